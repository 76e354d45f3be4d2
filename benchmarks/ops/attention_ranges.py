"""Attention under masks of keys and sequence ids on Hopper: the kernels in Gluon and in Triton.

    python benchmarks/ops/attention_ranges.py --compile 0/8    (and 1/8 ... 7/8 at the same time)
    python benchmarks/ops/attention_ranges.py
    python benchmarks/ops/attention_ranges.py --table padding

The op chooses one of these kernels for each call. This script runs the kernels of both languages in
turns, in one process, with launches queued in advance. The times of the forward pass include the
search for the visible keys, and so do those of the backward pass.

A row contains the times of one case. It also contains the largest differences between the results
of the two languages, relative to the largest value. `--table` prints the rows of a results file as
the table of a page. `--size tiny` runs the op on the CPU in seconds.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks import rows, timing
from memeff_compile.kernels._triton.conditions import Conditions
from memeff_compile.kernels._triton.launch import noted
from memeff_compile.kernels.attention import attention, hopper, hopper_gradients, tiles

Results = tuple[Tensor, ...]
PARTS = ("forward", "backward", "both")
NAMES = ("out", "lse", "grad_q", "grad_k", "grad_v")
RESULTS = Path(__file__).resolve().parents[1] / "results" / "nvidia-h200" / "attention-ranges.jsonl"


@dataclasses.dataclass(frozen=True)
class Case:
    """One attention: batch, heads, key heads, positions and head size, and its masks."""

    masks: tuple[str, ...]
    sizes: tuple[int, int, int, int, int]
    is_causal: bool = True
    window: int | None = None
    dtype: torch.dtype = torch.bfloat16

    def name(self) -> str:
        """Return the words by which a table names the case."""
        batch, heads, groups, length, _ = self.sizes
        parts = ["fp16"] if self.dtype == torch.float16 else []
        parts += [f"window of {self.window}"] if self.window else []
        parts += [" and ".join(self.masks)] if self.masks else []
        parts += [] if self.is_causal else ["not causal"]
        return ", ".join([*parts, f"{batch} x {heads} ({groups}) x {length}"])

    def has_gaps(self) -> bool:
        """Return whether visible keys have hidden keys between them."""
        return any("at random" in each or "alternate" in each for each in self.masks)


GAPS = "10 % of the keys hidden at random"
HALF = "50 % of the keys hidden at random"
TURN = "three ids that alternate every 100 tokens"
BAD = "nan at hidden keys"
LEFT, RIGHT, PADDING = "left padding", "right padding", "padding"
EVERY_SECOND = "left padding of 1024 in every second sequence"
WHOLE = "a mask that hides no key"
DOCUMENTS = {mean: f"documents of {mean} tokens" for mean in (100, 400, 1000)}
EIGHT = "8 documents of 1024 tokens"


def padding_of(kind: str, batch: int, length: int) -> Tensor:
    """Return the mask of keys of padded sequences."""
    place = torch.arange(length)[None]
    if kind == EVERY_SECOND:
        return place >= 1024 * (torch.arange(batch)[:, None] % 2)
    if kind == PADDING:
        lengths = torch.tensor([length, length * 5 // 6, length * 2 // 3, length // 2])
    else:
        lengths = torch.tensor(
            [length, 3400 * length // 4096, 2700 * length // 4096, 1900 * length // 4096]
        )
    lengths = lengths.repeat(-(-batch // 4))[:batch, None]
    return place < lengths if kind == RIGHT else place >= length - lengths


def masks_of(case: Case) -> tuple[Tensor | None, Tensor | None]:
    """Return the mask of keys and the sequence ids of a case."""
    batch, _, _, length, _ = case.sizes
    mask = ids = None
    generator = torch.Generator().manual_seed(0)
    for kind in case.masks:
        if kind in (LEFT, RIGHT, PADDING, EVERY_SECOND):
            mask = padding_of(kind, batch, length)
        elif kind == WHOLE:
            mask = torch.ones(batch, length, dtype=torch.bool)
        elif kind in (GAPS, HALF):
            mask = torch.rand(batch, length, generator=generator) < (0.9 if kind == GAPS else 0.5)
        elif kind == TURN:
            ids = (torch.arange(length) // 100 % 3)[None].expand(batch, -1).contiguous()
        elif kind == EIGHT:
            ids = (torch.arange(length) * 8 // length)[None].expand(batch, -1).contiguous()
        elif kind in DOCUMENTS.values():
            mean = next(each for each, name in DOCUMENTS.items() if name == kind)
            ids = (torch.rand(batch, length, generator=generator) < 1.0 / mean).cumsum(1)
        else:
            assert kind == BAD, kind
    return mask, ids


SHAPE = (4, 32, 8, 4096, 128)
NARROW = (4, 32, 8, 4096, 64)
HALF_PRECISION = torch.float16
CASES: dict[str, list[Case]] = {
    "h200": [
        Case((EVERY_SECOND,), (8, 32, 8, 2048, 128)),
        Case((EIGHT,), (1, 32, 8, 8192, 128)),
        *(
            Case((kind,), sizes)
            for kind in (LEFT, RIGHT, WHOLE, DOCUMENTS[1000], DOCUMENTS[400], DOCUMENTS[100])
            for sizes in (SHAPE, NARROW)
        ),
        Case((PADDING,), (4, 32, 8, 2048, 128)),
        Case((DOCUMENTS[400],), (4, 32, 8, 2048, 128)),
        Case((PADDING,), (8, 16, 8, 4096, 128)),
        Case((DOCUMENTS[400],), (8, 16, 8, 4096, 128)),
        Case((DOCUMENTS[1000],), (1, 32, 8, 32768, 128)),
        Case((PADDING,), SHAPE, dtype=HALF_PRECISION),
        Case((DOCUMENTS[400],), SHAPE, dtype=HALF_PRECISION),
        Case((PADDING,), SHAPE, window=1024),
        Case((DOCUMENTS[1000],), SHAPE, window=1024),
        Case((PADDING,), (4, 32, 32, 4096, 96)),
        Case((DOCUMENTS[400],), (4, 32, 32, 4096, 96)),
        Case((PADDING,), (4, 32, 32, 4096, 112)),
        Case((DOCUMENTS[400],), (8, 32, 8, 2048, 64)),
        Case((PADDING,), (8, 14, 2, 4096, 64)),
        Case((DOCUMENTS[400],), (8, 14, 2, 4096, 64)),
        # both tables
        Case((PADDING, DOCUMENTS[400]), SHAPE),
        Case((PADDING, DOCUMENTS[400]), (4, 32, 8, 2048, 128)),
        Case((PADDING, DOCUMENTS[400]), SHAPE, dtype=HALF_PRECISION),
        Case((PADDING, DOCUMENTS[1000]), SHAPE, window=1024),
        Case((PADDING, DOCUMENTS[400]), (8, 16, 8, 4096, 128)),
        Case((PADDING, DOCUMENTS[1000]), (2, 32, 8, 16384, 128)),
        Case((PADDING, DOCUMENTS[400]), (4, 32, 32, 4096, 96)),
        Case((PADDING, DOCUMENTS[400]), NARROW),
        Case((PADDING, DOCUMENTS[400]), (8, 14, 2, 4096, 64)),
        # no causal mask
        Case((PADDING,), (8, 32, 32, 2048, 128), is_causal=False),
        Case((PADDING,), (4, 32, 32, 4096, 96), is_causal=False),
        Case((PADDING,), SHAPE, is_causal=False, dtype=HALF_PRECISION),
        Case((PADDING, DOCUMENTS[400]), (4, 32, 32, 4096, 128), is_causal=False),
        Case((PADDING, DOCUMENTS[400]), SHAPE, is_causal=False, dtype=HALF_PRECISION),
        Case((DOCUMENTS[400],), (4, 32, 32, 4096, 128), is_causal=False),
        Case((DOCUMENTS[400],), (4, 32, 8, 2048, 128), is_causal=False),
        Case((DOCUMENTS[400],), (8, 16, 8, 4096, 128), is_causal=False, dtype=HALF_PRECISION),
        Case((DOCUMENTS[400],), (8, 16, 8, 4096, 128), is_causal=False),
        Case((DOCUMENTS[1000],), (1, 32, 8, 32768, 128), is_causal=False),
        Case((DOCUMENTS[100],), SHAPE, is_causal=False),
        Case((PADDING,), (16, 32, 32, 2048, 64), is_causal=False),
        Case((PADDING,), (16, 16, 16, 2048, 64), is_causal=False),
        Case((PADDING,), (16, 16, 16, 2048, 64), is_causal=False, dtype=HALF_PRECISION),
        Case((PADDING,), (4, 32, 32, 4096, 64), is_causal=False),
        Case((PADDING,), (8, 14, 2, 4096, 64), is_causal=False),
        Case((WHOLE,), (8, 16, 16, 4096, 64), is_causal=False),
        Case((DOCUMENTS[400],), (16, 32, 32, 2048, 64), is_causal=False),
        Case((DOCUMENTS[400],), (8, 16, 16, 4096, 64), is_causal=False),
        Case((DOCUMENTS[100],), (4, 32, 32, 4096, 64), is_causal=False),
        # hidden keys between visible ones
        Case((GAPS,), SHAPE),
        Case((HALF,), SHAPE),
        Case((TURN,), SHAPE),
        Case((GAPS, TURN), SHAPE),
        Case((GAPS,), SHAPE, dtype=HALF_PRECISION),
        Case((GAPS,), SHAPE, window=1024),
        Case((GAPS,), (2, 32, 8, 16384, 128)),
        Case((GAPS,), SHAPE, is_causal=False),
        Case((TURN,), SHAPE, is_causal=False),
        Case((GAPS,), NARROW),
        Case((TURN,), NARROW),
        Case((GAPS,), (4, 32, 32, 4096, 64), is_causal=False),
        # hidden numbers that are not finite
        Case((LEFT, BAD), SHAPE),
        Case((GAPS, BAD), SHAPE),
    ],
    "tiny": [
        Case((PADDING, DOCUMENTS[100]), (2, 4, 2, 200, 16)),
        Case((GAPS, BAD), (2, 2, 1, 64, 16), is_causal=False, dtype=torch.float32),
    ],
}


def call_of(case: Case, device: str) -> tuple[Any, Tensor]:
    """Return a case's call and a gradient of its output."""
    batch, heads, groups, length, depth = case.sizes
    torch.manual_seed(0)
    q, k, v, grad = (
        torch.randn(batch, length, each, depth, device=device, dtype=case.dtype).transpose(1, 2)
        for each in (heads, groups, groups, heads)
    )
    mask, ids = (None if each is None else each.to(device) for each in masks_of(case))
    if BAD in case.masks:
        assert mask is not None
        k, v = (each.masked_fill(~mask[:, None, :, None], float("nan")) for each in (k, v))
    behind = None if case.window is None else case.window - 1
    ahead = 0 if case.is_causal else None
    given = Conditions(mask, ids, ids, ahead, behind, depth**-0.5, 0.0, mean=False)
    return tiles._call(q, k, v, given), grad


def methods(
    call: Any, grad: Tensor
) -> dict[str, tuple[Callable[..., Results], Callable[..., Results]]]:
    """Return the forward and the backward pass of each implementation."""
    given = call.given
    if not call.q.is_cuda:
        return {"op": (lambda: _by_op(call), lambda *_: ())}
    plan = call.plan()
    return {
        "triton": (
            lambda: tiles.attend(call.q, call.k, call.v, given, plan=plan),
            lambda out, lse: tiles.gradients(
                grad, call.q, call.k, call.v, out, lse, given, plan=plan
            ),
        ),
        "gluon": (
            lambda: hopper.attend(call),
            lambda out, lse: hopper_gradients.gradients(call, grad, out, lse),
        ),
    }


def _by_op(call: Any) -> Results:
    given = call.given
    bounds = {"ahead": given.ahead, "behind": given.behind, "scale": given.scale}
    results: Results = attention(
        call.q, call.k, call.v, given.key_mask, given.query_ids, given.key_ids, **bounds
    )
    return results


def compile_kernels(cases: Iterable[Case]) -> None:
    """Compile the kernels of some cases, without running them."""
    seen = set()
    for case in cases:
        call, grad = call_of(case, "cuda")
        launches: list[Any] = []
        with noted(launches):
            for forward, backward in methods(call, grad).values():
                backward(*forward()[:2])
        for each in launches:
            if each.key() not in seen:
                seen.add(each.key())
                each.compile()
        print(len(seen), "kernels:", case.name(), flush=True)


def largest(tensor: Tensor) -> float:
    """Return the largest finite size of a number."""
    return float(tensor.float().nan_to_num(0.0, 0.0, 0.0).abs().max()) if tensor.numel() else 0.0


def measure(case: Case, options: argparse.Namespace) -> dict[str, Any]:
    """Return the times of a case, and the differences between the implementations."""
    call, grad = call_of(case, options.device)
    timers: dict[str, Callable[[], float]] = {}
    results: dict[str, Results] = {}
    for name, (forward, backward) in methods(call, grad).items():
        first = forward()[:2]
        results[name] = (*first, *backward(*first))

        def both(forward: Any = forward, backward: Any = backward) -> None:
            backward(*forward()[:2])

        def again(backward: Any = backward, first: Any = first) -> None:
            backward(*first)

        runs: tuple[Callable[[], Any], ...] = (forward, again, both)
        for part, run in zip(PARTS, runs, strict=True):
            timers[f"{name} {part}"] = functools.partial(
                timing.milliseconds, run, options.inner, device=options.device, is_ahead=True
            )
    found = timing.in_turns(timers, options.repeats)
    times: dict[str, dict[str, float]] = {name: {} for name in results}
    for name, samples in found.items():
        method, part = name.split()
        times[method][part] = round(statistics.median(samples), 4)
    first, last = (list(results.values())[i] for i in (0, -1))
    differences = {
        name: round(largest(a.float() - b.float()) / max(largest(a), 1e-9), 6)
        for name, a, b in zip(NAMES, first, last, strict=False)
    }
    described = {"case": case.name(), "gaps": case.has_gaps(), "sizes": list(case.sizes)}
    finite = all(bool(each.isfinite().all()) for each in last[2:])
    return {**described, "ms": times, "differences": differences, "finite": finite}


def table(found: Sequence[dict[str, Any]], kind: str) -> list[str]:
    """Return rows as lines of a table.

    `kind` is "gaps" for cases with hidden keys between visible ones, and otherwise "padding".
    """
    lines = []
    for row in found:
        if row["gaps"] != (kind == "gaps"):
            continue
        gluon, triton = row["ms"]["gluon"], row["ms"]["triton"]
        cells = [f"{gluon[part]:.2f} / {triton[part]:.2f}" for part in PARTS]
        saved = 100 * (1 - gluon["both"] / triton["both"])
        cells.append(f"{saved:.0f} %" if saved >= 0 else f"{-saved:.0f} % slower")
        lines.append(" | ".join(["", row["case"], str(row["sizes"][4]), *cells, ""]).strip())
    return lines


def main() -> None:
    """Measure as the arguments say."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--size", choices=list(CASES), default="h200")
    parser.add_argument(
        "--compile", metavar="I/N", help="compile every N-th case, from the I-th on"
    )
    parser.add_argument("--table", choices=("padding", "gaps"), help="print rows; measure nothing")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--inner", type=int, default=3, help="calls of one measurement")
    parser.add_argument("--out", type=Path, help="JSON lines are appended here")
    options = parser.parse_args()
    if options.table:
        print("\n".join(table(rows.read(options.out or RESULTS), options.table)))
        return
    options.device = "cpu" if options.size == "tiny" else "cuda"
    cases = CASES[options.size]
    if options.compile:
        start, step = map(int, options.compile.split("/"))
        compile_kernels(cases[start::step])
        return
    for case in cases:
        row = measure(case, options)
        if options.out:
            rows.write(options.out, row)
        else:
            print(row, flush=True)


if __name__ == "__main__":
    main()
