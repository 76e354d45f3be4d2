"""The reference implementation of ternary linear layers, in plain PyTorch. The module also defines
the layout of packed weights.

The weight codes -1, 0 and 1 are stored as 0, 1 and 2, in two bits each. The 32-bit word t contains
the codes of columns `16 t` to `16 t + 15`. Each of the word's bytes has four 2-bit fields. Field j
of byte b contains the code of column `16 t + 4 j + b`. Activations are stored in the same order, as
four planes of bytes. Byte `4 t + b` of plane j contains the activation of column `16 t + 4 j + b`.
So field j of a weight word is multiplied by plane j of the activations.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .quantizer import (
    FP4_CODES,
    FP4_THRESHOLDS,
    KINDS,
    NO_ENTRY,
    PER_WORD,
    Entry,
    Quantizer,
    compute_dtype,
    kept,
    words_for,
)

PIECE_ELEMENTS = 1 << 20
EXACT_IN_FLOAT = 1 << 24
"""Integers up to this one are exact in float32, and so are sums of products that stay below it."""


def pack_codes(codes: Tensor) -> Tensor:
    """Pack (N, K) codes of -1, 0 and 1 into (N, ceil(K / 16)) int32."""
    rows, columns = codes.shape
    words = words_for(columns)
    fields = codes.new_ones((rows, words * PER_WORD), dtype=torch.uint8)
    fields[:, :columns] = (codes + 1).to(torch.uint8)
    fields = fields.view(rows, words, 4, 4)
    packed = fields[:, :, 0] | fields[:, :, 1] << 2 | fields[:, :, 2] << 4 | fields[:, :, 3] << 6
    return packed.contiguous().view(torch.int32).view(rows, words)


def unpack_codes(packed: Tensor, columns: int) -> Tensor:
    """Return the codes of packed weights as (N, columns) int8."""
    rows, words = packed.shape
    held = packed.contiguous().view(torch.uint8).view(rows, words, 4)
    fields = torch.stack([held >> 2 * j & 3 for j in range(4)], dim=2)
    return fields.view(rows, words * PER_WORD)[:, :columns].to(torch.int8) - 1


def repack(packed: Tensor) -> Tensor:
    """Convert packed weights of transformers to the layout of this module.

    The layout of transformers is (N / 4, K) uint8: a byte contains the codes of four rows that are
    N / 4 apart.
    """
    codes = torch.cat([packed >> 2 * j & 3 for j in range(4)]).to(torch.int8) - 1
    return pack_codes(codes)


def to_planes(codes: Tensor) -> Tensor:
    """Rearrange the int8 codes (quantised inputs) of M tokens, (M, K), into four planes per token.

    Each byte of packed weights has four 2-bit fields. Plane j contains the codes that are
    multiplied by field j. A row of packed weights has `words` 32-bit words of 16 fields each. If
    the K codes of a token are fewer than `16 * words`, zeros follow them before the rearrangement.
    The result is (M, 4, 4 * words).
    """
    rows, columns = codes.shape
    words = words_for(columns)
    wide = codes.new_zeros((rows, words * PER_WORD))
    wide[:, :columns] = codes
    return wide.view(rows, words, 4, 4).transpose(1, 2).reshape(rows, 4, 4 * words)


def from_planes(planes: Tensor, columns: int) -> Tensor:
    """Undo `to_planes`: return the codes of M tokens in the order of columns, (M, columns).

    The int8 codes are the layer's quantised inputs. Plane j contains the codes that are multiplied
    by 2-bit field j of each byte of packed weights.
    """
    rows, _, width = planes.shape
    codes = planes.view(rows, 4, width // 4, 4).transpose(1, 2).reshape(rows, 4 * width)
    return codes[:, :columns]


def pack(weight: Tensor, scale: Tensor, *, is_step: bool, is_native: bool) -> Tensor:
    """Scale (N, K) weights, round them to -1, 0 or 1, and pack them as 2-bit codes.

    The weights are divided by `scale` if `is_step` is true, otherwise multiplied. The division or
    multiplication runs in the dtype of the weights if `is_native` is true, otherwise in fp32.
    """
    pieces = []
    dtype = compute_dtype(weight.dtype, is_native=is_native)
    factor = scale.reshape(()).to(dtype)
    rows = max(1, PIECE_ELEMENTS // max(1, weight.shape[1]))
    for piece in weight.split(rows):
        values = piece.to(dtype)
        values = values / factor if is_step else values * factor
        pieces.append(pack_codes(values.round().clamp(-1, 1).nan_to_num(0.0).to(torch.int8)))
    return torch.cat(pieces)


def enter(x: Tensor, entry: Entry) -> Tensor:
    """Return the tensor to quantise: x after the gate and the norm that `entry` describes.

    The returned tensor has the dtype of x.
    """
    if entry.up is not None:
        x = x.relu().square() * entry.up
    if entry.norm is not None:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + entry.norm_eps)
        x = entry.norm * wide.to(x.dtype)
    return x


def codes_and_scale(x: Tensor, quantizer: Quantizer) -> tuple[Tensor, Tensor]:
    """Quantise each token (row) of x, (M, K). Return codes (M, K) int8 and scales (M,) float32.

    A token that contains nan, or for which no valid scale exists, gets the scale nan.
    """
    kind = KINDS[quantizer.kind]
    values = x.to(compute_dtype(x.dtype, is_native=quantizer.is_native))
    size = values.abs()
    statistic = size.mean(-1, keepdim=True) if kind.is_mean else size.amax(-1, keepdim=True)
    if quantizer.adds_eps:
        statistic = statistic + quantizer.eps
    else:
        statistic = statistic.clamp(min=quantizer.eps)
    if kind.keeps_half:
        least = size.topk(kept(x.shape[1]), dim=-1).values[:, -1:]
        values = torch.where(size >= least, values, 0.0)
    if quantizer.is_step:
        scale = statistic / kind.levels
        scaled = values / scale
    else:
        scale = kind.levels / statistic
        scaled = values * scale
    codes = _nearest_fp4(scaled) if kind.is_float else scaled.round().clamp(kind.low, kind.high)
    scale = scale.float().squeeze(-1)
    is_scale = scale.isfinite() & (scale > 0)
    return codes.nan_to_num(0.0).to(torch.int8), torch.where(is_scale, scale, torch.nan)


def _nearest_fp4(scaled: Tensor) -> Tensor:
    """Round values to the nearest FP4 numbers.

    `scaled` contains the values multiplied by 2. The result contains the FP4 numbers multiplied by
    2. FP4 numbers have the magnitudes 0, .5, 1, 1.5, 2, 3, 4 and 6.
    """
    size = scaled.abs()
    code = torch.zeros_like(size)
    for place, threshold in enumerate(FP4_THRESHOLDS):
        reached = size >= threshold if place % 2 else size > threshold
        code = torch.where(reached, float(FP4_CODES[place + 1]), code)
    return torch.where(scaled < 0, -code, code)


def accumulate(codes: Tensor, packed: Tensor) -> Tensor:
    """Return the exact products of (M, K) codes and packed weights, as (M, N) float32 or float64.

    The codes are the integers to which the layer's inputs were quantised. Float32 adds integers
    exactly, in any order, as long as the absolute value of every sum is at most 2 ** 24. If a sum
    could be larger, the function computes in float64.
    """
    columns = codes.shape[1]
    dtype = torch.float32 if 128 * columns <= EXACT_IN_FLOAT else torch.float64
    left = codes.to(dtype)
    rows = max(1, PIECE_ELEMENTS // max(1, columns))
    pieces = [left @ unpack_codes(piece, columns).to(dtype).t() for piece in packed.split(rows)]
    return torch.cat(pieces, dim=1)


def dequantized_weights(
    packed: Tensor, scale: Tensor, columns: int, *, is_step: bool, dtype: torch.dtype
) -> Tensor:
    """Return the dequantised (N, K) weights, equal to the weights that the model's own code would
    multiply.
    """
    codes = unpack_codes(packed, columns).float()
    scale = scale.reshape(()).float()
    return (codes * scale if is_step else codes / scale).to(dtype)


def quantize(
    x: Tensor, quantizer: Quantizer, entry: Entry = NO_ENTRY, *, is_chained: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """For each token (row of `x`), return its integer codes, its scale and the sum of its codes.

    The codes of a token are split into four planes. Each byte of packed weights has four 2-bit
    fields, and plane j contains the codes that are multiplied by field j.
    """
    codes, scale = codes_and_scale(enter(x, entry), quantizer)
    return to_planes(codes), scale, codes.sum(-1, dtype=torch.int32)


def product(
    codes: Tensor,  # in planes; the sums of codes are not needed
    scale: Tensor,  # (M,) float32
    sums: Tensor,
    packed: Tensor,  # (N, ceil(K / 16)) int32
    weight_scale: Tensor,  # one floating element
    bias: Tensor | None,  # (N,) or None
    *,
    dtype: torch.dtype,  # of the result
    is_step: bool,  # whether a scale is the size of a step
    weight_is_step: bool,  # likewise
    added: Tensor | None = None,  # of the result's shape and dtype, or None
    is_chained: bool = False,
    leading: Sequence[int] | None = None,  # dimensions of the result instead of M
) -> Tensor:
    """Return the integer products of M tokens and N weight rows, scaled in float32, plus the bias.

    The result is (M, N), or (*leading, N) if `leading`, whose product is M, is given. The result is
    not a view, so a later in-place op is safe.
    """
    by_token = scale if is_step else 1.0 / scale
    by_weight = weight_scale.reshape(()).float()
    by_weight = by_weight if weight_is_step else 1.0 / by_weight
    found = accumulate(from_planes(codes, 16 * packed.shape[1]), packed).float()
    found *= (by_weight * by_token)[:, None]
    if bias is not None:
        found += bias.float()
    found = found.to(dtype) if added is None else added + found.to(dtype)
    shape = (*(found.shape[:1] if leading is None else leading), found.shape[1])
    shaped: Tensor = torch.ops.aten._unsafe_view.default(found, shape)
    return shaped


def dequantized_tokens(
    codes: Tensor, scale: Tensor, columns: int, *, is_step: bool, dtype: torch.dtype
) -> Tensor:
    """Return the dequantised (M, K) activations, equal to the activations that the model's own code
    would multiply.
    """
    values, scale = from_planes(codes, columns).float(), scale[:, None]
    return (values * scale if is_step else values / scale).to(dtype)
