"""Hands the output projection of TRL's trainers to the backend.

TRL's trainers call `model(..., labels=labels, fused_lm_head=True)`, and a `forward` of TRL's own
then computes log-probabilities by chunks, in an autograd function that ends every graph. While
this backend captures such a model, that function is replaced by the same formula in plain PyTorch,
which the pass `fuse_linear_cross_entropy` makes one op of. Nothing else of TRL changes: outside of
such a capture, and for any other backend, its own function runs. On a GPU TRL picks the rows whose
label counts before it calls the function. Their number is in the data, so there the graph of the
model ends, and head and loss share the next one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import compat
from .hosts import host

log = logging.getLogger(__name__)

LEAST = "1.16"
FUNCTION = "_ChunkedLogProbFunction"
"""The name by which TRL's forward calls what is replaced."""
_CLASSES_AT_ONCE = 8192


def hand_over_head() -> Callable[[], None]:
    """Let the backend compute the loss of TRL's trainers: SFT, DPO, KTO, GRPO, RLOO.

    It holds for every trainer of this process whose model is compiled by `backend="memeff"`, made
    before or after. `MemeffCallback` calls it. A second call changes nothing.

    Returns:
        A function that takes it back.

    Raises:
        ImportError: TRL is missing or older than 1.16, whose trainers use logits.

    Example:
        >>> hand_over_head()  # doctest: +SKIP
        >>> trainer.model.compile(backend="memeff")  # doctest: +SKIP
    """
    host("trl", LEAST)
    from trl.trainer import utils

    theirs = getattr(utils, FUNCTION, None)
    if isinstance(theirs, _Head):
        return theirs.take_back
    if theirs is None:
        _warn_of_another_name()
        return lambda: None
    head = _Head(utils, theirs)
    setattr(utils, FUNCTION, head)
    return head.take_back


@cache
def _warn_of_another_name() -> None:
    log.warning(
        "trl.trainer.utils of this version has no %s: TRL computes the loss of its trainers by "
        "itself, and memeff does not fuse it. memeff_compile was written for TRL %s.",
        FUNCTION,
        LEAST,
    )


class _Head:
    """Stands in for TRL's autograd function, and calls it unless this backend is capturing."""

    def __init__(self, utils: ModuleType, theirs: Any) -> None:
        self.utils, self.theirs = utils, theirs

    def take_back(self) -> None:
        """Give TRL its function back."""
        if getattr(self.utils, FUNCTION) is self:
            setattr(self.utils, FUNCTION, self.theirs)

    def apply(self, *given: Any) -> Any:
        """Compute what TRL's function does, from the same arguments."""
        if torch.compiler.is_compiling() and _is_ours():
            return statistics(*given)
        return self.theirs.apply(*given)


@compat.constant_in_traces
def _is_ours() -> bool:
    """Return whether the graph that is being captured is for this backend."""
    from ..backend import memeff

    return compat.capturing_backend() is memeff


def statistics(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: float,
    chunk_size: int,
    softcap: float | None = None,
    scale: float = 1.0,
    outputs: tuple[str, ...] = (),
) -> tuple[Tensor | None, ...]:
    """Return log-probabilities and statistics of rows, as TRL's chunked function does.

    Args:
        hidden: N rows of hidden states.
        weight: Of the output projection.
        bias: Of the output projection.
        targets: A class per row.
        temperature: Divides the logits.
        chunk_size: TRL's number of classes in a chunk, which the backend does not need.
        softcap: Of the logits, before the temperature divides them.
        scale: Multiplies the logits, before the cap.
        outputs: Which of the last four to return; the others are None.

    Returns:
        Of each row: log-probability of its target, entropy, log of the sum of squared
        probabilities, mean logit, and whether no other class is likelier.
    """
    if not torch.is_autocast_enabled(hidden.device.type) and weight.dtype != hidden.dtype:
        weight = weight.to(hidden.dtype)
        bias = None if bias is None else bias.to(hidden.dtype)

    def transformed(logits: Tensor) -> Tensor:
        logits = logits.float()
        if scale != 1.0:
            logits = logits * scale
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        return logits if temperature == 1.0 else logits / temperature

    def by_classes() -> Iterator[Tensor]:
        """Compute the logits again, some classes at a time."""
        for first in range(0, weight.shape[0], _CLASSES_AT_ONCE):
            some = slice(first, first + _CLASSES_AT_ONCE)
            yield transformed(F.linear(hidden, weight[some], None if bias is None else bias[some]))

    logits = transformed(F.linear(hidden, weight, bias))
    every = torch.log_softmax(logits, -1)
    log_probs = every.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    entropy = squares = mean = is_top = None
    if "entropy" in outputs:
        entropy = -(every.exp() * every).sum(-1)
    if "is_top1" in outputs:
        is_top = logits.argmax(-1) == targets
    with torch.no_grad():
        if "log_sum_sq_probs" in outputs:
            doubled = [torch.logsumexp(2 * some, -1) for some in by_classes()]
            squares = torch.logsumexp(torch.stack(doubled), 0) - 2 * torch.logsumexp(logits, -1)
        if "mean_logits" in outputs and softcap is None:
            mean = hidden.float() @ weight.mean(0, dtype=torch.float32)
            mean = mean if bias is None else mean + bias.mean(dtype=torch.float32)
            mean = mean * (scale / temperature)
        elif "mean_logits" in outputs:
            sums = [some.sum(-1) for some in by_classes()]
            mean = torch.stack(sums).sum(0) / weight.shape[0]
    return log_probs, entropy, squares, mean, is_top
