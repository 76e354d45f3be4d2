"""Observe the arguments and results of the attention calls that a running model makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch.overrides import TorchFunctionMode


class Watch(TorchFunctionMode):
    """An observer that calls a given function after every call of scaled_dot_product_attention.

    The given function gets the result and the arguments of the attention call. A tensor that the
    given function returns replaces the result of the attention call.
    """

    def __init__(self, seen: Callable[..., object]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        result = func(*args, **(kwargs or {}))
        if func is F.scaled_dot_product_attention:
            instead = self.seen(result, *args, **(kwargs or {}))
            return result if instead is None else instead
        return result
