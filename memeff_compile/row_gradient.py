# ruff: noqa: ANN401  (the protocols of PyTorch take and return anything)
"""Gradients of logits that are zero but for a few rows, kept as those rows.

`logits[:, -1]` has the autograd node that eager PyTorch gives it, and that node's backward returns
a gradient as large as all logits, zeros nearly everywhere. A `RowGradient` passes through these
nodes in its place: each hands it to the dispatcher, where the operation is noted and not run. The
backward of deferred logits asks for the pieces and pays for their rows only; anything else that
touches a `RowGradient` gets the dense tensor that eager PyTorch would have made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from memeff_compile.lazy_tensor import LazyTensor, untraced

__all__ = ["Piece", "RowGradient", "RowStep", "indexed_dims"]

aten = torch.ops.aten


class RowStep(NamedTuple):
    """One selection of rows, and its transpose.

    Both work on any tensor with the leading dimensions in question: on gradients, whose last
    dimension is the vocabulary, and on hidden states alike.
    """

    select: Callable[[Tensor], Tensor]
    scatter: Callable[[Tensor], Tensor]


class Piece(NamedTuple):
    """A gradient of some rows, and the steps that lead from all rows to these, last one first."""

    rows: Tensor
    steps: tuple[RowStep, ...]

    def select(self, tensor: Tensor) -> Tensor:
        """Return the rows of `tensor` that this piece speaks of."""
        for step in reversed(self.steps):
            tensor = step.select(tensor)
        return tensor

    def scatter(self, tensor: Tensor) -> Tensor:
        """Return `tensor`, which has this piece's rows, among zeros in all rows."""
        for step in self.steps:
            tensor = step.scatter(tensor)
        return tensor


class RowGradient(LazyTensor):
    """A dense gradient in shape, a sum of pieces in memory."""

    pieces: tuple[Piece, ...]
    _dense: Tensor | None

    @staticmethod
    def __new__(
        cls: type[RowGradient], shape: Sequence[int], pieces: tuple[Piece, ...], like: Tensor
    ) -> RowGradient:
        self = torch.Tensor._make_wrapper_subclass(
            cls, tuple(shape), dtype=like.dtype, device=like.device
        )
        self.pieces, self._dense = pieces, None
        return self

    @staticmethod
    @untraced
    def of(rows: Tensor) -> Tensor:
        """Wrap the gradient of a few rows; a gradient with a graph of its own stays as it is."""
        if type(rows) is not Tensor or rows.requires_grad:
            return rows
        return RowGradient(rows.shape, (Piece(rows, ()),), rows)

    def dense(self) -> Tensor:
        """Return the plain gradient."""
        if self._dense is None:
            parts = [piece.scatter(piece.rows) for piece in self.pieces]
            total = (
                parts[0] if parts else torch.zeros(self.shape, dtype=self.dtype, device=self.device)
            )
            for part in parts[1:]:
                total = total + part
            # From here on the dense tensor is the gradient: someone may write to it.
            self._dense, self.pieces = total, (Piece(total, ()),)
        return self._dense

    def _values(self) -> Tensor:
        return self.dense()

    def _memory(self) -> Tensor:
        return self.dense()

    def _peek(self) -> Tensor | None:
        return self._dense

    def then(self, shape: Sequence[int], step: RowStep) -> RowGradient:
        """Return the gradient in front of one more selection; `shape` is that of all rows."""
        pieces = tuple(Piece(piece.rows, (*piece.steps, step)) for piece in self.pieces)
        return RowGradient(shape, pieces, self)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # annotated as a function of torch's own
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return _dispatch(func, args, kwargs or {})

    # Gradients meet no function that has to act above autograd.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


@untraced
def _dispatch(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    rule = _RULES.get(func)
    if rule is not None:
        result = rule(*args, **kwargs)
        if result is not None:
            return result
    args, kwargs = pytree.tree_map_only(RowGradient, RowGradient.dense, (tuple(args), kwargs))
    return func(*args, **kwargs)


def _with_last(shape: Sequence[int], tensor: Tensor) -> list[int]:
    """`shape` with the last dimension of `tensor`."""
    return [*shape[:-1], tensor.shape[-1]]


def _is_leading(dim: int, shape: Sequence[int]) -> bool:
    return dim % len(shape) != len(shape) - 1


def _select_backward(
    grad: Tensor, shape: Sequence[int], dim: int, index: int
) -> RowGradient | None:
    if not isinstance(grad, RowGradient) or not _is_leading(dim, shape):
        return None
    dim = dim % len(shape)
    return grad.then(
        shape,
        RowStep(
            lambda x: x.select(dim, index),
            lambda g: aten.select_backward(g, _with_last(shape, g), dim, index),
        ),
    )


def _slice_backward(
    grad: Tensor, shape: Sequence[int], dim: int, start: int, end: int, step: int
) -> RowGradient | None:
    if not isinstance(grad, RowGradient) or not _is_leading(dim, shape):
        return None
    dim = dim % len(shape)
    return grad.then(
        shape,
        RowStep(
            lambda x: aten.slice(x, dim, start, end, step),
            lambda g: aten.slice_backward(g, _with_last(shape, g), dim, start, end, step),
        ),
    )


def _reshape(grad: RowGradient, shape: Sequence[int], *unused: object) -> RowGradient | None:
    """A view of a gradient, and what it was before, as one step."""
    before = tuple(grad.shape)
    after = torch.empty(before, device="meta").reshape(tuple(shape)).shape
    if not after or not before or after[-1] != before[-1]:
        return None
    return grad.then(
        after,
        RowStep(
            lambda x: x.reshape(_with_last(before, x)),
            lambda g: g.reshape(_with_last(after, g)),
        ),
    )


def _squeeze(grad: RowGradient, *dim: Any) -> RowGradient | None:
    return _reshape(grad, torch.empty(grad.shape, device="meta").squeeze(*dim).shape)


def _unsqueeze(grad: RowGradient, dim: int) -> RowGradient | None:
    return _reshape(grad, torch.empty(grad.shape, device="meta").unsqueeze(dim).shape)


def _same(grad: RowGradient, **kwargs: object) -> RowGradient:
    return RowGradient(grad.shape, grad.pieces, grad)


def _cast(
    grad: RowGradient,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    **kwargs: object,
) -> RowGradient | None:
    if device is not None and device != grad.device:
        return None
    pieces = tuple(Piece(piece.rows.to(dtype), piece.steps) for piece in grad.pieces)
    like = torch.empty(0, dtype=dtype or grad.dtype, device=grad.device)
    return RowGradient(grad.shape, pieces, like)


def _index_put(
    zeros: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False
) -> RowGradient | None:
    """The transpose of advanced indexing, as autograd spells it: added into fresh zeros."""
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
    """The transpose of `index_select`."""
    if alpha != 1:
        return None
    return _index_put(zeros, [*[None] * (dim % zeros.dim()), index.reshape(-1)], values, True)


def indexed_dims(indices: Sequence[Tensor | None]) -> int:
    """Number of leading dimensions that a list of advanced indices covers."""
    covered = 0
    for place, index in enumerate(indices):
        if index is not None:
            masks = index.dtype in (torch.bool, torch.uint8)
            covered = max(covered, place + (index.dim() if masks else 1))
    return covered


def _add(left: Tensor, right: Tensor, *, alpha: float = 1) -> RowGradient | None:
    """Two contributions to one gradient; as soon as they fill all rows, dense is cheaper."""
    if type(left) is not RowGradient or type(right) is not RowGradient or alpha != 1:
        return None
    pieces = (*left.pieces, *right.pieces)
    covered = sum(piece.rows.numel() for piece in pieces)
    if left.shape != right.shape or left.dtype != right.dtype or covered >= left.numel():
        return None
    return RowGradient(left.shape, pieces, left)


def _new_zeros(
    grad: RowGradient,
    shape: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    **kwargs: object,
) -> RowGradient | None:
    if device is not None and device != grad.device:
        return None
    return RowGradient(shape, (), torch.empty(0, dtype=dtype or grad.dtype, device=grad.device))


_RULES: dict[Any, Callable[..., Tensor | None]] = {
    aten.select_backward.default: _select_backward,
    aten.slice_backward.default: _slice_backward,
    aten.view.default: _reshape,
    aten._unsafe_view.default: _reshape,
    aten._reshape_alias.default: _reshape,
    aten.reshape.default: _reshape,
    aten.squeeze.default: _squeeze,
    aten.squeeze.dim: _squeeze,
    aten.squeeze.dims: _squeeze,
    aten.unsqueeze.default: _unsqueeze,
    aten.detach.default: _same,
    aten.alias.default: _same,
    aten.clone.default: _same,
    aten._to_copy.default: _cast,
    aten.index_put.default: _index_put,
    aten.index_add.default: _index_add,
    aten.add.Tensor: _add,
    aten.new_zeros.default: _new_zeros,
}
