"""A head with a LoRA adapter and its loss: eager PyTorch, Inductor and memeff, in turns.

    python benchmarks/ops/adapted_head.py                    # one GPU; PEFT's usual: W frozen
    python benchmarks/ops/adapted_head.py --trained --shape 4096x2048x151936
    python benchmarks/ops/adapted_head.py --shape 64x32x300 --device cpu --dtype float32 --rank 4

Logits are `h W^T + 2 (h A^T) B^T`, A and B in fp32 or in the dtype of the head. A step is forward
and backward. Memory is the peak beyond inputs and gradients. First the gradients are held to
fp64's, of which each method's error is in its row: of the hidden states, A, B and, trained, W.
"""

from __future__ import annotations

import argparse
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
CHECKED_ROWS = 512
"""Rows of the call whose gradients are compared: fp64 is slow on a GPU."""


def loss(h: Tensor, w: Tensor, a: Tensor, b: Tensor, target: Tensor) -> Tensor:
    """Return the mean loss of a head and an adapter, cast as PEFT casts."""
    logits = F.linear(h, w)
    logits = logits + 2 * F.linear(F.linear(h.to(a.dtype), a), b)
    return F.cross_entropy(logits.to(h.dtype).float(), target)


def drawn(given: argparse.Namespace, count: int) -> list[Any]:
    """Return operands of so many rows: hidden states, W, A, B and targets."""
    _, depth, vocab = given.shape
    dtype, narrow = getattr(torch, given.dtype), getattr(torch, given.adapter)
    torch.manual_seed(0)
    make = partial(torch.randn, device=given.device)
    h, w = make(count, depth).to(dtype), (make(vocab, depth) / depth**0.5).to(dtype)
    a, b = (
        (make(given.rank, depth) / depth**0.5).to(narrow),
        (make(vocab, given.rank) / 4).to(narrow),
    )
    trained = [each.requires_grad_() for each in (h, a, b)]
    w.requires_grad_(given.trained)
    return [trained[0], w, *trained[1:], torch.randint(vocab, (count,), device=given.device)]


def gradients(run: Any, operands: list[Any]) -> list[Tensor]:
    """Return the gradients of the trained tensors."""
    trained = [each for each in operands if each.requires_grad]
    return list(torch.autograd.grad(run(*operands), trained))


def errors(run: Any, given: argparse.Namespace) -> list[float]:
    """Return the relative error of each gradient against fp64."""
    few = drawn(given, min(CHECKED_ROWS, given.shape[0]))
    exact = [each if each.dtype == torch.int64 else each.detach().double() for each in few]
    for one, other in zip(exact, few, strict=True):
        one.requires_grad_(other.requires_grad)
    both = zip(gradients(run, few), gradients(loss, exact), strict=True)
    return [float((one - other).norm() / other.norm()) for one, other in both]


def compiled(method: str, inner: str) -> Any:
    """Return the function as a method runs it."""
    if method == "eager":
        return loss
    options = {"memeff.inner": inner} if method == "memeff" else None
    return torch.compile(loss, backend=method, options=options, dynamic=False)


def main() -> None:
    """Check, then time in turns, and write a row for each method."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    shape = partial(str.split, sep="x")
    parser.add_argument("--shape", type=shape, default=["8192", "4096", "128256"])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--trained", action="store_true", help="W is trained, too")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--adapter", default="float32", help="dtype of A and B")
    parser.add_argument("--method", nargs="+", default=METHODS, choices=METHODS)
    parser.add_argument("--inner", default="inductor", help="what memeff hands the graph to")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--out", type=Path, default=RESULTS / "adapted-head.jsonl")
    given = parser.parse_args()
    given.shape = list(map(int, given.shape))
    operands = drawn(given, given.shape[0])
    kept = sum(each.nbytes for each in operands if each.requires_grad)
    runs: dict[str, Any] = {}
    found: dict[str, dict[str, Any]] = {}
    for method in given.method:
        torch._dynamo.reset()
        run = compiled(method, given.inner)
        found[method] = {"errors": [float(f"{each:.2e}") for each in errors(run, given)]}
        if method == "memeff":
            codes = [(r.pass_name, r.code) for r in memeff_compile.last_report().records]
            found[method]["codes"] = codes
        runs[method] = partial(gradients, run, operands)
        runs[method]()
    is_cuda = given.device == "cuda"
    for method, run in runs.items():
        if is_cuda:
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
    facts = {
        name: getattr(given, name) for name in ("shape", "rank", "trained", "dtype", "adapter")
    }
    for method in given.method:
        row = {"what": "adapted head", "method": method, **facts, **found[method]}
        rows.write(given.out, row | {"both_ms": rows.percentiles(samples[method])})


if __name__ == "__main__":
    main()
