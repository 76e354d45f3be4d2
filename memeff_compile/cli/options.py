"""`memeff options`: list all options, one per line, or describe one option in full."""

from __future__ import annotations

import argparse
import re
import sys
import textwrap

from ..errors import OptionError
from ..options import PREFIX, OptionFacts, facts_of, option_facts, options_page
from ..report import text_width

_LABEL = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command `memeff options`."""
    parser.add_argument("name", nargs="?", help="of one, such as memeff.logits or logits")
    parser.add_argument("--page", action="store_true", help="print docs/options.md")


def run(given: argparse.Namespace) -> int:
    """Print all options of this package, one option in full, or `docs/options.md`.

    Return the exit status, which is 1 for an unknown option."""
    if given.page:
        sys.stdout.write(options_page())
        return 0
    try:
        text = options_text() if given.name is None else option_text(given.name)
    except OptionError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(text + "\n")
    return 0


def options_text() -> str:
    """Return one line of text per option, with the option's possible values."""
    every = option_facts()
    width = max(len(each.key) for each in every) + 2
    lines = []
    for each in every:
        room = max(text_width() - width, 20)
        values = textwrap.wrap(_plain(each.values), room)
        lines.append(f"\n{' ' * width}".join([f"{each.key:<{width}}{values[0]}", *values[1:]]))
    return "\n".join([*lines, "", "`memeff options NAME` says what one does, with an example."])


def option_text(name: str) -> str:
    """Return the full description of an option.

    For an unknown name, the function raises OptionError, which suggests a similar name.
    """
    facts = facts_of(name if name.startswith(PREFIX) else PREFIX + name)
    rows = {
        "takes": _plain(facts.values),
        "default": _plain(facts.default),
        "does": _plain(facts.meaning),
    }
    lines = [facts.key]
    for label, text in rows.items():
        lines += _row(label, text)
    for number, code in enumerate(_examples(facts)):
        lines.append(f"  {'' if number else 'example':<{_LABEL}}{code}")
    return "\n".join(lines)


def _row(label: str, text: str) -> list[str]:
    wrapped = textwrap.wrap(text, max(text_width() - _LABEL - 2, 20), break_on_hyphens=False)
    return [f"  {'' if n else label:<{_LABEL}}{line}" for n, line in enumerate(wrapped)]


def _examples(facts: OptionFacts) -> list[str]:
    """Return code examples that set the option, one for each way to set it."""
    by_keyword = ", ".join(f"{name}={value!r}" for name, value in facts.example.items())
    found = [f"memeff_compile.compile(model, {by_keyword})"]
    if facts.key != f"{PREFIX}weights":  # a backend refuses this option
        keys = {facts.keys[name]: value for name, value in facts.example.items()}
        found.append(f'model.compile(backend="memeff", options={keys!r})')
    return found


def _plain(text: str) -> str:
    """Return a sentence of `docs/options.md` without backticks."""
    return re.sub(r"`([^`]*)`", r"\1", text)
