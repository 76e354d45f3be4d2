"""fuse_divergence: spellings of distillation losses, declines, and eager's numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import memeff_compile
from memeff_compile.kernels import linear_divergence as op_folder
from memeff_compile.passes import fuse_divergence
from memeff_compile.report import Record

D, K, V, B, L = 8, 12, 64, 2, 5
NAME = "fuse_divergence"


class Pair(nn.Module):
    """A student's head and a teacher's, and a function of hidden states of both."""

    def __init__(self, function: Function, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        self.head = nn.Linear(D, V, dtype=dtype)
        self.of_teacher = nn.Linear(K, V, bias=False, dtype=dtype)

    def teach(self, g: Tensor) -> Tensor:
        with torch.no_grad():
            logits: Tensor = self.of_teacher(g)
        return logits

    def forward(self, h: Tensor, g: Tensor, y: Tensor) -> Any:
        return self.function(self, h, g, y)


Function = Callable[[Pair, Tensor, Tensor, Tensor], Any]


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(1)
    h, g = torch.randn(B, L, D, dtype=dtype), torch.randn(B, L, K, dtype=dtype)
    y = torch.randint(0, V, (B, L))
    y[0, 2] = y[1, 4] = -100
    return h.requires_grad_(), g, y


def logs(m: Pair, h: Tensor, g: Tensor, t: float = 2.0) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities of student and teacher."""
    return F.log_softmax(m.head(h) / t, -1), F.log_softmax(m.teach(g) / t, -1)


def gkd(m: Pair, h: Tensor, g: Tensor, y: Tensor) -> Tensor:
    """Return the generalised divergence in TRL's way, without its selection of rows."""
    s, t = logs(m, h, g)
    beta = torch.tensor(0.3, dtype=s.dtype)
    mixed = torch.logsumexp(torch.stack([s + torch.log1p(-beta), t + torch.log(beta)]), dim=0)
    of_teacher = F.kl_div(mixed, t, reduction="none", log_target=True)
    of_student = F.kl_div(mixed, s, reduction="none", log_target=True)
    every = beta * of_teacher + (1 - beta) * of_student
    return every.sum() / every.size(0)


def forward_kl(m: Pair, h: Tensor, g: Tensor, y: Tensor) -> Tensor:
    """Return the loss in torchtune's way: a cross entropy over the rows with a label."""
    z = m.head(h)
    q = F.softmax(m.teach(g), dim=-1, dtype=torch.float64)
    log_p = F.log_softmax(z, dim=-1, dtype=torch.float64)
    rows = torch.sum(q * log_p, dim=-1).view(-1)
    kept = (y != -100).int()
    return -torch.sum(rows * kept.view(-1), dim=0) / torch.sum(kept.view(-1), dim=0)


def without_bias(m: Pair, h: Tensor, g: Tensor, y: Tensor) -> Tensor:
    z = F.linear(h, m.head.weight)
    infinite = torch.isinf(z)
    product = torch.masked_fill(m.teach(g).softmax(-1) * z.log_softmax(-1), infinite, 0)
    return -torch.sum(product, dim=-1).view(-1).mean()


def jsd_of_probabilities(m: Pair, h: Tensor, g: Tensor, y: Tensor) -> Tensor:
    s, t = logs(m, h, g, 1.0)
    p, q = s.exp(), t.exp()
    mixed = (0.5 * (p + q)).log()
    return 0.5 * ((p * (s - mixed)).sum(-1) + (q * (t - mixed)).sum(-1)).mean()


def by_target(m: Pair, h: Tensor, g: Tensor, **how: Any) -> Tensor:
    s, t = logs(m, h, g)
    return F.kl_div(s, t if how.get("log_target") else t.exp(), **how)


TOTALS: dict[str, Function] = {
    "batchmean": lambda m, h, g, y: 4 * by_target(m, h, g, reduction="batchmean"),
    "sum": lambda m, h, g, y: by_target(m, h, g, reduction="sum"),
    "mean": lambda m, h, g, y: by_target(m, h, g, reduction="mean"),
    "log target": lambda m, h, g, y: by_target(m, h, g, reduction="sum", log_target=True),
    "module": lambda m, h, g, y: nn.KLDivLoss(reduction="batchmean")(
        F.log_softmax(m.head(h), -1), F.softmax(m.teach(g), -1)
    ),
    "reverse": lambda m, h, g, y: (
        lambda s, t: F.kl_div(t, s, reduction="batchmean", log_target=True)
    )(*logs(m, h, g)),
    "none, summed": lambda m, h, g, y: by_target(m, h, g, reduction="none").sum(),
    "none, row by row": lambda m, h, g, y: by_target(m, h, g, reduction="none").sum(-1).mean(),
    "none, averaged": lambda m, h, g, y: by_target(m, h, g, reduction="none").mean(),
    "masked rows": lambda m, h, g, y: (
        (by_target(m, h, g, reduction="none").sum(-1) * (y >= 0)).sum() / (y >= 0).sum()
    ),
    "masked classes": lambda m, h, g, y: (
        by_target(m, h, g, reduction="none") * (y >= 0).unsqueeze(-1)
    ).sum(),
    "filled rows": lambda m, h, g, y: (
        by_target(m, h, g, reduction="none").masked_fill((y < 0).unsqueeze(-1), 0.0).sum()
    ),
    "filled sums": lambda m, h, g, y: (
        by_target(m, h, g, reduction="none").sum(-1).masked_fill(y < 0, 0.0).sum()
    ),
    "by hand": lambda m, h, g, y: (lambda s, t: (t.exp() * (t - s)).sum(-1).mean())(*logs(m, h, g)),
    "symmetric": lambda m, h, g, y: (lambda s, t: ((t.exp() - s.exp()) * (t - s)).sum(-1).mean())(
        *logs(m, h, g)
    ),
    "xlogy": lambda m, h, g, y: (lambda s, q: (torch.xlogy(q, q) - q * s).sum(-1).mean())(
        m.head(h).log_softmax(-1), m.teach(g).softmax(-1)
    ),
    "logaddexp": lambda m, h, g, y: (
        lambda s, t: (t.exp() * (t - torch.logaddexp(s, t) + 0.6931471805599453)).sum(-1).mean()
    )(*logs(m, h, g)),
    "two sums": lambda m, h, g, y: (
        lambda s, t: ((t.exp() * (t - s)).sum(-1) - 0.25 * (s.exp() * (t - s)).sum(-1)).mean()
    )(*logs(m, h, g)),
    "two totals": lambda m, h, g, y: (
        lambda s, t: (
            F.kl_div(s, t, reduction="batchmean", log_target=True)
            - 0.25 * F.kl_div(t, s, reduction="batchmean", log_target=True)
        )
    )(*logs(m, h, g)),
    "Liger": lambda m, h, g, y: (
        lambda s, t: (
            lambda mixed: (
                0.3 * F.kl_div(mixed, t, reduction="sum", log_target=True)
                + 0.7 * F.kl_div(mixed, s, reduction="sum", log_target=True)
            )
        )(torch.lerp(s.exp(), t.exp(), 0.3).log())
    )(*logs(m, h, g)),
    "TRL": gkd,
    "torchtune": forward_kl,
    "torchtune, finite logits": without_bias,
    "mixture of probabilities": jsd_of_probabilities,
    "class probabilities": lambda m, h, g, y: F.cross_entropy(
        m.head(h).view(-1, V), m.teach(g).softmax(-1).view(-1, V)
    ),
    "class probabilities, sum": lambda m, h, g, y: F.cross_entropy(
        m.head(h).view(-1, V), m.teach(g).softmax(-1).view(-1, V), reduction="sum"
    ),
    "detached weights": lambda m, h, g, y: F.kl_div(
        m.head(h).log_softmax(-1), m.of_teacher(g).detach().softmax(-1), reduction="batchmean"
    ),
    "shifted rows": lambda m, h, g, y: F.kl_div(
        m.head(h)[:, :-1].flatten(0, 1).log_softmax(-1),
        m.teach(g)[:, :-1].reshape(-1, V).softmax(-1),
        reduction="batchmean",
    ),
    "some of the teacher's classes": lambda m, h, g, y: F.kl_div(
        F.linear(h, m.head.weight[:40]).log_softmax(-1),
        m.teach(g)[..., :40].softmax(-1),
        reduction="batchmean",
    ),
}


def top_k(m: Pair, h: Tensor, g: Tensor, k: int = 5) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and indices of the teacher's k likeliest classes."""
    with torch.no_grad():
        found = m.of_teacher(g).log_softmax(-1).topk(k)
    return found.values, found.indices


def with_the_rest(m: Pair, h: Tensor, g: Tensor, y: Tensor) -> Tensor:
    """Return the divergence of k classes, and of one more with the mass of all others."""
    t, i = top_k(m, h, g)
    s = m.head(h).log_softmax(-1).gather(-1, i)
    rest = [torch.log1p(-x.exp().sum(-1, keepdim=True)) for x in (s, t)]
    s, t = torch.cat([s, rest[0]], -1), torch.cat([t, rest[1]], -1)
    return F.kl_div(s, t, reduction="none", log_target=True).sum(-1).mean()


def picked(m: Pair, h: Tensor, g: Tensor, *, softmax: Any, pick: Any) -> Tensor:
    t, i = top_k(m, h, g)
    s = pick(softmax(m.head(h) / 2), i)
    return -(t.exp() * s).sum(-1).mean()


CLASSES: dict[str, Function] = {
    "log-probabilities": lambda m, h, g, y: picked(
        m, h, g, softmax=lambda z: F.log_softmax(z, -1), pick=lambda s, i: s.gather(-1, i)
    ),
    "log-probabilities in fp64": lambda m, h, g, y: picked(
        *(m, h, g),
        softmax=lambda z: F.log_softmax(z, -1, dtype=torch.float64),
        pick=lambda s, i: torch.gather(s, -1, i),
    ),
    "take_along_dim": lambda m, h, g, y: picked(
        *(m, h, g),
        softmax=lambda z: z.log_softmax(-1),
        pick=lambda s, i: torch.take_along_dim(s, i - V, dim=-1),
    ),
    "probabilities": lambda m, h, g, y: picked(
        m, h, g, softmax=lambda z: z.softmax(-1), pick=lambda s, i: s.gather(-1, i).log()
    ),
    "renormalised": lambda m, h, g, y: picked(
        m, h, g, softmax=lambda z: z, pick=lambda z, i: z.gather(-1, i).log_softmax(-1)
    ),
    "with the rest": with_the_rest,
    "indices that repeat": lambda m, h, g, y: (
        m.head(h).log_softmax(-1).gather(-1, torch.stack([y, y, y + 1], -1).clamp(0, V - 1)).sum()
    ),
}
ROWS: dict[str, Function] = {
    "rows": lambda m, h, g, y: by_target(m, h, g, reduction="none").sum(-1),
    "mean of a row": lambda m, h, g, y: by_target(m, h, g, reduction="none").mean(-1),
    "rows, squared": lambda m, h, g, y: by_target(m, h, g, reduction="none").sum(-1).square(),
    "class probabilities, none": lambda m, h, g, y: F.cross_entropy(
        m.head(h).view(-1, V), m.teach(g).softmax(-1).view(-1, V), reduction="none"
    ),
    "checkpoint": lambda m, h, g, y: checkpoint(
        lambda h: by_target(m, h, g, reduction="batchmean"), h, use_reentrant=False
    ),
}


def compiled(model: Pair, **settings: Any) -> Any:
    torch._dynamo.reset()
    memeff_compile.reset()
    options = {"memeff.inner": "eager", **settings.pop("options", {})}
    return torch.compile(model, backend="memeff", options=options, **settings)


def records() -> list[Record]:
    return [r for r in memeff_compile.last_report().records if r.pass_name == NAME]


def gradients(model: Pair, loss: Tensor, h: Tensor) -> list[Tensor | None]:
    weights = torch.linspace(1, 2, loss.numel(), dtype=loss.dtype).view(loss.shape)
    wanted = (h, model.head.weight, model.head.bias)
    return list(torch.autograd.grad((loss * weights).sum(), wanted, allow_unused=True))


@pytest.mark.parametrize("name", [*TOTALS, *ROWS])
def test_a_spelling_is_fused_and_equals_eager(name: str) -> None:
    function = (TOTALS | ROWS)[name]
    model, given = Pair(function), inputs()
    found = compiled(model, fullgraph=True)(*given)
    (record,) = records()
    assert record.action == "rewrote"
    in_one = "in four products" in record.sentence
    assert in_one == (name in TOTALS), record.sentence
    wanted = model(*given)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
    pairs = zip(gradients(model, found, given[0]), gradients(model, wanted, given[0]), strict=True)
    for got, expected in pairs:
        if expected is not None:
            torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("function", CLASSES.values(), ids=CLASSES)
def test_several_classes_of_each_row_are_fused_and_equal_eager(function: Function) -> None:
    model, given = Pair(function), inputs()
    found = compiled(model, fullgraph=True)(*given)
    (record,) = [r for r in records() if r.action == "rewrote"]
    assert "linear_divergence_classes" in record.sentence
    wanted = model(*given)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
    pairs = zip(gradients(model, found, given[0]), gradients(model, wanted, given[0]), strict=True)
    for got, expected in pairs:
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("inner", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_other_inner_compilers_give_the_same_numbers(inner: str) -> None:
    model, given = Pair(gkd), inputs()
    found = compiled(model, options={"memeff.inner": inner})(*given)
    wanted = model(*given)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
    for got, expected in zip(
        gradients(model, found, given[0]), gradients(model, wanted, given[0]), strict=True
    ):
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["TRL", "rows", "masked classes"])
def test_no_tensor_of_the_graph_has_a_number_per_row_and_class(name: str) -> None:
    compiled(Pair((TOTALS | ROWS)[name]))(*inputs())
    (graph,) = memeff_compile.graphs()
    assert "memeff.linear_divergence" in graph.after
    assert f"{B}, {L}, {V}]" in graph.before
    assert f"{B}, {L}, {V}]" not in graph.after


def test_given_logits_of_a_teacher_are_read_as_they_are() -> None:
    def function(m: Pair, h: Tensor, t: Tensor, y: Tensor) -> Tensor:
        return F.kl_div((m.head(h) / 2).log_softmax(-1), (t / 2).softmax(-1), reduction="batchmean")

    model, (h, _, y) = Pair(function), inputs()
    teacher = torch.randn(B, L, V, dtype=torch.float64)
    found = compiled(model, fullgraph=True)(h, teacher, y)
    (record,) = records()
    assert "a head and the teacher's logits" in record.sentence
    torch.testing.assert_close(found, model(h, teacher, y))


def test_a_cross_entropy_of_the_same_logits_is_fused_too() -> None:
    def function(m: Pair, h: Tensor, g: Tensor, y: Tensor) -> Tensor:
        z = m.head(h)
        hard = F.cross_entropy(z.view(-1, V), y.view(-1))
        soft = F.kl_div((z / 2).log_softmax(-1), (m.teach(g) / 2).softmax(-1), reduction="sum")
        return 0.5 * hard + 0.5 * soft

    model, given = Pair(function), inputs()
    found = compiled(model, fullgraph=True)(*given)
    actions = {r.pass_name: r.action for r in memeff_compile.last_report().records}
    assert actions == {NAME: "rewrote", "fuse_linear_cross_entropy": "rewrote"}
    torch.testing.assert_close(found, model(*given))


def test_batches_and_lengths_may_vary() -> None:
    model, (h, g, y) = Pair(TOTALS["masked rows"]), inputs()
    called = compiled(model, dynamic=True)
    for batch in (2, 1):
        given = h[:batch], g[:batch], y[:batch]
        torch.testing.assert_close(called(*given), model(*given))
    assert {r.action for r in records()} == {"rewrote"}


def test_autocast_computes_both_heads_in_16_bits() -> None:
    model, given = Pair(TOTALS["batchmean"], torch.float32), inputs(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found = compiled(model, fullgraph=True)(*given)
        wanted = model(*given)
    (record,) = records()
    assert record.action == "rewrote"
    exact = Pair(TOTALS["batchmean"]).double()
    exact.load_state_dict({k: v.double() for k, v in model.state_dict().items()})
    truth = exact(given[0].double(), given[1].double(), given[2])
    assert found.dtype == wanted.dtype
    assert (found - truth).abs() <= 2 * (wanted - truth).abs() + 1e-3


def test_a_step_without_gradients_is_fused() -> None:
    model, given = Pair(TOTALS["batchmean"]), inputs()
    with torch.no_grad():
        torch.testing.assert_close(compiled(model)(*given), model(*given))
    (record,) = records()
    assert record.action == "rewrote"


@pytest.mark.parametrize("is_size", [False, True], ids=["TRL", "the number of rows"])
def test_rows_that_a_mask_selects_are_summed_where_dynamo_captures_them(is_size: bool) -> None:
    """As TRL's generalised divergence selects the rows with a label."""

    def selected(m: Pair, h: Tensor, g: Tensor, y: Tensor) -> Tensor:
        s, t = logs(m, h, g)
        every, mask = F.kl_div(s, t, reduction="none", log_target=True), y != -100
        every = every[mask]
        return every.sum() / (every.size(0) if is_size else mask.sum())

    model, given = Pair(selected), inputs()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        found = compiled(model, fullgraph=True)(*given)
    actions = [record.action for record in records()]
    assert actions == (["declined"] if is_size else ["rewrote"])
    wanted = model(*given)
    torch.testing.assert_close(found, wanted)
    pairs = zip(gradients(model, found, given[0]), gradients(model, wanted, given[0]), strict=True)
    for got, expected in pairs:
        torch.testing.assert_close(got, expected)


def written(m: Pair, h: Tensor, g: Tensor, y: Tensor) -> Tensor:
    s = m.head(h).log_softmax(-1)
    t = m.teach(g)
    q = t.softmax(-1)
    g.zero_()
    return F.kl_div(s, q, reduction="sum")


DECLINED: dict[str, tuple[Function, str]] = {
    "a teacher that trains": (
        lambda m, h, g, y: F.kl_div(
            m.head(h).log_softmax(-1), m.of_teacher(g).softmax(-1), reduction="sum"
        ),
        "teacher_trains",
    ),
    "a softcap": (
        lambda m, h, g, y: F.kl_div(
            (30 * torch.tanh(m.head(h) / 30)).log_softmax(-1), m.teach(g).softmax(-1)
        ),
        "side_unsupported",
    ),
    "logits that are squared": (
        lambda m, h, g, y: (
            lambda z: (
                F.kl_div(z.log_softmax(-1), m.teach(g).softmax(-1), reduction="sum")
                + z.square().sum()
            )
        )(m.head(h)),
        "logits_reused(square)",
    ),
    "the divergence of every class": (
        lambda m, h, g, y: F.kl_div(
            m.head(h).log_softmax(-1), m.teach(g).softmax(-1), reduction="none"
        ),
        "divergence",
    ),
    "targets of another kind": (
        lambda m, h, g, y: F.kl_div(
            m.head(h).log_softmax(-1), torch.ones_like(m.teach(g)) / V, reduction="sum"
        ),
        "divergence",
    ),
    "an in-place write": (written, "mutated"),
}


@pytest.mark.parametrize(("function", "code"), DECLINED.values(), ids=DECLINED)
def test_a_divergence_that_is_not_fused_has_a_reason(function: Function, code: str) -> None:
    model, (h, g, y) = Pair(function), inputs()
    found = compiled(model)(h, g.clone(), y)
    (record,) = records()
    assert (record.action, record.code) == ("declined", code)
    assert record.hint
    torch.testing.assert_close(found, model(h, g.clone(), y))


def halves(s: Tensor, t: Tensor) -> Tensor:
    """As DistiLLM writes both halves of a divergence: each with its own mean over the rows."""
    mixed = (0.3 * s.exp() + 0.7 * t.exp()).log()
    of_teacher = (t.exp() * (t - mixed)).sum(-1).view(-1).mean()
    return 0.7 * of_teacher + 0.3 * (s.exp() * (s - mixed)).sum(-1).view(-1).mean()


def two_halves(m: Pair, h: Tensor, g: Tensor, y: Tensor) -> Tensor:
    return halves(*logs(m, h, g))


def two_teachers(m: Pair, h: Tensor, g: Tensor, y: Tensor) -> Tensor:
    s, t = logs(m, h, g)
    other = (m.teach(g.sin()) / 2).softmax(-1)
    kept = y.float() / 7
    second = (F.kl_div(s, other, reduction="none").sum(-1) * kept).sum() / kept.sum()
    return F.kl_div(s, t.exp(), reduction="batchmean") + second


@pytest.mark.parametrize("function", [two_halves, two_teachers])
def test_several_divergences_of_the_same_logits_are_fused_one_by_one(function: Function) -> None:
    model, given = Pair(function), inputs()
    found = compiled(model, fullgraph=True)(*given)
    assert [record.action for record in records()] == ["rewrote"] * 2
    assert "these logits have 2 divergences" in records()[1].sentence
    assert [bool(record.bytes_before) for record in records()] == [True, False]
    (graph,) = memeff_compile.graphs()
    assert f"{B}, {L}, {V}]" not in graph.after
    wanted = model(*given)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
    pairs = zip(gradients(model, found, given[0]), gradients(model, wanted, given[0]), strict=True)
    for got, expected in pairs:
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("third", ["itself", "a teacher that trains"])
def test_divergences_of_the_same_logits_stay_if_one_cannot_be_fused(third: str) -> None:
    def function(m: Pair, h: Tensor, g: Tensor, y: Tensor) -> Tensor:
        s, t = logs(m, h, g)
        other = s.detach() if third == "itself" else (m.of_teacher(g.sin()) / 2).log_softmax(-1)
        kept = F.kl_div(s, other.exp(), reduction="none").sum(-1).mean()
        return halves(s, t) + F.kl_div(s, t.exp(), reduction="sum") + kept

    model, (h, g, y) = Pair(function), inputs()
    found = compiled(model)(h, g, y)
    assert {record.action for record in records()} == {"declined"}
    assert all(record.hint for record in records())
    torch.testing.assert_close(found, model(h, g, y))


def test_probabilities_that_nothing_reads_do_not_stop_a_divergence() -> None:
    def function(m: Pair, h: Tensor, g: Tensor, y: Tensor) -> Tensor:
        s, t = m.head(h), m.teach(g)
        unread = s.softmax(-1), t.softmax(-1).log().sum(-1)  # noqa: F841
        return by_hand(s.log_softmax(-1), t.log_softmax(-1))

    def by_hand(s: Tensor, t: Tensor) -> Tensor:
        return (t.exp() * (t - s)).sum(-1).mean()

    model, given = Pair(function), inputs()
    found = compiled(model, fullgraph=True)(*given)
    assert [record.action for record in records()] == ["rewrote"]
    assert f"{B}, {L}, {V}]" not in memeff_compile.graphs()[0].after
    torch.testing.assert_close(found, model(*given))


def test_a_divergence_stays_if_another_of_its_logits_is_skipped() -> None:
    def function(m: Pair, h: Tensor, g: Tensor, y: Tensor) -> Tensor:
        s, t = logs(m, h, g)
        found: Tensor = F.kl_div(s, t.exp(), reduction="sum") + m.get_submodule("own")(s, t.exp())
        return found

    model, (h, g, y) = Pair(function), inputs()
    model.add_module("own", nn.KLDivLoss(reduction="batchmean"))
    found = compiled(model, options={"memeff.skip": "own"})(h, g, y)
    assert [(record.action, record.code) for record in records()] == [("declined", "skipped")] * 2
    torch.testing.assert_close(found, model(h, g, y))


def test_logits_scaled_by_a_tensor_are_declined() -> None:
    def function(m: Pair, h: Tensor, g: Tensor, y: Tensor) -> Tensor:
        z = m.head(h) * g.mean().exp()
        return F.kl_div(z.log_softmax(-1), m.teach(g).softmax(-1), reduction="sum")

    compiled(Pair(function))(*inputs())
    (record,) = records()
    assert record.code == "side_unsupported"


NEAR_MISSES: dict[str, Function] = {
    "classes of each row over the rows": lambda m, h, g, y: (
        m.head(h).log_softmax(-1).gather(1, torch.zeros(B, 2, V, dtype=torch.int64)).sum()
    ),
    "a router's own choice": lambda m, h, g, y: (
        lambda z: z.softmax(-1).gather(-1, z.topk(4).indices).square().sum()
    )(m.head(h)),
    "classes of some rows": lambda m, h, g, y: (
        m.head(h).log_softmax(-1).gather(-1, torch.ones(B, 2, 3, dtype=torch.int64)).sum()
    ),
    "an entropy": lambda m, h, g, y: (lambda s: -(s.exp() * s).sum(-1).mean())(
        m.head(h).log_softmax(-1)
    ),
    "a sum over the rows": lambda m, h, g, y: (lambda s, t: (t.exp() * (t - s)).sum(0).mean())(
        *logs(m, h, g)
    ),
    "a product of probabilities": lambda m, h, g, y: (
        lambda s, t: (t.exp() * s.exp()).sum(-1).mean()
    )(*logs(m, h, g)),
    "shares that are not one": lambda m, h, g, y: (
        lambda s, t: (t.exp() * (t - (0.5 * s.exp() + 0.6 * t.exp()).log())).sum(-1).mean()
    )(*logs(m, h, g)),
    "squared differences": lambda m, h, g, y: (lambda s, t: ((t - s) ** 2).sum(-1).mean())(
        *logs(m, h, g)
    ),
    "a factor per class": lambda m, h, g, y: (
        lambda s, t: (torch.arange(V) * t.exp() * (t - s)).sum(-1).mean()
    )(*logs(m, h, g)),
    "a softmax over the rows": lambda m, h, g, y: (lambda s, t: (t.exp() * (t - s)).sum(-1).mean())(
        m.head(h).log_softmax(1), m.teach(g).log_softmax(1)
    ),
}


@pytest.mark.parametrize("function", NEAR_MISSES.values(), ids=NEAR_MISSES)
def test_what_only_looks_like_a_divergence_is_left_alone(function: Function) -> None:
    model, given = Pair(function), inputs()
    found = compiled(model)(*given)
    assert all(record.action != "rewrote" for record in records())
    assert not [record for record in records() if record.code.startswith("logits_reused")]
    torch.testing.assert_close(found, model(*given))


def test_a_long_chain_of_sums_is_read_once() -> None:
    def function(m: Pair, h: Tensor, g: Tensor, y: Tensor) -> Tensor:
        x = m.head(h).softmax(-1)
        for _ in range(22):
            x = (x + 1) * (x - 1) * x
        return x.sum(-1).mean()

    compiled(Pair(function))(*inputs())
    assert records() == []


def test_logits_that_are_returned_too_are_deferred() -> None:
    def function(m: Pair, h: Tensor, g: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        z = m.head(h)
        return F.kl_div(z.log_softmax(-1), m.teach(g).softmax(-1), reduction="sum"), z

    model, given = Pair(function), inputs()
    loss, logits = compiled(model, fullgraph=True)(*given)
    wanted = model(*given)
    assert {r.action for r in memeff_compile.last_report().records} == {"rewrote", "deferred"}
    torch.testing.assert_close(loss, wanted[0])
    torch.testing.assert_close(logits + 0, wanted[1])


def test_the_report_says_that_few_rows_take_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuse_divergence, "_engine", lambda info, match: "kept_logits")
    compiled(Pair(TOTALS["batchmean"]))(*inputs())
    (record,) = records()
    assert "2048 rows or fewer take 1.03 to 1.09 times Inductor's time" in record.sentence
    assert op_folder.cost_of_few_rows(2049) == ""


def test_the_switch_leaves_the_graph_alone() -> None:
    model, given = Pair(TOTALS["batchmean"]), inputs()
    found = compiled(model, options={"memeff.divergence": "off"})(*given)
    assert records() == []
    torch.testing.assert_close(found, model(*given))


def test_explain_names_the_divergence() -> None:
    plan = memeff_compile.explain(Pair(TOTALS["batchmean"], torch.float32), *inputs(torch.float32))
    assert "memeff::linear_divergence" in str(plan)


def test_two_softmaxes_of_one_head_stay_as_they_are() -> None:
    """The op would multiply by the head twice, once for each side."""

    def itself(m: Pair, h: Tensor, g: Tensor, y: Tensor) -> Tensor:
        z = m.head(h)
        return F.kl_div((z / 2).log_softmax(-1), z.detach().softmax(-1), reduction="batchmean")

    model, (h, g, y) = Pair(itself), inputs()
    found = compiled(model)(h, g, y)
    torch.testing.assert_close(found, model(h, g, y))
    assert not [record for record in records() if record.action == "rewrote"]
