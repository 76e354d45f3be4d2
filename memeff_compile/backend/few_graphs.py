"""Compile two graphs for batches of any size: all sizes that vary become symbolic at once.

Dynamo compiles the first batch for its exact sizes. When a size differs for the first time, Dynamo
makes that size symbolic and compiles again. So each size that varies costs one more graph. With
this module, batch size and sequence length become symbolic together, when the second shape arrives.
This module affects only models that are compiled through its functions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from .. import compat


def for_any_batch(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a compiled call that trains on batches of any size and length with two graphs.

    The first graph is compiled for the sizes of the first call, the second for all others. As usual
    in PyTorch, Dynamo compiles a separate graph for a size of 1. Calls without gradients are
    unaffected: Dynamo still compiles a decoding step for its exact number of sequences.
    """
    first: dict[Any, torch.Size] = {}
    varies = False

    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal varies
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return call(*args, **kwargs)
        given = dict(_tensors(args, kwargs))
        if not varies:
            varies = any(first.setdefault(n, each.shape) != each.shape for n, each in given.items())
        if varies:
            for name, tensor in given.items():
                for dim in _may_vary(tensor, first.get(name, tensor.shape)):
                    compat.mark_varying(tensor, dim)
        return call(*args, **kwargs)

    return run


def _tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[Any, Tensor]]:
    for name, value in chain(enumerate(args), kwargs.items()):
        if isinstance(value, Tensor) and value.dim() > 0:
            yield name, value


def _may_vary(tensor: Tensor, first: torch.Size) -> set[int]:
    """Return the axes of an input whose size may vary: batch, length, and each axis whose size
    differs from its size in the first call.

    Token ids, labels, masks and hidden states have batch and length as their first two axes. Other
    tensors, such as images, have only a batch axis.
    """
    has_length = tensor.dim() == 3 if tensor.is_floating_point() else tensor.dim() > 1
    axes = {0, 1} if has_length else {0}
    if tensor.dim() == len(first):
        axes |= {axis for axis, size in enumerate(tensor.shape) if size != first[axis]}
    return axes


def cause_of(reason: str) -> str:
    """Turn Dynamo's message on why it compiles a function again into plain words.

    Example:
        >>> cause_of("0/0: tensor 'x' size mismatch at index 1. expected 32, actual 31")
        'x.size()[1] was 32 and is 31'
        >>> cause_of("0/1: 2 <= x.size()[0]  # y = x + 1  # model.py:3 in forward")
        'the earlier graph needs 2 <= x.size()[0]'
    """
    text = re.sub(r"^\d+/\d+: ", "", reason).partition("\n")[0].partition("  # ")[0].strip()
    found = re.fullmatch(
        r"tensor '(.*)' size mismatch at index (\d+)\. expected (\d+), actual (\d+)", text
    )
    if found:
        name, axis, before, now = found.groups()
        return f"{_plain(name)}.size()[{axis}] was {before} and is {now}"
    if re.match(r"len\(\w*kwargs\w*\) ==", text):
        return "other arguments are given"
    return f"the earlier graph needs {_plain(text)}" if text else ""


def _plain(text: str) -> str:
    """Return an input's name without Dynamo's containers: `input_ids` for `kwargs['input_ids']`."""
    text = re.sub(r"\bL\['(\w+)'\]", r"\1", text)
    return re.sub(r"\bkwargs\['(\w+)'\]", r"\1", text)
