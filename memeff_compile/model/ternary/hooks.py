"""Hooks through which `memeff_compile.compile` and `undo` make a model's linear layers ternary and
restore them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from memeff_compile.errors import OptionError
from memeff_compile.model.changes import verb_report
from memeff_compile.model.ternary.system import SYSTEM
from memeff_compile.options import Options
from memeff_compile.system import Hooks, Request, Undone

_SWITCHES = ("exact", "off")
"""Values of `memeff.ternary` that change no model; the others are recipes."""


class TernaryHooks(Hooks):
    """The hooks that make the linear layers of a model ternary before compilation, and make them
    dense again in `undo`."""

    def refuse(self, options: Options) -> None:
        if options.ternary not in _SWITCHES:
            raise OptionError(
                f"memeff.ternary is {options.ternary!r}, and a backend cannot change the linears "
                "of a model: it sees graphs. Call "
                f"memeff_compile.ternarize_(model, {options.ternary!r}) before torch.compile, or "
                f"memeff_compile.compile(model, ternary={options.ternary!r}), which does so; "
                "memeff.ternary itself is 'exact' or 'off'."
            )

    def wants(self, request: Request) -> bool:
        return request.options.ternary not in _SWITCHES

    def check(self, request: Request) -> None:
        from memeff_compile.model.ternary.verbs import plan_of

        options: Options = request.options
        if options.weights not in _SWITCHES:
            raise OptionError(
                f"ternary is {options.ternary!r} and weights {options.weights!r}; give one: a "
                "ternary linear rounds its weight anew in each step, and pack_ternary_ stores it "
                "in two bits afterwards."
            )
        plan_of(_module(request), options.ternary, skip=_skip(options))

    def prepare(self, request: Request) -> Options:
        from memeff_compile.model.ternary.verbs import ternarize_

        options: Options = request.options
        ternarize_(_module(request), options.ternary, skip=_skip(options))
        return replace(options, ternary="exact")

    def undo(self, model: nn.Module) -> Undone:
        from memeff_compile.model.ternary.verbs import dense_again

        undone = dense_again(model)
        reports = (verb_report(each, "rotate_hidden_states_") for each in model.modules())
        if all(report is None for report in reports):
            return undone
        why = "its hidden states stay rotated, with the same logits: load the model again"
        return replace(undone, left={**undone.left, "(model)": why})


def _module(request: Request) -> Any:  # noqa: ANN401
    """Return the model that the caller asked to compile; `ternarize_` raises an error if this model
    is not a module.
    """
    return request.model


def _skip(options: Options) -> tuple[str, ...]:
    """Return the paths of modules that stay dense, because an option tells the ternary passes to
    skip them."""
    passes = ("*", *(each.facts.name for each in SYSTEM.passes))
    return tuple(path for name in passes for path in options.skip.get(name, ()))
