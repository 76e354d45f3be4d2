"""The implementation `tiles` of low-bit attention: it encodes q, k and v, then combines tiles of
queries with tiles of keys. This implementation needs a CUDA GPU of sm_80 or later.

A call launches five kernels. The first kernel reads keys, values and some queries. The second
kernel, a short one, computes means and scales. The third kernel encodes keys and values. The fourth
kernel, a short one, sums the rounding errors of the values. The fifth kernel encodes queries and
computes attention. With masks or sequence ids, one more kernel finds the tiles that the fifth
kernel visits. If means of queries are subtracted, one more kernel computes the scores of these
means before the fifth kernel runs. The CPU never waits for the GPU or reads a value from it, and
the launch grids depend only on static sizes. So a CUDA graph can capture the calls. The kernels use
no atomic operations, so the same inputs give the same bits. The kernels read q, k and v and never
write to them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...errors import UnsupportedInputError
from .._triton import key_tiles
from .._triton.compat import described
from .._triton.conditions import Conditions
from .._triton.key_tiles import depth_block, rows_of, tiles_of
from .._triton.launch import start
from ..device import gpu, on_device, processors, starts_early
from . import reference, shapes
from .settings import BLOCK, NARROWEST, QUERY_ROWS, VALUES, Settings, sampled_queries

MOST_ROWS = 1 << 31


@dataclass(frozen=True)
class Packed:
    """The tensors of codes and scales that the attention kernel reads.

    The head dimension D is padded. The number of keys N is padded too, to a multiple of `BLOCK`.
    """

    # (B * H * M, D) int8; without `q_scale` room for them: the attention kernel codes queries as it
    # loads them
    q: Tensor
    k: Tensor  # (B * G * N, D) int8
    v: Tensor  # (B * G * D, N) E4M3, its keys in the order of `tiles_kernels._reordered`, or fp16
    q_scale: Tensor | None  # (B * H, M) fp32, or None
    k_scale: Tensor  # (B * G, N / BLOCK) fp32, or (B * G, N) with `is_scaled_per_key`
    v_scale: Tensor  # (B * G, 2, D) fp32: scale and mean of each channel
    correction: Tensor | None  # (B * H, query blocks, N) fp32, or None
    shift: Tensor | None  # (B * H, M) fp32, or None
    # (B * G, N / BLOCK + 1, D) fp32: the values' rounding errors, summed over blocks up to each,
    # weighed, in steps of their scale; or None
    rest: Tensor | None = None
    counts: Tensor | None = None  # (B * G, N / BLOCK + 1) fp32: sums of weights, with `rest`
    # (B * G, 6, D) fp32, without `q_scale`: the last is the factors of queries
    k_mean: Tensor | None = None
    q_mean: Tensor | None = None  # (B * H, query blocks, 2, D) fp32, with `correction`: the first
    is_scaled_per_key: bool = False  # whether each key has a scale


def _require_rows_in_reach(queries: int, keys: int) -> None:
    """Raise an error if a call has more rows of codes than a descriptor's 32-bit coordinates can
    address."""
    for name, rows in (("queries", queries), ("keys", keys)):
        if rows >= MOST_ROWS:
            raise UnsupportedInputError(
                f"quantized_attention: {rows} rows of {name} over all batches and heads; fewer "
                f"than {MOST_ROWS} are needed. Attend to parts of the batch."
            )


def _rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(3) == 1 else tensor.contiguous()


def pack(q: Tensor, k: Tensor, v: Tensor, given: Conditions, settings: Settings) -> Packed:
    """Encode q, k and v, and return the codes.

    If `settings.granularity` is "row", four kernels compute the codes, otherwise plain PyTorch. The
    inputs must be bf16, fp16 or fp32. The shape of q is (B, H, M, D). The shape of k and v is (B,
    G, N, D), where G is the number of key-value heads.
    """
    _require_rows_in_reach(
        q.shape[0] * q.shape[1] * q.shape[2],
        k.shape[0] * k.shape[1] * tiles_of(k.shape[2], BLOCK) * BLOCK,
    )
    if settings.granularity != "row":
        return packed(reference.codes(q, k, v, given, settings), settings)
    from . import prepare_kernels as kernels

    q, k, v = _rows(q), _rows(k), _rows(v)
    batch, heads, queries, depth = q.shape
    groups, keys = k.shape[1:3]
    wide, is_smooth = depth_block(depth, NARROWEST), "q" in settings.smooth
    rows = BLOCK if is_smooth else QUERY_ROWS
    query_blocks, key_blocks = tiles_of(queries, rows), tiles_of(keys, BLOCK)
    stride, samples, sampled = sampled_queries(queries)
    chunk, chunks = _chunks(batch * groups, keys, q.device)
    found = _empty(q, (batch, heads, groups, queries, keys, wide), settings)
    assert found.k_mean is not None
    k_mean = found.k_mean
    sums = k_mean.new_empty((batch * groups, chunks, 6, wide))
    looked = query_blocks if is_smooth else samples
    q_means = sums.new_empty((batch * heads, looked, 2, wide))
    counts = weights = k_mean
    if found.counts is not None:
        counts = torch.empty_like(found.counts)
        weights = k_mean.new_empty((batch * groups, key_blocks * BLOCK))
    looks, programs = batch * groups * chunks, batch * groups * key_blocks
    shifts = batch * heads * query_blocks if settings.with_lse else 0
    # each with its strides, as the kernels take them
    operands = (rows_of(q), rows_of(k), rows_of(v), *key_tiles.mask_and_stride(given, q))
    scale = given.scale * math.log2(math.e)
    sizes = {"DEPTH": depth, "DEPTH_BLOCK": wide, "HAS_KEY_MASK": given.key_mask is not None}
    far, near = settings.turned(wide)
    sizes |= {"ROWS": rows, "FAR": far, "NEAR": near, "UPCAST": not q.is_cuda}
    width = wide // 128 or 1
    is_early, early = _early(q.device)
    with on_device(q):
        start(
            kernels._quantized_attention_prepare_look_kernel,
            (looks + batch * heads * looked,),
            *(*operands, sums, q_means, scale, heads, groups, queries, keys),
            *(looked, stride, chunk, chunks, looks),
            KEYS=shapes.LOOK_KEYS,
            SAMPLE=reference.SAMPLE,
            SMOOTH_Q=is_smooth,
            num_warps=shapes.LOOK_WARPS * width,
            **sizes,
            **is_early,
        )
        start(
            kernels._quantized_attention_prepare_settle_kernel,
            (batch * groups, 3),
            *(sums, q_means, k_mean, found.v_scale, scale),
            *(chunks, looked * (heads // groups), sampled * (heads // groups)),
            DEPTH_BLOCK=wide,
            FAR=far,
            NEAR=near,
            ALIGN=settings.aligns,
            CHUNKS=max(2, 1 << (chunks - 1).bit_length()),
            SMOOTH_K="k" in settings.smooth,
            SMOOTH_V="v" in settings.smooth,
            num_warps=shapes.SETTLE_WARPS,
            **early,
        )
        start(
            kernels._quantized_attention_prepare_write_kernel,
            (2 * programs + shifts,),
            *(*operands, k_mean, found.v_scale, found.k, found.v, found.k_scale),
            k_mean if found.shift is None else found.shift,
            k_mean if found.rest is None else found.rest,
            *(counts, weights, scale, heads, groups, queries, keys),
            *(query_blocks, key_blocks, programs),
            BLOCK=BLOCK,
            LIMIT=settings.limit,
            KEY_STEPS=settings.steps,
            SMOOTH_K="k" in settings.smooth,
            ALIGN=settings.aligns,
            HAS_REST=found.rest is not None,
            WITH_LSE=settings.with_lse,
            num_warps=shapes.write_warps(wide),
            **sizes,
            **early,
        )
        if found.rest is not None:
            start(
                kernels._quantized_attention_prepare_total_kernel,
                (batch * groups, wide // shapes.TOTAL_COLUMNS),
                *(found.v, found.v_scale, found.rest, counts, found.counts, weights, key_blocks),
                DEPTH_BLOCK=wide,
                BLOCK=BLOCK,
                COLUMNS=shapes.TOTAL_COLUMNS,
                TOGETHER=shapes.TOTAL_BLOCKS,
                num_warps=shapes.TOTAL_WARPS,
                **early,
            )
        if found.correction is not None:
            blocks = heads // groups * query_blocks
            start(
                kernels._quantized_attention_prepare_correct_kernel,
                (batch * groups * key_blocks * tiles_of(blocks, shapes.MEANS),),
                *(operands[1], *operands[3:], k_mean, q_means, found.k_scale),
                *(found.correction, scale, groups, keys, blocks, key_blocks),
                BLOCK=BLOCK,
                MEANS=shapes.MEANS,
                CHANNELS=shapes.channels_together(wide),
                STARTS=settings.starts,
                num_warps=shapes.CORRECT_WARPS,
                **sizes,
                **early,
            )
    return replace(found, q_mean=q_means) if is_smooth else found


def _early(device: torch.device) -> tuple[dict[str, bool], dict[str, bool]]:
    """Return the launch options of the first kernel of an attention call, and those of the later
    kernels.
    """
    is_early = {"EARLY": starts_early(device)}
    return is_early, ({**is_early, "launch_pdl": True} if is_early["EARLY"] else is_early)


def _chunks(rows: int, keys: int, device: torch.device) -> tuple[int, int]:
    """Return the number of keys per chunk, and the number of chunks per key-value head.

    A chunk is a range of consecutive tokens. For each chunk, one program of the first kernel,
    `look`, sums sampled keys and all values. `rows` is the number of key-value heads in the batch.
    The chunks are chosen so that the GPU is busy.
    """
    wanted = tiles_of(shapes.PROGRAMS_PER_PROCESSOR * processors(device), rows)
    wanted = max(1, min(wanted, shapes.MOST_CHUNKS, tiles_of(keys, shapes.LOOK_KEYS)))
    chunk = tiles_of(tiles_of(keys, wanted), shapes.LOOK_KEYS) * shapes.LOOK_KEYS
    return chunk, tiles_of(keys, chunk)


def _empty(like: Tensor, sizes: tuple[int, int, int, int, int, int], settings: Settings) -> Packed:
    batch, heads, groups, queries, keys, depth = sizes
    blocks = tiles_of(keys, BLOCK)
    fp32, int8 = torch.float32, torch.int8
    dtype = VALUES[settings.values].dtype

    def empty(dtype: torch.dtype | None, *shape: int) -> Tensor:
        return like.new_empty(shape, dtype=dtype)

    key_rows, query_rows, has_rest = batch * groups, batch * heads, settings.restores
    is_smooth, query_blocks = "q" in settings.smooth, tiles_of(queries, BLOCK)
    return Packed(
        empty(int8, query_rows * queries, depth),
        empty(int8, key_rows * blocks * BLOCK, depth),
        empty(dtype, key_rows * depth, blocks * BLOCK),
        None,
        empty(fp32, key_rows, blocks),
        empty(fp32, key_rows, 2, depth),
        empty(fp32, query_rows, query_blocks, blocks * BLOCK) if is_smooth else None,
        empty(fp32, query_rows, queries) if settings.with_lse else None,
        empty(fp32, key_rows, blocks + 1, depth) if has_rest else None,
        empty(fp32, key_rows, blocks + 1) if has_rest else None,
        empty(fp32, key_rows, 6, depth),
    )


def packed(made: reference.Codes, settings: Settings) -> Packed:
    """Convert codes that PyTorch computed to the layout that the attention kernel reads."""
    wide = depth_block(made.v.shape[3], NARROWEST)
    missing = wide - made.v.shape[3]
    after = tiles_of(made.k.shape[2], BLOCK) * BLOCK - made.k.shape[2]
    pad = torch.nn.functional.pad
    values = pad(made.v, (0, missing, 0, after)).transpose(2, 3)
    if settings.values == "e4m3":
        order = values.reshape(*values.shape[:3], -1, 2, 4, 2).transpose(4, 5)
        values = order.reshape(values.shape)
    correction = made.correction
    dtype = VALUES[settings.values].dtype
    assert dtype is not None
    scales = torch.stack([made.v_scale, made.v_mean], 2)
    return Packed(
        pad(made.q, (0, wide - made.q.shape[3])).to(torch.int8).reshape(-1, wide),
        pad(made.k, (0, wide - made.k.shape[3], 0, after)).to(torch.int8).reshape(-1, wide),
        values.to(dtype).reshape(-1, values.shape[3]),
        made.q_scale.flatten(0, 1).contiguous(),
        pad(made.k_scale, (0, after)).flatten(0, 1).contiguous(),
        pad(scales, (0, missing)).flatten(0, 1).contiguous(),
        None if correction is None else pad(correction, (0, after)).flatten(0, 1).contiguous(),
        made.shift.flatten(0, 1).contiguous() if settings.with_lse else None,
        is_scaled_per_key=True,
    )


def attend(
    q: Tensor,  # (B, H, M, D) bf16, fp16 or fp32
    k: Tensor,  # (B, G, N, D)
    v: Tensor,  # likewise
    given: Conditions,  # the conditions
    settings: Settings,  # the arithmetic
    *,
    shape: shapes.Shape | None = None,  # the tile, by default the result of `shape_for`
) -> tuple[Tensor, Tensor]:
    """Return attention over the keys that no mask excludes, and each query's log-sum-exp.

    The log-sum-exps are empty if `settings` does not request them.
    """
    made = pack(q, k, v, given, settings)
    if shape is None:
        is_plain = made.correction is None or settings.starts
        has_tables = given.has_tables() or made.is_scaled_per_key or not is_plain
        kinds = {"has_tables": has_tables, "has_starts": settings.starts}
        kinds["has_f16"] = VALUES[settings.values].dtype != torch.float8_e4m3fn
        shape = shapes.shape_for(q.shape[3], gpu(q.device), **kinds)
    return attend_packed(made, q, k.shape[1], k.shape[2], given, settings, shape)


def attend_packed(
    made: Packed,  # the codes
    q: Tensor,  # their source, for its sizes and dtype
    groups: int,  # of k and v
    keys: int,  # likewise
    given: Conditions,  # the conditions
    settings: Settings,  # the arithmetic
    shape: shapes.Shape,  # the tile
) -> tuple[Tensor, Tensor]:
    """Return attention computed from existing codes."""
    from . import tiles_kernels as kernels

    batch, heads, queries, depth = q.shape
    wide, key_blocks = made.k.shape[1], made.v.shape[1] // BLOCK
    q = _rows(q)
    tiles = tiles_of(queries, shape.rows)
    out = q.new_empty((batch, queries, heads, depth))
    lse = made.k_scale.new_empty((batch, heads, queries if settings.with_lse else 0))
    given = key_tiles.within(given, queries, keys)
    is_described = gpu(q.device).has_descriptors
    far, near = settings.turned(wide)
    # Missing arguments are never read, but some tensor has to be passed.
    asked = made.q_scale, made.k_scale, made.v_scale, made.correction
    asked_too = made.shift, made.rest, made.counts
    with on_device(q):
        bounds = key_tiles.find_bounds(q, given, (heads, queries, keys), (shape.rows, shape.keys))
        start(
            kernels._quantized_attention_tiles_forward_kernel,
            (batch * heads * tiles,),
            *_operands(made, q, given, shape, is_described),
            *(made.k_scale if each is None else each for each in (*asked, *asked_too)),
            key_tiles.tables_of(given, q),
            bounds,
            out,
            lse if settings.with_lse else made.k_scale,
            *key_tiles.positions_of(given),
            math.gcd(batch * heads, shapes.HEADS_TOGETHER),
            *(heads, heads // groups, queries, keys, key_blocks, tiles),
            DEPTH=depth,
            DEPTH_BLOCK=wide,
            ROWS=shape.rows,
            KEYS=shape.keys,
            STAGES=shape.stages,
            PARTS_OF_DEPTH=shape.parts,
            KEY_BLOCK=BLOCK,
            QUERY_BLOCK=BLOCK,
            HAS_BOUNDS=given.has_tables(),
            SCALE_PER_KEY=made.is_scaled_per_key,
            HAS_CORRECTION=made.correction is not None,
            STARTS=settings.starts,
            HAS_REST=made.rest is not None,
            WITH_LSE=settings.with_lse,
            MAGIC_SUM=shape.magic or settings.starts,
            DESCRIBED=is_described,
            CODES_QUERIES=made.q_scale is None,
            LIMIT=settings.limit,
            FAR=far,
            NEAR=near,
            UPCAST=not q.is_cuda,
            num_warps=shape.warps,
            **_early(q.device)[1],
            **({} if shape.registers is None else {"maxnreg": shape.registers}),
            **key_tiles.flags_of(given),
        )
    return out.transpose(1, 2), lse


def _operands(
    made: Packed, q: Tensor, given: Conditions, shape: shapes.Shape, is_described: bool
) -> tuple[Any, ...]:
    """Return the first arguments of the attention kernel.

    The last of these arguments are the codes of q, k and v. They are wrapped in descriptors if the
    GPU loads tiles through descriptors.

    Before the codes, the result contains the arguments with which the attention kernel can encode
    the queries itself: q with its strides, `k_mean` and `q_mean`. If one of these two means does
    not exist, `k_scale` takes its place, and the kernel does not read this argument.
    """
    asked = (made.k_mean, made.q_mean)
    there = (made.k_scale if each is None else each for each in asked)
    facts = (rows_of(q), *there)
    if not is_described:
        return *facts, made.q, made.k, made.v
    wide = made.q.shape[1]
    return (
        *facts,
        made.q if made.q_scale is None else described(made.q, (shape.rows, wide)),
        described(made.k, (shape.keys, wide)),
        described(made.v, (wide // shape.parts, shape.keys)),
    )
