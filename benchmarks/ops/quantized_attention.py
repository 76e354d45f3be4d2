"""Attention in low bits: how far from exact, how fast with its codes made, and in a prefill.

    python benchmarks/ops/quantized_attention.py --part accuracy
    python benchmarks/ops/quantized_attention.py --part speed
    python benchmarks/ops/quantized_attention.py --part prefill --tokens 16384

`accuracy` compares levels with float64 on inputs that are plain noise (iid) and on such with means
in queries, keys and values (bias), 4096 tokens of two heads: cosine, relative L1, root mean square.

`speed` times one attention, bf16, from q, k and v to the output, codes included, as a CUDA graph
of as many calls as take milliseconds, over copies of the inputs that together exceed the L2 cache;
the methods take turns. `flash` and
`cudnn` are PyTorch's, `flex` is FlexAttention, compiled, `math` PyTorch's own, `exact`
memeff::attention, which serves masks that PyTorch's kernels do not know. TFLOP/s count 4 D
operations for each query and key that count.

`prefill` compiles a model of Llama-3-8B's shape (random weights, bf16) with the backend, once exact
and once with `memeff.attention=8b`, in one process, and times a forward over so many tokens.

`--size tiny` runs everything on the CPU in seconds.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import math
import statistics
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
from benchmarks import registry, rows, timing
from memeff_compile.kernels.attention import attention
from memeff_compile.kernels.quantized_attention import LEVELS, quantized_attention

CACHED_BYTES = 100 << 20
LEAST_WORK = 2.0e12
"""Operations in one graph: some 3 ms, of which the graph's own launch is no part to speak of."""
METHODS = (*LEVELS, "flash", "cudnn", "exact", "flex", "math")
SMOOTHED = "8b smooth qkv"  # queries without their means, too, as the paper has them
MOST_SCORES_OF_MATH = 1 << 31


@functools.cache
def environment() -> dict[str, Any]:
    """Return the fields that all rows of a run share: reading them takes longer than a
    measurement.
    """
    return rows.environment()


def write(path: Path, row: dict[str, Any]) -> None:
    """Append a row with its environment, and print it."""
    rows.append(path, {**row, **environment()})
    print(json.dumps(row), flush=True)


# --- inputs ---------------------------------------------------------------------------------------


def exact(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    """Return attention in float64, head by head."""
    found = []
    for head in range(q.shape[1]):
        row = slice(head, head + 1)
        mine, keys, values = (each[:, row].double() for each in (q, k, v))
        score = mine @ keys.transpose(2, 3) * q.shape[3] ** -0.5
        if is_causal:
            hidden = torch.ones(score.shape[2:], dtype=torch.bool, device=q.device).triu(1)
            score = score.masked_fill(hidden, -math.inf)
        found.append(score.softmax(-1) @ values)
    return torch.cat(found, 1)


def distance(found: Tensor, wanted: Tensor) -> dict[str, float]:
    """Return the paper's measures of a result."""
    found = found.double()
    return {
        "cosine": float(F.cosine_similarity(found.flatten(), wanted.flatten(), 0)),
        "relative_l1": float((found - wanted).abs().sum() / wanted.abs().sum()),
        "rmse": float((found - wanted).square().mean().sqrt()),
    }


# --- methods --------------------------------------------------------------------------------------


def method(name: str, is_causal: bool) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return a function of q, k and v."""
    ahead = 0 if is_causal else None
    level, _, smooth = name.partition(" smooth ")
    if level in LEVELS:
        return lambda q, k, v: quantized_attention(
            q, k, v, ahead=ahead, level=level, smooth=smooth or None, with_lse=False
        )[0]
    if name == "exact":
        return lambda q, k, v: attention(q, k, v, ahead=ahead)[0]
    if name == "flex":
        return flex(is_causal)
    backend = {
        "flash": SDPBackend.FLASH_ATTENTION,
        "cudnn": SDPBackend.CUDNN_ATTENTION,
        "math": SDPBackend.MATH,
    }[name]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)

    return attend


def flex(is_causal: bool) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return FlexAttention, compiled, its block mask made beforehand for each length."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.config.recompile_limit = 64  # each length and mask is compiled for itself
    compiled = torch.compile(flex_attention, dynamic=False)
    masks: dict[int, Any] = {}

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        length = q.shape[2]
        if is_causal and length not in masks:
            masks[length] = create_block_mask(
                lambda b, h, i, j: i >= j, None, None, length, length, device=q.device.type
            )
        return compiled(q, k, v, block_mask=masks.get(length), enable_gqa=True)  # type: ignore[no-any-return]

    return attend


# --- parts ----------------------------------------------------------------------------------------


def accuracy(settings: argparse.Namespace) -> None:
    """Write the distance of each level and of PyTorch's kernels from float64."""
    length = 256 if settings.size == "tiny" else 4096
    for kind in ("iid", "bias"):
        for depth in settings.depths:
            for is_causal in (False, True):
                q, k, v = registry.attention_rows(settings.device, 2, 2, length, depth, kind)
                wanted = exact(q, k, v, is_causal)
                for name in (*LEVELS, *([SMOOTHED] if settings.size != "tiny" else [])):
                    level, _, smooth = name.partition(" smooth ")
                    ahead = 0 if is_causal else None
                    found = quantized_attention(
                        q, k, v, ahead=ahead, level=level, smooth=smooth or None
                    )[0]
                    row = {"part": "accuracy", "method": name, "kind": kind, "D": depth}
                    row |= {"causal": is_causal, "N": length, **distance(found, wanted)}
                    write(settings.out, row)


def speed(settings: argparse.Namespace) -> None:
    """Write the time of each method."""
    for depth in settings.depths:
        for groups in settings.groups:
            for length in settings.lengths:
                for is_causal in (False, True):
                    _speed_of(settings, depth, groups, length, is_causal)
                    gc.collect()
                    torch.cuda.empty_cache()


def _speed_of(
    settings: argparse.Namespace, depth: int, groups: int, length: int, is_causal: bool
) -> None:
    heads = settings.heads
    count = max(1, CACHED_BYTES // (2 * (heads + 2 * groups) * length * depth))
    copies = [
        registry.attention_rows(settings.device, heads, groups, length, depth, seed=i)
        for i in range(count)
    ]
    work = 4 * depth * heads * length * length / (2 if is_causal else 1)
    copies *= max(1, math.ceil(LEAST_WORK / (work * count)))
    functions = {}
    for name in settings.methods:
        if name == "math" and heads * length * length > MOST_SCORES_OF_MATH:
            continue
        try:
            attend = method(name, is_causal)
            functions[name] = timing.Repeated(
                [functools.partial(attend, *each) for each in copies], least=1
            )
        except Exception as error:
            print(f"{name}, D {depth}, N {length}: {str(error)[:200]}", flush=True)
    timers = {name: each.microseconds for name, each in functions.items()}
    for name, found in timing.in_turns(timers, settings.repeats + 1).items():
        ordered = sorted(each / 1e3 for each in found[1:])
        median = statistics.median(ordered)
        row = {"part": "speed", "method": name, "H": heads, "G": groups, "N": length, "D": depth}
        row |= {
            "causal": is_causal,
            "ms": round(median, 5),
            "tflops": round(work / median / 1e9, 1),
        }
        row |= {"p20": ordered[len(ordered) // 5], "p80": ordered[-1 - len(ordered) // 5]}
        write(settings.out, {**row, "repeats": len(ordered)})


def prefill(settings: argparse.Namespace) -> None:
    """Write the time of a first forward, exact and in low bits, in turns."""
    import memeff_compile

    is_tiny = settings.size == "tiny"
    model, sizes = llama(settings)
    vocabulary = model.config.vocab_size
    ids = torch.randint(0, vocabulary, (1, settings.tokens), device=settings.device)
    functions, facts, wanted = {}, {}, None
    for name in ("exact", *settings.levels):
        options: dict[str, Any] = {"memeff.attention": name}
        if is_tiny:
            options |= {"memeff.inner": "aot_eager", "memeff.attention.length": 0}
        compiled = torch.compile(model.forward, backend="memeff", options=options, dynamic=False)
        started = time.perf_counter()
        functions[name] = _forward(compiled, ids)
        logits = functions[name]().float()
        wanted = logits if wanted is None else wanted
        facts[name] = {
            "first_call_s": round(time.perf_counter() - started, 1),
            "sites": sum(
                record.sites
                for record in memeff_compile.last_report().records
                if (record.pass_name, record.action) == ("quantize_attention", "rewrote")
            ),
            "logits_distance": float((logits - wanted).norm() / wanted.norm()),
        }
        print(name, facts[name], flush=True)
    if is_tiny or not settings.repeats:
        return
    timers = {
        name: functools.partial(timing.milliseconds, function)
        for name, function in functions.items()
    }
    for name, found in timing.in_turns(timers, settings.repeats + 1).items():
        ordered = sorted(found[1:])
        row = {"part": "prefill", "attention": name, "tokens": settings.tokens, **sizes}
        row |= {"ms": statistics.median(ordered), "least": ordered[0], "most": ordered[-1]}
        write(settings.out, {**row, **facts[name], "repeats": len(ordered)})
    if settings.profile:
        for name, function in functions.items():
            profile(name, function)


def llama(settings: argparse.Namespace) -> tuple[Any, dict[str, int]]:
    """Return a model of Llama-3-8B's shape with random weights, and its sizes."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    is_tiny = settings.size == "tiny"
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": settings.layers}
    if is_tiny:
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    config = LlamaConfig(
        vocab_size=512 if is_tiny else 128256,
        num_attention_heads=4 if is_tiny else 32,
        num_key_value_heads=2 if is_tiny else 8,
        max_position_embeddings=131072,
        rope_theta=500000.0,
        **sizes,
    )
    torch.manual_seed(0)
    with torch.device(settings.device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model.eval(), sizes


def _forward(compiled: Callable[..., Any], ids: Tensor) -> Callable[[], Tensor]:
    def run() -> Tensor:
        with torch.no_grad():
            logits: Tensor = compiled(input_ids=ids, use_cache=False, logits_to_keep=1).logits
        return logits

    return run


def profile(name: str, function: Callable[[], Any]) -> None:
    """Print the kernels that one call spends most time in."""
    from torch.profiler import ProfilerActivity

    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as found:
        function()
        torch.cuda.synchronize()
    kernels = sorted(found.key_averages(), key=lambda each: -each.self_device_time_total)
    print(f"{name}: {sum(each.self_device_time_total for each in kernels) / 1e3:.1f} ms of kernels")
    for each in kernels[:25]:
        print(f"  {each.self_device_time_total / 1e3:9.2f} ms {each.count:5d} x {each.key[:110]}")


# --- command line ---------------------------------------------------------------------------------


def parse() -> argparse.Namespace:
    """Return the settings of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--part", choices=("accuracy", "speed", "prefill"), default="accuracy")
    parser.add_argument("--size", choices=("full", "tiny"), default="full")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--groups", type=int, nargs="+", default=[32, 8])
    parser.add_argument("--depths", type=int, nargs="+", default=[64, 128])
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192, 16384, 32768]
    )
    parser.add_argument("--methods", nargs="+", choices=[*METHODS, SMOOTHED], default=METHODS)
    parser.add_argument("--levels", nargs="+", choices=LEVELS, default=["8b"])
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--profile", action="store_true", help="prefill: print what takes time")
    parser.add_argument("--out", type=Path, default=Path("quantized-attention.jsonl"))
    settings = parser.parse_args()
    settings.device = "cpu" if settings.size == "tiny" else "cuda"
    if settings.size == "tiny":
        settings.tokens = 64
    return settings


def main() -> None:
    """Run one part."""
    settings = parse()
    with torch.no_grad():
        {"accuracy": accuracy, "speed": speed, "prefill": prefill}[settings.part](settings)


if __name__ == "__main__":
    main()
