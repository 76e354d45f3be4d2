"""python -m fuzz: run the parts, each in a process of its own that may crash, and count.

Exit code 1 where anything failed, 2 where programs could not be run.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .judge import Verdict
from .program import Program
from .report import Failure, Tally, read_program, restore, row, save, save_program, table
from .shrink import shrink
from .worker import PARTS, work

_HANGS = 600
"""Seconds after which a program that is still running counts as a crash."""

_YOUNG = 300
"""CPU seconds after which a process is replaced: compilers keep some of what they were given."""

_ON_GPU = {"a", "b", "c"}


def main(arguments: list[str] | None = None) -> int:
    """Run what the command line asks for."""
    options = _options(arguments)
    if options.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch is imported
    if options.command == "worker":
        return _worker(options)
    if options.command == "soak":
        from .soak import COUNTS, soak

        found = soak(COUNTS)
        print("\n".join(found) or "nothing grew")
        return int(bool(found))
    with ThreadPoolExecutor(options.jobs) as pool:
        tallies = list(pool.map(lambda part: _watch(part, options), options.part))
    print(table(tallies))
    return int(any(tally.has_failed for tally in tallies))


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument("command", nargs="?", choices=("run", "soak", "worker"), default="run")
    parser.add_argument("--part", type=lambda text: text.split(","))
    parser.add_argument("--seconds", type=float, default=600, help="of CPU time, for each part")
    parser.add_argument("--seed", default="0")
    parser.add_argument("--jobs", type=int, default=1, help="parts that run at once")
    parser.add_argument(
        "--out",
        default="",
        help="append the counts to this file, as JSON lines;"
        " those of a part that still runs are in OUT.PART-SEED",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    able = _ON_GPU if options.device == "cuda" else set(PARTS)
    options.part = options.part or sorted(able)
    if not able.issuperset(options.part):
        parser.error(
            f"--part {','.join(options.part)} --device {options.device}: {', '.join(sorted(able))} "
            "are the parts that run there. Verbs and caches (d, e) are held to eager PyTorch on a "
            "CPU alone: a GPU's products of 16 bits round in another order."
        )
    return options


def _watch(part: str, options: argparse.Namespace) -> Tally:
    """Run one part, in a new process after each crash, until its time is spent."""
    with tempfile.TemporaryDirectory(prefix="memeff-fuzz-") as name:
        folder, tally, shown = Path(name), Tally(part), 0
        while tally.cpu_seconds < options.seconds:
            save(folder, tally)
            spent, setups = tally.cpu_seconds, tally.next_setup
            worker = subprocess.Popen(_command(options, folder), stderr=(folder / "log").open("w"))
            hangs = _wait(worker, folder, lambda: _count(restore(folder), options))
            tally = restore(folder)
            if worker.returncode > 0 and tally.next_setup == setups:  # it cannot even begin
                print((folder / "log").read_text(), file=sys.stderr)
                raise SystemExit(2)
            if worker.returncode or hangs:
                tally.cpu_seconds = max(tally.cpu_seconds, spent + 10)
                own, program = read_program(folder)
                if program.lines:  # otherwise eager PyTorch crashed while it was drawn
                    how = hangs or f"exit {worker.returncode}"
                    left = options.seconds - tally.cpu_seconds
                    tally.record_crash(_crashed(part, folder, own, program, how, left))
            for failure in tally.failures[shown:]:
                print(f"\n{failure.text}", flush=True)
            shown = len(tally.failures)
    _count(tally, options, is_over=True)
    return tally


def _count(tally: Tally, options: argparse.Namespace, *, is_over: bool = False) -> None:
    """Write the counts so far where a run that is cut leaves them, or at last into the file."""
    if not options.out:
        return
    line = f"{json.dumps(row(tally, options.seed, options.device))}\n"
    so_far = Path(f"{options.out}.{tally.part}-{options.seed}")
    if is_over:
        with Path(options.out).open("a") as file:
            file.write(line)
        so_far.unlink(missing_ok=True)
    else:
        so_far.write_text(line)


def _command(options: argparse.Namespace, folder: Path) -> list[str]:
    given = {"seconds": options.seconds, "seed": options.seed, "device": options.device}
    pairs = [f"--{name}={value}" for name, value in given.items()]
    return [
        sys.executable,
        "-X",
        "faulthandler",
        "-m",
        "fuzz",
        "worker",
        f"--folder={folder}",
        *pairs,
    ]


def _wait(worker: subprocess.Popen[bytes], folder: Path, tell: Callable[[], object]) -> str:
    """Wait for a worker, and tell how far it is; end one whose program does not."""
    current = folder / "program.json"
    while True:
        try:
            worker.wait(timeout=5)
            return ""
        except subprocess.TimeoutExpired:
            tell()
            since = time.time() - current.stat().st_mtime if current.exists() else 0
            if since > _HANGS:
                worker.kill()
                worker.wait()
                return f"no end within {_HANGS} s"


def _crashed(
    part: str, folder: Path, own: str, program: Program, how: str, seconds: float
) -> Failure:
    """Make the program that was running as small as it can be and still crash."""
    log = (folder / "log").read_text().strip().split("\n")
    reason = next((line for line in log if line.startswith("Fatal")), log[-1])
    crash = Verdict("crash", f"{how}: {reason}")

    def judge(candidate: Program) -> Verdict:
        command = [sys.executable, "-c", candidate.text()]
        try:
            ended = subprocess.run(command, capture_output=True, timeout=max(seconds, 10))
        except subprocess.TimeoutExpired:
            return Verdict("same")
        return crash if ended.returncode < 0 else Verdict("same")

    heading = f"part {part}, seed {own}: crash: {crash.sentence}"
    if judge(program) is crash:
        program = shrink(program, crash, judge, seconds=min(seconds, 180))
    return Failure(part, own, "crash", crash.sentence, program.text(heading))


def _worker(options: argparse.Namespace) -> int:
    logging.disable(logging.WARNING)
    folder, watcher = Path(options.folder), os.getppid()
    tally = restore(folder)

    def after(tally: Tally) -> None:
        save(folder, tally)
        if os.getppid() != watcher:
            raise SystemExit  # nobody waits for the counts

    work(
        tally,
        options.seed,
        min(options.seconds - tally.cpu_seconds, _YOUNG),
        before=lambda own, program: save_program(folder, own, program),
        after=after,
        device=options.device,
    )
    save(folder, tally)
    return 0


if __name__ == "__main__":
    sys.exit(main())
