"""Every pass on a toy: the graph as Dynamo captures it, and the graph that the pass leaves.

`make golden` rewrites the expected texts; read the difference before accepting it. A pass that has
no golden here fails the last test. The graphs are not run: other tests compare their
results with eager.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils.checkpoint import checkpoint

from memeff_compile.kernels.coded_kv_cache import (
    POOL,
    Layout,
    coded_kv_cache_append,
    coded_kv_cache_append_pair,
    coded_kv_cache_view,
)
from memeff_compile.kernels.coded_weight import CodedWeight, encode
from memeff_compile.kernels.device import planned_for
from memeff_compile.options import Options
from memeff_compile.passes import PASSES, keep_rotary_tables
from memeff_compile.passes.graph import pipeline
from memeff_compile.report import CHANGES, GraphReport
from tests.support import coded_caches, merged_caches
from tests.support.hostile_weights import normal
from tests.support.ternary_layers import Plain

expecttest = pytest.importorskip(
    "expecttest", reason="goldens are compared with expecttest, which is not installed here"
)

B, H, G, S, D, V = 2, 4, 2, 6, 8, 64


class Captured(Exception):
    """Raised where the rewritten graph would run."""


def before_and_after(
    pass_name: str,
    function: Callable[..., Any],
    *inputs: Any,
    grad: bool = False,
    **options: Any,
) -> str:
    """Capture `function`, run all passes on it as for a GPU, and return both graphs as text."""
    given = Options.parse(None, {f"memeff.{key}": value for key, value in options.items()})
    reports: list[GraphReport] = []

    def backend(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        with planned_for(torch.device("cuda", 0)):
            reports.append(pipeline.run(gm, PASSES, given).report)

        def never(*args: Any) -> Any:
            raise Captured

        return never

    torch._dynamo.reset()
    compiled = torch.compile(function, backend=backend, fullgraph=True, dynamic=False)
    with torch.set_grad_enabled(grad), pytest.raises(Captured):
        compiled(*inputs)
    (report,) = reports
    assert pass_name in {r.pass_name for r in report.records if r.action in CHANGES}, report.records
    return f"{report.before}\n\nbecomes\n\n{report.after}"


# --- heads, losses and embeddings -----------------------------------------------------------------


class Tied(nn.Module):
    """An embedding, and a head with the same weight and its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(V, D)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        logits = F.linear(self.embed(ids).tanh(), self.embed.weight)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Head(nn.Module):
    """A head, and its loss if there are labels."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.lm_head = nn.Linear(D, classes, bias=False)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        logits: Tensor = self.lm_head(x)
        return logits if labels is None else F.cross_entropy(logits, labels)


def test_fuse_linear_cross_entropy() -> None:
    x, labels = torch.ones(S, D), torch.zeros(S, dtype=torch.int64)
    expecttest.assert_expected_inline(
        before_and_after("fuse_linear_cross_entropy", Head(V), x, labels, grad=True),
        """\
graph(
    lm_head.weight: param f32[64, 8],
    x: input f32[6, 8],
    labels: input i64[6],
):
    %0: f32[6, 64] = aten.linear(x, lm_head.weight)
    %1: f32[] = aten.cross_entropy_loss(%0, labels)
    return (%1)

becomes

graph(
    lm_head.weight: param f32[64, 8],
    x: input f32[6, 8],
    labels: input i64[6],
):
    %0: (f32[6], f32[6], f32[0], f32[0], i64[0]) = memeff.linear_cross_entropy(x, lm_head.weight, None, labels, None, ignore_index=-100, scale=1.0, softcap=0.0, with_lse=False, with_logit_sum=False, gradient_filter='exact', workspace=0)
    %1: f32[6] = getitem(%0, 0)
    %2: b8[6] = aten.ne(labels, -100)
    %3: f32[] = aten.sum(%1)
    %4: i64[] = aten.sum(%2)
    %5: f32[] = aten.div(%3, %4)
    return (%5)""",
    )


class Distilled(nn.Module):
    """A head, a teacher's, and the divergence of both."""

    def __init__(self) -> None:
        super().__init__()
        self.lm_head, self.teacher = nn.Linear(D, V, bias=False), nn.Linear(S, V, bias=False)

    def forward(self, x: Tensor, of_teacher: Tensor) -> Tensor:
        student = F.log_softmax(self.lm_head(x) / 2, -1)
        with torch.no_grad():
            teacher = F.softmax(self.teacher(of_teacher) / 2, -1)
        return F.kl_div(student, teacher, reduction="batchmean")


def test_fuse_divergence() -> None:
    expecttest.assert_expected_inline(
        before_and_after(
            "fuse_divergence", Distilled(), torch.ones(S, D), torch.ones(S, S), grad=True
        ),
        """\
graph(
    lm_head.weight: param f32[64, 8],
    x: input f32[6, 8],
    teacher.weight: param f32[64, 6],
    of_teacher: input f32[6, 6],
):
    %0: f32[6, 64] = aten.linear(x, lm_head.weight)
    %1: f32[6, 64] = aten.div(%0, 2)
    %2: f32[6, 64] = aten.log_softmax(%1, -1)
    %3: none = _set_grad_enabled(False)
    %4: f32[6, 64] = aten.linear(of_teacher, teacher.weight)
    %5: f32[6, 64] = aten.div(%4, 2)
    %6: f32[6, 64] = aten.softmax(%5, -1)
    %7: none = _set_grad_enabled(True)
    %8: f32[] = kl_div(%2, %6, reduction='batchmean')
    return (%8)

becomes

graph(
    lm_head.weight: param f32[64, 8],
    x: input f32[6, 8],
    teacher.weight: param f32[64, 6],
    of_teacher: input f32[6, 6],
):
    %0: none = _set_grad_enabled(False)
    %1: none = _set_grad_enabled(True)
    %2: f32[64, 6] = aten.detach(teacher.weight)
    %3: (f32[], f32[0], f32[64, 8], f32[0]) = memeff.linear_divergence_total(x, lm_head.weight, None, of_teacher, %2, None, None, coefficients=[0.16666666666666666, -0.16666666666666666, 0.0, 0.0, 0.0, 0.0, 0.0], scale=0.5, teacher_scale=0.5, workspace=0, output_mask=[False, True, False])
    %4: f32[] = getitem(%3, 0)
    return (%4)""",
    )


def test_defer_logits() -> None:
    expecttest.assert_expected_inline(
        before_and_after("defer_logits", Head(4 * V), torch.ones(S, D), grad=True),
        """\
graph(
    lm_head.weight: param f32[256, 8],
    x: input f32[6, 8],
):
    %0: f32[6, 256] = aten.linear(x, lm_head.weight)
    return (%0)

becomes

graph(
    lm_head.weight: param f32[256, 8],
    x: input f32[6, 8],
):
    return (x)""",
    )


def test_fuse_embedding_gradient() -> None:
    ids = torch.zeros(B, S, dtype=torch.int64)
    expecttest.assert_expected_inline(
        before_and_after("fuse_embedding_gradient", Tied(), ids, ids, grad=True),
        """\
graph(
    embed.weight: param f32[64, 8],
    ids: input i64[2, 6],
):
    %0: f32[2, 6, 8] = aten.embedding(embed.weight, ids)
    %1: f32[2, 6, 8] = aten.tanh(%0)
    %2: f32[2, 6, 64] = aten.linear(%1, embed.weight)
    %3: f32[12, 64] = aten.flatten(%2, end_dim=1)
    %4: i64[12] = aten.flatten(ids)
    %5: f32[] = aten.cross_entropy_loss(%3, %4)
    return (%5)

becomes

graph(
    embed.weight: param f32[64, 8],
    ids: input i64[2, 6],
):
    %0: (f32[2, 6, 8], f32[64, 8]) = memeff.embedding_tied(embed.weight, ids, -1)
    %1: f32[2, 6, 8] = getitem(%0, 0)
    %2: f32[64, 8] = getitem(%0, 1)
    %3: f32[2, 6, 8] = aten.tanh(%1)
    %4: i64[12] = aten.flatten(ids)
    %5: i64[2, 6] = aten.reshape(%4, [2, 6])
    %6: (f32[2, 6], f32[2, 6], f32[0], f32[0], i64[0]) = memeff.linear_cross_entropy(%3, %2, None, %5, None, ignore_index=-100, scale=1.0, softcap=0.0, with_lse=False, with_logit_sum=False, gradient_filter='exact', workspace=0)
    %7: f32[2, 6] = getitem(%6, 0)
    %8: b8[2, 6] = aten.ne(%5, -100)
    %9: f32[] = aten.sum(%7)
    %10: i64[] = aten.sum(%8)
    %11: f32[] = aten.div(%9, %10)
    return (%11)""",
    )


# --- linears --------------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    """A gated MLP in an activation checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(D, 20, bias=False), nn.Linear(D, 20, bias=False)
        self.down = nn.Linear(20, D, bias=False)

    def mlp(self, x: Tensor) -> Any:
        return x + self.down(F.silu(self.gate(x)) * self.up(x))

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.mlp, x, use_reentrant=False)


def test_fuse_gated_linear() -> None:
    expecttest.assert_expected_inline(
        before_and_after("fuse_gated_linear", Checkpointed(), torch.ones(B, S, D), grad=True),
        """\
graph(
    x: input f32[2, 6, 8],
    gate.weight: param f32[20, 8],
    up.weight: param f32[20, 8],
    down.weight: param f32[8, 20],
):
    %0: (f32[2, 6, 8]) = tag_activation_checkpoint(wrap_body_0, x, gate.weight, up.weight, down.weight, use_reentrant=False)
    %1: f32[2, 6, 8] = getitem(%0, 0)
    return (%1)
  wrap_body_0:
    graph(
        x: input f32[2, 6, 8],
        self_modules_gate_parameters_weight: input f32[20, 8],
        self_modules_up_parameters_weight: input f32[20, 8],
        self_modules_down_parameters_weight: input f32[8, 20],
    ):
        %0: f32[2, 6, 20] = aten.linear(x, self_modules_gate_parameters_weight)
        %1: f32[2, 6, 20] = aten.silu(%0)
        %2: f32[2, 6, 20] = aten.linear(x, self_modules_up_parameters_weight)
        %3: f32[2, 6, 20] = aten.mul(%1, %2)
        %4: f32[2, 6, 8] = aten.linear(%3, self_modules_down_parameters_weight)
        %5: f32[2, 6, 8] = aten.add(x, %4)
        return (%5)

becomes

graph(
    x: input f32[2, 6, 8],
    gate.weight: param f32[20, 8],
    up.weight: param f32[20, 8],
    down.weight: param f32[8, 20],
):
    %0: (f32[2, 6, 8]) = tag_activation_checkpoint(wrap_body_0, x, gate.weight, up.weight, down.weight, use_reentrant=False)
    %1: f32[2, 6, 8] = getitem(%0, 0)
    return (%1)
  wrap_body_0:
    graph(
        x: input f32[2, 6, 8],
        self_modules_gate_parameters_weight: input f32[20, 8],
        self_modules_up_parameters_weight: input f32[20, 8],
        self_modules_down_parameters_weight: input f32[8, 20],
    ):
        %0: f32[2, 6, 20] = aten.linear(x, self_modules_gate_parameters_weight)
        %1: f32[2, 6, 20] = aten.linear(x, self_modules_up_parameters_weight)
        %2: f32[2, 6, 8] = memeff.gated_linear(%0, %1, self_modules_down_parameters_weight, None, 'silu')
        %3: f32[2, 6, 8] = aten.add(x, %2)
        return (%3)""",
    )


def coded(rows: int, columns: int) -> nn.Parameter:
    weight = normal(rows, columns)
    return nn.Parameter(CodedWeight(encode(weight, "win4"), "win4", weight.shape))


class Coded(nn.Module):
    """Two linears of one input and one of their sum, all with compressed weights."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.out = coded(32, 256), coded(32, 256), coded(256, 32)

    def forward(self, x: Tensor) -> Tensor:
        both = F.linear(x, self.left) + F.linear(x, self.right)
        return F.linear(both.tanh(), self.out)


def test_encode_weights_in_training() -> None:
    expecttest.assert_expected_inline(
        before_and_after("encode_weights", Coded(), normal(B, 256), grad=True),
        """\
graph(
    left: param bf16[32, 256],
    x: input bf16[2, 256],
    right: param bf16[32, 256],
    out: param bf16[256, 32],
):
    %0: bf16[2, 32] = aten.linear(x, left)
    %1: bf16[2, 32] = aten.linear(x, right)
    %2: bf16[2, 32] = aten.add(%0, %1)
    %3: bf16[2, 32] = aten.tanh(%2)
    %4: bf16[2, 256] = aten.linear(%3, out)
    return (%4)

becomes

graph(
    left: param bf16[32, 256],
    x: input bf16[2, 256],
    right: param bf16[32, 256],
    out: param bf16[256, 32],
):
    %0: bf16[2, 32] = memeff.coded_weight_linear(x, left, trains=True)
    %1: bf16[2, 32] = memeff.coded_weight_linear(x, right, trains=True)
    %2: bf16[2, 32] = aten.add(%0, %1)
    %3: bf16[2, 32] = aten.tanh(%2)
    %4: bf16[2, 256] = memeff.coded_weight_linear(%3, out, trains=True)
    return (%4)""",
    )


def test_encode_weights_without_gradients() -> None:
    expecttest.assert_expected_inline(
        before_and_after("encode_weights", Coded(), normal(B, 256)),
        """\
graph(
    left: param bf16[32, 256],
    x: input bf16[2, 256],
    right: param bf16[32, 256],
    out: param bf16[256, 32],
):
    %0: bf16[2, 32] = aten.linear(x, left)
    %1: bf16[2, 32] = aten.linear(x, right)
    %2: bf16[2, 32] = aten.add(%0, %1)
    %3: bf16[2, 32] = aten.tanh(%2)
    %4: bf16[2, 256] = aten.linear(%3, out)
    return (%4)

becomes

graph(
    left: param bf16[32, 256],
    x: input bf16[2, 256],
    right: param bf16[32, 256],
    out: param bf16[256, 32],
):
    %0: (bf16[2, 32], bf16[2, 32]) = memeff.coded_weight_linears(x, [left, right], [None, None])
    %1: bf16[2, 32] = getitem(%0, 0)
    %2: bf16[2, 32] = getitem(%0, 1)
    %3: bf16[2, 32] = aten.add(%1, %2)
    %4: bf16[2, 32] = aten.tanh(%3)
    %5: bf16[2, 256] = memeff.coded_weight_linear(%4, out)
    return (%5)""",
    )


def test_ternarize_linear() -> None:
    expecttest.assert_expected_inline(
        before_and_after("ternarize_linear", Plain(4, 8), torch.ones(B, 4)),
        """\
graph(
    x: input f32[2, 4],
    weight: param f32[8, 4],
    bias: param f32[8],
):
    %0: f32[2, 4] = aten.abs(x)
    %1: (f32[2, 1], i64[2, 1]) = aten.max(%0, -1, True)
    %2: f32[2, 1] = getitem(%1, 0)
    %3: f32[2, 1] = aten.clamp_(%2, 1e-05)
    %4: f32[2, 1] = aten.mul(aten.reciprocal(%3), 127.0)
    %5: f32[2, 4] = aten.mul(x, %4)
    %6: f32[2, 4] = aten.round(%5)
    %7: f32[2, 4] = aten.clamp_(%6, -128, 127)
    %8: f32[2, 4] = aten.div(%7, %4)
    %9: f32[8, 4] = aten.abs(weight)
    %10: f32[] = aten.mean(%9)
    %11: f32[] = aten.clamp_(%10, 1e-05)
    %12: f32[] = aten.mul(aten.reciprocal(%11), 1.0)
    %13: f32[8, 4] = aten.mul(weight, %12)
    %14: f32[8, 4] = aten.round(%13)
    %15: f32[8, 4] = aten.clamp_(%14, -1, 1)
    %16: f32[8, 4] = aten.div(%15, %12)
    %17: f32[2, 8] = aten.linear(%8, %16, bias)
    return (%17)

becomes

graph(
    x: input f32[2, 4],
    weight: param f32[8, 4],
    bias: param f32[8],
):
    %0: f32[8, 4] = aten.detach(weight)
    %1: f32[8, 4] = aten.abs(%0)
    %2: f32[] = aten.mean(%1)
    %3: f32[] = aten.clamp(%2, 1e-05)
    %4: f32[] = aten.reciprocal(%3)
    %5: i32[8, 1] = memeff.ternary_linear_pack(%0, %4)
    %6: (f32[2, 8]) = memeff.ternary_linear(x, [%5], [%4], [bias], f32)
    %7: f32[2, 8] = getitem(%6, 0)
    return (%7)""",
    )


# --- attention ------------------------------------------------------------------------------------


def heads(count: int = H, length: int = S, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(B, count, length, D, dtype=dtype)


def written_explicitly(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(2, 3) * 0.25
    places = torch.arange(S)
    return scores.masked_fill(places[None] > places[:, None], -torch.inf).softmax(-1) @ v


def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def test_recover_attention() -> None:
    expecttest.assert_expected_inline(
        before_and_after("recover_attention", written_explicitly, heads(), heads(), heads()),
        """\
graph(
    k: input f32[2, 4, 6, 8],
    q: input f32[2, 4, 6, 8],
    v: input f32[2, 4, 6, 8],
):
    %0: f32[2, 4, 8, 6] = aten.transpose(k, 2, 3)
    %1: f32[2, 4, 6, 6] = aten.matmul(q, %0)
    %2: f32[2, 4, 6, 6] = aten.mul(%1, 0.25)
    %3: i64[6] = aten.arange(6)
    %4: i64[1, 6] = aten.unsqueeze(%3, 0)
    %5: i64[6, 1] = aten.unsqueeze(%3, 1)
    %6: b8[6, 6] = aten.gt(%4, %5)
    %7: f32[2, 4, 6, 6] = aten.masked_fill(%2, %6, -inf)
    %8: f32[2, 4, 6, 6] = aten.softmax(%7, -1)
    %9: f32[2, 4, 6, 8] = aten.matmul(%8, v)
    return (%9)

becomes

graph(
    k: input f32[2, 4, 6, 8],
    q: input f32[2, 4, 6, 8],
    v: input f32[2, 4, 6, 8],
):
    %0: f32[2, 4, 6, 8] = aten.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.25)
    return (%0)""",
    )


class Multihead(nn.Module):
    """PyTorch's own layer; its weights of attention are not asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(2 * D, 2, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        return self.attention(x, x, x)[0]


def test_expand_multihead() -> None:
    expecttest.assert_expected_inline(
        before_and_after("expand_multihead", Multihead(), torch.ones(B, S, 2 * D), grad=True),
        """\
graph(
    x: input f32[2, 6, 16],
    attention.in_proj_bias: param f32[48],
    attention.in_proj_weight: param f32[48, 16],
    attention.out_proj.weight: param f32[16, 16],
    attention.out_proj.bias: param f32[16],
):
    %0: f32[6, 2, 16] = aten.transpose(x, 1, 0)
    %1: (f32[6, 2, 16], f32[2, 6, 6]) = multi_head_attention_forward(%0, %0, %0, 16, 2, attention.in_proj_weight, attention.in_proj_bias, None, None, False, 0.0, attention.out_proj.weight, attention.out_proj.bias, attn_mask=None, average_attn_weights=True, is_causal=False, key_padding_mask=None, need_weights=True, training=True)
    %2: f32[6, 2, 16] = getitem(%1, 0)
    %3: f32[2, 6, 16] = aten.transpose(%2, 1, 0)
    return (%3)

becomes

graph(
    x: input f32[2, 6, 16],
    attention.in_proj_bias: param f32[48],
    attention.in_proj_weight: param f32[48, 16],
    attention.out_proj.weight: param f32[16, 16],
    attention.out_proj.bias: param f32[16],
):
    %0: f32[2, 6, 48] = aten.linear(x, attention.in_proj_weight, attention.in_proj_bias)
    %1: f32[2, 6, 3, 2, 8] = aten.unflatten(%0, 2, [3, 2, 8])
    %2: f32[3, 2, 2, 6, 8] = aten.permute(%1, [2, 0, 3, 1, 4])
    %3: (f32[2, 2, 6, 8], f32[2, 2, 6, 8], f32[2, 2, 6, 8]) = aten.unbind(%2)
    %4: f32[2, 2, 6, 8] = aten.select(%2, 0, 0)
    %5: f32[2, 2, 6, 8] = aten.select(%2, 0, 1)
    %6: f32[2, 2, 6, 8] = aten.select(%2, 0, 2)
    %7: f32[2, 2, 6, 8] = aten.scaled_dot_product_attention(%4, %5, %6)
    %8: f32[6, 2, 2, 8] = aten.permute(%7, [2, 0, 1, 3])
    %9: f32[6, 2, 16] = aten.flatten(%8, 2, 3)
    %10: f32[6, 2, 16] = aten.contiguous(%9)
    %11: f32[6, 2, 16] = aten.linear(%10, attention.out_proj.weight, attention.out_proj.bias)
    %12: f32[2, 6, 16] = aten.transpose(%11, 1, 0)
    return (%12)""",
    )


def test_quantize_attention() -> None:
    q, k, v = (heads(count, 40, torch.bfloat16) for count in (H, G, G))
    choice: dict[str, Any] = {"attention": "8b", "attention.length": 0}
    expecttest.assert_expected_inline(
        before_and_after("quantize_attention", grouped, q, k, v, **choice),
        """\
graph(
    q: input bf16[2, 4, 40, 8],
    k: input bf16[2, 2, 40, 8],
    v: input bf16[2, 2, 40, 8],
):
    %0: bf16[2, 4, 40, 8] = aten.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return (%0)

becomes

graph(
    q: input bf16[2, 4, 40, 8],
    k: input bf16[2, 2, 40, 8],
    v: input bf16[2, 2, 40, 8],
):
    %0: (bf16[2, 4, 40, 8], f32[2, 4, 0]) = memeff.quantized_attention(q, k, v, ahead=0, with_lse=False)
    %1: bf16[2, 4, 40, 8] = getitem(%0, 0)
    %2: bf16[2, 4, 40, 8] = aten.contiguous(%1)
    return (%2)""",
    )


class Rotated(nn.Module):
    """Three layers that rotate by the angles of the positions."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(D, D))

    def forward(self, x: Tensor) -> Tensor:
        angles = torch.arange(S).float()[:, None] * 0.1
        cosine = angles.expand(S, D).cos()
        for _ in range(3):
            x = (x @ self.weight) * cosine
        return x


def test_keep_rotary_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keep_rotary_tables, "FEWEST_NUMBERS", S * D)
    expecttest.assert_expected_inline(
        before_and_after("keep_rotary_tables", Rotated(), torch.ones(B, S, D), grad=True),
        """\
graph(
    weight: param f32[8, 8],
    x: input f32[2, 6, 8],
):
    %0: i64[6] = aten.arange(6)
    %1: f32[6] = aten.to(%0, f32)
    %2: f32[6, 1] = aten.unsqueeze(%1, 1)
    %3: f32[6, 1] = aten.mul(%2, 0.1)
    %4: f32[6, 8] = aten.expand(%3, [6, 8])
    %5: f32[6, 8] = aten.cos(%4)
    %6: f32[2, 6, 8] = aten.matmul(x, weight)
    %7: f32[2, 6, 8] = aten.mul(%6, %5)
    %8: f32[2, 6, 8] = aten.matmul(%7, weight)
    %9: f32[2, 6, 8] = aten.mul(%8, %5)
    %10: f32[2, 6, 8] = aten.matmul(%9, weight)
    %11: f32[2, 6, 8] = aten.mul(%10, %5)
    return (%11)

becomes

graph(
    weight: param f32[8, 8],
    x: input f32[2, 6, 8],
):
    %0: i64[6] = aten.arange(6)
    %1: f32[6] = aten.to(%0, f32)
    %2: f32[6, 1] = aten.unsqueeze(%1, 1)
    %3: f32[6, 1] = aten.mul(%2, 0.1)
    %4: f32[6, 8] = aten.expand(%3, [6, 8])
    %5: f32[6, 8] = aten.cos(%4)
    %6: f32[6, 8] = aten.as_strided(%5, [6, 8], [8, 1])
    %7: f32[2, 6, 8] = aten.matmul(x, weight)
    %8: f32[2, 6, 8] = aten.mul(%7, %6)
    %9: f32[2, 6, 8] = aten.matmul(%8, weight)
    %10: f32[2, 6, 8] = aten.mul(%9, %6)
    %11: f32[2, 6, 8] = aten.matmul(%10, weight)
    %12: f32[2, 6, 8] = aten.mul(%11, %6)
    return (%12)""",
    )


def test_keep_activations() -> None:
    def block(x: Tensor) -> Tensor:
        q = x.view(B, 64, H, D).transpose(1, 2)
        attended = F.scaled_dot_product_attention(q, q, q, is_causal=True)
        return x + attended.transpose(1, 2).flatten(2)

    expecttest.assert_expected_inline(
        before_and_after(
            "keep_activations",
            lambda x: checkpoint(block, x, use_reentrant=False),
            torch.ones(B, 64, H * D, requires_grad=True),
            grad=True,
            recompute="attention",
        ),
        """\
graph(
    x: input f32[2, 64, 32],
):
    %0: (f32[2, 64, 32]) = tag_activation_checkpoint(wrap_body_0, x, use_reentrant=False)
    %1: f32[2, 64, 32] = getitem(%0, 0)
    return (%1)
  wrap_body_0:
    graph(
        x: input f32[2, 64, 32],
    ):
        %0: f32[2, 64, 4, 8] = aten.view(x, [2, 64, 4, 8])
        %1: f32[2, 4, 64, 8] = aten.transpose(%0, 1, 2)
        %2: f32[2, 4, 64, 8] = aten.scaled_dot_product_attention(%1, %1, %1, is_causal=True)
        %3: f32[2, 64, 4, 8] = aten.transpose(%2, 1, 2)
        %4: f32[2, 64, 32] = aten.flatten(%3, 2)
        %5: f32[2, 64, 32] = aten.add(x, %4)
        return (%5)

becomes

graph(
    x: input f32[2, 64, 32],
):
    %0: (f32[2, 64, 32]) = tag_activation_checkpoint(wrap_body_0, x, use_reentrant=False)
    %1: f32[2, 64, 32] = getitem(%0, 0)
    return (%1)
  wrap_body_0:
    graph(
        x: input f32[2, 64, 32],
    ):
        %0: f32[2, 64, 4, 8] = aten.view(x, [2, 64, 4, 8])
        %1: f32[2, 4, 64, 8] = aten.transpose(%0, 1, 2)
        %2: f32[2, 4, 64, 8] = aten.scaled_dot_product_attention(%1, %1, %1, is_causal=True)  # kept for the backward
        %3: f32[2, 64, 4, 8] = aten.transpose(%2, 1, 2)
        %4: f32[2, 64, 32] = aten.flatten(%3, 2)
        %5: f32[2, 64, 32] = aten.add(x, %4)
        return (%5)""",
    )


# --- caches ---------------------------------------------------------------------------------------


class StaticCache(nn.Module):
    """One step of decoding: keys and values are written at a position, and all are attended to."""

    keys: Tensor
    values: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("keys", torch.zeros(B, G, 32, D))
        self.register_buffer("values", torch.zeros(B, G, 32, D))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, position: Tensor) -> Tensor:
        self.keys.index_copy_(2, position, k)
        self.values.index_copy_(2, position, v)
        mask = torch.arange(32) <= position[:, None]
        return F.scaled_dot_product_attention(
            q, self.keys, self.values, attn_mask=mask, enable_gqa=True
        )


def token() -> tuple[Tensor, Tensor, Tensor]:
    return heads(H, 1), heads(G, 1), heads(G, 1)


def test_rewrite_kv_update() -> None:
    expecttest.assert_expected_inline(
        before_and_after("rewrite_kv_update", StaticCache(), *token(), torch.tensor([5])),
        """\
graph(
    keys: buffer f32[2, 2, 32, 8],
    position: input i64[1],
    k: input f32[2, 2, 1, 8],
    values: buffer f32[2, 2, 32, 8],
    v: input f32[2, 2, 1, 8],
    q: input f32[2, 4, 1, 8],
):
    %0: f32[2, 2, 32, 8] = aten.index_copy_(keys, 2, position, k)
    %1: f32[2, 2, 32, 8] = aten.index_copy_(values, 2, position, v)
    %2: i64[32] = aten.arange(32)
    %3: i64[1, 1] = aten.unsqueeze(position, 1)
    %4: b8[1, 32] = aten.le(%2, %3)
    %5: f32[2, 4, 1, 8] = aten.scaled_dot_product_attention(q, keys, values, %4, enable_gqa=True)
    return (%5)

becomes

graph(
    keys: buffer f32[2, 2, 32, 8],
    position: input i64[1],
    k: input f32[2, 2, 1, 8],
    values: buffer f32[2, 2, 32, 8],
    v: input f32[2, 2, 1, 8],
    q: input f32[2, 4, 1, 8],
):
    %0: none = memeff.kv_cache_append(keys, values, k, v, position)
    %1: i64[32] = aten.arange(32)
    %2: i64[1, 1] = aten.unsqueeze(position, 1)
    %3: i64[1, 1] = aten.t(%2)
    %4: f32[2, 4, 1, 8] = memeff.kv_cache_attention(q, keys, values, %3)
    return (%4)""",
    )


ROOM, DEPTH = 96, 64
LAYOUT = Layout(DEPTH, 4, group=32, recent=32, kept=2)


class CodedCache(nn.Module):
    """One step of decoding over a cache of four bits."""

    def __init__(self) -> None:
        super().__init__()
        pool = coded_caches.allocate(LAYOUT, B, G, ROOM, torch.bfloat16)
        for name, tensor in zip(POOL, pool, strict=True):
            self.register_buffer(name, tensor)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        pool = [getattr(self, name) for name in POOL]
        coded_kv_cache_append(*pool, k, v, LAYOUT.bits, LAYOUT.recent, ROOM)
        keys, values = coded_kv_cache_view(*pool, None, None, LAYOUT.bits, ROOM)
        keys, values = (t.repeat_interleave(H // G, 1) for t in (keys, values))
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)


class MergedCache(nn.Module):
    """One step of decoding of the upper of two layers that share directions."""

    def __init__(self) -> None:
        super().__init__()
        self.pair = merged_caches.Pair(LAYOUT, B, G, ROOM, torch.bfloat16)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        how = (LAYOUT.bits, LAYOUT.recent, ROOM, 1)
        rule = ("slerp", 0.5, 0.3, "distinct", "norm", False)
        coded_kv_cache_append_pair(*self.pair.all(), None, None, k, v, *how, *rule)
        pool, norms = self.pair.pool(is_upper=True), self.pair.norms(is_upper=True)
        keys, values = coded_kv_cache_view(*pool, *norms, LAYOUT.bits, ROOM)
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=True)


def step() -> tuple[Tensor, ...]:
    q, k, v = (torch.ones(B, count, 1, DEPTH, dtype=torch.bfloat16) for count in (H, G, G))
    return q, k, v, torch.ones(B, 1, 1, ROOM, dtype=torch.bool)


def test_compress_kv_cache_of_codes() -> None:
    expecttest.assert_expected_inline(
        before_and_after("compress_kv_cache", CodedCache(), *step()),
        """\
graph(
    k_codes: buffer u8[2, 2, 2, 1024],
    v_codes: buffer u8[2, 2, 2, 1024],
    k_scales: buffer bf16[2, 2, 2, 64, 2],
    v_scales: buffer bf16[2, 2, 2, 1, 32, 2],
    k_window: buffer bf16[2, 2, 64, 64],
    v_window: buffer bf16[2, 2, 64, 64],
    k_kept: buffer bf16[2, 2, 2, 64],
    v_kept: buffer bf16[2, 2, 2, 64],
    places: buffer i32[2, 2, 2],
    counts: buffer i64[3],
    k: input bf16[2, 2, 1, 64],
    v: input bf16[2, 2, 1, 64],
    q: input bf16[2, 4, 1, 64],
    mask: input b8[2, 1, 1, 96],
):
    %0: none = memeff.coded_kv_cache_append(k_codes, v_codes, k_scales, v_scales, k_window, v_window, k_kept, v_kept, places, counts, k, v, 4, 32, 96)
    %1: (bf16[2, 2, 96, 64], bf16[2, 2, 96, 64]) = memeff.coded_kv_cache_view(k_codes, v_codes, k_scales, v_scales, k_window, v_window, k_kept, v_kept, places, counts, None, None, 4, 96)
    %2: bf16[2, 2, 96, 64] = getitem(%1, 0)
    %3: bf16[2, 2, 96, 64] = getitem(%1, 1)
    %4: bf16[2, 4, 96, 64] = aten.repeat_interleave(%2, 2, 1)
    %5: bf16[2, 4, 96, 64] = aten.repeat_interleave(%3, 2, 1)
    %6: bf16[2, 4, 1, 64] = aten.scaled_dot_product_attention(q, %4, %5, mask)
    return (%6)

becomes

graph(
    k_codes: buffer u8[2, 2, 2, 1024],
    v_codes: buffer u8[2, 2, 2, 1024],
    k_scales: buffer bf16[2, 2, 2, 64, 2],
    v_scales: buffer bf16[2, 2, 2, 1, 32, 2],
    k_window: buffer bf16[2, 2, 64, 64],
    v_window: buffer bf16[2, 2, 64, 64],
    k_kept: buffer bf16[2, 2, 2, 64],
    v_kept: buffer bf16[2, 2, 2, 64],
    places: buffer i32[2, 2, 2],
    counts: buffer i64[3],
    k: input bf16[2, 2, 1, 64],
    v: input bf16[2, 2, 1, 64],
    q: input bf16[2, 4, 1, 64],
    mask: input b8[2, 1, 1, 96],
):
    %0: none = memeff.coded_kv_cache_append(k_codes, v_codes, k_scales, v_scales, k_window, v_window, k_kept, v_kept, places, counts, k, v, 4, 32, 96)
    %1: bf16[2, 4, 1, 64] = memeff.coded_kv_cache_attention(q, k_codes, v_codes, k_scales, v_scales, k_window, v_window, k_kept, v_kept, places, counts, None, None, 4, mask, None)
    return (%1)""",
    )


def test_compress_kv_cache_of_merged_layers() -> None:
    expecttest.assert_expected_inline(
        before_and_after("compress_kv_cache", MergedCache(), *step()),
        """\
graph(
    pair.shared.0: input u8[2, 2, 2, 1024],
    pair.shared.1: input u8[2, 2, 2, 1024],
    pair.shared.2: input bf16[2, 2, 2, 64, 2],
    pair.shared.3: input bf16[2, 2, 2, 1, 32, 2],
    pair.shared.4: input i32[2, 2, 2],
    pair.shared.5: input i32[2, 2],
    pair.shared.6: input f32[2, 2],
    pair.shared.7: input i32[2, 2],
    pair.shared.8: input i32[2, 2],
    pair.lower.0: input bf16[2, 2, 64, 64],
    pair.lower.1: input bf16[2, 2, 64, 64],
    pair.lower.2: input bf16[2, 2, 2, 64],
    pair.lower.3: input bf16[2, 2, 2, 64],
    pair.lower.4: input i64[3],
    pair.lower.5: input f16[2, 2, 64, 2],
    pair.upper.0: input bf16[2, 2, 64, 64],
    pair.upper.1: input bf16[2, 2, 64, 64],
    pair.upper.2: input bf16[2, 2, 2, 64],
    pair.upper.3: input bf16[2, 2, 2, 64],
    pair.upper.4: input i64[3],
    pair.upper.5: input f16[2, 2, 64, 2],
    k: input bf16[2, 2, 1, 64],
    v: input bf16[2, 2, 1, 64],
    q: input bf16[2, 4, 1, 64],
    mask: input b8[2, 1, 1, 96],
):
    %0: none = memeff.coded_kv_cache_append_pair(pair.shared.0, pair.shared.1, pair.shared.2, pair.shared.3, pair.shared.4, pair.shared.5, pair.shared.6, pair.shared.7, pair.shared.8, pair.lower.0, pair.lower.1, pair.lower.2, pair.lower.3, pair.lower.4, pair.lower.5, pair.upper.0, pair.upper.1, pair.upper.2, pair.upper.3, pair.upper.4, pair.upper.5, None, None, k, v, 4, 32, 96, 1, 'slerp', 0.5, 0.3, 'distinct', 'norm', False)
    %1: (f16[2, 2, 64], f16[2, 2, 64]) = aten.unbind(pair.upper.5, -1)
    %2: f16[2, 2, 64] = aten.select(pair.upper.5, -1, 0)
    %3: f16[2, 2, 64] = aten.select(pair.upper.5, -1, 1)
    %4: (bf16[2, 2, 96, 64], bf16[2, 2, 96, 64]) = memeff.coded_kv_cache_view(pair.shared.0, pair.shared.1, pair.shared.2, pair.shared.3, pair.upper.0, pair.upper.1, pair.upper.2, pair.upper.3, pair.shared.4, pair.upper.4, %2, %3, 4, 96)
    %5: bf16[2, 2, 96, 64] = getitem(%4, 0)
    %6: bf16[2, 2, 96, 64] = getitem(%4, 1)
    %7: bf16[2, 4, 1, 64] = aten.scaled_dot_product_attention(q, %5, %6, mask, enable_gqa=True)
    return (%7)

becomes

graph(
    pair.shared.0: input u8[2, 2, 2, 1024],
    pair.shared.1: input u8[2, 2, 2, 1024],
    pair.shared.2: input bf16[2, 2, 2, 64, 2],
    pair.shared.3: input bf16[2, 2, 2, 1, 32, 2],
    pair.shared.4: input i32[2, 2, 2],
    pair.shared.5: input i32[2, 2],
    pair.shared.6: input f32[2, 2],
    pair.shared.7: input i32[2, 2],
    pair.shared.8: input i32[2, 2],
    pair.lower.0: input bf16[2, 2, 64, 64],
    pair.lower.1: input bf16[2, 2, 64, 64],
    pair.lower.2: input bf16[2, 2, 2, 64],
    pair.lower.3: input bf16[2, 2, 2, 64],
    pair.lower.4: input i64[3],
    pair.lower.5: input f16[2, 2, 64, 2],
    pair.upper.0: input bf16[2, 2, 64, 64],
    pair.upper.1: input bf16[2, 2, 64, 64],
    pair.upper.2: input bf16[2, 2, 2, 64],
    pair.upper.3: input bf16[2, 2, 2, 64],
    pair.upper.4: input i64[3],
    pair.upper.5: input f16[2, 2, 64, 2],
    k: input bf16[2, 2, 1, 64],
    v: input bf16[2, 2, 1, 64],
    q: input bf16[2, 4, 1, 64],
    mask: input b8[2, 1, 1, 96],
):
    %0: none = memeff.coded_kv_cache_append_pair(pair.shared.0, pair.shared.1, pair.shared.2, pair.shared.3, pair.shared.4, pair.shared.5, pair.shared.6, pair.shared.7, pair.shared.8, pair.lower.0, pair.lower.1, pair.lower.2, pair.lower.3, pair.lower.4, pair.lower.5, pair.upper.0, pair.upper.1, pair.upper.2, pair.upper.3, pair.upper.4, pair.upper.5, None, None, k, v, 4, 32, 96, 1, 'slerp', 0.5, 0.3, 'distinct', 'norm', False)
    %1: (f16[2, 2, 64], f16[2, 2, 64]) = aten.unbind(pair.upper.5, -1)
    %2: f16[2, 2, 64] = aten.select(pair.upper.5, -1, 0)
    %3: f16[2, 2, 64] = aten.select(pair.upper.5, -1, 1)
    %4: bf16[2, 4, 1, 64] = memeff.coded_kv_cache_attention(q, pair.shared.0, pair.shared.1, pair.shared.2, pair.shared.3, pair.upper.0, pair.upper.1, pair.upper.2, pair.upper.3, pair.shared.4, pair.upper.4, %2, %3, 4, mask, None)
    return (%4)""",
    )


def test_every_pass_has_a_golden_here() -> None:
    shown = re.findall(r"before_and_after\(\s*\"(\w+)\"", Path(__file__).read_text())
    assert set(shown) == {each.name for each in PASSES}
