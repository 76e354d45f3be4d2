"""The reference implementation: the formula in plain PyTorch, one block of queries at a time, on
any device.

The scores of a block are computed in fp32 (fp64 for fp64 inputs). The scores are freed as soon as
the block's results are computed, so the scores of all queries never exist at once. The bounds
`ahead` and `behind` say how far after and before a query its keys may be. The implementation does
not read keys that these bounds hide from a whole block of queries.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .._triton.conditions import Conditions
from ..checks import wide
from ..library import heads_inside

BLOCK_SCORES = 1 << 22
"""Scores of one block: enough for the products to be fast, 16 MiB in fp32."""


@dataclass(frozen=True)
class _Operands:
    """q, k and v in the dtype in which sums are computed.

    Query heads are grouped by the key-value head that they share.
    """

    q: Tensor  # (B, G, R, M, D) with R query heads to a key head
    k: Tensor  # (B, G, N, D)
    v: Tensor  # likewise
    given: Conditions  # the conditions

    def blocks(self) -> Iterator[tuple[int, int]]:
        """Return the first query and the end of each block of queries."""
        batch, groups, repeat, queries, _ = self.q.shape
        size = block_of(batch * groups * repeat, queries, self.k.shape[2])
        return ((first, min(first + size, queries)) for first in range(0, queries, size))

    def scores(self, first: int, stop: int) -> tuple[Tensor, Tensor, slice]:
        """Return the scores of a block of queries, a mask of the visible scores, and a range of
        keys.

        The block contains the queries from `first` up to, not including, `stop`. The range contains
        the keys that these queries need, and only these keys have scores. The softcap and a bias
        have been applied to the scores, but a mask has not. The scores and the mask have the shape
        (B, G, R, stop - first, keys), or broadcast to it. The axes are B sequences, G key-value
        heads, and R query heads that share a key-value head.
        """
        low, high = self.given.keys_of(first, stop, self.q.shape[3], self.k.shape[2])
        keys = slice(low, high)
        rows = self.q[:, :, :, first:stop]
        score = _product(rows, self.k[:, :, keys].transpose(2, 3)) * self.given.scale
        if self.given.softcap:
            score = self.given.softcap * torch.tanh(score / self.given.softcap)
        if self.given.mask is not None:
            mask = self._mask(first, stop)
            if not self.given.is_bias:
                return score, mask, keys
            score = score + mask.to(score.dtype)
            return score, score != -math.inf, keys
        counts = self.given.counts(first, stop, low, high, self.q.device)
        return score, counts[:, None, None], keys

    def _mask(self, first: int, stop: int) -> Tensor:
        """Return the mask for a block of queries, (B or 1, G or 1, R or 1, rows, keys).

        G is the number of key-value heads, and R the number of query heads that share one of them.
        """
        mask = self.given.mask
        assert mask is not None
        if mask.shape[2] > 1:
            mask = mask[:, :, first:stop]
        grouped = self.q.shape[1:3] if mask.shape[1] > 1 else (1, 1)
        found: Tensor = mask.unflatten(1, grouped)
        return found


def block_of(heads: int, queries: int, keys: int) -> int:  # heads of all sequences
    """Return how many queries a block has: as many as `BLOCK_SCORES` scores allow, but at least 16.

    Each query has one score per head and key.
    """
    return max(1, min(queries, max(16, BLOCK_SCORES // max(1, heads * keys))))


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Multiply (B, G, R, m, X) by (B, G, X, Y).

    The R query heads that use one of the G key-value heads share the second factor. B counts
    sequences, and m counts queries. One of X and Y is the head dimension, and the other counts
    keys.
    """
    batch, groups, repeat, rows, inner = a.shape
    found = torch.matmul(a.reshape(batch, groups, repeat * rows, inner), b)
    return found.view(batch, groups, repeat, rows, b.shape[3])


def _product_over_rows(a: Tensor, b: Tensor) -> Tensor:
    """Sum a^T b over the queries and the query heads that share a key-value head.

    The inputs are (B, G, R, m, X) and (B, G, R, m, Y), and the result is (B, G, X, Y). B counts
    sequences, G key-value heads, R query heads per key-value head, and m queries. X counts keys,
    and Y is the head dimension.
    """
    left, right = (each.flatten(2, 3) for each in (a, b))
    return torch.matmul(left.transpose(2, 3), right)


def _operands(q: Tensor, k: Tensor, v: Tensor, given: Conditions) -> _Operands:
    batch, heads, queries, depth = q.shape
    dtype = wide(q.dtype)
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    if given.key_mask is not None and not given.mean:
        # Values of padding must not reach the result, not even as 0 * nan.
        hidden = ~given.key_mask[:, None, :, None]
        k, v = k.masked_fill(hidden, 0.0), v.masked_fill(hidden, 0.0)
    groups = k.shape[1]
    return _Operands(q.reshape(batch, groups, heads // groups, queries, depth), k, v, given)


def attend(q: Tensor, k: Tensor, v: Tensor, given: Conditions) -> tuple[Tensor, Tensor]:
    """Return attention over the keys that no mask excludes, and the log-sum-exp of each query's
    scores.

    - The first result is (B, H, M, D), with its memory in the order (B, M, H, D).
    - The second result is (B, H, M) in fp32 or fp64, with minus infinity for a query that attends
      to no key.
    - If the mask is a bias, the second result is (2, B, H, M). The planes are the largest score,
      and the logarithm of the sum of weights relative to that score.
    """
    batch, heads, queries, depth = q.shape
    every = _operands(q, k, v, given)
    out = heads_inside(q)
    planes = every.q.new_empty((1 + given.is_bias, batch, heads, queries))
    lse = planes if given.is_bias else planes[0]
    for first, stop in every.blocks():
        score, counts, keys = every.scores(first, stop)
        score = score.masked_fill(~counts, -math.inf)
        if score.shape[4] == 0:
            out[:, :, first:stop] = 0.0
            planes[:, :, :, first:stop] = -math.inf
            continue
        top = score.amax(-1, keepdim=True)
        score = score - top.masked_fill(top == -math.inf, 0.0)
        logs = score.logsumexp(-1, keepdim=True)
        weight = torch.exp(score - logs).masked_fill(top == -math.inf, _weight_of_none(every))
        found = _product(weight, every.v[:, :, keys])
        out[:, :, first:stop] = found.reshape(batch, heads, stop - first, depth)
        for plane, sums in zip(
            planes, (top, logs) if given.is_bias else (top + logs,), strict=True
        ):
            plane[:, :, first:stop] = sums.reshape(batch, heads, stop - first)
    return out, lse


def _weight_of_none(every: _Operands) -> float:
    """Return the weight that each value gets for a query from which all keys are hidden.

    The weight is 1 / N if such a query gets the mean of all N values, otherwise 0.
    """
    return 1.0 / max(1, every.k.shape[2]) if every.given.mean else 0.0


def gradients(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, given: Conditions
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, with their memory in the order (batch, rows, heads,
    depth).

    `grad_out` is the gradient of the output; `out` and `lse` are the results of `attend`.
    """
    every = _operands(q, k, v, given)
    grad = grad_out.to(every.q.dtype).reshape(every.q.shape)
    delta = (grad * out.to(every.q.dtype).reshape(every.q.shape)).sum(-1, keepdim=True)
    planes = lse.reshape(1 + given.is_bias, *every.q.shape[:4], 1)
    grad_q, grad_k, grad_v = (
        each.new_zeros(each.shape[0], each.shape[2], each.shape[1], each.shape[3]).transpose(1, 2)
        for each in (q, every.k, every.v)
    )
    for first, stop in every.blocks():
        score, counts, keys = every.scores(first, stop)
        rows = (slice(None), slice(None), slice(None), slice(first, stop))
        is_none = planes[0][rows] == -math.inf
        weight = score
        for plane in planes:
            weight = weight - plane[rows]
        weight = torch.exp(weight).masked_fill(~counts, 0.0)
        weight = weight.masked_fill(is_none, _weight_of_none(every))
        slope = weight * (_product(grad[rows], every.v[:, :, keys].transpose(2, 3)) - delta[rows])
        slope = slope.masked_fill(weight == 0.0, 0.0)
        if given.softcap:
            slope = slope * (1.0 - (score / given.softcap).square())
        slope = slope * given.scale
        grad_q[:, :, first:stop] = _product(slope, every.k[:, :, keys]).reshape(
            q.shape[0], q.shape[1], stop - first, q.shape[3]
        )
        grad_k[:, :, keys] += _product_over_rows(slope, every.q[rows])
        grad_v[:, :, keys] += _product_over_rows(weight, grad[rows])
    return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype)
