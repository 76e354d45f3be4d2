"""`python -m memeff_compile doctor | explain | tune | options | demo`."""

from __future__ import annotations

import argparse
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from memeff_compile.cli.explain import add_arguments, run
from memeff_compile.cli.tune import add_tune_arguments, tune

DEMO = Path(__file__).resolve().parent.parent / "examples" / "train_tiny_llama.py"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m memeff_compile", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("doctor", help="what this machine can run, and what is missing")
    explain = commands.add_parser("explain", help="what would happen to a model, and its memory")
    add_arguments(explain)
    measure = commands.add_parser("tune", help="measure this machine's GPU and store what is best")
    add_tune_arguments(measure)
    commands.add_parser("options", help="every option, as docs/options.md")
    commands.add_parser("demo", help="train a small Llama with and without the backend")
    command, rest = parser.parse_known_args(arguments)
    if rest and command.command != "demo":
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if command.command == "doctor":
        return _doctor()
    if command.command == "explain":
        return run(command)
    if command.command == "tune":
        return tune(command)
    if command.command == "options":
        return _options()
    return _demo(rest)


def _doctor() -> int:
    from memeff_compile.cli.doctor import diagnose, findings_text, is_usable

    findings = diagnose()
    sys.stdout.write(findings_text(findings) + "\n")
    return 0 if is_usable(findings) else 1


def _options() -> int:
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
