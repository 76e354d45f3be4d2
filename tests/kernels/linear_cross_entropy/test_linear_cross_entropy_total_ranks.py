"""Walks over the parts of one weight that meet per piece: together they are the walk over it all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from memeff_compile.errors import TargetRangeError, UnsupportedInputError
from memeff_compile.kernels._head_loss import ranks as exchange
from memeff_compile.kernels._head_loss.call import ScalarLoss
from memeff_compile.kernels.linear_cross_entropy import (
    Shard,
    linear_cross_entropy_total_shard,
    makes_gradients_in_forward,
    makes_gradients_in_forward_over_ranks,
    rows_of_a_block,
    vocabulary_parallel,
    walk,
)
from memeff_compile.kernels.linear_cross_entropy import (
    hopper as hopper_module,
)
from tests.kernels.linear_cross_entropy.engines import Found, hopper, reference
from tests.kernels.linear_cross_entropy.meeting import (
    IGNORED,
    Engine,
    Meeting,
    assert_close,
    cast_to,
    hostile,
    loss_of,
    part_of,
    together,
    whole,
)

CASES: dict[str, dict[str, Any]] = {
    "all count": {},
    "half ignored": {"ignored": 0.5},
    "all ignored": {"ignored": 1.0},
    "none is ignored": {"ignore_index": None},
    "softcap": {"softcap": 3.0, "ignored": 0.3},
    "all on the first rank": {"highest": 3},
    "all on the last rank": {"lowest": 38},
    "one row": {"rows": 1},
    "an automatic workspace": {"workspace": 0, "ignored": 0.3},
}


@pytest.mark.parametrize("engine", [reference.total, reference.in_two_walks])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize(
    "cuts",
    [
        pytest.param([(1, 40), (2, 41), (3, 41), (4, 40)], id="alike or not"),
        pytest.param([(1, 41), (2, 40), (3, 40), (4, 41)], id="the rest", marks=pytest.mark.slow),
    ],
)
def test_parts_of_a_weight_are_the_whole_head(
    cuts: list[tuple[int, int]], case: dict[str, Any], engine: Engine
) -> None:
    for count, vocab in cuts:
        given = loss_of(**{"vocab": vocab} | case)
        found, met = together(given, *count * [engine])
        assert_close(found, whole(given), 1e-12)
        how = {"depth": 8, "dtype": torch.float64, "device": torch.device("cpu")}
        how |= {"workspace": given.workspace, "has_softcap": given.softcap > 0}
        rows = given.target.numel()
        assert met == -(-rows // rows_of_a_block(rows, Shard(0, count, vocab), **how))


def test_row_weights_count_and_a_sum_needs_no_norm() -> None:
    given = loss_of(ignored=0.3)
    weights = torch.rand(37, dtype=torch.float64) * (given.target != IGNORED)
    given = given._replace(row_weight=weights, norm=None)
    for engine in (reference.total, reference.in_two_walks):
        assert_close(together(given, engine, engine)[0], whole(given), 1e-12)


@pytest.mark.parametrize("given", list(hostile()))
def test_ranks_with_nothing_of_a_row_give_what_one_process_does(given: ScalarLoss) -> None:
    for engine in (reference.total, reference.in_two_walks):
        assert_close(together(given, engine, engine)[0], whole(given), 1e-12)


def test_a_row_of_nan_stays_in_its_row() -> None:
    given = loss_of()
    given.hidden[3] = torch.nan
    for engine in (reference.total, reference.in_two_walks):
        (value, of_hidden, *_), _ = together(given, engine, engine)
        assert value.isnan()
        assert of_hidden[3].isnan().all()
        assert not of_hidden[[0, 1, 2, *range(4, 37)]].isnan().any()


def test_ranks_meet_as_often_whatever_their_targets() -> None:
    """A piece of which no row counts is met over all the same."""
    given, meeting = loss_of(), Meeting(2)

    def walk(rank: int) -> Found:
        mine = given
        if rank == 1:
            mine = given._replace(target=torch.full_like(given.target, IGNORED))
        shard = Shard(rank, 2, 41)
        return reference.total(part_of(mine, shard, lambda said: meeting.gather(rank, said)))

    meeting.run(walk)
    assert len(meeting.sizes[0]) == 37


def test_a_column_of_a_target_elsewhere_is_never_taken_for_an_ignored_one() -> None:
    """Ranks of more than a hundred classes, of which some would be written as -100."""
    given = loss_of(64, 230, lowest=200, highest=220)
    local = part_of(given, Shard(0, 2, 230), None)
    assert bool((local.target == exchange.ELSEWHERE - 98).any())
    column, here, elsewhere = exchange.own_columns(local.target)
    assert bool(elsewhere.all())
    assert not here.any()
    assert bool(((column >= 0) & (column < 115)).all())
    assert_close(together(given, *2 * [reference.total])[0], whole(given), 1e-12)


def test_pieces_follow_from_nothing_that_a_rank_has_for_itself() -> None:
    cuda, how = torch.device("cuda"), {"depth": 4096, "dtype": torch.bfloat16, "workspace": 0}
    for rows, classes, count in ((8192, 128256, 2), (8192, 128257, 3), (5000, 50257, 4)):
        heights = {
            rows_of_a_block(rows, Shard(rank, count, classes), device=cuda, **how)
            for rank in range(count)
        }
        assert len(heights) == 1
        assert heights.pop() % 128 == 0  # whole tiles of `hopper`
    assert rows_of_a_block(8192, Shard(0, 2, 128256), device=cuda, **how) == 4096


def test_which_form_is_taken_depends_on_no_kind_of_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def asked(*_: object, **__: object) -> Any:
        raise AssertionError("a rank's own")

    for name in ("is_faster_in_one_walk", "kernels_serve"):
        monkeypatch.setattr(walk, name, asked)
    monkeypatch.setattr(walk, "engine_for", asked)
    decide, cuda = makes_gradients_in_forward_over_ranks, torch.device("cuda")
    assert decide(cuda, torch.bfloat16, 64)
    assert not decide(cuda, torch.bfloat16, 63)
    assert not decide(cuda, torch.float32, 64)
    assert not decide(cuda, torch.bfloat16, 64, gradient_filter="mass")
    assert not decide(cuda, torch.bfloat16, 64, workspace=1 << 20)
    assert decide(torch.device("cpu"), torch.float32, 63)
    assert not decide(torch.device("cpu"), torch.float16, 64)
    with pytest.raises(AssertionError, match="own"):
        makes_gradients_in_forward(cuda, torch.bfloat16, 64)


SETTINGS = {
    "group": "nobody",
    "ignore_index": IGNORED,
    "scale": 1.0,
    "softcap": 0.0,
    "workspace": 0,
    "output_mask": [True, True, False],
}


def operands(*targets: int) -> list[Any]:
    return [torch.zeros(2, 8), torch.zeros(20, 8), None, torch.tensor(targets), None, None]


def test_what_ranks_cannot_share_is_refused_before_they_meet() -> None:
    counts, settings = torch.tensor([2, 2]), SETTINGS | Shard(0, 2, 40)._asdict()
    with pytest.raises(UnsupportedInputError, match=r"different numbers of rows \(2, 3\)"):
        linear_cross_entropy_total_shard(*operands(3, 39), torch.tensor([2, 3]), **settings)
    with pytest.raises(TargetRangeError, match=r"holds 40 \(row 1\); columns run from 0 to 39"):
        linear_cross_entropy_total_shard(*operands(3, 40), counts, **settings)
    given, wrong = operands(3, 39), SETTINGS | Shard(1, 2, 41)._asdict()
    given[1] = torch.zeros(21, 8)
    with pytest.raises(UnsupportedInputError, match="rank 1 of 2 with 41 classes holds 20"):
        linear_cross_entropy_total_shard(*given, counts, **wrong)


def test_no_rows_meet_nobody() -> None:
    settings = SETTINGS | Shard(1, 2, 40)._asdict()
    given = operands()
    given[0] = torch.zeros(0, 8)
    given[3] = torch.zeros(0, dtype=torch.int64)
    value, of_hidden, of_weight, _ = linear_cross_entropy_total_shard(
        *given, torch.tensor([0, 0]), **settings
    )
    assert value == 0
    assert of_hidden.shape == (0, 8)
    assert not of_weight.any()


def on_a_gpu(given: ScalarLoss) -> Found:
    """Stands for the reference where looking at targets would wait for the GPU."""
    return reference.total(given._replace(filter_level=1.0))


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    kept_rows = walk.kept_rows

    def kept(target: Tensor, knobs: Any, *, forward: bool) -> Tensor | None:
        return None if knobs.filter_level else kept_rows(target, knobs, forward=forward)

    monkeypatch.setattr(reference.module, "kept_rows", kept)


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize("ignored", [0.0, 0.4, 1.0])
def test_engines_have_rows_in_one_order(ignored: float) -> None:
    """Whether they leave ignored ones out, compute them last, or all rows before the first meeting."""
    given = loss_of(ignored=ignored, workspace=5 * 8 * 14)
    found, met = together(given, reference.total, reference.in_two_walks, on_a_gpu)
    assert met == 8
    assert_close(found, whole(given), 1e-12)


# --- `hopper`, in the interpreter ---------------------------------------------------------------


@pytest.fixture
def tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of one tile of the interpreter's."""
    monkeypatch.setattr(vocabulary_parallel, "rows_of_a_block", lambda *_, **__: 32)


INTERPRETED: dict[str, dict[str, Any]] = {
    "all count": {},
    "half ignored": {"ignored": 0.5},
    "bias and softcap": {"softcap": 3.0, "ignored": 0.3},
    "none is ignored": {"ignore_index": None},
    "all on one rank": {"highest": 30},
    "one row": {"rows": 1},
}


@pytest.mark.interpreter
@pytest.mark.usefixtures("tiles", "nan_filled_empty")
@pytest.mark.parametrize(
    ("case", "count"),
    [
        pytest.param(
            case,
            count,
            id=f"{name}-{count}",
            # The loop over ranks is the same.
            marks=[] if count == 3 or (count, case) == (2, {}) else pytest.mark.slow,
        )
        for name, case in INTERPRETED.items()
        for count in (2, 3, 4)
    ],
)
def test_hopper_of_every_rank_gives_the_whole_head(case: dict[str, Any], count: int) -> None:
    given = loss_of(**{"rows": 50, "vocab": 189, "dtype": torch.float32} | case)
    found, met = together(given, *count * [hopper.total])
    assert_close(found, whole(given), 1e-5)
    assert met == -(-given.target.numel() // 32)


@pytest.mark.interpreter
@pytest.mark.usefixtures("tiles")
def test_hopper_in_bf16() -> None:
    """The interpreter cuts off where a GPU rounds."""
    given = loss_of(50, 189, torch.bfloat16, ignored=0.3)
    assert_close(together(given, *3 * [hopper.total])[0], whole(given), 1e-2)


@pytest.mark.interpreter
@pytest.mark.usefixtures("tiles")
def test_all_ignored_in_hopper() -> None:
    given = loss_of(50, 189, torch.float32, ignored=1.0)
    (value, *gradients), met = together(given, *2 * [hopper.total])
    assert value.isnan()
    assert met == 2
    assert not any(part.any() for part in gradients)


@pytest.mark.interpreter
@pytest.mark.usefixtures("tiles", "gpus")
def test_ranks_may_have_engines_of_their_own() -> None:
    """`hopper`, one that recomputes and the reference say the same in the same order."""
    given = loss_of(70, 189, torch.float32, ignored=0.3)
    engines = (hopper.total, reference.in_two_walks, on_a_gpu)
    assert_close(together(given, *engines)[0], whole(given), 1e-5)


@pytest.mark.interpreter
@pytest.mark.usefixtures("tiles", "nan_filled_empty")
@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16], ids=str
)
@pytest.mark.parametrize("given", list(hostile()))
def test_hopper_with_nothing_of_a_row(given: ScalarLoss, dtype: torch.dtype) -> None:
    """A target far below another rank's logits would need a factor beyond 16 bits."""
    given = cast_to(given, dtype)
    budget = 1e-5 if dtype == torch.float32 else 1e-2
    assert_close(together(given, *2 * [hopper.total])[0], whole(given), budget)


@pytest.mark.interpreter
@pytest.mark.usefixtures("tiles")
def test_a_row_of_nan_in_hopper_stays_in_its_row_and_spoils_the_weight() -> None:
    given = loss_of(40, 189, torch.float32)
    given.hidden[3] = torch.nan
    (value, of_hidden, of_weight, _), _ = together(given, *2 * [hopper.total])
    assert value.isnan()
    assert of_hidden[3].isnan().all()
    assert not of_hidden[[0, 1, 2, *range(4, 40)]].isnan().any()
    assert of_weight.isnan().all()


@pytest.mark.interpreter
@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("offset", [-100.0, 100.0])
def test_logits_far_from_zero_are_computed_once(
    monkeypatch: pytest.MonkeyPatch, offset: float
) -> None:
    """Where another rank has the target, some class of the rank's own says where logits lie."""
    seen: list[bool] = []
    rows = hopper_module.Total._losses

    def watched(walk: Any, first: int, here: int, again: Tensor, *, is_final: bool) -> None:
        rows(walk, first, here, again, is_final=is_final)
        seen.append(bool(again.any()))

    monkeypatch.setattr(hopper_module.Total, "_losses", watched)
    given = loss_of(40, 189, torch.float32)
    given.bias[:] += offset
    assert_close(together(given, *2 * [hopper.total])[0], whole(given), 1e-4)
    assert seen
    assert not any(seen)
