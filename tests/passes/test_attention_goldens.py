"""Attention blocks as transformers spells them, and what goes to the inner compiler, as text.

`make golden` rewrites the expected texts; read the difference before accepting it.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import memeff_compile

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

    def test_what_depends_on_data_is_left_as_it_was(self) -> None:
        assert after(padded) == memeff_compile.graphs()[-1].before
        (record,) = memeff_compile.last_report().records
        self.assertExpectedInline(
            str(record.sentence),
            """The mask is padding: kept, fewer than 16 queries are a step of decoding.""",
        )
