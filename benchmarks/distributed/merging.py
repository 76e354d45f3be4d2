"""The exchanges between ranks with parts of a head, alone: no product, no gradient.

    torchrun --nproc-per-node 2 benchmarks/distributed/merging.py
    torchrun --nproc-per-node 2 benchmarks/distributed/merging.py --device cpu --rows 64

In a step these gathers stand between products, and a profile of them includes a rank's waiting for
a slower one. Here ranks start together: a sample is merges in a row after one barrier, the GPUs
kept asleep until the host has launched them, divided by their number. A merge is all of a loss: the
number of rows, two numbers of each row, block by block, with the results computed from them, and
the total. Rank 0 writes the row.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks import RESULTS, rows, timing
from benchmarks.distributed import many_gpus
from memeff_compile import compat
from memeff_compile.kernels._head_loss.call import ScalarLoss
from memeff_compile.kernels._head_loss.ranks import Ranks, check_counts
from memeff_compile.kernels._head_loss.shapes import spans
from memeff_compile.kernels._head_loss.walks import Block
from memeff_compile.kernels.linear_cross_entropy import Shard, vocabulary_parallel
from memeff_compile.kernels.linear_cross_entropy.walk import ENGINES

REPEATS = 5
CLASSES = 128256
WIDTH = 64
"""Of the hidden states, which are not used in computation."""


def merge_of(count: int, device: str) -> tuple[Callable[[], Tensor], int]:
    """Return all that is said about a loss of so many rows, and in how many pieces."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    gather, wait = compat.gathering_ops()
    group = dist.group.WORLD.group_name

    def gathered(said: Tensor) -> Tensor:
        found: Tensor = wait(gather(said, ranks, group))
        return found

    shard = Shard(rank, ranks, CLASSES)
    hidden = torch.randn(count, WIDTH, device=device, dtype=torch.bfloat16)
    weight = torch.randn(shard.columns, WIDTH, device=device, dtype=torch.bfloat16)
    target = torch.randint(CLASSES, (count,), device=device)
    settings: Any = (None, 1.0, 0.0, 0, (True, True, False))
    loss = ScalarLoss(hidden, weight, None, target, None, None, *settings)
    here = vocabulary_parallel.loss_of_rank(loss, shard, gathered)
    assert here.ranks is not None
    parts = list(spans(0, count, here.ranks.height))
    meet = _by_kernels(here, here.ranks) if device == "cuda" else _by_torch(here.ranks, count)

    def merge() -> Tensor:
        counted = torch.full((1,), count, dtype=torch.int64, device=device)
        check_counts(gathered(counted), count)
        for first, stop in parts:
            meet(first, stop)
        return gathered(hidden.new_zeros(1, dtype=torch.float32))

    return merge, len(parts)


def _by_kernels(here: ScalarLoss, ranks: Ranks) -> Callable[[int, int], None]:
    """As the engine of bf16 on a GPU does it, once it has the logits of a piece."""
    walk = ENGINES["hopper"].module.total(here)
    return lambda first, stop: walk.meet(Block(0, first, stop), ranks)


def _by_torch(ranks: Ranks, count: int) -> Callable[[int, int], object]:
    lse, nll = torch.randn(2, count)
    return lambda first, stop: ranks.meet(
        lse[first:stop], nll[first:stop], ranks.owner[first:stop], ranks.height
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Time merges on all ranks of the group that torchrun starts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--samples", type=int, default=20)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--out", type=Path, default=RESULTS / "distributed.jsonl")
    given = parser.parse_args(arguments)
    with many_gpus.group(parser, given.device):
        merge, pieces = merge_of(given.rows, given.device)
        merge()

        def sample() -> float:
            dist.barrier()
            took = timing.milliseconds(merge, REPEATS, device=given.device, is_ahead=True)
            return many_gpus.slowest(took)

        sample()
        row = {"what": "merge", "gpus": dist.get_world_size(), "rows": given.rows}
        row |= {"pieces": pieces, "ms": rows.percentiles([sample() for _ in range(given.samples)])}
        if dist.get_rank() == 0:
            rows.write(given.out, row)


if __name__ == "__main__":
    main()
