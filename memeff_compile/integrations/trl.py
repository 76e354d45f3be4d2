"""Let the backend compute the output projection and the loss of TRL's trainers.

TRL's trainers call `model(..., labels=labels, fused_lm_head=True)`. TRL's patched `forward`
then computes log-probabilities in chunks, inside an autograd function that breaks every graph.
While this backend captures such a model, the same formula in plain PyTorch replaces TRL's function.
The pass `fuse_linear_cross_entropy` rewrites that formula into one op. If no model is being
captured, or if another backend captures the model, TRL's own function runs.

On a GPU, TRL first selects the tokens whose labels count in the loss. Then TRL calls its function
for log-probabilities. The number of the selected tokens depends on the data, so the graph of the
model ends at the selection. The next graph then contains the output projection and the loss.
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
"""The name of the replaced function in TRL's module."""
_CLASSES_AT_ONCE = 8192


def hand_over_head() -> Callable[[], None]:
    """Let the backend compute the loss of TRL's trainers SFT, DPO, KTO, GRPO and RLOO.

    `hand_over_head` replaces `_ChunkedLogProbFunction`, with which TRL computes log-probabilities
    in chunks. It affects every trainer of this process whose model is compiled with
    `backend="memeff"`, including trainers that exist already. `MemeffCallback` calls
    `hand_over_head`. A second call has no effect.

    Returns:
        A function that restores TRL's own `_ChunkedLogProbFunction`.

    Raises:
        ImportError: TRL is missing, or older than 1.16. Trainers of older TRL releases compute
            logits.

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
    """The class that replaces TRL's autograd function for log-probabilities; it calls TRL's
    function unless this backend captures a graph.
    """

    def __init__(self, utils: ModuleType, theirs: Any) -> None:
        self.utils, self.theirs = utils, theirs

    def take_back(self) -> None:
        """Restore TRL's own `_ChunkedLogProbFunction`."""
        if getattr(self.utils, FUNCTION) is self:
            setattr(self.utils, FUNCTION, self.theirs)

    def apply(self, *given: Any) -> Any:
        """Compute the results of TRL's `_ChunkedLogProbFunction.apply` from its arguments.

        If this backend captures the graph, plain PyTorch computes them, otherwise TRL's function.
        """
        if torch.compiler.is_compiling() and _is_ours():
            return statistics(*given)
        return self.theirs.apply(*given)


@compat.constant_in_traces
def _is_ours() -> bool:
    """Return whether this backend captures the current graph."""
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
    """Return log-probabilities and statistics of rows (tokens); the results equal those of TRL's
    chunked function.

    Args:
        hidden: N rows of hidden states.
        weight: The weight of the output projection.
        bias: The bias of the output projection.
        targets: One class per row.
        temperature: The number by which the logits are divided.
        chunk_size: The number of classes per chunk in TRL's function; the backend ignores it.
        softcap: The softcap of the logits, applied before the temperature.
        scale: The factor of the logits, applied before the softcap.
        outputs: The names of the optional results to compute. The log-probability is always
            computed; each other result is None unless it is named here.

    Returns:
        For each row: log-probability of its target, entropy, log of the sum of squared
        probabilities, mean logit, and whether the target is the most likely class.
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
        """Yield the logits of all rows (tokens) for some classes at a time."""
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
