"""The op memeff::quantized_attention_by_call: attention whose precision level depends on how often
it was called.

A diffusion model runs the same graph for every time step, and early steps tolerate fewer bits than
late steps. The op uses the levels of a list in turn, and starts again after the last level.
`counter`, a CPU tensor that the op increments, contains the index of the next level. So the host
chooses kernels without waiting for the GPU.

A compiled graph stores its counters as buffers. An attention call may be compiled again, for
example for other shapes. Its new graph then uses the counter of the earlier graph, as long as the
model and the earlier graph exist. Two models count separately. If several threads call the op, each
call is counted. Activation checkpoints never recompute the op, because it runs only without
gradients.

If user code captures a CUDA graph, the capture chooses the graph's kernels once. Every replay then
uses the most precise level, and replays are not counted. Inductor leaves the op out of the CUDA
graphs that it captures. In float64, attention is never quantised and calls are not counted. So a
run in float64, for comparison, does not change the levels of other runs.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from ...errors import UnsupportedInputError
from .. import library
from ..attention import attention
from ..device import without_autocast
from .op import quantized_attention
from .settings import LEVELS, PRECISION

_one_at_a_time = threading.Lock()
_counters: WeakValueDictionary[tuple[str, tuple[str, ...], int], Tensor] = WeakValueDictionary()


def counter_for(site: str, levels: Sequence[str] = (), owner: object = None) -> Tensor:
    """Return the counter of an attention call if it exists, or a new counter that starts at 0.

    The counter is the index of the precision level in `levels` that the call uses next. `site`
    distinguishes the attention calls of one owner, such as a model. An attention call has a
    separate counter for each list of levels. The counter is deleted when its owner is freed, so a
    new owner starts at the first level.
    """
    key = site, tuple(levels), id(owner)
    found = _counters.get(key)
    if found is None:
        _counters[key] = found = torch.zeros((), dtype=torch.int64, device="cpu")
        if owner is not None:
            weakref.finalize(owner, _counters.pop, key, None)
    return found


def restart() -> None:
    """Let all attention calls start again at the first of the precision levels that they use in
    turn."""
    for counter in list(_counters.values()):
        counter.zero_()


def _next(levels: Sequence[str], counter: Tensor, device: torch.device) -> str:
    """Return the precision level with which attention runs now, and increment `counter`."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return max(levels, key=PRECISION.index)
    with _one_at_a_time:
        count = int(counter)
        counter.fill_((count + 1) % len(levels))
    return levels[count % len(levels)]


class _Call(NamedTuple):
    """The arguments of the op `quantized_attention_by_call`.

    All arguments after `key_ids` are passed by keyword.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    key_mask: Tensor | None = None
    query_ids: Tensor | None = None
    key_ids: Tensor | None = None
    levels: Sequence[str] = ()
    counter: Tensor | None = None
    ahead: int | None = None
    behind: int | None = None
    scale: float | None = None


def _attend(given: _Call) -> Tensor:
    _require_levels(given.levels)
    (q, k, v), tables = given[:3], given[3:6]
    if torch.is_grad_enabled() and any(each.requires_grad for each in (q, k, v)):
        raise UnsupportedInputError(
            "quantized_attention_by_call has no backward: it serves inference. Call it under "
            "torch.no_grad()."
        )
    counter, ahead, behind, scale = given[7:]
    assert counter is not None
    is_wide = q.dtype == torch.float64
    level = "exact" if is_wide else _next(given.levels, counter, q.device)
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


def _fake_attend(given: _Call) -> Tensor:
    _require_levels(given.levels)
    return library.heads_inside(given.q)


def _require_levels(levels: Sequence[str]) -> None:
    unknown = [level for level in levels if level not in PRECISION]
    if unknown or not levels:
        raise UnsupportedInputError(
            f"quantized_attention_by_call: levels is {list(levels)}; a list of "
            f"{', '.join((*LEVELS, 'exact'))} is needed."
        )


quantized_attention_by_call = library.op(
    "quantized_attention_by_call(Tensor q, Tensor k, Tensor v, Tensor? key_mask=None, "
    "Tensor? query_ids=None, Tensor? key_ids=None, *, str[] levels, Tensor(a!) counter, "
    "SymInt? ahead=None, SymInt? behind=None, float? scale=None) -> Tensor",
    *library.taking(_Call, _attend, _fake_attend),
    tags=(torch.Tag.cudagraph_unsafe,) if hasattr(torch.Tag, "cudagraph_unsafe") else (),
)
