"""Graphs that look almost like a fused loss: each is left alone, or rewritten and still right.

Every case runs in float64 with the inner compiler eager, so that whatever the passes decide must give
the values and gradients of eager to twelve digits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.support.captured_graphs import compare_with_eager
from tests.support.surfaces import D, V

Function = Callable[..., Any]


def head_inputs(rows: int = 2, length: int = 8, ignored: bool = True) -> tuple[Tensor, ...]:
    """Return hidden states, a weight (V, D), a bias (V,) in float64, and labels."""
    generator = torch.Generator().manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    hidden, weight, bias = normal(rows, length, D), normal(V, D), normal(V)
    labels = torch.randint(0, V, (rows, length), generator=generator)
    if ignored:
        labels[:, 1::5] = -100
    return hidden.requires_grad_(), weight.requires_grad_(), bias.requires_grad_(), labels


def logits_of(h: Tensor, w: Tensor) -> Tensor:
    return F.linear(h, w)


def loss_of(logits: Tensor, y: Tensor, **settings: Any) -> Tensor:
    return F.cross_entropy(logits.view(-1, V), y.view(-1), **settings)


@dataclass(frozen=True)
class Case:
    """A function of (hidden, weight, bias, labels), how often the pass fires, and why not: codes."""

    function: Function
    fires: int = 0
    code: str = ""
    fullgraph: bool = True


# --- other readers of the logits --------------------------------------------------------------------


def entropy_of_the_logits(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    logits = logits_of(h, w)
    p = logits.softmax(-1)
    return loss_of(logits, y), -(p * (p + 1e-9).log()).sum(-1).mean()


def argmax_of_the_logits(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    logits = logits_of(h, w)
    return loss_of(logits, y), (logits.argmax(-1) == y).sum()


def kl_to_a_teacher(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    logits = logits_of(h, w)
    teacher = logits_of(h.detach() * 1.5, w.detach()).log_softmax(-1)
    student = logits.log_softmax(-1)
    return loss_of(logits, y) + F.kl_div(student, teacher, log_target=True, reduction="sum")


def log_softmax_is_returned(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    log_probs = logits_of(h, w).view(-1, V).log_softmax(-1)
    return F.nll_loss(log_probs, y.view(-1)), log_probs


def max_of_the_logits(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    logits = logits_of(h, w)
    return loss_of(logits, y) + 1e-3 * logits.amax(-1).square().mean()


def gather_without_logsumexp(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    logits = logits_of(h, w)
    return loss_of(logits, y) + logits.gather(-1, y.clamp(min=0).unsqueeze(-1)).mean()


def logsumexp_alone(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    return logits_of(h, w).logsumexp(-1).mean()


def logsumexp_over_rows(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    logits = logits_of(h, w)
    return loss_of(logits, y) + logits.logsumexp(1).mean()


# --- writes in place ----------------------------------------------------------------------------------


def logits_written(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    logits = logits_of(h, w)
    logits.mul_(0.5)
    return loss_of(logits, y)


def logits_written_by_operator(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    logits = logits_of(h, w)
    logits += 1.0
    logits[..., 0] = -5.0
    return loss_of(logits, y)


def view_of_logits_written(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    logits = logits_of(h, w)
    logits[:, :, :3].zero_()
    return loss_of(logits, y)


def logits_masked_in_place(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    logits = logits_of(h, w)
    logits.masked_fill_(torch.arange(V) > 40, -1e4)
    return loss_of(logits, y)


@torch.no_grad()
def hidden_written(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    hidden = h * 2
    logits = logits_of(hidden, w)
    hidden.zero_()
    return loss_of(logits, y), hidden


@torch.no_grad()
def hidden_view_written(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    hidden = h * 2
    logits = logits_of(hidden, w)
    hidden.view(-1)[3:].fill_(7.0)
    return loss_of(logits, y)


@torch.no_grad()
def weight_written(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    logits = logits_of(h, w)
    w.t()[0].mul_(2.0)
    return loss_of(logits, y)


@torch.no_grad()
def an_input_that_may_be_the_hidden_states_written(
    h: Tensor, w: Tensor, b: Tensor, y: Tensor
) -> Any:
    logits = logits_of(h, w)
    b.zero_()
    return loss_of(logits, y)


def hidden_written_before_the_head(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    hidden = h * 2
    hidden.add_(1.0)
    return loss_of(logits_of(hidden, w), y)


def targets_written(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    logits = logits_of(h, w)
    y[:, 0] = 3
    return loss_of(logits, y)


@torch.no_grad()
def targets_written_after(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    loss = loss_of(logits_of(h, w), y)
    y[:, 0] = 3
    return loss


@torch.no_grad()
def targets_written_between_two_losses(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    logits = logits_of(h, w)
    first = loss_of(logits, y)
    y.clamp_(min=0)
    return first + loss_of(logits, y)


def copies_of_targets_written_between(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    short = y.to(torch.int32)
    before = short.to(torch.int64)
    short.clamp_(min=0)
    after = short.to(torch.int64)
    logits = logits_of(h, w)
    return loss_of(logits, before) + loss_of(logits, after)


@torch.no_grad()
def row_index_written(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    order = torch.arange(8)
    logits = logits_of(h, w).index_select(1, order)
    order.add_(1).remainder_(8)
    return loss_of(logits, y)


def class_weights_written(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    weight = torch.ones(V, dtype=torch.float64)
    logits = logits_of(h, w)
    weight[::2] = 2.0
    return loss_of(logits, y, weight=weight)


def bias_written(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    vector = b.detach() * 1
    logits = logits_of(h, w) + vector
    vector.zero_()
    return loss_of(logits, y)


def logits_written_after_the_loss(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    with torch.no_grad():
        logits = logits_of(h, w)
        loss = loss_of(logits, y)
        logits.zero_()
    return loss, logits


def cache_written_between(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    cache = torch.zeros(2, 8, D, dtype=torch.float64)
    logits = logits_of(h, w)
    cache.copy_(h.detach())
    return loss_of(logits, y), cache


# --- logits that are not the head's alone -------------------------------------------------------------


def masked_fill_on_logits(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    return loss_of(logits_of(h, w).masked_fill(torch.arange(V) > 44, -1e4), y.clamp(max=44))


def dropout_on_logits(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    return loss_of(F.dropout(logits_of(h, w), 0.5, True), y)


def learned_temperature(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    return loss_of(logits_of(h, w) * b[0], y)


def tensor_temperature(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    return loss_of(logits_of(h, w) / torch.full((), 2.0, dtype=torch.float64), y)


def temperature_per_row(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    return loss_of(logits_of(h, w) / h[..., :1].abs().clamp(min=0.5), y)


def zero_scale(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    return loss_of(logits_of(h, w) * 0.0, y)


def vanishing_scale(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    return loss_of(logits_of(h, w) * 1e-200 * 1e-200, y)


def negative_scale(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    return loss_of(logits_of(h, w) * -0.5, y)


def scale_vector(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    return loss_of(logits_of(h, w) * b, y)


def scaled_added_bias(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    return loss_of(torch.add(logits_of(h, w), b, alpha=2), y)


def double_tanh(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    return loss_of(torch.tanh(torch.tanh(logits_of(h, w))), y)


def negative_softcap(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    return loss_of(torch.tanh(logits_of(h, w) / 3.0) * -3.0, y)


def unequal_softcap(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    return loss_of(torch.tanh(logits_of(h, w) / 3.0) * 5.0, y)


def bias_before_softcap(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    return loss_of(torch.tanh((logits_of(h, w) + b) / 3.0) * 3.0, y)


def scale_bias_scale_softcap(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    return loss_of(torch.tanh((F.linear(h, w, b) * 0.5 + b) / 3.0) * 3.0, y)


def bias_after_softcap(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    return loss_of(torch.tanh(logits_of(h, w)) + b, y)


def two_biases(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    return loss_of(b + (F.linear(h, w, b) * 0.5 + b.view(1, V)), y)


def bias_per_row(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    return loss_of(logits_of(h, w) + h[..., :1], y)


def number_added(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    return loss_of(logits_of(h, w) + 1.0, y)


def logits_plus_other_logits(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    return loss_of(logits_of(h, w) + F.linear(h.sin(), w), y)


def logits_plus_logits_of_low_rank(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    down, up = w[:4], w[:, :4]
    return loss_of(logits_of(h, w) + F.linear(F.linear(h, down), up), y)


def cat_of_two_heads(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    both = torch.cat([logits_of(h, w), F.linear(h, w[:8])], -1)
    return F.cross_entropy(both.view(-1, V + 8), y.view(-1))


def relu_on_logits(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    return loss_of(F.relu(logits_of(h, w)), y)


# --- where the classes are --------------------------------------------------------------------------


def vocabulary_split(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    return F.cross_entropy(
        logits_of(h, w).view(-1, V // 2), y.view(-1).repeat_interleave(2).remainder(V // 2)
    )


def vocabulary_columns_sliced(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    return F.cross_entropy(logits_of(h, w)[..., :40].reshape(-1, 40), y.clamp(max=39).view(-1))


def vocabulary_columns_permuted(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    return loss_of(logits_of(h, w).flip(-1), y)


def vocabulary_columns_indexed(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    return loss_of(logits_of(h, w)[..., torch.arange(V - 1, -1, -1)], y)


def classes_transposed(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    square = F.linear(h.reshape(-1, D)[:1].expand(V, D), w)
    return F.cross_entropy(square.t(), torch.arange(V))


def softmax_over_length(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    log_probs = logits_of(h, w).log_softmax(1)
    return -log_probs.gather(-1, y.clamp(min=0).unsqueeze(-1)).mean()


def softmax_over_length_of_moved_classes(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    return F.nll_loss(F.log_softmax(logits_of(h, w).transpose(1, 2), dim=-1), y)


def softmax_over_moved_classes(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    return F.nll_loss(F.log_softmax(logits_of(h, w).transpose(1, 2), dim=1), y)


def classes_in_the_middle(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    logits = logits_of(h.repeat(1, 6, 1), w)  # (2, 48, V): 48 rows are taken for classes
    return F.cross_entropy(logits, y.repeat(1, 6).clamp(0))


def softmax_over_batch(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    log_probs = F.log_softmax(logits_of(h, w).view(-1, V), dim=0)
    return F.nll_loss(log_probs, y.view(-1))


def gather_of_two_classes(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    index = torch.stack([y.clamp(min=0), y.clamp(min=3)], -1)
    return -logits_of(h, w).log_softmax(-1).gather(-1, index).mean()


def gather_of_clamped_log_probs(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    clamped = logits_of(h, w).log_softmax(-1).clamp(min=-3.0) * 2
    return -clamped.gather(-1, y.clamp(min=0).unsqueeze(-1)).mean()


def gather_of_log_probs_plus_a_mask(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    masked = logits_of(h, w).log_softmax(-1) + b
    return -masked[torch.arange(2)[:, None], torch.arange(8), y.clamp(min=0)].mean()


def taken_modulo_the_classes(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    log_probs = logits_of(h, w).log_softmax(-1)
    return -torch.take_along_dim(log_probs, y.unsqueeze(-1) * 7, -1).mean()


def taken_and_gathered(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    log_probs = logits_of(h, w).log_softmax(-1)
    index = y.clamp(min=0).unsqueeze(-1)
    return log_probs.gather(-1, index).mean() * log_probs.take_along_dim(index, -1).sum()


def gather_of_rows(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    index = y.clamp(0, 7).unsqueeze(-1)
    return -logits_of(h, w).log_softmax(-1).gather(1, index).mean()


def gather_of_fewer_rows(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    index = y[:, :4].clamp(min=0).unsqueeze(-1)
    return -logits_of(h, w).log_softmax(-1).gather(-1, index).mean()


def rows_repeated(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    logits = logits_of(h[:, :1], w).expand(-1, 8, -1)
    return F.cross_entropy(logits.reshape(-1, V), y.view(-1))


def rows_interleaved(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    logits = logits_of(h, w).repeat_interleave(2, dim=1)
    return F.cross_entropy(logits.reshape(-1, V), y.repeat_interleave(2, dim=1).view(-1))


def rows_reversed(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    return F.cross_entropy(logits_of(h, w).flip(1).reshape(-1, V), y.view(-1))


def rows_indexed(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    order = torch.tensor([5, 0, 3])
    return F.cross_entropy(logits_of(h, w)[:, order].view(-1, V), y[:, order].reshape(-1))


def squeezed_and_unsqueezed(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    logits = logits_of(h, w)[:1].squeeze(0).unsqueeze(0).unsqueeze(2).squeeze(2)
    return F.cross_entropy(logits.view(-1, V), y[0])


def one_row(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    return F.cross_entropy(logits_of(h[0, 0], w), y[0, 0])


def sequence_of_four_dimensions(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    logits = logits_of(h.view(2, 2, 4, D), w)
    return F.cross_entropy(logits.flatten(0, 1).flatten(0, 1), y.flatten())


def classes_moved_in_four_dimensions(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    logits = logits_of(h.view(2, 2, 4, D), w).permute(0, 3, 1, 2)
    return F.cross_entropy(logits, y.view(2, 2, 4), reduction="none").sum()


# --- the loss's arguments -----------------------------------------------------------------------------


def probability_targets(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    target = torch.full((16, V), 1 / V, dtype=torch.float64)
    return F.cross_entropy(logits_of(h, w).view(-1, V), target)


@torch.no_grad()  # with gradients eager refuses them, too
def class_weights_with_gradient(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    return loss_of(logits_of(h, w), y, weight=b.requires_grad_())


def class_weights_of_an_input(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    return loss_of(logits_of(h, w), y, weight=b.detach().sigmoid())


def everything_ignored(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    return loss_of(logits_of(h, w), torch.full_like(y, -100))


def everything_ignored_and_summed(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    return loss_of(logits_of(h, w), torch.full_like(y, -100), reduction="sum")


def ignored_class_in_the_vocabulary(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    return loss_of(logits_of(h, w), y.clamp(min=0), ignore_index=0)


# --- several losses and heads -------------------------------------------------------------------------


def one_head_two_losses(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    logits = logits_of(h, w)
    other = y.clamp(min=0).flip(0)
    return loss_of(logits, y) + 0.3 * loss_of(logits, other, reduction="sum")


def one_head_called_twice(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    return loss_of(logits_of(h, w), y) + loss_of(logits_of(h.flip(1), w), y)


def multi_token_prediction(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    first = F.cross_entropy(logits_of(h, w)[:, :-1].reshape(-1, V), y[:, 1:].reshape(-1))
    second = F.linear(torch.tanh(h), w * 2, b)
    return first + F.cross_entropy(second[:, :-2].reshape(-1, V), y[:, 2:].reshape(-1))


def two_reductions_of_one_loss(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    logits = logits_of(h, w)
    return (
        loss_of(logits, y),
        loss_of(logits, y, reduction="sum"),
        loss_of(logits, y, reduction="none"),
    )


def z_loss_before_the_targets_exist(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    logits = logits_of(h, w)
    penalty = logits.logsumexp(-1).square().mean() * 1e-2
    shifted = F.pad(y, (0, 1), value=-100)[:, 1:].contiguous()
    return F.cross_entropy(logits.view(-1, V), shifted.view(-1)) + penalty


def loss_before_the_second_targets_exist(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    logits = logits_of(h, w)
    first = loss_of(logits, y)
    scaled = first * 2
    return scaled + loss_of(logits, y.view(-1).unsqueeze(0), reduction="sum")


def log_probs_twice(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    log_probs = logits_of(h, w).log_softmax(-1)
    index = y.clamp(min=0).unsqueeze(-1)
    return log_probs.gather(-1, index), log_probs.gather(-1, index.flip(0))


def rows_then_other_rows(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    logits = logits_of(h, w)
    return F.cross_entropy(logits[:, 0], y[:, 0]) + F.cross_entropy(logits[:, -1], y[:, -1])


def tied_to_an_embedding(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    hidden = h + F.embedding(y.clamp(min=0), w)
    return loss_of(logits_of(hidden, w), y)


def head_of_a_transposed_weight(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    columns = w.t().contiguous()
    return loss_of(h @ columns, y)


def head_weight_computed(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    return loss_of(logits_of(h, w / w.norm(dim=1, keepdim=True)), y)


def head_weight_computed_logits_returned(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    logits = logits_of(h, w / w.norm(dim=1, keepdim=True))
    return loss_of(logits, y), logits


# --- gradients, regions, nested graphs ------------------------------------------------------------------


def loss_without_gradient(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    with torch.no_grad():
        loss = loss_of(logits_of(h, w), y)
    return loss, h.sum()


def only_the_loss_without_gradient(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    logits = logits_of(h, w)
    with torch.no_grad():
        loss = loss_of(logits, y)
    return loss, h.sum()


def metric_without_gradient_beside_a_loss(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    logits = logits_of(h, w)
    with torch.no_grad():
        metric = loss_of(logits, y, reduction="sum")
    return loss_of(logits, y), metric


def metric_of_detached_logits(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    logits = logits_of(h, w)
    return loss_of(logits, y) + loss_of(logits.detach(), y, reduction="sum")


def detached_hidden(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    return loss_of(logits_of(h.detach(), w), y)


def detached_weight(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    return loss_of(logits_of(h, w.detach()), y)


def loss_in_a_checkpoint(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    return checkpoint(lambda h, w, y: loss_of(logits_of(h, w), y), h, w, y, use_reentrant=False)


def logits_leave_a_checkpoint(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    def body(h: Tensor, w: Tensor, y: Tensor) -> Any:
        logits = logits_of(h, w)
        return loss_of(logits, y), logits

    return checkpoint(body, h, w, y, use_reentrant=False)


def loss_outside_the_checkpoint_of_the_head(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    logits = checkpoint(logits_of, h, w, use_reentrant=False)
    return loss_of(logits, y)


def loss_in_a_branch(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    return torch.cond(
        h.sum() > 0,
        lambda h, w, y: loss_of(logits_of(h, w), y),
        lambda h, w, y: loss_of(logits_of(h * 2, w), y),
        (h, w, y),
    )


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, w: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(h, w)
        return loss_of(logits_of(h, w), y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        h, w = ctx.saved_tensors
        return grad * h, grad * w, None


def loss_in_an_autograd_function(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    return _Doubled.apply(h, w, y)


# --- losses that are almost written out by hand -----------------------------------------------------


def log_probs_of(h: Tensor, w: Tensor) -> Tensor:
    return logits_of(h, w).view(-1, V).log_softmax(-1)


def kept(y: Tensor) -> Tensor:
    return y.view(-1).clamp(min=0)


def rows_from_another_start(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    return -log_probs_of(h, w)[torch.arange(-1, 15), kept(y)].mean()


def rows_by_another_step(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    return -log_probs_of(h, w)[torch.arange(0, 16, 2), kept(y)[::2]].mean()


def range_backwards(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    return -log_probs_of(h, w)[range(15, -1, -1), kept(y)].mean()


def ranges_along_two_dimensions(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    """Two ranges pick the entries of a diagonal, not of all rows."""
    logs = logits_of(h[:, :2], w).log_softmax(-1)
    return -logs[range(2), range(2), kept(y)[:2]].mean()


def log_of_one_position(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    probs = log_probs_of(h, w).exp().unflatten(0, (2, 8))
    return -probs.gather(-1, kept(y).view(2, 8, 1))[:, 1].log().mean()


def rows_backwards(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    return -log_probs_of(h, w)[torch.arange(16).flip(0), kept(y)].mean()


def first_rows(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    return -log_probs_of(h, w)[torch.arange(4), kept(y)[:4]].mean()


def one_row_for_all(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    return -log_probs_of(h, w)[torch.arange(1).expand(16), kept(y)].mean()


def rows_written_to(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    rows = torch.arange(16)
    rows.sub_(1)
    return -log_probs_of(h, w)[rows, kept(y)].mean()


def rows_of_an_input(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    return -log_probs_of(h, w)[kept(y) % 16, kept(y)].mean()


def every_row_with_every_target(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    return -log_probs_of(h, w)[torch.arange(16), kept(y)[:, None]].mean()


def one_target_for_all_rows(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    return -log_probs_of(h, w)[torch.arange(16), kept(y)[:1]].mean()


def targets_and_rows_swapped(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    return -log_probs_of(h, w)[kept(y) % 16, torch.arange(16)].mean()


def positions_swapped(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    h = h.expand(8, 8, -1) if h.shape[0] == 1 else torch.cat([h] * 4)
    rows, columns = torch.arange(8)[:, None], torch.arange(8)[None]
    targets = kept(y)[:8].expand(8, 8)
    return -logits_of(h, w).log_softmax(-1)[columns, rows, targets].mean()


def last_rows_by_number(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    return -logits_of(h, w).log_softmax(-1)[torch.arange(2), -1, y[:, -1].clamp(min=0)].mean()


def entries_of_probabilities(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    return -log_probs_of(h, w).exp()[torch.arange(16), kept(y)].mean()


def one_hot_changed(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    target = F.one_hot(kept(y), V)
    target[:, 0] = 0
    return -(target * log_probs_of(h, w)).sum(-1).mean()


def one_hot_changed_later(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    target, logs = F.one_hot(kept(y), V).double(), log_probs_of(h, w)
    target.mul_(y.view(-1, 1) != -100)
    return -(target * logs).sum(-1).mean()


def targets_changed_after_their_one_hot_form(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    index = kept(y)
    target = F.one_hot(index, V)
    index.zero_()
    return -(target * log_probs_of(h, w)).sum(-1).mean() + index.sum()


def one_hot_of_other_rows(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    target = F.one_hot(kept(y)[:8], V)
    return -(target * logits_of(h, w).log_softmax(-1)).sum(-1).mean()


def one_hot_over_rows(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    return -(F.one_hot(kept(y), V) * log_probs_of(h, w)).sum(0).mean()


def one_hot_that_is_returned(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    target = F.one_hot(kept(y), V)
    return -(target * log_probs_of(h, w)).sum(-1).mean(), target


def one_hot_of_one_class(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    return -(F.one_hot(kept(y) * 0, 1) * log_probs_of(h, w)).sum(-1).mean()


def scattered_twice(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    logs, index = log_probs_of(h, w), kept(y)[:, None]
    target = torch.zeros_like(logs).scatter_(-1, index, 0.7)
    target.scatter_(-1, index * 0, 0.3)
    return -(target * logs).sum(-1).mean()


def scattered_without_a_padded_class(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    logs, index = log_probs_of(h, w), kept(y)[:, None]
    target = torch.full_like(logs, 0.1 / V).scatter_(-1, index, 0.9)
    target[:, 0] = 0
    return -(target * logs).sum(-1).mean()


def scattered_into_whole_numbers(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    logs, index = log_probs_of(h, w), kept(y)[:, None]
    target = torch.zeros(logs.shape, dtype=torch.int64).scatter_(-1, index, 0.9)
    return -((target + 1) * logs).sum(-1).mean()


def scattered_over_rows(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    logs = log_probs_of(h, w)
    target = torch.zeros_like(logs).scatter_(0, (torch.arange(V) % 16)[None], 1.0)
    return -(target * logs).sum(-1).mean()


def soft_targets(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    target = torch.linspace(0, 1, V, dtype=h.dtype).expand(16, V)
    return -(target * log_probs_of(h, w)).sum(-1).mean()


def soft_targets_over_everything(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    target = torch.linspace(0, 1, V, dtype=h.dtype).expand(16, V)
    return -(log_probs_of(h, w) * target).sum()


def shifted(h: Tensor, w: Tensor) -> Tensor:
    return logits_of(h, w).view(-1, V)


def entry_of(z: Tensor, y: Tensor) -> Tensor:
    return z.gather(-1, kept(y)[:, None]).squeeze(-1)


def maximum_detached_where_it_is_taken_off(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    z = shifted(h, w)
    peak = z.amax(-1, keepdim=True)
    lse = (z - peak.detach()).exp().sum(-1).log() + peak.squeeze(-1)
    return (lse - entry_of(z, y)).mean() + z.log_softmax(-1).gather(-1, kept(y)[:, None]).sum()


def maximum_detached_where_it_is_added(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    z = shifted(h, w)
    peak = z.amax(-1, keepdim=True)
    lse = (z - peak).exp().sum(-1).log() + peak.squeeze(-1).detach()
    return (lse - entry_of(z, y)).mean() + z.log_softmax(-1).gather(-1, kept(y)[:, None]).sum()


def maximum_over_rows(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    x = shifted(h, w)
    x = x - x.max(0, keepdim=True).values
    return -(x - x.exp().sum(-1, keepdim=True).log()).gather(-1, kept(y)[:, None]).mean()


def maximum_of_other_logits(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    z = shifted(h, w)
    lse = (z - z.amax(-1, keepdim=True)).exp().sum(-1).log() + (z * 2).amax(-1)
    return (lse - entry_of(z, y)).mean() + z.log_softmax(-1).gather(-1, kept(y)[:, None]).sum()


def minimum_taken_off(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    z = shifted(h, w)
    lse = (z - z.amin(-1, keepdim=True)).exp().sum(-1).log() + z.amax(-1)
    return (lse - entry_of(z, y)).mean() + z.log_softmax(-1).gather(-1, kept(y)[:, None]).sum()


def maximum_taken_off_and_not_added(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    z = shifted(h, w)
    lse = (z - z.amax(-1, keepdim=True)).exp().sum(-1).log()
    return (lse - entry_of(z, y)).mean() + z.log_softmax(-1).gather(-1, kept(y)[:, None]).sum()


def maximum_added_to_columns(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    z = shifted(h, w)
    peak = z.amax(-1, keepdim=True)
    lse = (z - peak).exp().sum(-1).log() + peak
    return lse.mean() + z.log_softmax(-1).gather(-1, kept(y)[:, None]).sum()


def maximum_of_rows_taken_off_classes(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    z = F.linear(h.reshape(-1, D).repeat(3, 1), w)  # as many rows as classes
    x = z - z.amax(-1)
    return -(x - x.exp().sum(-1, keepdim=True).log()).gather(-1, kept(y).repeat(3)[:, None]).mean()


def smoothed_over_rows(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    logs = log_probs_of(h, w)
    return -logs.gather(-1, kept(y)[:, None]).mean() - logs.mean(0).sum()


def smoothed_by_a_median(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    logs = log_probs_of(h, w)
    return -logs.gather(-1, kept(y)[:, None]).mean() - logs.median(-1).values.sum()


def shape_of_logits_and_their_values(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    logs = log_probs_of(h, w)
    return -logs.gather(-1, kept(y)[:, None]).sum() / logs.numel() - logs.pow(2).mean()


BY_HAND: dict[str, Case] = {
    case.function.__name__: case
    for case in (
        *(Case(f, 0, "rows_differ") for f in (rows_from_another_start, rows_by_another_step)),
        *(Case(f, 0, "rows_differ") for f in (rows_backwards, first_rows, one_row_for_all)),
        *(Case(f, 0, "rows_differ") for f in (range_backwards, ranges_along_two_dimensions)),
        Case(log_of_one_position, 0),
        *(Case(f, 0, "rows_differ") for f in (rows_written_to, rows_of_an_input)),
        *(Case(f, 0, "rows_differ") for f in (every_row_with_every_target, positions_swapped)),
        *(Case(f, 0, "rows_differ") for f in (one_target_for_all_rows, targets_and_rows_swapped)),
        Case(last_rows_by_number, 0, "rows_differ"),
        Case(entries_of_probabilities, 0, "unknown_step"),
        *(Case(f, 0, "prob_targets") for f in (one_hot_changed, one_hot_changed_later)),
        Case(targets_changed_after_their_one_hot_form, 0, "prob_targets"),
        *(Case(f, 0, "prob_targets") for f in (one_hot_of_other_rows, one_hot_that_is_returned)),
        Case(one_hot_over_rows),
        *(Case(f, 0, "prob_targets") for f in (one_hot_of_one_class, scattered_twice)),
        Case(scattered_without_a_padded_class, 0, "prob_targets"),
        *(Case(f, 0, "prob_targets") for f in (scattered_into_whole_numbers, scattered_over_rows)),
        *(Case(f, 0, "prob_targets") for f in (soft_targets, soft_targets_over_everything)),
        Case(maximum_detached_where_it_is_taken_off, 0, "logits_reused(amax)"),
        Case(maximum_detached_where_it_is_added, 0, "logits_reused(amax)"),
        Case(maximum_over_rows),
        Case(maximum_of_other_logits, 0, "logits_reused(amax)"),
        Case(minimum_taken_off, 0, "logits_reused(amin)"),
        Case(maximum_taken_off_and_not_added, 0, "logits_reused(amax)"),
        Case(maximum_added_to_columns, 0, "logits_reused(amax)"),
        Case(maximum_of_rows_taken_off_classes),
        Case(smoothed_over_rows, 0, "logits_reused(mean)"),
        Case(smoothed_by_a_median, 0, "logits_reused(median)"),
        Case(shape_of_logits_and_their_values, 0, "logits_reused(pow)"),
    )
}


CASES: dict[str, Case] = {
    case.function.__name__: case
    for case in (
        Case(entropy_of_the_logits, 0, "logits_reused(softmax)"),
        Case(argmax_of_the_logits, 1),
        Case(kl_to_a_teacher, 1),
        Case(log_softmax_is_returned, 0, "logits_reused(output)"),
        Case(max_of_the_logits, 0, "logits_reused(amax)"),
        Case(gather_without_logsumexp, 0, "logits_reused(gather)"),
        Case(logsumexp_alone),
        Case(logsumexp_over_rows, 0, "logits_reused(logsumexp)"),
        Case(logits_written, 0, "mutated"),
        Case(logits_written_by_operator, 0, "no_linear_head"),
        Case(view_of_logits_written, 0, "mutated"),
        Case(logits_masked_in_place, 0, "mutated"),
        Case(hidden_written, 0, "mutated"),
        Case(hidden_view_written, 0, "mutated"),
        Case(weight_written, 0, "mutated"),
        Case(an_input_that_may_be_the_hidden_states_written, 0, "mutated"),
        Case(hidden_written_before_the_head, 1),
        Case(targets_written, 0, "mutated"),
        Case(targets_written_after, 1),
        Case(targets_written_between_two_losses, 0, "mutated"),
        Case(copies_of_targets_written_between, 1),
        Case(row_index_written, 0, "mutated"),
        Case(class_weights_written, 1),
        Case(bias_written, 0, "mutated"),
        Case(logits_written_after_the_loss, 0, "mutated"),
        Case(cache_written_between, 1),
        Case(masked_fill_on_logits, 0, "no_linear_head"),
        Case(dropout_on_logits, 0, "no_linear_head"),
        Case(learned_temperature, 1),
        Case(tensor_temperature, 1),
        Case(temperature_per_row, 1),
        Case(zero_scale, 0, "scale_not_constant"),
        Case(vanishing_scale, 0, "scale_not_constant"),
        Case(negative_scale, 1),
        Case(scale_vector, 0, "scale_not_constant"),
        Case(scaled_added_bias, 0, "logits_combined"),
        Case(double_tanh, 0, "softcap_twice"),
        Case(negative_softcap, 1),
        Case(unequal_softcap, 1),
        Case(bias_before_softcap, 1),
        Case(scale_bias_scale_softcap, 1),
        Case(bias_after_softcap, 0, "bias_after_softcap"),
        Case(two_biases, 1),
        Case(bias_per_row, 0, "logits_combined"),
        Case(number_added, 0, "no_linear_head"),
        Case(logits_plus_other_logits, 0, "logits_combined"),
        Case(logits_plus_logits_of_low_rank, 1),
        Case(cat_of_two_heads, 0, "no_linear_head"),
        Case(relu_on_logits, 0, "no_linear_head"),
        Case(vocabulary_split, 0, "class_dim_changed"),
        Case(vocabulary_columns_sliced, 1),
        Case(vocabulary_columns_permuted, 0, "no_linear_head"),
        Case(vocabulary_columns_indexed, 0, "unknown_step"),
        Case(classes_transposed, 0, "no_linear_head"),
        Case(softmax_over_length, 0, "unknown_step"),
        Case(softmax_over_length_of_moved_classes, 0, "not_log_softmax"),
        Case(softmax_over_moved_classes, 1),
        Case(classes_in_the_middle, 0, "class_dim_changed"),
        Case(softmax_over_batch, 0, "not_log_softmax"),
        Case(gather_of_two_classes, 0),
        Case(gather_of_clamped_log_probs, 0, "unknown_step"),
        Case(gather_of_log_probs_plus_a_mask, 0, "unknown_step"),
        Case(taken_modulo_the_classes, 1),
        Case(taken_and_gathered, 1),
        Case(gather_of_rows, 0),
        Case(gather_of_fewer_rows, 0, "rows_differ"),
        Case(rows_repeated, 0, "no_linear_head"),
        Case(rows_interleaved, 0, "no_linear_head"),
        Case(rows_reversed, 0, "no_linear_head"),
        Case(rows_indexed, 1),
        Case(squeezed_and_unsqueezed, 1),
        Case(one_row, 1),
        Case(sequence_of_four_dimensions, 1),
        Case(classes_moved_in_four_dimensions, 1),
        Case(probability_targets, 0, "prob_targets"),
        Case(class_weights_with_gradient, 0, "class_weight"),
        Case(class_weights_of_an_input, 1),
        Case(everything_ignored, 1),
        Case(everything_ignored_and_summed, 1),
        Case(ignored_class_in_the_vocabulary, 1),
        Case(one_head_two_losses, 1),
        Case(one_head_called_twice, 2),
        Case(multi_token_prediction, 2),
        Case(two_reductions_of_one_loss, 1),
        Case(z_loss_before_the_targets_exist, 1),
        Case(loss_before_the_second_targets_exist, 1),
        Case(log_probs_twice, 1),
        Case(rows_then_other_rows, 1),
        Case(tied_to_an_embedding, 1),
        Case(head_of_a_transposed_weight, 1),
        Case(head_weight_computed, 1),
        Case(head_weight_computed_logits_returned, 0, "logits_not_deferrable"),
        Case(loss_without_gradient, 1),
        Case(only_the_loss_without_gradient, 0, "region_mismatch"),
        Case(metric_without_gradient_beside_a_loss, 1),
        Case(metric_of_detached_logits, 1),
        Case(detached_hidden, 1),
        Case(detached_weight, 1),
        Case(loss_in_a_checkpoint, 1),
        Case(logits_leave_a_checkpoint, 0, "logits_leave_checkpoint"),
        Case(loss_outside_the_checkpoint_of_the_head, 0, "no_linear_head"),
        Case(loss_in_a_branch, 0),
        Case(loss_in_an_autograd_function, 0),
    )
}


@pytest.mark.parametrize("case", (CASES | BY_HAND).values(), ids=CASES | BY_HAND)
def test_near_miss_equals_eager(case: Case) -> None:
    outcome = compare_with_eager(case.function, *head_inputs())
    assert outcome.fired == case.fires, outcome.report.details()
    assert outcome.codes == case.code.split(), outcome.report.details()


# --- logits that are returned ---------------------------------------------------------------------------


def returned(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    logits = logits_of(h, w)
    return loss_of(logits, y), logits


def returned_with_bias_and_softcap(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    logits = torch.tanh((F.linear(h, w, b) / 4 + b) / 3.0) * 3.0
    return loss_of(logits, y), logits


def returned_in_part(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    logits = logits_of(h, w)
    return loss_of(logits, y), logits[:, -1], logits[0, 2:]


def returned_flat_and_detached(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    logits = logits_of(h, w)
    flat = logits.view(-1, V)
    return F.cross_entropy(flat, y.view(-1)), flat.detach()


def returned_twice(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    logits = logits_of(h, w)
    return loss_of(logits, y), logits, logits


def returned_before_the_loss(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    logits = h @ w.T
    return logits, h * 2, loss_of(logits * 0.5, y)


def returned_of_two_heads(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    first, second = logits_of(h, w), F.linear(h, w, b)
    return loss_of(first, y) + loss_of(second, y), first, second


def returned_with_its_hidden_states(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    hidden = torch.tanh(h)
    logits = logits_of(hidden, w)
    return loss_of(logits, y), logits, hidden


def returned_of_a_stored_transpose(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    logits = torch.einsum("bsv,vh->bsh", h.new_ones(2, 8, V), w) @ h.new_ones(D, V)
    return loss_of(logits, y), logits


def returned_with_the_classes_moved(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    logits = logits_of(h, w).transpose(1, 2)
    return F.cross_entropy(logits, y), logits


def returned_as_log_probs(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    log_probs = logits_of(h, w).log_softmax(-1)
    picked = log_probs.gather(-1, y.clamp(min=0).unsqueeze(-1))
    return -picked.mean(), log_probs[:, 0]


def returned_and_written_behind_a_view(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    logits = logits_of(h, w)
    loss = loss_of(logits, y)
    return loss, logits.view(-1, V)[:3] + 1


RETURNED: dict[Function, tuple[int, list[str]]] = {
    returned: (1, []),
    returned_with_bias_and_softcap: (1, []),
    returned_in_part: (1, []),
    returned_flat_and_detached: (1, []),
    returned_twice: (1, []),
    returned_before_the_loss: (1, []),
    returned_of_two_heads: (2, []),
    returned_with_its_hidden_states: (1, []),
    returned_of_a_stored_transpose: (0, ["logits_not_deferrable"]),
    returned_with_the_classes_moved: (0, ["logits_not_deferrable"]),
    returned_as_log_probs: (0, ["logits_reused(getitem)"]),
    returned_and_written_behind_a_view: (0, ["logits_reused(add)"]),
}


@pytest.mark.parametrize("function", RETURNED, ids=lambda f: f.__name__)
def test_returned_logits_equal_eager(function: Function) -> None:
    fires, codes = RETURNED[function]
    outcome = compare_with_eager(function, *head_inputs())
    assert (outcome.fired, outcome.codes) == (fires, codes), outcome.report.details()


@pytest.mark.parametrize("function", [returned, returned_in_part, returned_of_two_heads])
@pytest.mark.parametrize("logits", ["eager", "none"])
def test_logits_option_decides_what_is_returned(function: Function, logits: str) -> None:
    if logits == "eager":
        outcome = compare_with_eager(function, *head_inputs(), options={"memeff.logits": "eager"})
        assert outcome.fired == 0
        assert set(outcome.codes) == {"logits_kept"}
        return
    options = {"memeff.inner": "eager", "memeff.logits": "none"}
    compiled = torch.compile(function, backend="memeff", options=options)
    found, expected = compiled(*head_inputs()), function(*head_inputs())
    torch.testing.assert_close(found[0], expected[0])
    assert [value is None for value in found[1:]] == [True] * len(found[1:])


# --- sizes ------------------------------------------------------------------------------------------------


def sizes_read_from_logits(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    logits = logits_of(h, w)
    rows, length, classes = logits.shape
    return F.cross_entropy(logits.view(rows * length, classes), y.view(rows * length))


def last_position_dropped(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    logits = logits_of(h, w)[:, :-1].contiguous()
    return F.cross_entropy(logits.view(-1, logits.size(-1)), y[:, 1:].contiguous().view(-1))


def losses_per_row_and_length(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    losses = loss_of(logits_of(h, w), y, reduction="none")
    return losses.view(y.shape).sum(-1) / (y.shape[1] - 1)


def logsumexp_of_flattened_rows(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    logits = logits_of(h, w)
    lse = logits.view(-1, V).logsumexp(-1, keepdim=True)
    return loss_of(logits, y) + lse.square().mean()


@pytest.mark.parametrize(
    "function",
    [
        sizes_read_from_logits,
        last_position_dropped,
        losses_per_row_and_length,
        logsumexp_of_flattened_rows,
        returned,
        one_head_two_losses,
        z_loss_before_the_targets_exist,
        classes_moved_in_four_dimensions,
        rows_then_other_rows,
        loss_in_a_checkpoint,
    ],
    ids=lambda f: f.__name__,
)
def test_symbolic_sizes_equal_eager(function: Function) -> None:
    h, w, b, y = head_inputs()
    head = torch.nn.ParameterList([w, b])

    def with_parameters(h: Tensor, y: Tensor) -> Any:
        return function(h, head[0], head[1], y)

    outcome = compare_with_eager(with_parameters, h, y, dynamic=True)
    assert outcome.fired == 1, outcome.report.details()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_empty_batch_equals_eager(reduction: str) -> None:
    h, w, b, y = head_inputs(rows=0)
    outcome = compare_with_eager(
        lambda h, w, b, y: loss_of(logits_of(h, w), y, reduction=reduction), h, w, b, y
    )
    assert outcome.fired == 1


def test_rows_chosen_by_a_mask_equal_eager() -> None:
    def function(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
        keep = y >= 0
        return F.cross_entropy(logits_of(h, w)[keep], y[keep])

    outcome = compare_with_eager(function, *head_inputs(), fullgraph=False)
    assert outcome.fired == 0
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        outcome = compare_with_eager(function, *head_inputs())
    assert (outcome.fired, outcome.codes) == (1, [])  # their number is read from hidden states


def test_softcap_of_a_config_stays_a_number_when_everything_is_dynamic() -> None:
    class Config:
        cap, smoothing, ignored = 30.0, 0.1, -100

    config = Config()
    _, w, b, _ = head_inputs()
    head = torch.nn.ParameterList([w, b])

    def function(h: Tensor, y: Tensor) -> Tensor:
        logits = torch.tanh(F.linear(h, head[0]) / config.cap) * config.cap
        return F.cross_entropy(
            logits.view(-1, V),
            y.view(-1),
            ignore_index=config.ignored,
            label_smoothing=config.smoothing,
        )

    h, _, _, y = head_inputs()
    outcome = compare_with_eager(function, h, y, dynamic=True)
    assert outcome.fired == 1, outcome.report.details()
    compiled = torch.compile(
        function, backend="memeff", dynamic=True, options={"memeff.inner": "eager"}
    )
    for cap, smoothing in ((30.0, 0.1), (2.0, 0.1), (2.0, 0.0)):
        config.cap, config.smoothing = cap, smoothing
        torch.testing.assert_close(compiled(h, y), function(h, y), rtol=1e-12, atol=1e-12)


def test_scale_by_a_size_is_left_alone() -> None:
    _, w, b, _ = head_inputs()
    head = torch.nn.ParameterList([w, b])

    def function(h: Tensor, y: Tensor) -> Tensor:
        return loss_of(F.linear(h, head[0]) / h.shape[1] ** 0.5, y)

    h, _, _, y = head_inputs()
    outcome = compare_with_eager(function, h, y, dynamic=True)
    assert outcome.codes == ["scale_not_constant"]


# --- heads in other clothes -----------------------------------------------------------------------------


class _Head(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lm_head = torch.nn.Linear(D, V, dtype=torch.float64)

    def forward(self, h: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.lm_head(h)
        return loss_of(logits, y), logits


def _gradients(module: torch.nn.Module, h: Tensor, y: Tensor, compiled: bool) -> list[Tensor]:
    module.zero_grad()
    run = (
        torch.compile(module, backend="memeff", options={"memeff.inner": "eager"})
        if compiled
        else module
    )
    loss, logits = run(h, y)
    (loss + logits.square().mean()).backward()
    return [loss.detach(), *(p.grad.clone() for p in module.parameters() if p.grad is not None)]


@pytest.mark.parametrize("clothes", ["plain", "weight_norm", "frozen", "orthogonal"])
def test_dressed_heads_equal_eager(clothes: str) -> None:
    torch.manual_seed(0)
    module = _Head()
    if clothes == "weight_norm":
        torch.nn.utils.parametrizations.weight_norm(module.lm_head)
    if clothes == "orthogonal":
        torch.nn.utils.parametrizations.orthogonal(module.lm_head)
    if clothes == "frozen":
        module.lm_head.weight.requires_grad_(False)
    h, _, _, y = head_inputs()
    for ours, theirs in zip(
        _gradients(module, h, y, True), _gradients(module, h, y, False), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_a_wider_bias_widens_the_returned_logits(dtype: torch.dtype) -> None:
    h, w, _, y = (t.detach() for t in head_inputs())
    bias = torch.linspace(-1, 1, V, requires_grad=True)

    def function(h: Tensor, w: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        logits = F.linear(h, w) / 2 + bias
        return loss_of(logits, y), logits

    given = h.to(dtype).requires_grad_(), w.to(dtype).requires_grad_(), y
    expected = function(*given)
    torch._dynamo.reset()
    found = torch.compile(function, backend="memeff", options={"memeff.inner": "eager"})(*given)
    assert found[1].dtype == expected[1].dtype == torch.float32
    torch.testing.assert_close(found[1], expected[1])
    torch.testing.assert_close(found[0], expected[0], rtol=1e-2, atol=1e-2)


def test_classes_forbidden_by_an_infinite_bias_equal_eager() -> None:
    """Whole pieces of the vocabulary may be forbidden, whatever the size of the pieces."""

    def function(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
        forbidden = b.detach().new_zeros(V).masked_fill(torch.arange(V) < 40, -torch.inf)
        return loss_of(logits_of(h, w) + forbidden, y.clamp(min=40))

    for workspace in (0, 1):
        options = {"memeff.linear_cross_entropy.workspace": workspace}
        assert compare_with_eager(function, *head_inputs(), options=options).fired == 1


@pytest.mark.parametrize("is_entropy", [True, False])
def test_clamped_log_probs_of_forbidden_classes_equal_eager(is_entropy: bool) -> None:
    """The clamp of `Categorical.entropy` changes nothing there, but changes a picked class."""

    def function(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
        forbidden = b.detach().new_zeros(V).masked_fill(torch.arange(V) < 40, -torch.inf)
        log_probs = (logits_of(h, w) + forbidden).log_softmax(-1)
        finite = log_probs.clamp(min=torch.finfo(torch.float64).min)
        if is_entropy:
            return -(finite * log_probs.exp()).sum(-1).mean()
        return -finite.gather(-1, y.clamp(min=0)[..., None]).mean()

    assert compare_with_eager(function, *head_inputs()).fired == is_entropy


@pytest.mark.parametrize("spreads", [False, True])
def test_only_steps_on_single_elements_may_follow_the_gather(spreads: bool) -> None:
    """A softmax after the clamp reads all classes, so it cannot be applied to one number."""

    def function(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
        changed = logits_of(h, w).log_softmax(-1).clamp(min=-3.0)
        changed = changed.softmax(-1) if spreads else changed * 2
        return -changed.gather(-1, y.clamp(min=0)[..., None]).mean()

    outcome = compare_with_eager(function, *head_inputs())
    (record,) = [r for r in outcome.report.records if r.code == "unknown_step"]
    assert record.sentence.startswith("`clamp` changes log-probabilities before `gather`")
    assert bool(record.hint) is not spreads


def test_hooks_on_logits_are_kept() -> None:
    def function(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
        logits = logits_of(h, w)
        logits.register_hook(lambda gradient: gradient * 2)
        return loss_of(logits, y)

    assert compare_with_eager(function, *head_inputs(), fullgraph=False).fired == 0


_LIBRARY = torch.library.Library("memeff_near_misses", "FRAGMENT")
_LIBRARY.define("scramble(Tensor(a!) x) -> ()")


def _scramble(x: Tensor) -> None:
    x.mul_(-1)


_LIBRARY.impl("scramble", _scramble, "CompositeExplicitAutograd")
torch.library.register_fake("memeff_near_misses::scramble", lambda x: None, lib=_LIBRARY)


@pytest.mark.parametrize("overload", [False, True], ids=["packet", "overload"])
def test_writes_of_custom_ops_are_seen(overload: bool) -> None:
    scramble: Any = torch.ops.memeff_near_misses.scramble
    scramble = scramble.default if overload else scramble

    @torch.no_grad()
    def function(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
        hidden = h * 2
        logits = logits_of(hidden, w)
        scramble(hidden)
        return loss_of(logits, y)

    outcome = compare_with_eager(function, *head_inputs())
    assert outcome.codes == ["mutated"]
