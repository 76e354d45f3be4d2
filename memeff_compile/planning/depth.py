"""Capture a deep model with only some of its repeated blocks, which show the memory of every kind
of block.

Of each list of blocks, this module captures the first block, the last block, and one block of each
kind from between them. This one block represents all blocks of its kind, because their tensors have
the same sizes.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from ..errors import ExplainError

INDEX_NAMES = ("layer_idx", "layer_id", "layer_index", "layer_number", "idx", "index")


@dataclass(frozen=True)
class Stack:
    """A list of repeated blocks in a model, such as its layers."""

    path: str  # as in `named_modules()`
    kinds: tuple[int, ...]  # kind of each block, numbered in order of appearance
    kept: tuple[int, ...]  # which blocks are captured, in order

    @property
    def depth(self) -> int:
        """Return the number of layers in this list of a model's layers."""
        return len(self.kinds)

    @property
    def is_short(self) -> bool:
        """Return whether some blocks (layers) of this list are not captured (traced)."""
        return len(self.kept) < self.depth

    def alike(self, place: int) -> tuple[int, ...]:
        """Return the indices of a captured (traced) block and of the uncaptured blocks of its kind.

        This object is a list of repeated blocks (layers) in a model, and the indices are positions
        in the list. `place` is the position of a block among the captured ones. For the first and
        the last block of the list, return only the block's own index. Any other captured block
        represents the uncaptured blocks of its kind. Their tensors have the same sizes."""
        index = self.kept[place]
        if index in (0, self.depth - 1):
            return (index,)
        others = (i for i in range(1, self.depth - 1) if self.kinds[i] == self.kinds[index])
        return tuple(i for i in others if i == index or i not in self.kept)

    def whole(self) -> Stack:
        """Return a copy of this list of blocks (layers) in which every block is to be traced."""
        return replace(self, kept=tuple(range(self.depth)))


def stacks_of(model: object) -> list[Stack]:
    """Return a model's outermost lists of blocks (layers), and which blocks of each list to trace.

    The blocks to trace are the first one, the last one, and one of each kind from between them."""
    if not isinstance(model, nn.Module):
        return []
    found: list[Stack] = []
    for path, module in model.named_modules():
        if any(path.startswith(f"{stack.path}.") for stack in found):
            continue
        if isinstance(module, nn.ModuleList) and len(module) > 1 and path:
            kinds = _kinds(model, module)
            middle = {kinds[i]: i for i in reversed(range(1, len(kinds) - 1))}
            kept = tuple(sorted({0, len(kinds) - 1, *middle.values()}))
            found.append(Stack(path, kinds, kept))
    return found


def _kinds(model: nn.Module, blocks: nn.ModuleList) -> tuple[int, ...]:
    """Return the kind of each block: its structure, and the block's entries in those lists of the
    config that have one entry per layer.
    """
    settings = (value for config in configs_of(model) for value in vars(config).values())
    lists = [v for v in settings if isinstance(v, (list, tuple)) and len(v) == len(blocks)]
    kinds = [(_kind(block), *(repr(v[place]) for v in lists)) for place, block in enumerate(blocks)]
    numbers = {kind: number for number, kind in enumerate(dict.fromkeys(kinds))}
    return tuple(numbers[kind] for kind in kinds)


def _kind(block: nn.Module) -> tuple[object, ...]:
    """Return a tuple that is equal for all blocks of one kind.

    The tuple has the classes of the block's modules, the shapes and dtypes of their parameters, and
    their attributes that are numbers or strings. The tuple does not contain the block's index.
    """
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


def config_of(module: object) -> Any:
    """Return a module's config, or None if the module has no config, or if reading the config
    raises an error.
    """
    with contextlib.suppress(Exception):
        return getattr(module, "config", None)
    return None


def configs_of(model: nn.Module) -> Iterator[Any]:
    """Yield the configs of a model's modules and the configs nested in these configs, each config
    once.
    """
    seen: set[int] = set()
    queue = [config_of(module) for module in model.modules()]
    while queue:
        config = queue.pop()
        if id(config) not in seen and hasattr(config, "__dict__"):
            seen.add(id(config))
            yield config
            queue += [value for value in vars(config).values() if hasattr(value, "to_dict")]


def copied_with(model: nn.Module, memo: dict[int, object]) -> nn.Module:
    """Return a copy of a model in which some tensors are replaced.

    `memo` maps the ids of these tensors to the objects that replace them."""
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:
        name = getattr(model, "__name__", type(model).__name__)
        raise ExplainError(
            f"{name} cannot be copied: {type(error).__name__}: {error}. Build it afresh on device "
            "'meta' and explain that."
        ) from error


def shortened(model: nn.Module, stacks: Sequence[Stack]) -> nn.Module:
    """Return a copy of the model with only the blocks (layers) that `stacks` keep; the copy shares
    its parameters with the original.
    """
    copied = copied_with(model, {id(p): p for p in (*model.parameters(), *model.buffers())})
    configs = list(configs_of(copied))
    for stack in stacks:
        if not stack.is_short:
            continue
        parent, _, name = stack.path.rpartition(".")
        blocks = copied.get_submodule(stack.path)
        assert isinstance(blocks, nn.ModuleList)
        kept = nn.ModuleList([blocks[index] for index in stack.kept])
        setattr(copied.get_submodule(parent), name, kept)
        for place, index in enumerate(stack.kept):
            for module in kept[place].modules():
                for numbered in INDEX_NAMES:
                    if vars(module).get(numbered) == index:
                        setattr(module, numbered, place)
        for config in configs:
            _shorten(config, stack)
    return copied


def _shorten(config: object, stack: Stack) -> None:
    """Set the number of blocks in a config to the number of those that `stack` keeps.

    `stack` describes a list of blocks (layers). In the config's lists with one entry per block,
    keep only the entries of the blocks that `stack` keeps.
    """
    for name, value in list(vars(config).items()):
        if isinstance(value, (list, tuple)) and len(value) == stack.depth:
            vars(config)[name] = type(value)([value[index] for index in stack.kept])
        elif value == stack.depth and type(value) is int and "layer" in name:
            vars(config)[name] = len(stack.kept)
