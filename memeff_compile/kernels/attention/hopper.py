"""The engine `hopper` of attention: warps that load and warps that multiply, in Gluon.

The engine needs compute capability 9.0, bf16 or fp16, and a head dimension up to 128. It serves the
calls of `tiles` whose masks are positions, ids and masks of keys; results are those of `tiles`.
Like there, no sum depends on the order in which programs run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .._triton import compat, key_tiles
from .._triton.key_tiles import depth_block, rows_of, tiles_of
from .._triton.launch import start
from ..device import gpu, on_device, processors

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


def serves(call: Any) -> bool:
    """Return whether the engine's kernels support a call of `tiles`."""
    given = call.given
    if not (gpu(call.q.device).is_hopper and compat.has_gluon()):
        return False
    if given.mask is not None or given.softcap or call.mean or given.scale <= 0:
        return False
    depth = call.sizes[5]
    return 32 < depth <= 128 and depth % 8 == 0 and min(call.sizes) > 0 and all(map(_loads, (call.q, call.k, call.v)))


def _loads(tensor: Tensor) -> bool:
    """Return whether the GPU can load tiles of a tensor through a descriptor."""
    steps = zip(tensor.shape[:3], tensor.stride()[:3], strict=True)
    is_even = all(size == 1 or (stride > 0 and stride % 8 == 0) for size, stride in steps)
    return tensor.stride(3) == 1 and is_even and tensor.data_ptr() % 16 == 0


def _tiles(tensor: Tensor, block: list[int]) -> Any:
    """Return a descriptor with which the GPU loads or stores tiles of a tensor of four axes."""
    from .._triton.gluon import NVMMASharedLayout, TensorDescriptor

    sizes, depth = tensor.shape, tensor.shape[3]
    strides = [
        depth if size == 1 and stride % 8 else stride
        for size, stride in zip(sizes, tensor.stride(), strict=True)
    ]
    strides[3] = 1
    return TensorDescriptor(tensor, list(sizes), strides, block, NVMMASharedLayout(128, 16, 4))


def _constants(call: Any, shape: Shape, *, sections: int) -> dict[str, Any]:
    depth = call.sizes[5]
    return {
        "ROWS": shape.rows,
        "KEYS": shape.keys,
        "STAGES": shape.stages,
        "WARPS": 4,
        "DEPTH": depth,
        "DEPTH_BLOCK": depth_block(depth, 64),
        "SECTION": sections,
        "REGISTERS": shape.registers,
        "FUSED": shape.fused,
        "IN_TURN": shape.in_turn,
        "IN_REGISTERS": shape.in_registers,
        "CARRIED": shape.carried,
        "HAS_BOUNDS": call.given.has_tables(),
        "num_warps": 4,
        **key_tiles.flags_of(call.given),
    }


def _start(
    call: Any,
    kernel: Any,
    shape: Shape,
    before: tuple[Any, ...],  # the arguments in front of the bounds
    after: tuple[Any, ...],  # and behind
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
    cached = CACHED // (4 * depth * (keys if ours_are_queries else queries))
    sections = max(1, cached) * repeat if ours_are_queries else max(1, cached // repeat)
    total = batch * ours * tiles
    programs = min(total, processors(call.q.device)) if shape.is_persistent else total
    start(
        kernel,
        (programs,),
        *(*before, key_tiles.tables_of(call.given, call.q), bounds, *after),
        *key_tiles.positions_of(call.given),
        (batch * ours, ours, repeat, queries, keys, tiles),
        **_constants(call, shape, sections=min(sections, 1 << 20)),
    )


def attend(call: Any, plan: Plan = PLAN) -> tuple[Tensor, Tensor]:
    """Return attention over the keys that count, like `tiles.attend`."""
    from . import hopper_kernels as kernels

    batch, heads, _, queries, _, depth = call.sizes
    shape, block = plan.forward, depth_block(depth, 64)
    out = call.q.new_empty((batch, queries, heads, depth))
    lse = call.q.new_empty((batch, heads, queries), dtype=torch.float32)
    own, other = [1, 1, OWN, block], [1, 1, shape.keys, block]
    with on_device(call.q):
        _start(
            call,
            kernels._attention_hopper_forward_kernel,
            shape,
            (
                *(_tiles(call.q, own), _tiles(call.k, other), _tiles(call.v, other)),
                _tiles(out, [1, OWN, 1, block]),
            ),
            (lse, call.scales()[0]),
        )
    return out.transpose(1, 2), lse


def gradients(
    call: Any, grad: Tensor, out: Tensor, lse: Tensor, plan: Plan = PLAN
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, like `tiles.gradients`."""
    from . import hopper_kernels as kernels

    q, k, v = call.q, call.k, call.v
    batch, heads, groups, queries, keys, depth = call.sizes
    block = depth_block(depth, 64)
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
                *(_tiles(q, own), _tiles(grad, own), _tiles(k, other), _tiles(v, other)),
                *(rows_of(out), _tiles(grad_q, store)),
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
                *(_tiles(q, other), _tiles(grad, other), _tiles(k, own), _tiles(v, own)),
                *(_tiles(grad_k, store), _tiles(grad_v, store)),
            ),
            (sums, delta, *scales),
            ours_are_queries=False,
        )
    return grad_q.transpose(1, 2), grad_k.transpose(1, 2), grad_v.transpose(1, 2)
