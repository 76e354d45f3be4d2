"""Attention under every condition of memeff::attention, built densely, in float64, for autograd."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class Case:
    """Inputs of one call, drawn on the CPU.

    Attributes:
        q, k, v: (B, H, M, D) and (B, G, N, D).
        tables: key_mask, query_ids and key_ids, each None or as the op takes it.
        settings: the keyword arguments.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    tables: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None)
    settings: dict[str, Any] = field(default_factory=dict)

    def to(self, device: str) -> Case:
        """Return the same case on another device."""
        tables = tuple(t if t is None else t.to(device) for t in self.tables)
        operands = (each.detach().to(device) for each in (self.q, self.k, self.v))
        return Case(*operands, tables, self.settings)  # type: ignore[arg-type]


def draw(
    batch: int = 2,
    heads: int = 4,
    groups: int = 2,
    queries: int = 9,
    keys: int = 11,
    depth: int = 8,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    **settings: Any,
) -> Case:
    """Return a case without tables."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((batch, heads, queries, depth), *2 * [(batch, groups, keys, depth)])
    q, k, v = (torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes)
    return Case(q, k, v, settings=settings)


def compose(case: Case, seed: int) -> Case:
    """Put a random composition of conditions on a case."""
    pick = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    batch, _, queries, _ = case.q.shape
    keys = case.k.shape[2]
    key_mask = query_ids = key_ids = None
    if pick.random() < 0.5:
        rows = pick.choice((1, batch))
        key_mask = torch.rand(rows, keys, generator=generator) < pick.choice((0.2, 0.7, 0.95))
        if pick.random() < 0.4:  # padding, to the left or to the right
            start = torch.randint(0, keys + 1, (rows, 1), generator=generator)
            key_mask = torch.arange(keys)[None] >= start
            key_mask = ~key_mask if pick.random() < 0.5 else key_mask
    if pick.random() < 0.4:
        rows, kinds = pick.choice((1, batch)), pick.choice((1, 3, 40))
        dtype = pick.choice((torch.int32, torch.int64))
        query_ids, key_ids = (
            torch.randint(-1, kinds, (rows, length), generator=generator).to(dtype)
            for length in (queries, keys)
        )
        if pick.random() < 0.6:
            query_ids, key_ids = query_ids.sort(-1).values, key_ids.sort(-1).values
    span = max(queries, keys)
    settings = dict(case.settings)
    if pick.random() < 0.6:
        settings["ahead"] = pick.choice((0, 0, keys - queries, pick.randint(-span, 2 * span)))
    if pick.random() < 0.4:
        settings["behind"] = pick.choice((0, 3, pick.randint(-span, span)))
    if pick.random() < 0.4:
        settings["softcap"] = pick.choice((0.7, 30.0))
    if pick.random() < 0.5:
        settings["scale"] = pick.choice((0.3, 1.0))
    if pick.random() < 0.5:
        settings["empty_rows"] = "mean"
    return Case(case.q, case.k, case.v, (key_mask, query_ids, key_ids), settings)


def counting(case: Case) -> Tensor:
    """Return bool (B or 1, M, N): which keys count for which queries, cell by cell."""
    queries, keys, device = case.q.shape[2], case.k.shape[2], case.q.device
    m, n = torch.arange(queries, device=device)[:, None], torch.arange(keys, device=device)[None]
    found = torch.ones(1, queries, keys, dtype=torch.bool, device=device)
    key_mask, query_ids, key_ids = case.tables
    if case.settings.get("ahead") is not None:
        found = found & (n <= m + case.settings["ahead"])
    if case.settings.get("behind") is not None:
        found = found & (n >= m - case.settings["behind"])
    if key_mask is not None:
        found = found & key_mask[:, None, :]
    if query_ids is not None and key_ids is not None:
        found = found & (query_ids[:, :, None] == key_ids[:, None, :])
    return found


def dense(case: Case, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return out and lse of (B, H, M, D) float64 leaves, for autograd."""
    repeat = q.shape[1] // k.shape[1]
    k, v = (each.repeat_interleave(repeat, 1) for each in (k, v))
    scale = case.settings.get("scale")
    score = q @ k.transpose(2, 3) * (q.shape[3] ** -0.5 if scale is None else scale)
    softcap = case.settings.get("softcap", 0.0)
    if softcap:
        score = softcap * torch.tanh(score / softcap)
    found = counting(case)[:, None]
    if case.settings.get("empty_rows", "zeros") == "mean":
        # In an eager chain, all scores of such a row round to one number.
        is_empty = ~found.any(-1, keepdim=True)
        score = torch.where(is_empty, score - score.detach(), score)
        weight = score.masked_fill(~(found | is_empty), -math.inf).softmax(-1)
    else:
        weight = score.masked_fill(~found, -math.inf).softmax(-1)
        weight = weight.masked_fill(~found.any(-1, keepdim=True), 0.0)
    lse = score.masked_fill(~found, -math.inf).logsumexp(-1)
    return weight @ v, lse


def dense_with_gradients(case: Case, grad: Tensor) -> tuple[Tensor, ...]:
    """Return out, lse and the gradients of q, k and v in float64."""
    leaves = [each.detach().double().requires_grad_() for each in (case.q, case.k, case.v)]
    out, lse = dense(case, *leaves)
    return (out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, grad.double()))


def largest(tensor: Tensor) -> float:
    """Return the largest absolute value, 0 for no values."""
    return float(tensor.abs().max()) if tensor.numel() else 0.0


BUDGET = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float32: 1e-4}
"""The largest difference from float64, over the largest value."""
NAMES = ("out", "lse", "grad of q", "grad of k", "grad of v")


def gradient_like(case: Case) -> Tensor:
    """Return a drawn gradient of a case's output, on the same device."""
    generator = torch.Generator(case.q.device).manual_seed(7)
    given = {"device": case.q.device, "dtype": case.q.dtype, "generator": generator}
    return torch.randn(case.q.shape, **given)


def assert_equals_dense(found: Sequence[Tensor], case: Case, grad: Tensor) -> None:
    """Compare out, lse and the gradients of q, k and v with dense attention in float64."""
    for name, ours, wanted in zip(NAMES, found, dense_with_gradients(case, grad), strict=True):
        is_number = wanted != -math.inf
        assert torch.equal(ours != -math.inf, is_number), name
        difference = largest(ours.double()[is_number] - wanted[is_number])
        budget = BUDGET[case.q.dtype] * max(1.0, largest(wanted[is_number]))
        assert difference <= budget, f"{name}: {difference} > {budget}, {case.settings}"


MASKS = (
    "random",
    "blocks of each head",
    "causal",
    "causal, lowest number",
    "causal, minus infinity in bf16",
    "blocks, lowest number, rows without keys",
    "numbers",
    "keys alone",
    "queries alone",
    "transposed",
    "nothing shown",
)


def drawn_mask(kind: str, batch: int, heads: int, queries: int, keys: int, seed: int = 0) -> Tensor:
    """Return a mask as a tensor, (batch or 1, heads or 1, queries or 1, keys or 1)."""
    generator = torch.Generator().manual_seed(seed)

    def share(below: float, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator) < below

    lowest = torch.finfo(torch.float32).min
    blocks = share(0.5, batch, heads, -(-queries // 64), -(-keys // 64))
    blocks = blocks.repeat_interleave(64, 2).repeat_interleave(64, 3)[:, :, :queries, :keys]
    causal = torch.ones(1, 1, queries, keys, dtype=torch.bool).tril()
    match kind:
        case "random":
            return share(0.3, batch, 1, queries, keys)
        case "blocks of each head":
            return blocks
        case "causal":
            return causal
        case "causal, lowest number":
            return torch.where(causal, 0.0, lowest)
        case "causal, minus infinity in bf16":
            return torch.where(causal, 0.0, -math.inf).bfloat16()
        case "blocks, lowest number, rows without keys":
            found = torch.where(blocks, 0.0, lowest)
            found[0, 0, queries // 2] = lowest
            found[-1, -1, -1] = -math.inf
            return found
        case "numbers":
            return torch.randn(1, heads, queries, keys, generator=generator)
        case "keys alone":
            return share(0.4, batch, 1, 1, keys)
        case "queries alone":
            return share(0.4, batch, 1, queries, 1)
        case "transposed":
            return share(0.4, batch, 1, keys, queries).transpose(2, 3)
        case "nothing shown":
            return torch.zeros(1, 1, queries, keys, dtype=torch.bool)
    raise AssertionError(kind)
