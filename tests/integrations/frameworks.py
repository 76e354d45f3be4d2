"""The packages that only the framework tests need: the extra `frameworks`, which make test-all installs."""

from __future__ import annotations

from typing import Any

import pytest


def framework(name: str) -> Any:
    """Import a package of the extra; if it is missing, skip the test with the command that installs
    it.
    """
    return pytest.importorskip(name, reason="make test-all installs the extra `frameworks`")
