"""memeff::quantized_attention_by_call: attention whose level depends on how often it was called.

A diffusion model calls the same graph for every time step, and early steps bear fewer bits than
late ones. The op counts its calls on the host and takes the levels in turn, from the start again
after the last. What is captured in a CUDA graph by hand cannot count: there the most precise level
serves. Inductor leaves the op out of the graphs it captures itself.

In float64, where nothing is coded, nothing is counted either: so a comparison may run beside.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from memeff_compile.errors import UnsupportedInputError
from memeff_compile.kernels.attention import attention
from memeff_compile.kernels.device import without_autocast
from memeff_compile.kernels.quantized_attention.op import quantized_attention
from memeff_compile.kernels.quantized_attention.settings import LEVELS, PRECISION

_counts: dict[int, int] = {}
_numbers: dict[tuple[str, tuple[str, ...]], int] = {}
_fresh = itertools.count()

_LIBRARY = torch.library.Library("memeff", "FRAGMENT")
_TAGS = [torch.Tag.pt2_compliant_tag, torch.Tag.nondeterministic_seeded]
if hasattr(torch.Tag, "cudagraph_unsafe"):
    _TAGS.append(torch.Tag.cudagraph_unsafe)
_LIBRARY.define(
    "quantized_attention_by_call(Tensor q, Tensor k, Tensor v, Tensor? key_mask=None, "
    "Tensor? query_ids=None, Tensor? key_ids=None, *, str[] levels, int counter, "
    "SymInt? ahead=None, SymInt? behind=None, float? scale=None) -> Tensor",
    tags=tuple(_TAGS),
)


# --- counters -------------------------------------------------------------------------------------


def counter_for(site: str, levels: Sequence[str] = (), owner: object = None) -> int:
    """Return the number of a site's counter, the same whenever it is asked.

    Args:
        site: what tells sites apart in this process, while they live.
        levels: what is taken in turn; other levels begin with their first.
        owner: when it dies the counter is forgotten, so that who takes its place begins anew.
    """
    key = site, tuple(levels)
    if key not in _numbers:
        _numbers[key] = next(_fresh)
        if owner is not None:
            weakref.finalize(owner, _forget, key)
    return _numbers[key]


def _forget(key: tuple[str, tuple[str, ...]]) -> None:
    _counts.pop(_numbers.pop(key, -1), None)


def restart() -> None:
    """Begin with the first call again, for every site."""
    _counts.clear()


def _next(levels: Sequence[str], counter: int, device: torch.device) -> str:
    """Return the level of this call, and count it."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return max(levels, key=PRECISION.index)
    count = _counts.get(counter, 0)
    _counts[counter] = (count + 1) % len(levels)
    return levels[count % len(levels)]


# --- the op ---------------------------------------------------------------------------------------


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None = None,
    query_ids: Tensor | None = None,
    key_ids: Tensor | None = None,
    *,
    levels: Sequence[str],
    counter: int,
    ahead: int | None = None,
    behind: int | None = None,
    scale: float | None = None,
) -> Tensor:
    _require_levels(levels)
    tables = (key_mask, query_ids, key_ids)
    is_wide = q.dtype == torch.float64
    level = "exact" if is_wide else _next(levels, counter, q.device)
    bounds = {"ahead": ahead, "behind": behind, "scale": scale}
    if level != "exact":
        found: Tensor = quantized_attention(
            q, k, v, *tables, level=level, with_lse=False, **bounds
        )[0]
        return found
    is_plain = behind is None and ahead in (None, 0) and all(each is None for each in tables)
    if not is_plain:
        return _laid_out(attention(q, k, v, *tables, **bounds)[0])
    with without_autocast(q.device.type):
        return _laid_out(
            torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=ahead == 0, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
            )
        )


def _laid_out(out: Tensor) -> Tensor:
    return out.transpose(1, 2).contiguous().transpose(1, 2)


def _fake_attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None = None,
    query_ids: Tensor | None = None,
    key_ids: Tensor | None = None,
    *,
    levels: Sequence[str],
    counter: int,
    ahead: int | None = None,
    behind: int | None = None,
    scale: float | None = None,
) -> Tensor:
    del k, v, key_mask, query_ids, key_ids, counter, ahead, behind, scale
    _require_levels(levels)
    batch, heads, queries, depth = q.shape
    return q.new_empty((batch, queries, heads, depth)).transpose(1, 2)


def _require_levels(levels: Sequence[str]) -> None:
    unknown = [level for level in levels if level not in PRECISION]
    if unknown or not levels:
        raise UnsupportedInputError(
            f"quantized_attention_by_call: levels is {list(levels)}; a list of "
            f"{', '.join((*LEVELS, 'exact'))} is needed."
        )


def _no_backward(ctx: object, grad: Tensor | None) -> None:
    raise UnsupportedInputError(
        "quantized_attention_by_call has no backward: it serves inference. Call it under "
        "torch.no_grad()."
    )


_LIBRARY.impl("quantized_attention_by_call", _attend, "CompositeExplicitAutograd")
torch.library.register_fake("memeff::quantized_attention_by_call", _fake_attend, lib=_LIBRARY)
torch.library.register_autograd("memeff::quantized_attention_by_call", _no_backward, lib=_LIBRARY)

quantized_attention_by_call = torch.ops.memeff.quantized_attention_by_call.default
