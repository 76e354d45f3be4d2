"""Ranks that hold parts of the sequence: attention still sees all of it, and the loss is served."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental import context_parallel
from torch.nn import functional as F
from transformers.loss.loss_utils import ForCausalLMLoss

import memeff_compile
from tests.distributed.models import OPTIONS, assert_same_gradients, gradients
from tests.distributed.processes import RANKS, TwoProcesses

LENGTH, HEADS, WIDTH, VOCABULARY = 16, 4, 32, 101
ATEN = torch.ops.aten


@cache
def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (RANKS,))


def all_keys(x: Tensor) -> Tensor:
    return collectives.all_gather_tensor(x.contiguous(), 2, dist.group.WORLD)


def sums_of_own(x: Tensor) -> Tensor:
    return collectives.reduce_scatter_tensor(x.contiguous(), "sum", 2, dist.group.WORLD)


def scores(q: Tensor, keys: Tensor) -> Tensor:
    mine = q.shape[2]
    seen = torch.ones(mine, keys.shape[2], dtype=torch.bool).tril(dist.get_rank() * mine)
    products = q @ keys.transpose(-1, -2) * q.shape[-1] ** -0.5
    return products.masked_fill(~seen, -torch.inf)


def of_the_sequence(*parts: Tensor) -> tuple[DTensor, ...]:
    return tuple(DTensor.from_local(p, mesh(), [Shard(2)], run_check=False) for p in parts)


def attention(op: object, args: Any, settings: object) -> tuple[DTensor, ...]:
    """Replacement of torch's ring attention, which has no CPU kernel: gathers the keys of all
    ranks.
    """
    q, k, v = (each._local_tensor for each in args[:3])
    found = scores(q, all_keys(k))
    return of_the_sequence(found.softmax(-1) @ all_keys(v), found.logsumexp(-1))


def backward(op: object, args: Any, settings: object) -> tuple[DTensor, ...]:
    out_gradient, q, k, v, out, lse = (each._local_tensor for each in args[:6])
    keys, values = all_keys(k), all_keys(v)
    p = (scores(q, keys) - lse[..., None]).exp()
    inner = out_gradient @ values.transpose(-1, -2) - (out_gradient * out).sum(-1, keepdim=True)
    of_scores = p * inner * q.shape[-1] ** -0.5
    of_keys = sums_of_own(of_scores.transpose(-1, -2) @ q)
    of_values = sums_of_own(p.transpose(-1, -2) @ out_gradient)
    return of_the_sequence(of_scores @ keys, of_keys, of_values)


class Model(nn.Module):
    """Embedding, causal attention, head; the loss takes labels that are shifted already."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.qkv = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def forward(self, ids: Tensor, shift_labels: Tensor, count: Tensor) -> Tensor:
        x = self.embed(ids)
        q, k, v = self.qkv(x).view(*ids.shape, 3, HEADS, -1).permute(2, 0, 3, 1, 4).unbind(0)
        logits = self.head(x + self.attend(q, k, v).transpose(1, 2).flatten(2))
        loss: Tensor = ForCausalLMLoss(
            logits, None, VOCABULARY, num_items_in_batch=count, shift_labels=shift_labels
        )
        return loss


def to_all(x: Tensor, split: int, joined: int) -> Tensor:
    """Give each rank its share of one dimension, and all of another."""
    given = torch.stack(x.chunk(RANKS, split)).contiguous()
    got = collectives.all_to_all_single_autograd(given, None, None, dist.group.WORLD)
    return torch.cat(got.unbind(0), joined)


class ByHeads(Model):
    """Attention of some heads over the whole sequence, as DeepSpeed's Ulysses has it."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (to_all(each, 1, 2) for each in (q, k, v))
        hidden = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        products = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        out = products.masked_fill(hidden, -torch.inf).softmax(-1) @ v
        return to_all(out, 2, 1)


def batch(valid: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, and labels of which the first part of the sequence has fewer, or none."""
    ids = torch.randint(3, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    labels = ids.roll(-1, 1)
    labels[:, -1] = -100
    labels[:, : {"some": 3, "none": LENGTH // 2}[valid]] = -100
    return ids, labels, (labels != -100).sum()


def expected(valid: str) -> tuple[Tensor, dict[str, Tensor]]:
    model = Model()
    loss = model(*batch(valid))
    loss.backward()
    return loss.detach(), gradients(model)


def assert_one_process(model: nn.Module, loss: Tensor, valid: str) -> None:
    total = loss.detach().clone()
    dist.all_reduce(total)
    found = gradients(model)
    for gradient in found.values():
        dist.all_reduce(gradient)
    wanted_loss, wanted = expected(valid)
    torch.testing.assert_close(total, wanted_loss, rtol=1e-6, atol=0)
    assert_same_gradients(found, wanted)


def attention_sees_all_ranks(valid: str, **settings: Any) -> None:
    """Under torch's context_parallel, compiled inside, and outside before: no local attention."""
    from torch.distributed.tensor.experimental._context_parallel import _attention as torchs

    model = Model()
    options = {**OPTIONS, **settings.pop("options", {})}
    model.compile(backend="memeff", options=options, **settings)
    ids, labels, count = batch(valid)
    part = slice(0, LENGTH // RANKS)
    if valid == "some":  # code for a sequence that is all there, of the same shapes
        model(ids[:, part].clone(), labels[:, part].clone(), count)
    flash = ATEN._scaled_dot_product_flash_attention_for_cpu
    served = {
        flash.default: attention,
        ATEN._scaled_dot_product_flash_attention_for_cpu_backward.default: backward,
    }
    with (
        mock.patch.dict(torchs.custom_ops, served),
        mock.patch.object(torchs._cp_options, "enable_load_balance", False),
        context_parallel(mesh(), buffers=[ids, labels], buffer_seq_dims=[1, 1]),
    ):
        assert ids.shape[1] == LENGTH // RANKS
        loss = model(ids, labels, count)
        loss.backward()
    assert_one_process(model, loss, valid)
    records = memeff_compile.last_report().graphs[-1].records
    assert ("fuse_linear_cross_entropy", "rewrote") in {(r.pass_name, r.code) for r in records}
    of_attention = [r for r in records if "attention" in r.pass_name]
    assert {r.action for r in of_attention} == {"declined"}
    assert "subclass_operand(DTensor)" in {r.code for r in of_attention}


def heads_are_exchanged(valid: str) -> None:
    model = ByHeads()
    model.compile(backend="memeff", options=OPTIONS)
    rank = dist.get_rank()
    ids, labels, count = batch(valid)
    ids, labels = (each.chunk(RANKS, 1)[rank].contiguous() for each in (ids, labels))
    loss = model(ids, labels, count)
    loss.backward()
    assert_one_process(model, loss, valid)
    report = memeff_compile.last_report()
    assert report.rewrites("recover_attention") == report.rewrites("fuse_linear_cross_entropy") == 1


SLOW = pytest.mark.slow
LOW_BIT = {"memeff.attention": "8b", "memeff.attention.length": 1}
CASES: list[Any] = [
    partial(attention_sees_all_ranks, "some"),
    pytest.param(partial(attention_sees_all_ranks, "none", dynamic=True), marks=SLOW),
    pytest.param(partial(attention_sees_all_ranks, "some", options=LOW_BIT), marks=SLOW),
    partial(heads_are_exchanged, "none"),
    pytest.param(partial(heads_are_exchanged, "some"), marks=SLOW),
]


@pytest.mark.xdist_group("two processes")
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.func.__name__} {case.args[0]}")
def test_context_parallel(
    case: Callable[[], None], two_processes: TwoProcesses, inner: str
) -> None:
    two_processes.run(case, inner=inner)
