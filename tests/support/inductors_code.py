"""Inductor's code for the CPU, to be read where nothing has to run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock


@contextmanager
def uncompiled() -> Iterator[None]:
    """Keep g++ from Inductor's kernels, which then do nothing: results are whatever was there."""
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.codecache import PyCodeCache

    with mock.patch.object(AsyncCompile, "cpp_pybinding", return_value=lambda *tensors: None):
        yield
    PyCodeCache.cache_clear()
