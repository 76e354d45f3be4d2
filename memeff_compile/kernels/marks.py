"""The attribute that marks a parameter as updated during the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

Announce = Callable[[Sequence[Tensor]], None]


class Mark:
    """A mark for a parameter that is updated during the backward pass. Copies of the parameter are
    not marked.

    A copy is not marked because it does not have the hook that updates the parameter. A copy that
    shares the parameter's attributes is recognised because the copy is a different object than the
    marked parameter. A deep copy or a pickled copy gets an empty set instead of the mark, so
    pickles can be read without this package.
    """

    def __init__(
        self, parameter: Tensor, announce: Announce | None = None, keeps: object = None
    ) -> None:
        self.owner = id(parameter)
        self.keeps = keeps  # an object to keep alive as long as the parameter
        # tells the updater that the gradients of these parameters come next, without others in
        # between

        self.announce = announce

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return set, ()


def is_updated_in_backward(parameter: Tensor | None) -> bool:
    """Return whether `optim_in_backward` updates a parameter during the backward pass.

    `optim_in_backward` is a function of this package that registers a hook on each model parameter
    that it updates. The hook runs the optimizer step as soon as the parameter's gradient exists.
    With `accumulate=n`, the step runs only in every n-th backward pass.
    """
    mark = getattr(parameter, "updated_in_backward", None)
    return isinstance(mark, Mark) and mark.owner == id(parameter)


def announce(parameters: Sequence[Tensor]) -> None:
    """Tell `optim_in_backward` that all gradients of the given parameters exist.

    The hooks that update these parameters are about to run. So `optim_in_backward` can update
    several compressed weights in one kernel launch.
    """
    told: dict[Announce, list[Tensor]] = {}
    for parameter in parameters:
        mark = getattr(parameter, "updated_in_backward", None)
        if isinstance(mark, Mark) and mark.owner == id(parameter) and mark.announce is not None:
            told.setdefault(mark.announce, []).append(parameter)
    for tell, several in told.items():
        tell(several)
