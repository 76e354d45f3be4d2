"""Compiles by memeff what Axolotl trains, from its YAML file.

plugins:
  - memeff_compile.integrations.axolotl.MemeffPlugin
memeff:                     # optional
  memeff.logits: eager
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic import create_model

from ..errors import OptionError
from .hosts import host

host("axolotl")

from axolotl.integrations.base import BasePlugin  # noqa: E402

if TYPE_CHECKING:
    from torch import nn
    from transformers import TrainerCallback

_TOP_LEVEL = ("mode", "dynamic", "fullgraph")


MemeffArgs: Any = create_model("MemeffArgs", memeff=(dict[str, Any] | None, None))
"""What the plugin adds to the YAML file: options by the names of docs/options.md, and mode, dynamic
or fullgraph of torch.compile.
"""


class MemeffPlugin(BasePlugin):  # type: ignore[misc]
    """Give Axolotl's trainer the callback that compiles its model in place.

    Raises:
        OptionError: From the configuration: an option has an unknown name, a wrong type or a
            value out of range, or Axolotl is told to compile, too, or to replace the loss.
    """

    def get_input_args(self) -> str:
        """Return the name of the model of what the plugin reads from the YAML file."""
        return f"{__name__}.MemeffArgs"

    def register(self, cfg: Mapping[str, Any]) -> None:
        """Check the options before Axolotl loads data and model."""
        self._callback(cfg)

    def add_callbacks_pre_trainer(
        self, cfg: Mapping[str, Any], model: nn.Module
    ) -> list[TrainerCallback]:
        """Return the callback."""
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
