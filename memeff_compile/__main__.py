"""memeff doctor | explain | fit | tune | demo | options: the commands of memeff_compile."""

from __future__ import annotations

import argparse
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

import memeff_compile
from memeff_compile.cli.explain import add_arguments, run
from memeff_compile.cli.fit import add_fit_arguments, fit
from memeff_compile.cli.tune import add_tune_arguments, tune

DEMO = Path(__file__).resolve().parent.parent / "examples" / "train_tiny_llama.py"


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Names the defaults that say something."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        says = action.default not in (None, False, [])
        return super()._get_help_string(action) if says else action.help


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    is_module = Path(sys.argv[0]).name == "__main__.py"
    parser = argparse.ArgumentParser(
        prog="python -m memeff_compile" if is_module else "memeff", description=__doc__
    )
    version = f"memeff_compile {memeff_compile.__version__}"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(dest="command", required=True)

    def add(name: str, does: str, *, add_help: bool = True) -> argparse.ArgumentParser:
        return commands.add_parser(
            name, help=does, description=does, formatter_class=_Help, add_help=add_help
        )

    add("doctor", "what this machine can run, and what is missing")
    add_arguments(add("explain", "what would happen to a model, and its memory"))
    add_fit_arguments(add("fit", "which settings train or serve a model on a GPU"))
    add_tune_arguments(add("tune", "measure this machine's GPU and store what is best"))
    add("options", "every option, as docs/options.md")
    # What follows is the demo's own, --help included.
    add("demo", "train a small Llama with and without the backend", add_help=False)
    command, rest = parser.parse_known_args(arguments)
    if rest and command.command != "demo":
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if command.command == "demo":
        return _demo(rest)
    commands_of = {"doctor": _doctor, "explain": run, "fit": fit, "tune": tune, "options": _options}
    return commands_of[command.command](command)


def _doctor(_: argparse.Namespace) -> int:
    from memeff_compile.cli.doctor import diagnose, findings_text, is_usable

    findings = diagnose()
    sys.stdout.write(findings_text(findings) + "\n")
    return 0 if is_usable(findings) else 1


def _options(_: argparse.Namespace) -> int:
    from memeff_compile.options import options_page

    sys.stdout.write(options_page())
    return 0


def _demo(arguments: list[str]) -> int:
    if not DEMO.exists():
        sys.stderr.write(
            "The demo is a file of the repository, examples/train_tiny_llama.py, and is not part "
            "of the installed package. Clone the repository and run `make demo` there.\n"
        )
        return 1
    sys.argv = [str(DEMO), *arguments]
    runpy.run_path(str(DEMO), run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main())
