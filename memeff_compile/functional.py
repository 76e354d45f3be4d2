"""Cross entropy fused with the output projection, as a plain function for code that does not use
torch.compile.

The function computes torch.nn.functional.cross_entropy(F.linear(hidden, weight, bias), target) and
common training statistics, without building the logits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from operator import index
from typing import Any, Literal, NamedTuple, TypeAlias, overload

import torch
from torch import Tensor

from memeff_compile import compat
from memeff_compile.errors import UnsupportedInputError
from memeff_compile.kernels import linear_cross_entropy as op_folder

Reduction: TypeAlias = Literal["mean", "sum", "none"]
_REDUCTIONS = ("mean", "sum", "none")


class Stats(NamedTuple):
    """Statistics of each token's logits, each in the shape of the targets; all except `top` have
    gradients.

    Attributes:
        lse: the log-sum-exp of the logits.
        entropy: the entropy of the softmax of the logits, in nats.
        top: the index of the largest logit, int64; the first one if several are equal.
        log_probs: the log-probability of the target; 0 if the target is ignored.
    """

    lse: Tensor
    entropy: Tensor
    top: Tensor
    log_probs: Tensor


@overload
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int | None = -100,
    reduction: Reduction = "mean",
    scale: float = 1.0,
    softcap: float = 0.0,
    label_smoothing: float = 0.0,
    class_weight: Tensor | None = None,
    z_loss: float = 0.0,
    filter: str = "exact",
    return_stats: Literal[False] = False,
) -> Tensor: ...


@overload
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int | None = -100,
    reduction: Reduction = "mean",
    scale: float = 1.0,
    softcap: float = 0.0,
    label_smoothing: float = 0.0,
    class_weight: Tensor | None = None,
    z_loss: float = 0.0,
    filter: str = "exact",
    return_stats: Literal[True],
) -> tuple[Tensor, Stats]: ...


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int | None = -100,
    reduction: Reduction = "mean",
    scale: float = 1.0,
    softcap: float = 0.0,
    label_smoothing: float = 0.0,
    class_weight: Tensor | None = None,
    z_loss: float = 0.0,
    filter: str = "exact",
    return_stats: bool = False,
) -> Tensor | tuple[Tensor, Stats]:
    """Compute cross entropy from hidden states and the weight of the output projection, one block
    of logits at a time.

    The logits are z = softcap * tanh(scale * (hidden @ weight.T + bias) / softcap), or without the
    cap if `softcap` is 0. Under autocast, `hidden` and `weight` are cast as by F.linear.

    Args:
        hidden: (..., D), bf16, fp16, fp32 or fp64. If `weight` is a DTensor, `hidden` is a DTensor
            or a tensor that is equal on all ranks.
        weight: (V, D), in the dtype of `hidden`; or a DTensor split over ranks by vocabulary
            entries, as by ColwiseParallel. With a DTensor, call this function on all ranks.
        target: (...), int64 or int32 class indices.
        bias: (V,) or None; if `weight` is split over ranks, `bias` is split in the same way.
        ignore_index: rows with this target do not count in the loss; None: every row counts.
        reduction: "mean" over the rows that count (weighted by `class_weight`, if given), "sum" or
            "none".
        scale: a factor on the logits, as in the formula above.
        softcap: the bound of the logits in the formula above; 0 means no bound.
        label_smoothing: between 0 and 1, as in F.cross_entropy.
        class_weight: (V,) or None, as `weight` of F.cross_entropy.
        z_loss: adds z_loss * lse**2 to each row that counts; "mean" divides the sum by the number
            of these rows.
        filter: "exact", "mass", "block" or "published". With "exact", the gradients contain every
            class. The other filters may leave unlikely classes out of the gradients. In a group of
            128 rows (tokens), "mass" leaves out classes that together have at most 1/64 of each
            row's probability. In such a group, "block" leaves out classes whose probability p is
            below 2**-12 in every row. "published" leaves out tiles (128 rows x 128 classes) in
            which |p - 1(target)| is below 2**-12 everywhere. Here 1(target) is 1 for the row's
            target, and 0 for other classes. With a softcap, the filters first multiply p by the
            slope of the cap (at most 1). The option `memeff.linear_cross_entropy` has modes with
            the same names.
        return_stats: also return `Stats`: each row's log-sum-exp, entropy, most likely class, and
            log-probability of the target.

    Returns:
        The loss in fp32 (fp64 for fp64 inputs): a scalar, or a tensor shaped like `target` for the
        reduction "none"; with `return_stats`, the pair of loss and `Stats`.

    Raises:
        UnsupportedInputError: a dtype, shape, layout or setting is not supported.
        TargetRangeError: on the CPU, a target other than `ignore_index` is not in the vocabulary.

    Example: linear_cross_entropy(hidden, head.weight, labels) equals
    F.cross_entropy(head(hidden).flatten(0, -2), labels.flatten()), except for rounding.
    """
    numbers = {"scale": scale, "softcap": softcap, "z_loss": z_loss}
    numbers["label_smoothing"] = label_smoothing
    tensors = {"hidden": hidden, "weight": weight, "target": target}
    _require_settings(numbers, tensors, reduction, ignore_index, class_weight)
    split, classes = None, weight.shape[0]
    if compat.is_dtensor(weight):
        split, hidden, weight, bias = _of_this_rank(hidden, weight, bias, target)
    hidden, weight, bias = as_autocast_would(hidden, weight, bias)
    smooth = label_smoothing > 0
    operands = (hidden, weight, bias, target)
    how: dict[str, Any] = {"ignore_index": ignore_index, "workspace": 0}
    how |= {"scale": float(scale), "softcap": float(softcap)}
    filtered = {"gradient_filter": filter, "sort_vocabulary": filter != "exact"}
    makes_gradients_in_forward = op_folder.makes_gradients_in_forward
    if split is not None:
        makes_gradients_in_forward = op_folder.makes_gradients_in_forward_over_ranks
    if (
        reduction != "none"
        and not (smooth or z_loss or return_stats)
        and torch.is_grad_enabled()
        and any(part is not None and part.requires_grad for part in (hidden, weight, bias))
        and makes_gradients_in_forward(
            *(hidden.device, hidden.dtype, index(hidden.shape[-1])),  # no symbol of a trace
            gradient_filter=filter,
        )
    ):
        how |= filtered if split is None else {"group": split.group, **split.shard._asdict()}
        return _total(operands, class_weight, reduction, how, is_split=split is not None)
    how |= filtered | {"with_lse": return_stats or bool(z_loss), "with_logit_sum": smooth}
    column_weight = class_weight if smooth else None
    how |= {"with_entropy": return_stats, "with_top": return_stats}
    if split is None:
        found = op_folder.linear_cross_entropy(*operands, column_weight, **how)
    else:
        shard = split.shard
        if column_weight is not None:
            column_weight = column_weight[shard.first : shard.first + shard.columns]
        how |= {"group": split.group, **shard._asdict()}
        found = op_folder.linear_cross_entropy_over_ranks(*operands, column_weight, **how)
    nll, lse, logit_sum, entropy, top = found
    kept, norm = _kept_and_norm(target, class_weight, ignore_index, nll.dtype)
    rows = nll if class_weight is None else nll * norm
    if smooth:
        total = classes if class_weight is None else class_weight.to(nll.dtype).sum()
        spread = torch.where(kept, lse * total - logit_sum, 0.0)
        rows = rows * (1 - label_smoothing) + spread * (label_smoothing / classes)
    loss = _reduced(rows, norm, reduction)
    if z_loss:
        squares = torch.where(kept, lse, 0.0).square()
        loss = loss + z_loss * _reduced(squares, kept, reduction)
    return (loss, Stats(lse, entropy, top, -nll)) if return_stats else loss


def _of_this_rank(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor
) -> tuple[op_folder.Split, Tensor, Tensor, Tensor | None]:
    """Return how an output projection is split over ranks, and the weight, bias and targets of this
    rank."""
    from torch.distributed.tensor import DTensor, Replicate

    spread: Any = weight
    split, said = op_folder.split_of(spread), ""
    if isinstance(split, str):
        said = f"weight {split}. Split it as ColwiseParallel does, or pass weight.full_tensor()."
    elif bias is not None and getattr(bias, "placements", None) != spread.placements:
        said = "weight is a DTensor and bias is not laid out like it. Split both alike."
    elif compat.is_dtensor(target):
        said = "target is a DTensor. Pass the same plain targets on every rank."
    if isinstance(split, str) or said:
        raise UnsupportedInputError(f"linear_cross_entropy: {said}")
    whole: Any = hidden
    places = [Replicate()] * spread.device_mesh.ndim
    if not compat.is_dtensor(hidden):
        whole = DTensor.from_local(hidden, spread.device_mesh, places, run_check=False)
    whole = whole.redistribute(placements=places)
    of_bias = None if bias is None else op_folder.part_of_rank(bias)
    return split, op_folder.part_of_rank(whole, split.dim), op_folder.part_of_rank(weight), of_bias


def _kept_and_norm(
    target: Tensor, class_weight: Tensor | None, ignore_index: int | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return which rows count in the loss, and the number by which the sum of their losses is
    divided for the mean.
    """
    kept = torch.ones_like(target, dtype=torch.bool)
    if ignore_index is not None:
        kept = target != ignore_index
    if class_weight is None:
        return kept, kept.to(dtype)
    index = torch.where(kept, target, 0).long()
    return kept, class_weight.to(dtype)[index] * kept


def _total(
    operands: tuple[Tensor, Tensor, Tensor | None, Tensor],
    class_weight: Tensor | None,
    reduction: Reduction,
    how: Mapping[str, Any],
    *,
    is_split: bool,
) -> Tensor:
    """Return the mean or sum of the loss; call the fused op that also computes the gradients in its
    forward pass.
    """
    hidden, *_, target = operands
    dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    _, norm = _kept_and_norm(target, class_weight, how["ignore_index"], dtype)
    weights = None if class_weight is None else norm, norm.sum() if reduction == "mean" else None
    needs = [part is not None and part.requires_grad for part in operands[:3]]
    op = op_folder.linear_cross_entropy_total
    if is_split:
        op = op_folder.linear_cross_entropy_total_over_ranks
    found: tuple[Tensor, ...] = op(*operands, *weights, output_mask=needs, **how)
    return found[0]


def _reduced(rows: Tensor, norm: Tensor, reduction: str) -> Tensor:
    if reduction == "none":
        return rows
    return rows.sum() / norm.sum() if reduction == "mean" else rows.sum()


def as_autocast_would(
    hidden: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return hidden states, weight and bias in the dtype that autocast would use for the
    product."""
    kind = hidden.device.type
    if not torch.is_autocast_enabled(kind) or hidden.dtype == torch.float64:
        return hidden, weight, bias
    dtype = torch.get_autocast_dtype(kind)
    return hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


def _require_settings(
    numbers: Mapping[str, float],
    tensors: Mapping[str, Tensor],
    reduction: str,
    ignore_index: int | None,
    class_weight: Tensor | None,
) -> None:
    """Raise an error for an unsupported setting of `linear_cross_entropy`.

    The checked settings are those that the fused loss op does not check itself.
    """
    odd = [name for name, value in numbers.items() if not isinstance(value, (int, float))]
    no_tensors = [name for name, value in tensors.items() if not isinstance(value, Tensor)]
    sentence = None
    if odd:
        sentence = f"{odd[0]} is {numbers[odd[0]]!r}; a number is needed."
    elif no_tensors:
        sentence = f"{no_tensors[0]} is a {type(tensors[no_tensors[0]]).__name__}, not a tensor."
    elif reduction not in _REDUCTIONS:
        sentence = f"reduction is {reduction!r}; use 'mean', 'sum' or 'none'."
    elif not (ignore_index is None or isinstance(ignore_index, int)):
        sentence = f"ignore_index is {ignore_index!r}; a whole number is needed, or None."
    elif not 0 <= numbers["label_smoothing"] <= 1:
        value = numbers["label_smoothing"]
        sentence = f"label_smoothing is {value}; it must be between 0 and 1."
    elif not 0 <= numbers["z_loss"] < math.inf:
        sentence = f"z_loss is {numbers['z_loss']}; it must be positive and finite, or 0 for none."
    elif not -math.inf < numbers["scale"] < math.inf:
        sentence = f"scale is {numbers['scale']}; it must be finite."
    elif class_weight is not None:
        operands = (tensors["hidden"], tensors["weight"], None, tensors["target"], class_weight)
        sentence = op_folder.supports(*operands, dtype=tensors["hidden"].dtype)
        sentence = sentence and sentence.replace("column_weight", "class_weight")
    if sentence is not None:
        raise UnsupportedInputError(f"linear_cross_entropy: {sentence}")
