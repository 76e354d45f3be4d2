"""memeff::ternary_linear and its related ops: schemas, validation, choice of implementation, fake
tensors, gradients.

Separate ops quantise activations and weights, so that layers with the same input share the input's
codes. `ternary_linear_product` also takes the unquantised input and weight. The op reads only the
codes, but passes gradients to the unquantised tensors, as a straight-through estimator does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...errors import DoubleBackwardError, UnsupportedInputError
from .. import library
from ..checks import require, short
from ..device import kernels_serve, runs_kernels, starts_early
from . import reference
from .quantizer import KINDS, NO_ENTRY, Entry, Quantizer, words_for
from .shapes import (
    GROUPED_TOKENS,
    MAX_COLUMNS,
    MAX_GROUP,
    multiplies_by_dots,
    quantizes_first,
)

FLOATING = (torch.bfloat16, torch.float16, torch.float32)

ENGINES = {
    "tiles": (
        "2-bit weights unpacked in registers, int8 tensor cores, for up to four tokens integer dot "
        "products, Triton (CUDA, compute capability 8.0 or later)"
    ),
    "reference": "plain PyTorch, piece by piece over the rows of the weight (any device)",
}


class _Linear(NamedTuple):
    """The arguments of `ternary_linear`."""

    x: Tensor
    packed: Sequence[Tensor]
    weight_scale: Sequence[Tensor]
    bias: Sequence[Tensor | None]
    dtype: torch.dtype
    weight_is_step: bool = False
    kind: str = "int8"
    eps: float = 1e-5
    adds_eps: bool = False
    is_step: bool = False
    is_native: bool = False
    up: Tensor | None = None
    norm: Tensor | None = None
    norm_eps: float = 0.0
    added: Tensor | None = None
    is_early: bool = False


class _Product(NamedTuple):
    """The arguments of `ternary_linear_product`."""

    x: Tensor
    weight: Sequence[Tensor]
    codes: Tensor
    scale: Tensor
    sums: Tensor
    packed: Sequence[Tensor]
    weight_scale: Sequence[Tensor]
    bias: Sequence[Tensor]
    biased: Sequence[int]
    dtype: torch.dtype
    is_step: bool = False
    weight_is_step: bool = False


class _Gradients(NamedTuple):
    """The arguments of `ternary_linear_product_backward`, which returns gradients of x, weights and
    biases.

    The field `grad` contains the gradients of the outputs.
    """

    grad: Sequence[Tensor]
    codes: Tensor
    scale: Tensor
    packed: Sequence[Tensor]
    weight_scale: Sequence[Tensor]
    columns: int
    is_step: bool
    weight_is_step: bool
    of_x: bool
    of_weight: Sequence[bool]
    of_bias: Sequence[bool]


def supports(x: Tensor, weight: Tensor | None, bias: Tensor | None = None) -> str | None:
    """Return a sentence that says why the op cannot multiply x (..., K) by the weight, or None if
    it can.

    The weight (N, K) is None if only the packed weight exists. The bias (N,) may be None.
    """
    given = [("x", x, 1), ("weight", weight, 2), ("bias", bias, 1)]
    for name, tensor, rank in given:
        if tensor is None:
            continue
        if tensor.layout != torch.strided or tensor.is_quantized:
            return f"{name} is no plain strided tensor; densify or dequantise it."
        if tensor.dtype not in FLOATING:
            kind = short(tensor.dtype)
            return f"{name} has dtype {kind}; bfloat16, float16 or float32 is needed. Cast it."
        if tensor.device != x.device:
            return f"x is on {x.device} and {name} on {tensor.device}; move them to one device."
        if tensor.dim() < rank or (rank != tensor.dim() and name != "x"):
            return f"{name} has {tensor.dim()} dimensions; {rank} is needed."
    if weight is not None and x.shape[-1] != weight.shape[1]:
        return f"x has {x.shape[-1]} columns and the weight {weight.shape[1]}."
    if bias is not None and weight is not None and bias.shape[0] != weight.shape[0]:
        return f"the bias has {bias.shape[0]} elements and the weight {weight.shape[0]} rows."
    columns = x.shape[-1]
    if isinstance(columns, int) and not 0 < columns <= MAX_COLUMNS:
        return f"x has {columns} columns; 1 to {MAX_COLUMNS} are served."
    return None


def _unlike_tokens(x: Tensor, kind: str) -> str | None:
    if kind not in KINDS:
        return f"the kind is {kind!r}; one of {', '.join(KINDS)} is needed."
    return supports(x, None)


def _unlike_packed(packed: Tensor, scale: Tensor, like: Tensor) -> str | None:
    if packed.dtype != torch.int32 or packed.dim() != 2:
        return (
            f"packed is {packed.dtype} with {packed.dim()} dimensions; int32 of (N, K / 16), as "
            "ternary_linear_pack makes it, is needed."
        )
    columns, found = like.shape[-1], packed.shape[1]
    if found != words_for(columns):
        needed = f"for {columns} columns {words_for(columns)} are needed."
        return f"packed has {found} words in a row; {needed}"
    if scale.numel() != 1 or not scale.dtype.is_floating_point:
        return (
            f"the scale of a weight has {scale.numel()} elements of {scale.dtype}; one floating "
            "element is needed."
        )
    for name, tensor in (("packed", packed), ("its scale", scale)):
        if tensor.device != like.device:
            return f"x is on {like.device} and {name} on {tensor.device}; move them to one device."
    return None


def engine_for(device: torch.device, dtype: torch.dtype) -> str:
    """Return the name of the implementation, a key of `ENGINES`, for a given device and dtype."""
    return "tiles" if kernels_serve(device, dtype) else "reference"


@lru_cache(maxsize=64)
def _engine_of(index: int) -> ModuleType:
    if runs_kernels(index):
        from . import tiles

        return tiles
    return reference


def _engine(tensor: Tensor) -> ModuleType:
    """Return the module of the implementation that computes for a tensor."""
    return _engine_of(tensor.get_device()) if tensor.is_cuda else reference


def _pack(weight: Tensor, scale: Tensor, is_step: bool = False, is_native: bool = False) -> Tensor:
    require("ternary_linear_pack", _unlike_weight(weight, scale))
    return _checked_pack(weight, scale, is_step, is_native)


def _checked_pack(
    weight: Tensor, scale: Tensor, is_step: bool = False, is_native: bool = False
) -> Tensor:
    if weight.numel() == 0:
        return _fake_pack(weight, scale)
    found: Tensor = _engine(weight).pack(weight, scale, is_step=is_step, is_native=is_native)
    return found


def _fake_pack(weight: Tensor, scale: Tensor, *settings: bool) -> Tensor:
    require("ternary_linear_pack", _unlike_weight(weight, scale))
    return weight.new_empty((weight.shape[0], words_for(weight.shape[1])), dtype=torch.int32)


def _unlike_weight(weight: Tensor, scale: Tensor) -> str | None:
    if weight.dim() != 2 or weight.dtype not in FLOATING:
        return (
            f"the weight is {weight.dtype} with {weight.dim()} dimensions; (N, K) in bfloat16, "
            "float16 or float32 is needed."
        )
    if scale.numel() != 1 or scale.device != weight.device:
        return (
            f"the scale has {scale.numel()} elements on {scale.device}; one element on "
            f"{weight.device} is needed: ternary weights have one scale for the whole matrix."
        )
    return None


def _repack(packed: Tensor) -> Tensor:
    _fake_repack(packed)
    return reference.repack(packed)


def _fake_repack(packed: Tensor) -> Tensor:
    if packed.dtype != torch.uint8 or packed.dim() != 2:
        raise UnsupportedInputError(
            f"ternary_linear_repack: packed is {packed.dtype} with {packed.dim()} dimensions; "
            "uint8 of (N / 4, K), the layout of transformers' BitNet checkpoints, is needed."
        )
    rows, columns = packed.shape
    return packed.new_empty((4 * rows, words_for(columns)), dtype=torch.int32)


_quantizer = lru_cache(maxsize=64)(Quantizer)


def _quantize(x: Tensor, *quantizer: Any, **named: Any) -> tuple[Tensor, Tensor, Tensor]:
    require("ternary_linear_quantize", _unlike_tokens(x, _quantizer(*quantizer, **named).kind))
    return _checked_quantize(x, *quantizer, **named)


def _checked_quantize(x: Tensor, *quantizer: Any, **named: Any) -> tuple[Tensor, Tensor, Tensor]:
    if x.numel() == 0:
        return _fake_quantize(x, *quantizer, **named)
    rows, asked = x.reshape(-1, x.shape[-1]), _quantizer(*quantizer, **named)
    found: tuple[Tensor, Tensor, Tensor] = _engine(x).quantize(rows, asked)
    return found


def _fake_quantize(
    x: Tensor, kind: str = "int8", *details: Any, **named: Any
) -> tuple[Tensor, Tensor, Tensor]:
    require("ternary_linear_quantize", _unlike_tokens(x, kind))
    tokens = math.prod(x.shape[:-1])
    return (
        x.new_empty((tokens, 4, 4 * words_for(x.shape[-1])), dtype=torch.int8),
        x.new_empty((tokens,), dtype=torch.float32),
        x.new_empty((tokens,), dtype=torch.int32),
    )


def _unlike_linear(given: _Linear) -> str | None:
    x, packed, scales, biases = given[:4]
    if not len(packed) == len(scales) == len(biases) > 0:
        return (
            f"there are {len(packed)} weights, {len(scales)} scales and {len(biases)} biases; as "
            "many of each are needed, and at least one."
        )
    for weight, scale, bias in zip(packed, scales, biases, strict=True):
        sentence = _unlike_packed(weight, scale, x)
        if sentence is not None:
            return sentence
        rows = weight.shape[0]
        if bias is not None and tuple(bias.shape) != (rows,):
            return f"the bias is {tuple(bias.shape)}; ({rows},) is needed."
    up, norm, added = given.up, given.norm, given.added
    if up is not None and (up.shape != x.shape or up.dtype != x.dtype):
        return f"up has another shape or dtype than x; {tuple(x.shape)} in {x.dtype} is needed."
    if norm is not None and (norm.shape != x.shape[-1:] or norm.dtype != x.dtype):
        return f"the norm's weight is not ({x.shape[-1]},) in the dtype of x, {x.dtype}."
    result = (*x.shape[:-1], packed[0].shape[0])
    if added is not None and (len(packed), added.dtype, added.shape) != (1, given.dtype, result):
        return (
            "the tensor to add must have the shape and dtype of the result, of which there is one."
        )
    return None


def _require_linear(given: _Linear) -> None:
    unlike = _unlike_tokens(given.x, given.kind) or _unlike_linear(given)
    require("ternary_linear", unlike)


def _linear(given: _Linear) -> list[Tensor]:
    _require_linear(given)
    x, packed, up, added = given.x, given.packed, given.up, given.added
    if x.numel() == 0 or not all(weight.numel() for weight in packed):
        found = []
        for weight, scale, bias in zip(*given[1:4], strict=True):
            one = given._replace(packed=[weight], weight_scale=[scale], bias=[bias], is_early=False)
            is_empty = 0 in (x.numel(), weight.numel())
            found += [_empty_linear(x, weight, given.dtype).zero_()] if is_empty else _linear(one)
        return found
    quantizer = _quantizer(*given[6:11])
    rows = x.reshape(-1, x.shape[-1])
    engine, entry = _engine(x), NO_ENTRY
    if up is not None or given.norm is not None:
        gate = None if up is None else up.reshape(rows.shape)
        entry = Entry(gate, given.norm, given.norm_eps)
    settings: dict[str, Any] = {
        "dtype": given.dtype,
        "weight_is_step": given.weight_is_step,
        "added": None if added is None else added.reshape(rows.shape[0], packed[0].shape[0]),
        "leading": x.shape[:-1],
    }
    found = []
    has_kernels = engine is not reference
    overlaps = has_kernels and starts_early(x.device)
    height = sum(weight.shape[0] for weight in packed)
    if has_kernels and multiplies_by_dots(rows.shape[0], packed[0].shape[1], height):
        coded, is_early = None, given.is_early and overlaps
        # Otherwise each program that multiplies quantises its tokens, which saves a launch.
        if KINDS[quantizer.kind].keeps_half or quantizes_first(packed[0].shape[1], height):
            coded = engine.quantize(rows, quantizer, entry, is_chained=overlaps, is_early=is_early)
            is_early, entry = overlaps, NO_ENTRY
        settings["coded"] = coded
        for start in range(0, len(packed), MAX_GROUP):
            group = [each[start : start + MAX_GROUP] for each in given[1:4]]
            settings["is_early"] = is_early and start == 0
            found += engine.vectors(rows, *group, quantizer, entry, **settings)
        return found
    settings["is_step"], settings["is_chained"] = given.is_step, overlaps
    codes = engine.quantize(rows, quantizer, entry, is_chained=overlaps)
    if has_kernels and rows.shape[0] <= GROUPED_TOKENS:
        for start in range(0, len(packed), MAX_GROUP):
            group = [each[start : start + MAX_GROUP] for each in given[1:4]]
            found += engine.products(*codes, *group, **settings)
            settings["is_chained"] = False  # the next product's kernel follows this one directly
        return found
    for each in zip(*given[1:4], strict=True):
        found.append(engine.product(*codes, *each, **settings))
        settings["is_chained"] = False
    return found


def _fake_linear(given: _Linear) -> list[Tensor]:
    _require_linear(given)
    return [_empty_linear(given.x, weight, given.dtype) for weight in given.packed]


def _empty_linear(x: Tensor, packed: Tensor, dtype: torch.dtype) -> Tensor:
    return x.new_empty((*x.shape[:-1], packed.shape[0]), dtype=dtype)


def _unlike_product(given: _Product) -> str | None:
    x, weight, codes, *_ = given
    packed, scales, bias, biased = given[5:9]
    if (
        not len(weight) == len(packed) == len(scales) > 0
        or not len(bias) == len(biased) <= len(weight)
        or not all(0 <= place < len(weight) for place in biased)
    ):
        return (
            f"there are {len(weight)} weights, {len(packed)} packed ones, {len(scales)} scales and "
            f"{len(bias)} biases for the weights {list(biased)}; as many of each are needed, at "
            "least one, and at most one bias for each."
        )
    added = dict(zip(biased, bias, strict=True))
    for place, (dense, held, scale) in enumerate(zip(weight, packed, scales, strict=True)):
        sentence = supports(x, dense, added.get(place)) or _unlike_packed(held, scale, x)
        if sentence is not None:
            return sentence
        if held.shape[0] != dense.shape[0]:
            return f"packed has {held.shape[0]} rows and the weight {dense.shape[0]}."
    if codes.dtype != torch.int8 or codes.dim() != 3 or given.scale.dim() != 1:
        return (
            f"codes are {codes.dtype} with {codes.dim()} dimensions; int8 as "
            "ternary_linear_quantize makes them is needed."
        )
    return None


def _product(given: _Product) -> list[Tensor]:
    require("ternary_linear_product", _unlike_product(given))
    return _checked_product(given)


def _checked_product(given: _Product) -> list[Tensor]:
    """Multiply operands that were already checked.

    The code that Inductor generates calls this function, with operands that were checked at compile
    time.
    """
    x, _, *coded = given[:5]
    engine, added = _engine(x), dict(zip(given.biased, given.bias, strict=True))
    settings = {"dtype": given.dtype, "is_step": given.is_step, "leading": x.shape[:-1]}
    settings["weight_is_step"] = given.weight_is_step
    found = []
    for place, (held, scale) in enumerate(zip(given.packed, given.weight_scale, strict=True)):
        if x.numel() == 0 or held.numel() == 0:
            found.append(_empty_linear(x, held, given.dtype).zero_())
        else:
            found.append(engine.product(*coded, held, scale, added.get(place), **settings))
    return found


def _fake_product(given: _Product) -> list[Tensor]:
    require("ternary_linear_product", _unlike_product(given))
    return [_empty_linear(given.x, held, given.dtype) for held in given.packed]


def _product_backward(given: _Gradients) -> list[Tensor]:
    engine, grad, columns = _engine(given.codes), given.grad, given.columns
    tokens = math.prod(grad[0].shape[:-1])
    rows = [each.reshape(tokens, each.shape[-1]) for each in grad]
    kind, shape = grad[0].dtype, (*grad[0].shape[:-1], columns)
    is_full = [0 not in (columns, each.numel()) for each in rows]
    found = []
    if given.of_x:  # one dense weight at a time
        total = None
        each_weight = zip(rows, given.packed, given.weight_scale, is_full, strict=True)
        for each, held, scale, is_on in each_weight:
            if not is_on:
                continue
            weights = engine.dequantized_weights(
                held, scale, columns, is_step=given.weight_is_step, dtype=kind
            )
            total = each.mm(weights) if total is None else total.addmm_(each, weights)
            del weights
        found.append(grad[0].new_zeros(shape) if total is None else total.view(shape))
    if any(given.of_weight):
        if any(is_full):
            dense = engine.dequantized_tokens(
                given.codes, given.scale, columns, is_step=given.is_step, dtype=kind
            )
        else:
            dense = grad[0].new_empty((tokens, columns))
        found += [
            each.t().mm(dense) for each, is_on in zip(rows, given.of_weight, strict=True) if is_on
        ]
    found += [each.sum(0) for each, is_on in zip(rows, given.of_bias, strict=True) if is_on]
    return found


def _fake_product_backward(given: _Gradients) -> list[Tensor]:
    first, columns = given.grad[0], given.columns
    shapes = [(*first.shape[:-1], columns)] if given.of_x else []
    heights = [held.shape[0] for held in given.packed]
    shapes += [(n, columns) for n, is_on in zip(heights, given.of_weight, strict=True) if is_on]
    shapes += [(n,) for n, is_on in zip(heights, given.of_bias, strict=True) if is_on]
    return [first.new_empty(shape) for shape in shapes]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, weight, codes, scale, _, packed, weight_scale, bias, biased, _, *steps = inputs
    ctx.set_materialize_grads(False)  # a result without a gradient passes no gradient to its weight
    ctx.save_for_backward(codes, scale, *packed, *weight_scale)
    ctx.columns, ctx.steps, ctx.biased = x.shape[-1], steps, list(biased)
    ctx.dtypes = (x.dtype, [w.dtype for w in weight], [b.dtype for b in bias])


def _backward(ctx: Any, grad: list[Tensor | None]) -> tuple[Any, ...]:
    """Return the gradients of the op's inputs.

    The op has one output per weight. If no gradient arrives for an output, the gradients of its
    weight and of its bias are None.
    """
    needs, count = ctx.needs_input_grad, len(grad)
    given = {place: each.contiguous() for place, each in enumerate(grad) if each is not None}
    of_x = needs[0] and bool(given)
    of_weight = [place for place in given if needs[1][place]]
    biased = {place for place, is_on in zip(ctx.biased, needs[7], strict=True) if is_on}
    of_bias = [place for place in given if place in biased]
    codes, scale, *rest = ctx.saved_tensors
    found: list[Tensor] = []
    if of_x or of_weight or of_bias:
        found = ternary_linear_product_backward(
            list(given.values()),
            codes,
            scale,
            [rest[place] for place in given],
            [rest[count + place] for place in given],
            ctx.columns,
            *ctx.steps,
            of_x,
            [place in of_weight for place in given],
            [place in of_bias for place in given],
        )
    kind, kinds, added_kinds = ctx.dtypes
    results = iter(found)
    grad_x = next(results).to(kind) if of_x else None
    by_weight = {place: next(results).to(kinds[place]) for place in of_weight}
    by_bias = {place: next(results) for place in of_bias}
    grad_weight = [by_weight.get(place) for place in range(count)]
    of_added = [
        by_bias[place].to(its) if place in by_bias else None
        for place, its in zip(ctx.biased, added_kinds, strict=True)
    ]
    nothing = [None] * count
    places: list[Any] | None = (
        None if ctx.biased else []
    )  # autograd expects an empty list for an argument that is a list of tensors
    settings = (None,) * (len(needs) - 9)  # fewer if the last arguments have their defaults
    return grad_x, grad_weight, None, None, None, nothing, nothing, of_added, places, *settings


def _not_differentiable(ctx: Any, *grads: object) -> tuple[None, ...]:
    """Return no gradient for the inputs of the ops that quantise tokens and pack weights.

    The codes (quantised integers) that these ops return are constants for autograd. The op
    `ternary_linear_product` multiplies codes. The backward pass of this op returns the gradients of
    the unquantised tokens and weights.
    """
    return (None,) * len(ctx.needs_input_grad)


def _note_shapes(ctx: Any, inputs: tuple[Any, ...], output: object) -> None:
    def noted(given: Any) -> Any:
        # PyTorch treats a list with a None in it as one argument without a gradient.
        if isinstance(given, list | tuple) and all(isinstance(each, Tensor) for each in given):
            return [noted(each) for each in given]
        return (tuple(given.shape), given.dtype) if isinstance(given, Tensor) else None

    ctx.of_inputs = [noted(each) for each in inputs]


def _refused_gradients(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Any, ...]:
    """Return the results of the op `ternary_linear_refused` as gradients.

    The op raises an error when it runs, so a backward pass fails. A compiled graph contains the
    backward pass of each forward pass that runs with gradients on. An error raised in this function
    would make such a forward pass fail.
    """
    grad = next(each for each in grads if each is not None)

    def refused(noted: Any, is_needed: Any) -> Any:
        if isinstance(noted, list):
            return [refused(*each) for each in zip(noted, is_needed, strict=True)]
        return ternary_linear_refused(grad, *noted) if noted and is_needed else None

    return tuple(map(refused, ctx.of_inputs, ctx.needs_input_grad))


def _refuse(grad: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    raise UnsupportedInputError(
        "ternary_linear has no backward: it serves inference, and packed weights cannot be "
        "trained. Call it under torch.no_grad(); to train, keep the full-precision weights "
        "(memeff_compile.ternarize_)."
    )


_QUANTIZER = (
    'str kind="int8", float eps=1e-05, bool adds_eps=False, bool is_step=False, '
    "bool is_native=False"
)
ternary_linear = library.op(
    "ternary_linear(Tensor x, Tensor[] packed, Tensor[] weight_scale, Tensor?[] bias, "
    f"ScalarType dtype, bool weight_is_step=False, {_QUANTIZER}, Tensor? up=None, "
    "Tensor? norm=None, float norm_eps=0.0, Tensor? added=None, bool is_early=False) -> Tensor[]",
    *library.taking(_Linear, _linear, _fake_linear),
    backward=_refused_gradients,
    setup_context=_note_shapes,
)
ternary_linear_refused = library.op(
    "ternary_linear_refused(Tensor grad, SymInt[] shape, ScalarType dtype) -> Tensor",
    _refuse,
    lambda grad, shape, dtype: grad.new_empty(shape, dtype=dtype),
)
ternary_linear_pack = library.op(
    "ternary_linear_pack(Tensor weight, Tensor scale, bool is_step=False, bool is_native=False) "
    "-> Tensor",
    _pack,
    _fake_pack,
    backward=_not_differentiable,
    direct=_checked_pack,
)
ternary_linear_repack = library.op(
    "ternary_linear_repack(Tensor packed) -> Tensor", _repack, _fake_repack
)
ternary_linear_quantize = library.op(
    f"ternary_linear_quantize(Tensor x, {_QUANTIZER}) -> (Tensor, Tensor, Tensor)",
    _quantize,
    _fake_quantize,
    backward=_not_differentiable,
    direct=_checked_quantize,
)
ternary_linear_product = library.op(
    "ternary_linear_product(Tensor x, Tensor[] weight, Tensor codes, Tensor scale, Tensor sums, "
    "Tensor[] packed, Tensor[] weight_scale, Tensor[] bias, int[] biased, ScalarType dtype, "
    "bool is_step=False, bool weight_is_step=False) -> Tensor[]",
    *library.taking(_Product, _product, _fake_product),
    backward=_backward,
    setup_context=_setup_context,
    direct=library.taking(_Product, _checked_product)[0],
)
ternary_linear_product_backward = library.op(
    "ternary_linear_product_backward(Tensor[] grad, Tensor codes, Tensor scale, Tensor[] packed, "
    "Tensor[] weight_scale, SymInt columns, bool is_step, bool weight_is_step, bool of_x, "
    "bool[] of_weight, bool[] of_bias) -> Tensor[]",
    *library.taking(_Gradients, _product_backward, _fake_product_backward),
    direct=library.taking(_Gradients, _product_backward)[0],
    backward=library.refusing(
        DoubleBackwardError,
        "ternary_linear has a first derivative only: its gradients pass straight through the "
        "rounding. Switch the rewrite off with options={'memeff.ternary': 'off'}.",
    ),
)
