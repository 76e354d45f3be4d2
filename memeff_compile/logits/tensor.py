# ruff: noqa: ANN401  (the protocols of PyTorch take and return anything)
"""Logits that are computed on first use.

A graph whose loss no longer needs the logits returns the hidden states in their place, and
`attach` turns these into a `DeferredLogits`: a tensor with the shape, dtype and autograd node of
the logits and none of their memory. A training loop that never looks at the logits never pays for
them. Whoever looks gets the values that eager PyTorch would have given, and gradients through them.

From the outside in:

* `_Defer` is the autograd function whose result is the logits. Its backward multiplies with the
  head once more, so that autograd sees an ordinary non-leaf tensor.
* `DeferredLogits` is the wrapper subclass. Operations that leave the vocabulary dimension alone
  (`_LAZY`) give another `DeferredLogits`; every other operation computes the values and goes on
  with a plain tensor. Both happen below autograd, so the autograd graph, the views and the version
  counters are those of eager PyTorch. What has to act above autograd is in `_ABOVE_AUTOGRAD`.
* `_Memory` stands for one piece of memory of eager PyTorch: the logits and all their views share
  one, a copy or a cast begins another.
* `LogitsSource` holds the hidden states and the head, and notices when they have changed.
* `outside_loss` computes losses of these logits without computing the logits.

Nothing of this is traced by Dynamo.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from math import isfinite, prod
from multiprocessing.reduction import ForkingPickler
from typing import Any, cast

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef, reduce_tensor
from torch.utils import _pytree as pytree

from memeff_compile import compat
from memeff_compile.errors import MemeffError, UnsupportedInputError
from memeff_compile.logits.fused_rows import FusedRows
from memeff_compile.logits.lazy_tensor import MEMORY_METHODS, LazyTensor, untraced
from memeff_compile.logits.outside_loss import SERVED, Declined, Statistics
from memeff_compile.logits.recipe import DeferredOutput, LogitsRecipe, LossSettings
from memeff_compile.logits.row_gradient import RowGradient, indexed_dims
from memeff_compile.logits.source import LogitsSource, reading_for
from memeff_compile.report import LogitsUse

__all__ = ["REMEDY", "DeferredLogits", "accept", "attach", "defer"]

aten = torch.ops.aten

REMEDY = (
    'Read out.logits before optimizer.step(), or compile with options={"memeff.logits": "eager"}.'
)
"""What a user can do about stale logits: the last sentence of every `StaleLogitsError`."""

# A product of few rows costs about as much as one of this many: reading the head dominates it.
_LEAST_ROWS = 64


def defer(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    vectors: Sequence[Tensor],
    recipe: LogitsRecipe,
    *,
    remedy: str = REMEDY,
    loss: LossSettings | None = None,
    use: LogitsUse | None = None,
) -> Tensor:
    """Return the logits of `hidden` as a tensor that is computed on first use.

    Args:
        hidden: (..., hidden), what enters the head.
        weight: the head's weight, oriented as `recipe` says.
        bias: (vocabulary,) or None.
        vectors: the tensors that the recipe's bias steps add.
        recipe: how the logits come from the hidden states.
        remedy: what to do about stale logits, the end of the error's sentence.
        loss: how losses of these logits are fused; None leaves them to PyTorch, on computed values.
        use: where to count what becomes of the logits.

    Returns:
        A `DeferredLogits` of shape (..., vocabulary), joined to autograd as the logits would be.
        Reading it for the first time after the head or the hidden states were changed in place
        raises a `StaleLogitsError`.

    Example:
        >>> logits = defer(hidden, head.weight, None, (), LogitsRecipe(hidden.dtype))
        >>> logits[:, -1].argmax(-1)        # computes the last rows and no others
    """
    result: Tensor = _apply(recipe, (remedy, loss, use), hidden, weight, bias, *vectors)
    return result


def attach(
    compiled: Callable[..., Sequence[Any]],
    plan: Sequence[DeferredOutput],
    *,
    clone_hidden: bool,
    use: LogitsUse | None = None,
) -> Callable[..., Sequence[Any]]:
    """Wrap a compiled callable so that the outputs named in `plan` become deferred logits.

    Args:
        compiled: takes the graph's arguments; returns hidden states in the place of logits.
        plan: one entry per output to replace; the other outputs pass untouched.
        clone_hidden: keep a copy of the hidden states, because `compiled` reuses their memory at
            its next call, as CUDA graphs do.
        use: where to count what becomes of the logits.

    Returns:
        A callable of the graph's arguments with the kind of result that `compiled` has.
    """
    entries = tuple(plan)

    def run(*args: Any) -> Sequence[Any]:
        # As Dynamo calls it; AOTAutograd's _boxed_call flag does not hold here.
        outputs = compiled(*args)
        results = list(outputs)
        for entry in entries:
            hidden, weight = results[entry.output], args[entry.weight]
            bias = None if entry.bias is None else args[entry.bias]
            vectors = [args[index] for index in entry.vectors]
            if compat.is_fake(hidden):
                # DDP asks for fake outputs, to compile the next piece of the model with.
                logits = entry.recipe.logits(hidden, weight, bias, vectors)
            else:
                hidden = hidden.clone() if clone_hidden else hidden
                logits = defer(
                    hidden, weight, bias, vectors, entry.recipe, loss=entry.loss, use=use
                )
            results[entry.output] = logits.detach() if entry.detached else logits
        return results if isinstance(outputs, list) else tuple(results)

    return run


def accept(compiled: Callable[..., Any], places: Sequence[int]) -> Callable[..., Any]:
    """Wrap a compiled callable so that deferred logits among its arguments arrive as plain ones.

    Args:
        compiled: takes plain tensors only.
        places: the arguments that come out of another compiled callable.

    Returns:
        A callable of the same arguments. Gradients reach the deferred logits.
    """
    entries = tuple(places)

    def run(*args: Any) -> Any:
        if any(isinstance(args[place], DeferredLogits) for place in entries):
            args = tuple(_plain(arg) if isinstance(arg, DeferredLogits) else arg for arg in args)
        return compiled(*args)

    return run


class _Defer(torch.autograd.Function):
    """Joins deferred logits to the hidden states and the head that they come from."""

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
        shape = (*hidden.shape[:-1], recipe.vocab(weight))
        return _Memory(source, recipe, source.hidden, shape).whole(shape)

    @staticmethod
    @untraced
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, *vectors = ctx.saved_tensors
        recipe: LogitsRecipe = ctx.recipe
        needed = ctx.needs_input_grad[2:]
        source = ctx.source()
        if source is not None:
            source.is_differentiated = True
        if not isinstance(grad, RowGradient):
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
                    part = piece.scatter(part) if place == 0 else part
                    total = totals[place]
                    totals[place] = part if total is None else total + part
        return (None, None, *totals)


_apply = cast("Callable[..., Tensor]", _Defer.apply)


class _Memory:
    """What is one piece of memory in eager PyTorch: a tensor and all its views.

    The values of all rows, once computed, live here, and every view reads them here. Before that,
    a view that has only some of the rows computes just these, for itself.

    Writes go to the one place where everybody reads. The exception is a plain alias of rows that
    a view had computed for itself (a loan): the other views cannot see a write through it, so
    they refuse to be read after one. All aliases of a tensor share one version counter in
    PyTorch, which is how such a write is noticed.
    """

    def __init__(
        self,
        source: LogitsSource,
        recipe: LogitsRecipe,
        rows: Tensor,
        shape: tuple[int, ...],
        origin: Callable[[], Tensor | None] | None = None,
    ) -> None:
        self.source, self.recipe, self.rows, self.shape = source, recipe, rows, shape
        self.origin = origin
        self.value: Tensor | None = None
        self.rows_computed = 0
        self.is_open = False  # somebody may have written, or may write unnoticed
        self.alias_version: int | None = None  # of the views, when the first plain alias left
        self.loans: list[StorageWeakRef] = []
        self.loan_version: int | None = None
        self.lender: Callable[[], DeferredLogits | None] = _nobody
        self.statistics: Statistics | None = None  # what the last loss found out about the rows

    def whole(self, shape: tuple[int, ...]) -> DeferredLogits:
        """Return a tensor with all of this memory, in the given shape."""
        rows = self.rows
        if shape != self.shape:
            rows = rows.reshape(*shape[:-1], rows.shape[-1])
        return DeferredLogits(self, rows, shape, _contiguous_stride(shape), 0)

    def read(self, view: DeferredLogits) -> Tensor:
        """Return the values of `view`, computing its rows alone where that is less work."""
        if self.value is not None or (view._own is None and not self._is_less_work(view)):
            return self.link(view)
        self._refuse_lost_writes(view, is_own=True)
        if view._own is None:
            own = self.source.compute(self.recipe, view._rows)
            view._own = own if view._order is None else own.permute(view._order)
            self.rows_computed += max(_row_count(view), _LEAST_ROWS)
        return view._own

    def link(self, view: DeferredLogits) -> Tensor:
        """Return the part of this memory that `view` is, computing all of it if need be."""
        self._refuse_lost_writes(view, is_own=False)
        if self.value is None:
            value = None if self.origin is None else self.origin()
            value = self.source.compute(self.recipe, self.rows) if value is None else value
            self.value = value.contiguous()
        view._own = None
        # Never the memory itself for its size: transposed square logits have that size, too.
        return self.value.as_strided(view._size, view._stride, view._offset)

    def write(self, view: DeferredLogits) -> Tensor:
        """Return the memory of `view` to somebody who may write to it unnoticed."""
        plain = self.link(view)
        if self.loans:
            raise MemeffError(_LOST_WRITE)
        self.is_open = True
        return plain

    def lend(self, view: DeferredLogits) -> None:
        """Note that a plain alias of the values of `view` is about to leave."""
        version = _version(view)
        if version is None:
            self.write(view)
            return
        self.read(view)
        if self.alias_version is None:
            self.alias_version = version
        if view._own is not None:
            is_only_lender = not self.loans or self.lender() is view
            self.lender = weakref.ref(view) if is_only_lender else _nobody
            if not self.loans:
                self.loan_version = version
            self.loans.append(StorageWeakRef(view._own.untyped_storage()))

    def is_pristine(self, view: DeferredLogits) -> bool:
        """Say whether the values of `view` are surely those of the forward pass."""
        return not self.is_open and self.alias_version in (None, _version(view))

    def snapshot(
        self, view: DeferredLogits, function: Callable[[Tensor], Tensor]
    ) -> Callable[[], Tensor | None]:
        """Return a way to apply `function` to a copy of the values of `view` later.

        It holds none of this memory.
        """
        reference, origin = weakref.ref(self), self.origin
        geometry = (view._size, view._stride, view._offset)
        is_inference = self.source.is_inference

        def copy() -> Tensor | None:
            memory, value = reference(), None
            if memory is not None:
                if memory.is_open or memory.alias_version is not None:
                    return None
                value = memory.value
            if value is None and origin is not None:
                value = origin()
            if value is None:
                return None
            with torch.inference_mode(is_inference), torch.no_grad():
                part = value.as_strided(*geometry)
                result = function(part)
                if result is part or not result.is_contiguous():
                    result = result.clone(memory_format=torch.contiguous_format)
                return result

        return copy

    def _is_less_work(self, view: DeferredLogits) -> bool:
        """Say whether to compute the rows of `view` alone, after what such rows have cost."""
        rows = prod(self.shape[:-1])
        return _row_count(view) < rows and self.rows_computed < rows

    def _refuse_lost_writes(self, view: DeferredLogits, *, is_own: bool) -> None:
        """Raise if a loan was written to that `view` cannot see."""
        if not self.loans:
            return
        counting = view if view._taken_from is None else view._taken_from
        if _version(counting) == self.loan_version:
            self.loans = [storage for storage in self.loans if not storage.expired()]
        elif not is_own or self.lender() is not view:
            raise MemeffError(_LOST_WRITE)


_LOST_WRITE = (
    "A part of deferred logits, computed on its own, was modified in place while other tensors "
    "share its memory, which would not see the new values. Modify a copy (logits.clone()), or "
    'compile with options={"memeff.logits": "eager"}.'
)


_OTHER_MEMORY = (
    "{} would give deferred logits another shape or other memory in place. Use a function that "
    'returns a new tensor, or compile with options={{"memeff.logits": "eager"}}.'
)


class DeferredLogits(LazyTensor):
    """Logits, or some of their rows, that are computed on first use."""

    _shared: _Memory
    _rows: Tensor  # the hidden states of this tensor's rows
    _own: Tensor | None  # this tensor's values while the shared memory has none
    _size: tuple[int, ...]
    _stride: tuple[int, ...]
    _offset: int
    _taken_from: DeferredLogits | None  # of `.data`, whose version counter is its own
    _order: tuple[int, ...] | None  # of dimensions, where the vocabulary has left the last place
    _is_reordered: bool  # the rows are not in the order of the memory
    _row_hook: Any

    @staticmethod
    def __new__(
        cls: type[DeferredLogits],
        memory: _Memory,
        rows: Tensor,
        size: tuple[int, ...],
        stride: tuple[int, ...],
        offset: int,
    ) -> DeferredLogits:
        self = cls._make(size, memory.recipe.dtype, rows.device, stride, offset)
        self._shared, self._rows, self._own, self._row_hook = memory, rows, None, None
        self._size, self._stride, self._offset = size, stride, offset
        self._taken_from, self._order, self._is_reordered = None, None, False
        return self

    @property
    def materialisations(self) -> int:
        """Products computed so far for these logits and everything derived from them."""
        return self._shared.source.materialisations

    @untraced
    def _values(self) -> Tensor:
        with compat.outside_dispatch_modes():
            return self._shared.read(self)

    @untraced
    def _memory(self) -> Tensor:
        # A compiler that makes a fake copy of this tensor asks for its storage in its fake mode.
        with compat.outside_dispatch_modes():
            return self._shared.write(self)

    def _peek(self) -> Tensor | None:
        if self._shared.value is None:
            return self._own
        try:
            return self._shared.read(self)
        except MemeffError:
            return None

    def _geometry(self) -> Tensor:
        """This tensor's place in its memory, on the meta device."""
        memory = torch.empty(self._shared.shape, dtype=self._shared.recipe.dtype, device="meta")
        return memory.as_strided(self._size, self._stride, self._offset)

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return _function(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # annotated as a function of torch's own
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return _dispatch(func, args, kwargs or {})


def _nobody() -> None:
    return None


def _row_count(view: DeferredLogits) -> int:
    return prod(view._rows.shape[:-1])


def _version(view: DeferredLogits) -> int | None:
    """Number of writes to `view` and its aliases, where PyTorch keeps count."""
    with torch._C.DisableTorchFunctionSubclass():
        return None if view._taken_from is not None or view.is_inference() else view._version


def _contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    stride, strides = 1, []
    for size in reversed(shape):
        strides.append(stride)
        stride *= max(size, 1)
    return tuple(reversed(strides))


# Below autograd ----------------------------------------------------------------------------------


@untraced
def _dispatch(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run one ATen operation: lazily where a rule says how, else on the computed values."""
    if func in compat.ABOUT_MEMORY:
        return compat.ABOUT_MEMORY[func](*args)
    rule = _LAZY.get(func)
    if rule is not None and isinstance(args[0], DeferredLogits) and _takes(rule, func, args[0]):
        result = rule(func, args[0], args[1:], kwargs)
        if result is not None:
            return None if result is _NOTHING else result
    elif torch.is_inference_mode_enabled():
        # Without autograd, composite operations arrive whole; their parts may have rules.
        result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
    with reading_for(func._schema.name.split("::")[-1]):
        return _compute(func, args, kwargs)


def _takes(rule: _Rule, func: Any, view: DeferredLogits) -> bool:
    """Say whether a rule holds for `view`; few do when its vocabulary is not in the last place."""
    if rule in (_permuted, _scaled) and view._shared.source.loss is None:
        return False
    return view._order is None or rule in _ANY_ORDER or func in _ALIASES


def _compute(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run one ATen operation on the computed values."""
    if torch.Tag.inplace_view in func.tags and isinstance(args[0], DeferredLogits):
        name = func._schema.name.split("::")[-1]
        raise UnsupportedInputError(_OTHER_MEMORY.format(name))
    written = {id(view): view for view in _written(func, args, kwargs)}
    is_view = any(out.alias_info and not out.alias_info.is_write for out in func._schema.returns)
    wrappers: dict[int, DeferredLogits] = {}

    def plain(view: DeferredLogits) -> Tensor:
        if id(view) in written:
            memory = view._shared.write(view)
            wrappers[id(memory)] = view
            return memory
        if is_view:
            view._shared.lend(view)
        return view._shared.read(view)

    # Writes first: a tensor that is read and written must be read where it is written.
    for view in written.values():
        view._shared.write(view)
    plain_args, plain_kwargs = pytree.tree_map_only(
        DeferredLogits, plain, (tuple(args), dict(kwargs))
    )
    result = func(*plain_args, **plain_kwargs)
    if not written:
        return result
    if func._schema.name.startswith("aten::_foreach"):
        # These count writes on the tensors they are given, which are the plain ones.
        for view in written.values():
            if not view.is_inference():
                torch.autograd.graph.increment_version(view)
    return pytree.tree_map_only(Tensor, lambda out: wrappers.get(id(out), out), result)


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[DeferredLogits]:
    """The deferred logits among the arguments that an operation writes to."""
    name = func._schema.name
    if not func._schema.is_mutable and (name.startswith("aten::") or not name.endswith("_")):
        return []
    found: list[Any] = []
    for place, argument in enumerate(func._schema.arguments):
        # Collectives write to lists of tensors without saying so in their schema.
        if name.startswith("aten::") and not (argument.alias_info and argument.alias_info.is_write):
            continue
        found.append(args[place] if place < len(args) else kwargs.get(argument.name))
    return [leaf for leaf in pytree.tree_leaves(found) if isinstance(leaf, DeferredLogits)]


_Rule = Callable[[Any, DeferredLogits, Sequence[Any], Mapping[str, Any]], Any]


def _derive(view: DeferredLogits, geometry: Tensor, rows: Tensor) -> DeferredLogits:
    """A view of `view` that has the given rows."""
    size, offset = tuple(geometry.shape), int(geometry.storage_offset())
    # A view in inference mode of a tensor from outside belongs outside, as in eager PyTorch.
    is_inference = view.is_inference()
    changes = is_inference != torch.is_inference_mode_enabled()
    with torch.inference_mode(is_inference) if changes else nullcontext():
        derived = DeferredLogits(view._shared, rows, size, geometry.stride(), offset)
    derived._taken_from, derived._is_reordered = view._taken_from, view._is_reordered
    return derived


def _same_rows(
    func: Any, view: DeferredLogits, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> DeferredLogits | None:
    """Views that keep all rows in their order: alias, detach, reshapes of leading dimensions."""
    geometry = func(view._geometry(), *args, **kwargs)
    if geometry.dim() == 0 or geometry.shape[-1] != view._size[-1]:
        return None
    rows = view._rows
    if geometry.shape != view._size and view._order is None:
        rows = rows.reshape(*geometry.shape[:-1], rows.shape[-1])
    derived = _derive(view, geometry, rows)
    derived._order = view._order
    return derived


def _some_rows(
    func: Any, view: DeferredLogits, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Views of some rows: slice, select, unbind and split of a leading dimension."""
    takes_dim_first = func in (aten.slice.Tensor, aten.select.int, aten.unbind.int)
    place = 0 if takes_dim_first else 1
    dim = kwargs.get("dim", args[place] if place < len(args) else 0)
    geometry = func(view._geometry(), *args, **kwargs)
    if dim % len(view._size) == len(view._size) - 1:
        is_all = isinstance(geometry, Tensor) and geometry.shape == view._size
        return _derive(view, geometry, view._rows) if is_all else None
    rows = func(view._rows, *args, **kwargs)
    if isinstance(geometry, Tensor):
        return _derive(view, geometry, rows)
    return [_derive(view, place, some) for place, some in zip(geometry, rows, strict=True)]


def _permuted(
    func: Any, view: DeferredLogits, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> DeferredLogits:
    """Dimensions in another order; the vocabulary may go to another place and come back."""
    geometry = func(view._geometry(), *args, **kwargs)
    numbered = torch.empty(tuple(range(len(view._size))), device="meta")
    order = tuple(func(numbered, *args, **kwargs).shape)
    before = view._order or tuple(range(len(view._size)))
    total = tuple(before[dim] for dim in order)
    last = len(total) - 1
    if total[-1] != last:
        derived = _derive(view, geometry, view._rows)
        derived._order = total
        return derived
    derived = _derive(view, geometry, view._rows.permute(total))
    derived._is_reordered = view._is_reordered or total != tuple(range(last + 1))
    return derived


def _unmoved(view: DeferredLogits, order: tuple[int, ...]) -> DeferredLogits:
    """`view` with its vocabulary back in the last place."""
    back = [order.index(dim) for dim in range(len(order))]
    return _derive(view, view._geometry().permute(back), view._rows)


def _moved(view: DeferredLogits, order: tuple[int, ...]) -> DeferredLogits:
    derived = _derive(view, view._geometry().permute(order), view._rows)
    derived._order = order
    return derived


def _copied(
    func: Any, view: DeferredLogits, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> DeferredLogits | None:
    """Copies and floating casts on one device."""
    memory = view._shared
    dtype, device = kwargs.get("dtype") or memory.recipe.dtype, kwargs.get("device")
    preserves = kwargs.get("memory_format") in (None, torch.preserve_format)
    if (
        dtype not in (torch.float64, torch.float32, torch.float16, torch.bfloat16)
        or (device is not None and torch.device(device) not in (view.device, view.device.type))
        or kwargs.get("layout") not in (None, torch.strided)
        or kwargs.get("pin_memory")
        or not (preserves or kwargs["memory_format"] is torch.contiguous_format)
        or (view._order is not None and not preserves)
        or (view._is_reordered and preserves)
    ):
        return None
    return _copy(view, memory.recipe.cast(dtype), lambda values: values.to(dtype))


def _scaled(
    func: Any, view: DeferredLogits, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> DeferredLogits | None:
    """Multiplication and division by a number, as by a temperature."""
    number: Any = -1.0 if func is aten.neg.default else args[0]
    is_number = isinstance(number, (int, float)) and not isinstance(number, bool)
    if kwargs or not is_number or not isfinite(number) or number == 0 or view._is_reordered:
        return None
    name = "div" if func in (aten.div.Tensor, aten.div.Scalar) else "mul"
    return _copy(view, view._shared.recipe.then(name, number), lambda values: func(values, *args))


def _copy(
    view: DeferredLogits, recipe: LogitsRecipe, function: Callable[[Tensor], Tensor]
) -> DeferredLogits | None:
    """A new tensor whose values are `function` of those of `view`."""
    memory, order = view._shared, view._order
    # A copy of values that are there is possible even when they could not be computed again.
    if not memory.is_pristine(view) or (
        memory.value is not None and memory.source.change() is not None
    ):
        return None
    # Asked of `view` itself: what `_unmoved` makes has a version counter of its own.
    view = view if order is None else _unmoved(view, order)
    is_whole = prod(view._size) == prod(memory.shape) and not view._is_reordered
    copy = _Memory(
        memory.source,
        recipe,
        memory.rows if is_whole else view._rows,
        memory.shape if is_whole else view._size,
        memory.snapshot(view, function),
    )
    result = copy.whole(view._size)
    return result if order is None else _moved(result, order)


def _indexed(
    func: Any, view: DeferredLogits, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> DeferredLogits | None:
    """Rows picked by tensors of positions or masks, which is a copy in eager PyTorch too."""
    memory = view._shared
    if memory.value is not None or not memory.is_pristine(view):
        return None
    is_leading = (
        indexed_dims(args[0]) < len(view._size)
        if func is aten.index.Tensor
        else args[0] % len(view._size) != len(view._size) - 1
    )
    if not is_leading:
        return None
    rows = func(view._rows, *args, **kwargs)
    shape = (*rows.shape[:-1], view._size[-1])
    return _Memory(memory.source, memory.recipe, rows, shape).whole(shape)


def _shaped_like(
    func: Any, view: DeferredLogits, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """New tensors that take nothing but shape, dtype and device."""
    stand_in = torch.empty((), dtype=view._shared.recipe.dtype, device=view.device)
    if func._schema.name.endswith("_like"):
        stand_in = stand_in.expand(view._size)
        if kwargs.get("memory_format") in (None, torch.preserve_format):
            kwargs = {**kwargs, "memory_format": torch.contiguous_format}
    return func(stand_in, *args, **kwargs)


def _restrided(
    func: Any, view: DeferredLogits, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """Strides count in the memory that eager PyTorch would have: have it, and go on with it."""
    view._shared.link(view)


def _itself(
    func: Any, view: DeferredLogits, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> DeferredLogits:
    return view


def _recorded(
    func: Any, view: DeferredLogits, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> object:
    """Keep what the values come from until another stream has used it."""
    for tensor in (view._rows, view._shared.source.weight, view._peek()):
        if tensor is not None:
            func(tensor, *args, **kwargs)
    return _NOTHING


_NOTHING = object()
"""The result of a rule for an operation that returns nothing; None says that a rule has none."""

_LAZY: dict[Any, _Rule] = {
    aten.alias.default: _same_rows,
    aten.detach.default: _same_rows,
    aten.view.default: _same_rows,
    aten._unsafe_view.default: _same_rows,
    aten._reshape_alias.default: _same_rows,
    aten.squeeze.default: _same_rows,
    aten.squeeze.dim: _same_rows,
    aten.squeeze.dims: _same_rows,
    aten.unsqueeze.default: _same_rows,
    aten.slice.Tensor: _some_rows,
    aten.select.int: _some_rows,
    aten.unbind.int: _some_rows,
    aten.split.Tensor: _some_rows,
    aten.split_with_sizes.default: _some_rows,
    aten.transpose.int: _permuted,
    aten.permute.default: _permuted,
    aten.clone.default: _copied,
    aten._to_copy.default: _copied,
    aten.mul.Tensor: _scaled,
    aten.mul.Scalar: _scaled,
    aten.div.Tensor: _scaled,
    aten.div.Scalar: _scaled,
    aten.neg.default: _scaled,
    aten.index.Tensor: _indexed,
    aten.index_select.default: _indexed,
    aten.empty_like.default: _shaped_like,
    aten.zeros_like.default: _shaped_like,
    aten.ones_like.default: _shaped_like,
    aten.full_like.default: _shaped_like,
    aten.rand_like.default: _shaped_like,
    aten.randn_like.default: _shaped_like,
    aten.new_empty.default: _shaped_like,
    aten.new_zeros.default: _shaped_like,
    aten.new_ones.default: _shaped_like,
    aten.new_full.default: _shaped_like,
    aten.as_strided.default: _restrided,
    aten.detach_.default: _itself,
    aten.record_stream.default: _recorded,
}

_ANY_ORDER = (_permuted, _copied, _scaled, _shaped_like, _restrided, _itself, _recorded)
_ALIASES = (aten.alias.default, aten.detach.default)


# Above autograd ----------------------------------------------------------------------------------


@untraced
def _function(
    func: Any, types: Sequence[type], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Run one function of PyTorch's Python interface."""
    if not all(issubclass(kind, _FAMILIAR) or kind is Tensor for kind in types):
        # Another subclass has its own idea of what `func` means: give it a plain tensor.
        args, kwargs = pytree.tree_map_only(DeferredLogits, _plain, (tuple(args), dict(kwargs)))
        return func(*args, **kwargs)
    with torch._C.DisableTorchFunctionSubclass():
        special = _ABOVE_AUTOGRAD.get(func)
        if special is not None:
            return special(func, *args, **kwargs)
        reason: Any = nullcontext()
        serve = SERVED.get(func)
        if serve is not None:
            served = serve(*args, **kwargs)
            if isinstance(served, Declined):
                reason = reading_for(f"{func.__name__}: {served}") if str(served) else reason
            elif served is not NotImplemented:
                return served
        with reason:
            result = func(*args, **kwargs)
        if type(result) is DeferredLogits and args and isinstance(args[0], DeferredLogits):
            _keep_gradient_in_rows(result, args[0])
    return result


_FAMILIAR = (LazyTensor, torch.nn.Parameter)


def _plain(view: DeferredLogits) -> Tensor:
    """An ordinary tensor that is a view of `view` for autograd."""
    with torch._C.DisableTorchFunctionSubclass():
        return view.expand(view._size)


def _keep_gradient_in_rows(view: DeferredLogits, base: DeferredLogits) -> None:
    """Spare a selection of rows the dense gradient that its autograd node would make."""
    if view.requires_grad and view._row_hook is None and prod(view._size) < prod(base._size):
        register: Callable[..., Any] = view.register_hook
        view._row_hook = register(RowGradient.of)


def _dense(grad: Any) -> Any:
    return grad.dense() if isinstance(grad, RowGradient) else grad


def _register_hook(func: Any, view: DeferredLogits, hook: Callable[[Tensor], Any]) -> Any:
    """Hooks see the gradients that eager PyTorch would show them."""
    _forget_rows(view)
    if compat.ignores_gradients(hook):
        return func(view, hook)
    return func(view, lambda grad: hook(_dense(grad)))


def _retain_grad(func: Any, view: DeferredLogits) -> None:
    _forget_rows(view)
    register: Callable[..., Any] = view.register_hook
    register(_dense)
    func(view)


def _forget_rows(view: DeferredLogits) -> None:
    if view._row_hook is not None:
        view._row_hook.remove()


def _read_grad(func: Any, view: DeferredLogits) -> Tensor | None:
    grad: Tensor | None = func(view)
    if isinstance(grad, RowGradient):
        grad = grad.dense()
        view.grad = grad
    return grad


def _gradients(func: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    return tuple(_dense(grad) for grad in func(*args, **kwargs))


def _data(func: Any, view: DeferredLogits) -> Tensor:
    data: Tensor = func(view)
    if isinstance(data, DeferredLogits):
        is_data = view._taken_from is not None
        data._taken_from = view._taken_from if is_data else cast("DeferredLogits", view.detach())
    return data


def _set_data(func: Any, view: Tensor, data: Tensor) -> None:
    if isinstance(view, DeferredLogits):
        raise UnsupportedInputError(_OTHER_MEMORY.format("Assigning to .data"))
    func(view, data)


def _method(func: Any, view: LazyTensor, *args: Any, **kwargs: Any) -> Any:
    """`Tensor.numpy(logits)` is `logits.numpy()`."""
    return getattr(view, func.__name__)(*args, **kwargs)


def _set_item(func: Any, target: Tensor, index: Any, value: Any) -> None:
    """An assignment reaches its part of the target through views, which are no loans."""
    if isinstance(target, DeferredLogits):
        target._shared.write(target)
    func(target, index, value)


# Attributes, seen from the class.
_GRAD, _DATA = cast("Any", torch.Tensor.grad), cast("Any", torch.Tensor.data)

# Functions that must act before autograd sees them; losses are in the table `SERVED`.
_ABOVE_AUTOGRAD: dict[Any, Callable[..., Any]] = {
    torch.Tensor.register_hook: _register_hook,
    torch.Tensor.retain_grad: _retain_grad,
    _GRAD.__get__: _read_grad,
    _DATA.__get__: _data,
    _DATA.__set__: _set_data,
    torch.Tensor.__setitem__: _set_item,
    torch.autograd.grad: _gradients,
    **{getattr(torch.Tensor, name): _method for name in MEMORY_METHODS},
}


def _reduce(view: LazyTensor) -> Any:
    return reduce_tensor(view._stand_in())


# Sending tensors to other processes goes by exact type.
ForkingPickler.register(DeferredLogits, _reduce)
ForkingPickler.register(RowGradient, _reduce)
