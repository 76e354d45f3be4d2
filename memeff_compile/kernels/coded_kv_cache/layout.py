"""Describe the memory of a low-bit KV cache: the sizes of its tensors, and how codes are packed
into bytes.

Tokens are encoded in groups. The codes of a group are one contiguous block of bytes, keys token by
token, values channel by channel. So tensor cores read the codes without reordering. A row is the D
channels of one token's key or value in one head. In a row, codes are packed as follows:

- 4 bits: channels j and j + D/2 are the low and the high half of one byte.
- 2 bits: four channels, D/4 apart, share a byte.
- 3 bits: first the low two bits of the codes, packed like 2-bit codes, then the third (highest)
  bits, two tokens to a byte. For keys, the tokens are 2t and 2t + 1, for values t and t + group/2.
  Each of these bytes contains the third bits of two tokens in four channels, D/4 apart. In a byte,
  these channels have the numbers p = 0 to 3. For p = 0 to 2, the first token's third bit is bit
  2p + 2. For p = 3, the first token's third bit is bit 0. The second token's third bit is the next
  bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

BITS = (8, 4, 3, 2)

PLAIN = 16
"""A value of `bits`: rows are stored as numbers in the dtype of the cache, without scales."""

SCHEMES = ("kivi", "per_head")
"""`kivi`: keys have a scale and a zero per channel and group of tokens; values per token and
group of channels. `per_head`: keys and values have one scale per token and head, and codes are
symmetric around zero.
"""

LENGTH, CODED, ARRIVED = range(3)
"""Indices into `counts`: tokens in the cache, tokens stored as codes, finished programs of a
launch."""


class Pool(NamedTuple):
    """The tensors of one layer's low-bit KV cache, in the order in which ops and kernels take them.

    `Layout.shapes` returns the shapes of these tensors. A window stores the latest tokens exactly.
    `k_kept` and `v_kept` store other tokens exactly, such as the first tokens of each sequence, and
    `places` (int32) contains the positions of these tokens. Codes of other keys and values have
    dtype uint8. If the layout's `bits` is PLAIN (16), plain numbers in the model's dtype take the
    place of codes. `counts` (int64) contains three numbers: of the tokens in the cache, of the
    tokens stored as codes, and of the programs of a running launch that have finished.
    """

    k_codes: Any
    v_codes: Any
    k_scales: Any
    v_scales: Any
    k_window: Any
    v_window: Any
    k_kept: Any
    v_kept: Any
    places: Any
    counts: Any


class Shared(NamedTuple):
    """The tensors that two layers share if their keys and values are merged.

    For each merged token and head, the two layers share one unit vector for their keys and one for
    their values. The tensors store these unit vectors, as codes or plain numbers.
    """

    # k_codes, v_codes, k_scales, v_scales, places: as of `Pool`; PLAIN rows are numbers
    k_codes: Any
    v_codes: Any
    k_scales: Any
    v_scales: Any
    places: Any
    starts: Any  # (B, H) int32, each sequence's first token
    bound: Any  # (B, H) fp32, the distance beyond which a row stays unmerged
    kept_count: Any  # (B, H) int32, the number of unmerged rows in addition to the first tokens
    # (B, H) int32, the number of rows that were merged because no memory for unmerged rows was left
    left_over: Any


class Own(NamedTuple):
    """The tensors that each of two layers has separately if their keys and values are merged.

    The two layers share directions (unit vectors) of keys and of values, in the tensors of
    `Shared`. All tensors except `norms` have the same meaning as in `Pool`, the cache of one layer.

    Two layers' keys and values are merged in groups of `group` tokens. `norms` is
    (B, H, groups * group, 2). The tensor contains the norm of the key and of the value of each
    token in these groups. A negative norm of a key marks a token that is stored unmerged.
    """

    k_window: Any
    v_window: Any
    k_kept: Any
    v_kept: Any
    counts: Any
    norms: Any


class SharedValues(NamedTuple):
    """The tensors that two layers share if the layers merge values but not keys.

    For each merged token and head, the two layers' values share one direction (a unit vector).
    """

    v_codes: Any
    v_scales: Any  # with the lengths of the lower layer's values
    # (B, H, groups * group), for groups of `group` tokens: ratios of the upper layer's lengths of
    # values to the lower layer's
    norms: Any
    # positions of each sequence's first tokens, which are stored exactly; all layers of the cache
    # share them
    places: Any


class OwnKeys(NamedTuple):
    """The tensors that each of two layers has separately if the layers merge values but not keys.

    For each merged token and head, the two layers' values share one direction (a unit vector), in
    `SharedValues`. The tensors here have the same meaning as in `Pool`, the cache of one layer.
    """

    k_codes: Any
    k_scales: Any
    k_window: Any
    v_window: Any
    k_kept: Any
    v_kept: Any
    counts: Any


class Maps(NamedTuple):
    """The linear maps that make the keys and values of two layers similar (module `alignment`).

    If two layers merge only values, each head has a mean and a matrix for its values, but not for
    its keys.
    """

    lower_means: Any  # (B, H, 2, D), of keys and of values
    upper_means: Any  # likewise
    turns: Any  # (B, H, 2, D, D), of the upper layer's heads, for keys and for values
    slots: Any  # (B, H) int32, the lower layer's head for each head of the upper


class Pair(NamedTuple):
    """All cache tensors of two layers whose keys and values are merged.

    For each merged token and head, the two layers share one unit vector for their keys and one for
    their values.
    """

    shared: Shared
    lower: Own
    upper: Own
    maps: Maps | None = None  # of layers that are aligned


class ValuePair(NamedTuple):
    """All cache tensors of two layers whose values are merged. Each layer has its own keys.

    For each merged token and head, the two layers' values share one direction (a unit vector).
    """

    shared: SharedValues
    lower: OwnKeys
    upper: OwnKeys
    maps: Maps


def pool_of_values(shared: Sequence[Any], own: Sequence[Any]) -> list[Any]:
    """Return the ten tensors (`Pool`) of the cache of a layer that shares values with another one.

    `shared` (`SharedValues`) contains the codes and scales of values. `shared` also contains the
    positions of each sequence's first tokens, which the cache stores exactly. The other tensors are
    in `own` (`OwnKeys`). The ops `coded_kv_cache_view` and `coded_kv_cache_attention` take the
    result.
    """
    v_codes, v_scales, _, places = shared
    k_codes, k_scales, *rows, counts = own
    return [k_codes, v_codes, k_scales, v_scales, *rows, places, counts]


@dataclass(frozen=True)
class Layout:
    """The parameters of a low-bit cache, from which `shapes` computes the shapes of its tensors.

    An encoded token's keys and values have a low-bit code for each element, and a scale for several
    elements. `scheme` says which elements of keys, and which elements of values, share a scale.
    """

    depth: int  # channels per head
    bits: int  # of a code
    scheme: str = "kivi"  # one of `SCHEMES`
    group: int = 64  # tokens that are coded together
    recent: int = 128  # latest tokens, which are never stored as codes
    kept: int = 4  # tokens at the beginning that are stored exactly
    value_bits: int | None = None  # of a value's code, by default as many as of a key's

    @property
    def window(self) -> int:
        """Return for how many of the latest tokens, not yet encoded, the cache has memory."""
        return self.recent + self.group

    @property
    def bits_of_values(self) -> int:
        """Return how many bits the code of one element of a value vector has."""
        return self.bits if self.value_bits is None else self.value_bits

    @property
    def channel_group(self) -> int:
        """Return how many channels of a value vector share a scale."""
        return channel_group(self.depth, self.scheme)

    def groups(self, tokens: int) -> int:
        """Return for how many groups of encoded tokens a cache has memory, at least one.

        The cache has space for `tokens` tokens. A group is `group` consecutive tokens that are
        encoded together.
        """
        return max(1, (tokens - self.recent) // self.group)

    def shapes(self, batch: int, heads: int, tokens: int) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor of a cache for a given number of tokens, by tensor
        name."""
        front, groups = (batch, heads), self.groups(tokens)
        k_codes, v_codes = (
            (*front, groups, self.group * self.depth * min(bits, 8) // 8)
            for bits in (self.bits, self.bits_of_values)
        )
        ends = scale_shapes(self.depth, self.bits, self.group, self.scheme)
        k_scales, v_scales = ((*front, groups, *end) for end in ends)
        window = (*front, self.window, self.depth)
        kept = (*front, self.kept, self.depth)
        rows = (window, window, kept, kept, (*front, self.kept))
        shapes = (k_codes, v_codes, k_scales, v_scales, *rows, (3,))
        return dict(zip(Pool._fields, shapes, strict=True))


def dtype_of(name: str, dtype: torch.dtype, bits: int) -> torch.dtype:
    """Return the dtype of one tensor, by name, of a layer's cache or of two layers' merged cache.

    `dtype` is the dtype of the model, and `bits` the number of bits of a code.
    """
    if name in ("places", "starts", "kept_count", "left_over", "slots"):
        return torch.int32
    if name in ("bound", "counts"):
        return torch.float32 if name == "bound" else torch.int64
    if name.endswith("codes") and bits != 16:
        return torch.uint8
    if name.endswith("norms") and dtype.itemsize == 2:
        return torch.float16  # float16 keeps 11 bits of a length, bfloat16 only 8
    return dtype


def scale_shapes(depth: int, bits: int, group: int, scheme: str) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of the scale tensors for a group of keys and for a group of values."""
    if bits == PLAIN:
        return (0, 2), (0, 2)
    if scheme == "per_head":
        return (1, group, 1), (1, group, 1)
    return (depth, 2), (depth // channel_group(depth, scheme), group, 2)


def channel_group(depth: int, scheme: str) -> int:
    """Return how many channels of a value vector share a scale."""
    return depth // 2 if scheme == "kivi" and depth > 64 else depth


def group_of(block: int, depth: int, bits: int) -> int:
    """Return how many tokens a group has if the group's codes take `block` bytes in one head.

    A group is the tokens whose keys, or values, are encoded together. `depth` is the number of
    channels of one token's key or value in one head. Example: 64 tokens if `block` is 4096, `depth`
    is 128 and `bits` is 4. If `bits` is PLAIN, plain numbers take the place of codes, and `block`
    counts these numbers instead of bytes.
    """
    return block // depth if bits == PLAIN else block * 8 // (depth * bits)


def value_bits_of(k_block: int, v_block: int, bits: int) -> int:
    """Return how many bits the codes of values have, given the bits of the keys' codes.

    Tokens are encoded in groups. `k_block` is the number of bytes of the codes of a group's keys,
    in one head. `v_block` is the number of bytes of the codes of the group's values. If `bits` is
    PLAIN, plain numbers take the place of codes, and both arguments count these numbers.
    """
    return bits * v_block // k_block


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack 8-, 4- or 2-bit codes, (..., D) uint8, into (..., D * bits / 8) bytes."""
    count = 8 // bits
    parts = torch.chunk(codes, count, -1)
    packed = parts[0].clone()
    for place, part in enumerate(parts[1:], 1):
        packed |= part << (bits * place)
    return packed  # 1 and 2 of 4 bits: 33


def unpack(packed: Tensor, bits: int) -> Tensor:
    """Return the codes from bytes that `pack` returned."""
    places = range(0, 8, bits)
    return torch.cat([(packed >> place) & ((1 << bits) - 1) for place in places], -1)


_HIGH_PLACES = (2, 4, 6, 0)
"""Positions of the first token's bits in a byte of high bits, by channel."""


def _high_plane(bits: Tensor, *, is_value: bool) -> Tensor:
    """Pack the third (highest) bits of the 3-bit codes of keys or values, for a group of tokens.

    The bits, (..., group, D) uint8, become bytes of the shape (..., group / 2, D / 4). Two tokens
    share a byte: for keys they are neighbours, for values they are half a group apart.
    """
    tokens = bits.unflatten(-2, (2, -1) if is_value else (-1, 2))
    first, second = tokens.unbind(-3 if is_value else -2)
    both = first | second << 1
    packed = torch.zeros_like(both[..., : both.shape[-1] // 4])
    for place, part in zip(_HIGH_PLACES, both.chunk(4, -1), strict=True):
        packed |= part << place
    return packed


def _from_high_plane(packed: Tensor, *, is_value: bool) -> Tensor:
    """Return the third (highest) bits of a group of 3-bit codes, (..., group, D).

    `packed`, (..., group / 2, D / 4), contains these bits as `_high_plane` packs them.
    """
    tokens = [
        torch.cat([(packed >> (place + second)) & 1 for place in _HIGH_PLACES], -1)
        for second in range(2)
    ]
    if is_value:
        return torch.cat(tokens, -2)
    return torch.stack(tokens, -2).flatten(-3, -2)


def block_of(codes: Tensor, bits: int, *, is_value: bool) -> Tensor:
    """Pack the codes of keys or values into bytes, in the order in which a cache stores them.

    A group is the tokens whose codes are stored together. A group's 8-, 4-, 3- or 2-bit codes,
    (..., group, D) uint8, become (..., group * D * bits / 8) bytes. Keys are stored token by token,
    values channel by channel.
    """
    parts = [pack(codes & 3, 2) if bits == 3 else pack(codes, bits)]
    if bits == 3:
        parts.append(_high_plane(codes >> 2, is_value=is_value))
    turned = [part.transpose(-1, -2) if is_value else part for part in parts]
    return torch.cat([part.flatten(-2) for part in turned], -1)


def codes_of(block: Tensor, bits: int, depth: int, *, is_value: bool) -> Tensor:
    """Return the codes, (..., group, D), from bytes that `block_of` returned for keys or values.

    The bytes contain the codes of a group of tokens. `depth` is D, the number of channels per head.
    """
    group = block.shape[-1] * 8 // (depth * bits)
    shapes = [(group, depth // 4), (group // 2, depth // 4)]
    if bits != 3:
        shapes = [(group, depth * bits // 8)]
    parts = []
    for part, (rows, width) in zip(
        block.split([math.prod(shape) for shape in shapes], -1), shapes, strict=True
    ):
        plane = part.unflatten(-1, (width, rows) if is_value else (rows, width))
        parts.append(plane.transpose(-1, -2) if is_value else plane)
    if bits != 3:
        return unpack(parts[0], bits)
    return unpack(parts[0], 2) | _from_high_plane(parts[1], is_value=is_value) << 2
