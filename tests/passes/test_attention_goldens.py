"""Attention blocks as transformers writes them, and the graph for the inner compiler, as text.

`make golden` rewrites the expected texts; read the difference before accepting it.
"""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import memeff_compile
from memeff_compile.passes.attention import told_to_op as masked_attention

expecttest = pytest.importorskip(
    "expecttest", reason="goldens are compared with expecttest, which is not installed here"
)

B, H, G, S, D = 2, 4, 2, 6, 8


def repeat_kv(x: Tensor) -> Tensor:
    return x[:, :, None, :, :].expand(B, G, H // G, S, D).reshape(B, H, S, D)


def without_cache_in_5_17(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    positions = (torch.arange(S) + 0).unsqueeze(0).expand(B, -1)
    first = positions[:, :1] - 1
    sequences = (torch.diff(positions, prepend=first, dim=-1) != 1).cumsum(-1)
    rows = torch.arange(B)[:, None, None, None]
    at, key_at = torch.arange(S)[None, None, :, None], torch.arange(S)[None, None, None, :]
    mask = at.new_ones((), dtype=torch.bool) & (key_at <= at).to("cpu")
    mask = mask & (sequences[rows, at] == sequences[rows, key_at]).to("cpu")
    mask = mask.expand(B, -1, S, S)
    return F.scaled_dot_product_attention(
        q, repeat_kv(k), repeat_kv(v), attn_mask=mask, dropout_p=0.0, scale=0.25, is_causal=False
    )


def without_cache_in_5_23(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    positions = (torch.arange(S) + 0).unsqueeze(0).expand(B, -1)
    rows = torch.arange(B)[:, None, None, None]
    at, key_at = torch.arange(S)[None, None, :, None], torch.arange(S)[None, None, None, :]
    mask = (positions[rows, key_at] <= positions[rows, at]).to("cpu").expand(B, -1, S, S)
    return F.scaled_dot_product_attention(
        q, repeat_kv(k), repeat_kv(v), attn_mask=mask, dropout_p=0.0, scale=0.25, is_causal=False
    )


def eager_with_an_additive_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    at = torch.arange(S)
    mask = torch.where(at[None, :] <= at[:, None], torch.zeros(()), torch.finfo(torch.float32).min)
    scores = torch.matmul(q, repeat_kv(k).transpose(2, 3)) * 0.25 + mask.expand(B, 1, S, S)
    weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    weights = F.dropout(weights, p=0.0, training=True)
    return torch.matmul(weights, repeat_kv(v)).transpose(1, 2).contiguous()


def padded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, repeat_kv(k), repeat_kv(v), (k[:, :1, None, :, 0] > 0))


def places() -> tuple[Tensor, Tensor]:
    return torch.arange(S)[None, None, :, None], torch.arange(S)[None, None, None, :]


def left_padding_in_5_23(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    given = (k[:, 0, :, 0] > 0).long().to(torch.bool)
    at, key_at = places()
    rows = torch.arange(B)[:, None, None, None]
    mask = at.new_ones((), dtype=torch.bool) & (key_at <= at)
    mask = (mask & given[rows, key_at]).expand(B, -1, S, S)
    return F.scaled_dot_product_attention(
        q, repeat_kv(k), repeat_kv(v), attn_mask=mask, dropout_p=0.0, scale=0.25, is_causal=False
    )


def packed_in_5_23(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    positions = k[:, 0, :, 0].long()
    first = positions[:, :1] - 1
    sequences = (torch.diff(positions, prepend=first, dim=-1) != 1).cumsum(-1)
    rows = torch.arange(B)[:, None, None, None]
    at, key_at = places()
    mask = at.new_ones((), dtype=torch.bool) & (sequences[rows, at] == sequences[rows, key_at])
    mask = mask & (positions[rows, key_at] <= positions[rows, at])
    mask = mask.expand(B, -1, S, S)
    return F.scaled_dot_product_attention(q, repeat_kv(k), repeat_kv(v), mask, scale=0.25)


def window_in_5_23(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    at, key_at = places()
    mask = at.new_ones((), dtype=torch.bool) & (key_at > at - 3) & (key_at <= at)
    mask = mask.expand(B, -1, S, S)
    return F.scaled_dot_product_attention(q, repeat_kv(k), repeat_kv(v), mask, scale=0.25)


def prefill_behind_earlier_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    at, key_at = places()
    mask = (key_at <= at[:, :, :4] + 2).expand(B, -1, 4, S)
    return F.scaled_dot_product_attention(q[:, :, :4], repeat_kv(k), repeat_kv(v), mask)


def gemma_2_spelled_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    at, key_at = places()
    given = (k[:, 0, :, 0] > 0)[:, None, None, :]
    mask = torch.where((key_at <= at) & given, torch.zeros(()), torch.finfo(torch.float32).min)
    scores = torch.matmul(q, repeat_kv(k).transpose(2, 3)) * 0.25
    scores = torch.tanh(scores / 50.0) * 50.0 + mask
    weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    weights = F.dropout(weights, p=0.0, training=True)
    return torch.matmul(weights, repeat_kv(v)).transpose(1, 2).contiguous()


def einsum_with_one_head_of_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = k[:, 0], v[:, 0]
    scores = torch.einsum("b h i d, b j d -> b h i j", q * 0.25, k)
    future = torch.ones(S, S, dtype=torch.bool).triu(1)
    weights = scores.masked_fill(future, -torch.finfo(scores.dtype).max).softmax(-1)
    return torch.einsum("b h i j, b j d -> b i h d", weights, v)


def baddbmm_masked_in_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.reshape(B * H, S, D) for x in (q, repeat_kv(k), repeat_kv(v)))
    scores = torch.baddbmm(torch.empty(B * H, S, S), q, k.mT, beta=0, alpha=-0.25)
    scores[:, torch.ones(S, S, dtype=torch.bool).triu(1)] = float("-inf")
    return torch.bmm(scores.softmax(-1), v).view(B, H, S, D)


def after(block: Callable[..., Tensor]) -> str:
    torch._dynamo.reset()
    memeff_compile.reset()
    compiled = torch.compile(block, backend="memeff", options={"memeff.inner": "eager"})
    compiled(torch.ones(B, H, S, D), torch.ones(B, G, S, D), torch.ones(B, G, S, D))
    (graph,) = memeff_compile.graphs()
    return graph.after


class TestGoldens(expecttest.TestCase):
    def test_packed_by_default_positions(self) -> None:
        self.assertExpectedInline(
            after(without_cache_in_5_17),
            """\
graph(
    k: input f32[2, 2, 6, 8],
    v: input f32[2, 2, 6, 8],
    q: input f32[2, 4, 6, 8],
):
    %0: f32[2, 4, 6, 8] = aten.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.25, enable_gqa=True)
    return (%0)""",
        )

    def test_compared_by_positions(self) -> None:
        assert after(without_cache_in_5_23) == after(without_cache_in_5_17)

    def test_spelled_out_with_an_additive_mask(self) -> None:
        self.assertExpectedInline(
            after(eager_with_an_additive_mask),
            """\
graph(
    k: input f32[2, 2, 6, 8],
    q: input f32[2, 4, 6, 8],
    v: input f32[2, 2, 6, 8],
):
    %0: f32[2, 4, 6, 8] = aten.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.25, enable_gqa=True)
    %1: f32[2, 6, 4, 8] = aten.transpose(%0, 1, 2)
    %2: f32[2, 6, 4, 8] = aten.contiguous(%1)
    return (%2)""",
        )

    def test_einsum_with_one_head_of_keys(self) -> None:
        self.assertExpectedInline(
            after(einsum_with_one_head_of_keys),
            """\
graph(
    k: input f32[2, 2, 6, 8],
    v: input f32[2, 2, 6, 8],
    q: input f32[2, 4, 6, 8],
):
    %0: f32[2, 6, 8] = aten.select(k, 1, 0)
    %1: f32[2, 6, 8] = aten.select(v, 1, 0)
    %2: f32[2, 4, 6, 8] = aten.mul(q, 0.25)
    %3: f32[2, 1, 6, 8] = aten.unsqueeze(%0, 1)
    %4: f32[2, 1, 6, 8] = aten.unsqueeze(%1, 1)
    %5: f32[2, 4, 6, 8] = aten.scaled_dot_product_attention(%2, %3, %4, is_causal=True, scale=1.0, enable_gqa=True)
    %6: f32[2, 6, 4, 8] = aten.permute(%5, [0, 2, 1, 3])
    %7: f32[2, 6, 4, 8] = aten.contiguous(%6)
    return (%7)""",
        )

    def test_baddbmm_masked_in_place(self) -> None:
        self.assertExpectedInline(
            after(baddbmm_masked_in_place),
            """\
graph(
    k: input f32[2, 2, 6, 8],
    v: input f32[2, 2, 6, 8],
    q: input f32[2, 4, 6, 8],
):
    %0: f32[2, 4, 6, 8] = aten.neg(q)
    %1: f32[2, 4, 6, 8] = aten.scaled_dot_product_attention(%0, k, v, is_causal=True, scale=0.25, enable_gqa=True)
    %2: f32[8, 6, 8] = aten.flatten(%1, end_dim=1)
    %3: f32[2, 4, 6, 8] = aten.view(%2, [2, 4, 6, 8])
    return (%3)""",
        )

    def test_what_depends_on_data_is_left_as_it_was(self) -> None:
        assert after(padded) == memeff_compile.graphs()[-1].before
        (record,) = memeff_compile.last_report().records
        self.assertExpectedInline(
            str(record.sentence),
            """The mask is padding: kept, PyTorch's kernel for the CPU takes the mask as it is.""",
        )


@mock.patch.object(masked_attention, "why_not_fast", new=mock.Mock(return_value=""))
class TestGoldensOfTheOp(expecttest.TestCase):
    """The arguments of memeff::attention where it is fast, which is assumed here."""

    def test_left_padding(self) -> None:
        self.assertExpectedInline(
            after(left_padding_in_5_23),
            """\
graph(
    k: input f32[2, 2, 6, 8],
    v: input f32[2, 2, 6, 8],
    q: input f32[2, 4, 6, 8],
):
    %0: f32[2, 6] = aten.select(aten.select(k, 1, 0), 2, 0)
    %1: b8[2, 6] = aten.gt(%0, 0)
    %2: b8[2, 6] = aten.clone(%1, memory_format=torch.contiguous_format)
    %3: (f32[2, 4, 6, 8], f32[2, 4, 6]) = memeff.attention(q, k, v, %2, ahead=0, scale=0.25)
    %4: f32[2, 4, 6, 8] = getitem(%3, 0)
    %5: f32[2, 4, 6, 8] = aten.contiguous(%4)
    return (%5)""",
        )

    def test_packed_sequences(self) -> None:
        self.assertExpectedInline(
            after(packed_in_5_23),
            """\
graph(
    k: input f32[2, 2, 6, 8],
    v: input f32[2, 2, 6, 8],
    q: input f32[2, 4, 6, 8],
):
    %0: f32[2, 6] = aten.select(aten.select(k, 1, 0), 2, 0)
    %1: i64[2, 6] = aten.to(%0, i64)
    %2: i64[2, 1] = aten.slice(%1, 1, end=1)
    %3: i64[2, 1] = aten.sub(%2, 1)
    %4: i64[2, 6] = aten.diff(%1, prepend=%3)
    %5: b8[2, 6] = aten.ne(%4, 1)
    %6: i64[2, 6] = aten.cumsum(%5, -1)
    %7: i64[2, 6] = aten.clone(%6, memory_format=torch.contiguous_format)
    %8: (f32[2, 4, 6, 8], f32[2, 4, 6]) = memeff.attention(q, k, v, query_ids=%7, key_ids=%7, ahead=0, scale=0.25)
    %9: f32[2, 4, 6, 8] = getitem(%8, 0)
    %10: f32[2, 4, 6, 8] = aten.contiguous(%9)
    return (%10)""",
        )

    def test_window(self) -> None:
        self.assertExpectedInline(
            after(window_in_5_23),
            """\
graph(
    k: input f32[2, 2, 6, 8],
    v: input f32[2, 2, 6, 8],
    q: input f32[2, 4, 6, 8],
):
    %0: (f32[2, 4, 6, 8], f32[2, 4, 6]) = memeff.attention(q, k, v, ahead=0, behind=2, scale=0.25)
    %1: f32[2, 4, 6, 8] = getitem(%0, 0)
    %2: f32[2, 4, 6, 8] = aten.contiguous(%1)
    return (%2)""",
        )

    def test_earlier_keys(self) -> None:
        self.assertExpectedInline(
            after(prefill_behind_earlier_keys),
            """\
graph(
    q: input f32[2, 4, 6, 8],
    k: input f32[2, 2, 6, 8],
    v: input f32[2, 2, 6, 8],
):
    %0: f32[2, 4, 4, 8] = aten.slice(q, 2, end=4)
    %1: (f32[2, 4, 4, 8], f32[2, 4, 4]) = memeff.attention(%0, k, v, ahead=2)
    %2: f32[2, 4, 4, 8] = getitem(%1, 0)
    %3: f32[2, 4, 4, 8] = aten.contiguous(%2)
    return (%3)""",
        )

    def test_softcap_and_padding(self) -> None:
        self.assertExpectedInline(
            after(gemma_2_spelled_out),
            """\
graph(
    k: input f32[2, 2, 6, 8],
    q: input f32[2, 4, 6, 8],
    v: input f32[2, 2, 6, 8],
):
    %0: f32[2, 6] = aten.select(aten.select(k, 1, 0), 2, 0)
    %1: b8[2, 6] = aten.gt(%0, 0)
    %2: b8[2, 6] = aten.clone(%1, memory_format=torch.contiguous_format)
    %3: (f32[2, 4, 6, 8], f32[2, 4, 6]) = memeff.attention(q, k, v, %2, ahead=0, scale=0.25, softcap=50.0, empty_rows='mean')
    %4: f32[2, 4, 6, 8] = getitem(%3, 0)
    %5: f32[2, 6, 4, 8] = aten.transpose(%4, 1, 2)
    %6: f32[2, 6, 4, 8] = aten.contiguous(%5)
    return (%6)""",
        )

    def test_the_record_of_a_softcap(self) -> None:
        after(gemma_2_spelled_out)
        (record,) = memeff_compile.last_report().records
        self.assertExpectedInline(
            str(record.sentence),
            """Matmul, tanh, softmax, matmul; mask (2 x 1 x 6 x 6, float32) is causal and padding -> memeff::attention (softcap, key table from `k`), engine reference; the scores, 4*B*H*M*N bytes (1.1 KiB), are not built; a query that attends to nothing gets the mean of all values, as before; keys and values are not expanded.""",
        )
