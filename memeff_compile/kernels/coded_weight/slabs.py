"""Pack the lists (tensors of irregular length) of many compressed weights into a few large
allocations.

A codec (a compressed format) stores the exponents of a weight's elements as short codes. In the
codecs `win4` and `tier`, rare exponents have no code. Elements with a rare exponent are stored
whole, in lists whose length depends on the weight's values. If each list had its own allocation,
PyTorch's allocator would round the list's size up, by as much as one MiB. For weights of
Llama-3-8B's shape with the codec `tier`, this rounding costs 71 MiB. In a shared allocation, lists
are stored without gaps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from .codecs import EXACT_FIT, Room
from .layout import LISTS, fits_one_piece, parse, piece_words
from .pieces import joined
from .tensor import CodedWeight

SLAB = 64 << 20
"""Bytes of one allocation; more only if one weight's lists need more."""
ALIGNED = 512
"""Every list starts at a multiple of this many bytes, like memory from PyTorch's allocator."""
EVEN = Room(0.02, 1024)
"""How much longer than necessary a list may be, so that lists of the same kind have equal lengths.
Then all blocks of a model have the same shapes, and are compiled only once.
"""


def side_by_side(
    weights: Iterable[CodedWeight],
    room: Room = EXACT_FIT,
    *,
    whole: bool = False,  # all parts of a weight next to each other, where its codec allows it
) -> None:
    """Move the lists (tensors of irregular length) of several compressed weights into a few shared
    allocations. Each list gets spare memory (`room`) at its end.

    The length of such a list, for example the list of elements whose exponents have no code,
    depends on the weight's values.

    The function fills each new allocation with lists, one weight after another. The function frees
    a weight's old lists after copying them, so one extra allocation is needed temporarily. The
    weights may have different codecs and devices, and their values do not change. The function also
    adds spare memory to a list that already has spare memory. If all tensors that encode a weight
    lie in one allocation, the function moves them together and keeps them adjacent.
    """
    by_device: dict[torch.device, list[CodedWeight]] = {}
    for weight in weights:
        by_device.setdefault(weight.device, []).append(weight)
    for several in by_device.values():
        lengths = _lengths(several, room)
        for group in _groups(several, lengths, whole):
            _move(group, lengths, whole)


def _lengths(weights: Sequence[CodedWeight], room: Room) -> dict[Tensor, int]:
    """Return how many elements to allocate for each list (tensor of irregular length) of the
    compressed weights."""
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
    weights: Sequence[CodedWeight], lengths: Mapping[Tensor, int], whole: bool
) -> Iterator[list[CodedWeight]]:
    group: list[CodedWeight] = []
    taken = 0
    for weight in weights:
        size = _size(weight, lengths, whole)
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


def _is_whole(weight: CodedWeight, whole: bool) -> bool:
    return weight.piece is not None or (whole and fits_one_piece(parse(weight.codec)))


def _words(weight: CodedWeight, lengths: Mapping[Tensor, int]) -> int:
    return piece_words(weight.numel(), max(lengths[part] for _, part in _lists(weight)))


def _size(weight: CodedWeight, lengths: Mapping[Tensor, int], whole: bool) -> int:
    """Return the bytes that a compressed weight takes in a shared allocation.

    Count all tensors that encode the weight if they already lie in one allocation. Also count all
    if they are to lie next to each other (`whole`) and the weight's codec (compressed format)
    allows it. Otherwise count only the lists (tensors of irregular length).
    """
    if _is_whole(weight, whole):
        return 4 * _words(weight, lengths)
    return sum(_bytes(part, lengths) for _, part in _lists(weight))


def _move(group: Sequence[CodedWeight], lengths: Mapping[Tensor, int], whole: bool) -> None:
    size = sum(_size(weight, lengths, whole) for weight in group)
    if size == 0:
        return
    slab = torch.zeros(size, dtype=torch.uint8, device=group[0].device)
    start = 0
    for weight in group:
        if _is_whole(weight, whole):
            piece = _place(slab, torch.int32, start, _words(weight, lengths))
            weight.show_all([joined(weight.parts, weight.numel(), piece)])
            start += piece.nbytes
            continue
        for name, part in _lists(weight):
            place = _place(slab, part.dtype, start, lengths[part])
            place[: part.numel()].copy_(part)
            weight.show(name, place)
            start += _bytes(part, lengths)


def _place(slab: Tensor, dtype: torch.dtype, start: int, length: int) -> Tensor:
    """Return `length` elements of the shared allocation `slab`, from the byte offset `start` on.

    The elements belong to one compressed weight. They will contain one of its lists (tensors of
    irregular length), or all tensors that encode the weight. Autograd treats the result as separate
    memory: a write to one weight's list does not count as a write to another weight's list.
    """
    place = torch.empty(0, dtype=dtype, device=slab.device)
    return place.set_(slab.untyped_storage(), start // dtype.itemsize, (length,), (1,))
