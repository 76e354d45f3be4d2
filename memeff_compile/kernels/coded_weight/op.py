"""The ops of compressed weights: schemas, validation, choice of implementation, fake tensors,
autograd.

A codec is a compressed format for weights. The codec `win4` stores exponents as 4-bit codes.
Autograd sees only the op `coded_weight_linear`. This op takes the weight as one tensor, a
`CodedWeight`, and saves it for the backward pass, which decodes the weight again. Below autograd,
the ops take the weight's coded tensors as separate arguments, so the inner compiler (Inductor by
default) sees these tensors. The op `coded_weight_product` chooses between two ways of multiplying
at run time. For a few tokens and the codec `win4`, one kernel decodes and multiplies. Otherwise a
kernel decodes the weight into a temporary buffer, and the GPU's matrix library multiplies. If a
gradient is needed, the function `trained_product` calls two other ops instead:
`coded_weight_decode`, and then PyTorch's `linear`. Results then equal the results of a dense layer
bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import UnsupportedInputError
from .. import library
from ..device import kernels_serve, without_autocast
from . import codecs, dtypes, pieces, reference
from .layout import LISTS, SMALLER, Format, fits_one_piece, parse

ENGINES = {
    "triton": (
        "Triton kernels; with win4 and a few tokens the weight is decoded inside the product "
        "(CUDA, compute capability 8.0 or later)"
    ),
    "reference": "plain PyTorch, a million weights at a time (any device)",
}

MAX_WEIGHTS = 1 << 31


def supports_weight(
    weight: Tensor,
    codec: str = "win4",
    *,
    is_loaded_later: bool = False,  # a tensor on the meta device gets values before it is encoded
) -> str | None:
    """Return a sentence that says why a codec cannot encode a weight, or None if the codec can.

    A codec is a compressed format, such as "win4".
    """
    if weight.layout != torch.strided or weight.is_quantized:
        return "it is not a plain strided tensor"
    wanted = dtypes.dtype_of(parse(codec))
    if weight.dtype != wanted:
        return _other_dtype(weight.dtype, wanted, codec)
    if weight.device.type == "meta" and not is_loaded_later:
        return "it is on the meta device and holds no values yet"
    if not 0 < weight.numel() < MAX_WEIGHTS:
        return f"it has {weight.numel()} elements; 1 to {MAX_WEIGHTS - 1} can be coded"
    if weight.device.type == "meta" or parse(codec).is_lossless:
        return None
    if not bool(weight.isfinite().all()):
        return "it holds values that are not finite, which a lossy mode cannot keep"
    return None


def _other_dtype(given: torch.dtype, wanted: torch.dtype, codec: str) -> str:
    name, own = (str(each).removeprefix("torch.") for each in (given, wanted))
    short = {each: key for key, each in dtypes.DTYPES.items()}.get(given)
    said = f"its dtype is {name}, and {codec!r} codes {own}"
    if short is None or not parse(codec).is_lossless:
        return said
    said += f". The codec {str(Format(SMALLER, dtype=short))!r} codes {name}"
    if short == "bf16":
        return said
    return (
        f"{said}, saves less than a sixth, and decodes before each product. Loading the model with "
        "dtype=torch.bfloat16 saves half and rounds its weights"
    )


def engine_for(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> str:
    """Return the implementation, a key of `ENGINES`, for weights of a dtype on a device.

    The implementation encodes weights, decodes them, and multiplies by them.
    """
    return "triton" if kernels_serve(device, dtype) else "reference"


def _uses_kernels(tensor: Tensor) -> bool:
    return tensor.is_cuda and engine_for(tensor.device) == "triton"


def _require(weight: Tensor, codec: str) -> None:
    sentence = supports_weight(weight, codec)
    if sentence is not None:
        raise UnsupportedInputError(f"coded_weight: the tensor cannot be coded: {sentence}.")


def encode(weight: Tensor, codec: str, room: codecs.Room = codecs.EXACT_FIT) -> list[Tensor]:
    """Return the coded tensors of a weight of any shape, in the order of `parse(codec).parts`.

    A codec is a compressed format. If the tensors have spare memory (`room`), later values of the
    weight can be encoded into them. If the codec cannot encode the values, raise an error.
    """
    form = parse(codec)
    _require(weight, codec)
    if form.dtype != "bf16":
        upper, rest = dtypes.split(weight, form)
        return [*encode(upper, form.codec, room), rest]
    if _uses_kernels(weight):
        return codecs.encode(weight, form, room)
    parts = reference.encode(weight, form)
    return [
        F.pad(part, (0, room.length(part.numel()) - part.numel())) if name in LISTS else part
        for name, part in zip(form.parts, parts, strict=True)
    ]


def encode_soon(
    parts: Sequence[Tensor],
    weight: Tensor,
    codec: str,
    refuge: Tensor | None = None,  # host memory for a weight that does not fit
    counts: Tensor | None = None,  # the result of `codecs.step`, if that made the weight
) -> codecs.Outcome | bool:
    """Encode a new value of a weight into the weight's coded tensors, `parts`. Return whether the
    value's codes fitted.

    A codec is a compressed format. If the value did not fit, the contents of `parts` are invalid,
    and the caller must allocate new tensors. The lossless bf16 codecs `win4` and `tier` do not make
    the CPU wait for the GPU. With these two codecs on a GPU, the function returns an `Outcome`,
    which tells later whether the value fitted. All other codecs make the CPU wait: `rans`, the
    lossy modes, and the modes `:fp32` and `:fp16`. The result is then True or False.

    Do not read the coded tensors before `Outcome.fits` has returned True. The argument `refuge` is
    a spill buffer: CPU memory that receives a value whose codes do not fit into `parts`. Without a
    spill buffer, the caller must keep the dense value until `Outcome.fits` has returned True. If
    `Outcome.fits` returns False, the caller must encode the dense value again. A lossy codec raises
    an error for values that are not finite.
    """
    form = parse(codec)
    if form.dtype != "bf16":
        return reference.move(encode(weight, codec), parts)
    if not form.is_lossless:
        _require(weight, codec)
    elif _uses_kernels(weight):
        return codecs.encode_soon(parts, weight, form, refuge, counts)
    return reference.move(reference.encode(weight, form), parts)


def steps(gradient: Tensor, codec: str) -> bool:
    """Return whether `codecs.step` can apply a gradient to a weight that a codec has compressed.

    A codec is a compressed format, such as "win4".
    """
    return _uses_kernels(gradient) and codecs.steps(parse(codec), gradient)


def make_refuge(count: int, device: torch.device) -> Tensor | None:
    """Return CPU memory (a spill buffer) for a compressed weight's new value, or None.

    The buffer receives the value if the value's codes do not fit into the weight's coded tensors.
    The buffer has `count` 16-bit numbers. The result is None if no buffer is needed, or if no
    usable buffer can be allocated.
    """
    return codecs.make_refuge(count, device) if engine_for(device) == "triton" else None


def _form(codec: str, parts: Sequence[Tensor]) -> Format:
    form = parse(codec)
    if len(parts) != len(form.parts) and not (len(parts) == 1 and fits_one_piece(form)):
        raise UnsupportedInputError(
            f"coded_weight: {len(parts)} parts were given; {codec} has {len(form.parts)}: "
            f"{', '.join(form.parts)}."
        )
    return form


def _decode(parts: Sequence[Tensor], codec: str, size: Sequence[int], at: object = None) -> Tensor:
    form = _form(codec, parts)
    if form.dtype != "bf16":
        return dtypes.join(_decode(parts[:-1], form.codec, size), parts[-1], form, size)
    if not _uses_kernels(parts[0]):
        return reference.decode(_apart(parts, form, size), form, size)
    if len(parts) < len(form.parts):
        return pieces.decode(parts[0], size)
    return codecs.decode(parts, form, size)


def _decode_in_inductor(
    parts: Sequence[Tensor], codec: str, size: Sequence[int], at: object = None
) -> Tensor:
    if len(parts) == 1 and _uses_kernels(parts[0]):
        return pieces.decode(parts[0], size)
    return _decode(parts, codec, size)


def _apart(parts: Sequence[Tensor], form: Format, size: Sequence[int]) -> Sequence[Tensor]:
    """Return the tensors that encode a weight, such as its codes and signs, as separate tensors.

    `parts` contains these tensors, or one tensor: the allocation that contains them all.
    """
    is_apart = len(parts) == len(form.parts)
    return parts if is_apart else pieces.parts_of(parts[0], math.prod(size))


def _fake_decode(
    parts: Sequence[Tensor], codec: str, size: Sequence[int], at: object = None
) -> Tensor:
    dtype = dtypes.dtype_of(_form(codec, parts))
    return parts[0].new_empty(tuple(size), dtype=dtype)


def _require_fit(given: Product) -> Format:
    """Return the format of a linear layer's compressed weight.

    Raise an error if x or the bias has another dtype than the weight. Also raise an error if x and
    the weight are on different devices, or if one of them has an unsupported number of dimensions.
    """
    x, parts, bias, codec, size, _ = given
    form = _form(codec, parts)
    for name, tensor in (("x", x), ("bias", bias)):
        if tensor is not None and tensor.dtype != dtypes.dtype_of(form):
            own = str(dtypes.dtype_of(form)).removeprefix("torch.")
            raise UnsupportedInputError(
                f"coded_weight_linear: {name} has dtype {tensor.dtype} and the weight was coded "
                f"from {own}; cast one, or run under autocast."
            )
    if x.device != parts[0].device:
        raise UnsupportedInputError(
            f"coded_weight_linear: x is on {x.device} and the weight on {parts[0].device}; move "
            "one of them."
        )
    if len(size) != 2 or x.dim() < 1:
        raise UnsupportedInputError(
            f"coded_weight_linear: x has {x.dim()} dimensions and the weight {len(size)}; at least "
            "one, and two, are needed."
        )
    return form


class Product(NamedTuple):
    """The arguments of `coded_weight_product`."""

    x: Tensor
    parts: Sequence[Tensor]
    bias: Tensor | None
    codec: str
    size: Sequence[int]
    trains: bool = False


def _product(given: Product) -> Tensor:
    form = _require_fit(given)
    x, parts, bias, codec, size, trains = given
    tokens = math.prod(x.shape[:-1])
    is_near = _uses_kernels(x) and x.shape[-1] == size[1]
    if is_near and codecs.fuses(form, tokens, size, x.device, trains=trains):
        apart = _apart(parts, form, size)
        rows = codecs.product(x.reshape(tokens, size[1]), apart, bias, size, form)
        return rows.view(*x.shape[:-1], size[0])
    weight = _decode(parts, codec, size)
    with without_autocast(x.device.type):
        return F.linear(x, weight, bias)


def _fake_product(given: Product) -> Tensor:
    _require_fit(given)
    return given.x.new_empty((*given.x.shape[:-1], given.size[0]))


def trained_product(given: Product, folds: bool) -> Tensor:
    """Decode the weight and multiply as a dense layer does, for a result that needs a gradient.

    The layer's input is x. The inner compiler (Inductor by default) sees the multiplication as
    `F.linear`. The compiler may add the bias in a separate op. The compiler calls `F.linear` with
    less overhead than a custom op has. The op that decodes the weight gets x as its argument `at`.
    So the compiler cannot decode a weight before its layer's input exists. Nor can the compiler
    decode a weight only once for several layers that share the weight. For weights that require
    gradients, inputs with unusual strides are copied into contiguous rows.
    """
    x, parts, bias, codec, size, _ = given
    if not (x.dim() <= 2 or x.is_contiguous()):
        if not folds:
            return cast("Tensor", coded_weight_product(*given))
        rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
        found = trained_product(given._replace(x=rows, bias=None), folds)
        found = found.view(*x.shape[:-1], size[0])
        return found if bias is None else found + bias
    _require_fit(given)
    with without_autocast(x.device.type):
        return F.linear(x, coded_weight_decode(parts, codec, size, x), bias)


def trained_product_backward(
    grad: Tensor, parts: Sequence[Tensor], codec: str, size: Sequence[int]
) -> Tensor:
    """Return the gradient of the input x of `trained_product`, a linear layer.

    `grad` is the gradient of the layer's output. The compressed weight is decoded again.
    """
    with without_autocast(grad.device.type):
        return _linear_backward(grad, coded_weight_decode(parts, codec, size, grad))


class _Products(NamedTuple):
    """The arguments of `coded_weight_products`."""

    x: Tensor
    parts: Sequence[Tensor]
    biases: Sequence[Tensor | None]
    codec: str
    sizes: Sequence[int]

    def apart(self) -> list[Product]:
        """Return the arguments of one call of `coded_weight_product` for each of the weights.

        `coded_weight_product` multiplies by a single weight, `coded_weight_products` by several.
        """
        x, parts, biases, codec, sizes = self
        each = len(parse(codec).parts)
        count = len(biases)
        if len(parts) != each * count or len(sizes) != 2 * count:
            raise UnsupportedInputError(
                f"coded_weight_linears: {len(parts)} parts and {len(sizes)} sizes were given for "
                f"{count} weights; {codec} has {each} parts a weight, and a size is two numbers."
            )
        return [
            Product(x, parts[n * each : (n + 1) * each], bias, codec, sizes[2 * n : 2 * n + 2])
            for n, bias in enumerate(biases)
        ]


def _products(given: _Products) -> list[Tensor]:
    """Multiply tokens by several weights: a single token in one kernel launch, several tokens in
    one launch per weight."""
    several, x, form = given.apart(), given.x, parse(given.codec)
    columns = x.shape[-1]
    fits = (each.size[1] == columns and codecs.fuses(form, 1, each.size) for each in several)
    if not (math.prod(x.shape[:-1]) == 1 and _uses_kernels(x) and all(fits)):
        return [_product(each) for each in several]
    for each in several:
        _require_fit(each)
    parts, sizes = [each.parts for each in several], [each.size for each in several]
    found = codecs.products(x.reshape(1, columns), parts, given.biases, sizes, form)
    return [rows.view(*x.shape[:-1], rows.shape[-1]) for rows in found]


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, trains: bool = False) -> Tensor:
    """Return `F.linear` of x, a dense weight and a bias. This function never gets a compressed
    weight: another function multiplies by a compressed weight, using the tensors of its codes."""
    return F.linear(x, weight, bias)


def _linears(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> list[Tensor]:
    """Return `F.linear` of x with each of several dense weights and its bias."""
    return [F.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]


def _linear_backward(grad: Tensor, weight: Tensor) -> Tensor:
    return (grad.reshape(-1, weight.shape[0]) @ weight).view(*grad.shape[:-1], weight.shape[1])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, *_ = inputs
    ctx.save_for_backward(x if weight.requires_grad else None, weight)


def _link(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    once = _gradients_once if torch.is_grad_enabled() else _gradients  # create_graph=True
    return (*once(ctx.needs_input_grad, grad, x, weight), None)


def _gradients(
    needs: Sequence[bool], grad: Tensor, x: Tensor | None, weight: Tensor
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    rows = grad.reshape(-1, grad.shape[-1])
    grad_x = grad_weight = grad_bias = None
    if needs[0]:
        grad_x = torch.ops.memeff.coded_weight_linear_backward.default(grad, weight)
    if needs[1]:
        assert x is not None
        grad_weight = torch.mm(rows.t(), x.reshape(-1, x.shape[-1]))
    if len(needs) > 2 and needs[2]:
        grad_bias = rows.sum(0)
    return grad_x, grad_weight, grad_bias


def linear_in_autograd(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute a linear layer with autograd. Before the matrix product, save the tensors that the
    backward pass needs.

    An activation checkpoint stops its recomputation as soon as it has saved all tensors that the
    forward pass saved. With `F.linear`, the recomputation stops before the last product of the
    checkpointed block. A custom op's autograd formula, however, saves operands only after the op
    has run. So this function creates two autograd nodes: one saves the operands, the other
    multiplies. A tensor without memory connects the two nodes.
    """
    token = _Keep.apply(x, weight, bias)  # type: ignore[no-untyped-call]
    found: Tensor = _Multiply.apply(token, (x, weight, bias))  # type: ignore[no-untyped-call]
    return found


class _Keep(torch.autograd.Function):
    """The autograd node that saves a linear layer's operands; its backward pass computes their
    gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x if weight.requires_grad else None, weight)
        shape = (*x.shape[:-1], weight.shape[0])
        return torch.empty_strided(shape, (0,) * len(shape), dtype=x.dtype, device=x.device)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _link(ctx, grad)[:3]


class _Multiply(torch.autograd.Function):
    """The autograd node that computes a linear layer's output.

    Its backward pass passes the gradient on unchanged. The node `_Keep`, which saved the operands,
    computes the operands' gradients.
    """

    @staticmethod
    def forward(ctx: Any, token: Tensor, operands: tuple[Tensor, Tensor, Tensor | None]) -> Tensor:
        found: Tensor = coded_weight_linear(*operands, True)
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


_gradients_once = library.only_first(
    _gradients,
    "coded_weight_linear: a second derivative of a linear with a coded weight was requested, but "
    "the op has only a first one. Decompress the model for it.",
)

coded_weight_decode = library.op(
    "coded_weight_decode(Tensor[] parts, str codec, SymInt[] size, Tensor? at=None) -> Tensor",
    _decode,
    _fake_decode,
    direct=_decode_in_inductor,
)
coded_weight_product = library.op(
    "coded_weight_product(Tensor x, Tensor[] parts, Tensor? bias, str codec, SymInt[] size, "
    "bool trains=False) -> Tensor",
    *library.taking(Product, _product, _fake_product),
)
coded_weight_products = library.op(
    "coded_weight_products(Tensor x, Tensor[] parts, Tensor?[] biases, str codec, SymInt[] sizes) "
    "-> Tensor[]",
    *library.taking(_Products, _products, lambda given: [*map(_fake_product, given.apart())]),
)
coded_weight_linears = library.op(
    "coded_weight_linears(Tensor x, Tensor[] weights, Tensor?[] biases) -> Tensor[]",
    _linears,
    _linears,
)
coded_weight_linear = library.op(
    "coded_weight_linear(Tensor x, Tensor weight, Tensor? bias=None, bool trains=False) -> Tensor",
    _linear,
    _linear,
    backward=_link,
    setup_context=_setup_context,
)
coded_weight_linear_backward = library.op(
    "coded_weight_linear_backward(Tensor grad, Tensor weight) -> Tensor",
    _linear_backward,
    _linear_backward,
)
