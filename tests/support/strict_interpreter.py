"""Triton's interpreter, as strict about masks as that of Triton 3.9, whichever version runs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np


def refuse_masks_of_numbers() -> None:
    """Let loads and stores of the interpreter raise for a mask that is not boolean.

    A condition on one number that is spread over a tile is an integer there, although its type is
    a bit: write ``offs < tl.where(condition, size, 0)``, and not ``(offs < size) & condition``.
    Before 3.9 the interpreter takes it, so that a kernel passes here and fails on a newer Triton.
    """
    from triton.runtime import interpreter as given

    builder: Any = given.InterpreterBuilder
    builder.create_masked_load = _strict(builder.create_masked_load, 1)
    builder.create_masked_store = _strict(builder.create_masked_store, 2)


def _strict(function: Callable[..., Any], place: int) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(self: Any, *given: Any, **named: Any) -> Any:
        kind = np.asarray(given[place].data).dtype
        if kind.kind != "b":
            raise ValueError(f"a mask has to be boolean, and this one is of {kind}")
        return function(self, *given, **named)

    return run
