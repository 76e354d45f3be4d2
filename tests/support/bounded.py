"""Kernels that touch only their tensors, as far as Triton's interpreter can see."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from memeff_compile.kernels._triton import launch


@pytest.fixture
def bounded() -> Iterator[None]:
    """Have each load and store fail that reaches beyond the tensors its launch was given."""
    from triton.runtime import interpreter

    builder: Any = interpreter.interpreter_builder
    load, store, start = builder.create_masked_load, builder.create_masked_store, launch.start
    begins = ends = np.empty(0, dtype=np.uint64)

    def check(what: str, pointers: Any, mask: Any) -> None:
        at = pointers.data[np.broadcast_to(mask.data, pointers.data.shape)].astype(np.uint64)
        size = max(pointers.get_element_ty().primitive_bitwidth // 8, 1)
        place = np.searchsorted(begins, at, side="right") - 1
        beyond = (place < 0) | (at + np.uint64(size) > ends[place])
        if beyond.any():
            pytest.fail(f"{int(beyond.sum())} of {at.size} addresses of a {what} are nobody's")

    def checked_load(pointers: Any, mask: Any, *rest: Any) -> Any:
        check("load", pointers, mask)
        return load(pointers, mask, *rest)

    def checked_store(pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        check("store", pointers, mask)
        return store(pointers, value, mask, *rest)

    def checked_start(kernel: Any, grid: tuple[int, ...], *arguments: Any, **given: Any) -> None:
        nonlocal begins, ends
        tensors = sorted(
            {(a.data_ptr(), a.data_ptr() + a.nbytes) for a in arguments if isinstance(a, Tensor)}
        )
        begins, ends = (np.array(each, dtype=np.uint64) for each in zip(*tensors, strict=True))
        start(kernel, grid, *arguments, **given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "create_masked_load", checked_load)
        patch.setattr(builder, "create_masked_store", checked_store)
        patch.setattr(launch, "start", checked_start)
        yield
