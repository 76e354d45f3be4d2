"""Distillation between two heads: eager PyTorch, Inductor and memeff, in turns.

    python benchmarks/ops/linear_divergence.py                       # one GPU
    python benchmarks/ops/linear_divergence.py --kind jsd --shape 4096x2304x3584x256000
    python benchmarks/ops/linear_divergence.py --shape 64x16x24x300 --device cpu --dtype float32 \
        --inner aot_eager

A shape is rows x features of the student x features of the teacher x classes. A step is forward and
backward of the compiled loss; the student's hidden states and weight have gradients. Memory is the
peak beyond inputs and gradients. First the gradients are held to fp64's, of which each method's
error is in its row.
"""

from __future__ import annotations

import argparse
import math
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import memeff_compile
from benchmarks import RESULTS, rows, timing

METHODS = ("eager", "inductor", "memeff")
CHECKED_ROWS = 256
"""Rows of the call whose gradients are compared: fp64 is slow on a GPU."""


def logarithms(h: Tensor, w: Tensor, g: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities of student and teacher at temperature 2."""
    student = (F.linear(h, w) / 2).float() if h.dtype != torch.float64 else F.linear(h, w) / 2
    with torch.no_grad():
        teacher = F.linear(g, u) / 2
        teacher = teacher.to(student.dtype).log_softmax(-1)
    return student.log_softmax(-1), teacher


def forward_kl(*given: Tensor) -> Tensor:
    """Return KL(teacher || student)."""
    student, teacher = logarithms(*given)
    return F.kl_div(student, teacher, reduction="batchmean", log_target=True)


def reverse_kl(*given: Tensor) -> Tensor:
    """Return KL(student || teacher)."""
    student, teacher = logarithms(*given)
    return F.kl_div(teacher, student, reduction="batchmean", log_target=True)


def jsd(*given: Tensor) -> Tensor:
    """Return the Jensen-Shannon divergence as TRL writes it."""
    student, teacher = logarithms(*given)
    mixed = torch.logsumexp(torch.stack([student + math.log(0.5), teacher + math.log(0.5)]), dim=0)
    both = [F.kl_div(mixed, x, reduction="none", log_target=True) for x in (teacher, student)]
    every = 0.5 * both[0] + 0.5 * both[1]
    return every.sum() / every.size(0)


def top_k(h: Tensor, w: Tensor, index: Tensor, teacher: Tensor) -> Tensor:
    """Return KL(teacher || student) over the classes of which the teacher's numbers are known."""
    student = (F.linear(h, w) / 2).float() if h.dtype != torch.float64 else F.linear(h, w) / 2
    student = student.log_softmax(-1).gather(-1, index)
    return F.kl_div(student, teacher, reduction="batchmean", log_target=True)


KINDS = {"forward_kl": forward_kl, "reverse_kl": reverse_kl, "jsd": jsd, "top_k": top_k}
KNOWN = 64
"""Classes of a row in `top_k`."""


def drawn(given: argparse.Namespace, shape: list[int], count: int, kind: str) -> list[Tensor]:
    """Return operands of so many rows: hidden states and weight of student and of teacher, or
    indices and log-probabilities of the teacher's classes.
    """
    _, depth, of_teacher, vocab = shape
    torch.manual_seed(0)
    make = partial(torch.randn, device=given.device, dtype=getattr(torch, given.dtype))
    h, w = make(count, depth), 3 / depth**0.5 * make(vocab, depth)
    if kind == "top_k":
        wide = torch.float64 if h.dtype == torch.float64 else torch.float32
        index = torch.rand(count, vocab, device=given.device).topk(KNOWN).indices
        logs = torch.randn(count, KNOWN, device=given.device, dtype=wide).log_softmax(-1) - 0.1
        return [h.requires_grad_(), w.requires_grad_(), index, logs]
    g, u = make(count, of_teacher), 3 / of_teacher**0.5 * make(vocab, of_teacher)
    return [h.requires_grad_(), w.requires_grad_(), g, u]


def gradients(run: Any, operands: list[Tensor]) -> list[Tensor]:
    """Return the gradients of the student."""
    return list(torch.autograd.grad(run(*operands), operands[:2]))


def errors(run: Any, given: argparse.Namespace, shape: list[int], kind: str) -> list[float]:
    """Return the relative error of each gradient against fp64."""
    few = drawn(given, shape, min(CHECKED_ROWS, shape[0]), kind)
    exact = [
        each.detach().double().requires_grad_(each.requires_grad)
        if each.is_floating_point()
        else each
        for each in few
    ]
    both = zip(gradients(run, few), gradients(KINDS[kind], exact), strict=True)
    return [float((one - other).norm() / other.norm()) for one, other in both]


def compiled(method: str, kind: str, inner: str) -> Any:
    """Return the function as a method runs it."""
    if method == "eager":
        return KINDS[kind]
    options = {"memeff.inner": inner} if method == "memeff" else None
    return torch.compile(KINDS[kind], backend=method, options=options, dynamic=False)


def measure(given: argparse.Namespace, shape: list[int], kind: str) -> None:
    """Check, then time in turns, and write a row for each method."""
    runs: dict[str, Any] = {}
    found: dict[str, dict[str, Any]] = {}
    for method in given.method:
        torch._dynamo.reset()
        run = compiled(method, kind, given.inner)
        found[method] = {
            "errors": [float(f"{each:.2e}") for each in errors(run, given, shape, kind)]
        }
        if method == "memeff":
            codes = [(r.pass_name, r.code) for r in memeff_compile.last_report().records]
            found[method]["codes"] = codes
        runs[method] = run
    operands = drawn(given, shape, shape[0], kind)
    kept = sum(each.nbytes for each in operands[:2])
    runs = {method: partial(gradients, run, operands) for method, run in runs.items()}
    is_cuda = given.device == "cuda"
    for method, run in runs.items():
        run()
        if is_cuda:
            torch.cuda.empty_cache()
            before = torch.cuda.memory_allocated()
            _, peak = timing.with_peak(run, is_cuda=True)
            found[method]["mib_beyond_gradients"] = round((peak - before - kept) / 2**20, 1)
    samples = timing.in_turns(
        {
            name: partial(timing.milliseconds, run, device=given.device)
            for name, run in runs.items()
        },
        given.repeats,
    )
    facts = {"shape": shape, "kind": kind, "dtype": given.dtype}
    for method in given.method:
        row = {"what": "linear divergence", "method": method, **facts, **found[method]}
        rows.write(given.out, row | {"both_ms": rows.percentiles(samples[method])})


def main() -> None:
    """Measure every kind on every shape."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", nargs="+", default=["8192x4096x4096x128256"])
    parser.add_argument("--kind", nargs="+", default=["forward_kl"], choices=KINDS)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--method", nargs="+", default=METHODS[1:], choices=METHODS)
    parser.add_argument("--inner", default="inductor", help="what memeff hands the graph to")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--out", type=Path, default=RESULTS / "linear-divergence.jsonl")
    given = parser.parse_args()
    for shape in given.shape:
        for kind in given.kind:
            measure(given, list(map(int, shape.split("x"))), kind)


if __name__ == "__main__":
    main()
