"""memeff::ternary_linear and its parts: schemas, validation, engines, fakes, gradients.

Activations and weights are quantised by ops of their own, so that linears of one input share its
codes. `ternary_linear_product` takes the input and the weight beside their codes: it reads neither,
but its gradients are theirs, as a straight-through estimator has it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from types import ModuleType
from typing import Any, NoReturn

import torch
from torch import Tensor

from memeff_compile import compat
from memeff_compile.errors import DoubleBackwardError, UnsupportedInputError
from memeff_compile.kernels.device import kernels_serve
from memeff_compile.kernels.ternary_linear import reference
from memeff_compile.kernels.ternary_linear.quantizer import (
    KINDS,
    NO_ENTRY,
    Entry,
    Quantizer,
    words_for,
)
from memeff_compile.kernels.ternary_linear.shapes import MAX_COLUMNS, MAX_GROUP

FLOATING = (torch.bfloat16, torch.float16, torch.float32)

ENGINES = {
    "tiles": (
        "2-bit weights unpacked in registers, int8 tensor cores, for up to four tokens integer dot "
        "products, Triton (CUDA, compute capability 8.0 or later)"
    ),
    "reference": "plain PyTorch, piece by piece over the rows of the weight (any device)",
}

_LIBRARY = torch.library.Library("memeff", "FRAGMENT")
_COMPLIANT = (torch.Tag.pt2_compliant_tag,)
_QUANTIZER = (
    'str kind="int8", float eps=1e-05, bool adds_eps=False, bool is_step=False, '
    "bool is_native=False"
)
_LIBRARY.define(
    "ternary_linear_pack(Tensor weight, Tensor scale, bool is_step=False, bool is_native=False) "
    "-> Tensor",
    tags=_COMPLIANT,
)
_LIBRARY.define("ternary_linear_repack(Tensor packed) -> Tensor", tags=_COMPLIANT)
_LIBRARY.define(
    f"ternary_linear_quantize(Tensor x, {_QUANTIZER}) -> (Tensor, Tensor, Tensor)", tags=_COMPLIANT
)
_LIBRARY.define(
    "ternary_linear(Tensor x, Tensor[] packed, Tensor[] weight_scale, Tensor?[] bias, "
    f"ScalarType dtype, bool weight_is_step=False, {_QUANTIZER}, Tensor? up=None, "
    "Tensor? norm=None, float norm_eps=0.0, Tensor? added=None, bool is_early=False) -> Tensor[]",
    tags=_COMPLIANT,
)
_LIBRARY.define(
    "ternary_linear_product(Tensor x, Tensor[] weight, Tensor codes, Tensor scale, Tensor sums, "
    "Tensor[] packed, Tensor[] weight_scale, Tensor[] bias, int[] biased, ScalarType dtype, "
    "bool is_step=False, bool weight_is_step=False) -> Tensor[]",
    tags=_COMPLIANT,
)
_LIBRARY.define(
    "ternary_linear_product_backward(Tensor[] grad, Tensor codes, Tensor scale, Tensor[] packed, "
    "Tensor[] weight_scale, SymInt columns, bool is_step, bool weight_is_step, bool of_x, "
    "bool[] of_weight, bool[] of_bias) -> Tensor[]",
    tags=_COMPLIANT,
)


def supports(x: Tensor, weight: Tensor | None, bias: Tensor | None = None) -> str | None:
    """Say in a sentence why a linear cannot be served with these inputs, or return None.

    Args:
        x: (..., K).
        weight: (N, K) before it is packed, or None where there is only the packed one.
        bias: (N,) or None.

    Example: supports(torch.ones(2, 32), torch.ones(8, 32)) is None.
    """
    given = [("x", x, 1), ("weight", weight, 2), ("bias", bias, 1)]
    for name, tensor, rank in given:
        if tensor is None:
            continue
        if tensor.layout != torch.strided or tensor.is_quantized:
            return f"{name} is no plain strided tensor; densify or dequantise it."
        if tensor.dtype not in FLOATING:
            short = str(tensor.dtype).removeprefix("torch.")
            return f"{name} has dtype {short}; bfloat16, float16 or float32 is needed. Cast it."
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


def _require(condition: bool, op: str, sentence: Callable[[], str]) -> None:
    """Raise unless a condition holds; the sentence is only made where it is needed."""
    if not condition:
        _refuse(op, sentence())


def _refuse(op: str, sentence: str) -> NoReturn:
    raise UnsupportedInputError(f"{op}: {sentence}")


def _require_kind(op: str, kind: str) -> None:
    _require(
        kind in KINDS, op, lambda: f"the kind is {kind!r}; one of {', '.join(KINDS)} is needed."
    )


def _require_tokens(op: str, x: Tensor) -> None:
    sentence = supports(x, None)
    _require(sentence is None, op, lambda: str(sentence))


def _require_packed(op: str, packed: Tensor, scale: Tensor, columns: int, like: Tensor) -> None:
    _require(
        packed.dtype == torch.int32 and packed.dim() == 2,
        op,
        lambda: (
            f"packed is {packed.dtype} with {packed.dim()} dimensions; int32 of (N, K / 16), as "
            "ternary_linear_pack makes it, is needed."
        ),
    )
    _require(
        packed.shape[1] == words_for(columns),
        op,
        lambda: (
            f"packed has {packed.shape[1]} words in a row; for {columns} columns "
            f"{words_for(columns)} are needed."
        ),
    )
    _require(
        scale.numel() == 1 and scale.dtype.is_floating_point,
        op,
        lambda: (
            f"the scale of a weight has {scale.numel()} elements of {scale.dtype}; one floating "
            "element is needed."
        ),
    )
    for name, tensor in (("packed", packed), ("its scale", scale)):
        if tensor.device != like.device:
            _refuse(
                op, f"x is on {like.device} and {name} on {tensor.device}; move them to one device."
            )


def engine_for(device: torch.device, dtype: torch.dtype) -> str:
    """Name the engine that serves this device and dtype: a key of `ENGINES`."""
    return "tiles" if kernels_serve(device, dtype) else "reference"


def _engine(tensor: Tensor) -> ModuleType:
    """Return the module that computes for a tensor."""
    if tensor.is_cuda and engine_for(tensor.device, torch.float32) == "tiles":
        from memeff_compile.kernels.ternary_linear import tiles

        return tiles
    return reference


def _check_pack(weight: Tensor, scale: Tensor) -> None:
    op = "ternary_linear_pack"
    _require(
        weight.dim() == 2 and weight.dtype in FLOATING,
        op,
        lambda: (
            f"the weight is {weight.dtype} with {weight.dim()} dimensions; (N, K) in bfloat16, "
            "float16 or float32 is needed."
        ),
    )
    _require(
        scale.numel() == 1 and scale.device == weight.device,
        op,
        lambda: (
            f"the scale has {scale.numel()} elements on {scale.device}; one element on "
            f"{weight.device} is needed: ternary weights have one scale for the whole matrix."
        ),
    )


def _pack(weight: Tensor, scale: Tensor, is_step: bool = False, is_native: bool = False) -> Tensor:
    _check_pack(weight, scale)
    if weight.numel() == 0:
        return _fake_pack(weight, scale, is_step, is_native)
    found: Tensor = _engine(weight).pack(weight, scale, is_step=is_step, is_native=is_native)
    return found


def _fake_pack(
    weight: Tensor, scale: Tensor, is_step: bool = False, is_native: bool = False
) -> Tensor:
    del is_step, is_native
    _check_pack(weight, scale)
    return weight.new_empty((weight.shape[0], words_for(weight.shape[1])), dtype=torch.int32)


def _repack(packed: Tensor) -> Tensor:
    _check_repack(packed)
    return reference.repack(packed)


def _fake_repack(packed: Tensor) -> Tensor:
    _check_repack(packed)
    rows, columns = packed.shape
    return packed.new_empty((4 * rows, words_for(columns)), dtype=torch.int32)


def _check_repack(packed: Tensor) -> None:
    _require(
        packed.dtype == torch.uint8 and packed.dim() == 2,
        "ternary_linear_repack",
        lambda: (
            f"packed is {packed.dtype} with {packed.dim()} dimensions; uint8 of (N / 4, K), the "
            "layout of transformers' BitNet checkpoints, is needed."
        ),
    )


_quantizer = lru_cache(maxsize=64)(Quantizer)


def _quantize(
    x: Tensor,
    kind: str = "int8",
    eps: float = 1e-5,
    adds_eps: bool = False,
    is_step: bool = False,
    is_native: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    if x.numel() == 0:
        return _fake_quantize(x, kind, eps, adds_eps, is_step, is_native)
    _require_kind("ternary_linear_quantize", kind)
    _require_tokens("ternary_linear_quantize", x)
    rows = x.reshape(-1, x.shape[-1])
    found: tuple[Tensor, Tensor, Tensor] = _engine(x).quantize(
        rows, _quantizer(kind, eps, adds_eps, is_step, is_native)
    )
    return found


def _fake_quantize(
    x: Tensor,
    kind: str = "int8",
    eps: float = 1e-5,
    adds_eps: bool = False,
    is_step: bool = False,
    is_native: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    del eps, adds_eps, is_step, is_native
    _require_kind("ternary_linear_quantize", kind)
    _require_tokens("ternary_linear_quantize", x)
    tokens = math.prod(x.shape[:-1])
    return (
        x.new_empty((tokens, 4, 4 * words_for(x.shape[-1])), dtype=torch.int8),
        x.new_empty((tokens,), dtype=torch.float32),
        x.new_empty((tokens,), dtype=torch.int32),
    )


def _check_linear(
    x: Tensor,
    packed: Sequence[Tensor],
    weight_scale: Sequence[Tensor],
    bias: Sequence[Tensor | None],
    kind: str,
) -> None:
    op = "ternary_linear"
    _require_kind(op, kind)
    _require_tokens(op, x)
    _require(
        len(packed) == len(weight_scale) == len(bias) > 0,
        op,
        lambda: (
            f"there are {len(packed)} weights, {len(weight_scale)} scales and {len(bias)} biases; "
            "as many of each are needed, and at least one."
        ),
    )
    for weight, scale, added in zip(packed, weight_scale, bias, strict=True):
        _require_packed(op, weight, scale, x.shape[-1], x)
        _require_bias(op, added, weight)


def _require_bias(op: str, bias: Tensor | None, packed: Tensor) -> None:
    _require(
        bias is None or tuple(bias.shape) == (packed.shape[0],),
        op,
        lambda: (
            f"the bias is {None if bias is None else tuple(bias.shape)}; ({packed.shape[0]},) is "
            "needed."
        ),
    )


def _check_around(
    x: Tensor,
    packed: Sequence[Tensor],
    dtype: torch.dtype,
    up: Tensor | None,
    norm: Tensor | None,
    added: Tensor | None,
) -> None:
    op = "ternary_linear"
    _require(
        up is None or (up.shape == x.shape and up.dtype == x.dtype),
        op,
        lambda: f"up has shape and dtype of its own; those of x, {tuple(x.shape)}, are needed.",
    )
    _require(
        norm is None or (norm.shape == x.shape[-1:] and norm.dtype == x.dtype),
        op,
        lambda: f"the norm's weight is not ({x.shape[-1]},) in the dtype of x, {x.dtype}.",
    )
    _require(
        added is None
        or (
            len(packed) == 1
            and added.dtype == dtype
            and added.shape == (*x.shape[:-1], packed[0].shape[0])
        ),
        op,
        lambda: "what is added has to have the shape and dtype of the one result.",
    )


def _linear(
    x: Tensor,
    packed: Sequence[Tensor],
    weight_scale: Sequence[Tensor],
    bias: Sequence[Tensor | None],
    dtype: torch.dtype,
    weight_is_step: bool = False,
    kind: str = "int8",
    eps: float = 1e-5,
    adds_eps: bool = False,
    is_step: bool = False,
    is_native: bool = False,
    up: Tensor | None = None,
    norm: Tensor | None = None,
    norm_eps: float = 0.0,
    added: Tensor | None = None,
    is_early: bool = False,
) -> list[Tensor]:
    _check_linear(x, packed, weight_scale, bias, kind)
    _check_around(x, packed, dtype, up, norm, added)
    if x.numel() == 0:
        return [_empty_linear(x, weight, dtype).zero_() for weight in packed]
    if not all(weight.numel() for weight in packed):
        rest = (weight_is_step, kind, eps, adds_eps, is_step, is_native, up, norm, norm_eps)
        return [
            _linear(x, [weight], [scale], [its_bias], dtype, *rest)[0]
            if weight.numel()
            else _empty_linear(x, weight, dtype).zero_()
            for weight, scale, its_bias in zip(packed, weight_scale, bias, strict=True)
        ]
    quantizer = Quantizer(kind, eps, adds_eps, is_step, is_native)
    rows = x.reshape(-1, x.shape[-1])
    engine = _engine(x)
    entry = NO_ENTRY
    if up is not None or norm is not None:
        entry = Entry(None if up is None else up.reshape(rows.shape), norm, norm_eps)
    flat = None if added is None else added.reshape(rows.shape[0], packed[0].shape[0])
    found: list[Tensor] = []
    if engine.serves_vectors(rows.shape[0]):
        overlaps, coded = engine.chains(x.device), None
        is_early = is_early and overlaps
        if engine.codes_first(packed[0].shape[1], sum(w.shape[0] for w in packed), quantizer):
            coded = engine.quantize(rows, quantizer, entry, is_chained=overlaps, is_early=is_early)
            is_early, entry = overlaps, NO_ENTRY
        for start in range(0, len(packed), MAX_GROUP):
            group = slice(start, start + MAX_GROUP)
            found += engine.vectors(
                rows,
                packed[group],
                weight_scale[group],
                bias[group],
                quantizer,
                entry,
                dtype=dtype,
                weight_is_step=weight_is_step,
                added=flat,
                is_early=is_early and start == 0,
                coded=coded,
                leading=x.shape[:-1],
            )
    else:
        is_chained = engine.chains(x.device)
        codes, scale, sums = engine.quantize(rows, quantizer, entry, is_chained=is_chained)
        for weight, by_weight, its_bias in zip(packed, weight_scale, bias, strict=True):
            found.append(
                engine.product(
                    codes,
                    scale,
                    sums,
                    weight,
                    by_weight,
                    its_bias,
                    dtype=dtype,
                    is_step=is_step,
                    weight_is_step=weight_is_step,
                    added=flat,
                    is_chained=is_chained,
                    leading=x.shape[:-1],
                )
            )
            is_chained = False  # the kernel before the next product is this one
    return found


def _fake_linear(
    x: Tensor,
    packed: Sequence[Tensor],
    weight_scale: Sequence[Tensor],
    bias: Sequence[Tensor | None],
    dtype: torch.dtype,
    weight_is_step: bool = False,
    kind: str = "int8",
    eps: float = 1e-5,
    adds_eps: bool = False,
    is_step: bool = False,
    is_native: bool = False,
    up: Tensor | None = None,
    norm: Tensor | None = None,
    norm_eps: float = 0.0,
    added: Tensor | None = None,
    is_early: bool = False,
) -> list[Tensor]:
    del weight_is_step, eps, adds_eps, is_step, is_native, norm_eps, is_early
    _check_linear(x, packed, weight_scale, bias, kind)
    _check_around(x, packed, dtype, up, norm, added)
    return [_empty_linear(x, weight, dtype) for weight in packed]


def _empty_linear(x: Tensor, packed: Tensor, dtype: torch.dtype) -> Tensor:
    return x.new_empty((*x.shape[:-1], packed.shape[0]), dtype=dtype)


def _no_backward(ctx: object, *grads: object) -> None:
    raise UnsupportedInputError(
        "ternary_linear has no backward: it serves inference, and packed weights cannot be "
        "trained. Call it under torch.no_grad(); to train, keep the full-precision weights "
        "(memeff_compile.ternarize_)."
    )


def _check_product(
    x: Tensor,
    weight: Sequence[Tensor],
    codes: Tensor,
    scale: Tensor,
    packed: Sequence[Tensor],
    weight_scale: Sequence[Tensor],
    bias: Sequence[Tensor],
    biased: Sequence[int],
) -> None:
    op = "ternary_linear_product"
    _require(
        len(weight) == len(packed) == len(weight_scale) > 0
        and len(bias) == len(biased) <= len(weight)
        and all(0 <= place < len(weight) for place in biased),
        op,
        lambda: (
            f"there are {len(weight)} weights, {len(packed)} packed ones, {len(weight_scale)} "
            f"scales and {len(bias)} biases for the weights {list(biased)}; as many of each are "
            "needed, at least one, and at most one bias for each."
        ),
    )
    added = dict(zip(biased, bias, strict=True))
    for place, (dense, held, by_weight) in enumerate(
        zip(weight, packed, weight_scale, strict=True)
    ):
        sentence = supports(x, dense, added.get(place))
        if sentence is not None:
            _refuse(op, sentence)
        _require_packed(op, held, by_weight, x.shape[-1], x)
        if held.shape[0] != dense.shape[0]:
            _refuse(op, f"packed has {held.shape[0]} rows and the weight {dense.shape[0]}.")
    _require(
        codes.dtype == torch.int8 and codes.dim() == 3 and scale.dim() == 1,
        op,
        lambda: (
            f"codes are {codes.dtype} with {codes.dim()} dimensions; int8 as "
            "ternary_linear_quantize makes them is needed."
        ),
    )


def _product(
    x: Tensor,
    weight: Sequence[Tensor],
    codes: Tensor,
    scale: Tensor,
    sums: Tensor,
    packed: Sequence[Tensor],
    weight_scale: Sequence[Tensor],
    bias: Sequence[Tensor],
    biased: Sequence[int],
    dtype: torch.dtype,
    is_step: bool = False,
    weight_is_step: bool = False,
) -> list[Tensor]:
    _check_product(x, weight, codes, scale, packed, weight_scale, bias, biased)
    rest = (dtype, is_step, weight_is_step)
    return _checked_product(
        x, weight, codes, scale, sums, packed, weight_scale, bias, biased, *rest
    )


def _checked_product(
    x: Tensor,
    weight: Sequence[Tensor],
    codes: Tensor,
    scale: Tensor,
    sums: Tensor,
    packed: Sequence[Tensor],
    weight_scale: Sequence[Tensor],
    bias: Sequence[Tensor],
    biased: Sequence[int],
    dtype: torch.dtype,
    is_step: bool = False,
    weight_is_step: bool = False,
) -> list[Tensor]:
    """Multiply what was checked, in compiled code when it was compiled."""
    del weight
    engine, added = _engine(x), dict(zip(biased, bias, strict=True))
    found = []
    for place, (held, by_weight) in enumerate(zip(packed, weight_scale, strict=True)):
        if x.numel() == 0 or held.numel() == 0:
            found.append(_empty_linear(x, held, dtype).zero_())
            continue
        out: Tensor = engine.product(
            codes,
            scale,
            sums,
            held,
            by_weight,
            added.get(place),
            dtype=dtype,
            is_step=is_step,
            weight_is_step=weight_is_step,
            leading=x.shape[:-1],
        )
        found.append(out)
    return found


def _fake_product(
    x: Tensor,
    weight: Sequence[Tensor],
    codes: Tensor,
    scale: Tensor,
    sums: Tensor,
    packed: Sequence[Tensor],
    weight_scale: Sequence[Tensor],
    bias: Sequence[Tensor],
    biased: Sequence[int],
    dtype: torch.dtype,
    is_step: bool = False,
    weight_is_step: bool = False,
) -> list[Tensor]:
    del sums, is_step, weight_is_step
    _check_product(x, weight, codes, scale, packed, weight_scale, bias, biased)
    return [_empty_linear(x, held, dtype) for held in packed]


def _product_backward(
    grad: Sequence[Tensor],
    codes: Tensor,
    scale: Tensor,
    packed: Sequence[Tensor],
    weight_scale: Sequence[Tensor],
    columns: int,
    is_step: bool,
    weight_is_step: bool,
    of_x: bool,
    of_weight: Sequence[bool],
    of_bias: Sequence[bool],
) -> list[Tensor]:
    engine = _engine(codes)
    tokens = math.prod(grad[0].shape[:-1])
    rows = [given.reshape(tokens, given.shape[-1]) for given in grad]
    kind, shape = grad[0].dtype, (*grad[0].shape[:-1], columns)
    is_full = [0 not in (columns, given.numel()) for given in rows]
    found = []
    if of_x:  # one dense weight at a time
        total = None
        for given, held, by_weight, is_on in zip(rows, packed, weight_scale, is_full, strict=True):
            if not is_on:
                continue
            weights = engine.dequantized_weights(
                held, by_weight, columns, is_step=weight_is_step, dtype=kind
            )
            total = given.mm(weights) if total is None else total.addmm_(given, weights)
            del weights
        found.append(grad[0].new_zeros(shape) if total is None else total.view(shape))
    if any(of_weight):
        dense = grad[0].new_empty((tokens, columns))
        if any(is_full):
            dense = engine.dequantized_tokens(codes, scale, columns, is_step=is_step, dtype=kind)
        found += [
            given.t().mm(dense) for given, is_on in zip(rows, of_weight, strict=True) if is_on
        ]
    found += [given.sum(0) for given, is_on in zip(rows, of_bias, strict=True) if is_on]
    return found


def _fake_product_backward(
    grad: Sequence[Tensor],
    codes: Tensor,
    scale: Tensor,
    packed: Sequence[Tensor],
    weight_scale: Sequence[Tensor],
    columns: int,
    is_step: bool,
    weight_is_step: bool,
    of_x: bool,
    of_weight: Sequence[bool],
    of_bias: Sequence[bool],
) -> list[Tensor]:
    del codes, scale, weight_scale, is_step, weight_is_step
    first = grad[0]
    heights = [held.shape[0] for held in packed]
    return [
        *([first.new_empty((*first.shape[:-1], columns))] if of_x else []),
        *(
            first.new_empty((n, columns))
            for n, is_on in zip(heights, of_weight, strict=True)
            if is_on
        ),
        *(first.new_empty((n,)) for n, is_on in zip(heights, of_bias, strict=True) if is_on),
    ]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:  # noqa: ANN401
    del output
    x, weight, codes, scale, _, packed, weight_scale, bias, biased, _, *steps = inputs
    ctx.set_materialize_grads(False)  # a result nobody differentiates gives its weight no gradient
    ctx.save_for_backward(codes, scale, *packed, *weight_scale)
    ctx.columns, ctx.steps, ctx.biased = x.shape[-1], steps, list(biased)
    ctx.dtypes = (x.dtype, [w.dtype for w in weight], [b.dtype for b in bias])


def _backward(ctx: Any, grad: list[Tensor | None]) -> tuple[Any, ...]:  # noqa: ANN401
    """Return the gradients; none at all for the weight and bias of a result that has none."""
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
    )  # as autograd takes an empty list for one of tensors
    settings = (None,) * (len(needs) - 9)  # fewer where those at the end have their defaults
    return grad_x, grad_weight, None, None, None, nothing, nothing, of_added, places, *settings


def _no_second_derivative(ctx: object, *grads: object) -> None:
    raise DoubleBackwardError(
        "ternary_linear has a first derivative only: its gradients pass straight through the "
        "rounding. Switch the rewrite off with options={'memeff.ternary': 'off'}."
    )


def _nothing_saved(ctx: object, inputs: object, output: object) -> None:
    del ctx, inputs, output


def _not_differentiable(ctx: object, *grads: object) -> tuple[None, ...]:
    """Give no gradient: quantised values are constants, their inputs get it from the product."""
    return (None,) * 6


_LIBRARY.impl("ternary_linear_pack", _pack, "CompositeExplicitAutograd")
_LIBRARY.impl("ternary_linear_repack", _repack, "CompositeExplicitAutograd")
_LIBRARY.impl("ternary_linear_quantize", _quantize, "CompositeExplicitAutograd")
_LIBRARY.impl("ternary_linear", _linear, "CompositeExplicitAutograd")
_LIBRARY.impl("ternary_linear_product", _product, "CompositeExplicitAutograd")
_LIBRARY.impl("ternary_linear_product_backward", _product_backward, "CompositeExplicitAutograd")
for _name, _fake in (
    ("pack", _fake_pack),
    ("repack", _fake_repack),
    ("quantize", _fake_quantize),
    ("product", _fake_product),
    ("product_backward", _fake_product_backward),
):
    torch.library.register_fake(f"memeff::ternary_linear_{_name}", _fake, lib=_LIBRARY)
torch.library.register_fake("memeff::ternary_linear", _fake_linear, lib=_LIBRARY)
torch.library.register_autograd(
    "memeff::ternary_linear", _no_backward, setup_context=_nothing_saved, lib=_LIBRARY
)
torch.library.register_autograd(
    "memeff::ternary_linear_quantize",
    _not_differentiable,
    setup_context=_nothing_saved,
    lib=_LIBRARY,
)
torch.library.register_autograd(
    "memeff::ternary_linear_pack",
    lambda ctx, grad: (None,) * 4,
    setup_context=_nothing_saved,
    lib=_LIBRARY,
)
torch.library.register_autograd(
    "memeff::ternary_linear_product", _backward, setup_context=_setup_context, lib=_LIBRARY
)
torch.library.register_autograd(
    "memeff::ternary_linear_product_backward",
    _no_second_derivative,
    setup_context=_nothing_saved,
    lib=_LIBRARY,
)


def _twin(name: str, compute: Callable[..., Any], fake: Callable[..., Any]) -> Any:  # noqa: ANN401
    """Define the op of this name once more, without a gradient: what code below autograd calls."""
    op = getattr(torch.ops.memeff, name).default
    schema = str(compat.schema(op)).partition("::")[2]
    _LIBRARY.define(schema.replace(name, f"{name}_below", 1), tags=_COMPLIANT)
    _LIBRARY.impl(f"{name}_below", compute, "CompositeExplicitAutograd")
    _LIBRARY.impl(f"{name}_below", torch.library.fallthrough_kernel, "Autograd")
    torch.library.register_fake(f"memeff::{name}_below", fake, lib=_LIBRARY)
    return op, getattr(torch.ops.memeff, f"{name}_below").default


TWINS = [
    _twin("ternary_linear_pack", _pack, _fake_pack),
    _twin("ternary_linear_quantize", _quantize, _fake_quantize),
    _twin("ternary_linear_product", _checked_product, _fake_product),
    _twin("ternary_linear_product_backward", _product_backward, _fake_product_backward),
]
"""The ops of a training step, each with the one that Inductor's code calls for it."""

ternary_linear = torch.ops.memeff.ternary_linear.default
ternary_linear_pack = torch.ops.memeff.ternary_linear_pack.default
ternary_linear_repack = torch.ops.memeff.ternary_linear_repack.default
ternary_linear_quantize = torch.ops.memeff.ternary_linear_quantize.default
ternary_linear_product = torch.ops.memeff.ternary_linear_product.default
ternary_linear_product_backward = torch.ops.memeff.ternary_linear_product_backward.default
