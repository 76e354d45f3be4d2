# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Softmax over keys that a kernel reads tile by tile, or that are divided among several programs.

Scores are multiplied by log2(e), so that the kernels compute powers of 2 instead of e. A row's
largest score is minus infinity until one of its keys has been read.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def step(score, largest, AXIS: tl.constexpr):
    """Return a tile's softmax weights, the factor that rescales the sums over earlier tiles, and
    the new largest score.

    With this factor, the earlier sums are relative to the new largest score.
    """
    higher = tl.maximum(largest, tl.max(score, axis=AXIS))
    base = tl.where(higher == float("-inf"), 0.0, higher)
    weight = tl.exp2(score - tl.expand_dims(base, AXIS))
    shrink = tl.exp2(largest - base)
    return weight, shrink, higher


@triton.jit
def of_shares(largest, total, share):
    """Combine the attention results (splits, D) of several programs, given each program's largest
    score and sum of softmax weights."""
    base = tl.max(largest, axis=0)
    base = tl.where(base == float("-inf"), 0.0, base)
    weight = tl.exp2(largest - base)
    whole = tl.sum(weight * total, axis=0)
    return tl.sum(share * weight[:, None], axis=0) / tl.where(whole == 0.0, 1.0, whole)
