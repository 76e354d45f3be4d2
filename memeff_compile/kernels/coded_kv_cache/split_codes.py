"""The attention implementation `codes`: the codes of a low-bit cache are divided among several
programs. This implementation needs a CUDA GPU of sm_80 or later.

The CPU never waits for the GPU or reads a value from it, and the launch grid depends only on static
sizes. So a CUDA graph can capture the calls and replay them while the cache fills up. The kernels
use no atomic operations, so the same inputs give the same bits.

The lower bound of a launch's time is the time to read the codes and their scales once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from .._triton.launch import start
from ..device import gpu, on_device, processors
from .layout import Pool, channel_group, value_bits_of
from .reference import is_per_head
from .shapes import Shapes, halves_for, part_width, rows_for, shapes_for, splits_for

_splits = lru_cache(maxsize=1024)(splits_for)


@dataclass(frozen=True)
class Plan:
    """The parameters of an attention launch: warps, stages, and programs per key-value head.

    The stages are pipeline stages. `splits` programs share one sequence and key-value head.
    """

    shapes: Shapes
    splits: int


def plan_for(
    pairs: int, groups: int, depth: int, bits: int, device: torch.device, repeat: int = 1
) -> Plan:
    """Return the launch parameters of the attention kernel for a low-bit cache.

    `pairs` is the number of pairs of a sequence and a key-value head. Without a GPU, return the
    parameters for an H200.
    """
    shapes = shapes_for(depth, bits, repeat, gpu(device))
    return Plan(shapes, _splits(pairs, groups, processors(device) * shapes.programs))


def paired_norms(norms: Sequence[Tensor | None]) -> Tensor | None:
    """Return the norms of keys and values, each (B, H, N) or None, in one tensor, which is a copy
    only if necessary."""
    first, second = norms
    if first is None or second is None:
        return None
    shape = (*first.shape, 2)
    strides = (2 * shape[1] * shape[2], 2 * shape[2], 2)
    behind = first.data_ptr() + first.element_size() == second.data_ptr()
    if behind and first.stride() == second.stride() == strides and first.dtype == second.dtype:
        return first.as_strided(shape, (*strides, 1))
    return torch.stack([first, second], -1)


def mask_argument(mask: Tensor | None, like: Tensor) -> tuple[Tensor, int, int]:
    """Return a mask, bool (B or 1, 1, 1, N) or None, as the kernels' arguments: bytes and
    strides."""
    if mask is None:
        return like, 0, 0
    return mask.view(torch.uint8), 0 if mask.shape[0] == 1 else mask.stride(0), mask.stride(3)


def turned(q: Tensor, turns: Tensor) -> Tensor:
    """Rotate queries of the upper one of two layers that share the directions of their keys.

    The directions are unit vectors. Before these keys were merged, the upper layer's keys were
    rotated to be similar to the lower layer's keys. This function rotates the upper layer's queries
    in the same way. The queries are (B, Hq, 1, D). The result is (B, Hq, D) in fp32.

    `turns`, (B, H, 2, D, D), contains two matrices per key-value head: one for keys and one for
    values. This function applies only the matrix for keys.
    """
    from . import split_codes_kernels as kernels

    batch, heads, _, depth = q.shape
    found = q.new_empty((batch, heads, depth), dtype=torch.float32)
    chunk, at_once = min(CHUNK, depth), heads_at_once(q, turns)
    start(
        kernels._coded_kv_cache_split_codes_turn_kernel,
        (batch * heads // at_once, depth // chunk),
        *((q, q.stride(0), q.stride(1), q.stride(3)), turns, found),
        (heads, heads // turns.shape[1]),
        DEPTH=depth,
        CHUNK=chunk,
        AT_ONCE=at_once,
        num_warps=4,
    )
    return found


TOGETHER = True

CHUNK = 32
"""Channels of a map that one program applies."""


def heads_at_once(q: Tensor, turns: Tensor) -> int:
    """Return how many query heads one program rotates by the matrix of their key-value head.

    `q`, (B, Hq, 1, D), contains the query heads' queries or results. The rotation matrices `turns`
    are (B, H, 2, D, D) for the keys and values of H heads, or (B, H, 1, D, D) for values only.
    The result is the number of query heads that share a matrix, so that the matrix is read once.
    The result is 1 if the GPU would otherwise have too few programs.
    """
    batch, kv_heads, _, depth = turns.shape[:4]
    programs = batch * kv_heads * (depth // min(CHUNK, depth))
    return q.shape[1] // kv_heads if programs >= 2 * processors(q.device) else 1


def room_for(q: Tensor, shares: int) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate the results, (B, 1, Hq, D), and fp32 buffers for the programs' partial results and
    their softmax statistics.

    If one program computes all of a head, its partial result uses the memory of the results.
    """
    batch, heads, _, depth = q.shape
    out = q.new_empty((batch, 1, heads, depth))
    if shares == 1:
        return out, out, out
    count = batch * heads * shares
    share = q.new_empty((count, depth), dtype=torch.float32)
    return out, share, q.new_empty((2, count), dtype=torch.float32)


def combine(
    out: Tensor,
    share: Tensor,
    stat: Tensor,
    shares: int,
    maps: Sequence[Tensor | None] = (None, None, None),  # as of `reference.view`
    exact: int = 0,  # the last shares, of tokens that are not merged, if there are turns
) -> None:
    """Combine the partial results of several programs into the final result."""
    from . import split_codes_kernels as kernels

    batch, _, heads, depth = out.shape
    means, turns, _ = maps
    if turns is not None:
        chunk, at_once = min(CHUNK, depth), heads_at_once(out.transpose(1, 2), turns)
        start(
            kernels._coded_kv_cache_split_codes_combine_turned_kernel,
            (batch * heads // at_once, depth // chunk),
            *(share, stat, out, means, turns),
            (shares - exact, exact, heads // turns.shape[1], batch * heads * shares),
            DEPTH=depth,
            CHUNK=chunk,
            MERGED_BLOCK=1 << (shares - exact - 1).bit_length(),
            EXACT_BLOCK=1 << (exact - 1).bit_length(),
            AT_ONCE=at_once,
            KINDS=turns.shape[2],
            num_warps=4,
        )
        return
    if shares > 1:
        start(
            kernels._coded_kv_cache_split_codes_combine_kernel,
            (batch * heads,),
            *(share, stat, out, shares, batch * heads * shares),
            DEPTH=depth,
            SPLIT_BLOCK=1 << (shares - 1).bit_length(),
            num_warps=4,
        )


def attend(
    q: Tensor,  # (B, Hq, 1, D), any strides
    pool: Sequence[Tensor],  # the tensors of a cache
    norms: Sequence[Tensor | None],  # of keys and of values, (B, H, N), or two None
    mask: Tensor | None,  # bool (B or 1, 1, 1, N), or None
    scale: float,  # factor of the scores
    bits: int,  # of a code
    maps: Sequence[Tensor | None] = (None, None, None),  # as of `reference.view`
    *,
    plan: Plan | None = None,  # the launch, by default the result of `plan_for`
) -> Tensor:
    """Return attention of one query per sequence over a compressed KV cache.

    The op `memeff::coded_kv_cache_attention` calls this function, and has already checked the
    shapes.
    """
    from . import split_codes_kernels as kernels

    k_codes, v_codes, k_scales, _, k_window, _, k_kept, _, _, counts = pool
    batch, kv_heads, groups, block = k_codes.shape
    window, depth = k_window.shape[2:]
    heads = q.shape[1]
    repeat, pairs = heads // kv_heads, batch * kv_heads
    v_bits = value_bits_of(block, v_codes.shape[3], bits)
    most = max(bits, v_bits)
    per_head = is_per_head(k_scales)
    channels = channel_group(depth, "per_head" if per_head else "kivi")
    kept = k_kept.shape[2]
    if plan is None:
        plan = plan_for(pairs, groups, depth, most, q.device, repeat)
    splits = plan.splits
    halves = halves_for(repeat, most)
    means, turns, slots = maps
    exact = 0 if turns is None else splits
    shares = splits * halves + exact
    out, share, stat = room_for(q, shares)
    kinds = 2 if means is None else means.shape[2]
    of_values = norms[1] if norms[0] is None else None
    paired = paired_norms(norms) if of_values is None else of_values.contiguous()
    norm_count = 0 if norms[1] is None else norms[1].shape[2]
    mask_count = 0 if mask is None else mask.shape[3]
    with on_device(q):
        read = means, None if turns is None or kinds == 1 else turned(q, turns), slots
        start(
            kernels._coded_kv_cache_split_codes_attention_kernel,
            (pairs, splits),
            *((q, q.stride(0), q.stride(1), q.stride(3)), Pool(*pool)),
            *(counts if paired is None else paired, read, mask_argument(mask, counts)),
            *(out, share, stat),
            scale * math.log2(math.e),
            (kv_heads, groups, norm_count, mask_count, splits, batch * heads * shares),
            REPEAT=repeat,
            DEPTH=depth,
            ROWS=rows_for(repeat),
            BITS=bits,
            V_BITS=v_bits,
            GROUP=block * 8 // (depth * bits),
            CHANNELS=channels,
            WIDTH=part_width(depth, v_bits, channels),
            WINDOW=window,
            WINDOW_TILE=min(64, 1 << (window - 1).bit_length()),
            KEPT=kept,
            KEPT_TILE=max(16, min(64, 1 << max(0, kept - 1).bit_length())),
            IS_PER_HEAD=per_head,
            HAS_NORMS=norms[0] is not None,
            HAS_VALUE_NORMS=of_values is not None,
            TOGETHER=TOGETHER,
            KINDS=kinds,
            HAS_MASK=mask is not None,
            IS_ALONE=shares == 1,
            IS_ALIGNED=means is not None,
            IS_TURNED=turns is not None,
            STAGES=plan.shapes.stages,
            AT_ONCE=plan.shapes.at_once,
            HALVES=halves,
            PACKED=q.is_cuda,
            UPCAST=not q.is_cuda,
            num_warps=plan.shapes.warps,
        )
        combine(out, share, stat, shares, maps, exact)
    return out.transpose(1, 2)
