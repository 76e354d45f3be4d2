"""The byte counts of a low-bit cache, as formulas in B (sequences), H (key-value heads), N (tokens)
and D (head dimension).

`bytes_per_token` is the size of a token that is stored as codes. `fixed_bytes` is the size of the
tokens that a layer stores exactly: its window of latest tokens, and its first tokens. This size
does not depend on the cache's length.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import sympy

from ..sizes import Size
from .layout import PLAIN, Layout


def bytes_per_token(
    heads: Size,  # H, D as symbols or numbers
    depth: Size,  # likewise
    bits: int,  # of a code
    *,
    # tokens that share the scales of a channel of keys; 0 if each token and head has one scale
    group: Size,
    shares: Size,  # groups of channels of a value that have separate scales; not read with group 0
    itemsize: int = 2,  # bytes of a scale
    value_bits: int | None = None,  # of a value's code, by default as many as of a key's
) -> sympy.Expr:
    """Return the bytes of one token's keys and values in codes, in one layer and sequence."""
    both = 2 * bits if value_bits is None else bits + value_bits
    codes = sympy.sympify(both) * heads * depth / 8
    if group == 0:
        return codes + sympy.sympify(2) * heads * itemsize
    scales = 2 * sympy.sympify(depth) / group + 2 * sympy.sympify(shares)
    return codes + heads * scales * itemsize  # 1152 for (8, 128, 4, group=64, shares=2)


def fixed_bytes(
    batch: Size, heads: Size, depth: Size, *, window: Size, kept: Size, itemsize: int = 2
) -> sympy.Expr:
    """Return the bytes of the tokens that one layer stores exactly: its window of latest tokens,
    and its first tokens.
    """
    tokens = sympy.sympify(window) + kept
    return sympy.sympify(batch) * heads * (2 * tokens * depth * itemsize + 4 * kept)


def bytes_of_token(layout: Layout, heads: int, itemsize: int) -> Size:
    """Return the bytes of one token's keys and values in codes, in one layer and sequence.

    `layout` determines the bits of the codes and the number of scales. A scale has `itemsize`
    bytes. If `layout.bits` is PLAIN, keys and values are numbers of `itemsize` bytes, without
    codes.
    """
    if layout.bits == PLAIN:
        return 2 * heads * layout.depth * itemsize
    told: dict[str, Any] = {
        "group": layout.group if layout.scheme == "kivi" else 0,
        "itemsize": itemsize,
    }
    shares = layout.depth // layout.channel_group
    told["value_bits"] = layout.value_bits
    return bytes_per_token(heads, layout.depth, layout.bits, shares=shares, **told)


def bytes_after(layout: Layout, batch: int, heads: int, tokens: int, itemsize: int) -> int:
    """Return the bytes of a layer's cache that contains `tokens` tokens, including the latest
    tokens and the first tokens, which are stored exactly."""
    each = bytes_of_token(layout, heads, itemsize)
    fixed = fixed_bytes(
        batch, heads, layout.depth, window=layout.window, kept=layout.kept, itemsize=itemsize
    )
    return int(each * batch * layout.groups(tokens) * layout.group + fixed)


def map_bytes(layout: Layout, batch: int, heads: int, itemsize: int, kinds: int = 2) -> int:
    """Return the bytes of the linear maps that make two layers' keys and values similar.

    Similar keys and values can be merged. Each sequence and head has a mean vector for each layer,
    and a rotation matrix. In each sequence, each head of the upper layer has the index of the lower
    layer's head with which it is merged. Keys and values have separate means and matrices. If
    `kinds` is 1, only values have them.
    """
    return batch * heads * (kinds * layout.depth * (layout.depth + 2) * itemsize + 4)


def value_pair_bytes(layout: Layout, batch: int, heads: int, tokens: int, itemsize: int) -> int:
    """Return the bytes of the caches of two layers that share values, for `tokens` tokens.

    The result leaves out the linear maps that make the layers' values similar (`map_bytes`). It
    also leaves out the positions at which sequences begin. The pair stores the codes and scales of
    its values once. For each token and head, the pair also stores one ratio. It is the length of
    the upper layer's value divided by the length of the lower layer's value. Each layer stores its
    own window of latest tokens, its own first tokens, and the codes and scales of its keys.
    """
    rows = layout.groups(tokens) * layout.group
    each = bytes_of_value_pair(layout, heads, itemsize)
    exact = 4 * (layout.window + layout.kept) * layout.depth * itemsize
    return int(batch * (each * rows + heads * exact))


def bytes_of_value_pair(layout: Layout, heads: int, itemsize: int) -> Size:
    """Return the bytes of one encoded token in the caches of two layers that share values.

    The result is the sum for the two layers.
    """
    both = replace(layout, value_bits=0)
    of_values = bytes_of_token(layout, heads, itemsize) - bytes_of_token(both, heads, itemsize)
    shares = layout.depth // layout.channel_group
    scales = 2 * heads * shares * itemsize  # of values
    keys = bytes_of_token(both, heads, itemsize) - scales
    return 2 * keys + of_values + scales + heads * itemsize


def pair_bytes(layout: Layout, batch: int, heads: int, tokens: int, itemsize: int) -> int:
    """Return the bytes of the caches of two layers with merged keys and values.

    The caches have space for `tokens` tokens. For each merged token and head, the two layers share
    one direction (unit vector) of their keys and one of their values. The result leaves out the
    linear maps that make the layers' keys and values similar (`map_bytes`). Some tokens stay
    unmerged: each layer stores their keys and values exactly. The layout's `kept` is the number of
    unmerged tokens for which a head has memory, including the first tokens of the sequence. The two
    layers share the codes and scales of the directions, and the positions of unmerged tokens. Each
    layer stores norms (lengths of keys and values), a window of latest tokens, and its unmerged
    keys and values. In 16-bit caches, norms are float16.
    """
    rows = layout.groups(tokens) * layout.group
    sequences = batch * heads
    each = bytes_of_token(layout, heads, itemsize)
    lengths = 4 * sequences * rows * itemsize
    exact = 2 * sequences * 2 * (layout.window + layout.kept) * layout.depth * itemsize
    notes = 4 * sequences * (layout.kept + 4)
    return int(each * batch * rows) + lengths + exact + notes
