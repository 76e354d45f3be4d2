"""The op memeff::coded_kv_cache_append_values, which appends to the caches of two layers that share
only values.

Each of the two layers has its own encoded keys. Both layers share the codes of the values. In a
decoding step, the lower layer writes its token with the op `coded_kv_cache_append_lower`, before
the upper layer's token exists. The upper layer's append encodes groups of tokens of both layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .. import library
from ..checks import require
from . import value_pair_reference
from .layout import (
    Layout,
    Maps,
    OwnKeys,
    SharedValues,
    ValuePair,
    dtype_of,
    group_of,
    pool_of_values,
)
from .op import on_kernels, supports_pool
from .pair import MAPS, unlike_choices, unlike_maps, unlike_rows
from .value_pair_reference import Merging

SHARED_VALUES = SharedValues._fields[:3]
"""Names of the tensors that the layers of a pair share, without the places of all layers."""

OWN_KEYS = OwnKeys._fields
"""Names of the tensors that each layer has."""

_TENSORS = [
    *SharedValues._fields,
    *(f"lower_{name}" for name in OWN_KEYS),
    *(f"upper_{name}" for name in OWN_KEYS),
    *MAPS,
]
_COUNT = len(_TENSORS)
_LETTERS = iter("abcdefghijklmnopqrstuvwxyz")
_WRITTEN = ", ".join(
    f"Tensor {name}" if name == "places" else f"Tensor({next(_LETTERS)}!) {name}"
    for name in _TENSORS
)


def shapes_of_values(
    layout: Layout, batch: int, heads: int, tokens: int
) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    """Return the shapes of the cache tensors of two layers that share only values.

    The first result has the shapes of the tensors that the two layers share. The second has those
    of the tensors that each layer has separately.
    """
    every = layout.shapes(batch, heads, tokens)
    every["norms"] = (batch, heads, layout.groups(tokens) * layout.group)
    shared = {name: every[name] for name in SHARED_VALUES}
    return shared, {name: every[name] for name in OWN_KEYS}


def _split(args: Sequence[Any]) -> tuple[ValuePair, Sequence[Any]]:
    first, second = len(SharedValues._fields), len(SharedValues._fields) + len(OWN_KEYS)
    third = second + len(OWN_KEYS)
    own = OwnKeys(*args[first:second]), OwnKeys(*args[second:third])
    maps = Maps(*args[third:_COUNT])
    return ValuePair(SharedValues(*args[:first]), *own, maps), args[_COUNT:]


def _unlike(args: Sequence[Any]) -> str | None:
    (shared, lower, upper, maps), rest = _split(args)
    lower_k, lower_v, k, v, bits, recent, _, rule, t, scale, _ = rest
    for own in (lower, upper):
        sentence = supports_pool(pool_of_values(shared, own), bits)
        if sentence is not None:
            return sentence
    _, _, window, depth = upper.k_window.shape
    group = group_of(upper.k_codes.shape[3], depth, bits)
    if bits == 16 or window != recent + group:
        return f"bits={bits}, a window of {window} rows; codes and {recent + group} are needed."
    sentence = unlike_rows((k, v), (lower_k, lower_v), upper.k_window, group)
    if sentence is not None:
        return sentence
    wanted = (*upper.k_codes.shape[:2], upper.k_codes.shape[2] * group)
    kind = dtype_of("norms", upper.k_window.dtype, bits)
    if tuple(shared.norms.shape) != wanted or shared.norms.dtype != kind:
        return (
            f"norms is {shared.norms.dtype} {tuple(shared.norms.shape)}; {kind} {wanted} is needed."
        )
    sentence = unlike_maps(maps, upper.k_window, bits, kinds=1)
    sentence = sentence or unlike_choices(rule=rule, scale=scale)
    if sentence is not None:
        return sentence
    return None if 0.0 <= t <= 1.0 else f"t is {t}; a number from 0 to 1 is needed."


def _append_values(*args: Any) -> None:
    require("coded_kv_cache_append_values", _unlike(args))
    pair, rest = _split(args)
    lower_k, lower_v, k, v, bits, recent, limit, rule, t, scale, is_first = rest
    if not k.numel():
        return
    new = None if lower_k is None else (lower_k, lower_v)
    window = pair.upper.k_window
    run: Any = value_pair_reference.append
    if on_kernels(window, window.shape[2] - recent):
        from .append_value_pairs import append as run
    run(pair, new, (k, v), bits, recent, limit, Merging(rule, t, scale), is_first=is_first)


def _fake_append_values(*args: Any) -> None:
    require("coded_kv_cache_append_values", _unlike(args))


coded_kv_cache_append_values = library.op(
    f"coded_kv_cache_append_values({_WRITTEN}, Tensor? lower_k, Tensor? lower_v, Tensor k, "
    "Tensor v, int bits, int recent, SymInt limit, str rule, float t, str scale, bool is_first)"
    " -> ()",
    _append_values,
    _fake_append_values,
)
