"""Head and loss with their gradients made in the forward: right first, then memory, time, kernels.

    python benchmarks/ops/linear_cross_entropy_total.py --seconds 330 --out $OUT/total.jsonl
    python benchmarks/ops/linear_cross_entropy_total.py --tokens --out $OUT/tokens.jsonl
    python benchmarks/ops/linear_cross_entropy_total.py --peers 8192x4096x128256
    python benchmarks/ops/linear_cross_entropy_total.py --apart --shape 1024x576x32000

The second line measures log-probability and entropy of every token, each with a separate gradient,
so that the logits are computed twice; the third one the losses of other libraries, too. With the
fourth, rows also have the time of the GPU alone, which does not wait for the host.

One process and no more seconds than given: the most important parts come first, and a missing row
was not reached. Small cases of every kind are compared with float64, over memory that held nan, and
twice for the same bits. Then each shape: gradient errors against fp32, peak memory, times with all
methods in turn, each after a call of the same method, and the time of each kernel of a step.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks import measuring, methods, registry, rows, timing
from benchmarks.methods import IGNORED
from memeff_compile.kernels import linear_cross_entropy as folder

TODAY, FORWARD = "memeff exact", "memeff exact gradients=forward"
FIRST = ("llama3", "gemma2", "llama1b")
FIRST_METHODS = (
    FORWARD,
    f"{FORWARD} workspace=256MiB",
    f"{FORWARD} workspace=512MiB",
    TODAY,
    "inductor",
    "liger",
)
HELD_OUT = ("4096x2048x151936", "10007x3584x152064", "12288x5120x202048", "32768x2048x128256")
HELD_OUT_METHODS = (FORWARD, TODAY, "inductor")
PEERS = (
    *(FORWARD, "inductor", "inductor auto-chunker", "8 chunks", "torch chunks"),
    *("torch chunks of 2048", "quack 1024", "quack 4096", "liger cute", "liger cute rows"),
    *("liger", "apple", "apple no filter"),
)
TOKENS = tuple(methods.TOKEN_METHODS)
LEAST_SECONDS = 4
"""With less than this left, no further shape or method is begun."""
TOKEN_SHAPES = ("8192x4096x151936", "16384x2048x151936")
SMALL_BUDGET = 4.5e-3
"""Relative error (Frobenius) of bf16 gradients against float64 on the same inputs."""


class Runner:
    """Writes rows, and knows the remaining time."""

    def __init__(self, seconds: float, out: Path | None) -> None:
        self.end, self.out = time.monotonic() + seconds, out
        self.machine = rows.environment()

    def left(self) -> float:
        """Return the seconds that are left."""
        return self.end - time.monotonic()

    def row(self, what: str, **found: Any) -> None:
        """Print a row, and keep it."""
        print(what, json.dumps(found), flush=True)
        if self.out is not None:
            rows.append(self.out, {"what": what, **found, **self.machine})


# ------------------------------------------------------------------ right


def small_case(
    device: str, kind: str, *, ignored: float = 0.0, spread: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw 1537 rows of 512 features and 9003 classes."""
    source = torch.Generator(device).manual_seed(3)
    shape = (1537, 512, 9003) if device == "cuda" else (70, 16, 201)
    hidden, weight, target = registry.DATA[kind](shape, source)
    lost = torch.rand(target.shape, device=device, generator=source) < ignored
    return (hidden * spread).bfloat16(), weight.bfloat16(), target.masked_fill(lost, IGNORED)


def poison(device: str) -> None:
    """Leave nan in the memory that is allocated next."""
    if device == "cuda":
        held = [torch.full((size,), torch.nan, device=device) for size in (2**28, 2**24, 2**20)]
        del held


def total(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    norm: Tensor | None,
    softcap: float = 0.0,
    needs: tuple[bool, bool] = (True, True),
) -> tuple[Tensor, ...]:
    """Call the op on pieces of 512 rows; `needs` says of which of both gradients are asked."""
    found: tuple[Tensor, ...] = folder.linear_cross_entropy_total(
        hidden,
        weight,
        bias,
        target,
        None,
        norm,
        ignore_index=IGNORED,
        scale=1.0,
        softcap=softcap,
        workspace=2 * 512 * weight.shape[0],
        output_mask=[*needs, bias is not None],
    )
    return found[:4]


def compare(
    run: Runner,
    device: str,
    name: str,
    softcap: float = 0.0,
    has_bias: bool = False,
    needs: tuple[bool, bool] = (True, True),
    **case: Any,
) -> bool:
    """Compare one case with float64, twice and over memory that held nan; say if it is right."""
    hidden, weight, target = small_case(device, **case)
    bias = torch.randn(weight.shape[0], device=device).bfloat16() if has_bias else None
    results = []
    for _ in range(2):
        poison(device)
        norm = (target != IGNORED).sum()
        results.append(total(hidden, weight, bias, target, norm, softcap, needs))
    found, again = results
    wide = [t.double().requires_grad_() for t in (hidden, weight, bias) if t is not None]
    z = F.linear(*wide)
    z = softcap * torch.tanh(z / softcap) if softcap else z
    loss = F.cross_entropy(z, target, ignore_index=IGNORED)
    loss.backward()
    errors = [float((found[0] - loss.detach()).abs() / loss.detach().abs())]
    for one, other, is_asked in zip(found[1:], wide, (*needs, True), strict=False):
        assert other.grad is not None
        if not is_asked:
            continue
        errors.append(float((one.double() - other.grad).norm() / other.grad.norm()))
    same = all(torch.equal(one, other) for one, other in zip(found, again, strict=True))
    passes = same and errors[0] <= 1e-5 and max(errors) <= SMALL_BUDGET
    run.row("right", case=name, errors=errors, same_bits=same, passes=passes)
    return passes


def check(run: Runner, device: str) -> bool:
    """Compare with float64; say whether all is right."""
    cases: dict[str, dict[str, Any]] = {
        "peaked": {"kind": "peaked"},
        "flat, 40 % ignored": {"kind": "flat", "ignored": 0.4},
        "peaked, 90 % ignored": {"kind": "peaked", "ignored": 0.9},
        "far from the target": {"kind": "spread", "spread": 60.0},
        "softcap": {"kind": "spread", "softcap": 5.0, "ignored": 0.2},
        "frozen head": {"kind": "peaked", "needs": (True, False), "ignored": 0.1},
        "frozen trunk": {"kind": "peaked", "needs": (False, True)},
        "bias and softcap": {"kind": "spread", "softcap": 5.0, "has_bias": True},
    }
    verdicts = [compare(run, device, name, **case) for name, case in cases.items()]
    hidden, weight, target = small_case(device, "flat")
    hidden[700 % hidden.shape[0]] = torch.nan
    found = total(hidden, weight, None, target, None)
    bad = found[1].isnan().any(1)
    passes = bool(found[0].isnan()) and int(bad.sum()) == 1
    run.row("right", case="a row of nan", rows_of_nan=int(bad.sum()), passes=passes)
    return all(verdicts) and passes


def compare_tokens(run: Runner, device: str, name: str, **case: Any) -> bool:
    """Compare log-probabilities and entropies with float64; say if they are right."""
    hidden, weight, target = small_case(device, case["kind"], spread=case.get("spread", 1.0))
    softcap, workspace = case.get("softcap", 0.0), case.get("workspace", 0)
    bias = torch.randn(weight.shape[0], device=device).bfloat16() if "bias" in case else None
    leaves = [t.clone().requires_grad_() for t in (hidden, weight, bias) if t is not None]
    source = torch.Generator(device).manual_seed(4)
    shares = torch.randn(2, len(target), device=device, generator=source)
    results = []
    for _ in range(2):
        poison(device)
        found = folder.linear_cross_entropy(
            leaves[0],
            leaves[1],
            None if bias is None else leaves[2],
            target,
            None,
            ignore_index=None,
            scale=0.7,
            softcap=softcap,
            with_lse=False,
            with_logit_sum=False,
            gradient_filter="exact",
            workspace=workspace,
            with_entropy=True,
        )
        values = found[0], found[3]
        gradients = torch.autograd.grad(values, leaves, tuple(shares))
        results.append([*(value.detach() for value in values), *gradients])
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    z = F.linear(*wide) * 0.7
    every = (softcap * torch.tanh(z / softcap) if softcap else z).log_softmax(-1)
    expected = [-every.gather(-1, target[:, None])[:, 0], -(every.exp() * every).sum(-1)]
    expected += torch.autograd.grad(tuple(expected), wide, tuple(shares.double()))
    pairs = zip(results[0], (each.detach() for each in expected), strict=True)
    errors = [float((one.double() - other).norm() / other.norm()) for one, other in pairs]
    same = all(torch.equal(one, other) for one, other in zip(*results, strict=True))
    # Rows with an entropy near 0 owe it to differences of large logits.
    passes = same and errors[0] <= 1e-5 and errors[1] <= 1e-4 and max(errors) <= SMALL_BUDGET
    run.row("tokens are right", case=name, errors=errors, same_bits=same, passes=passes)
    return passes


def check_tokens(run: Runner, device: str) -> bool:
    """Compare with float64; say whether all is right."""
    cases: dict[str, dict[str, Any]] = {
        "peaked": {"kind": "peaked"},
        "flat": {"kind": "flat"},
        "columns": {"kind": "peaked", "workspace": 2 * 1537 * 2048},
        "far apart": {"kind": "spread", "spread": 60.0},
        "bias and softcap": {"kind": "spread", "softcap": 5.0, "bias": True},
    }
    verdicts = [compare_tokens(run, device, name, **case) for name, case in cases.items()]
    return all(verdicts)


# ------------------------------------------------------------------ memory, time, kernels


def losses_here(names: tuple[str, ...], shares: tuple[Tensor, Tensor] | None) -> dict[str, Any]:
    """Build the losses that can run here."""
    found = {}
    for name in names:
        try:
            if shares is None:
                found[name] = methods.method(name).build()
            else:
                found[name] = methods.token_loss(name, shares)
        except (methods.Unavailable, ImportError) as problem:
            print(f"{name}: {problem}", flush=True)
    return found


def errors_and_memory(
    loss: methods.Loss, tensors: registry.Inputs, wanted: measuring.Reference
) -> dict[str, Any]:
    """Return the errors of a loss's gradients, and its peak beyond them."""
    row: dict[str, Any] = {}
    measuring.both(loss, tensors)
    row["grad_hidden_error"] = measuring.relative_error(tensors.hidden.grad, wanted.grad_hidden)
    if tensors.weight.requires_grad:
        error = measuring.relative_error(tensors.weight.grad, wanted.grad_weight)
        row["grad_weight_error"] = error
    tensors.without_gradients()
    if tensors.hidden.is_cuda:
        torch.cuda.empty_cache()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        measuring.both(loss, tensors)
        torch.cuda.synchronize()
        given = sum(t.grad.nbytes for t in (tensors.hidden, tensors.weight) if t.grad is not None)
        peak = torch.cuda.max_memory_allocated() - before
        row["MiB_beyond_gradients"] = (peak - given) / 2**20
        tensors.without_gradients()
    return row


def measure(
    run: Runner, shape: str, names: tuple[str, ...], device: str, *, rounds: int, **data: Any
) -> None:
    """Measure one shape: errors and memory of each method, then times in turns."""
    torch._dynamo.reset()
    kind, ignored, frozen = "peaked", data.get("ignored", 0), data.get("frozen", False)
    tensors = registry.inputs(shape, kind, device, torch.bfloat16, ignored)
    shares = None
    if data.get("tokens"):
        source = torch.Generator(device).manual_seed(5)
        size = 2, len(tensors.target)
        shares = tuple(torch.randn(size, device=device, generator=source).div_(size[1]))
    wanted = measuring.reference(tensors, shares=shares)
    if frozen:
        tensors.weight.requires_grad_(False)
    calls: dict[str, Callable[[], Any]] = {}
    found: dict[str, dict[str, Any]] = {}
    for name, loss in losses_here(names, shares).items():
        if run.left() < LEAST_SECONDS:
            break
        try:
            row = errors_and_memory(loss, tensors, wanted)
        except Exception as problem:
            if name.startswith("memeff"):
                raise
            print(f"{name}: {type(problem).__name__}: {str(problem)[:300]}", flush=True)
            tensors.without_gradients()
            continue
        calls[name] = lambda loss=loss: measuring.both(loss, tensors)
        found[name] = row
    del wanted
    clock = timing.Clock()

    def timer(call: Callable[[], Any]) -> Callable[[], float]:
        def sample() -> float:
            # After a call of the same method: after another one the clocks would be that method's.
            call()
            tensors.without_gradients()
            clock.flush()
            value = timing.milliseconds(call)
            tensors.without_gradients()
            return value

        return sample

    times = timing.in_turns({name: timer(call) for name, call in calls.items()}, rounds)
    for name, row in found.items():
        row |= rows.percentiles(times[name])
        if data.get("apart"):
            row["gpu_alone"] = of_gpu(calls[name], tensors, rounds)
        what = "head and loss" if shares is None else "log-probabilities and entropies"
        run.row(what, shape=shape, method=name, ignored=ignored, frozen=frozen, **row)
    ours = FORWARD if shares is None else TOKENS[0]
    if device == "cuda" and ours in calls and rounds > 3:
        kernels(run, shape, calls[ours])


def of_gpu(call: Callable[[], Any], tensors: registry.Inputs, rounds: int) -> float:
    """Return the median milliseconds of the GPU if the host is ahead of it."""
    found = []
    for _ in range(rounds):
        found.append(timing.milliseconds(call, is_ahead=True))
        tensors.without_gradients()
    return rows.percentiles(found)["median"]


def kernels(run: Runner, shape: str, call: Callable[[], Any]) -> None:
    """Write the time of each kernel of one step."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    spent: dict[str, list[float]] = {}
    for each in seen.key_averages():
        if each.self_device_time_total > 20:
            held = spent.setdefault(each.key[:100], [0, 0])  # names of kernels can be very long
            held[0] = round(held[0] + each.self_device_time_total / 1e3, 3)
            held[1] += each.count
    run.row("kernels", shape=shape, ms_and_launches=spent)


def main() -> None:
    """Read the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=330)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--shape", nargs="+", help="these shapes alone")
    parser.add_argument("--methods", nargs="+", default=FIRST_METHODS, help="of those shapes")
    parser.add_argument("--peers", nargs="+", default=(), help="shapes with every other library")
    parser.add_argument(
        "--tokens", nargs="*", metavar="SHAPE", help="log-probabilities and entropies"
    )
    parser.add_argument("--token-methods", nargs="+", default=TOKENS)
    parser.add_argument(
        "--unchecked", action="store_true", help="no small cases: rows have errors anyway"
    )
    parser.add_argument("--apart", action="store_true", help="the time of the GPU alone, too")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    run = Runner(given.seconds, given.out)
    has_tokens, has_totals = given.tokens is not None, bool(given.shape or given.peers)
    checks = [check_tokens] if has_tokens else []
    checks += [check] if has_totals or not has_tokens else []
    if not given.unchecked and not all(right(run, device) for right in checks):
        sys.exit("wrong numbers are not timed")
    for shape in given.shape or ():
        if run.left() > LEAST_SECONDS:
            how = {"rounds": given.rounds, "apart": given.apart}
            measure(run, shape, tuple(given.methods), device, **how)
    for shape in (given.tokens or TOKEN_SHAPES) if has_tokens else ():
        for frozen in (False, True):
            if run.left() > LEAST_SECONDS:
                how = {"rounds": given.rounds, "frozen": frozen, "tokens": True}
                measure(run, shape, tuple(given.token_methods), device, **how)
    for shape in given.peers:
        if run.left() > LEAST_SECONDS:
            measure(run, shape, PEERS, device, rounds=given.rounds)
    if has_tokens or has_totals:
        return
    for shape in FIRST:
        if run.left() > LEAST_SECONDS:
            measure(run, shape, FIRST_METHODS, device, rounds=given.rounds)
    if run.left() > 20:
        measure(run, "llama3", (FORWARD, TODAY), device, rounds=3, frozen=True)
    if run.left() > 20:
        measure(run, "llama3", (FORWARD, TODAY), device, rounds=3, ignored=50)
    for shape in HELD_OUT:
        if run.left() > 30:
            measure(run, shape, HELD_OUT_METHODS, device, rounds=3)


if __name__ == "__main__":
    main()
