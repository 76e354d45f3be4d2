"""The gated linear's Triton kernels compiled for GPUs that are not there: no spills, wide loads."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.offline import compile_for, gpus, within_limits

pytestmark = pytest.mark.offline

KERNELS = ("_gated_linear_in_place_product_kernel", "_gated_linear_in_place_gradients_kernel")


def _compile(name: str, capability: int, dtype: str, activation: str, *, aligned: bool) -> Any:
    from memeff_compile.kernels.gated_linear import in_place_kernels

    return compile_for(
        capability,
        getattr(in_place_kernels, name),
        {"ACTIVATION": activation, "BLOCK": in_place_kernels.BLOCK},
        lambda argument: f"*{dtype}" if argument.endswith("_ptr") else "i64",
        lambda argument: aligned,
        num_warps=in_place_kernels.WARPS,
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
@pytest.mark.parametrize("capability", gpus(80, 89, 90, 100))
def test_kernel_compiles_without_spills(
    name: str, capability: int, dtype: str, activation: str, aligned: bool
) -> None:
    kernel = _compile(name, capability, dtype, activation, aligned=aligned)
    assert kernel.metadata.shared == 0
    within_limits(kernel, capability)
    if aligned:
        assert "ld.global.v4.b32" in kernel.asm["ptx"]
        assert "st.global.v4.b32" in kernel.asm["ptx"]


@pytest.mark.usefixtures("sizes_of_one")
@pytest.mark.parametrize("name", KERNELS)
def test_kernel_compiles_for_sizes_of_one(name: str) -> None:
    _compile(name, 90, "bf16", "silu", aligned=False)
