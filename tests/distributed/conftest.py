"""The two processes that the tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.distributed.processes import TwoProcesses


@pytest.fixture(scope="package")
def two_processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoProcesses]:
    both = TwoProcesses(tmp_path_factory)
    yield both
    both.stop()
