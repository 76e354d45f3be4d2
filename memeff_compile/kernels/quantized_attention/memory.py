"""A formula for the bytes of the codes, which are rounded q, k and v. The codes exist only while
the op `memeff::quantized_attention` runs.

The formula uses B (sequences), H (query heads), G (key-value heads), M (queries), N (keys) and D
(head dimension). The formula includes padding: D is padded to a power of two of at least 64, and N
to a multiple of 128.
"""

from __future__ import annotations

import sympy

from ..sizes import Size
from .settings import BLOCK


def code_bytes(
    batch: Size,  # B, H, G, M, N as symbols or numbers
    heads: Size,  # likewise
    groups: Size,  # likewise
    queries: Size,  # likewise
    keys: Size,  # likewise
    depth: Size,  # the padded head dimension
    *,
    value_bytes: int = 1,  # 1 for E4M3, 2 for fp16
) -> sympy.Expr:
    """Return the bytes of the codes and scales of q, k and v.

    The codes and scales take about half of the bytes of q, k and v in bf16.
    """
    padded = sympy.ceiling(sympy.sympify(keys) / BLOCK) * BLOCK
    q = sympy.sympify(batch) * heads * queries * depth
    k = sympy.sympify(batch) * groups * (padded * depth + 4 * padded / BLOCK)
    v = sympy.sympify(batch) * groups * depth * (value_bytes * padded + 8)
    if value_bytes == 1:  # the rounding error of each block
        v += sympy.sympify(batch) * groups * 4 * ((depth + 2) * (padded / BLOCK + 1) + padded)
    return sympy.expand(q + k + v)
