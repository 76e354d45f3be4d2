"""memeff::gated_linear and its backward op: schemas, validation, choice of implementation, fake
tensors, autograd.

The forward pass has no side effects and saves gate, up and the weight. The backward pass copies
gate and up and calls `gated_linear_backward`, which overwrites the copies with the gradients. The
GPU's matrix library computes the matrix products. This folder's kernels compute the elementwise
steps between these products.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import library
from ..checks import require, two_devices, two_dtypes, unfloating, unplain
from ..device import kernels_serve, without_autocast
from . import reference

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")
"""The activations of the gate; `gelu` is the form with erf."""

ENGINES = {
    "in_place": (
        "one Triton kernel over gate, up and the product's gradient, fp32 inside "
        "(CUDA, compute capability 8.0 or later; bf16, fp16, fp32)"
    ),
    "reference": "plain PyTorch, piece by piece (any device, also fp64)",
}


def supports(
    gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor | None, activation: str
) -> str | None:
    """Return the reason why the op does not support the given tensors, or None if it supports them.

    `gate` and `up` have the shape (..., I), and `weight` has the shape (D, I).
    """
    if activation not in ACTIVATIONS:
        return f"activation is {activation!r}; one of {', '.join(ACTIVATIONS)} is needed."
    named = {"gate": gate, "up": up, "weight": weight, "bias": bias}
    for name, tensor in named.items():
        if tensor is None:
            continue
        sentence = (
            unplain(name, tensor)
            or unfloating(name, tensor)
            or two_dtypes(name, tensor.dtype, "gate", gate.dtype)
            or two_devices(name, tensor, "gate", gate)
        )
        if sentence is not None:
            return sentence
    return _shape_problem(gate, up, weight, bias)


def _shape_problem(gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor | None) -> str | None:
    if gate.dim() == 0 or weight.dim() != 2:
        dims = f"{gate.dim()} and {weight.dim()}"
        return f"gate and weight have {dims} dimensions; (..., I) and (D, I) are needed."
    if gate.dim() != up.dim() or any(a != b for a, b in zip(gate.shape, up.shape, strict=True)):
        return f"gate has shape {tuple(gate.shape)} and up {tuple(up.shape)}; they must be equal."
    if weight.shape[1] != gate.shape[-1]:
        return (
            f"weight has shape {tuple(weight.shape)} and gate {tuple(gate.shape)}; their last "
            "sizes must be equal."
        )
    if bias is not None and (bias.dim() != 1 or bias.shape[0] != weight.shape[0]):
        return f"bias has shape {tuple(bias.shape)}; ({weight.shape[0]},) is needed."
    return None


def engine_for(device: torch.device, dtype: torch.dtype) -> str:
    """Return the name of the implementation, a key of `ENGINES`, for tensors of a given device and
    dtype."""
    return "in_place" if kernels_serve(device, dtype) else "reference"


def _engine(tensor: Tensor) -> Any:  # a module
    if engine_for(tensor.device, tensor.dtype) == "in_place":
        from . import in_place

        return in_place
    return reference


def _forward(
    gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor | None, activation: str
) -> Tensor:
    require("gated_linear", supports(gate, up, weight, bias, activation))
    with without_autocast(gate.device.type):
        return F.linear(_product(gate, up, activation), weight, bias)


def _product(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """Compute act(gate) * up into a new contiguous tensor."""
    product = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if product.numel():
        flat = (gate.contiguous().view(-1), up.contiguous().view(-1), product.view(-1))
        _engine(gate).product(*flat, activation)
    return product


def _fake_forward(
    gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor | None, activation: str
) -> Tensor:
    require("gated_linear", supports(gate, up, weight, bias, activation))
    return gate.new_empty((*gate.shape[:-1], weight.shape[0]))


class _Gradients(NamedTuple):
    """The arguments of `gated_linear_backward`."""

    grad_out: Tensor
    gate: Tensor
    up: Tensor
    weight: Tensor
    activation: str
    needs_inputs: bool
    needs_weight: bool


def _backward(given: _Gradients) -> Tensor:
    grad_out, gate, up, weight, activation, needs_inputs, needs_weight = given
    require("gated_linear", supports(gate, up, weight, None, activation))
    with without_autocast(gate.device.type):
        rows = grad_out.reshape(-1, weight.shape[0])
        if needs_inputs:
            product = torch.mm(rows, weight)
            if product.numel():
                _in_place(gate, up, product.view(-1), activation)
        elif needs_weight:
            product = _product(gate, up, activation).view(-1, weight.shape[1])
        if not needs_weight:
            return weight.new_empty(0)
        return torch.mm(rows.t(), product)


def _in_place(gate: Tensor, up: Tensor, grad: Tensor, activation: str) -> None:
    """Run the backward kernel on three buffers, each flattened to one dimension."""
    flat_gate, flat_up = gate.contiguous(), up.contiguous()
    _engine(gate).gradients(flat_gate.view(-1), flat_up.view(-1), grad, activation)
    for given, flat in ((gate, flat_gate), (up, flat_up)):
        if flat is not given:
            given.copy_(flat)


def _fake_backward(given: _Gradients) -> Tensor:
    require("gated_linear", supports(*given[1:4], None, given.activation))
    return given.weight.new_empty(given.weight.shape if given.needs_weight else 0)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    gate, up, weight, _, activation = inputs
    ctx.save_for_backward(gate, up, weight)
    ctx.activation = activation


def _link(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    gate, up, weight = ctx.saved_tensors
    needs_gate, needs_up, needs_weight, needs_bias, _ = ctx.needs_input_grad
    settings = (ctx.activation, needs_gate or needs_up, needs_weight)
    once = _gradients_once if torch.is_grad_enabled() else _gradients  # create_graph=True
    found = once(grad, gate, up, weight, *settings)
    return (
        found[0] if needs_gate else None,
        found[1] if needs_up else None,
        found[2] if needs_weight else None,
        grad.reshape(-1, weight.shape[0]).sum(0) if needs_bias else None,
        None,
    )


def _gradients(
    grad: Tensor, gate: Tensor, up: Tensor, *others: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of gate, up and weight, without changing gate and up."""
    # The copies become the gradients. A compiler removes the copies if gate and up are recomputed.
    gate, up = (each.clone(memory_format=torch.contiguous_format) for each in (gate, up))
    return gate, up, gated_linear_backward(grad, gate, up, *others)


_gradients_once = library.only_first(
    _gradients,
    "gated_linear: a second derivative of the fused linear was requested, but the op has only a "
    "first one. Compile with options={'memeff.gated_linear': 'off'}.",
)

gated_linear = library.op(
    "gated_linear(Tensor gate, Tensor up, Tensor weight, Tensor? bias, str activation) -> Tensor",
    _forward,
    _fake_forward,
    backward=_link,
    setup_context=_setup_context,
    direct=_forward,
)
gated_linear_backward = library.op(
    "gated_linear_backward(Tensor grad_out, Tensor(a!) gate, Tensor(b!) up, Tensor weight, "
    "str activation, bool needs_inputs, bool needs_weight) -> Tensor",
    *library.taking(_Gradients, _backward, _fake_backward),
    direct=library.taking(_Gradients, _backward)[0],
)
