"""The implementation `reference` of `memeff::linear_divergence` and related ops, in plain PyTorch.

A divergence, such as KL, compares the softmax of a student's logits with that of a teacher's. The
module processes one block of rows (tokens) at a time, on any device and in any dtype.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .._head_loss.shapes import spans
from .call import ClassRequest, Found, Request, reference_rows, wanted


def run(given: Request, factors: Tensor | None, mask: Sequence[bool]) -> Found:
    """Compute the divergence of each row (token): one number per row.

    If `factors` (a number per row) is given, also compute the gradients of a sum over all rows:
    each row's divergence times its factor."""
    sums = _Gradients(given, wanted(given, factors, mask))
    rows = given.hidden.new_empty(given.rows, dtype=given.wide)
    for here in sums.blocks():
        student = _logits(given.hidden[here], given.weight, given.bias, given.scale, given.wide)
        teacher = _logits(
            *(given.teacher[here], given.teacher_weight, given.teacher_bias, given.teacher_scale),
            given.wide,
        )
        logs = student.log_softmax(1), teacher.log_softmax(1)
        rows[here], gradient = _divergence(given, *logs, factors is not None)
        if gradient is not None and factors is not None:
            by = factors[here].to(given.wide).unsqueeze(1)
            sums.add(here, (gradient * by).masked_fill_(by == 0, 0))
    return Found(rows, *sums.results())


def run_classes(given: ClassRequest, factors: Tensor | None, mask: Sequence[bool]) -> Found:
    """Compute, for each of N rows (tokens), the log-probabilities of k classes, as (N, k).

    `given.chosen` contains the classes' indices. If `given.is_normalised` is false, compute logits
    instead. If the gradient of these results is given as `factors`, also compute the gradients that
    `mask` requests, such as the weight's gradient.
    """
    sums = _Gradients(given, wanted(given, factors, mask))
    found = given.hidden.new_empty(given.chosen.shape, dtype=given.wide)
    for here in sums.blocks():
        values = _logits(given.hidden[here], given.weight, given.bias, given.scale, given.wide)
        values = values.log_softmax(1) if given.is_normalised else values
        found[here] = values.gather(1, given.chosen[here])
        if factors is not None:
            by = factors[here].to(given.wide)
            gradient = torch.zeros_like(values)
            if given.is_normalised:
                total = by.sum(1, keepdim=True)
                gradient = (-total * values.exp()).masked_fill_(total == 0, 0)
            sums.add(here, gradient.scatter_add_(1, given.chosen[here], by))
    return Found(found, *sums.results())


class _Gradients:
    """The gradients of hidden states, weight and bias, computed from one block of rows (tokens) at
    a time."""

    def __init__(self, given: Request | ClassRequest, trains: tuple[bool, ...]) -> None:
        self.given, weight = given, given.weight
        self.of_hidden, self.of_weight, self.of_bias = trains
        self.hidden = torch.empty_like(given.hidden) if self.of_hidden else None
        self.weight = weight.new_zeros(weight.shape, dtype=given.wide) if self.of_weight else None
        self.bias = weight.new_zeros(given.vocab, dtype=given.wide) if self.of_bias else None

    def blocks(self) -> Iterator[slice]:
        """Yield slices of the call's rows (tokens): blocks whose logits are computed together."""
        given = self.given
        itemsize = given.hidden.itemsize
        step = int(reference_rows(given.rows, given.vocab, given.workspace, itemsize))
        for first, stop in spans(0, given.rows, step):
            yield slice(first, stop)

    def add(self, here: slice, gradient: Tensor) -> None:
        """Add the contribution of the rows `here` to the gradients of hidden states, weight and
        bias.

        `gradient` is the gradient of these rows' scaled logits.
        """
        gradient, dtype = gradient * self.given.scale, self.given.wide
        if self.hidden is not None:
            self.hidden[here] = gradient @ self.given.weight.to(dtype)
        if self.weight is not None:
            self.weight.addmm_(gradient.t(), self.given.hidden[here].to(dtype))
        if self.bias is not None:
            self.bias += gradient.sum(0)

    def results(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the gradients of hidden states, weight and bias."""
        bias = self.given.bias
        of_weight = None if self.weight is None else self.weight.to(self.given.weight.dtype)
        of_bias = None if self.bias is None or bias is None else self.bias.to(bias.dtype)
        return self.hidden, of_weight, of_bias


def _logits(
    rows: Tensor, weight: Tensor | None, bias: Tensor | None, scale: float, dtype: torch.dtype
) -> Tensor:
    """Return scaled logits.

    `rows` contains hidden states, or, without a weight, logits."""
    logits = rows.to(dtype)
    if weight is not None:
        logits = logits @ weight.to(dtype).t()
    if bias is not None:
        logits = logits + bias.to(dtype)
    return logits * scale


def _divergence(
    given: Request, log_p: Tensor, log_q: Tensor, needs_gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the divergence of each row, and its gradient with respect to the student's scaled
    logits."""
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
    """Multiply a probability by a logarithm.

    Where the probability is 0, the product is 0, even if the logarithm is minus infinity."""
    return (probability * logarithm).masked_fill_(probability == 0, 0)


def _ratio(log_a: Tensor, log_b: Tensor) -> Tensor:
    """Return a / b, or 0 where a is 0."""
    return (log_a - log_b).exp().masked_fill_(log_a == -torch.inf, 0)
