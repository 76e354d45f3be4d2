"""One training loop for the ablations that train small models: batches in, a curve out.

The recipe (model, text, optimizer, schedule, validation) is that of `training.py`; here the model
may be changed between steps, and a run may start from another run's weights and optimizer state.
"""

from __future__ import annotations

import math
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import ROOT
from benchmarks.methods import registered
from benchmarks.models import training
from benchmarks.tiles import wide_product

Report = Callable[[dict[str, Any]], None]


def ensure_corpus(folder: Path, arguments: list[str]) -> None:
    """Build the text with these arguments of corpus.py, unless the folder has it."""
    if not (folder / "corpus.json").exists():
        command = [
            sys.executable,
            str(ROOT / "benchmarks" / "data" / "corpus.py"),
            "--folder",
            str(folder),
            *arguments,
        ]
        subprocess.run(command, check=True)


def compile_whole(model: Any, backend: str, inner: str) -> None:
    """Compile a model in place with "memeff" or "inductor"; leave it eager if inner is "none"."""
    if inner == "none":
        return
    if backend == "memeff":
        registered()
        model.compile(backend="memeff", options={"memeff.inner": inner})
    else:
        model.compile(backend=inner)


def rewrites() -> dict[str, int]:
    """Return how often each pass rewrote something, as the report counts."""
    from memeff_compile import last_report

    found: dict[str, int] = {}
    for record in last_report().records:
        if record.action == "rewrote":
            found[record.pass_name] = found.get(record.pass_name, 0) + record.sites
    return found


@torch.no_grad()
def judge(model: Any, tokens: training.Tokens, batches: int, device: str) -> dict[str, float]:
    """Return mean loss and share of right next tokens on the first batches of held-out text.

    The trunk runs uncompiled; the products of the head have fp32 results.
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    right = torch.zeros((), dtype=torch.int64, device=device)
    count = 0
    weight = model.lm_head.weight.bfloat16()
    for number in range(min(batches, len(tokens.rows) // tokens.batch)):
        ids = tokens[number * tokens.batch : (number + 1) * tokens.batch]
        with training.autocast(device):
            hidden = model.model(input_ids=ids).last_hidden_state
        flat = hidden[:, :-1].reshape(-1, hidden.shape[-1]).bfloat16()
        targets = ids[:, 1:].reshape(-1)
        for part, wanted in zip(flat.split(8192), targets.split(8192), strict=True):
            logits = wide_product(part, weight)
            total += F.cross_entropy(logits, wanted, reduction="sum")
            right += (logits.argmax(-1) == wanted).sum()
        count += len(flat)
    return {"loss": float(total) / count, "accuracy": int(right) / count, "tokens": count}


@dataclass
class Loop:
    """A model in training.

    Attributes:
        batch_of: returns the (batch, length) token ids of a step.
        held_out: text to validate on.
        report: called with {"step", "loss": [...], "validation"} as the run goes.
        after_step: called with the number of steps done after each, and after its validation.
        deadline: time.monotonic() at which to stop with `training.OutOfTime`.
    """

    model: Any
    recipe: training.Recipe
    device: str
    batch_of: Callable[[int], Tensor]
    held_out: training.Tokens
    report: Report
    after_step: Callable[[int], None] = lambda done: None
    deadline: float = math.inf

    def __post_init__(self) -> None:
        self.optimizer = training.optimizer_for(self.model, self.recipe, self.device)
        self.first_step_s = self.seconds = 0.0

    def validate(self) -> float:
        """Return the validation loss on the few batches of the curve."""
        batches = self.recipe.validation_batches
        return judge(self.model, self.held_out, batches, self.device)["loss"]

    def run(self, first: int, last: int) -> None:
        """Do the steps first .. last - 1."""
        recipe, started = self.recipe, time.perf_counter()
        losses = torch.zeros(last, device=self.device)
        reported = first
        for step in range(first, last):
            if step % 10 == 0 and time.monotonic() > self.deadline:
                raise training.OutOfTime(f"stopped at step {step} of {recipe.steps}")
            for group in self.optimizer.param_groups:
                group["lr"] = training.learning_rate(recipe, step)
            ids = self.batch_of(step)
            with training.autocast(self.device):
                loss = self.model(input_ids=ids, labels=ids).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), recipe.clip)
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses[step] = loss.detach()
            if step == first:
                losses[step].item()
                self.first_step_s = time.perf_counter() - started
            if (step + 1) % recipe.validate_every == 0 or step + 1 == last:
                curve = losses[reported : step + 1].cpu().split(recipe.train_every)
                thin = [round(float(part.mean()), 5) for part in curve]
                held = round(self.validate(), 5)
                self.report({"step": step + 1, "loss": thin, "validation": held})
                reported = step + 1
            self.after_step(step + 1)
        self.seconds = time.perf_counter() - started

    def state(self) -> dict[str, Any]:
        """Return weights and optimizer state, to start other runs from."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        """Take up weights and optimizer state."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
