"""Merge a token's keys, or values, in two layers into one shared direction and two lengths.

A row is the key or value vector of one head and token. The two layers' rows of the same token
become one shared direction (a vector of length one) and two lengths. If the angle between the two
rows is too large, both rows stay unmerged. The rotary embedding does not matter for merging,
because it rotates the rows of both layers by the same angles.

Paper: MiniCache, arXiv 2405.14366, equations 1 to 3.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..checks import wide

SCALES = ("norm", "projection")
"""The lengths of a merged row: the row's length, or the one with the smallest error."""

RULES = ("slerp", "average", "max_norm")
"""How the shared direction of a pair is computed."""

READINGS = ("distinct", "similar")
"""Which rows are kept unchanged: those farthest apart, as the paper intends, or those nearest, as
its inequality can be read.
"""

_NEARLY_PARALLEL = 1e-4


def direction_and_length(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return vectors normalised to length one, and their original lengths, in fp32 or fp64.

    The vectors are keys or values.

    For a vector of zeros, the direction and the length are zero.
    """
    x = x.to(wide(x.dtype))
    length = x.norm(dim=-1, keepdim=True)
    return x / length.clamp_min(1e-12), length.squeeze(-1)


def distance(lower: Tensor, upper: Tensor) -> Tensor:
    """Return the angle between vectors of length one, divided by pi.

    The result lies between 0 and 1. `lower` and `upper` contain the directions of two layers' keys
    or values. They must be fp32 or fp64, because bf16 rounding would give a nonzero distance
    between a vector and itself.
    """
    cosine: Tensor = (lower * upper).sum(-1).clamp(-1.0, 1.0)
    return cosine.acos() / torch.pi


def shared_direction(
    lower: Tensor,  # (..., D)
    upper: Tensor,  # likewise
    *,
    # `slerp`: the point on the arc between the two rows' directions at the fraction `t` of the
    # arc, counted from the lower layer's; `average`: their weighted mean, scaled to length one;
    # `max_norm`: the direction of the longer row
    rule: str = "slerp",
    t: float = 0.5,  # 0 is the lower row's, 1 the upper's
) -> Tensor:
    """Return the direction (unit vector) that two layers' rows share, in fp32 or fp64.

    A row is a token's key, or value, in one layer. The result, (..., D), replaces the directions of
    both rows. The function `folded_length` computes each row's length separately.
    """
    (u, m), (v, n) = direction_and_length(lower), direction_and_length(upper)
    if rule == "max_norm":
        return torch.where((m >= n).unsqueeze(-1), u, v)
    mean: Tensor = (1 - t) * u + t * v
    if rule == "slerp":
        angle = (distance(u, v) * torch.pi).unsqueeze(-1)
        sine = angle.sin()
        arc = ((1 - t) * angle).sin() * u + (t * angle).sin() * v
        mean = torch.where(sine < _NEARLY_PARALLEL, mean, arc / sine.clamp_min(_NEARLY_PARALLEL))
    size: Tensor = mean.norm(dim=-1, keepdim=True).clamp_min(1e-12)
    return mean / size


def threshold(apart: Tensor, counted: Tensor, *, gamma: float, reading: str) -> Tensor:
    """Return the threshold, (B, H), for the distance between a token's rows in two layers.

    A row is a key or a value. Beyond the threshold, a token's keys and values stay unmerged. If
    `reading` is `distinct`, tokens above the threshold stay unmerged. If `reading` is `similar`,
    tokens below the threshold stay unmerged. Unmerged keys and values are stored exactly. The
    others are merged with another layer's keys and values. `apart` (B, H, N) is the distance
    between two layers' keys, or between their values if it is larger.

    The function uses only the distances for which `counted` is true. If `counted` is true for no
    token, the function returns nan. `gamma` is a fraction of the range from the smallest to the
    largest distance. With 0.1, tokens in the upper tenth of this range stay unmerged or, if
    `reading` is `similar`, tokens in its lower tenth. A larger `gamma` keeps more tokens unmerged,
    and 1 keeps all tokens unmerged.
    """
    if gamma >= 1:
        return torch.full_like(apart[..., 0], -torch.inf if reading == "distinct" else torch.inf)
    high = apart.masked_fill(~counted, -torch.inf).amax(-1)
    low = apart.masked_fill(~counted, torch.inf).amin(-1)
    spread = gamma * (high - low)
    return high - spread if reading == "distinct" else low + spread


def kept_rows(
    apart: Tensor,  # (B, H, N) distances
    counted: Tensor,  # bool (B, H, N), rows that may be kept
    bound: Tensor,  # (B, H), from `threshold`
    room: Tensor,  # (B, H) int64, the number of unmerged rows for which memory is left
    *,
    reading: str,  # one of `READINGS`
) -> tuple[Tensor, Tensor, Tensor]:
    """Choose the tokens whose keys and values stay unmerged, at most `room` tokens per head.

    Keys and values of other tokens are merged with those of another layer. A chosen token's
    distance between the two layers (`apart`) is beyond the threshold `bound`. The tokens farthest
    beyond the threshold are chosen first. The results are:

    - `chosen`: bool (B, H, N), whether a token stays unmerged.
    - `rank`: int64 (B, H, N), the rank of a token among those beyond the threshold; rank 0 is the
      most extreme.
    - `left_over`: (B, H) int64, how many more tokens than `room` are beyond the threshold.
    """
    is_beyond = (
        apart > bound.unsqueeze(-1) if reading == "distinct" else apart < bound.unsqueeze(-1)
    )
    is_beyond = is_beyond & counted
    order = apart if reading == "distinct" else -apart
    order = order.masked_fill(~is_beyond, -torch.inf)
    rank = order.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    chosen = is_beyond & (rank < room.unsqueeze(-1))
    return chosen, rank, is_beyond.sum(-1) - chosen.sum(-1)


def folded_length(x: Tensor, decoded: Tensor, *, scale: str = "norm") -> Tensor:
    """Return the factors that turn vectors shared by two layers back into one layer's keys or
    values.

    A row of `x` is the key or value of one token and head in one layer. The shared vector
    `decoded`, (..., D), is a direction of about length one, decoded from codes. The restored row is
    the factor times this vector.

    If `scale` is `norm`, the factor preserves the row's length. If `scale` is `projection`, the
    factor minimises the error of the restored row. The result contains one factor per row, in fp32
    or fp64. The factor is 0 where the decoded direction is zero.
    """
    x = x.to(decoded.dtype)
    if scale == "projection":
        found = (x * decoded).sum(-1) / decoded.square().sum(-1).clamp_min(1e-24)
        return found.clamp_min(0.0)  # a negative length would mark the row as unmerged
    length: Tensor = x.norm(dim=-1) / decoded.norm(dim=-1).clamp_min(1e-12)
    return length
