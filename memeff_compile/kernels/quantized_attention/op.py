"""memeff::quantized_attention: schema, validation, choice of implementation, fake tensors.

Inductor treats the op as opaque, and the op never writes to q, k or v. The op is for inference and
has no backward pass, so a request for a gradient raises an error.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...errors import UnsupportedInputError
from .. import library
from .._triton.conditions import Conditions
from ..attention import attention
from ..attention import supports as supports_attention
from ..checks import require
from ..device import gpu, kernels_serve, where_it_runs, without_autocast
from . import reference
from .settings import GRANULARITIES, LEVELS, SMOOTHABLE, settings_for

ENGINES = {
    "tiles": (
        "8-bit codes made in a few launches, then tiles of queries against tiles of keys, in "
        "Triton kernels (CUDA, compute capability 8.0 or later; bf16, fp16, fp32)"
    ),
    "reference": (
        "the same arithmetic in plain PyTorch, a tile of keys at a time (any device); in float64 "
        "nothing is coded"
    ),
}


def supports(
    q: Tensor,  # (B, H, M, D)
    k: Tensor,  # (B, G, N, D), H a multiple of G
    v: Tensor,  # likewise
    key_mask: Tensor | None = None,  # bool (B or 1, N)
    query_ids: Tensor | None = None,  # int32 or int64 (B or 1, M)
    key_ids: Tensor | None = None,  # likewise (B or 1, N)
    *,
    level: str = "8b",  # one of `LEVELS`
    granularity: str = "row",  # one of `GRANULARITIES`
    smooth: str | None = None,  # some of the letters q, k and v, or None
) -> str | None:
    """Return a sentence that says why the op does not support the given inputs, or None if it
    supports them."""
    return _unlike_settings(level, granularity, smooth) or supports_attention(
        q, k, v, key_mask, query_ids, key_ids
    )


def _unlike_settings(level: str, granularity: str, smooth: str | None) -> str | None:
    for name, found, known in (
        ("level", level, tuple(LEVELS)),
        ("granularity", granularity, GRANULARITIES),
    ):
        if found not in known:
            return f"{name} is {found!r}; one of {', '.join(known)} is needed."
    if smooth is not None and set(smooth) - set(SMOOTHABLE):
        return f"smooth is {smooth!r}; some of the letters q, k and v are needed, or None."
    return None


def engine_for(device: torch.device, dtype: torch.dtype) -> str:
    """Return the name of the implementation, a key of `ENGINES`, for tensors of a given device and
    dtype.
    """
    return "tiles" if kernels_serve(device, dtype) else "reference"


def has_fp8(device: torch.device) -> bool:
    """Return whether a device can multiply E4M3 numbers; if not, softmax weights and values are
    fp16."""
    return where_it_runs(device).type != "cuda" or gpu(device).has_fp8


class _Call(NamedTuple):
    """The arguments of the op `quantized_attention`."""

    q: Tensor
    k: Tensor
    v: Tensor
    key_mask: Tensor | None = None
    query_ids: Tensor | None = None
    key_ids: Tensor | None = None
    ahead: int | None = None
    behind: int | None = None
    scale: float | None = None
    level: str = "8b"
    granularity: str = "row"
    smooth: str | None = None
    with_lse: bool = True


def _attend(given: _Call) -> tuple[Tensor, Tensor]:
    _require_support(given)
    (q, k, v), tables = given[:3], given[3:6]
    ahead, behind, scale, with_lse = given.ahead, given.behind, given.scale, given.with_lse
    factor = q.shape[3] ** -0.5 if scale is None else scale
    conditions = Conditions(*tables, ahead, behind, factor, 0.0, False)
    if q.dtype == torch.float64:  # computes the exact formula, for tests
        out, lse = attention(q, k, v, *tables, ahead=ahead, behind=behind, scale=scale)
        return out, (lse if with_lse else lse[:, :, :0]).float()
    named = given.level, given.granularity, given.smooth
    is_fp8 = has_fp8(q.device)
    settings = settings_for(*named, with_lse=with_lse, has_fp8=is_fp8, depth=q.shape[3])
    attend = reference.attend
    if q.is_cuda and q.numel() and k.numel() and engine_for(q.device, q.dtype) == "tiles":
        from .tiles import attend
    with without_autocast(q.device.type):
        return attend(q, k, v, conditions, settings)


def _fake_attend(given: _Call) -> tuple[Tensor, Tensor]:
    _require_support(given)
    batch, heads, queries, _ = given.q.shape
    lse = given.q.new_empty((batch, heads, queries if given.with_lse else 0), dtype=torch.float32)
    return library.heads_inside(given.q), lse


def _require_support(given: _Call) -> None:
    level, granularity, smooth = given.level, given.granularity, given.smooth
    unlike = supports(*given[:6], level=level, granularity=granularity, smooth=smooth)
    require("quantized_attention", unlike)


quantized_attention = library.op(
    "quantized_attention(Tensor q, Tensor k, Tensor v, Tensor? key_mask=None, "
    "Tensor? query_ids=None, Tensor? key_ids=None, *, SymInt? ahead=None, SymInt? behind=None, "
    'float? scale=None, str level="8b", str granularity="row", str? smooth=None, '
    "bool with_lse=True) -> (Tensor out, Tensor lse)",
    *library.taking(_Call, _attend, _fake_attend),
    backward=library.refusing(
        UnsupportedInputError,
        "quantized_attention has no backward: it serves inference. Call it under torch.no_grad(), "
        "or use memeff::attention where gradients are needed.",
    ),
)
