"""The command line of memeff_compile: memeff doctor | explain | fit | demo | options |
report-bug."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import memeff_compile
from memeff_compile.cli import explain, fit, options, report_bug
from memeff_compile.errors import MemeffError


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """A help formatter that shows the default of each argument, unless the default is None or
    False.
    """

    def _get_help_string(self, action: argparse.Action) -> str | None:
        says = action.default not in (None, False, [])
        return super()._get_help_string(action) if says else action.help


class _Parser(argparse.ArgumentParser):
    """An argument parser that suggests the most similar command for a misspelled one."""

    def error(self, message: str) -> NoReturn:
        given = re.search(r"invalid choice: '([^']*)'", message)
        names = (name for a in self._actions for name in a.choices or ())
        near = difflib.get_close_matches(given[1], names, n=1) if given else []
        super().error(f"{message}. Did you mean {near[0]!r}?" if near else message)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    is_module = Path(sys.argv[0]).name == "__main__.py"
    parser = _Parser(
        prog="python -m memeff_compile" if is_module else "memeff", description=__doc__
    )
    version = f"memeff_compile {memeff_compile.__version__}"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(dest="command")

    def add(name: str, does: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=does, description=does, formatter_class=_Help)

    doctor = add("doctor", "check this machine: which engines run, which packages are missing")
    doctor.add_argument("--json", action="store_true", help="print JSON, for a report of a bug")
    said = "check another GPU by its name, such as rtx4090"
    doctor.add_argument("--gpu", metavar="NAME", help=said)
    explain.add_arguments(
        add("explain", "show the rewrites and the memory of a model without running it")
    )
    fit.add_fit_arguments(add("fit", "list the settings with which a model fits on a GPU"))
    options.add_arguments(add("options", "every option, or all about one"))
    demo = add("demo", "train a small Llama with and without the backend")
    demo.add_argument("--steps", type=int, default=30, help="of training")
    one_run = ("NAME", "INNER", "BATCHES", "RESULT")  # of the two, in a process of its own
    demo.add_argument("--run", nargs=4, metavar=one_run, help=argparse.SUPPRESS)
    report_bug.add_arguments(add("report-bug", "run a script and zip what a bug report needs"))
    command = parser.parse_args(arguments)
    if command.command is None:
        parser.print_help()
        return 2
    commands_of = {
        "doctor": _doctor,
        "explain": explain.run,
        "fit": fit.fit,
        "options": options.run,
        "demo": _demo,
        "report-bug": report_bug.run,
    }
    return commands_of[command.command](command)


def _doctor(given: argparse.Namespace) -> int:
    from memeff_compile.cli import doctor

    if given.gpu is not None:
        try:
            sys.stdout.write(doctor.card_text(given.gpu) + "\n")
        except MemeffError as error:
            sys.stderr.write(f"{error}\n")
            return 1
        return 0
    findings = doctor.diagnose()
    text = doctor.findings_json if given.json else doctor.findings_text
    sys.stdout.write(text(findings) + "\n")
    return 0 if doctor.is_usable(findings) else 1


def _demo(given: argparse.Namespace) -> int:
    from memeff_compile.cli import demo

    return demo.run(given)


if __name__ == "__main__":
    sys.exit(main())
