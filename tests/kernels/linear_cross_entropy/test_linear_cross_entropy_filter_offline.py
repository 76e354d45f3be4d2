"""The filter on pieces of `hopper` compiled for GPUs that are not there: no spills, room enough."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.support.offline import compile_for, gpus, within_limits

pytestmark = pytest.mark.offline

CAPABILITIES = gpus(80, 90, 100)
HALVES = ("x_ptr", "packed_ptr", "weight_ptr", "grad_weight_ptr", "grad_hidden_ptr", "hidden_ptr")
HALVES += ("ranked_ptr",)
FLOATS = ("part_ptr", "level_ptr", "score_ptr", "sums_ptr", "stats_ptr", "base_ptr", "light_ptr")
FLOATS += ("inverse_ptr", "dropped_ptr", "row_scale_ptr", "row_values_ptr", "lost_ptr", "stays_ptr")
FLOATS += ("rest_ptr", "restore_ptr")
WIDTHS = {"word_ptr": "*i16", "column_order_ptr": "*i64"}
LEVELS = {"TILE": 128, "LEVELS": 32, "STEP": 0.3125}
STRIPS = {"BLOCK": 64, "STAGES": 3, "UPCAST": False}
HELPERS = {
    "weigh": ({"HAS_KEPT": True, "ROWS": 8, "TILES": 128}, 4),
    "weigh_rows": ({"HAS_KEPT": True, "BLOCK": 4096}, 4),
    "rank": ({"BLOCK": 16, "OTHERS": 256}, 4),
    "score": ({**LEVELS, **STRIPS, "SUMS": True}, 4),
    "score by the most": ({**LEVELS, **STRIPS, "LEVELS": 16, "STEP": 0.0, "SUMS": False}, 4),
    "level": ({**LEVELS, "SOME": 8, "CHUNKS": 8}, 4),
    "word": ({**LEVELS, "BLOCK": 512}, 4),
    "tile": ({"TILE": 128}, 1),
    "list": ({"BLOCK": 512}, 4),
    "pack": ({"TILE": 128, "BLOCK": 64, "STRIPS": 4}, 4),
    "restore": ({"TILE": 128, "ROWS": 8, "PARTS": 128, "BLOCK": 256}, 4),
    "rows": ({"BLOCK": 1024}, 4),
}


def _compile(capability: int, name: str, constants: dict[str, Any], warps: int, stages: int) -> Any:
    from memeff_compile.kernels.linear_cross_entropy import gradient_filter_kernels

    columns = constants.get("BN", 128)
    blocks = {
        "packed_by_step_desc": (64, 128),
        "packed_by_tile_desc": (128, 64),
        "ranked_desc": (64, columns),
    }

    def type_of(argument: str) -> str | None:
        if argument in blocks:
            return f"tensordesc<bf16[{', '.join(map(str, blocks[argument]))}]>"
        if argument.endswith("_ptr"):
            kind = "bf16" if argument in HALVES else "fp32" if argument in FLOATS else "i32"
            return WIDTHS.get(argument, f"*{kind}")
        return "fp32" if argument in ("scale", "highest", "limit") else "i32"

    name = name.split()[0]
    kernel = getattr(gradient_filter_kernels, f"_linear_cross_entropy_filter_{name}_kernel")
    aligned = ("depth", "width", "columns_here")
    return compile_for(
        *(capability, kernel, constants, type_of, lambda argument: argument in aligned),
        num_warps=warps,
        num_stages=stages,
    )


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("name", HELPERS)
def test_helpers_compile_within_the_limits(name: str, capability: int) -> None:
    constants, warps = HELPERS[name]
    ptx = within_limits(_compile(capability, name, constants, warps, 3), capability)
    # The next scores are being loaded.
    assert not name.startswith("score") or "cp.async" in ptx
    # X is multiplied where it lies in shared memory.
    assert (
        not name.startswith("score")
        or capability != 90
        or "ldmatrix.sync.aligned.m8n8.x4" not in ptx
    )
    # A column of a block is written as one run.
    assert name != "pack" or re.search(r"st\.global\.v4\.b32", ptx)


@pytest.mark.parametrize("needs", [(True, True), (True, False), (False, True)], ids=str)
def test_products_compile_within_the_limits(needs: tuple[bool, bool]) -> None:
    from memeff_compile.kernels.linear_cross_entropy.shapes import (
        filter_constants,
        filter_shapes,
        shapes_for_programs,
    )

    shapes = filter_shapes(shapes_for_programs(132))
    constants = {"NEEDS_HIDDEN": needs[0], "NEEDS_WEIGHT": needs[1]}
    constants |= filter_constants(shapes)
    ptx = within_limits(_compile(90, "products", constants, shapes.warps, shapes.stages), 90)
    assert "wgmma.mma_async" in ptx
    assert "cp.async.bulk.tensor" in ptx
    # Rows of the weight are gathered ahead of the sum.
    assert not needs[0] or "cp.async.cg" in ptx
    # Programs count tiles with atomics; results are never added in varying order.
    assert {kind[-3:] for kind in re.findall(r"atom\.\S+", ptx)} == {"u32"}
