"""Random layouts and shapes over two processes: none of them hangs, and all agree with one process.

Every draw has a time limit; one that exceeds it is ended and named by its seed, like a wrong one.
"""

from __future__ import annotations

import contextlib
import random
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleOutput,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import memeff_compile
from memeff_compile.passes.graph import last_product
from tests.distributed.models import assert_same_gradients, fresh_start, gradients, whole
from tests.distributed.processes import RANKS, TwoProcesses

LIMIT = 150.0
"""Seconds for a draw, which takes three on an idle machine."""

DATA_PARALLEL = (
    *("plain", "ddp", "ddp outside", "fsdp root", "fsdp layers"),
    *("fsdp root freed", "fsdp root kept", "fsdp own head", "fsdp norm and head"),
    "fsdp layers in checkpoints",
)
TENSOR_PARALLEL = ("tp gathered", "tp parallel loss", "tp sequence", "tp sequence, parallel loss")


@dataclass(frozen=True)
class Draw:
    """A model, its layout, and each rank's data in each micro-batch."""

    seed: int
    layout: str
    width: int
    vocabulary: int
    blocks: int
    attends: bool
    tied: bool
    reduction: str
    returns_logits: bool
    reads_logits: bool  # before the backward; on rank 0 alone, where they are not split over ranks
    logits: str  # memeff.logits
    inner: str
    dynamic: bool | None
    lengths: tuple[tuple[int, ...], ...]  # by micro-batch, by rank
    batches: tuple[tuple[int, ...], ...]
    ignored: tuple[tuple[str, ...], ...]  # none, half or all of the labels


def draw(seed: int) -> Draw:
    chance = random.Random(seed)
    layout = chance.choice(DATA_PARALLEL + TENSOR_PARALLEL)
    splits, steps = layout in TENSOR_PARALLEL, chance.choice((1, 2, 2, 3))

    def by_rank(choices: Any) -> tuple[tuple[Any, ...], ...]:
        drawn = [[chance.choice(choices) for _ in range(RANKS)] for _ in range(steps)]
        return tuple((one[0],) * RANKS if splits else tuple(one) for one in drawn)

    ignored = by_rank(("none", "none", "half", "all"))
    returns = not splits and chance.random() < 0.6
    if splits:
        returns = seed % 2 == 0 and "parallel loss" not in layout
    drawn = Draw(
        seed=seed,
        layout=layout,
        width=chance.choice((8, 16, 24)),
        vocabulary=chance.choice((97, 128, 161)),
        blocks=chance.choice((1, 2)),
        attends=chance.random() < 0.5,
        tied=layout in ("plain", "ddp", "fsdp root") and chance.random() < 0.4,
        reduction="sum" if "all" in str(ignored) else chance.choice(("mean", "sum")),
        returns_logits=returns,
        reads_logits=returns and (seed % 4 == 0 if splits else chance.random() < 0.5),
        logits=chance.choice(("deferred", "deferred", "eager", "none")),
        inner=chance.choice(("eager", "aot_eager")),
        dynamic=chance.choice((None, None, True, False)),
        lengths=by_rank((2, 4, 6, 10, 12) if "sequence" in layout else tuple(range(1, 13))),
        batches=by_rank((1, 2, 3)),
        ignored=ignored,
    )
    # AOTAutograd of torch 2.13 fails on logits gathered over ranks if their sizes vary, with every
    # backend (a RecursionError).
    fails = splits and drawn.returns_logits and drawn.logits == "eager"
    return replace(drawn, inner="eager") if fails else drawn


class Block(nn.Module):
    def __init__(self, width: int, attends: bool) -> None:
        super().__init__()
        self.attends = attends
        self.gradient_checkpointing = False
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def __call__(self, x: Tensor) -> Any:
        if not self.gradient_checkpointing:
            return super().__call__(x)
        return checkpoint(partial(super().__call__), x, use_reentrant=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.up(x).unflatten(-1, (3, 2, -1)).movedim(-3, 0).transpose(-3, -2).unbind(0)
        if self.attends:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            mixed = torch.tanh(q) * k + v
        return x + self.down(mixed.transpose(-3, -2).flatten(-2))


class Model(nn.Module):
    """Embedding, blocks, norm, head and loss."""

    def __init__(self, drawn: Draw) -> None:
        super().__init__()
        torch.manual_seed(drawn.seed)
        self.drawn = drawn
        self.embed = nn.Embedding(drawn.vocabulary, drawn.width)
        self.blocks = nn.Sequential(
            *(Block(drawn.width, drawn.attends) for _ in range(drawn.blocks))
        )
        self.norm = nn.LayerNorm(drawn.width)
        self.head = nn.Linear(drawn.width, drawn.vocabulary, bias=False)
        if drawn.tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Any:
        logits = self.head(self.norm(self.blocks(self.embed(ids))))
        given = logits.flatten(0, 1).float(), labels.flatten()
        loss = F.cross_entropy(*given, reduction=self.drawn.reduction)
        return (loss, logits) if self.drawn.returns_logits else loss


def data(drawn: Draw, step: int, rank: int) -> tuple[Tensor, Tensor]:
    rank = 0 if drawn.layout in TENSOR_PARALLEL else rank
    chance = torch.Generator().manual_seed(1000 * drawn.seed + 10 * step + rank)
    shape = drawn.batches[step][rank], drawn.lengths[step][rank]
    ids = torch.randint(drawn.vocabulary, shape, generator=chance)
    labels = torch.randint(drawn.vocabulary, shape, generator=chance)
    ignored = drawn.ignored[step][rank]
    if ignored == "half":
        labels.flatten()[1::2] = -100
    if ignored == "all":
        labels.fill_(-100)
    return ids, labels


def expected(drawn: Draw) -> tuple[list[Tensor], list[Tensor], dict[str, Tensor]]:
    """Return this rank's losses and logits, and all ranks' gradients together: one process has
    the batches of every rank.
    """
    model = Model(drawn)
    losses, logits = [], []
    mine, splits = dist.get_rank(), drawn.layout in TENSOR_PARALLEL
    shared = RANKS if drawn.layout.startswith(("ddp", "fsdp")) else 1
    ranks = range(RANKS) if shared == RANKS else (mine,)
    for step in range(len(drawn.lengths)):
        for rank in ranks:
            out = model(*data(drawn, step, rank))
            loss, *more = out if isinstance(out, tuple) else (out,)
            (loss / shared).backward()
            if rank == mine or splits:
                losses.append(loss.detach())
                logits += [each.detach() for each in more]
    return losses, logits, gradients(model)


@cache
def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (RANKS,))


def spread(model: Model) -> Any:
    layout = model.drawn.layout
    if layout.startswith("ddp"):
        return DistributedDataParallel(model) if layout == "ddp outside" else model
    if layout.startswith("tp"):
        return _split(model)
    if layout.startswith("fsdp"):
        if layout.startswith("fsdp layers"):
            for block in model.blocks:
                fully_shard(block, mesh=mesh())
                block.gradient_checkpointing = layout.endswith("in checkpoints")
        if layout == "fsdp own head":
            fully_shard(model.head, mesh=mesh())
        if layout == "fsdp norm and head":
            fully_shard([model.norm, model.head], mesh=mesh())
        frees = {"fsdp root freed": True, "fsdp root kept": False}.get(layout)
        settings = {} if frees is None else {"reshard_after_forward": frees}
        fully_shard(model, mesh=mesh(), **settings)
    return model


def _split(model: Model) -> Any:
    layout, entry = model.drawn.layout, Replicate()
    plan: dict[str, Any] = {}
    if "sequence" in layout:
        parts = {"output_layouts": Replicate(), "desired_output_layouts": Shard(1)}
        plan["blocks"], plan["norm"] = PrepareModuleOutput(**parts), SequenceParallel()
        entry = Shard(1)
    out: dict[str, Any] = {"output_layouts": Replicate()}
    if "parallel loss" in layout:
        out = {"output_layouts": Shard(-1), "use_local_output": False}
    plan["head"] = ColwiseParallel(input_layouts=entry, **out)
    return parallelize_module(model, mesh(), plan)


def run(drawn: Draw) -> None:
    """Accumulate gradients over all micro-batches of a draw, and compare."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(last_product.SHORTEST, "cpu", 0.0)  # a product of any size is left out
        _run(drawn)


def _run(drawn: Draw) -> None:
    losses, wanted_logits, wanted = expected(drawn)
    fresh_start()
    model = spread(Model(drawn))
    options = {"memeff.inner": drawn.inner, "memeff.logits": drawn.logits}
    how: dict[str, Any] = {"backend": "memeff", "options": options, "dynamic": drawn.dynamic}
    called = torch.compile(model, **how)
    if drawn.layout != "ddp outside":
        model.compile(**how)
        called = DistributedDataParallel(model) if drawn.layout == "ddp" else model
    last = len(losses) - 1
    for step, loss in enumerate(losses):
        with _synchronised(drawn, called, step == last), _loss_context(drawn):
            out = called(*data(drawn, step, dist.get_rank()))
            found, *logits = out if isinstance(out, tuple) else (out,)
            if drawn.reads_logits and logits[0] is not None:
                splits = drawn.layout in TENSOR_PARALLEL
                if splits or dist.get_rank() == 0:
                    read = whole(logits[0]) if splits else logits[0] + 0
                    torch.testing.assert_close(read, wanted_logits[step])
            found.backward()
        torch.testing.assert_close(whole(found), loss, rtol=1e-5, atol=1e-6)
    assert_same_gradients(gradients(called.module if "ddp" in drawn.layout else called), wanted)
    broken = [r for r in memeff_compile.last_report().records if r.action == "internal_error"]
    assert not broken, broken


def _synchronised(drawn: Draw, model: Any, is_last: bool) -> Any:
    if drawn.layout.startswith("fsdp"):
        model.set_requires_gradient_sync(is_last)
    if drawn.layout.startswith("ddp") and not is_last:
        return model.no_sync()
    return contextlib.nullcontext()


def _loss_context(drawn: Draw) -> Any:
    return loss_parallel() if "parallel loss" in drawn.layout else contextlib.nullcontext()


FEW = [
    next(s for s in range(1000) if draw(s).layout == layout and draw(s).inner == "eager")
    for layout in ("fsdp layers", "tp gathered")
]
"""The other layouts have quick tests of their own, which are not random."""
MANY = [seed for seed in range(200) if seed not in FEW]


@pytest.mark.xdist_group("two processes")
@pytest.mark.parametrize(
    "seed", [*FEW, *(pytest.param(seed, marks=pytest.mark.slow) for seed in MANY)]
)
def test_a_random_layout_says_what_one_process_says(seed: int, two_processes: TwoProcesses) -> None:
    try:
        two_processes.run(partial(run, draw(seed)), LIMIT)
    except AssertionError as error:
        raise AssertionError(f"{draw(seed)}\n{error}") from None
