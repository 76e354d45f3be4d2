"""Run a model on the user's inputs, to observe its modules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


def runs_of(inputs: object) -> Iterable[Any] | None:
    """Return a list with the arguments of each run of a model, or None if the inputs have an
    unsupported form.

    A single mapping or tensor gives one run.
    """
    if isinstance(inputs, (Tensor, Mapping)):
        return [inputs]
    return inputs if isinstance(inputs, Iterable) and not isinstance(inputs, str) else None


def call(model: nn.Module, given: Any) -> Any:  # noqa: ANN401
    """Call a model with a mapping of keyword arguments, a list of arguments, or a single
    argument."""
    if isinstance(given, Mapping):
        return model(**given)
    return model(*given) if isinstance(given, (tuple, list)) else model(given)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """In this context, put a model in eval mode, without dropout; at the end of the context,
    restore each module's mode.
    """
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
