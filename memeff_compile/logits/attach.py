# ruff: noqa: ANN401  (the protocols of PyTorch take and return anything)
"""Create deferred logits, and pass their values to compiled code that takes the logits as inputs.

Deferred logits are computed when they are first read. `defer` creates them from hidden states and
an output projection, and `attach` from the outputs of a compiled graph. `accept` passes their
values to compiled code. For autograd, deferred logits are an ordinary non-leaf tensor: the result
of the autograd function `_Defer`. The backward pass of `_Defer` takes the gradient of the logits.
From it, the pass computes the gradients of the hidden states and of the output projection.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from memeff_compile import compat
from memeff_compile.errors import ShardedLogitsError
from memeff_compile.logits.fused_rows import FusedRows
from memeff_compile.logits.memory import Memory
from memeff_compile.logits.recipe import DeferredOutput, LogitsRecipe, LossSettings, given_sizes
from memeff_compile.logits.row_gradient import RowGradient
from memeff_compile.logits.source import LogitsSource
from memeff_compile.logits.tensor import DeferredLogits
from memeff_compile.report import LogitsUse

REMEDY = (
    "Read out.logits before optimizer.step(), keep out.logits.detach().clone(), or compile with "
)
REMEDY += 'options={"memeff.logits": "eager"}.'
"""The user's way out for stale logits: the last sentence of every `StaleLogitsError`."""


def defer(
    hidden: Tensor,  # (..., hidden), the input of the head
    weight: Tensor,  # the head's weight, oriented as `recipe` says
    bias: Tensor | None,  # (vocabulary,) or None
    vectors: Sequence[Tensor],  # operands of the recipe's steps
    recipe: LogitsRecipe,  # how the logits come from the hidden states
    *,
    remedy: str = REMEDY,  # the way out for stale logits, the end of the error's sentence
    # how losses of these logits are fused; None leaves them to PyTorch, on computed values
    loss: LossSettings | None = None,
    use: LogitsUse | None = None,  # counts how the logits are used
) -> Tensor:
    """Return the logits of `hidden` as `DeferredLogits`, with the autograd graph of ordinary
    logits.

    Reading a part computes only this part: `logits[:, -1].argmax(-1)` computes only the logits of
    the last tokens. If the output projection or the hidden states are changed in place before the
    first read, that read raises a `StaleLogitsError`.
    """
    return _apply(recipe, (remedy, loss, use), hidden, weight, bias, *vectors)


def attach(
    # takes the graph's arguments; returns hidden states in place of logits
    compiled: Callable[..., Sequence[Any]],
    plan: Sequence[DeferredOutput],  # an entry for each allocation among the outputs to replace
    *,
    clone_hidden: bool,  # `compiled` reuses their memory at its next call, as CUDA graphs do
    # arguments that `compiled` does not read: hidden from autograd, since
    # their hooks would otherwise be called without a gradient
    unread: Sequence[int] = (),
    use: LogitsUse | None = None,  # counts how the logits are used
) -> Callable[..., Sequence[Any]]:
    """Wrap a compiled callable so that the outputs in `plan` become deferred logits.

    Deferred logits are computed when they are first read.
    """
    entries, end = tuple(plan), given_sizes(plan)

    def run(*args: Any) -> Sequence[Any]:
        # As Dynamo calls it; AOTAutograd's _boxed_call flag does not hold here.
        given = list(args)
        for place in unread:
            if type(given[place]) in (Tensor, torch.nn.Parameter):
                given[place] = given[place].detach()
        outputs = compiled(*given)
        results = list(outputs)
        if use is not None and not any(map(compat.is_fake, results)):
            use.count_step()
        for entry in entries:
            hidden, weight = results[entry.output], args[entry.weight]
            bias = None if entry.bias is None else args[entry.bias]
            vectors = [args[index] for index in entry.vectors]
            if compat.is_fake(hidden):
                # DDP asks for fake outputs, to compile the next piece of the model with.
                logits = _fake(hidden, weight, bias, vectors, entry.recipe)
            else:
                made_of = hidden.clone() if clone_hidden else hidden, weight, bias, vectors
                logits = defer(*made_of, entry.recipe, loss=entry.loss, use=use)
            entry.put(logits, results)
        results = results[:end]
        return results if isinstance(outputs, list) else tuple(results)

    return run


def _fake(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, vectors: Sequence[Tensor], recipe: Any
) -> Tensor:
    if compat.is_dtensor(weight):
        shape = (*hidden.shape[:-1], recipe.vocab(weight))
        return hidden.new_empty(shape, dtype=recipe.dtype)
    logits: Tensor = recipe.logits(hidden, weight, bias, vectors)
    return logits


def with_missing_outputs(
    compiled: Callable[..., Any], present: Sequence[bool]
) -> Callable[..., Any]:
    """Wrap a compiled callable so that it again returns None in the positions of removed outputs.

    These outputs were removed from the callable's graph because they are None."""

    def run(*args: object) -> tuple[Any, ...]:
        results = iter(compiled(*args))
        return tuple(next(results) if is_there else None for is_there in present)

    return run


def accept(compiled: Callable[..., Any], places: Sequence[int]) -> Callable[..., Any]:
    """Wrap a compiled callable so that it receives deferred logits (computed when first read) as
    plain tensors, with gradients.

    `places` are the positions of those arguments that are deferred logits, returned by another
    compiled callable.
    """

    def run(*args: Any) -> Any:
        if any(isinstance(args[place], DeferredLogits) for place in places):
            args = tuple(arg.as_plain() if isinstance(arg, DeferredLogits) else arg for arg in args)
        return compiled(*args)

    return run


class _Defer(torch.autograd.Function):
    """The autograd function that connects deferred logits (computed when first read) to the hidden
    states and the output projection."""

    @staticmethod
    def forward(
        ctx: Any,
        recipe: LogitsRecipe,
        settings: tuple[str, LossSettings | None, LogitsUse | None],
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        *vectors: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(hidden, weight, bias, *vectors)
        source = LogitsSource(hidden, weight, bias, vectors, *settings)
        ctx.recipe, ctx.source = recipe, weakref.ref(source)
        ctx.is_spread = source.ranks is not None
        shape = (*hidden.shape[:-1], recipe.vocab(weight))
        return DeferredLogits.whole(Memory(source, recipe, source.hidden, shape), shape)

    @staticmethod
    @compat.untraced
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.is_spread:
            raise ShardedLogitsError(
                "A gradient reached deferred logits of a head that is split over ranks. Such "
                "logits take no gradient: only the returned loss has one. Compile with "
                'options={"memeff.logits": "eager"}.'
            )
        hidden, weight, bias, *vectors = ctx.saved_tensors
        recipe: LogitsRecipe = ctx.recipe
        needed = ctx.needs_input_grad[2:]
        source = ctx.source()
        if source is not None:
            source.is_differentiated = True
        if not isinstance(grad, RowGradient) or grad.order is not None:
            parts = recipe.gradients(grad, hidden, weight, bias, vectors, needed)
            return (None, None, *parts)
        totals: list[Tensor | None] = [None] * len(needed)
        for piece in grad.pieces:
            if isinstance(piece.rows, FusedRows):
                parts = piece.rows.gradients(recipe, needed)
            else:
                rows = piece.select(hidden)
                parts = recipe.gradients(piece.rows, rows, weight, bias, vectors, needed)
            for place, part in enumerate(parts):
                if part is not None:
                    part, total = piece.scatter(part) if place == 0 else part, totals[place]
                    totals[place] = part if total is None else total + part
        return (None, None, *totals)


_apply = cast("Callable[..., Tensor]", _Defer.apply)
