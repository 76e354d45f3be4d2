"""memeff::embedding and its related ops: schemas, validation, choice of implementation, fake
tensors, autograd.

`embedding` and `embedding_tied` are composed of other ops (CompositeImplicitAutograd). So the inner
compiler (Inductor by default) sees aten.embedding in the forward pass and fuses it as usual. The
backward pass calls `embedding_backward`, which has no side effects, or `embedding_accumulate`,
which writes to its first argument.

In `embedding_tied`, the weight of the output projection is a second output of the lookup. So
autograd passes two gradients to the lookup's backward pass: the gradient of the looked-up rows, and
the gradient of the output projection's weight. The backward pass adds the first gradient to the
second in place, so the table needs only one gradient buffer.

With `first_row`, `embedding` and `embedding_tied` treat the weight as one rank's shard of a table.
The shard starts at row `first_row`. Ids whose rows other ranks store get zeros in the lookup, and
no gradient.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import library
from ..checks import INDICES, require, short, two_devices, unfloating, unplain
from ..device import kernels_serve
from . import reference

ENGINES = {
    "sorted": (
        "ids sorted, rows summed per id in fp32 by two Triton passes "
        "(CUDA, compute capability 8.0 or later; bf16, fp16, fp32)"
    ),
    "reference": "plain PyTorch, ids sorted, rows summed per id (any device, also fp64)",
}


def supports(weight: Tensor, ids: Tensor) -> str | None:
    """Return the reason why a (V, D) table and (...) token ids are not supported, or None if they
    are."""
    sentence = unplain("weight", weight) or unfloating("weight", weight)
    if sentence is not None:
        return sentence
    if weight.dim() != 2:
        return f"weight has {weight.dim()} dimensions; (V, D) is needed."
    if ids.dtype not in INDICES:
        return f"ids has dtype {short(ids.dtype)}; int64 or int32 is needed."
    return two_devices("ids", ids, "weight", weight)


def engine_for(device: torch.device, dtype: torch.dtype) -> str:
    """Return the name of the implementation that computes an embedding table's gradient.

    The name is a key of `ENGINES`. The gradient has the given device and dtype.
    """
    return "sorted" if kernels_serve(device, dtype) else "reference"


class _Places(NamedTuple):
    """The map from token ids to rows of a weight.

    The weight is the whole table or one rank's shard of it."""

    vocab: int | torch.SymInt  # rows of the weight
    padding_idx: int  # an id, or -1
    first_row: int | None  # the id of the weight's first row, where other ranks hold other rows

    def of(self, ids: Tensor) -> tuple[Tensor, int]:
        """Return the row index of each id in this rank's weight, and the row index of
        `padding_idx`.

        The index of an id is -1 if another rank stores the row.
        """
        if self.first_row is None:
            return ids, self.padding_idx
        here = (ids >= self.first_row) & (ids < self.first_row + self.vocab)
        return torch.where(here, ids - self.first_row, -1), max(
            self.padding_idx - self.first_row, -1
        )

    def rows(self, weight: Tensor, ids: Tensor) -> Tensor:
        """Return the embeddings of the ids, with zeros for ids whose row another rank stores."""
        places, padding_idx = self.of(ids)
        if self.first_row is not None:
            return rows_or_zeros(weight, places)
        rows: Tensor = torch.ops.aten.embedding.default(weight, places, padding_idx)
        return rows


def rows_or_zeros(weight: Tensor, places: Tensor) -> Tensor:
    """Return the rows of a weight at the indices `places`, with zeros for an index of -1.

    The weight may be empty.
    """
    if weight.shape[0] == 0:
        return weight.new_zeros((*places.shape, weight.shape[1]))
    rows: Tensor = torch.ops.aten.embedding.default(weight, places.clamp(min=0))
    return rows.masked_fill((places < 0).unsqueeze(-1), 0)


class _Embedding(torch.autograd.Function):
    """The autograd function of the lookup: it runs aten.embedding, and `embedding_backward` in the
    backward pass."""

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, ids: Tensor, padding_idx: int, first_row: int | None
    ) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.places = _Places(weight.shape[0], padding_idx, first_row)
        return ctx.places.rows(weight, ids)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad_rows: Tensor) -> Any:
        places, padding_idx = ctx.places.of(*ctx.saved_tensors)
        gradient = embedding_backward(grad_rows, places, ctx.places.vocab, padding_idx)
        return gradient, None, None, None


class _TiedEmbedding(torch.autograd.Function):
    """The autograd function of a lookup that returns the table as a second output.

    The backward pass of this lookup adds the gradients of both outputs in one buffer.
    """

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, ids: Tensor, padding_idx: int, first_row: int | None
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(ids)
        ctx.places = _Places(weight.shape[0], padding_idx, first_row)
        ctx.set_materialize_grads(False)
        return ctx.places.rows(weight, ids), weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad_rows: Tensor | None, grad_weight: Tensor | None) -> Any:
        if grad_rows is None:
            return grad_weight, None, None, None
        places, padding_idx = ctx.places.of(*ctx.saved_tensors)
        if grad_weight is None or torch.is_grad_enabled():
            alone = embedding_backward(grad_rows, places, ctx.places.vocab, padding_idx)
            # with create_graph=True every step must stay differentiable
            return alone if grad_weight is None else grad_weight + alone, None, None, None
        # No other code reads this buffer: in the graph, only fused losses read the table, and their
        # backward ops return new tensors.
        embedding_accumulate(grad_weight, grad_rows, places, padding_idx)
        return grad_weight, None, None, None


def _embedding(
    weight: Tensor, ids: Tensor, padding_idx: int, first_row: int | None = None
) -> Tensor:
    require("embedding", supports(weight, ids))
    rows: Tensor = _Embedding.apply(weight, ids, padding_idx, first_row)  # type: ignore[no-untyped-call]
    return rows


def _embedding_tied(
    weight: Tensor, ids: Tensor, padding_idx: int, first_row: int | None = None
) -> tuple[Tensor, Tensor]:
    require("embedding", supports(weight, ids))
    both = _TiedEmbedding.apply(weight, ids, padding_idx, first_row)  # type: ignore[no-untyped-call]
    return both[0], both[1]


def _accumulate(grad_weight: Tensor, grad_rows: Tensor, ids: Tensor, padding_idx: int) -> None:
    require("embedding", supports(grad_weight, ids))
    if grad_rows.numel() == 0 or grad_weight.numel() == 0:
        return
    flat_ids = ids.reshape(-1)
    flat_rows = grad_rows.reshape(-1, grad_weight.shape[1])
    if engine_for(grad_weight.device, grad_weight.dtype) == "sorted":
        from .sorted_rows import accumulate
    else:
        accumulate = reference.accumulate
    accumulate(grad_weight, flat_rows, flat_ids, padding_idx)


def _backward(grad_rows: Tensor, ids: Tensor, vocab: int, padding_idx: int) -> Tensor:
    grad_weight = grad_rows.new_zeros((vocab, grad_rows.shape[-1]))
    _accumulate(grad_weight, grad_rows, ids, padding_idx)
    return grad_weight


def _fake_backward(grad_rows: Tensor, ids: Tensor, vocab: int, padding_idx: int) -> Tensor:
    return grad_rows.new_empty((vocab, grad_rows.shape[-1]))


def _fake_accumulate(grad_weight: Tensor, grad_rows: Tensor, ids: Tensor, padding_idx: int) -> None:
    require("embedding", supports(grad_weight, ids))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ids, _, padding_idx = inputs
    ctx.save_for_backward(ids)
    ctx.padding_idx = padding_idx


def _link(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (ids,) = ctx.saved_tensors
    return rows_or_zeros(grad, ids.masked_fill(ids == ctx.padding_idx, -1)), None, None, None


embedding = library.op(
    "embedding(Tensor weight, Tensor ids, int padding_idx, int? first_row=None) -> Tensor",
    _embedding,
)
embedding_tied = library.op(
    "embedding_tied(Tensor(a) weight, Tensor ids, int padding_idx, int? first_row=None) "
    "-> (Tensor rows, Tensor(a) head_weight)",
    _embedding_tied,
)
embedding_backward = library.op(
    "embedding_backward(Tensor grad_rows, Tensor ids, SymInt vocab, int padding_idx) -> Tensor",
    _backward,
    _fake_backward,
    backward=_link,
    setup_context=_setup_context,
)
embedding_accumulate = library.op(
    "embedding_accumulate(Tensor(a!) grad_weight, Tensor grad_rows, Tensor ids, int padding_idx) "
    "-> ()",
    _accumulate,
    _fake_accumulate,
)
