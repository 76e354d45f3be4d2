"""The kernels of kv_cache compiled for GPUs that are not there: no spills, shared memory in bounds."""

from __future__ import annotations

import re
from typing import Any

import pytest

from memeff_compile.kernels._triton.gpus import gpu_of
from memeff_compile.kernels._triton.key_tiles import depth_block
from memeff_compile.kernels.kv_cache.shapes import (
    MAX_ROWS,
    MAX_SPLITS,
    MIN_ROWS,
    shapes_for,
)
from memeff_compile.kernels.kv_cache.split_keys import alignment
from tests.support.offline import NARROWEST, cells_named, compile_for, gpus, twice, within_limits

pytestmark = pytest.mark.offline

CAPABILITIES = gpus(80, 89, 90, 100)
POINTERS = {"last_ptr": "*i64", "mask_ptr": "*u8", "share_ptr": "*fp32", "stat_ptr": "*fp32"}
PARTS = {
    **{f"{name}_cells": cells_named(name) for name in "qkv"},
    "last_keys": ("last_ptr", "stride_last_batch", "stride_last_query"),
    "mask": ("mask_ptr", "stride_mask_batch", "stride_mask_query", "stride_mask_key"),
    "outs": ("out_ptr", "share_ptr", "stat_ptr"),
    "sizes": ("kv_heads", "queries", "keys", "splits", "stat_count"),
}
UNIT_STRIDES = ("stride_q_depth", "stride_k_depth", "stride_v_depth", "stride_mask_key")


def _compile(name: str, capability: int, dtype: str, given: dict[str, Any], warps: int) -> Any:
    from memeff_compile.kernels.kv_cache import split_keys_kernels

    def type_of(argument: str) -> str:
        if argument.endswith("_ptr"):
            return POINTERS.get(argument, f"*{dtype}")
        return "fp32" if argument == "scale" else "i32"

    def is_aligned(argument: str) -> bool:
        is_odd = (
            argument in ("stride_k_row", "stride_v_row")
            and given["DEPTH"] // given["ALIGN"] % 16 != 0
        )
        return argument.startswith("stride") and "last" not in argument and not is_odd

    return compile_for(
        capability,
        getattr(split_keys_kernels, name),
        # The launcher passes a stride of one, which Triton makes a constant.
        {**given, **dict.fromkeys(UNIT_STRIDES, 1)},
        type_of,
        is_aligned,
        PARTS,
        num_warps=warps,
    )


def _attention(
    capability: int, dtype: str, depth: int, rows: int, *, has_mask: bool, splits: int
) -> Any:
    shapes = shapes_for(depth, 4 if dtype == "fp32" else 2, rows, gpu_of(divmod(capability, 10)))
    constants = {
        "REPEAT": 4,
        "DEPTH": depth,
        "DEPTH_BLOCK": depth_block(depth),
        "ROWS": rows,
        "KEYS": shapes.keys,
        "IS_ALONE": splits == 1,
        "HAS_MASK": has_mask,
        "STAGES": shapes.stages,
        "ALIGN": alignment(depth),
        "UPCAST": False,
    }
    return _compile(
        "_kv_cache_split_keys_attention_kernel", capability, dtype, constants, shapes.warps
    )


def _combine(capability: int, depth: int, splits: int) -> Any:
    constants = {
        "REPEAT": 4,
        "DEPTH": depth,
        "DEPTH_BLOCK": depth_block(depth),
        "KEYS": 64,
        "SPLIT_BLOCK": 1 << (splits - 1).bit_length(),
    }
    return _compile("_kv_cache_split_keys_combine_kernel", capability, "bf16", constants, 4)


CASES = [
    *[each for depth in (96, 256) for each in twice("bf16", depth, MIN_ROWS, False, 4)],
    *[
        pytest.param("bf16", depth, MIN_ROWS, False, 4, marks=pytest.mark.slow)
        for depth in (64, 128)
    ],
    ("bf16", 128, MIN_ROWS, True, 4),
    *twice("bf16", 128, MIN_ROWS, False, 1),
    pytest.param("fp16", 128, MAX_ROWS, False, 4, marks=pytest.mark.slow),
    ("bf16", 256, MAX_ROWS, False, 4),
    pytest.param("fp32", 128, MIN_ROWS, False, 4, marks=pytest.mark.slow),
    ("fp32", 256, MIN_ROWS, False, 4),
]


@pytest.mark.parametrize(
    ("dtype", "depth", "rows", "has_mask", "splits"),
    CASES,
    ids=lambda value: str(value),
)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_attention_compiles_within_the_limits(
    capability: int,
    dtype: str,
    depth: int,
    rows: int,
    has_mask: bool,
    splits: int,
) -> None:
    kernel = _attention(capability, dtype, depth, rows, has_mask=has_mask, splits=splits)
    ptx = within_limits(kernel, capability)
    assert "cp.async.cg.shared.global" in ptx, "keys and values are not loaded ahead"
    if dtype != "fp32":
        assert re.search(r"mma\.sync|wgmma|tcgen05\.mma", ptx), "no tensor cores"


@pytest.mark.parametrize(("dtype", "rows"), [("bf16", MAX_ROWS), ("fp32", MIN_ROWS)])
def test_the_widest_heads_compile_for_the_narrowest_gpu(dtype: str, rows: int) -> None:
    kernel = _attention(NARROWEST, dtype, 256, rows, has_mask=False, splits=4)
    ptx = within_limits(kernel, NARROWEST)
    assert "cp.async.cg.shared.global" in ptx, "keys and values are not loaded ahead"


@pytest.mark.parametrize(("depth", "size"), [(100, 8), (72, 16)])
def test_rows_of_other_lengths_than_sixteens_are_loaded_ahead(depth: int, size: int) -> None:
    kernel = _attention(90, "bf16", depth, MIN_ROWS, has_mask=False, splits=4)
    within_limits(kernel, 90)
    found = set(
        re.findall(r"cp\.async\.c[ag]\.shared\.global .*, (0x\w+|\d+), ", kernel.asm["ptx"])
    )
    assert {int(each, 0) for each in found} == {size}


@pytest.mark.parametrize("splits", [2, 5, MAX_SPLITS])
@pytest.mark.parametrize("depth", [64, 256])
@pytest.mark.parametrize("capability", gpus(80, 90))
def test_combine_compiles_within_the_limits(capability: int, depth: int, splits: int) -> None:
    kernel = _combine(capability, depth, splits)
    within_limits(kernel, capability)
    assert "atom." not in kernel.asm["ptx"]


@pytest.mark.usefixtures("sizes_of_one")
def test_kernels_compile_for_sizes_of_one() -> None:
    _attention(90, "bf16", 128, MIN_ROWS, has_mask=True, splits=4)
    _combine(90, 128, 4)
