"""What a parameter that an optimizer updates in the backward has as an attribute."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

Announce = Callable[[Sequence[Tensor]], None]


class Mark:
    """What a parameter that is updated has as an attribute, and none of its copies believes.

    Copies do not have its hook. One that shares attributes is told apart by identity; one that is
    deep or pickled gets an empty set, which any reader of pickles knows.
    """

    def __init__(
        self, parameter: Tensor, announce: Announce | None = None, keeps: object = None
    ) -> None:
        self.owner = id(parameter)
        self.keeps = keeps  # what is to live as long as the parameter
        # tells who updates it that gradients of these parameters come next, and nothing in between
        self.announce = announce

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return set, ()


def is_updated_in_backward(parameter: Tensor | None) -> bool:
    """Whether an `optim_in_backward` that was not taken off updates this very parameter."""
    mark = getattr(parameter, "updated_in_backward", None)
    return isinstance(mark, Mark) and mark.owner == id(parameter)


def announce(parameters: Sequence[Tensor]) -> None:
    """Say that the gradients of these parameters are there, all of them, and about to be given."""
    told: dict[Announce, list[Tensor]] = {}
    for parameter in parameters:
        mark = getattr(parameter, "updated_in_backward", None)
        if isinstance(mark, Mark) and mark.owner == id(parameter) and mark.announce is not None:
            told.setdefault(mark.announce, []).append(parameter)
    for tell, several in told.items():
        tell(several)
