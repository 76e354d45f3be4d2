"""Linear layers with ternary weights (-1, 0 or 1): one class for training, one for inference with
packed weights."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memeff_compile.errors import UnsupportedInputError
from memeff_compile.kernels.ternary_linear import (
    KINDS,
    Quantizer,
    ternary_linear,
    ternary_linear_pack,
    ternary_linear_product,
    ternary_linear_quantize,
)

EPS = 1e-5


def require_kind(kind: str) -> str:
    """Return `kind` if it names a known quantiser of a linear layer's inputs, otherwise raise an
    error."""
    if kind not in KINDS:
        raise UnsupportedInputError(
            f"The kind is {kind!r}; one of {', '.join(map(repr, KINDS))} is needed."
        )
    return kind


def result_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype that a dense linear layer would return for a given input."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def codes_per_unit(weight: Tensor) -> Tensor:
    """Return the scale of a weight, 1 / mean(abs(weight)), in float32."""
    scale: Tensor = weight.float().abs().mean().clamp(min=EPS).reciprocal()
    return scale


class SquaredReLU(nn.Module):
    """The activation function relu(x) ** 2 of BitNet a4.8's gated MLP.

    Attributes:
        was: the activation function that this one replaced and that `undo` restores, or None.
        names: the entries of the model's config that named the replaced function, with their
            values.
    """

    def __init__(
        self,
        was: nn.Module | None = None,
        config: Any = None,  # noqa: ANN401 - a config of transformers
        names: dict[str, str] | None = None,
    ) -> None:
        super().__init__()
        self._was, self.config, self.names = (was,), config, names or {}

    @property
    def was(self) -> nn.Module | None:
        """Return the activation function that the squared ReLU replaced.

        The replaced function is not registered as a child module, because it must not be part of
        the model.
        """
        return self._was[0]

    def forward(self, input: Tensor) -> Tensor:
        """Return relu(x) ** 2, in the shape and dtype of the input."""
        return F.relu(input).square()


class TernaryLinear(nn.Linear):
    """A trainable linear layer that rounds its weight to -1, 0, 1 and its input to few bits.

    The weight remains a full-precision parameter. The forward pass multiplies the weight by a
    scale, 1 / mean(abs(weight)), and rounds it. The attribute `kind`, such as "int8", determines
    how each token's input vector is quantised. Gradients pass unchanged through the rounding of the
    weight and of the input. For the backward pass, autograd keeps two bits per weight and one byte
    per input element in memory.

    Attributes:
        kind: how inputs are quantised: "int8", "int4", "fp4", or "topk8" (INT8 for the half of the
            elements with the largest magnitudes, 0 for the others). You may change `kind` at any
            time.
        was_dense: whether `ternarize_` created the module from an nn.Linear, which `undo`
            restores.

    Example:
        >>> TernaryLinear(64, 128, kind="int4")  # doctest: +SKIP
    """

    was_dense = False

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        kind: str = "int8",
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self.kind = require_kind(kind)

    def forward(self, input: Tensor) -> Tensor:
        """Return the linear's output, (..., out_features)."""
        weight, bias = self.weight, self.bias
        if hasattr(weight, "placements"):  # a DTensor; FSDP2 gathers weights before
            raise UnsupportedInputError(
                "A ternary linear was split over processes, but its scale needs the whole weight, "
                "and those of its tokens whole tokens. Leave it out of parallelize_module's plan; "
                "fully_shard (FSDP2) is supported, because it gathers whole weights."
            )
        quantizer = Quantizer(self.kind).arguments()
        dtype = result_dtype(input)
        scale = codes_per_unit(weight.detach())
        packed = ternary_linear_pack(weight.detach(), scale)
        trains = any(t is not None and t.requires_grad for t in (input, weight, bias))
        out: Tensor
        if not (torch.is_grad_enabled() and trains):
            (out,) = ternary_linear(input, [packed], [scale], [bias], dtype, False, *quantizer)
            return out
        quantized = ternary_linear_quantize(input.detach(), *quantizer)
        biases, biased = ([], []) if bias is None else ([bias], [0])
        held = ([packed], [scale], biases, biased, dtype)
        (out,) = ternary_linear_product(input, [weight], *quantized, *held)
        return out

    def extra_repr(self) -> str:
        """Return the settings as text, for print(model)."""
        return f"{super().extra_repr()}, kind={self.kind!r}"


class PackedTernaryLinear(nn.Module):
    """A linear layer for inference, whose ternary weights take two bits each.

    The buffers, which are part of the state dict, are:
        packed: (out_features, ceil(in_features / 16)) int32.
        weight_scale: one float32 number; each weight equals its code (-1, 0 or 1) divided by this
            number.
        bias: (out_features,), or no buffer if the linear layer has no bias.

    Attributes:
        kind: how each token's input vector is quantised: "int8", "int4", "fp4", or "topk8" (INT8
            for the half of the elements with the largest magnitudes, 0 for the others).
        norm: a module that is applied to the input first, or None.
    """

    packed: Tensor
    weight_scale: Tensor
    bias: Tensor | None

    def __init__(
        self,
        packed: Tensor,
        weight_scale: Tensor,
        bias: Tensor | None,
        *,
        in_features: int,
        kind: str = "int8",
        norm: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, packed.shape[0]
        self.kind = require_kind(kind)
        self.norm = norm
        self.register_buffer("packed", packed)
        self.register_buffer("weight_scale", weight_scale.detach().float().reshape(()))
        self.register_buffer("bias", None if bias is None else bias.detach().clone())

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        """Raise an error with a remedy if a model reads the weight instead of calling the layer."""
        if name == "weight":
            raise AttributeError(
                "A packed ternary linear has no weight in full precision, and this model reads "
                "`linear.weight` itself, as T5 does for its dtype. Leave such linears dense: name "
                "them in ternarize_(model, skip=[...]) before packing."
            )
        return super().__getattr__(name)

    def _apply(self, fn: object, recurse: bool = True) -> PackedTernaryLinear:
        """Move or cast the layer with its model, but keep the scale in float32."""
        scale = self.weight_scale
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.weight_scale.dtype != torch.float32:
            self.weight_scale = scale.to(self.weight_scale.device)
        return self

    def forward(self, input: Tensor) -> Tensor:
        """Return the linear's output, (..., out_features)."""
        input = input if self.norm is None else self.norm(input)
        out: Tensor
        held, how = ([self.packed], [self.weight_scale], [self.bias]), Quantizer(self.kind)
        (out,) = ternary_linear(input, *held, result_dtype(input), False, *how.arguments())
        return out

    def extra_repr(self) -> str:
        """Return the settings as text, for print(model)."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, kind={self.kind!r}"
        )
