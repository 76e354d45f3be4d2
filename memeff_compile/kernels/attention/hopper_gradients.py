"""The backward pass of the attention implementation `tiles` for large calls on Hopper, in Gluon:
one warp loads tiles, and eight warps multiply.

The implementation also has Triton kernels, in the module `tiles_kernels`. These Gluon kernels
support the calls that the forward kernel in `hopper` supports. `is_faster` returns whether a call
uses these kernels. The kernels are used only for calls of the kinds for which they were measured to
be faster than the Triton kernels. As in the Triton kernels, no sum depends on the order in which
programs run.

The lower bound of the time is 14 D operations for each visible pair of a query and a key, at 790
TFLOP/s. D is the head dimension. One kernel computes the gradient of q, and another kernel computes
the gradients of k and v. Both kernels multiply queries by keys, and output gradients by values. So
the lower bound of the time counts the operations of these two products twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._triton import compat, key_tiles
from .._triton.key_tiles import depth_block, tiles_of
from .._triton.launch import launch
from ..device import on_device, processors, was_measured
from . import hopper
from .call import Call

LEAST_TILES = 256
"""The least number of tiles of keys, over all key heads, of a measured call; with fewer, some
processors would compute less than others."""
LEAST_TILES_WITH_TABLES = 512
"""The same for calls with sequence ids or a mask of keys."""
LONG = 16384
"""The least number of keys for which starting products in turn was measured to be slower."""


@dataclass(frozen=True)
class Shape:
    """The tile sizes and other constants for which a kernel is compiled."""

    rows: int  # queries per tile
    keys: int  # keys per tile
    stages: int  # visited tiles in flight
    # for queries: the groups of warps start their products in turn
    in_turn: bool = False
    # for keys and values: the product with the weights starts before the slopes are known
    early: bool = False
    registers: int = 232  # of a thread of the second group of warps
    loader_registers: int = 40  # of a thread of the warp that loads


@dataclass(frozen=True)
class Plan:
    """The tile shape of each kernel."""

    query_gradient: Shape
    key_gradient: Shape


def plan_for(depth: int, keys: int) -> Plan:
    """Return the tile shapes for a head dimension and a number of keys."""
    if depth_block(depth, 64) == 64:
        return Plan(Shape(128, 128, 3, in_turn=True), Shape(64, 128, 4))
    wide = Shape(64, 128, 3, early=True, registers=240, loader_registers=24)
    return Plan(Shape(128, 64, 3, in_turn=keys < LONG), wide)


def is_faster(call: Call, grad: Tensor, out: Tensor) -> bool:
    """Return whether this module's Gluon kernels were faster than the Triton kernels of the module
    `tiles` for backward calls of this kind.

    `grad` is the gradient of attention's result `out`.
    """
    batch, heads, groups, queries, keys, depth = call.sizes
    if call.given.has_tables():
        is_kind = depth >= hopper.MEASURED or hopper.masks_only_keys(call)
        is_measured = is_kind and hopper.has_measured_tables(call)
        least = LEAST_TILES_WITH_TABLES
    else:
        is_narrow = depth == hopper.NARROW and compat.release() <= hopper.LATEST
        is_measured, least = is_narrow or depth >= hopper.MEASURED, LEAST_TILES
    is_large = batch * heads * queries * keys >= hopper.LEAST_PAIRS
    tiles = batch * groups * tiles_of(keys, plan_for(depth, keys).key_gradient.keys)
    if not (is_measured and is_large and tiles >= least):
        return False
    return was_measured(call.q.device, "attention_hopper") and serves(call, grad, out)


def serves(call: Call, grad: Tensor, out: Tensor) -> bool:
    """Return whether this module's Gluon kernels support a backward call of attention.

    `grad` is the gradient of attention's result `out`.
    """
    if not hopper.serves(call):
        return False
    return all(map(hopper.is_loadable, (grad, out)))


def constants_of(shape: Shape, depth: int, flags: Mapping[str, bool]) -> dict[str, Any]:
    """Return the compile-time constants of a kernel.

    `flags` tell which masking conditions a call has, as `hopper.flags_of` returns them."""
    return {
        "ROWS": shape.rows,
        "KEYS": shape.keys,
        "STAGES": shape.stages,
        "DEPTH_BLOCK": depth_block(depth, 64),
        "IN_TURN": shape.in_turn,
        "EARLY": shape.early,
        "REGISTERS": shape.registers,
        "LOADER_REGISTERS": shape.loader_registers,
        "num_warps": 4,
        **flags,
    }


def gradients(
    call: Call,
    grad: Tensor,  # (B, H, M, D), of out, with the depth at unit stride
    out: Tensor,  # the result of `attend`
    lse: Tensor,  # likewise, contiguous
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of attention's inputs q, k and v."""
    plan = plan_for(call.sizes[5], call.sizes[4])
    with on_device(call.q):
        grad_q, stats = _query_gradient(call, grad, out, lse, plan.query_gradient)
        return grad_q, *_key_gradients(call, grad, stats, plan.key_gradient)


def _query_gradient(
    call: Call, grad: Tensor, out: Tensor, lse: Tensor, shape: Shape
) -> tuple[Tensor, Tensor]:
    """Return the gradient of q, and two numbers for each query, which the kernel for the gradients
    of k and v reads.

    The numbers are the log-sum-exp in base 2, and the sum of the output gradient times the output.
    For a query without visible keys, the first number is infinity.
    """
    from .._triton.gluon import tiles_of_heads
    from . import hopper_gradients_kernels as kernels

    batch, heads, groups, queries, keys, depth = call.sizes
    q, block, repeat = call.q, depth_block(depth, 64), heads // groups
    tiles = tiles_of(queries, shape.rows)
    padded = tiles * shape.rows
    grad_q = _like(q)
    stats = q.new_empty((batch, heads, 2, padded), dtype=torch.float32)
    own, others = [1, 1, hopper.OWN, block], [1, 1, shape.keys, block]
    arguments = (
        *(tiles_of_heads(each, own) for each in (q, grad, out)),
        *(tiles_of_heads(each, others) for each in (call.k, call.v)),
        tiles_of_heads(grad_q, own),
        hopper.ranges_of(call, shape.rows, shape.keys, checked=(call.k, call.v)),
        *(lse, stats, call.scales()[0], call.given.scale),
        *key_tiles.positions_of(call.given),
        *(batch * heads, heads, repeat, queries, keys, tiles, padded, _section(call, heads)),
    )
    _run(kernels._attention_hopper_gradients_query_kernel, call, shape, tiles * heads, arguments)
    return grad_q, stats


def _key_gradients(call: Call, grad: Tensor, stats: Tensor, shape: Shape) -> tuple[Tensor, Tensor]:
    """Return the gradients of attention's inputs k and v.

    `stats` contains two numbers of each query, which `_query_gradient` computed. The numbers are
    the log-sum-exp in base 2, and the sum of the output gradient times the output.
    """
    from .._triton.gluon import tiles_of_heads
    from . import hopper_gradients_kernels as kernels

    batch, heads, groups, queries, keys, depth = call.sizes
    q, block, repeat = call.q, depth_block(depth, 64), heads // groups
    tiles = tiles_of(keys, shape.keys)
    grad_k, grad_v = _like(call.k), _like(call.v)
    own, others = [1, 1, hopper.OWN, block], [1, 1, shape.rows, block]
    arguments = (
        *(tiles_of_heads(each, own) for each in (call.k, call.v)),
        *(tiles_of_heads(each, others) for each in (q, grad)),
        *(tiles_of_heads(each, own) for each in (grad_k, grad_v)),
        hopper.ranges_of(call, shape.keys, shape.rows, ours_are_queries=False),
        *(stats, call.scales()[0], call.given.scale),
        *key_tiles.positions_of(call.given),
        *(batch * groups, groups, repeat, queries, keys, tiles, stats.shape[3]),
        _section(call, groups),
    )
    _run(kernels._attention_hopper_gradients_key_kernel, call, shape, tiles * groups, arguments)
    return grad_k, grad_v


def _section(call: Call, heads: int) -> int:
    """Return how many rows of tiles are computed at the same time; a row consists of tiles of one
    head.

    If the call has sequence ids or a mask of keys, a row consists of one head's tiles in all
    sequences. Otherwise, a row consists of one head's tiles in one sequence.
    """
    return heads if call.given.has_tables() else call.sizes[0] * heads


def _like(tensor: Tensor) -> Tensor:
    """Return uninitialized memory for a tensor's gradient, in which all heads of a position are
    adjacent.
    """
    batch, heads, length, depth = tensor.shape
    return tensor.new_empty((batch, length, heads, depth)).transpose(1, 2)


def _run(kernel: Any, call: Call, shape: Shape, tiles: int, arguments: tuple[Any, ...]) -> None:
    """Run a kernel with at most one program per multiprocessor.

    The kernel computes the gradients of tiles of queries or of tiles of keys. `tiles` is the number
    of these tiles in one sequence, over all heads.
    """
    constants = constants_of(shape, call.sizes[5], hopper.flags_of(call))
    programs = min(call.sizes[0] * tiles, processors(call.q.device))
    launch(kernel, (programs,), arguments, constants, tuple(constants.items()))
