"""The divergence between the softmaxes of a student's and a teacher's output projection.

For the default divergence, the result equals F.kl_div of the two softmaxes. Neither the student's
nor the teacher's logits are built.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from .errors import UnsupportedInputError
from .functional import as_autocast_would
from .kernels import linear_divergence as op_folder
from .kernels.checks import wide
from .kernels.linear_divergence import Coefficients

Kind: TypeAlias = Literal["forward_kl", "reverse_kl", "jsd", "cross_entropy"]
Reduction: TypeAlias = Literal["mean", "sum", "none"]
_KINDS = ("forward_kl", "reverse_kl", "jsd", "cross_entropy")
_REDUCTIONS = ("mean", "sum", "none")


def coefficients_of(kind: str, beta: float) -> Coefficients:
    """Return the coefficients with which `memeff::linear_divergence` computes a divergence.

    `kind` names the divergence. A coefficient multiplies a sum over classes, such as sum(q log p),
    where p is the student's softmax and q the teacher's.

    `beta` is the teacher's weight in the Jensen-Shannon divergence (jsd).
    """
    if kind == "jsd" and beta not in (0, 1):
        return Coefficients(beta, 0.0, 1 - beta, 0.0, -beta, beta - 1, beta)
    if kind == "reverse_kl" or (kind == "jsd" and beta == 1):
        return Coefficients(p_log_p=1.0, p_log_q=-1.0)
    if kind == "cross_entropy":
        return Coefficients(q_log_p=-1.0)
    return Coefficients(q_log_q=1.0, q_log_p=-1.0)


def linear_divergence(
    hidden: Tensor,
    weight: Tensor,
    teacher: Tensor,
    teacher_weight: Tensor | None = None,
    *,
    kind: Kind = "forward_kl",
    beta: float = 0.5,
    temperature: float = 1.0,
    mask: Tensor | None = None,
    reduction: Reduction = "mean",
    bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    classes: Tensor | None = None,
    with_rest: bool = False,
) -> Tensor:
    """Compute a divergence between the softmaxes of a student's and a teacher's output projection,
    without building the logits.

    Let p = softmax(z / temperature) with the student's logits z = hidden @ weight.T + bias. Let q
    be the teacher's softmax, computed in the same way. `kind` selects the result per row (token):

    - "forward_kl": sum(q (log q - log p)), that is, KL(teacher || student);
    - "reverse_kl": sum(p (log p - log q)), that is, KL(student || teacher);
    - "jsd": beta KL(q || m) + (1 - beta) KL(p || m), with m = beta q + (1 - beta) p. As in TRL,
      beta = 0 selects "forward_kl", and beta = 1 selects "reverse_kl";
    - "cross_entropy": -sum(q log p), which has the gradient of "forward_kl".

    The student gets gradients, the teacher does not. The loss is not multiplied by temperature**2.
    If your recipe needs this factor, multiply the result.

    Args:
        hidden: (..., D), the student's hidden states; bf16, fp16, fp32 or fp64.
        weight: (V, D), the weight of the student's output projection, in the dtype of `hidden`.
        teacher: (..., K), the teacher's hidden states; or (..., V), its logits. A compiled teacher
            may return deferred logits, which are computed on first use. For most deferred logits,
            this function uses the hidden states and the weight, and does not compute the logits.
            Examples of exceptions are logits with a softcap, logits that were written to, and an
            output projection with adapters. (Under torch.no_grad() logits are not deferred.)
        teacher_weight: (V, K), the weight of the teacher's output projection, in the dtype of
            `teacher`; None if `teacher` contains logits.
        kind: the name of the divergence, as in the list above.
        beta: the teacher's weight in "jsd", between 0 and 1.
        temperature: a positive number by which the logits of student and teacher are divided.
        mask: (...), True or not 0 in the rows that count in the loss; None: every row counts.
        reduction: "mean" over the rows that count, "sum" over these rows, or "none" for one number
            per row (0 in rows that do not count). "mean" equals F.kl_div's "batchmean" for (N, V)
            logits.
        bias: (V,), the bias of the student's output projection, or None.
        teacher_bias: (V,), the bias of the teacher's output projection, or None.
        classes: (..., k) int64, the class indices for which the teacher's log-probabilities are
            known. `teacher` then contains these log-probabilities, (..., k), already divided by
            the temperature. The divergence is then a sum over these classes only. A class index
            outside of the vocabulary raises an error.
        with_rest: if `classes` is given, count all other classes together as one more class, for
            the student and for the teacher.

    Returns:
        The loss in fp32 (fp64 for fp64 inputs), a scalar or one number per row.

    Raises:
        UnsupportedInputError: a dtype, shape, layout or setting is not supported.
        TargetRangeError: on the CPU, an index in `classes` is outside of the vocabulary. On a
            GPU, such an index fails an assertion in the kernel.

    Example: for (N, D) hidden states, linear_divergence(hidden, head.weight, teacher_hidden,
    teacher_head.weight) equals F.kl_div(head(hidden).log_softmax(-1),
    teacher_head(teacher_hidden).softmax(-1), reduction="batchmean"), except for rounding.
    """
    _require(kind, beta, temperature, reduction, mask, hidden)
    hidden, weight, bias = as_autocast_would(hidden, weight, bias)
    kept = None if mask is None else (mask != 0)
    if classes is not None:
        _require_classes(classes, teacher, teacher_weight, teacher_bias)
        logs = op_folder.linear_divergence_classes(
            *(hidden, weight, bias, classes),
            is_normalised=True,
            scale=1 / temperature,
            workspace=0,
        )
        of_teacher = teacher.detach().to(logs.dtype)
        if with_rest:
            logs, of_teacher = _with_rest(logs), _with_rest(of_teacher)
        rows = _of_classes(logs, of_teacher, coefficients_of(kind, beta))
        return _reduced(rows, kept, reduction)
    scale, factors = 1.0, _factors_of(teacher) if teacher_weight is None else None
    if factors is not None:
        teacher, teacher_weight, teacher_bias, scale = factors
    elif teacher_weight is not None:
        teacher, teacher_weight, teacher_bias = as_autocast_would(
            teacher, teacher_weight, teacher_bias
        )
    teacher, teacher_weight = teacher.detach(), _detached(teacher_weight)
    teacher_bias = _detached(teacher_bias)
    operands = hidden, weight, bias, teacher, teacher_weight, teacher_bias
    how: dict[str, Any] = {"coefficients": list(coefficients_of(kind, beta)), "workspace": 0}
    how |= {"scale": 1 / temperature, "teacher_scale": scale / temperature}
    trains = [part is not None and part.requires_grad for part in operands[:3]]
    if (
        reduction != "none"
        and torch.is_grad_enabled()
        and any(trains)
        and op_folder.makes_gradients_in_forward(hidden.dtype)
    ):
        # Multiplied before the sum, so that the gradients need not be multiplied again.
        row_weight = None if kept is None else kept.to(wide(hidden.dtype))
        if reduction == "mean" and row_weight is not None:
            row_weight = row_weight / row_weight.sum()
        elif reduction == "mean":
            by = coefficients_of(kind, beta).times(1 / max(hidden[..., 0].numel(), 1))
            how["coefficients"] = list(by)
        total: Tensor = op_folder.linear_divergence_total(
            *operands, row_weight, output_mask=trains, **how
        )[0]
        return total
    return _reduced(op_folder.linear_divergence(*operands, **how), kept, reduction)


def _reduced(rows: Tensor, kept: Tensor | None, reduction: str) -> Tensor:
    rows = rows if kept is None else rows.masked_fill(~kept, 0)
    if reduction == "none":
        return rows
    if reduction == "sum":
        return rows.sum()
    return rows.sum() / (rows.numel() if kept is None else kept.sum())


def _of_classes(log_p: Tensor, log_q: Tensor, coefficients: Coefficients) -> Tensor:
    """Return the divergence per row (token), summed over the classes for which log-probabilities
    are known; the code is plain PyTorch, with PyTorch's autograd.
    """
    a1, a2, a3, a4, a5, a6, share = coefficients.settled()
    p, q = log_p.exp(), log_q.exp()
    log_m = (share * q + (1 - share) * p).log() if a5 or a6 else None
    rows = torch.zeros_like(log_p[..., 0])
    terms: list[tuple[float, Tensor, Tensor | None]]
    terms = [(a1, q, log_q), (a2, q, log_p), (a3, p, log_p), (a4, p, log_q)]
    for factor, probability, logarithm in (*terms, (a5, q, log_m), (a6, p, log_m)):
        if factor and logarithm is not None:
            safe = logarithm.masked_fill(probability == 0, 0)
            rows = rows + factor * (probability * safe).sum(-1)
    return rows


def _with_rest(logs: Tensor) -> Tensor:
    """Append one column to log-probabilities of some classes: the log of the total probability of
    all other classes."""
    smallest = torch.finfo(logs.dtype).eps
    mass = (1 - logs.exp().sum(-1, keepdim=True)).clamp(min=smallest)
    return torch.cat([logs, mass.log()], dim=-1)


def _factors_of(logits: Tensor) -> tuple[Tensor, Tensor, Tensor | None, float] | None:
    """Return the operands from which deferred logits (logits computed on first use) are computed.

    The operands are the hidden states, the weight, the bias and the scale. The logits are not
    computed. Return None for other tensors, and for logits that these operands do not determine.
    """
    if type(logits) is Tensor:
        return None
    from .logits.tensor import DeferredLogits

    if not isinstance(logits, DeferredLogits):
        return None
    source = logits.memory.source
    if source.loss is None or logits.lost_factors() is not None or source.ranks is not None:
        return None
    source.require_unchanged()
    found = logits.head.factors()
    if found is not None and source.use is not None:
        source.use.count_fused("linear_divergence")
    return found


def _detached(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach()


def _require_classes(
    classes: Tensor, teacher: Tensor, weight: Tensor | None, bias: Tensor | None
) -> None:
    if weight is not None or bias is not None:
        sentence = "classes are given with a teacher's head; pass the teacher's log-probabilities "
        raise UnsupportedInputError(f"linear_divergence: {sentence}of these classes as teacher.")
    if teacher.shape != classes.shape or not teacher.is_floating_point():
        sentence = f"teacher has shape {tuple(teacher.shape)} and dtype {str(teacher.dtype)[6:]}; "
        sentence += f"{tuple(classes.shape)} log-probabilities are needed, one of each class."
        raise UnsupportedInputError(f"linear_divergence: {sentence}")


def _require(
    kind: str, beta: float, temperature: float, reduction: str, mask: Tensor | None, hidden: Tensor
) -> None:
    """Raise an error for an unsupported setting that the fused op does not check itself."""
    sentence = None
    if kind not in _KINDS:
        sentence = f"kind is {kind!r}; use one of {', '.join(_KINDS)}."
    elif reduction not in _REDUCTIONS:
        sentence = f"reduction is {reduction!r}; use 'mean', 'sum' or 'none'."
    elif not 0 <= beta <= 1:
        sentence = f"beta is {beta}; it must be between 0 and 1."
    elif not 0 < temperature < float("inf"):
        sentence = f"temperature is {temperature}; it must be positive and finite."
    elif mask is not None and tuple(mask.shape) != tuple(hidden.shape[:-1]):
        shapes = f"{tuple(mask.shape)} and hidden {tuple(hidden.shape)}"
        sentence = f"mask has shape {shapes}; one number per row of hidden is needed."
    if sentence is not None:
        raise UnsupportedInputError(f"linear_divergence: {sentence}")
