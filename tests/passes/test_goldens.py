"""The graphs that go to the inner compiler, and the report, as text.

`make golden` rewrites the expected texts; read the difference before accepting it. Source lines and
times are taken out of the reports, so that the texts are the same on every machine and torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import memeff_compile
from memeff_compile.report import Report

expecttest = pytest.importorskip(
    "expecttest", reason="goldens are compared with expecttest, which is not installed here"
)

D, V = 16, 64


class Toy(nn.Module):
    """A head and a loss; `loss` says how they are written."""

    def __init__(self, loss: Callable[[Toy, Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.lm_head = nn.Linear(D, V, bias=False)
        self.loss = loss

    def forward(self, hidden: Tensor, labels: Tensor) -> Any:
        return self.loss(self, hidden, labels)


def run(loss: Callable[[Toy, Tensor, Tensor], Any], **settings: Any) -> None:
    """Compile a toy and call it once."""
    torch._dynamo.reset()
    memeff_compile.reset()
    toy = torch.compile(
        Toy(loss), backend="memeff", options={"memeff.inner": "eager"}, fullgraph=True, **settings
    )
    toy(torch.ones(2, 8, D), torch.zeros(2, 8, dtype=torch.int64))


def after() -> str:
    (graph,) = memeff_compile.graphs()
    return graph.after


def report() -> str:
    """Return the report's text without source lines and times."""
    graphs = [
        replace(g, seconds=0.0, records=tuple(replace(r, source="") for r in g.records))
        for g in memeff_compile.last_report().graphs
    ]
    return Report(tuple(graphs)).details()


def plain(toy: Toy, hidden: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(toy.lm_head(hidden).view(-1, V), labels.view(-1))


def as_transformers(toy: Toy, hidden: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    logits = toy.lm_head(hidden)
    shifted = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
    loss = F.cross_entropy(logits.float().view(-1, V), shifted.view(-1), ignore_index=-100)
    return loss, logits


def softcap_and_z_loss(toy: Toy, hidden: Tensor, labels: Tensor) -> Tensor:
    logits = torch.tanh(toy.lm_head(hidden) / 30.0) * 30.0
    z_loss = logits.logsumexp(-1).square().mean()
    return F.cross_entropy(logits.view(-1, V), labels.view(-1)) + 1e-4 * z_loss


def label_smoothing(toy: Toy, hidden: Tensor, labels: Tensor) -> Tensor:
    logits = toy.lm_head(hidden).view(-1, V)
    return F.cross_entropy(logits, labels.view(-1), label_smoothing=0.1)


def in_a_checkpoint(toy: Toy, hidden: Tensor, labels: Tensor) -> Tensor:
    return checkpoint(lambda h, y: plain(toy, h, y), hidden, labels, use_reentrant=False)


def last_position_dropped(toy: Toy, hidden: Tensor, labels: Tensor) -> Tensor:
    logits = toy.lm_head(hidden)[:, :-1]
    return F.cross_entropy(logits.reshape(-1, V), labels[:, 1:].reshape(-1), reduction="sum")


def log_probs(toy: Toy, hidden: Tensor, labels: Tensor) -> Tensor:
    picked = toy.lm_head(hidden).log_softmax(-1).gather(-1, labels.unsqueeze(-1))
    return picked.squeeze(-1)


def with_a_confidence(toy: Toy, hidden: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    logits = toy.lm_head(hidden)
    return F.cross_entropy(logits.view(-1, V), labels.view(-1)), logits.amax(-1).mean()


def with_metrics(toy: Toy, hidden: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logits = toy.lm_head(hidden)
    with torch.no_grad():
        accuracy = (logits.argmax(-1) == labels).float().mean()
        log_probs = logits.log_softmax(-1)
        entropy = -(log_probs.exp() * log_probs).sum(-1).mean()
    return F.cross_entropy(logits.view(-1, V), labels.view(-1)), accuracy, entropy


def padded_and_scaled(toy: Toy, hidden: Tensor, labels: Tensor) -> Tensor:
    scale = hidden.new_full((), 0.5).exp()
    logits = scale * toy.lm_head(hidden)[..., : V - 4]
    return F.cross_entropy(logits.reshape(-1, V - 4), labels.view(-1))


class TiedToy(nn.Module):
    """Two lookups in the table that the head reads."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(V, D, padding_idx=0)
        self.lm_head = nn.Linear(D, V, bias=False)
        self.lm_head.weight = self.embed.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        rows = self.embed(ids) + self.embed(labels.clamp(min=0))
        return F.cross_entropy(self.lm_head(rows).view(-1, V), labels.view(-1))


def test_a_cut_and_scaled_head_graph() -> None:
    run(padded_and_scaled)
    expecttest.assert_expected_inline(
        after(),
        """\
graph(
    hidden: input f32[2, 8, 16],
    lm_head.weight: param f32[64, 16],
    labels: input i64[2, 8],
):
    %0: f32[] = aten.new_full(hidden, (), 0.5)
    %1: f32[] = aten.exp(%0)
    %2: i64[16] = aten.view(labels, [-1])
    %3: f32[2, 8, 16] = aten.mul(hidden, %1)
    %4: f32[60, 16] = aten.slice(lm_head.weight, start=0, end=60)
    %5: i64[2, 8] = aten.reshape(%2, [2, 8])
    %6: (f32[2, 8], f32[2, 8], f32[0], f32[0], i64[0]) = memeff.linear_cross_entropy(%3, %4, None, %5, None, ignore_index=-100, scale=1.0, softcap=0.0, with_lse=False, with_logit_sum=False, gradient_filter='exact', workspace=0)
    %7: f32[2, 8] = getitem(%6, 0)
    %8: b8[2, 8] = aten.ne(%5, -100)
    %9: f32[] = aten.sum(%7)
    %10: i64[] = aten.sum(%8)
    %11: f32[] = aten.div(%9, %10)
    return (%11)""",
    )


def test_plain_graph() -> None:
    run(plain)
    expecttest.assert_expected_inline(
        after(),
        """\
graph(
    lm_head.weight: param f32[64, 16],
    hidden: input f32[2, 8, 16],
    labels: input i64[2, 8],
):
    %0: i64[16] = aten.view(labels, [-1])
    %1: i64[2, 8] = aten.reshape(%0, [2, 8])
    %2: (f32[2, 8], f32[2, 8], f32[0], f32[0], i64[0]) = memeff.linear_cross_entropy(hidden, lm_head.weight, None, %1, None, ignore_index=-100, scale=1.0, softcap=0.0, with_lse=False, with_logit_sum=False, gradient_filter='exact', workspace=0)
    %3: f32[2, 8] = getitem(%2, 0)
    %4: b8[2, 8] = aten.ne(%1, -100)
    %5: f32[] = aten.sum(%3)
    %6: i64[] = aten.sum(%4)
    %7: f32[] = aten.div(%5, %6)
    return (%7)""",
    )


def test_plain_graph_as_it_came() -> None:
    run(plain)
    (graph,) = memeff_compile.graphs()
    expecttest.assert_expected_inline(
        graph.before,
        """\
graph(
    lm_head.weight: param f32[64, 16],
    hidden: input f32[2, 8, 16],
    labels: input i64[2, 8],
):
    %0: f32[2, 8, 64] = aten.linear(hidden, lm_head.weight)
    %1: f32[16, 64] = aten.view(%0, [-1, 64])
    %2: i64[16] = aten.view(labels, [-1])
    %3: f32[] = aten.cross_entropy_loss(%1, %2)
    return (%3)""",
    )


def test_transformers_graph_with_returned_logits() -> None:
    run(as_transformers)
    expecttest.assert_expected_inline(
        after(),
        """\
graph(
    lm_head.weight: param f32[64, 16],
    hidden: input f32[2, 8, 16],
    labels: input i64[2, 8],
):
    %0: i64[2, 9] = aten.pad(labels, (0, 1), value=-100)
    %1: i64[2, 8] = aten.slice(%0, 1, 1)
    %2: i64[2, 8] = aten.contiguous(%1)
    %3: i64[16] = aten.view(%2, [-1])
    %4: i64[2, 8] = aten.reshape(%3, [2, 8])
    %5: (f32[2, 8], f32[2, 8], f32[0], f32[0], i64[0]) = memeff.linear_cross_entropy(hidden, lm_head.weight, None, %4, None, ignore_index=-100, scale=1.0, softcap=0.0, with_lse=False, with_logit_sum=False, gradient_filter='exact', workspace=0)
    %6: f32[2, 8] = getitem(%5, 0)
    %7: b8[2, 8] = aten.ne(%4, -100)
    %8: f32[] = aten.sum(%6)
    %9: i64[] = aten.sum(%7)
    %10: f32[] = aten.div(%8, %9)
    return (%10, hidden)""",
    )


def test_softcap_and_z_loss_graph() -> None:
    run(softcap_and_z_loss)
    expecttest.assert_expected_inline(
        after(),
        """\
graph(
    lm_head.weight: param f32[64, 16],
    hidden: input f32[2, 8, 16],
    labels: input i64[2, 8],
):
    %0: i64[16] = aten.view(labels, [-1])
    %1: i64[2, 8] = aten.reshape(%0, [2, 8])
    %2: (f32[2, 8], f32[2, 8], f32[0], f32[0], i64[0]) = memeff.linear_cross_entropy(hidden, lm_head.weight, None, %1, None, ignore_index=-100, scale=1.0, softcap=30.0, with_lse=True, with_logit_sum=False, gradient_filter='exact', workspace=0)
    %3: f32[2, 8] = getitem(%2, 0)
    %4: f32[2, 8] = getitem(%2, 1)
    %5: f32[2, 8] = aten.square(%4)
    %6: f32[] = aten.mean(%5)
    %7: b8[2, 8] = aten.ne(%1, -100)
    %8: f32[] = aten.sum(%3)
    %9: i64[] = aten.sum(%7)
    %10: f32[] = aten.div(%8, %9)
    %11: f32[] = aten.mul(%6, 0.0001)
    %12: f32[] = aten.add(%10, %11)
    return (%12)""",
    )


def test_label_smoothing_graph() -> None:
    run(label_smoothing)
    expecttest.assert_expected_inline(
        after(),
        """\
graph(
    lm_head.weight: param f32[64, 16],
    hidden: input f32[2, 8, 16],
    labels: input i64[2, 8],
):
    %0: i64[16] = aten.view(labels, [-1])
    %1: i64[2, 8] = aten.reshape(%0, [2, 8])
    %2: (f32[2, 8], f32[2, 8], f32[2, 8], f32[0], i64[0]) = memeff.linear_cross_entropy(hidden, lm_head.weight, None, %1, None, ignore_index=-100, scale=1.0, softcap=0.0, with_lse=False, with_logit_sum=True, gradient_filter='exact', workspace=0)
    %3: f32[2, 8] = getitem(%2, 2)
    %4: f32[2, 8] = getitem(%2, 0)
    %5: f32[2, 8] = getitem(%2, 1)
    %6: b8[2, 8] = aten.ne(%1, -100)
    %7: f32[] = aten.sum(%4)
    %8: i64[] = aten.sum(%6)
    %9: f32[] = aten.div(%7, %8)
    %10: f32[2, 8] = aten.mul(%5, 64.0)
    %11: f32[2, 8] = aten.sub(%10, %3)
    %12: f32[2, 8] = aten.zeros_like(%11)
    %13: f32[2, 8] = aten.where(%6, %11, %12)
    %14: f32[] = aten.sum(%13)
    %15: i64[] = aten.sum(%6)
    %16: f32[] = aten.div(%14, %15)
    %17: f32[] = aten.mul(%9, 0.9)
    %18: f32[] = aten.mul(%16, 0.0015625)
    %19: f32[] = aten.add(%17, %18)
    return (%19)""",
    )


def test_checkpoint_graph() -> None:
    run(in_a_checkpoint)
    expecttest.assert_expected_inline(
        after(),
        """\
graph(
    hidden: input f32[2, 8, 16],
    labels: input i64[2, 8],
    lm_head.weight: param f32[64, 16],
):
    %0: (f32[]) = tag_activation_checkpoint(wrap_body_0, hidden, lm_head.weight, labels, use_reentrant=False)
    %1: f32[] = getitem(%0, 0)
    return (%1)
  wrap_body_0:
    graph(
        hidden: input f32[2, 8, 16],
        self_modules_lm_head_parameters_weight: input f32[64, 16],
        labels: input i64[2, 8],
    ):
        %0: i64[16] = aten.view(labels, [-1])
        %1: i64[2, 8] = aten.reshape(%0, [2, 8])
        %2: (f32[2, 8], f32[2, 8], f32[0], f32[0], i64[0]) = memeff.linear_cross_entropy(hidden, self_modules_lm_head_parameters_weight, None, %1, None, ignore_index=-100, scale=1.0, softcap=0.0, with_lse=False, with_logit_sum=False, gradient_filter='exact', workspace=0)
        %3: f32[2, 8] = getitem(%2, 0)
        %4: b8[2, 8] = aten.ne(%1, -100)
        %5: f32[] = aten.sum(%3)
        %6: i64[] = aten.sum(%4)
        %7: f32[] = aten.div(%5, %6)
        return (%7)""",
    )


def test_symbolic_sizes_graph() -> None:
    run(last_position_dropped, dynamic=True)
    expecttest.assert_expected_inline(
        after(),
        """\
graph(
    lm_head.weight: param f32[64, 16],
    s0: input size,
    s1: input size,
    hidden: input f32[s0, s1, 16],
    labels: input i64[s0, s1],
):
    %0: i64[s0, s1 - 1] = aten.slice(labels, 1, 1)
    %1: i64[s0*(s1 - 1)] = aten.reshape(%0, [-1])
    %2: f32[s0, s1 - 1, 16] = aten.slice(hidden, 1, end=-1)
    %3: f32[s0, s1 - 1] = aten.select(%2, -1, 0)
    %4: i64[s0, s1 - 1] = aten.reshape_as(%1, %3)
    %5: (f32[s0, s1 - 1], f32[s0, s1 - 1], f32[0], f32[0], i64[0]) = memeff.linear_cross_entropy(%2, lm_head.weight, None, %4, None, ignore_index=-100, scale=1.0, softcap=0.0, with_lse=False, with_logit_sum=False, gradient_filter='exact', workspace=0)
    %6: f32[s0, s1 - 1] = getitem(%5, 0)
    %7: b8[s0, s1 - 1] = aten.ne(%4, -100)
    %8: f32[] = aten.sum(%6)
    return (%8)""",
    )


def test_log_probs_graph() -> None:
    run(log_probs)
    expecttest.assert_expected_inline(
        after(),
        """\
graph(
    lm_head.weight: param f32[64, 16],
    hidden: input f32[2, 8, 16],
    labels: input i64[2, 8],
):
    %0: i64[2, 8, 1] = aten.unsqueeze(labels, -1)
    %1: i64[2, 8] = aten.reshape(%0, [2, 8])
    %2: (f32[2, 8], f32[2, 8], f32[0], f32[0], i64[0]) = memeff.linear_cross_entropy(hidden, lm_head.weight, None, %1, None, ignore_index=None, scale=1.0, softcap=0.0, with_lse=False, with_logit_sum=False, gradient_filter='exact', workspace=0)
    %3: f32[2, 8] = getitem(%2, 0)
    %4: f32[2, 8] = aten.neg(%3)
    %5: f32[2, 8, 1] = aten.reshape(%4, [2, 8, 1])
    %6: f32[2, 8] = aten.squeeze(%5, -1)
    return (%6)""",
    )


def by_hand(toy: Toy, hidden: Tensor, labels: Tensor) -> Tensor:
    logs, y = toy.lm_head(hidden).view(-1, V).log_softmax(-1), labels.view(-1)
    return -(0.9 * logs[torch.arange(16), y] + 0.1 * logs.mean(-1)).mean()


def one_hot_by_writes(toy: Toy, hidden: Tensor, labels: Tensor) -> Tensor:
    logs = toy.lm_head(hidden).log_softmax(-1)
    target = torch.zeros_like(logs).fill_(0.1 / (V - 1))
    target.scatter_(-1, labels.unsqueeze(-1), 0.9)
    return -(target * logs).sum(-1).mean()


def test_graph_of_a_loss_written_by_hand() -> None:
    run(by_hand)
    expecttest.assert_expected_inline(
        after(),
        """\
graph(
    lm_head.weight: param f32[64, 16],
    hidden: input f32[2, 8, 16],
    labels: input i64[2, 8],
):
    %0: i64[16] = aten.view(labels, [-1])
    %1: i64[16] = aten.arange(16)
    %2: i64[2, 8] = aten.reshape(%0, [2, 8])
    %3: i64[2, 8] = aten.add(%2, 64)
    %4: b8[2, 8] = aten.lt(%2, 0)
    %5: i64[2, 8] = aten.where(%4, %3, %2)
    %6: (f32[2, 8], f32[2, 8], f32[2, 8], f32[0], i64[0]) = memeff.linear_cross_entropy(hidden, lm_head.weight, None, %5, None, ignore_index=None, scale=1.0, softcap=0.0, with_lse=True, with_logit_sum=True, gradient_filter='exact', workspace=0)
    %7: f32[2, 8] = getitem(%6, 2)
    %8: f32[2, 8] = getitem(%6, 0)
    %9: f32[2, 8] = getitem(%6, 1)
    %10: f32[2, 8] = aten.neg(%8)
    %11: f32[16] = aten.reshape(%10, [16])
    %12: f32[16] = aten.mul(%11, 0.9)
    %13: f32[2, 8] = aten.mul(%9, 64.0)
    %14: f32[2, 8] = aten.sub(%7, %13)
    %15: f32[2, 8] = aten.mul(%14, 0.015625)
    %16: f32[16] = aten.reshape(%15, [16])
    %17: f32[16] = aten.mul(%16, 0.1)
    %18: f32[16] = aten.add(%12, %17)
    %19: f32[] = aten.mean(%18)
    %20: f32[] = aten.neg(%19)
    return (%20)""",
    )


def test_graph_of_one_hot_targets() -> None:
    run(one_hot_by_writes)
    expecttest.assert_expected_inline(
        after(),
        """\
graph(
    lm_head.weight: param f32[64, 16],
    hidden: input f32[2, 8, 16],
    labels: input i64[2, 8],
):
    %0: i64[2, 8, 1] = aten.unsqueeze(labels, -1)
    %1: i64[2, 8] = aten.reshape(%0, [2, 8])
    %2: (f32[2, 8], f32[2, 8], f32[2, 8], f32[0], i64[0]) = memeff.linear_cross_entropy(hidden, lm_head.weight, None, %1, None, ignore_index=None, scale=1.0, softcap=0.0, with_lse=True, with_logit_sum=True, gradient_filter='exact', workspace=0)
    %3: f32[2, 8] = getitem(%2, 2)
    %4: f32[2, 8] = getitem(%2, 0)
    %5: f32[2, 8] = getitem(%2, 1)
    %6: f32[2, 8] = aten.mul(%4, -0.8984126984126984)
    %7: f32[2, 8] = aten.mul(%5, 64.0)
    %8: f32[2, 8] = aten.sub(%3, %7)
    %9: f32[2, 8] = aten.mul(%8, 0.0015873015873015873)
    %10: f32[2, 8] = aten.add(%6, %9)
    %11: f32[2, 8, 1] = aten.reshape(%10, [2, 8, 1])
    %12: f32[2, 8] = aten.squeeze(%11, -1)
    %13: f32[] = aten.mean(%12)
    %14: f32[] = aten.neg(%13)
    return (%14)""",
    )


def test_declined_graph_is_the_one_that_came() -> None:
    run(with_a_confidence)
    (graph,) = memeff_compile.graphs()
    assert graph.after == graph.before
    expecttest.assert_expected_inline(
        after(),
        """\
graph(
    lm_head.weight: param f32[64, 16],
    hidden: input f32[2, 8, 16],
    labels: input i64[2, 8],
):
    %0: f32[2, 8, 64] = aten.linear(hidden, lm_head.weight)
    %1: f32[16, 64] = aten.view(%0, [-1, 64])
    %2: i64[16] = aten.view(labels, [-1])
    %3: f32[] = aten.cross_entropy_loss(%1, %2)
    %4: f32[2, 8] = aten.amax(%0, [-1])
    %5: f32[] = aten.mean(%4)
    return (%3, %5)""",
    )


def test_report_of_a_deferred_graph() -> None:
    run(as_transformers)
    expecttest.assert_expected_inline(
        report(),
        """\
memeff_compile: the loss is fused, 1 graph, 2 changes, 8.5 KiB never allocated

graph 0/0 (training, 12 nodes, our passes 0 ms)
  rewrote    fuse_linear_cross_entropy in lm_head
             linear + cross_entropy -> memeff::linear_cross_entropy; engine reference: plain
             PyTorch, piece by piece over the vocabulary (any device, also fp64).
             Saves 8.5 KiB (16.0 KiB before, 7.5 KiB after): 16*N*V - (B + 8*D*N + 96*N) bytes
             with B = 4096, D = 16, N = 16, V = 64.

  deferred   defer_logits in lm_head
             out.logits is computed when first read; reading it after the weights changed raises
             StaleLogitsError; options={'memeff.logits': 'eager'} restores eager logits.""",
    )


def test_report_of_a_declined_graph() -> None:
    run(with_a_confidence)
    expecttest.assert_expected_inline(
        report(),
        """\
memeff_compile: the loss is not fused (logits_reused(amax)), 1 graph, no changes, 1 declined

graph 0/0 (training, 10 nodes, our passes 0 ms): it went on unchanged
  declined   fuse_linear_cross_entropy (logits_reused(amax))
             The logits are also used by `amax`.
             What to do: Return the logits and compute that outside the compiled function.""",
    )


def test_report_of_symbolic_sizes() -> None:
    run(last_position_dropped, dynamic=True)
    expecttest.assert_expected_inline(
        report(),
        """\
memeff_compile: the loss is fused, 1 graph, 1 change, 4.5 KiB never allocated

graph 0/0 (training, 12 nodes, our passes 0 ms)
  rewrote    fuse_linear_cross_entropy in lm_head
             linear + cross_entropy -> memeff::linear_cross_entropy; engine reference: plain
             PyTorch, piece by piece over the vocabulary (any device, also fp64).
             Saves 4.5 KiB (12.0 KiB before, 7.5 KiB after): 12*N*V - (B + 8*D*N + 96*N) bytes
             with B = 4096, D = 16, N = 16, V = 64.""",
    )


def test_golden_of_a_loss_with_metrics() -> None:
    run(with_metrics)
    expecttest.assert_expected_inline(
        after(),
        """\
graph(
    lm_head.weight: param f32[64, 16],
    hidden: input f32[2, 8, 16],
    labels: input i64[2, 8],
):
    %0: i64[16] = aten.view(labels, [-1])
    %1: i64[2, 8] = aten.reshape(%0, [2, 8])
    %2: (f32[2, 8], f32[2, 8], f32[0], f32[2, 8], i64[2, 8]) = memeff.linear_cross_entropy(hidden, lm_head.weight, None, %1, None, ignore_index=-100, scale=1.0, softcap=0.0, with_lse=False, with_logit_sum=False, gradient_filter='exact', workspace=0, with_entropy=True, with_top=True)
    %3: f32[2, 8] = getitem(%2, 0)
    %4: f32[2, 8] = getitem(%2, 3)
    %5: i64[2, 8] = getitem(%2, 4)
    %6: none = _set_grad_enabled(False)
    %7: b8[2, 8] = aten.eq(%5, labels)
    %8: f32[2, 8] = aten.to(%7, f32)
    %9: f32[] = aten.mean(%8)
    %10: f32[2, 8] = aten.detach(%4)
    %11: f32[2, 8] = aten.neg(%10)
    %12: f32[] = aten.mean(%11)
    %13: f32[] = aten.neg(%12)
    %14: none = _set_grad_enabled(True)
    %15: b8[2, 8] = aten.ne(%1, -100)
    %16: f32[] = aten.sum(%3)
    %17: i64[] = aten.sum(%15)
    %18: f32[] = aten.div(%16, %17)
    return (%18, %9, %13)""",
    )


def run_tied() -> None:
    """Compile a toy whose head is tied, and call it once."""
    torch._dynamo.reset()
    memeff_compile.reset()
    options = {"memeff.inner": "eager"}
    toy = torch.compile(TiedToy(), backend="memeff", options=options, fullgraph=True)
    toy(torch.ones(2, 8, dtype=torch.int64), torch.zeros(2, 8, dtype=torch.int64))


def test_tied_embedding_graph() -> None:
    run_tied()
    expecttest.assert_expected_inline(
        after(),
        """\
graph(
    embed.weight: param f32[64, 16],
    ids: input i64[2, 8],
    labels: input i64[2, 8],
):
    %0: (f32[2, 8, 16], f32[64, 16]) = memeff.embedding_tied(embed.weight, ids, 0)
    %1: f32[2, 8, 16] = getitem(%0, 0)
    %2: f32[64, 16] = getitem(%0, 1)
    %3: i64[2, 8] = aten.clamp(labels, 0)
    %4: (f32[2, 8, 16], f32[64, 16]) = memeff.embedding_tied(%2, %3, 0)
    %5: f32[2, 8, 16] = getitem(%4, 0)
    %6: f32[64, 16] = getitem(%4, 1)
    %7: f32[2, 8, 16] = aten.add(%1, %5)
    %8: i64[16] = aten.view(labels, [-1])
    %9: i64[2, 8] = aten.reshape(%8, [2, 8])
    %10: (f32[2, 8], f32[2, 8], f32[0], f32[0], i64[0]) = memeff.linear_cross_entropy(%7, %6, None, %9, None, ignore_index=-100, scale=1.0, softcap=0.0, with_lse=False, with_logit_sum=False, gradient_filter='exact', workspace=0)
    %11: f32[2, 8] = getitem(%10, 0)
    %12: b8[2, 8] = aten.ne(%9, -100)
    %13: f32[] = aten.sum(%11)
    %14: i64[] = aten.sum(%12)
    %15: f32[] = aten.div(%13, %14)
    return (%15)""",
    )


def test_tied_embedding_report() -> None:
    run_tied()
    expecttest.assert_expected_inline(
        report(),
        """\
memeff_compile: the loss is fused, 1 graph, 2 changes, 3.0 KiB never allocated

graph 0/0 (training, 12 nodes, our passes 0 ms)
  rewrote    fuse_linear_cross_entropy in lm_head
             linear + cross_entropy -> memeff::linear_cross_entropy; engine reference: plain
             PyTorch, piece by piece over the vocabulary (any device, also fp64).
             Saves 4.5 KiB (12.0 KiB before, 7.5 KiB after): 12*N*V - (B + 8*D*N + 96*N) bytes
             with B = 4096, D = 16, N = 16, V = 64.

  rewrote    fuse_embedding_gradient in embed
             Embedding and head share their weight -> memeff::embedding_tied, which adds the
             embedding's gradient into the head's; engine reference: plain PyTorch, ids sorted,
             rows summed per id (any device, also fp64).
             Saves nothing at these sizes (4.0 KiB before, 5.5 KiB after): 4*D*V - (B + 96*N)
             bytes with B = 4096, D = 16, N = 16, V = 64.""",
    )
