"""memeff::linear_cross_entropy and its backward: schemas, validation, engines, fakes, autograd.

The op is functional, opaque to Inductor and unaffected by autocast. It saves its inputs, one
lse per row and, if asked for, one entropy; backward is an op of its own that recomputes products
piece by piece.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import compat
from ...errors import DoubleBackwardError, TargetRangeError
from .. import library
from ..checks import (
    FLOATING,
    INDICES,
    require,
    short,
    two_devices,
    two_dtypes,
    unfloating,
    unplain,
    wide,
)
from ..device import gpu, kernels_serve, tuned, where_it_runs, without_autocast
from . import fused, hybrid, reference, row_pieces
from .call import Kept, Knobs, Operands, RowGradients, Rows

ENGINE = "linear_cross_entropy.engine"
"""The decision that `tune` makes: which engine serves where "fused" and "hybrid" both could."""

# What memeff.linear_cross_entropy may be.
GRADIENT_FILTERS = ("exact", "mass", "block")
# Which of the two gradients a filter may leave blocks out of.
FILTER_PARTS = ("both", "hidden", "weight")

ENGINES = {
    "fused": (
        "products in Triton that keep only statistics and gradients of the logits "
        "(CUDA, compute capability 9.0; bf16, fp16)"
    ),
    "hybrid": (
        "library products in fp32 and one Triton pass per piece of the vocabulary "
        "(CUDA, compute capability 8.0 or later; bf16, fp16, fp32)"
    ),
    "reference": "plain PyTorch, piece by piece over the vocabulary (any device, also fp64)",
}


def supports(
    hidden: Tensor,  # (..., D)
    weight: Tensor,  # (V, D)
    bias: Tensor | None,  # (V,) or None
    target: Tensor,  # (...), the leading dimensions of hidden
    column_weight: Tensor | None = None,  # (V,) or None
    low: Tensor | None = None,  # (..., R) or None, as of `linear_cross_entropy_adapted`
    up: Tensor | None = None,  # (V, R) or None, likewise
    *,
    # dtype that the caller will cast hidden, weight and bias to, if it will
    dtype: torch.dtype | None = None,
    softcap: float = 0.0,  # as for the op
    gradient_filter: str = "exact",  # likewise
    workspace: int = 0,  # likewise
    filter_level: float = 0.0,  # likewise
    filter_parts: str = "both",  # likewise
) -> str | None:
    """Say in a sentence why the op cannot serve these inputs, or return None if it can.

    Reads dtypes, devices, layouts and sizes, never values, and adds no guard: sizes that are
    symbols are left to the op's own checks. Real and fake tensors both do.
    """
    given = Operands(hidden, weight, bias, target, column_weight, low, up)
    return (
        _setting_fault(softcap, workspace, gradient_filter, filter_level, filter_parts)
        or _layout_fault(given)
        or _dtype_fault(given, dtype)
        or _shape_fault(given)
    )


def _setting_fault(
    softcap: float, workspace: int, gradient_filter: str, level: float, parts: str
) -> str | None:
    if not softcap >= 0:
        return f"softcap is {softcap}; it must be positive, or 0 for none."
    if isinstance(workspace, int) and workspace < 0:
        return f"workspace is {workspace} bytes; it must be positive, or 0 for automatic."
    if gradient_filter not in GRADIENT_FILTERS:
        return (
            f"gradient_filter is {gradient_filter!r}; known filters are "
            f"{', '.join(GRADIENT_FILTERS)}. Use 'exact'."
        )
    if not 0 <= level < math.inf:
        return f"filter_level is {level}; it must be positive and finite, or 0 for automatic."
    if parts not in FILTER_PARTS:
        return f"filter_parts is {parts!r}; known parts are {', '.join(FILTER_PARTS)}."
    return None


def _layout_fault(given: Operands) -> str | None:
    for name, tensor in given._asdict().items():
        if tensor is None:
            continue
        sentence = unplain(name, tensor) or two_devices(name, tensor, "hidden", given.hidden)
        if sentence is not None:
            return sentence
    return None


def _dtype_fault(given: Operands, dtype: torch.dtype | None) -> str | None:
    hidden, weight, bias, target, column_weight, low, up = given
    for name, tensor in (("hidden", hidden), ("weight", weight), ("bias", bias)):
        if tensor is None:
            continue
        sentence = unfloating(name, tensor)
        if sentence is None and dtype is None:
            sentence = two_dtypes(name, tensor.dtype, "hidden", hidden.dtype)
        if sentence is not None:
            return sentence
    if dtype is not None and dtype not in FLOATING:
        return (
            f"the compute dtype is {short(dtype)}; bfloat16, float16, float32 or float64 is needed."
        )
    if target.dtype not in INDICES:
        return (
            f"target has dtype {short(target.dtype)}; class indices of dtype int64 or int32 are "
            "needed. Class probabilities are not supported."
        )
    if column_weight is not None:
        if column_weight.dtype not in FLOATING:
            return (
                f"column_weight has dtype {short(column_weight.dtype)}; a floating dtype is "
                "needed. Cast it."
            )
        if column_weight.requires_grad:
            return "column_weight requires a gradient, which the op does not give. Detach it."
    if low is None or up is None:
        return None
    served = hidden.dtype if dtype is None else dtype
    if low.dtype not in (served, wide(served)):
        return f"low has dtype {short(low.dtype)}; {short(served)} or its wide dtype is needed."
    return two_dtypes("up", up.dtype, "low", low.dtype)


def _shape_fault(given: Operands) -> str | None:
    hidden, weight, bias, target, column_weight, low, up = given
    if hidden.dim() < 1 or weight.dim() != 2:
        return (
            f"hidden has {hidden.dim()} dimensions and weight {weight.dim()}; (..., D) and (V, D) "
            "are needed."
        )
    if target.dim() != hidden.dim() - 1:
        return (
            f"target has {target.dim()} dimensions and hidden {hidden.dim()}; target must have the "
            "leading dimensions of hidden."
        )
    if low is not None and up is not None and (low.dim() != hidden.dim() or up.dim() != 2):
        return (
            f"low has {low.dim()} dimensions and up {up.dim()}; (..., R), with the leading "
            "dimensions of hidden, and (V, R) are needed."
        )
    vocab, depth = weight.shape
    for vector, name in ((bias, "bias"), (column_weight, "column_weight")):
        if vector is not None and vector.dim() != 1:
            return f"{name} has {vector.dim()} dimensions; (V,) is needed."
    for seen, needed, sentence in _size_pairs(given):
        if isinstance(seen, int) and isinstance(needed, int) and seen != needed:
            return sentence
    if isinstance(vocab, int) and vocab == 0:
        return f"weight has shape (0, {depth}); a head needs at least one column."
    return None


def _size_pairs(given: Operands) -> list[tuple[Any, Any, str]]:
    """List the sizes that must agree, with the sentence for when they do not."""
    hidden, weight, bias, target, column_weight, low, up = given
    vocab, depth = weight.shape
    of_depth = (
        f"hidden has {hidden.shape[-1]} features and weight {depth}; hidden must be (..., D) and "
        "weight (V, D)."
    )
    of_rows = (
        f"target has shape {tuple(target.shape)} and hidden {tuple(hidden.shape)}; target must "
        "have the leading dimensions of hidden."
    )
    pairs = [(hidden.shape[-1], depth, of_depth)]
    for seen, needed in zip(target.shape, hidden.shape[:-1], strict=True):
        pairs.append((seen, needed, of_rows))
    for vector, name in ((bias, "bias"), (column_weight, "column_weight")):
        if vector is not None:
            sentence = f"{name} has {vector.shape[0]} elements and weight {vocab} rows."
            pairs.append((vector.shape[0], vocab, sentence))
    if low is not None and up is not None:
        sentence = (
            f"low has shape {tuple(low.shape)} and up {tuple(up.shape)}; low must have the leading "
            "dimensions of hidden, up the rows of weight, and both one rank."
        )
        wanted = (*hidden.shape[:-1], up.shape[1])
        pairs += [(seen, needed, sentence) for seen, needed in zip(low.shape, wanted, strict=True)]
        pairs.append((up.shape[0], vocab, sentence))
    return pairs


def check_sizes(given: Operands) -> None:
    """Refuse sizes that do not agree, symbols among them."""
    for seen, needed, sentence in _size_pairs(given):
        torch._check(seen == needed, lambda sentence=sentence: f"linear_cross_entropy: {sentence}")


def engine_for(
    device: torch.device,
    dtype: torch.dtype,
    depth: int = 8,
    *,
    with_top: bool = False,
    is_adapted: bool = False,
) -> str:
    """Name the engine that serves tensors of this device, dtype and depth: a key of `ENGINES`.

    Where "fused" and "hybrid" both could, what `tune` measured on that GPU decides. A weight whose
    rows do not follow each other in memory is served by "hybrid" where this says "fused".

    Dtype and depth are the hidden states'; `with_top` asks for the likeliest class of a row, and
    `is_adapted` for a head with a low-rank part.
    """
    if not kernels_serve(device, dtype):
        return "reference"
    device = where_it_runs(device)
    fits = dtype in fused.DTYPES and depth % 8 == 0 and not with_top and not is_adapted
    return tuned(device, ENGINE, "fused") if fits and gpu(device).is_hopper else "hybrid"


def check_range(target: Tensor, vocab: int, ignore_index: int | None) -> None:
    """Refuse targets that are no column: at once on a CPU, by a device assertion on CUDA."""
    is_valid = (target >= 0) & (target < vocab)
    if ignore_index is not None:
        is_valid |= target == ignore_index
    if target.device.type == "cuda":
        compat.assert_on_device(
            is_valid.all(),
            f"linear_cross_entropy: a target is outside 0 .. {vocab - 1} and is not ignore_index "
            f"({ignore_index})",
        )
        return
    if not bool(is_valid.all()):
        row = int((~is_valid).nonzero()[0])
        rest = ". Fix the index."
        if ignore_index is not None:
            rest = f" and ignore_index is {ignore_index}. Fix the labels, or pass that value as "
            rest += "ignore_index."
        raise TargetRangeError(
            f"linear_cross_entropy: target holds {int(target[row])} (row {row}); columns run from "
            f"0 to {vocab - 1}{rest}"
        )


class _Call(NamedTuple):
    """What `linear_cross_entropy` is called with."""

    operands: Operands
    knobs: Knobs


class _Gradients(NamedTuple):
    """What `linear_cross_entropy_backward` is called with."""

    grads: RowGradients
    call: _Call
    kept: Kept
    output_mask: tuple[bool, ...]


_CHECKED = ("softcap", "gradient_filter", "workspace", "filter_level", "filter_parts")


def called(*tensors: Any, **settings: Any) -> _Call:
    """Check a call; the dispatcher leaves out settings that equal their defaults.

    A filter that would be wrong or has no engine is off: label smoothing gives every class a
    gradient.
    """
    checked = {name: settings[name] for name in _CHECKED if name in settings}
    require("linear_cross_entropy", supports(*tensors, **checked))
    knobs = Knobs(**settings)
    if knobs.with_logit_sum or knobs.with_entropy or knobs.with_top:
        knobs = knobs._replace(gradient_filter="exact")
    return _Call(Operands(*tensors), knobs)


def called_back(*tensors: Any, output_mask: list[bool], **settings: Any) -> _Gradients:
    call = called(*tensors[4:-2], **settings)
    trained = zip(output_mask, call.operands.trained, strict=True)
    mask = tuple(needs and part is not None for needs, part in trained)
    return _Gradients(RowGradients(*tensors[:4]), call, Kept(*tensors[-2:]), mask)


def _engine(given: Operands, knobs: Knobs) -> Any:  # a module
    hidden, is_adapted = given.hidden, given.low is not None
    how: dict[str, bool] = {"with_top": knobs.with_top, "is_adapted": is_adapted}
    name = engine_for(hidden.device, hidden.dtype, hidden.shape[-1], **how)
    if name != "fused":
        return hybrid if name == "hybrid" else reference
    return fused if fused.serves(given.weight) else hybrid


def forward(given: _Call) -> tuple[Tensor, ...]:
    (hidden, weight, _, target, *_), knobs = given
    rows = target.numel()
    if rows == 0:
        return fake_forward(given)
    with without_autocast(hidden.device.type):
        flat = given.operands.flat()
        check_range(flat.target, weight.shape[0], knobs.ignore_index)
        found = _engine(flat, knobs).forward(flat, knobs)
    parts = zip(found, knobs.wanted, strict=True)
    return tuple(part.view(target.shape) if wanted else part for part, wanted in parts)


def backward(given: _Gradients) -> tuple[Tensor, ...]:
    grads, (operands, knobs), kept, mask = given
    hidden, rows = operands.hidden, operands.target.numel()
    if rows == 0:
        return as_results(zero_gradients(operands.trained, mask), operands)
    with without_autocast(hidden.device.type):
        asked = zip(grads, knobs.wanted, strict=False)
        grads = RowGradients(*(grad.reshape(rows if wanted else 0) for grad, wanted in asked))
        entropy = kept.entropy.reshape(rows if knobs.with_entropy else 0)
        kept = kept._replace(lse=kept.lse.reshape(rows), entropy=entropy)
        flat = operands.flat()
        engine = _engine(flat, knobs)
        if engine is fused and row_pieces.serves(flat.hidden, flat.weight, knobs):
            engine = row_pieces
        return as_results(engine.backward(grads, flat, kept, knobs, mask), operands)


def zero_gradients(operands: Sequence[Tensor | None], mask: Sequence[bool]) -> list[Tensor | None]:
    """Return the gradients that are asked for where there are no rows."""
    asked = zip(operands, mask, strict=False)
    return [
        torch.zeros_like(tensor) if wanted and tensor is not None else None
        for tensor, wanted in asked
    ]


def as_results(gradients: Sequence[Tensor | None], given: Operands) -> tuple[Tensor, ...]:
    """Return gradients as an op does: each in the shape of its operand, empty ones for None."""
    found: list[Tensor] = []
    for part, of in zip(gradients, given.trained, strict=True):
        if part is None or of is None:
            found.append(given.hidden.new_empty(0))
        else:  # rows are flat in engines
            found.append(part if part.shape == of.shape else part.reshape(of.shape))
    return tuple(found)


def fake_forward(given: _Call) -> tuple[Tensor, ...]:
    (hidden, _, _, target, *_), knobs = given
    check_sizes(given.operands)
    return tuple(Rows.new(hidden, target.shape, knobs))


def fake_backward(given: _Gradients) -> tuple[Tensor, ...]:
    return fake_gradients(given.call.operands, given.output_mask)


def fake_gradients(given: Operands, output_mask: Sequence[bool]) -> tuple[Tensor, ...]:
    """Return empty gradients of what may have one, where they are asked for."""
    hidden = given.hidden

    def empty(of: Tensor | None, is_needed: bool) -> Tensor:
        if of is None or not is_needed:
            return hidden.new_empty(0)
        return of.new_empty(of.shape) if of is hidden or of is given.low else torch.empty_like(of)

    return tuple(map(empty, given.trained, output_mask))


def setup_context(
    ctx: Any,
    inputs: tuple[Any, ...],
    keyword_only_inputs: dict[str, Any],
    output: tuple[Tensor, ...],
) -> None:
    _, lse, _, entropy, top = output
    ctx.mark_non_differentiable(top)
    ctx.save_for_backward(*inputs, lse, entropy)
    ctx.settings = keyword_only_inputs


def link(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    mask = list(ctx.needs_input_grad[:3])
    gradients = linear_cross_entropy_backward(
        *grads[:4],  # behind them are indices
        *ctx.saved_tensors,
        **ctx.settings,
        output_mask=mask,
    )
    found = [gradient if wanted else None for gradient, wanted in zip(gradients, mask, strict=True)]
    return (*found, None, None)


refuse_double_backward = library.refusing(
    DoubleBackwardError,
    "linear_cross_entropy: a second derivative of the fused loss was asked for, and the op has "
    "only a first one. Compile with options={'memeff.linear_cross_entropy': 'off'}.",
)

KNOBS = (
    "int? ignore_index, float scale, float softcap, bool with_lse, bool with_logit_sum, "
    "str gradient_filter, int workspace, bool with_entropy=False, bool with_top=False, "
    'float filter_level=0.0, str filter_parts="both", bool sort_vocabulary=False'
)
RESULTS = "(Tensor nll, Tensor lse, Tensor logit_sum, Tensor entropy, Tensor top)"
linear_cross_entropy = library.op(
    "linear_cross_entropy(Tensor hidden, Tensor weight, Tensor? bias, Tensor target, "
    f"Tensor? column_weight, *, {KNOBS}) -> {RESULTS}",
    *library.taking(called, forward, fake_forward),
    backward=link,
    setup_context=setup_context,
)
linear_cross_entropy_backward = library.op(
    "linear_cross_entropy_backward(Tensor grad_nll, Tensor grad_lse, Tensor grad_logit_sum, "
    "Tensor grad_entropy, Tensor hidden, Tensor weight, Tensor? bias, Tensor target, "
    "Tensor? column_weight, Tensor lse, Tensor entropy, "
    f"*, {KNOBS}, bool[3] output_mask) -> (Tensor, Tensor, Tensor)",
    *library.taking(called_back, backward, fake_backward),
    backward=refuse_double_backward,
)
