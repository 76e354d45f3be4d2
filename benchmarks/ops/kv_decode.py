"""Decoding with a static KV cache: attention alone, whole steps, and candidate tiles.

    python benchmarks/ops/kv_decode.py --part attention
    python benchmarks/ops/kv_decode.py --part step
    python benchmarks/ops/kv_decode.py --part sweep

`attention`: one query per sequence over the filled part of a cache, bf16, 32 query and 8 key-value
heads of 128. Ours reads a cache of that length, and one twice as long; PyTorch's backends get the
filled part itself, a mask over the cache, and transformers' arguments: copies per query head and a
mask. Every method's error against float64 comes first. Calls sit in CUDA graphs over rotated
caches, so that keys and values come from memory; the graphs take turns.

`step`: one decoding step of a model of Llama-3-8B's shape with random weights and a StaticCache
filled with random keys and values, under torch.compile(mode="reduce-overhead"). Logits are compared
with eager's first. Cases that the seconds of --budget do not reach are left out and listed.

`sweep`: every tile, number of warps and stages, and number of programs, per shape; the fastest are
printed. No rows are written.

`--size tiny` runs everything on the CPU in seconds; `--size cpu --part attention` is for a CPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import itertools
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import memeff_compile
from benchmarks import registry, rows, timing
from benchmarks.registry import CacheData
from memeff_compile.kernels.kv_cache import kv_cache_attention, split_keys

Call = Callable[[], Tensor]

STEPS: dict[
    str, list[tuple[int, int, int]]
] = {  # batch, cache length, filled; the same length and batch share compiled code
    "h200": [(16, 8192, 65), (16, 8192, 8000), (1, 4096, 65)],
    "tiny": [(2, 32, 5), (2, 32, 20)],
}
MODELS = {
    "h200": {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
    },
    "tiny": {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
}
ROTATED_BYTES = 256 << 20
ERROR_BUDGET = 1.5e-2
"""Largest difference from float64 over the largest value of bf16's attention."""


def ours(data: CacheData) -> Tensor:
    """Attend with the op of the package."""
    return kv_cache_attention(data.q, data.k, data.v, data.last)


def with_backend(backend: SDPBackend) -> Callable[[CacheData], Tensor]:
    """Return SDPA on the filled part, grouped by key-value head, with one backend."""

    def attend(data: CacheData) -> Tensor:
        k, v = (t[:, :, : data.filled] for t in (data.k, data.v))
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(data.q, k, v, enable_gqa=True)

    return attend


def masked(data: CacheData) -> Tensor:
    """Attend to the whole cache under a mask, grouped by key-value head."""
    mask = torch.arange(data.k.shape[2], device=data.q.device) <= data.last[:, None, :, None]
    return F.scaled_dot_product_attention(data.q, data.k, data.v, attn_mask=mask, enable_gqa=True)


def repeated_and_masked(data: CacheData) -> Tensor:
    """Attend as transformers does over a StaticCache: a copy per query head, a mask."""
    batch, kv_heads, length, depth = data.k.shape
    times = data.q.shape[1] // kv_heads
    wide = (batch, kv_heads, times, length, depth)
    k, v = (t[:, :, None].expand(wide).reshape(batch, -1, length, depth) for t in (data.k, data.v))
    mask = torch.arange(length, device=data.q.device) <= data.last[:, None, :, None]
    return F.scaled_dot_product_attention(data.q, k, v, attn_mask=mask)


def exact(data: CacheData) -> Tensor:
    """Attend in float64, one sequence at a time."""
    parts = []
    for q, k, v in zip(data.q, data.k, data.v, strict=True):
        k, v = (t[:, : data.filled].double() for t in (k, v))
        grouped = q.double().view(k.shape[0], -1, k.shape[2])
        weight = (grouped @ k.transpose(1, 2) * k.shape[2] ** -0.5).softmax(-1)
        parts.append((weight @ v).view(q.shape))
    return torch.stack(parts)


def error(found: Tensor, data: CacheData) -> float:
    """Return the largest difference from float64, over the largest value."""
    wanted = exact(data)
    return float((found.double() - wanted).abs().max() / wanted.abs().max())


# --- time -----------------------------------------------------------------------------------------


def clean() -> None:
    """Free the memory of the last case."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def copies_for(batch: int, length: int, options: argparse.Namespace) -> int:
    """Return how many caches to rotate, so that no cache is still in the L2 cache."""
    return max(1, min(16, math.ceil(ROTATED_BYTES / cache_bytes(batch, length, options))))


def cache_bytes(batch: int, length: int, options: argparse.Namespace) -> int:
    """Return the bytes of so many keys and values."""
    _, kv_heads, depth = options.heads
    itemsize: int = getattr(torch, options.dtype).itemsize
    return 2 * itemsize * batch * kv_heads * length * depth


# --- attention ------------------------------------------------------------------------------------


def attention(options: argparse.Namespace) -> None:
    """Compare the op with PyTorch's backends."""
    methods: dict[str, Callable[[CacheData], Tensor]] = {
        "memeff": ours,
        "memeff, cache twice as long": ours,
        "sdpa cudnn": with_backend(SDPBackend.CUDNN_ATTENTION),
        "sdpa flash": with_backend(SDPBackend.FLASH_ATTENTION),
        "sdpa, masked": masked,
        "sdpa, repeated and masked": repeated_and_masked,
    }
    for batch, filled in options.case or registry.CACHES[options.size]:
        timed: dict[str, timing.Repeated] = {}
        found: dict[str, dict[str, Any]] = {}
        count = copies_for(batch, filled, options)
        held = {1: [registry.cache_inputs(batch, filled, filled, options) for _ in range(count)]}
        held[2] = [
            registry.cache_inputs(batch, filled, 2 * filled, options)
            for _ in range(max(1, count // 2))
        ]
        for name, attend in methods.items():
            data = held[2 if "twice" in name else 1]
            row = {"method": name, "batch": batch, "filled": filled, "error": None, "us": None}
            found[name] = row
            try:
                row["length"] = data[0].k.shape[2]
                row["error"] = error(attend(data[0]), data[0])
                if not row["error"] <= ERROR_BUDGET:
                    row["failed"] = f"off by {row['error']:.1e}; {ERROR_BUDGET} is allowed"
                    continue
                timed[name] = timing.Repeated([lambda d=d, a=attend: a(d) for d in data])
            except (RuntimeError, torch.cuda.OutOfMemoryError) as failure:
                row["failed"] = f"{type(failure).__name__}: {str(failure)[:160]}"
        timers = {name: repeated.microseconds for name, repeated in timed.items()}
        samples = timing.in_turns(timers, options.repeats)
        for name, row in found.items():
            if name in samples:
                row["us"] = rows.percentiles(samples[name])
                read = cache_bytes(batch, filled, options)
                row["tb_per_s"] = round(read / row["us"]["median"] / 1e6, 3)
            row |= {"heads": options.heads, "dtype": options.dtype}
            rows.write(options.out, {"kind": "kv decode attention", **row})
        del timed, held
        clean()


# --- whole steps ----------------------------------------------------------------------------------


def build(size: str, device: str) -> Any:
    """Return a causal language model with random weights."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(**MODELS[size])
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def filled_cache(model: Any, batch: int, length: int, device: str) -> Any:
    """Return a StaticCache with random keys and values everywhere."""
    from transformers import StaticCache

    config = model.config
    cache = StaticCache(config=config, max_cache_len=length)
    depth = config.hidden_size // config.num_attention_heads
    cache.early_initialization(
        batch, config.num_key_value_heads, depth, torch.bfloat16, torch.device(device)
    )
    for layer in cache.layers:
        layer.keys.normal_()
        layer.values.normal_()
    return cache


def set_filled(cache: Any, filled: int) -> None:
    """Say that so many tokens are in the cache."""
    for layer in cache.layers:
        layer.cumulative_length.fill_(filled)


@torch.no_grad()
def step(options: argparse.Namespace) -> None:
    """Time whole decoding steps of each backend."""
    started = time.perf_counter()
    model = build(options.size, options.device) if options.size in STEPS else None
    cases = STEPS.get(options.size, [])
    for batch, length in dict.fromkeys((b, n) for b, n, _ in cases):
        cache = filled_cache(model, batch, length, options.device)
        token = torch.randint(0, model.config.vocab_size, (batch, 1), device=options.device)
        for backend in options.backend:
            mine = [filled for b, n, filled in cases if (b, n) == (batch, length)]
            late = time.perf_counter() - started > options.budget
            if late:
                print(f"left out, no time: {backend}, batch {batch}, length {length}")
                continue
            torch._dynamo.reset()
            memeff_compile.reset()
            compiled = torch.compile(model, backend=backend, mode=options.mode)
            for filled in mine:
                row = one_step(options, model, compiled, cache, token, filled - 1)
                fired = memeff_compile.last_report().rewrites("rewrite_kv_update")
                row |= {"backend": backend, "mode": options.mode, "rewritten": fired}
                row |= {"batch": batch, "length": length, "filled": filled}
                rows.write(options.out, {"kind": "kv decode step", **row})
            del compiled
            clean()
        del cache
        clean()


def one_step(
    options: argparse.Namespace, model: Any, compiled: Any, cache: Any, token: Tensor, before: int
) -> dict[str, Any]:
    """Compare one step's logits with eager's, then time the step; the cache is set back each time.

    Args:
        before: tokens in the cache before the step.
    """

    def run(which: Any) -> Tensor:
        set_filled(cache, before)
        logits: Tensor = which(input_ids=token, past_key_values=cache, use_cache=True).logits
        return logits.float()

    wanted = run(model)
    first = time.perf_counter()
    found = [run(compiled) for _ in range(4)][-1]
    seconds = time.perf_counter() - first
    difference = float((found - wanted).norm() / wanted.norm())
    samples = []
    step = functools.partial(compiled, input_ids=token, past_key_values=cache, use_cache=True)
    for _ in range(options.repeats):
        set_filled(cache, before)
        samples.append(timing.milliseconds(step, device=options.device))
    return {
        "model": "llama3-8b shape" if options.size == "h200" else "tiny",
        "difference_from_eager": difference,
        "first_calls_s": round(seconds, 1),
        "ms": rows.percentiles(samples),
    }


# --- tiles ----------------------------------------------------------------------------------------


def sweep(options: argparse.Namespace) -> None:
    """Print the fastest launches per shape."""
    if options.device != "cuda":
        print("the sweep launches kernels; it needs a CUDA device")
        return
    tiles = [
        split_keys.Shapes(keys, warps, stages)
        for keys, warps, stages in itertools.product((32, 64, 128), (4, 8), (2, 3, 4))
    ]
    for batch, filled in options.case or registry.CACHES[options.size]:
        count = copies_for(batch, filled, options)
        data = [registry.cache_inputs(batch, filled, filled, options) for _ in range(count)]
        heads, kv_heads, depth = options.heads
        sizes = (batch, heads, 1, filled, depth)
        chosen = split_keys.plan_for(sizes, kv_heads, 2, data[0].q.device)
        best = []
        for shapes in tiles:
            limit = -(-filled // shapes.keys)
            counts = {s for s in (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64) if s <= limit}
            for splits in sorted(counts):
                if not 128 <= splits * batch * kv_heads <= 3000:
                    continue
                plan = dataclasses.replace(chosen, shapes=shapes, splits=splits)
                microseconds = _try_plan(data, plan)
                if microseconds is not None:
                    best.append((microseconds, plan))
        own = _try_plan(data, chosen)
        spent = "does not run" if own is None else f"takes {own:.1f} us"
        print(f"\nbatch {batch}, {filled} filled; the plan of today {spent}: {chosen}")
        for microseconds, plan in sorted(best, key=lambda pair: pair[0])[: options.show]:
            each = plan.shapes
            print(
                f"  {microseconds:8.1f} us  keys {each.keys:3d} warps {each.warps} "
                f"stages {each.stages} splits {plan.splits:2d}"
            )
        del data
        clean()


def _try_plan(data: list[CacheData], plan: split_keys.Plan) -> float | None:
    """Return the median time of a launch; None where it does not fit or is wrong."""

    def attend(each: CacheData) -> Tensor:
        scale = each.q.shape[3] ** -0.5
        return split_keys.attend(each.q, each.k, each.v, each.last, None, scale, plan=plan)

    try:
        wanted = split_keys.attend(
            data[0].q, data[0].k, data[0].v, data[0].last, None, data[0].q.shape[3] ** -0.5
        )
        if not torch.allclose(attend(data[0]).float(), wanted.float(), rtol=2e-2, atol=2e-3):
            return None
        repeated = timing.Repeated([lambda d=d: attend(d) for d in data])
        return sorted(repeated.microseconds() for _ in range(7))[3]
    except Exception as failure:  # shared memory, registers
        if "out of resource" not in str(failure).lower():
            print(f"  {plan}: {type(failure).__name__}: {str(failure)[:100]}")
        return None


def _case(text: str) -> tuple[int, int]:
    """Read a batch and a number of filled keys from the command line."""
    batch, filled = text.split("x")
    return int(batch), int(filled)


def main() -> None:
    """Run the parts that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parts: dict[str, Callable[[argparse.Namespace], None]] = {
        "attention": attention,
        "step": step,
        "sweep": sweep,
    }
    parser.add_argument("--part", nargs="+", choices=parts, default=["attention", "step"])
    parser.add_argument("--size", choices=registry.CACHES, default="h200")
    parser.add_argument(
        "--case", type=_case, nargs="+", help="batch x filled of attention and sweep, as in 1x32768"
    )
    parser.add_argument("--heads", type=int, nargs=3, help="query heads, key-value heads, depth")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--backend", nargs="+", default=["memeff", "inductor"])
    parser.add_argument("--mode", default="reduce-overhead")
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--show", type=int, default=8, help="launches the sweep prints per shape")
    parser.add_argument("--budget", type=float, default=60, help="seconds to begin steps in")
    parser.add_argument("--out", type=Path, default=Path("kv-decode.jsonl"))
    options = parser.parse_args()
    options.heads = options.heads or registry.CACHE_HEADS[options.size]
    options.device = "cuda" if torch.cuda.is_available() else "cpu"
    for name in options.part:
        parts[name](options)


if __name__ == "__main__":
    main()
