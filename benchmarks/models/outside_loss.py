"""The loss outside the model: the allocations of a training step, and its time.

    python benchmarks/models/outside_loss.py --out benchmarks/results/outside-loss.jsonl

A Llama-3.2-1B shape (random weights, bf16, gradient checkpointing) is called without labels, and
the loss is computed from ``out.logits``: shifted cross entropy as in a plain loop, or the label
smoother of the transformers Trainer. For each loss and backend one row: peak memory of the steps,
the blocks that the allocator handed out in one of them (from its own recorded history), the
bytes of the logits, and ms per step; the backends take turns, and each compiles the model once for
all losses. First the loss and the gradients are compared with eager's; a row has figures only if
they agree. With memeff the row also has the report's counts: losses that used the fused op, and
products that computed logits.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from torch import Tensor
from torch.nn import functional as F

from benchmarks import RESULTS, rows, timing
from benchmarks.models import models

Loss = Callable[[Any, Tensor], Tensor]

# Of bf16 against bf16: two roundings of the same numbers.
LOSS_BOUND, GRADIENT_BOUND = 2e-3, 5e-2


def cross_entropy(out: Any, ids: Tensor) -> Tensor:
    """Compute the loss of a plain loop."""
    logits = out.logits[..., :-1, :].contiguous()
    return F.cross_entropy(logits.view(-1, logits.shape[-1]).float(), ids[:, 1:].reshape(-1))


def label_smoothing(out: Any, ids: Tensor) -> Tensor:
    """Compute the loss of a Trainer with label_smoothing_factor."""
    from transformers.trainer_pt_utils import LabelSmoother

    return LabelSmoother(epsilon=0.1)(out, ids, shift_labels=True)


LOSSES: dict[str, Loss] = {"cross_entropy": cross_entropy, "label_smoothing": label_smoothing}


class Step:
    """The training step of one backend: its compiled model, and a loss."""

    def __init__(self, model: Any, run: Callable[..., Any], loss: Loss) -> None:
        self.model, self.run, self.loss = model, run, loss

    def __call__(self, ids: Tensor) -> Tensor:
        loss = self.loss(self.run(input_ids=ids), ids)
        loss.backward()
        self.model.zero_grad(set_to_none=True)
        return loss.detach()


def build(name: str, device: str) -> Any:
    """Build the model for training with non-reentrant gradient checkpointing."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            models.config(name), dtype=torch.bfloat16, attn_implementation="sdpa"
        )
    model.train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.config.use_cache = False
    return model


def disagreement(model: Any, step: Step, loss: Loss, ids: Tensor) -> dict[str, float]:
    """Return how far loss and gradients are from eager's, relatively."""
    found = []
    for run in (model, step.run):
        value = loss(run(input_ids=ids), ids)
        value.backward()
        grads = [p.grad.float() for p in model.parameters() if p.grad is not None]
        found.append((float(value.detach()), grads))
        model.zero_grad(set_to_none=True)
    (eager, wanted), (ours, grads) = found
    off = sum(float((g - w).square().sum()) for g, w in zip(grads, wanted, strict=True))
    total = sum(float(w.square().sum()) for w in wanted)
    return {"loss": abs(ours - eager) / abs(eager), "gradients": (off / total) ** 0.5}


def blocks(step: Step, ids: Tensor) -> dict[str, int] | None:
    """Return how many blocks of which MiB, from 1 MiB on, one step asked the allocator for."""
    if not ids.is_cuda:
        return None
    torch.cuda.synchronize()
    torch.cuda.memory._record_memory_history(context=None, max_entries=1_000_000)
    step(ids)
    torch.cuda.synchronize()
    snapshot = torch.cuda.memory._snapshot()
    torch.cuda.memory._record_memory_history(enabled=None)
    traces = [entry for device in snapshot["device_traces"] for entry in device]
    sizes = [entry["size"] for entry in traces if entry["action"] == "alloc"]
    counts = Counter(size for size in sizes if size >= 2**20)
    return {f"{size / 2**20:.3f}": count for size, count in sorted(counts.items(), reverse=True)}


def measure(
    name: str, losses: list[str], backends: list[str], steps: int
) -> Iterator[dict[str, Any]]:
    """Check and measure every loss and backend on one model; yield a row for each."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    batch, length = models.SHAPES[name]
    model = build(name, device)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, model.config.vocab_size, (batch, length), generator=generator).to(device)
    compiled = {
        backend: model if backend == "eager" else torch.compile(model, backend=backend)
        for backend in backends
    }
    for loss in losses:
        facts = {
            "what": "training step, loss outside",
            "model": name,
            "loss": loss,
            "batch": batch,
            "length": length,
            "logits_bytes": batch * length * model.config.vocab_size * 2,
        }
        taking = {backend: Step(model, run, LOSSES[loss]) for backend, run in compiled.items()}
        yield from compare(model, taking, ids, steps, facts)


def compare(
    model: Any, taking: dict[str, Step], ids: Tensor, steps: int, facts: dict[str, Any]
) -> list[dict[str, Any]]:
    """Return the rows of one loss: the backends that agree with eager, step by step in turn."""
    found, runs = [], {}
    for backend, step in taking.items():
        off = disagreement(model, step, step.loss, ids)
        row = facts | {
            "backend": backend,
            "off_eager": {key: float(f"{value:.2e}") for key, value in off.items()},
            "agrees": off["loss"] <= LOSS_BOUND and off["gradients"] <= GRADIENT_BOUND,
        }
        found.append(row)
        if row["agrees"]:
            before = _uses() if backend == "memeff" else None
            row["value"] = float(step(ids))
            if before is not None:
                after = _uses()
                row["fused_outside"], row["computed"] = after[0] - before[0], after[1] - before[1]
            row["blocks_mib"] = blocks(step, ids)
            runs[backend] = (step, row, [], [])
    for _ in range(steps):
        for step, _, samples, peaks in runs.values():
            ms, peak = timing.with_peak(lambda step=step: step(ids), is_cuda=ids.is_cuda)
            samples.append(ms)
            peaks.append(peak)
    for _, row, samples, peaks in runs.values():
        row |= {"ms": rows.percentiles(samples), "peak_gib": round(max(peaks) / 2**30, 3)}
        if row["blocks_mib"]:
            row["largest_block_mib"] = max(map(float, row["blocks_mib"]))
            # Nine tenths: the shift drops a position, and a copy of the rest would count.
            row["logits_allocated"] = row["largest_block_mib"] > 0.9 * row["logits_bytes"] / 2**20
    return found


def _uses() -> tuple[int, int]:
    """Return, of the last report: losses outside that were fused, products that made logits."""
    import memeff_compile

    uses = [g.logits for g in memeff_compile.last_report().graphs if g.logits is not None]
    return sum(use.calls for use in uses), sum(use.products for use in uses)


def main() -> None:
    """Measure each loss and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="llama3.2-1b", choices=list(models.SHAPES))
    parser.add_argument("--loss", nargs="+", default=list(LOSSES), choices=list(LOSSES))
    parser.add_argument("--backend", nargs="+", default=["inductor", "memeff"])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS / "outside-loss.jsonl")
    given = parser.parse_args()
    for row in measure(given.model, given.loss, given.backend, given.steps):
        rows.write(given.out, row)
        largest = row.get("largest_block_mib", 0)
        print(
            f"{row['loss']:16} {row['backend']:9} agrees {row['agrees']!s:5} "
            f"peak {row.get('peak_gib', 0):7.3f} GiB  largest block {largest:8.1f} MiB "
            f"(logits {row['logits_bytes'] / 2**20:.1f})  "
            f"{row.get('ms', {}).get('median', 0):8.1f} ms",
            file=sys.stderr,
        )


if __name__ == "__main__":
    main()
