"""memeff::linear_cross_entropy and its backward: schemas, validation, engines, fakes, autograd.

The op is functional, opaque to Inductor and unaffected by autocast. It saves its inputs, one
lse per row and, if asked for, one entropy, and what a filter decided; backward is an op of its own
that recomputes products piece by piece.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ... import compat
from ...errors import DoubleBackwardError, TargetRangeError, UnsupportedInputError
from ..checks import FLOATING, INDICES, short, two_devices, two_dtypes, unfloating, unplain
from ..device import gpu, kernels_serve, tuned, where_it_runs, without_autocast
from . import filters, fused, hybrid, reference, row_pieces, sorting
from .pieces import Knobs, RowGradients, Rows
from .shapes import is_minimal

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

_KNOBS = (
    "int? ignore_index, float scale, float softcap, bool with_lse, bool with_logit_sum, "
    "str gradient_filter, int workspace, bool with_entropy=False, bool with_top=False, "
    'float filter_level=0.0, str filter_parts="both", bool sort_vocabulary=False'
)
_LIBRARY = torch.library.Library("memeff", "FRAGMENT")
_LIBRARY.define(
    "linear_cross_entropy(Tensor hidden, Tensor weight, Tensor? bias, Tensor target, "
    f"Tensor? column_weight, *, {_KNOBS}) -> "
    "(Tensor nll, Tensor lse, Tensor logit_sum, Tensor entropy, Tensor top, "
    "Tensor dropped, Tensor active, Tensor row_order)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_LIBRARY.define(
    "linear_cross_entropy_backward(Tensor grad_nll, Tensor grad_lse, Tensor grad_logit_sum, "
    "Tensor grad_entropy, Tensor hidden, Tensor weight, Tensor? bias, Tensor target, "
    "Tensor? column_weight, Tensor lse, Tensor entropy, Tensor active, Tensor row_order, "
    f"*, {_KNOBS}, bool[3] output_mask) -> (Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def supports(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    column_weight: Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
    softcap: float = 0.0,
    gradient_filter: str = "exact",
    workspace: int = 0,
    filter_level: float = 0.0,
    filter_parts: str = "both",
) -> str | None:
    """Say in a sentence why the op cannot serve these inputs, or return None if it can.

    Reads dtypes, devices, layouts and sizes, never values, and adds no guard: sizes that are
    symbols are left to the op's own checks. Real and fake tensors both do.

    Args:
        hidden: (..., D).
        weight: (V, D).
        bias: (V,) or None.
        target: (...), the leading dimensions of hidden.
        column_weight: (V,) or None.
        dtype: dtype that the caller will cast hidden, weight and bias to, if it will.
        softcap, gradient_filter, workspace, filter_level, filter_parts: as for the op.

    Example: supports(torch.ones(3, 4), torch.ones(5, 4), None, torch.zeros(3).long()) is None.
    """
    return (
        _setting_fault(softcap, workspace)
        or _filter_fault(gradient_filter, filter_level, filter_parts)
        or _layout_fault(hidden, weight, bias, target, column_weight)
        or _dtype_fault(hidden, weight, bias, target, column_weight, dtype)
        or _shape_fault(hidden, weight, bias, target, column_weight)
    )


def _setting_fault(softcap: float, workspace: int) -> str | None:
    if not softcap >= 0:
        return f"softcap is {softcap}; it must be positive, or 0 for none."
    if isinstance(workspace, int) and workspace < 0:
        return f"workspace is {workspace} bytes; it must be positive, or 0 for automatic."
    return None


def _filter_fault(gradient_filter: str, level: float, parts: str) -> str | None:
    if gradient_filter not in GRADIENT_FILTERS:
        return (
            f"gradient_filter is {gradient_filter!r}; known filters are "
            f"{', '.join(GRADIENT_FILTERS)}. Use 'exact'."
        )
    if not (level >= 0 and math.isfinite(level)):
        return f"filter_level is {level}; it must be positive and finite, or 0 for automatic."
    if parts not in FILTER_PARTS:
        return f"filter_parts is {parts!r}; known parts are {', '.join(FILTER_PARTS)}."
    return None


def _layout_fault(*tensors: Tensor | None) -> str | None:
    hidden = tensors[0]
    assert hidden is not None
    for name, tensor in zip(_NAMES, tensors, strict=True):
        if tensor is None:
            continue
        sentence = unplain(name, tensor) or two_devices(name, tensor, "hidden", hidden)
        if sentence is not None:
            return sentence
    return None


_NAMES = ("hidden", "weight", "bias", "target", "column_weight")


def _dtype_fault(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    column_weight: Tensor | None,
    dtype: torch.dtype | None,
) -> str | None:
    floating = {"hidden": hidden, "weight": weight, "bias": bias}
    for name, tensor in floating.items():
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
    return None


def _shape_fault(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    column_weight: Tensor | None,
) -> str | None:
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
    vocab, depth = weight.shape
    for vector, name in ((bias, "bias"), (column_weight, "column_weight")):
        if vector is not None and vector.dim() != 1:
            return f"{name} has {vector.dim()} dimensions; (V,) is needed."
    for seen, needed, sentence in _size_pairs(hidden, weight, bias, target, column_weight):
        if isinstance(seen, int) and isinstance(needed, int) and seen != needed:
            return sentence
    if isinstance(vocab, int) and vocab == 0:
        return f"weight has shape (0, {depth}); a head needs at least one column."
    return None


def _size_pairs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    column_weight: Tensor | None,
) -> list[tuple[Any, Any, str]]:
    """List the sizes that must agree, with the sentence for when they do not."""
    vocab, depth = weight.shape
    pairs = [
        (
            hidden.shape[-1],
            depth,
            f"hidden has {hidden.shape[-1]} features and weight {depth}; hidden must be (..., D) "
            "and weight (V, D).",
        )
    ]
    for seen, needed in zip(target.shape, hidden.shape[:-1], strict=True):
        sentence = (
            f"target has shape {tuple(target.shape)} and hidden {tuple(hidden.shape)}; target must "
            "have the leading dimensions of hidden."
        )
        pairs.append((seen, needed, sentence))
    for vector, name in ((bias, "bias"), (column_weight, "column_weight")):
        if vector is not None:
            sentence = f"{name} has {vector.shape[0]} elements and weight {vocab} rows."
            pairs.append((vector.shape[0], vocab, sentence))
    return pairs


def check_sizes(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    column_weight: Tensor | None,
) -> None:
    """Refuse sizes that do not agree, symbols among them."""
    for seen, needed, sentence in _size_pairs(hidden, weight, bias, target, column_weight):
        torch._check(seen == needed, lambda sentence=sentence: f"linear_cross_entropy: {sentence}")


def _require_support(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    column_weight: Tensor | None,
    settings: dict[str, Any],
) -> None:
    knobs = _knobs(settings)
    sentence = supports(
        hidden,
        weight,
        bias,
        target,
        column_weight,
        softcap=knobs.softcap,
        gradient_filter=settings.get("gradient_filter", "exact"),
        workspace=knobs.workspace,
        filter_level=knobs.filter_level,
        filter_parts=knobs.filter_parts,
    )
    if sentence is not None:
        raise UnsupportedInputError(f"linear_cross_entropy: {sentence}")


def _knobs(settings: dict[str, Any]) -> Knobs:
    """Read a call's settings; the dispatcher leaves out those that equal their defaults.

    A filter that would be wrong or has no engine or room is off: label smoothing gives every tile
    a gradient.
    """
    knobs = Knobs(**{name: settings[name] for name in Knobs._fields if name in settings})
    has_filter = not (knobs.with_logit_sum or knobs.with_entropy or knobs.with_top)
    if not has_filter or is_minimal(knobs.workspace):
        return knobs._replace(gradient_filter="exact")
    return knobs


def engine_for(
    device: torch.device, dtype: torch.dtype, depth: int = 8, *, with_top: bool = False
) -> str:
    """Name the engine that serves tensors of this device, dtype and depth: a key of `ENGINES`.

    Where "fused" and "hybrid" both could, what `tune` measured on that GPU decides. A weight whose
    rows do not follow each other in memory is served by "hybrid" where this says "fused".

    Args:
        device, dtype, depth: of the hidden states.
        with_top: whether the likeliest class of each row is asked for.
    """
    if not kernels_serve(device, dtype):
        return "reference"
    device = where_it_runs(device)
    fits = dtype in fused.DTYPES and depth % 8 == 0 and not with_top
    return tuned(device, ENGINE, "fused") if fits and gpu(device).is_hopper else "hybrid"


def _engine(hidden: Tensor, weight: Tensor, knobs: Knobs) -> str:
    name = engine_for(hidden.device, hidden.dtype, hidden.shape[-1], with_top=knobs.with_top)
    return "hybrid" if name == "fused" and not fused.serves(weight) else name


def _sorts(knobs: Knobs) -> bool:
    return knobs.sort_vocabulary and knobs.gradient_filter != "exact"


def _found_shapes(hidden: Tensor, vocab: int, rows: int, knobs: Knobs) -> tuple[Any, ...]:
    """Return the shapes of what a filter decides; engines other than "fused" have no filter."""
    has_filter = engine_for(hidden.device, hidden.dtype, hidden.shape[-1]) == "fused"
    return filters.found_shapes(rows, vocab, knobs.gradient_filter if has_filter else "exact")


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
        raise TargetRangeError(
            f"linear_cross_entropy: target holds {int(target[row])} (row {row}); columns run from "
            f"0 to {vocab - 1} and ignore_index is {ignore_index}. Fix the labels, or pass that "
            "value as ignore_index."
        )


def _forward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    column_weight: Tensor | None,
    **settings: Any,  # noqa: ANN401
) -> tuple[Tensor, ...]:
    _require_support(hidden, weight, bias, target, column_weight, settings)
    knobs, rows = _knobs(settings), target.numel()
    if rows == 0:
        return _fake_forward(hidden, weight, bias, target, column_weight, **settings)
    flat_target = target.reshape(rows)
    with without_autocast(hidden.device.type):
        check_range(flat_target, weight.shape[0], knobs.ignore_index)
        flat_hidden = hidden.reshape(rows, hidden.shape[-1])
        name = _engine(flat_hidden, weight, knobs)
        operands = (flat_hidden, weight, bias, flat_target, column_weight, knobs)
        if name == "fused":
            found, left_out = (sorting if _sorts(knobs) else fused).forward(*operands)
        else:
            found = (hybrid if name == "hybrid" else reference).forward(*operands)
            shapes = _found_shapes(hidden, weight.shape[0], rows, knobs)
            left_out = filters.nothing_left_out(hidden, shapes)
    parts = zip(found, knobs.wanted, strict=True)
    shaped = (part.view(target.shape) if wanted else part for part, wanted in parts)
    dropped = left_out.dropped.view(target.shape) if left_out.dropped.numel() else left_out.dropped
    return *shaped, dropped, left_out.active, left_out.row_order


def _backward(
    grad_nll: Tensor,
    grad_lse: Tensor,
    grad_logit_sum: Tensor,
    grad_entropy: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    column_weight: Tensor | None,
    lse: Tensor,
    entropy: Tensor,
    active: Tensor,
    row_order: Tensor,
    *,
    output_mask: list[bool],
    **settings: Any,  # noqa: ANN401
) -> tuple[Tensor, Tensor, Tensor]:
    _require_support(hidden, weight, bias, target, column_weight, settings)
    knobs, rows = _knobs(settings), target.numel()
    needs_hidden, needs_weight, needs_bias = output_mask
    mask = (needs_hidden, needs_weight, needs_bias and bias is not None)
    if rows == 0:
        zeros = (hidden, weight, bias)
        gradients: Any = [
            torch.zeros_like(tensor) if wanted and tensor is not None else None
            for tensor, wanted in zip(zeros, mask, strict=True)
        ]
    else:
        with without_autocast(hidden.device.type):
            grads = RowGradients(
                grad_nll.reshape(rows),
                grad_lse.reshape(rows),
                grad_logit_sum.reshape(rows if knobs.with_logit_sum else 0),
                grad_entropy.reshape(rows if knobs.with_entropy else 0),
            )
            flat_hidden = hidden.reshape(rows, hidden.shape[-1])
            operands = (flat_hidden, weight, bias, target.reshape(rows), column_weight)
            of_rows = lse.reshape(rows), entropy.reshape(rows if knobs.with_entropy else 0)
            name = _engine(flat_hidden, weight, knobs)
            if name == "fused":
                left_out = filters.LeftOut(lse.new_empty(0), active, row_order)
                engine: Any = sorting if _sorts(knobs) else fused
                if row_pieces.serves(flat_hidden, knobs):
                    engine = row_pieces
                gradients = engine.backward(grads, *operands, *of_rows, left_out, knobs, mask)
            else:
                engine = hybrid if name == "hybrid" else reference
                gradients = engine.backward(grads, *operands, *of_rows, knobs, mask)
    grad_hidden, grad_weight, grad_bias = (
        hidden.new_empty(0) if gradient is None else gradient for gradient in gradients
    )
    if needs_hidden:
        grad_hidden = grad_hidden.reshape(hidden.shape)
    return grad_hidden, grad_weight, grad_bias


def _fake_forward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    column_weight: Tensor | None,
    **settings: Any,  # noqa: ANN401
) -> tuple[Tensor, ...]:
    _require_support(hidden, weight, bias, target, column_weight, settings)
    check_sizes(hidden, weight, bias, target, column_weight)
    wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    knobs = _knobs(settings)

    def rows(dtype: torch.dtype, wanted: bool = True) -> Tensor:
        return hidden.new_empty(target.shape if wanted else (0,), dtype=dtype)

    found = Rows(
        nll=rows(wide),
        lse=rows(wide),
        logit_sum=rows(wide, knobs.with_logit_sum),
        entropy=rows(wide, knobs.with_entropy),
        top=rows(torch.int64, knobs.with_top),
    )
    shapes = _found_shapes(hidden, weight.shape[0], target.numel(), knobs)
    left_out = [
        hidden.new_empty(shape, dtype=dtype)
        for shape, dtype in zip(shapes, filters.DTYPES, strict=True)
    ]
    if shapes[0] != (0,):
        left_out[0] = rows(torch.float32)
    return *found, *left_out


def _fake_backward(
    grad_nll: Tensor,
    grad_lse: Tensor,
    grad_logit_sum: Tensor,
    grad_entropy: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    column_weight: Tensor | None,
    lse: Tensor,
    entropy: Tensor,
    active: Tensor,
    row_order: Tensor,
    *,
    output_mask: list[bool],
    **settings: Any,  # noqa: ANN401
) -> tuple[Tensor, Tensor, Tensor]:
    del grad_nll, grad_lse, grad_logit_sum, grad_entropy, lse, entropy, active, row_order
    _require_support(hidden, weight, bias, target, column_weight, settings)
    needs_hidden, needs_weight, needs_bias = output_mask
    nothing = [hidden.new_empty(0) for _ in range(3)]
    return (
        hidden.new_empty(hidden.shape) if needs_hidden else nothing[0],
        torch.empty_like(weight) if needs_weight else nothing[1],
        torch.empty_like(bias) if needs_bias and bias is not None else nothing[2],
    )


def _setup_context(
    ctx: Any,  # noqa: ANN401
    inputs: tuple[Any, ...],
    keyword_only_inputs: dict[str, Any],
    output: tuple[Tensor, ...],
) -> None:
    hidden, weight, bias, target, column_weight = inputs
    _, lse, _, entropy, top, dropped, active, row_order = output
    ctx.mark_non_differentiable(top, dropped, active, row_order)
    saved = (hidden, weight, bias, target, column_weight, lse, entropy, active, row_order)
    ctx.save_for_backward(*saved)
    ctx.settings = keyword_only_inputs


def _link(
    ctx: Any,  # noqa: ANN401
    grad_nll: Tensor,
    grad_lse: Tensor,
    grad_logit_sum: Tensor,
    grad_entropy: Tensor,
    *without_gradient: Tensor | None,
) -> tuple[Tensor | None, ...]:
    del without_gradient  # indices, maps and measurements
    mask = list(ctx.needs_input_grad[:3])
    gradients = torch.ops.memeff.linear_cross_entropy_backward.default(
        grad_nll,
        grad_lse,
        grad_logit_sum,
        grad_entropy,
        *ctx.saved_tensors,
        **ctx.settings,
        output_mask=mask,
    )
    found = [gradient if wanted else None for gradient, wanted in zip(gradients, mask, strict=True)]
    return (*found, None, None)


def _refuse_double_backward(ctx: Any, *gradients: Tensor) -> None:  # noqa: ANN401
    raise DoubleBackwardError(
        "linear_cross_entropy: a second derivative of the fused loss was asked for, and the op has "
        "only a first one. Compile with options={'memeff.linear_cross_entropy': 'off'}."
    )


_LIBRARY.impl("linear_cross_entropy", _forward, "CompositeExplicitAutograd")
_LIBRARY.impl("linear_cross_entropy_backward", _backward, "CompositeExplicitAutograd")
torch.library.register_fake("memeff::linear_cross_entropy", _fake_forward, lib=_LIBRARY)
torch.library.register_fake("memeff::linear_cross_entropy_backward", _fake_backward, lib=_LIBRARY)
torch.library.register_autograd(
    "memeff::linear_cross_entropy", _link, setup_context=_setup_context, lib=_LIBRARY
)
torch.library.register_autograd(
    "memeff::linear_cross_entropy_backward", _refuse_double_backward, lib=_LIBRARY
)

linear_cross_entropy = torch.ops.memeff.linear_cross_entropy.default
linear_cross_entropy_backward = torch.ops.memeff.linear_cross_entropy_backward.default
