"""The gated linear's Triton kernels compiled for GPUs that are not there: no spills, wide loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.cubins import stack_bytes

pytestmark = pytest.mark.offline

KERNELS = ("_gated_product_kernel", "_gated_gradients_kernel")


def _compile(name: str, capability: int, dtype: str, activation: str, *, aligned: bool) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from memeff_compile.kernels.gated_linear import in_place_kernels

    kernel = getattr(in_place_kernels, name)
    constants = {"ACTIVATION": activation, "BLOCK": in_place_kernels.BLOCK}
    signature, hints = {}, {}
    for place, argument in enumerate(kernel.arg_names):
        if argument in constants:
            signature[argument] = "constexpr"
            continue
        signature[argument] = f"*{dtype}" if argument.endswith("_ptr") else "i64"
        if aligned or argument.endswith("_ptr"):
            hints[(place,)] = [["tt.divisibility", 16]]
    return triton.compile(
        ASTSource(kernel, signature, constants, hints),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": in_place_kernels.WARPS},
    )


@pytest.mark.parametrize(
    ("dtype", "activation", "aligned"),
    [
        ("bf16", "silu", True),
        ("bf16", "gelu_tanh", True),
        ("fp16", "gelu", True),
        ("fp32", "relu", True),
        ("bf16", "silu", False),
    ],
    ids=["silu", "gelu_tanh", "gelu", "relu", "ragged"],
)
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("capability", [80, 89, 90, 100])
def test_kernel_compiles_without_spills(
    name: str, capability: int, dtype: str, activation: str, aligned: bool, tmp_path: Path
) -> None:
    kernel = _compile(name, capability, dtype, activation, aligned=aligned)
    assert kernel.metadata.shared == 0
    assert stack_bytes(kernel.asm["cubin"], tmp_path) == 0
    if aligned:
        assert "ld.global.v4.b32" in kernel.asm["ptx"]
        assert "st.global.v4.b32" in kernel.asm["ptx"]


@pytest.mark.usefixtures("sizes_of_one")
@pytest.mark.parametrize("name", KERNELS)
def test_kernel_compiles_for_sizes_of_one(name: str) -> None:
    _compile(name, 90, "bf16", "silu", aligned=False)
