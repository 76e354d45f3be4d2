"""The engine `hopper` of attention: warps that load and warps that multiply, in Gluon.

The engine needs compute capability 9.0, bf16 or fp16, and a head dimension up to 128. It serves the
calls of `tiles` whose masks are positions, ids and masks of keys; results are those of `tiles`.
Like there, no sum depends on the order in which programs run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...compat import is_fake
from .._triton import compat, key_tiles
from .._triton.key_tiles import depth_block, rows_of, tiles_of
from .._triton.launch import launch
from .._triton.typed import typed
from ..device import gpu, on_device, processors

if TYPE_CHECKING:
    from .tiles import Call

NARROWEST, WIDEST = 40, 128
"""Head dimensions; tiles pad narrower ones to 64 channels."""
OWN = 64
"""Positions that one group of warps owns, as in the kernels."""
CACHED = 32 << 20
"""Bytes of keys and values that programs read at the same time, to find them in the L2 cache."""


@dataclass(frozen=True)
class Shape:
    """The sizes for which a kernel is compiled."""

    rows: int  # queries per tile
    keys: int  # keys per tile
    stages: int  # tiles in flight
    in_turn: bool = False  # the groups of warps start their products in turn
    fused: bool = False
    in_registers: bool = False
    is_persistent: bool = True
    registers: int = 232
    carried: bool = False


@dataclass(frozen=True)
class Plan:
    """The tile shape of each kernel."""

    forward: Shape
    query_gradient: Shape
    key_gradient: Shape


PLAN = Plan(
    forward=Shape(128, 128, 2, in_turn=True),
    query_gradient=Shape(128, 64, 3),
    key_gradient=Shape(64, 128, 3),
)
PLAN_WITH_TABLES = replace(PLAN, forward=Shape(128, 64, 4, in_turn=True))
"""For calls with a mask of keys or ids, which take additional registers."""


def plan_for(*, has_tables: bool) -> Plan:
    """Return the tile shapes for calls with or without a mask of keys or ids."""
    return PLAN_WITH_TABLES if has_tables else PLAN


def serves(call: Call) -> bool:
    """Return whether the kernels of this module support a call of `tiles`."""
    given, depth = call.given, call.sizes[5]
    is_plain = given.mask is None and not given.softcap and not call.mean and given.scale > 0
    if not (is_plain and call.q.is_cuda and gpu(call.q.device).is_hopper):
        return False
    is_size = NARROWEST <= depth <= WIDEST and depth % 8 == 0 and min(call.sizes) > 0
    return is_size and compat.has_gluon() and all(map(_loads, (call.q, call.k, call.v)))


def _loads(tensor: Tensor) -> bool:
    """Return whether the GPU can load tiles of a tensor through a descriptor."""
    is_even = all(
        size == 1 or (stride > 0 and stride % 8 == 0)
        for size, stride in zip(tensor.shape[:3], tensor.stride()[:3], strict=True)
    )
    start: Any = typed(tensor) if is_fake(tensor) else tensor
    return is_even and start.data_ptr() % 16 == 0


def constants_of(shape: Shape, depth: int, flags: Mapping[str, bool]) -> dict[str, Any]:
    """Return the compile-time constants of a kernel; `flags` tell which conditions a call has."""
    return {
        "ROWS": shape.rows,
        "KEYS": shape.keys,
        "STAGES": shape.stages,
        "WARPS": 4,
        "DEPTH": depth,
        "DEPTH_BLOCK": depth_block(depth, 64),
        "REGISTERS": shape.registers,
        "FUSED": shape.fused,
        "IN_TURN": shape.in_turn,
        "IN_REGISTERS": shape.in_registers,
        "CARRIED": shape.carried,
        "num_warps": 4,
        **flags,
    }


def _start(
    call: Call,
    kernel: Any,
    shape: Shape,
    before: tuple[Any, ...],  # the arguments in front of the bounds
    after: tuple[Any, ...],  # and after them
    *,
    ours_are_queries: bool = True,
) -> None:
    batch, heads, groups, queries, keys, depth = call.sizes
    tile = (shape.rows, shape.keys)
    bounds = key_tiles.find_bounds(
        call.q, call.given, (heads, queries, keys), tile, ours_are_queries=ours_are_queries
    )
    ours, length, size = (heads, queries, tile[0]) if ours_are_queries else (groups, keys, tile[1])
    repeat = heads // groups
    tiles = tiles_of(length, size)
    # Heads of one group of keys share them; a program of keys reads the queries of all its heads.
    others = keys if ours_are_queries else queries * repeat
    section = max(1, CACHED // (4 * depth * others)) * (repeat if ours_are_queries else 1)
    total = batch * ours * tiles
    programs = min(total, processors(call.q.device)) if shape.is_persistent else total
    flags = {"HAS_BOUNDS": call.given.has_tables(), **key_tiles.flags_of(call.given)}
    constants = constants_of(shape, depth, flags)
    arguments = (
        *(*before, key_tiles.tables_of(call.given, call.q), bounds, *after),
        *key_tiles.positions_of(call.given),
        *(batch * ours, ours, repeat, queries, keys, tiles, section),
    )
    launch(kernel, (programs,), arguments, constants, tuple(constants.items()))


def attend(call: Call, plan: Plan | None = None) -> tuple[Tensor, Tensor]:
    """Return attention over the keys that count, like `tiles.attend`."""
    from .._triton.gluon import tiles_of_heads
    from . import hopper_kernels as kernels

    batch, heads, _, queries, _, depth = call.sizes
    shape = (plan or plan_for(has_tables=call.given.has_tables())).forward
    block = depth_block(depth, 64)
    out = call.q.new_empty((batch, queries, heads, depth))
    lse = call.q.new_empty((batch, heads, queries), dtype=torch.float32)
    own, other = [1, 1, OWN, block], [1, 1, shape.keys, block]
    with on_device(call.q):
        _start(
            call,
            kernels._attention_hopper_forward_kernel,
            shape,
            (
                tiles_of_heads(call.q, own),
                *(tiles_of_heads(each, other) for each in (call.k, call.v)),
                tiles_of_heads(out, [1, OWN, 1, block]),
            ),
            (lse, call.scales()[0]),
        )
    return out.transpose(1, 2), lse


def gradients(
    call: Call, grad: Tensor, out: Tensor, lse: Tensor, plan: Plan | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, like `tiles.gradients`."""
    from .._triton.gluon import tiles_of_heads
    from . import hopper_kernels as kernels

    q, k, v = call.q, call.k, call.v
    grad = grad if _loads(grad) else grad.contiguous()
    batch, heads, groups, queries, keys, depth = call.sizes
    plan, block = plan or plan_for(has_tables=call.given.has_tables()), depth_block(depth, 64)
    grad_q = q.new_empty((batch, queries, heads, depth))
    grad_k = k.new_empty((batch, keys, groups, depth))
    grad_v = torch.empty_like(grad_k)
    sums, delta = lse.new_empty((2, batch, heads, queries))
    scales, store = (call.scales()[0], call.given.scale), [1, OWN, 1, block]
    own = [1, 1, OWN, block]
    with on_device(q):
        shape = plan.query_gradient
        other = [1, 1, shape.keys, block]
        _start(
            call,
            kernels._attention_hopper_query_gradient_kernel,
            shape,
            (
                *(tiles_of_heads(each, own) for each in (q, grad)),
                *(tiles_of_heads(each, other) for each in (k, v)),
                *(rows_of(out), tiles_of_heads(grad_q, store)),
            ),
            (lse, sums, delta, *scales),
        )
        shape = plan.key_gradient
        other = [1, 1, shape.rows, block]
        _start(
            call,
            kernels._attention_hopper_key_gradient_kernel,
            shape,
            (
                *(tiles_of_heads(each, other) for each in (q, grad)),
                *(tiles_of_heads(each, own) for each in (k, v)),
                *(tiles_of_heads(each, store) for each in (grad_k, grad_v)),
            ),
            (sums, delta, *scales),
            ours_are_queries=False,
        )
    return grad_q.transpose(1, 2), grad_k.transpose(1, 2), grad_v.transpose(1, 2)
