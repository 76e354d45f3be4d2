"""Divergences in plain PyTorch, and operands for them."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from memeff_compile.kernels.linear_divergence import Coefficients

Formula = Callable[[Tensor, Tensor], Tensor]  # of log-probabilities: student's, teacher's


def jsd(log_p: Tensor, log_q: Tensor, beta: float) -> Tensor:
    mixed = torch.stack([log_p + math.log(1 - beta), log_q + math.log(beta)]).logsumexp(0)
    of_teacher = F.kl_div(mixed, log_q, reduction="none", log_target=True)
    of_student = F.kl_div(mixed, log_p, reduction="none", log_target=True)
    return (beta * of_teacher + (1 - beta) * of_student).sum(-1)


DIVERGENCES: dict[str, tuple[Coefficients, Formula]] = {
    "forward_kl": (
        Coefficients(q_log_q=1, q_log_p=-1),
        lambda p, q: F.kl_div(p, q.exp(), reduction="none").sum(-1),
    ),
    "reverse_kl": (
        Coefficients(p_log_p=1, p_log_q=-1),
        lambda p, q: F.kl_div(q, p, reduction="none", log_target=True).sum(-1),
    ),
    "jsd": (
        Coefficients(0.3, 0, 0.7, 0, -0.3, -0.7, 0.3),
        lambda p, q: jsd(p, q, 0.3),
    ),
    "cross_entropy": (
        Coefficients(q_log_p=-1),
        lambda p, q: -(q.exp() * p).sum(-1),
    ),
    "all sums": (
        Coefficients(0.5, -0.2, 0.7, 0.1, -0.3, -0.7, 0.6),
        lambda p, q: (
            (0.5 * q.exp() * q - 0.2 * q.exp() * p + 0.7 * p.exp() * p + 0.1 * p.exp() * q)
            - (0.3 * q.exp() + 0.7 * p.exp()) * (0.6 * q.exp() + 0.4 * p.exp()).log()
        ).sum(-1),
    ),
    "a mixture that is the student": (
        Coefficients(q_log_q=1, q_log_m=-1, share=0),
        lambda p, q: (q.exp() * (q - p)).sum(-1),
    ),
    "a mixture that is the teacher": (
        Coefficients(p_log_p=1, p_log_m=-1, share=1),
        lambda p, q: (p.exp() * (p - q)).sum(-1),
    ),
}

N, D, K, V = 7, 12, 20, 2500


def draw(
    dtype: torch.dtype = torch.float64, *, vocab: int = V, device: str = "cpu"
) -> dict[str, Tensor]:
    """Return hidden states, weight and bias of a student, which train, and of a teacher."""
    generator = torch.Generator().manual_seed(0)

    def new(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64).to(device, dtype)

    student = {"hidden": new(N, D), "weight": new(vocab, D), "bias": new(vocab)}
    teacher = {"teacher": new(N, K), "teacher_weight": new(vocab, K), "teacher_bias": new(vocab)}
    return {name: each.requires_grad_() for name, each in student.items()} | teacher


def eager(given: dict[str, Tensor], formula: Formula, scale: float, teacher_scale: float) -> Tensor:
    """Return a number per row by the formula, from logits."""
    student = F.linear(given["hidden"], given["weight"], given["bias"]) * scale
    teacher = F.linear(given["teacher"], given["teacher_weight"], given["teacher_bias"])
    return formula(student.log_softmax(-1), (teacher * teacher_scale).log_softmax(-1))
