"""Compile the models inside a LightningModule in place.

Usage:

    lightning.Trainer(callbacks=[MemeffCallback()])
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import nn

from ..errors import UnsupportedInputError
from ..options import Options
from .hosts import host
from .in_place import Request, compile_in_place

host("lightning", "2.4")

from lightning.pytorch.callbacks import Callback  # noqa: E402

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class MemeffCallback(Callback):  # type: ignore[misc]
    """Compile the models of a LightningModule in place with `backend="memeff"`.

    Lightning calls `training_step` instead of the module, so compiling the module itself would
    have no effect. Instead, the callback compiles, in place, each child module that has parameters.
    The callback runs before training, validation, testing and prediction. Children that are already
    compiled are not changed.

    Args:
        *children: Names of the children to compile, such as "model" or "generator.body"; by default
            all direct children with parameters.
        mode: An Inductor mode, such as "reduce-overhead".
        options: As in `torch.compile(options=...)`, or an `Options`.
        dynamic: As in `torch.compile`.
        fullgraph: As in `torch.compile`.
        **settings: Options of memeff_compile by keyword, as in `memeff_compile.compile`.

    Raises:
        OptionError: For the same reasons as `memeff_compile.compile`.
        UnsupportedInputError: When training begins: the LightningModule has no child with one of
            the given names, or no child with parameters.
    """

    def __init__(
        self,
        *children: str,
        mode: str | None = None,
        options: Mapping[str, object] | Options | None = None,
        dynamic: bool | None = None,
        fullgraph: bool = False,
        **settings: object,
    ) -> None:
        self.children = children
        self.request = Request.of(
            settings, mode=mode, options=options, dynamic=dynamic, fullgraph=fullgraph
        )

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compile child modules of `pl_module` in place before training.

        The arguments of the callback name these modules. By default, they are all direct children
        with parameters.
        """
        self._compile(pl_module)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compile child modules of `pl_module` in place before validation.

        The arguments of the callback name these modules. By default, they are all direct children
        with parameters.
        """
        self._compile(pl_module)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compile child modules of `pl_module` in place before testing.

        The arguments of the callback name these modules. By default, they are all direct children
        with parameters.
        """
        self._compile(pl_module)

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compile child modules of `pl_module` in place before prediction.

        The arguments of the callback name these modules. By default, they are all direct children
        with parameters.
        """
        self._compile(pl_module)

    def _compile(self, module: nn.Module) -> None:
        named = dict(module.named_modules())
        if missing := [name for name in self.children if name not in named]:
            has = ", ".join(name for name, _ in module.named_children())
            said = f"{type(module).__name__} has no child {missing[0]!r}; its children are {has}."
            raise UnsupportedInputError(said)
        chosen = [named[name] for name in self.children] or [
            child for child in module.children() if any(True for _ in child.parameters())
        ]
        if not chosen:
            raise UnsupportedInputError(
                f"{type(module).__name__} has no child with parameters. Give it its model as an "
                "attribute (self.model = ...), and call that in training_step."
            )
        for child in chosen:
            compile_in_place(child, self.request)
