"""The kernels of pairs of layers compiled for GPUs that are not there: no spills, memory in bounds."""

from __future__ import annotations

import re
from importlib import import_module
from typing import Any

import pytest

from memeff_compile.kernels.coded_kv_cache import split_rows
from memeff_compile.kernels.coded_kv_cache.layout import Maps, Own, Pool, Shared, channel_group
from memeff_compile.kernels.coded_kv_cache.shapes import rows_for
from tests.support.offline import cells_named, compile_for, gpus, twice, within_limits

pytestmark = pytest.mark.offline

CAPABILITIES = gpus(80, 90, 100)
STACK = 16

POINTERS = {
    "places_ptr": "*i32",
    "starts_ptr": "*i32",
    "bound_ptr": "*fp32",
    "kept_count_ptr": "*i32",
    "left_over_ptr": "*i32",
    "mask_ptr": "*u8",
    "is_kept_ptr": "*u8",
    "apart_ptr": "*fp32",
    "counted_ptr": "*u8",
    "sums_ptr": "*fp32",
    "products_ptr": "*fp32",
    "share_ptr": "*fp32",
    "stat_ptr": "*fp32",
    "scratch_ptr": "*fp32",
    "turned_ptr": "*fp32",
    "slots_ptr": "*i32",
    "heads_ptr": "*i32",
}


def pointer(name: str, bits: int, *, in_scratch: bool) -> str:
    if in_scratch and name in ("lower_ptr", "upper_ptr"):
        return "*fp32"
    if name.endswith("counts_ptr"):
        return "*i64"
    if name.endswith("norms_ptr"):
        return "*fp16"
    if name.endswith("codes_ptr") and bits != 16:
        return "*u8"
    return POINTERS.get(name, "*bf16")


PARTS = {
    **{name: cells_named(name) for name in "kv"},
    **{f"lower_{name}_new": cells_named(f"lower_{name}") for name in "kv"},
    **{
        f"{layer}_{name}": cells_named(f"{layer}_{name}")
        for layer in ("lower", "upper")
        for name in ("k", "v", "rows")
    },
    "shared": Shared(*(f"{name}_ptr" for name in Shared._fields)),
    "lower": Own(*(f"lower_{name}_ptr" for name in Own._fields)),
    "upper": Own(*(f"upper_{name}_ptr" for name in Own._fields)),
    "pool": Pool(*(f"{name}_ptr" for name in Pool._fields)),
    "q": ("q_ptr", "stride_q_batch", "stride_q_head", "stride_q_depth"),
    "mask": ("mask_ptr", "stride_mask_batch", "stride_mask_key"),
    "maps": Maps(*(f"{name}_ptr" for name in Maps._fields)),
}
READ = ("means_ptr", "turned_ptr", "slots_ptr")
"""The maps that attention takes."""
SIZES = {
    "_coded_kv_cache_append_pairs_lower_kernel": ("kv_heads", "new", "limit"),
    "_coded_kv_cache_append_pairs_merge_kernel": ("kv_heads", "groups", "new", "limit"),
    "_coded_kv_cache_append_pairs_code_kernel": ("kv_heads", "groups", "count", "earlier"),
    "_coded_kv_cache_alignment_sum_rows_kernel": ("kv_heads", "count", "share"),
    "_coded_kv_cache_alignment_multiply_rows_kernel": ("kv_heads", "count", "share"),
    "_coded_kv_cache_alignment_align_rows_kernel": ("kv_heads", "count"),
    "_coded_kv_cache_split_rows_attention_kernel": (
        "kv_heads",
        "row_count",
        "mask_count",
        "splits",
        "stat_count",
    ),
}


def build(module: str, name: str, capability: int, given: dict[str, Any], warps: int) -> Any:
    kernel = getattr(import_module(f"memeff_compile.kernels.coded_kv_cache.{module}"), name)
    ends = ("_depth", "_mask_key")
    parts = {**PARTS, "sizes": SIZES.get(name, ())}
    if module == "split_rows_kernels":
        parts["maps"] = READ
    maps = {*parts["maps"], "scratch_ptr", "heads_ptr"}
    has_maps = given.get("IS_ALIGNED", module == "alignment_kernels")
    missing = set() if has_maps else maps  # arguments that are None
    if not given.get("IS_TURNED", True):
        missing |= {"turned_ptr", "slots_ptr"}
    names = [each for argument in kernel.arg_names for each in parts.get(argument, [argument])]
    units = {n: 1 for n in names if n.startswith("stride") and n.endswith(ends)}

    def type_of(argument: str) -> str | None:
        if argument.endswith("scales_ptr") and module == "split_rows_kernels":
            return None
        if argument in missing:
            return None
        if argument.endswith("_ptr"):
            is_aligned = given.get("IS_ALIGNED", False)
            return pointer(argument, given.get("BITS", 16), in_scratch=is_aligned)
        return "fp32" if argument in ("scale", "t", "gamma") else "i32"

    def is_aligned(argument: str) -> bool:
        return argument.startswith("stride") and "mask" not in argument

    constants = {**given, **units}
    return compile_for(capability, kernel, constants, type_of, is_aligned, parts, num_warps=warps)


def append(capability: int, bits: int, depth: int = 128, **more: Any) -> Any:
    constants = {
        "DEPTH": depth,
        "BITS": bits,
        "V_BITS": bits,
        "NORMS": 2,
        "GROUP": 64,
        "CHANNELS": depth // 2 if bits == 16 else channel_group(depth, "kivi"),
        "WINDOW": 192,
        "KEPT": 332,
        "KEEP_FIRST": 4,
        "TOKENS": 1,
        "RULE": 0,
        "IS_PROJECTED": False,
        "KEEPS_NEAREST": False,
        "KEEPS_ALL": False,
        "HAS_LOWER": False,
        "IS_ALIGNED": False,
        "UPCAST": False,
        **more,
    }
    name = "_coded_kv_cache_append_pairs_merge_kernel"
    return build("append_pairs_kernels", name, capability, constants, 8)


def prompt(capability: int, bits: int, depth: int = 128, **more: Any) -> list[Any]:
    """Build the passes over a prompt: measuring, coding keys, coding values."""
    both = {"DEPTH": depth, "GROUP": 64}
    channels = depth // 2 if bits == 16 else channel_group(depth, "kivi")
    codes = {**both, "BITS": bits, "V_BITS": bits, "NORMS": 2, "CHANNELS": channels}
    codes |= {"RULE": 0, "IS_PROJECTED": False, "IS_ALIGNED": False, **more}
    module, name = "append_pairs_kernels", "_coded_kv_cache_append_pairs_code_kernel"
    return [
        build(module, "_coded_kv_cache_append_pairs_measure_kernel", capability, both, 8),
        *(build(module, name, capability, {**codes, "IS_VALUE": x}, 8) for x in (False, True)),
    ]


def rows(
    capability: int,
    *,
    repeat: int = 4,
    splits: int = 4,
    has_mask: bool = True,
    aligned: str = "",
) -> Any:
    plan = split_rows.plan_for(repeat)
    constants = {
        "REPEAT": repeat,
        "DEPTH": 128,
        "ROWS": rows_for(repeat),
        "TILE": plan.tile,
        "WINDOW": 192,
        "KEPT": 332,
        "HAS_MASK": has_mask,
        "IS_ALONE": splits == 1 and aligned != "upper",
        "IS_ALIGNED": bool(aligned),
        "IS_TURNED": aligned == "upper",
        "STAGES": plan.stages,
        "UPCAST": False,
    }
    name = "_coded_kv_cache_split_rows_attention_kernel"
    return build("split_rows_kernels", name, capability, constants, plan.warps)


CASES: list[tuple[int, dict[str, Any]]] = [
    (4, {}),
    (16, {"TOKENS": 64, "HAS_LOWER": True}),
    (2, {"IS_PROJECTED": True, "RULE": 1}),
    (3, {"depth": 64}),
    (8, {"KEEPS_ALL": True, "KEEPS_NEAREST": True, "RULE": 2}),
]
ALIGNED: list[tuple[int, dict[str, Any]]] = [
    (4, {"IS_ALIGNED": True}),
    (3, {"IS_ALIGNED": True, "TOKENS": 64, "HAS_LOWER": True}),
    (16, {"IS_ALIGNED": True}),
    (4, {"IS_ALIGNED": True, "depth": 256}),
]
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("capability", "bits", "more"),
    [
        *[pytest.param(90, *case, marks=SLOW) for case in CASES],
        *[pytest.param(80, *case, marks=SLOW) for case in CASES],
        *twice(90, *ALIGNED[0]),
        *[pytest.param(90, *case, marks=SLOW) for case in ALIGNED[1:]],
        *[pytest.param(other, *ALIGNED[0], marks=SLOW) for other in (80, 100)],
    ],
    ids=str,
)
def test_append_compiles_within_the_limits(
    capability: int, bits: int, more: dict[str, Any]
) -> None:
    kernel = append(capability, bits, **more)
    # One program of a step in 64 runs this part: rows of 256 in fp32 do not all fit in registers.
    stack = 128 if more.get("depth") == 256 and more.get("IS_ALIGNED") else 0
    within_limits(kernel, capability, stack=max(stack, 32 if capability == 100 else 0))


@pytest.mark.parametrize(
    ("capability", "bits", "more"),
    [
        (90, 16, {}),
        pytest.param(90, *CASES[0], marks=SLOW),
        pytest.param(90, *CASES[2], marks=SLOW),
        pytest.param(80, *CASES[0], marks=SLOW),
        pytest.param(100, *CASES[0], marks=SLOW),
        pytest.param(90, *ALIGNED[0], marks=SLOW),
        pytest.param(80, *ALIGNED[0], marks=SLOW),
    ],
    ids=str,
)
def test_merging_a_prompt_compiles_within_the_limits(
    capability: int, bits: int, more: dict[str, Any]
) -> None:
    for kernel in prompt(capability, bits, **more):
        within_limits(kernel, capability)
        assert "atom." not in kernel.asm["ptx"]


@pytest.mark.parametrize(
    ("capability", "depth"),
    [
        (90, 128),
        pytest.param(90, 256, marks=SLOW),
        pytest.param(80, 128, marks=SLOW),
        pytest.param(100, 128, marks=SLOW),
    ],
)
def test_fitting_maps_and_aligning_a_prompt_compile_within_the_limits(
    capability: int, depth: int
) -> None:
    module, tile = "alignment_kernels", {"DEPTH": depth, "TILE": 64, "KINDS": 2}
    products = {**tile, "COLUMNS": 64, "UPCAST": False}
    rows = {"DEPTH": depth, "GROUP": 64, "UPCAST": False}
    for name, constants, warps in (
        ("_coded_kv_cache_alignment_sum_rows_kernel", {**tile, "KINDS": 4}, 4),
        ("_coded_kv_cache_alignment_multiply_rows_kernel", products, 8),
        ("_coded_kv_cache_alignment_align_rows_kernel", rows, 8),
    ):
        kernel = build(module, name, capability, constants, warps)
        within_limits(kernel, capability)
        has_products = re.search(r"mma\.sync|wgmma|tcgen05\.mma", kernel.asm["ptx"])
        assert bool(has_products) == ("sum" not in name)


@pytest.mark.parametrize(
    ("capability", "more"),
    [
        *twice(90, {}),
        *[pytest.param(other, {}, marks=SLOW) for other in (80, 100)],
        pytest.param(90, {"repeat": 1, "splits": 1}, marks=SLOW),
        (90, {"repeat": 12, "has_mask": False}),
        *[pytest.param(each, {"aligned": "upper"}, marks=SLOW) for each in (80, 90, 100)],
        pytest.param(90, {"aligned": "lower"}, marks=SLOW),
    ],
    ids=str,
)
def test_attention_compiles_within_the_limits(capability: int, more: dict[str, Any]) -> None:
    kernel = rows(capability, **more)
    ptx = kernel.asm["ptx"]
    within_limits(kernel, capability, stack=STACK)
    assert "atom." not in ptx
    assert re.search(r"mma\.sync|wgmma|tcgen05\.mma", ptx), "no tensor cores"


@pytest.mark.parametrize("capability", [90])
def test_appending_to_the_lower_layer_compiles(capability: int) -> None:
    constants = {"DEPTH": 128, "WINDOW": 192, "TOKENS": 1}
    name = "_coded_kv_cache_append_pairs_lower_kernel"
    kernel = build("append_pairs_kernels", name, capability, constants, 1)
    within_limits(kernel, capability)


@pytest.mark.slow
@pytest.mark.usefixtures("sizes_of_one")
def test_kernels_compile_for_sizes_of_one() -> None:
    append(90, 4)
    append(90, 16, HAS_LOWER=True)
    prompt(90, 4)
    rows(90)
    constants = {"DEPTH": 128, "WINDOW": 192, "TOKENS": 1}
    build("append_pairs_kernels", "_coded_kv_cache_append_pairs_lower_kernel", 90, constants, 1)
