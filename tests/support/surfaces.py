"""The ways people write a head and its loss, and the two ways to call them: eager and compiled.

One declaration used by the surface matrix, the cross-check of the canonical view and the property
tests. Every function takes hidden states (2, 8, D), a weight (V, D), a bias (V,) and labels (2, 8).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Surface = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
D, V = 16, 48


def linear_view(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(h, w).view(-1, V), y.view(-1))


def linear_bias_reshape(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(h, w, b).reshape(-1, V), y.reshape(-1))


def matmul_attribute_t(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy((h @ w.T).flatten(0, 1), y.flatten())


def matmul_method_t(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(torch.matmul(h, w.t()).flatten(0, -2), y.flatten())


def matmul_mt_kept(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(h.matmul(w.mT).view(-1, V), y.view(-1))


def matmul_transpose(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy((h @ w.transpose(0, 1)).view(-1, V), y.view(-1))


def matmul_permute(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy((h @ w.permute(1, 0)).view(-1, V), y.view(-1))


def mm_two_dimensional(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(torch.mm(h.view(-1, D), w.t()), y.view(-1))


def addmm_bias(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(torch.addmm(b, h.view(-1, D), w.t()), y.view(-1))


def einsum_vh(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(torch.einsum("bsh,vh->bsv", h, w).reshape(-1, V), y.view(-1))


def einsum_hv(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(torch.einsum("bsh,hv->bsv", h, w.t()).reshape(-1, V), y.view(-1))


def float_upcast(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(h, w).float().view(-1, V), y.view(-1))


def to_float_keyword(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(h, w).to(dtype=torch.float32).view(-1, V), y.view(-1))


def module_loss(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
    return nn.CrossEntropyLoss(ignore_index=-100)(F.linear(h, w).view(-1, V), y.view(-1))


def hf_shifted_labels(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
    logits = F.linear(h[:, slice(0, None), :], w).float()
    shifted = F.pad(y, (0, 1), value=-100)[..., 1:].contiguous()
    return F.cross_entropy(
        logits.view(-1, V), shifted.view(-1).to(logits.device), ignore_index=-100, reduction="mean"
    )


def old_shifted_logits(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
    logits = F.linear(h, w).float()
    return F.cross_entropy(
        logits[..., :-1, :].contiguous().view(-1, V), y[..., 1:].contiguous().view(-1)
    )


def sum_over_items(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(F.linear(h, w).float().view(-1, V), y.view(-1), reduction="sum")
    return loss / 13


def classes_at_dim_one(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(h, w).transpose(1, 2), y)


def classes_by_permute(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(h, w).permute(0, 2, 1), y, reduction="none").mean()


def classes_by_movedim(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(h, w).movedim(-1, 1).float(), y)


def softcap_constant_first(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
    logits = 30.0 * torch.tanh(F.linear(h, w) / 30.0)
    return F.cross_entropy(logits.view(-1, V), y.view(-1))


def softcap_gemma(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
    logits = F.linear(h, w) / 5.0
    logits = torch.tanh(logits)
    logits = logits * 5.0
    return F.cross_entropy(logits.float().view(-1, V), y.view(-1))


def scaled_down(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy((F.linear(h, w) / 4.0).view(-1, V), y.view(-1))


def scaled_by_method(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(h, w, b).mul(0.25).view(-1, V), y.view(-1))


def vector_bias_after(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy((F.linear(h, w) + b.view(1, 1, V)).view(-1, V), y.view(-1))


def scaled_then_bias(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy((F.linear(h, w) * 0.5 + b).view(-1, V), y.view(-1))


def log_softmax_nll(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
    return F.nll_loss(F.log_softmax(F.linear(h, w).view(-1, V), dim=-1), y.view(-1))


def log_softmax_gather(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
    picked = F.linear(h, w).log_softmax(-1).gather(-1, y.clamp(min=0).unsqueeze(-1))
    return -(picked.squeeze(-1) * (y >= 0)).sum() / 7


def log_softmax_float_gather(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
    log_probs = torch.log_softmax(F.linear(h, w).float(), dim=-1)
    return -torch.gather(log_probs, 2, y.clamp(min=0)[..., None]).mean()


def logsumexp_minus_gather(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
    logits = F.linear(h, w).float()
    picked = logits.gather(-1, y.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return (torch.logsumexp(logits, dim=-1) - picked).mean()


def z_loss(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
    logits = F.linear(h, w).float().view(-1, V)
    return F.cross_entropy(logits, y.view(-1)) + 1e-2 * logits.logsumexp(-1).pow(2).mean()


def z_loss_unflattened(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
    logits = F.linear(h, w).float()
    lse = torch.logsumexp(logits, dim=-1, keepdim=True)
    return F.cross_entropy(logits.view(-1, V), y.view(-1)) + 1e-2 * (lse**2).mean()


def label_smoothing(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(h, w).view(-1, V), y.view(-1), label_smoothing=0.1)


def class_weights(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
    weight = torch.linspace(0.5, 2.0, V, dtype=h.dtype, device=h.device)
    return F.cross_entropy(F.linear(h, w).view(-1, V), y.view(-1), weight=weight)


def weights_and_smoothing(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
    weight = torch.linspace(0.5, 2.0, V, dtype=h.dtype, device=h.device)
    return F.cross_entropy(
        F.linear(h, w).view(-1, V), y.view(-1), weight=weight, label_smoothing=0.2
    )


def unreduced_masked_mean(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
    losses = F.cross_entropy(F.linear(h, w).view(-1, V), y.view(-1), reduction="none")
    mask = (y.view(-1) >= 0).to(losses.dtype)
    return (losses * mask).sum() / mask.sum()


def last_tokens_only(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(h, w)[:, -1], y[:, -1])


def time_major(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(h, w).transpose(0, 1).reshape(-1, V), y.t().reshape(-1))


SURFACES: dict[str, Surface] = {
    f.__name__: f
    for f in (
        linear_view,
        linear_bias_reshape,
        matmul_attribute_t,
        matmul_method_t,
        matmul_mt_kept,
        matmul_transpose,
        matmul_permute,
        mm_two_dimensional,
        addmm_bias,
        einsum_vh,
        einsum_hv,
        float_upcast,
        to_float_keyword,
        module_loss,
        hf_shifted_labels,
        old_shifted_logits,
        sum_over_items,
        classes_at_dim_one,
        classes_by_permute,
        classes_by_movedim,
        softcap_constant_first,
        softcap_gemma,
        scaled_down,
        scaled_by_method,
        vector_bias_after,
        scaled_then_bias,
        log_softmax_nll,
        log_softmax_gather,
        log_softmax_float_gather,
        logsumexp_minus_gather,
        z_loss,
        z_loss_unflattened,
        label_smoothing,
        class_weights,
        weights_and_smoothing,
        unreduced_masked_mean,
        last_tokens_only,
        time_major,
    )
}
if hasattr(F, "linear_cross_entropy"):  # torch 2.13 and newer

    def torch_linear_cross_entropy(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
        return F.linear_cross_entropy(h.view(-1, D), w, y.view(-1))

    SURFACES["torch_linear_cross_entropy"] = torch_linear_cross_entropy


class SurfaceModel(nn.Module):
    """A trunk, a head and one of the surfaces as its loss."""

    def __init__(self, surface: Surface, dtype: torch.dtype = torch.float32, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.surface = surface
        self.trunk = nn.Parameter(torch.randn(D, D, generator=generator).to(dtype) / 4)
        self.weight = nn.Parameter(torch.randn(V, D, generator=generator).to(dtype))
        self.bias = nn.Parameter(torch.randn(V, generator=generator).to(dtype))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return self.surface(x @ self.trunk, self.weight, self.bias, labels)


def batch(
    rows: int = 2, length: int = 8, dtype: torch.dtype = torch.float32, seed: int = 1
) -> tuple[Tensor, Tensor]:
    """Return hidden inputs (rows, length, D) and labels with some ignored ones."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, length, D, generator=generator).to(dtype)
    labels = torch.randint(0, V, (rows, length), generator=generator)
    labels[:, 1::5] = -100
    return x, labels


def loss_and_grads(model: nn.Module, *args: Any) -> tuple[Tensor, list[Tensor | None]]:
    """Run forward and backward; return the loss and every parameter's gradient."""
    model.zero_grad(set_to_none=True)
    loss = model(*args)
    loss.backward()
    return loss.detach(), [None if p.grad is None else p.grad.clone() for p in model.parameters()]
