"""The engine `reference`: the formula in plain PyTorch, by blocks of rows; any device and dtype."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .call import Found, Request, reference_rows, spans, wanted


def run(given: Request, factors: Tensor | None, mask: Sequence[bool]) -> Found:
    """Compute a number per row, and the gradients of the rows' sum weighted by `factors`."""
    dtype, hidden, weight = given.wide, given.hidden, given.weight
    of_hidden, of_weight, of_bias = wanted(given, factors, mask)
    rows = hidden.new_empty(given.rows, dtype=dtype)
    grad_hidden = torch.empty_like(hidden) if of_hidden else None
    grad_weight = weight.new_zeros(weight.shape, dtype=dtype) if of_weight else None
    grad_bias = weight.new_zeros(given.vocab, dtype=dtype) if of_bias else None
    step = int(reference_rows(given.rows, given.vocab, given.workspace, hidden.itemsize))
    wide_weight = weight.to(dtype)
    for first, stop in spans(given.rows, step):
        here = slice(first, stop)
        student = _logits(hidden[here], weight, given.bias, given.scale, dtype)
        teacher = _logits(
            *(given.teacher[here], given.teacher_weight, given.teacher_bias, given.teacher_scale),
            dtype,
        )
        rows[here], gradient = _divergence(given, student, teacher, factors is not None)
        if gradient is None or factors is None:
            continue
        by = (factors[here].to(dtype) * given.scale).unsqueeze(1)
        gradient = (gradient * by).masked_fill_(by == 0, 0)
        if grad_hidden is not None:
            grad_hidden[here] = gradient @ wide_weight
        if grad_weight is not None:
            grad_weight.addmm_(gradient.t(), hidden[here].to(dtype))
        if grad_bias is not None:
            grad_bias += gradient.sum(0)
    of_weight_ = None if grad_weight is None else grad_weight.to(weight.dtype)
    of_bias_ = None
    if grad_bias is not None and given.bias is not None:
        of_bias_ = grad_bias.to(given.bias.dtype)
    return Found(rows, grad_hidden, of_weight_, of_bias_)


def _logits(
    rows: Tensor, weight: Tensor | None, bias: Tensor | None, scale: float, dtype: torch.dtype
) -> Tensor:
    """Return the log-probabilities of the scaled logits of some rows."""
    logits = rows.to(dtype)
    if weight is not None:
        logits = logits @ weight.to(dtype).t()
    if bias is not None:
        logits = logits + bias.to(dtype)
    return (logits * scale).log_softmax(1)


def _divergence(
    given: Request, log_p: Tensor, log_q: Tensor, needs_gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the sum of each row, and its gradient with respect to the student's scaled logits."""
    a1, a2, a3, a4, a5, a6, share = given.coefficients
    p, q = log_p.exp(), log_q.exp()
    log_m = None
    if given.coefficients.has_mixture:
        one = log_p.new_tensor
        log_m = torch.logaddexp(log_p + one(1 - share).log(), log_q + one(share).log())
    rows = log_p.new_zeros(log_p.shape[0])
    terms: list[tuple[float, Tensor, Tensor | None]]
    terms = [(a1, q, log_q), (a2, q, log_p), (a3, p, log_p), (a4, p, log_q)]
    terms += [(a5, q, log_m), (a6, p, log_m)]
    for factor, probability, logarithm in terms:
        if factor and logarithm is not None:
            rows += factor * _product(probability, logarithm).sum(1)
    if not needs_gradient:
        return rows, None
    gradient = a2 * (q - p)
    if given.coefficients.has_centre:
        slope = torch.zeros_like(p)
        slope += a3 * _product(p, log_p) + a4 * _product(p, log_q)
        if log_m is not None:
            of_mixture = a5 * _ratio(log_q, log_m) + a6 * _ratio(log_p, log_m)
            slope += a6 * _product(p, log_m) + (1 - share) * p * of_mixture
        gradient += slope - p * slope.sum(1, keepdim=True)
    return rows, gradient


def _product(probability: Tensor, logarithm: Tensor) -> Tensor:
    """Return the product, with 0 where the probability is 0, even if the other factor is minus
    infinity."""
    return (probability * logarithm).masked_fill_(probability == 0, 0)


def _ratio(log_a: Tensor, log_b: Tensor) -> Tensor:
    """Return a / b, 0 where a is 0."""
    return (log_a - log_b).exp().masked_fill_(log_a == -torch.inf, 0)
