"""Average a key over its own and later positions, as if the same key appeared at each of them. Do
the same for the outer product of two keys, as if both appeared again the same distance later.

A rotary embedding rotates the channels i and i + D / 2 of a key, as a point of a plane. The angle
is in proportion to the position. So a key that appears again `s` positions later is the same key,
rotated in each plane by `s` times the plane's angle per position. The mean of these rotated keys,
over all real `s` from 0 to `span`, has a closed form.
"""

from __future__ import annotations

import torch
from torch import Tensor


def mean_key(
    x: Tensor,  # (..., D) fp32 or fp64
    angles: Tensor,  # (D / 2,), per position
    span: int,  # positions
) -> Tensor:
    """Return, for each key in `x`, its mean while a rotary embedding rotates it to later positions.

    The mean is over all real distances from the key's own position to a later one, from 0 to `span`
    positions. From one position to the next, a rotary embedding rotates the channels i and
    i + D / 2 by `angles[i]`, in radians.
    """
    real, imaginary = _factor(angles.to(x.dtype), span)
    a, b = x.chunk(2, -1)
    return torch.cat([a * real - b * imaginary, b * real + a * imaginary], -1)


def mean_product(
    x: Tensor,  # (..., D, D) fp32 or fp64: sums of a row times a row
    angles: Tensor,  # as `mean_key` takes them
    span: int,
) -> Tensor:
    """Return the mean of two keys' outer product while a rotary embedding rotates the two keys.

    Both keys are rotated as if they appeared again the same distance later. The mean is over all
    real distances from 0 to `span` positions. From one position to the next, a rotary embedding
    rotates the channels i and i + D / 2 by `angles[i]`, in radians.
    """
    angles = angles.to(x.dtype)
    (a, b), (c, d) = (half.chunk(2, -1) for half in x.chunk(2, -2))
    # A 2 x 2 block is the sum of a part that rotates by the difference of both angles and a part
    # that rotates by the sum of both angles.
    near = _turned((a + d) / 2, (c - b) / 2, angles[:, None] - angles, span)
    far = _turned((a - d) / 2, (c + b) / 2, angles[:, None] + angles, span)
    upper = torch.cat([near[0] + far[0], far[1] - near[1]], -1)
    lower = torch.cat([far[1] + near[1], near[0] - far[0]], -1)
    return torch.cat([upper, lower], -2)


def _turned(real: Tensor, imaginary: Tensor, angles: Tensor, span: int) -> tuple[Tensor, Tensor]:
    a, b = _factor(angles, span)
    return real * a - imaginary * b, imaginary * a + real * b


def _factor(angles: Tensor, span: int) -> tuple[Tensor, Tensor]:
    """Return the mean of `exp(1j * s * angle)` over all real numbers s from 0 to `span`, as its
    real and imaginary parts."""
    half = angles * (span / 2)
    size = torch.sinc(half / torch.pi)
    return size * half.cos(), size * half.sin()
