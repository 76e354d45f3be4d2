"""Shards of one weight, merged, are the whole head: values, and the sum of the ranks' gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from memeff_compile.errors import TargetRangeError, UnsupportedInputError
from memeff_compile.kernels import linear_cross_entropy as op_folder
from memeff_compile.kernels.linear_cross_entropy import (
    Shard,
    walk,
)
from memeff_compile.kernels.linear_cross_entropy import (
    op as rows_op,
)
from tests.kernels.linear_cross_entropy.engines import by_classes, by_rows, library

N, D = 14, 8
DEFAULTS: dict[str, Any] = {
    "ignore_index": -100,
    "scale": 1.0,
    "softcap": 0.0,
    "with_lse": False,
    "with_logit_sum": False,
    "gradient_filter": "exact",
    "workspace": 0,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale and softcap": {"scale": 0.5, "softcap": 3.0},
    "lse": {"with_lse": True},
    "smoothing": {"with_logit_sum": True},
    "entropy": {"with_entropy": True},
    "all": {"with_lse": True, "with_logit_sum": True, "with_entropy": True, "softcap": 5.0},
    "top": {"with_top": True, "with_entropy": True, "scale": -0.5, "softcap": 5.0},
    "a class is ignored": {"ignore_index": 0},
    "none is ignored": {"ignore_index": None},
}


class Case:
    """A head with its targets, and random factors of the op's results for each row."""

    def __init__(self, vocab: int, dtype: torch.dtype, where: str, **settings: Any) -> None:
        self.settings = DEFAULTS | settings
        self.vocab, ignored = vocab, self.settings["ignore_index"]
        draw = torch.Generator().manual_seed(vocab)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype)

        self.hidden, self.weight, self.bias = random(2, N // 2, D), random(vocab, D), random(vocab)
        self.column_weight = random(vocab).abs() if self.settings["with_logit_sum"] else None
        highest = 3 if where == "one rank" else vocab
        self.target = torch.randint(0, highest, (2, N // 2), generator=draw)
        if where != "one rank" and ignored is not None:
            self.target[0 if where == "half ignored" else slice(None)] = ignored
        self.factors = [random(2, N // 2) for _ in range(4)]

    def operands(self, first: int = 0, stop: int | None = None) -> tuple[list[Any], list[Tensor]]:
        part = slice(first, stop)
        trained = [self.hidden.clone(), self.weight[part].clone(), self.bias[part].clone()]
        for each in trained:
            each.requires_grad_()
        column_weight = None if self.column_weight is None else self.column_weight[part]
        return [*trained, self.target, column_weight], trained

    def whole(self) -> tuple[list[Tensor], list[Tensor]]:
        operands, trained = self.operands()
        found = list(op_folder.linear_cross_entropy(*operands, **self.settings))
        return found, self.gradients(found, trained)

    def gradients(self, found: list[Tensor], trained: list[Tensor]) -> list[Tensor]:
        *found, top = found
        assert not top.requires_grad
        asked = [(part, by) for part, by in zip(found, self.factors, strict=True) if part.numel()]
        sum((part * by).sum() for part, by in asked).backward()
        return [each.grad for each in trained]

    def merged(self, ranks: int) -> tuple[list[Tensor], list[Tensor]]:
        """Return every rank's results, and the gradients that ranks add up or keep."""
        shards = [Shard(rank, ranks, self.vocab) for rank in range(ranks)]
        given = [self.operands(s.first, s.first + s.columns) for s in shards]
        settings = [self.settings | s._asdict() for s in shards]
        op = op_folder.linear_cross_entropy_shard
        stats = [op(*each[0], None, **how) for each, how in zip(given, settings, strict=True)]
        assert not any(each.requires_grad for each in stats)
        every, found, gradients = torch.cat(stats), [], []
        for (operands, trained), how in zip(given, settings, strict=True):
            found.append(list(op_folder.linear_cross_entropy_merge(every, *operands, **how)))
            gradients.append(self.gradients(found[-1], trained))
        for other in found[1:]:
            for mine, theirs in zip(found[0], other, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)
        of_hidden, of_weight, of_bias = zip(*gradients, strict=True)
        return found[0], [torch.stack(of_hidden).sum(0), torch.cat(of_weight), torch.cat(of_bias)]


def assert_same(case: Case, ranks: int, tolerance: float) -> None:
    values, gradients = case.merged(ranks)
    whole_values, whole_gradients = case.whole()
    both = zip((*values, *gradients), (*whole_values, *whole_gradients), strict=True)
    for mine, whole in both:
        bound = tolerance * max(1.0, float(whole.detach().abs().max())) if whole.numel() else 0.0
        torch.testing.assert_close(mine, whole, rtol=0, atol=bound)


@pytest.mark.parametrize("where", ["half ignored", "one rank", "all ignored"])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_shards_of_a_weight_are_the_whole_head(settings: dict[str, Any], where: str) -> None:
    for ranks in (1, 2, 3, 4):
        for vocab in (40, 41):
            assert_same(Case(vocab, torch.float64, where, **settings), ranks, 1e-12)
    assert_same(Case(41, torch.float32, where, **settings), 3, 2e-6)


@pytest.mark.parametrize("entropy", [False, True])
def test_a_rank_may_hold_nothing_but_padding(entropy: bool) -> None:
    """Padded classes at -inf give 0, not nan, whatever is asked of the others."""
    case = Case(40, torch.float64, "one rank", with_entropy=entropy)
    case.bias[20:] = -torch.inf
    values, gradients = case.merged(2)
    assert all(torch.isfinite(each).all() for each in (*values, *gradients))
    assert_same(case, 2, 1e-12)
    assert_same(case, 4, 1e-12)


def test_a_target_at_minus_infinity_loses_infinity_as_in_one_process() -> None:
    case = Case(40, torch.float64, "one rank")
    case.bias[:20] = -torch.inf
    (mine, *_), _ = case.merged(2)
    (whole, *_), _ = case.whole()
    assert torch.equal(mine, whole)
    assert (mine == torch.inf).all()


def test_a_confident_target_keeps_its_digits() -> None:
    """A loss of 1e-5 with a log-sum-exp of 50: their difference would have no correct digit."""
    hidden = torch.zeros(1, D)
    hidden[0, 0] = 1
    weight = torch.zeros(40, D)
    weight[3, 0], weight[39, 0] = 50, 50 - 11.5
    target = torch.tensor([3])
    stats = [
        op_folder.linear_cross_entropy_shard(
            *(hidden, weight[20 * rank :][:20], None, target, None, None),
            **DEFAULTS,
            **Shard(rank, 2, 40)._asdict(),
        )
        for rank in range(2)
    ]
    settings = DEFAULTS | Shard(0, 2, 40)._asdict()
    operands = (hidden, weight[:20], None, target, None)
    nll, *_ = op_folder.linear_cross_entropy_merge(torch.cat(stats), *operands, **settings)
    exact, *_ = op_folder.linear_cross_entropy(
        *(hidden.double(), weight.double(), None, target, None), **DEFAULTS
    )
    torch.testing.assert_close(nll.double(), exact, rtol=1e-3, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_likeliest_class_of_equals_is_the_lowest_one(dtype: torch.dtype) -> None:
    """Whichever ranks they are on; nan counts as the largest, and -inf everywhere leaves class 0."""
    for softcap, offset in ((0.0, 0.0), (1e-3, 100.0)):  # the cap makes all classes equal
        case = Case(40, dtype, "half ignored", with_top=True, softcap=softcap)
        case.weight, case.bias = case.weight[:10].repeat(4, 1), case.bias[:10].repeat(4) + offset
        expected = (case.hidden.double() @ case.weight[:10].double().T + case.bias[:10]).argmax(-1)
        for ranks in (2, 3, 4):
            found = case.merged(ranks)[0][-1]
            assert torch.equal(found, torch.zeros_like(found) if softcap else expected)
    case.bias[:] = -torch.inf
    assert not case.merged(2)[0][-1].any()
    case.bias[25] = torch.nan
    assert (case.merged(2)[0][-1] == 25).all()


@pytest.mark.parametrize(("level", "lost"), [(0.0, 2.0**-6), (0.25, 0.25)])
def test_a_row_loses_no_more_to_the_filters_of_all_ranks_than_to_one(
    monkeypatch: pytest.MonkeyPatch, level: float, lost: float
) -> None:
    """Each rank filters by probabilities of the whole head, so that their dropped masses add up."""
    given: list[float] = []
    backward = rows_op.linear_cross_entropy_backward

    def watched(*operands: Any, **settings: Any) -> Any:
        given.append(settings["filter_level"])
        return backward(*operands, **settings)

    monkeypatch.setattr(rows_op, "linear_cross_entropy_backward", watched)
    for ranks in (2, 4):
        given.clear()
        how = {"gradient_filter": "mass", "filter_level": level}
        Case(40, torch.float32, "half ignored", **how).merged(ranks)
        assert given == [lost / ranks] * ranks


def test_no_rows_give_no_numbers_and_no_gradients() -> None:
    operands = (torch.zeros(0, D, requires_grad=True), torch.zeros(20, D, requires_grad=True))
    operands += (None, torch.zeros(0, dtype=torch.int64), None)
    settings = DEFAULTS | Shard(1, 2, 40)._asdict()
    stats = op_folder.linear_cross_entropy_shard(*operands, None, **settings)
    assert stats.shape == (2, 0)
    nll, *_ = op_folder.linear_cross_entropy_merge(torch.cat([stats] * 2), *operands, **settings)
    nll.sum().backward()
    assert all(each.grad is not None and not each.grad.any() for each in operands[:2])


def test_a_target_is_judged_by_the_classes_of_all_ranks() -> None:
    operands = (torch.zeros(2, D), torch.zeros(20, D), None)
    settings = DEFAULTS | Shard(0, 2, 40)._asdict()
    fits, outside = torch.tensor([3, 39]), torch.tensor([3, 40])
    op_folder.linear_cross_entropy_shard(*operands, fits, None, None, **settings)
    with pytest.raises(TargetRangeError, match=r"holds 40 \(row 1\); columns run from 0 to 39"):
        op_folder.linear_cross_entropy_shard(*operands, outside, None, None, **settings)


ENGINES = {
    "library": (library, torch.float32, 2e-5),
    "hopper": (by_classes, torch.float16, 4e-3),
    "by pieces of rows": (
        by_rows,
        *(torch.float16, 4e-3),
    ),
}


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("name", "settings"),
    [*((name, asked) for name in ENGINES for asked in ("plain", "all")), ("library", "top")],
)
def test_every_engine_serves_shards(
    monkeypatch: pytest.MonkeyPatch, name: str, settings: str
) -> None:
    """Rows whose target is on another rank, and gradients of an unused log-sum-exp."""
    engine, dtype, tolerance = ENGINES[name]
    asked = {"half ignored": SETTINGS[settings], "one rank": SETTINGS[settings]}
    for where, how in asked.items():
        case, exact = Case(69, dtype, where, **how), Case(69, dtype, where, **how)
        for part in ("hidden", "weight", "bias", "column_weight"):
            value = getattr(exact, part)
            setattr(exact, part, None if value is None else value.double())
        exact.factors = [each.double() for each in exact.factors]
        whole_values, whole_gradients = exact.whole()
        with monkeypatch.context() as patch:
            patch.setattr(walk, "engine_of", lambda *_, **__: engine)
            values, gradients = case.merged(2)
        both = zip((*values, *gradients), (*whole_values, *whole_gradients), strict=True)
        for mine, whole in both:
            bound = tolerance * max(1.0, float(whole.detach().abs().max())) if whole.numel() else 0
            torch.testing.assert_close(mine.to(whole.dtype), whole, rtol=0, atol=bound)


def test_ranks_that_have_different_rows_all_say_so() -> None:
    operands = (
        torch.zeros(2, D),
        torch.zeros(20, D),
        None,
        torch.zeros(2, dtype=torch.int64),
        None,
    )
    settings = DEFAULTS | Shard(0, 2, 40)._asdict()
    op_folder.linear_cross_entropy_shard(*operands, torch.tensor([2, 2]), **settings)
    with pytest.raises(UnsupportedInputError, match=r"different numbers of rows \(2, 3\)"):
        op_folder.linear_cross_entropy_shard(*operands, torch.tensor([2, 3]), **settings)


def test_a_weight_that_is_not_the_shard_is_refused() -> None:
    settings = DEFAULTS | Shard(1, 2, 41)._asdict()
    target = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(UnsupportedInputError, match="rank 1 of 2 with 41 classes holds 20"):
        op_folder.linear_cross_entropy_shard(
            *(torch.zeros(2, D), torch.zeros(21, D), None, target, None, None), **settings
        )


def test_shards_are_those_of_torch_chunk() -> None:
    for classes in range(1, 30):
        for ranks in range(1, 9):
            parts = torch.arange(classes).chunk(ranks)
            for rank in range(ranks):
                shard = Shard(rank, ranks, classes)
                part = parts[rank] if rank < len(parts) else torch.arange(0)
                assert shard.columns == len(part)
                assert not len(part) or shard.first == int(part[0])
            assert shard.leaves_some_empty == (len(parts) < ranks)
