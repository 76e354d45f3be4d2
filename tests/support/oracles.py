"""Dense float64 formulas that the ops are compared with, the inputs, and the allowed errors.

This module shares no code with the package: the oracle builds the whole N x V matrix and leaves the
gradient to autograd.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Relative error in the Frobenius norm allowed against float64 on the same inputs: values, then
# gradients. 16-bit values come from fp32 products; 16-bit gradients are rounded twice, once as the
# gradient of the products and once as the result (2^-9 and 2^-12 at most each).
BUDGETS = {
    torch.float64: (1e-13, 1e-12),
    torch.float32: (2e-6, 1e-5),
    torch.bfloat16: (2e-6, 4e-3),
    torch.float16: (2e-6, 6e-4),
}


@dataclass(frozen=True)
class Case:
    """One combination of the op's features; `arguments` are its keyword arguments."""

    name: str
    scale: float = 1.0
    softcap: float = 0.0
    has_bias: bool = False
    has_column_weight: bool = False
    ignore_index: int | None = -100
    ignored_share: float = 0.0
    with_lse: bool = False
    with_logit_sum: bool = False
    with_entropy: bool = False
    with_top: bool = False

    def arguments(self, workspace: int = 0) -> dict[str, Any]:
        return {
            "ignore_index": self.ignore_index,
            "scale": self.scale,
            "softcap": self.softcap,
            "with_lse": self.with_lse,
            "with_logit_sum": self.with_logit_sum,
            "gradient_filter": "exact",
            "workspace": workspace,
            "with_entropy": self.with_entropy,
            "with_top": self.with_top,
        }


CASES = [
    Case("plain"),
    Case("no ignore_index", ignore_index=None),
    Case("scale", scale=0.25),
    Case("softcap", softcap=3.0),
    Case("bias", has_bias=True),
    Case("ignored rows", ignored_share=0.4),
    Case("ignored rows, index inside the vocabulary", ignore_index=1, ignored_share=0.4),
    Case("all rows ignored", ignored_share=1.0),
    Case("lse", with_lse=True),
    Case("lse of ignored rows", with_lse=True, ignored_share=0.4),
    Case("logit sum", with_logit_sum=True),
    Case("weighted logit sum", with_logit_sum=True, has_column_weight=True, ignored_share=0.4),
    Case("entropy", with_entropy=True),
    Case("entropy of ignored rows", with_entropy=True, ignored_share=0.4),
    Case("entropy and softcap", with_entropy=True, softcap=3.0, scale=0.5, has_bias=True),
    Case("top", with_top=True),
    Case("top of ignored rows", with_top=True, ignored_share=0.4),
    Case("entropy and top, all rows ignored", with_entropy=True, with_top=True, ignored_share=1.0),
    Case(
        "everything",
        scale=1.5,
        softcap=4.0,
        has_bias=True,
        has_column_weight=True,
        ignored_share=0.3,
        with_lse=True,
        with_logit_sum=True,
        with_entropy=True,
        with_top=True,
    ),
]


@dataclass
class Inputs:
    """Arguments of one call and the cotangents of its outputs."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    target: Tensor
    column_weight: Tensor | None
    grad_nll: Tensor
    grad_lse: Tensor
    grad_logit_sum: Tensor
    grad_entropy: Tensor

    def cotangents(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.grad_nll, self.grad_lse, self.grad_logit_sum, self.grad_entropy

    def tensors(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor | None]:
        return self.hidden, self.weight, self.bias, self.target, self.column_weight


def make_inputs(
    case: Case,
    *,
    shape: tuple[int, ...] = (3, 7),
    depth: int = 13,
    vocab: int = 201,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    kind: str = "flat",
    seed: int = 0,
    target_dtype: torch.dtype = torch.int64,
) -> Inputs:
    """Draw inputs; "peaked" gives most rows a confident target, as a trained model does."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    def uniform(*size: int) -> Tensor:
        return torch.rand(size, generator=generator, dtype=torch.float64)

    target = torch.randint(0, vocab, shape, generator=generator)
    weight, hidden = normal(vocab, depth), normal(*shape, depth)
    if kind == "peaked":
        strength = 2 + 12 * uniform(*shape, 1)
        hidden = hidden + weight[target] * strength / depth**0.5
    if case.ignore_index is not None and case.ignored_share > 0:
        target[uniform(*shape) < case.ignored_share] = case.ignore_index
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return Inputs(
        hidden=hidden.to(device, dtype),
        weight=weight.to(device, dtype),
        bias=normal(vocab).to(device, dtype) if case.has_bias else None,
        target=target.to(device, target_dtype),
        column_weight=uniform(vocab).to(device, wide) if case.has_column_weight else None,
        grad_nll=normal(*shape).to(device, wide),
        grad_lse=normal(*shape).to(device, wide),
        grad_logit_sum=normal(*(shape if case.with_logit_sum else (0,))).to(device, wide),
        grad_entropy=normal(*(shape if case.with_entropy else (0,))).to(device, wide),
    )


def dense_logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, scale: float, softcap: float
) -> Tensor:
    """Return the logits in float64."""
    z = hidden.double() @ weight.double().T
    if bias is not None:
        z = z + bias.double()
    z = z * scale
    return softcap * torch.tanh(z / softcap) if softcap > 0 else z


def dense_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    column_weight: Tensor | None,
    *,
    ignore_index: int | None,
    scale: float,
    softcap: float,
    with_lse: bool,
    with_logit_sum: bool,
    gradient_filter: str = "exact",
    workspace: int = 0,
    with_entropy: bool = False,
    with_top: bool = False,
) -> tuple[Tensor, ...]:
    """Return the op's five results by the book, in float64, differentiable."""
    del gradient_filter, workspace
    z = dense_logits(hidden, weight, bias, scale, softcap)
    is_kept = torch.ones_like(target, dtype=torch.bool)
    if ignore_index is not None:
        is_kept = target != ignore_index
    lse = z.logsumexp(-1)
    at_target = z.gather(-1, target.where(is_kept, 0).long().unsqueeze(-1)).squeeze(-1)
    nll = torch.where(is_kept, lse - at_target, 0.0)
    logit_sum = entropy = z.new_zeros(0)
    if with_logit_sum:
        weights = z.new_ones(z.shape[-1]) if column_weight is None else column_weight.double()
        logit_sum = torch.where(is_kept, z @ weights, 0.0)
    if with_entropy:
        # clamped, so that a column of -inf adds 0 to value and gradient
        log_p = (z - lse.unsqueeze(-1)).clamp(min=-1e300)
        entropy = -(log_p.exp() * log_p).sum(-1)
    if not (with_lse or with_entropy):
        lse = torch.where(is_kept, lse, 0.0)
    top = z.detach().argmax(-1) if with_top else target.new_zeros(0, dtype=torch.int64)
    return nll, lse, logit_sum, entropy, top


Op = Callable[..., tuple[Tensor, ...]]
Results = dict[str, Tensor]
NAMES = ("nll", "lse", "logit_sum", "entropy", "top")


def values_and_gradients(op: Op, inputs: Inputs, arguments: dict[str, Any]) -> Results:
    """Run an op forward and backward with the inputs' cotangents; results by name."""
    leaves = {
        "hidden": inputs.hidden.detach().requires_grad_(),
        "weight": inputs.weight.detach().requires_grad_(),
        "bias": None if inputs.bias is None else inputs.bias.detach().requires_grad_(),
    }
    outputs = op(*leaves.values(), inputs.target, inputs.column_weight, **arguments)
    total = sum(
        (output * cotangent).sum()
        for output, cotangent in zip(outputs[:4], inputs.cotangents(), strict=True)
    )
    used = {name: leaf for name, leaf in leaves.items() if leaf is not None}
    gradients = torch.autograd.grad(total, list(used.values()))
    named = dict(zip(NAMES, outputs, strict=False))
    return {
        **{name: output.detach() for name, output in named.items()},
        **{f"grad_{name}": grad for name, grad in zip(used, gradients, strict=True)},
    }


def relative_error(found: Tensor, expected: Tensor, floor: float = 1e-30) -> float:
    """Return the Frobenius norm of the difference over that of the expectation, in float64.

    `floor` is the least norm to divide by.
    """
    if found.shape != expected.shape:
        raise AssertionError(f"shape {tuple(found.shape)}, expected {tuple(expected.shape)}")
    difference = (found.double() - expected.double()).norm()
    if expected.numel() == 0 or float(difference) == 0:
        return 0.0
    return float(difference / expected.double().norm().clamp(min=floor))


def _assert_largest(
    top: Tensor, wanted: Tensor, inputs: Inputs, arguments: dict[str, Any], budget: float
) -> None:
    """Compare indices, or where they differ the logits there: rounding may reorder equals."""
    assert top.shape == wanted.shape
    if torch.equal(top, wanted):
        return
    scale, softcap = arguments["scale"], arguments["softcap"]
    z = dense_logits(inputs.hidden, inputs.weight, inputs.bias, scale, softcap)
    found, most = (z.gather(-1, index.unsqueeze(-1)) for index in (top, wanted))
    room = budget * (float(z.abs().max()) + 1)
    assert torch.allclose(found, most, rtol=0, atol=room, equal_nan=True), "top is not the largest"


def assert_matches_oracle(
    op: Op, inputs: Inputs, arguments: dict[str, Any], *, slack: float = 1.0
) -> None:
    """Compare an op's values and gradients with the dense float64 oracle within the budgets."""
    found = values_and_gradients(op, inputs, arguments)
    expected = values_and_gradients(dense_linear_cross_entropy, inputs, arguments)
    value_budget, gradient_budget = BUDGETS[inputs.hidden.dtype]
    for name, wanted in expected.items():
        if name == "top":
            _assert_largest(found[name], wanted, inputs, arguments, value_budget * slack)
            continue
        budget = gradient_budget if name.startswith("grad_") else value_budget
        # A loss is a difference of logits: rounding is relative to those, however small the loss.
        floor = 1e-30 if name.startswith("grad_") else float(expected["lse"].norm()) + 1e-30
        error = relative_error(found[name], wanted, floor)
        assert error <= budget * slack, f"{name}: relative error {error:.2e} above {budget:.0e}"
        if name.startswith("grad_"):
            leaf = getattr(inputs, name.removeprefix("grad_"))
            assert found[name].dtype == leaf.dtype
