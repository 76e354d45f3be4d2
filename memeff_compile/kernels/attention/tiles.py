"""The implementation `tiles` of attention: its kernels combine tiles of queries with tiles of keys.
This implementation needs a CUDA GPU of sm_80 or later, and bf16 or fp16.

The CPU never waits for the GPU or reads a value from it, and the launch grids depend only on static
sizes. So a CUDA graph can capture the calls. The kernels use no atomic operations, so the same
inputs give the same bits.

The kernels take at least the time of their floating-point operations. In each attention head, the
forward pass needs 4 D floating-point operations per visible pair of query and key. The backward
pass needs 10 D. D is the head dimension.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._triton import key_tiles
from .._triton.conditions import Conditions
from .._triton.key_tiles import depth_block, rows_of, tiles_of
from .._triton.launch import launch
from ..device import gpu, on_device
from . import hopper, hopper_gradients
from .call import Call
from .mask_tiles import Dense, dense_of, none_of
from .shapes import KERNELS, Shape, shape_for

MAX_ROW_STRIDE = 1 << 22
"""The largest stride of rows, in elements, with which a tile's offsets are 32-bit numbers."""


@dataclass(frozen=True)
class Plan:
    """The tile shape of each kernel."""

    forward: Shape
    query_gradient: Shape
    key_gradient: Shape


def plan_for(
    depth: int, device: torch.device, *, has_tables: bool = False, has_mask: bool = False
) -> Plan:
    """Return the tile shapes for a head dimension; without CUDA, return those for an H200."""
    told = {"has_tables": has_tables, "has_mask": has_mask}
    return Plan(*(shape_for(name, depth, gpu(device), **told) for name in KERNELS))


class _Call(Call):
    """A call of the kernels of this module."""

    def has_bounds(self) -> bool:
        """Return whether kernels look up, in a table, which tiles of queries and keys to combine.

        A mask that depends only on positions needs no table. The exceptions are calls in which a
        query may have no key and then gets the mean of all values.
        """
        return self.given.has_tables() or self.mean

    def plan(self) -> Plan:
        """Return the tile shape of each kernel."""
        told = {"has_tables": self.has_bounds(), "has_mask": self.given.mask is not None}
        return plan_for(self.sizes[5], self.q.device, **told)

    def constants(self, shape: Shape) -> dict[str, Any]:
        """Return the compile-time constants of an attention kernel."""
        depth, scale = self.sizes[5], self.given.scale
        return {
            "DEPTH": depth,
            "DEPTH_BLOCK": depth_block(depth),
            "ROWS": shape.rows,
            "KEYS": shape.keys,
            "STAGES": shape.stages,
            "HAS_BOUNDS": self.has_bounds(),
            "SIGN": (scale > 0) - (scale < 0),
            "SOFTCAP": self.given.softcap > 0,
            "UPCAST": not self.q.is_cuda,
            "num_warps": shape.warps,
            "BY_HEAD": shape.by_head,
            **({} if shape.registers is None else {"maxnreg": shape.registers}),
            "MEAN": self.mean,
            "HAS_MASK": self.given.mask is not None,
            "IS_BIAS": self.given.is_bias,
            "PER_HEAD": self.given.mask is not None and self.given.mask.shape[1] > 1,
            **key_tiles.flags_of(self.given),
        }

    def bounds(
        self, shape: Shape, lse: Tensor | None, *, ours_are_queries: bool = True
    ) -> tuple[Tensor, int]:
        """Return a table of the tiles that each program visits, and a number of programs.

        A program has its own tile of queries if `ours_are_queries`, otherwise its own tile of keys.
        The program combines this tile with the tiles that it visits: of keys, or of queries. The
        number counts the programs, and thus the own tiles, of one sequence and head. If kernels
        need no table, the first result is a placeholder.
        """
        _, heads, _, queries, keys, _ = self.sizes
        sizes, tile = (heads, queries, keys), (shape.rows, shape.keys)
        ours = (queries, shape.rows) if ours_are_queries else (keys, shape.keys)
        told = {"ours_are_queries": ours_are_queries, "mean": self.mean}
        found = key_tiles.find_bounds(self.q, self.given, sizes, tile, **told, lse=lse)
        return found, tiles_of(*ours)

    def dense(self, shape: Shape, *, ours_are_queries: bool = True) -> Dense:
        """Return the mask tensor as kernel arguments, with a list of tiles for each program.

        A program has its own tile of queries if `ours_are_queries`, otherwise its own tile of keys.
        The program combines its own tile with the tiles in its list: of keys, or of queries. The
        mask has one code per block of 64 x 64 elements. A pair of the own tile and another tile
        overlaps one or more of these blocks. The list leaves out the other tile if all these blocks
        are empty (every key is hidden). Without a mask tensor, the function returns placeholders.
        """
        if self.given.mask is None:
            return none_of(self.q)
        return dense_of(
            self.given.mask,
            self.given.mask_tiles,
            self.sizes[3:5],
            (shape.rows, shape.keys),
            ours_are_queries=ours_are_queries,
        )

    def run(
        self,
        kernel: Any,
        shape: Shape,
        read: tuple[Tensor, ...],  # (B, heads, positions, D) each
        others: tuple[Any, ...],  # the arguments between the bounds and the positions
        *,
        lse: Tensor | None = None,
        ours_are_queries: bool = True,
        parts: Sequence[Mapping[str, bool]] = ({},),  # further constants of each launch
    ) -> None:
        """Run a kernel in which each program processes one tile of queries, or one tile of keys."""
        batch, heads, groups, queries, keys, _ = self.sizes
        bounds, tiles = self.bounds(shape, lse, ours_are_queries=ours_are_queries)
        ours = heads if ours_are_queries else groups
        arguments = (
            *map(rows_of, read),
            key_tiles.tables_of(self.given, self.q),
            self.dense(shape, ours_are_queries=ours_are_queries),
            bounds,
            *others,
            *key_tiles.positions_of(self.given),
            (batch * ours, ours, heads // groups, queries, keys, tiles),
        )
        for part in parts:
            constants = {**self.constants(shape), **part}
            name = tuple(constants.items())
            launch(kernel, (batch * ours * tiles,), arguments, constants, name)


def _call(q: Tensor, k: Tensor, v: Tensor, given: Conditions) -> _Call:
    queries, keys = q.shape[2], k.shape[2]
    given = key_tiles.within(given, queries, keys)
    sizes = (q.shape[0], q.shape[1], k.shape[1], queries, keys, q.shape[3])
    mean = given.has_empty_means(queries, keys)
    return _Call(_rows(q), _rows(k), _rows(v), given, mean, sizes)


def _rows(tensor: Tensor) -> Tensor:
    """Return the tensor itself, or a contiguous copy if the kernels cannot read the tensor.

    The kernels need a last axis of unit stride, and a row stride of at most `MAX_ROW_STRIDE`.
    """
    is_plain = tensor.stride(3) == 1 and tensor.stride(2) <= MAX_ROW_STRIDE
    return tensor if is_plain else tensor.contiguous()


def attend(
    q: Tensor, k: Tensor, v: Tensor, given: Conditions, *, plan: Plan | None = None
) -> tuple[Tensor, Tensor]:
    """Return attention over the keys that no mask excludes, and the log-sum-exp of each query's
    scores.

    The first result is (B, H, M, D) in bf16 or fp16, and the second is (B, H, M) in fp32. If the
    mask is a bias, the second result is (2, B, H, M). Its planes are the largest score, and the
    logarithm of the sum of weights relative to that score. `plan` contains the tile shapes for the
    Triton kernels. Without a `plan`, calls for which `hopper.is_faster` is true run the Gluon
    kernel of the module `hopper`.
    """
    from . import tiles_kernels as kernels

    call = _call(q, k, v, given)
    if plan is None and hopper.is_faster(call):
        return hopper.attend(call)
    batch, heads, _, queries, _, depth = call.sizes
    shape = (plan or call.plan()).forward
    out = q.new_empty((batch, queries, heads, depth))
    planes = (2,) if call.given.is_bias else ()
    lse = q.new_empty((*planes, batch, heads, queries), dtype=torch.float32)
    with on_device(q):
        read, others = (call.q, call.k, call.v), (out, lse, call.scales())
        call.run(kernels._attention_tiles_forward_kernel, shape, read, others)
    return out.transpose(1, 2), lse


def gradients(
    grad_out: Tensor,  # (B, H, M, D), of out
    q: Tensor,  # as for `attend`
    k: Tensor,  # (B, G, N, D)
    v: Tensor,  # likewise
    out: Tensor,  # the result of `attend`
    lse: Tensor,  # likewise
    given: Conditions,  # as for `attend`
    *,
    plan: Plan | None = None,  # likewise
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of attention's inputs q, k and v, as `reference.gradients` does."""
    from . import tiles_kernels as kernels

    call = _call(q, k, v, given)
    q, k, v = call.q, call.k, call.v
    batch, heads, groups, queries, keys, depth = call.sizes
    grad, out, lse = _rows(grad_out), _rows(out), lse.contiguous()
    if plan is None and hopper_gradients.is_faster(call, grad, out):
        return hopper_gradients.gradients(call, grad, out, lse)
    plan = plan or call.plan()
    grad_q = q.new_empty((batch, queries, heads, depth))
    grad_k = k.new_empty((batch, keys, groups, depth))
    grad_v = torch.empty_like(grad_k)
    sums, delta = lse.new_empty((2, batch, heads, queries))
    with on_device(q):
        # sums and delta are made by the first kernel and read by the others
        kernel, made = kernels._attention_tiles_query_gradient_kernel, (lse, sums, delta, grad_q)
        scales = (call.scales(), call.given.scale)
        call.run(kernel, plan.query_gradient, (grad, out, q, k, v), (*made, *scales), lse=lse)
        parts = [(True, True)]
        if plan.key_gradient.is_split:
            parts = [(False, True), (True, False)]
        call.run(
            kernels._attention_tiles_key_gradient_kernel,
            plan.key_gradient,
            (grad, q, k, v),
            (lse, sums, delta, grad_k, grad_v, *scales),
            lse=lse,
            ours_are_queries=False,
            parts=[{"WITH_K": with_k, "WITH_V": with_v} for with_k, with_v in parts],
        )
    return grad_q.transpose(1, 2), grad_k.transpose(1, 2), grad_v.transpose(1, 2)
