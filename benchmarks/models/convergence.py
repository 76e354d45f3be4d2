"""Convergence: one small Llama trained with each loss, from scratch and fine-tuned, over seeds.

    python benchmarks/models/convergence.py train --budget-seconds 500  # every GPU and method
    python benchmarks/models/convergence.py train --method mass --seed 0 --phase scratch --gpu 0
    python benchmarks/models/convergence.py model --to small_model  # the recipe's model, saved
    python benchmarks/models/convergence.py table  # what the committed curves say

`train` appends to one file of curves as it goes and leaves out runs that are complete there, so it
can be interrupted and repeated. A run is a phase, a method and a seed; each GPU takes the next run
that is waiting, lower seeds first. A line holds a hundred steps: the mean training loss of every
ten, and the validation loss. The first line of a run describes it, the last one has "done".
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks import GENERATED, RESULTS, ROOT, rows
from benchmarks.methods import MODEL_METHODS
from benchmarks.models import training

BASE_METHOD = "inductor"
"""Fine-tuning starts from this method's weights, trained from scratch with seed 0."""
REPLY = "@@"
"""Prefix of a worker's answers; all other output is ignored."""


@dataclass(frozen=True)
class Run:
    """One curve. A `kept` run is not for the figure: it only saves the model that tuning needs."""

    phase: str
    method: str
    seed: int
    kept: bool = False

    @property
    def name(self) -> str:
        """Phase, method and seed, as the curves file spells them."""
        return f"{self.phase}/{self.method}/{self.seed}"


@dataclass
class Plan:
    """The runs that wait, handed out one by one to whichever worker is free."""

    waiting: list[Run]
    base: Path
    deadline: float
    seconds: dict[str, float] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)
    busy: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, last_method: str | None) -> Run | None:
        """Return the next run: lowest seed first, then the method that is already compiled."""
        while True:
            with self.lock:
                if not self.waiting:
                    return None
                ready = [r for r in self.waiting if r.phase != "tune" or self.base.exists()]
                ready = [r for r in ready if self._fits(r)]
                if ready:
                    best = min(
                        ready,
                        key=lambda r: (not r.kept, r.seed, r.method != last_method, r.phase),
                    )
                    self.waiting.remove(best)
                    self.busy += 1
                    return best
                if not self._someone_trains_the_base():
                    return None
            time.sleep(0.5)

    def _fits(self, run: Run) -> bool:
        expected = self.seconds.get(run.phase, 0.0)
        return time.monotonic() + expected < self.deadline

    def _someone_trains_the_base(self) -> bool:
        tuning = any(r.phase == "tune" for r in self.waiting)
        in_time = time.monotonic() < self.deadline
        return tuning and not self.base.exists() and in_time and self.busy > 0

    def finish(self, run: Run, reply: dict[str, Any]) -> None:
        """Note how long the run took, or that it failed."""
        with self.lock:
            self.busy -= 1
            if reply.get("stopped"):
                self.waiting.append(run)
            elif reply.get("problem"):
                self.failed.append(f"{run.name}: {reply['problem']}")
            else:
                self.seconds[run.phase] = max(self.seconds.get(run.phase, 0), reply["seconds"])


def read_curves(path: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the lines of each run, of its latest start only."""
    if not path.exists():
        return {}
    found = []
    for line in path.read_text().splitlines():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue  # the end of an interrupted write
    return latest(found)


def latest(found: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of each run, of its latest start only."""
    runs: dict[str, list[dict[str, Any]]] = {}
    for row in found:
        if "recipe" in row:
            runs[row["run"]] = []
        runs.setdefault(row["run"], []).append(row)
    return runs


def complete(path: Path) -> dict[str, dict[str, Any]]:
    """Return the recipes of the runs that reached their end, by the run's name."""
    curves = read_curves(path).items()
    return {name: lines[0]["recipe"] for name, lines in curves if lines[-1].get("done")}


def gpus(wanted: list[str]) -> list[str]:
    """Return the devices to use: GPU numbers, or one "none" for the CPU."""
    if wanted == ["none"]:
        return ["none"]
    if wanted != ["all"]:
        return wanted
    import torch

    return [str(number) for number in range(torch.cuda.device_count())] or ["none"]


def ensure_corpus(given: argparse.Namespace) -> None:
    """Build the text, unless the folder has it."""
    if (given.folder / "corpus.json").exists():
        return
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "data" / "corpus.py"),
        "--folder",
        str(given.folder),
    ]
    command += ["--vocabulary", str(training.RECIPES[given.size].vocabulary)]
    if given.megabytes:
        command += ["--megabytes", str(given.megabytes)]
        command += ["--other-megabytes", str(given.megabytes)]
        command += ["--sample-megabytes", str(given.megabytes / 2), "--validation-share", "8"]
    if given.root:
        command += ["--root", *map(str, given.root)]
    subprocess.run(command, check=True)


def worker_command(given: argparse.Namespace) -> list[str]:
    """Return the command of a worker process with the settings of this one."""
    command = [sys.executable, __file__, "worker"]
    command += ["--folder", str(given.folder), "--out", str(given.out), "--size", given.size]
    command += ["--inner", given.inner]
    if given.steps:
        command += ["--steps", str(given.steps)]
    return command + [f"--option={pair}" for pair in given.option]


def serve(gpu: str, plan: Plan, given: argparse.Namespace) -> None:
    """Keep one worker process on one device busy until no waiting run fits."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    number = visible.split(",")[int(gpu)] if visible and gpu != "none" else gpu
    environment["CUDA_VISIBLE_DEVICES"] = "" if gpu == "none" else number
    environment["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
    )
    worker, last = None, None
    while (run := plan.take(last)) is not None:
        if worker is None:
            worker = subprocess.Popen(
                worker_command(given),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
            )
        reply = ask(worker, run, plan, given)
        plan.finish(run, reply)
        print(f"gpu {gpu}: {run.name}: {reply}", flush=True)
        last = run.method
        if reply.get("fatal"):
            worker.kill()
            worker.wait()
            worker, last = None, None
    if worker is not None:
        assert worker.stdin is not None
        worker.stdin.close()
        worker.wait()


def ask(
    worker: subprocess.Popen[str], run: Run, plan: Plan, given: argparse.Namespace
) -> dict[str, Any]:
    """Send a run to a worker and wait for its answer."""
    order = {**asdict(run), "command": rows.command(), "left": plan.deadline - time.monotonic()}
    order["save_to"] = str(plan.base) if _gives_the_base(run) else None
    order["base"] = str(plan.base)
    if not math.isfinite(order["left"]):
        order["left"] = None
    assert worker.stdin is not None
    assert worker.stdout is not None
    try:
        worker.stdin.write(json.dumps(order) + "\n")
        worker.stdin.flush()
        for line in worker.stdout:
            if line.startswith(REPLY):
                reply: dict[str, Any] = json.loads(line.removeprefix(REPLY))
                return reply
            print(line, end="", flush=True)
    except BrokenPipeError:
        pass
    return {"problem": "the worker process ended", "fatal": True}


def _gives_the_base(run: Run) -> bool:
    return (run.phase, run.method, run.seed) == ("scratch", BASE_METHOD, 0)


def work(given: argparse.Namespace) -> None:
    """Run the jobs that the driver sends on standard input, one JSON line each."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    trainer = training.Trainer(given.size, given.folder, device, given.inner)
    for line in sys.stdin:
        reply = perform(trainer, json.loads(line), given)
        print(REPLY + json.dumps(reply), flush=True)


def perform(
    trainer: training.Trainer, order: dict[str, Any], given: argparse.Namespace
) -> dict[str, Any]:
    """Do one run and return the answer to the driver."""
    options = dict(pair.split("=", 1) for pair in given.option)
    run = Run(order["phase"], order["method"], order["seed"], order["kept"])
    suffix = "".join(f"+{pair}" for pair in given.option)
    name = f"{run.phase}/{run.method}{suffix}/{run.seed}"
    recipe = training.recipe_for(given.size, run.phase, given.steps)
    started = time.monotonic()

    def report(row: dict[str, Any]) -> None:
        if not run.kept:
            rows.append(given.out, {"run": name, **row})

    facts = rows.environment() | {"command": order["command"]}
    report(
        {
            "recipe": asdict(recipe),
            "method": run.method,
            "options": options,
            "corpus": training.corpus_digest(given.folder),
            **facts,
        }
    )
    save_to = Path(order["save_to"]) if order["save_to"] else None
    if save_to is not None and save_to.exists():
        save_to = None
    try:
        last = trainer.run(
            run.method,
            run.phase,
            run.seed,
            report,
            steps=given.steps,
            options=options,
            base=Path(order["base"]),
            save_to=save_to,
            deadline=math.inf if order["left"] is None else started + order["left"],
        )
    except training.OutOfTime as stop:
        report({"stopped": str(stop)})
        return {"stopped": str(stop)}
    except Exception as problem:
        text = f"{type(problem).__name__}: {problem}"[:300]
        report({"error": text})
        return {"problem": text, "fatal": "CUDA" in text}
    report(last)
    seconds = round(time.monotonic() - started, 1)
    shown = {"validation": round(last["validation"], 4), "step_ms": last["step_ms"]}
    return {**shown, "seconds": seconds}


def plan_for(given: argparse.Namespace) -> Plan:
    """List the runs that are not complete, with a base run in front if tuning needs one."""
    finished = complete(given.out)
    suffix = "".join(f"+{pair}" for pair in given.option)
    waiting = [
        Run(phase, method, seed)
        for phase in given.phase
        for method in given.method
        for seed in given.seed
        if finished.get(f"{phase}/{method}{suffix}/{seed}")
        != asdict(training.recipe_for(given.size, phase, given.steps))
    ]
    base = given.folder / f"model-{given.size}"
    base_run = Run("scratch", BASE_METHOD, 0)
    if (
        any(run.phase == "tune" for run in waiting)
        and not base.exists()
        and (base_run not in waiting)
    ):
        waiting.insert(0, Run("scratch", BASE_METHOD, 0, kept=True))
    budget = given.budget_seconds
    return Plan(waiting, base, math.inf if budget is None else time.monotonic() + budget)


def train(given: argparse.Namespace) -> int:
    """Do every run that is not complete, on all devices, within the budget."""
    started = time.monotonic()
    plan = plan_for(given)
    if not plan.waiting:
        print(f"{given.out} holds every run asked for")
        return 0
    ensure_corpus(given)
    threads = [threading.Thread(target=serve, args=(gpu, plan, given)) for gpu in gpus(given.gpu)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for problem in plan.failed:
        print(f"failed: {problem}")
    print(
        f"{len(complete(given.out))} runs complete in {given.out}, {len(plan.waiting)} waiting, "
        f"{len(plan.failed)} failed, {time.monotonic() - started:.0f} s"
    )
    return 1 if plan.failed else 0


def save_model(given: argparse.Namespace) -> int:
    """Train the recipe from scratch with the first seed and save weights and tokenizer."""
    if given.to.exists():
        print(f"{given.to} exists")
        return 0
    started = time.monotonic()
    ensure_corpus(given)
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    trainer = training.Trainer(given.size, given.folder, device, given.inner)
    last = trainer.run(
        given.method[0],
        "scratch",
        given.seed[0],
        lambda row: print(json.dumps(row), flush=True),
        steps=given.steps,
        save_to=given.to,
    )
    row = {"what": "small trained model", "method": given.method[0], "seed": given.seed[0], **last}
    row["total_seconds"] = round(time.monotonic() - started, 1)
    row["corpus"] = training.corpus_digest(given.folder)
    rows.write(given.out, row)
    return 0


def summary(curves: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return the final validation loss per phase and method: mean, spread, difference to eager's.

    The difference is taken seed by seed, so that a seed's common effect cancels.
    """
    final: dict[tuple[str, str], dict[int, float]] = {}
    for name, lines in curves.items():
        if lines[-1].get("done"):
            phase, method, seed = name.split("/")
            final.setdefault((phase, method), {})[int(seed)] = lines[-1]["validation"]
    table = []
    for (phase, method), values in sorted(final.items()):
        baseline = final.get((phase, BASE_METHOD), {})
        paired = [(v - baseline[s]) / baseline[s] for s, v in values.items() if s in baseline]
        table.append(
            {
                "phase": phase,
                "method": method,
                "seeds": len(values),
                "validation": statistics.mean(values.values()),
                "deviation": statistics.stdev(values.values()) if len(values) > 1 else None,
                "against_baseline_percent": 100 * statistics.mean(paired) if paired else None,
                "largest_percent": 100 * max(paired, key=abs) if paired else None,
            }
        )
    return table


def print_table(given: argparse.Namespace) -> int:
    """Print the summary of a curves file."""
    print("| phase | method | seeds | validation loss | deviation | against Inductor | largest |")
    print("|---|---|---|---|---|---|---|")
    for row in summary(read_curves(given.out)):
        shown = [
            "-" if row[key] is None else format(row[key], spec)
            for key, spec in (
                ("validation", ".4f"),
                ("deviation", ".4f"),
                ("against_baseline_percent", "+.3f"),
                ("largest_percent", "+.3f"),
            )
        ]
        shown[2:] = [s if s == "-" else f"{s} %" for s in shown[2:]]
        print(f"| {row['phase']} | {row['method']} | {row['seeds']} | {' | '.join(shown)} |")
    return 0


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=["train", "model", "table", "worker"])
    parser.add_argument("--phase", nargs="+", choices=training.PHASES, default=training.PHASES)
    parser.add_argument(
        "--method", nargs="+", choices=MODEL_METHODS, default=["inductor", "exact", "mass", "block"]
    )
    parser.add_argument("--seed", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--gpu", nargs="+", default=["all"], help="numbers, all, or none: the CPU")
    parser.add_argument("--budget-seconds", type=float, help="start no run that would not end")
    parser.add_argument("--option", action="append", default=[], help="memeff.key=value")
    parser.add_argument("--size", choices=training.RECIPES, default="full")
    parser.add_argument("--steps", type=int, help="steps from scratch, if not the recipe's own")
    parser.add_argument("--megabytes", type=float, help="text per slice, if not the recipe's own")
    parser.add_argument("--root", type=Path, nargs="+", help="folders to take the text from")
    parser.add_argument("--inner", default="inductor", help="aot_eager where no compiler is")
    parser.add_argument("--folder", type=Path, default=GENERATED, help="of the text")
    parser.add_argument("--out", type=Path, default=RESULTS / "convergence.jsonl")
    parser.add_argument("--to", type=Path, default=GENERATED / "small_model")
    return parser.parse_args()


def main() -> int:
    """Run the requested command."""
    given = arguments()
    if given.action == "worker":
        work(given)
        return 0
    actions = {"train": train, "model": save_model, "table": print_table}
    return actions[given.action](given)


if __name__ == "__main__":
    sys.exit(main())
