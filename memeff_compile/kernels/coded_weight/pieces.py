"""The optimizer step on compressed weights, for several weights in one launch.

The codec is `win4`, which compresses bf16 weights without loss, with 4-bit codes for exponents. All
tensors that encode a weight (codes, signs and mantissas, elements whose exponents have no 4-bit
code) lie in one allocation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from itertools import count as counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import compat
from .._triton.launch import launch_aligned
from ..device import on_device
from . import shapes
from .codecs import Step, kernel_of, moves
from .layout import CHUNK, padded, piece_places, piece_room, piece_words

MOST_TOGETHER = 8
"""The most weights of one launch."""
HEADING = 2 * MOST_TOGETHER
"""The heading of a spill buffer, in numbers of 16 bits: the lengths that lists need."""


def parts_of(piece: Tensor, count: int) -> list[Tensor]:
    """Return the tensors that encode a weight of `count` elements, as views of the allocation
    `piece`.

    The tensors contain the weight's exponent codes, its signs and mantissas, and its patches
    (elements whose exponents have no 4-bit code).
    """
    found = []
    for place, (start, length) in enumerate(piece_places(count, piece.numel())):
        words = piece[start : start + length]
        found.append(words.view(torch.int16) if place in (3, 4) else words)
    return found


def joined(parts: Sequence[Tensor], count: int, piece: Tensor | None = None) -> Tensor:
    """Copy `parts`, the tensors that encode a weight of `count` elements, into one allocation:
    `piece`, or a new allocation.
    """
    if piece is None:
        words = piece_words(count, parts[3].numel())
        piece = torch.zeros(words, dtype=torch.int32, device=parts[0].device)
    for place, part in zip(parts_of(piece, count), parts, strict=True):
        place[: part.numel()].copy_(part)
    return piece


def sheltered_together(counts: Sequence[int]) -> int:
    """Return the length, in 16-bit numbers, of a buffer for weights whose new codes do not fit.

    Weights of the given sizes share the buffer, called a spill buffer. The codes do not fit if they
    are too long for a weight's existing allocation.
    """
    return HEADING + sum(map(padded, counts))


class _Launch(NamedTuple):
    grid: tuple[int]
    settings: dict[str, Any]  # as `launch_plain` takes them
    name: int  # unlike any other's


class _Plan(NamedTuple):
    """The kernel launches that update and encode several weights of given sizes.

    The launches also write the weights' lists of patches (elements whose exponents have no 4-bit
    code).
    """

    chunks: int
    rooms: tuple[int, ...]
    steps: tuple[_Launch, _Launch]  # without weight decay, and with it
    lists: _Launch


@lru_cache(maxsize=4096)
def _plan(*sizes: tuple[int, int]) -> _Plan:
    """Plan the kernel launches that update and encode several weights.

    Each weight is given as a pair: its number of elements, and the number of 32-bit words of its
    allocation.
    """
    chunks = tuple(padded(count) // CHUNK for count, _ in sizes)
    rooms = tuple(piece_room(*size) for size in sizes)
    each = tuple(-(-count // shapes.LISTS_PROGRAMS) for count in chunks)
    listing = tuple(accumulate(-(-c // e) for c, e in zip(chunks, each, strict=True)))
    ends = tuple(accumulate(chunks))
    about = (("COUNT", len(sizes)), ("ENDS", ends), ("CHUNKS", chunks), ("ROOMS", rooms))
    lists = _launch(
        listing[-1],
        1,
        *(*about, ("LISTING", listing), ("PROGRAMS", shapes.LISTS_PROGRAMS)),
        *(("BLOCK", shapes.STARTS_BLOCK), ("HEADING", HEADING)),
    )
    without, with_decay = (
        _launch(
            ends[-1],
            shapes.WIN4_STEP_WARPS,
            *(*about, ("STEP", True), ("HAS_DECAY", has_decay), ("PATCHES", shapes.PATCHES)),
        )
        for has_decay in (False, True)
    )
    return _Plan(ends[-1], rooms, (without, with_decay), lists)


_names = counter()


def _launch(grid: int, warps: int, *constants: tuple[str, Any]) -> _Launch:
    return _Launch((grid,), {**dict(constants), "num_warps": warps}, next(_names))


def _run(
    kernel: str,
    how: _Launch,
    tensors: Sequence[Tensor],
    many: int,  # that the kernel takes
    numbers: Sequence[float] = (),
) -> None:
    found = kernel_of("piece_kernels", f"_coded_weight_piece_{kernel}_kernel")
    launch_aligned(found, how.grid, tensors, many, numbers, how.settings, how.name)


def decode(piece: Tensor, shape: Sequence[int]) -> Tensor:
    """Return the bf16 weight that the tensors in the allocation `piece` encode.

    The memory of the result may be slightly larger than the weight.
    """
    how, size, strides, is_whole = _decoding(piece.numel(), *shape)
    with on_device(piece):
        out = compat.empty_bf16(size, strides, piece)
        _run("decode", how, (piece, out), 2)
    return out if is_whole else out[: math.prod(shape)].view(*shape)


class _Decoding(NamedTuple):
    how: _Launch
    size: tuple[int, ...]  # of the buffer
    strides: tuple[int, ...]
    is_whole: bool  # the weight fills it


@lru_cache(maxsize=4096)
def _decoding(words: int, *shape: int) -> _Decoding:
    """Plan the kernel launch that decodes a weight of a given shape.

    Return the launch, and the size of the buffer for the decoded weight. The tensors that encode
    the weight lie in one allocation of `words` 32-bit words.
    """
    count = math.prod(shape)
    chunks, room = padded(count) // CHUNK, piece_room(count, words)
    each = shapes.WIN4_DECODE_WORDS
    how = _launch(
        chunks * (CHUNK // 8 // each),
        shapes.WIN4_DECODE_WARPS,
        *(("CHUNKS", chunks), ("ROOM", room), ("WORDS", each), ("PATCHES", shapes.PATCHES)),
    )
    is_whole = count == padded(count)
    size = shape if is_whole else (padded(count),)
    strides = tuple(math.prod(size[at + 1 :]) for at in range(len(size)))
    return _Decoding(how, size, strides, is_whole)


class Outcomes:
    """The result of encoding several weights: whether each weight fitted into its allocation.

    Patches are elements of a weight whose exponents have no 4-bit code. A weight fits if its
    allocation has space for its patches. The CPU knows the result only after the GPU has run the
    kernels.
    """

    def __init__(self, refuge: Tensor, rooms: Sequence[int], counts: Sequence[int]) -> None:
        """Record a CUDA event on the current stream, so that `misfits` can wait for the GPU.

        Patches are elements of a weight whose exponents have no 4-bit code. The spill buffer
        `refuge` is memory for weights whose new codes do not fit. GPU kernels also write each
        weight's number of patches to the buffer's header. Later, `misfits` reads these numbers.
        `rooms` contains how many patches fit into each weight's allocation. `counts` contains each
        weight's number of elements.
        """
        self._refuge, self._rooms, self._counts = refuge, rooms, counts
        self._event = torch.cuda.Event() if torch.cuda.is_available() else None
        if self._event is not None:
            self._event.record()

    def misfits(self) -> list[tuple[int, Tensor]]:
        """Return the indices and the bit patterns of the weights that did not fit into their
        allocations.

        Patches are elements whose exponents have no 4-bit code. A weight does not fit if it has
        more patches than its allocation has space for. The function waits for the GPU.
        """
        if self._event is not None:
            self._event.synchronize()
        needed = self._refuge[:HEADING].view(torch.int32).tolist()
        if all(need <= room for need, room in zip(needed, self._rooms, strict=False)):
            return []
        ends = list(accumulate(map(padded, self._counts), initial=HEADING))
        return [
            (place, self._refuge[ends[place] : ends[place] + count])
            for place, count in enumerate(self._counts)
            if needed[place] > self._rooms[place]
        ]


def move(pieces: Sequence[Tensor], gradients: Sequence[Tensor], by: Step) -> Tensor:
    """Update weights with their gradients and encode them in place, all in one launch.

    `pieces` contains one allocation per weight, with the tensors that encode the weight. The
    gradients are bf16, and the kernel overwrites them with the new weights. The memory of each
    gradient is padded to a multiple of 16,384 elements (`padded`). The updated weights equal, bit
    for bit, those that `codecs.step` and then `encode_soon` give. The contents of `pieces` are
    invalid until `list_patches` has written the lists of patches (elements whose exponents have no
    4-bit code).

    Return, for each chunk (8192 elements), the number of its patches, and bits that mark its groups
    with patches. Pass this result to `list_patches`. If memory runs out, this function raises an
    error and has changed no weight.
    """
    plan = _planned(pieces, gradients)
    rates, _ = moves(by)
    with on_device(pieces[0]):
        found = torch.empty(2 * plan.chunks, dtype=torch.int32, device=pieces[0].device)
        tensors = (found, *_pairs(pieces, gradients))
        _run("encode", plan.steps[by.decay != 0], tensors, 1 + 2 * MOST_TOGETHER, rates)
    return found


def list_patches(
    pieces: Sequence[Tensor],
    weights: Sequence[Tensor],  # the gradients' memory, in which `move` wrote the weights
    found: Tensor,  # the result of `move`
    refuge: Tensor,  # host memory of `sheltered_together` elements, for weights that do not fit
) -> Outcomes:
    """Write the lists of patches (elements whose exponents have no 4-bit code) of all weights that
    `move` updated, in one launch.

    The lists contain the patches' positions and values. If the patches of a weight do not fit into
    its allocation, the weight's value is in the spill buffer (`refuge`). The allocation is then
    invalid.
    """
    plan = _planned(pieces, weights)
    with on_device(pieces[0]):
        tensors = (found, refuge, *_pairs(pieces, weights))
        _run("lists", plan.lists, tensors, 2 + 2 * MOST_TOGETHER)
        return Outcomes(refuge, plan.rooms, [weight.numel() for weight in weights])


def _planned(pieces: Sequence[Tensor], weights: Sequence[Tensor]) -> _Plan:
    return _plan(*((w.numel(), p.numel()) for w, p in zip(weights, pieces, strict=True)))


def _pairs(pieces: Sequence[Tensor], weights: Sequence[Tensor]) -> list[Tensor]:
    return [each for pair in zip(pieces, weights, strict=True) for each in pair]
