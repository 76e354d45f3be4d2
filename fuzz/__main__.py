"""python -m fuzz: run the parts, each in a process of its own that may crash, and count.

Exit code 1 where anything failed.
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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .judge import Verdict
from .program import Program
from .report import Failure, Tally, read_program, restore, rows, save, save_program, table
from .shrink import shrink
from .worker import PARTS, work

_HANGS = 600
"""Seconds behind which a program that is still running counts as a crash."""


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
    if options.out:
        with Path(options.out).open("a") as file:
            file.writelines(f"{json.dumps(row)}\n" for row in rows(tallies, options.seed))
    return int(any(tally.failures for tally in tallies))


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument("command", nargs="?", choices=("run", "soak", "worker"), default="run")
    parser.add_argument("--part", type=lambda text: text.split(","), default=list(PARTS))
    parser.add_argument("--seconds", type=float, default=600, help="of CPU time, for each part")
    parser.add_argument("--seed", default="0")
    parser.add_argument("--jobs", type=int, default=1, help="parts that run at once")
    parser.add_argument("--out", default="", help="append the counts to this file, as JSON lines")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def _watch(part: str, options: argparse.Namespace) -> Tally:
    """Run one part, in another process behind each crash, until its time is spent."""
    with tempfile.TemporaryDirectory(prefix="memeff-fuzz-") as name:
        folder, tally, shown = Path(name), Tally(part), 0
        while tally.cpu_seconds < options.seconds:
            save(folder, tally)
            spent, setups = tally.cpu_seconds, tally.next_setup
            worker = subprocess.Popen(_command(options, folder), stderr=(folder / "log").open("w"))
            hangs = _wait(worker, folder)
            tally = restore(folder)
            if worker.returncode > 0 and tally.next_setup == setups:  # it cannot even begin
                raise SystemExit((folder / "log").read_text())
            if worker.returncode or hangs:
                tally.cpu_seconds = max(tally.cpu_seconds, spent + 10)
                own, program = read_program(folder)
                if program.lines:  # otherwise eager PyTorch crashed while it was drawn
                    how = hangs or f"exit {worker.returncode}"
                    tally.record_crash(_crashed(part, folder, own, program, how))
            for failure in tally.failures[shown:]:
                print(f"\n{failure.text}", flush=True)
            shown = len(tally.failures)
    return tally


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


def _wait(worker: subprocess.Popen[bytes], folder: Path) -> str:
    """Wait for a worker; end one whose program does not."""
    current = folder / "program.json"
    while True:
        try:
            worker.wait(timeout=5)
            return ""
        except subprocess.TimeoutExpired:
            since = time.time() - current.stat().st_mtime if current.exists() else 0
            if since > _HANGS:
                worker.kill()
                worker.wait()
                return f"no end within {_HANGS} s"


def _crashed(part: str, folder: Path, own: str, program: Program, how: str) -> Failure:
    """Make the program that was running as small as it can be and still crash."""
    log = (folder / "log").read_text().strip().split("\n")
    reason = next((line for line in log if line.startswith("Fatal")), log[-1])
    crash = Verdict("crash", f"{how}: {reason}")

    def judge(candidate: Program) -> Verdict:
        ended = subprocess.run(
            [sys.executable, "-c", candidate.text()], capture_output=True, timeout=_HANGS
        )
        return crash if ended.returncode < 0 else Verdict("same")

    heading = f"part {part}, seed {own}: crash: {crash.sentence}"
    if judge(program) is crash:
        program = shrink(program, crash, judge, seconds=180)
    return Failure(part, own, "crash", crash.sentence, program.text(heading))


def _worker(options: argparse.Namespace) -> int:
    logging.disable(logging.WARNING)
    folder = Path(options.folder)
    tally = restore(folder)
    work(
        tally,
        options.seed,
        options.seconds - tally.cpu_seconds,
        before=lambda own, program: save_program(folder, own, program),
        after=lambda tally: save(folder, tally),
        device=options.device,
    )
    save(folder, tally)
    return 0


if __name__ == "__main__":
    sys.exit(main())
