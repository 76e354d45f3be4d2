"""Attention with masks given as conditions: memeff's, PyTorch's, FlexAttention's; candidate tiles.

    python benchmarks/ops/attention_kernels.py
    python benchmarks/ops/attention_kernels.py --quick
    python benchmarks/ops/attention_kernels.py --quick --tensors
    python benchmarks/ops/attention_kernels.py --sweep --shape causal-d128-4k

Each case is one attention, bf16, with its mask as models have it. `sdpa` is PyTorch's
scaled_dot_product_attention: is_causal if the mask is only causal, a dense bool mask elsewhere
(built beforehand, its making is not timed). `flex` is FlexAttention, compiled, with a block mask
built beforehand. `chain` is eager models' code for a softcap: matmul, softcap, mask, softmax,
matmul. memeff's op gets the mask's conditions, and the time includes finding the tiles.

Where the mask is a tensor (`tensor-...`, `--tensors` for these alone) memeff's op gets only that
tensor, and the time includes looking at it, once for forward and backward; `said` is the same op
told that the mask is causal. With `--ahead` the host gets ahead of the GPU first.

Errors against float64, of the output and of the gradients, come first, on the first and last 256
queries of one head; a method beyond the budget is not timed. Then the methods take turns: the
forward under no_grad, and forward with backward. TFLOP/s count 4 D (forward) and 10 D (backward)
operations for each query and key that count.

`--sweep` times tiles, warps and stages of one kernel at a time and prints the five fastest of each;
no rows are written. `--size tiny` runs everything on the CPU in seconds.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import itertools
import math
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks import registry, rows, timing
from benchmarks.registry import AttentionData, Case
from memeff_compile.kernels._triton.conditions import Conditions
from memeff_compile.kernels.attention import attention, attention_mask_tiles, shapes, tiles

ERROR_BUDGET = 3e-2
"""Largest difference from float64 over the largest value of bf16's attention and gradients."""

LOOKED_AT = 256
"""Queries, first and last, whose output is compared."""


# --- methods --------------------------------------------------------------------------------------


def ours(data: AttentionData) -> Tensor:
    """Attend with the op of the package."""
    if data.case.tensor:
        codes = attention_mask_tiles(data.dense)
        return attention(data.q, data.k, data.v, None, None, None, data.dense, codes)[0]
    return said(data)


def said(data: AttentionData) -> Tensor:
    """Attend with the package's op, given the mask's conditions."""
    return attention(data.q, data.k, data.v, data.key_mask, data.ids, data.ids, **data.settings())[
        0
    ]


def sdpa(data: AttentionData) -> Tensor:
    """Attend with PyTorch's attention, grouped, with a dense mask where it needs one."""
    causal = data.dense is None
    return F.scaled_dot_product_attention(
        data.q, data.k, data.v, attn_mask=data.dense, is_causal=causal, enable_gqa=True
    )


def chain(data: AttentionData) -> Tensor:
    """Attend as an eager model does under a softcap."""
    repeat = data.q.shape[1] // data.k.shape[1]
    k, v = (each.repeat_interleave(repeat, 1) for each in (data.k, data.v))
    score = data.q @ k.transpose(2, 3) * data.q.shape[3] ** -0.5
    score = data.case.softcap * torch.tanh(score / data.case.softcap)
    lowest = torch.finfo(score.dtype).min
    score = score + torch.where(data.dense, 0.0, lowest).to(score.dtype)
    return score.softmax(-1, dtype=torch.float32).to(data.q.dtype) @ v


def prepare_flex(data: AttentionData) -> Callable[[AttentionData], Tensor]:
    """Return FlexAttention, compiled, for the mask and softcap of a case."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    case, key_mask, ids = data.case, data.key_mask, data.ids
    batch, _, _, length, _ = case.sizes

    def mask(b: Tensor, h: Tensor, m: Tensor, n: Tensor) -> Tensor:
        if data.blocks is not None:
            return data.blocks[b, m // registry.BLOCK, n // registry.BLOCK]
        found = n <= m
        if case.window:
            found = found & (m - n < case.window)
        if key_mask is not None:
            found = found & key_mask[b, n]
        if ids is not None:
            found = found & (ids[0, m] == ids[0, n])
        return found

    def capped(score: Tensor, b: Tensor, h: Tensor, m: Tensor, n: Tensor) -> Tensor:
        return case.softcap * torch.tanh(score / case.softcap)

    rows_of_mask = batch if key_mask is not None or data.blocks is not None else None
    device = data.q.device
    data.block_mask = create_block_mask(mask, rows_of_mask, None, length, length, device=device)
    torch._dynamo.reset()  # beyond a few shapes Dynamo gives up and runs it unfused
    compiled = torch.compile(flex_attention, dynamic=False)

    def attend(given: AttentionData) -> Tensor:
        score_mod = capped if case.softcap else None
        return compiled(
            given.q,
            given.k,
            given.v,
            score_mod=score_mod,
            block_mask=given.block_mask,
            enable_gqa=True,
        )

    return attend


def methods(
    data: AttentionData, options: argparse.Namespace
) -> dict[str, Callable[[AttentionData], Tensor]]:
    """Return the methods of a case, with their inputs."""
    case = data.case
    found: dict[str, Callable[[AttentionData], Tensor]] = {"ours": ours}
    if not case.is_causal_alone():
        data.dense = data.mask_as_tensor()
    if case.tensor == "causal":
        found["said"] = said
    found["chain" if case.softcap else "sdpa"] = chain if case.softcap else sdpa
    if data.q.is_cuda and not options.no_flex and case.tensor not in ("lowest", "numbers"):
        found["flex"] = prepare_flex(data)
    return found


# --- correctness ----------------------------------------------------------------------------------


def errors(method: Callable[[AttentionData], Tensor], data: AttentionData) -> dict[str, float]:
    """Return the largest differences from float64 over the largest values.

    The gradient flows from the first and last queries of the last head of the last sequence alone,
    so that float64's fits; queries that see no key are left out.
    """
    length = data.case.sizes[3]
    size = min(LOOKED_AT, length // 2)
    spans = [(0, size), (length - size, length)]
    batch = data.case.sizes[0] - 1
    exact = [
        each.detach()[batch, -1].double().requires_grad_() for each in (data.q, data.k, data.v)
    ]
    grad = torch.zeros_like(data.grad)
    wanted, found, given = [], [], []
    out = method(data)
    for first, stop in spans:
        seen = data.seen(batch, first, stop)
        some = seen.any(-1, keepdim=True)
        score = exact[0][first:stop] @ exact[1].t() * data.q.shape[3] ** -0.5
        if data.case.softcap:
            score = data.case.softcap * torch.tanh(score / data.case.softcap)
        added = data.added(batch, first, stop)
        if added is not None:
            score = score + added.double()
        weight = score.masked_fill(~seen & some, -math.inf).softmax(-1) * some
        wanted.append(weight @ exact[2])
        found.append(torch.where(some, out[batch, -1, first:stop].double(), 0.0))
        part = data.grad[batch, -1, first:stop] * some
        grad[batch, -1, first:stop] = part
        given.append(part.double())
    gradients = torch.autograd.grad(out, (data.q, data.k, data.v), grad)
    expected = torch.autograd.grad(wanted, exact, given)
    pairs = {"out": (torch.cat(found), torch.cat(wanted))}
    for name, mine, theirs in zip("qkv", gradients, expected, strict=True):
        pairs[name] = (mine[batch, -1].double(), theirs)
    pairs = {name: (mine.detach(), theirs.detach()) for name, (mine, theirs) in pairs.items()}
    return {
        name: float((mine - theirs).abs().max() / theirs.abs().max().clamp(min=1e-9))
        for name, (mine, theirs) in pairs.items()
    }


# --- time -----------------------------------------------------------------------------------------


def forward_of(method: Callable[[AttentionData], Tensor], data: AttentionData) -> Callable[[], Any]:
    """Return the forward without gradients."""

    def call() -> None:
        with torch.no_grad():
            method(data)

    return call


def both_of(method: Callable[[AttentionData], Tensor], data: AttentionData) -> Callable[[], Any]:
    """Return forward and backward."""
    return lambda: torch.autograd.grad(method(data), (data.q, data.k, data.v), data.grad)


def run_case(case: Case, options: argparse.Namespace) -> None:
    """Check, time and write one case."""
    data = registry.attention_inputs(case, options.device)
    heads, depth = case.sizes[1], case.sizes[4]
    pairs = data.pairs() * heads * depth
    calls: dict[tuple[str, str], Callable[[], Any]] = {}
    found: dict[str, dict[str, float]] = {}
    for name, method in methods(data, options).items():
        try:
            found[name] = errors(method, data)
        except torch.OutOfMemoryError:
            print(f"{case.name} {name}: does not fit in memory, not measured", flush=True)
            continue
        worst = max(found[name].values())
        if not worst <= ERROR_BUDGET:
            print(f"{case.name} {name}: WRONG, {found[name]}; not timed", flush=True)
            continue
        calls[name, "forward"] = forward_of(method, data)
        calls[name, "both"] = both_of(method, data)
    taken: dict[tuple[str, str], list[float]] = {key: [] for key in calls}
    for call in calls.values():
        call()
    for _ in range(options.repeats):
        for key, call in calls.items():
            taken[key].append(timing.milliseconds(call, options.inner, is_ahead=options.ahead))
    for name in {key[0]: None for key in calls}:
        forward = statistics.median(taken[name, "forward"])
        both = statistics.median(taken[name, "both"])
        row = {
            "benchmark": "attention_kernels",
            "case": case.name,
            "sizes": case.sizes,
            "method": name,
            "host_is_ahead": options.ahead,
            "forward_ms": rows.percentiles(taken[name, "forward"]),
            "both_ms": rows.percentiles(taken[name, "both"]),
            "forward_tflops": round(4 * pairs / forward / 1e9, 1),
            "backward_tflops": round(10 * pairs / max(both - forward, 1e-9) / 1e9, 1),
            "errors": {key: float(f"{value:.2e}") for key, value in found[name].items()},
        }
        if options.out:
            rows.write(options.out, row)
        print(
            f"{case.name:18} {name:6} forward {forward:8.3f} ms {row['forward_tflops']:6.1f} "
            f"TFLOP/s   both {both:8.3f} ms   backward {row['backward_tflops']:6.1f} TFLOP/s",
            flush=True,
        )


# --- sweep ----------------------------------------------------------------------------------------

GRIDS: dict[str, list[tuple[list[int], ...]]] = {  # rows, keys, warps, stages
    "forward": [([128], [64, 128], [8], [2, 3]), ([64, 128], [32, 64, 128], [4], [2, 3])],
    "query_gradient": [([64, 128], [32, 64, 128], [8], [2, 3]), ([64], [64], [4], [2, 3])],
    "key_gradient": [([32, 64], [64, 128], [8], [1, 2, 3]), ([32, 64, 128], [64], [4, 8], [2])],
}


def sweep_case(case: Case, options: argparse.Namespace) -> None:
    """Print the five fastest tiles of each kernel, everything else as by default."""
    data = registry.attention_inputs(case, options.device)
    q, k, v = (each.detach() for each in (data.q, data.k, data.v))
    settings = data.settings()
    scale, softcap = q.shape[3] ** -0.5, settings["softcap"]
    bounds = (settings["ahead"], settings["behind"])
    given = Conditions(data.key_mask, data.ids, data.ids, *bounds, scale, softcap, mean=False)
    if case.tensor:
        mask = data.mask_as_tensor()
        codes = attention_mask_tiles(mask)
        given = Conditions(None, None, None, None, None, scale, 0.0, False, mask, codes)
    told = {"has_tables": given.has_tables(), "has_mask": bool(case.tensor)}
    plan = tiles.plan_for(q.shape[3], q.device, **told)
    out, lse = tiles.attend(q, k, v, given, plan=plan)
    whole = tiles.gradients(data.grad, q, k, v, out, lse, given, plan=plan)
    for kernel in options.kernels:
        results = []
        for shape in candidates(kernel, getattr(plan, kernel)):
            tried = dataclasses.replace(plan, **{kernel: shape})

            def call(tried: tiles.Plan = tried, kernel: str = kernel) -> tuple[Tensor, ...]:
                if kernel == "forward":
                    return tiles.attend(q, k, v, given, plan=tried)[:1]
                return tiles.gradients(data.grad, q, k, v, out, lse, given, plan=tried)

            try:
                pairs = zip(call(), (out,) if kernel == "forward" else whole, strict=True)
                wrong = max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)
            except Exception as error:  # a tile that does not fit is no candidate
                print(f"{case.name} {kernel} {shape}: {type(error).__name__}", flush=True)
                continue
            if wrong <= ERROR_BUDGET:
                results.append((timing.milliseconds(call, options.inner), shape))
        for taken, shape in sorted(results, key=lambda result: result[0])[:5]:
            print(f"{case.name} {kernel:14} {taken:8.3f} ms {shape}", flush=True)


def candidates(kernel: str, default: shapes.Shape) -> list[shapes.Shape]:
    """Return the tiles to try for a kernel, the default first."""
    found = {default: None}
    for grid in GRIDS[kernel]:
        for values in itertools.product(*grid):
            found[shapes.Shape(*values, is_split=default.is_split)] = None
            found[shapes.Shape(*values)] = None
    return list(found)


def main() -> None:
    """Measure as the arguments say."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--size", choices=list(registry.ATTENTION_CASES), default="h200")
    parser.add_argument("--shape", action="append", help="a case by name; may be repeated")
    parser.add_argument(
        "--ahead", action="store_true", help="the device sleeps first: its own time"
    )
    parser.add_argument("--tensors", action="store_true", help="only masks that are tensors")
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    parser.add_argument("--sweep", action="store_true", help="try tiles; nothing is written")
    parser.add_argument("--kernels", nargs="+", choices=shapes.KERNELS, default=shapes.KERNELS)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--inner", type=int, default=5, help="calls of one measurement")
    parser.add_argument("--no-flex", action="store_true", help="leave FlexAttention out")
    parser.add_argument("--out", type=Path, help="JSON lines are appended here")
    options = parser.parse_args()
    options.device = "cuda" if torch.cuda.is_available() and options.size != "tiny" else "cpu"
    if options.quick:
        options.repeats, options.inner = 5, 3
    torch.manual_seed(0)
    if torch.cuda.is_available():
        print(torch.cuda.get_device_name(), "torch", torch.__version__, flush=True)
    for case in registry.ATTENTION_CASES[options.size]:
        if options.shape and case.name not in options.shape:
            continue
        if options.tensors and not case.tensor:
            continue
        (sweep_case if options.sweep else run_case)(case, options)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
