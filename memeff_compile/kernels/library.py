"""Register ops with PyTorch: one call takes the schema, the computation, the fake implementation
and the gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from .. import compat
from ..errors import DoubleBackwardError
from ._triton.launch import Launch as Launch
from ._triton.launch import noted as noted
from ._triton.stored import unpack as unpack

Function: TypeAlias = Callable[..., Any]
T = TypeVar("T")

_LIBRARY = torch.library.Library("memeff", "FRAGMENT")
_DIRECT: list[Any] = []


def op(
    schema: str,  # name, arguments and results
    compute: Function,  # serves every device
    # returns empty results; without this argument, `compute` is composed of other ops, which a
    # compiler sees
    fake: Function | None = None,
    *,
    backward: Function | None = None,  # as `torch.library.register_autograd` takes them
    setup_context: Function | None = None,  # likewise
    # the function that Inductor's code calls, with plain tensors checked at compile time
    direct: Function | None = None,
    tags: tuple[torch.Tag, ...] = (),  # tags in addition to `pt2_compliant_tag`
) -> Any:  # an overload, called as its schema says
    """Define an op in the namespace memeff and return its overload."""
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag, *tags))
    kind = "CompositeImplicitAutograd" if fake is None else "CompositeExplicitAutograd"
    _LIBRARY.impl(name, compute, kind)
    if fake is not None:
        torch.library.register_fake(f"memeff::{name}", fake, lib=_LIBRARY)
    if backward is not None:
        torch.library.register_autograd(
            f"memeff::{name}", backward, setup_context=setup_context, lib=_LIBRARY
        )
    found = getattr(torch.ops.memeff, name).default
    found.compute = compute
    if direct is not None:
        # code from Inductor's cache calls this function, even if this process compiled no graph
        found.direct = direct
        _DIRECT.append(found)
    return found


def taking(arguments: Callable[..., T], *functions: Callable[[T], Any]) -> list[Function]:
    """Convert functions that take one named tuple to functions that take the tuple's fields one by
    one, as ops do."""

    def apart(function: Callable[[T], Any]) -> Function:
        return lambda *args, **kwargs: function(arguments(*args, **kwargs))

    return [apart(function) for function in functions]


def heads_inside(like: Tensor) -> Tensor:
    """Return an empty (B, H, L, D) tensor whose memory has the order (B, L, H, D), which models
    use."""
    batch, heads, length, depth = like.shape
    return like.new_empty((batch, length, heads, depth)).transpose(1, 2)


def refusing(error: type[Exception], sentence: str) -> Function:
    """Return a backward function that raises `error`, for an op that has no gradient."""

    def refuse(ctx: Any, *grads: Any) -> Any:
        raise error(sentence)

    return refuse


def only_first(gradients: Function, refusal: str) -> Function:
    """Wrap an op's `gradients` function so that it raises an error if a second derivative is
    requested.
    """

    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *arguments: Any) -> Any:
            return gradients(*arguments)

        backward = staticmethod(refusing(DoubleBackwardError, refusal))

    return Once.apply


def direct_in_inductor() -> None:
    """Let the code that Inductor generates call an op's Python function directly, if the op has
    one."""
    for found in _DIRECT:
        compat.call_in_inductor(found)
