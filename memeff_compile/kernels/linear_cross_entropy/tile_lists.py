"""Lists of active tiles, built on the GPU from a map of them: what engine S walks over."""

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


def group_count(row_blocks: int, column_blocks: int, slots: int) -> int:
    """Return how many groups there can be if every tile is active."""
    return -(-row_blocks * column_blocks // (slots - row_blocks))


def build(active: Tensor, parts: str, slots: int, dense_share: float) -> TileLists:
    """List the active tiles for both products, without a value read on the host.

    Args:
        active: (row blocks, T) uint8 map; row blocks without rows are inactive.
        parts: "both", or the one gradient ("hidden", "weight") that tiles are left out of.
        slots: tiles that the buffer of G holds; more than there are row blocks.
        dense_share: share of active tiles from which the dense kernels take over.
    """
    row_blocks, columns = active.shape
    groups = group_count(row_blocks, columns, slots)
    has_rows = active.any(1, keepdim=True) if parts == "both" else torch.ones_like(active[:, :1])
    found = active.ne(0)
    everything = has_rows.expand_as(found).ne(0)
    for_weight = everything if parts == "hidden" else found
    for_hidden = everything if parts == "weight" else found
    union = found if parts == "both" else everything

    work = (union.sum() + for_weight.sum() + for_hidden.sum()).to(torch.float32)
    is_sparse = (work < 3 * dense_share * row_blocks * columns).to(torch.int32).view(1)
    union, for_weight, for_hidden = (
        flags.to(torch.int32) * is_sparse for flags in (union, for_weight, for_hidden)
    )

    by_column = union.t().reshape(-1)
    tile_of = _exclusive(by_column)  # (T * row blocks,) place of each tile among the active ones
    device = active.device
    place = torch.arange(columns * row_blocks, device=device, dtype=torch.int32)
    tile_row = _listed(by_column, tile_of, place % row_blocks)
    tile_column = _listed(by_column, tile_of, place // row_blocks)

    # The first tile of a column decides its group, so a group holds at most `slots` tiles.
    ends = torch.cat([tile_of.view(columns, row_blocks)[:, 0], by_column.sum().view(1)])
    ends = ends.to(torch.int32)
    group_of = torch.div(ends[:-1], slots - row_blocks, rounding_mode="floor")
    numbers = torch.arange(groups + 1, device=device, dtype=torch.int32)
    group_column = torch.searchsorted(group_of, numbers, out_int32=True) * is_sparse
    group_tile = ends[group_column.long()]

    weight_flags = for_weight.t().reshape(-1)
    weight_place = _exclusive(weight_flags)
    weight_start = torch.cat(
        [weight_place.view(columns, row_blocks)[:, 0], weight_flags.sum().view(1)]
    ).to(torch.int32)

    tile_by_row = tile_of.view(columns, row_blocks).t()
    hidden_flags = for_hidden.reshape(-1)
    hidden_place = _exclusive(hidden_flags)
    starts = torch.cat(
        [
            hidden_place.view(row_blocks, columns),
            (hidden_place.view(row_blocks, columns)[:, -1:] + for_hidden[:, -1:]),
        ],
        dim=1,
    )
    hidden_start = starts[:, group_column.long()].to(torch.int32).contiguous()
    return TileLists(
        is_sparse=is_sparse,
        tile_row=tile_row,
        tile_column=tile_column,
        group_tile=group_tile.contiguous(),
        group_column=group_column.contiguous(),
        weight_start=weight_start,
        weight_tile=_listed(weight_flags, weight_place, tile_of),
        weight_row=_listed(weight_flags, weight_place, place % row_blocks),
        hidden_start=hidden_start,
        hidden_tile=_listed(hidden_flags, hidden_place, tile_by_row.reshape(-1)),
        hidden_column=_listed(hidden_flags, hidden_place, place % columns),
    )


def _exclusive(flags: Tensor) -> Tensor:
    """Return how many flags stand before each place."""
    return torch.cumsum(flags, 0, dtype=torch.int32) - flags


def _listed(flags: Tensor, place: Tensor, values: Tensor) -> Tensor:
    """Move the flagged values to their places; the last element of the result is a dump."""
    out = values.new_zeros(values.numel() + 1)
    where = torch.where(flags.ne(0), place, values.numel())
    return out.scatter_(0, where.long(), values)
