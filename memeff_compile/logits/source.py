"""The tensors from which deferred logits (logits that are computed when first read) are computed,
with checks that these tensors are unchanged.

Eager PyTorch computes logits before the output projection can change. Deferred logits are computed
later, and an optimizer step may have changed the output projection in the meantime. Deferred logits
must never be computed from changed tensors. So a `LogitsSource` records version counters and
addresses of its tensors (a stamp) when it is created, and compares them before it computes logits.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from memeff_compile import compat
from memeff_compile.errors import StaleLogitsError
from memeff_compile.logits.recipe import LogitsRecipe, LossSettings
from memeff_compile.logits.together import Ranks
from memeff_compile.report import LogitsUse

_REMEDY_GATHERED = (
    "FSDP frees the gathered head in the backward pass: read out.logits before loss.backward(), or "
    'compile with options={"memeff.logits": "eager"}.'
)

_EDITED = "the head's weight, or an adapter, changed since then, through .data or outside PyTorch"

_reading: list[str] = []


@contextmanager
def reading_for(reason: str) -> Iterator[None]:
    """Name the code that reads deferred logits in this context, for the compilation's report.

    Deferred logits are computed when first read, not by the compiled graph. The report lists logits
    that are computed in this context under the name `reason`. `reason` is usually the name of the
    op that reads the logits. If contexts are nested, the report shows the `reason` of the outermost
    context.
    """
    _reading.append(reason)
    try:
        yield
    finally:
        _reading.pop()


def reader() -> str:
    """Return the name under which the compilation's report lists logits that are computed now.

    `reading_for` is a context manager around code that reads deferred logits (logits that are
    computed when first read). The outermost active `reading_for` sets the name, usually that of the
    op that reads the logits.
    """
    return _reading[0] if _reading else "their values"


class LogitsSource:
    """Detached aliases of the hidden states and of the output projection's tensors from which
    logits are computed.

    Because the aliases are detached, this object does not keep the autograd graph of the hidden
    states alive. As in eager PyTorch, logits keep the autograd graph of the hidden states alive,
    but detached logits do not.
    """

    def __init__(
        self,
        hidden: Tensor,  # (..., hidden), the input of the head
        weight: Tensor,  # the head's weight
        bias: Tensor | None,  # the bias inside the product, or None
        vectors: Sequence[Tensor],  # operands of the recipe's steps
        remedy: str,  # the end of the error's sentence
        # how a loss outside the graph is fused, or None if it is not
        loss: LossSettings | None = None,
        use: LogitsUse | None = None,  # counts how the logits are used
    ) -> None:
        self.loss, self.use = loss, use
        added = (bias, *vectors)
        self.trained = (
            hidden.requires_grad,
            weight.requires_grad,
            any(each is not None and each.requires_grad for each in added),
        )
        self.has_gradients = False  # a loss has computed them in its forward pass
        self.ranks = Ranks(weight) if compat.is_dtensor(weight) else None
        self.hidden, self.weight = hidden.detach(), compat.local_part(weight).detach()
        self.bias = None if bias is None else compat.local_part(bias).detach()
        self.vectors = tuple(vector.detach() for vector in vectors)
        self.remedy = remedy
        self.is_inference = hidden.is_inference()
        self.materialisations = 0  # products computed so far
        self.read_by = ""  # the reader of the latest read, also of values that existed already
        self.stepped_by: str | None = None
        self.is_differentiated = False  # a gradient has come back through these logits
        operands = [tensor for tensor in (weight, bias, *vectors) if tensor is not None]
        shards = [compat.fsdp_shard(tensor) for tensor in operands]
        self._shards = [shard for shard in shards if shard is not None]
        self._spread = [*self._shards, *filter(compat.is_dtensor, operands)]
        self.parameters = [
            weakref.ref(tensor) for tensor in (*operands, *self._shards) if tensor.requires_grad
        ]
        names = ["the head's weight", *["the head's bias"] * (bias is not None)]
        names += ["an adapter" if _is_matrix(v) else "a vector added to them" for v in vectors]
        self._seen: list[tuple[str, Tensor, int | None, int | None]] = [
            ("the hidden states they come from", self.hidden, *_stamp(self.hidden))
        ]
        for name, operand, shard in zip(names, operands, shards, strict=True):
            held = compat.local_part(operand).detach()
            version, pointer = _stamp(held)
            # FSDP gathers a weight repeatedly, each time at another address.
            self._seen.append((name, held, version, pointer if shard is None else None))
        self._shard_stamps = [_shard_stamp(shard) for shard in self._spread]
        self._sample: Tensor | None = None
        if self.parameters:
            self._sample = None if self.weight.is_meta else self._sampled()
            _live.add(self)
            _watch_optimizers()

    def compute(self, recipe: LogitsRecipe, rows: Tensor) -> Tensor:
        """Compute the logits of tokens with the hidden states `rows`, without autograd.

        `recipe` lists the steps from hidden states to logits. Raise a StaleLogitsError if a tensor
        from which the logits are computed has changed.
        """
        change = self.change()
        if self.ranks is not None:
            change = self.ranks.agreed(change, self.weight.device)
        self._refuse(change)
        self.materialisations += 1
        if self.use is not None:
            self.use.count_computed(reader(), compat.users_line())
        with torch.inference_mode(self.is_inference), torch.no_grad():
            gather = None if self.ranks is None else self.ranks.gather
            return recipe.logits(rows, self.weight, self.bias, self.vectors, gather)

    @compat.untraced
    def record_gradients_of(self, results: Iterable[Any]) -> None:
        """Register a hook that runs when a backward pass goes through one of `results`.

        `results` contains tensors that depend on the logits, such as the results of an op. The hook
        marks an op in the compilation's report as a part of a loss. This op is the one that read
        the logits last.
        """
        use, reason = self.use, self.read_by
        if use is not None and reason and not use.has_gradient(reason):
            line = compat.users_line()
            compat.after_gradients(results, lambda: use.record_gradient(reason, line))

    def require_unchanged(self) -> None:
        """Raise a StaleLogitsError if the hidden states or the output projection have changed since
        this `LogitsSource` was created.

        A write through `.data` is detected by comparing sampled elements of the weight. Copying
        the samples to the CPU for the comparison would make the CPU wait for the GPU. So an
        assertion on the GPU compares the samples, before the backward pass. Ordinary training loops
        do not change the output projection before the backward pass.
        """
        if self._sample is None or self.is_differentiated or self.weight.device.type == "cpu":
            self._refuse(self.change())
            return
        self._refuse(self._visible_change())
        same = ~_differences(self._sample, self._sampled()).any()
        compat.assert_on_device(same, f"deferred logits: {_EDITED}; {self.remedy}")

    def _refuse(self, change: str | None) -> None:
        if change is not None:
            raise StaleLogitsError(
                "These logits were left out of the forward pass to be computed on first use, and "
                f"{change}: the values of the forward pass are gone. "
                f"{_REMEDY_GATHERED if self._shards else self.remedy}"
            )

    def change(self) -> str | None:
        """Return the name of a tensor that has changed since this `LogitsSource` was created, or
        None."""
        change = self._visible_change()
        if change is not None or self._sample is None:
            return change
        with torch.no_grad(), compat.outside_dispatch_modes():
            is_edited = bool(_differences(self._sample, self._sampled()).any())
        return _EDITED if is_edited else None

    def _sampled(self) -> Tensor:
        """Return a few elements of the output projection's weight and of its adapters' weights."""
        adapters = [_sample(each).flatten() for each in self.vectors if _is_matrix(each)]
        sample = _sample(self.weight)
        return torch.cat([sample.flatten(), *adapters]) if adapters else sample.clone()

    def _visible_change(self) -> str | None:
        """Return the name of a tensor that has changed, if its version counter or address shows the
        change, or None."""
        for name, tensor, version_then, pointer_then in self._seen:
            version, pointer = _stamp(tensor)
            if version != version_then:
                return (
                    f"{name} changed in place since then (version {version_then}, now {version}; "
                    "an optimizer step does this)"
                )
            if tensor.numel() and not tensor.untyped_storage().nbytes():
                return f"the memory of {name} was freed since then, as sharded training does"
            if pointer_then is not None and pointer != pointer_then:
                return f"the memory of {name} was replaced since then"
        if [_shard_stamp(shard) for shard in self._spread] != self._shard_stamps:
            return "the sharded head changed in place since then"
        if self.stepped_by is not None:
            return f"{self.stepped_by}.step() updated the head since then"
        return None


def _is_matrix(added: Tensor) -> bool:
    """Return whether a tensor is the matrix A or B of an adapter, not a vector."""
    return added.dim() == 2


def _stamp(tensor: Tensor) -> tuple[int | None, int]:
    """Return a tensor's version counter and address; if one of them changes, the tensor's values
    may have changed.

    Inference tensors have no version counter, so only their address is returned.
    """
    return (None if tensor.is_inference() else compat.version_of(tensor)), tensor.data_ptr()


def _shard_stamp(shard: Tensor) -> tuple[Any, ...]:
    """Return the version counters and address of a distributed tensor.

    A distributed tensor and its local tensor have separate version counters.
    """
    return compat.version_of(shard), *_stamp(compat.local_part(shard))


def _sample(weight: Tensor) -> Tensor:
    """Return a few evenly spaced elements of a weight, with which a write through `.data` can be
    detected."""
    rows, columns = weight.shape
    down, right = weight.stride()
    return weight.as_strided(
        (min(rows, 8), min(columns, 8)), (max(rows // 8, 1) * down, max(columns // 8, 1) * right)
    )


def _differences(left: Tensor, right: Tensor) -> Tensor:
    """Return a boolean tensor that is True where two samples of the weights differ.

    Both samples contain the same elements of the weights, read at different times. NaN counts as
    equal to NaN.
    """
    return (left != right) & ~(left.isnan() & right.isnan())


_live: weakref.WeakSet[LogitsSource] = weakref.WeakSet()


@cache
def _watch_optimizers() -> None:
    """Register a hook that detects optimizer steps which do not change version counters: steps of
    fused optimizers, and steps that write through `.data`.
    """
    register_optimizer_step_post_hook(_after_step)


@compat.untraced
def _after_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Mark each `LogitsSource` as changed if the optimizer has just updated its output projection.

    A `LogitsSource` contains the tensors from which deferred logits are computed. A later attempt
    to compute logits from changed tensors raises a StaleLogitsError.
    """
    waiting = [source for source in list(_live) if source.stepped_by is None]
    if not waiting:
        return
    given = (parameter for group in optimizer.param_groups for parameter in group["params"])
    updated = {id(parameter) for parameter in given if parameter.grad is not None}
    for source in waiting:
        if any(id(reference()) in updated for reference in source.parameters):
            source.stepped_by = type(optimizer).__name__
