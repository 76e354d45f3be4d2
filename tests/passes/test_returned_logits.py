"""Logits of a training graph without a loss: deferred, or left alone with a reason."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed

import memeff_compile
from memeff_compile.logits.tensor import DeferredLogits
from memeff_compile.report import Record
from tests.support.captured_graphs import compare_with_eager

D, V = 16, 96


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (
        torch.randn(size, generator=generator, dtype=torch.float64)
        for size in ((2, 8, D), (V, D), (V,))
    )
    return hidden.requires_grad_(), weight.requires_grad_(), bias


Function = Callable[[Tensor, Tensor, Tensor], Any]
DEFERRED: dict[str, Function] = {
    "linear": lambda h, w, b: F.linear(h.sin(), w),
    "bias": lambda h, w, b: F.linear(h.sin(), w, b),
    "matmul": lambda h, w, b: h.sin() @ w.T,
    "softcap and cast": lambda h, w, b: 30 * torch.tanh(F.linear(h.sin(), w) / 30).double(),
    "beside others": lambda h, w, b: (h * 2, F.linear(h.sin(), w), h.mean()),
    "last position": lambda h, w, b: F.linear(h.sin(), w)[:, -1],
    "two heads": lambda h, w, b: (F.linear(h.sin(), w), h.cos() @ w.T),
}


def deferred(outputs: Any) -> list[Tensor]:
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return [out for out in outputs if isinstance(out, DeferredLogits)]


def run(
    function: Function,
    options: Mapping[str, Any] | None = None,
    given: tuple[Tensor, ...] | None = None,
    **settings: Any,
) -> tuple[Any, list[Record]]:
    torch._dynamo.reset()
    memeff_compile.reset()
    merged = {"memeff.inner": "eager", **(options or {})}
    compiled = torch.compile(function, backend="memeff", options=merged, **settings)
    return compiled(*(given or inputs())), list(memeff_compile.last_report().records)


@pytest.mark.parametrize("function", DEFERRED.values(), ids=DEFERRED)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_logits_that_are_only_returned_are_deferred(function: Function, dynamic: bool) -> None:
    given = inputs()
    if dynamic:
        torch._dynamo.mark_dynamic(given[0], (0, 1))
    outputs, records = run(function, given=given)
    assert {r.code for r in records if r.action == "deferred"} == {"logits_deferred"}
    assert {r.pass_name for r in records if r.action == "deferred"} == {"defer_logits"}
    assert deferred(outputs)
    compare_with_eager(function, *inputs())
    found = deferred(outputs)[0].sin().sum()
    torch.testing.assert_close(found, _eager_logits(function).sin().sum())


def _eager_logits(function: Function) -> Tensor:
    result = function(*inputs())
    results = result if isinstance(result, tuple) else (result,)
    return next(out for out in results if out.dim() and out.shape[-1] == V)


def reused(h: Tensor, w: Tensor, b: Tensor) -> Any:
    logits = F.linear(h, w)
    return logits, logits.argmax(-1)


def narrow(h: Tensor, w: Tensor, b: Tensor) -> Any:
    return F.linear(h, w[: 4 * D])


def written_behind(h: Tensor, w: Tensor, b: Tensor) -> Any:
    logits = F.linear(h.sin(), w, b)
    b.mul_(2)
    return logits


def without_gradient(h: Tensor, w: Tensor, b: Tensor) -> Any:
    with torch.no_grad():
        logits = F.linear(h, w)
    return logits, h.sum()


def capped_twice(h: Tensor, w: Tensor, b: Tensor) -> Any:
    return torch.tanh(torch.tanh(F.linear(h, w)))


def computed_weight(h: Tensor, w: Tensor, b: Tensor) -> Any:
    return F.linear(h, w * 2)


def classes_moved(h: Tensor, w: Tensor, b: Tensor) -> Any:
    return F.linear(h, w).transpose(1, 2)


def cut(h: Tensor, w: Tensor, b: Tensor) -> Any:
    logits = F.linear(h, w)
    torch._dynamo.graph_break()
    return logits.logsumexp(-1).mean()


LEFT_ALONE: dict[str, tuple[Function, set[str], str]] = {
    "reused": (reused, {"graph_break_between"}, ""),
    "narrow": (narrow, set(), ""),
    "no gradient": (without_gradient, set(), ""),
    "computed weight": (
        computed_weight,
        {"graph_break_between", "logits_not_deferrable"},
        "the head's weight is computed inside the graph (by `mul`)",
    ),
    "written": (
        written_behind,
        {"graph_break_between", "logits_not_deferrable"},
        "`mul_` writes in place to what they come from",
    ),
    "capped twice": (
        capped_twice,
        {"graph_break_between", "logits_not_deferrable"},
        "pass through tanh twice",
    ),
    "classes moved": (
        classes_moved,
        {"graph_break_between", "logits_not_deferrable"},
        "vocabulary dimension moved",
    ),
    "cut": (
        cut,
        {"graph_break_between", "logits_not_deferrable"},
        "Dynamo ended the graph here",
    ),
}


@pytest.mark.parametrize(("function", "codes", "sentence"), LEFT_ALONE.values(), ids=LEFT_ALONE)
def test_other_logits_stay_as_they_are(function: Function, codes: set[str], sentence: str) -> None:
    outputs, records = run(function)
    assert not deferred(outputs)
    assert {r.code for r in records} == codes
    reasons = [r.sentence for r in records if r.code == "logits_not_deferrable"]
    assert not sentence or sentence in reasons[0]
    compare_with_eager(function, *inputs(), fullgraph=function is not cut)


@pytest.mark.parametrize(
    "options",
    [
        {"memeff.logits": "eager"},
        {"memeff.logits": "none"},
        {"memeff.linear_cross_entropy": "off"},
    ],
    ids=str,
)
def test_options_leave_them_in_the_graph(options: dict[str, str]) -> None:
    outputs, records = run(DEFERRED["linear"], options)
    assert type(outputs) is Tensor
    assert not [r for r in records if r.action != "declined"]


def test_gradients_switched_off_leave_them_in_the_graph() -> None:
    with torch.no_grad():
        outputs, records = run(DEFERRED["linear"])
    assert (type(outputs), records) == (Tensor, [])
    frozen = tuple(value.detach() for value in inputs())
    outputs, records = run(DEFERRED["linear"], given=frozen)
    assert (type(outputs), records) == (Tensor, [])


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lm_head = nn.Linear(D, V, dtype=torch.float64)

    def forward(self, h: Tensor) -> Tensor:
        return self.lm_head(h.sin())


@pytest.mark.parametrize("skip", ["lm_head", {"defer_logits": "lm_head"}], ids=str)
def test_a_skipped_head_stays_in_the_graph(skip: Any) -> None:
    options = {"memeff.inner": "eager", "memeff.skip": skip}
    found = torch.compile(Model(), backend="memeff", options=options)(inputs()[0])
    assert type(found) is Tensor
    records = memeff_compile.last_report().records
    assert "skipped" in {r.code for r in records}


def test_strictness_about_the_fused_loss_is_not_met_by_deferring() -> None:
    with pytest.raises(BackendCompilerFailed, match="names fuse_linear_cross_entropy"):
        run(DEFERRED["linear"], {"memeff.strict": "fuse_linear_cross_entropy"})
    outputs, _ = run(DEFERRED["linear"], {"memeff.strict": "defer_logits"})
    assert deferred(outputs)
    with pytest.raises(BackendCompilerFailed, match="tanh twice"):
        run(capped_twice, {"memeff.strict": "defer_logits"})


def test_a_subclass_weight_stays_in_the_graph() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    w = inputs()[1]
    weight = nn.Parameter(TwoTensor(w.detach(), w.detach().clone()))
    _, records = run(lambda h, w, b: F.linear(h, weight), {"memeff.inner": "aot_eager"})
    assert {r.code for r in records} <= {"graph_break_between", "logits_not_deferrable"}


class OfAUser(Tensor):
    """A subclass without changes: Dynamo wraps a graph's outputs in it."""


@pytest.mark.parametrize("has_loss", [False, True])
def test_logits_of_a_weight_of_a_users_class_are_of_that_class(has_loss: bool) -> None:
    torch._dynamo.reset()
    h = torch.ones(4, 8, requires_grad=True)
    weight = torch.nn.Parameter(torch.randn(67, 8).as_subclass(OfAUser))

    def head(h: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        logits = F.linear(h, weight)
        loss = F.cross_entropy(logits, torch.arange(4)) if has_loss else logits.sum()
        return loss, logits

    grads = []
    for function in (
        head,
        torch.compile(head, backend="memeff", options={"memeff.inner": "eager"}),
    ):
        loss, logits = function(h, weight)
        assert type(logits) is OfAUser
        grads.append(torch.autograd.grad(loss + logits.sin().sum(), [h, weight]))
    torch.testing.assert_close(grads[0], grads[1])


def test_the_report_counts_what_became_of_the_logits() -> None:
    torch._dynamo.reset()
    memeff_compile.reset()
    compiled = torch.compile(Model(), backend="memeff", options={"memeff.inner": "eager"})
    targets = torch.zeros(16, dtype=torch.int64)
    assert "so far" not in memeff_compile.last_report().details()
    for _ in range(3):
        F.cross_entropy(compiled(inputs()[0]).view(-1, V), targets).backward()
    before = memeff_compile.last_report()
    compiled(inputs()[0]).argmax(-1)
    text = " ".join(memeff_compile.last_report().details().split())
    assert "losses that used the fused op: 3 (cross_entropy: 3)" in text
    assert "products that computed logits: 1 (argmax: 1)" in text
    assert before.graphs[0].logits is not None
    assert before.graphs[0].logits.products == 0  # a report is of its moment
    read = memeff_compile.last_report()
    assert type(read).from_json(read.to_json()) == read


def test_a_loss_by_softmax_is_named_with_its_line_and_the_steps_it_was_in() -> None:
    memeff_compile.reset()
    compiled = torch.compile(Model(), backend="memeff", options={"memeff.inner": "eager"})
    targets = torch.zeros(16, 1, dtype=torch.int64)

    def focal(logits: Tensor) -> Tensor:
        p = logits.view(-1, V).softmax(-1).gather(1, targets)
        return -((1 - p) ** 2 * p.log()).mean()

    line = focal.__code__.co_firstlineno + 1
    for _ in range(2):
        focal(compiled(inputs()[0])).backward()
    compiled(inputs()[0])  # a step whose logits nobody reads
    report = memeff_compile.last_report()
    assert report.summary.startswith("memeff_compile: the loss is not fused (softmax")
    said = f"your loss computed the logits by softmax at test_returned_logits.py:{line} in 2 of 3"
    assert said in " ".join(str(report).split()), report


def test_a_loss_by_log_softmax_and_gather_computes_none_as_the_report_says() -> None:
    memeff_compile.reset()
    compiled = torch.compile(Model(), backend="memeff", options={"memeff.inner": "eager"})
    targets = torch.zeros(16, 1, dtype=torch.int64)
    log_p = compiled(inputs()[0]).view(-1, V).log_softmax(-1).gather(1, targets)
    (-((1 - log_p.exp()) ** 2) * log_p).mean().backward()
    report = memeff_compile.last_report()
    assert report.summary.startswith("memeff_compile: the loss is fused")
    assert "computed the logits" not in str(report)


class Trained(nn.Module):
    """A model that returns its loss and its logits."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Model()

    def forward(self, h: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.model(h)
        return F.cross_entropy(logits.view(-1, V), targets), logits


METRICS: dict[str, Callable[[Tensor], object]] = {
    "argmax": lambda z: (z.argmax(-1) == 0).sum(),
    "topk": lambda z: z.topk(3, -1).indices,
    "_softmax": lambda z: z.softmax(-1).amax(-1).mean(),
    "sub": lambda z: (z - 1).abs().mean(),
    "gt": lambda z: z[0] > 0,
}


@pytest.mark.parametrize("op", METRICS)
@pytest.mark.parametrize("is_first", [True, False], ids=["before backward", "after backward"])
def test_a_metric_with_gradients_on_is_no_loss(op: str, is_first: bool) -> None:
    torch._dynamo.reset()
    memeff_compile.reset()
    compiled = torch.compile(Trained(), backend="memeff", options={"memeff.inner": "eager"})
    loss, logits = compiled(inputs()[0], torch.zeros(16, dtype=torch.int64))
    if is_first:
        METRICS[op](logits)
    loss.backward()
    if not is_first:
        METRICS[op](logits)
    report = memeff_compile.last_report()
    assert report.summary.startswith("memeff_compile: the loss is fused, 1 graph"), report
    assert f"your code computed the logits by {op.strip('_')} at" in " ".join(str(report).split())


def set_rows(z: Tensor) -> Tensor:
    rows = torch.zeros(z.shape)
    rows[:] = z
    return rows.square().mean()


UNFUSED: dict[str, Callable[[Tensor], Tensor]] = {
    "sub": lambda z: -torch.distributions.Categorical(logits=z).log_prob(torch.tensor(1)).mean(),
    "gather": lambda z: z.view(-1, V).log_softmax(-1).gather(1, torch.zeros(16, 2).long()).mean(),
    "copy": set_rows,
    "softmax": lambda z: z.softmax(-1).square().mean(),
}


@pytest.mark.parametrize("op", UNFUSED)
@pytest.mark.parametrize("metric", [None, "argmax", "sub"])
def test_a_loss_that_needs_the_logits_is_named_after_a_metric(op: str, metric: str | None) -> None:
    torch._dynamo.reset()
    memeff_compile.reset()
    compiled = torch.compile(Model(), backend="memeff", options={"memeff.inner": "eager"})
    logits = compiled(inputs()[0])
    if metric is not None:
        METRICS[metric](logits)
    UNFUSED[op](logits).backward()
    report = memeff_compile.last_report()
    assert f"loss is not fused ({op}), 1 graph" in report.summary, report
    assert f"your loss computed the logits by {op}" in " ".join(str(report).split())


def test_a_loss_with_gradients_off_is_no_loss_that_needs_the_logits() -> None:
    torch._dynamo.reset()
    memeff_compile.reset()
    compiled = torch.compile(Model(), backend="memeff", options={"memeff.inner": "eager"})
    scale = torch.ones((), requires_grad=True)
    logits = compiled(inputs()[0])
    F.cross_entropy(logits.view(-1, V), torch.zeros(16, dtype=torch.int64)).backward()
    (scale * (logits.detach() - 1)).mean().backward()  # of a teacher
    report = memeff_compile.last_report()
    assert report.summary.startswith("memeff_compile: the loss is fused, 1 graph"), report
