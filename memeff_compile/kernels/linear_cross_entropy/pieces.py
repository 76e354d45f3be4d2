"""How wide a piece of the vocabulary is: the only place that turns a workspace into widths.

Axis letters of this folder: N rows (tokens), D depth (hidden size), V vocabulary, W columns of one
piece. Both engines walk the vocabulary in pieces, so that the transient is N x W and never N x V.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from torch import Tensor

MIB = 2**20
# The smallest piece. A smaller workspace than this piece needs is exceeded rather than refused.
MIN_WIDTH = 64

# `hybrid`, automatic workspace: at least 64 MiB and at least 16 KiB per row. 16 KiB per row is a
# strip of 2048 fp32 products (8 KiB) beside a gradient piece of 4096 columns in bf16 (8 KiB), about
# 6 % of what the bf16 logits of a 128k vocabulary take. Measured on an H200, forward + backward:
# strip 1024 / 2048 / 4096 with that piece take 61.4 / 59.8 / 60.1 ms at N, D, V = 16384, 2048,
# 128256 and 70.9 / 69.5 / 68.5 ms at 8192, 2304, 256000; strips of 256 take 72 and 87 ms. Narrower
# pieces lose twice: the fp32 sum of the hidden gradient is read and written once per piece (8ND
# bytes), and a short product leaves multiprocessors idle. Rows: piece-widths.jsonl of the results.
HYBRID_AUTO_BYTES = 64 * MIB
HYBRID_AUTO_BYTES_PER_ROW = 16 * 1024

# `reference`: on a CPU a piece should stay in the cache between the product and the passes over it;
# elsewhere it should be large enough to hide the launches.
REFERENCE_AUTO_BYTES = {"cpu": 8 * MIB}
REFERENCE_AUTO_BYTES_ELSEWHERE = 64 * MIB
REFERENCE_AUTO_COLUMNS = 256

# What one wave of a weight-gradient product and one pass over the fp32 hidden gradient cost on an
# H200, per row. Only their ratio matters.
_SECONDS_PER_WAVE = 2 * 128 * 256 * 132 / 790e12
_SECONDS_PER_BYTE = 1 / 4.28e12


def window(buffer: Tensor, rows: int, width: int) -> Tensor:
    """View the head of a flat buffer as a contiguous (rows, width) matrix."""
    return buffer[: rows * width].view(rows, width)


class Widths(NamedTuple):
    """Columns of products (`strip`) and of gradients (`piece`) that are alive at once."""

    strip: int
    piece: int


def spans(first: int, stop: int, width: int) -> Iterator[tuple[int, int]]:
    """Cut the columns [first, stop) into spans of `width`; the last one may be shorter."""
    for start in range(first, stop, width):
        yield start, min(start + width, stop)


def _round_down(value: int, step: int) -> int:
    return max(step, value // step * step)


def _half_vocab(vocab: int) -> int:
    """Return the widest piece allowed: half the vocabulary, so that no buffer is ever N x V."""
    return max(MIN_WIDTH, -(-vocab // (2 * MIN_WIDTH)) * MIN_WIDTH)


@lru_cache(maxsize=1024)
def hybrid_widths(
    rows: int, depth: int, vocab: int, workspace: int, itemsize: int, processors: int
) -> Widths:
    """Choose the engine `hybrid`'s widths within the workspace; 0 means automatic.

    16-bit inputs: a strip of fp32 products (4 bytes per element) beside a piece of gradients in the
    input dtype (2 bytes); the strip gets half of the budget. fp32 inputs: the gradient replaces
    the product in place, so strip and piece are one buffer. The piece is then narrowed to where
    the weight-gradient product fills whole waves of multiprocessors.
    """
    budget = workspace or max(HYBRID_AUTO_BYTES, HYBRID_AUTO_BYTES_PER_ROW * rows)
    per_row = budget // max(rows, 1)
    widest = _half_vocab(vocab)
    if itemsize == 4:
        width = _whole_waves(min(per_row // 4, widest), depth, vocab, processors)
        return Widths(width, width)
    strip = per_row // 8
    strip = min(_round_down(strip, 256 if strip >= 256 else MIN_WIDTH), widest)
    limit = max(strip, min((per_row - 4 * strip) // 2, widest))
    return Widths(strip, max(strip, _whole_waves(limit, depth, vocab, processors)))


def _whole_waves(limit: int, depth: int, vocab: int, processors: int) -> int:
    """Return the cheapest piece width in (limit / 2, limit] by the model of `_piece_seconds`."""
    if limit < 256:
        return _round_down(limit, MIN_WIDTH)
    step = 128 * -(-limit // (128 * 64))  # at most 64 candidates
    candidates = range(_round_down(limit, step), limit // 2, -step)
    return min(
        candidates or (limit,),
        key=lambda width: -(-vocab // width) * _piece_seconds(width, depth, processors),
    )


def _piece_seconds(width: int, depth: int, processors: int) -> float:
    """Model one piece's weight-gradient product in 128 x 256 tiles, plus its hidden-gradient sum.

    Both are per row. The other two products cost the same per column at any width considered.
    """
    tiles = min(-(-depth // 128) * -(-width // 256), -(-depth // 256) * -(-width // 128))
    return -(-tiles // processors) * _SECONDS_PER_WAVE + 8 * depth * _SECONDS_PER_BYTE


def reference_bytes_per_logit(
    itemsize: int,  # bytes of one input element: 2 and 4 compute in fp32, 8 in fp64
    has_softcap: bool,  # backward then keeps the slope beside the product
    with_gradient: bool,  # backward; 16-bit inputs then also need the rounded gradient
    with_entropy: bool = False,  # both passes then keep a second piece
) -> int:
    """Return the bytes the engine `reference` holds per element of a piece."""
    wide = max(itemsize, 4)
    if not with_gradient:
        return wide * (1 + with_entropy)
    return wide * (1 + has_softcap + with_entropy) + (2 if itemsize == 2 else 0)


def reference_width(
    rows: int, vocab: int, workspace: int, bytes_per_logit: int, device_type: str
) -> int:
    """Choose the engine `reference`'s piece width within the workspace; 0 means automatic."""
    automatic = REFERENCE_AUTO_BYTES.get(device_type, REFERENCE_AUTO_BYTES_ELSEWHERE)
    budget = workspace or max(automatic, REFERENCE_AUTO_COLUMNS * bytes_per_logit * rows)
    width = budget // (bytes_per_logit * max(rows, 1))
    return min(_round_down(width, MIN_WIDTH), _half_vocab(vocab))
