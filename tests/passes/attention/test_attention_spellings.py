"""Attention as other packages spell it: which spellings are recovered, and which reason is given.

No spelling of ``softmax(q @ k.T) @ v`` over three or four axes passes without a record.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import memeff_compile
from memeff_compile.passes.attention import told_to_op
from tests.support.captured_graphs import compare_with_eager

B, H, T, D = 2, 3, 6, 8
E = H * D
LOW = torch.finfo(torch.float64).min
SCALE = D**-0.5
INFINITY = float("inf")


def random(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()


def apart() -> tuple[Tensor, ...]:
    """Queries, keys and values as batch, heads, length, depth."""
    return tuple(random(B, H, T, D, seed=seed) for seed in range(3))


def packed() -> tuple[Tensor, ...]:
    """The same as batch, length, heads, depth."""
    return tuple(random(B, T, H, D, seed=seed) for seed in range(3))


def folded() -> tuple[Tensor, ...]:
    """The same with batch and heads in one axis."""
    return tuple(random(B * H, T, D, seed=seed) for seed in range(3))


def shared() -> tuple[Tensor, ...]:
    """Queries with heads, keys and values without."""
    return random(B, H, T, D), random(B, T, D, seed=1), random(B, T, D, seed=2)


def one_head() -> tuple[Tensor, ...]:
    """Queries with heads, keys and values with one."""
    return random(B, H, T, D), random(B, 1, T, D, seed=1), random(B, 1, T, D, seed=2)


def channels() -> tuple[Tensor, ...]:
    """Images as batch, channels, pixels."""
    return tuple(random(B, D, T, seed=seed) for seed in range(3))


def causal() -> Tensor:
    return torch.ones(T, T, dtype=torch.bool).tril()


def future() -> Tensor:
    return torch.ones(T, T, dtype=torch.bool).triu(1)


def bias() -> Tensor:
    return torch.zeros(T, T, dtype=torch.float64).masked_fill(future(), LOW)


def fold(x: Tensor) -> Tensor:
    return x.reshape(B * H, *x.shape[2:])


def split(x: Tensor) -> Tensor:
    return x.view(B, H, *x.shape[1:])


# --- one function a spelling ----------------------------------------------------------------------


def matmul(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-1, -2) * SCALE).softmax(-1) @ v


def matmul_of_mt(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.linalg.matmul((torch.linalg.matmul(q, k.mT) / D**0.5).softmax(-1), v)


def matmul_of_keys_permuted_once(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, v = q.transpose(1, 2), v.transpose(1, 2)
    return (q @ k.permute(0, 2, 3, 1) * SCALE).softmax(-1) @ v


def matmul_special(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.special.softmax(q @ k.transpose(-1, -2) * SCALE, -1) @ v


def matmul_broadcast(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-1, -2) * SCALE).softmax(-1) @ v


def einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (torch.einsum("b h i d, b h j d -> b h i j", q, k) * SCALE).softmax(-1)
    return torch.einsum("b h i j, b h j d -> b h i d", weights, v)


def einsum_of_packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (torch.einsum("bqhd,bkhd->bhqk", q, k) * SCALE).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v)


def einsum_with_ellipsis(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (torch.einsum("...qhd,...khd->...hqk", q, k) * SCALE).softmax(-1)
    return torch.einsum("...hqk,...khd->...qhd", weights, v)


def einsum_causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("b h i d, b h j d -> b h i j", q, k) * SCALE
    weights = scores.masked_fill(future(), -torch.finfo(scores.dtype).max).softmax(-1)
    return torch.einsum("b h i j, b h j d -> b h i d", weights, v)


def einsum_keys_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (torch.einsum("bhjd,bhid->bhij", k, q) * SCALE).softmax(-1)
    return torch.einsum("bhjd,bhij->bhid", v, weights)


def einsum_multi_query(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("b h i d, b j d -> b h i j", q * SCALE, k)
    weights = scores.masked_fill(future(), -torch.finfo(scores.dtype).max).softmax(-1)
    return torch.einsum("b h i j, b j d -> b h i d", weights, v)


def einsum_of_three(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (torch.einsum("b i d, b j d -> b i j", q, k) * SCALE).softmax(-1)
    return torch.einsum("b i j, b j d -> b i d", weights, v)


def einsum_then_matmul(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (torch.einsum("bhid,bhjd->bhij", q, k) * SCALE).softmax(-1) @ v


def einsum_of_channels(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As guided diffusion spells it."""
    scale = 1 / math.sqrt(math.sqrt(D))
    weights = torch.einsum("bct,bcs->bts", q * scale, k * scale).softmax(-1)
    return torch.einsum("bts,bcs->bct", weights, v)


def einsum_queries_along_batch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (torch.einsum("bqhd,bkhd->bqkh", q, k) * SCALE).softmax(2)
    return torch.einsum("bqkh,bkhd->bqhd", weights, v)


def bmm(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.bmm((torch.bmm(q, k.transpose(1, 2)) * SCALE).softmax(-1), v)


def bmm_of_views(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (torch.bmm(fold(q), fold(k).transpose(1, 2)) * SCALE).softmax(-1)
    return split(torch.bmm(weights, fold(v)))


def bmm_causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.bmm(fold(q), fold(k).transpose(1, 2)) * SCALE
    return split(torch.bmm((scores + bias()).softmax(-1), fold(v)))


def bmm_masked_apart(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As old OPT spells it."""
    scores = torch.bmm(q, k.transpose(1, 2)).view(B, H, T, T) + bias()
    weights = scores.view(B * H, T, T).softmax(-1)
    return torch.bmm(F.dropout(weights, 0.0, training=True), v).view(B, H, T, D)


def bmm_folded_along_length(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As fairseq spells it: length, batch times heads, depth."""
    q, k, v = (x.permute(1, 0, 2, 3).reshape(T, B * H, D).transpose(0, 1) for x in (q, k, v))
    weights = (torch.bmm(q * SCALE, k.transpose(1, 2)) + bias().unsqueeze(0)).softmax(-1)
    return torch.bmm(weights, v).transpose(0, 1).reshape(T, B, E)


def bmm_of_channels(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As the attention of latent diffusion's autoencoder spells it."""
    weights = F.softmax(torch.bmm(q.permute(0, 2, 1), k) * D**-0.5, dim=2)
    return torch.bmm(v, weights.permute(0, 2, 1))


def baddbmm_of_nothing(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    empty = torch.empty(B * H, T, T, dtype=q.dtype)
    scores = torch.baddbmm(empty, q, k.transpose(-1, -2), beta=0, alpha=SCALE)
    return torch.bmm(scores.softmax(-1), v)


def baddbmm_of_zeros(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As GPT-NeoX spells it."""
    zeros = torch.zeros(B * H, T, T, dtype=q.dtype)
    scores = torch.baddbmm(zeros, fold(q), fold(k).transpose(1, 2), beta=1.0, alpha=SCALE)
    lowest = torch.tensor(LOW, dtype=q.dtype)
    return torch.where(causal(), scores.view(B, H, T, T), lowest).softmax(-1) @ v


def baddbmm_of_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.baddbmm(bias(), q, k.transpose(-1, -2), beta=1, alpha=SCALE)
    return torch.bmm(scores.softmax(-1), v)


def baddbmm_of_slopes(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As BLOOM spells it."""
    slopes = torch.arange(T, dtype=q.dtype).expand(B * H, 1, T) * 0.1
    scores = slopes.baddbmm(batch1=q, batch2=k.transpose(1, 2), beta=1.0, alpha=SCALE)
    return torch.bmm(scores.softmax(-1), v)


def baddbmm_of_half_a_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.baddbmm(bias(), q, k.transpose(-1, -2), beta=0.5, alpha=SCALE)
    return torch.bmm(scores.softmax(-1), v)


def negative_scale(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-1, -2) * -SCALE + bias()).softmax(-1) @ v


def negative_cap(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((q @ k.transpose(-1, -2) / -5.0).tanh() * 5.0).softmax(-1) @ v


def scale_of_zero(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-1, -2) * 0.0).softmax(-1) @ v


def learned_scale(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-1, -2) * q.abs().mean()).softmax(-1) @ v


def queries_scaled_by_what_was_learned(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((q * q.abs().mean()) @ k.transpose(-1, -2)).softmax(-1) @ v


def softmax_in_float(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = F.softmax(q @ k.transpose(-1, -2) * SCALE, dim=-1, dtype=torch.float64)
    return weights.to(q.dtype) @ v


def where_masked_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(-1, -2) * SCALE
    return torch.where(future(), -INFINITY, scores).softmax(-1) @ v


def masked_in_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(-1, -2) * SCALE
    scores.masked_fill_(future(), -INFINITY)
    return scores.softmax(-1) @ v


def masked_in_place_and_used(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("bhid,bhjd->bhij", q, k)
    scores = scores.mul_(SCALE).masked_fill_(future(), -INFINITY)
    return torch.einsum("bhij,bhjd->bhid", scores.softmax(-1), v)


def added_in_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(-1, -2)
    scores /= D**0.5
    scores += bias()
    return scores.softmax(-1) @ v


def added_by_a_call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(-1, -2)
    scores.div_(D**0.5)
    scores.add_(bias())
    return scores.softmax(-1) @ v


def set_where_true(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(-1, -2) * SCALE
    scores[future().expand(B, H, T, T)] = -INFINITY
    return scores.softmax(-1) @ v


def set_where_true_after_colons(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(-1, -2) * SCALE
    scores[:, :, future()] = -INFINITY
    return scores.softmax(-1) @ v


def weights_written_in_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (q.detach() @ k.detach().transpose(-1, -2)).softmax(-1)
    weights.masked_fill_(future(), 0.0)
    return weights @ v


def weights_set_where_true(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (q.detach() @ k.detach().transpose(-1, -2)).softmax(-1)
    weights[:, :, future()] = 0.0
    return weights @ v


def weights_masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (q @ k.transpose(-1, -2) * SCALE).softmax(-1)
    return weights.masked_fill(future(), 0.0) @ v


def scores_written_later(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q.detach() @ k.detach().transpose(-1, -2)
    out = scores.softmax(-1) @ v
    return out + scores.masked_fill_(future(), 0.0).sum() * 0


def scores_written_by_themselves(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(-1, -2)
    scores.add_(scores.detach().clone())
    return scores.softmax(-1) @ v


def scores_clamped_in_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(-1, -2)
    scores.clamp_(max=5.0)
    return scores.softmax(-1) @ v


def one_row_written(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(-1, -2)
    scores[:, :, 0] = 0.0
    return scores.softmax(-1) @ v


def talking_heads_before(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mix = torch.eye(H, dtype=q.dtype) + 0.1
    scores = torch.einsum("bhij,hg->bgij", q @ k.transpose(-1, -2) * SCALE, mix)
    return scores.softmax(-1) @ v


def talking_heads_after(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mix = torch.eye(H, dtype=q.dtype) + 0.1
    weights = (q @ k.transpose(-1, -2) * SCALE).softmax(-1)
    return torch.einsum("bhij,hg->bgij", weights, mix) @ v


def talking_heads_by_convolution(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mix = (torch.eye(H, dtype=q.dtype) + 0.1)[:, :, None, None]
    return F.conv2d(q @ k.transpose(-1, -2) * SCALE, mix).softmax(-1) @ v


def dropped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (torch.einsum("bhid,bhjd->bhij", q, k) * SCALE).softmax(-1)
    return torch.einsum("bhij,bhjd->bhid", F.dropout(weights, 0.5, training=True), v) * 0


def with_sinks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    sink = torch.zeros(B, H, T, 1, dtype=q.dtype)
    weights = torch.cat([q @ k.transpose(-1, -2) * SCALE, sink], -1).softmax(-1)
    return weights[..., :-1] @ v


def with_weights(q: Tensor, k: Tensor, v: Tensor) -> Any:
    weights = (torch.einsum("bhid,bhjd->bhij", q, k) * SCALE).softmax(-1)
    return torch.einsum("bhij,bhjd->bhid", weights, v), weights


def with_relative_positions(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    table = torch.ones(T, T, D, dtype=q.dtype)
    scores = torch.einsum("bhid,bhjd->bhij", q, k) + torch.einsum("bhid,ijd->bhij", q, table)
    return torch.einsum("bhij,bhjd->bhid", (scores * SCALE).softmax(-1), v)


def values_of_each_query(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    table = torch.ones(B, T, T, D, dtype=q.dtype)
    weights = (torch.einsum("bhid,bhjd->bhij", q, k) * SCALE).softmax(-1)
    return torch.einsum("bhij,bijd->bhid", weights, table)


def over_queries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The transposed scores, of which the softmax goes over the last axis but one."""
    weights = (k @ q.transpose(-1, -2) * SCALE).softmax(-2)
    return weights.transpose(-1, -2) @ v


def windows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As Swin spells it: the mask is added to five axes."""
    scores = q @ k.transpose(-2, -1) * SCALE
    scores = scores.view(1, B, H, T, T) + torch.zeros(B, T, T, dtype=q.dtype)[None, :, None]
    return scores.view(B, H, T, T).softmax(-1) @ v


def double_masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(-1, -2) * SCALE + bias()
    return (scores + bias()).softmax(-1) @ v


def masked_before_it_is_scaled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((q @ k.transpose(-1, -2) + bias()) * SCALE).softmax(-1) @ v


def position_bias(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    table = torch.arange(T * T, dtype=q.dtype).view(1, 1, T, T) * 0.1
    return (q @ k.transpose(-1, -2) + table).softmax(-1) @ v


def padded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    keys = (q.detach().sum((1, 3)) > -INFINITY)[:, None, None]
    return (q @ k.transpose(-1, -2) * SCALE).masked_fill(~keys, LOW).softmax(-1) @ v


def groups_of_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    groups = q.unflatten(1, (H, 1))
    scores = torch.einsum("bghid,bgjd->bghij", groups, k)
    scores = torch.where(torch.ones(T, T).tril() > 0, scores, LOW)
    return torch.einsum("bghij,bgjd->bghid", scores.softmax(-1), v).flatten(1, 2)


def features(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention among D features, over the length (XCiT)."""
    weights = torch.einsum("bhid,bhie->bhde", q, k).softmax(-1)
    return torch.einsum("bhie,bhde->bhid", v, weights)


FIRED = "rewrote"

SPELLINGS: dict[Callable[..., Any], tuple[Callable[[], tuple[Tensor, ...]], str]] = {
    matmul: (apart, FIRED),
    matmul_of_mt: (apart, FIRED),
    matmul_of_keys_permuted_once: (packed, FIRED),
    matmul_special: (apart, FIRED),
    matmul_broadcast: (one_head, FIRED),
    einsum: (apart, FIRED),
    einsum_of_packed: (packed, FIRED),
    einsum_with_ellipsis: (packed, FIRED),
    einsum_causal: (apart, FIRED),
    einsum_keys_first: (apart, FIRED),
    einsum_multi_query: (shared, FIRED),
    einsum_of_three: (folded, FIRED),
    einsum_then_matmul: (apart, FIRED),
    einsum_of_channels: (channels, FIRED),
    bmm: (folded, FIRED),
    bmm_of_views: (apart, FIRED),
    bmm_causal: (apart, FIRED),
    bmm_masked_apart: (folded, FIRED),
    bmm_folded_along_length: (packed, FIRED),
    bmm_of_channels: (channels, FIRED),
    baddbmm_of_nothing: (folded, FIRED),
    baddbmm_of_zeros: (apart, FIRED),
    baddbmm_of_mask: (folded, FIRED),
    negative_scale: (apart, FIRED),
    queries_scaled_by_what_was_learned: (apart, FIRED),
    softmax_in_float: (apart, FIRED),
    where_masked_first: (apart, FIRED),
    masked_in_place: (apart, FIRED),
    masked_in_place_and_used: (apart, FIRED),
    added_in_place: (apart, FIRED),
    added_by_a_call: (apart, FIRED),
    set_where_true: (apart, FIRED),
    set_where_true_after_colons: (apart, FIRED),
    over_queries: (apart, FIRED),
    features: (apart, FIRED),
    baddbmm_of_slopes: (folded, "mask_is_bias"),
    position_bias: (apart, "mask_is_bias"),
    padded: (apart, "padding_mask"),
    negative_cap: (apart, "softcap"),
    baddbmm_of_half_a_mask: (folded, "unknown_step(baddbmm)"),
    scale_of_zero: (apart, "scale_not_constant"),
    learned_scale: (apart, "scale_not_constant"),
    scores_written_later: (apart, "scores_used(masked_fill_)"),
    scores_clamped_in_place: (apart, "unknown_step(clamp_)"),
    one_row_written: (apart, "unknown_step(setitem)"),
    scores_written_by_themselves: (apart, "scores_used(detach)"),
    weights_written_in_place: (apart, "unknown_step(masked_fill_)"),
    weights_set_where_true: (apart, "unknown_step(setitem)"),
    weights_masked: (apart, "unknown_step(masked_fill)"),
    talking_heads_before: (apart, "unknown_step(einsum)"),
    talking_heads_after: (apart, "unknown_step(einsum)"),
    talking_heads_by_convolution: (apart, "unknown_step(conv2d)"),
    windows: (apart, "unknown_step(view)"),
    double_masked: (apart, "unknown_step(add)"),
    masked_before_it_is_scaled: (apart, "unknown_step(add)"),
    with_relative_positions: (apart, "unknown_step(add)"),
    dropped: (apart, "dropout_active"),
    with_sinks: (apart, "sinks"),
    with_weights: (apart, "weights_used(output)"),
    values_of_each_query: (apart, "axes_order"),
    groups_of_heads: (apart, "axes_order"),
    einsum_queries_along_batch: (packed, "axes_order"),
}


def codes_of(function: Callable[..., Any], *inputs: Tensor, **how: Any) -> list[str]:
    """Compare with eager, values and gradients; return the codes of the records."""
    report = compare_with_eager(function, *inputs, rtol=1e-9, atol=1e-9, **how).report
    return [r.code for r in report.records if r.pass_name == "recover_attention"]


@pytest.mark.parametrize("spelling", SPELLINGS, ids=lambda each: each.__name__)
def test_a_spelling_of_attention_is_recovered_or_says_why_not(
    spelling: Callable[..., Any],
) -> None:
    inputs, code = SPELLINGS[spelling]
    assert codes_of(spelling, *inputs()) == [code]
    graph = memeff_compile.graphs()[-1]
    if code == FIRED:
        assert "scaled_dot_product_attention(" in graph.after
        assert "softmax(" not in graph.after
    else:
        assert graph.after == graph.before


# --- the new call ---------------------------------------------------------------------------------


def after(spelling: Callable[..., Any], *inputs: Tensor, **how: Any) -> str:
    """Return the rewritten graph of a spelling that is recovered."""
    assert codes_of(spelling, *inputs, **how) == [FIRED]
    return memeff_compile.graphs()[-1].after


@pytest.mark.parametrize("spelling", [einsum_multi_query, matmul_broadcast])
def test_one_head_of_keys_is_not_expanded(spelling: Callable[..., Any]) -> None:
    inputs, _ = SPELLINGS[spelling]
    text = after(spelling, *inputs())
    assert "enable_gqa=True" in text
    assert "expand" not in text


def test_the_sign_of_a_scale_is_given_to_the_queries() -> None:
    text = after(negative_scale, *apart())
    assert f"is_causal=True, scale={SCALE}" in text
    assert "aten.neg" in text


@pytest.mark.parametrize("spelling", [bmm_of_views, bmm_causal])
def test_views_that_folded_the_heads_are_gone(spelling: Callable[..., Any]) -> None:
    text = after(spelling, *apart())
    assert "reshape" not in text
    assert "unflatten" not in text


@pytest.mark.parametrize("spelling", [einsum_of_packed, einsum_of_channels, bmm_of_channels])
def test_a_batch_of_one_is_recovered(spelling: Callable[..., Any]) -> None:
    inputs, _ = SPELLINGS[spelling]
    after(spelling, *(each[:1] for each in inputs()))


DYNAMIC = [
    einsum_of_packed,
    einsum_multi_query,
    einsum_of_channels,
    bmm,
    bmm_of_views,
    baddbmm_of_nothing,
    masked_in_place,
    over_queries,
]


@pytest.mark.parametrize("spelling", DYNAMIC, ids=lambda each: each.__name__)
def test_a_spelling_is_recovered_with_sizes_that_vary(spelling: Callable[..., Any]) -> None:
    inputs, _ = SPELLINGS[spelling]
    after(spelling, *inputs(), dynamic=True)


@pytest.mark.parametrize("spelling", [einsum_multi_query, bmm_causal, added_in_place])
def test_a_spelling_is_recovered_inside_a_checkpoint(spelling: Callable[..., Any]) -> None:
    def kept(*given: Tensor) -> Any:
        return checkpoint(spelling, *given, use_reentrant=False)

    inputs, _ = SPELLINGS[spelling]
    after(kept, *inputs())


@pytest.mark.parametrize("spelling", [einsum_of_packed, bmm_of_views, masked_in_place])
def test_a_spelling_under_autocast_gives_what_the_products_give(
    spelling: Callable[..., Any],
) -> None:
    inputs, _ = SPELLINGS[spelling]
    given = [each.detach().float() for each in inputs()]

    def lowered(*given: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return spelling(*given)

    torch._dynamo.reset()
    memeff_compile.reset()
    compiled = torch.compile(lowered, backend="memeff", options={"memeff.inner": "eager"})
    found, expected = compiled(*given), lowered(*given)
    assert "scaled_dot_product_attention(" in memeff_compile.graphs()[-1].after
    assert found.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), spelling(*given), rtol=2e-2, atol=2e-2)


def padded_and_folded(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    scores = torch.bmm(q, k.transpose(1, 2)) * SCALE
    scores = scores.masked_fill(~table.repeat_interleave(H, 0)[:, None], LOW)
    return torch.bmm(scores.softmax(-1), v)


def padded_with_one_head(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    scores = torch.einsum("bid,bjd->bij", q, k) * SCALE
    return scores.masked_fill(~table[:, None] | future(), LOW).softmax(-1) @ v


@pytest.mark.parametrize("spelling", [padded_and_folded, padded_with_one_head])
def test_a_mask_of_three_axes_is_told_to_the_op(
    spelling: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(told_to_op, "why_not_fast", lambda *_: "")
    rows = B * H if spelling is padded_and_folded else B
    inputs = [random(rows, T, D, seed=seed).detach() for seed in range(3)]
    table = torch.ones(B, T, dtype=torch.bool)
    table[0, 4:] = False
    assert "memeff.attention(" in after(spelling, *inputs, table)


# --- near misses ----------------------------------------------------------------------------------


def values_of_queries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The second product sums over the queries."""
    weights = torch.einsum("bhid,bhjd->bhij", q, k).softmax(-1)
    return torch.einsum("bhij,bhid->bhjd", weights, v)


def sums_over_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Einsum without an arrow sums over every letter that it sees twice."""
    weights = torch.einsum("bhid,bhjd->bhij", q, k).softmax(-1)
    return torch.einsum("bhij,bhjd", weights, v)


def values_of_another_fold(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The weights' batch and heads are taken for heads and batch."""
    scores = torch.bmm(fold(q), fold(k).transpose(1, 2)).view(B, H, T, T) * SCALE
    weights = scores.view(B * H, T, T).softmax(-1).view(H, B, T, T)
    return weights @ v.reshape(H, B, T, D)


def weights_of_all_queries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The weights are summed over queries before they are multiplied."""
    weights = (q @ k.transpose(-1, -2) * SCALE).softmax(-1)
    return weights.sum(-2, keepdim=True) @ v


def softmax_over_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-1, -2) * SCALE).softmax(1) @ v


def mask_of_some_rows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The mask goes along the first axes, not the last ones."""
    scores = q @ k.transpose(-1, -2) * SCALE
    scores[torch.ones(B, H, dtype=torch.bool).triu(1)] = -100000.0
    return scores.softmax(-1) @ v


def softmax_of_five_axes(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A softmax of a product's blocks, which no other product reads."""
    blocks = (q @ k.transpose(-1, -2)).unflatten(1, (H, 1)).softmax(-1)
    return blocks.sum(-1) + v.sum()


NEAR_MISSES: dict[Callable[..., Any], list[str]] = {
    values_of_queries: [],
    sums_over_heads: [],
    values_of_another_fold: ["axes_order"],
    weights_of_all_queries: [],
    softmax_over_heads: [],
    mask_of_some_rows: ["unknown_step(setitem)"],
    softmax_of_five_axes: [],
}


@pytest.mark.parametrize("near_miss", NEAR_MISSES, ids=lambda each: each.__name__)
def test_what_is_almost_attention_is_left_alone(near_miss: Callable[..., Any]) -> None:
    assert codes_of(near_miss, *apart()) == NEAR_MISSES[near_miss]
