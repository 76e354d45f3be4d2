"""The kernels of coded weights compiled for GPUs that are not there: no spills, shared memory fits."""

from __future__ import annotations

import re
from importlib import import_module
from typing import Any

import pytest

from memeff_compile.kernels.coded_weight import pieces, shapes
from memeff_compile.kernels.coded_weight.layout import Multiplied, piece_words
from tests.support.offline import compile_for, gpus, twice, within_limits

pytestmark = pytest.mark.offline
SLOW = pytest.mark.slow

CAPABILITIES = gpus(80, 90, 100)
POINTERS = {
    "places_ptr": "*i16",
    "values_ptr": "*i16",
    "weight_ptr": "*i16",
    "norms_ptr": "*u8",
    "bias_ptr": "*bf16",
}

WEIGHT = (
    *("header_ptr", "codes_ptr", "starts_ptr", "places_ptr", "values_ptr", "signs_ptr"),
    "norms_ptr",
)
FORMATS = {8: 0, 4: 512, 2: 64, 1: 32}
"""Bits of a field -> weights per normaliser, of the formats that are compiled."""
FIELDS = {8: "*i32", 4: "*i32", 2: "*i16", 1: "*u8"}
WIDE_FIELDS = {8: ("i32", 64, 32), 4: ("i32", 64, 32), 2: ("i16", 32, 16), 1: ("u8", 0, 8)}
"""The type of a tile of fields in shared memory, its swizzle, and the bits of a number."""
ONE = {"weight": Multiplied(*WEIGHT, "bias_ptr", "out_ptr", "rows")}
SEVERAL = {
    f"weight_{place}": Multiplied(
        *(f"{name.removesuffix('_ptr')}_{place}_ptr" for name in WEIGHT),
        *(f"bias_{place}_ptr", f"out_{place}_ptr", f"rows_{place}"),
    )
    for place in range(3)
}
PARTS = {"row": ONE, "rows": SEVERAL, "matrix": ONE, "matrices": SEVERAL}
PARTS |= {"token": ONE, "tokens": SEVERAL}
STEPS = {name: "win4" if parts is ONE else "win4_several" for name, parts in PARTS.items()}
STEPS["wide"] = "win4_wide"


def _compile(
    module: str, name: str, capability: int, constants: dict[str, Any], warps: int, **types: str
) -> Any:
    folder = "memeff_compile.kernels.coded_weight"
    step = STEPS.get(name, name)

    def type_of(argument: str) -> str:
        number = "fp32" if argument in ("rate", "decay") else "i32"
        plain = POINTERS.get(argument, "*i32") if argument.endswith("_ptr") else number
        return types.get(argument, plain)

    return compile_for(
        capability,
        getattr(
            import_module(f"{folder}.{module}_kernels"), f"_coded_weight_{module}_{step}_kernel"
        ),
        constants,
        type_of,
        lambda argument: True,
        PARTS.get(name),
        num_warps=warps,
    )


def _row(capability: int, rows: int = 14336, field: int = 8) -> Any:
    find = shapes.row_tile if field == 8 else shapes.narrow_row_tile
    tile = find(rows, 132)
    constants = {
        "TILE": tile.constants(4096, has_bias=True, is_even=True),
        "PATCHES": shapes.PATCHES,
        "PACKED": tile.packed,
        "FIELD": field,
        "BLOCK": FORMATS[field],
    }
    types = {"signs_ptr": FIELDS[field], "out_ptr": "*bf16"}
    return _compile("row", "row", capability, constants, tile.warps, **types)


def _rows(capability: int, field: int = 8) -> Any:
    """Queries, keys and values of Llama-3-8B in one launch."""
    constants: dict[str, Any] = {"COUNT": 3, "PATCHES": shapes.PATCHES, "PACKED": True}
    constants |= {"FIELD": field, "BLOCK": FORMATS[field]}
    find = shapes.row_tile if field == 8 else shapes.narrow_row_tile
    for place, rows in enumerate((4096, 1024, 1024)):
        tile = find(rows, 132)
        constants[f"TILE_{place}"] = tile.constants(4096, has_bias=place == 0, is_even=True)
    return _compile("row", "rows", capability, constants, 1, **_several(field))


def _several(field: int) -> dict[str, str]:
    """Return the types of several weights' parts, by name."""
    names = ("places", "values"), ("bias", "out"), ("norms",), ("signs",)
    kinds = ("*i16", "*bf16", "*u8", FIELDS[field])
    several = zip(kinds, names, strict=True)
    return {f"{name}_{n}_ptr": kind for kind, group in several for name in group for n in range(3)}


def _gluon(
    name: str,
    capability: int,
    constants: dict[str, Any],
    warps: int,
    module: str = "matrix",
    **types: str,
) -> Any:
    types = {"x_ptr": "*bf16", "xt_ptr": "*bf16", **types}
    return _compile(module, name, capability, constants, warps, **types)


def _matrix(
    capability: int, tokens: int, rows: int, field: int = 8, *, is_even: bool, count: int = 1
) -> Any:
    tile = shapes.matrix_tile(tokens, rows, 4096, 132, is_lossless=field == 8)
    constants = {
        "COUNT": count,
        "TILE": (True, is_even),
        **{f"TILE_{place}": (place == 0, is_even) for place in range(3)},
        "HAS_ALL": is_even,
        "GROUPS": 16 if tile.is_early else 0,
        "ROWS": tile.rows,
        "TOKENS": tile.tokens,
        "CHUNKS": shapes.chunks_touched(tile.rows, 4096),
        "PATCHES": tile.patches,
        "WARPS": tile.warps,
        "FIELD": field,
        "BLOCK": FORMATS[field],
    }
    types = {"signs_ptr": FIELDS[field], "out_ptr": "*bf16", **_several(field)}
    name = "matrix" if count == 1 else "matrices"
    return _gluon(name, capability, constants, tile.warps, **types)


def _token(
    capability: int, rows: int, columns: int, field: int, *, is_even: bool = True, count: int = 1
) -> Any:
    tile = shapes.halves_tile(rows, columns, field - 1, 132)
    constants = {
        "COUNT": count,
        "TILE": (True, is_even),
        **{f"TILE_{place}": (place == 0, is_even) for place in range(3)},
        "GROUPS": columns // 256,
        "ROWS": tile.rows,
        "TOKENS": tile.tokens,
        "CHUNKS": shapes.chunks_touched(tile.rows, columns),
        "PATCHES": tile.patches,
        "WARPS": tile.warps,
        "FIELD": field,
        "BLOCK": 512,
    }
    types = {"signs_ptr": FIELDS[field], "out_ptr": "*bf16", **_several(field)}
    name = "token" if count == 1 else "tokens"
    return _gluon(name, capability, constants, tile.warps, "token", **types)


def _wide(tile: shapes.WideTile, field: int = 8, **sizes: int) -> Any:
    from triton.experimental.gluon.language import NVMMASharedLayout

    constants = {
        "HAS_BIAS": True,
        "ROWS": tile.rows,
        "TOKENS": tile.tokens,
        "NOTED": tile.noted,
        "X_STAGES": tile.x_stages,
        "STAGES": tile.stages,
        "WARPS": tile.warps,
        "FIELD": field,
        "BLOCK": FORMATS[field],
        **sizes,
    }
    words, signs = (
        f"tensordesc<{kind}[{tile.rows}, 16],{NVMMASharedLayout(swizzle, bits, 2)!r}>"
        for kind, swizzle, bits in (("i32", 64, 32), WIDE_FIELDS[field])
    )
    types = {
        "x_desc": f"tensordesc<bf16[{tile.tokens}, 64],{NVMMASharedLayout(128, 16, 2)!r}>",
        "codes_desc": words,
        "signs_desc": signs,
        "out_ptr": "*bf16",
        "shares_ptr": "*fp32",
    }
    return _gluon("wide", 90, constants, tile.warps, **types)


def _decode(capability: int, codec: str, field: int, block: int, *, steps: bool = False) -> Any:
    step = {"STEP": steps, "HAS_DECAY": steps}
    constants: dict[str, Any] = {"FIELD": field, "BLOCK": block, "PATCHES": shapes.PATCHES, **step}
    constants["PACKED"] = True
    if codec == "win4":
        constants["WORDS"] = shapes.WIN4_DECODE_WORDS
        warps = shapes.WIN4_DECODE_WARPS
    elif codec == "tier":
        warps = shapes.TIER_DECODE_WARPS
    else:
        constants = {"FIELD": field, "BLOCK": block, "WARPS": shapes.RANS_WARPS, **step}
        warps = shapes.RANS_WARPS
    types = {"signs_ptr": FIELDS[field], "out_ptr": "*bf16"}
    if codec == "rans":
        types["words_ptr"] = "*i16"
    return _compile(codec, "decode", capability, constants, warps, **types)


def _encode(capability: int, name: str) -> Any:
    if name in ("win4", "win4 step"):
        step = name == "win4 step"
        constants = {"STEP": step, "HAS_DECAY": step, "PATCHES": shapes.PATCHES}
        warps = shapes.WIN4_STEP_WARPS if step else shapes.WIN4_ENCODE_WARPS
        return _compile("win4", "encode", capability, constants, warps, weight_ptr="*bf16")
    if name in ("lists", "lists alone"):
        constants = {"BLOCK": shapes.STARTS_BLOCK, "REFUGE": name == "lists"}
        types = {"weight_ptr": "*bf16", "refuge_ptr": "*i16"}
        return _compile("win4", "lists", capability, constants, 1, **types)
    if name == "window":
        return _compile("win4", "window", capability, {}, 4)
    if name == "tier":
        return _compile("tier", "encode", capability, {}, shapes.TIER_ENCODE_WARPS)
    if name == "count":
        return _compile("tier", "count", capability, {"BLOCK": 1024}, 4)
    if name == "rans":
        constants = {"COUNT": False, "WARPS": shapes.RANS_WARPS}
        types = {"words_ptr": "*i16"}
        return _compile("rans", "encode", capability, constants, shapes.RANS_WARPS, **types)
    constants = {
        "patches": {"BLOCK": 1024},
        "histogram": {"BLOCKS": 16, "BLOCK": 1024},
        "signs": {"BLOCK": 512},
        "shelter": {"COUNT": 3, "BLOCK": 1024},
    }[name]
    types = {"value_ptr": "*i16", "refuge_ptr": "*i16"}
    return _compile("pair", name, capability, constants, 4, **types)


def _check(kernel: Any, capability: int) -> None:
    # Older versions of Triton keep a pointer or two on the stack of the longest kernel.
    within_limits(kernel, capability, stack=16)


@pytest.mark.parametrize(
    "field",
    [*twice(8), 4, *[pytest.param(bits, marks=pytest.mark.slow) for bits in (2, 1)]],
)
@pytest.mark.parametrize("codec", ["win4", "tier", "rans"])
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_decoding_compiles_within_the_limits(capability: int, codec: str, field: int) -> None:
    if field != 8 and capability != 90:
        field = 4
    kernel = _decode(capability, codec, field, 0 if field == 8 else 64)
    _check_decoding(kernel, capability, is_wide=field == 8 and codec != "rans")


def _check_decoding(kernel: Any, capability: int, *, is_wide: bool) -> None:
    _check(kernel, capability)
    assert "atom." not in kernel.asm["ptx"]
    if is_wide:
        assert re.search(r"ld\.global\.\S*v[24]\.b32", kernel.asm["ptx"]), "narrow loads"
        assert re.search(r"st\.global\.\S*v[24]\.b32", kernel.asm["ptx"]), "narrow stores"


@pytest.mark.parametrize("codec", ["win4", "tier", "rans"])
def test_decoding_compiles_for_an_older_gpu(codec: str) -> None:
    _check_decoding(_decode(80, codec, 8, 0), 80, is_wide=codec != "rans")


@pytest.mark.parametrize("codec", ["win4", "tier", "rans"])
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_a_step_compiles_within_the_limits(capability: int, codec: str) -> None:
    if codec == "win4":  # which steps where it encodes
        kernel = _encode(capability, "win4 step")
        assert re.search(r"ld\.global\.\S*v[24]\.b32", kernel.asm["ptx"]), "narrow loads"
    else:
        kernel = _decode(capability, codec, 8, 0, steps=True)
    _check(kernel, capability)
    assert "fma.rn.f32" in kernel.asm["ptx"], "rounded twice"


@pytest.mark.parametrize(
    "name",
    [
        *("win4", "lists", "lists alone", "window"),
        *("tier", "count", "rans", "patches", "histogram", "signs", "shelter"),
    ],
)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_encoding_compiles_within_the_limits(capability: int, name: str) -> None:
    _check(_encode(capability, name), capability)


@pytest.mark.parametrize(
    ("capability", "rows"),
    [
        (90, 14336),
        *[pytest.param(*case, marks=SLOW) for case in ((80, 14336), (90, 1024), (100, 4096))],
    ],
)
def test_a_product_of_one_token_compiles_within_the_limits(capability: int, rows: int) -> None:
    kernel = _row(capability, rows)
    _check(kernel, capability)
    assert "cp.async.cg.shared.global" in kernel.asm["ptx"], "codes are not loaded ahead"


@pytest.mark.parametrize(
    ("capability", "field"),
    [
        (90, 4),
        *[pytest.param(*case, marks=SLOW) for case in ((90, 2), (90, 1), (80, 4), (100, 4))],
    ],
)
def test_lossy_products_of_one_token_compile_within_the_limits(capability: int, field: int) -> None:
    kernel = _row(capability, field=field)
    _check(kernel, capability)
    assert "fma.rn.bf16x2" in kernel.asm["ptx"], "weights are not rounded two at once"
    width = {4: r"v4\.b32", 2: "b32", 1: "b32"}[field]
    assert re.search(rf"ld\.global\.{width}", kernel.asm["ptx"]), "narrow loads"


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_products_of_one_token_compile_within_the_limits(capability: int) -> None:
    kernel = _rows(capability)
    _check(kernel, capability)
    assert kernel.asm["ptx"].count("cp.async.commit_group") >= 3, "codes are not loaded ahead"


@pytest.mark.parametrize(
    ("capability", "tokens", "rows", "field", "is_even"),
    [
        *[(90, 16, 14336, 8, True), (90, 2, 1024, 8, False), (90, 1, 14336, 4, False)],
        *[
            pytest.param(*case, True, marks=SLOW)
            for case in (
                *((80, 16, 14336, 8), (100, 2, 14336, 8)),
                *((80, 16, 14336, 4), (100, 2, 14336, 4), (90, 16, 14336, 2), (90, 2, 14336, 1)),
            )
        ],
    ],
)
def test_operands_are_decoded_in_registers(
    capability: int, tokens: int, rows: int, field: int, is_even: bool
) -> None:
    kernel = _matrix(capability, tokens, rows, field, is_even=is_even)
    _check(kernel, capability)
    assert "mma.sync" in kernel.asm["ptx"], "no tensor cores"
    blocks = kernel.asm["ptx"].split("$L__BB")
    loop = max(blocks, key=lambda block: block.count("mma.sync"))  # the others add patches
    assert re.search(r"ld\.global\.\S*v4\.b32", loop), "narrow loads"
    assert loop.count("st.shared") <= 3, "operands move between threads"  # three for patches


@pytest.mark.parametrize(
    ("capability", "rows", "columns", "field", "is_even"),
    [
        (90, 14336, 4096, 2, True),
        *[
            pytest.param(*case, marks=SLOW)
            for case in (
                *((90, 14336, 4096, 4, True), (90, 14336, 4096, 1, True)),
                *((90, 4096, 14336, 4, True), (90, 1030, 1536, 4, False)),
                *((80, 14336, 4096, 4, True), (100, 14336, 4096, 1, True)),
            )
        ],
    ],
)
def test_codes_become_halves_in_registers(
    capability: int, rows: int, columns: int, field: int, is_even: bool
) -> None:
    kernel = _token(capability, rows, columns, field, is_even=is_even)
    _check(kernel, capability)
    blocks = kernel.asm["ptx"].split("$L__BB")
    loop = max(blocks, key=lambda block: block.count("mma.sync"))
    assert loop.count("row.col.f32.f16.f16.f32") == 16, "no tensor cores, or of another type"
    assert loop.count("prmt.b32") == 64, "weights are expanded one by one"
    assert "st.shared" not in loop, "operands move between threads"


@pytest.mark.parametrize("field", [pytest.param(4, marks=SLOW), pytest.param(1, marks=SLOW)])
def test_halves_times_several_weights_compile_within_the_limits(field: int) -> None:
    _check(_token(90, 4096, 4096, field, count=3), 90)


@pytest.mark.parametrize("field", [4, pytest.param(8, marks=SLOW), pytest.param(1, marks=SLOW)])
def test_tokens_times_several_weights_compile_within_the_limits(field: int) -> None:
    _check(_matrix(90, 2, 4096, field, is_even=True, count=3), 90)


@pytest.mark.parametrize(
    "tile",
    [pytest.param(t, marks=[pytest.mark.slow] * (t.tokens != 64)) for t in shapes.WIDE_TILES],
    ids=str,
)
@pytest.mark.parametrize(
    "field", [8, *(pytest.param(field, marks=pytest.mark.slow) for field in (4, 2, 1))]
)
def test_products_run_while_the_next_operand_is_decoded(tile: shapes.WideTile, field: int) -> None:
    kernel = _wide(tile, field)
    _check(kernel, 90)
    assert "wgmma.mma_async" in kernel.asm["ptx"], "no tensor cores of Hopper"
    assert "wgmma.wait_group.sync.aligned 1" in kernel.asm["ptx"], "one after the other"


def test_columns_are_ordered_within_the_limits() -> None:
    constants = {"TOKENS": shapes.ORDERED_TOKENS}
    kernel = _compile("win4", "order", 90, constants, 8, turned_ptr="*i16")
    _check(kernel, 90)
    assert not re.search(r"st\.global\.\S*b(16|32) ", kernel.asm["ptx"].replace("v4.b32", "")), (
        "narrow"
    )


def test_the_sum_of_shares_compiles_within_the_limits() -> None:
    constants = {"SPLITS": 4, "BLOCK": shapes.SUM_BLOCK}
    kernel = _compile("win4", "sum", 90, constants, 4, parts_ptr="*fp32", out_ptr="*bf16")
    _check(kernel, 90)


@pytest.mark.parametrize("name", ["decode", "encode", "lists"])
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_kernels_of_weights_in_one_piece_compile_within_the_limits(
    capability: int, name: str
) -> None:
    counts = (896 * 896, 128 * 896, 4864 * 896)
    plan = pieces._plan(*((count, piece_words(count, count // 64)) for count in counts))
    decoding = pieces._decoding(piece_words(counts[0], 0), 896, 896).how
    how = {"decode": decoding, "encode": plan.steps[True], "lists": plan.lists}[name]
    constants = dict(how.settings)
    warps = constants.pop("num_warps")
    types = {f"p{place}": "*i32" for place in range(8)} | {f"w{n}": "*bf16" for n in range(8)}
    types |= {"refuge_ptr": "*i16", "piece_ptr": "*i32", "weight_ptr": "*bf16"}
    kernel = _compile("piece", name, capability, constants, warps, **types)
    _check(kernel, capability)
    if name != "lists":
        assert re.search(r"ld\.global\.\S*v[24]\.b32", kernel.asm["ptx"]), "narrow loads"
        assert re.search(r"st\.global\.\S*v[24]\.b32", kernel.asm["ptx"]), "narrow stores"


@pytest.mark.usefixtures("sizes_of_one")
def test_kernels_compile_for_sizes_of_one() -> None:
    _row(90)
    _rows(90)
    _decode(90, "rans", 8, 0)
    _encode(90, "rans")


@pytest.mark.slow
def test_products_in_gluon_compile_for_sizes_of_one() -> None:
    _wide(shapes.WideTile(128, 256), tokens_count=1, rows_count=1, groups=1)
    _matrix(90, 2, 1, is_even=False)
