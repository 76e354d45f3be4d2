"""Products with win4 weights of eight widths and 2 to 256 tokens: dense, decoded first, ours.

    python benchmarks/ops/coded_weight_widths.py
    python benchmarks/ops/coded_weight_widths.py --sweep

Each way is one row: `dense` is the library on the dense weight, `first` decodes and calls it,
`win4` is the op, which chooses by `shapes`; on a GPU `--sweep` adds tiles that it chooses among.
Weights are random, with scales per row and column; calls sit in CUDA graphs over rotated copies, so
that weights come from memory. Every tile is first compared with fp64, twice: the bits have to be
the same. Kernels are compiled by several processes beforehand. `--size tiny` runs on the CPU.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks import registry, rows, timing
from memeff_compile.kernels.coded_weight import CodedWeight, codecs, coded_weight_linear, encode
from memeff_compile.kernels.coded_weight.layout import GROUP, parse
from memeff_compile.kernels.coded_weight.shapes import MatrixTile, WideTile
from memeff_compile.kernels.device import processors

FORM = parse("win4")
WIDTHS: dict[str, list[tuple[int, int]]] = {
    "h200": [
        (4096, 4096),
        (1024, 4096),
        (8960, 1536),
        (6144, 2048),
        (4096, 12288),
        (12288, 4096),
        (18944, 3584),
        (28672, 8192),
    ],
    "tiny": [(64, 256), (40, 512)],
}
TOKENS = {"h200": (2, 4, 8, 16, 32, 64, 128, 256), "tiny": (2, 17)}
ROTATED_BYTES = 140 << 20
SMALL = 304
"""Rows of the weights that tiles are compared on."""
WIDE = {
    64: [WideTile(64, 64), WideTile(64, 64, 3, 2)],
    128: [WideTile(64, 128)],
    256: [WideTile(128, 256), WideTile(64, 128, 3, 2), WideTile(64, 256, 3, 3)],
}


def tiles(tokens: int, shape: tuple[int, int], count: int) -> list[MatrixTile | WideTile]:
    """Return the tiles of a sweep."""
    groups = shape[1] // GROUP
    if tokens in (8, 16):
        return [
            MatrixTile(height, tokens, warps, is_ahead)
            for height in (16, 32)[: tokens // 8]
            for warps in (2, 4, 8)
            for is_ahead in (True, False)
            if warps <= groups and (warps > 2 or groups % 4) and (warps < 8 or shape[0] <= 4096)
        ]
    found: list[MatrixTile | WideTile] = []
    for plain in WIDE.get(tokens, ()):
        of_rows, of_tokens = -(-shape[0] // plain.rows), -(-tokens // plain.tokens)
        full = of_rows // count * count
        for splits in (1, 2, 3, 4, 8):
            programs = of_rows * of_tokens * splits
            if splits <= groups and (splits == 1 or programs <= 3 * count):
                found.append(replace(plain, splits=splits))
        if 0 < full < of_rows:
            parts = [each for each in (2, 6) if each <= groups]
            found += [replace(plain, splits=each, whole=full) for each in parts]
    if tokens <= 64 and shape[0] <= 4096:
        found += [MatrixTile(16, 16, warps, True) for warps in (4, 8)]
    return found


def compared(job: tuple[int, int, MatrixTile | WideTile, bool]) -> str:
    """Compare a tile with fp64 and with itself, which leaves its kernel in the cache on disk."""
    tokens, columns, tile, has_bias = job
    torch.manual_seed(1)
    weight = registry.weight_of("trained", (SMALL + 17 * has_bias, columns), "cuda")
    weight.view(-1)[::997] = 300.0
    parts = codecs.encode(weight, FORM)
    x = torch.randn(tokens, columns, device="cuda").to(torch.bfloat16)
    bias = torch.randn(weight.shape[0], device="cuda").to(torch.bfloat16) if has_bias else None
    try:
        found, again = (codecs.product(x, parts, bias, weight.shape, setting=tile) for _ in "ab")
    except Exception as error:
        return f"FAILED {job}: {type(error).__name__} {str(error)[:160]}"
    exact = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    off = float((found.double() - exact).abs().max())
    usual = float((F.linear(x, weight, bias).double() - exact).abs().max())
    is_same = torch.equal(found.view(torch.int16), again.view(torch.int16))
    return "" if off <= 1.5 * usual + 1e-6 and is_same else f"WRONG {job}: {off} {usual} {is_same}"


def measure(options: argparse.Namespace, shape: tuple[int, int], tokens: int, data: Any) -> None:
    """Write the rows of one width and number of tokens."""
    weights, coded = data
    x = torch.randn(tokens, shape[1], device=options.device).to(torch.bfloat16)
    chosen = codecs.setting_of(tokens, shape, x.device)
    groups: dict[str, list[Callable[[], object]]] = {
        "dense": [lambda w=w: F.linear(x, w) for w in weights],
        "win4": [lambda c=c: coded_weight_linear(x, c) for c in coded],
    }
    if tokens in (2, 64, 256):
        groups["first"] = [lambda c=c: F.linear(x, c.decode()) for c in coded]
    if options.sweep and options.device == "cuda":
        for tile in tiles(tokens, shape, processors(x.device)):
            groups[repr(tile)] = [
                lambda c=c, t=tile: codecs.product(x, c.parts, None, shape, setting=t)
                for c in coded
            ]
    timers = {way: timing.Repeated(calls, least=2).microseconds for way, calls in groups.items()}
    usual = 0.0
    for way, found in timing.in_turns(timers, options.rounds).items():
        us = rows.percentiles(found, 2)
        usual = usual or us["median"]
        row = {"what": "width", "shape": shape, "tokens": tokens, "way": way, "us": us}
        more = {"chosen": repr(chosen)} if way == "win4" else {}
        rows.append(options.out, {**row, **more, **options.environment})
        if way in ("dense", "first", "win4"):
            print(shape, tokens, way, us["median"], f"{us['median'] / usual:.2f}", more, flush=True)


def main() -> None:
    """Compare, then time."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=tuple(WIDTHS), default="h200")
    parser.add_argument("--sweep", action="store_true", help="time every tile")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no width after so many")
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--out", type=Path, default=Path("coded-weight-widths.jsonl"))
    options = parser.parse_args()
    started = time.time()
    options.device = "cpu" if options.size == "tiny" else "cuda"
    options.environment = rows.environment()
    if options.device == "cuda":
        jobs = set()
        for shape in WIDTHS[options.size]:
            for tokens in TOKENS[options.size]:
                own = codecs.setting_of(tokens, shape, torch.device("cuda"))
                for tile in {own, *(tiles(tokens, shape, 132) if options.sweep else [])} - {None}:
                    if isinstance(tile, WideTile):
                        columns = shape[1] if tile.splits < 3 else 2048
                        few = replace(tile, whole=min(tile.whole, 2), splits=min(tile.splits, 3))
                        jobs.add((tokens, columns, few, tile.splits == 2))
                    else:
                        jobs.add((tokens, shape[1], tile, False))
        with multiprocessing.get_context("spawn").Pool(options.workers) as pool:
            said = [each for each in pool.imap_unordered(compared, jobs, chunksize=4) if each]
        print(
            "\n".join(said), f"\ncompared {len(jobs)} in {time.time() - started:.0f} s", flush=True
        )
    for shape in WIDTHS[options.size]:
        if time.time() - started > options.seconds:
            print("no time for", shape)
            break
        torch.manual_seed(0)
        copies = max(2, ROTATED_BYTES * 2 // (3 * shape[0] * shape[1]))
        copies = min(copies, 24) if options.device == "cuda" else 1
        weights = [registry.weight_of("trained", shape, options.device) for _ in range(copies)]
        coded = [CodedWeight(encode(weight, "win4"), "win4", shape) for weight in weights]
        for weight, each in zip(weights, coded, strict=True):
            assert torch.equal(each.decode().view(torch.int16), weight.view(torch.int16))
        for tokens in TOKENS[options.size]:
            measure(options, shape, tokens, (weights, coded))
        print(f"{time.time() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
