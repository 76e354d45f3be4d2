"""What ranks that hold parts of a head tell each other, alone: no product, no gradient.

    torchrun --nproc-per-node 2 benchmarks/distributed/merging.py
    torchrun --nproc-per-node 2 benchmarks/distributed/merging.py --device cpu --rows 64

In a step these gathers stand between products, and a profile of them counts what a rank waits for
a slower one. Here ranks come together: a sample is merges in a row behind one barrier, the GPUs
kept asleep until the host has asked for them, divided by their number. A merge is all of a loss:
the number of rows, two numbers of each row, piece by piece, with what is made of them, and the
total. Rank 0 writes the row.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks import RESULTS, rows, timing
from benchmarks.distributed import many_gpus
from memeff_compile import compat
from memeff_compile.kernels.linear_cross_entropy import sharded, sharded_total
from memeff_compile.kernels.linear_cross_entropy.ranks import Ranks

REPEATS = 5
CLASSES = 128256


def merge_of(count: int, device: str) -> tuple[Callable[[], Tensor], int]:
    """Return all that is said about a loss of so many rows, and in how many pieces."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    gather, wait = compat.gathering_ops()
    group = dist.group.WORLD.group_name

    def gathered(said: Tensor) -> Tensor:
        found: Tensor = wait(gather(said, ranks, group))
        return found

    kind, shard = torch.device(device), sharded.Shard(rank, ranks, CLASSES)
    height = sharded_total.rows_of_a_piece(count, shard, dtype=torch.bfloat16, device=kind)
    lse, nll = torch.randn(2, count, device=device)
    owner = torch.randint(ranks, (count,), device=device, dtype=torch.int32)
    pieces = [
        [each[start : start + height] for each in (lse, nll, owner)]
        for start in range(0, count, height)
    ]
    here = Ranks(rank, ranks, height, owner, gathered)

    def merge() -> Tensor:
        counted = torch.full((1,), count, dtype=torch.int64, device=device)
        sharded.check_counts(gathered(counted), count)
        for piece in pieces:
            whole, _ = here.meet(*piece, height)
        return gathered(whole.sum().reshape(1))

    return merge, len(pieces)


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
