"""How ops become PyTorch's: schema, computation, fake and gradient in one place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from .. import compat
from ..errors import DoubleBackwardError

Function: TypeAlias = Callable[..., Any]
T = TypeVar("T")

_LIBRARY = torch.library.Library("memeff", "FRAGMENT")


def op(
    schema: str,  # name, arguments and results
    compute: Function,  # serves every device
    # returns empty results; without it `compute` is written in terms of other ops, and these are
    # what a compiler sees
    fake: Function | None = None,
    *,
    backward: Function | None = None,  # as `torch.library.register_autograd` takes them
    setup_context: Function | None = None,  # likewise
    tags: tuple[torch.Tag, ...] = (),  # beside the one that says the op is fit for a compiler
) -> Any:  # an overload, called with what its schema says
    """Define an op of the namespace memeff and return its overload."""
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
    return getattr(torch.ops.memeff, name).default


def taking(arguments: Callable[..., T], *functions: Callable[[T], Any]) -> list[Function]:
    """Return functions of one named tuple as functions of what it is made of, as an op has them."""

    def apart(function: Callable[[T], Any]) -> Function:
        return lambda *args, **kwargs: function(arguments(*args, **kwargs))

    return [apart(function) for function in functions]


def heads_inside(like: Tensor) -> Tensor:
    """Return an empty (B, H, L, D) laid out as (B, L, H, D), as models want it back."""
    batch, heads, length, depth = like.shape
    return like.new_empty((batch, length, heads, depth)).transpose(1, 2)


def refusing(error: type[Exception], sentence: str) -> Function:
    """Return a backward for an op that has none, or a backward op's: it raises."""

    def refuse(ctx: Any, *grads: Any) -> Any:
        raise error(sentence)

    return refuse


def only_first(gradients: Function, refusal: str) -> Function:
    """Return `gradients` for where a second derivative may be asked for: that is refused."""

    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *arguments: Any) -> Any:
            return gradients(*arguments)

        backward = staticmethod(refusing(DoubleBackwardError, refusal))

    return Once.apply


def twin(of: Any, compute: Function, fake: Function) -> Any:  # two overloads
    """Define an op once more, without a gradient: what code below autograd calls; return both."""
    schema = str(compat.schema(of)).partition("::")[2]
    name = schema.partition("(")[0]
    below = op(schema.replace(name, f"{name}_below", 1), compute, fake)
    _LIBRARY.impl(f"{name}_below", torch.library.fallthrough_kernel, "Autograd")
    return of, below
