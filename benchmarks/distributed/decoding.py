"""generate() of a model that is cut over GPUs: time to the first token, a step, peak memory.

    torchrun --nproc-per-node 4 benchmarks/distributed/decoding.py --size llama3-8b --layers 8
    torchrun --nproc-per-node 2 benchmarks/distributed/decoding.py --size tiny --device cpu

The paths are those of `benchmarks/models/serving.py` that a cut model has: `eager`, `verb-static`,
`verb-4`. Each rank has its heads and a cache of them. The first call compiles and is not timed. A
row says whether all ranks had the same tokens, and how many of the first path's. Rank 0 writes it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import memeff_compile
from benchmarks import RESULTS, rows
from benchmarks.distributed import many_gpus
from benchmarks.models import serving

PATHS = ("eager", "verb-static", "verb-4")


@torch.no_grad()
def measure(path: str, given: argparse.Namespace, exact: torch.Tensor | None) -> Any:
    """Return a path's row, and its tokens."""
    serving.clean()
    model = serving.build(given.size, given.layers, given.device)
    many_gpus.cut(model, many_gpus.line(given.device))
    ids = serving.prompt(model, given.batch, given.prompt)
    serving.prepare(path, model)
    serving.one_call(model, path, ids, given.new)
    if given.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        found = serving.one_call(model, path, ids, given.new)
    tokens = found.pop("tokens")
    ranks = [torch.empty_like(tokens) for _ in range(dist.get_world_size())]
    dist.all_gather(ranks, tokens.contiguous())
    row: dict[str, Any] = {"what": "TP decoding", "gpus": len(ranks), "path": path}
    row |= {name: getattr(given, name) for name in ("size", "layers", "batch", "prompt", "new")}
    row |= {"ranks_agree": all(torch.equal(tokens, each) for each in ranks), **found}
    exact = tokens if exact is None else exact
    row["same_as_first_path"] = round(float((tokens == exact).float().mean()), 4)
    if given.device == "cuda":
        row["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    if path != "eager":
        records = memeff_compile.last_report().records
        row["codes"] = sorted({(r.pass_name, r.code) for r in records})
    return row, exact


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the paths on all ranks of the group that torchrun starts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--paths", nargs="+", default=[*PATHS], choices=PATHS)
    parser.add_argument("--size", default="llama3-8b", choices=[*serving.WIDTHS])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=2048)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--out", type=Path, default=RESULTS / "distributed.jsonl")
    given = parser.parse_args(arguments)
    with many_gpus.group(parser, given.device):
        exact = None
        for path in given.paths:
            row, exact = measure(path, given, exact)
            if dist.get_rank() == 0:
                rows.write(given.out, row)


if __name__ == "__main__":
    main()
