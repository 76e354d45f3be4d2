"""The kernels of coded_kv_cache compiled for GPUs that are not there: no spills, memory in bounds."""

from __future__ import annotations

import re
import struct
from importlib import import_module
from typing import Any

import pytest

from memeff_compile.kernels._triton.gpus import gpu_of
from memeff_compile.kernels.coded_kv_cache import append_codes, split_codes
from memeff_compile.kernels.coded_kv_cache.layout import Pool, channel_group
from memeff_compile.kernels.coded_kv_cache.shapes import (
    MAX_SPLITS,
    halves_for,
    part_width,
    rows_for,
    shapes_for,
)
from tests.support.offline import (
    cells_named,
    compile_for,
    gpus,
    registers_of,
    twice,
    within_limits,
)

pytestmark = pytest.mark.offline

SLOW = pytest.mark.slow
STACK = 16
"""Bytes of stack that a launch may use: a register or two at the end of a program."""

POINTERS = {
    "k_codes_ptr": "*u8",
    "v_codes_ptr": "*u8",
    "places_ptr": "*i32",
    "counts_ptr": "*i64",
    "mask_ptr": "*u8",
    "share_ptr": "*fp32",
    "stat_ptr": "*fp32",
    "turned_ptr": "*fp32",
    "slots_ptr": "*i32",
}
PARTS = {
    "pool": Pool(*(f"{name}_ptr" for name in Pool._fields)),
    "q": ("q_ptr", "stride_q_batch", "stride_q_head", "stride_q_depth"),
    "mask": ("mask_ptr", "stride_mask_batch", "stride_mask_key"),
    "maps": ("means_ptr", "turned_ptr", "slots_ptr"),
}
SIZES = {
    **dict.fromkeys(
        ("_coded_kv_cache_append_codes_rows_kernel", "_coded_kv_cache_append_codes_groups_kernel"),
        ("kv_heads", "groups", "new", "limit"),
    ),
    "_coded_kv_cache_split_codes_attention_kernel": (
        *("kv_heads", "groups", "norm_count", "mask_count", "splits", "stat_count"),
    ),
    "_coded_kv_cache_split_codes_turn_kernel": ("heads", "repeat"),
    "_coded_kv_cache_split_codes_combine_turned_kernel": (
        "merged",
        "exact",
        "repeat",
        "stat_count",
    ),
}
UNIT_STRIDES = ("stride_q_depth", "stride_k_depth", "stride_v_depth", "stride_mask_key")


def _compile(
    module: str, name: str, capability: int, dtype: str, given: dict[str, Any], warps: int
) -> Any:
    aligned = {"means_ptr": "IS_ALIGNED", "turned_ptr": "IS_TURNED", "slots_ptr": "IS_TURNED"}

    def type_of(argument: str) -> str | None:
        if not given.get(aligned.get(argument, ""), True):
            return None
        if argument.endswith("_ptr"):
            return POINTERS.get(argument, f"*{dtype}")
        return "fp32" if argument == "scale" else "i32"

    kernel = getattr(import_module(f"memeff_compile.kernels.coded_kv_cache.{module}"), name)
    return compile_for(
        capability,
        kernel,
        # The launcher passes a stride of one, which Triton makes a constant.
        {**given, **dict.fromkeys(UNIT_STRIDES, 1)},
        type_of,
        lambda argument: argument.startswith(("stride_q", "stride_k", "stride_v")),
        parts={
            **PARTS,
            **{name: cells_named(name) for name in "kv"},
            "sizes": SIZES.get(name, ()),
        },
        num_warps=warps,
    )


def _attention(
    capability: int,
    dtype: str,
    depth: int,
    bits: int,
    scheme: str = "kivi",
    *,
    group: int = 64,
    kept: int = 4,
    has_mask: bool = False,
    has_norms: bool = False,
    aligned: str = "",
    splits: int = 4,
    repeat: int = 4,
    value_bits: int | None = None,
    kinds: int = 2,
) -> Any:
    of_values = bits if value_bits is None else value_bits
    most = max(bits, of_values)
    shapes = shapes_for(depth, most, repeat, gpu_of(divmod(capability, 10)))
    channels = channel_group(depth, scheme)
    constants = {
        "REPEAT": repeat,
        "DEPTH": depth,
        "ROWS": rows_for(repeat),
        "BITS": bits,
        "V_BITS": of_values,
        "GROUP": group,
        "CHANNELS": channels,
        "WIDTH": part_width(depth, of_values, channels),
        "WINDOW": 192,
        "WINDOW_TILE": 64,
        "KEPT": kept,
        "KEPT_TILE": 16,
        "IS_PER_HEAD": scheme == "per_head",
        "HAS_NORMS": has_norms or (bool(aligned) and kinds == 2),
        "HAS_VALUE_NORMS": kinds == 1,
        "KINDS": kinds,
        "TOGETHER": True,
        "HAS_MASK": has_mask,
        "IS_ALONE": splits == 1 and aligned != "upper",
        "IS_ALIGNED": bool(aligned),
        "IS_TURNED": aligned == "upper",
        "STAGES": shapes.stages,
        "AT_ONCE": shapes.at_once,
        "HALVES": halves_for(repeat, most),
        "PACKED": True,
        "UPCAST": False,
    }
    return _compile(
        "split_codes_kernels",
        "_coded_kv_cache_split_codes_attention_kernel",
        capability,
        dtype,
        constants,
        shapes.warps,
    )


def _append(
    capability: int,
    dtype: str,
    depth: int,
    bits: int,
    scheme: str = "kivi",
    tokens: int = 1,
    *,
    is_new: bool = False,
) -> Any:
    share = max(1, min(append_codes.NEW_GROUPS[0], depth // 32))
    constants = {
        "DEPTH": depth,
        "BITS": bits,
        "V_BITS": bits,
        "GROUP": 64,
        "CHANNELS": channel_group(depth, scheme),
        "WINDOW": 192,
        "KEPT": 4,
        "TOKENS": tokens,
        "PIECES": append_codes.cut(bits, depth)[0] if tokens == 1 else share if is_new else 1,
        "IS_PER_HEAD": scheme == "per_head",
        "IS_FAST": True,
        "CODES_VALUES": True,
    }
    warps = append_codes.cut(bits, depth)[1] if tokens == 1 else append_codes.WARPS
    name = (
        "_coded_kv_cache_append_codes_groups_kernel"
        if is_new
        else "_coded_kv_cache_append_codes_rows_kernel"
    )
    warps = append_codes.NEW_GROUPS[1] if is_new else warps
    return _compile("append_codes_kernels", name, capability, dtype, constants, warps)


def _combine(capability: int, depth: int, splits: int) -> Any:
    constants = {"DEPTH": depth, "SPLIT_BLOCK": 1 << (splits - 1).bit_length()}
    return _compile(
        "split_codes_kernels",
        "_coded_kv_cache_split_codes_combine_kernel",
        capability,
        "bf16",
        constants,
        4,
    )


def _turn(capability: int, depth: int, splits: int | None = None) -> Any:
    """Compile the kernel that turns queries or, with splits, the one that turns results back."""
    at_once = 1 if splits == MAX_SPLITS else 4  # where there are many shares, there are few maps
    constants = {"DEPTH": depth, "CHUNK": split_codes.CHUNK, "AT_ONCE": at_once}
    if splits is None:
        name = "_coded_kv_cache_split_codes_turn_kernel"
    else:
        name = "_coded_kv_cache_split_codes_combine_turned_kernel"
        constants["KINDS"] = 2
        exact = 1 << (splits - 1).bit_length()
        constants |= {"MERGED_BLOCK": 2 * exact, "EXACT_BLOCK": exact}
    return _compile("split_codes_kernels", name, capability, "bf16", constants, 4)


CASES = [
    *[("bf16", 128, bits, "kivi", {}) for bits in (8, 4, 3, 2)],
    *[("bf16", 128, bits, "per_head", {}) for bits in (4, 3)],
    ("bf16", 64, 4, "kivi", {"has_mask": True}),
    ("bf16", 256, 4, "kivi", {}),
    ("bf16", 128, 4, "kivi", {"has_norms": True, "has_mask": True}),
    ("bf16", 128, 4, "kivi", {"splits": 1, "kept": 0}),
    ("bf16", 128, 4, "kivi", {"repeat": 12}),
    ("fp16", 128, 4, "kivi", {}),
]
ALIGNED = [
    ("bf16", 128, 4, "kivi", {"aligned": "upper", "has_mask": True, "kept": 332}),
    ("bf16", 128, 3, "kivi", {"aligned": "upper", "has_mask": True, "kept": 332}),
    ("bf16", 128, 4, "kivi", {"aligned": "lower", "has_mask": True, "kept": 332}),
    ("bf16", 256, 4, "kivi", {"aligned": "upper", "has_mask": True}),
    ("bf16", 64, 2, "kivi", {"aligned": "upper", "repeat": 12}),
]
VALUES = [
    ("bf16", 128, 3, "kivi", {"value_bits": 2, "kinds": 1, "aligned": "upper", "has_mask": True}),
    ("bf16", 64, 4, "kivi", {"kinds": 1, "aligned": "lower", "has_mask": True}),
    ("bf16", 128, 3, "kivi", {"value_bits": 2, "has_mask": True}),
]
SMALLER = (0, 2, 4, 9)
"""Forms whose parts are in the others: shifts of codes, one split, a scale per head."""


@pytest.mark.parametrize(
    ("capability", "dtype", "depth", "bits", "scheme", "more"),
    [
        *[
            pytest.param(90, *case, marks=SLOW if place in (1, 3, 5, 6, 7, 10, 11) else ())
            for place, case in enumerate(CASES)
            if place not in SMALLER
        ],
        *twice(90, *CASES[2]),
        *[pytest.param(90, *CASES[place], marks=SLOW) for place in SMALLER if place != 2],
        *twice(80, *CASES[7]),
        *[pytest.param(80, *CASES[place], marks=SLOW) for place in (1, 3, 8)],
        *[pytest.param(100, *CASES[place], marks=SLOW) for place in (1, 3, 7, 8)],
        *twice(90, *ALIGNED[0]),
        *twice(90, *VALUES[0]),
        *[pytest.param(90, *case, marks=SLOW) for case in (*ALIGNED[1:], *VALUES[1:])],
        *[pytest.param(each, *case, marks=SLOW) for each in (80, 100) for case in ALIGNED[:2]],
    ],
    ids=str,
)
def test_attention_compiles_within_the_limits(
    capability: int,
    dtype: str,
    depth: int,
    bits: int,
    scheme: str,
    more: dict[str, Any],
) -> None:
    kernel = _attention(capability, dtype, depth, bits, scheme, **more)
    ptx = kernel.asm["ptx"]
    within_limits(kernel, capability, stack=STACK)
    assert "atom." not in ptx
    assert "cp.async.cg.shared.global" in ptx, "codes are not loaded ahead"
    assert re.search(r"mma\.sync|wgmma|tcgen05\.mma", ptx), "no tensor cores"


@pytest.mark.parametrize(
    ("tokens", "depth", "bits", "scheme"),
    [
        *[(1, 128, 4, "per_head"), *twice(1, 256, 2, "kivi")],
        *[*twice(1, 128, 3, "kivi"), *twice(64, 128, 8, "kivi")],
        *[pytest.param(1, 128, bits, "kivi", marks=SLOW) for bits in (8, 4)],
        *[pytest.param(64, 128, bits, "kivi", marks=SLOW) for bits in (4, 3)],
        pytest.param(64, 128, 4, "per_head", marks=SLOW),
        pytest.param(64, 256, 2, "kivi", marks=SLOW),
    ],
)
@pytest.mark.parametrize("capability", [90])
def test_append_compiles_within_the_limits(
    capability: int, depth: int, bits: int, scheme: str, tokens: int
) -> None:
    kernel = _append(capability, "bf16", depth, bits, scheme, tokens)
    within_limits(kernel, capability)


@pytest.mark.parametrize(
    ("depth", "bits", "scheme"),
    [
        (128, 4, "kivi"),
        *[pytest.param(128, bits, "kivi", marks=SLOW) for bits in (8, 3, 2)],
        pytest.param(128, 4, "per_head", marks=SLOW),
        *[pytest.param(depth, 2, "kivi", marks=SLOW) for depth in (64, 256)],
    ],
)
def test_coding_new_groups_leaves_room_for_several_programs(
    depth: int, bits: int, scheme: str
) -> None:
    kernel = _append(90, "bf16", depth, bits, scheme, 64, is_new=True)
    within_limits(kernel, 90)
    # Of 65,536 for three programs of 128 threads each, or two where rows are twice as wide.
    assert registers_of(kernel.asm["cubin"]) <= (168 if depth <= 128 else 255)


@pytest.mark.parametrize(("depth", "splits"), [(64, 2), (128, MAX_SPLITS), (256, 5)])
@pytest.mark.parametrize("capability", gpus(80, 90))
def test_combine_compiles_within_the_limits(capability: int, depth: int, splits: int) -> None:
    kernel = _combine(capability, depth, splits)
    within_limits(kernel, capability)
    assert "atom." not in kernel.asm["ptx"]


@pytest.mark.parametrize(("depth", "splits"), [(128, MAX_SPLITS), (256, 5), (128, None)])
@pytest.mark.parametrize("capability", gpus(80, 90, 100))
def test_turning_compiles_within_the_limits(
    capability: int, depth: int, splits: int | None
) -> None:
    kernel = _turn(capability, depth, splits)
    within_limits(kernel, capability)
    assert "atom." not in kernel.asm["ptx"]


@pytest.mark.usefixtures("sizes_of_one")
def test_kernels_compile_for_sizes_of_one() -> None:
    _attention(90, "bf16", 128, 4, has_mask=True, has_norms=True)
    _append(90, "bf16", 128, 4)
    _append(90, "bf16", 128, 4, tokens=64)
    _combine(90, 128, 4)
    _turn(90, 128)
    _turn(90, 128, 4)


def _run(code: str, *words: int) -> int:
    """Return the result of `_take_two`'s instructions for 32-bit words."""
    registers = {f"${place}": word for place, word in enumerate(words, 1)}

    def read(name: str) -> int:
        return registers[name] if name in registers else int(name, 0)

    for line in code.strip("{} ").strip(";").split(";"):
        operation, _, rest = line.strip().partition(" ")
        names = [name.strip() for name in rest.split(",")]
        if operation in ("shr.b32", "shl.b32"):
            shift = read(names[2])
            value = read(names[1])
            registers[names[0]] = value >> shift if operation[2] == "r" else value << shift
        elif operation == "and.b32":
            registers[names[0]] = read(names[1]) & read(names[2])
        elif operation == "lop3.b32":
            assert int(names[4], 0) == (0xF0 & 0xCC) | 0xAA, "not (a and b) or c"
            registers[names[0]] = read(names[1]) & read(names[2]) | read(names[3])
        else:
            assert operation == ".reg", f"{operation} is not known"
        registers = {name: value & 0xFFFFFFFF for name, value in registers.items()}
    return registers["$0"]


def _number(word: int, half: int) -> float:
    """Return the bf16 number in half of a 32-bit word."""
    found: float = struct.unpack("<f", struct.pack("<I", (word >> (16 * half) & 0xFFFF) << 16))[0]
    return found


@pytest.mark.parametrize("bits", [8, 4, 3, 2])
def test_the_instructions_that_unpack_make_very_small_numbers_of_the_codes(bits: int) -> None:
    """Each byte of each half of a word, every part: bf16 numbers gain * code * 2 ** -133."""
    import random

    from memeff_compile.kernels.coded_kv_cache import split_codes_kernels as kernels

    draw = random.Random(0)
    apart = 2 if bits == 3 else bits
    for _ in range(200):
        word, high = draw.getrandbits(32), draw.getrandbits(32)
        for part in range(8 // apart):
            gain = (1, 4, 16, 16)[part] if bits == 3 else 2 ** (part * apart)
            for byte in range(2):
                found = _run(kernels._take_two(bits, part, byte), word, high)
                for half in range(2):
                    place = 16 * half + 8 * byte
                    wanted = word >> (place + part * apart) & (2**apart - 1)
                    if bits == 3:
                        wanted |= (high >> (place + (2 * part + 2) % 8) & 1) << 2
                    assert _number(found, half) == gain * wanted * 2.0**-133


def test_the_second_high_bits_are_moved_to_where_the_first_ones_are() -> None:
    from memeff_compile.kernels.coded_kv_cache import split_codes_kernels as kernels

    for place in (1, 3, 5, 7, 9, 11, 13, 15, 17, 31):
        assert _run(kernels._SECOND.value, 1 << place) == 1 << (place - 1)
