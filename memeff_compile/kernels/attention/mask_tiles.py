"""Classify the tiles of a mask tensor, and list the tiles that a kernel visits.

A tile of `TILE` x `TILE` elements has one of three codes:

- `EMPTY`: every key is hidden from every query.
- `FULL`: every key is visible to every query and the mask adds 0.
- `PARTIAL`: all other tiles.

The code of each tile is computed once per mask. Before each launch of a kernel, the codes are
converted to lists of tiles. These tiles have the tile size of the launched kernel. The CPU never
waits for the GPU in this module.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .._triton.key_tiles import Cells, tiles_of
from .._triton.launch import launch
from ..device import kernels_serve, on_device

TILE = 64
EMPTY, PARTIAL, FULL = 0, 1, 2

HIDDEN = -65504.0
"""A number added to a score hides its key if it is at most this and the query has another key with
at least `SEEN`."""

SEEN = HIDDEN / 2

_MAX_STRIDE = 1 << 22
CLASSIFY = {"CHUNK": 4, "num_warps": 8}
LISTS = {"CHUNK": 64, "num_warps": 4}


class Dense(NamedTuple):
    """Kernel arguments: a mask tensor, its strides, and a list of tiles for each program.

    A broadcast axis has a stride of 0. A program's list contains the tiles of the mask that the
    program visits. In full tiles, every key is visible. All other visited tiles are partial. A list
    begins with its number of full tiles and its number of partial tiles. Next come the indices of
    the full tiles, in increasing order. The indices of the partial tiles stand at the end of the
    list, in decreasing order, before one int32 number of padding. A kernel needs the padding
    because it reads one tile ahead. So a list has 3 more numbers than there are tiles that could be
    visited.
    """

    ptr: Any
    batch: Any
    head: Any
    row: Any
    key: Any
    lists_ptr: Any
    lists_batch: Any
    lists_head: Any


def table_shape(mask: Tensor) -> tuple[Any, ...]:
    """Return the shape of a mask's codes: one byte per tile of `TILE` x `TILE` (64 x 64) elements.

    A tile's code says whether the tile hides keys. A code is empty (every key is hidden), full
    (every key is visible and the mask adds 0) or partial.

    Example: (4, 1, 2, 1) for a mask of shape (4, 1, 100, 1).
    """
    batch, heads, rows, keys = mask.shape
    return batch, heads, tiles_of(rows, TILE), tiles_of(keys, TILE)


def classify(
    # bool, true where a key is visible, or floating, added to scores; any size may be 1
    mask: Tensor,
) -> Tensor:
    """Classify the tiles of a mask by their hidden keys.

    The result is a code for each tile: empty (every key is hidden), full (every key is visible and
    the mask adds 0) or partial (all other tiles). The codes are a uint8 tensor of shape (B or 1, H
    or 1, tiles, tiles).
    """
    if not (mask.is_cuda and mask.numel() and kernels_serve(mask.device, torch.bfloat16)):
        return _classify_plainly(mask)
    return classify_in_kernel(mask)


def classify_in_kernel(mask: Tensor) -> Tensor:
    """Classify the tiles of a mask by their hidden keys, in a Triton kernel.

    The result is a code for each tile, as `classify` returns: empty (every key is hidden), full
    (every key is visible and the mask adds 0) or partial (all other tiles).
    """
    from . import mask_tiles_kernels as kernels

    shape = table_shape(mask)
    codes = mask.new_empty(shape, dtype=torch.uint8)
    batch, heads, bands, tiles = shape
    with on_device(mask):
        arguments = (
            Cells(_as_bytes(mask), *_strides(mask)),
            codes,
            (heads, mask.shape[2], mask.shape[3], bands, tiles),
        )
        is_bias = mask.dtype.is_floating_point
        numbers = {"IS_BIAS": is_bias, "TILE": TILE, "HIDDEN": HIDDEN, "SEEN": SEEN}
        # Whether a number added in one tile hides a key depends on the numbers added in other tiles
        # of the same rows.
        parts = 1 if is_bias else tiles_of(tiles, CLASSIFY["CHUNK"])
        kernel, grid = kernels._attention_mask_tiles_kernel, (batch * heads * bands, parts)
        launch(kernel, grid, arguments, {**numbers, **CLASSIFY}, (is_bias,))
    return codes


def _classify_plainly(mask: Tensor) -> Tensor:
    if not mask.dtype.is_floating_point:
        every, some = _over_tiles(mask, fill=True).all(-1), _over_tiles(mask, fill=False).any(-1)
        return every.to(torch.uint8) + some
    is_low = _over_tiles(mask <= HIDDEN, fill=True).all(-1)
    is_empty = _over_tiles(mask == -math.inf, fill=True).all(-1)
    # In a row without a key at `SEEN` or above, softmax is over the hidden keys alone.
    seen = (mask >= SEEN).any(-1)
    every = F.pad(seen, (0, -seen.shape[2] % TILE), value=True).unflatten(2, (-1, TILE)).all(-1)
    is_empty |= is_low & every[..., None]
    is_full = _over_tiles(mask == 0, fill=True).all(-1)
    return torch.where(is_full, FULL, torch.where(is_empty, EMPTY, PARTIAL)).to(torch.uint8)


def _over_tiles(truth: Tensor, *, fill: bool) -> Tensor:
    """Return a bool mask as (batch, heads, tiles, tiles, elements of a tile).

    Tiles that extend beyond the mask's last query or key are padded with `fill`.
    """
    rows, keys = truth.shape[2:]
    padded = F.pad(truth, (0, -keys % TILE, 0, -rows % TILE), value=fill)
    cut: Tensor = padded.unflatten(3, (-1, TILE)).unflatten(2, (-1, TILE))
    return cut.transpose(3, 4).flatten(4)


def dense_of(
    mask: Tensor,  # as for `classify`
    codes: Tensor | None,  # the result of `classify`, or None to compute it now
    lengths: tuple[int, int],  # queries and keys
    tile: tuple[int, int],  # queries and keys per tile
    *,
    ours_are_queries: bool = True,  # tiles of queries visit tiles of keys, not the other way around
) -> Dense:
    """Return a mask as kernel arguments, with a list of tiles for each program of the kernel.

    A program combines its own tile of queries with several tiles of keys, or the other way around.
    A program's list contains the indices of these several tiles. The mask has one code per block of
    64 x 64 elements. A pair of the own tile and another tile overlaps one or more of these blocks.
    The list leaves out the other tile if all these blocks are empty (every key is hidden).
    """
    from . import mask_tiles_kernels as kernels

    if codes is None:
        codes = classify_in_kernel(mask)
    if max(mask.stride()[2:]) > _MAX_STRIDE:
        mask = mask.contiguous()
    places = _strides(codes)[2:]
    if not ours_are_queries:
        lengths, tile, places = lengths[::-1], tile[::-1], places[::-1]
    batch, heads = codes.shape[:2]
    ours, others = tiles_of(lengths[0], tile[0]), tiles_of(lengths[1], tile[1])
    lists = codes.new_empty((batch, heads, ours, 3 + others), dtype=torch.int32)
    arguments = (
        Cells(codes, codes.stride(0), codes.stride(1), *places),
        lists,
        (heads, ours, others, *lengths),
    )
    constants = {"OURS": tile[0], "OTHERS": tile[1], "TILE": TILE, **LISTS}
    kernel, grid = kernels._attention_mask_tiles_lists_kernel, (batch * heads * ours,)
    launch(kernel, grid, arguments, constants, tile)
    return Dense(_as_bytes(mask), *_strides(mask), lists, *_strides(lists)[:2])


def none_of(like: Tensor) -> Dense:
    """Return the mask arguments of a kernel for a call without a mask."""
    return Dense(like, 0, 0, 0, 0, like, 0, 0)


def _as_bytes(mask: Tensor) -> Tensor:
    return mask if mask.dtype.is_floating_point else mask.view(torch.uint8)


def _strides(tensor: Tensor) -> tuple[int, int, int, int]:
    """Return the strides of four axes, with 0 for axes of size one."""
    pairs = zip(tensor.stride(), tensor.shape, strict=True)
    batch, heads, rows, keys = (stride if size > 1 else 0 for stride, size in pairs)
    return batch, heads, rows, keys
