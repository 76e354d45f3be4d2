"""The effect of a loss on a real model that is fine-tuned: curves over seeds, on text of this
machine.

    python benchmarks/models/fine_tuning.py train --model FOLDER --every-depth
    python benchmarks/models/fine_tuning.py table --out FILE

FOLDER is a causal model with its tokenizer, as `from_pretrained` takes it. fp32 weights, bf16
autocast, AdamW; headers and prose that Python packages bring along, of which one file in eight is
judged on. A seed decides the order of the text, the same for every method. "apple" is Apple's loss
with its filter after a compiled model, if it is installed. A run is a row; complete ones are left
out.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks import RESULTS, methods, rows
from benchmarks.data.corpus import roots, texts
from benchmarks.methods import MODEL_METHODS, apple
from benchmarks.models import training
from benchmarks.models.causal_attention import use_causal_attention

BASE, THEIRS = "inductor", "apple"
METHODS = (BASE, "exact", "mass", "block", THEIRS)
WARM_UP, CLIP, SHARE, THINNED = 10, 1.0, 8, 5

Step = Callable[[Tensor], Tensor]
"""From token ids (B, T) to a loss."""


class Text:
    """Sequences of tokens on a device: those to train on, and those to judge by."""

    def __init__(self, given: argparse.Namespace, device: str) -> None:
        from transformers import AutoTokenizer

        self.batch = given.batch
        tokenizer = AutoTokenizer.from_pretrained(given.model)
        wanted = {"train": given.steps * given.batch, "validation": given.judged}
        kept: dict[str, list[int]] = {split: [] for split in wanted}
        for found in texts("other", given.root or roots(), 1 << 40, SHARE):
            if len(kept[found.split]) < wanted[found.split] * given.length:
                kept[found.split] += tokenizer(found.content, add_special_tokens=False).input_ids
            elif all(len(kept[split]) >= wanted[split] * given.length for split in wanted):
                break
        for split, count in wanted.items():
            if len(kept[split]) < count * given.length:
                raise SystemExit(f"{len(kept[split])} tokens of text were found for {split}")
        self.train, self.judged = (
            torch.tensor(kept[split][: count * given.length], device=device).view(count, -1)
            for split, count in wanted.items()
        )

    def batches(self, seed: int) -> Tensor:
        """Return all of the text in the order of a seed, batch by batch."""
        order = torch.randperm(len(self.train), generator=torch.Generator().manual_seed(seed))
        return self.train[order.to(self.train.device)].view(-1, self.batch, self.train.shape[1])


def load(given: argparse.Namespace, device: str) -> Any:
    """Return the model in fp32, with causal attention that needs no mask tensor."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32)
    model.config.use_cache = False
    model.set_attn_implementation(use_causal_attention())
    return model.to(device).train()


def step_of(model: Any, method: str, inner: str) -> Step:
    """Compile a model for a method; return a function that computes its loss."""
    if method != THEIRS:
        methods.compile_model(model, method, {}, inner)
        return lambda ids: model(input_ids=ids, labels=ids).loss
    model.model.compile(backend=inner)
    loss = apple("auto")

    def step(ids: Tensor) -> Tensor:
        hidden = model.model(input_ids=ids).last_hidden_state[:, :-1].flatten(0, 1).bfloat16()
        weight = model.lm_head.weight.bfloat16()
        return loss(hidden, weight, ids[:, 1:].flatten())

    return step


def train_once(
    model: Any, step: Step, start: dict[str, Tensor], text: Text, seed: int, given: Any
) -> dict[str, Any]:
    """Fine-tune from the start in one order of the text; return losses and the improvement."""
    model.load_state_dict(start)
    device = text.train.device.type
    fused = device == "cuda"
    optimizer = torch.optim.AdamW(model.parameters(), lr=given.rate, fused=fused)
    losses = torch.zeros(given.steps, device=device)
    for number, ids in enumerate(text.batches(seed)):
        for group in optimizer.param_groups:
            group["lr"] = given.rate * min(1.0, (number + 1) / WARM_UP)
        with training.autocast(device):
            loss = step(ids)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        losses[number] = loss.detach()
    curve = [round(float(part.mean()), 5) for part in losses.cpu().split(THINNED)]
    return {"loss": curve, "validation": judge(model, text)}


def judge(model: Any, text: Text) -> float:
    """Return the mean loss of a token that was not trained on, the same way for every method."""
    batches = text.judged.split(text.batch)
    return round(training.validate(model, batches, text.judged.device.type), 6)


def measure(given: argparse.Namespace) -> int:
    """Train each method with each seed; return how many methods failed."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if given.every_depth:
        from memeff_compile.kernels._gradient_filter import levels as gradient_filter

        gradient_filter.LEAST_DEPTH = 8
    text, failed, began = Text(given, device), 0, time.monotonic()
    facts: dict[str, Any] = {"what": "fine-tuning", "model": given.model.name}
    facts |= {name: getattr(given, name) for name in ("steps", "batch", "length", "rate")}
    facts["every_depth"] = given.every_depth
    for method in given.method:
        waiting = [seed for seed in given.seed if not _is_there(given.out, facts, method, seed)]
        if not waiting:
            continue
        torch.compiler.reset()
        model = load(given, device)
        start = {name: part.clone() for name, part in model.state_dict().items()}
        before = judge(model, text)
        try:
            step = step_of(model, method, given.inner)
            for seed in waiting:
                if time.monotonic() - began > given.budget:
                    break
                started, fused = time.perf_counter(), methods.rewrites(method)
                found = train_once(model, step, start, text, seed, given)
                found |= {"before": before, "seconds": round(time.perf_counter() - started, 1)}
                found["rewrites"] = None if fused is None else methods.rewrites(method)
                print(method, seed, found["validation"], found["seconds"], "s", flush=True)
                if given.save is not None:
                    save(model, given.save / f"{given.model.name}+{method}-{seed}", given.model)
                row = {**facts, "method": method, "seed": seed, **found}
                rows.append(given.out, {**row, **rows.environment()})
        except Exception as problem:
            failed += 1
            print(f"{method}: {type(problem).__name__}: {problem}"[:400], flush=True)
    return failed


def save(model: Any, folder: Path, tokenizer: Path) -> None:
    """Write a fine-tuned model, which `task_scores.py` takes as a mode of the one it was."""
    from transformers import AutoTokenizer

    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)


def _is_there(path: Path, facts: dict[str, Any], method: str, seed: int) -> bool:
    wanted = {**facts, "method": method, "seed": seed}
    found = rows.read(path) if path.exists() else []
    return any(all(row.get(name) == fact for name, fact in wanted.items()) for row in found)


def summary(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return, by method, the improvement: mean, deviation, and the spread of seeds' differences
    from BASE.

    Runs of one seed have the same text in the same order, so differences are taken seed by seed.
    """
    final: dict[str, dict[int, float]] = {}
    for row in found:
        final.setdefault(row["method"], {})[row["seed"]] = row["validation"]
    table, base = [], final.get(BASE, {})
    for method, values in final.items():
        paired = [value - base[seed] for seed, value in values.items() if seed in base]
        table.append(
            {
                "method": method,
                "seeds": len(values),
                "validation": statistics.mean(values.values()),
                "deviation": statistics.stdev(values.values()) if len(values) > 1 else None,
                "beyond_base": statistics.mean(paired) if paired else None,
                "most": max(paired, key=abs) if paired else None,
            }
        )
    return table


def show(given: argparse.Namespace) -> int:
    """Print the summary of a file of rows."""
    print("| loss | seeds | judged (deviation) | beyond Inductor's, seed by seed | the most |")
    print("|---|---:|---:|---:|---:|")
    for row in summary(rows.read(given.out)):
        spread = "-" if row["deviation"] is None else f"{row['deviation']:.5f}"
        away = ["-" if row[key] is None else f"{row[key]:+.5f}" for key in ("beyond_base", "most")]
        shown = [f"`{row['method']}`", str(row["seeds"]), f"{row['validation']:.5f} ({spread})"]
        print(f"| {' | '.join([*shown, *away])} |")
    return 0


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=["train", "table"])
    parser.add_argument("--model", type=Path, help="a folder that from_pretrained takes")
    known = [*MODEL_METHODS, THEIRS]
    parser.add_argument("--method", nargs="+", choices=known, default=METHODS)
    parser.add_argument("--seed", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--judged", type=int, default=32, help="sequences that are not trained on")
    parser.add_argument("--rate", type=float, default=5e-5)
    parser.add_argument("--every-depth", action="store_true", help="filter rows of any length")
    parser.add_argument("--root", type=Path, nargs="+", help="folders to take the text from")
    parser.add_argument("--inner", default="inductor", help="aot_eager where no compiler is")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds")
    parser.add_argument("--save", type=Path, help="a folder for the models; never commit it")
    parser.add_argument("--out", type=Path, default=RESULTS / "fine-tuning.jsonl")
    given = parser.parse_args()
    if given.action == "table":
        return show(given)
    if given.model is None:
        parser.error("--model is needed: a folder of weights and a tokenizer")
    return measure(given)


if __name__ == "__main__":
    sys.exit(main())
