"""Attention's kernels in Gluon, compiled for a GPU that is not there: memory, spills, products."""

from __future__ import annotations

import re
from typing import Any

import pytest
from packaging.version import Version

from memeff_compile.kernels._triton.key_tiles import depth_block
from memeff_compile.kernels.attention import hopper, hopper_gradients
from tests.support.offline import (
    HOPPER,
    TABLES_NAMED,
    compile_for,
    within_limits,
)

pytestmark = pytest.mark.offline

PLAIN = {
    "HAS_AHEAD": True,
    "HAS_BEHIND": False,
    "HAS_KEY_MASK": False,
    "HAS_IDS": False,
    "HAS_BOUNDS": False,
}
EVERY = dict.fromkeys(PLAIN, True)
POINTERS = {
    "key_mask_ptr": "*u8",
    "query_ids_ptr": "*i64",
    "key_ids_ptr": "*i64",
    "plan_ptr": "*i32",
    "lse_ptr": "*fp32",
}
LAYOUT = (
    "NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4, transposed=False, "
    "fp4_padded=False, cga_layout=[])"
)


def _compile(depth: int, dtype: str, flags: dict[str, bool]) -> Any:
    from memeff_compile.kernels.attention.hopper_kernels import _attention_hopper_forward_kernel

    shape, wide = hopper.shape_for(has_tables=flags["HAS_BOUNDS"]), depth_block(depth, 64)
    keys = f"1, 1, {shape.keys}"
    blocks = {
        "q_desc": f"1, 1, {hopper.OWN}",
        "k_desc": keys,
        "v_desc": keys,
        "out_desc": f"1, {hopper.OWN}, 1",
    }

    def type_of(argument: str) -> str:
        if argument in blocks:
            return f"tensordesc<{dtype}[{blocks[argument]}, {wide}],{LAYOUT}>"
        if argument.endswith("_ptr"):
            return POINTERS[argument]
        return "fp32" if argument == "scale" else "i32"

    constants = hopper.constants_of(shape, depth, flags)
    warps = constants.pop("num_warps")
    kernel, parts = _attention_hopper_forward_kernel, {"tables": TABLES_NAMED}
    return compile_for(HOPPER, kernel, constants, type_of, parts=parts, num_warps=warps)


@pytest.mark.parametrize(
    ("depth", "dtype", "flags"),
    [
        pytest.param(128, "bf16", PLAIN, id="causal-128"),
        pytest.param(128, "bf16", EVERY, id="every mask-128"),
        pytest.param(64, "fp16", EVERY, id="every mask-64", marks=pytest.mark.slow),
        pytest.param(96, "fp16", PLAIN, id="causal-96", marks=pytest.mark.slow),
    ],
)
def test_the_kernel_compiles_within_the_limits(
    depth: int, dtype: str, flags: dict[str, bool]
) -> None:
    ptx = within_limits(_compile(depth, dtype, flags), HOPPER)
    assert "cp.async.bulk.tensor" in ptx
    # A separate warp loads, and gives its registers to those that multiply.
    assert "setmaxnreg" in ptx
    # Products of a tile stay in flight together.
    assert len(re.findall("wgmma.mma_async", ptx)) > len(re.findall("wgmma.wait_group", ptx)) * 3


def _spills() -> int:
    """Return how many bytes of stack the kernel for keys and values may use.

    Up to Triton 3.8 its innermost loop does not read the stack. With Triton 3.9 that loop reads six
    numbers of each thread there, next to 24 products, and writes none.
    """
    import triton

    return 112 if Version(triton.__version__) >= Version("3.9") else 64


def _compile_backward(step: str, depth: int, dtype: str, flags: dict[str, bool]) -> Any:
    from memeff_compile.kernels.attention import hopper_gradients_kernels as kernels

    plan, wide = hopper_gradients.plan_for(depth, 4096), depth_block(depth, 64)
    if step == "query":
        kernel, shape = kernels._attention_hopper_gradients_query_kernel, plan.query_gradient
        visited, length = ("k_desc", "v_desc"), shape.keys
    else:
        kernel, shape = kernels._attention_hopper_gradients_key_kernel, plan.key_gradient
        visited, length = ("q_desc", "grad_desc"), shape.rows

    def type_of(argument: str) -> str:
        if argument.endswith("_desc"):
            rows = length if argument in visited else hopper.OWN
            return f"tensordesc<{dtype}[1, 1, {rows}, {wide}],{LAYOUT}>"
        if argument.endswith("_ptr"):
            return POINTERS.get(argument, "*fp32")
        return "fp32" if argument in ("scale", "factor") else "i32"

    constants = hopper_gradients.constants_of(shape, depth, flags)
    warps = constants.pop("num_warps")
    parts = {"tables": TABLES_NAMED}
    return compile_for(HOPPER, kernel, constants, type_of, parts=parts, num_warps=warps)


@pytest.mark.parametrize("step", ["query", "key"])
@pytest.mark.parametrize(
    ("depth", "dtype", "flags"),
    [
        pytest.param(128, "bf16", PLAIN, id="causal-128"),
        pytest.param(128, "fp16", PLAIN | {"HAS_BEHIND": True}, id="window-128"),
        pytest.param(64, "bf16", PLAIN, id="causal-64", marks=pytest.mark.slow),
    ],
)
def test_the_backward_kernels_compile_within_the_limits(
    step: str, depth: int, dtype: str, flags: dict[str, bool]
) -> None:
    compiled = _compile_backward(step, depth, dtype, flags)
    ptx = within_limits(compiled, HOPPER, _spills() if step == "key" else 0)
    assert "cp.async.bulk.tensor" in ptx
    assert "setmaxnreg" in ptx
    assert len(re.findall("wgmma.mma_async", ptx)) > len(re.findall("wgmma.wait_group", ptx)) * 3
