"""A filter's kernels compiled for GPUs that are not there: no spills, room enough."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.support.offline import compile_for, gpus, within_limits

pytestmark = pytest.mark.offline

CAPABILITIES = gpus(80, 89, 90, 100, 120)
HALVES = ("sample_ptr", "packed_ptr", "weight_ptr", "grad_weight_ptr", "grad_hidden_ptr")
HALVES += ("hidden_ptr", "products_ptr")
FLOATS = ("base_ptr", "light_ptr", "share_ptr", "of_bias_ptr", "score_ptr", "part_ptr", "stats_ptr")
FLOATS += ("target_logit_ptr", "bias_part_ptr", "factor_ptr", "level_ptr", "scale_ptr", "nll_ptr")
FLOATS += ("at_target_ptr", "dropped_ptr", "values_ptr", "sums_ptr")
WIDTHS = {"word_ptr": "*i16", "column_order_ptr": "*i64", "rank_ptr": "*i64"}
PLAIN = {"HAS_BIAS": False, "HAS_KEPT": True, "HAS_SOFTCAP": False}
LEVELS = {"TILE": 128, "LEVELS": 32, "STEP": 0.3125}
HELPERS = {
    "sample": ({"BLOCK": 1024}, 4),
    "estimate": ({**PLAIN, "SAMPLE": 2048, "HAS_LSE": False, "SUMS": True, "BLOCK": 1024}, 8),
    "check": ({**PLAIN, "ROWS": 128}, 4),
    "level": ({**PLAIN, **LEVELS, "HAS_LSE": False, "RESTORE": True}, 4),
    "level of rows": ({**PLAIN, **LEVELS, "HAS_LSE": True, "RESTORE": True}, 4),
    "share": ({"BLOCK": 512}, 4),
    "word": ({"BLOCK": 512}, 4),
    "tile": ({"TILE": 128}, 1),
    "list": ({"BLOCK": 512}, 4),
    "rows": ({"HAS_KEPT": True, "BLOCK": 1024}, 4),
}
# Bytes of stack of the kernels whose epilogues keep all registers busy.
STACKS = {"score": 64, "fill": 32}


def _compile(capability: int, name: str, constants: dict[str, Any], *absent: str) -> Any:
    from memeff_compile.kernels._gradient_filter import filtered_kernels
    from memeff_compile.kernels._gradient_filter.shapes import filter_shapes_of

    shapes = filter_shapes_of(132, is_hopper=capability == 90)
    rows, columns, products, step = shapes[:4]
    more = {"score": shapes.scoring, "fill": shapes.filling, "products": shapes.multiplying}
    constants = {**constants, **(more[name]() if name in more else {})}
    options = {key: constants.pop(key) for key in list(constants) if key.startswith("num_")}
    blocks = {
        "hidden_desc": (rows, step),
        "weight_desc": (columns, step),
        "packed_by_row_desc": (rows, step),
        "packed_by_step_desc": (step, rows),
        "ranked_desc": (step, products),
    }

    def type_of(argument: str) -> str | None:
        if argument in absent:
            return None
        if argument in blocks:
            return f"tensordesc<bf16[{', '.join(map(str, blocks[argument]))}]>"
        if argument.endswith("_ptr"):
            kind = "bf16" if argument in HALVES else "fp32" if argument in FLOATS else "i32"
            return WIDTHS.get(argument, f"*{kind}")
        return "fp32" if argument in ("scale", "softcap", "highest", "limit") else "i32"

    kernel = getattr(filtered_kernels, f"_gradient_filter_{name}_kernel")
    aligned = ("depth",)
    return compile_for(
        *(capability, kernel, constants, type_of, lambda argument: argument in aligned), **options
    )


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("name", HELPERS)
def test_helpers_compile_within_the_limits(name: str, capability: int) -> None:
    constants, warps = HELPERS[name]
    absent = ("bias_ptr", *(("nll_ptr",) if constants.get("HAS_LSE") else ()))
    within_limits(
        _compile(capability, name.split()[0], {**constants, "num_warps": warps}, *absent),
        capability,
    )


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("has_again", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_scores_compile_within_the_limits(has_again: bool, capability: int) -> None:
    constants = {**PLAIN, **LEVELS, "SUMS": True, "HAS_AGAIN": has_again, "HAS_SHARE": False}
    constants |= {"NEEDS_BIAS": False, "WHOLE": False}
    absent = ["bias_ptr", "share_ptr", "of_bias_ptr", "bias_part_ptr"]
    absent += [] if has_again else ["again_ptr"]
    compiled = _compile(capability, "score", constants, *absent)
    ptx = within_limits(compiled, capability, stack=STACKS["score"])
    if capability == 90:
        assert "wgmma.mma_async" in ptx
        assert "cp.async.bulk.tensor" in ptx
    # No result depends on the order of programs.
    assert "atom." not in ptx


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_logits_of_tiles_compile_within_the_limits(capability: int) -> None:
    constants = {**PLAIN, "TILE": 128, "HAS_SHARE": False, "WHOLE": False}
    compiled = _compile(capability, "fill", constants, "bias_ptr", "share_ptr")
    ptx = within_limits(compiled, capability, stack=256 if capability == 100 else STACKS["fill"])
    # Rows of the weight are gathered ahead of the sum.
    assert "cp.async.c" in ptx


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(
    "needs",
    [
        (True, True),
        *(pytest.param(n, marks=pytest.mark.slow) for n in ((True, False), (False, True))),
    ],
    ids=str,
)
def test_products_compile_within_the_limits(needs: tuple[bool, bool], capability: int) -> None:
    constants = {"TILE": 128, "NEEDS_HIDDEN": needs[0], "NEEDS_WEIGHT": needs[1]}
    ptx = within_limits(_compile(capability, "products", constants), capability, stack=32)
    if capability == 90:
        assert "wgmma.mma_async" in ptx
        assert "cp.async.bulk.tensor" in ptx
    # Rows of the weight are gathered ahead of the sum.
    assert not needs[0] or "cp.async.cg" in ptx
    # Programs count tiles with atomics; results are never added in varying order.
    assert {kind[-3:] for kind in re.findall(r"atom\.\S+", ptx)} == {"u32"}
