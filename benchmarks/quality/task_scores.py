"""Scores of real models in tasks, under every lossy mode.

    python benchmarks/quality/task_scores.py measure --models FOLDER [FOLDER ...]
    python benchmarks/quality/task_scores.py table
    python benchmarks/quality/task_scores.py summary

FOLDER is an argument of `from_pretrained`. One that `fine_tuning.py --save` wrote is a mode of the
model that was fine-tuned, and compared with that fine-tuned by the exact loss. Tasks are those of
tasks.py; all modes answer the same items. A row has a model, a task, a seed and a mode, and says of
each item whether it was right, so that a mode is compared with the exact model item by item. Rows
that are there already are not measured again: after --budget seconds, or when it was stopped, the
command goes on where its rows end. Tasks in which the exact model is no better than chance are
asked of it alone, unless --tasks names them. --times adds the time of reading a prompt and of
writing a token with the compiled model, whose weights stay coded, as those with all bits do in
tasks, too.

A cache takes the text before the question as the prompt, which attends exactly; the question and
the answer, in pieces of 64 tokens, read the cache. Attention in low bits and weights of fewer bits
take everything in one go.
"""

from __future__ import annotations

import argparse
import fcntl
import functools
import math
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks import RESULTS, rows
from benchmarks.quality import labels, tasks
from benchmarks.quality.answering import Answering, Prompts
from benchmarks.quality.modes import Mode, modes
from benchmarks.quality.subject import Subject
from memeff_compile.errors import MemeffError

LEFT_OUT = (
    "max_norm",
    "groups of 32",
    "three quarters on, slerp, t 0.5",
    "half on, slerp, t 0.6",
    "8b, compiled",
)
"""Parts of names of modes that perplexity tells from others well enough."""
SURE = 4
"""Standard errors above chance, from which on a task counts."""
LOGITS = 2**30
"""Bytes of fp32 logits of a batch."""
AFTER = 256
"""Tokens after a prompt whose time is compared."""
COMPILED = Mode("compiled", compiled=True)
EXACT = Mode("exact")
IN_PIECES = Mode("transformers' own cache", in_pieces=True)
SCORED = (
    "mode (exact model: share of right answers; other rows: change in percentage points; "
    "in brackets: standard error)"
)
BYTES = "size of the cache or the weights, % of bf16"
MEAN = "mean of the tasks"
TUNED = "fine-tuned, "
"""How modes of fine-tuned models begin; a method and a seed follow."""


def batch_of(items: tasks.Rows, device: str, vocabulary: int = 1) -> int:
    """Return how many rows go through the model at a time; rows of two texts never do."""
    length, is_gpu = items.ids.shape[1], device == "cuda"
    fitting = LOGITS // (4 * vocabulary * max(1, *items.answers))
    if items.group == 1:
        return max(1, min(fitting, (65_536 if is_gpu else 2048) // length))
    most = max(1, min(fitting, (131_072 if is_gpu else 16_384) // length))
    return max(
        each for each in range(1, items.group + 1) if items.group % each == 0 and each <= most
    )


class Run:
    """One call of the command: what is asked, what is there, and when it must end."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given, self.environment = given, rows.environment()
        self.deadline = time.monotonic() + given.budget
        had = before(given)
        self.done = {key_of(row) for row in had if "failed" not in row}
        self.exact = [row for row in had if row.get("mode") == EXACT.name and "answers" in row]

    def write(self, facts: dict[str, Any], make: Callable[[], dict[str, Any]]) -> None:
        """Write a row, unless there is one, with the figures or why there are none."""
        if key_of(facts) in self.done:
            return
        if time.monotonic() > self.deadline:
            raise TimeoutError(f"out of time before {facts['mode']}, {facts.get('task', 'times')}")
        started = time.monotonic()
        try:
            found = make()
        except MemeffError as problem:
            found = {"refused": str(problem)}
        except Exception as problem:  # a crash of one is no reason to miss the others
            traceback.print_exc()
            found = {"failed": f"{type(problem).__name__}: {problem}"[:300]}
        row = {**facts, **found, "seconds": round(time.monotonic() - started, 2)}
        rows.append(self.given.out, {**row, **self.environment})
        if facts["mode"] == EXACT.name and "answers" in row:
            self.exact.append(row)
        told = ("right", "items", "token_ms", "refused", "failed", "seconds")
        shown = {name: row[name] for name in told if name in row}
        print(f"{facts['mode']}; {facts.get('task', 'times')}: {shown}", flush=True)

    def is_solved(self, model: str, task: tasks.Task) -> bool:
        """Say whether the exact model is better than chance in a task, as far as rows tell."""
        known = [row for row in self.exact if (row["model"], row["task"]) == (model, task.name)]
        answers = "".join(row["answers"] for row in known)
        right = answers.count("1") / max(len(answers), 1)
        error = (right * (1 - right) / max(len(answers), 1)) ** 0.5
        return not known or right > task.chance + SURE * max(error, 0.01)


def measure(given: argparse.Namespace) -> int:
    """Write a row for each model, seed, mode and task that has none."""
    run = Run(given)
    try:
        for folder in given.models:
            subject = subject_in(folder, given)
            for seed in given.seeds:
                _answer(run, subject, seed)
            if given.times and not subject.tuned:
                _time(run, subject)
    except TimeoutError as problem:
        print(problem, flush=True)
    return 0


def _answer(run: Run, subject: Subject, seed: int) -> None:
    """Ask a task of all modes, then the next one; other weights, which need room, come last."""
    rows_of = functools.cache(
        lambda task: tasks.rows_of(
            subject.tokenizer, task, seed, run.given.count, run.given.questions
        )
    )
    asked, found, exact = tasks_of(subject, run.given), modes_of(subject, run.given), Prompts()
    light = [mode for mode in found if mode.mantissa is None and not mode.compiled]

    held: dict[Mode, Answering] = {}

    def make(task: tasks.Task, mode: Mode) -> dict[str, Any]:
        items = rows_of(task)
        if mode not in held:
            if mode not in light:
                held.clear()
            held[mode] = Answering(subject, mode, coded=mode.is_exact, exact=exact)
        return held[mode].row(
            items, task.kind, batch_of(items, subject.device, subject.facts["vocabulary"])
        )

    order = [(task, mode) for task in asked for mode in light]
    order += [(task, mode) for mode in found if mode not in light for task in asked]
    for task, mode in order:
        is_asked = mode.name == EXACT.name or run.given.tasks
        if not is_asked and not run.is_solved(subject.name, task):
            continue
        facts = {"what": "tasks", **subject.facts, "task": task.name, "seed": seed}
        facts |= {"kind": task.kind, "chance": task.chance, "mode": mode.name}
        run.write(facts, functools.partial(make, task, mode))


def _time(run: Run, subject: Subject) -> None:
    batch, length, count = run.given.shape
    ids = torch.arange(batch * length).remainder(subject.facts["vocabulary"]).view(batch, length)
    ids = ids.to(subject.device)
    for mode in modes_of(subject, run.given):
        if mode.compiled or mode.in_pieces:
            continue
        facts = {"what": "task times", **subject.facts, "mode": mode.name, "batch": batch}
        facts |= {"prompt": length, "tokens": count}

        def make(mode: Mode = mode) -> dict[str, Any]:
            asked = Answering(subject, mode, coded=subject.device == "cuda")
            return asked.times(ids, count, run.given.inner, alone(run.given.turns))

        run.write(facts, make)


@contextmanager
def alone(turns: Path | None) -> Iterator[None]:
    """Wait until no other process measures that has the same file."""
    if turns is None:
        yield
        return
    with turns.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def tasks_of(subject: Subject, given: argparse.Namespace) -> list[tasks.Task]:
    """Return the tasks that a model is long enough for."""
    longest = min(subject.longest, given.longest)
    found = [task for task in tasks.TASKS if task.length <= longest]
    if given.tasks:
        found = [task for task in found if any(part in task.name for part in given.tasks)]
    return found


def modes_of(subject: Subject, given: argparse.Namespace) -> list[Mode]:
    """Return the modes to measure, the exact model first; one of a fine-tuned model."""
    if subject.tuned:
        return [Mode(f"{TUNED}{subject.tuned}")]
    found = [EXACT, IN_PIECES, *modes(subject.layers), COMPILED]
    names = {mode.name for mode in found}
    if given.modes:
        found = [
            mode
            for mode in found
            if mode.name in given.modes
            or any(part in mode.name for part in given.modes if part not in names)
        ]
    return [mode for mode in found if not any(part in mode.name for part in LEFT_OUT)]


def before(given: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the rows that are there already."""
    return [row for path in (given.out, *given.had) if path.exists() for row in rows.read(path)]


def subject_in(folder: Path, given: argparse.Namespace) -> Subject:
    """Return the model in a folder."""
    torch.backends.cuda.matmul.allow_tf32 = False
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = given.dtype or ("bfloat16" if device == "cuda" else "float32")
    return Subject(folder, device, getattr(torch, dtype))


def key_of(row: dict[str, Any]) -> tuple[Any, ...]:
    """Return the values of a row that name its measurement."""
    named = ("what", "model", "task", "seed", "mode", "dtype")
    return tuple(row.get(name) for name in named)


class Change(NamedTuple):
    """A mode's score in a task, compared with the exact model on the same items.

    Attributes:
        right: share of right items.
        change: difference from the exact model's share.
        error: standard error of `change`; for the exact model that of `right`.
    """

    right: float
    change: float
    error: float


Scores = dict[str, dict[str, Change]]
"""Mode -> task -> change; the exact model first."""


def scores(found: list[dict[str, Any]]) -> Scores:
    """Return the scores of one model, over all seeds that both it and the exact model have.

    If a seed's prompts have changed, the rows of the newest prompts count.
    """
    latest = rows.latest(
        [row for row in found if "answers" in row], "task", "seed", "mode", "digest"
    )
    answers = {(r["mode"], r["task"], r["seed"], r["digest"]): r["answers"] for r in latest}
    made: Scores = {}
    for mode in dict.fromkeys(key[0] for key in answers):
        for task in dict.fromkeys(key[1] for key in answers):
            by_seed: dict[int, list[tuple[int, int]]] = {}
            for (own, named, *drawn), given in answers.items():
                exact = answers.get((_base(own, answers), named, *drawn))
                if (own, named) == (mode, task) and exact is not None:
                    pairs = zip(map(int, exact), map(int, given), strict=True)
                    by_seed[drawn[0]] = list(pairs)
            all_pairs = [pair for pairs in by_seed.values() for pair in pairs]
            if all_pairs:
                made.setdefault(mode, {})[task] = _change(all_pairs, mode == EXACT.name)
    return made


def _base(mode: str, known: Iterable[tuple[Any, ...]]) -> str:
    """Return the mode that a mode is compared with."""
    method, _, seed = mode.removeprefix(TUNED).rpartition("-")
    if not mode.startswith(TUNED) or method == EXACT.name:
        return EXACT.name
    base = f"{TUNED}{EXACT.name}-{seed}"
    return base if any(key[0] == base for key in known) else EXACT.name


def _change(pairs: list[tuple[int, int]], is_exact: bool) -> Change:
    right = statistics.mean(b for _, b in pairs)
    samples = [float(b) if is_exact else float(b - a) for a, b in pairs]
    error = statistics.stdev(samples) / len(samples) ** 0.5 if len(samples) > 1 else math.nan
    return Change(right, 0.0 if is_exact else statistics.mean(samples), error)


def solved(found: list[dict[str, Any]], made: Scores) -> list[str]:
    """Return the tasks in which the exact model is above chance by four standard errors."""
    chance = {row["task"]: row["chance"] for row in found}
    exact = made.get(EXACT.name, {})
    return [
        task
        for task, own in exact.items()
        if own.right > chance[task] + SURE * max(own.error, 0.01)
    ]


def mean_of(made: dict[str, Change], over: list[str]) -> Change | None:
    """Return the mean over tasks, or None where one is missing."""
    if not over or any(task not in made for task in over):
        return None
    each = [made[task] for task in over]
    error = sum(one.error**2 for one in each) ** 0.5 / len(each)
    right, change = (statistics.mean(column) for column in list(zip(*each, strict=True))[:2])
    return Change(right, change, error)


class Agreement(NamedTuple):
    """How an exact mode's answers differ from the exact model's.

    Attributes:
        items: those of both.
        others: items that only one of both has right.
        tie: the largest margin by which the exact model is right or wrong in one of these.
        moved: the largest change of a margin in 99 of 100 items: what rounding does.
    """

    items: int
    others: int
    tie: float
    moved: float


def agreements(found: list[dict[str, Any]]) -> dict[str, Agreement]:
    """Return the agreement of each mode that only rounding tells from the exact model."""
    judged = [r for r in found if "margins" in r and not r["mode"].startswith(TUNED)]
    latest = rows.latest(judged, "task", "seed", "mode", "digest")
    key = ("task", "seed", "digest")
    exact = {tuple(r[n] for n in key): r for r in latest if r["mode"] == EXACT.name}
    made = {}
    for mode in dict.fromkeys(row["mode"] for row in latest if row["mode"] != EXACT.name):
        others, moved = [], []
        for row in (row for row in latest if row["mode"] == mode):
            own = exact.get(tuple(row[name] for name in key))
            if own is None:
                continue
            moved += [abs(a - b) for a, b in zip(own["margins"], row["margins"], strict=True)]
            pairs = zip(own["answers"], row["answers"], own["margins"], strict=True)
            others += [abs(margin) for a, b, margin in pairs if a != b]
        if moved:
            worst = sorted(moved)[int(0.99 * (len(moved) - 1))]
            made[mode] = Agreement(len(moved), len(others), max(others, default=0.0), worst)
    return made


def costs(found: list[dict[str, Any]], mode: str) -> str:
    """Return the size of a mode's cache or weights, in percent of the exact model's."""
    share = share_of_bytes(found, mode)
    return "" if share is None else f"{share:.0%}".replace("%", " %")


def share_of_bytes(found: list[dict[str, Any]], mode: str) -> float | None:
    """Return the bytes of a mode's cache, over all tasks, or weights, compared with bf16."""
    own = [row for row in found if row["mode"] == mode]
    bits = [row["bits"] for row in own if "bits" in row]
    if bits:
        return float(bits[-1]) / 16
    for name, at in (("cache_bytes_a_token", "length"), ("cache_mib", "prompt")):
        sized = [row for row in found if name in row]
        exact = {row[at]: row[name] for row in sized if row["mode"] == "cache, 16 bits"}
        both = {
            row[at]: row[name] / exact[row[at]] for row in own if name in row and row[at] in exact
        }
        if both:
            return float(both[max(both)])
    return None


def share_of_time(found: list[dict[str, Any]], mode: str) -> float | None:
    """Return the time of a prompt and the tokens after it, compared with the exact model."""
    timed = [r for r in found if "token_ms" in r]
    timed = [r for r in timed if r.get("compiled")] or timed
    both = [[row for row in timed if row["mode"] == name][-1:] for name in (mode, EXACT.name)]
    if not all(both):
        return None
    own, exact = (row["prompt_ms"] + AFTER * row["token_ms"] for (row,) in both)
    return float(own / exact)


def how_timed(found: list[dict[str, Any]]) -> str:
    """Return whether times are those of compiled models; earlier rows are of eager ones."""
    return "compiled" if any(row.get("compiled") for row in found) else "eager"


def table(given: argparse.Namespace) -> int:
    """Print scores as Markdown: a table for each model."""
    all_rows = before(given)
    for name in dict.fromkeys((row["model"], row["dtype"]) for row in all_rows):
        here = [row for row in all_rows if (row["model"], row["dtype"]) == name]
        asked = [row for row in here if row["what"] == "tasks"]
        timed = [row for row in here if row["what"] == "task times"]
        made = scores(asked)
        over = solved(asked, made)
        exact = [row for row in asked if "answers" in row and row["mode"] == EXACT.name]
        counts = [len(row["answers"]) for row in rows.latest(exact, "task", "seed")]
        print(f"\n{name[0]}, {name[1]}, {sum(counts):,} items\n")
        print(f"| {SCORED} | {BYTES} | {' | '.join(map(labels.of_task, over))} | {MEAN} |")
        print(f"|---{'|---:' * (len(over) + 2)}|")
        for mode, own in made.items():
            mean = mean_of(own, over)
            cells = [shown(own.get(task), mode) for task in over] + [shown(mean, mode)]
            size = costs([*asked, *timed], mode)
            print(f"| {' | '.join([labels.of_mode(mode), size, *cells])} |")
        left = [
            f"{labels.of_task(task)} ({100 * own.right:.0f} %)"
            for task, own in made["exact"].items()
            if task not in over
        ]
        if left:
            head = "In these tasks the exact model is not better than chance"
            print(f"\n{head} (in brackets: its score): {'; '.join(left)}.")
        if agreed := agreements(asked):
            heads = "mode that computes exactly | items | answers that differ"
            margins = "largest margin of these answers, nats | change of margins, nats"
            print(f"\n| {heads} | {margins} |")
            print(f"|---{'|---:' * 4}|")
        for mode, how in agreed.items():
            margin = f"{how.tie:.2g}" if how.others else ""
            told = f"{how.items:,} | {how.others} | {margin} | {how.moved:.2g}"
            print(f"| {labels.of_mode(mode)} | {told} |")
    return 0


def summary(given: argparse.Namespace) -> int:
    """Print as Markdown what each mode costs on average, a column for each model."""
    found = [row for row in before(given) if row.get("dtype") == (given.dtype or "bfloat16")]
    models = list(dict.fromkeys(row["model"] for row in found))
    rows_by = {name: [row for row in found if row["model"] == name] for name in models}
    asked = {name: [r for r in own if r["what"] == "tasks"] for name, own in rows_by.items()}
    made = {name: scores(own) for name, own in asked.items()}
    over = {name: solved(asked[name], made[name]) for name in models}
    heads = [f"{name}, mean of {_tasks(len(over[name]))}" for name in models]
    time_head = f"time of the {how_timed(found)} model, % of exact"
    print(f"| {SCORED} | {BYTES} | {time_head} | {' | '.join(heads)} |")
    print(f"|---{'|---:' * (len(models) + 2)}|")
    for mode in dict.fromkeys(mode for own in made.values() for mode in own):
        sizes = [share_of_bytes(own, mode) for own in rows_by.values()]
        ratio = [share_of_time(own, mode) for own in rows_by.values()]
        cells = [as_percent([x for x in each if x is not None]) for each in (sizes, ratio)]
        for name in models:
            own = made[name].get(mode, {})
            there = [task for task in over[name] if task in own]
            mean = shown(mean_of(own, there), mode)
            left = len(over[name]) - len(there)
            of = f" in {_tasks(len(there))}" if mean and left else ""
            cells.append(f"{mean}{of}")
        print(f"| {' | '.join([labels.of_mode(mode), *cells])} |")
    return 0


def _tasks(count: int) -> str:
    return f"{count} task{'' if count == 1 else 's'}"


def as_percent(shares: list[float]) -> str:
    """Return the range of shares."""
    ends = [f"{end(shares):.0%}".replace("%", " %") for end in (min, max) if shares]
    return " to ".join(dict.fromkeys(ends))


def shown(own: Change | None, mode: str) -> str:
    """Return a cell: percent of the exact model, points of change of every other one."""
    if own is None:
        return ""
    if mode == EXACT.name:
        return f"{100 * own.right:.0f} % ({100 * own.error:.0f})"
    return (
        "0" if own.change == own.error == 0 else f"{100 * own.change:+.0f} ({100 * own.error:.0f})"
    )


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    actions = {"measure": measure, "table": table, "summary": summary}
    parser.add_argument("action", choices=[*actions])
    parser.add_argument("--models", nargs="+", type=Path, default=[], help="folders")
    parser.add_argument(
        "--modes", nargs="+", default=[], help="names, or parts of them; all without"
    )
    parser.add_argument("--tasks", nargs="+", default=[], help="parts of names; all without")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--longest", type=int, default=32768, help="tokens of a row")
    parser.add_argument("--count", type=int, help="items of a task, for a trial")
    parser.add_argument(
        "--questions", type=int, help="about each text; a task's own number without"
    )
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="bfloat16 on a GPU")
    parser.add_argument("--budget", type=float, default=math.inf, help="seconds")
    parser.add_argument("--shape", nargs=3, type=int, default=[8, 2048, 9], metavar="N",
                        help="batch, prompt and written tokens of times")  # fmt: skip
    parser.add_argument("--times", action="store_true", help="of the compiled model, as well")
    parser.add_argument("--inner", default="inductor", help="aot_eager where no compiler is")
    parser.add_argument("--turns", type=Path, help="a file of processes that share a GPU")
    parser.add_argument("--had", nargs="+", type=Path, default=[], help="more files of rows")
    where = "nvidia-h200" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--out", type=Path, default=RESULTS / where / "tasks.jsonl")
    given = parser.parse_args()
    return actions[given.action](given)


if __name__ == "__main__":
    sys.exit(main())
