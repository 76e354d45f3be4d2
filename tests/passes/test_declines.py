"""Every reason to leave a loss alone: its code, sentence, way out and source line, and eager's result."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import memeff_compile
from memeff_compile import passes
from memeff_compile.report import Record
from tests.support.captured_graphs import compare_with_eager
from tests.support.surfaces import D, V

Function = Callable[..., Any]


@dataclass(frozen=True)
class Refusal:
    """A function of (hidden, weight, bias, labels) and the record it must leave."""

    code: str
    function: Function
    sentence: str
    hint: str = ""
    line: str = "cross_entropy"
    settings: dict[str, Any] = field(default_factory=dict)


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (
        torch.randn(size, generator=generator, dtype=dtype) for size in ((2, 8, D), (V, D), (V,))
    )
    labels = torch.randint(0, V, (2, 8), generator=generator)
    return hidden.requires_grad_(), weight.requires_grad_(), bias.requires_grad_(), labels


# --- one function per code ------------------------------------------------------------------------------


def prob_targets(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    target = torch.full((16, V), 1 / V, dtype=h.dtype)
    return F.cross_entropy(F.linear(h, w).view(-1, V), target)


@torch.compiler.allow_in_graph
def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """A loss of somebody else's that only shares its name with PyTorch's."""
    return F.cross_entropy(logits * 2, labels)


def unreadable_loss(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    return cross_entropy(F.linear(h, w).view(-1, V), y.view(-1))


def not_log_softmax(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    return F.nll_loss(F.linear(h, w).view(-1, V), y.view(-1))


def setting_not_constant(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    return F.cross_entropy(F.linear(h, w).view(-1, V), y.view(-1), ignore_index=h.shape[1])


def logits_reused(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    logits = F.linear(h, w)
    return F.cross_entropy(logits.view(-1, V), y.view(-1)), logits.amax(-1)


def log_probs_reused(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    log_probs = F.linear(h, w).view(-1, V).log_softmax(-1)
    return F.nll_loss(log_probs, y.view(-1)), log_probs


def log_probs_squared(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    log_probs = F.linear(h, w).view(-1, V).log_softmax(-1)
    return F.nll_loss(log_probs, y.view(-1)) - 0.1 * log_probs.square().mean()


def logits_gathered(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    logits = F.linear(h, w)
    picked = logits.gather(-1, y.unsqueeze(-1))
    return F.cross_entropy(logits.view(-1, V), y.view(-1)) + picked.mean()


def no_linear_head(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    return F.cross_entropy(F.relu(F.linear(h, w)).view(-1, V), y.view(-1))


def logits_from_outside(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    logits = F.linear(h, w)
    torch._dynamo.graph_break()
    return F.cross_entropy(logits.view(-1, V), y.view(-1))


wide = torch.nn.Parameter(torch.linspace(-1, 1, 96 * D, dtype=torch.float64).view(96, D))


def loss_elsewhere(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    return F.linear(h, wide)


def head_scaled(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    return F.cross_entropy(torch.addmm(b, h.view(-1, D), w.t(), alpha=2.0), y.view(-1))


def scale_not_constant(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    return F.cross_entropy((F.linear(h, w) * b).view(-1, V), y.view(-1))


def scale_not_finite(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    return F.cross_entropy((F.linear(h, w) * 0.0).view(-1, V), y.view(-1))


def logits_combined(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    both = F.linear(h, w) + F.linear(h.sin(), w)
    return F.cross_entropy(both.view(-1, V), y.view(-1))


def unknown_step(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    logits = F.linear(h, w)[..., torch.arange(V).roll(1)]
    return F.cross_entropy(logits.view(-1, V), y.view(-1))


def classes_moved_and_more(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    logits = F.linear(h, w).transpose(1, 2)[:, :, :4]
    return F.cross_entropy(logits, y[:, :4])


def gather_behind_moved_classes(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    log_probs = F.linear(h, w).transpose(1, 2).log_softmax(-1)
    return log_probs.gather(-1, y[:, :1, None].expand(-1, V, 1) % 8).mean()


def rows_differ(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    log_probs = F.linear(h, w).log_softmax(-1)
    return log_probs.gather(-1, y[:, 1:].unsqueeze(-1)).mean()


def vocabulary_split(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    return F.cross_entropy(F.linear(h, w).view(-1, V // 2), y.repeat(1, 2).view(-1) % (V // 2))


def classes_in_the_middle(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    return F.cross_entropy(F.linear(h, w), y[:, :1].expand(-1, V) % 8)


def softcap_twice(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    return F.cross_entropy(F.linear(h, w).tanh().tanh().view(-1, V), y.view(-1))


def bias_after_softcap(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    return F.cross_entropy((F.linear(h, w).tanh() + b).view(-1, V), y.view(-1))


def dtype_unsupported(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    return F.cross_entropy(F.linear(h.float(), w.float()).double().view(-1, V), y.view(-1))


def integer_head(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    logits = F.linear((h * 4).to(torch.int64), (w * 4).to(torch.int64))
    return F.cross_entropy(logits.float().view(-1, V), y.view(-1))


def dynamic_vocabulary(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    logits = F.linear(h, w)
    return F.cross_entropy(logits.view(-1, logits.shape[-1]), y.view(-1))


def vocab_too_small(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    return F.cross_entropy(F.linear(h, w[:31]).view(-1, 31), y.view(-1) % 31)


def class_weight(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    with torch.no_grad():  # with gradients eager refuses such weights, too
        return F.cross_entropy(F.linear(h, w).view(-1, V), y.view(-1), weight=b.requires_grad_())


def detached(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    return F.cross_entropy(F.linear(h, w).detach().view(-1, V), y.view(-1)), h.sum()


def region_mismatch(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    logits = F.linear(h, w)
    with torch.no_grad():
        return F.cross_entropy(logits.view(-1, V), y.view(-1)), h.sum()


def mutated(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    logits = F.linear(h, w)
    y[:, 0] = 3
    return F.cross_entropy(logits.view(-1, V), y.view(-1))


def logits_mutated(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    logits = F.linear(h, w)
    logits.add_(1.0)
    return F.cross_entropy(logits.view(-1, V), y.view(-1))


def logits_leave_checkpoint(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    def body(h: Tensor, w: Tensor) -> Any:
        logits = F.linear(h, w)
        return F.cross_entropy(logits.view(-1, V), y.view(-1)), logits

    return checkpoint(body, h, w, use_reentrant=False)


def logits_kept(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    logits = F.linear(h, w)
    return F.cross_entropy(logits.view(-1, V), y.view(-1)), logits


def logits_not_deferrable(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    logits = F.linear(h, w * 2)
    return F.cross_entropy(logits.view(-1, V), y.view(-1)), logits


REFUSALS = [
    Refusal("prob_targets", prob_targets, "probabilities, not class indices", "integer class"),
    Refusal("unreadable_loss", unreadable_loss, "arguments this pass does not read"),
    Refusal("not_log_softmax", not_log_softmax, "log_softmax over its classes", line="nll_loss"),
    Refusal(
        "setting_not_constant",
        setting_not_constant,
        "varies from call to call",
        "fixed number",
        settings={"dynamic": True},
    ),
    Refusal("logits_reused(amax)", logits_reused, "also used by `amax`", "outside the compiled"),
    Refusal(
        "logits_reused(output)",
        log_probs_reused,
        "log-probabilities are also used by `output` as an output",
        "the log-probabilities of them outside",
        line="nll_loss",
    ),
    Refusal(
        "logits_reused(square)",
        log_probs_squared,
        "log-probabilities are also used by `square`",
        "log_probs.gather(-1, y).exp()",
        line="nll_loss",
    ),
    Refusal(
        "logits_reused(gather)",
        logits_gathered,
        "without their logsumexp",
        "gather from log_softmax",
        line="logits.gather",
    ),
    Refusal("no_linear_head", no_linear_head, "come from `relu`, which is not a linear head"),
    Refusal(
        "graph_break_between",
        logits_from_outside,
        "the head that made them is in another graph",
        "fullgraph=True",
        settings={"fullgraph": False},
    ),
    Refusal(
        "graph_break_between",
        loss_elsewhere,
        "logits over 96 classes and no loss",
        "pass labels=",
        line="F.linear",
        settings={"options": {"memeff.logits": "eager"}},
    ),
    Refusal("head_scaled", head_scaled, "addmm with beta or alpha other than 1"),
    Refusal("scale_not_constant", scale_not_constant, "each class", "rows of the weight"),
    Refusal("scale_not_constant", scale_not_finite, "scales by 0.0"),
    Refusal("logits_combined", logits_combined, "other than a vector over the vocabulary"),
    Refusal("unknown_step", unknown_step, "is not a known row move", "on the hidden states"),
    Refusal("unknown_step", classes_moved_and_more, "is not a known row move"),
    Refusal(
        "unknown_step",
        gather_behind_moved_classes,
        "another dimension than the classes",
        line="gather",
    ),
    Refusal("rows_differ", rows_differ, "may have fewer rows", "dynamic=True", line="gather"),
    Refusal("class_dim_changed", vocabulary_split, "changes the vocabulary dimension"),
    Refusal(
        "class_dim_changed", classes_in_the_middle, "from dimension 1", "transpose(1, 2) the logits"
    ),
    Refusal("softcap_twice", softcap_twice, "through tanh twice"),
    Refusal("bias_after_softcap", bias_after_softcap, "added after the softcap"),
    Refusal("dtype_unsupported", dtype_unsupported, "to torch.float64", "cast them to float32"),
    Refusal("dtype_unsupported", integer_head, "hidden has dtype int64; bfloat16"),
    Refusal(
        "dynamic_vocabulary",
        dynamic_vocabulary,
        "vocabulary size is dynamic",
        "mark only batch and length dynamic",
        settings={"dynamic": True},
    ),
    Refusal("vocab_too_small", vocab_too_small, "31 classes"),
    Refusal("class_weight", class_weight, "class weights need a gradient", "detach them"),
    Refusal("detached", detached, "reads detached logits"),
    Refusal(
        "region_mismatch", region_mismatch, "switched differently from the head", "same no_grad"
    ),
    Refusal("mutated", mutated, "`setitem` writes in place", "out-of-place"),
    Refusal("mutated", logits_mutated, "`add_` writes in place", "out-of-place"),
    Refusal(
        "logits_leave_checkpoint",
        logits_leave_checkpoint,
        "leave an activation checkpoint",
        "return only the loss",
        line="F.linear",
    ),
    Refusal(
        "logits_kept",
        logits_kept,
        "memeff.logits is 'eager'",
        "'deferred' or 'none'",
        line="F.linear",
        settings={"options": {"memeff.logits": "eager"}},
    ),
    Refusal(
        "logits_not_deferrable",
        logits_not_deferrable,
        "is computed inside the graph",
        "{'memeff.logits': 'none'}",
        line="F.linear",
    ),
]


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda r: r.function.__name__)
def test_refusal_is_explained_and_equals_eager(refusal: Refusal) -> None:
    outcome = compare_with_eager(refusal.function, *inputs(), rtol=1e-6, **refusal.settings)
    assert outcome.fired == 0, outcome.report.details()
    record = outcome.declined(refusal.code)
    assert_explains(record, refusal)
    assert len(outcome.codes) == 1, outcome.report.details()


def assert_explains(record: Record, refusal: Refusal) -> None:
    assert refusal.sentence.lower() in record.sentence.lower()
    assert refusal.hint.lower() in record.hint.lower()
    assert bool(record.hint) == bool(refusal.hint) or not refusal.hint
    assert re.match(rf"{Path(__file__).name}:\d+ in \w+: ", record.source), record.source
    assert refusal.line in record.source
    text = str(record)
    assert record.code in text
    assert " ".join(record.sentence.split()) in " ".join(text.split())


# --- weights that are not plain tensors ------------------------------------------------------------------


def test_subclass_weight_is_refused_by_name() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    h, w, _, y = inputs()
    weight = torch.nn.Parameter(TwoTensor(w.detach(), w.detach().clone()))

    def function(h: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(h, weight).view(-1, V), y.view(-1))

    refusal = Refusal(
        "subclass_weight(TwoTensor)",
        function,
        "the head weight comes as a TwoTensor",
        "plain tensor",
    )
    compiled = torch.compile(function, backend="memeff", options={"memeff.inner": "aot_eager"})
    found, expected = compiled(h, y), function(h, y)
    torch.testing.assert_close(found.a, expected.a)
    (record,) = memeff_compile.last_report().records
    assert record.code == refusal.code
    assert_explains(record, refusal)


def test_a_loss_that_torch_func_transforms_is_refused_by_name() -> None:
    h, w, _, y = inputs()
    h, w = h.detach(), w.detach()

    def loss(w: Tensor, h: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(h, w).view(-1, V), y.view(-1))

    def function(w: Tensor, h: Tensor, y: Tensor) -> Any:
        return torch.func.grad(loss)(w, h, y)

    refusal = Refusal("torch_func", loss, "torch.func (grad, vmap, jvp)", "by backward()")
    compiled = torch.compile(function, backend="memeff", options={"memeff.inner": "aot_eager"})
    torch.testing.assert_close(compiled(w, h, y), function(w, h, y))
    (record,) = memeff_compile.last_report().records
    assert record.code == refusal.code
    assert_explains(record, refusal)


def test_what_the_op_itself_refuses_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    from memeff_compile.kernels import linear_cross_entropy as folder

    monkeypatch.setattr(folder, "supports", lambda *a, **k: "weight is stored as sparse rows.")
    outcome = compare_with_eager(logits_kept, *inputs())
    assert outcome.declined("unsupported").sentence == "Weight is stored as sparse rows."


def test_skipped_module_is_named() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lm_head = torch.nn.Linear(D, V, dtype=torch.float64)

        def forward(self, h: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(self.lm_head(h).view(-1, V), y.view(-1))

    model = Model()
    options = {"memeff.inner": "eager", "memeff.skip": "lm_head"}
    h, _, _, y = inputs()
    found = torch.compile(model, backend="memeff", options=options)(h, y)
    torch.testing.assert_close(found, model(h, y))
    (record,) = memeff_compile.last_report().records
    assert (record.code, record.module) == ("skipped", "lm_head")
    assert "memeff.skip names lm_head" in record.sentence


def test_logits_of_a_declined_loss_are_not_said_to_lack_one() -> None:
    def function(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
        logits = F.linear(h, w.repeat(2, 1))
        target = torch.full((16, 2 * V), 1 / V, dtype=h.dtype)
        return F.cross_entropy(logits.view(-1, 2 * V), target), logits

    assert compare_with_eager(function, *inputs()).codes == ["prob_targets"]


def test_every_code_in_the_source_has_a_test() -> None:
    folder = Path(passes.__file__).parent
    text = "".join(file.read_text() for file in folder.rglob("*.py"))
    written = set(re.findall(r'(?:Decline|Unfoldable)\(\s*f?"([a-z_]+)', text))
    assert len(written) > 60
    tests = Path(__file__).parents[1].rglob("test_*.py")
    tested = {code for file in tests for code in re.findall(r'"([a-z_]+)[("]', file.read_text())}
    assert written <= tested


UNREAD: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "probabilities": (lambda z: z.softmax(-1).square().sum(-1), ""),
    "log-probabilities": (lambda z: z.log_softmax(-1), ""),
    "an in-place write": (lambda z: z.softmax(-1).mul_(2), "logits_reused(softmax)"),
    "random numbers": (lambda z: F.dropout(z, 0.5), "logits_reused(dropout)"),
}


@pytest.mark.parametrize(("function", "code"), UNREAD.values(), ids=UNREAD)
def test_results_that_nothing_reads_do_not_stop_a_loss(
    function: Callable[[Tensor], Any], code: str
) -> None:
    def loss(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
        z = F.linear(h, w, b)
        unread = function(z)  # noqa: F841  # as a metric whose line was commented out
        return F.cross_entropy(z.flatten(0, 1), y.flatten())

    torch._dynamo.reset()
    memeff_compile.reset()
    h, w, b, y = inputs()
    found = torch.compile(loss, backend="memeff", options={"memeff.inner": "eager"})(h, w, b, y)
    (record,) = memeff_compile.last_report().records
    assert (record.action, record.code) == (("declined", code) if code else ("rewrote", "rewrote"))
    (graph,) = memeff_compile.graphs()
    assert ("softmax" in graph.after) == (code == "logits_reused(softmax)")
    torch.testing.assert_close(found, loss(h, w, b, y))
