"""The forward pass of the attention implementation `tiles` for large calls on Hopper, in Gluon: one
warp loads tiles, and eight warps multiply.

The implementation also has Triton kernels, in the module `tiles_kernels`. The Gluon kernel needs
compute capability 9.0, bf16 or fp16, and a head dimension up to 128. The kernel supports bounds on
positions (causal masks and sliding windows), sequence ids and masks of keys. For ids and masks of
keys, the module `ranges` first finds which keys each query sees. `is_faster` returns whether a call
uses this kernel. The kernel is used only for calls of the kind for which it was measured to be
faster than the Triton kernels. As in the Triton kernels, no sum depends on the order in which
programs run. The backward pass is in `hopper_gradients`.

The time of the kernel's floating-point operations is a lower bound for the time of the kernel, as
for the Triton kernels. Each visible pair of a query and a key takes 4 D operations (D is the head
dimension). An H200 reaches at most 790 TFLOP/s. On an H200, causal attention of 4 sequences, 32
heads, 4096 tokens and a head dimension of 128 reaches 593 TFLOP/s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...compat import is_fake
from .._triton import compat, key_tiles
from .._triton.key_tiles import depth_block, tiles_of
from .._triton.launch import launch
from .._triton.typed import typed
from ..device import gpu, on_device, processors, was_measured
from . import ranges
from .call import Call

NARROWEST, WIDEST = 40, 128
"""Head dimensions that the kernel supports."""
MEASURED = 96
"""The least head dimension for which the kernel was faster under masks that depend only on
positions; heads of 64 were 4 % slower."""
LEAST_PAIRS = 1 << 29
"""The least number of pairs of a query and a key, over all heads, of a measured call; small calls
would wait for the host."""
NARROW = 64
"""The one head dimension below `MEASURED` for which kernels were faster: the forward kernel with
sequence ids or masks of keys, the backward kernels without them, and the backward kernels with a
mask of keys as the only condition."""
LEAST_ROWS, LEAST_ROWS_NARROW = 1 << 18, 1 << 19
"""The least number of queries over all heads of a measured call with ids or masks of keys, and of
such a call with heads of 64."""
LEAST_KEYS_WITH_TABLES = 2048
"""The shortest sequences of a measured call with ids or masks of keys."""
LEAST_HEADS = 16
"""The least number of heads of a measured call with ids or masks of keys. All heads share the
ranges, so with fewer heads the time for finding the ranges counts more."""
KEYS_PER_HEAD, KEYS_PER_HEAD_NARROW = 1024, 256
"""The longest measured calls with ids or masks of keys had about this number of keys for each head
of queries. For packed documents, the time for finding the ranges grows with the square of the
length, and attention's time does not."""
WINDOW = 1024
"""The narrowest window of a measured call with ids or masks of keys."""
MOST_POSITIONS = 1 << 17
"""The most positions of all sequences of a call with ids or masks of keys; the kernel that sorts
tiles compares every two tiles."""
LATEST = (3, 8)
"""The latest Triton with which calls use the kernels for ids and masks of keys, and the backward
kernels for heads of 64. These kernels spill more registers with Triton 3.9, with which they were
not timed."""
OWN = 64
"""Queries that one group of warps owns, as in the kernel."""
CACHED = 32 << 20
"""Bytes of keys and values that programs read at the same time, to find them in the L2 cache."""


@dataclass(frozen=True)
class Shape:
    """The tile sizes and other constants for which the kernel is compiled."""

    rows: int  # queries per tile
    keys: int  # keys per tile
    stages: int  # tiles in flight
    in_turn: bool = True  # the groups of warps start their products in turn
    registers: int = 232  # of a thread of the second group of warps


def shape_for(*, has_tables: bool) -> Shape:
    """Return the tile shape for a call.

    With sequence ids or a mask of keys (`has_tables`), a thread gets additional registers. It
    stores in them the first and the last visible key of its queries.
    """
    return Shape(128, 128, 2, registers=240 if has_tables else 232)


def is_faster(call: Call) -> bool:
    """Return whether this module's Gluon kernel was faster than the Triton kernel of the module
    `tiles` for calls of this kind.
    """
    batch, heads, _, queries, keys, depth = call.sizes
    is_measured = has_measured_tables(call) if call.given.has_tables() else depth >= MEASURED
    if not is_measured or batch * heads * queries * keys < LEAST_PAIRS:
        return False
    return was_measured(call.q.device, "attention_hopper") and serves(call)


def has_measured_tables(call: Call) -> bool:
    """Return whether a call with sequence ids or a mask of keys resembles the benchmarked calls.

    Only self-attention was benchmarked, within this module's limits on heads, head dimensions,
    lengths, masks and Triton versions. The forward pass of such calls was compared with float64 and
    timed on a GPU.
    """
    batch, heads, _, queries, keys, depth = call.sizes
    positions = batch * queries
    if queries != keys or keys < LEAST_KEYS_WITH_TABLES:
        return False
    if positions > MOST_POSITIONS or heads < LEAST_HEADS:
        return False
    if not _has_measured_masks(call) or compat.release() > LATEST:
        return False
    if depth >= MEASURED:
        return positions * heads >= LEAST_ROWS and keys <= KEYS_PER_HEAD * heads
    is_long = keys > KEYS_PER_HEAD_NARROW * heads
    return depth == NARROW and positions * heads >= LEAST_ROWS_NARROW and not is_long


def _has_measured_masks(call: Call) -> bool:
    """Return whether the masks of a call are like those of a benchmarked call.

    For head dimensions of at least `MEASURED` (96), three kinds of calls were timed: with a mask of
    keys, with sequence ids, and with both. Each kind was timed with a causal mask, with a causal
    window, and without a causal mask.

    For a head dimension of 64, these calls were timed:

    - in bf16, with a causal mask: a mask of keys, sequence ids, or both;
    - in bf16, without a causal mask: sequence ids or a mask of keys, not both;
    - in fp16: a mask of keys, without ids and without a causal mask.
    """
    given, is_wide = call.given, call.sizes[5] >= MEASURED
    if given.ahead is None and given.behind is None:
        if is_wide or masks_only_keys(call):
            return True
        return given.key_mask is None and call.q.dtype == torch.bfloat16
    if given.ahead != 0:
        return False
    if given.behind is not None:
        return is_wide and given.behind >= WINDOW - 1
    return is_wide or call.q.dtype == torch.bfloat16


def masks_only_keys(call: Call) -> bool:
    """Return whether a mask of keys is the only condition that hides keys from queries."""
    given = call.given
    is_unbounded = given.ahead is None and given.behind is None
    return is_unbounded and given.key_mask is not None and given.query_ids is None


def serves(call: Call) -> bool:
    """Return whether this module's Gluon kernel supports a call of attention."""
    given, depth = call.given, call.sizes[5]
    is_plain = given.mask is None and not given.softcap and not call.mean and given.scale > 0
    if not (is_plain and call.q.is_cuda and gpu(call.q.device).is_hopper):
        return False
    is_size = NARROWEST <= depth <= WIDEST and depth % 8 == 0 and min(call.sizes) > 0
    return is_size and compat.has_gluon() and all(map(is_loadable, (call.q, call.k, call.v)))


def is_loadable(tensor: Tensor) -> bool:
    """Return whether the GPU can load tiles of a tensor through a descriptor."""
    is_even = all(
        size == 1 or (stride > 0 and stride % 8 == 0)
        for size, stride in zip(tensor.shape[:3], tensor.stride()[:3], strict=True)
    )
    start: Any = typed(tensor) if is_fake(tensor) else tensor
    return is_even and start.data_ptr() % 16 == 0


def constants_of(shape: Shape, depth: int, flags: Mapping[str, bool]) -> dict[str, Any]:
    """Return the compile-time constants of the kernel.

    `flags` tell which masking conditions a call has, as `flags_of` returns them."""
    return {
        "ROWS": shape.rows,
        "KEYS": shape.keys,
        "STAGES": shape.stages,
        "WARPS": 4,
        "DEPTH": depth,
        "DEPTH_BLOCK": depth_block(depth, 64),
        "REGISTERS": shape.registers,
        "IN_TURN": shape.in_turn,
        "num_warps": 4,
        **flags,
    }


def flags_of(call: Call) -> dict[str, bool]:
    """Return the compile-time flags that tell a kernel which masking conditions a call has."""
    return {"HAS_BOUNDS": call.given.has_tables(), **key_tiles.flags_of(call.given)}


def ranges_of(
    call: Call,
    own: int,
    others: int,
    *,
    ours_are_queries: bool = True,
    checked: Sequence[Tensor] = (),
) -> Tensor:
    """Return the table, made by `ranges.find`, that tells a kernel which keys each query sees.

    The kernel combines tiles of `own` queries with tiles of `others` keys. For each tile of
    queries, the table contains the range of tiles of keys with visible keys. For each query, the
    table contains the first and the last visible key. Without `ours_are_queries`, queries and keys
    change roles. The table also tells whether a tensor of `checked` has nan or an infinity at a key
    that the mask of keys hides. If the mask depends only on positions, return a placeholder, which
    kernels do not read.
    """
    if not call.given.has_tables():
        return call.q
    return ranges.find(call, own, others, ours_are_queries=ours_are_queries, checked=checked)


def attend(call: Call) -> tuple[Tensor, Tensor]:
    """Return attention over the keys that no mask excludes, and the log-sum-exp of each query's
    scores.

    The results have the shapes (B, H, M, D) and (B, H, M). The second result is fp32.
    """
    from .._triton.gluon import tiles_of_heads
    from . import hopper_kernels as kernels

    batch, heads, groups, queries, keys, depth = call.sizes
    q, given, repeat = call.q, call.given, heads // groups
    shape, block = shape_for(has_tables=given.has_tables()), depth_block(depth, 64)
    out = q.new_empty((batch, queries, heads, depth))
    lse = q.new_empty((batch, heads, queries), dtype=torch.float32)
    tiles = tiles_of(queries, shape.rows)
    # All heads that share keys are computed at the same time. With ids or a mask of keys, all heads
    # of all sequences are.
    section = heads if given.has_tables() else max(1, CACHED // (4 * depth * keys)) * repeat
    constants = constants_of(shape, depth, flags_of(call))
    with on_device(q):
        arguments = (
            tiles_of_heads(q, [1, 1, OWN, block]),
            *(tiles_of_heads(each, [1, 1, shape.keys, block]) for each in (call.k, call.v)),
            tiles_of_heads(out, [1, OWN, 1, block]),
            ranges_of(call, shape.rows, shape.keys, checked=(call.v,)),
            *(lse, call.scales()[0], *key_tiles.positions_of(given)),
            *(batch * heads, heads, repeat, queries, keys, tiles, section),
        )
        launch(
            kernels._attention_hopper_forward_kernel,
            (min(batch * heads * tiles, processors(q.device)),),
            arguments,
            constants,
            tuple(constants.items()),
        )
    return out.transpose(1, 2), lse
