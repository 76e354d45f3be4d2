"""No training graph with a head goes unreported: each gives a record with a reason and a way out,
and wide layers inside a model give none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import memeff_compile
from memeff_compile.passes.losses import unfused
from memeff_compile.report import Record

D, V = 16, 8192

Function = Callable[..., Any]


class Model(nn.Module):
    """A body, a head of 8,192 classes, and a function of both."""

    def __init__(self, function: Function, width: int = D) -> None:
        super().__init__()
        self.body = nn.Linear(D, width)
        self.head = nn.Linear(width, V, bias=False)
        self.down = nn.Linear(V, D)
        self.narrow = nn.Linear(V // 2, D)
        self.vector = nn.Parameter(torch.ones(V))
        self.function = function

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.function(self, self.body(x), y)


def records_of(function: Function, width: int = D, **settings: Any) -> list[Record]:
    """Compile a model, call it, and return the records."""
    torch._dynamo.reset()
    memeff_compile.reset()
    options = {"memeff.inner": "eager", **settings.pop("options", {})}
    called = torch.compile(Model(function, width), backend="memeff", options=options, **settings)
    called(torch.randn(4, D), torch.randint(0, V, (4,)))
    return list(memeff_compile.last_report().records)


class Chunked(torch.autograd.Function):
    """A loss that makes its own logits, as losses by chunks do."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, w: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(h, w, y)
        return F.cross_entropy(h @ w.t(), y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        h, w, y = ctx.saved_tensors
        rest = (h @ w.t()).softmax(-1) - F.one_hot(y, V)
        rest = rest * (grad / len(y))
        return rest @ w, rest.t() @ h, None


def own_cross_entropy(m: Model, h: Tensor, y: Tensor) -> Tensor:
    h = h.tanh()
    torch._dynamo.graph_break()
    return F.linear(h, m.head.weight).square().mean()


UNFUSED: dict[str, tuple[Function, str, str]] = {
    "multi-label": (
        lambda m, h, y: F.binary_cross_entropy_with_logits(m.head(h), F.one_hot(y, V).float()),
        "loss_not_read",
        "end in `binary_cross_entropy_with_logits`",
    ),
    "squares": (lambda m, h, y: m.head(h).square().mean(), "loss_not_read", "end in `mean`"),
    "a logsumexp alone": (
        lambda m, h, y: m.head(h).logsumexp(-1).mean(),
        "loss_not_read",
        "end in `logsumexp`",
    ),
    "a product with one-hot targets": (
        lambda m, h, y: torch.einsum(
            "bv,bv->b", F.one_hot(y, V).float(), m.head(h).log_softmax(-1)
        ).mean(),
        "loss_not_read",
        "end in `einsum`",
    ),
    "a weight masked by an input and returned": (
        lambda m, h, y: F.linear(h, m.head.weight * (y.sum() > 0)),
        "logits_not_deferrable",
        "`mul` computes the head's weight from a tensor that is neither a parameter nor a buffer",
    ),
    "an autograd function": (
        lambda m, h, y: Chunked.apply(h, m.head.weight, y),
        "own_loss_function",
        "a weight of 8192 classes",
    ),
    "scaled by class and returned": (
        lambda m, h, y: m.vector * m.head(h),
        "logits_not_deferrable",
        "scales each class of the logits by a different number",
    ),
}


@pytest.mark.parametrize(("function", "code", "said"), UNFUSED.values(), ids=UNFUSED)
def test_a_head_whose_loss_is_not_fused_has_a_record(
    function: Function, code: str, said: str
) -> None:
    (record,) = records_of(function, fullgraph=True)
    assert (record.pass_name, record.action) == ("fuse_linear_cross_entropy", "declined")
    assert record.code == code
    assert said in record.sentence
    assert record.hint


def test_a_loss_inside_which_dynamo_cuts_the_function_has_a_record() -> None:
    records = records_of(lambda m, h, y: own_cross_entropy(m, h, y) * 2)
    record, *_ = [r for r in records if r.code == "graph_break_in_loss"]
    assert record.action == "declined"
    assert "inside of `own_cross_entropy`" in record.sentence


IN_TRL = """
import torch
def chunks(x):
    torch._dynamo.graph_break()
    return x
"""


def test_the_loss_of_trl_names_the_callback_that_hands_it_over() -> None:
    """Dynamo cuts inside of TRL's function on a CPU; here a function of that file stands for it."""
    trl: dict[str, Any] = {}
    exec(compile(IN_TRL, f"packages/{unfused.TRL_LOSS}", "exec"), trl)
    records = records_of(lambda m, h, y: trl["chunks"](h * 2).sum())
    record, *_ = [r for r in records if r.code == "graph_break_in_loss"]
    assert record.action == "declined"
    assert "fused_lm_head=True" in record.sentence
    assert "integrations.transformers.MemeffCallback()" in record.hint


def gated(m: Model, h: Tensor, y: Tensor) -> Tensor:
    return m.down(F.silu(m.head(h)) * (h @ m.head.weight.T)).square().mean()


LAYERS: dict[str, Function] = {
    "gated": gated,
    "a gate and its product in one": lambda m, h, y: m.narrow(
        (lambda both: F.silu(both[0]) * both[1])(m.head(h).chunk(2, -1))
    ).sum(),
    "attention": lambda m, h, y: (
        (lambda s: s.softmax(-1) @ m.head.weight)(h @ m.head.weight.T)
    ).sum(),
    "in a checkpoint": lambda m, h, y: m.down(
        checkpoint(lambda h: F.relu(m.head(h)), h, use_reentrant=False)
    ).sum(),
    "counted alone": lambda m, h, y: (h.sum(), m.head(h).argmax(-1)),
}


@pytest.mark.parametrize("function", LAYERS.values(), ids=LAYERS)
def test_a_wide_layer_inside_a_model_has_no_record(function: Function) -> None:
    assert records_of(function, fullgraph=True) == []


def test_the_similarity_of_two_encoders_is_no_head() -> None:
    def similarity(m: Model, h: Tensor, y: Tensor) -> Tensor:
        others = m.body(torch.ones(V, D)[: len(y) + 92] * y.sum())
        return h[:, :16] @ others[:, :16].T

    torch._dynamo.reset()
    memeff_compile.reset()
    called = torch.compile(Model(similarity), backend="memeff", options={"memeff.inner": "eager"})
    called(torch.randn(4, D), torch.randint(0, V, (4,)))
    assert list(memeff_compile.last_report().records) == []


def test_a_fused_or_deferred_head_has_no_other_record() -> None:
    (record,) = records_of(lambda m, h, y: F.cross_entropy(m.head(h), y))
    assert record.action == "rewrote"
    (record,) = records_of(lambda m, h, y: m.head(h))
    assert record.action == "deferred"


def test_a_head_of_few_classes_has_no_record() -> None:
    assert records_of(lambda m, h, y: m.head(h)[:, :4096].square().mean()) != []
    assert records_of(lambda m, h, y: F.linear(h, m.head.weight[:4096]).square().mean()) == []


def test_logits_of_a_head_that_is_too_narrow_have_a_note() -> None:
    (record,) = records_of(lambda m, h, y: m.head(h), width=V // 4)
    assert (record.action, record.code) == ("note", "head_narrow")
    assert "at most four times" in record.sentence
    assert "labels=" in record.hint
    report = memeff_compile.last_report()
    assert "head_narrow" in report.details()
    assert "declined" not in str(report)


def test_the_summary_speaks_of_the_loss_first() -> None:
    records_of(lambda m, h, y: F.cross_entropy(F.relu(m.head(h)), y))
    first, _, following = str(memeff_compile.last_report()).split("\n", 2)
    assert first.startswith("memeff_compile: the loss is not fused (no_linear_head), 1 graph")
    assert following.startswith("next: Make the logits by one linear layer")
