"""Prepare a call with a mask of keys or sequence ids for the kernels in Gluon.

With padding and with packed documents, each query sees the keys from a first to a last one. Each
key is seen by the queries from a first to a last one. To find the visible pairs, a kernel then
compares positions with two numbers of each query or key. The ranges are computed on the GPU,
without waiting for the CPU. Masks and ids in which a position sees others with gaps between them
are marked. For such masks and ids, the kernels also read the mask and the ids. In tiles that the
mask of keys touches, the forward kernel and the kernel for the gradient of q always read the mask.
These two kernels replace hidden keys and values, which may be nan, by zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._triton import key_tiles
from .._triton.key_tiles import tiles_of
from .._triton.launch import launch
from .call import Call

FIELDS = 8
"""Numbers of each tile: the first visited tile, the first complete tile, the end of the complete
tiles, the end of all visited tiles, whether positions see others with gaps between them, the first
visited tile of which the mask hides no key, the end of such tiles, and, as the n-th tile's last
number, which tile of all sequences has the n-th most work."""

CHUNK = 1024
"""Positions that one program reads at a time."""
SORTED, COMPARED = 128, 32
"""Tiles that one program sorts, and tiles with which it compares them at a time."""
WARPS = 8


def find(call: Call, own: int, others: int, *, ours_are_queries: bool) -> Tensor:
    """Return the tiles that each tile of queries (or, without `ours_are_queries`, of keys) visits,
    and the range of each position, as int32.

    `own` and `others` are the positions of a tile and of a visited tile. The first B x tiles x
    `FIELDS` numbers describe the tiles. Then follow, for each sequence, the first visible position
    of each position, and the last visible positions. If a position sees none, the first one is
    above the last one.
    """
    from . import ranges_kernels as kernels

    batch, queries, keys = call.sizes[0], call.sizes[3], call.sizes[4]
    tiles = tiles_of(queries if ours_are_queries else keys, own)
    size = batch * tiles * (FIELDS + 2 * own)
    found = call.q.new_empty((size,), dtype=torch.int32)
    constants = {
        "OURS": own,
        "OTHERS": others,
        "CHUNK": max(1, CHUNK // others),
        "OURS_ARE_QUERIES": ours_are_queries,
        "num_warps": WARPS,
        **key_tiles.flags_of(call.given),
    }
    tables = key_tiles.tables_of(call.given, call.q)
    positions = key_tiles.positions_of(call.given)
    arguments = (tables, found, *positions, queries, keys, tiles)
    name = tuple(constants.items())
    launch(kernels._attention_ranges_kernel, (batch * tiles,), arguments, constants, name)
    constants = {"OURS": SORTED, "OTHERS": COMPARED, "num_warps": WARPS}
    grid = (tiles_of(batch * tiles, SORTED),)
    name = tuple(constants.items())
    launch(kernels._attention_ranges_order_kernel, grid, (found, batch * tiles), constants, name)
    return found
