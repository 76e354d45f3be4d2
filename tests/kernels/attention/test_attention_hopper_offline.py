"""Attention's kernels in Gluon, compiled for a GPU that is not there: memory, spills, products."""

from __future__ import annotations

import re
from typing import Any

import pytest
from packaging.version import Version

from memeff_compile.kernels._triton.key_tiles import depth_block
from memeff_compile.kernels.attention import hopper, hopper_gradients, ranges
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
PADDED = PLAIN | {"HAS_KEY_MASK": True, "HAS_BOUNDS": True}
PACKED = PLAIN | {"HAS_IDS": True, "HAS_BOUNDS": True}
POINTERS = {"ranges_ptr": "*i32", "lse_ptr": "*fp32"}
TABLES = {
    "key_mask_ptr": "*u8",
    "query_ids_ptr": "*i64",
    "key_ids_ptr": "*i64",
    "flags_ptr": "*i32",
    "first_ptr": "*bf16",
    "second_ptr": "*bf16",
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
    kernel = _attention_hopper_forward_kernel
    return compile_for(HOPPER, kernel, constants, type_of, num_warps=warps)


@pytest.mark.parametrize(
    ("depth", "dtype", "flags"),
    [
        pytest.param(128, "bf16", PLAIN, id="causal-128"),
        pytest.param(128, "bf16", PADDED, id="padded-128"),
        pytest.param(128, "bf16", PACKED, id="packed-128", marks=pytest.mark.slow),
        pytest.param(128, "bf16", EVERY, id="every mask-128", marks=pytest.mark.slow),
        pytest.param(64, "fp16", EVERY, id="every mask-64", marks=pytest.mark.slow),
        pytest.param(96, "fp16", PLAIN, id="causal-96", marks=pytest.mark.slow),
    ],
)
def test_the_kernel_compiles_within_the_limits(
    depth: int, dtype: str, flags: dict[str, bool]
) -> None:
    ptx = within_limits(_compile(depth, dtype, flags), HOPPER, _spills_with(flags, "forward"))
    assert "cp.async.bulk.tensor" in ptx
    # A separate warp loads, and gives its registers to those that multiply.
    assert "setmaxnreg" in ptx
    # Products of a tile stay in flight together.
    assert len(re.findall("wgmma.mma_async", ptx)) > len(re.findall("wgmma.wait_group", ptx)) * 3


def _spills_with(flags: dict[str, bool], step: str, depth: int = 128) -> int:
    """Return how many bytes of stack a kernel for masks of keys and ids may use.

    With Triton 3.9 the kernels spill more, and calls do not use them (`hopper.LATEST`).
    """
    if not flags["HAS_BOUNDS"]:
        return 0
    if _is_later():
        return {"forward": 160, "query": 64, "key": 320}[step] if depth == 128 else 320
    return {"forward": 32, "query": 32, "key": 256}[step] if depth == 128 else 96


def _spills(step: str, depth: int) -> int:
    """Return how many bytes of stack a backward kernel may use.

    Up to Triton 3.8, the innermost loop of the kernel for keys and values does not read the stack.
    With Triton 3.9 that loop reads six numbers of each thread there, next to 24 products, and writes
    none. The kernel for queries with heads of 64 writes to the stack in its innermost loop with
    Triton 3.9, and calls do not use it then (`hopper.LATEST`).
    """
    if step == "key":
        return 112 if _is_later() else 64
    return 144 if _is_later() and depth == 64 else 0


def _is_later() -> bool:
    import triton

    return Version(triton.__version__).release[:2] > hopper.LATEST


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
    return compile_for(HOPPER, kernel, constants, type_of, num_warps=warps)


@pytest.mark.parametrize("step", ["query", "key"])
@pytest.mark.parametrize(
    ("depth", "dtype", "flags"),
    [
        pytest.param(128, "bf16", PLAIN, id="causal-128"),
        pytest.param(128, "fp16", PLAIN | {"HAS_BEHIND": True}, id="window-128"),
        pytest.param(128, "bf16", PACKED, id="packed-128"),
        pytest.param(128, "bf16", PADDED, id="padded-128", marks=pytest.mark.slow),
        pytest.param(64, "bf16", PLAIN, id="causal-64", marks=pytest.mark.slow),
        pytest.param(64, "bf16", EVERY, id="every mask-64", marks=pytest.mark.slow),
    ],
)
def test_the_backward_kernels_compile_within_the_limits(
    step: str, depth: int, dtype: str, flags: dict[str, bool]
) -> None:
    compiled = _compile_backward(step, depth, dtype, flags)
    stack = max(_spills_with(flags, step, depth), _spills(step, depth))
    ptx = within_limits(compiled, HOPPER, stack)
    assert "cp.async.bulk.tensor" in ptx
    assert "setmaxnreg" in ptx
    assert len(re.findall("wgmma.mma_async", ptx)) > len(re.findall("wgmma.wait_group", ptx)) * 3


@pytest.mark.parametrize("ours_are_queries", [True, False], ids=["queries", "keys"])
@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(PADDED, id="padded", marks=pytest.mark.slow),
        pytest.param(PACKED, id="packed", marks=pytest.mark.slow),
        pytest.param(EVERY, id="every mask"),
    ],
)
def test_the_kernels_of_ranges_compile_within_the_limits(
    flags: dict[str, bool], ours_are_queries: bool
) -> None:
    from memeff_compile.kernels.attention import ranges_kernels as kernels

    def type_of(argument: str) -> str:
        return {**POINTERS, **TABLES}.get(argument, "i32")

    others = 128 if ours_are_queries else 64
    sizes = {"OURS": 128, "OTHERS": others, "CHUNK": ranges.CHUNK // others}
    constants = {**flags, **sizes, "OURS_ARE_QUERIES": ours_are_queries}
    kernel, parts = kernels._attention_ranges_kernel, {"tables": TABLES_NAMED}
    warps = ranges.WARPS
    compiled = compile_for(HOPPER, kernel, constants, type_of, parts=parts, num_warps=warps)
    within_limits(compiled, HOPPER, stack=64)
    finite = kernels._attention_ranges_finite_kernel
    constants = {"KEYS": ranges.CHECKED, "DEPTH": 96, "DEPTH_BLOCK": 128, "HAS_SECOND": True}
    named: dict[str, Any] = {"first": rows_named("first"), "second": rows_named("second")}
    compiled = compile_for(HOPPER, finite, constants, type_of, parts={**parts, **named})
    within_limits(compiled, HOPPER)
    order = kernels._attention_ranges_order_kernel
    constants = {"OURS": ranges.SORTED, "OTHERS": ranges.COMPARED}
    within_limits(compile_for(HOPPER, order, constants, type_of, num_warps=warps), HOPPER)
