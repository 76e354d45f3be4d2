"""The two processes that the tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.distributed.processes import TwoProcesses


@pytest.fixture(scope="package")
def two_processes(
    tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> Iterator[TwoProcesses]:
    both = TwoProcesses(tmp_path_factory, is_quick="not slow" in pytestconfig.option.markexpr)
    yield both
    both.stop()


@pytest.fixture(params=["eager", pytest.param("aot_eager", marks=pytest.mark.slow)])
def inner(request: pytest.FixtureRequest) -> str:
    """The inner compiler: AOTAutograd takes half of a compilation, and starts after the passes."""
    chosen: str = request.param
    return chosen
