"""Compressed weights: bits, decoding, encoding, linears, resident memory, training, one token.

    python benchmarks/ops/coded_weights.py --part kernels
    python benchmarks/ops/coded_weights.py --part widths
    python benchmarks/ops/coded_weights.py --part memory
    python benchmarks/ops/coded_weights.py --part training
    python benchmarks/ops/coded_weights.py --part token

Weights are random: `trained`, with scales per row and column and heavier tails, as trained weights
have, and `normal`.

`kernels`: per codec and shape the bits per weight with everything counted, decoding in TB/s of bf16
written, encoding in ms of wall time with the read-back it needs, and a linear against the library's
on the dense weight. Calls sit in CUDA graphs over rotated copies, so that weights come from memory;
every result is compared first.

`widths`: linears of 1 to 64 tokens over ten widths, without loss and with 3, 1 and 0 mantissa bits;
`error` is against the decoded weight in fp64, `of_dense` the time relative to the dense weight.
One token also meets INT8 and NF4 in plain PyTorch, fused by Inductor, in four widths.

`memory`: a model of Llama-3-8B's shape; the bytes of its linears as dense weights and as codes.

`training`: that model, eager, checkpointed, with the loss of `memeff_compile.linear_cross_entropy`:
SGD after the backward, SGD in the backward on dense weights, and on compressed ones.

`token`: one token through that model with a static cache, dense, compressed and in those formats,
in CUDA graphs; `peak_gib` is of the weights, the cache and the rest of one step, of this model
alone. With `--compiled`, the backend compiles each model, equal layers once; with `--trace`, a row
has the time of each kernel of a step. "head too" also compresses the output projection.

`--size tiny` runs everything on the CPU in seconds.
"""

from __future__ import annotations

import argparse
import copy
import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import memeff_compile
from benchmarks import registry, rows, timing
from benchmarks.ops.plain_formats import FORMATS, PlainFormat
from benchmarks.turns import Turns
from memeff_compile.kernels.coded_weight import (
    CODECS,
    CodedWeight,
    Room,
    coded_weight_decode,
    coded_weight_linear,
    encode,
)
from memeff_compile.kernels.coded_weight.op import encode_soon

BATCHES = {"h200": [(1, 1024), (8, 1024)], "tiny": [(1, 8)]}
MODELS: dict[str, dict[str, Any]] = {
    "h200": {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "tiny": {
        "vocab_size": 64,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
    },
}
ROTATED_BYTES = 256 << 20
GIB = 2**30


def encode_into(parts: Sequence[Tensor], weight: Tensor, codec: str) -> bool:
    """Encode a weight into existing parts, wait for it, and say whether there was room."""
    outcome = encode_soon(parts, weight, codec)
    return outcome if isinstance(outcome, bool) else outcome.fits()


def timed(groups: dict[str, list[Callable[[], object]]], device: str) -> dict[str, Any]:
    """Time lists of calls, microseconds per call; graphs take turns."""
    runs = {name: timing.Repeated(calls, least=1) for name, calls in groups.items()}
    timers = {name: run.microseconds for name, run in runs.items()}
    found = timing.in_turns(timers, 25 if device == "cuda" else 2)
    return {name: rows.percentiles(each) for name, each in found.items()}


# --- kernels --------------------------------------------------------------------------------------


def kernels(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measure each codec on each shape."""
    device = options.device
    for shape in registry.WEIGHTS[options.size]:
        for kind in ("trained", "normal"):
            weight = registry.weight_of(kind, shape, device)
            for codec in CODECS:
                size = sum(part.nbytes for part in encode(weight, codec))
                bits = round(8 * size / weight.numel(), 4)
                yield {"what": "bits", "codec": codec, "data": kind, "shape": shape, "bits": bits}
        copies = max(2, ROTATED_BYTES // (2 * shape[0] * shape[1]))
        copies = copies if device == "cuda" else 1
        weights = [registry.weight_of("trained", shape, device) for _ in range(copies)]
        coded = {c: [CodedWeight(encode(w, c), c, shape) for w in weights] for c in CODECS}
        yield from _decoding(options, shape, weights, coded)
        yield from _encoding(options, shape, weights[0])
        yield from _linears(options, shape, weights, coded)
        del weights, coded


def _decoding(
    options: argparse.Namespace,
    shape: tuple[int, int],
    weights: list[Tensor],
    coded: dict[str, list[CodedWeight]],
) -> Iterator[dict[str, Any]]:
    groups = {
        codec: [
            lambda c=c: coded_weight_decode(c.parts, c.codec, list(c.shape)) for c in coded[codec]
        ]
        for codec in CODECS
    }
    for codec in CODECS:
        exact = all(
            torch.equal(c.decode().view(torch.int16), w.view(torch.int16))
            for c, w in zip(coded[codec], weights, strict=True)
        )
        if not exact:
            yield {"what": "decode", "codec": codec, "shape": shape, "failed": "not exact"}
            groups.pop(codec)
    for codec, found in timed(groups, options.device).items():
        rate = 2 * weights[0].numel() / found["median"] / 1e6
        row = {"what": "decode", "codec": codec, "shape": shape, "tb_per_s": round(rate, 3)}
        yield {**row, "us": found}


def _encoding(
    options: argparse.Namespace, shape: tuple[int, int], weight: Tensor
) -> Iterator[dict[str, Any]]:
    for codec in CODECS:
        parts = encode(weight, codec, Room(0.02, 1024))
        ways = {
            "first": lambda codec=codec: encode(weight, codec),
            "again": lambda codec=codec, parts=parts: encode_into(parts, weight, codec),
        }
        for way, call in ways.items():
            times = [timing.waited(call) for _ in range(10 if options.device == "cuda" else 2)]
            row = {"what": "encode", "codec": codec, "shape": shape, "way": way}
            yield {**row, "ms": rows.percentiles(times)}


def _linears(
    options: argparse.Namespace,
    shape: tuple[int, int],
    weights: list[Tensor],
    coded: dict[str, list[CodedWeight]],
) -> Iterator[dict[str, Any]]:
    for tokens in registry.WEIGHT_TOKENS[options.size]:
        x = torch.randn(tokens, shape[1], device=options.device).to(torch.bfloat16)
        groups: dict[str, list[Callable[[], object]]] = {
            "dense": [lambda w=w, x=x: F.linear(x, w) for w in weights]
        }
        for codec in CODECS:
            groups[codec] = [lambda c=c, x=x: coded_weight_linear(x, c) for c in coded[codec]]
        wide = x.double() @ weights[0].double().t()
        errors = {
            name: float((calls[0]().double() - wide).abs().max() / wide.abs().max())
            for name, calls in groups.items()
        }
        del wide
        for name, found in timed(groups, options.device).items():
            row = {"what": "linear", "codec": name, "shape": shape, "tokens": tokens}
            yield {**row, "us": found, "error": round(errors[name], 6)}


# --- widths ---------------------------------------------------------------------------------------


WIDTHS = {
    "h200": [
        *[(14336, 4096), (4096, 14336), (4096, 4096), (1024, 4096)],
        *[(8960, 1536), (6144, 2048), (12288, 4096), (18944, 3584), (4096, 12288), (28672, 8192)],
    ],
    "tiny": [(128, 256)],
}
PEERS = 4
"""Of the widths, the first ones: those of Llama-3-8B."""
LOSSY = tuple(f"win4:k{kept}:b512" for kept in (3, 1, 0))


def widths(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measure linears of a few tokens, without loss and with fewer mantissa bits."""
    named = [tuple(map(int, each.split("x"))) for each in options.shapes]
    for shape in named or WIDTHS[options.size]:
        weight = registry.weight_of("trained", shape, options.device)
        held: dict[str, list[Any]] = {"dense": _copies([weight], options)}
        bits = {"dense": 16.0}
        for codec in ("win4", *LOSSY):
            parts = encode(weight, codec)
            bits[codec] = round(8 * sum(part.nbytes for part in parts) / weight.numel(), 3)
            held[codec] = [CodedWeight(p, codec, shape) for p in _copies(parts, options)]
        held["dense"] = [each for (each,) in held["dense"]]
        for tokens in options.tokens:
            x = torch.randn(tokens, shape[1], device=options.device).to(torch.bfloat16)
            groups: dict[str, list[Callable[[], object]]] = {
                codec: [lambda w=w, x=x: F.linear(x, w) for w in several]
                for codec, several in held.items()
            }
            errors = {}
            has_peers = tokens == 1 and shape in WIDTHS[options.size][:PEERS]
            has_peers = has_peers and not options.no_peers
            for name in FORMATS if has_peers else ():
                peers = [PlainFormat(each, name) for (each,) in _copies([weight], options)]
                groups[name] = [lambda own=own, x=x: own(x) for own in peers]
                bits[name] = round(peers[0].bits, 3)
            for codec, (own, *_) in held.items():
                decoded = own if codec == "dense" else own.decode()
                exact = x.double() @ decoded.double().t()
                off = groups[codec][0]().double() - exact
                errors[codec] = round(float(off.abs().max() / exact.abs().max()), 6)
            times = timed(groups, options.device)
            usual = times["dense"]["median"]
            for codec, found in times.items():
                row = {"what": "width", "codec": codec, "shape": shape, "tokens": tokens}
                row |= {"bits": bits[codec], "us": found, "error": errors.get(codec)}
                yield {**row, "of_dense": round(found["median"] / usual, 3)}


def _copies(parts: Sequence[Tensor], options: argparse.Namespace) -> list[list[Tensor]]:
    """Return copies of the parts of a weight that do not fit into a cache together."""
    size = sum(part.nbytes for part in parts)
    count = max(2, ROTATED_BYTES // size) if options.device == "cuda" else 1
    return [[part.clone() for part in parts] for _ in range(count)]


# --- whole models ---------------------------------------------------------------------------------


def build(options: argparse.Namespace) -> nn.Module:
    """Return a model with trained-like linear weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = MODELS[options.size] | ({"num_hidden_layers": options.layers} if options.layers else {})
    config = LlamaConfig(**shape, max_position_embeddings=8192)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    skip = nn.init.normal_
    try:
        nn.init.normal_ = lambda tensor, *_, **__: tensor  # its random values are replaced
        with torch.device(options.device):
            model = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
        nn.init.normal_ = skip
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                kind = "normal" if "embed" in name or "lm_head" in name else "trained"
                scale = 1.0 if kind == "normal" else 0.4
                for piece in parameter.split(16384):
                    piece.copy_(
                        registry.weight_of(kind, tuple(piece.shape), options.device) * scale
                    )
    return model


def resident(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measure the bytes of the linears."""
    model = build(options)
    limit = 0 if options.size == "tiny" else 1 << 20
    for codec in CODECS:
        allocated = _allocated(options.device)
        report = memeff_compile.compress_(model, codec, min_size=limit, progress=False)
        largest = max(each.bytes_before for each in report.compressed)
        yield {
            "what": "resident",
            "codec": codec,
            "weights": len(report.compressed),
            "dense_gib": round(report.bytes_before / GIB, 3),
            "gib": round(report.bytes_after / GIB, 3),
            "with_scratch_gib": round((report.bytes_after + largest) / GIB, 3),
            "bits": round(report.bits, 4),
            "allocator_freed_gib": round((allocated - _allocated(options.device)) / GIB, 3),
        }
        memeff_compile.decompress_(model)


def _allocated(device: str) -> int:
    timing.synchronize()
    return torch.cuda.memory_allocated() if device == "cuda" else 0


def sgd(parameter: nn.Parameter) -> torch.optim.Optimizer:
    """Return the optimizer of one parameter."""
    return torch.optim.SGD([parameter], lr=1e-5)


def training(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measure steps: peak and time."""
    limit = 0 if options.size == "tiny" else 1 << 20
    model = build(options)
    model.model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()

    def step(ids: Tensor, optimizer: torch.optim.Optimizer) -> Tensor:
        hidden = model.model(input_ids=ids).last_hidden_state[:, :-1]
        loss = memeff_compile.linear_cross_entropy(hidden, model.lm_head.weight, ids[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    for way in ("sgd after the backward", "sgd in the backward", "win4", "tier"):
        if way in CODECS:
            memeff_compile.decompress_(model)
            memeff_compile.compress_(model, way, min_size=limit, progress=False)
        if way == "sgd after the backward":
            optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-5)
        else:
            optimizer = memeff_compile.optim_in_backward(model, sgd)
        for batch, length in BATCHES[options.size]:
            ids = torch.randint(0, model.config.vocab_size, (batch, length), device=options.device)
            step(ids, optimizer)
            timing.synchronize()
            if options.device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            losses: list[Tensor] = []

            def run(ids: Tensor = ids, by: Any = optimizer, losses: Any = losses) -> None:
                losses.append(step(ids, by))

            times = [1e-3 * timing.waited(run) for _ in range(8 if options.device == "cuda" else 1)]
            peak = torch.cuda.max_memory_allocated() if options.device == "cuda" else 0
            yield {
                "what": "training",
                "way": way,
                "batch": batch,
                "length": length,
                "peak_gib": round(peak / GIB, 3),
                "s_per_step": rows.percentiles(times, 4),
                "loss": round(float(losses[-1]), 4),
            }
        if hasattr(optimizer, "remove"):
            optimizer.remove()
        del run, optimizer
        gc.collect()


def token(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measure one token through the whole model."""
    from transformers import StaticCache

    limit = 0 if options.size == "tiny" else 1 << 20
    turns = Turns(options.turns)  # processes compile in parallel, the rest is done one at a time
    dense = build(options).eval()
    cuda = options.device == "cuda"
    ids = torch.randint(0, dense.config.vocab_size, (1, 1), device=options.device)
    place = torch.tensor([64], device=options.device)
    usual, exact = 0.0, torch.empty(0)
    with torch.no_grad():
        ways = options.way or WAYS
        for number, way in enumerate(ways, 1):
            model = dense if way == "dense" or number == len(ways) else copy.deepcopy(dense)
            codec, _, more = way.partition(", ")
            if way in FORMATS:
                _hold_as(model, way)
            elif way != "dense":
                skip = {"skip": ()} if more else {}
                memeff_compile.compress_(model, codec, min_size=limit, progress=False, **skip)
            cache = StaticCache(config=model.config, max_cache_len=512)

            run = model
            if options.compiled:
                torch._dynamo.reset()
                settings = {"memeff.regions": "on", "memeff.cuda_graphs": "off"}
                run = torch.compile(model, backend="memeff", options=settings)

            def step(model: Any = run, cache: Any = cache) -> Tensor:
                return model(
                    input_ids=ids,
                    past_key_values=cache,
                    cache_position=place,
                    position_ids=place[None],
                ).logits

            if options.compiled:
                turns.give()
            logits = step().clone()
            turns.take()
            exact = logits if way == "dense" or not exact.numel() else exact
            before = _allocated(options.device)
            if cuda:
                torch.cuda.reset_peak_memory_stats()
            step()
            peak = torch.cuda.max_memory_allocated() - before if cuda else 0
            held = [*model.parameters(), *model.buffers()]
            held += [part for layer in cache.layers for part in (layer.keys, layer.values)]
            size = round((peak + sum(map(_held_bytes, held))) / GIB, 3)
            off = float((logits.float() - exact.float()).abs().max())
            largest = round(float(exact.abs().max()), 5)
            (times,) = timed({way: [step]}, options.device).values()
            usual = times["median"] if way == "dense" else usual
            row = {"what": "token", "way": way, "graph": cuda, "us": times, "peak_gib": size}
            row |= {"compiled": True} if options.compiled else {}
            row |= {"layers": options.layers} if options.layers else {}
            row |= {"of_dense": round(times["median"] / usual, 3) if usual else None}
            yield {**row, "largest_difference": round(off, 5), "largest_logit": largest}
            if options.trace:
                kept = {key: row[key] for key in ("way", "layers", "compiled") if key in row}
                yield {"what": "step kernels", **kept, **_kernels_of(step)}
    turns.give()


def _kernels_of(step: Callable[[], object], runs: int = 4) -> dict[str, Any]:
    """Return the microseconds of the kernels of a step, and for each name its launches and time."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        for _ in range(runs):
            step()
        timing.synchronize()
    spent: dict[str, list[float]] = {}
    for event in found.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            its = spent.setdefault(event.name[:60], [0, 0.0])
            its[0] += 1 / runs
            its[1] += event.time_range.elapsed_us() / runs
    longest = sorted(spent.items(), key=lambda item: -item[1][1])[:LISTED]
    total = round(sum(time for _, time in spent.values()), 1)
    return {"us": total, "kernels": {k: [round(n, 2), round(t, 1)] for k, (n, t) in longest}}


LISTED = 16
"""Kernels of a trace that a row names."""
WAYS = ("dense", LOSSY[0], "win4", *FORMATS, *LOSSY[1:], "tier")
WITH_HEAD = tuple(f"{codec}, head too" for codec in LOSSY)
"""Of holding the model's weights; the first is the one that others are compared with."""


def _hold_as(model: nn.Module, name: str) -> None:
    """Replace the linears that `compress_` compresses by those of another format."""
    for path, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and path != "lm_head":
            owner, _, own = path.rpartition(".")
            setattr(model.get_submodule(owner), own, PlainFormat(module.weight, name))


def _held_bytes(tensor: Tensor) -> int:
    is_coded = isinstance(tensor, CodedWeight)
    return tensor.coded_bytes if is_coded else tensor.nbytes


PARTS = {
    "kernels": kernels,
    "widths": widths,
    "memory": resident,
    "training": training,
    "token": token,
}


def main() -> None:
    """Run the parts that were asked for and write their rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=PARTS, action="append")
    parser.add_argument("--size", choices=tuple(registry.WEIGHTS), default="h200")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 2, 8, 16, 64])
    parser.add_argument("--compiled", action="store_true", help="the model of `token`")
    parser.add_argument("--turns", type=Path, help="a file that processes of `token` share")
    parser.add_argument("--layers", type=int, help="of the model of `token`, if not all")
    parser.add_argument("--trace", action="store_true", help="kernels of the step of `token`")
    parser.add_argument("--shapes", nargs="+", default=[], help="of `widths`, such as 4096x14336")
    parser.add_argument("--no-peers", action="store_true", help="no INT8 and NF4 in `widths`")
    parser.add_argument("--way", choices=WAYS + WITH_HEAD, nargs="+", help="of `token`")
    parser.add_argument("--out", type=Path, default=Path("coded-weights.jsonl"))
    options = parser.parse_args()
    options.device = "cpu" if options.size == "tiny" else "cuda"
    for name in options.part or PARTS:
        torch.manual_seed(0)
        for row in PARTS[name](options):
            rows.write(options.out, {"part": name, **row})
        gc.collect()
        if options.device == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
