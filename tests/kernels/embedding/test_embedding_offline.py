"""The embedding's Triton kernels compiled for GPUs that are not there: no spills, shared memory in bounds."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.offline import NARROWEST, compile_for, gpus, within_limits

pytestmark = pytest.mark.offline

CAPABILITIES = gpus(80, 89, 90, 100)
BLOCKS = {
    "_embedding_sorted_rows_runs_kernel": {"BLOCK": 1024},
    "_embedding_sorted_rows_borders_kernel": {"BLOCK": 256, "CHUNKS": 16},
}


def _compile(name: str, capability: int, dtype: str, index: str, *, aligned: bool) -> Any:
    from memeff_compile.kernels.embedding import sorted_rows_kernels

    constants: dict[str, Any] = {"CHUNK": sorted_rows_kernels.CHUNK, **BLOCKS[name]}
    # The launcher passes a stride of one, which Triton makes a constant.
    constants |= {"stride_rows_column": 1, "stride_out_column": 1}
    pointers = {"ids_ptr": f"*{index}", "order_ptr": "*i64", "partial_ptr": "*fp32"}
    return compile_for(
        capability,
        getattr(sorted_rows_kernels, name),
        constants,
        lambda name: pointers.get(name, f"*{dtype}") if name.endswith("_ptr") else "i32",
        lambda name: aligned and name.startswith(("stride", "depth")),
        num_warps=sorted_rows_kernels.WARPS,
    )


@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "ragged"])
@pytest.mark.parametrize(("dtype", "index"), [("bf16", "i64"), ("fp16", "i32"), ("fp32", "i64")])
@pytest.mark.parametrize("name", list(BLOCKS))
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_kernel_compiles_within_the_limits(
    name: str, capability: int, dtype: str, index: str, aligned: bool
) -> None:
    kernel = _compile(name, capability, dtype, index, aligned=aligned)
    within_limits(kernel, capability)
    assert "atom" not in kernel.asm["ptx"]
    if aligned:
        assert "ld.global.v4.b32" in kernel.asm["ptx"]


@pytest.mark.parametrize("name", list(BLOCKS))
def test_kernel_compiles_for_the_narrowest_gpu(name: str) -> None:
    kernel = _compile(name, NARROWEST, "fp32", "i64", aligned=True)
    assert "ld.global.v4.b32" in within_limits(kernel, NARROWEST)


@pytest.mark.usefixtures("sizes_of_one")
@pytest.mark.parametrize("name", list(BLOCKS))
def test_kernel_compiles_for_sizes_of_one(name: str) -> None:
    _compile(name, 90, "bf16", "i64", aligned=False)
