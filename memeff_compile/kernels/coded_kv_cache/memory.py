"""The byte counts of a low-bit cache, as formulas in B (sequences), H (key-value heads), N (tokens)
and D (head dimension).

`bytes_per_token` is the size of a token that is stored as codes. `fixed_bytes` is the size of a
layer's window of latest tokens and of its exact first tokens, which does not depend on the cache's
length.
"""

from __future__ import annotations

import sympy

from ..sizes import Size
from .layout import PLAIN, Layout


def bytes_per_token(
    heads: Size,  # H, D as symbols or numbers
    depth: Size,  # likewise
    bits: int,  # of a code
    *,
    group: Size,  # tokens that share the scales of a channel of keys; 0 for one per token and head
    shares: Size,  # groups of channels of a value that have separate scales; not read with group 0
    itemsize: int = 2,  # bytes of a scale
) -> sympy.Expr:
    """Return the bytes that the codes of one token's keys and values take, in one layer and
    sequence."""
    codes = sympy.sympify(2) * heads * depth * bits / 8
    if group == 0:
        return codes + sympy.sympify(2) * heads * itemsize
    scales = 2 * sympy.sympify(depth) / group + 2 * sympy.sympify(shares)
    return codes + heads * scales * itemsize  # 1152 for (8, 128, 4, group=64, shares=2)


def fixed_bytes(
    batch: Size, heads: Size, depth: Size, *, window: Size, kept: Size, itemsize: int = 2
) -> sympy.Expr:
    """Return the bytes of one layer's window of latest tokens and of its exact first tokens."""
    tokens = sympy.sympify(window) + kept
    return sympy.sympify(batch) * heads * (2 * tokens * depth * itemsize + 4 * kept)


def bytes_of_token(layout: Layout, heads: int, itemsize: int) -> Size:
    """Return the bytes of one token in a layout's codes, or in the model's dtype if the layout has
    no codes."""
    if layout.bits == PLAIN:
        return 2 * heads * layout.depth * itemsize
    told = {"group": layout.group if layout.scheme == "kivi" else 0, "itemsize": itemsize}
    shares = layout.depth // layout.channel_group
    return bytes_per_token(heads, layout.depth, layout.bits, shares=shares, **told)


def bytes_after(layout: Layout, batch: int, heads: int, tokens: int, itemsize: int) -> int:
    """Return the bytes of a layer's cache that contains `tokens` tokens, including window and exact
    first tokens."""
    each = bytes_of_token(layout, heads, itemsize)
    fixed = fixed_bytes(
        batch, heads, layout.depth, window=layout.window, kept=layout.kept, itemsize=itemsize
    )
    return int(each * batch * layout.groups(tokens) * layout.group + fixed)


def map_bytes(layout: Layout, batch: int, heads: int, itemsize: int) -> int:
    """Return the bytes of the alignment maps of two layers: means, and one matrix per head."""
    return batch * heads * (2 * layout.depth * (layout.depth + 2) * itemsize + 4)


def pair_bytes(layout: Layout, batch: int, heads: int, tokens: int, itemsize: int) -> int:
    """Return the bytes of two layers that share directions, for `tokens` tokens, without their
    alignment maps.

    The layout's `kept` is the number of unmerged rows for which memory is allocated, including the
    first tokens. A pair of layers stores codes, scales and positions of unmerged rows once; it
    stores norms, windows and unmerged rows once per layer. In 16-bit caches, norms are float16.
    """
    rows = layout.groups(tokens) * layout.group
    sequences = batch * heads
    each = bytes_of_token(layout, heads, itemsize)
    lengths = 4 * sequences * rows * itemsize
    exact = 2 * sequences * 2 * (layout.window + layout.kept) * layout.depth * itemsize
    notes = 4 * sequences * (layout.kept + 4)
    return int(each * batch * rows) + lengths + exact + notes
