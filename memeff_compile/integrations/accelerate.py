"""Compile the models that an Accelerator of accelerate prepares.

Usage:

    Accelerator(dynamo_plugin=MemeffPlugin())
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..options import Options
from .hosts import host
from .in_place import Request

host("accelerate", "1.10")

from accelerate.utils import TorchDynamoPlugin  # noqa: E402


class MemeffPlugin(TorchDynamoPlugin):  # type: ignore[misc]
    """Make `Accelerator.prepare(model)` call `torch.compile` with `backend="memeff"`.

    The arguments are those of `memeff_compile.compile`, including options by keyword:
    `MemeffPlugin(logits="eager")`. The options are checked when the plug-in is created. The plug-in
    ignores the environment variables `ACCELERATE_DYNAMO_...`, which `accelerate launch` sets.

    Args:
        mode: An Inductor mode, such as "reduce-overhead".
        options: As in `torch.compile(options=...)`, or an `Options`.
        dynamic: As in `torch.compile`.
        fullgraph: As in `torch.compile`.
        use_regional_compilation: Compile the repeated blocks and the rest of the model separately,
            which shortens compilation. With this setting, the output projection is in a separate
            graph, which returns deferred logits (computed only on first use). The loss is computed
            from the deferred logits, outside of the graphs.
        **settings: Options of memeff_compile by keyword.

    Raises:
        OptionError: For the same reasons as `memeff_compile.compile`.
    """

    def __init__(
        self,
        *,
        mode: str | None = None,
        options: Mapping[str, object] | Options | None = None,
        dynamic: bool | None = None,
        fullgraph: bool = False,
        use_regional_compilation: bool = False,
        **settings: object,
    ) -> None:
        self.request = Request.of(
            settings, mode=mode, options=options, dynamic=dynamic, fullgraph=fullgraph
        )
        self.backend = "memeff"  # accelerate compares it with "NO"; its list of backends is closed
        self.mode = mode
        self.fullgraph = fullgraph
        self.dynamic = dynamic
        self.options = self.request.options.to_dict() or None
        self.disable = False
        self.use_regional_compilation = use_regional_compilation

    def __post_init__(self) -> None:
        """Do nothing, because `__init__` sets every setting. In accelerate's class, this method
        reads missing settings from environment variables, and turns the backend's name into an enum
        member.
        """

    def to_dict(self) -> dict[str, Any]:
        """Return the settings in the form that accelerate logs and stores."""
        return {
            **self.request.arguments(),
            "mode": self.mode,
            "use_regional_compilation": self.use_regional_compilation,
        }

    def to_kwargs(self) -> dict[str, Any]:
        """Return the arguments of `torch.compile`; the Inductor mode is passed as an entry of
        `options`."""
        return self.request.arguments()
