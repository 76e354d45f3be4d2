"""What a parameter that an optimizer updates in the backward has as an attribute."""

from __future__ import annotations

from torch import Tensor


class Mark:
    """What a parameter that is updated has as an attribute, and none of its copies believes.

    Copies do not have its hook. One that shares attributes is told apart by identity; one that is
    deep or pickled gets an empty set, which any reader of pickles knows.
    """

    def __init__(self, parameter: Tensor) -> None:
        self.owner = id(parameter)

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return set, ()


def is_updated_in_backward(parameter: Tensor | None) -> bool:
    """Whether an `optim_in_backward` that was not taken off updates this very parameter."""
    mark = getattr(parameter, "updated_in_backward", None)
    return isinstance(mark, Mark) and mark.owner == id(parameter)
