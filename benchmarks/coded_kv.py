"""Decoding with a KV cache of few bits: attention, appending, and the launch to choose from.

    python benchmarks/coded_kv.py --part attention
    python benchmarks/coded_kv.py --part append
    python benchmarks/coded_kv.py --part step
    python benchmarks/coded_kv.py --part longest
    python benchmarks/coded_kv.py --part sweep

`attention`: one query per sequence over a full cache, 32 query and 8 key-value heads of 128, bf16.
Ours reads codes of 8, 4, 3 and 2 bits and is compared with float64 attention over what the codes
say; PyTorch's cuDNN backend and memeff::kv_cache_attention read the same tokens in bf16. Calls sit
in CUDA graphs over rotated caches, so that codes come from memory; the graphs take turns.

`append`: one token per sequence, where no group of tokens is due and where one is.

`step`: one decoding step of a model of Llama-3-8B's shape with random weights, batch 16, the cache
filled with random tokens, under torch.compile(mode="reduce-overhead"): a StaticCache and a KVCache
of each of --bits. Cases that the seconds of --budget do not reach are left out and said to be.

`longest`: the longest cache of such a model at batch 16 for which 32 decoding steps run, for a
StaticCache and for a KVCache; lengths are tried from the formula's upwards and downwards in 5 %.

`sweep`: warps, stages and programs per multiprocessor, per shape; the fastest are printed. Nothing
is written. Variants are compiled in `--workers` processes first.

`--size tiny` runs everything on the CPU in seconds.
"""

from __future__ import annotations

import argparse
import itertools
import math
import multiprocessing
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

sys.path.insert(0, str(Path(__file__).resolve().parent))
import kv_decode
import rows

import memeff_compile
from memeff_compile.kernels.coded_kv_cache import (
    CODED,
    LENGTH,
    Layout,
    coded_kv_cache_append,
    coded_kv_cache_attention,
    coded_kv_cache_view,
    split_codes,
)
from memeff_compile.kernels.coded_kv_cache.shapes import Shapes, splits_for

CASES = {
    "h200": [
        (4, 16, 32768),
        (4, 16, 4096),
        (4, 64, 32768),
        (4, 1, 32768),
        (4, 1, 131072),
        (2, 16, 32768),
        (3, 16, 32768),
        (8, 16, 32768),
    ],
    "tiny": [(4, 2, 300), (3, 1, 300)],
}
SWEPT = [(4, 16, 32768), (4, 16, 4096), (4, 1, 32768), (4, 1, 131072), (2, 16, 32768)]
STEPS = {"h200": [(16, 32768)], "tiny": [(2, 300)]}
HEADS = {"h200": (32, 8, 128), "tiny": (4, 2, 16)}
ERROR_BUDGET = 1.5e-2
"""Largest difference from float64 over what the codes say, over the largest value."""


def layout_of(bits: int, options: argparse.Namespace) -> Layout:
    """Return what the caches are made of."""
    return Layout(options.heads[2], bits, options.scheme)


def fill(layout: Layout, batch: int, tokens: int, options: argparse.Namespace) -> list[Tensor]:
    """Return a full cache with random codes, and scales as keys and values have them."""
    pool: list[Tensor] = []
    device, dtype = options.device, getattr(torch, options.dtype)
    for name, shape in layout.shapes(batch, options.heads[1], tokens).items():
        kind = name.split("_")[-1]
        if kind == "codes":
            drawn = torch.randint(0, 256, shape, dtype=torch.uint8, device=device)
        elif kind == "scales":
            drawn = torch.rand(shape, device=device, dtype=dtype).mul_(0.2).add_(0.1)
            drawn *= 16.0 / 2**layout.bits
            if layout.scheme == "kivi":  # the zeros
                drawn[..., 1] *= -(2.0 ** (layout.bits - 1))
        elif kind in ("window", "kept"):
            drawn = torch.randn(shape, device=device, dtype=dtype)
        elif kind == "places":
            drawn = torch.arange(layout.kept, dtype=torch.int32, device=device)
            drawn = drawn.expand(shape).contiguous()
        else:
            drawn = torch.zeros(shape, dtype=torch.int64, device=device)
        pool.append(drawn)
    pool[-1][LENGTH] = tokens
    pool[-1][CODED] = layout.groups(tokens) * layout.group
    return pool


def codes_bytes(layout: Layout, batch: int, tokens: int, options: argparse.Namespace) -> int:
    """Return the bytes that attention has to read of such a cache."""
    itemsize = getattr(torch, options.dtype).itemsize
    shapes = layout.shapes(batch, options.heads[1], tokens)
    return sum(
        math.prod(shape) * (1 if name.endswith("codes") else itemsize)
        for name, shape in shapes.items()
        if name not in ("places", "counts")
    )


def attend(q: Tensor, pool: list[Tensor], bits: int, plan: Any = None) -> Tensor:
    """Attend with the op, or with a launch of one's own."""
    if plan is None:
        return coded_kv_cache_attention(q, *pool, None, None, bits, None, None)
    return split_codes.attend(q, pool, (None, None), None, q.shape[3] ** -0.5, bits, plan=plan)


def error(found: Tensor, q: Tensor, pool: list[Tensor], bits: int, tokens: int) -> float:
    """Return the largest difference from float64 of the first two sequences, over the largest."""
    some = [t if t.dim() == 1 else t[:2].contiguous() for t in pool]
    some = [t.float() if t.is_floating_point() else t for t in some]
    keys, values = coded_kv_cache_view(*some, None, None, bits, tokens)
    data = kv_decode.Data(q[:2], keys, values, tokens, q)
    return kv_decode.error(found[:2], data)


# --- attention ------------------------------------------------------------------------------------


def attention(options: argparse.Namespace) -> None:
    """Compare attention over codes with attention over bf16."""
    heads, _, depth = options.heads
    like: dict[str, Any] = {"dtype": getattr(torch, options.dtype), "device": options.device}
    for batch, tokens in dict.fromkeys((b, n) for _, b, n in options.cases):
        timed: dict[str, kv_decode.Repeated] = {}
        found: dict[str, dict[str, Any]] = {}
        q = torch.randn(batch, heads, 1, depth, **like)
        for bits in (b for b, *shape in options.cases if tuple(shape) == (batch, tokens)):
            layout = layout_of(bits, options)
            size = codes_bytes(layout, batch, tokens, options)
            count = max(1, min(16, math.ceil(kv_decode.ROTATED_BYTES / size)))
            pools = [fill(layout, batch, tokens, options) for _ in range(count)]
            row = {"method": f"memeff, {bits} bits", "bits": bits, "bytes": size}
            row["error"] = error(attend(q, pools[0], bits), q, pools[0], bits, tokens)
            found[f"memeff, {bits} bits"] = row
            if not row["error"] <= ERROR_BUDGET:
                row["failed"] = f"off by {row['error']:.1e}; {ERROR_BUDGET} is allowed"
                continue
            timed[row["method"]] = kv_decode.Repeated(
                [lambda p=pool, b=bits, q=q: attend(q, p, b) for pool in pools]
            )
        size = kv_decode.cache_bytes(batch, tokens, options)
        held = [
            kv_decode.draw(batch, tokens, tokens, options)
            for _ in range(kv_decode.copies_for(batch, tokens, options))
        ]
        for name, method in (
            ("sdpa cudnn, bf16", kv_decode.with_backend(SDPBackend.CUDNN_ATTENTION)),
            ("memeff, bf16", kv_decode.ours),
        ):
            row = {"method": name, "bits": 16, "bytes": size}
            found[name] = row
            try:
                timed[name] = kv_decode.Repeated([lambda d=d, a=method: a(d) for d in held])
            except (RuntimeError, torch.cuda.OutOfMemoryError) as failure:
                row["failed"] = f"{type(failure).__name__}: {str(failure)[:160]}"
        samples: dict[str, list[float]] = {name: [] for name in timed}
        for _ in range(options.repeats):
            for name, repeated in timed.items():
                samples[name].append(repeated.microseconds())
        for name, row in found.items():
            row |= {"batch": batch, "tokens": tokens, "scheme": options.scheme}
            if name in samples:
                row["us"] = rows.percentiles(samples[name])
                row["tb_per_s"] = round(row["bytes"] / row["us"]["median"] / 1e6, 3)
            row |= {"heads": options.heads, "dtype": options.dtype}
            rows.write(options.out, {"kind": "coded kv attention", **row})
        del timed, held, pools
        kv_decode.clean()


# --- append ---------------------------------------------------------------------------------------


def append(options: argparse.Namespace) -> None:
    """Time one token per sequence: no group due, and a group due."""
    _, kv_heads, depth = options.heads
    like: dict[str, Any] = {"dtype": getattr(torch, options.dtype), "device": options.device}
    for bits, batch, tokens in options.cases:
        layout = layout_of(bits, options)
        pools = [fill(layout, batch, tokens, options) for _ in range(4 if tokens < 65536 else 1)]
        k, v = (torch.randn(batch, kv_heads, 1, depth, **like) for _ in range(2))

        def one(pool: list[Tensor], length: int) -> Tensor:
            pool[-1][LENGTH].fill_(length)
            pool[-1][CODED].fill_(0)
            coded_kv_cache_append(*pool, k, v, bits, layout.recent, tokens)  # noqa: B023
            return k  # noqa: B023

        def nothing(pool: list[Tensor]) -> Tensor:
            pool[-1][LENGTH].fill_(1)
            pool[-1][CODED].fill_(0)
            return k  # noqa: B023

        timed = {
            "counts alone": kv_decode.Repeated([lambda p=p: nothing(p) for p in pools]),
            "idle": kv_decode.Repeated([lambda p=p: one(p, 5) for p in pools]),
            "due": kv_decode.Repeated([lambda p=p, n=layout.window - 1: one(p, n) for p in pools]),
        }
        samples: dict[str, list[float]] = {name: [] for name in timed}
        for _ in range(options.repeats):
            for name, repeated in timed.items():
                samples[name].append(repeated.microseconds())
        base = rows.percentiles(samples["counts alone"])["median"]
        for name in ("idle", "due"):
            found = rows.percentiles(samples[name])
            row = {"what": name, "bits": bits, "batch": batch, "tokens": tokens, "us": found}
            row["us_without_setting_counts"] = round(found["median"] - base, 3)
            rows.write(options.out, {"kind": "coded kv append", **row})
        del timed, pools
        kv_decode.clean()


# --- whole steps ----------------------------------------------------------------------------------


def build(options: argparse.Namespace) -> Any:
    """Return a causal language model with random weights, and heads as in `HEADS`."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    heads, _, depth = options.heads
    config = LlamaConfig(**{**kv_decode.MODELS[options.size], "hidden_size": heads * depth})
    with torch.device(options.device):
        return AutoModelForCausalLM.from_config(config, dtype=getattr(torch, options.dtype)).eval()


def filled_cache(
    model: Any, bits: int, batch: int, tokens: int, options: argparse.Namespace
) -> Any:
    """Return a cache with random contents and one place left: a StaticCache for 16 bits."""
    if bits == 16:
        from transformers import StaticCache

        cache: Any = StaticCache(config=model.config, max_cache_len=tokens)
        cache.early_initialization(
            batch, options.heads[1], options.heads[2], model.dtype, torch.device(options.device)
        )
        for layer in cache.layers:
            layer.keys.normal_()
            layer.values.normal_()
        kv_decode.set_filled(cache, tokens - 1)
        return cache
    cache = memeff_compile.KVCache(model.config, tokens, bits, scheme=options.scheme)
    _, kv_heads, depth = options.heads
    like = torch.empty(
        batch, kv_heads, 0, depth, dtype=model.dtype, device=torch.device(options.device)
    )
    for layer in cache.layers:
        layer.lazy_initialization(like, like)
        for name, tensor in layer.tensors():
            if name.endswith("codes"):
                tensor.random_(0, 256)
            elif name.endswith("scales"):
                tensor.uniform_(0.01, 0.02)
            else:
                tensor.normal_(0.0, 0.1)
        layer.is_empty = False
    set_filled(cache, tokens - 1)
    return cache


def set_filled(cache: Any, tokens: int) -> None:
    """Say that so many tokens are in the cache."""
    if not isinstance(cache, memeff_compile.KVCache):
        kv_decode.set_filled(cache, tokens)
        return
    for layer in cache.layers:
        layout = layer.layout
        due = max(0, tokens - layout.recent) // layout.group
        layer.counts[LENGTH] = tokens
        layer.counts[CODED] = due * layout.group


@torch.no_grad()
def step(options: argparse.Namespace) -> None:
    """Time whole decoding steps with each cache."""
    started = time.perf_counter()
    model = build(options)
    for batch, tokens in options.steps:
        for bits in options.bits:
            if time.perf_counter() - started > options.budget:
                print(f"left out, no time: {bits} bits, batch {batch}, {tokens} tokens")
                continue
            row = {"bits": bits, "batch": batch, "tokens": tokens, "scheme": options.scheme}
            row |= one_step(model, bits, batch, tokens, options)
            kv_decode.clean()
            rows.write(options.out, {"kind": "coded kv step", **row})


def one_step(
    model: Any, bits: int, batch: int, tokens: int, options: argparse.Namespace
) -> dict[str, Any]:
    """Compile and time the step; the cache is set back each time."""
    torch._dynamo.reset()
    memeff_compile.reset()
    compiled = torch.compile(model, backend="memeff", mode=options.mode)
    cache = filled_cache(model, bits, batch, tokens, options)
    token = torch.randint(0, model.config.vocab_size, (batch, 1), device=options.device)
    began = time.perf_counter()

    def run() -> None:
        set_filled(cache, tokens - 1)
        if options.device == "cuda":
            torch.compiler.cudagraph_mark_step_begin()
        compiled(input_ids=token, past_key_values=cache)

    for _ in range(4):
        run()
    first = time.perf_counter() - began
    samples = []
    for _ in range(options.repeats):
        set_filled(cache, tokens - 1)
        if options.device == "cuda":
            torch.cuda.synchronize()
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            marks[0].record()
            run()
            marks[1].record()
            marks[1].synchronize()
            samples.append(marks[0].elapsed_time(marks[1]))
        else:
            began = time.perf_counter()
            run()
            samples.append((time.perf_counter() - began) * 1e3)
    name = "rewrite_kv_update" if bits == 16 else "compress_kv_cache"
    found: dict[str, Any] = {
        "ms": rows.percentiles(samples),
        "rewritten": memeff_compile.last_report().rewrites(name),
        "seconds_to_first": round(first, 1),
        "mode": options.mode,
    }
    if bits != 16:
        found["cache_bytes"] = cache.nbytes
    if options.device == "cuda":
        found["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
        torch.cuda.reset_peak_memory_stats()
    return found


@torch.no_grad()
def longest(options: argparse.Namespace) -> None:
    """Find the longest cache for which 32 steps run."""
    started = time.perf_counter()
    model = build(options)
    config, (batch, _) = model.config, options.steps[0]
    heads, depth = options.heads[1:]
    for bits in options.bits:
        layout = layout_of(bits if bits != 16 else 4, options)
        free = torch.cuda.mem_get_info()[0] if options.device == "cuda" else 1 << 26
        each = 4 * heads * depth if bits == 16 else layout.block_bytes * 2 * heads // layout.group
        if bits != 16:
            shapes = layout.shapes(1, heads, 1 << 20)
            scales = sum(math.prod(shapes[f"{x}_scales"]) for x in "kv")
            each += 2 * scales // (1 << 20)
        tokens = int(free * 0.97 / (each * batch * config.num_hidden_layers)) // 256 * 256
        best = None
        for _ in range(6):
            if time.perf_counter() - started > options.budget:
                print("left out, no time: another length")
                break
            try:
                found = one_step(model, bits, batch, tokens, options)
                best = {"tokens": tokens, **found}
                kv_decode.clean()
                break
            except torch.cuda.OutOfMemoryError:
                kv_decode.clean()
                tokens = int(tokens * 0.95) // 256 * 256
        row = {
            "bits": bits,
            "batch": batch,
            "scheme": options.scheme,
            **(best or {"failed": "none"}),
        }
        rows.write(options.out, {"kind": "coded kv longest", **row})


# --- sweep ----------------------------------------------------------------------------------------

WARPS, STAGES, AT_ONCE, PROGRAMS = (2, 4), (2, 3, 4), (1, 2), (2, 3, 4, 5, 6, 8)


def variants(bits: int, batch: int, tokens: int, options: argparse.Namespace) -> list[Any]:
    """Return every launch worth a try, each number of programs once."""
    groups = layout_of(bits, options).groups(tokens)
    found = {}
    for warps, stages, at_once, programs in itertools.product(WARPS, STAGES, AT_ONCE, PROGRAMS):
        splits = splits_for(batch * options.heads[1], groups, 132 * programs)
        shapes = Shapes(warps, stages, at_once, programs)
        found[warps, stages, at_once, splits] = split_codes.Plan(shapes, splits)
    return list(found.values())


def compile_one(job: tuple[int, int, Any, argparse.Namespace]) -> str:
    """Compile one variant in a process of its own; small sizes with the same divisibility do."""
    bits, tokens, plan, options = job
    try:
        pool = fill(layout_of(bits, options), 1, tokens, options)
        q = torch.randn(
            1, options.heads[0], 1, options.heads[2], dtype=torch.bfloat16, device="cuda"
        )
        attend(q, pool, bits, plan)
        torch.cuda.synchronize()
    except Exception as failure:
        return f"{bits} bits {plan}: {str(failure)[:200]}"
    return ""


def sweep(options: argparse.Namespace) -> None:
    """Print the fastest launches of each shape."""
    started = time.perf_counter()
    jobs = {}
    for bits, batch, tokens in options.cases:
        for plan in variants(bits, batch, tokens, options):
            shape = (plan.shapes.warps, plan.shapes.stages, plan.shapes.at_once)
            kind = (bits, shape, tokens, plan.splits % 16 == 0, plan.splits == 1)
            jobs[kind] = (bits, tokens, plan, options)
    with multiprocessing.get_context("spawn").Pool(options.workers) as pool:
        for failure in pool.imap_unordered(compile_one, jobs.values()):
            if failure:
                print("failed:", failure, flush=True)
    print(f"{len(jobs)} compiled in {time.perf_counter() - started:.0f} s", flush=True)
    for bits, batch, tokens in options.cases:
        if time.perf_counter() - started > options.budget:
            print("left out, no time:", bits, batch, tokens)
            continue
        layout = layout_of(bits, options)
        size = codes_bytes(layout, batch, tokens, options)
        count = max(1, min(16, math.ceil(kv_decode.ROTATED_BYTES / size)))
        pools = [fill(layout, batch, tokens, options) for _ in range(count)]
        q = torch.randn(
            batch, options.heads[0], 1, options.heads[2], dtype=torch.bfloat16, device="cuda"
        )
        found = []
        for plan in variants(bits, batch, tokens, options):
            try:
                repeated = kv_decode.Repeated(
                    [lambda p=pool, x=plan, q=q, b=bits: attend(q, p, b, x) for pool in pools]
                )
                found.append((min(repeated.microseconds() for _ in range(3)), plan))
            except Exception as failure:
                print("failed:", bits, plan, str(failure)[:200], flush=True)
        found.sort(key=lambda pair: pair[0])
        floor = size / 4.43e6
        print(f"{bits} bits, batch {batch}, {tokens} tokens: floor {floor:.1f} us", flush=True)
        default = split_codes.plan_for(
            batch * options.heads[1], layout.groups(tokens), options.heads[2], bits, q.device
        )
        for us, plan in found[:6]:
            print(f"  {us:8.1f} us {plan}", flush=True)
        best = {}
        for us, plan in found:
            best.setdefault(
                (plan.shapes.warps, plan.shapes.stages, plan.shapes.at_once),
                (round(us, 1), plan.splits),
            )
        print("  best of warps, stages, groups at once:", best, flush=True)
        print("  default:", default, flush=True)
        del pools
        kv_decode.clean()


PARTS = {
    "attention": attention,
    "append": append,
    "step": step,
    "longest": longest,
    "sweep": sweep,
}


def main() -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=list(PARTS), default="attention")
    parser.add_argument("--size", choices=list(CASES), default="h200")
    parser.add_argument("--scheme", choices=["kivi", "per_head"], default="kivi")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--budget", type=float, default=60.0)
    parser.add_argument("--bits", type=int, nargs="+", default=[16, 4])
    parser.add_argument("--mode", default=None)
    parser.add_argument("--out", type=Path, default=Path("coded_kv.jsonl"))
    options = parser.parse_args()
    options.heads = HEADS[options.size]
    options.device = "cuda" if options.size == "h200" else "cpu"
    options.steps = STEPS[options.size]
    if options.mode is None and options.size == "h200":
        options.mode = "reduce-overhead"
    options.dtype = "bfloat16" if options.size == "h200" else "float32"
    options.cases = SWEPT if options.part == "sweep" else CASES[options.size]
    torch.manual_seed(0)
    PARTS[options.part](options)


if __name__ == "__main__":
    main()
