"""The ops memeff::coded_kv_cache_append_lower and _append_pair, for two layers with merged caches.

The ops append tokens to the KV caches of the two layers, lower and upper. For each merged token and
head, the keys of both layers share one direction (a vector of length one). The values of both
layers share another direction. Some tokens stay unmerged, and each layer stores their keys and
values exactly. The two layers share the tensors named in `SHARED`. Each layer also has its own
tensors, named in `OWN`.

The cache of one layer consists of ten tensors, called its pool, some of them shared (`pool_of`).
The layer's norms, one of its own tensors, are the lengths of its keys and values. The ops
`coded_kv_cache_view` and `coded_kv_cache_attention` read the pool and the norms of one layer. These
ops multiply shared directions by the norms.

In a decoding step, the lower layer writes its token before the upper layer's token is computed. So
the lower layer's append does not merge. Until a token is merged, each layer stores its key and
value exactly, in the layer's window of latest tokens. When both windows are full, the append to the
upper layer merges the group of their oldest tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .. import library
from ..checks import require
from . import pair_reference
from .layout import Layout, Maps, Own, Pair, Shared, dtype_of, group_of
from .merging import READINGS, RULES, SCALES
from .op import on_kernels, supports_pool
from .pair_reference import Merging

SHARED = Shared._fields
"""Names of the tensors that the layers of a pair share, in the order that ops take them."""

OWN = Own._fields
"""Names of the tensors that each layer has, in the same order."""

MAPS = Maps._fields
"""Names of the tensors that align the two layers of a pair."""

_TENSORS = [
    *(f"shared_{name}" for name in SHARED),
    *(f"lower_{name}" for name in OWN),
    *(f"upper_{name}" for name in OWN),
]
_COUNT = len(_TENSORS)
_LETTERS = iter("abcdefghijklmnopqrstuvwxyz")
_WRITTEN = ", ".join(
    f"Tensor {name}" if name == "shared_starts" else f"Tensor({next(_LETTERS)}!) {name}"
    for name in _TENSORS
)
_ALIGNED = ", ".join(f"Tensor({next(_LETTERS)}!)? {name}=None" for name in MAPS)
_ALIGNED += ", Tensor? angles=None"


def shapes_of_maps(
    layout: Layout, batch: int, heads: int, kinds: int = 2
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the linear maps that make the keys and values of two layers similar.

    If `kinds` is 1, the maps are only for values.
    """
    front, depth = (batch, heads), layout.depth
    means = (*front, kinds, depth)
    return dict(zip(MAPS, (means, means, (*means, depth), front), strict=True))


def shapes_of_pair(
    layout: Layout, batch: int, heads: int, tokens: int
) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    """Return the shapes of the cache tensors of two layers with merged keys and values.

    The first result has the shapes of the tensors that the two layers share. The second has those
    of the tensors that each layer has separately. Some tokens stay unmerged: each layer stores
    their keys and values exactly. The layout's `kept` is the number of unmerged tokens for which a
    head has memory. The first tokens of a sequence are among them.
    """
    every = layout.shapes(batch, heads, tokens)
    front = (batch, heads)
    every["norms"] = (*front, layout.groups(tokens) * layout.group, 2)
    every |= dict.fromkeys(("starts", "bound", "kept_count", "left_over"), front)
    return {name: every[name] for name in SHARED}, {name: every[name] for name in OWN}


def pool_of(shared: Sequence[Tensor], own: Sequence[Tensor]) -> list[Tensor]:
    """Return the ten tensors (`layout.Pool`) of the KV cache of one of two layers.

    The two layers have merged caches: per token and head, they share one unit vector for their keys
    and one for their values. Some tokens stay unmerged. Each layer stores the keys and values of
    unmerged tokens exactly. `shared` (`layout.Shared`) contains the codes and scales of the unit
    vectors, and the positions of unmerged tokens. Both layers share these tensors. The layer's
    other tensors are in `own` (`layout.Own`). The ops `coded_kv_cache_view` and
    `coded_kv_cache_attention` take the result.
    """
    return [*shared[:4], *own[:4], shared[4], own[4]]


_SETTINGS = 14
"""Arguments of the append between the tensors of the layers and those that align them."""


def _split(args: Sequence[Any]) -> tuple[Pair, Sequence[Any]]:
    first, second = len(SHARED), len(SHARED) + len(OWN)
    shared, lower, upper = args[:first], args[first:second], args[second:_COUNT]
    rest, held = args[_COUNT:][:_SETTINGS], args[_COUNT + _SETTINGS :][: len(MAPS)]
    maps = Maps(*held) if len(held) == len(MAPS) and None not in held else None
    return Pair(Shared(*shared), Own(*lower), Own(*upper), maps), rest


def _angles(args: Sequence[Any]) -> Tensor | None:
    """Return the angles of the keys' rotary embedding, or None if they were not passed.

    `args` are the arguments of `coded_kv_cache_append_pair`, which appends tokens to two layers.
    """
    more = args[_COUNT + _SETTINGS + len(MAPS) :]
    return more[0] if more else None


def unlike_rows(
    new: tuple[Tensor, Tensor],
    lower: tuple[Tensor | None, Tensor | None],
    window: Tensor,
    group: int,
) -> str | None:
    """Return a sentence that says why new keys and values cannot be appended to two layers' caches.

    The two layers, lower and upper, share merged keys and values, or only merged values. The result
    is None if the new keys and values can be appended. `new` contains the keys and values of the
    upper layer, `lower` those of the lower layer.
    """
    (k, v), (lower_k, lower_v) = new, lower
    batch, heads, _, depth = window.shape
    for name, rows in (("k", k), ("v", v), ("lower_k", lower_k), ("lower_v", lower_v)):
        if rows is None:
            continue
        if rows.dtype != window.dtype or rows.device != window.device:
            return f"{name} is {rows.dtype} on {rows.device}; as the cache is needed."
        if tuple(rows.shape) != (batch, heads, k.shape[2], depth):
            return f"{name} is {tuple(rows.shape)}; {(batch, heads, 'tokens', depth)} is needed."
    if (lower_k is None) != (lower_v is None):
        return "lower_k and lower_v come together or not at all."
    if lower_k is None and k.shape[2] > group:
        return f"{k.shape[2]} tokens came without the lower layer's; at most a group can."
    return None


def unlike_maps(maps: Maps, window: Tensor, bits: int, kinds: int = 2) -> str | None:
    """Return a sentence that says why the linear maps of two layers do not fit the layers' KV
    cache.

    The maps make the keys and values of the two layers similar. If `kinds` is 1, the maps are only
    for values. Maps fit if they have the shapes, dtypes and device that the cache needs, and are
    contiguous. The result is None if the maps fit.
    """
    batch, heads, _, depth = window.shape
    shapes = shapes_of_maps(Layout(depth, bits), batch, heads, kinds)
    for name, tensor in maps._asdict().items():
        if tuple(tensor.shape) != shapes[name] or not tensor.is_contiguous():
            return f"{name} is {tuple(tensor.shape)}; contiguous {shapes[name]} is needed."
        kind = dtype_of(name, window.dtype, bits)
        if tensor.dtype != kind or tensor.device != window.device:
            return f"{name} is {tensor.dtype} on {tensor.device}; {kind}, as the cache, is needed."
    return None


def unlike_choices(**given: str) -> str | None:
    """Return a sentence that names an unsupported setting for merging the KV caches of two layers.

    The result is None if all given settings are supported.
    """
    every = {"rule": RULES, "scale": SCALES, "reading": READINGS}
    for name, value in given.items():
        if value not in every[name]:
            return f"{name} is {value!r}; one of {', '.join(map(repr, every[name]))} is needed."
    return None


def _unlike(args: Sequence[Any]) -> str | None:
    (shared, lower, upper, maps), rest = _split(args)
    lower_k, lower_v, k, v, bits, recent, _, keep_first, rule, t, gamma, reading, scale, _ = rest
    for own in (lower, upper):
        sentence = supports_pool(pool_of(shared, own), bits)
        if sentence is not None:
            return sentence
    _, _, window, depth = upper.k_window.shape
    group = group_of(shared.k_codes.shape[3], depth, bits)
    if window != recent + group:
        return f"the window has {window} rows; recent + group = {recent + group} is needed."
    sentence = unlike_rows((k, v), (lower_k, lower_v), upper.k_window, group)
    if sentence is not None:
        return sentence
    if any(each is not None for each in args[_COUNT + _SETTINGS :]) and maps is None:
        return f"{', '.join(MAPS)} come together or not at all."
    sentence = None if maps is None else unlike_maps(maps, upper.k_window, bits)
    if sentence is not None:
        return sentence
    angles = _angles(args)
    if angles is not None and (angles.shape != (depth // 2,) or angles.device != k.device):
        return f"angles is {tuple(angles.shape)} on {angles.device}; {(depth // 2,)} is needed."
    sentence = unlike_choices(rule=rule, scale=scale, reading=reading)
    if sentence is not None:
        return sentence
    if not 0.0 <= t <= 1.0 or not gamma >= 0.0 or keep_first > shared.places.shape[2]:
        return f"t={t}, gamma={gamma}, keep_first={keep_first}: out of range."
    return None


def _append_lower(*args: Any) -> None:
    k_window, v_window, counts, k, v, limit = args
    require("coded_kv_cache_append_lower", _unlike_lower(k_window, k, v))
    if on_kernels(k_window, 64):
        from .append_pairs import append_lower

        append_lower(k_window, v_window, counts, k, v, limit)
    else:
        pair_reference.append_lower((k_window, v_window, counts), k, v, limit)


def _unlike_lower(window: Tensor, k: Tensor, v: Tensor) -> str | None:
    wanted = (*window.shape[:2], "tokens", window.shape[3])
    for name, new in (("k", k), ("v", v)):
        if new.dim() != 4 or (*new.shape[:2], "tokens", new.shape[3]) != wanted:
            return f"{name} is {tuple(new.shape)}; {wanted} is needed."
        if new.dtype != window.dtype:
            return f"{name} is {new.dtype} and the cache {window.dtype}; cast one."
    return None


def _append_pair(*args: Any) -> None:
    require("coded_kv_cache_append_pair", _unlike(args))
    pair, rest = _split(args)
    lower_k, lower_v, k, v, bits, recent, limit, keep_first, rule, t, gamma, *more = rest
    reading, scale, is_first = more
    if not k.numel():
        return
    settings = Merging(rule, t, gamma, reading, scale, keep_first)
    new = None if lower_k is None else (lower_k, lower_v)
    given = (pair, new, (k, v), bits, recent, limit, settings)
    window = pair.upper.k_window
    if not on_kernels(window, window.shape[2] - recent):
        pair_reference.append(*given, is_first=is_first, angles=_angles(args))
        return
    from . import append_pairs

    if is_first:
        by_kernels: dict[str, Any] = {
            "merging": append_pairs.merge_prompt,
            "sums": append_pairs.SUMS,
        }
        pair_reference.append(*given, is_first=True, angles=_angles(args), **by_kernels)
    else:
        append_pairs.append_pair(*given)


def _fake_append_pair(*args: Any) -> None:
    require("coded_kv_cache_append_pair", _unlike(args))


def _fake_append_lower(*args: Any) -> None:
    require("coded_kv_cache_append_lower", _unlike_lower(args[0], args[3], args[4]))


coded_kv_cache_append_lower = library.op(
    "coded_kv_cache_append_lower(Tensor(a!) k_window, Tensor(b!) v_window, Tensor(c!) counts, "
    "Tensor k, Tensor v, SymInt limit) -> ()",
    _append_lower,
    _fake_append_lower,
)
coded_kv_cache_append_pair = library.op(
    f"coded_kv_cache_append_pair({_WRITTEN}, Tensor? lower_k, Tensor? lower_v, Tensor k, Tensor v, "
    "int bits, int recent, SymInt limit, int keep_first, str rule, float t, float gamma, "
    f"str reading, str scale, bool is_first, {_ALIGNED}) -> ()",
    _append_pair,
    _fake_append_pair,
)
