"""`hopper` compiled for a GPU that is not there: no spills, shared memory in bounds."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.support.offline import (
    HOPPER,
    compile_for,
    shared_of,
    stack_bytes,
    stack_limit,
    twice,
    within_limits,
)

pytestmark = pytest.mark.offline

SLOW = pytest.mark.slow

INTEGERS = ("target_ptr", "order_ptr", "kept_ptr", "again_ptr", "counter_ptr", "owner_ptr")
HALVES = ("hidden_ptr", "weight_ptr", "bias_ptr", "x_ptr", "out_ptr", "grad_hidden_ptr")
OPTIONAL = {"bias_ptr": "HAS_BIAS", "again_ptr": "HAS_AGAIN", "said_ptr": "HAS_RANKS"}
EPILOGUES = {
    "plain": {"HAS_BIAS": False, "HAS_SOFTCAP": False},
    "softcap": {"HAS_BIAS": False, "HAS_SOFTCAP": True},
    "bias and softcap": {"HAS_BIAS": True, "HAS_SOFTCAP": True},
}


def _compile(name: str, constants: dict[str, Any], *, warps: int, stages: int) -> Any:
    from memeff_compile.kernels.linear_cross_entropy import hopper_kernels

    rows, columns, step = 128, constants.get("BN", 256), 64
    blocks = {
        "hidden_desc": (rows, step),
        "weight_desc": (columns, step) if name == "logits" else (step, columns),
        "x_desc": (rows, columns // 4),
        "x_by_column_desc": (step, rows),
        "x_by_row_desc": (rows, step),
        "scaled_desc": (step, columns),
        "grad_weight_desc": (rows, columns // 4),
    }

    def type_of(argument: str) -> str | None:
        if argument in OPTIONAL and not constants.get(OPTIONAL[argument], True):
            return None
        if argument in blocks:
            return f"tensordesc<bf16[{', '.join(map(str, blocks[argument]))}]>"
        if argument.endswith("_ptr"):
            kind = "i32" if argument in INTEGERS else "bf16" if argument in HALVES else "fp32"
            return f"*{kind}"
        return "fp32" if argument in ("scale", "softcap") else "i32"

    kernel = getattr(hopper_kernels, f"_linear_cross_entropy_hopper_{name}_kernel")
    return compile_for(HOPPER, kernel, constants, type_of, num_warps=warps, num_stages=stages)


FAST = (("bias and softcap", True),)
"""The most; the slow tests compile the rest."""


def _tiles(columns: int) -> dict[str, Any]:
    return {"BM": 128, "BN": columns, "BK": 64, "FLATTEN": True, "UPCAST": False}


@pytest.mark.parametrize(
    ("epilogue", "is_busy"),
    [
        pytest.param(
            *(epilogue, is_busy),
            id=f"{epilogue}-{'kept rows, again' if is_busy else 'all rows'}",
            marks=() if (epilogue, is_busy) in FAST else SLOW,
        )
        for epilogue in EPILOGUES
        for is_busy in (False, True)
    ],
)
def test_logits_compile_within_the_limits(epilogue: str, is_busy: bool) -> None:
    from memeff_compile.kernels.linear_cross_entropy.shapes import shapes_for_programs

    shapes = shapes_for_programs(132)
    columns = shapes.gradient_columns(is_plain=epilogue == "plain")
    constants = {
        **EPILOGUES[epilogue],
        **_tiles(columns),
        "GROUP": 16,
        "HAS_AGAIN": is_busy,
        "HAS_KEPT": is_busy,
    }
    compiled = _compile("logits", constants, warps=shapes.warps, stages=shapes.stages)
    ptx = within_limits(compiled, HOPPER)
    assert "wgmma.mma_async" in ptx
    assert "cp.async.bulk.tensor" in ptx


@pytest.mark.parametrize(
    "is_busy",
    [
        pytest.param(False, id="all rows, first", marks=SLOW),
        pytest.param(True, id="kept rows, adds"),
    ],
)
def test_products_compile_within_the_limits(is_busy: bool) -> None:
    constants = {
        **_tiles(256),
        "ADD": is_busy,
        "MAY_REST": is_busy,
        "HAS_KEPT": is_busy,
        "NEEDS_WEIGHT": True,
        "NEEDS_HIDDEN": True,
    }
    compiled = _compile("products", constants, warps=8, stages=3)
    assert compiled.metadata.shared <= shared_of(HOPPER)
    assert stack_bytes(compiled.asm["cubin"]) <= stack_limit(compiled)
    ptx = compiled.asm["ptx"]
    assert "wgmma.mma_async" in ptx
    assert "cp.async.bulk.tensor" in ptx
    # Programs count tiles with atomics; results are never added in varying order.
    assert {kind[-3:] for kind in re.findall(r"atom\.\S+", ptx)} == {"u32"}
    assert "cp.reduce" not in ptx


def _shared_addresses(ptx: str) -> tuple[set[int], set[int]]:
    """Return where barriers are made in shared memory, and where it is plainly read or written."""
    sums = re.findall(r"add\.s32\s+(%r\d+), %r\d+, (\d+);", ptx)
    where = {register: int(offset) for register, offset in sums}
    made = re.findall(r"mbarrier\.init\S* \[(%r\d+)\]", ptx)
    used = re.findall(r"(?:st|ld)\.shared\S*\s+\[\s*(%r\d+)(?: \+ 0)?\s*\]", ptx)
    fixed = {int(offset) for offset in re.findall(r"global_smem\+(\d+)\]", ptx)}
    barriers = {where[register] for register in made if register in where}
    return barriers, fixed | {where[register] for register in used if register in where}


@pytest.mark.parametrize("splits", [*twice(1), 3])
@pytest.mark.parametrize(
    ("sums", "is_busy", "depth"),
    [
        ("bf16", False, 4096),  # one block
        pytest.param("fp16", True, 1152, marks=SLOW),
        ("last of fp16", True, 4096),
        pytest.param("fp16", False, 4096, marks=SLOW),
        pytest.param("fp16", False, 1152, marks=SLOW),
        pytest.param("fp16", True, 4096, marks=SLOW),
        pytest.param("bf16", True, 4096, marks=SLOW),  # a filter's
    ],
)
def test_products_in_gluon_compile_within_the_limits(
    sums: str, is_busy: bool, depth: int, splits: int
) -> None:
    from memeff_compile.kernels._triton import specialized_products_kernels
    from memeff_compile.kernels.linear_cross_entropy.shapes import (
        SLICE,
        product_tile,
        shapes_for_programs,
    )

    shapes = shapes_for_programs(132)
    rows, columns = product_tile(depth, shapes)
    blocks = {
        "x_by_column_desc": (shapes.step, rows),
        "x_by_row_desc": (rows, shapes.step),
        "scaled_desc": (shapes.step, columns),
        "weight_desc": (shapes.step, columns),
        "grad_weight_desc": (rows, SLICE),
    }
    layout = (
        "NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2, transposed=False, "
        "fp4_padded=False, cga_layout=[])"
    )

    def type_of(argument: str) -> str | None:
        if argument in blocks:
            return f"tensordesc<bf16[{', '.join(map(str, blocks[argument]))}],{layout}>"
        if argument == "parts_ptr" and splits == 1:
            return None
        if argument == "scales_ptr":
            return None if sums == "bf16" else "*u8"
        kinds = {"grad_hidden_ptr": "*bf16", "row_scale_ptr": "*fp32", "parts_ptr": "*fp32"}
        return kinds.get(argument, "*i32" if argument.endswith("_ptr") else "i32")

    constants = {
        "ADD": is_busy,
        "MAY_REST": is_busy,
        "HAS_KEPT": is_busy,
        "HAS_PARTS": splits > 1,
        "HAS_SCALES": sums != "bf16",
        "LAST": sums == "last of fp16",
        "NEEDS_WEIGHT": True,
        "NEEDS_HIDDEN": True,
        "BM": rows,
        "BN": columns,
        "BK": shapes.step,
        "STAGES": shapes.stages,
        "WARPS": shapes.warps,
    }
    if splits == 1:
        constants["splits"] = 1
    compiled = compile_for(
        HOPPER,
        specialized_products_kernels._linear_cross_entropy_hopper_specialized_products_kernel,
        constants,
        type_of,
        num_warps=shapes.warps,
    )
    # Tiles of 256 rows whose sums are shared spill a few addresses.
    ptx = within_limits(compiled, HOPPER, stack=64 if rows == 256 else 0)
    assert "wgmma.mma_async" in ptx
    assert "cp.async.bulk.tensor" in ptx
    # A separate warp loads, and gives its registers to those that multiply.
    assert "setmaxnreg" in ptx
    barriers, read_or_written = _shared_addresses(ptx)
    assert len(barriers) == 2 * shapes.stages + 4 + 2 * is_busy
    # The number of a tile shared memory with an unused barrier, and was sometimes lost by programs
    # that started after those of another process.
    assert not barriers & read_or_written


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("base", {"BLOCK": 4096, "HAS_RANKS": False}),
        ("base", {"BLOCK": 4096, "HAS_RANKS": True}),
        ("loss", {"ROWS": 8, "TILES": 128, "FINAL": False, "HAS_RANKS": False}),
        ("loss", {"ROWS": 8, "TILES": 128, "FINAL": True, "HAS_RANKS": False}),
        ("loss", {"ROWS": 8, "TILES": 128, "FINAL": True, "HAS_RANKS": True}),
        ("ranks", {"ROWS": 8}),
        ("bias", {"BLOCK": 128, "ROWS": 64, "HAS_SCALE": True}),
    ],
    ids=str,
)
def test_helpers_compile_within_the_limits(name: str, sizes: dict[str, Any]) -> None:
    constants = {**sizes, **EPILOGUES["bias and softcap"], "HAS_KEPT": True}
    within_limits(_compile(name, constants, warps=4, stages=3), HOPPER)


@pytest.mark.usefixtures("sizes_of_one")
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("base", {"BLOCK": 16, "HAS_RANKS": True}),
        ("loss", {"ROWS": 8, "TILES": 128, "FINAL": True, "HAS_RANKS": True}),
        ("ranks", {"ROWS": 8}),
    ],
    ids=["base", "rows", "ranks"],
)
def test_helpers_over_ranks_compile_for_sizes_of_one(name: str, sizes: dict[str, Any]) -> None:
    """The second rank is one of them, and a group of one rank."""
    for is_busy in (False, True):
        constants = {**sizes, **EPILOGUES["bias and softcap"], "HAS_KEPT": is_busy}
        _compile(name, constants, warps=4, stages=3)


@pytest.mark.parametrize("kind", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("is_in_place", [False, True], ids=["copy", "in place"])
def test_scaling_compiles_within_the_limits(is_in_place: bool, kind: str) -> None:
    from memeff_compile.kernels._head_loss import scaling_kernels, shapes

    types = {"gradient_ptr": f"*{kind}", "out_ptr": f"*{kind}", "by_ptr": "*fp32", "count": "i32"}
    compiled = compile_for(
        HOPPER,
        scaling_kernels._head_loss_scaling_scale_kernel,
        {"IN_PLACE": is_in_place, "BLOCK": shapes.SCALED},
        types.get,
        lambda argument: argument == "count",
        num_warps=4,
    )
    ptx = within_limits(compiled, HOPPER)
    if kind == "bf16":
        assert "cvt.rn.bf16" in ptx
    assert re.search(r"ld\.global\S*\.v4\.b32", ptx)
    assert re.search(r"st\.global\S*\.v4\.b32", ptx)
    assert "ftz" not in ptx  # small numbers stay, as in PyTorch
    assert ("setp.eq.f32" in ptx or "setp.neu.f32" in ptx) == is_in_place
