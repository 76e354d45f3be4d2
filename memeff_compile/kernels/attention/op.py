"""memeff::attention and its backward op: schemas, validation, choice of implementation, fake
tensors, autograd.

Compilers treat both ops as opaque, and neither op changes its inputs. The forward pass saves q, k,
v, its output and one number per query. The backward pass computes the scores again. The op's second
result, `lse`, has no gradient; only the backward pass reads `lse`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...errors import UnsupportedInputError
from .. import library
from .._triton.conditions import Conditions
from ..checks import (
    INDICES,
    MAX_DEPTH,
    require,
    short,
    two_dtypes,
    unlike_heads,
    unlike_sizes,
    wide,
)
from ..device import kernels_need, kernels_serve, where_it_runs, without_autocast
from . import reference
from .mask_tiles import classify, table_shape

HALF = (torch.bfloat16, torch.float16)

EMPTY_ROWS = ("zeros", "mean")
"""The result of a query for which no key counts: zeros, or the mean of all values."""

ENGINES = {
    "tiles": (
        "tiles of queries against tiles of keys, only those where a key counts, in Triton kernels "
        "(CUDA, compute capability 8.0 or later; bf16, fp16)"
    ),
    "reference": "plain PyTorch, a block of queries at a time (any device, also fp32 and fp64)",
}


class _Call(NamedTuple):
    """The arguments of the op `attention`."""

    q: Tensor
    k: Tensor
    v: Tensor
    key_mask: Tensor | None = None
    query_ids: Tensor | None = None
    key_ids: Tensor | None = None
    mask: Tensor | None = None
    mask_tiles: Tensor | None = None
    ahead: int | None = None
    behind: int | None = None
    scale: float | None = None
    softcap: float = 0.0
    empty_rows: str = "zeros"


class _Gradients(NamedTuple):
    """The arguments of the op `attention_backward`."""

    grad_out: Tensor
    call: _Call
    out: Tensor
    lse: Tensor


def _called_back(*given: Any) -> _Gradients:
    grad_out, q, k, v, out, lse, *conditions = given
    return _Gradients(grad_out, _Call(q, k, v, *conditions), out, lse)


def supports(
    q: Tensor,  # (B, H, M, D)
    k: Tensor,  # (B, G, N, D), H a multiple of G
    v: Tensor,  # likewise
    key_mask: Tensor | None = None,  # bool (B or 1, N)
    query_ids: Tensor | None = None,  # int32 or int64 (B or 1, M)
    key_ids: Tensor | None = None,  # likewise (B or 1, N)
    mask: Tensor | None = None,  # bool or floating (B or 1, H or 1, M or 1, N or 1), alone
    mask_tiles: Tensor | None = None,  # the result of `attention_mask_tiles` for it
    *,
    ahead: int | None = None,  # the bound, or None
    behind: int | None = None,  # likewise
    softcap: float = 0.0,  # 0 for no cap
    empty_rows: str = "zeros",  # one of `EMPTY_ROWS`
) -> str | None:
    """Return a sentence that says why the op does not support the given inputs, or None if it
    does."""
    tables = (key_mask, query_ids, key_ids, mask, mask_tiles)
    return _unlike(_Call(q, k, v, *tables, ahead, behind, None, softcap, empty_rows))


def _unlike(given: _Call) -> str | None:
    """Return the reason why the attention op does not support a call, or None if it does."""
    named = {"q": given.q, "k": given.k, "v": given.v}
    return (
        _unlike_settings(given.softcap, given.empty_rows)
        or unlike_heads(named)
        or unlike_sizes(named)
        or _unlike_tables(*given[:2], *given[3:6])
        or _unlike_mask(*given[:2], *given[6:8])
        or _not_alone(given)
    )


def _unlike_settings(softcap: float, empty_rows: str) -> str | None:
    if not softcap >= 0.0:
        return f"softcap is {softcap}; a number above 0 is needed, or 0 for none."
    if empty_rows not in EMPTY_ROWS:
        return f"empty_rows is {empty_rows!r}; one of {', '.join(EMPTY_ROWS)} is needed."
    return None


def _unlike_tables(
    q: Tensor, k: Tensor, key_mask: Tensor | None, query_ids: Tensor | None, key_ids: Tensor | None
) -> str | None:
    if (query_ids is None) != (key_ids is None):
        given, missing = ("key_ids", "query_ids") if query_ids is None else ("query_ids", "key_ids")
        return f"{given} is given without {missing}; both are needed, or neither."
    tables = (
        ("key_mask", key_mask, (torch.bool,), k.shape[2]),
        ("query_ids", query_ids, INDICES, q.shape[2]),
        ("key_ids", key_ids, INDICES, k.shape[2]),
    )
    for name, table, dtypes, length in tables:
        if table is None:
            continue
        if table.dtype not in dtypes or table.dim() != 2 or table.device != q.device:
            wanted = " or ".join(short(dtype) for dtype in dtypes)
            return (
                f"{name} is {short(table.dtype)} with {table.dim()} dimensions on "
                f"{table.device}; {wanted} of (batch or 1, length) on {q.device} is needed."
            )
        rows = table.shape[0]
        if (rows != 1 and rows != q.shape[0]) or table.shape[1] != length:
            return f"{name} is {tuple(table.shape)}; (1 or {q.shape[0]}, {length}) is needed."
    if query_ids is None or key_ids is None:
        return None
    return two_dtypes("query_ids", query_ids.dtype, "key_ids", key_ids.dtype)


def _unlike_mask(q: Tensor, k: Tensor, mask: Tensor | None, codes: Tensor | None) -> str | None:
    if mask is None:
        return None if codes is None else "mask_tiles is given without mask; both are needed."
    is_number = mask.dtype == torch.bool or mask.dtype.is_floating_point
    if not is_number or mask.dim() != 4 or mask.device != q.device:
        return (
            f"mask is {short(mask.dtype)} with {mask.dim()} dimensions on {mask.device}; bool or a "
            f"floating dtype of (batch, heads, queries, keys), each of them or 1, on {q.device} is "
            "needed."
        )
    wanted = (*q.shape[:3], k.shape[2])
    if any(size not in (1, full) for size, full in zip(mask.shape, wanted, strict=True)):
        return f"mask is {tuple(mask.shape)}; {wanted} is needed, or 1 in the place of any of them."
    if codes is None or (codes.dtype == torch.uint8 and codes.shape == table_shape(mask)):
        return None
    return (
        f"mask_tiles is {short(codes.dtype)} of {tuple(codes.shape)}; the result of "
        f"attention_mask_tiles(mask) is needed, uint8 of {table_shape(mask)}."
    )


def _not_alone(given: _Call) -> str | None:
    mask, softcap = given.mask, given.softcap
    if mask is None:
        return None
    others = (given.key_mask, given.query_ids, given.ahead, given.behind)
    if given.empty_rows != "zeros" or any(each is not None for each in others):
        return (
            "mask is given with another condition or with empty_rows; it decides alone: put the "
            "condition into the mask."
        )
    if softcap and mask.dtype.is_floating_point:
        return f"mask is {short(mask.dtype)} and softcap {softcap}; under a softcap bool is needed."
    return None


def _conditions(name: str, given: _Call) -> Conditions:
    """Return the conditions under which a query attends to a key, and how scores are computed.

    `given` contains the arguments of a call of the attention op. If the op does not support the
    call, the function raises an error.
    """
    require(name, _unlike(given))
    factor = given.q.shape[3] ** -0.5 if given.scale is None else given.scale
    bounds, is_mean = (given.ahead, given.behind), given.empty_rows == "mean"
    masks = given.mask, given.mask_tiles
    return Conditions(*given[3:6], *bounds, factor, given.softcap, is_mean, *masks)


def served(device: torch.device, dtype: torch.dtype, depth: int) -> str:
    """Return a sentence that says why the implementation `tiles` does not support q, k and v, or ""
    if it does."""
    if where_it_runs(device).type != "cuda":
        return f"the tile kernels run on CUDA and the tensors are on {device.type}"
    if dtype not in HALF:
        return f"the tile kernels compute in bfloat16 and float16, and this is {short(dtype)}"
    if not 0 < depth <= MAX_DEPTH:
        return f"the tile kernels serve head dimensions up to {MAX_DEPTH}, and this is {depth}"
    if not kernels_serve(device, dtype):
        return f"the tile kernels need {kernels_need(device)}"
    return ""


def engine_for(device: torch.device, dtype: torch.dtype, depth: int = MAX_DEPTH) -> str:
    """Return the name of the implementation, a key of `ENGINES`, for tensors of a given device,
    dtype and head dimension."""
    return "reference" if served(device, dtype, depth) else "tiles"


def _engine(q: Tensor, k: Tensor) -> Any:  # a module
    if q.is_cuda and q.numel() and k.numel() and not served(q.device, q.dtype, q.shape[3]):
        from . import tiles

        return tiles
    return reference


def _forward(given: _Call) -> tuple[Tensor, Tensor]:
    conditions = _conditions("attention", given)
    q, k, v, *_ = given
    with without_autocast(q.device.type):
        found: tuple[Tensor, Tensor] = _engine(q, k).attend(q, k, v, conditions)
    return found


def _fake_forward(given: _Call) -> tuple[Tensor, Tensor]:
    planes = (2,) if _conditions("attention", given).is_bias else ()
    q = given.q
    lse = q.new_empty((*planes, *q.shape[:3]), dtype=wide(q.dtype))
    return library.heads_inside(q), lse


def _backward(given: _Gradients) -> tuple[Tensor, Tensor, Tensor]:
    conditions = _conditions("attention_backward", given.call)
    grad_out, (q, k, v, *_), out, lse = given
    with without_autocast(q.device.type):
        found: tuple[Tensor, Tensor, Tensor] = _engine(q, k).gradients(
            grad_out, q, k, v, out, lse, conditions
        )
    return found


def _fake_backward(given: _Gradients) -> tuple[Tensor, ...]:
    _conditions("attention_backward", given.call)
    return tuple(map(library.heads_inside, given.call[:3]))


def _readable(mask: Tensor) -> Tensor:
    if mask.dim() != 4 or not (mask.dtype == torch.bool or mask.dtype.is_floating_point):
        raise UnsupportedInputError(
            f"attention_mask_tiles: mask is {short(mask.dtype)} with {mask.dim()} dimensions; bool "
            "or a floating dtype of (batch, heads, queries, keys) is needed."
        )
    return mask


def _setup_context(
    ctx: Any,
    inputs: tuple[Any, ...],
    keyword_only_inputs: dict[str, Any],
    output: tuple[Tensor, Tensor],
) -> None:
    q, k, v, *tables = inputs
    if any(ctx.needs_input_grad[6:7]):  # an operand that is not given has no entry
        raise UnsupportedInputError(
            "attention: mask needs a gradient, and the op has none for it. Detach the mask, or "
            "compile with options={'memeff.attention': 'off'}."
        )
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, out, lse, *tables)
    names = ("ahead", "behind", "scale", "softcap", "empty_rows")
    ctx.settings = tuple(keyword_only_inputs[name] for name in names)


def _link(ctx: Any, grad: Tensor | None, grad_lse: None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 8
    once = _gradients_once if torch.is_grad_enabled() else attention_backward  # create_graph=True
    found = once(grad, *ctx.saved_tensors, *ctx.settings)
    needed = ctx.needs_input_grad
    gradients = (each if need else None for each, need in zip(found, needed[:3], strict=True))
    return (*gradients, *5 * [None])


attention = library.op(
    "attention(Tensor q, Tensor k, Tensor v, Tensor? key_mask=None, Tensor? query_ids=None, "
    "Tensor? key_ids=None, Tensor? mask=None, Tensor? mask_tiles=None, *, SymInt? ahead=None, "
    "SymInt? behind=None, float? scale=None, "
    'float softcap=0.0, str empty_rows="zeros") -> (Tensor out, Tensor lse)',
    *library.taking(_Call, _forward, _fake_forward),
    backward=_link,
    setup_context=_setup_context,
    direct=library.taking(_Call, _forward)[0],
)
attention_backward = library.op(
    "attention_backward(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    "Tensor? key_mask, Tensor? query_ids, Tensor? key_ids, Tensor? mask, Tensor? mask_tiles, "
    "SymInt? ahead, SymInt? behind, float? scale, float softcap, str empty_rows) "
    "-> (Tensor, Tensor, Tensor)",
    *library.taking(_called_back, _backward, _fake_backward),
    direct=library.taking(_called_back, _backward)[0],
)
attention_mask_tiles = library.op(
    "attention_mask_tiles(Tensor mask) -> Tensor",
    *library.taking(
        _readable, classify, lambda mask: mask.new_empty(table_shape(mask), dtype=torch.uint8)
    ),
)
_gradients_once = library.only_first(
    attention_backward,
    "attention: a second derivative of the fused attention was requested, but the op has only a "
    "first one. Compile with options={'memeff.attention': 'off'}.",
)
