"""The kernels of ternary_linear compiled for GPUs that are not there: no spills, memory in bounds."""

from __future__ import annotations

import re
from typing import Any

import pytest

from memeff_compile.kernels.ternary_linear.quantizer import KINDS
from memeff_compile.kernels.ternary_linear.shapes import (
    TileShapes,
    VectorShapes,
    coded_shapes,
    tile_shapes,
    vector_shapes,
)
from tests.support.offline import compile_for, gpus, twice, within_limits

pytestmark = pytest.mark.offline

CAPABILITIES = gpus(80, 90, 100)
POINTERS = {
    "codes_ptr": "*i8",
    "sums_ptr": "*i32",
    "part_ptr": "*i32",
    "packed_a": "*i32",
    "packed_b": "*i32",
    "packed_c": "*i32",
}
PARTS = {
    "entry": ("x_ptr", "stride_x", "up_ptr", "stride_up", "norm_ptr"),
    "coded": ("codes_ptr", "scale_ptr", "sums_ptr"),
    "packed": ("packed_a", "packed_b", "packed_c"),
    "weight_scales": ("weight_scale_a", "weight_scale_b", "weight_scale_c"),
    "biases": ("bias_a", "bias_b", "bias_c"),
    "outs": ("out_a", "out_b", "out_c"),
    "counts": ("rows_a", "rows_b", "rows_c"),
    "tiles": ("tiles_a", "tiles_b"),
    "numbers": ("norm_eps", "kept", "eps", "eps_rounded"),
}
DIVISIBLE = ("words", "width", "share", "columns", "rows", "stride_x", "rows_a", "rows_b", "rows_c")


def _compile(
    name: str,
    capability: int,
    dtype: str,
    given: dict[str, Any],
    warps: int,
    kinds: dict[str, str] | None = None,
) -> Any:
    from memeff_compile.kernels.ternary_linear import tiles_kernels

    def type_of(argument: str) -> str:
        is_pointer = argument.endswith(("_ptr", "_a", "_b", "_c"))
        if is_pointer and not argument.startswith(("rows_", "tiles_")):
            default = "*fp32" if "scale" in argument else f"*{dtype}"
            return (POINTERS | (kinds or {})).get(argument, default)
        return "fp32" if "eps" in argument else "i32"

    return compile_for(
        capability,
        getattr(tiles_kernels, name),
        given,
        type_of,
        DIVISIBLE.__contains__,
        PARTS,
        num_warps=warps,
        enable_fp_fusion=False,
    )


def _quantizer(kind: str, *, is_step: bool = False, is_native: bool = False) -> dict[str, Any]:
    import triton.language as tl

    found = KINDS[kind]
    return {
        "LEVELS": found.levels,
        "INVERSE": 1.0 / found.levels,
        "LOW": float(found.low),
        "HIGH": float(found.high),
        "IS_MEAN": found.is_mean,
        "IS_FLOAT": found.is_float,
        "KEEPS_HALF": found.keeps_half,
        "LOW_BIT": 16,
        "ADDS_EPS": False,
        "IS_STEP": is_step,
        "WEIGHT_IS_STEP": False,
        "DTYPE": tl.bfloat16 if is_native else tl.float32,
        "IS_CHAINED": False,
        "IS_CODED": False,
        **_neighbours(is_on=False),
    }


def _neighbours(*, is_on: bool) -> dict[str, bool]:
    return dict.fromkeys(("HAS_UP", "HAS_NORM", "HAS_ADDED", "IS_EARLY"), is_on)


def _vectors(
    capability: int,
    kind: str,
    shapes: VectorShapes,
    words: int,
    *,
    tokens: int = 1,
    group: int = 1,
    is_native: bool = False,
    has_neighbours: bool = False,
    is_coded: bool = False,
) -> Any:
    constants = {
        **_quantizer(kind, is_native=is_native),
        **_neighbours(is_on=has_neighbours),
        "IS_CODED": is_coded,
        "HAS_BIAS_A": False,
        "HAS_BIAS_B": True,
        "HAS_BIAS_C": False,
        "GROUP": group,
        "TOKENS": tokens,
        "ROWS": shapes.rows,
        "TILES": shapes.tiles,
        "WORDS": words,
        "BYTEWISE": False,
    }
    kinds = {"codes_ptr": "*i32"}
    return _compile(
        "_ternary_linear_tiles_vectors_kernel", capability, "bf16", constants, shapes.warps, kinds
    )


def _tiles(
    capability: int,
    shapes: TileShapes,
    *,
    is_part: bool = False,
    is_even: bool = True,
    matrices: int = 1,
) -> Any:
    constants = {
        **_quantizer("int8"),
        "MATRICES": matrices,
        "ROWS": shapes.rows,
        "TOKENS": shapes.tokens,
        "BYTES": shapes.bytes,
        "GROUP": 8,
        "STAGES": shapes.stages,
        "IS_EVEN": is_even,
        "IS_PART": is_part,
        "HAS_BIAS": not is_part,
        "IS_CHAINED": capability >= 90,
        "BYTEWISE": False,
    }
    kinds = dict.fromkeys(("packed_a", "packed_b", "packed_c"), "*u8")
    return _compile(
        "_ternary_linear_tiles_tiles_kernel", capability, "bf16", constants, shapes.warps, kinds
    )


@pytest.mark.parametrize(
    ("words", "rows", "tokens", "group", "kind"),
    [
        (256, 14336, 1, 1, "int8"),
        pytest.param(256, 14336, 4, 1, "int8", marks=pytest.mark.slow),
        pytest.param(1024, 4096, 1, 1, "int8", marks=pytest.mark.slow),
        *twice(512, 28672, 1, 1, "fp4"),
        *twice(256, 6144, 1, 3, "int4"),
        pytest.param(2048, 8192, 1, 1, "int8", marks=pytest.mark.slow),
        (128, 2560, 2, 2, "topk8"),
    ],
    ids=str,
)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_the_kernel_for_few_tokens_compiles_within_the_limits(
    capability: int, words: int, rows: int, tokens: int, group: int, kind: str
) -> None:
    shapes = vector_shapes(words, rows, tokens, 132)
    kernel = _vectors(capability, kind, shapes, words, tokens=tokens, group=group)
    # ptxas spills two registers of the widest rows on 10.0, which has no measurements.
    ptx = within_limits(kernel, capability, stack=8 if (capability, words) == (100, 2048) else 0)
    assert "dp4a" in ptx
    assert "ld.global.v4" in ptx, "weights are not loaded sixteen bytes at a time"


@pytest.mark.parametrize(
    ("words", "rows", "tokens"),
    [
        *twice(1024, 3200, 1),
        pytest.param(256, 3200, 1, marks=pytest.mark.slow),
        (256, 8640, 2),
    ],
    ids=str,
)
def test_a_gate_a_norm_and_a_sum_fit_into_the_kernel_for_few_tokens(
    words: int, rows: int, tokens: int
) -> None:
    shapes = vector_shapes(words, rows, tokens, 132)
    kernel = _vectors(90, "int8", shapes, words, tokens=tokens, has_neighbours=True)
    ptx = within_limits(kernel, 90)
    assert ptx.index("ld.global.v4") < ptx.index("griddepcontrol.wait"), "weights wait for tokens"


@pytest.mark.parametrize(
    ("words", "rows", "tokens", "group"),
    [
        (256, 9600, 1, 3),
        *twice(1024, 3200, 1, 1),
        (256, 14336, 4, 1),
        *twice(512, 28672, 1, 1),
        *twice(256, 3200, 1, 1),
    ],
    ids=str,
)
@pytest.mark.parametrize("capability", gpus(80, 90))
def test_weights_come_before_tokens_that_were_quantised_already(
    capability: int, words: int, rows: int, tokens: int, group: int
) -> None:
    shapes = coded_shapes(words, rows, tokens, 132)
    options = {"tokens": tokens, "group": group, "is_coded": True}
    is_early = capability == 90
    kernel = _vectors(capability, "int8", shapes, words, has_neighbours=is_early, **options)
    ptx = within_limits(kernel, capability)
    if is_early:
        assert ptx.index("ld.global.v4") < ptx.index("griddepcontrol.wait"), "weights wait"


@pytest.mark.parametrize(
    ("tokens", "rows"),
    [
        *twice(16, 4096),
        *twice(48, 14336),
        (4096, 14336),
        *(pytest.param(tokens, 14336, marks=pytest.mark.slow) for tokens in (16, 256)),
    ],
)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_the_kernel_for_many_tokens_compiles_within_the_limits(
    capability: int, tokens: int, rows: int
) -> None:
    shapes = tile_shapes(tokens, rows, 1024, 132, is_hopper=capability == 90)
    ptx = within_limits(_tiles(capability, shapes), capability)
    assert re.search(r"mma\.sync.*s8|wgmma.*s8|tcgen05\.mma", ptx), "no integer tensor cores"
    assert "cp.async" in ptx, "operands are not loaded ahead"


@pytest.mark.parametrize("tokens", [*twice(8), 32])
def test_three_matrices_of_one_launch_compile_within_the_limits(tokens: int) -> None:
    shapes = tile_shapes(tokens, 9600, 800, 132)
    kernel = _tiles(90, shapes, matrices=3, is_even=False)
    # A warp group has four warps; fewer multiply by the older instruction.
    assert ("wgmma" if shapes.warps >= 4 else "mma.sync") in within_limits(kernel, 90)


def test_the_kernels_compile_for_an_older_gpu() -> None:
    few = _vectors(80, "int8", vector_shapes(256, 14336, 4, 132), 256, tokens=4)
    assert "dp4a" in within_limits(few, 80)
    many = _tiles(80, tile_shapes(4096, 14336, 1024, 132, is_hopper=False))
    assert "cp.async" in within_limits(many, 80), "operands are not loaded ahead"


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("has_neighbours", [*twice(False), True])
def test_quantisers_compile_without_spills(kind: str, has_neighbours: bool) -> None:
    given = {**_quantizer(kind, is_native=True), **_neighbours(is_on=has_neighbours)}
    given["COLUMNS"] = 16384
    kinds = {"codes_ptr": "*i32"}
    within_limits(
        _compile("_ternary_linear_tiles_quantize_kernel", 90, "bf16", given, 16, kinds), 90
    )


@pytest.mark.usefixtures("sizes_of_one")
def test_kernels_compile_for_sizes_of_one() -> None:
    _vectors(90, "topk8", VectorShapes(4, 4, 2), 16, tokens=2, group=3)
    small = TileShapes(16, 32, 32, 4, 2)
    _tiles(90, small, is_part=True, is_even=False)
    given = _quantizer("int4", is_step=True)
    kinds = {"codes_ptr": "*i32", "packed_ptr": "*i32"}
    for name, constants in (
        ("_ternary_linear_tiles_quantize_kernel", {**given, "COLUMNS": 16}),
        ("_ternary_linear_tiles_pack_kernel", {**given, "WORDS": 1}),
        ("_ternary_linear_tiles_weights_kernel", {**given, "WORDS": 1}),
        (
            "_ternary_linear_tiles_parts_kernel",
            {**given, "SPLITS": 2, "ROWS": 16, "HAS_BIAS": True},
        ),
    ):
        _compile(name, 90, "fp32", constants, 4, kinds)
    _compile(
        "_ternary_linear_tiles_tokens_kernel",
        90,
        "fp32",
        {**given, "WORDS": 1},
        4,
        {"codes_ptr": "*i32"},
    )
