"""Repeated blocks: a deep model is captured at two small depths, and what a block adds is read off.

Memory at any one moment is a constant plus a multiple of the number of blocks that came before or
are still to come, so two depths give every depth exactly.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

from torch import nn

from ..errors import ExplainError

INDEX_NAMES = ("layer_idx", "layer_id", "layer_index", "layer_number", "idx", "index")


@dataclass(frozen=True)
class Stack:
    """A list of blocks that repeats."""

    path: str  # as in `named_modules()`
    depth: int  # number of blocks
    period: int  # after how many blocks the list repeats; 2 where two kinds of attention alternate

    @property
    def small(self) -> int:
        """The smaller depth to capture: a first and a last block at least."""
        return max(2, self.period) + (self.depth - max(2, self.period)) % self.period

    @property
    def large(self) -> int:
        """The larger depth to capture: one period more."""
        return self.small + self.period

    @property
    def rest(self) -> int:
        """How many more periods the model has than the larger depth."""
        return (self.depth - self.large) // self.period


def stacks_of(model: object) -> list[Stack]:
    """Return the outermost lists of blocks that are worth shortening; all have the same rest."""
    if not isinstance(model, nn.Module):
        return []
    found: list[Stack] = []
    for path, module in model.named_modules():
        if any(path.startswith(f"{stack.path}.") for stack in found):
            continue
        if isinstance(module, nn.ModuleList) and len(module) > 2:
            stack = Stack(path, len(module), _period(module))
            if stack.period * 2 <= stack.depth and stack.rest > 0:
                found.append(stack)
    return found if len({stack.rest for stack in found}) == 1 else []


def _period(blocks: nn.ModuleList) -> int:
    kinds = [_kind(block) for block in blocks]
    for period in range(1, len(kinds)):
        if all(a == b for a, b in zip(kinds, kinds[period:], strict=False)):
            return period
    return len(kinds)


def _kind(block: nn.Module) -> tuple[object, ...]:
    """Return what makes two blocks alike: classes, parameters and plain settings, not numbering."""
    parts: list[object] = []
    for path, module in block.named_modules():
        settings = {
            name: value
            for name, value in vars(module).items()
            if isinstance(value, (bool, int, float, str)) and name not in INDEX_NAMES
        }
        shapes = [
            (name, tuple(p.shape), p.dtype, p.requires_grad)
            for name, p in module._parameters.items()
            if p is not None
        ]
        parts.append((path, type(module), tuple(sorted(settings.items())), tuple(shapes)))
    return tuple(parts)


def copied_with(model: nn.Module, memo: dict[int, object]) -> nn.Module:
    """Return a copy of a model with other tensors in the place of its own, by their ids."""
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:
        name = getattr(model, "__name__", type(model).__name__)
        raise ExplainError(
            f"{name} cannot be copied: {type(error).__name__}: {error}. Build it afresh on device "
            "'meta' and explain that."
        ) from error


def shortened(model: nn.Module, stacks: list[Stack], *, large: bool) -> nn.Module:
    """Return a copy of the model with fewer blocks; parameters are shared with the original."""
    copied = copied_with(model, {id(p): p for p in (*model.parameters(), *model.buffers())})
    for stack in stacks:
        parent, _, name = stack.path.rpartition(".")
        blocks = copied.get_submodule(stack.path)
        assert isinstance(blocks, nn.ModuleList)
        kept = nn.ModuleList(list(blocks)[: stack.large if large else stack.small])
        setattr(copied.get_submodule(parent), name, kept)
    return copied
