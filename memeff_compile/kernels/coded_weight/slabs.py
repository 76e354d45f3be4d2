"""Lists of many weights side by side, in a few large pieces of memory.

The lists of a code have odd lengths, and PyTorch's allocator counts up to a MiB beyond each as
taken: 71 MiB for the linears of Llama-3-8B's shape with `tier`. Side by side they take what they
hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from .codecs import EXACT_FIT, Room
from .layout import LISTS, parse
from .tensor import CodedWeight

SLAB = 64 << 20
"""Bytes of one piece of memory, unless one weight's lists need more."""
ALIGNED = 512
"""Bytes that every list starts at a multiple of, as memory of the allocator's own does."""
EVEN = Room(0.02, 1024)
"""Most that a list is made longer than its room, to be as long as others of its kind: a compiler
then sees the same block wherever a model has one, and compiles it once."""


def side_by_side(weights: Iterable[CodedWeight], room: Room = EXACT_FIT) -> None:
    """Move the lists of weights into shared pieces of memory, with spare room behind each.

    A new piece is filled before the old lists in it are given up, weight by weight: what this takes
    beside the weights is one piece. They are of any codecs and devices, and keep their values; a
    list that has spare room gets more on top.
    """
    by_device: dict[torch.device, list[CodedWeight]] = {}
    for weight in weights:
        by_device.setdefault(weight.device, []).append(weight)
    for several in by_device.values():
        lengths = _lengths(several, room)
        for group in _groups(several, lengths):
            _move(group, lengths)


def _lengths(weights: Sequence[CodedWeight], room: Room) -> dict[Tensor, int]:
    """Return how long each list is to be, in elements."""
    found, kinds = dict[Tensor, int](), dict[tuple[object, ...], list[Tensor]]()
    for weight in weights:
        for name, part in _lists(weight):
            found[part] = room.length(part.numel())
            kinds.setdefault((weight.codec, weight.shape, name), []).append(part)
    for parts in kinds.values() if room != EXACT_FIT else ():
        lengths = [found[part] for part in parts]
        for part in parts:
            found[part] = max(n for n in lengths if n <= EVEN.length(found[part]))
    return found


def _groups(
    weights: Sequence[CodedWeight], lengths: Mapping[Tensor, int]
) -> Iterator[list[CodedWeight]]:
    group: list[CodedWeight] = []
    taken = 0
    for weight in weights:
        size = sum(_bytes(part, lengths) for _, part in _lists(weight))
        if group and taken + size > SLAB:
            yield group
            group, taken = [], 0
        group.append(weight)
        taken += size
    if group:
        yield group


def _lists(weight: CodedWeight) -> list[tuple[str, Tensor]]:
    names = parse(weight.codec).parts
    return [(n, p) for n, p in zip(names, weight.parts, strict=True) if n in LISTS]


def _bytes(part: Tensor, lengths: Mapping[Tensor, int]) -> int:
    needed = lengths[part] * part.element_size()
    return -(-needed // ALIGNED) * ALIGNED


def _move(group: Sequence[CodedWeight], lengths: Mapping[Tensor, int]) -> None:
    size = sum(_bytes(part, lengths) for weight in group for _, part in _lists(weight))
    if size == 0:
        return
    slab = torch.zeros(size, dtype=torch.uint8, device=group[0].device)
    start = 0
    for weight in group:
        for name, part in _lists(weight):
            # Memory of its own to autograd: a write to one weight's list is none to another's.
            place = torch.empty(0, dtype=part.dtype, device=part.device)
            place.set_(slab.untyped_storage(), start // part.element_size(), (lengths[part],), (1,))
            place[: part.numel()].copy_(part)
            weight.show(name, place)
            start += _bytes(part, lengths)
