# ruff: noqa: ANN401  (the protocols of PyTorch take and return anything)
"""Gradients of logits that are nonzero only in a few rows (tokens); only these rows are stored.

For `logits[:, -1]`, the backward pass of eager PyTorch returns a gradient as large as all logits,
with zeros in nearly all rows. In this module, the backward pass of such a selection returns a
`RowGradient` instead. A `RowGradient` records reshapes, sums and similar operations without
running them. Any other operation runs on the dense gradient, as in eager PyTorch. The backward pass
of deferred logits (logits that are computed when first read) uses only the rows that a
`RowGradient` contains.

Code outside of the compiled graph may compute a loss from deferred logits. Then the gradient of
these logits is a `RowGradient` too, even if no row is zero. This gradient contains `FusedRows`: a
few numbers per row instead of one per class. From these numbers, the backward pass of the deferred
logits computes the gradients of hidden states and weight.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from operator import attrgetter
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from memeff_compile import compat
from memeff_compile.compat import pytree
from memeff_compile.logits.fused_rows import FusedRows
from memeff_compile.logits.lazy_tensor import LazyTensor

aten = torch.ops.aten


class RowStep(NamedTuple):
    """A function that selects rows of a tensor, and its adjoint function, which writes the selected
    rows back to their positions.

    The two functions apply to hidden states and to gradients of logits, because these
    tensors differ only in their last dimension.
    """

    select: Callable[[Tensor], Tensor]
    scatter: Callable[[Tensor], Tensor]


class Piece(NamedTuple):
    """The gradient of some rows (tokens) of logits, and the steps (`RowStep`) that select them.

    The steps select these rows from all rows of the logits. The steps are stored in reverse order:
    the step that is applied last comes first.
    """

    rows: Tensor | FusedRows
    steps: tuple[RowStep, ...]

    @property
    def fused(self) -> FusedRows | None:
        """Return the gradient as `FusedRows` (a few numbers per row) if it has this form and covers
        all rows, otherwise None."""
        return self.rows if isinstance(self.rows, FusedRows) and not self.steps else None

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Return the gradient as a dense tensor with all rows (tokens) of the logits.

        Rows that this gradient does not cover are zero.
        """
        rows = self.rows
        return self.scatter(rows.dense(dtype) if isinstance(rows, FusedRows) else rows)

    def select(self, tensor: Tensor) -> Tensor:
        """Return the rows (tokens) of `tensor` that this gradient covers."""
        for step in reversed(self.steps):
            tensor = step.select(tensor)
        return tensor

    def scatter(self, tensor: Tensor) -> Tensor:
        """Return a tensor with all rows (tokens) of the logits: the rows that this gradient covers
        contain `tensor`, the other rows are zero.
        """
        for step in self.steps:
            tensor = step.scatter(tensor)
        return tensor


class RowGradient(LazyTensor):
    """A gradient of logits that looks like a dense tensor, but is stored as a sum of gradients that
    each cover some rows (tokens)."""

    pieces: tuple[Piece, ...]
    order: tuple[int, ...] | None  # order of the dimensions, if the vocabulary is not last
    _dense: Tensor | None

    @staticmethod
    def __new__(
        cls: type[RowGradient],
        shape: Sequence[int],
        pieces: tuple[Piece, ...],
        like: Tensor,
        order: tuple[int, ...] | None = None,
    ) -> RowGradient:
        self = cls._make(shape, like.dtype, like.device)
        self.pieces, self.order, self._dense = pieces, order, None
        return self

    @staticmethod
    @compat.untraced
    def of(rows: Tensor) -> Tensor:
        """Return `rows`, the gradient of selected rows (tokens) of logits, as a RowGradient.

        A RowGradient looks like a dense tensor, but stores only some rows. If `rows` has an
        autograd graph (as in a second derivative), return `rows` unchanged.
        """
        if type(rows) is not Tensor or rows.requires_grad or compat.is_batched(rows):
            return rows
        return RowGradient(rows.shape, (Piece(rows, ()),), rows)

    def dense(self) -> Tensor:
        """Return this gradient of logits as a plain tensor.

        Rows (tokens) that the gradient does not store are zero.
        """
        if self._dense is None:
            total = _sum(self.pieces, self)
            if self.order is not None and self.pieces:
                total = total.permute(self.order)
            # From here on the dense tensor is the gradient, because callers may write to it.
            self._dense, self.pieces, self.order = total, (Piece(total, ()),), None
        return self._dense

    @staticmethod
    def of_fused(rows: FusedRows) -> Tensor:
        """Return the gradient `rows` of a logits tensor as a RowGradient.

        A `RowGradient` looks like a dense tensor, but stores only `rows`: a few numbers for each
        row (token) of the logits. vmap does not find the tensors inside of a `RowGradient`, so
        under vmap the function returns a dense gradient.
        """
        head = rows.head
        if rows.is_batched:
            return rows.dense(head.recipe.dtype)
        like = head.hidden.new_empty(0, dtype=head.recipe.dtype)
        return RowGradient((*head.hidden.shape[:-1], head.vocabulary), (Piece(rows, ()),), like)

    @property
    def is_fused(self) -> bool:
        """Return whether this gradient of logits is stored only as a few numbers per row (token).

        These numbers are in `FusedRows`. The gradient is computed from the numbers, the hidden
        states and the output projection. Return False if the vocabulary is not the gradient's last
        dimension.
        """
        are_fused = [isinstance(piece.rows, FusedRows) for piece in self.pieces]
        return any(are_fused) and all(are_fused) and self.order is None

    def with_rows(
        self, function: Callable[[Any], Tensor | FusedRows], dtype: torch.dtype | None = None
    ) -> RowGradient:
        """Return this gradient of logits with `function` applied to its stored rows (tokens).

        The gradient is stored as a sum. Each summand stores some rows, as a tensor or as
        `FusedRows` (a few numbers per row instead of one per class). `function` takes the rows of
        one summand, and returns the rows of this summand in the new gradient.
        """
        pieces = tuple(Piece(function(piece.rows), piece.steps) for piece in self.pieces)
        like = torch.empty(0, dtype=dtype or self.dtype, device=self.device)
        return RowGradient(self.shape, pieces, like, self.order)

    def permuted(self, order: Sequence[int]) -> RowGradient:
        """Return the gradient with its dimensions in another order."""
        last = self.dim() - 1
        before = self.order or tuple(range(last + 1))
        total = tuple(before[dim] for dim in order)
        shape = [self.shape[dim] for dim in order]
        if total[-1] != last:
            return RowGradient(shape, self.pieces, self, total)
        if total == tuple(range(last + 1)):
            return RowGradient(shape, self.pieces, self)
        back = [total.index(dim) for dim in range(last + 1)]
        return self.then(shape, RowStep(lambda x: x.permute(back), lambda g: g.permute(total)))

    _values = _memory = dense

    def _peek(self) -> Tensor | None:
        return self._dense

    def then(self, shape: Sequence[int], step: RowStep) -> RowGradient:
        """Return the gradient of the tensor from which `step` selected rows.

        `self` is the gradient of the selected rows. `shape` is the shape of the tensor from which
        `step` selected rows, and so of the result.
        """
        pieces = tuple(Piece(piece.rows, (*piece.steps, step)) for piece in self.pieces)
        return RowGradient(shape, pieces, self)

    @classmethod
    def _run(cls, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run one ATen operation on a RowGradient, if possible without the dense gradient.

        A RowGradient is a gradient of logits that stores only some rows (tokens). A rule in
        `_RULES` records the operation as a step for later, or applies the operation to the stored
        rows. If no rule fits, the operation runs on the dense gradient.
        """
        rule = _RULES.get(func)
        given = [leaf for leaf in pytree.tree_leaves(list(args)) if isinstance(leaf, RowGradient)]
        is_taken = rule in _ANY_ORDER or all(grad.order is None for grad in given)
        result = rule(*args, **kwargs) if rule is not None and is_taken else None
        if result is not None:
            return result
        args, kwargs = pytree.tree_map_only(RowGradient, RowGradient.dense, (tuple(args), kwargs))
        return func(*args, **kwargs)

    # Gradients meet no function that has to act above autograd.
    __torch_function__ = compat.NO_TORCH_FUNCTION


def dense(grad: Tensor) -> Tensor:
    """Return a `RowGradient` as a plain tensor; return other tensors unchanged.

    A `RowGradient` stores a gradient of logits as a sum of gradients that each cover some rows
    (tokens).
    """
    return grad.dense() if isinstance(grad, RowGradient) else grad


def _sum(pieces: Sequence[Piece], like: Tensor) -> Tensor:
    """Return the sum of gradients that each cover some rows (tokens), as a dense tensor."""
    parts = [piece.dense(like.dtype) for piece in pieces]
    if not parts:
        return torch.zeros(like.shape, dtype=like.dtype, device=like.device)
    return functools.reduce(torch.add, parts)


def _with_last(shape: Sequence[int], tensor: Tensor) -> list[int]:
    """Return `shape`, extended by the last dimension of `tensor`."""
    return [*shape[:-1], tensor.shape[-1]]


def _is_leading(dim: int, shape: Sequence[int]) -> bool:
    return dim % len(shape) != len(shape) - 1


def _part_backward(step: Callable[..., RowStep]) -> Callable[..., RowGradient | None]:
    def rule(grad: Tensor, shape: Sequence[int], dim: int, *which: int) -> RowGradient | None:
        if not isinstance(grad, RowGradient) or not _is_leading(dim, shape):
            return None
        return grad.then(shape, step(shape, dim % len(shape), *which))

    return rule


def _reshape(grad: RowGradient, shape: Sequence[int], *unused: object) -> RowGradient | None:
    """Return the gradient with another shape, or None if the last dimension would change."""
    before = tuple(grad.shape)
    after = torch.empty(before, device="meta").reshape(tuple(shape)).shape
    if not after or not before or after[-1] != before[-1]:
        return None
    ways = (lambda x: x.reshape(_with_last(before, x)), lambda g: g.reshape(_with_last(after, g)))
    pieces = [
        Piece(piece.rows, (*piece.steps, RowStep(*ways)))
        if piece.fused is None
        else Piece(piece.fused.reshaped(after[:-1]), ())
        for piece in grad.pieces
    ]
    return RowGradient(after, tuple(pieces), grad)


def _shaped(func: Any) -> Callable[..., RowGradient | None]:
    def rule(grad: RowGradient, *dim: Any) -> RowGradient | None:
        return _reshape(grad, func(torch.empty(grad.shape, device="meta"), *dim).shape)

    return rule


def _same(grad: RowGradient, **kwargs: object) -> RowGradient:
    return grad.with_rows(lambda rows: rows)


def _cast(grad: RowGradient, **kwargs: Any) -> RowGradient | None:
    dtype = kwargs.get("dtype")
    if kwargs.get("device") not in (None, grad.device):
        return None
    # Factored rows have a dtype only when multiplied out.
    return grad.with_rows(lambda x: x if isinstance(x, FusedRows) else x.to(dtype), dtype)


def _index_put(
    zeros: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False
) -> RowGradient | None:
    """Return the gradient of advanced indexing as a RowGradient, or None if that is not possible.

    A RowGradient stores only some rows (tokens) of a gradient. Autograd computes the gradient by
    adding rows to a tensor of zeros.
    """
    if type(values) is not RowGradient or type(zeros) is not RowGradient or zeros.pieces:
        return None
    shape = tuple(zeros.shape)
    if not accumulate or indexed_dims(indices) >= len(shape):
        return None
    indices = list(indices)

    def scatter(grad: Tensor) -> Tensor:
        zeros = grad.new_zeros(_with_last(shape, grad))
        return cast("Tensor", aten.index_put(zeros, indices, grad, True))

    return values.then(shape, RowStep(lambda x: aten.index(x, indices), scatter))


def _index_add(
    zeros: Tensor, dim: int, index: Tensor, values: Tensor, *, alpha: float = 1
) -> RowGradient | None:
    """Return the gradient of `index_select` as a RowGradient, or None if that is not possible.

    A RowGradient stores only some rows (tokens) of a gradient. Autograd computes the gradient by
    calling `index_add`.
    """
    if alpha != 1:
        return None
    return _index_put(zeros, [*[None] * (dim % zeros.dim()), index.reshape(-1)], values, True)


def indexed_dims(indices: Sequence[Tensor | None]) -> int:
    """Return the number of the last dimension that has an advanced index, counted from 1.

    Return 0 if no dimension has an advanced index."""
    place = covered = 0
    for index in indices:
        is_mask = index is not None and index.dtype in (torch.bool, torch.uint8)
        place += index.dim() if is_mask and index is not None else 1
        covered = covered if index is None else place
    return covered


def _add(left: Tensor, right: Tensor, *, alpha: float = 1) -> RowGradient | None:
    """Return the sum of two gradients of logits as a `RowGradient`, or None if the caller has to
    add dense tensors.

    A `RowGradient` stores some rows (tokens) of a gradient, as tensors or as `FusedRows`.
    `FusedRows` contains a few numbers per row instead of one per class. If neither gradient
    contains `FusedRows`, the result is None in these cases:

    - one of the gradients is dense;
    - the two gradients together contain at least as many rows as a dense gradient.

    If one of the gradients contains `FusedRows`, the result is a `RowGradient`. Neither a dense
    second gradient nor a large number of rows changes the type of this result."""
    if not isinstance(left, Tensor) or not isinstance(right, Tensor):
        return None  # a hook of a node adds a number
    if alpha != 1 or left.shape != right.shape or left.dtype != right.dtype:
        return None
    pieces = [*_pieces_of(left), *_pieces_of(right)]
    fused = [piece for piece in pieces if isinstance(piece.rows, FusedRows)]
    rest = [piece for piece in pieces if not isinstance(piece.rows, FusedRows)]
    is_full = sum(cast("Tensor", piece.rows).numel() for piece in rest) >= left.numel()
    are_rows = isinstance(left, RowGradient) and isinstance(right, RowGradient)
    if not fused and (is_full or not are_rows):
        return None
    if is_full and len(rest) > 1:
        rest = [Piece(_sum(rest, left), ())]
    return RowGradient(left.shape, (*_merged(fused), *rest), left)


def _pieces_of(grad: Tensor) -> tuple[Piece, ...]:
    return grad.pieces if isinstance(grad, RowGradient) else (Piece(grad, ()),)


def _merged(pieces: Sequence[Piece]) -> list[Piece]:
    """Add up gradients of logits that cover the same rows (tokens) and are `FusedRows`.

    `FusedRows` contains a few numbers per row instead of one per class. One call of the fused loss
    op then computes the gradients of hidden states and weight from the sum.
    """
    result: list[Piece] = []
    for piece in pieces:
        for place, other in enumerate(result):
            both = other.fused.merged(piece.fused) if other.fused and piece.fused else None
            if both is not None:
                result[place] = Piece(both, ())
                break
        else:
            result.append(piece)
    return result


def _scale(grad: Tensor, factor: Any, *, invert: bool = False) -> RowGradient | None:
    """Return the RowGradient `grad` times `factor`, or divided by `factor` if `invert` is true.

    Autograd may pass the number `factor` as a CPU tensor with one element. Return None for other
    factors, for a division by 0, and if `grad` is no RowGradient.
    """
    if not isinstance(grad, RowGradient):
        return None
    if isinstance(factor, Tensor):
        if factor.dim() or factor.device.type != "cpu" or type(factor) is not Tensor:
            return None
        factor = factor.item()
    if not isinstance(factor, (int, float)) or isinstance(factor, bool) or (invert and not factor):
        return None

    def scaled(rows: Tensor | FusedRows) -> Tensor | FusedRows:
        if isinstance(rows, FusedRows):
            return rows.scaled(1 / factor if invert else factor)
        return rows / factor if invert else rows * factor

    return grad.with_rows(scaled)


def _transpose(grad: RowGradient, one: int, other: int) -> RowGradient:
    order = list(range(grad.dim()))
    order[one], order[other] = order[other], order[one]
    return grad.permuted(order)


def _cat(grads: Sequence[Tensor], dim: int = 0) -> RowGradient | None:
    """Return the gradient of `split` or `chunk` as a RowGradient, or None if that is not possible.

    A RowGradient stores only some rows (tokens) of a gradient. Autograd computes the gradient by
    concatenation.
    """
    dim = dim % grads[0].dim()
    if not _is_leading(dim, grads[0].shape):
        return None
    shape = list(grads[0].shape)
    shape[dim] = sum(grad.shape[dim] for grad in grads)
    starts = accumulate((grad.shape[dim] for grad in grads), initial=0)
    steps = [_sliced(shape, dim, *ends, 1) for ends in pairwise(starts)]
    return _together(grads, shape, lambda parts: torch.cat(list(parts), dim), steps)


def _stack(grads: Sequence[Tensor], dim: int = 0) -> RowGradient | None:
    """Return the gradient of `unbind` as a RowGradient, or None if that is not possible.

    A RowGradient stores only some rows (tokens) of a gradient. Autograd computes the gradient of
    `unbind`, and of a loop over a tensor, by stacking.
    """
    dim = dim % (grads[0].dim() + 1)
    shape = [*grads[0].shape[:dim], len(grads), *grads[0].shape[dim:]]
    if not _is_leading(dim, shape):
        return None
    steps = [_selected(shape, dim, index) for index in range(len(grads))]
    return _together(grads, shape, lambda parts: torch.stack(list(parts), dim), steps)


def _together(
    grads: Sequence[Tensor],
    shape: Sequence[int],
    join: Callable[[Sequence[Tensor]], Tensor],
    steps: Sequence[RowStep],
) -> RowGradient | None:
    """Concatenate or stack gradients into a `RowGradient`; return None if one is no `RowGradient`.

    A `RowGradient` stores a gradient of logits as a sum of gradients that each cover some rows
    (tokens). A gradient may consist of one `FusedRows`: a few numbers per row instead of one per
    class. If all gradients do, and `FusedRows.joined` can join them, the result contains one
    `FusedRows`. Otherwise the result is stored as the sum of the gradients. `steps` contains one
    pair of functions (`RowStep`) per gradient. One function of the pair, `scatter`, writes the
    gradient to its positions in a tensor of zeros, which has the result's shape `shape`.
    """
    given = [grad for grad in grads if isinstance(grad, RowGradient)]
    if len(given) < len(grads):
        return None
    fused = [grad.pieces[0].fused if len(grad.pieces) == 1 else None for grad in given]
    parts = [part for part in fused if part is not None]
    joined = FusedRows.joined(parts, join) if len(parts) == len(given) else None
    if joined is not None:
        return RowGradient(shape, (Piece(joined, ()),), grads[0])
    behind = [grad.then(shape, step) for grad, step in zip(given, steps, strict=True)]
    return RowGradient(shape, tuple(piece for grad in behind for piece in grad.pieces), grads[0])


def _sliced(shape: Sequence[int], dim: int, start: int, end: int, step: int) -> RowStep:
    return RowStep(
        lambda x: aten.slice(x, dim, start, end, step),
        lambda g: aten.slice_backward(g, _with_last(shape, g), dim, start, end, step),
    )


def _selected(shape: Sequence[int], dim: int, index: int) -> RowStep:
    return RowStep(
        lambda x: x.select(dim, index),
        lambda g: aten.select_backward(g, _with_last(shape, g), dim, index),
    )


def _new_zeros(grad: RowGradient, shape: Sequence[int], **kwargs: Any) -> RowGradient | None:
    if kwargs.get("device") not in (None, grad.device):
        return None
    like = torch.empty(0, dtype=kwargs.get("dtype") or grad.dtype, device=grad.device)
    return RowGradient(shape, (), like)


_divide, _negate = functools.partial(_scale, invert=True), functools.partial(_scale, factor=-1.0)

_NAMED: dict[Callable[..., Tensor | None], str] = {
    _part_backward(_selected): "select_backward.default",
    _part_backward(_sliced): "slice_backward.default",
    _reshape: "view.default _unsafe_view.default _reshape_alias.default reshape.default",
    _shaped(aten.squeeze): "squeeze.default squeeze.dim squeeze.dims",
    _shaped(aten.unsqueeze): "unsqueeze.default",
    _same: "detach.default alias.default clone.default",
    _cast: "_to_copy.default",
    _index_put: "index_put.default",
    _index_add: "index_add.default",
    _add: "add.Tensor",
    _scale: "mul.Tensor mul.Scalar",
    _divide: "div.Tensor div.Scalar",
    _negate: "neg.default",
    RowGradient.permuted: "permute.default",
    _transpose: "transpose.int",
    _cat: "cat.default",
    _stack: "stack.default",
    _new_zeros: "new_zeros.default",
}
_RULES = {attrgetter(name)(aten): rule for rule, names in _NAMED.items() for name in names.split()}
_ANY_ORDER = (RowGradient.permuted, _transpose, _same, _cast, _scale, _divide, _negate)
