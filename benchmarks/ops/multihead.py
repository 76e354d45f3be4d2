"""nn.MultiheadAttention, forward and backward, by backends in turn: weights unread, masks.

    python benchmarks/ops/multihead.py
    python benchmarks/ops/multihead.py --size cpu --case weights padding --repeats 15
    python benchmarks/ops/multihead.py --size tiny --inner eager

Before anything is timed, each backend's output and input gradient are compared with the module in
fp64: they may be off by half as much again as eager's. Memory is the allocator's peak beyond the
bytes before the step, on a GPU.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks import RESULTS, rows, timing

BUDGET = 1.5
SIZES: dict[str, dict[str, Any]] = {
    "full": {"batch": 8, "length": 2048, "width": 1024, "heads": 16, "dtype": "bfloat16"},
    "cpu": {"batch": 4, "length": 512, "width": 512, "heads": 8, "dtype": "float32"},
    "tiny": {"batch": 2, "length": 16, "width": 32, "heads": 4, "dtype": "float32"},
}
CASES = ("plain", "weights", "causal", "padding", "weights and padding", "both")


def call(module: nn.Module, case: str, x: Tensor, taken: Tensor) -> Tensor:
    """Call the module as the case says."""
    given: dict[str, Any] = {"need_weights": case.startswith("weights")}
    if case in ("causal", "both"):
        length = x.shape[1]
        given["attn_mask"] = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
    if case in ("padding", "weights and padding", "both"):
        given["key_padding_mask"] = taken
    out: Tensor = module(x, x, x, **given)[0]
    return out


class Run:
    """One case on one backend, and its cost until now."""

    def __init__(self, backend: str, case: str, module: nn.Module, inner: str) -> None:
        self.backend, self.module = backend, module

        def step(x: Tensor, taken: Tensor) -> Tensor:
            return call(module, case, x, taken)

        options = {"memeff.inner": inner} if backend == "memeff" and inner else None
        self.forward: Callable[..., Tensor] = (
            step if backend == "eager" else torch.compile(step, backend=backend, options=options)
        )
        self.samples: list[float] = []
        self.peak = 0
        self.row: dict[str, Any] = {}

    def once(self, x: Tensor, taken: Tensor) -> list[Tensor]:
        """Run forward and backward; return output and input gradient."""
        x = x.detach().requires_grad_()
        self.module.zero_grad(set_to_none=True)
        out = self.forward(x, taken)
        out.backward(torch.ones_like(out))
        assert x.grad is not None
        return [out.detach(), x.grad]

    def timed(self, x: Tensor, taken: Tensor) -> None:
        """Run once, and count time and memory."""
        self.module.zero_grad(set_to_none=True)
        held = torch.cuda.memory_allocated() if x.is_cuda else 0
        took, peak = timing.with_peak(lambda: self.once(x, taken), is_cuda=x.is_cuda)
        self.samples.append(took)
        self.peak = max(self.peak, peak - held)


def distance(found: list[Tensor], wanted: list[Tensor]) -> float:
    """Return the larger relative Frobenius distance."""
    pairs = zip(found, wanted, strict=True)
    return max(float((f.double() - w).norm() / w.norm()) for f, w in pairs)


def measure(case: str, given: argparse.Namespace) -> list[dict[str, Any]]:
    """Check and time the backends in turn; return their rows."""
    import memeff_compile

    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = SIZES[given.size]
    dtype = getattr(torch, sizes["dtype"])
    memeff_compile.reset()
    torch._dynamo.reset()
    torch.manual_seed(0)
    exact = nn.MultiheadAttention(
        sizes["width"], sizes["heads"], batch_first=True, device=device, dtype=dtype
    ).double()
    shape = (sizes["batch"], sizes["length"])
    x = torch.randn(*shape, sizes["width"], device=device).to(dtype)
    taken = torch.zeros(shape, dtype=torch.bool, device=device)
    taken[::2, shape[1] // 2 :] = True  # every other sequence is half as long
    # One sequence after the other: fp64 scores of all at once would not fit.
    parts = [
        Run("eager", case, exact, "").once(x[i : i + 1].double(), taken[i : i + 1])
        for i in range(shape[0])
    ]
    wanted = [torch.cat(pieces) for pieces in zip(*parts, strict=True)]
    module = copy.deepcopy(exact).to(dtype)
    del exact, parts
    runs = [Run(backend, case, module, given.inner) for backend in ("eager", *given.backend)]
    for run in runs:
        run.row["error"] = distance(run.once(x, taken), wanted)
    good = [run for run in runs if run.row["error"] <= BUDGET * runs[0].row["error"]]
    del wanted
    for run in good:
        run.once(x, taken)
    for _ in range(given.repeats):
        for run in good:
            run.timed(x, taken)
    found = []
    for run in runs:
        row: dict[str, Any] = {"what": "multihead", "case": case, "backend": run.backend, **sizes}
        row |= run.row
        if run in good:
            row["ms"] = rows.percentiles(run.samples)
            if x.is_cuda:
                row["peak_mib"] = round(run.peak / 2**20, 1)
        if run.backend == "memeff":
            row["records"] = [
                f"{r.pass_name}: {r.code}" for r in memeff_compile.last_report().records
            ]
        found.append(row)
    return found


def main() -> None:
    """Measure each case and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--backend", nargs="+", default=["inductor", "memeff"])
    parser.add_argument("--size", choices=tuple(SIZES), default="full")
    parser.add_argument("--inner", default="", help="memeff.inner")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--out", type=Path, default=RESULTS / "multihead.jsonl")
    given = parser.parse_args()
    table = []
    for case in given.case:
        for row in measure(case, given):
            rows.write(given.out, row)
            time_ms = row.get("ms", {}).get("median", "failed")
            table.append((case, row["backend"], time_ms, row.get("peak_mib", "-"), row["error"]))
    print(f"{'case':22}{'backend':12}{'ms':>12}{'peak MiB':>12}{'error':>12}")
    for case, backend, time_ms, peak, error in table:
        print(f"{case:22}{backend:12}{time_ms!s:>12}{peak!s:>12}{error:12.2e}")


if __name__ == "__main__":
    main()
