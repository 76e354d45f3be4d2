"""The implementation `tiles` of ternary linear layers: it launches the Triton kernels. This
implementation needs a CUDA GPU of sm_80 or later.

The CPU never waits for the GPU or reads a value from it, so a CUDA graph can capture the calls.
Sums of integers do not depend on their order, so the same inputs give the same bits with any tile
sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import torch
from torch import Tensor

from .._triton.launch import launch, start
from ..device import gpu, on_device, processors
from .quantizer import KINDS, NO_ENTRY, Entry, Quantizer, kept, words_for
from .shapes import (
    MAX_VECTORS,
    TileShapes,
    VectorShapes,
    coded_shapes,
    tile_shapes,
    vector_shapes,
)

_LOW_BITS = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}
"""The position, in a float32, of the lowest bit of a number of this dtype."""


Coded: TypeAlias = tuple[Tensor, Tensor, Tensor]
"""Codes, scales and sums, as `quantize` returns them."""


@lru_cache(maxsize=1)
def _kernels() -> Any:
    """Return the module with the kernels.

    Importing the module imports Triton, so the import happens only when a kernel runs.
    """
    from . import tiles_kernels

    return tiles_kernels


@lru_cache(maxsize=1024)
def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()


def _dtype(dtype: torch.dtype, *, is_native: bool) -> Any:
    """Return Triton's name of the dtype in which a quantiser computes."""
    import triton.language as tl

    names = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
    return names.get(dtype, tl.float32) if is_native else tl.float32


@lru_cache(maxsize=256)
def _settings(
    quantizer: Quantizer, dtype: torch.dtype, columns: int, is_cuda: bool
) -> dict[str, Any]:
    """Return the properties of a quantiser as constants of a kernel."""
    kind = KINDS[quantizer.kind]
    rounded = torch.tensor(quantizer.eps, dtype=torch.float32).to(
        dtype if quantizer.is_native else torch.float32
    )
    return {
        "numbers": (kept(columns), quantizer.eps, float(rounded)),
        "LEVELS": kind.levels,
        "INVERSE": float(torch.tensor(kind.levels, dtype=torch.float32).reciprocal())
        if is_cuda
        else 0.0,
        "LOW": float(kind.low),
        "HIGH": float(kind.high),
        "IS_MEAN": kind.is_mean,
        "IS_FLOAT": kind.is_float,
        "KEEPS_HALF": kind.keeps_half,
        "LOW_BIT": _LOW_BITS[dtype],
        "ADDS_EPS": quantizer.adds_eps,
        "IS_STEP": quantizer.is_step,
        "DTYPE": _dtype(dtype, is_native=quantizer.is_native),
        "enable_fp_fusion": False,
    }


def _with_unit_stride(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def pack(weight: Tensor, scale: Tensor, *, is_step: bool, is_native: bool) -> Tensor:
    """Scale (N, K) weights, round them to -1, 0 or 1, and pack them as 2-bit codes.

    The weights are divided by `scale` if `is_step` is true, otherwise multiplied. This step uses
    the dtype of the weights if `is_native` is true, otherwise fp32.
    """
    rows, columns = weight.shape
    words = words_for(columns)
    packed = weight.new_empty((rows, words), dtype=torch.int32)
    block = min(_power_of_two(words), 128)
    with on_device(weight):
        launch(
            _kernels()._ternary_linear_tiles_pack_kernel,
            (rows, -(-words // block)),
            (weight, *weight.stride(), scale, packed, columns, words),
            {
                "WORDS": block,
                "IS_STEP": is_step,
                "DTYPE": _dtype(weight.dtype, is_native=is_native),
                **_ROUNDED,
            },
            (block, is_step, is_native),
        )
    return packed


def _entering(x: Tensor, entry: Entry) -> tuple[Any, ...]:
    """Return the kernel arguments that describe the operations on x before quantisation."""
    up = x if entry.up is None else _with_unit_stride(entry.up)
    norm = x if entry.norm is None else entry.norm.contiguous()
    return x, x.stride(0), up, up.stride(0), norm


def quantize(
    x: Tensor,
    quantizer: Quantizer,
    entry: Entry = NO_ENTRY,
    *,
    is_chained: bool = False,
    is_early: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes (M, 4, 4 * words) int8, scales (M,) float32 and sums of codes (M,) int32.

    M is the number of tokens (rows of `x`). A token's codes are stored in four planes, one for each
    2-bit field of a byte of packed weights. Here, words is the number of 32-bit words in a row of
    packed weights. With `is_chained`, the next kernel in the stream may start before this kernel
    has ended. That next kernel must be launched by `product` or `products` with `is_chained`, or by
    `vectors` with `is_early`. With `is_early`, this kernel may start before the previous kernel in
    the stream has ended.
    """
    x = _with_unit_stride(x)
    tokens, columns = x.shape
    words = words_for(columns)
    codes = x.new_empty((tokens, 4, 4 * words), dtype=torch.int8)
    scale = x.new_empty((tokens,), dtype=torch.float32)
    sums = x.new_empty((tokens,), dtype=torch.int32)
    asked = (entry.up is not None, entry.norm is not None, is_chained, is_early)
    plan = _quantize_plan(quantizer, x.dtype, (tokens, columns), x.is_cuda, asked)
    numbers = (entry.norm_eps, *plan.numbers)
    with on_device(x):
        launch(
            _kernels()._ternary_linear_tiles_quantize_kernel,
            (tokens,),
            (_entering(x, entry), codes.view(torch.int32), scale, sums, columns, words, numbers),
            plan.constants,
            (plan,),
        )
    return codes, scale, sums


@dataclass(frozen=True, eq=False)
class QuantizePlan:
    """The launch arguments of a quantiser kernel: numbers, and compile-time constants."""

    numbers: tuple[int | float, ...]
    constants: dict[str, Any]


@lru_cache(maxsize=1024)
def _quantize_plan(
    quantizer: Quantizer,
    dtype: torch.dtype,
    sizes: tuple[int, int],
    is_cuda: bool,
    asked: tuple[bool, ...],
) -> QuantizePlan:
    """Return the launch arguments of a quantiser kernel for a number of tokens and columns."""
    tokens, columns = sizes
    constants = dict(_settings(quantizer, dtype, columns, is_cuda))
    numbers = constants.pop("numbers")
    block = _power_of_two(words_for(columns) * 16)
    constants |= {
        "COLUMNS": block,
        "num_warps": _quantize_warps(block, tokens),
        **dict(zip(_ASKED, asked, strict=True)),
    }
    if constants["IS_EARLY"]:
        constants["launch_pdl"] = True
    return QuantizePlan(numbers, constants)


_ASKED = ("HAS_UP", "HAS_NORM", "IS_CHAINED", "IS_EARLY")


def _quantize_warps(columns: int, tokens: int) -> int:
    """Return the number of warps per token, which is large if tokens are few."""
    if tokens <= MAX_VECTORS:
        return max(1, min(16, columns // 512))
    return max(1, min(16, max(4, columns // 1024), columns // 32))


def vectors(
    x: Tensor,
    packed: Sequence[Tensor],
    weight_scale: Sequence[Tensor],
    bias: Sequence[Tensor | None],
    quantizer: Quantizer,
    entry: Entry = NO_ENTRY,
    *,
    dtype: torch.dtype,
    weight_is_step: bool,
    added: Tensor | None = None,
    is_early: bool = False,
    coded: Coded | None = None,
    leading: Sequence[int] | None = None,
    shapes: VectorShapes | None = None,
) -> list[Tensor]:
    """Multiply up to four tokens by up to three matrices, and quantise the tokens in the same
    kernel.

    Each result has the shape (M, N), or (*leading, N) if `leading`, whose product is M, is given.
    If `coded` (quantised tokens) is given, the kernel multiplies these tokens and reads no value of
    `x`. With `is_early`, the kernel may start, and read weights, while the previous kernel in the
    stream still runs.
    """
    kinds = {t.dtype for t in weight_scale}, {t.dtype for t in bias if t is not None}
    if any(len(kind) > 1 for kind in kinds):  # a launch supports one dtype of each
        alike: dict[str, Any] = {"dtype": dtype, "weight_is_step": weight_is_step}
        alike |= {"coded": coded, "leading": leading, "shapes": shapes}
        found: list[Tensor] = []
        for place, (w, by, b) in enumerate(zip(packed, weight_scale, bias, strict=True)):
            early = is_early and not place
            found += vectors(x, [w], [by], [b], quantizer, entry, is_early=early, **alike)
        return found
    x = _with_unit_stride(x)
    packed = [weight.contiguous() for weight in packed]
    tokens, columns = x.shape
    words = words_for(columns)
    count = [weight.shape[0] for weight in packed]
    if shapes is None:
        choose = vector_shapes if coded is None else coded_shapes
        shapes = choose(words, sum(count), tokens, processors(x.device))
    front = (tokens,) if leading is None else tuple(leading)
    outs = [x.new_empty((*front, rows), dtype=dtype) for rows in count]
    tiles = [-(-rows // (shapes.rows * shapes.tiles)) for rows in count]
    anything = next((b for b in bias if b is not None), weight_scale[0])
    biases = [anything if b is None else b.contiguous() for b in bias]

    def three(given: Sequence[Any]) -> tuple[Any, ...]:
        return (*given, *[given[0]] * (3 - len(given)))

    settings = _settings(quantizer, x.dtype, columns, x.is_cuda)
    coded_or_not = (packed[0], weight_scale[0], packed[0])
    if coded is not None:
        coded_or_not = (coded[0].view(torch.int32), *coded[1:])
    with on_device(x):
        start(
            _kernels()._ternary_linear_tiles_vectors_kernel,
            (sum(tiles),),
            *(_entering(x, entry), outs[0] if added is None else added.contiguous(), coded_or_not),
            *map(three, (packed, weight_scale, biases, outs, count)),
            *(three(tiles)[:2], columns, words),
            **{**settings, "numbers": (entry.norm_eps, *settings["numbers"])},
            HAS_UP=entry.up is not None,
            HAS_NORM=entry.norm is not None,
            HAS_ADDED=added is not None,
            IS_CODED=coded is not None,
            IS_EARLY=is_early,
            **dict(zip(_HAS_BIAS, three([b is not None for b in bias]), strict=True)),
            GROUP=len(packed),
            TOKENS=tokens,
            ROWS=shapes.rows,
            TILES=shapes.tiles,
            WORDS=_power_of_two(words),
            WEIGHT_IS_STEP=weight_is_step,
            BYTEWISE=not x.is_cuda,
            num_warps=shapes.warps,
            **({"launch_pdl": True} if is_early else {}),
        )
    return outs


_HAS_BIAS = ("HAS_BIAS_A", "HAS_BIAS_B", "HAS_BIAS_C")


def product(
    codes: Tensor,
    scale: Tensor,
    sums: Tensor,
    packed: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    **settings: Any,
) -> Tensor:
    """Multiply quantised tokens by one ternary matrix, and add the bias.

    `codes`, `scale` and `sums` are the tokens: their codes, their scales, and the sum of each
    token's codes. `packed` and `weight_scale` are the matrix. `settings` are keyword arguments of
    `products`.
    """
    return products(codes, scale, sums, [packed], [weight_scale], [bias], **settings)[0]


def products(
    codes: Tensor,
    scale: Tensor,
    sums: Tensor,
    packed: Sequence[Tensor],
    weight_scale: Sequence[Tensor],
    bias: Sequence[Tensor | None],
    *,
    dtype: torch.dtype,
    is_step: bool,
    weight_is_step: bool,
    added: Tensor | None = None,
    is_chained: bool = False,
    leading: Sequence[int] | None = None,
    shapes: TileShapes | None = None,
) -> list[Tensor]:
    """Multiply M quantised tokens by each matrix, and return one result per matrix.

    `codes`, `scale` and `sums` are the tokens: their codes, their scales, and the sum of each
    token's codes. Each result has the shape (M, N), or (*leading, N) if `leading`, whose product is
    M, is given.

    One launch multiplies up to three matrices, but only one matrix if it also adds a residual. With
    `is_chained`, the kernel may start before the previous kernel in the stream has ended. That
    previous kernel must be launched by `quantize` with `is_chained`.
    """
    kinds = {t.dtype for t in weight_scale}, {None if t is None else t.dtype for t in bias}
    if any(len(kind) > 1 for kind in kinds):  # a launch supports one dtype of each
        alike: dict[str, Any] = {"dtype": dtype, "is_step": is_step, "added": added}
        alike |= {"weight_is_step": weight_is_step, "leading": leading, "shapes": shapes}
        found: list[Tensor] = []
        for one in zip(packed, weight_scale, bias, strict=True):
            chained = is_chained and not found  # the next kernel follows this one directly
            found.append(product(codes, scale, sums, *one, is_chained=chained, **alike))
        return found
    codes, packed = codes.contiguous(), [each.contiguous() for each in packed]
    tokens, width = codes.shape[0], 4 * packed[0].shape[1]
    rows = tuple(each.shape[0] for each in packed)
    flags = (bias[0] is not None, added is not None, is_step, weight_is_step)
    plan = _plan(codes.device, (tokens, rows, width), flags, is_chained, shapes)
    front = (tokens,) if leading is None else tuple(leading)
    outs = [codes.new_empty((*front, count), dtype=dtype) for count in rows]
    part = sums
    if plan.splits > 1:
        part = codes.new_empty((plan.splits, tokens, rows[0]), dtype=torch.int32)
    plain = [by if b is None else b.contiguous() for by, b in zip(weight_scale, bias, strict=True)]
    held = outs[0] if added is None else added.contiguous()
    bytes_of = tuple(each.view(torch.uint8) for each in packed)
    around = (scale, sums, tuple(weight_scale), tuple(plain), held, tuple(outs))
    with on_device(codes):
        launch(
            _kernels()._ternary_linear_tiles_tiles_kernel,
            plan.grid,
            (codes, bytes_of, *around, part, tokens, rows, width, plan.share),
            plan.constants,
            (plan,),
        )
        if plan.splits > 1:
            launch(
                _kernels()._ternary_linear_tiles_parts_kernel,
                plan.sum_grid,
                (part, scale, sums, weight_scale[0], plain[0], held, outs[0], tokens, rows[0]),
                plan.sum_constants,
                (plan,),
            )
    return outs


@dataclass(frozen=True, eq=False)
class Plan:
    """The parameters of a product's launches, which depend only on sizes."""

    grid: tuple[int, int]  # of the kernel that multiplies
    constants: dict[str, Any]  # likewise
    share: int  # bytes per row of weights, of each split
    splits: int  # programs that share a tile; more than one have a kernel add up their sums
    sum_grid: tuple[int, int]  # of that kernel
    sum_constants: dict[str, Any]  # likewise


@lru_cache(maxsize=1024)
def _plan(
    device: torch.device,
    sizes: tuple[int, tuple[int, ...], int],
    around: tuple[bool, ...],
    is_chained: bool,
    shapes: TileShapes | None,
) -> Plan:
    """Return the launch parameters of products of quantised tokens with packed weight matrices.

    `sizes` contains the number of tokens, the rows of each matrix, and the bytes per packed row.
    """
    tokens, rows, width = sizes
    if shapes is None:
        is_hopper = gpu(device).is_hopper
        shapes = tile_shapes(tokens, sum(rows), width, processors(device), is_hopper=is_hopper)
    tiles = -(-width // shapes.bytes)
    wanted = shapes.splits if len(rows) == 1 else 1
    share = -(-tiles // wanted) * shapes.bytes
    splits = -(-width // share)
    settings = dict(zip(_SETTINGS, around, strict=True), enable_fp_fusion=False)
    constants = {
        "MATRICES": len(rows),
        "ROWS": shapes.rows,
        "TOKENS": shapes.tokens,
        "BYTES": shapes.bytes,
        "GROUP": shapes.group,
        "STAGES": shapes.stages,
        "IS_EVEN": width % shapes.bytes == 0,
        "IS_PART": splits > 1,
        "IS_CHAINED": is_chained,
        "BYTEWISE": device.type != "cuda",
        "num_warps": shapes.warps,
        **({"launch_pdl": True} if is_chained else {}),
        **settings,
    }
    block = min(1024, _power_of_two(rows[0]))
    across = sum(-(-count // shapes.rows) for count in rows)
    return Plan(
        (-(-tokens // shapes.tokens) * across, splits),
        constants,
        share,
        splits,
        (tokens, -(-rows[0] // block)),
        {"SPLITS": splits, "ROWS": block, "num_warps": 4, **settings},
    )


_SETTINGS = ("HAS_BIAS", "HAS_ADDED", "IS_STEP", "WEIGHT_IS_STEP")
_ROUNDED: dict[str, Any] = {"num_warps": 4, "enable_fp_fusion": False}
_WORDS = 128
"""The most words of 16 columns for one program that dequantises."""


def _dequantize(
    kernel: Any, held: Tensor, scale: Tensor, out: Tensor, words: int, is_step: bool
) -> None:
    block, (rows, columns) = min(_power_of_two(words), _WORDS), out.shape
    constants = {"WORDS": block, "IS_STEP": is_step, **_ROUNDED}
    operands = (held, scale, out, columns, words)
    with on_device(out):
        launch(kernel, (rows, -(-words // block)), operands, constants, (block, is_step))


def dequantized_weights(
    packed: Tensor, scale: Tensor, columns: int, *, is_step: bool, dtype: torch.dtype
) -> Tensor:
    """Return the dequantised (N, K) weights, equal to the weights that the model's own code would
    multiply.
    """
    packed = packed.contiguous()
    out = packed.new_empty((packed.shape[0], columns), dtype=dtype)
    _dequantize(
        _kernels()._ternary_linear_tiles_weights_kernel,
        packed,
        scale,
        out,
        packed.shape[1],
        is_step,
    )
    return out


def dequantized_tokens(
    codes: Tensor, scale: Tensor, columns: int, *, is_step: bool, dtype: torch.dtype
) -> Tensor:
    """Return the dequantised (M, K) activations, equal to the activations that the model's own code
    would multiply.
    """
    codes = codes.contiguous()
    out = codes.new_empty((codes.shape[0], columns), dtype=dtype)
    held, words = codes.view(torch.int32), codes.shape[2] // 4
    _dequantize(_kernels()._ternary_linear_tiles_tokens_kernel, held, scale, out, words, is_step)
    return out
