"""Compile the model that Axolotl trains, with settings from its YAML file.

Write these keys into the YAML file; `memeff` is optional:

    plugins: [memeff_compile.integrations.axolotl.MemeffPlugin]
    memeff: {memeff.logits: eager}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..errors import OptionError
from .hosts import host

host("axolotl")

from axolotl.integrations.base import BasePlugin  # noqa: E402
from pydantic import create_model  # noqa: E402

if TYPE_CHECKING:
    from torch import nn
    from transformers import TrainerCallback

_TOP_LEVEL = ("mode", "dynamic", "fullgraph")


MemeffArgs: Any = create_model("MemeffArgs", memeff=(dict[str, Any] | None, None))
"""The keys that the plug-in adds to the YAML file.

Keys are the names of options in docs/options.md, and mode, dynamic or fullgraph of torch.compile.
"""


class MemeffPlugin(BasePlugin):  # type: ignore[misc]
    """Axolotl plug-in that adds a callback to Axolotl's trainer; the callback compiles the model in
    place.

    Raises:
        OptionError: While Axolotl reads the configuration: an option is not valid; or another
            setting makes Axolotl itself compile the model or replace the loss.
    """

    def get_input_args(self) -> str:
        """Return the name of the pydantic model for the plug-in's keys in the YAML file."""
        return f"{__name__}.MemeffArgs"

    def register(self, cfg: Mapping[str, Any]) -> None:
        """Check the options before Axolotl loads the data and the model."""
        self._callback(cfg)

    def add_callbacks_pre_trainer(
        self, cfg: Mapping[str, Any], model: nn.Module
    ) -> list[TrainerCallback]:
        """Return the callback that compiles the model."""
        return [self._callback(cfg)]

    def _callback(self, cfg: Mapping[str, Any]) -> TrainerCallback:
        from .transformers import MemeffCallback

        for name in ("torch_compile", "liger_fused_linear_cross_entropy", "cut_cross_entropy"):
            if cfg.get(name):
                raise OptionError(
                    f"{name} is on in the configuration of Axolotl, next to memeff, which does the "
                    f"same; set {name}: false."
                )
        given = dict(cfg.get("memeff") or {})
        top = {name: given.pop(name) for name in _TOP_LEVEL if name in given}
        return MemeffCallback(options=given, **top)
