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

# --- as other packages spell it -------------------------------------------------------------------


def classes_cut_to_all(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
    """As nanochat does where the vocabulary needs no padding: the slice drops no class."""
    logits = F.linear(h, w)[..., :V].float()
    logits = 15 * torch.tanh(logits / 15)
    return F.cross_entropy(logits.view(-1, V), y.view(-1), ignore_index=-100, reduction="mean")


def classes_cut_from_padding(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
    """As nanochat does where the head is padded to a multiple of 64."""
    logits = F.linear(h, w)[..., : V - 5].float()
    return F.cross_entropy(logits.view(-1, V - 5), y.clamp(max=V - 6).view(-1))


def log_softmax_at_positions(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
    log_probs = F.linear(h, w).view(-1, V).log_softmax(-1)
    return -log_probs[torch.arange(y.numel(), device=y.device), y.clamp(min=0).view(-1)].mean()


def negated_log_softmax_gather(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
    """As the label smoother of the Trainer does without smoothing, of logits in fp32.

    In 16 bits its sum and its quotient would both be rounded, and one number shows little.
    """
    losses = -F.log_softmax(F.linear(h, w).float(), dim=-1)
    picked = losses.gather(dim=-1, index=y.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return picked.masked_fill(y.eq(-100), 0.0).sum() / y.ne(-100).sum()


def logsumexp_minus_the_logit(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
    logits, labels = F.linear(h, w).view(-1, V), y.clamp(min=0).view(-1)
    return (logits.logsumexp(-1) - logits[torch.arange(len(labels)), labels]).mean()


def one_hot_times_log_softmax(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
    log_probs = F.log_softmax(F.linear(h, w), dim=-1)
    return -(F.one_hot(y.clamp(min=0), V).to(log_probs.dtype) * log_probs).sum(-1).mean()


def maximum_taken_off_by_hand(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
    logits = F.linear(h, w)
    peak = logits.max(dim=-1, keepdim=True).values.detach()
    log_sum = (logits - peak).exp().sum(-1, keepdim=True).log() + peak
    return -(logits - log_sum).gather(-1, y.clamp(min=0).unsqueeze(-1)).mean()


def softplus_of_the_other_classes(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
    """As x-transformers does: the log-sum-exp of the other classes' distances to the target."""
    logits, labels = F.linear(h, w), y.clamp(min=0).unsqueeze(-1)
    is_target = torch.arange(V, device=y.device) == labels
    distances = torch.where(is_target, -torch.inf, logits - logits.gather(-1, labels))
    losses = F.softplus(distances.logsumexp(-1))
    return torch.where(y != -100, losses, 0.0).sum() / (y != -100).sum()


def smoothing_by_the_mean(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
    """As timm does."""
    log_probs = F.log_softmax(F.linear(h, w).view(-1, V), dim=-1)
    picked = -log_probs.gather(dim=-1, index=y.clamp(min=0).view(-1, 1)).squeeze(1)
    return (0.9 * picked - 0.1 * log_probs.mean(dim=-1)).mean()


def smoothing_by_the_sum(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
    """As fairseq does."""
    log_probs = F.linear(h, w).view(-1, V).log_softmax(-1)
    picked = -log_probs.gather(-1, y.clamp(min=0).view(-1, 1))
    smooth = -log_probs.sum(dim=-1, keepdim=True)
    share = 0.1 / (V - 1)
    return ((0.9 - share) * picked + share * smooth).sum() / 16


def weight_of_the_inputs_dtype(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
    """As in whisper: a cast without effect if weight and hidden states have the same dtype."""
    logits = (h @ torch.transpose(w.to(h.dtype), 0, 1)).float()
    return F.cross_entropy(logits.view(-1, V), y.view(-1))


def normalised_weight(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(h, F.normalize(w, dim=-1)).view(-1, V), y.view(-1))


def pruned_weight(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
    kept = (torch.arange(w.numel(), device=w.device).view_as(w) % 3 > 0).to(w.dtype)
    return F.cross_entropy(F.linear(h, w * kept).view(-1, V), y.view(-1))


def learned_temperature(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
    """As CLIP's heads do: the logits times the exponential of a parameter."""
    return F.cross_entropy((F.linear(h, w) * b[0].exp()).view(-1, V), y.view(-1))


def learned_temperature_first(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
    """As litgpt's adapters do, with one number."""
    return F.cross_entropy((b[0] * F.linear(h, w)).view(-1, V), y.view(-1))


def targets_written_in_place(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
    """As DPO's log-probabilities are made in torchtune and most trainers."""
    logits, labels = F.linear(h, w)[:, :-1], y[:, 1:].clone()
    kept = labels != -100
    labels[labels == -100] = 0
    picked = torch.gather(logits.log_softmax(-1), dim=2, index=labels.unsqueeze(2)).squeeze(2)
    return -(picked * kept).sum(-1).mean()


def z_loss_of_the_rows(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
    """As OLMo does: both losses by rows, the second where there is a target."""
    logits = F.linear(h, w)[..., :-1, :].reshape(-1, V)
    labels = y[..., 1:].reshape(-1)
    losses = F.cross_entropy(logits, labels, ignore_index=-100, reduction="none")
    squares = logits.logsumexp(-1).pow(2) * (labels != -100)
    return (losses.sum() + 1e-2 * squares.sum()) / (labels != -100).sum()


OF_PACKAGES: dict[str, Surface] = {
    f.__name__: f
    for f in (
        classes_cut_to_all,
        classes_cut_from_padding,
        log_softmax_at_positions,
        negated_log_softmax_gather,
        logsumexp_minus_the_logit,
        one_hot_times_log_softmax,
        maximum_taken_off_by_hand,
        softplus_of_the_other_classes,
        smoothing_by_the_mean,
        smoothing_by_the_sum,
        weight_of_the_inputs_dtype,
        normalised_weight,
        pruned_weight,
        learned_temperature,
        learned_temperature_first,
        targets_written_in_place,
        z_loss_of_the_rows,
    )
}

NOT_FUSED = {
    "softplus_of_the_other_classes": "",
}
"""Those that are not fused, and the code they are declined with: empty where there is no record."""


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
