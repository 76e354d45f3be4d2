"""`memeff report-bug SCRIPT`: run a script, and write the files of a bug report to one zip.

The script runs in a separate process, so its crash does not end this command. The zip contains text
files: versions, reports, graphs and the findings of `memeff doctor`. That command checks versions,
devices, compilers and kernels on this machine. The zip contains no weights, no inputs and no
script.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import runpy
import subprocess
import sys
import tempfile
import time
import traceback
import zipfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import memeff_compile

from .doctor import diagnose, findings_json

PACKAGES = (
    "torch triton numpy sympy transformers accelerate peft trl lightning diffusers torchao "
    "bitsandbytes deepspeed flash-attn liger-kernel"
)
VARIABLES = ("TORCH", "PYTORCH", "MEMEFF", "TRITON", "CUDA")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command `memeff report-bug` to its parser."""
    said = "where the zip goes (default: memeff-report-DATE.zip here)"
    parser.add_argument("--output", type=Path, metavar="ZIP", help=said)
    said = "do not run the doctor, which compiles a toy model"
    parser.add_argument("--no-doctor", action="store_true", help=said)
    parser.add_argument("script", help="a Python file that shows the bug")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own")


def run(given: argparse.Namespace) -> int:
    """Run the script that `given` names, write a bug report's zip, and print the zip's path.

    Return 1 if the script, or the folder for the zip, does not exist.
    """
    script = Path(given.script)
    if not script.is_file():
        sys.stderr.write(f"There is no file {script} to run.\n")
        return 1
    stamp = time.strftime("%Y%m%d-%H%M%S")
    output: Path = given.output or Path(f"memeff-report-{stamp}.zip")
    if not output.parent.is_dir():
        sys.stderr.write(f"There is no folder {output.parent} to write {output.name} into.\n")
        return 1
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        code = "from memeff_compile.cli.report_bug import run_here; run_here()"
        command = [sys.executable, "-c", code, name, str(script), *given.arguments]
        status = subprocess.run(command, check=False).returncode
        (folder / "versions.json").write_text(json.dumps(_versions(status), indent=2))
        if not given.no_doctor:
            (folder / "doctor.json").write_text(findings_json(diagnose()))
        names = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
        with zipfile.ZipFile(output, "w", zipfile.ZIP_DEFLATED) as archive:
            for each in names:
                archive.write(folder / each, each)
    ended = "the script ended well" if status == 0 else f"the script ended with status {status}"
    graphs = sum(each.startswith("graphs") for each in names) // 2
    sys.stdout.write(
        f"\n{ended}; {graphs} graph{'' if graphs == 1 else 's'} compiled with memeff\n"
        f"wrote {output.resolve()}: {', '.join(e for e in names if '/' not in e)}"
        f"{', graphs/' if graphs else ''}\n"
        "No weights, no inputs and no script are in it. Texts quote lines of your code and the "
        "names of modules: look before you send it.\n"
    )
    return 0


def _versions(status: int) -> dict[str, object]:
    found: dict[str, object] = {
        "memeff_compile": memeff_compile.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "exit_status": status,
    }
    for package in PACKAGES.split():
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    set_here = {k: v for k, v in sorted(os.environ.items()) if k.startswith(VARIABLES)}
    return {**found, "environment": set_here}


def run_here() -> None:
    """Run the user's script as `python SCRIPT` does, but in this process, and then write the
    reports of the passes."""
    folder, script, *arguments = sys.argv[1:]
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).resolve().parent)
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit:
        raise
    except BaseException:
        said = traceback.format_exc()
        (Path(folder) / "traceback.txt").write_text(said)
        sys.stderr.write(said)
        sys.exit(1)
    finally:
        _write_reports(Path(folder))


def _write_reports(folder: Path) -> None:
    report = memeff_compile.last_report()
    (folder / "report.txt").write_text(f"{report}\n\n{report.details()}\n")
    (folder / "report.json").write_text(report.to_json(include_graphs=False, indent=2))
    for number, graph in enumerate(report.graphs):
        (folder / "graphs").mkdir(exist_ok=True)
        for side in ("before", "after"):
            text = f"# {graph.name}\n{getattr(graph, side)}\n"
            (folder / "graphs" / f"{number:02}-{side}.txt").write_text(text)
