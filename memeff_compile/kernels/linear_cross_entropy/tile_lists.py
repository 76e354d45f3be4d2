"""Lists of active tiles, built on the GPU from a map of them: what the sparse kernels walk over."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class TileLists(NamedTuple):
    """Where the sparse kernels find their work; int32 all.

    A group is a run of column blocks whose active tiles fit the buffer of G. All counts are zero
    where `is_sparse` is: then the dense kernels do the work.
    """

    is_sparse: Tensor  # (1,)
    tile_row: Tensor  # row block of each active tile, column by column
    tile_column: Tensor
    group_tile: Tensor  # (groups + 1,) where a group's tiles start
    group_column: Tensor  # (groups + 1,) where its columns start
    weight_start: Tensor  # (T + 1,) where a column's list starts
    weight_tile: Tensor
    weight_row: Tensor
    hidden_start: Tensor  # (row blocks, groups + 1) where a row's list of a group starts
    hidden_tile: Tensor
    hidden_column: Tensor


def group_count(row_blocks: int, columns: int, slots: int, parts: str, dense_share: float) -> int:
    """Return how many groups there can be: as many tiles active as still count as sparse.

    Args: as for `build`, with the map's sizes.
    """
    tiles = row_blocks * columns
    if parts == "both":
        tiles = int(tiles * dense_share) + 1
    return -(-tiles // (slots - row_blocks))


def build(
    active: Tensor,  # (row blocks, T) uint8 map; row blocks without rows are inactive
    row_blocks_kept: Tensor | int,  # how many row blocks have rows
    parts: str,  # "both", or the one gradient ("hidden", "weight") that tiles are left out of
    slots: int,  # tiles that the buffer of G holds; at least two per row block
    dense_share: float,  # share of active tiles from which the dense kernels take over
) -> TileLists:
    """List the active tiles for both products, without a value read on the host."""
    row_blocks, columns = active.shape
    groups = group_count(row_blocks, columns, slots, parts, dense_share)
    for_weight = for_hidden = union = active
    if parts != "both":
        numbered = torch.arange(row_blocks, device=active.device)
        has_rows = (numbered < row_blocks_kept).to(active.dtype)
        union = has_rows.view(-1, 1).expand_as(active).contiguous()
        for_weight = active if parts == "weight" else union
        for_hidden = active if parts == "hidden" else union
    by_column, by_row = union.t().contiguous(), for_hidden
    before, before_row = _counted(by_column), _counted(by_row)
    work = before[-1]
    if parts != "both":
        work = (2 * work + active.sum(dtype=torch.int32)) // 3
    is_sparse = (work < int(dense_share * row_blocks * columns) + 1).to(torch.int32).view(1)

    numbers = torch.arange(row_blocks * columns, device=active.device, dtype=torch.int32)
    # Places of the tiles, and lists of what stands at each place; a dump at the end.
    row_of = (numbers % row_blocks).view(columns, row_blocks)
    column_of = (numbers // row_blocks).view(columns, row_blocks)
    tile_of = before[:-1].view(columns, row_blocks)
    where = _where(by_column, before)
    tile_row, tile_column = _listed(where, row_of), _listed(where, column_of)

    # The first tile of a column decides its group, so a group holds at most `slots` tiles.
    starts = before[::row_blocks] * is_sparse
    group_of = torch.div(starts[:-1], slots - row_blocks, rounding_mode="floor")
    group_column = torch.searchsorted(group_of, numbers[: groups + 1], out_int32=True) * is_sparse

    weight_start, weight_tile, weight_row = starts, numbers, tile_row
    if parts == "weight":
        flags = for_weight.t().contiguous()
        places = _counted(flags)
        weight_start = places[::row_blocks] * is_sparse
        where = _where(flags, places)
        weight_tile, weight_row = _listed(where, tile_of), _listed(where, row_of)

    where = _where(by_row, before_row)
    edges = before_row[:-1].view(row_blocks, columns)
    edges = torch.cat([edges, before_row[columns::columns].view(row_blocks, 1)], dim=1)
    return TileLists(
        is_sparse=is_sparse,
        tile_row=tile_row,
        tile_column=tile_column,
        group_tile=starts.index_select(0, group_column),
        group_column=group_column,
        weight_start=weight_start,
        weight_tile=weight_tile,
        weight_row=weight_row,
        hidden_start=edges.index_select(1, group_column),
        hidden_tile=_listed(where, tile_of.t()),
        hidden_column=_listed(where, column_of.t()),
    )


def _counted(flags: Tensor) -> Tensor:
    """Return how many flags stand before each place, and in all, as int32."""
    flat = flags.reshape(-1)
    before = flags.new_zeros(flat.numel() + 1, dtype=torch.int32)
    torch.cumsum(flat, 0, dtype=torch.int32, out=before[1:])
    return before


def _where(flags: Tensor, before: Tensor) -> Tensor:
    """Return the place of each flagged element in its list; the others go to the dump."""
    flat = flags.reshape(-1)
    return torch.where(flat.ne(0), before[:-1], flat.numel()).long()


def _listed(where: Tensor, values: Tensor) -> Tensor:
    """Move values to their places; the last element of the result is the dump."""
    out = values.new_zeros(values.numel() + 1)
    return out.scatter_(0, where, values.reshape(-1))
