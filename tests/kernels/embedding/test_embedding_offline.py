"""The embedding's Triton kernels compiled for GPUs that are not there: no spills, shared memory in bounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.cubins import stack_bytes

pytestmark = pytest.mark.offline

# Shared memory a block may use, in bytes.
SHARED_LIMITS = {80: 166912, 89: 101376, 90: 232448, 100: 232448}
BLOCKS = {
    "_embedding_runs_kernel": {"BLOCK": 1024},
    "_embedding_borders_kernel": {"BLOCK": 256, "CHUNKS": 16},
}


def _compile(name: str, capability: int, dtype: str, index: str, *, aligned: bool) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from memeff_compile.kernels.embedding import sorted_kernels

    kernel = getattr(sorted_kernels, name)
    constants: dict[str, Any] = {"CHUNK": sorted_kernels.CHUNK, **BLOCKS[name]}
    # A stride of one is what the launcher sees, and what Triton makes a constant of.
    constants |= {"stride_rows_column": 1, "stride_out_column": 1}
    pointers = {"ids_ptr": f"*{index}", "order_ptr": "*i64", "partial_ptr": "*fp32"}
    signature, hints = {}, {}
    for place, argument in enumerate(kernel.arg_names):
        if argument in constants:
            signature[argument] = "constexpr"
        elif argument.endswith("_ptr"):
            signature[argument] = pointers.get(argument, f"*{dtype}")
            hints[(place,)] = [["tt.divisibility", 16]]
        else:
            signature[argument] = "i32"
            if aligned and argument.startswith(("stride", "depth")):
                hints[(place,)] = [["tt.divisibility", 16]]
    used = {key: value for key, value in constants.items() if key in kernel.arg_names}
    source = ASTSource(kernel, signature, used, hints)
    return triton.compile(
        source,
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": sorted_kernels.WARPS},
    )


@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "ragged"])
@pytest.mark.parametrize(("dtype", "index"), [("bf16", "i64"), ("fp16", "i32"), ("fp32", "i64")])
@pytest.mark.parametrize("name", list(BLOCKS))
@pytest.mark.parametrize("capability", list(SHARED_LIMITS))
def test_kernel_compiles_within_the_limits(
    name: str, capability: int, dtype: str, index: str, aligned: bool, tmp_path: Path
) -> None:
    kernel = _compile(name, capability, dtype, index, aligned=aligned)
    assert kernel.metadata.shared <= SHARED_LIMITS[capability]
    assert stack_bytes(kernel.asm["cubin"], tmp_path) == 0
    assert "atom" not in kernel.asm["ptx"]
    if aligned:
        assert "ld.global.v4.b32" in kernel.asm["ptx"]


@pytest.mark.usefixtures("sizes_of_one")
@pytest.mark.parametrize("name", list(BLOCKS))
def test_kernel_compiles_for_sizes_of_one(name: str) -> None:
    _compile(name, 90, "bf16", "i64", aligned=False)
