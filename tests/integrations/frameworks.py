"""Import packages of the extra `frameworks`, which `make test-all` installs for these tests."""

from __future__ import annotations

from typing import Any

import pytest


def framework(name: str) -> Any:
    """Import a package of the extra; if it is missing, skip the test and name the command to install
    it.
    """
    return pytest.importorskip(name, reason="make test-all installs the extra `frameworks`")
