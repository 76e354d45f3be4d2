"""Inputs of quantised attention, exact attention in float64, and the paper's measures of a result."""

from __future__ import annotations

import torch
from torch import Tensor

from memeff_compile.kernels._triton.conditions import Conditions
from tests.support.dense_attention import Case, dense, draw

KINDS = ("iid", "bias", "channels")


def biased(case: Case, kind: str, seed: int = 0) -> Case:
    """Return the case with means (bias) or a few huge channels in queries and keys."""
    generator = torch.Generator().manual_seed(seed + 100)
    q, k, v = (each.float() for each in (case.q, case.k, case.v))
    depth = q.shape[3]
    if kind == "bias":
        q = q + 3 * torch.randn(1, q.shape[1], 1, depth, generator=generator)
        k = k + 4 * torch.randn(1, k.shape[1], 1, depth, generator=generator)
        v = v + torch.randn(1, v.shape[1], 1, depth, generator=generator)
    elif kind == "channels":
        loud = torch.ones(depth)
        loud[torch.randperm(depth, generator=generator)[:4]] = 8.0
        q, k = q * loud, (k + 1.0) * loud
    dtype = case.q.dtype
    return Case(q.to(dtype), k.to(dtype), v.to(dtype), case.tables, case.settings)


def half(queries: int, keys: int, depth: int, kind: str = "iid", **settings: object) -> Case:
    """Return a bf16 case of two heads that share keys."""
    return biased(draw(1, 2, 1, queries, keys, depth, torch.bfloat16, **settings), kind)


def exact(case: Case) -> tuple[Tensor, Tensor]:
    """Return the result in float64, and the logarithms of the sums."""
    return dense(case, *(each.double() for each in (case.q, case.k, case.v)))


def relative_l1(found: Tensor, wanted: Tensor) -> float:
    """Return the paper's relative L1: the sum of differences over the sum of sizes."""
    difference = (found.double() - wanted.double()).abs().sum()
    return float(difference / wanted.double().abs().sum())


def conditions(case: Case) -> Conditions:
    """Return the conditions of a case as the op hands them on."""
    given = {"ahead": None, "behind": None, "scale": None, **case.settings}
    scale = case.q.shape[3] ** -0.5 if given["scale"] is None else given["scale"]
    return Conditions(*case.tables, given["ahead"], given["behind"], scale, 0.0, False)
