"""Attention's kernels in Gluon compiled for a GPU that is not there: shared memory, spills, products."""

from __future__ import annotations

import re
from typing import Any

import pytest

from memeff_compile.kernels._triton.key_tiles import depth_block
from memeff_compile.kernels.attention import hopper
from tests.support.offline import (
    HOPPER,
    TABLES_NAMED,
    compile_for,
    rows_named,
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
OWN = {
    "forward": ("q_desc",),
    "query_gradient": ("q_desc", "grad_desc"),
    "key_gradient": ("k_desc", "v_desc"),
}
"""Descriptors of the tile of a program, of which each group of warps loads its own part."""
STACK = {"forward": 0, "query_gradient": 16, "key_gradient": 384}
"""Bytes that incomplete tiles spill."""
WRITTEN = ("out_desc", "grad_q_desc", "grad_k_desc", "grad_v_desc")
POINTERS = {"key_mask_ptr": "*u8", "query_ids_ptr": "*i64", "key_ids_ptr": "*i64"}
LAYOUT = (
    "NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4, transposed=False, "
    "fp4_padded=False, cga_layout=[])"
)


def _compile(name: str, depth: int, dtype: str, flags: dict[str, bool]) -> Any:
    from memeff_compile.kernels.attention import hopper_kernels

    shape, wide = (
        getattr(hopper.plan_for(has_tables=flags["HAS_BOUNDS"]), name),
        depth_block(depth, 64),
    )
    others = shape.rows if name == "key_gradient" else shape.keys

    def type_of(argument: str) -> str:
        if argument.endswith("_desc"):
            rows = f"1, {hopper.OWN}, 1" if argument in WRITTEN else f"1, 1, {others}"
            rows = f"1, 1, {hopper.OWN}" if argument in OWN[name] else rows
            return f"tensordesc<{dtype}[{rows}, {wide}],{LAYOUT}>"
        if argument.endswith("_ptr"):
            numbers = f"*{dtype}" if argument == "out_ptr" else "*fp32"
            numbers = "*i32" if argument == "bounds_ptr" else numbers
            return POINTERS.get(argument, numbers)
        return "fp32" if argument in ("scale", "factor") else "i32"

    constants = hopper.constants_of(shape, depth, flags)
    parts = {
        "tables": TABLES_NAMED,
        "out": rows_named("out"),
    }
    kernel = getattr(hopper_kernels, f"_attention_hopper_{name}_kernel")
    warps = constants.pop("num_warps")
    return compile_for(HOPPER, kernel, constants, type_of, parts=parts, num_warps=warps)


@pytest.mark.parametrize(
    ("depth", "dtype", "flags"),
    [
        pytest.param(128, "bf16", PLAIN, id="causal-128"),
        pytest.param(64, "bf16", PLAIN, id="causal-64"),
        pytest.param(128, "bf16", EVERY, id="every mask-128"),
        pytest.param(64, "fp16", EVERY, id="every mask-64", marks=pytest.mark.slow),
        pytest.param(96, "fp16", PLAIN, id="causal-96", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("name", OWN)
def test_kernels_compile_within_the_limits(
    name: str, depth: int, dtype: str, flags: dict[str, bool]
) -> None:
    compiled = _compile(name, depth, dtype, flags)
    # Incomplete tiles, of which a program visits few, may spill; the products of complete tiles
    # stay in flight together, which ptxas would undo with a wait after each.
    ptx = within_limits(compiled, HOPPER, stack=STACK[name])
    assert "cp.async.bulk.tensor" in ptx
    assert "setmaxnreg" in ptx
    assert len(re.findall("wgmma.mma_async", ptx)) > len(re.findall("wgmma.wait_group", ptx)) * 3
