"""Dynamo's objects must be collected before weights can be swapped, as outside of tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _cycles_go() -> Iterator[None]:
    from torch._dynamo import config

    with config.patch(run_gc_after_compile=True):
        yield
