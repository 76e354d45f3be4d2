"""Check every kernel of the coded weights on this GPU, then try their tiles; no rows are written.

    python benchmarks/ops/coded_weight_tiles.py

First each codec is held against the plain PyTorch path on hostile weights, then each candidate of
tile, warps and stages is timed in CUDA graphs over rotated copies: weights come from memory.
Candidates are compiled beforehand in several processes.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import registry
from benchmarks.ops.coded_weights import encode_into
from benchmarks.timing import Repeated, waited
from memeff_compile.kernels.coded_weight import codecs, reference, shapes
from memeff_compile.kernels.coded_weight.layout import CODECS, parse

ONE_TOKEN = [(28672, 4096), (6144, 4096), (4096, 14336), (4096, 4096), (1024, 4096)]
"""More shapes for one token: those of Llama-3-8B, also with equal inputs taken together."""
DEVICE = "cuda"


def bits(tensor: Tensor) -> Tensor:
    """Return the patterns of a bf16 tensor."""
    return tensor.contiguous().view(torch.int16)


def check() -> None:
    """Print the errors."""
    torch.manual_seed(0)
    for shape in ((1024, 4096), (70, 512), (3, 7), (1, 1), (515, 1111)):
        for codec in CODECS:
            form, weight = parse(codec), registry.hostile_weight(*shape, DEVICE)
            parts, plain = codecs.encode(weight, form), reference.encode(weight, form)
            same = [
                a.shape == b.shape and torch.equal(a, b) for a, b in zip(parts, plain, strict=True)
            ]
            exact = torch.equal(bits(codecs.decode(parts, form, shape)), bits(weight))
            roomy = codecs.encode(weight, form, codecs.Room(0.1, 64))
            other = registry.hostile_weight(*shape, DEVICE)
            fitted = encode_into(roomy, other, codec)
            again = torch.equal(bits(codecs.decode(roomy, form, shape)), bits(other))
            if not (all(same) and exact and fitted and again):
                print("WRONG", shape, codec, same, exact, fitted, again)
    for codec, kept, block in itertools.product(CODECS, (0, 1, 3), (32, 512)):
        form = parse(f"{codec}:k{kept}:b{block}")
        weight = registry.weight_of("trained", (70, 512), DEVICE)
        parts = reference.encode(weight, form)
        a, b = codecs.decode(parts, form, weight.shape), reference.decode(parts, form, weight.shape)
        if not torch.equal(bits(a), bits(b)):
            print("WRONG", form)
    for rows, columns, tokens in itertools.product(
        (33, 512, 4096), (256, 4096, 14336), (1, 2, 16, 17, 64, 200)
    ):
        weight = registry.weight_of("trained", (rows, columns), DEVICE)
        weight.view(-1)[:: rows * 7] = 300.0
        parts = codecs.encode(weight, parse("win4"))
        x = torch.randn(tokens, columns, device=DEVICE, dtype=torch.bfloat16)
        bias = torch.randn(rows, device=DEVICE, dtype=torch.bfloat16)
        exact = x.double() @ weight.double().t() + bias.double()
        found = codecs.product(x, parts, bias, weight.shape)
        dense = F.linear(x, weight, bias)
        off, usual = ((y.double() - exact).abs().max().item() for y in (found, dense))
        if not off <= 1.5 * usual + 1e-6:
            print("WRONG product", rows, columns, tokens, off, usual)
    print("checked", flush=True)


# --- candidates -----------------------------------------------------------------------------------

Setting = dict[str, Any]


@contextlib.contextmanager
def using(setting: Setting) -> Iterator[None]:
    """Put constants of `shapes` in place for a while."""
    before = {name: getattr(shapes, name) for name in setting}
    for name, value in setting.items():
        setattr(shapes, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(shapes, name, value)


def decode_settings(codec: str) -> list[Setting]:
    if codec == "win4":
        return [
            {"WIN4_DECODE_WORDS": words, "WIN4_DECODE_WARPS": warps}
            for words, warps in itertools.product((128, 256, 512, 1024), (1, 2, 4, 8))
            if 4 <= words // (32 * warps) <= 8
        ]
    name = {"tier": "TIER_DECODE_WARPS", "rans": "RANS_WARPS"}[codec]
    return [{name: warps} for warps in ((4, 8) if codec == "tier" else (1,))]


ENCODE_SETTINGS = {
    "win4": [{"WIN4_ENCODE_WARPS": warps} for warps in (4, 8)],
    "tier": [{"TIER_ENCODE_WARPS": warps} for warps in (8, 16)],
    "rans": [{"RANS_WARPS": 1}],
}

ROW_TILES = [
    *[
        shapes.RowTile(rows, words, warps, stages, packed)
        for rows, words, warps in ((4, 64, 1), (2, 128, 1), (8, 32, 1), (4, 128, 2), (8, 64, 2))
        for stages, packed in ((3, False), (2, True), (3, True), (4, True))
    ],
    *[
        shapes.RowTile(rows, words, warps, stages, True)
        for rows, words, warps in (
            (2, 64, 1),
            (1, 128, 1),
            (1, 256, 2),
            (2, 256, 2),
            (2, 256, 4),
            (4, 256, 4),
            (1, 512, 4),
            (2, 512, 4),
            (1, 256, 4),
        )
        for stages in (1, 3)
    ],
]
TILES: dict[int, list[shapes.MatrixTile | shapes.WideTile]] = {
    8: [
        shapes.MatrixTile(rows, 8, warps, is_ahead)
        for rows, warps, is_ahead in itertools.product((16, 32), (1, 2, 4, 8), (True, False))
    ],
    16: [
        shapes.MatrixTile(rows, 16, warps, is_ahead)
        for rows, warps, is_ahead in itertools.product((16, 32), (1, 2, 4, 8), (True, False))
    ],
    64: [shapes.WideTile(rows, 64, x, codes) for rows, x, codes in ((64, 4, 3), (128, 6, 3))],
    128: [shapes.WideTile(rows, 128, x, codes) for rows, x, codes in ((64, 4, 3), (128, 6, 3))],
    256: [
        shapes.WideTile(rows, 256, x, codes)
        for rows, x, codes in ((128, 4, 3), (128, 3, 3), (64, 4, 3))
    ],
}


def jobs() -> list[tuple[str, Any]]:
    """Return everything that has to be compiled."""
    found: list[tuple[str, Any]] = []
    for codec in CODECS:
        found += [(f"decode {codec}", setting) for setting in decode_settings(codec)]
        found += [(f"encode {codec}", setting) for setting in ENCODE_SETTINGS[codec]]
    found += [("1", tile) for tile in ROW_TILES]
    for tokens, tiles in TILES.items():
        found += [(str(tokens), tile) for tile in tiles]
    return found


def compile_one(job: tuple[str, Any]) -> str:
    """Run a candidate on a small weight, which leaves its kernel in the cache on disk."""
    kind, setting = job
    try:
        for columns in (4096, 8192, 14336) if kind == "1" else (4096,):
            weight = torch.randn(128, columns, device=DEVICE).to(torch.bfloat16)
            if kind.isdigit():
                parts = codecs.encode(weight, parse("win4"))
                x = torch.randn(int(kind), columns, device=DEVICE, dtype=torch.bfloat16)
                found = codecs.product(x, parts, None, weight.shape, setting=setting)
                exact = x.double() @ weight.double().t()
                off = float((found.double() - exact).abs().max() / exact.abs().max())
                if not off < 1e-2:
                    return f"WRONG {job}: {off}"
                continue
            codec = kind.split()[1]
            with using(setting):
                parts = codecs.encode(weight, parse(codec))
                if not torch.equal(codecs.decode(parts, parse(codec), weight.shape), weight):
                    return f"WRONG {job}"
        torch.cuda.synchronize()
    except Exception as error:
        return f"FAILED {job}: {type(error).__name__}: {str(error)[:100]}"
    return ""


# --- times ----------------------------------------------------------------------------------------


def microseconds(calls: list[Callable[[], object]], replays: int = 7) -> float:
    """Return the median time of one call, in a CUDA graph over all of them."""
    repeated = Repeated(calls, least=1)
    return statistics.median(repeated.microseconds() for _ in range(replays))


def decode_times(coded: list[list[Tensor]], codec: str, weight: Tensor) -> None:
    size = coded[0][-1].numel() * 4  # signs, four weights a word
    buffers = [torch.empty(size, dtype=torch.int16, device=DEVICE) for _ in coded]
    found = []
    for setting in decode_settings(codec):
        with using(setting):
            time_us = microseconds(
                [
                    lambda p=p, b=b: codecs.decode_flat(p, parse(codec), b)
                    for p, b in zip(coded, buffers, strict=True)
                ]
            )
        found.append((time_us, setting))
    found.sort(key=lambda pair: pair[0])
    for time_us, setting in found[:4]:
        rate = 2 * weight.numel() / time_us / 1e6
        print("decode", codec, tuple(weight.shape), f"{time_us:.1f} us {rate:.2f} TB/s", setting)


def encode_times(weight: Tensor, codec: str) -> None:
    form = parse(codec)
    parts = codecs.encode(weight, form, codecs.Room(0.1, 64))
    for setting in ENCODE_SETTINGS[codec]:
        with using(setting):
            for name, call in (
                ("encode", lambda: codecs.encode(weight, form)),
                ("again", lambda: encode_into(parts, weight, codec)),
            ):
                middle = statistics.median(waited(call) for _ in range(5))
                print(name, codec, f"{middle:.3f} ms", setting)


def product_times(coded: list[list[Tensor]], weights: list[Tensor], tokens: int) -> None:
    shape = weights[0].shape
    x = torch.randn(tokens, shape[1], device=DEVICE, dtype=torch.bfloat16)
    dense = microseconds([lambda w=w: F.linear(x, w) for w in weights], 15)
    found = []
    for tile in ROW_TILES if tokens == 1 else TILES[tokens]:
        try:
            time_us = microseconds(
                [lambda p=p, t=tile: codecs.product(x, p, None, shape, setting=t) for p in coded]
            )
        except Exception:
            continue
        found.append((time_us, tile))
    found.sort(key=lambda pair: pair[0])
    print("cublas", tokens, tuple(shape), f"{dense:.1f} us", flush=True)
    for time_us, tile in found[:5]:
        print("fused", tokens, tuple(shape), f"{time_us:.1f} us", tile)
    sys.stdout.flush()


def one_token_times() -> None:
    """Time the tiles of one token on more shapes, and how much one launch for several saves."""
    for shape in ONE_TOKEN:
        copies = max(2, (320 << 20) // (2 * shape[0] * shape[1]))
        weights = [registry.weight_of("trained", shape, DEVICE) for _ in range(copies)]
        coded = [codecs.encode(weight, parse("win4")) for weight in weights]
        product_times(coded, weights, 1)


def main() -> None:
    """Check, compile, time."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--only", choices=("compile", "time"), help="one half of the work")
    options = parser.parse_args()
    started = time.time()
    if options.only != "time":
        with multiprocessing.get_context("spawn").Pool(options.workers) as pool:
            said = pool.imap_unordered(compile_one, jobs())
            check()
            print("\n".join(filter(None, said))[:6000])
        print(f"compiled {len(jobs())} in {time.time() - started:.0f} s", flush=True)
    if options.only == "compile":
        return
    torch.manual_seed(0)
    for number, shape in enumerate(registry.WEIGHTS["h200"]):
        weights = [registry.weight_of("trained", shape, DEVICE) for _ in range(3 - number)]
        for codec in ("win4", "tier", "rans"):
            coded = [codecs.encode(weight, parse(codec)) for weight in weights]
            size = sum(part.nbytes for part in coded[0]) * 8 / weights[0].numel()
            print("bits", codec, shape, f"{size:.4f}")
            decode_times(coded, codec, weights[0])
            if not number:
                encode_times(weights[0], codec)
            if codec == "win4":
                for tokens in (1, *TILES):
                    product_times(coded, weights, tokens)
        print(f"{time.time() - started:.0f} s", flush=True)
    one_token_times()
    print(f"{time.time() - started:.0f} s")


if __name__ == "__main__":
    main()
