"""Decoding with a low-bit KV cache: attention, appending, and candidate launches.

    python benchmarks/ops/coded_kv.py --part attention
    python benchmarks/ops/coded_kv.py --part append
    python benchmarks/ops/coded_kv.py --part step
    python benchmarks/ops/coded_kv.py --part longest
    python benchmarks/ops/coded_kv.py --part batch
    python benchmarks/ops/coded_kv.py --part prompt
    python benchmarks/ops/coded_kv.py --part fits
    python benchmarks/ops/coded_kv.py --part size
    python benchmarks/ops/coded_kv.py --part sweep

`attention`: one query per sequence over a full cache, 32 query and 8 key-value heads of 128, bf16.
Ours reads codes of 8, 4, 3 and 2 bits and is compared with float64 attention over the decoded
values; PyTorch's cuDNN backend and memeff::kv_cache_attention read the same tokens in bf16. Calls
sit in CUDA graphs over rotated caches, so that codes come from memory; the graphs take turns.

`append`: one token per sequence, where no group of tokens is due and where one is.

`step`: one decoding step of a model of Llama-3-8B's shape with random weights, batch 16, the cache
filled with random tokens, under torch.compile(mode="reduce-overhead"): a StaticCache and a KVCache
of each of --bits. The last 64 places are filled step by step, without waiting in between, which
codes one group; `ms` is the mean of these steps, `ms_waiting_for_each` that of the last one alone.
Cases that the seconds of --budget do not reach are left out and listed.

`longest`: the longest cache of such a model at batch 16 for which 32 decoding steps run, for a
StaticCache and for a KVCache. The formula gives the length for the device's free memory, less
--reserve GiB; where that does not fit, 2 % less are tried. Caches are filled with random keys and
values through the op's append.

`batch`: decoding steps of four layers, 8192 tokens, against the number of sequences: bf16 in a
StaticCache, codes of 2 bits in KIVI's groups, and in this package's; with 8 and with 32 key-value
heads, or with those of --shapes; 4 and 3 bits also with aligned layers merged, from half and from a
quarter on, with all rows kept that there is room for, and with values alone merged. One step is a
CUDA graph of PyTorch's kernels around attention. `ms` is the mean of the last 64 steps, of which
one codes or merges a group, and `ms_with_a_group` that step alone; --kernels adds the time of each
kernel in a step without one.

`prompt`: a prompt of --prompt-tokens through --layers layers of Llama-3-8B's widths, by its cache:
bf16, 4 bits, and 4 bits with half of the layers merged: as they are, aligned, values
alone. Caches take turns.

`fits`: the longest cache of each kind for which steps of such layers run in --gib GiB of memory,
weights included, at the last number of --batches.

`size`: bytes per token and layer that the allocator gives, and the formula's.

`sweep`: warps, stages and programs per multiprocessor, per shape; the fastest are printed. No rows
are written. Variants are compiled in `--workers` processes first.

`--size tiny` runs everything on the CPU in seconds.
"""

from __future__ import annotations

import argparse
import itertools
import math
import multiprocessing
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import memeff_compile
from benchmarks import registry, rows, timing
from benchmarks.ops import kv_decode
from memeff_compile.kernels.coded_kv_cache import (
    CODED,
    LENGTH,
    Layout,
    bytes_after,
    bytes_per_token,
    coded_kv_cache_append,
    coded_kv_cache_attention,
    coded_kv_cache_view,
    split_codes,
)
from memeff_compile.kernels.coded_kv_cache.shapes import Shapes, splits_for

SWEPT = [
    (2, 16, 32768),
    (4, 16, 32768),
    (3, 16, 32768),
    (4, 16, 4096),
    (4, 1, 32768),
    (4, 1, 131072),
    (8, 16, 32768),
]
STEPS = {"h200": [(16, 32768)], "tiny": [(2, 300)]}
ERROR_BUDGET = 1.5e-2
"""Largest difference from float64 over the decoded values, over the largest value."""


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
    """Attend with the op, or with a launch that you pass."""
    if plan is None:
        return coded_kv_cache_attention(q, *pool, None, None, bits, None, None)
    return split_codes.attend(q, pool, (None, None), None, q.shape[3] ** -0.5, bits, plan=plan)


def error(found: Tensor, q: Tensor, pool: list[Tensor], bits: int, tokens: int) -> float:
    """Return the largest difference from float64 of the first two sequences, over the largest."""
    some = [t if t.dim() == 1 else t[:2].contiguous() for t in pool]
    some = [t.float() if t.is_floating_point() else t for t in some]
    keys, values = coded_kv_cache_view(*some, None, None, bits, tokens)
    data = registry.CacheData(q[:2], keys, values, tokens, q)
    return kv_decode.error(found[:2], data)


# --- attention ------------------------------------------------------------------------------------


def attention(options: argparse.Namespace) -> None:
    """Compare attention over codes with attention over bf16."""
    heads, _, depth = options.heads
    like: dict[str, Any] = {"dtype": getattr(torch, options.dtype), "device": options.device}
    for batch, tokens in dict.fromkeys((b, n) for _, b, n in options.cases):
        timed: dict[str, timing.Repeated] = {}
        found: dict[str, dict[str, Any]] = {}
        q = torch.randn(batch, heads, 1, depth, **like)
        for bits in (b for b, *shape in options.cases if tuple(shape) == (batch, tokens)):
            layout = registry.layout_of(bits, options)
            size = codes_bytes(layout, batch, tokens, options)
            count = max(1, min(16, math.ceil(kv_decode.ROTATED_BYTES / size)))
            pools = [registry.coded_cache(layout, batch, tokens, options) for _ in range(count)]
            row = {"method": f"memeff, {bits} bits", "bits": bits, "bytes": size}
            row["error"] = error(attend(q, pools[0], bits), q, pools[0], bits, tokens)
            found[f"memeff, {bits} bits"] = row
            if not row["error"] <= ERROR_BUDGET:
                row["failed"] = f"off by {row['error']:.1e}; {ERROR_BUDGET} is allowed"
                continue
            timed[row["method"]] = timing.Repeated(
                [lambda p=pool, b=bits, q=q: attend(q, p, b) for pool in pools]
            )
        size = kv_decode.cache_bytes(batch, tokens, options)
        held = [
            registry.cache_inputs(batch, tokens, tokens, options)
            for _ in range(kv_decode.copies_for(batch, tokens, options))
        ]
        for name, method in (
            ("sdpa cudnn, bf16", kv_decode.with_backend(SDPBackend.CUDNN_ATTENTION)),
            ("memeff, bf16", kv_decode.ours),
        ):
            row = {"method": name, "bits": 16, "bytes": size}
            found[name] = row
            try:
                timed[name] = timing.Repeated([lambda d=d, a=method: a(d) for d in held])
            except (RuntimeError, torch.cuda.OutOfMemoryError) as failure:
                row["failed"] = f"{type(failure).__name__}: {str(failure)[:160]}"
        timers = {name: repeated.microseconds for name, repeated in timed.items()}
        samples = timing.in_turns(timers, options.repeats)
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
        layout = registry.layout_of(bits, options)
        pools = [
            registry.coded_cache(layout, batch, tokens, options)
            for _ in range(4 if tokens < 65536 else 1)
        ]
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
            "counts alone": timing.Repeated([lambda p=p: nothing(p) for p in pools]),
            "idle": timing.Repeated([lambda p=p: one(p, 5) for p in pools]),
            "due": timing.Repeated([lambda p=p, n=layout.window - 1: one(p, n) for p in pools]),
        }
        timers = {name: repeated.microseconds for name, repeated in timed.items()}
        samples = timing.in_turns(timers, options.repeats)
        base = rows.percentiles(samples["counts alone"])["median"]
        for name in ("idle", "due"):
            found = rows.percentiles(samples[name])
            row = {"what": name, "bits": bits, "batch": batch, "tokens": tokens, "us": found}
            row["us_without_setting_counts"] = round(found["median"] - base, 3)
            rows.write(options.out, {"kind": "coded kv append", **row})
        del timed, pools
        kv_decode.clean()


# --- whole steps ----------------------------------------------------------------------------------


_BUILT: dict[str, Any] = {}


def build(options: argparse.Namespace) -> Any:
    """Return a causal language model with random weights; one for all parts."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    if options.size in _BUILT:
        return _BUILT[options.size]

    heads, _, depth = options.heads
    config = LlamaConfig(**{**kv_decode.MODELS[options.size], "hidden_size": heads * depth})
    dtype = getattr(torch, options.dtype)
    with torch.device(options.device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    _BUILT[options.size] = model
    return model


def filled_cache(
    model: Any, bits: int, batch: int, tokens: int, options: argparse.Namespace
) -> Any:
    """Return a cache with random contents and one place left: a StaticCache for 16 bits."""
    cache = empty_cache(model, bits, batch, tokens, options)
    for layer in cache.layers:
        if bits == 16:
            layer.keys.normal_()
            layer.values.normal_()
            continue
        for (_, name), tensor in layer.tensors():
            if name.endswith("codes"):
                tensor.random_(0, 256)
            elif name.endswith("scales"):
                tensor.uniform_(0.01, 0.02)
            elif name == "norms":
                tensor.uniform_(0.5, 1.5)
            elif tensor.is_floating_point() and name not in ("bound", "turns"):
                tensor.normal_(0.0, 0.1)
        layer.is_empty = False
        if hasattr(layer, "pair") and not layer.pair.merge.values_only:
            keep_rows(layer)
    set_filled(cache, tokens - 1)
    return cache


def keep_rows(layer: Any) -> None:
    """Let a merged layer have as many kept rows as it has room for, after its first tokens."""
    shared, norms = layer.pair, layer.norms
    count, first = shared.places.shape[2], shared.keep_first
    each = torch.linspace(first, norms.shape[2] - 1, count, device=norms.device).to(torch.int32)
    each[:first] = torch.arange(first)
    shared.places.copy_(each)
    norms[:, :, each.long(), 0] = -1.0


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
            cache = filled_cache(model, bits, batch, tokens, options)
            row = {"bits": bits, "batch": batch, "tokens": tokens, "scheme": options.scheme}
            row |= one_step(model, cache, tokens, options)
            del cache
            forget(options)
            rows.write(options.out, {"kind": "coded kv step", **row})


def one_step(model: Any, cache: Any, tokens: int, options: argparse.Namespace) -> dict[str, Any]:
    """Compile and time the last 64 steps, of which one codes a group; then single ones."""
    bits = cache.bits if isinstance(cache, memeff_compile.KVCache) else 16
    compiled = compile_step(model, options)
    token = torch.randint(0, model.config.vocab_size, (cache_batch(cache), 1))
    token = token.to(options.device)

    def run() -> Tensor:
        if options.device == "cuda":
            torch.compiler.cudagraph_mark_step_begin()
        logits: Tensor = compiled(input_ids=token, past_key_values=cache).logits
        return logits

    began = time.perf_counter()
    for _ in range(4):
        set_filled(cache, tokens - 1)
        is_finite = bool(run().isfinite().all())
    first = time.perf_counter() - began
    samples: dict[int, list[float]] = {64: [], 1: []}
    for steps, times in samples.items():
        for _ in range(max(2, options.repeats // 4) if steps > 1 else options.repeats):
            set_filled(cache, tokens - steps)
            times.append(timing.waited(run, steps))
    name = "rewrite_kv_update" if bits == 16 else "compress_kv_cache"
    found: dict[str, Any] = {
        "ms": rows.percentiles(samples[64]),
        "ms_waiting_for_each": rows.percentiles(samples[1]),
        "finite": is_finite,
        "rewritten": memeff_compile.last_report().rewrites(name),
        "seconds_to_first": round(first, 1),
        "mode": options.mode,
        "cache_bytes": bytes_of(cache),
    }
    if options.device == "cuda":
        found["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    return found


def compile_step(model: Any, options: argparse.Namespace) -> Any:
    """Return the model compiled with the backend."""
    if options.device == "cuda":
        return torch.compile(model, backend="memeff", mode=options.mode)
    return torch.compile(model, backend="memeff", options={"memeff.inner": "aot_eager"})


def forget(options: argparse.Namespace) -> None:
    """Free the compiled code of the last step, CUDA graphs included."""
    torch._dynamo.reset()
    memeff_compile.reset()
    kv_decode.clean()
    if options.device == "cuda":
        torch.cuda.reset_peak_memory_stats()


def cache_batch(cache: Any) -> int:
    """Return the sequences of a cache that is filled."""
    layer = cache.layers[0]
    first: Tensor = layer.pool()[0] if hasattr(layer, "pool") else layer.keys
    return first.shape[0]


def bytes_of(cache: Any) -> int:
    """Return the bytes of keys and values."""
    if isinstance(cache, memeff_compile.KVCache):
        return cache.nbytes
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


# --- throughput and memory against batch ----------------------------------------------------------

SHAPES = {
    "gqa": {"num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256},
    "mha": {"num_key_value_heads": 32, "intermediate_size": 11008, "vocab_size": 32000},
}
"""Widths of Llama-3-8B, and of Llama-2-7B, which has a key-value head per query head."""

KINDS = {
    "bf16": (16, {}),
    "2 bits, KIVI's groups of 32": (2, {"group": 32}),
    "4 bits": (4, {}),
    "2 bits": (2, {}),
    "4 bits, aligned from half on": (4, {"merge": 0.5}),
    "3 bits, aligned from a quarter on": (3, {"merge": 0.25}),
    "4 bits, values merged from half on": (4, {"merge": 0.5, "values_only": True}),
    "3 bits, values of 2 bits": (3, {"value_bits": 2}),
    "3 bits, values of 2 bits, merged": (3, {"value_bits": 2, "merge": 0, "values_only": True}),
    "3 bits, values of 2 bits, groups of 128, merged from a quarter on": (
        3,
        {"value_bits": 2, "group": 128, "merge": 0.25, "values_only": True},
    ),
}
"""Bits and settings; `merge` is the share of layers that stay apart."""


def few_layers(options: argparse.Namespace, widths: dict[str, int]) -> dict[str, Any]:
    """Return the settings of a model of a few layers."""
    heads, _, depth = options.heads
    base = {**kv_decode.MODELS[options.size], "hidden_size": heads * depth}
    return {**base, **widths, "num_hidden_layers": options.layers}


def settings_of(given: dict[str, Any], layers: int) -> dict[str, Any]:
    """Return settings of `KVCache` for a model of so many layers."""
    if "merge" not in given:
        return given
    given = dict(given)
    start, values = int(given["merge"] * layers), given.pop("values_only", False)
    merge = memeff_compile.MiniCache(start_layer=start, values_only=values, force=True)
    return {**given, "merge": merge}


@torch.no_grad()
def batch(options: argparse.Namespace) -> None:
    """Time decoding steps of a few layers with each kind of cache, batch by batch."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    started = time.perf_counter()
    heads, _, depth = options.heads
    is_tiny = options.size == "tiny"
    sizes = [(1, 300), (2, 300)]
    if not is_tiny:
        sizes = list(zip(options.batches, itertools.cycle(options.tokens), strict=False))
    for name in options.shapes:
        widths = SHAPES[name]
        config = LlamaConfig(**few_layers(options, {} if is_tiny else widths))
        own = argparse.Namespace(**vars(options))
        own.heads = (heads, config.num_key_value_heads, depth)
        with torch.device(options.device):
            made = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, options.dtype))
        for count, tokens in sizes:
            for kind in options.kinds or KINDS:
                bits, settings = KINDS[kind]
                row = {"shape": name, "batch": count, "tokens": tokens, "cache": kind}
                if time.perf_counter() - started > options.budget:
                    print("left out, no time:", row)
                    continue
                own.settings = settings_of(settings, config.num_hidden_layers)
                begun = time.perf_counter()
                try:
                    row |= one_batch(made.eval(), bits, count, tokens, own)
                except torch.cuda.OutOfMemoryError:
                    row["failed"] = "out of memory"
                forget(options)
                row["layers"] = config.num_hidden_layers
                row["seconds"] = round(time.perf_counter() - begun, 1)
                rows.write(options.out, {"kind": "coded kv batch", **row})
        del made
        kv_decode.clean()


def one_batch(
    model: Any, bits: int, count: int, tokens: int, options: argparse.Namespace
) -> dict[str, Any]:
    """Capture a decoding step in a CUDA graph; time the last 64, and the one that codes a group."""
    compiled = torch.compile(model, backend="memeff", options={"memeff.inner": "eager"})
    cache = filled_cache(model, bits, count, tokens, options)
    held = bytes_of(cache)
    token = torch.zeros(count, 1, dtype=torch.int64, device=options.device)

    def run() -> Tensor:
        logits: Tensor = compiled(input_ids=token, past_key_values=cache).logits
        return logits

    for _ in range(2):
        set_filled(cache, tokens - 1)
        run()
    if options.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    set_filled(cache, tokens - 1)
    replay = timing.captured(run)
    found: dict[str, Any] = {"cache_bytes": held}
    for name, steps in (("ms", 64 if options.device == "cuda" else 4), ("ms_with_a_group", 1)):
        samples = []
        for _ in range(options.repeats):
            set_filled(cache, tokens - steps)
            samples.append(timing.waited(replay, steps))
        found[name] = rows.percentiles(samples)
    found["tokens_per_s"] = round(count / found["ms"]["median"] * 1e3)
    if options.kernels:
        set_filled(cache, tokens - 33)
        found["us_of_kernels"] = microseconds_of(replay)
    name = "rewrite_kv_update" if bits == 16 else "compress_kv_cache"
    found["rewritten"] = memeff_compile.last_report().rewrites(name)
    if options.device == "cuda":
        found["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 3)
    return found


def microseconds_of(replay: Callable[[], Any], steps: int = 8) -> dict[str, float]:
    """Return the microseconds that each of a cache's kernels takes in a step, and all others."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(steps):
            replay()
        torch.cuda.synchronize()
    took: dict[str, float] = {}
    for event in found.events() or ():
        name = event.name.strip("_") if "kv_cache" in event.name else "others"
        took[name] = took.get(name, 0.0) + event.device_time_total / steps
    return {name: round(each, 1) for name, each in took.items()}


@torch.no_grad()
def fits(options: argparse.Namespace) -> None:
    """Find the longest cache of each kind for which steps run in a part of the GPU's memory."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    started, is_tiny = time.perf_counter(), options.size == "tiny"
    config = LlamaConfig(**few_layers(options, {} if is_tiny else SHAPES["gqa"]))
    count, room = options.batches[-1], options.gib * 2**30
    with torch.device(options.device):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, options.dtype)).eval()
    if is_tiny:
        room, short = 2.0**24, (300, 556)
    else:
        short = (4096, 8192)
        whole = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(room / whole)
        room -= torch.cuda.memory_reserved() + 2**29
    for kind in options.kinds or KINDS:
        bits, settings = KINDS[kind]
        row = {"cache": kind, "batch": count, "layers": config.num_hidden_layers}
        row |= {} if is_tiny else {"gib": options.gib}
        if time.perf_counter() - started > options.budget:
            print("left out, no time:", row)
            continue
        options.settings = settings_of(settings, config.num_hidden_layers)
        small, large = (bytes_of(empty_cache(model, bits, count, n, options)) for n in short)
        each = (large - small) / (short[1] - short[0])
        tokens = int(short[0] + (room - small) / each) // 256 * 256
        compiled = torch.compile(model, backend="memeff", options={"memeff.inner": "eager"})
        token = torch.zeros(count, 1, dtype=torch.int64, device=options.device)
        cache = logits = None
        for _ in range(6):
            kv_decode.clean()
            try:
                cache = filled_cache(model, bits, count, tokens, options)
                set_filled(cache, tokens - 8)
                for _ in range(8):
                    logits = compiled(input_ids=token, past_key_values=cache).logits
                row |= {"tokens": tokens, "cache_bytes": bytes_of(cache), "steps": 8}
                row["finite"] = bool(logits.isfinite().all())
                break
            except torch.cuda.OutOfMemoryError:
                cache = logits = None
                tokens = int(tokens * 0.97) // 256 * 256
        del cache, logits
        forget(options)
        rows.write(options.out, {"kind": "coded kv fits", "bytes_per_token": round(each, 1), **row})


@torch.no_grad()
def prompt(options: argparse.Namespace) -> None:
    """Time a prompt with each kind of cache, in turns."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    is_tiny = options.size == "tiny"
    config = LlamaConfig(**few_layers(options, {} if is_tiny else SHAPES["gqa"]))
    tokens, layers = 300 if is_tiny else options.prompt_tokens, config.num_hidden_layers
    with torch.device(options.device):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, options.dtype)).eval()
    merge = {
        name: memeff_compile.MiniCache(start_layer=layers // 2, align=align, force=True)
        for name, align in (("as they are", "none"), ("aligned", "heads"))
    }
    merge["values alone"] = memeff_compile.MiniCache(
        start_layer=layers // 2, values_only=True, force=True
    )
    kinds: dict[str, dict[str, Any]] = {"bf16": {"bits": 16}, "4 bits": {"bits": 4}}
    kinds |= {
        f"4 bits, half merged, {name}": {"bits": 4, "merge": each} for name, each in merge.items()
    }
    ids = torch.randint(0, config.vocab_size, (1, tokens)).to(options.device)
    samples: dict[str, list[float]] = {name: [] for name in kinds}
    for turn in range(options.repeats + 1):
        for name, settings in kinds.items():
            cache = memeff_compile.KVCache(config, tokens + 64, **settings)
            took = timing.waited(
                lambda cache=cache: model(input_ids=ids, past_key_values=cache, logits_to_keep=1)
            )
            if turn:
                samples[name].append(took)
            del cache
    for name, took in samples.items():
        row = {"cache": name, "tokens": tokens, "layers": layers, "ms": rows.percentiles(took)}
        rows.write(options.out, {"kind": "coded kv prompt", **row})


# --- the longest cache ----------------------------------------------------------------------------


def empty_cache(model: Any, bits: int, batch: int, tokens: int, options: argparse.Namespace) -> Any:
    """Return an allocated cache: a StaticCache for 16 bits."""
    _, kv_heads, depth = options.heads
    device = torch.device(options.device)
    if bits == 16:
        from transformers import StaticCache

        cache: Any = StaticCache(config=model.config, max_cache_len=tokens)
        cache.early_initialization(batch, kv_heads, depth, model.dtype, device)
        return cache
    settings = {"scheme": options.scheme, **getattr(options, "settings", {})}
    cache = memeff_compile.KVCache(model.config, tokens, bits, **settings)
    like = torch.empty(batch, kv_heads, 0, depth, dtype=model.dtype, device=device)
    for layer in cache.layers:
        layer.lazy_initialization(like, like)
    return cache


def append_random(cache: Any, tokens: int, options: argparse.Namespace) -> None:
    """Fill a cache with random keys and values through its own append, a few thousand at once."""
    _, kv_heads, depth = options.heads
    at_once = min(tokens, 4096)
    like: dict[str, Any] = {"dtype": getattr(torch, options.dtype), "device": options.device}
    k, v = (torch.randn(cache_batch(cache), kv_heads, at_once, depth, **like) for _ in range(2))
    for layer in cache.layers:
        for start in range(0, tokens, at_once):
            new = [t[:, :, : min(at_once, tokens - start)] for t in (k, v)]
            if hasattr(layer, "pool"):
                layout = layer.layout
                coded_kv_cache_append(
                    *layer.pool(), *new, layout.bits, layout.recent, layer.max_cache_len
                )
            else:
                layer.update(*new)
        layer.is_empty = False


@torch.no_grad()
def longest(options: argparse.Namespace) -> None:
    """Find the longest cache for which 32 steps run, in CUDA graphs."""
    started = time.perf_counter()
    model = build(options)
    config, (batch, _) = model.config, options.steps[0]
    for bits in options.bits:
        if time.perf_counter() - started > options.budget:
            print(f"left out, no time: {bits} bits")
            continue
        free = 1 << 20
        if options.device == "cuda":
            free = torch.cuda.mem_get_info()[0] - int(options.reserve * 2**30)
        small, large = (
            cache_size(bits, batch, n, options) * config.num_hidden_layers for n in (1024, 2048)
        )
        each = (large - small) / 1024
        tokens = int(1024 + (free - small) / each) // 256 * 256
        row: dict[str, Any] = {"bits": bits, "batch": batch, "scheme": options.scheme}
        for _ in range(4):
            try:
                found = steps_of(model, bits, batch, tokens, options)
                row |= {"tokens": tokens, "bytes_per_token": round(each, 1), **found}
            except torch.cuda.OutOfMemoryError:
                tokens = int(tokens * 0.98) // 256 * 256
            forget(options)
            if "steps" in row:
                break
        rows.write(options.out, {"kind": "coded kv longest", **row})


def cache_size(bits: int, batch: int, tokens: int, options: argparse.Namespace) -> int:
    """Return the bytes of one layer's cache."""
    heads, depth = options.heads[1:]
    if bits == 16:
        return 4 * batch * heads * tokens * depth
    return bytes_after(registry.layout_of(bits, options), batch, heads, tokens, 2)


def steps_of(
    model: Any, bits: int, batch: int, tokens: int, options: argparse.Namespace
) -> dict[str, Any]:
    """Fill a cache up to its last 40 tokens, then decode 32."""
    compiled = compile_step(model, options)
    cache = empty_cache(model, bits, batch, tokens, options)
    began = time.perf_counter()
    append_random(cache, tokens - 40, options)
    if options.device == "cuda":
        torch.cuda.synchronize()
    filling = time.perf_counter() - began
    token = torch.randint(0, model.config.vocab_size, (batch, 1)).to(options.device)
    samples = []
    for _ in range(32):
        began = time.perf_counter()
        if options.device == "cuda":
            torch.compiler.cudagraph_mark_step_begin()
        logits = compiled(input_ids=token, past_key_values=cache).logits
        token = logits[:, -1:].argmax(-1).clone()
        is_finite = bool(logits.isfinite().all())
        samples.append((time.perf_counter() - began) * 1e3)
    name = "rewrite_kv_update" if bits == 16 else "compress_kv_cache"
    found: dict[str, Any] = {
        "steps": 32,
        "finite": is_finite,
        "ms": rows.percentiles(samples[8:]),
        "seconds_to_fill": round(filling, 1),
        "seconds_to_first": round(samples[0] / 1e3, 1),
        "rewritten": memeff_compile.last_report().rewrites(name),
        "mode": options.mode,
        "cache_bytes": bytes_of(cache),
    }
    if options.device == "cuda":
        found["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    return found


# --- bytes ----------------------------------------------------------------------------------------


def size(options: argparse.Namespace) -> None:
    """Compare the bytes that the allocator gives to caches with the formula, per token."""
    _, heads, depth = options.heads
    for bits in (16, 8, 4, 3, 2):
        held = []
        lengths = (4096, 36864) if options.size == "h200" else (300, 1580)
        for tokens in lengths:
            before = torch.cuda.memory_allocated() if options.device == "cuda" else 0
            cache = tuple(allocate(bits, 16, tokens, options))
            after = torch.cuda.memory_allocated() if options.device == "cuda" else 0
            held.append(after - before if options.device == "cuda" else sum(map(_bytes, cache)))
            del cache
        measured = (held[1] - held[0]) / (lengths[1] - lengths[0]) / 16
        if bits == 16:
            formula = float(4 * heads * depth)
        else:
            layout = registry.layout_of(bits, options)
            parts = depth // layout.channel_group
            group = layout.group if layout.scheme == "kivi" else 0
            formula = float(bytes_per_token(heads, depth, bits, group=group, shares=parts))
        row = {"bits": bits, "heads": options.heads, "bytes_per_token": round(measured, 2)}
        row |= {"formula": formula, "times_smaller": round(4 * heads * depth / measured, 3)}
        rows.write(options.out, {"kind": "coded kv bytes", **row})


def _bytes(tensor: Tensor) -> int:
    return tensor.nbytes


def allocate(bits: int, batch: int, tokens: int, options: argparse.Namespace) -> list[Tensor]:
    """Return the tensors of one layer's cache."""
    _, heads, depth = options.heads
    like: dict[str, Any] = {"dtype": torch.bfloat16, "device": options.device}
    if bits == 16:
        return [torch.empty(batch, heads, tokens, depth, **like) for _ in range(2)]
    shapes = registry.layout_of(bits, options).shapes(batch, heads, tokens)
    return [
        torch.empty(shape, **(like | ({"dtype": torch.uint8} if name.endswith("codes") else {})))
        for name, shape in shapes.items()
        if name not in ("places", "counts")
    ]


# --- sweep ----------------------------------------------------------------------------------------

WARPS, STAGES, AT_ONCE, PROGRAMS = (1, 2), (2, 3), (1, 2), (3, 4, 6, 8)


def variants(bits: int, batch: int, tokens: int, options: argparse.Namespace) -> list[Any]:
    """Return every launch worth a try, each number of programs once."""
    groups = registry.layout_of(bits, options).groups(tokens)
    found = {}
    for warps, stages, at_once, programs in itertools.product(WARPS, STAGES, AT_ONCE, PROGRAMS):
        splits = splits_for(batch * options.heads[1], groups, 132 * programs)
        shapes = Shapes(warps, stages, at_once, programs)
        found[warps, stages, at_once, splits] = split_codes.Plan(shapes, splits)
    return list(found.values())


def compile_one(job: tuple[int, int, Any, argparse.Namespace]) -> str:
    """Compile one variant in a separate process; small sizes with the same divisibility do."""
    bits, tokens, plan, options = job
    try:
        pool = registry.coded_cache(registry.layout_of(bits, options), 1, tokens, options)
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
        layout = registry.layout_of(bits, options)
        size = codes_bytes(layout, batch, tokens, options)
        count = max(1, min(16, math.ceil(kv_decode.ROTATED_BYTES / size)))
        pools = [registry.coded_cache(layout, batch, tokens, options) for _ in range(count)]
        q = torch.randn(
            batch, options.heads[0], 1, options.heads[2], dtype=torch.bfloat16, device="cuda"
        )
        found = []
        for plan in variants(bits, batch, tokens, options):
            try:
                repeated = timing.Repeated(
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
    "batch": batch,
    "prompt": prompt,
    "fits": fits,
    "size": size,
    "sweep": sweep,
}


def main() -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=list(PARTS), nargs="+", default=["attention"])
    parser.add_argument("--size", choices=list(registry.CODED_CACHES), default="h200")
    parser.add_argument("--scheme", choices=["kivi", "per_head"], default="kivi")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--budget", type=float, default=60.0)
    parser.add_argument("--bits", type=int, nargs="+", default=[16, 4])
    parser.add_argument("--layers", type=int, default=4, help="of `batch` and `prompt`")
    parser.add_argument("--batches", type=int, nargs="+", default=[64, 1, 16], help="of `batch`")
    parser.add_argument("--kinds", choices=list(KINDS), nargs="+", help="of `batch`; all of them")
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[8192], help="of --batches in turn"
    )
    parser.add_argument("--kernels", action="store_true", help="of `batch`: times of each")
    parser.add_argument("--gib", type=float, default=16.0, help="of memory, for `fits`")
    parser.add_argument("--prompt-tokens", type=int, default=12032, help="of `prompt`")
    parser.add_argument("--shapes", choices=list(SHAPES), nargs="+", default=list(SHAPES))
    parser.add_argument("--mode", default=None)
    parser.add_argument("--reserve", type=float, default=2.5)
    parser.add_argument("--out", type=Path, default=Path("coded_kv.jsonl"))
    options = parser.parse_args()
    options.heads = registry.CODED_HEADS[options.size]
    options.device = "cuda" if options.size == "h200" else "cpu"
    options.steps = STEPS[options.size]
    if options.mode is None and options.size == "h200":
        options.mode = "reduce-overhead"
    options.dtype = "bfloat16" if options.size == "h200" else "float32"
    for part in options.part:
        options.cases = SWEPT if part == "sweep" else registry.CODED_CACHES[options.size]
        torch.manual_seed(0)
        PARTS[part](options)


if __name__ == "__main__":
    main()
