"""Dynamo without what it does for its own statistics alone."""

from __future__ import annotations

import logging
import sys
from typing import Any


def measure_nothing() -> None:
    """Keep Dynamo, where it is imported, from timing guards and from writing graphs out.

    It empties the processor's caches before it times the guards of a graph: a fifth of what a test
    of a small graph takes. And pytest gives its handlers to each logger that does not pass records
    on, so that the structured trace, which is written where somebody listens, always is.
    """
    guards: Any = sys.modules.get("torch._dynamo.guards")
    if guards is not None:
        guards.profile_guard_manager = lambda *given: 0.0
    logging.getLogger("torch.__trace").propagate = True
