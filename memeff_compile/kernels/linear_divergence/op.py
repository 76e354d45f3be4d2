"""memeff::linear_divergence and related ops: schemas, validation, fake tensors, autograd, choice of
implementation.

- `linear_divergence` returns, for each row (token), the divergence between the student's and the
  teacher's softmax. Its backward pass computes the logits again.
- `linear_divergence_total` returns the weighted sum of the rows' divergences, and the sum's
  gradients.
- `linear_divergence_classes` returns log-probabilities (or logits) of k listed classes of each row,
  (..., k). The op is for a teacher whose probabilities are known only for these classes. Its
  backward pass computes the logits again.

The forward pass of `linear_divergence_total` also computes its operands' gradients. The backward
pass of this op only multiplies these gradients by the gradient that autograd passes in for the op's
sum. The product is written in place if no other code can read the gradients. The ops compute no
gradient for the teacher. The three ops do not change their inputs; Inductor treats the ops as
opaque, and autocast does not affect them.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import compat
from ...errors import DoubleBackwardError
from .. import library
from .._head_loss.scaling import asked, at_arguments, total_joins
from ..checks import (
    require,
    require_classes,
    two_devices,
    two_dtypes,
    unfloating,
    unplain,
    wide,
)
from ..device import kernels_serve, on_device, without_autocast
from .call import ClassRequest, Coefficients, Found, Request

ENGINES = {
    "kept_logits": (
        "library products in fp32 and two Triton passes over the logits of a block of rows "
        "(CUDA, compute capability 8.0 or later; bf16, fp16, fp32)"
    ),
    "reference": "plain PyTorch, by blocks of rows (any device, also fp64)",
}
_COUNT = len(Coefficients._fields)
_TRAINED = (0, 1, 2)  # hidden, weight and bias, among the arguments of every op
MOST_CLASSES = 1024
"""Classes of a row that `linear_divergence_classes` serves: a program has all of them at once."""


class _Call(NamedTuple):
    """The arguments of `linear_divergence`, in the order of its schema."""

    hidden: Tensor  # (..., D)
    weight: Tensor  # (V, D)
    bias: Tensor | None  # (V,)
    teacher: Tensor  # (..., K), or (..., V)
    teacher_weight: Tensor | None  # (V, K)
    teacher_bias: Tensor | None  # (V,)
    coefficients: Sequence[float]
    scale: float
    teacher_scale: float
    workspace: int

    def request(self) -> Request:
        """Return the arguments with all dimensions of tokens, such as batch and sequence, flattened
        to one."""
        hidden, teacher = self.hidden, self.teacher
        rows = math.prod(hidden.shape[:-1])
        return Request(
            hidden.reshape(rows, hidden.shape[-1]),
            *(self.weight, self.bias),
            teacher.reshape(rows, teacher.shape[-1]),
            *(self.teacher_weight, self.teacher_bias),
            Coefficients(*self.coefficients).settled(),
            self.scale,
            self.teacher_scale,
            self.workspace,
        )


def supports(
    hidden: Tensor,  # (..., D)
    weight: Tensor,  # (V, D)
    bias: Tensor | None,  # (V,) or None
    teacher: Tensor,  # (..., K), or the teacher's logits, (..., V), if it has no weight
    teacher_weight: Tensor | None,  # (V, K) or None
    teacher_bias: Tensor | None,  # (V,) or None
    *,
    coefficients: Sequence[float] = (0.0,) * _COUNT,  # as in `Coefficients`
    scale: float = 1.0,
    teacher_scale: float = 1.0,
    workspace: int = 0,  # in bytes, 0 = automatic
) -> str | None:
    """Return the reason why the op does not support the given inputs, or None if it does."""
    given = _Call(
        *(hidden, weight, bias, teacher, teacher_weight, teacher_bias),
        *(coefficients, scale, teacher_scale, workspace),
    )
    return _setting_fault(given) or _tensor_fault(given) or _shape_fault(given)


def _setting_fault(given: _Call) -> str | None:
    if len(given.coefficients) != _COUNT or not all(map(math.isfinite, given.coefficients)):
        return f"coefficients are {list(given.coefficients)}; {_COUNT} finite numbers are needed."
    if not 0 <= given.coefficients[-1] <= 1:
        share = given.coefficients[-1]
        return f"the teacher's share in the mixture is {share}; it must be between 0 and 1."
    for name in ("scale", "teacher_scale"):
        value = getattr(given, name)
        if not math.isfinite(value):
            return f"{name} is {value}; it must be finite."
    if isinstance(given.workspace, int) and given.workspace < 0:
        return f"workspace is {given.workspace} bytes; it must be positive, or 0 for automatic."
    return None


def _tensor_fault(given: _Call) -> str | None:
    named = given._asdict()
    for name in _Call._fields[:6]:
        tensor = named[name]
        if tensor is None:
            continue
        sentence = unplain(name, tensor) or unfloating(name, tensor)
        sentence = sentence or two_devices(name, tensor, "hidden", given.hidden)
        if sentence is None and name in ("weight", "bias"):
            sentence = two_dtypes(name, tensor.dtype, "hidden", given.hidden.dtype)
        if sentence is None and name in ("teacher_weight", "teacher_bias"):
            sentence = two_dtypes(name, tensor.dtype, "teacher", given.teacher.dtype)
        if sentence is not None:
            return sentence
    if given.teacher_bias is not None and given.teacher_weight is None:
        return "teacher_bias is given without teacher_weight. Add it to the teacher's logits."
    return None


def _shape_fault(given: _Call) -> str | None:
    hidden, weight, teacher = given.hidden, given.weight, given.teacher
    if hidden.dim() == 0 or weight.dim() != 2 or teacher.dim() == 0:
        dims = f"{hidden.dim()}, {weight.dim()} and {teacher.dim()}"
        return f"hidden, weight and teacher have {dims} dimensions; (..., D), (V, D), (..., K)."
    if _differ(hidden.shape[-1], weight.shape[1]):
        return f"hidden has {hidden.shape[-1]} features and weight {weight.shape[1]}."
    if teacher.dim() != hidden.dim() or any(map(_differ, teacher.shape[:-1], hidden.shape[:-1])):
        rows = f"{tuple(teacher.shape[:-1])} and hidden {tuple(hidden.shape[:-1])}"
        return f"teacher has rows {rows}; student and teacher need the same rows."
    of_teacher = given.teacher_weight
    if of_teacher is None:
        classes = teacher.shape[-1]
    elif of_teacher.dim() != 2 or _differ(of_teacher.shape[1], teacher.shape[-1]):
        shape = tuple(of_teacher.shape)
        return f"teacher_weight has shape {shape} and teacher {teacher.shape[-1]} features."
    else:
        classes = of_teacher.shape[0]
    if _differ(classes, weight.shape[0]):
        return (
            f"the teacher has {classes} classes and the student {weight.shape[0]}; cut the larger "
            "vocabulary, as in weight[:V], so that both have the same classes."
        )
    for name, bias in (("bias", given.bias), ("teacher_bias", given.teacher_bias)):
        if bias is not None and (bias.dim() != 1 or _differ(bias.shape[0], weight.shape[0])):
            return f"{name} has shape {tuple(bias.shape)}; ({weight.shape[0]},) is needed."
    return None


def _differ(a: Any, b: Any) -> bool:
    """Return whether two sizes are known to differ; symbolic sizes are checked when the op runs."""
    return isinstance(a, int) and isinstance(b, int) and a != b


def engine_for(device: torch.device, dtype: torch.dtype, teacher: torch.dtype | None = None) -> str:
    """Return the name of the implementation for a student and a teacher of the given dtypes."""
    is_served = kernels_serve(device, dtype) and kernels_serve(device, teacher or dtype)
    return "kept_logits" if is_served else "reference"


@compat.constant_in_traces
def makes_gradients_in_forward(dtype: torch.dtype) -> bool:
    """Return whether the forward pass of a scalar loss also computes the loss's gradients.

    For fp16, the result is false, because the range of fp16 is too small for gradients that are
    scaled afterwards.
    """
    return dtype != torch.float16


def _run(given: _Call, factors: Tensor | None, mask: Sequence[bool]) -> Found:
    request = given.request()
    if request.rows == 0:
        return _of_no_rows(request, mask)
    engine = engine_for(request.hidden.device, request.hidden.dtype, request.teacher.dtype)
    module = importlib.import_module(f".{engine}", __package__)
    with without_autocast(request.hidden.device.type), on_device(request.hidden):
        found: Found = module.run(request, factors, mask)
    return found


def _of_no_rows(request: Request, mask: Sequence[bool]) -> Found:
    parts = zip((request.hidden, request.weight, request.bias), mask, strict=True)
    gradients = (
        torch.zeros_like(part) if each and part is not None else None for part, each in parts
    )
    return Found(request.hidden.new_zeros(0, dtype=request.wide), *gradients)


def _forward(given: _Call) -> Tensor:
    require("linear_divergence", _fault(given))
    return _run(given, None, (False, False, False)).rows.view(given.hidden.shape[:-1])


def _fake_forward(given: _Call) -> Tensor:
    require("linear_divergence", _fault(given))
    return given.hidden.new_empty(given.hidden.shape[:-1], dtype=wide(given.hidden.dtype))


def _fault(given: _Call) -> str | None:
    return _setting_fault(given) or _tensor_fault(given) or _shape_fault(given)


class _Backward(NamedTuple):
    """The arguments of `linear_divergence_backward`."""

    grad_rows: Tensor
    call: _Call
    output_mask: Sequence[bool]


def _backward(given: _Backward) -> tuple[Tensor, ...]:
    call = given.call
    factors = given.grad_rows.reshape(math.prod(call.hidden.shape[:-1]))
    return _as_results(_run(call, factors, given.output_mask), call)


def _as_results(found: Found, call: _Call | _Classes) -> tuple[Tensor, ...]:
    """Return gradients in the shapes of their operands, and an empty tensor (0,) for each gradient
    that was not computed."""
    parts = zip(found[1:], call[:3], strict=True)
    return tuple(
        call.hidden.new_empty(0) if gradient is None or part is None else gradient.view(part.shape)
        for gradient, part in parts
    )


def _fake_gradients(call: _Call | _Classes, mask: Sequence[bool]) -> tuple[Tensor, ...]:
    return tuple(
        call.hidden.new_empty(part.shape if each and part is not None else (0,), dtype=part.dtype)
        if part is not None
        else call.hidden.new_empty(0)
        for part, each in zip(call[:3], mask, strict=True)
    )


def _fake_backward(given: _Backward) -> tuple[Tensor, ...]:
    return _fake_gradients(given.call, given.output_mask)


class _Total(NamedTuple):
    """The arguments of `linear_divergence_total`."""

    call: _Call
    row_weight: Tensor | None
    output_mask: Sequence[bool]


def _total(given: _Total) -> tuple[Tensor, ...]:
    call, weight = given.call, given.row_weight
    require("linear_divergence", _fault(call) or _weight_fault(given))
    rows, dtype = math.prod(call.hidden.shape[:-1]), wide(call.hidden.dtype)
    factors = call.hidden.new_ones(rows, dtype=dtype)
    if weight is not None:
        factors = weight.reshape(rows).to(dtype)
    found = _run(call, factors if any(given.output_mask) else None, given.output_mask)
    total = (found.rows * factors).masked_fill_(factors == 0, 0).sum()
    return (total, *_as_results(found, call))


def _fake_total(given: _Total) -> tuple[Tensor, ...]:
    call = given.call
    require("linear_divergence", _fault(call) or _weight_fault(given))
    total = call.hidden.new_empty((), dtype=wide(call.hidden.dtype))
    return (total, *_fake_gradients(call, given.output_mask))


def _weight_fault(given: _Total) -> str | None:
    weight, rows = given.row_weight, given.call.hidden.shape[:-1]
    if weight is None:
        return None
    if weight.dim() != len(rows) or any(map(_differ, weight.shape, rows)):
        return f"row_weight has shape {tuple(weight.shape)}; {tuple(rows)} is needed."
    return None


def _refuse_others(needs_grad: Sequence[bool]) -> None:
    """Raise an error if an operand that is not the student's requires a gradient."""
    names = (*_Call._fields[:6], "row_weight")
    trained = [name for name, needs in zip(names, needs_grad, strict=False) if needs]
    others = [name for name in trained if name not in names[:3]]
    if others:
        sentence = f"{others[0]} requires a gradient, which the op does not give. Detach it, or "
        require("linear_divergence", f"{sentence}compute it under torch.no_grad().")


def _setup(
    ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Tensor
) -> None:
    _refuse_others(ctx.needs_input_grad)
    ctx.save_for_backward(*inputs)
    ctx.settings = keyword_only_inputs


def _link(ctx: Any, grad_rows: Tensor) -> tuple[Tensor | None, ...]:
    mask, settings = asked(ctx, _TRAINED), ctx.settings
    found = linear_divergence_backward(grad_rows, *ctx.saved_tensors, **settings, output_mask=mask)
    return at_arguments(ctx, _TRAINED, found, mask)


_REFUSAL = (
    "linear_divergence: a second derivative of the fused divergence was asked for, and the op has "
    "only a first one. Compile with options={'memeff.divergence': 'off'}."
)
_refuse = library.refusing(DoubleBackwardError, _REFUSAL)
_setup_scaling, _link_total = total_joins(_TRAINED, _REFUSAL)


def _setup_total(
    ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any
) -> None:
    _refuse_others(ctx.needs_input_grad)
    _setup_scaling(ctx, inputs, keyword_only_inputs, output)


class _Classes(NamedTuple):
    """The arguments of `linear_divergence_classes`."""

    hidden: Tensor  # (..., D)
    weight: Tensor  # (V, D)
    bias: Tensor | None  # (V,)
    chosen: Tensor  # (..., k), the index
    is_normalised: bool
    scale: float
    workspace: int


def supports_classes(
    hidden: Tensor,  # (..., D)
    weight: Tensor,  # (V, D)
    bias: Tensor | None,  # (V,) or None
    index: Tensor,  # (..., k) int64
    *,
    scale: float = 1.0,
    workspace: int = 0,
) -> str | None:
    """Return the reason why `linear_divergence_classes` does not support the given inputs, or None
    if it does.
    """
    return _classes_fault(_Classes(hidden, weight, bias, index, True, scale, workspace))


def _classes_fault(given: _Classes) -> str | None:
    hidden, weight, bias, index, _, scale, workspace = given
    head = _Call(
        *(hidden, weight, bias, hidden, weight, None),
        *((0.0,) * _COUNT, scale, 1.0, workspace),
    )
    sentence = supports(*head[:6], scale=scale, workspace=workspace)
    sentence = sentence or unplain("index", index) or two_devices("index", index, "hidden", hidden)
    if sentence is not None:
        return sentence
    if index.dtype != torch.int64:
        return f"index has dtype {str(index.dtype)[6:]}; int64 is needed."
    rows = hidden.shape[:-1]
    if index.dim() != hidden.dim() or any(map(_differ, index.shape[:-1], rows)):
        return f"index has shape {tuple(index.shape)}; {(*rows, 'k')} is needed, k classes per row."
    count = index.shape[-1]
    if isinstance(count, int) and not 0 < count <= MOST_CLASSES:
        return f"index names {count} classes per row; 1 to {MOST_CLASSES} are supported."
    return None


def _run_classes(given: _Classes, grad: Tensor | None, mask: Sequence[bool]) -> Found:
    hidden, index, rows = given.hidden, given.chosen, math.prod(given.hidden.shape[:-1])
    flat = hidden.reshape(rows, hidden.shape[-1])
    request = ClassRequest(
        *(flat, given.weight, given.bias, index.reshape(rows, index.shape[-1])),
        *(given.is_normalised, given.scale, given.workspace),
    )
    if rows == 0:
        parts = zip(request[:3], mask, strict=True)
        zeros = (torch.zeros_like(x) if each and x is not None else None for x, each in parts)
        return Found(hidden.new_zeros(request.chosen.shape, dtype=request.wide), *zeros)
    engine = engine_for(hidden.device, hidden.dtype)
    module = importlib.import_module(f".{engine}", __package__)
    factors = None if grad is None else grad.reshape(request.chosen.shape)
    with without_autocast(hidden.device.type), on_device(hidden):
        found: Found = module.run_classes(request, factors, mask)
    return found


def _classes(given: _Classes) -> Tensor:
    require("linear_divergence_classes", _classes_fault(given))
    require_classes("linear_divergence_classes", given.chosen, given.weight.shape[0])
    return _run_classes(given, None, (False,) * 3).rows.view(given.chosen.shape)


def _fake_classes(given: _Classes) -> Tensor:
    require("linear_divergence_classes", _classes_fault(given))
    return given.hidden.new_empty(given.chosen.shape, dtype=wide(given.hidden.dtype))


class _ClassesBackward(NamedTuple):
    """The arguments of `linear_divergence_classes_backward`."""

    grad: Tensor
    call: _Classes
    output_mask: Sequence[bool]


def _classes_backward(given: _ClassesBackward) -> tuple[Tensor, ...]:
    return _as_results(_run_classes(given.call, given.grad, given.output_mask), given.call)


def _fake_classes_backward(given: _ClassesBackward) -> tuple[Tensor, ...]:
    return _fake_gradients(given.call, given.output_mask)


def _setup_classes(
    ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Tensor
) -> None:
    ctx.save_for_backward(*inputs)
    ctx.settings = keyword_only_inputs


def _link_classes(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    mask, settings, saved = asked(ctx, _TRAINED), ctx.settings, ctx.saved_tensors
    found = linear_divergence_classes_backward(grad, *saved, **settings, output_mask=mask)
    return at_arguments(ctx, _TRAINED, found, mask)


_OPERANDS = (
    "Tensor hidden, Tensor weight, Tensor? bias, Tensor teacher, Tensor? teacher_weight, "
    "Tensor? teacher_bias"
)
_SETTINGS = "float[] coefficients, float scale, float teacher_scale, int workspace"
_GRADIENTS = "Tensor grad_hidden, Tensor grad_weight, Tensor grad_bias"


def _called(*operands: Any, **settings: Any) -> _Call:
    return _Call(*operands, **settings)


def _called_back(grad_rows: Tensor, *operands: Any, output_mask: Any, **settings: Any) -> _Backward:
    return _Backward(grad_rows, _Call(*operands, **settings), output_mask)


def _called_total(*operands: Any, output_mask: Any, **settings: Any) -> _Total:
    *operands_, row_weight = operands
    return _Total(_Call(*operands_, **settings), row_weight, output_mask)


linear_divergence: Any = library.op(
    f"linear_divergence({_OPERANDS}, *, {_SETTINGS}) -> Tensor",
    *library.taking(_called, _forward, _fake_forward),
    backward=_link,
    setup_context=_setup,
    direct=library.taking(_called, _forward)[0],
)
linear_divergence_backward: Any = library.op(
    f"linear_divergence_backward(Tensor grad_rows, {_OPERANDS}, *, {_SETTINGS}, "
    f"bool[3] output_mask) -> ({_GRADIENTS})",
    *library.taking(_called_back, _backward, _fake_backward),
    backward=_refuse,
    direct=library.taking(_called_back, _backward)[0],
)
linear_divergence_total: Any = library.op(
    f"linear_divergence_total({_OPERANDS}, Tensor? row_weight, *, {_SETTINGS}, "
    f"bool[3] output_mask) -> (Tensor total, {_GRADIENTS})",
    *library.taking(_called_total, _total, _fake_total),
    backward=_link_total,
    setup_context=_setup_total,
    direct=library.taking(_called_total, _total)[0],
)

_HEAD = "Tensor hidden, Tensor weight, Tensor? bias, Tensor index"
_HOW = "bool is_normalised, float scale, int workspace"


def _called_classes(*operands: Any, **settings: Any) -> _Classes:
    return _Classes(*operands, **settings)


def _called_classes_back(
    grad: Tensor, *operands: Any, output_mask: Any, **settings: Any
) -> _ClassesBackward:
    return _ClassesBackward(grad, _Classes(*operands, **settings), output_mask)


linear_divergence_classes: Any = library.op(
    f"linear_divergence_classes({_HEAD}, *, {_HOW}) -> Tensor",
    *library.taking(_called_classes, _classes, _fake_classes),
    backward=_link_classes,
    setup_context=_setup_classes,
    direct=library.taking(_called_classes, _classes)[0],
)
linear_divergence_classes_backward: Any = library.op(
    f"linear_divergence_classes_backward(Tensor grad, {_HEAD}, *, {_HOW}, bool[3] output_mask) "
    f"-> ({_GRADIENTS})",
    *library.taking(_called_classes_back, _classes_backward, _fake_classes_backward),
    backward=_refuse,
    direct=library.taking(_called_classes_back, _classes_backward)[0],
)
