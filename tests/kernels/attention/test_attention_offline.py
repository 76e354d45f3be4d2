"""The kernels of attention compiled for GPUs that are not there: no spills, shared memory in bounds."""

from __future__ import annotations

import re
from typing import Any

import pytest

from memeff_compile.kernels._triton.gpus import gpu_of
from memeff_compile.kernels._triton.key_tiles import BOUNDS_CHUNK, BOUNDS_WARPS, depth_block
from memeff_compile.kernels.attention.mask_tiles import CLASSIFY, HIDDEN, LISTS, SEEN, TILE, Dense
from memeff_compile.kernels.attention.shapes import (
    KERNELS,
    Shape,
    shape_for,
)
from tests.support.offline import (
    TABLES_NAMED,
    cells_named,
    compile_for,
    gpus,
    registers_of,
    rows_named,
    twice,
    within_limits,
)

pytestmark = pytest.mark.offline

CAPABILITIES = gpus(80, 89, 90, 100)
POINTERS = {
    "key_mask_ptr": "*u8",
    "query_ids_ptr": "*i64",
    "key_ids_ptr": "*i64",
    "bounds_ptr": "*i32",
    "lse_ptr": "*fp32",
    "sums_ptr": "*fp32",
    "delta_ptr": "*fp32",
    "lists_ptr": "*i32",
    "codes_ptr": "*u8",
}
FLOATS = ("scale", "inner", "factor")
PARTS = {
    **{name: rows_named(name) for name in ("q", "k", "v", "grad", "out")},
    "tables": TABLES_NAMED,
    "mask": Dense(
        *("mask_ptr", "stride_mask_batch", "stride_mask_head", "stride_mask_row", "mask_unit"),
        *("lists_ptr", "stride_lists_batch", "stride_lists_head"),
    ),
    "scales": ("scale", "inner"),
    "sizes": ("batch_heads", "heads", "repeat", "queries", "keys", "tiles"),
}
PLAIN = {
    "HAS_AHEAD": True,
    "HAS_BEHIND": False,
    "HAS_KEY_MASK": False,
    "HAS_IDS": False,
    "HAS_BOUNDS": False,
    "MEAN": False,
    "SIGN": 1,
    "SOFTCAP": False,
    "UPCAST": False,
    "WITH_K": True,
    "WITH_V": True,
    "HAS_MASK": False,
    "IS_BIAS": False,
    "PER_HEAD": False,
}
CAPPED = {**PLAIN, "SOFTCAP": True}
EVERY = {
    **PLAIN,
    "HAS_BEHIND": True,
    "HAS_KEY_MASK": True,
    "HAS_IDS": True,
    "HAS_BOUNDS": True,
    "MEAN": True,
    "SIGN": -1,
    "SOFTCAP": True,
}
MASKS = {
    "bool": {**PLAIN, "HAS_AHEAD": False, "HAS_MASK": True},
    "bias": {**PLAIN, "HAS_AHEAD": False, "HAS_MASK": True, "IS_BIAS": True, "PER_HEAD": True},
}
UNIT = "mask_unit"
"""A mask's stride from key to key, as a rule."""


def _compile(
    kernel: Any,
    capability: int,
    dtype: str,
    given: dict[str, Any],
    warps: int,
    unit: str = UNIT,
    parts: dict[str, Any] | None = None,
    registers: int | None = None,
) -> Any:
    """Compile a kernel; the runtime integers that `unit` names by a pattern are 1, a constant."""
    parts = {**PARTS, **(parts or {})}
    names = [each for argument in kernel.arg_names for each in parts.get(argument, [argument])]
    units = {each: 1 for each in names if re.fullmatch(unit, each)}

    def type_of(argument: str) -> str:
        if argument == "mask_ptr":
            return f"*{dtype}" if given.get("IS_BIAS") else "*u8"
        if argument.endswith("_ptr"):
            return POINTERS.get(argument, f"*{dtype}")
        return "fp32" if argument in FLOATS else "i32"

    def is_aligned(argument: str) -> bool:
        """Masks are loaded in wide pieces where 16 divides the lengths, as it mostly does."""
        is_length = argument in ("queries", "keys") and bool(given.get("HAS_MASK"))
        return argument.startswith("stride") or is_length

    options = {"num_warps": warps, **({} if registers is None else {"maxnreg": registers})}
    return compile_for(
        capability, kernel, {**units, **given}, type_of, is_aligned, parts=parts, **options
    )


def _kernel(name: str) -> Any:
    from memeff_compile.kernels._triton import key_tiles_kernels
    from memeff_compile.kernels.attention import tiles_kernels

    return getattr(tiles_kernels, name, None) or getattr(key_tiles_kernels, name)


def _constants(depth: int, shape: Shape, flags: dict[str, Any]) -> dict[str, Any]:
    return {
        "DEPTH": depth,
        "DEPTH_BLOCK": depth_block(depth),
        "ROWS": shape.rows,
        "KEYS": shape.keys,
        "STAGES": shape.stages,
        "BY_HEAD": shape.by_head,
        **flags,
    }


NAMES = {
    "forward": "_attention_tiles_forward_kernel",
    "query_gradient": "_attention_tiles_query_gradient_kernel",
    "key_gradient": "_attention_tiles_key_gradient_kernel",
}


def _check(kernel: str, capability: int, depth: int, flags: dict[str, Any], dtype: str) -> None:
    """Compile a kernel with its own tile: no stack, shared memory in bounds, tensor cores."""
    told = {"has_tables": flags["HAS_BOUNDS"], "has_mask": flags["HAS_MASK"]}
    shape = shape_for(kernel, depth, gpu_of(divmod(capability, 10)), **told)
    parts = [{}]
    if kernel == "key_gradient" and shape.is_split:
        parts = [{"WITH_K": False}, {"WITH_V": False}]
    for part in parts:
        constants = _constants(depth, shape, {**flags, **part})
        options = {"registers": shape.registers}
        compiled = _compile(
            _kernel(NAMES[kernel]), capability, dtype, constants, shape.warps, **options
        )
        place = (kernel, capability, depth_block(depth))
        stack = max(
            SPILLED.get(place, 0),
            flags["HAS_MASK"] * UNDER_A_MASK.get(place, 0),
            flags["IS_BIAS"] * UNDER_A_BIAS.get(place, 0),
        )
        ptx = within_limits(compiled, capability, stack)
        if shape.registers:
            assert registers_of(compiled.asm["cubin"]) <= shape.registers
        assert re.search(PRODUCTS[capability], ptx), "no tensor cores"
        if shape.stages > 1:
            assert "cp.async.cg.shared.global" in ptx, "tiles are not loaded ahead"


# Bytes per thread where the fastest tile of the sweep on an H200 spills: at head size 256 it takes
# 1.1 ms where the best that does not spill takes 1.7.
SPILLED = {("key_gradient", 90, 128): 136, ("key_gradient", 90, 256): 448}

# The same under masks that are tensors: two programs per processor are worth more.
UNDER_A_MASK = {("query_gradient", 90, 64): 16}

# And where such a mask is added, head by head; these were not measured.
UNDER_A_BIAS = {
    **{("key_gradient", 80, 64): 48, ("forward", 100, 64): 48},
    **{("forward", 90, 64): 8, ("query_gradient", 90, 64): 64},
}

PRODUCTS = {80: r"mma\.sync", 89: r"mma\.sync", 90: r"wgmma", 100: r"tcgen05\.mma"}


@pytest.mark.parametrize("kernel", [case for kernel in KERNELS for case in twice(kernel)])
def test_attention_compiles_within_the_limits(kernel: str) -> None:
    _check(kernel, 90, 128, PLAIN, "bf16")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("depth", "dtype"), [(64, "bf16"), (96, "bf16"), (128, "fp16"), (256, "bf16")]
)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_attention_compiles_within_the_limits_everywhere(
    capability: int, depth: int, dtype: str, kernel: str
) -> None:
    for flags in (CAPPED, EVERY):
        _check(kernel, capability, depth, flags, dtype)


@pytest.mark.parametrize(("ours_are_queries", "from_lse"), [(True, False), (False, True)])
def test_bounds_compile_within_the_limits(ours_are_queries: bool, from_lse: bool) -> None:
    constants = {
        "OURS": 128,
        "OTHERS": 64,
        "CHUNK": BOUNDS_CHUNK // 64,
        "OURS_ARE_QUERIES": ours_are_queries,
        "FROM_LSE": from_lse,
        **EVERY,
    }
    kernel = _kernel("_attention_key_tiles_bounds_kernel")
    compiled = _compile(kernel, 90, "bf16", constants, BOUNDS_WARPS)
    within_limits(compiled, 90)


@pytest.mark.parametrize("kernel", KERNELS)
def test_attention_under_a_mask_compiles_within_the_limits(kernel: str) -> None:
    _check(kernel, 90, 128, MASKS["bool"], "bf16")


@pytest.mark.parametrize("depth", [64, 128])
@pytest.mark.parametrize("kernel", ["forward", "query_gradient"])
def test_under_a_mask_two_programs_fit_on_a_processor(kernel: str, depth: int) -> None:
    """One program alone waits for memory; two fit only if their registers do."""
    shape = shape_for(kernel, depth, gpu_of((9, 0)), has_mask=True)
    constants = _constants(depth, shape, MASKS["bool"])
    given = (90, "bf16", constants, shape.warps)
    compiled = _compile(_kernel(NAMES[kernel]), *given, registers=shape.registers)
    allotted = -(-registers_of(compiled.asm["cubin"]) // 8) * 8
    assert 2 * 32 * shape.warps * allotted <= 1 << 16
    assert 2 * (compiled.metadata.shared + 1024) <= 228 << 10


@pytest.mark.slow
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("depth", [64, 128, 256])
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_attention_under_a_mask_compiles_within_the_limits_everywhere(
    capability: int, kernel: str, depth: int, kind: str
) -> None:
    _check(kernel, capability, depth, MASKS[kind], "bf16")


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize(
    "unit",
    [UNIT, pytest.param("mask_unit|queries|keys|tiles|others|heads|bands", marks=pytest.mark.slow)],
)
def test_codes_and_lists_compile_within_the_limits(kind: str, unit: str) -> None:
    from memeff_compile.kernels.attention import mask_tiles_kernels as kernels

    given = {**MASKS[kind], "TILE": TILE, "HIDDEN": HIDDEN, "SEEN": SEEN}
    cells = cells_named("mask")._replace(depth="mask_unit")
    parts = {"mask": cells, "sizes": ("heads", "queries", "keys", "bands", "tiles")}
    codes = kernels._attention_mask_tiles_kernel
    warps = CLASSIFY["num_warps"]
    constants = {**given, "CHUNK": CLASSIFY["CHUNK"]}
    compiled = _compile(codes, 90, "bf16", constants, warps, unit, parts)
    within_limits(compiled, 90)
    parts = {
        "codes": cells_named("codes"),
        "sizes": ("heads", "tiles", "others", "queries", "keys"),
    }
    constants = {**given, "CHUNK": LISTS["CHUNK"], "OURS": 32, "OTHERS": 128}
    lists = kernels._attention_mask_tiles_lists_kernel
    within_limits(_compile(lists, 90, "bf16", constants, LISTS["num_warps"], unit, parts), 90)


# One sequence, one head, one query or one key: Triton makes constants of such numbers.
UNITS = (
    r"stride_.*|queries|keys|heads|groups|repeat|batch_heads|batch_groups|tiles|query_tiles|"
    r"key_tiles"
)


@pytest.mark.parametrize("name", [*NAMES.values(), "_attention_key_tiles_bounds_kernel"])
def test_numbers_that_are_one_compile(name: str) -> None:
    constants = {**_constants(64, Shape(16, 16, 4, 1), EVERY), "OURS": 16, "OTHERS": 16}
    constants |= {"CHUNK": 4, "OURS_ARE_QUERIES": True, "FROM_LSE": False}
    _compile(_kernel(name), 80, "bf16", constants, 4, UNITS)
