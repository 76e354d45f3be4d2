# ruff: noqa: ANN401  (the protocols of PyTorch take and return anything)
"""The class of deferred logits: a tensor whose values are computed on first use.

If a graph's loss does not need the logits, the graph returns hidden states. `attach.attach` turns
these into a `DeferredLogits`: a tensor with the shape, dtype and autograd node of the logits, but
without their memory. Logits that a training loop never reads are never computed. Code that reads
the logits gets the same values and gradients as in eager PyTorch.

The design, from the outermost object to the innermost:

* `attach.attach` replaces outputs of a graph by objects of the class `DeferredLogits`.
  `attach.defer` creates one such object by calling an autograd function.
* `DeferredLogits` is the class of deferred logits, a wrapper subclass of `torch.Tensor`. The table
  `_LAZY` lists views, and other operations that do not change the vocabulary dimension. These
  operations return another `DeferredLogits`. Every other operation computes the values and returns
  a plain tensor. Operations on `DeferredLogits` run below autograd (after autograd has recorded
  them). So autograd's graph, the views and the version counters are the same as in eager PyTorch.
  Some views, such as a diagonal, do not consist of whole rows (all classes of some tokens). Such
  views are `DeferredLogits` too, so that every write is detected. `_ABOVE_AUTOGRAD` lists the
  functions that must be handled before autograd records them.
* `Memory` represents the memory that eager PyTorch would allocate. The logits and all their views
  share one `Memory`. Each copy or cast of the logits has a `Memory` for itself.
* `LogitsSource` contains the hidden states and the output projection, and detects whether they
  have changed.
* `outside_loss` computes losses of deferred logits without building the logits.

Dynamo does not trace this module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from math import isfinite, prod
from multiprocessing.reduction import ForkingPickler
from operator import attrgetter
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from memeff_compile import compat
from memeff_compile.compat import pytree
from memeff_compile.errors import MemeffError, UnsupportedInputError
from memeff_compile.logits.fused_rows import Head
from memeff_compile.logits.lazy_tensor import MEMORY_METHODS, LazyTensor
from memeff_compile.logits.memory import Memory
from memeff_compile.logits.outside_loss import SERVED, Declined
from memeff_compile.logits.recipe import LogitsRecipe
from memeff_compile.logits.row_gradient import RowGradient, dense, indexed_dims
from memeff_compile.logits.source import LogitsSource, reader, reading_for
from memeff_compile.logits.together import all_ranks_ask

aten = torch.ops.aten

_OTHER_MEMORY = (
    "{} would give deferred logits another shape or other memory in place. Use a function that "
    'returns a new tensor, or compile with options={{"memeff.logits": "eager"}}.'
)


class DeferredLogits(LazyTensor):
    """Logits, or some of their rows, whose values are computed on first use; all fields are
    internal to this package."""

    memory: Memory
    rows: Tensor  # the hidden states of this tensor's rows
    own: Tensor | None  # private values while the shared memory has none
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    order: tuple[int, ...] | None  # order of the dimensions, if the vocabulary is not the last
    # for values that are not rows: a view
    window: tuple[DeferredLogits, Callable[[Tensor], Tensor]] | None
    log_probs: DeferredLogits | None  # of which these are the probabilities, or p log p
    _is_reordered: bool  # the rows are not in the order of the memory
    _row_hook: Any

    @staticmethod
    def __new__(
        cls: type[DeferredLogits],
        memory: Memory,
        rows: Tensor,
        size: tuple[int, ...],
        stride: tuple[int, ...],
        offset: int,
    ) -> DeferredLogits:
        self = cls._make(size, memory.recipe.dtype, rows.device, stride, offset)
        self.memory, self.rows, self.own, self._row_hook = memory, rows, None, None
        self.dims, self.strides, self.offset = size, stride, offset
        self.order, self.window, self._is_reordered = None, None, False
        self.log_probs = None
        return self

    @classmethod
    def whole(cls, memory: Memory, shape: Sequence[int]) -> DeferredLogits:
        """Return a tensor of shape `shape` whose values, logits, are computed when first read.

        `memory` represents the memory that eager PyTorch would allocate for the logits. The tensor
        covers all of this memory, so `shape` must have as many elements as `memory`.
        """
        rows = memory.rows.reshape(*shape[:-1], memory.rows.shape[-1])
        strides = torch.empty(tuple(shape), device="meta").stride()
        return cls(memory, rows, tuple(shape), strides, 0)

    def copied(
        self, recipe: LogitsRecipe, function: Callable[[Tensor], Tensor], *, is_whole: bool = False
    ) -> DeferredLogits:
        """Return a new deferred tensor, whose values are computed on first use.

        The new tensor has its own `Memory`, the object that stores a deferred tensor's values.
        The steps in `recipe` compute the new tensor's values from the hidden states of `self`. If
        the values of `self` already exist, `function` computes the new tensor's values from them.
        `is_whole` says that `self` has all rows (tokens) of its `Memory`, in the same order.
        """
        memory = self.memory
        rows, shape = (memory.rows, memory.shape) if is_whole else (self.rows, self.dims)
        origin = memory.snapshot(self, function)
        return self.whole(Memory(memory.source, recipe, rows, shape, origin), self.dims)

    def as_plain(self) -> Tensor:
        """Compute the values, and return an ordinary tensor that is a view of this tensor.

        Autograd records operations on this view, and a write to the view changes this tensor.
        """
        self._memory()
        source, plain = self.memory.source, self.to_read()
        source.read_by = reader()
        if plain.requires_grad:
            source.record_gradients_of([plain])
        return plain

    def as_subclass(self, cls: Any) -> Any:
        return self.as_plain().as_subclass(cls)

    def to_read(self) -> Tensor:
        """Return a plain tensor, for reading only, that autograd treats as a view of this tensor.

        This method calls `expand` with the argument `implicit=True`, and gets a plain tensor. Every
        other view of this tensor is a `DeferredLogits`, which is computed when first read.
        """
        with compat.without_torch_function():
            plain: Tensor = aten.expand.default(self, self.dims, implicit=True)
        return plain

    def __getattr__(self, name: str) -> Any:
        """Provide the method `full_tensor()` of a DTensor, if ranks split the output projection."""
        memory = self.__dict__.get("memory")
        if name == "full_tensor" and memory is not None and memory.source.ranks is not None:
            return self._asked_by_all
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def _asked_by_all(self) -> Tensor:
        with all_ranks_ask():
            return self.to_read()

    def from_rows(self, function: Callable[[Tensor], Tensor]) -> Tensor:
        """Return `function` applied to the hidden states of this tensor's rows (tokens).

        `function` gets the rows in their order in memory. The dimensions of the result are in the
        same order as those of this tensor.
        """
        last = len(self.dims) - 1
        shown = self.order or range(last + 1)
        strides = dict(zip(shown, self.strides, strict=True))
        laid = (*sorted(range(last), key=lambda dim: -strides[dim]), last)
        values = function(self.rows.permute(laid).contiguous())
        return values.permute([laid.index(dim) for dim in shown])

    @property
    def head(self) -> Head:
        """Return the hidden states of this tensor's rows (tokens), and the output projection.

        A loss outside of the graph takes the result as its argument, instead of computed logits.
        """
        source = self.memory.source
        assert source.loss is not None
        made_of = (self.rows, source.weight, source.bias, source.vectors)
        return Head(*made_of, self.recipe, source.loss, source.use)

    @property
    def place(self) -> tuple[tuple[int, ...], tuple[int, ...], int]:
        """Return the position of this tensor in its `Memory` (the memory that eager PyTorch would
        allocate for the logits), as arguments of `as_strided`."""
        return self.dims, self.strides, self.offset

    @property
    def recipe(self) -> LogitsRecipe:
        """Return the recipe: the steps that compute this tensor's values from hidden states."""
        return self.memory.recipe

    def lost_factors(self) -> str | None:
        """Return why this tensor's values may differ from logits that are computed again, or None.

        Logits are computed from the hidden states and the output projection. The values may differ
        if code wrote to the logits, or may have written to them. The values may also differ if the
        hidden states or the output projection changed after the values were computed.
        """
        memory = self.memory
        if memory.is_open:
            return "the logits were written to, or may have been"
        if memory.value is not None and memory.source.change() is not None:
            return "the values were computed before the weights changed"
        return None

    @property
    def materialisations(self) -> int:
        """Return how many times values were computed for this tensor and for the tensors derived
        from it."""
        return self.memory.source.materialisations

    @compat.untraced
    def _values(self) -> Tensor:
        with compat.outside_dispatch_modes():
            return self.memory.read(self)

    @compat.untraced
    def _memory(self) -> Tensor:
        # A compiler that makes a fake copy of this tensor asks for its storage in its fake mode.
        with compat.outside_dispatch_modes():
            return self.memory.write(self)

    def _peek(self) -> Tensor | None:
        if self.memory.value is None and self.window is None:
            return self.own
        try:
            return self.memory.read(self)
        except MemeffError:
            return None

    def _geometry(self) -> Tensor:
        """Return a meta tensor with the shape, strides and offset of this tensor."""
        memory = torch.empty(self.memory.shape, dtype=self.memory.recipe.dtype, device="meta")
        return memory.as_strided(*self.place)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _function(func, types, args, kwargs or {})

    @classmethod
    def _run(cls, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run one ATen operation. If this module has a rule for the operation, the rule runs it
        without computing the logits. Otherwise the operation runs on the computed logits."""
        rule = _LAZY.get(func)
        if rule is not None and isinstance(args[0], DeferredLogits) and _takes(rule, func, args[0]):
            result = rule(_Call(func, args[0], args[1:], kwargs))
            if result is not None:
                return None if result is _NOTHING else result
        elif torch.is_inference_mode_enabled():
            # Without autograd, composite operations arrive whole; their parts may have rules.
            result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        with reading_for(compat.schema(func).name.split("::")[-1]):
            return _compute(func, args, kwargs)


def _takes(rule: _Rule, func: Any, view: DeferredLogits) -> bool:
    """Return whether an operation's rule, which runs the operation without computing the logits,
    applies to `view`.

    Few rules apply if the vocabulary is not the last dimension.
    """
    if view.window is not None:
        return rule in (_shaped_like, _itself, _recorded)
    if rule in (_permuted, _scaled) and view.memory.source.loss is None:
        return False
    return view.order is None or rule in _ANY_ORDER or func in _ALIASES


def _compute(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Compute deferred logits (computed when first read), and run one ATen operation on them."""
    schema = compat.schema(func)
    if torch.Tag.inplace_view in func.tags and isinstance(args[0], DeferredLogits):
        raise UnsupportedInputError(_OTHER_MEMORY.format(schema.name.split("::")[-1]))
    written = {id(view): view for view in _written(func, args, kwargs)}
    is_view = any(out.alias_info and not out.alias_info.is_write for out in schema.returns)
    is_to_read = func is aten.expand.default and kwargs.get("implicit")
    if is_view and not is_to_read and isinstance(args[0], DeferredLogits):
        views = _windows(_Call(func, args[0], args[1:], kwargs))
        if views is not None:
            return views
    wrappers: dict[int, DeferredLogits] = {}
    outs: dict[int, Tensor] = {}  # copies, since `out=` may be given another size

    def plain(view: DeferredLogits) -> Tensor:
        view.memory.source.read_by = reader()
        if id(view) in written:
            memory = outs.get(id(view))
            if memory is None:
                memory = view.memory.write(view)
            if any(argument.is_out for argument in schema.arguments):
                memory = outs.setdefault(id(view), memory.clone())
            wrappers[id(memory)] = view
            return memory
        return view.memory.write(view) if is_view and not is_to_read else view.memory.read(view)

    # Writes first: a tensor that is read and written must be read where it is written.
    for view in written.values():
        view.memory.write(view)
    given = (tuple(args), dict(kwargs))
    plain_args, plain_kwargs = pytree.tree_map_only(DeferredLogits, plain, given)
    result = func(*plain_args, **plain_kwargs)
    if not written:
        return result
    if any(made.shape != written[number].dims for number, made in outs.items()):
        raise UnsupportedInputError(_OTHER_MEMORY.format(f"out= of {schema.name}"))
    for number, made in outs.items():
        written[number].memory.write(written[number]).copy_(made)
    if schema.name.startswith("aten::_foreach"):
        # These count writes on the tensors they are given, which are the plain ones.
        for view in written.values():
            if not view.is_inference():
                torch.autograd.graph.increment_version(view)
    return pytree.tree_map_only(Tensor, lambda out: wrappers.get(id(out), out), result)


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[DeferredLogits]:
    """Return those arguments of an operation that are deferred logits (computed when first read)
    and to which the operation writes."""
    schema = compat.schema(func)
    is_atens = schema.name.startswith("aten::")
    if not schema.is_mutable and (is_atens or not schema.name.endswith("_")):
        return []
    found: list[Any] = []
    for place, argument in enumerate(schema.arguments):
        # Collectives write to lists of tensors; their schema does not declare that.
        if not is_atens or (argument.alias_info and argument.alias_info.is_write):
            found.append(args[place] if place < len(args) else kwargs.get(argument.name))
    return [leaf for leaf in pytree.tree_leaves(found) if isinstance(leaf, DeferredLogits)]


class _Call(NamedTuple):
    """One ATen operation on deferred logits (computed when first read), with its arguments."""

    func: Any
    view: DeferredLogits
    args: Sequence[Any]  # after `view`
    kwargs: Mapping[str, Any]

    def on(self, tensor: Tensor) -> Any:
        """Run this call's operation on `tensor` instead of on `view`.

        `view` is the tensor on which code called the operation: deferred logits, which are computed
        when first read.
        """
        return self.func(tensor, *self.args, **self.kwargs)


_Rule = Callable[[_Call], Any]


def _derive(
    view: DeferredLogits, geometry: Tensor, rows: Tensor, order: tuple[int, ...] | None = None
) -> DeferredLogits:
    """Return a view of the deferred logits `view` with the given rows (tokens).

    Deferred logits are computed when first read. `rows` contains the hidden states from which the
    logits of these tokens are computed. `geometry` is a meta tensor with the shape, strides and
    offset of the new view. `order` is the order of the dimensions if the vocabulary is not the last
    one."""
    size, offset = tuple(geometry.shape), int(geometry.storage_offset())
    # A view in inference mode of a tensor from outside belongs outside, as in eager PyTorch.
    is_inference = view.is_inference()
    changes = is_inference != torch.is_inference_mode_enabled()
    with torch.inference_mode(is_inference) if changes else nullcontext():
        derived = DeferredLogits(view.memory, rows, size, geometry.stride(), offset)
    derived.order, derived._is_reordered = order, view._is_reordered
    return derived


def _windows(call: _Call) -> Any:
    """Run a view operation on deferred logits (logits that are computed when first read), if the
    result does not consist of whole rows (all classes of some tokens).

    Such a result is a slice of classes or a diagonal, for example. The result has no values until
    code reads it. Then the argument's values are computed, and the result is a view of them. Return
    None if the result has another dtype than the argument, or is a view with negated values.
    """
    view = call.view
    geometry = call.on(view._geometry())
    if any(p.dtype != view.dtype or p.is_neg() for p in pytree.tree_leaves(geometry)):
        return None
    if call.func in (aten.as_strided.default, aten._reshape_alias.default):
        view.memory.link(view)  # strides count in the memory that eager PyTorch would have

    def window(place: Tensor, take: Callable[[Tensor], Tensor]) -> DeferredLogits:
        derived = _derive(view, place, view.rows)
        derived.window = view, take
        return derived

    def part(number: int) -> Callable[[Tensor], Tensor]:
        return lambda values: cast("Tensor", call.on(values)[number])

    if isinstance(geometry, Tensor):
        return window(geometry, call.on)
    return [window(place, part(number)) for number, place in enumerate(geometry)]


def _same_rows(call: _Call) -> DeferredLogits | None:
    """Return a view that keeps all rows (tokens) of deferred logits in order.

    Deferred logits are computed when first read. The view operations that keep all rows in order
    are alias, detach, and reshapes of leading dimensions."""
    view = call.view
    geometry = call.on(view._geometry())
    if geometry.dim() == 0 or geometry.shape[-1] != view.dims[-1]:
        return None
    rows = view.rows
    if geometry.shape != view.dims and view.order is None:
        rows = rows.reshape(*geometry.shape[:-1], rows.shape[-1])
    return _derive(view, geometry, rows, view.order)


def _some_rows(call: _Call) -> Any:
    """Select rows (tokens) of deferred logits, which are computed when first read.

    The view operations that select rows are slice, select, unbind and split of a leading
    dimension."""
    view, args = call.view, call.args
    takes_dim_first = call.func in (aten.slice.Tensor, aten.select.int, aten.unbind.int)
    place = 0 if takes_dim_first else 1
    dim = call.kwargs.get("dim", args[place] if place < len(args) else 0)
    geometry = call.on(view._geometry())
    if dim % len(view.dims) == len(view.dims) - 1:
        is_all = isinstance(geometry, Tensor) and geometry.shape == view.dims
        return _derive(view, geometry, view.rows) if is_all else None
    rows = call.on(view.rows)
    if isinstance(geometry, Tensor):
        return _derive(view, geometry, rows)
    return [_derive(view, place, some) for place, some in zip(geometry, rows, strict=True)]


def _permuted(call: _Call) -> DeferredLogits:
    """Permute the dimensions of deferred logits, which are computed when first read.

    A permutation can move the vocabulary to another dimension and back."""
    view = call.view
    geometry = call.on(view._geometry())
    order = call.on(torch.empty(tuple(range(len(view.dims))), device="meta")).shape
    before = view.order or tuple(range(len(view.dims)))
    total = tuple(before[dim] for dim in order)
    last = len(total) - 1
    if total[-1] != last:
        return _derive(view, geometry, view.rows, total)
    derived = _derive(view, geometry, view.rows.permute(total))
    derived._is_reordered = view._is_reordered or total != tuple(range(last + 1))
    return derived


def _copied(call: _Call) -> DeferredLogits | None:
    """Return a copy of logits, or a cast to a floating dtype, that is computed when first read.

    Return None for other calls, such as a copy to another device.
    """
    view, kwargs = call.view, call.kwargs
    recipe = view.memory.recipe
    dtype, device = kwargs.get("dtype") or recipe.dtype, kwargs.get("device")
    preserves = kwargs.get("memory_format") in (None, torch.preserve_format)
    if (
        dtype not in (torch.float64, torch.float32, torch.float16, torch.bfloat16)
        or (device is not None and torch.device(device) not in (view.device, view.device.type))
        or kwargs.get("layout") not in (None, torch.strided)
        or kwargs.get("pin_memory")
        or not (preserves or kwargs["memory_format"] is torch.contiguous_format)
        or (view.order is not None and not preserves)
        or (view._is_reordered and preserves)
    ):
        return None
    return _copy(view, recipe.cast(dtype), lambda values: values.to(dtype))


def _scaled(call: _Call) -> DeferredLogits | None:
    """Multiply or divide deferred logits by a number, such as a temperature.

    Deferred logits are computed when first read, and so is the result.
    """
    func, view, args, kwargs = call
    number: Any = -1.0 if func is aten.neg.default else args[0]
    is_number = isinstance(number, (int, float)) and not isinstance(number, bool)
    if kwargs or not is_number or not isfinite(number) or number == 0 or view._is_reordered:
        return None
    name = "div" if func in (aten.div.Tensor, aten.div.Scalar) else "mul"
    # Not `call.on`, which holds the view, and with it the memory that the copy is to outlive.
    return _copy(view, view.memory.recipe.then(name, number), lambda values: func(values, *args))


def _copy(
    view: DeferredLogits, recipe: LogitsRecipe, function: Callable[[Tensor], Tensor]
) -> DeferredLogits | None:
    """Return new deferred logits whose values are `function` applied to the values of `view`.

    Deferred logits are computed when first read. The steps in `recipe` compute the same new values
    from hidden states. Return None if the values of `view` may differ from logits computed at the
    time of this call. For example, an optimizer step may have changed the weight.
    """
    if view.lost_factors() is not None:
        return None  # values that are there can be copied all the same
    order = view.order
    if order is not None:  # the vocabulary goes back to the last place, and out again
        back = [order.index(dim) for dim in range(len(order))]
        view = _derive(view, view._geometry().permute(back), view.rows)
    is_whole = prod(view.dims) == prod(view.memory.shape) and not view._is_reordered
    result = view.copied(recipe, function, is_whole=is_whole)
    if order is None:
        return result
    return _derive(result, result._geometry().permute(order), result.rows, order)


def _indexed(call: _Call) -> DeferredLogits | None:
    """Index the rows (tokens) of deferred logits by tensors or masks; as in eager PyTorch, the
    result is a copy.

    Deferred logits are computed when first read, and so is the copy.
    """
    view, where = call.view, call.args[0]
    memory, rank = view.memory, len(view.dims)
    if memory.value is not None or memory.is_open or view._is_reordered:
        return None
    is_by_tensors = call.func is aten.index.Tensor
    is_leading = indexed_dims(where) < rank if is_by_tensors else where % rank != rank - 1
    if not is_leading:
        return None
    rows = call.on(view.rows)
    shape = (*rows.shape[:-1], view.dims[-1])
    return view.whole(Memory(memory.source, memory.recipe, rows, shape), shape)


def _shaped_like(call: _Call) -> Any:
    """Run operations whose result depends only on shape, dtype and device, such as `zeros_like`."""
    options = {name: value for name, value in call.kwargs.items() if value is not None}
    device = {"device": call.view.device}
    return call.func(call.view._geometry(), *call.args, **{**device, **options})


def _itself(call: _Call) -> DeferredLogits:
    return call.view


def _recorded(call: _Call) -> object:
    """Run `record_stream` on the tensors from which the logits are computed, so that their memory
    is not reused while another CUDA stream uses it."""
    view = call.view
    for tensor in (view.rows, view.memory.source.weight, view._peek()):
        if tensor is not None:
            call.on(tensor)
    return _NOTHING


_NOTHING = object()
"""The result of a rule for an operation that returns nothing; None means that no rule applies."""

_RULES: dict[_Rule, str] = {
    _same_rows: "alias.default detach.default view.default _unsafe_view.default "
    "_reshape_alias.default squeeze.default squeeze.dim squeeze.dims unsqueeze.default",
    _some_rows: "slice.Tensor select.int unbind.int split.Tensor split_with_sizes.default",
    _permuted: "transpose.int permute.default",
    _copied: "clone.default _to_copy.default",
    _scaled: "mul.Tensor mul.Scalar div.Tensor div.Scalar neg.default",
    _indexed: "index.Tensor index_select.default",
    _shaped_like: "empty_like.default zeros_like.default ones_like.default full_like.default "
    "rand_like.default randn_like.default new_empty.default new_zeros.default new_ones.default "
    "new_full.default",
    _itself: "detach_.default",
    _recorded: "record_stream.default",
}
_LAZY = {attrgetter(name)(aten): rule for rule, names in _RULES.items() for name in names.split()}

_ANY_ORDER = (_permuted, _copied, _scaled, _shaped_like, _itself, _recorded)
_ALIASES = (aten.alias.default, aten.detach.default)


@compat.untraced
def _function(
    func: Any, types: Sequence[type], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Run one function of PyTorch's Python interface on deferred logits (computed when first
    read)."""
    if not all(issubclass(kind, _FAMILIAR) or kind is Tensor for kind in types):
        # Another subclass may define `func` differently: give it a plain tensor.
        return _on_plain(func, *args, **kwargs)
    with compat.without_torch_function():
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
        trained = _trained(args, kwargs)
        with reason:
            result = func(*args, **kwargs)
        if type(result) is DeferredLogits and args and isinstance(args[0], DeferredLogits):
            _keep_gradient_in_rows(result, args[0])
        else:
            _record_gradients(trained, args[0] if result is None and args else result)
    return result


def _trained(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[LogitsSource]:
    """Return the `LogitsSource` of each tensor of deferred logits that needs a gradient.

    Deferred logits are computed when first read. The function finds them in the arguments of a
    call, `args` and `kwargs`. A `LogitsSource` contains the hidden states and the output projection
    from which logits are computed. For each returned source, also clear the field `read_by`. This
    field names the op that last read the source's logits.
    """
    if not torch.is_grad_enabled():
        return []
    views = [v for v in pytree.tree_leaves((args, kwargs)) if isinstance(v, DeferredLogits)]
    sources = [view.memory.source for view in views if view.requires_grad]
    for source in sources:
        source.read_by = ""
    return sources


def _record_gradients(sources: Sequence[LogitsSource], result: Any) -> None:
    """Register a hook: a backward pass through `result` marks the function that read the logits as
    a part of a loss.

    The hook marks the function in the compilation's report.

    Functions that compute a metric read logits too. Only a backward pass shows whether the result
    of a function is a part of a loss.
    """
    leaves = pytree.tree_leaves(result) if sources else []
    results = [leaf for leaf in leaves if not isinstance(leaf, DeferredLogits)]
    if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in results):
        for source in sources:
            source.record_gradients_of(results)


_FAMILIAR = (LazyTensor, torch.nn.Parameter)


def _keep_gradient_in_rows(view: DeferredLogits, base: DeferredLogits) -> None:
    """Turn the gradient of selected rows into a RowGradient, which stores only these rows.

    The autograd node of the selection would otherwise make a dense gradient."""
    is_part = view.window is None and prod(view.dims) < prod(base.dims)
    if is_part and view.requires_grad and view._row_hook is None:
        register: Callable[..., Any] = view.register_hook
        view._row_hook = register(RowGradient.of)


def _register_hook(func: Any, view: DeferredLogits, hook: Callable[[Tensor], Any]) -> Any:
    """Register a hook that sees the same gradients as in eager PyTorch."""
    _forget_rows(view)
    if compat.ignores_gradients(hook):
        return func(view, hook)
    return func(view, lambda grad: hook(dense(grad)))


def _retain_grad(func: Any, view: DeferredLogits) -> None:
    _forget_rows(view)
    register: Callable[..., Any] = view.register_hook
    register(dense)
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
    return tuple(dense(grad) for grad in func(*args, **kwargs))


def _data(func: Any, view: DeferredLogits) -> Tensor:
    """Return `.data` of deferred logits.

    The result is deferred too (computed when first read) if the logits contain all classes of each
    row. Code may assign deferred logits to the `.data` of another tensor. The other tensor then
    uses the memory of the deferred logits.

    As in eager PyTorch, `.data` is not a view for autograd. Code may change `logits.data` in place,
    with a value that requires a gradient. Then `logits.data` requires a gradient, and `logits` does
    not.
    """
    data: DeferredLogits = func(view)
    # Without a node first: that of a view which a write made stale would raise.
    return data if data.window is None else data.as_plain().data


def _set_data(func: Any, view: Tensor, data: Tensor) -> None:
    if isinstance(view, DeferredLogits):
        raise UnsupportedInputError(_OTHER_MEMORY.format("Assigning to .data"))
    func(view, data)


def _on_plain(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a function that reads memory in C++, or that belongs to another tensor class, on plain
    tensors."""
    given = (args, kwargs)
    args, kwargs = pytree.tree_map_only(DeferredLogits, DeferredLogits.as_plain, given)
    return func(*args, **kwargs)


def _kept(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Copy logits by `func`, and compute the values now if the logits require no gradient.

    Other logits are computed when first read. A copy that requires no gradient, such as
    `logits.detach().cpu()`, is usually read later, when the output projection may have changed. A
    copy that requires a gradient is not computed yet. A loss may use the copy without its values: a
    fused loss computes its result from hidden states and the output projection.
    """
    view, *others = args or (kwargs.pop("input"),)
    if view.requires_grad or view.memory.source.ranks is not None:
        return func(view, *others, **kwargs)
    with reading_for(func.__name__):
        values = view._values()
        # Tensors of the CPU are moved there by returning them.
        return func(view if func is torch.Tensor.cpu else values, *others, **kwargs)


def _method(func: Any, view: LazyTensor, *args: Any, **kwargs: Any) -> Any:
    """Handle `Tensor.numpy(logits)` like `logits.numpy()`."""
    return getattr(view, func.__name__)(*args, **kwargs)


# Attributes, seen from the class.
_GRAD, _DATA = cast("Any", torch.Tensor.grad), cast("Any", torch.Tensor.data)

# Functions that must act before autograd sees them; losses are in the table `SERVED`.
_ABOVE_AUTOGRAD: dict[Any, Callable[..., Any]] = {
    torch.Tensor.register_hook: _register_hook,
    torch.Tensor.retain_grad: _retain_grad,
    _GRAD.__get__: _read_grad,
    _DATA.__get__: _data,
    _DATA.__set__: _set_data,
    torch.autograd.grad: _gradients,
    torch.clone: _kept,
    torch.Tensor.clone: _kept,
    torch.Tensor.cpu: _kept,
    torch.Tensor.new: _on_plain,
    torch.Tensor.new_tensor: _on_plain,
    **{getattr(torch.Tensor, name): _method for name in MEMORY_METHODS},
}


def _reduce(view: LazyTensor) -> Any:
    return reduce_tensor(view._stand_in())


# Sending tensors to other processes goes by exact type.
ForkingPickler.register(DeferredLogits, _reduce)
ForkingPickler.register(RowGradient, _reduce)
