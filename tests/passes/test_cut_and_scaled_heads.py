"""Heads whose classes are cut, whose logits a tensor scales, and whose weight is cast: fused and
deferred with eager's numbers, or left alone with a reason that is true.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import memeff_compile
from memeff_compile.logits.tensor import DeferredLogits
from tests.support.captured_graphs import Outcome, compare_with_eager

D, V, LEFT = 16, 96, 64

Function = Callable[..., Any]


def normal(*size: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, generator=generator, dtype=torch.float64)


def inputs() -> tuple[Tensor, ...]:
    """Return hidden states, a weight, a bias and labels that every cut leaves in range."""
    made = normal(2, 8, D), normal(V, D, seed=1), normal(V, seed=2)
    labels = torch.randint(0, 40, (2, 8), generator=torch.Generator().manual_seed(3))
    labels[:, 1] = -100
    return *(each.requires_grad_() for each in made), labels


def loss_of(logits: Tensor, y: Tensor, **settings: Any) -> Tensor:
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), y.reshape(-1), **settings)


def head(h: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    return F.linear(h, w, b)


# --- some of the classes --------------------------------------------------------------------------------

CUTS: dict[str, Function] = {
    "nothing": lambda h, w, b, y: loss_of(head(h, w)[..., :V], y),
    "nothing, by narrow": lambda h, w, b, y: loss_of(head(h, w).narrow(-1, 0, V), y),
    "padding": lambda h, w, b, y: loss_of(head(h, w)[..., :LEFT], y),
    "padding and a row": lambda h, w, b, y: loss_of(head(h, w, b)[:, :-1, :LEFT], y[:, 1:]),
    "flat": lambda h, w, b, y: loss_of(head(h, w).view(-1, V)[:, :LEFT], y),
    "narrow": lambda h, w, b, y: loss_of(head(h, w, b).narrow(-1, 0, LEFT), y),
    "contiguous": lambda h, w, b, y: loss_of(head(h, w)[..., :LEFT].contiguous(), y),
    "a start and a negative end": lambda h, w, b, y: loss_of(head(h, w, b)[..., 8:-4], y),
    "twice": lambda h, w, b, y: loss_of(head(h, w, b)[..., 8:][..., :-3], y),
    "before a softcap": lambda h, w, b, y: loss_of(5 * torch.tanh(head(h, w)[..., :LEFT] / 5), y),
    "after a softcap": lambda h, w, b, y: loss_of(
        (5 * torch.tanh((head(h, w) * 0.5 + b) / 5))[..., :LEFT], y
    ),
    "a vector before and one after": lambda h, w, b, y: loss_of(
        (head(h, w) + b)[..., 8:LEFT] + b[8:LEFT], y
    ),
    "transposed": lambda h, w, b, y: loss_of((h @ w.T)[..., :LEFT], y),
    "stored as (D, V)": lambda h, w, b, y: loss_of((h @ w.view(D, V))[..., 3:LEFT], y),
    "label smoothing and class weights": lambda h, w, b, y: loss_of(
        head(h, w)[..., :LEFT], y, label_smoothing=0.1, weight=b.detach()[:LEFT].abs()
    ),
    "z-loss": lambda h, w, b, y: (lambda z: loss_of(z, y) + z.logsumexp(-1).square().mean())(
        head(h, w)[..., :LEFT]
    ),
    "per-token log-probabilities": lambda h, w, b, y: (
        head(h, w)[..., :LEFT].log_softmax(-1).gather(-1, y.clamp(min=0).unsqueeze(-1))
    ),
    "a loss of all and one of some": lambda h, w, b, y: (
        lambda z: loss_of(z, y) + loss_of(z[..., :LEFT], y) + loss_of(z[..., :50], y)
    )(head(h, w, b)),
}


@pytest.mark.parametrize("function", CUTS.values(), ids=CUTS)
def test_a_slice_of_the_classes_is_fused(function: Function) -> None:
    outcome = compare_with_eager(function, *inputs())
    assert (outcome.fired, outcome.codes) == (1, []), outcome.report.details()


def test_the_other_classes_of_a_cut_head_get_a_zero_gradient() -> None:
    h, w, _, y = inputs()
    compiled = torch.compile(CUTS["padding"], backend="memeff", options={"memeff.inner": "eager"})
    compiled(h, w, None, y).backward()
    assert w.grad is not None
    assert not w.grad[LEFT:].any()
    assert w.grad[:LEFT].any()


def test_every_second_class_is_declined_with_a_remedy_that_is_fused() -> None:
    outcome = compare_with_eager(lambda h, w, b, y: loss_of(head(h, w)[..., ::2], y), *inputs())
    record = outcome.declined("unknown_step")
    assert "takes one class in 2" in record.sentence
    assert "weight[0:96:2]" in record.hint
    outcome = compare_with_eager(lambda h, w, b, y: loss_of(head(h, w[0:96:2]), y), *inputs())
    assert outcome.fired == 1


def test_classes_cut_after_a_softmax_are_not_a_cut_head() -> None:
    def function(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
        some = head(h, w).log_softmax(-1)[..., :LEFT]
        return F.nll_loss(some.reshape(-1, LEFT), y.reshape(-1))

    assert compare_with_eager(function, *inputs()).fired == 0


# --- logits times a tensor --------------------------------------------------------------------------------

NUMBERS: dict[str, Tensor] = {
    "no dimensions": torch.tensor(0.7, dtype=torch.float64),
    "one element": torch.tensor([[0.7]], dtype=torch.float64),
}
SCALED: dict[str, Function] = {
    "on the right": lambda h, w, b, y, t: loss_of(head(h, w, b) * t, y),
    "on the left": lambda h, w, b, y, t: loss_of(t * head(h, w, b), y),
    "division": lambda h, w, b, y, t: loss_of(head(h, w) / t, y),
    "exp, and a vector after it": lambda h, w, b, y, t: loss_of(t.exp() * head(h, w) + b, y),
    "a vector before it": lambda h, w, b, y, t: loss_of((head(h, w, b) * 2 + b) * t, y),
    "before a softcap": lambda h, w, b, y, t: loss_of(5 * torch.tanh(t * head(h, w) / 5), y),
    "with a cut": lambda h, w, b, y, t: loss_of(t * (head(h, w, b) + b)[..., :LEFT], y),
    "twice": lambda h, w, b, y, t: loss_of(t * head(h, w) / t.exp(), y),
}


@pytest.mark.parametrize("number", NUMBERS.values(), ids=NUMBERS)
@pytest.mark.parametrize("function", SCALED.values(), ids=SCALED)
def test_a_learned_temperature_is_fused(function: Function, number: Tensor) -> None:
    outcome = compare_with_eager(function, *inputs(), number.clone().requires_grad_())
    assert (outcome.fired, outcome.codes) == (1, []), outcome.report.details()


ROWS: dict[str, Function] = {
    "each row": lambda h, w, b, y, t: loss_of(head(h, w) * t, y),
    "on the left, a vector after it": lambda h, w, b, y, t: loss_of(t * head(h, w) + b, y),
    "flat": lambda h, w, b, y, t: loss_of(head(h, w).view(-1, V) / t.view(-1, 1), y),
    "then a shift": lambda h, w, b, y, t: loss_of((head(h, w) / t)[:, :-1], y[:, 1:]),
    "after a shift": lambda h, w, b, y, t: loss_of(head(h, w)[:, :-1] / t[:, 1:], y[:, 1:]),
    "each sequence": lambda h, w, b, y, t: loss_of(head(h, w) / t[:, :1], y),
    "two losses": lambda h, w, b, y, t: (lambda z: loss_of(z, y) + z.logsumexp(-1).mean())(
        t * head(h, w)
    ),
    "losses scaled differently": lambda h, w, b, y, t: (
        lambda z: (
            loss_of(t * z, y) + loss_of(z.view(-1, V) * t.exp().view(-1, 1), y) + loss_of(z, y)
        )
    )(head(h, w)),
}


@pytest.mark.parametrize("function", ROWS.values(), ids=ROWS)
def test_a_scale_for_each_row_is_fused(function: Function) -> None:
    scale = (normal(2, 8, 1, seed=5).abs() + 0.5).requires_grad_()
    outcome = compare_with_eager(function, *inputs(), scale)
    assert (outcome.fired, outcome.codes) == (1, []), outcome.report.details()


ADAPTED: dict[str, Function] = {
    "cut": lambda z, t, y: loss_of(z[..., 3:LEFT], y),
    "scaled": lambda z, t, y: loss_of(t[0, 0] * z, y),
    "rows scaled, then cut": lambda z, t, y: loss_of((z / t)[:, 1:, :LEFT], y[:, 1:]),
}


@pytest.mark.parametrize("function", ADAPTED.values(), ids=ADAPTED)
def test_a_head_with_an_adapter_is_cut_and_scaled_with_it(function: Function) -> None:
    def loss(
        h: Tensor, w: Tensor, b: Tensor, y: Tensor, down: Tensor, up: Tensor, t: Tensor
    ) -> Any:
        return function(head(h, w) + 2 * F.linear(F.linear(h, down), up), t, y)

    low = normal(4, D, seed=6).requires_grad_(), normal(V, 4, seed=7).requires_grad_()
    scale = (normal(2, 8, 1, seed=5).abs() + 0.5).requires_grad_()
    outcome = compare_with_eager(loss, *inputs(), *low, scale)
    assert (outcome.fired, outcome.codes) == (1, []), outcome.report.details()


NOT_FOLDED: dict[str, tuple[Function, str, str]] = {
    "after the softcap": (
        lambda h, w, b, y: loss_of(b[0] * torch.tanh(head(h, w)), y),
        "scale_not_constant",
        "scaled by a tensor after the softcap",
    ),
    "each class": (
        lambda h, w, b, y: loss_of(b * head(h, w), y),
        "scale_not_constant",
        "each class of the logits by a different number",
    ),
    "each class, with a bias": (
        lambda h, w, b, y: loss_of(b * (head(h, w) + b), y),
        "scale_not_constant",
        "each class of the logits by a different number",
    ),
    "each logit": (
        lambda h, w, b, y: loss_of(head(h, w).detach().sin() * head(h, w), y),
        "scale_not_constant",
        "numbers for single classes of a row",
    ),
    "each row, with a bias": (
        lambda h, w, b, y: loss_of(head(h, w, b) * h[..., :1], y),
        "scale_not_constant",
        "scales each row, and the bias in it",
    ),
    "by the logits' own norm": (
        lambda h, w, b, y: (lambda z: loss_of(z / z.norm(dim=-1, keepdim=True), y))(head(h, w)),
        "scale_not_constant",
        "computed from them",
    ),
    "divided into": (
        lambda h, w, b, y: loss_of(b[0] / head(h, w), y),
        "no_linear_head",
        "is not a linear head",
    ),
    "of integers": (
        lambda h, w, b, y: loss_of(head(h, w) * (y[0, 0] + 1), y),
        "scale_not_constant",
        "by a tensor of torch.int64",
    ),
}


@pytest.mark.parametrize(("function", "code", "said"), NOT_FOLDED.values(), ids=NOT_FOLDED)
def test_another_scale_is_declined_with_a_true_reason(
    function: Function, code: str, said: str
) -> None:
    outcome = compare_with_eager(function, *inputs())
    assert outcome.fired == 0
    record = outcome.declined(code)
    assert said in record.sentence
    assert record.hint
    assert "graph_break_between" not in outcome.codes


class Model(nn.Module):
    """A head with a learned temperature, of a model that is called with dynamic sizes."""

    def __init__(self, loss: Function, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(D, D, dtype=dtype)
        self.head = nn.Linear(D, V, bias=False, dtype=dtype)
        self.scale = nn.Parameter(torch.tensor(0.7, dtype=dtype))
        self.loss = loss

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.loss(self, self.body(x).sin(), y)


MODELS: dict[str, Function] = {
    "cut": lambda m, h, y: loss_of(m.head(h)[:, :-1, :LEFT].float(), y[:, 1:]),
    "temperature": lambda m, h, y: loss_of(m.scale.exp() * m.head(h), y),
    "rows": lambda m, h, y: loss_of(m.head(h) / (h[..., :1].square() + 1), y),
    "cast": lambda m, h, y: loss_of(h @ m.head.weight.to(h.dtype).T, y),
}


def step_of(model: nn.Module, given: tuple[Tensor, Tensor], **settings: Any) -> list[Tensor]:
    """Return a loss and the gradients of the parameters, of a compiled copy where settings say."""
    torch._dynamo.reset()
    memeff_compile.reset()
    model.zero_grad()
    called = torch.compile(model, backend="memeff", **settings) if settings else model
    loss = called(*given)
    loss.backward()
    found = [loss.detach()]
    for parameter in model.parameters():
        found.append(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    return [each.clone() for each in found]


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", MODELS)
def test_dynamic_batches_and_lengths_are_fused(name: str, inner: str) -> None:
    model = Model(MODELS[name])
    x, y = normal(3, 8, D), inputs()[3][:1].expand(3, -1).clone()
    expected = step_of(model, (x, y))
    for each in (x, y):
        torch._dynamo.mark_dynamic(each, (0, 1))
    settings = {"fullgraph": True, "options": {"memeff.inner": inner}}
    found = step_of(model, (x, y), **settings)
    assert Outcome(memeff_compile.last_report()).fired == 1, memeff_compile.last_report().details()
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["cut", "temperature", "rows"])
def test_errors_under_autocast_are_no_larger_than_eagers(name: str) -> None:
    x, y = normal(64, 8, D).float(), torch.randint(0, 40, (64, 8))
    exact = step_of(Model(MODELS[name]), (x.double(), y))

    def errors(**settings: Any) -> Tensor:
        model = Model(MODELS[name], torch.float32)
        model.load_state_dict(Model(MODELS[name]).state_dict())
        with torch.autocast("cpu", torch.bfloat16):
            found = step_of(model, (x, y), **settings)
        pairs = zip(found, exact, strict=True)
        return torch.stack([(a.double() - b).norm() / b.norm().clamp(min=1e-30) for a, b in pairs])

    ours = errors(options={"memeff.inner": "aot_eager"})
    assert Outcome(memeff_compile.last_report()).fired == 1
    assert (ours <= 1.1 * errors() + 1e-3).all()


# --- logits that are returned ------------------------------------------------------------------------------

RETURNED: dict[str, Function] = {
    "a cast that changes nothing": lambda m, h, y: h @ m.head.weight.to(h.dtype).T,
    "a cast of the transposed weight": lambda m, h, y: h @ m.head.weight.T.to(h.dtype),
    "a cast to 16 bits": lambda m, h, y: F.linear(h.bfloat16(), m.head.weight.bfloat16()),
    "cut, then capped": lambda m, h, y: 15 * torch.tanh(m.head(h)[..., 3:90] / 15),
    "cut, then cast": lambda m, h, y: m.head(h)[..., :90].float(),
    "cut with rows": lambda m, h, y: m.head(h)[:, 1:, :90] * 2,
    "cut alone": lambda m, h, y: m.head(h)[..., :90],
}


@pytest.mark.parametrize("loss_inside", [False, True], ids=["loss outside", "loss inside"])
@pytest.mark.parametrize("function", RETURNED.values(), ids=RETURNED)
def test_logits_of_a_cut_or_cast_head_are_deferred(function: Function, loss_inside: bool) -> None:
    def forward(model: Model, h: Tensor, y: Tensor) -> Any:
        logits = function(model, h, y)
        return (loss_of(logits, y[:, -logits.shape[1] :]) if loss_inside else None), logits

    x, y = normal(2, 8, D), inputs()[3]
    results = []
    for options in (None, {"memeff.inner": "aot_eager"}):
        torch._dynamo.reset()
        memeff_compile.reset()
        model: Any = Model(forward)
        called = torch.compile(model, backend="memeff", options=options) if options else model
        loss, logits = called(x, y)
        outside = loss_of(logits.double(), y[:, -logits.shape[1] :])
        total = outside if loss is None else loss + outside
        (total + 1e-3 * logits.square().sum()).backward()
        assert isinstance(logits, DeferredLogits) == (options is not None)
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        results.append((logits.detach().clone(), logits.stride(), total.detach(), *grads))
    (expected, strides, *rest), (found, found_strides, *found_rest) = results
    # A head that multiplies fewer rows may add in another order.
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=1e-14)
    assert found_strides == strides
    wide = found.dtype == torch.float64
    torch.testing.assert_close(
        found_rest, rest, rtol=1e-6 if wide else 2e-2, atol=1e-2 * (not wide)
    )


def test_views_of_some_rows_of_cut_classes_are_eagers() -> None:
    """Rows that are computed alone lie side by side, as eager's do after the scale."""

    def scaled(h: Tensor, w: Tensor) -> Tensor:
        return head(h, w)[..., :LEFT] * 0.5

    h, w, *_ = inputs()
    compiled = torch.compile(scaled, backend="memeff", options={"memeff.inner": "aot_eager"})
    for read in (
        lambda z: z[1:].ravel(),
        lambda z: z[1:].view(-1, 2).sum(0),
        lambda z: z[1:].ravel().split(1, -1)[-1].unsqueeze(0),
    ):
        torch.testing.assert_close(read(compiled(h, w)), read(scaled(h, w)))


def test_a_loss_outside_of_a_cut_head_is_fused() -> None:
    model = Model(RETURNED["cut, then cast"])
    called = torch.compile(model, backend="memeff", options={"memeff.inner": "aot_eager"})
    x, y = normal(2, 8, D), inputs()[3]
    loss_of(called(x, y), y).backward()
    (use,) = [graph.logits for graph in memeff_compile.last_report().graphs]
    assert use is not None
    assert (use.fused, use.computed) == ({"cross_entropy": 1}, {})
    assert model.head.weight.grad is not None
    assert not model.head.weight.grad[90:].any()


KEPT: dict[str, tuple[Function, str]] = {
    "pruned": (
        lambda m, h, y: F.linear(h, m.head.weight * (m.head.weight > 0)),
        "the head's weight is computed inside the graph (by `mul`)",
    ),
    "normalised": (
        lambda m, h, y: F.linear(h, F.normalize(m.head.weight)),
        "the head's weight is computed inside the graph (by `normalize`)",
    ),
    "scaled": (lambda m, h, y: m.scale * m.head(h), "they are scaled by a tensor"),
}


@pytest.mark.parametrize(("function", "said"), KEPT.values(), ids=KEPT)
def test_logits_that_cannot_be_deferred_say_why(function: Function, said: str) -> None:
    called = torch.compile(Model(function), backend="memeff", options={"memeff.inner": "eager"})
    logits = called(normal(2, 8, D), inputs()[3])
    assert not isinstance(logits, DeferredLogits)
    records = memeff_compile.last_report().records
    (record,) = [r for r in records if r.code == "logits_not_deferrable"]
    assert said in record.sentence
    assert record.hint


def test_a_coded_weight_that_a_cast_decodes_is_fused_behind_the_cast() -> None:
    head = nn.Sequential(nn.Linear(256, 512, bias=False, dtype=torch.bfloat16))
    h, y = normal(8, 256).float(), torch.arange(8)

    def loss(h: Tensor, y: Tensor) -> Tensor:
        return loss_of(F.linear(h, head[0].weight.to(h.dtype)), y)

    with torch.no_grad():
        expected = loss(h, y)
    memeff_compile.compress_(head, "rans", min_size=0)
    assert type(head[0].weight).__name__.startswith("CodedWeight")
    with torch.no_grad():
        called = torch.compile(loss, backend="memeff", options={"memeff.inner": "aot_eager"})
        torch.testing.assert_close(called(h, y), expected)
    outcome = Outcome(memeff_compile.last_report())
    assert (outcome.fired, outcome.codes) == (1, ["not_a_linear"]), outcome.report.details()


# --- targets written before the loss reads them ----------------------------------------------------------------


def written(write: Callable[[Tensor], object]) -> Function:
    def loss(model: Model, h: Tensor, y: Tensor) -> Tensor:
        logits = model.head(h)
        write(y)
        return loss_of(logits, y)

    return loss


def by_index(y: Tensor) -> None:
    y[y == -100] = 0


WRITES: dict[str, Callable[[Tensor], object]] = {
    "by a mask": by_index,
    "masked_fill_": lambda y: y.masked_fill_(y == -100, 0),
    "index_put_": lambda y: y.index_put_((torch.tensor([0]),), torch.tensor(3)),
    "clamp_": lambda y: y.clamp_(min=0),
}


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_targets_written_between_the_head_and_the_loss_are_no_obstacle(
    write: Callable[[Tensor], object], inner: str
) -> None:
    model = Model(written(write))
    x, y = normal(2, 8, D), inputs()[3]
    expected = step_of(model, (x, y.clone()))
    found = step_of(model, (x, y.clone()), options={"memeff.inner": inner})
    assert Outcome(memeff_compile.last_report()).fired == 1, memeff_compile.last_report().details()
    torch.testing.assert_close(found, expected)


def test_losses_on_both_sides_of_a_write_read_their_own_targets() -> None:
    @torch.no_grad()
    def loss(model: Model, h: Tensor, y: Tensor) -> Tensor:
        logits, labels = model.head(h), y.clone()
        first = loss_of(logits, labels)
        labels[labels == -100] = 5
        return first + loss_of(logits, labels)

    x, y = normal(2, 8, D), inputs()[3]
    expected = Model(loss)(x, y)
    called = torch.compile(Model(loss), backend="memeff", options={"memeff.inner": "aot_eager"})
    torch.testing.assert_close(called(x, y), expected)
    (record,) = memeff_compile.last_report().records
    assert "2 calls" in record.sentence


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_hidden_states_written_between_the_head_and_the_loss_are_an_obstacle(inner: str) -> None:
    def loss(model: Model, h: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            states = h * 1
            logits = states @ model.head.weight.T
            states.zero_()
            y[y == -100] = 0
            return loss_of(logits, y)

    x, y = normal(2, 8, D), inputs()[3]
    expected = Model(loss)(x, y.clone())
    called = torch.compile(Model(loss), backend="memeff", options={"memeff.inner": inner})
    torch.testing.assert_close(called(x, y.clone()), expected)
    assert Outcome(memeff_compile.last_report()).codes == ["mutated"]


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_targets_written_after_the_loss_are_refused_as_in_eager(inner: str) -> None:
    def loss(model: Model, h: Tensor, y: Tensor) -> Tensor:
        found = loss_of(model.head(h), y)
        y.clamp_(min=7)
        return found

    x, y = normal(2, 8, D), inputs()[3].clamp(min=0)
    for settings in (
        {"backend": "eager"},
        {"backend": "memeff", "options": {"memeff.inner": inner}},
    ):
        torch._dynamo.reset()
        called = torch.compile(Model(loss), **settings)
        # The loss saves its targets for the backward pass, in eager PyTorch and here.
        with pytest.raises(Exception, match="modified by an inplace operation"):
            called(x, y.clone()).backward()


# --- devices and shapes without anything in them -----------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_a_loss_on_the_meta_device_is_fused(name: str) -> None:
    model = Model(MODELS[name]).to("meta")
    called = torch.compile(model, backend="memeff", options={"memeff.inner": "eager"})
    loss = called(torch.empty(2, 8, D, device="meta", dtype=torch.float64), inputs()[3].to("meta"))
    loss.backward()
    assert loss.is_meta
    outcome = Outcome(memeff_compile.last_report())
    assert outcome.fired == 1, outcome.report.details()
    assert not [r for r in outcome.report.records if r.action == "internal_error"]


def test_logits_on_the_meta_device_are_deferred() -> None:
    model = Model(lambda m, h, y: m.head(h)).to("meta")
    called = torch.compile(model, backend="memeff", options={"memeff.inner": "eager"})
    logits = called(
        torch.empty(2, 8, D, device="meta", dtype=torch.float64), inputs()[3].to("meta")
    )
    assert (logits + 1).shape == (2, 8, V)
    assert not [r for r in memeff_compile.last_report().records if r.action == "internal_error"]


@pytest.mark.parametrize(
    "function",
    [
        lambda h, w, b, y: b[0].logsumexp(0),
        lambda h, w, b, y: b[0].log_softmax(0),
        lambda h, w, b, y: b.sum().softmax(-1),
        lambda h, w, b, y: b[0].argmax(),
        lambda h, w, b, y: F.cross_entropy(head(h, w)[0, 0], y[0, 0]),
    ],
    ids=["logsumexp", "log_softmax", "softmax", "argmax", "a lone row"],
)
def test_tensors_without_dimensions_are_no_error(function: Function) -> None:
    compare_with_eager(function, *inputs())
