"""Each rank has a part of every sequence: attention over exchanged heads, and the loss of its tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.nn import functional as F

import memeff_compile
from tests.distributed.models import (
    AOTAUTOGRAD,
    VOCABULARY,
    assert_same_gradients,
    fresh_start,
    gradients,
)
from tests.distributed.processes import RANKS, TwoProcesses

HEADS, DEPTH, LENGTH, BATCH = 4, 8, 12, 2


def exchanged(x: Tensor, ranks: int) -> Tensor:
    """Swap the first axis over the ranks: (ranks, ...) of this rank for (ranks, ...) of the
    others.
    """
    flat = all_to_all_single_autograd(x.contiguous().flatten(0, 1), None, None, dist.group.WORLD)
    return flat.unflatten(0, (ranks, -1))


class Model(nn.Module):
    """One attention, whose heads are split over the ranks while it sees whole sequences, and a loss."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        width, self.ranks = HEADS * DEPTH, ranks
        self.embed, self.qkv = nn.Embedding(VOCABULARY, width), nn.Linear(width, 3 * width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x, ranks = self.embed(ids), self.ranks
        qkv = self.qkv(x).unflatten(-1, (3, HEADS, DEPTH))  # (B, S / P, 3, H, D)
        if ranks > 1:
            apart = qkv.unflatten(3, (ranks, -1)).permute(3, 1, 0, 2, 4, 5)
            qkv = exchanged(apart, ranks).flatten(0, 1).transpose(0, 1)
        q, k, v = (each.transpose(1, 2) for each in qkv.unbind(2))  # (B, H / P, S, D)
        mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()
        out = F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2)
        if ranks > 1:
            apart = out.unflatten(1, (ranks, -1)).permute(1, 0, 2, 3, 4)
            out = exchanged(apart.transpose(1, 2), ranks).permute(2, 1, 0, 3, 4).flatten(2, 3)
        logits = self.head(x + out.flatten(2))
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum")


def of_this_rank(whole: Tensor) -> Tensor:
    return whole.chunk(RANKS, dim=1)[dist.get_rank()].contiguous()


def heads_over_ranks() -> None:
    """The last rank has few valid tokens: all of a sequence's end is padding."""
    ids = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
    labels = ids.roll(-1, 1).masked_fill(torch.arange(LENGTH) >= 7, -100)
    plain, model = Model(1), Model(RANKS)
    expected = plain(ids, labels)
    expected.backward()
    fresh_start()
    run: Any = torch.compile(model, backend="memeff", options=AOTAUTOGRAD, fullgraph=True)
    loss = run(of_this_rank(ids), of_this_rank(labels))
    loss.backward()
    report = memeff_compile.last_report()
    assert report.rewrites("recover_attention") == 1
    assert report.rewrites("fuse_linear_cross_entropy") == 1
    total = loss.detach().clone()
    dist.all_reduce(total)
    torch.testing.assert_close(total, expected.detach(), rtol=1e-5, atol=0)
    found = gradients(model)
    for gradient in found.values():
        dist.all_reduce(gradient)
    assert_same_gradients(found, gradients(plain))


@pytest.mark.xdist_group("two processes")
def test_heads_exchanged_around_attention(two_processes: TwoProcesses) -> None:
    two_processes.run(heads_over_ranks)
