"""How numbers are made: the correctness gate, peak memory, and interleaved times."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks import rows, timing
from benchmarks.methods import IGNORED, Loss, Method
from benchmarks.registry import Inputs

MIB = 2**20


@dataclass(frozen=True)
class Reference:
    """Loss and gradients with fp32 products and softmax."""

    loss: float
    grad_hidden: Tensor
    grad_weight: Tensor


@torch.no_grad()
def reference(
    data: Inputs, step: int = 8192, shares: tuple[Tensor, Tensor] | None = None
) -> Reference:
    """Compute loss and both gradients in fp32, piece by piece over the vocabulary.

    Args:
        data: of the mean loss of the targets that count.
        step: columns of a piece.
        shares: factors of each row's loss and entropy, for a weighted sum instead.
    """
    hidden, weight, target = data.hidden, data.weight, data.target
    v = weight.shape[0]
    counts = (target != IGNORED).float()
    lse = torch.full(target.shape, -math.inf, device=hidden.device)
    picked = torch.zeros(target.shape, device=hidden.device)
    for first in range(0, v, step):
        z = product(hidden, weight[first : first + step].t())
        lse = torch.logaddexp(lse, z.logsumexp(-1))
        here = (target >= first) & (target < first + z.shape[1])
        picked[here] = z[here, target[here] - first]
    share, of_entropy = shares or (counts / counts.sum(), None)
    entropy = torch.zeros_like(lse)
    if of_entropy is not None:
        for first in range(0, v, step):
            log_p = product(hidden, weight[first : first + step].t()) - lse[:, None]
            entropy -= (log_p.exp() * log_p).sum(-1)
    grad_hidden = torch.zeros_like(hidden, dtype=torch.float32)
    grad_weight = torch.empty(weight.shape, device=weight.device)
    for first in range(0, v, step):
        piece = weight[first : first + step]
        log_p = product(hidden, piece.t()) - lse[:, None]
        g = log_p.exp()
        slant = 0.0
        if of_entropy is not None:
            slant = of_entropy[:, None] * g * log_p.add_(entropy[:, None])
        here = (target >= first) & (target < first + g.shape[1])
        g[here, target[here] - first] -= 1
        g *= share[:, None]
        g -= slant
        grad_hidden += product(g, piece)
        grad_weight[first : first + step] = product(g.t(), hidden)
    total = ((lse - picked) * share).sum()
    if of_entropy is not None:
        total += (entropy * of_entropy).sum()
    return Reference(float(total), grad_hidden, grad_weight)


def product(left: Tensor, right: Tensor) -> Tensor:
    """Return the fp32 product of two matrices.

    On a GPU, tensor cores multiply by a bf16 matrix: products of bf16 numbers are exact in fp32,
    and an fp32 matrix is the sum of three matrices in bf16.
    """
    if right.device.type != "cuda" or right.dtype != torch.bfloat16:
        return left.float() @ right.float()
    total, rest = torch.zeros((), device=left.device), left
    for _ in range(1 if left.dtype == torch.bfloat16 else 3):
        top = rest.bfloat16()
        total = total + torch.mm(top, right, out_dtype=torch.float32)
        rest = rest - top
    return total


def relative_error(got: Tensor | None, wanted: Tensor) -> float:
    """Return the relative Frobenius error, in pieces so that it needs no second fp32 copy."""
    if got is None:
        return math.inf
    off = total = 0.0
    for first in range(0, wanted.shape[0], 16384):
        piece = wanted[first : first + 16384]
        difference = got[first : first + 16384].float() - piece
        off += float(difference.square().sum(dtype=torch.float64))
        total += float(piece.square().sum(dtype=torch.float64))
    return math.sqrt(off / total)


def both(loss: Loss, data: Inputs) -> Tensor:
    """Compute loss and gradients once, from a clean start."""
    data.without_gradients()
    value = loss(data.hidden, data.weight, data.target)
    value.backward()
    return value.detach()


def gate(method: Method, loss: Loss, data: Inputs, wanted: Reference) -> dict[str, Any]:
    """Return a method's errors, and under "failed" why it may not be timed, if it may not."""
    value = float(both(loss, data))
    row: dict[str, Any] = {
        "loss_error": abs(value - wanted.loss) / abs(wanted.loss),
        "grad_hidden_error": relative_error(data.hidden.grad, wanted.grad_hidden),
        "grad_weight_error": relative_error(data.weight.grad, wanted.grad_weight),
    }
    data.without_gradients()
    worst = max(row["grad_hidden_error"], row["grad_weight_error"])
    if not row["loss_error"] <= method.loss_budget:
        allowed = f"{method.loss_budget:.0e} is allowed"
        row["failed"] = f"loss is off by {row['loss_error']:.1e}; {allowed}"
    elif not math.isfinite(worst) or (method.budget is not None and worst > method.budget):
        row["failed"] = f"a gradient is off by {worst:.1e}; {method.budget} is allowed"
    return row


# ------------------------------------------------------------------ memory


def memory(loss: Loss, data: Inputs) -> dict[str, float]:
    """Return peaks in MiB of forward alone, of loss, gradient and both as in training.

    Each is the allocator's peak beyond the bytes allocated when that part began. `both` and
    `gradient` contain the two gradients; `beyond_gradients` is `both` without them.
    """
    if not data.hidden.is_cuda:
        return {}
    for _ in range(2):  # compilation and first-call workspaces
        both(loss, data)
    data.without_gradients()

    def allocated() -> int:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()

    def peak(since: int) -> int:
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - since

    resident = allocated()
    with torch.no_grad():
        loss(data.hidden, data.weight, data.target)
    found = {"forward": peak(resident)}
    resident = allocated()
    value = loss(data.hidden, data.weight, data.target)
    found["loss"] = peak(resident)
    between = allocated()
    value.backward()
    found["gradient"] = peak(between)
    found["both"] = max(found["loss"], found["gradient"] + between - resident)
    gradients = sum(t.numel() * t.element_size() for t in (data.hidden, data.weight))
    found["beyond_gradients"] = found["both"] - gradients
    data.without_gradients()
    return {name: round(size / MIB, 3) for name, size in found.items()}


# ------------------------------------------------------------------ time


def sample(loss: Loss, data: Inputs, clock: timing.Clock) -> dict[str, float]:
    """Time one forward without gradients, and one training forward and backward."""
    clock.flush()
    with torch.no_grad():
        marks = [clock.mark()]
        loss(data.hidden, data.weight, data.target)
        marks.append(clock.mark())
    data.without_gradients()
    clock.flush()
    marks.append(clock.mark())
    value = loss(data.hidden, data.weight, data.target)
    marks.append(clock.mark())
    value.backward()
    marks.append(clock.mark())
    return {
        "forward_ms": clock.between(marks[0], marks[1]),
        "loss_ms": clock.between(marks[2], marks[3]),
        "gradient_ms": clock.between(marks[3], marks[4]),
        "both_ms": clock.between(marks[2], marks[4]),
    }


def interleaved(
    losses: dict[str, Loss], data: Inputs, repeats: int, device: str
) -> dict[str, dict[str, Any]]:
    """Time every method in turn, `repeats` rounds; return median, p20 and p80 per part."""
    clock = timing.Clock(device)
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in losses}
    for loss in losses.values():
        for _ in range(2):
            sample(loss, data, clock)
    for _ in range(repeats):
        for name, loss in losses.items():
            samples[name].append(sample(loss, data, clock))
    data.without_gradients()
    return {
        name: {part: rows.percentiles([s[part] for s in found]) for part in found[0]}
        for name, found in samples.items()
    }


def product_ms(data: Inputs, repeats: int, device: str) -> dict[str, float]:
    """Time the library's product hidden @ weight.T, the unit to count every method in."""
    clock, samples = timing.Clock(device), []
    hidden, weight = data.hidden.detach(), data.weight.detach()
    hidden @ weight.t()
    for _ in range(repeats):
        clock.flush()
        start = clock.mark()
        hidden @ weight.t()
        samples.append(clock.between(start, clock.mark()))
    return rows.percentiles(samples)
