"""Compile a model in place exactly once, even if a framework requests the compilation several
times."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from .. import compat, system
from ..backend.sharded_layers import compile_layers
from ..errors import OptionError
from ..options import Options, key_of

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Request:
    """Settings for compiling a model; they are checked when they are set, not at the first step."""

    options: Options
    dynamic: bool | None
    fullgraph: bool

    @classmethod
    def of(
        cls,
        settings: Mapping[str, object],
        *,
        mode: str | None = None,
        options: Mapping[str, object] | Options | None = None,
        dynamic: bool | None = None,
        fullgraph: bool = False,
    ) -> Request:
        """Create a `Request` from an integration's arguments, which are those of
        `memeff_compile.compile`.

        `settings` contains the options that were passed by keyword.

        Raises:
            OptionError: An option is not valid, or is set twice. Options that compress weights or
                make linear layers ternary also raise this error. It is too late to replace weights,
                because the optimizer already exists.
        """
        given = options.to_dict() if isinstance(options, Options) else dict(options or {})
        named = {key_of(name): value for name, value in settings.items()}
        if twice := sorted(named.keys() & given.keys()):
            raise OptionError(f"{twice[0]} is given by keyword and in options; give it once.")
        checked = Options.parse(mode, {**given, **named})
        if checked.weights not in ("exact", "off"):
            raise OptionError(
                f"memeff.weights is {checked.weights!r}, and a host makes the optimizer before it "
                "lets us compile; call memeff_compile.compress_(model) before the host has the "
                "model."
            )
        for hooks in system.hooks():
            hooks.refuse(checked)
        return cls(checked, dynamic, fullgraph)

    def arguments(self) -> dict[str, Any]:
        """Return the settings as arguments of `torch.compile`."""
        return {
            "backend": "memeff",
            "options": self.options.to_dict() or None,
            "dynamic": self.dynamic,
            "fullgraph": self.fullgraph,
        }


_asked: weakref.WeakKeyDictionary[nn.Module, Request] = weakref.WeakKeyDictionary()
"""The request with which each model was compiled."""


def compile_in_place(model: nn.Module, request: Request) -> bool:
    """Compile a model in place, unless it is compiled already.

    Returns:
        Whether this call compiled the model. A model that is already compiled is not changed.
    """
    compile_layers(model, request.arguments())  # FSDP2 may have sharded it since the last call
    if compat.is_compiled_in_place(model):
        if _asked.get(model, request) != request:
            log.warning(
                "%s is compiled already, with other options; they stay.", type(model).__name__
            )
        return False
    compat.compile_in_place(model, request.arguments())
    _asked[model] = request
    return True
