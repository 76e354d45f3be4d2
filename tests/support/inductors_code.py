"""Inductor on the CPU without g++, which takes longer than all the rest of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest


@contextmanager
def uncompiled() -> Iterator[None]:
    """Skip g++ for Inductor's kernels, which then have no effect: their results are zeros."""
    import torch._C._dynamo.guards as made
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.codecache import PyCodeCache

    empty = made._empty_strided_cpu
    with (
        mock.patch.object(AsyncCompile, "cpp_pybinding", return_value=lambda *tensors: None),
        mock.patch.object(made, "_empty_strided_cpu", lambda *given: empty(*given).zero_()),
    ):
        yield
    PyCodeCache.cache_clear()


@pytest.fixture
def calling_ops() -> Iterator[None]:
    """Let Inductor call PyTorch's ops where it would write loops: its graphs do not change."""
    from torch._inductor import config

    with config.patch(fallback_by_default=True):
        yield


@pytest.fixture(params=["ops called", pytest.param("loops compiled", marks=pytest.mark.slow)])
def inductors_loops(request: pytest.FixtureRequest) -> None:
    """Run a test where Inductor calls PyTorch's ops and, slow, where it compiles loops instead."""
    if request.param == "ops called":
        request.getfixturevalue("calling_ops")
