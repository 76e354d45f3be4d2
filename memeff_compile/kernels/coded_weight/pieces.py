"""The engine `triton` for weights of win4 in one piece of memory: several of them in one launch."""

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
"""Weights of one launch."""
HEADING = 2 * MOST_TOGETHER
"""Numbers of 16 bits in front of the values in a refuge: the lengths that lists need."""


def parts_of(piece: Tensor, count: int) -> list[Tensor]:
    """Return the parts of a weight of so many elements in one piece, which share its memory."""
    found = []
    for place, (start, length) in enumerate(piece_places(count, piece.numel())):
        words = piece[start : start + length]
        found.append(words.view(torch.int16) if place in (3, 4) else words)
    return found


def joined(parts: Sequence[Tensor], count: int, piece: Tensor | None = None) -> Tensor:
    """Return a piece with the parts of a weight of so many elements, or fill one that is longer."""
    if piece is None:
        words = piece_words(count, parts[3].numel())
        piece = torch.zeros(words, dtype=torch.int32, device=parts[0].device)
    for place, part in zip(parts_of(piece, count), parts, strict=True):
        place[: part.numel()].copy_(part)
    return piece


def sheltered_together(counts: Sequence[int]) -> int:
    """Return the numbers of 16 bits that weights of so many elements take in a refuge together."""
    return HEADING + sum(map(padded, counts))


class _Launch(NamedTuple):
    grid: tuple[int]
    settings: dict[str, Any]  # as `launch_plain` takes them
    name: int  # unlike any other's


class _Plan(NamedTuple):
    """How weights of these sizes are decoded, moved and encoded, and listed."""

    chunks: int
    rooms: tuple[int, ...]
    decode: _Launch
    steps: tuple[_Launch, _Launch]  # without weight decay, and with it
    lists: _Launch


@lru_cache(maxsize=4096)
def _plan(*sizes: tuple[int, int]) -> _Plan:
    """Plan launches for weights of (elements, words of the piece) each."""
    chunks = tuple(padded(count) // CHUNK for count, _ in sizes)
    rooms = tuple(piece_room(*size) for size in sizes)
    each = tuple(-(-count // shapes.LISTS_PROGRAMS) for count in chunks)
    listing = tuple(accumulate(-(-c // e) for c, e in zip(chunks, each, strict=True)))
    ends = tuple(accumulate(chunks))
    about = (("COUNT", len(sizes)), ("ENDS", ends), ("CHUNKS", chunks), ("ROOMS", rooms))
    words, patches = shapes.WIN4_DECODE_WORDS, ("PATCHES", shapes.PATCHES)
    decoding = tuple(end * (CHUNK // 8 // words) for end in ends)
    decode = _launch(
        decoding[-1],
        shapes.WIN4_DECODE_WARPS,
        *(*about, ("DECODING", decoding), ("WORDS", words), patches),
    )
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
            *(*about, ("STEP", True), ("HAS_DECAY", has_decay), patches),
        )
        for has_decay in (False, True)
    )
    return _Plan(ends[-1], rooms, decode, (without, with_decay), lists)


_names = counter()


def _launch(grid: int, warps: int, *constants: tuple[str, Any]) -> _Launch:
    return _Launch((grid,), {**dict(constants), "num_warps": warps}, next(_names))


def _run(
    kernel: str,
    how: _Launch,
    tensors: Sequence[Tensor],  # in pairs behind the `before` first ones
    numbers: Sequence[float] = (),
    *,
    before: int = 0,
) -> None:
    found = kernel_of("piece_kernels", f"piece_{kernel}_kernel")
    many = before + 2 * MOST_TOGETHER
    launch_aligned(found, how.grid, tensors, many, numbers, how.settings, how.name)


def decode(pieces: Sequence[Tensor], several: Sequence[Sequence[int]]) -> list[Tensor]:
    """Return the bf16 weights of these shapes; one may lie in a slightly larger buffer."""
    sizes = [(*shape, piece.numel()) for shape, piece in zip(several, pieces, strict=True)]
    plan, buffers = _decoding(*sizes)
    tensors, outs = [], []
    with on_device(pieces[0]):
        for piece, buffer in zip(pieces, buffers, strict=True):
            out = compat.empty_bf16(buffer.size, buffer.strides, piece)
            tensors += [piece, out]
            outs.append(out)
        _run("decode", plan.decode, tensors)
    return [
        out if buffer.is_whole else out[: math.prod(shape)].view(*shape)
        for out, buffer, shape in zip(outs, buffers, several, strict=True)
    ]


class _Buffer(NamedTuple):
    size: tuple[int, ...]
    strides: tuple[int, ...]
    is_whole: bool  # the weight fills it


@lru_cache(maxsize=4096)
def _decoding(*sizes: tuple[int, ...]) -> tuple[_Plan, tuple[_Buffer, ...]]:
    """Plan the decoding of weights of (*shape, words of the piece); say how the results lie."""
    counts = [math.prod(size[:-1]) for size in sizes]
    buffers = []
    for size, needed in zip(sizes, counts, strict=True):
        is_whole = needed == padded(needed)
        given = size[:-1] if is_whole else (padded(needed),)
        strides = tuple(math.prod(given[at + 1 :]) for at in range(len(given)))
        buffers.append(_Buffer(given, strides, is_whole))
    plan = _plan(*((needed, size[-1]) for needed, size in zip(counts, sizes, strict=True)))
    return plan, tuple(buffers)


class Outcomes:
    """Whether weights fitted into their lists, known when the GPU has got so far."""

    def __init__(self, refuge: Tensor, rooms: Sequence[int], counts: Sequence[int]) -> None:
        """Note the moment on the current stream."""
        self._refuge, self._rooms, self._counts = refuge, rooms, counts
        self._event = torch.cuda.Event() if torch.cuda.is_available() else None
        if self._event is not None:
            self._event.record()

    def misfits(self) -> list[tuple[int, Tensor]]:
        """Wait for the GPU; return the places of weights that did not fit, and their patterns."""
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


def step(
    pieces: Sequence[Tensor],
    gradients: Sequence[Tensor],  # bf16, of whole chunks; over them the new weights go
    by: Step,
    refuge: Tensor,  # of the host, `sheltered` long, for those that do not fit
) -> Outcomes:
    """Move weights along their gradients and encode them where they are, all in two launches.

    The bits are those of `codecs.step` and `encode_soon` for each. Where memory runs out, nothing
    was written.
    """
    counts = [gradient.numel() for gradient in gradients]
    plan = _plan(*((c, piece.numel()) for c, piece in zip(counts, pieces, strict=True)))
    rates, _ = moves(by)
    with on_device(pieces[0]):
        found = torch.empty(2 * plan.chunks, dtype=torch.int32, device=pieces[0].device)
        pairs = [each for pair in zip(pieces, gradients, strict=True) for each in pair]
        _run("encode", plan.steps[by.decay != 0], [found, *pairs], rates, before=1)
        _run("lists", plan.lists, [found, refuge, *pairs], before=2)
        return Outcomes(refuge, plan.rooms, counts)
