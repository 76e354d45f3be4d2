"""Scores of real models in tasks, under every lossy mode.

    python benchmarks/quality/task_scores.py measure --models FOLDER [FOLDER ...]

FOLDER is an argument of `from_pretrained`. Tasks are those of tasks.py; all modes answer the same
items. A row has a model, a task, a seed and a mode, and says of each item whether it was right, so
that a mode is compared with the exact model item by item. Rows that are there already are not
measured again: after --budget seconds, or when it was stopped, the command goes on where its rows
end.

A cache takes the text before the question as the prompt, which attends exactly; the question and
the answer, in pieces of 64 tokens, read the cache. Attention in low bits and weights of fewer bits
take everything in one go.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
import traceback
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import memeff_compile
from benchmarks import RESULTS, rows
from benchmarks.quality import tasks, texts
from benchmarks.quality.modes import CALIBRATED, Mode, modes
from benchmarks.quality.subject import Lowered, Subject
from memeff_compile.errors import MemeffError

PIECE = 64
LEFT_OUT = ("max_norm", "groups of 32", "three quarters on, slerp, t 0.5", "half on, slerp, t 0.6")
"""Parts of names of modes that perplexity tells from others well enough."""
EXACT = Mode("exact")
CALIBRATION = (448, 4)
"""Length and number of texts that levels of attention are chosen on."""


def chosen(layers: int, given: argparse.Namespace) -> list[Mode]:
    """Return the modes to measure, the exact model first."""
    found = [mode for mode in modes(layers) if not any(part in mode.name for part in LEFT_OUT)]
    if given.modes:
        found = [mode for mode in found if any(part in mode.name for part in given.modes)]
    return [EXACT, *found]


class Answering:
    """A model that answers items under a mode.

    Args:
        subject: the model.
        mode: how.
        coded: whether weights stay as codes, as they would in use.
    """

    def __init__(self, subject: Subject, mode: Mode, coded: bool = False) -> None:
        self.subject, self.mode = subject, mode
        self.facts: dict[str, Any] = {}
        self.model: Any = None
        self.levels: str | list[str] = mode.level or ""
        if mode.mantissa is not None:
            self.model, self.facts = subject.with_weights(mode.mantissa, coded)
        elif mode.compiled:
            self.model = subject.compiled(mode.level or "exact")
        elif mode.share is not None or mode.level == CALIBRATED:
            self.levels = self._calibrated()
            self.facts["levels"] = {each: self.levels.count(each) for each in set(self.levels)}

    def _calibrated(self) -> list[str]:
        length, count = CALIBRATION
        ids = texts.rows_of(self.subject.tokenizer, "source", length, count)
        inputs = [{"input_ids": row[None].to(self.subject.device)} for row in ids]
        given: dict[str, Any] = {"levels": ("8b",)}
        if self.mode.share is not None:
            given = {"share": self.mode.share}
        found = memeff_compile.calibrate_attention(self.subject.model.base_model, inputs, **given)
        return [str(each) for each in found["levels"].values()]

    def around(self) -> AbstractContextManager[Any]:
        """Return the context of one forward pass of several tokens."""
        if self.mode.level is None or self.mode.compiled:
            return nullcontext()
        return Lowered(self.levels, judged=False).forward()

    def cache(self, length: int) -> Any:
        """Return an empty cache, or None where the mode has no own."""
        if self.mode.cache is None:
            return None
        return memeff_compile.KVCache(self.subject.model.config, length, **self.mode.cache)

    def last(self, ids: Tensor, first: int) -> Tensor:
        """Return the last states of tokens (B, N)."""
        cache = self.cache(ids.shape[1])
        pieces = None if cache is None else (first, PIECE)
        around = self.around()
        found = self.subject.states(ids, self.model, cache, pieces, around, layers=False).last
        if cache is not None:
            self.facts["cache_bytes_a_token"] = round(cache.nbytes / ids.numel(), 1)
        return found

    @torch.no_grad()
    def judge(self, items: tasks.Rows, kind: str, batch: int) -> list[bool]:
        """Return which items are right."""
        if kind == "code":
            return self._code(items, batch)
        found: list[Tensor] = []
        most = max(items.answers)
        first = items.first // PIECE * PIECE
        for part in torch.arange(len(items.ids)).split(batch):
            ids = items.ids[part].to(self.subject.device)
            last = self.last(ids, first)[:, -most - 1 : -1]
            log_p = self.subject.logits(last.flatten(0, 1)).log_softmax(-1)
            log_p = log_p.view(len(ids), most, -1)
            wanted = ids[:, -most:]
            own = torch.tensor([items.answers[each] for each in part], device=ids.device)
            is_answer = torch.arange(most, device=ids.device) >= most - own[:, None]
            if kind == "exact":
                same = log_p.argmax(-1) == wanted
                found.append((same | ~is_answer).all(1).float().cpu())
            else:
                of_each = log_p.gather(-1, wanted[..., None])[..., 0] * is_answer
                found.append(of_each.sum(1).cpu())
        scores = torch.cat(found)
        if kind == "exact":
            return [bool(each) for each in scores]
        scores = (scores / torch.tensor(items.characters)).view(-1, items.each)
        return [bool(each) for each in scores.argmax(1) == 0]

    def _code(self, items: tasks.Rows, batch: int) -> list[bool]:
        """Let the model write greedily, and judge each text."""
        from transformers import DynamicCache

        body = (self.model or self.subject.model).base_model
        right: list[bool] = []
        for ids in items.ids.to(self.subject.device).split(batch):
            cache = self.cache(ids.shape[1] + tasks.WRITTEN)
            cache = DynamicCache() if cache is None else cache
            with self.around():
                out = body(input_ids=ids, past_key_values=cache)
            written: list[Tensor] = []
            while True:
                last = out.last_hidden_state[:, -1]
                written.append(self.subject.logits(last).argmax(-1, keepdim=True))
                if len(written) == tasks.WRITTEN:
                    break
                out = body(input_ids=written[-1], past_key_values=cache)
            for row in torch.cat(written, 1):
                text = self.subject.tokenizer.decode(row)
                right.append(tasks.parses(items.questions[len(right)], text))
        return right


def batch_of(length: int, device: str) -> int:
    """Return how many rows of a length go through the model at a time."""
    return max(1, (65_536 if device == "cuda" else 2048) // length)


def measure(given: argparse.Namespace) -> int:
    """Write a row for each model, seed, mode and task that has none."""
    deadline = time.monotonic() + given.budget
    before = [row for path in (given.out, *given.had) if path.exists() for row in rows.read(path)]
    done = {key_of(row) for row in before if row["what"] == "tasks"}
    environment = rows.environment()
    for folder in given.models:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        dtype = getattr(torch, given.dtype or ("bfloat16" if device == "cuda" else "float32"))
        torch.backends.cuda.matmul.allow_tf32 = False
        subject = Subject(folder, device, dtype)
        asked = [task for task in tasks.TASKS if task.length <= subject.longest]
        if given.tasks:
            asked = [task for task in asked if any(part in task.name for part in given.tasks)]
        made: dict[tuple[str, int], tasks.Rows] = {}
        for seed in given.seeds:
            for mode in chosen(subject.layers, given):
                open_tasks = [
                    task
                    for task in asked
                    if (subject.name, task.name, seed, mode.name, str(dtype)) not in done
                ]
                answering: Answering | None = None
                for task in open_tasks:
                    if time.monotonic() > deadline:
                        print(f"out of time before {mode.name}, {task.name}", flush=True)
                        return 0
                    facts = {"what": "tasks", **subject.facts, "task": task.name, "seed": seed,
                             "kind": task.kind, "chance": task.chance, "mode": mode.name}  # fmt: skip
                    started = time.monotonic()
                    try:
                        answering = answering or Answering(subject, mode)
                        at = (task.name, seed)
                        if at not in made:
                            made[at] = tasks.rows_of(subject.tokenizer, task, seed, given.count)
                        batch = batch_of(task.length, device)
                        right = answering.judge(made[at], task.kind, batch)
                    except MemeffError as problem:
                        found: dict[str, Any] = {"refused": str(problem)}
                    except Exception as problem:  # a crash of one is no reason to miss the others
                        traceback.print_exc()
                        found = {"failed": f"{type(problem).__name__}: {problem}"[:300]}
                    else:
                        found = {"items": len(right), "right": sum(right),
                                 "answers": "".join(str(int(each)) for each in right),
                                 "length": task.length, "digest": tasks.digest(made[at]),
                                 **answering.facts}  # fmt: skip
                    found["seconds"] = round(time.monotonic() - started, 2)
                    rows.append(given.out, {**facts, **found, **environment})
                    shown = {k: found.get(k) for k in ("right", "items", "refused", "failed")}
                    print(
                        f"{mode.name}; {task.name}; {seed}: {shown} {found['seconds']}", flush=True
                    )
    return 0


def key_of(row: dict[str, Any]) -> tuple[Any, ...]:
    """Return the values of a row that name its measurement."""
    return row["model"], row["task"], row["seed"], row["mode"], f"torch.{row['dtype']}"


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=["measure"])
    parser.add_argument("--models", nargs="+", type=Path, default=[], help="folders")
    parser.add_argument("--modes", nargs="+", default=[], help="parts of names; all without")
    parser.add_argument("--tasks", nargs="+", default=[], help="parts of names; all without")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--count", type=int, help="items of a task, for a trial")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="bfloat16 on a GPU")
    parser.add_argument("--budget", type=float, default=math.inf, help="seconds")
    parser.add_argument("--had", nargs="+", type=Path, default=[], help="more files of rows")
    where = "nvidia-h100" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--out", type=Path, default=RESULTS / where / "tasks.jsonl")
    given = parser.parse_args()
    return {"measure": measure}[given.action](given)


if __name__ == "__main__":
    sys.exit(main())
