"""Reports of functions that change models in place; the latest reports are stored for each
model."""

from __future__ import annotations

import json
import weakref
from collections.abc import Mapping
from typing import TypeVar

from torch import nn

from memeff_compile import compat
from memeff_compile.errors import OptionError, UnsupportedInputError
from memeff_compile.report import VerbReport, fold_names

Kept = TypeVar("Kept", bound=VerbReport)


class Changes(VerbReport, int):
    """The report of a function that changed a model in place.

    This report is also an integer, the number of changed modules or weights.
    """

    verb: str  # its name
    places: Mapping[str, str]  # the new state by name of the module or weight
    left: Mapping[str, str]  # candidates left unchanged, and why
    _sentence: str

    def __new__(
        cls, verb: str, sentence: str, places: Mapping[str, str], left: Mapping[str, str] | None
    ) -> Changes:
        """Create the report, an integer that equals the number of changes, and set its
        attributes."""
        self = super().__new__(cls, len(places))
        self.verb, self._sentence, self.places, self.left = verb, sentence, places, left or {}
        return self

    def __getnewargs__(self) -> tuple[object, ...]:  # type: ignore[override]
        return self.verb, self._sentence, self.places, self.left

    def __str__(self) -> str:
        """Return a summary, then the new state of each module or weight, or the reason why it did
        not change.

        Layers with the same text in the report share one line; `details` has one line per layer.
        """
        return self._text(fold_names(self._said()))

    def details(self) -> str:
        """Return a summary, then one line per module or weight, which gives its new state, or the
        reason why it did not change."""
        return self._text(self._said())

    def _said(self) -> list[tuple[str, str]]:
        left = ((place, f"left: {why}") for place, why in self.left.items())
        return [*self.places.items(), *left]

    def _text(self, said: list[tuple[str, str]]) -> str:
        lines = [f"{self.verb}: {self._sentence}", *(f"  {p}  {is_}" for p, is_ in said)]
        return "\n".join(lines)

    def to_json(self, *, indent: int | None = None) -> str:
        """Return as JSON the name of the function that changed the model, the summary, and the
        entries of `details()`."""
        said = {"verb": self.verb, "summary": self.summary}
        return json.dumps({**said, "places": self.places, "left": self.left}, indent=indent)


VERBS = (
    "compress_",
    "decompress_",
    "load_compressed_",
    "pack_ternary_",
    "rotate_hidden_states_",
    "ternarize_",
    "undo",
)
_kept: weakref.WeakKeyDictionary[nn.Module, dict[str, VerbReport]] = weakref.WeakKeyDictionary()


def require_module(model: object, verb: str) -> None:
    """Raise UnsupportedInputError if the argument is not a module."""
    if not isinstance(model, nn.Module):
        raise UnsupportedInputError(
            f"{verb} was given a {type(model).__name__}; it needs an nn.Module: the model itself."
        )


def keep(model: nn.Module, verb: str, report: Kept) -> Kept:
    """Store the report of a function that changed a model in place, and return the report.

    The stored report becomes the model's latest report, which `verb_report` returns by default.
    `verb` is the function's name, such as "ternarize_".
    """
    reports = _kept.setdefault(compat.without_compile(model), {})
    reports.pop(verb, None)
    reports[verb] = report
    return report


def verb_report(model: nn.Module, verb: str | None = None) -> VerbReport | None:
    """Return the report of the last function that changed a model in place, or None.

    Args:
        model: the model that was passed to that function; it may have been compiled afterwards.
        verb: the name of a function, such as "ternarize_", to get the latest report of this
            function.

    Example:
        >>> print(memeff_compile.verb_report(model).summary)  # doctest: +SKIP
    """
    if verb is not None and verb not in VERBS:
        raise OptionError(f"verb_report: the verb is {verb!r}; one of {', '.join(VERBS)} is needed")
    require_module(model, "verb_report")
    reports = _kept.get(compat.without_compile(model), {})
    return reports.get(verb) if verb else next(reversed(reports.values()), None)
