"""Compute a table that tells the attention kernels in Gluon which keys each query sees. Calls with
sequence ids or a mask of keys need the table.

With padding and with packed documents, each query sees all keys between a first and a last one.
Each key is seen by all queries between a first and a last one. Therefore the attention kernels
compare positions with two numbers of each query or key. The table is computed on the GPU, without
waiting for the CPU.

A tile is a block of consecutive queries or keys. The function `find` marks a tile of queries if one
of its queries has a gap: a hidden key between its first and its last visible key. Likewise, a tile
of keys is marked if one of its keys is hidden from a query between the first and the last query
that see the key. For marked tiles, the kernels compare joint ids: one int32 number for each query
and each key. The joint ids of a query and a key are equal if neither the mask of keys nor the
sequence ids hide the key.

Keys and values that the mask of keys hides may be nan or infinite, and 0 times nan is nan. If a
sequence has such numbers at hidden keys, the forward kernel and the kernel for the gradient of q
replace hidden keys and values by zeros.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .._triton import key_tiles
from .._triton.key_tiles import depth_block, tiles_of
from .._triton.launch import launch
from .call import Call

FIELDS = 8
"""Numbers of each tile, in this order:

1. the first visited tile;
2. the first complete tile;
3. the end of the complete tiles;
4. the end of all visited tiles;
5. 1 if a position of the tile sees others with gaps between them, otherwise 0;
6. the first visited tile in which the mask hides no key;
7. the end of such tiles;
8. for the n-th tile, the tile of all sequences with the n-th most work."""

CHUNK = 1024
"""Positions that one program reads at a time."""
SORTED, COMPARED = 128, 32
"""Tiles that one program sorts, and tiles with which it compares them at a time."""
WARPS = 8
CHECKED = 128
"""Keys that one program reads to find nan and infinities at hidden keys."""


def find(
    call: Call, own: int, others: int, *, ours_are_queries: bool, checked: Sequence[Tensor] = ()
) -> Tensor:
    """Return an int32 table that tells attention kernels which keys each query sees.

    The kernels combine tiles of `own` queries with tiles of `others` keys. `checked` contains keys,
    values, or both. The table contains, one after another:

    - for each tile of queries, the `FIELDS` (8) numbers, such as the first of its tiles of keys;
    - for each sequence, four lists. The first two lists contain the first and the last key that
      each query sees. The last two lists contain one number, the joint id, for each query and for
      each key. The joint ids of a query and a key are equal if neither the mask of keys nor the
      sequence ids hide the key;
    - for each sequence and key head, a flag. The flag is 1 if `checked` has nan or an infinity at a
      key that the mask of keys hides, otherwise 0.

    Without `ours_are_queries`, queries and keys change roles in the tiles and the lists. The lists
    then contain the first and the last query that sees each key. If a query sees no key, or no
    query sees a key, the first position is larger than the last position.
    """
    from . import ranges_kernels as kernels

    batch, _, groups, queries, keys, _ = call.sizes
    tiles = tiles_of(queries if ours_are_queries else keys, own)
    visited = tiles_of(keys if ours_are_queries else queries, others)
    size = batch * (tiles * (FIELDS + 3 * own) + visited * others)
    found = call.q.new_empty((size + batch * groups,), dtype=torch.int32)
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
    arguments = (tables, found, *positions, queries, keys, tiles, groups)
    name = tuple(constants.items())
    launch(kernels._attention_ranges_kernel, (batch * tiles,), arguments, constants, name)
    if call.given.key_mask is not None and checked:
        _find_infinite(call, checked, tables, found[size:])
    constants = {"OURS": SORTED, "OTHERS": COMPARED, "num_warps": WARPS}
    grid = (tiles_of(batch * tiles, SORTED),)
    name = tuple(constants.items())
    launch(kernels._attention_ranges_order_kernel, grid, (found, batch * tiles), constants, name)
    return found


def _find_infinite(
    call: Call, checked: Sequence[Tensor], tables: key_tiles.Tables, flags: Tensor
) -> None:
    """Write 1 to the flag of a sequence and key head if `checked` has nan or an infinity at a key
    that the mask of keys hides.

    `checked` contains the keys, the values, or both.
    """
    from . import ranges_kernels as kernels

    batch, _, groups, _, keys, depth = call.sizes
    constants = {
        "KEYS": CHECKED,
        "DEPTH": depth,
        "DEPTH_BLOCK": depth_block(depth),
        "HAS_SECOND": len(checked) > 1,
        "num_warps": 4,
    }
    first, second = key_tiles.rows_of(checked[0]), key_tiles.rows_of(checked[-1])
    tiles = tiles_of(keys, CHECKED)
    arguments = (first, second, tables, flags, groups, keys, tiles)
    name = tuple(constants.items())
    grid = (batch * groups * tiles,)
    launch(kernels._attention_ranges_finite_kernel, grid, arguments, constants, name)
