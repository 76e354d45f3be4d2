"""The op alone: forward and forward + backward, time, peak memory and gradient error.

    python benchmarks/linear_cross_entropy.py --shape gemma2 llama3 llama1b --workspace auto 64MiB

Data is "peaked": every row has a few likely tokens, as in a trained model. Memory is the peak
beyond what was resident, minus the two gradients. Errors are relative Frobenius norms against
products and softmax in fp32, vocabulary piece by piece. Methods are interleaved in one process.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent))
import rows

from memeff_compile.kernels import linear_cross_entropy as op_folder

SHAPES = {
    "gemma2": (8192, 2304, 256000),
    "llama3": (8192, 4096, 128256),
    "llama1b": (16384, 2048, 128256),
    "tiny": (128, 32, 512),
}
UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def data(shape: str, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Draw hidden states that are mixtures of vocabulary rows, so that a few tokens are likely."""
    n, d, v = SHAPES[shape]
    generator = torch.Generator(device=device).manual_seed(1)
    weight = torch.randn(v, d, device=device, generator=generator) / math.sqrt(d)
    weight = weight.bfloat16()
    hidden = torch.empty(n, d, device=device, dtype=torch.bfloat16)
    target = torch.empty(n, device=device, dtype=torch.int64)
    for first in range(0, n, 1024):
        span = slice(first, min(first + 1024, n))
        count = span.stop - span.start
        uniform = torch.rand(count, 16, device=device, generator=generator)
        ids = (torch.exp(uniform * math.log(v)) - 1).long().clamp_(0, v - 1)
        decay = torch.arange(16, device=device) * torch.rand(
            count, 1, device=device, generator=generator
        )
        amount = (16.0 - decay).clamp_min(0.0)
        hidden[span] = torch.einsum("nk,nkd->nd", amount, weight[ids].float()).bfloat16()
        scores = torch.einsum("nd,nkd->nk", hidden[span].float(), weight[ids].float())
        pick = torch.multinomial(scores.softmax(-1), 1, generator=generator)
        target[span] = ids.gather(1, pick).squeeze(1)
    return hidden, weight, target


def reference(hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[float, Tensor, Tensor]:
    """Compute loss and both gradients with fp32 products, piece by piece."""
    n, v = hidden.shape[0], weight.shape[0]
    wide, step = hidden.float(), 8192
    lse = torch.full((n,), -math.inf, device=hidden.device)
    picked = torch.zeros(n, device=hidden.device)
    for first in range(0, v, step):
        z = wide @ weight[first : first + step].float().t()
        lse = torch.logaddexp(lse, z.logsumexp(-1))
        here = (target >= first) & (target < first + z.shape[1])
        picked[here] = z[here, target[here] - first]
    grad_hidden = torch.zeros_like(wide)
    grad_weight = torch.empty(weight.shape, device=weight.device)
    for first in range(0, v, step):
        piece = weight[first : first + step].float()
        g = (wide @ piece.t() - lse[:, None]).exp_()
        here = (target >= first) & (target < first + g.shape[1])
        g[here, target[here] - first] -= 1
        g /= n
        grad_hidden += g @ piece
        grad_weight[first : first + step] = g.t() @ wide
    return float((lse - picked).mean()), grad_hidden, grad_weight


def ours(workspace: str) -> Loss:
    """Return the op as a mean loss."""
    unit = next((u for u in UNITS if workspace.endswith(u)), "")
    size = (
        0 if workspace == "auto" else int(float(workspace.removesuffix(unit)) * UNITS.get(unit, 1))
    )

    def loss(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        nll, *_ = op_folder.linear_cross_entropy(
            hidden,
            weight,
            None,
            target,
            None,
            ignore_index=-100,
            scale=1.0,
            softcap=0.0,
            with_lse=False,
            with_logit_sum=False,
            gradient_filter="exact",
            workspace=size,
        )
        return nll.mean()

    return loss


def eager(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """The usual two lines."""
    return F.cross_entropy(F.linear(hidden, weight).float(), target)


def timed(run: Callable[[], Any], repeats: int, device: str) -> dict[str, float]:
    """Time ``run`` with device events."""
    import time

    samples = []
    for _ in range(repeats):
        if device == "cuda":
            start, end = torch.cuda.Event(True), torch.cuda.Event(True)
            start.record()
            run()
            end.record()
            end.synchronize()
            samples.append(start.elapsed_time(end))
        else:
            started = time.perf_counter()
            run()
            samples.append((time.perf_counter() - started) * 1e3)
    return rows.percentiles(samples)


def main() -> None:
    """Measure every method on every shape."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", nargs="+", default=["gemma2", "llama3"])
    parser.add_argument("--workspace", nargs="+", default=["auto"])
    parser.add_argument("--method", nargs="*", default=["eager", "inductor"])
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument(
        "--out", type=Path, default=Path("benchmarks/results/linear_cross_entropy.jsonl")
    )
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cuda.matmul.allow_tf32 = False
    methods: dict[str, Loss] = {f"memeff H, workspace {w}": ours(w) for w in given.workspace}
    if "eager" in given.method:
        methods["eager"] = eager
    if "inductor" in given.method:
        methods["inductor"] = torch.compile(eager, dynamic=False)
    for shape in given.shape:
        hidden, weight, target = data(shape, device)
        wanted = reference(hidden, weight, target)
        hidden.requires_grad_(True)
        weight.requires_grad_(True)
        for name, method in methods.items():
            n, d, v = SHAPES[shape]
            row: dict[str, Any] = {"what": "linear cross entropy", "shape": shape, "method": name}
            row |= {"N": n, "D": d, "V": v, "data": "peaked", "dtype": "bfloat16"}
            try:
                row |= measure(method, hidden, weight, target, wanted, given.repeats)
            except torch.cuda.OutOfMemoryError as problem:
                row["error"] = str(problem)[:100]
            rows.write(given.out, row)
        hidden = weight = target = wanted = None


def measure(
    method: Loss,
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    wanted: tuple[float, Tensor, Tensor],
    repeats: int,
) -> dict[str, Any]:
    """Return errors, memory and times of one method."""

    def both() -> Tensor:
        hidden.grad = weight.grad = None
        loss = method(hidden, weight, target)
        loss.backward()
        return loss.detach()

    def forward() -> Tensor:
        with torch.no_grad():
            return method(hidden, weight, target)

    row: dict[str, Any] = {"loss_error": abs(both().item() - wanted[0]) / wanted[0]}
    row["grad_hidden_error"] = error(hidden.grad, wanted[1])
    row["grad_weight_error"] = error(weight.grad, wanted[2])
    hidden.grad = weight.grad = None
    if hidden.is_cuda:
        torch.cuda.synchronize()
        resident = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        both()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - resident
        gradients = (hidden.numel() + weight.numel()) * 2
        row["mib_beyond_gradients"] = round((peak - gradients) / 2**20, 1)
    row["forward_ms"] = timed(forward, repeats, hidden.device.type)
    row["both_ms"] = timed(both, repeats, hidden.device.type)
    hidden.grad = weight.grad = None
    return row


def error(grad: Tensor | None, wanted: Tensor) -> float:
    """Return the relative Frobenius error, in pieces so that it needs no second fp32 copy."""
    assert grad is not None
    off = total = 0.0
    for first in range(0, wanted.shape[0], 16384):
        piece = wanted[first : first + 16384]
        off += float(
            (grad[first : first + 16384].float() - piece).square().sum(dtype=torch.float64)
        )
        total += float(piece.square().sum(dtype=torch.float64))
    return math.sqrt(off / total)


if __name__ == "__main__":
    main()
