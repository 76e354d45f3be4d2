"""Pass masking conditions to the kernels of all attention implementations, and find the tiles that
these kernels visit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .conditions import Conditions
from .launch import start


class Rows(NamedTuple):
    """Kernel arguments: a (B, H, rows, D) tensor and its first three strides.

    The last dimension has a stride of 1.
    """

    ptr: Any
    batch: Any
    head: Any
    row: Any


class Tables(NamedTuple):
    """Kernel arguments: the mask of keys and the sequence ids, each with its stride between
    sequences.

    The mask of keys is (B or 1, N) bytes. The ids are (B or 1, M) for queries and (B or 1, N) for
    keys.
    """

    key_mask: Any
    mask_batch: Any
    query_ids: Any
    query_ids_batch: Any
    key_ids: Any
    key_ids_batch: Any


class Cells(NamedTuple):
    """Kernel arguments: a (B, H, rows, D) tensor and its four strides.

    The last dimension may have any stride.
    """

    ptr: Any
    batch: Any
    head: Any
    row: Any
    depth: Any


def rows_of(tensor: Tensor) -> Rows:
    """Return a tensor and its first three strides as kernel arguments."""
    return Rows(tensor, *tensor.stride()[:3])


BOUNDS_CHUNK = 2048
"""Positions that one program of the bounds kernel reads at a time."""

BOUNDS_WARPS = 8


def depth_block(depth: int, least: int = 16) -> int:
    """Return a head dimension rounded up to a power of two of at least `least`, such as 128 for
    96."""
    return max(least, 1 << (depth - 1).bit_length())


def tiles_of(length: int, size: int) -> int:
    """Return how many tiles of `size` positions cover `length` positions."""
    return -(-length // size)


def within(given: Conditions, queries: int, keys: int) -> Conditions:
    """Simplify the conditions without changing which keys a query sees.

    The bounds `ahead` and `behind` say how far after and before a query its keys may be. The
    function removes a bound that hides no key. If a bound hides every key, the function raises the
    bound to the largest number that hides every key. Key masks and sequence ids get unit stride."""

    def bound(number: int | None, most: int, least: int) -> int | None:
        return None if number is None or number >= most - 1 else max(number, -least)

    return replace(
        given,
        key_mask=_unit_stride(given.key_mask),
        query_ids=_unit_stride(given.query_ids),
        key_ids=_unit_stride(given.key_ids),
        ahead=bound(given.ahead, keys, queries),
        behind=bound(given.behind, queries, keys),
    )


def _unit_stride(table: Tensor | None) -> Tensor | None:
    return table if table is None or table.stride(1) == 1 else table.contiguous()


def flags_of(given: Conditions) -> dict[str, bool]:
    """Return the compile-time flags that tell a kernel which masking conditions a call has."""
    return {
        "HAS_AHEAD": given.ahead is not None,
        "HAS_BEHIND": given.behind is not None,
        "HAS_KEY_MASK": given.key_mask is not None,
        "HAS_IDS": given.query_ids is not None,
    }


def mask_and_stride(given: Conditions, like: Tensor) -> tuple[Tensor, int]:
    """Return the mask of keys as bytes, and its stride between sequences.

    Without a mask, return `like` as a placeholder."""
    mask = _unit_stride(given.key_mask)
    return (like, 0) if mask is None else (mask.view(torch.uint8), _over_batch(mask))


def cells_of(tensor: Tensor) -> Cells:
    """Return a tensor and all its strides as kernel arguments."""
    return Cells(tensor, *tensor.stride())


def tables_of(given: Conditions, like: Tensor) -> Tables:
    """Return the key mask and the sequence ids as kernel arguments; `like` replaces a missing
    tensor."""
    found: list[Any] = [*mask_and_stride(given, like)]
    for table in map(_unit_stride, (given.query_ids, given.key_ids)):
        found += [like, 0] if table is None else [table, _over_batch(table)]
    return Tables(*found)


def _over_batch(table: Tensor) -> int:
    return table.stride(0) if table.shape[0] > 1 else 0


def positions_of(given: Conditions) -> tuple[int, int]:
    """Return the bounds `ahead` and `behind` (how far after and before a query its keys may be) as
    numbers.

    If a bound is missing, its number is 0. The flags from `flags_of` tell a kernel which bounds
    exist."""
    return given.ahead or 0, given.behind or 0


def find_bounds(
    like: Tensor,  # of the batch's size, on the device
    given: Conditions,  # the conditions, `within` the sizes
    sizes: tuple[int, int, int],  # heads, queries and keys
    shape: tuple[int, int],  # queries and keys per tile
    *,
    ours_are_queries: bool = True,  # tiles of queries visit tiles of keys, not the other way around
    mean: bool = False,  # a query may have no key and then gets the mean of all values
    lse: Tensor | None = None,  # (B, H, M) fp32: minus infinity tells such queries
) -> Tensor:
    """Return, for each program, four numbers that describe the tiles which the program visits.

    Each program has its own tile of queries, and combines this tile with tiles of keys, the visited
    tiles. Without `ours_are_queries`, queries and keys change roles. The result is an int32 tensor
    (B, tiles, 4), with four numbers for each own tile of each sequence. All heads of a sequence use
    the same numbers. The module `key_tiles_kernels` explains the four numbers.

    If the mask depends only on positions, the result is the placeholder `like`, which kernels do
    not read.
    """
    if not (given.has_tables() or mean):
        return like
    from . import key_tiles_kernels as kernels

    _, queries, keys = sizes
    ours, others = shape if ours_are_queries else shape[::-1]
    batch, tiles = like.shape[0], tiles_of(queries if ours_are_queries else keys, ours)
    bounds = like.new_empty((batch, tiles, 4), dtype=torch.int32)
    start(
        kernels._attention_key_tiles_bounds_kernel,
        (batch * tiles,),
        *(tables_of(given, like), bounds if lse is None else lse, bounds, *positions_of(given)),
        *(*sizes, tiles),
        OURS=ours,
        OTHERS=others,
        CHUNK=max(1, BOUNDS_CHUNK // others),
        OURS_ARE_QUERIES=ours_are_queries,
        MEAN=mean,
        FROM_LSE=lse is not None,
        num_warps=BOUNDS_WARPS,
        **flags_of(given),
    )
    return bounds
