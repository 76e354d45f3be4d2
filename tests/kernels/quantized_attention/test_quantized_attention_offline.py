"""The kernels of quantised attention compiled for GPUs that are not present.

No spills, shared memory in bounds, and on 9.0 the instructions that make it fast: products of warp
groups in int8 and E4M3, weights that go from one to the other without moving between threads, and
no arithmetic per score beyond the number checked here.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from memeff_compile.kernels._triton.gpus import gpu_of
from memeff_compile.kernels._triton.key_tiles import BOUNDS_CHUNK, BOUNDS_WARPS, depth_block
from memeff_compile.kernels.quantized_attention.settings import (
    BLOCK,
    NARROWEST,
    QUERY_ROWS,
    TURNED,
    WIDEST_E4M3,
    settings_for,
)
from memeff_compile.kernels.quantized_attention.shapes import (
    CORRECT_WARPS,
    LOOK_KEYS,
    LOOK_WARPS,
    MEANS,
    MOST_CHUNKS,
    SETTLE_WARPS,
    TOTAL_BLOCKS,
    TOTAL_COLUMNS,
    TOTAL_WARPS,
    Shape,
    channels_together,
    shape_for,
    write_warps,
)
from tests.support.offline import (
    TABLES_NAMED,
    compile_for,
    gpus,
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
    "q_ptr": "*bf16",
    "k_ptr": "*bf16",
    "v_ptr": "*bf16",
    "out_ptr": "*bf16",
    "q_codes_ptr": "*i8",
    "k_codes_ptr": "*i8",
}
PLAIN = {
    "HAS_AHEAD": True,
    "HAS_BEHIND": False,
    "HAS_KEY_MASK": False,
    "HAS_IDS": False,
    "HAS_BOUNDS": False,
    "SCALE_PER_KEY": False,
    "HAS_CORRECTION": False,
    "STARTS": False,
    "HAS_REST": True,
    "WITH_LSE": False,
    "CODES_QUERIES": True,
    "LIMIT": 127,
    "UPCAST": False,
}
FOUR = {**PLAIN, "HAS_CORRECTION": True, "STARTS": True, "LIMIT": 15}
EVERY = {
    **PLAIN,
    "HAS_BEHIND": True,
    "HAS_KEY_MASK": True,
    "HAS_IDS": True,
    "HAS_BOUNDS": True,
    "HAS_CORRECTION": True,
    "CODES_QUERIES": False,
    "WITH_LSE": True,
}


PARTS = {**{name: rows_named(name) for name in "qkv"}, "tables": TABLES_NAMED}


def _compile(
    kernel: Any,
    capability: int,
    constants: dict[str, Any],
    warps: int,
    codes: dict[str, str] | None = None,
    registers: int | None = None,
) -> Any:
    def type_of(argument: str) -> str:
        plain = POINTERS.get(argument, "*fp32") if argument.endswith("_ptr") else "i32"
        return (codes or {}).get(argument, "fp32" if argument == "scale" else plain)

    options = {} if registers is None else {"maxnreg": registers}
    return compile_for(
        capability, kernel, constants, type_of, parts=PARTS, num_warps=warps, **options
    )


def _turned(wide: int, *, is_small: bool) -> dict[str, int]:
    return dict(zip(("FAR", "NEAR"), TURNED["small" if is_small else "8 bits"][wide], strict=True))


def _attention(
    capability: int, depth: int, flags: dict[str, Any], value: str, shape: Shape | None = None
) -> tuple[Any, Shape]:
    from memeff_compile.kernels.quantized_attention import tiles_kernels

    kinds = {"has_tables": bool(flags["HAS_BOUNDS"]), "has_starts": bool(flags["STARTS"])}
    kinds["has_f16"] = value == "fp16"
    shape = shape or shape_for(depth, gpu_of(divmod(capability, 10)), **kinds)
    wide = depth_block(depth, NARROWEST)
    is_described = capability >= 90
    tiles = {
        "q_codes": ("i8", shape.rows, wide),
        "k_codes": ("i8", shape.keys, wide),
        "v_codes": (value, wide // shape.parts, shape.keys),
    }
    codes = {
        name: f"tensordesc<{kind}[{rows},{columns}]>" if is_described else f"*{kind}"
        for name, (kind, rows, columns) in tiles.items()
    }
    if flags["CODES_QUERIES"]:
        codes["q_codes"] = "*i8"
    constants = {
        "DEPTH": depth,
        "DEPTH_BLOCK": wide,
        **_turned(wide, is_small=flags["LIMIT"] == 15),
        "ROWS": shape.rows,
        "KEYS": shape.keys,
        "STAGES": shape.stages,
        "PARTS_OF_DEPTH": shape.parts,
        "KEY_BLOCK": BLOCK,
        "QUERY_BLOCK": BLOCK,
        "MAGIC_SUM": shape.magic or flags["STARTS"],
        "DESCRIBED": is_described,
        "EARLY": is_described,
        **flags,
    }
    kernel = tiles_kernels._quantized_attention_tiles_forward_kernel
    found = _compile(kernel, capability, constants, shape.warps, codes, shape.registers)
    return found, shape


def _tool(name: str, *arguments: object) -> str:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    ran = subprocess.run([tool, *map(str, arguments)], capture_output=True, text=True, check=True)
    return ran.stdout


def _check(capability: int, depth: int, flags: dict[str, Any]) -> None:
    level = "4b" if flags["LIMIT"] == 15 else "8b"
    settings = settings_for(level, has_fp8=capability >= 89, depth=depth)
    value = {"e4m3": "fp8e4nv", "f16": "fp16"}[settings.values]
    flags = {**flags, "HAS_REST": settings.restores}
    compiled, shape = _attention(capability, depth, flags, value)
    # Numbers of the prologue may wait outside of the registers; the loops are read below. With
    # values in parts a few more are fastest.
    few = 0 if shape.registers is None and depth <= WIDEST_E4M3 else 16
    ptx = within_limits(compiled, capability, 160 if shape.parts > 1 else few)
    assert re.search(r"s32\.s8\.s8(\.s32)?", ptx), "scores are no products of int8"
    if capability == 90:
        assert re.search(r"wgmma\S*s32\.s8\.s8", ptx)
        product = r"e4m3\.e4m3" if value == "fp8e4nv" else r"f16\.f16"
        assert re.search(rf"wgmma\S*f32\.{product}", ptx)
        assert "cp.async.bulk.tensor" in ptx, "tiles are not loaded by descriptors"
    elif shape.stages > 1 and capability < 90:
        assert "cp.async.cg.shared.global" in ptx, "tiles are not loaded ahead"


@pytest.mark.parametrize("depth", [*twice(64), 128])
def test_attention_compiles_within_the_limits(depth: int) -> None:
    _check(90, depth, PLAIN)


@pytest.mark.parametrize("capability", gpus(80, 89))
def test_older_gpus_are_served(capability: int) -> None:
    _check(capability, 128, PLAIN)


@pytest.mark.parametrize("depth", [64, pytest.param(128, marks=pytest.mark.slow)])
def test_scores_of_means_cost_no_more_than_a_sum_to_start_from(depth: int, tmp_path: Path) -> None:
    """In 4 bits: a multiply-add per score in the place of a constant, and no spill."""
    compiled, shape = _attention(90, depth, FOUR, "fp8e4nv")
    within_limits(compiled, 90, 8)
    loop = _loop(compiled, tmp_path)
    scores = shape.rows * shape.keys // (32 * shape.warps)
    assert loop.count("FFMA") <= 2 * scores + shape.rows * depth // (32 * shape.warps) + 16
    assert not {"LDL", "STL", "I2FP", "LDG"} & set(loop)


@pytest.mark.slow
@pytest.mark.parametrize("depth", [64, 96, 128, 256])
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_attention_compiles_within_the_limits_everywhere(capability: int, depth: int) -> None:
    for flags in (PLAIN, FOUR, EVERY, {**EVERY, "SCALE_PER_KEY": True}):
        _check(capability, depth, flags)


def _loop(compiled: Any, folder: Path) -> list[str]:
    """Return the opcodes of the loop over complete tiles, which comes first."""
    file = folder / "kernel.cubin"
    file.write_bytes(compiled.asm["cubin"])
    places: dict[str, int] = {}
    opcodes: list[str] = []
    for line in _tool("nvdisasm", "-c", file).splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            places[label[1]] = len(opcodes)
        elif found := re.search(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9]+)(.*);", line):
            opcodes.append(found[1])
            target = re.search(r"`\((\.L_x_\d+)\)", found[2])
            start = places.get(target[1], len(opcodes)) if target else len(opcodes)
            if found[1] == "BRA" and "QGMMA" in opcodes[start:]:
                return opcodes[start:]
    raise AssertionError("no loop with products of warp groups")


@pytest.mark.parametrize("depth", [pytest.param(64, marks=pytest.mark.slow), 128])
def test_a_score_costs_what_it_has_to(depth: int, tmp_path: Path) -> None:
    """Per score: one conversion, maximum, multiply-add, exponential and sum, half a rounding.

    Both products are of warp groups, weights move between threads in no shuffle but those of the
    row's maximum, sum and scale, and the sum over tiles is a multiply-add apart from tensor cores.
    """
    compiled, shape = _attention(90, depth, PLAIN, "fp8e4nv")
    loop = _loop(compiled, tmp_path)
    scores = shape.rows * shape.keys // (32 * shape.warps)
    sums = shape.rows * depth // (32 * shape.warps)
    counted = {name: loop.count(name) for name in set(loop)}
    assert counted["IGMMA"] >= 1
    assert not {"HMMA", "IMMA", "HGMMA", "LDL", "STL"} & set(counted)
    assert counted["MUFU"] <= scores + 4
    assert counted["FFMA"] <= scores + sums + 16
    assert counted["FMNMX"] <= scores + 8
    assert counted["FADD"] <= scores + 8
    assert counted.get("I2FP", 0) <= scores
    assert counted["F2FP"] <= scores // 2 + 2
    assert counted["SHFL"] <= 10
    assert counted.get("PRMT", 0) <= 4
    assert len(loop) <= 6.5 * scores + sums + 150


def _preparation(depth: int = 128, **changes: Any) -> dict[str, Any]:
    return {
        "LIMIT": 127,
        "KEY_STEPS": 1,
        **_turned(depth_block(depth, NARROWEST), is_small=changes.get("LIMIT") == 15),
        "CHANNELS": channels_together(depth_block(depth, NARROWEST)),
        "MEANS": MEANS,
        "DEPTH": depth,
        "DEPTH_BLOCK": depth_block(depth, NARROWEST),
        "BLOCK": BLOCK,
        "CHUNKS": MOST_CHUNKS,
        "SMOOTH_Q": False,
        "STARTS": bool(changes.get("SMOOTH_Q")),
        "ALIGN": not changes.get("SMOOTH_Q"),
        "COLUMNS": TOTAL_COLUMNS,
        "TOGETHER": TOTAL_BLOCKS,
        "SMOOTH_K": True,
        "SMOOTH_V": True,
        "HAS_KEY_MASK": False,
        "WITH_LSE": False,
        "UPCAST": False,
        "EARLY": False,
        "ROWS": BLOCK if changes.get("SMOOTH_Q") else QUERY_ROWS,
        "SAMPLE": 8,
        **changes,
    }


def _prepared(capability: int, depth: int, **changes: Any) -> list[Any]:
    """Compile the kernels of the preparation."""
    from memeff_compile.kernels.quantized_attention import prepare_kernels as kernels

    value = "*fp16" if capability < 89 or depth > WIDEST_E4M3 else "*fp8e4nv"
    flags = {"HAS_REST": value == "*fp8e4nv", "EARLY": capability >= 90}
    constants = _preparation(depth, **flags, **changes)
    wide = depth_block(depth, NARROWEST)
    width = max(1, wide // 128)
    launches = (
        (kernels._quantized_attention_prepare_look_kernel, LOOK_KEYS, LOOK_WARPS * width),
        (kernels._quantized_attention_prepare_settle_kernel, 0, SETTLE_WARPS),
        (kernels._quantized_attention_prepare_write_kernel, 0, write_warps(wide)),
        (kernels._quantized_attention_prepare_total_kernel, 0, TOTAL_WARPS),
        (kernels._quantized_attention_prepare_correct_kernel, 0, CORRECT_WARPS),
    )
    return [
        _compile(kernel, capability, {**constants, "KEYS": keys}, warps, {"v_codes_ptr": value})
        for kernel, keys, warps in launches
    ]


def _check_preparation(capability: int, depth: int, **changes: Any) -> None:
    for place, compiled in enumerate(_prepared(capability, depth, **changes)):
        # A few numbers may wait outside of the registers: 4 warps are faster than 8 without. Wide heads
        # have more of them, with 4 bits many, and so have means on 10.0.
        few = depth > 128 or (capability >= 100 and place == 4)
        wide = 384 if changes else 128
        ptx = within_limits(compiled, capability, wide if few else 16)
        assert place in (1, 3) or "ld.global.v4" in ptx or "cp.async" in ptx


def test_preparation_compiles_within_the_limits() -> None:
    _check_preparation(90, 128)


@pytest.mark.slow
@pytest.mark.parametrize("depth", [64, 128, 256])
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_preparation_compiles_within_the_limits_everywhere(capability: int, depth: int) -> None:
    changes = {"SMOOTH_Q": True, "WITH_LSE": True, "HAS_KEY_MASK": True, "LIMIT": 15}
    changes["KEY_STEPS"] = 8
    _check_preparation(capability, depth)
    _check_preparation(capability, depth, **changes)


@pytest.mark.usefixtures("sizes_of_one")
def test_numbers_that_are_one_compile() -> None:
    _attention(90, 64, {**EVERY, "SCALE_PER_KEY": True}, "fp8e4nv", Shape(64, 128, 4, 1))
    _attention(80, 64, EVERY, "fp16", Shape(64, 64, 4, 1))
    assert len(_prepared(90, 64, SMOOTH_Q=True, WITH_LSE=True, HAS_KEY_MASK=True)) == 5


def test_bounds_of_these_tiles_compile() -> None:
    """The kernel is attention's; its tiles are ours."""
    from memeff_compile.kernels._triton import key_tiles_kernels

    shape = shape_for(128, gpu_of((9, 0)), has_tables=True)
    constants = {
        **EVERY,
        "OURS": shape.rows,
        "OTHERS": shape.keys,
        "CHUNK": BOUNDS_CHUNK // shape.keys,
        "OURS_ARE_QUERIES": True,
        "MEAN": False,
        "FROM_LSE": False,
    }
    _compile(key_tiles_kernels._attention_key_tiles_bounds_kernel, 90, constants, BOUNDS_WARPS)
