"""The kernels of pairs of layers that share values compiled for GPUs that are not there."""

from __future__ import annotations

import re
from importlib import import_module
from typing import Any

import pytest

from memeff_compile.kernels.coded_kv_cache.layout import Maps, OwnKeys, SharedValues, channel_group
from tests.support.offline import cells_named, compile_for, twice, within_limits

pytestmark = pytest.mark.offline

POINTERS = {"places_ptr": "*i32", "slots_ptr": "*i32", "scratch_ptr": "*fp32"}
PARTS = {
    **{name: cells_named(name) for name in "kv"},
    **{f"lower_{name}_new": cells_named(f"lower_{name}") for name in "kv"},
    "shared": SharedValues(*(f"{name}_ptr" for name in SharedValues._fields)),
    "lower": OwnKeys(*(f"lower_{name}_ptr" for name in OwnKeys._fields)),
    "upper": OwnKeys(*(f"upper_{name}_ptr" for name in OwnKeys._fields)),
    "maps": Maps(*(f"{name}_ptr" for name in Maps._fields)),
    "lower_steps": ("stride_lower_batch", "stride_lower_head", "stride_lower_token"),
    "upper_steps": ("stride_upper_batch", "stride_upper_head", "stride_upper_token"),
}
SIZES = {
    "rows": ("kv_heads", "groups", "new", "limit"),
    "groups": ("kv_heads", "groups", "due"),
}


def type_of(argument: str) -> str:
    if argument.endswith("counts_ptr"):
        return "*i64"
    if argument.endswith("norms_ptr"):
        return "*fp16"
    if argument.endswith("codes_ptr"):
        return "*u8"
    if argument.endswith("_ptr"):
        return POINTERS.get(argument, "*bf16")
    return "fp32" if argument == "t" else "i32"


def build(name: str, capability: int, depth: int, bits: int, value_bits: int, **more: Any) -> Any:
    constants = {
        "DEPTH": depth,
        "BITS": bits,
        "V_BITS": value_bits,
        "GROUP": 64,
        "CHANNELS": channel_group(depth, "kivi"),
        "WINDOW": 192,
        "KEPT": 4,
        "NORMS": 1,
        "RULE": 0,
        "IS_PROJECTED": False,
        "IS_PER_HEAD": False,
        "IS_FAST": True,
        "PIECES": 1,
        "UPCAST": False,
        "TOKENS": 1,
        "HAS_LOWER": False,
        **more,
        **dict.fromkeys(("stride_k_depth", "stride_v_depth"), 1),
        **dict.fromkeys(("stride_lower_k_depth", "stride_lower_v_depth"), 1),
    }
    module = import_module("memeff_compile.kernels.coded_kv_cache.append_value_pairs_kernels")
    kernel = getattr(module, f"_coded_kv_cache_append_value_pairs_{name}_kernel")
    parts = {**PARTS, "sizes": SIZES[name]}
    return compile_for(capability, kernel, constants, type_of, parts=parts, num_warps=8)


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "capability", "depth", "bits", "value_bits", "more"),
    [
        *twice("rows", 90, 128, 3, 2, {}),
        *twice("groups", 90, 128, 3, 2, {}),
        pytest.param("rows", 90, 128, 4, 4, {"TOKENS": 64, "HAS_LOWER": True}, marks=SLOW),
        pytest.param("groups", 90, 64, 4, 3, {}, marks=SLOW),
        *[
            pytest.param(name, other, 128, 3, 2, {}, marks=SLOW)
            for name in SIZES
            for other in (80, 100)
        ],
    ],
)
def test_appending_values_compiles_within_the_limits(
    name: str, capability: int, depth: int, bits: int, value_bits: int, more: dict[str, Any]
) -> None:
    kernel = build(name, capability, depth, bits, value_bits, **more)
    ptx = within_limits(kernel, capability, stack=32 if capability == 100 else 0)
    assert re.search(r"mma\.sync|wgmma|tcgen05\.mma", ptx), "no tensor cores"
