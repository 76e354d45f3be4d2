"""Read graph nodes in one canonical form: as the ATen calls to which they are equivalent.

Dynamo records calls as the user wrote them: `x.float()`, `x.to(torch.float32)` and
`x.to(dtype=...)` are three different nodes. Every pass reads nodes through :func:`read`, which
returns the pre-dispatch ATen calls. Their arguments are bound by schema name, with defaults filled
in. So a pass handles only one form.

Reading never changes the graph. A node can be read in two ways. The function :func:`read` uses a
table of names and schemas, and takes microseconds. The function :func:`trace` runs the node on fake
operands under `make_fx`. The tests compare the table with this trace. If neither the table nor a
trace can read a node, the result is None, and the pass declines the match.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch.fx import Node

from ... import compat
from ...compat import OpOverload, OpOverloadPacket

aten = torch.ops.aten


def named(words: str) -> frozenset[Any]:
    """Return the ATen ops with the given names: one overload for a name like `add.Tensor`, all
    overloads for a name like `add`."""
    return frozenset(operator.attrgetter(name)(aten) for name in words.split())


class _Previous:
    """An argument of an ATen call that stands for the result of the previous ATen call.

    The placeholder is used if a node is read as several ATen calls.
    """

    def __repr__(self) -> str:
        return "PREVIOUS"


PREVIOUS = _Previous()


@dataclass(frozen=True)
class Call:
    """An ATen call: an op overload, and its arguments by schema name."""

    op: OpOverload
    args: Mapping[str, Any]

    def __repr__(self) -> str:
        inner = ", ".join(f"{name}={value!r}" for name, value in self.args.items())
        return f"{self.op}({inner})"


Reading = tuple[Call, ...]


def read(node: Node) -> Reading | None:
    """Return the ATen calls to which `node` is equivalent, according to this module's table of
    names.

    For example, `x.float()` becomes `(Call(aten.to.dtype, {"self": x, "dtype": float32, ...}),)`.
    Return None if the table has no entry for the node.
    """
    if node.op not in ("call_function", "call_method"):
        return None
    try:
        return _read_by_table(node)
    except _CannotBind:
        return None


def read_one(node: Any) -> Call | None:
    """Return `node` as a single ATen call; None if it is no node or stands for several calls."""
    reading = read(node) if isinstance(node, Node) else None
    return reading[0] if reading is not None and len(reading) == 1 else None


def read_write(node: Node) -> Call | None:
    """Return the out-of-place call that computes the result of an in-place write.

    The write stores this result in the write's first argument. For example, `x /= 2` becomes
    `div(x, 2)`, and `x[mask] = 0.0` becomes `masked_fill(x, mask, 0.0)`. For a node that is no
    in-place write, return None.
    """
    try:
        if node.target is operator.setitem or node.target == "__setitem__":
            return _written_where_true(*node.args)
        named = node.target if isinstance(node.target, str) else _IN_PLACE.get(node.target)
        if named is None or named.removesuffix("_") not in _WRITES or not named.endswith("_"):
            return None
        packet = getattr(aten, named.removesuffix("_"))
        return _bind_packet(packet, node.args, dict(node.kwargs))
    except _CannotBind:
        return None


def _written_where_true(target: Any, index: Any, value: Any) -> Call:
    """Represent `x[mask] = value` as a call of masked_fill.

    The mask must have all axes of x, except leading axes for which the index has a colon, as in
    `x[:, mask]`.
    """
    *leading, mask = index if isinstance(index, tuple) else (index,)
    _require(_is_tensor(target) and _is_tensor(mask))
    written, where = compat.example_value(target), compat.example_value(mask)
    skipped = written.dim() - where.dim()
    _require(where.dtype == torch.bool)
    _require(leading in ([Ellipsis], [slice(None)] * skipped))
    return _bind_packet(aten.masked_fill, (target, mask, value), {})


def call_of(node: Any, *ops: OpOverload) -> Call | None:
    """If `node` stands for a single ATen call, and the op of this call is in `ops`, return the
    call, otherwise None."""
    call = read_one(node)
    return call if call is not None and call.op in ops else None


def back_over(node: Any, ops: Collection[OpOverload], way: list[Node] | None = None) -> Any:
    """Follow calls of the given ops from `node` back to their first operands.

    Return the first node that is not a call of these ops, and append the visited nodes to the list
    `way`.
    """
    while (call := call_of(node, *ops)) is not None:
        if way is not None and node not in way:
            way.append(node)
        node = call.args["self"]
    return node


class _CannotBind(Exception):
    """The error for arguments that do not fit a schema."""


def _require(holds: Any) -> None:
    if not holds:
        raise _CannotBind


_RENAMED = {"input": "self", "axis": "dim", "keepdims": "keepdim", "tensor1": "self"}


@dataclass(frozen=True)
class Argument:
    """One argument of an op's schema; each schema is read once."""

    name: str
    kind: Any  # its type
    is_named: bool  # by keyword alone
    is_list: bool  # of a fixed size, such as int[1], which takes a bare integer
    has_default: bool
    default: Any


@lru_cache(maxsize=4096)
def arguments_of(op: Any) -> tuple[Argument, ...]:
    """Return the schema arguments of an op, in order."""
    return tuple(
        Argument(
            each.name,
            each.type,
            each.kwarg_only,
            getattr(each, "N", None) is not None,
            each.has_default_value(),
            each.default_value,
        )
        for each in compat.schema(op).arguments
    )


def bind(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
    """Bind `args` and `kwargs` to the schema of `op` and fill in defaults; raise an error if
    the arguments do not fit the schema.
    """
    arguments = arguments_of(op)
    positional = [a.name for a in arguments if not a.is_named]
    _require(len(args) <= len(positional))
    bound: dict[str, Any] = dict(zip(positional, args, strict=False))
    if kwargs:
        names = {a.name for a in arguments}
        for key, value in kwargs.items():
            name = key if key in names else _RENAMED.get(key, key)
            _require(name in names and name not in bound)
            bound[name] = value
    ordered: dict[str, Any] = {}
    for argument in arguments:
        if argument.name in bound:
            value = bound[argument.name]
            if argument.is_list and _is_integer(value):
                value = [value]
            _require(_fits(value, argument.kind))
        else:
            _require(argument.has_default)
            default = argument.default
            value = list(default) if isinstance(default, list) else default
        ordered[argument.name] = value
    return Call(op, ordered)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Node) and isinstance(compat.example_value(value), torch.Tensor)


def _is_number(value: Any) -> bool:
    if isinstance(value, Node):
        symbols = (torch.SymInt, torch.SymFloat, torch.SymBool)
        return isinstance(compat.example_value(value), (int, float, *symbols))
    return isinstance(value, (int, float, bool, complex))


def _is_integer(value: Any) -> bool:
    if isinstance(value, Node):
        return isinstance(compat.example_value(value), (int, torch.SymInt))
    return isinstance(value, int) and not isinstance(value, bool)


def _fits(value: Any, kind: Any) -> bool:
    """Return whether `value` may be passed for an argument whose schema type is `kind`."""
    name = kind.kind()
    if name == "OptionalType":
        return value is None or _fits(value, kind.getElementType())
    if name == "ListType":
        element = kind.getElementType()
        return isinstance(value, (list, tuple)) and all(_fits(v, element) for v in value)
    if name == "TensorType":
        return _is_tensor(value)
    if name in ("NumberType", "FloatType"):
        return _is_number(value)
    if name in ("IntType", "SymIntType") and _is_integer(value):
        return True
    return isinstance(value, _PLAIN_TYPES.get(name, type(None)))


_PRINTED_AS_INT = (torch.dtype, torch.layout, torch.memory_format)
_PLAIN_TYPES: dict[str, tuple[type, ...]] = {
    "IntType": _PRINTED_AS_INT,
    "SymIntType": _PRINTED_AS_INT,
    "BoolType": (bool,),
    "StringType": (str,),
    "DeviceObjType": (torch.device, str),
}


def _bind_packet(packet: OpOverloadPacket, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
    """Bind arguments to the first functional overload of `packet` that accepts them."""
    for overload_name in packet.overloads():
        if overload_name.endswith("out") or overload_name in ("Scalar_Tensor", "names"):
            continue
        with suppress(_CannotBind):
            return bind(getattr(packet, overload_name), args, kwargs)
    raise _CannotBind


_Args: TypeAlias = Sequence[Any]
_Kwargs: TypeAlias = dict[str, Any]
_Reader = Callable[[Node, _Args, _Kwargs], Reading]


def _plain(name: str) -> _Reader:
    """Return a function that represents a node as one call of the ATen op `name`."""
    return lambda node, args, kwargs: (_bind_packet(getattr(aten, name), args, kwargs),)


def _sized(name: str, size_keyword: str = "") -> _Reader:
    """Return a function that represents `x.view(a, b)` as `x.view((a, b))`.

    For `name="permute"`, the function represents `x.permute(1, 0)` in the same way."""

    def reader(node: Node, args: _Args, kwargs: _Kwargs) -> Reading:
        if len(args) > 1 and not isinstance(args[1], (list, tuple, torch.dtype)):
            args = (args[0], list(args[1:]))
        if size_keyword and "shape" in kwargs:
            kwargs[size_keyword] = list(kwargs.pop("shape"))
        return (_bind_packet(getattr(aten, name), args, kwargs),)

    return reader


def _cast(dtype: torch.dtype) -> _Reader:
    """Return a function that represents `x.float()` and similar casts as `x.to(dtype)`."""

    def reader(node: Node, args: _Args, kwargs: _Kwargs) -> Reading:
        _require(len(args) == 1 and not kwargs)
        return (bind(aten.to.dtype, (args[0], dtype), {}),)

    return reader


def _to(node: Node, args: _Args, kwargs: _Kwargs) -> Reading:
    """Represent every form of `Tensor.to` as a dtype cast if the device does not change."""
    _require(args and _is_tensor(args[0]))
    source, result = compat.example_value(args[0]), compat.example_value(node)
    kinds = (torch.dtype, torch.device, str, bool)
    _require(isinstance(result, torch.Tensor))
    _require(all(isinstance(a, kinds) or _is_tensor(a) for a in args[1:]))
    _require(not set(kwargs) - {"dtype", "device", "non_blocking", "copy", "other"})
    _require(source.device == result.device and True not in args[1:] and not kwargs.get("copy"))
    return (bind(aten.to.dtype, (args[0], result.dtype), {}),)


def _loss(op: OpOverload, *smoothing: str) -> _Reader:
    """Return a function that represents a loss of torch.nn.functional as its ATen call.

    The user gives the reduction as a name, or by two deprecated arguments.
    """
    names = "input target weight size_average ignore_index reduce reduction".split()

    def reader(node: Node, args: _Args, kwargs: _Kwargs) -> Reading:
        given = _by_name([*names, *smoothing], 2, args, kwargs)
        settings = [_reduction(given), given.get("ignore_index", -100)]
        settings += [given.get(name, 0.0) for name in smoothing]
        return (bind(op, (given["input"], given["target"], given.get("weight"), *settings), {}),)

    return reader


def _by_name(names: Sequence[str], required: int, args: _Args, kwargs: _Kwargs) -> _Kwargs:
    """Return positional and keyword arguments by name; the first `required` arguments must be
    present."""
    _require(len(args) <= len(names) and not set(kwargs) - set(names))
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    _require(given.keys() >= set(names[:required]) and not given.get("inplace"))
    return given


def _embedding(node: Node, args: _Args, kwargs: _Kwargs) -> Reading:
    """Represent `F.embedding(ids, weight)` as the ATen op, which takes the weight first."""
    names = "input weight padding_idx max_norm norm_type scale_grad_by_freq sparse".split()
    given = _by_name(names, 2, args, kwargs)
    padding = given.get("padding_idx")
    _require(given.get("max_norm") is None and (padding is None or padding >= 0))
    padding = -1 if padding is None else padding
    flags = (given.get("scale_grad_by_freq", False), given.get("sparse", False))
    return (bind(aten.embedding.default, (given["weight"], given["input"], padding, *flags), {}),)


def _dropout(node: Node, args: _Args, kwargs: _Kwargs) -> Reading:
    """Represent `F.dropout` as the ATen op, which has no default arguments."""
    given = _by_name("input p training inplace".split(), 1, args, kwargs)
    operands = (given["input"], given.get("p", 0.5), given.get("training", True))
    return (bind(aten.dropout.default, operands, {}),)


def _activation(packet: OpOverloadPacket) -> _Reader:
    """Return a function that represents a call of an activation function as a call of its ATen op.

    An example is `F.silu(x, inplace=False)`. `packet` is the ATen op, here `aten.silu`. The ATen op
    has no argument `inplace`.
    """
    return lambda node, args, kwargs: (
        bind(packet.default, (_by_name(["input", "inplace"], 1, args, kwargs)["input"],), {}),
    )


def _where_method(node: Node, args: _Args, kwargs: _Kwargs) -> Reading:
    """Represent `x.where(condition, other)` as the ATen op, which takes the condition first."""
    _require(len(args) == 3 and not kwargs)
    return (_bind_packet(aten.where, (args[1], args[0], args[2]), {}),)


_REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}


def _reduction(given: Mapping[str, Any]) -> int:
    reduction = given.get("reduction", "mean")
    old = given.get("size_average"), given.get("reduce")
    if old != (None, None):
        reduction = compat.reduction_of(*old)
    _require(reduction in _REDUCTIONS)
    return _REDUCTIONS[reduction]


def _created(name: str, leading: int = 0) -> _Reader:
    """Return a function that represents `torch.ones(2, 3)`, `x.new_ones((2, 3))` and similar calls
    as ATen calls, which take the sizes as one list.
    """

    def reader(node: Node, args: _Args, kwargs: _Kwargs) -> Reading:
        kwargs = {k: v for k, v in kwargs.items() if (k, v) != ("requires_grad", False)}
        head, sizes = tuple(args[:leading]), tuple(args[leading:])
        if "size" not in kwargs and not (sizes and isinstance(sizes[0], (list, tuple))):
            sizes = (list(sizes),)
        return (_bind_packet(getattr(aten, name), (*head, *sizes), kwargs),)

    return reader


def _scalar_tensor(node: Node, args: _Args, kwargs: _Kwargs) -> Reading:
    """Represent `torch.tensor(0.5)`, a tensor without axes, as a call of `full`."""
    _require(len(args) == 1 and _is_number(args[0]) and not isinstance(args[0], Node))
    kwargs = {k: v for k, v in kwargs.items() if (k, v) != ("requires_grad", False)}
    dtype = kwargs.pop("dtype", None) or compat.example_value(node).dtype
    return (bind(aten.full.default, ([], args[0]), {**kwargs, "dtype": dtype}),)


def _is_of_a_number(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether the first argument of a call is a number and the second is a tensor."""
    return len(args) == 2 and not kwargs and not _is_tensor(args[0]) and _is_tensor(args[1])


def _difference(node: Node, args: _Args, kwargs: _Kwargs) -> Reading:
    """Represent `1.0 - x` as `rsub(x, 1.0)`, and other differences as calls of `sub`."""
    if _is_of_a_number(args, kwargs):
        return (_bind_packet(aten.rsub, (args[1], args[0]), {}),)
    return (_bind_packet(aten.sub, args, kwargs),)


def _quotient(node: Node, args: _Args, kwargs: _Kwargs) -> Reading:
    """Represent `127 / x` as `reciprocal(x) * 127`, because PyTorch computes it in this way.

    Other quotients become calls of `div`.
    """
    if _is_of_a_number(args, kwargs):
        inverse = bind(aten.reciprocal.default, (args[1],), {})
        # bind() takes only nodes for tensors, so the number is bound separately from the operand.
        scaled = bind(aten.mul.Scalar, (args[1], args[0]), {})
        return (inverse, Call(aten.mul.Tensor, {"self": PREVIOUS, "other": scaled.args["other"]}))
    return (_bind_packet(aten.div, args, kwargs),)


def _softmax_like(packet: OpOverloadPacket) -> _Reader:
    """Return a function that represents a call of log_softmax or softmax as the ATen op `packet`.

    The call is, for example, `F.log_softmax(x, dim, _stacklevel, dtype)`, or the tensor method of
    the same name.
    """

    def reader(node: Node, args: _Args, kwargs: _Kwargs) -> Reading:
        kwargs.pop("_stacklevel", None)
        rest = [a for i, a in enumerate(args) if not (i == 2 and isinstance(a, int))]
        _require(len(rest) != 3 or isinstance(rest[2], (torch.dtype, type(None))))
        given = {**kwargs, **dict(zip(("input", "dim", "dtype"), rest, strict=False))}
        source, dim, dtype = (given.pop(name, None) for name in ("input", "dim", "dtype"))
        _require(dim is not None and not given)
        return (bind(packet.int, (source, dim, dtype), {}),)

    return reader


def _einsum(node: Node, args: _Args, kwargs: _Kwargs) -> Reading:
    _require(not kwargs and args and isinstance(args[0], str))
    operands = args[1] if len(args) == 2 and isinstance(args[1], (list, tuple)) else args[1:]
    return (bind(aten.einsum.default, (args[0], list(operands)), {}),)


def _attribute(node: Node, args: _Args, kwargs: _Kwargs) -> Reading:
    """Represent `x.T` and `x.mT` as ATen calls; Dynamo records both as getattr before torch
    2.14, and as ops since then.
    """
    _require(len(args) == 2 and _is_tensor(args[0]))
    rank = compat.example_value(args[0]).dim()
    if args[1] in ("T", aten.numpy_T) and rank == 2:
        return (bind(aten.t.default, (args[0],), {}),)
    _require(args[1] in ("mT", aten.mT) and rank >= 2)
    return (bind(aten.transpose.int, (args[0], -2, -1), {}),)


def _getitem(node: Node, args: _Args, kwargs: _Kwargs) -> Reading:
    """Represent indexing as the equivalent slices, selects, new axes and gathers."""
    if not kwargs and len(args) == 2 and is_several(args[0]) and _is_integer(args[1]):
        return (_part(args[0], args[1]),)
    _require(not kwargs and len(args) == 2 and _is_tensor(args[0]))
    current, rank = args[0], compat.example_value(args[0]).dim()
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    consumed = sum(_axes_taken(i) for i in index if i is not None and i is not Ellipsis)
    _require(index.count(Ellipsis) <= 1 and consumed <= rank)
    calls: list[Call] = []
    gathers: list[Any] = []
    dim = 0

    def add(op: OpOverload, *rest: Any) -> None:
        nonlocal current
        names = (argument.name for argument in compat.schema(op).arguments)
        calls.append(Call(op, dict(zip(names, (current, *rest), strict=True))))
        current = PREVIOUS

    for item in index:
        if item is Ellipsis:
            dim += rank - consumed
            gathers += [None] * (rank - consumed)
        elif item is None:
            add(aten.unsqueeze.default, dim)
            gathers.append(None)
            dim += 1
        elif isinstance(item, slice):
            start, stop, step = bounds = (item.start, item.stop, item.step)
            _require(all(b is None or _is_integer(b) for b in bounds))
            if bounds != (None, None, None):
                add(aten.slice.Tensor, dim, start, stop, 1 if step is None else step)
            gathers.append(None)
            dim += 1
        elif _is_integer(item):
            add(aten.select.int, dim, item)
        else:
            _require(_is_tensor(item))
            gathers.append(item)
            dim += _axes_taken(item)
    while gathers and gathers[-1] is None:
        gathers.pop()
    if gathers:
        add(aten.index.Tensor, gathers)
    if not calls:
        calls.append(Call(aten.alias.default, {"self": args[0]}))
    return tuple(calls)


def is_several(value: Any) -> bool:
    """Return whether a node has several results, like `x.split(2)`."""
    return isinstance(value, Node) and isinstance(compat.example_value(value), (tuple, list))


def _part(parted: Node, index: Any) -> Call:
    """Represent `x.chunk(4)[1]` as the equivalent slice, and `x.unbind()[1]` as a select."""
    parts = compat.example_value(parted)
    call = read_one(parted)
    if call is None or not isinstance(index, int) or not -len(parts) <= index < len(parts):
        raise _CannotBind
    index %= len(parts)
    if call.op is aten.unbind.int:
        return bind(aten.select.int, (call.args["self"], call.args["dim"], index), {})
    _require(call.op in _CUTS)
    dim, size = call.args["dim"], call.args.get("split_size")
    if isinstance(size, int):  # the last part may be shorter, by as much as a slice is cut off
        sizes: list[int | None] = [size] * (index + 1)
    else:
        sizes = [compat.known_size(part.shape[dim]) for part in parts[: index + 1]]
    known = [size for size in sizes if size is not None]
    _require(len(known) == len(sizes))
    start = sum(known[:-1])
    return bind(aten.slice.Tensor, (call.args["self"], dim, start, start + known[-1]), {})


_CUTS = named(
    "split.Tensor split.sizes split_with_sizes.default chunk.default tensor_split.sections "
    "tensor_split.indices"
)


def _axes_taken(item: Any) -> int:
    """Return how many axes of a tensor one index uses; a boolean mask uses as many axes as the mask
    has.
    """
    value = compat.example_value(item) if _is_tensor(item) else None
    return value.dim() if value is not None and value.dtype in (torch.bool, torch.uint8) else 1


_METHODS: dict[str, _Reader] = {
    **{name: _cast(getattr(torch, name)) for name in "float double half bfloat16 bool".split()},
    "long": _cast(torch.int64),
    "int": _cast(torch.int32),
    **dict.fromkeys(("to", "type_as", "type"), _to),
    "view": _sized("view", "size"),
    "reshape": _sized("reshape", "shape"),
    "expand": _sized("expand", "size"),
    "broadcast_to": _sized("broadcast_to", "size"),
    "repeat": _sized("repeat", "repeats"),
    "new_ones": _created("new_ones", 1),
    "new_zeros": _created("new_zeros", 1),
    "permute": _sized("permute"),
    "log_softmax": _softmax_like(aten.log_softmax),
    "softmax": _softmax_like(aten.softmax),
    "where": _where_method,
    "__getitem__": _getitem,
    "__sub__": _plain("sub"),
    "__rsub__": _plain("rsub"),
}

_BY_NAME = (
    "flatten unflatten unsqueeze squeeze contiguous clone detach t transpose movedim swapaxes "
    "swapdims select narrow tanh add sub mul div matmul mm addmm bmm gather logsumexp exp log "
    "neg pow mean sum index_copy index_copy_ index_select view_as reshape_as expand_as "
    "repeat_interleave masked_fill relu gelu silu sigmoid softplus dropout layer_norm rms_norm "
    "linear embedding cat stack scaled_dot_product_attention take_along_dim chunk split unbind "
    "split_with_sizes tensor_split ravel pad clamp roll square rsqrt sqrt argmax cos sin where "
    "triu tril ne eq lt le gt ge baddbmm max topk special_entr arange full new_full ones_like "
    "zeros_like full_like scatter "
    "logical_and logical_or logical_xor logical_not bitwise_and bitwise_or bitwise_xor "
    "bitwise_not cumsum diff rsub broadcast_to abs amax amin round round_ clamp_ clamp_min "
    "clamp_min_ reciprocal"
).split()

_OPERATORS = (
    "add mul matmul neg ne eq lt le gt ge truediv:div and_:bitwise_and or_:bitwise_or "
    "xor:bitwise_xor invert:bitwise_not abs"
)
"""Python's operators, as in `operator` and as methods, and their ATen ops, if the names differ."""

_WRITES = frozenset("masked_fill add sub mul div".split())
"""Ops of which passes read the in-place form like the out-of-place form."""

_IN_PLACE: dict[Any, str] = {
    operator.iadd: "add_",
    operator.isub: "sub_",
    operator.imul: "mul_",
    operator.itruediv: "div_",
}

_ALIASES = {"true_divide": "div", "divide": "div", "multiply": "mul", "moveaxis": "movedim"}

_FUNCTIONS: dict[Any, _Reader] = {
    F.cross_entropy: _loss(aten.cross_entropy_loss.default, "label_smoothing"),
    F.nll_loss: _loss(aten.nll_loss_nd.default),
    F.log_softmax: _softmax_like(aten.log_softmax),
    F.softmax: _softmax_like(aten.softmax),
    F.embedding: _embedding,
    F.dropout: _dropout,
    F.relu: _activation(aten.relu),
    F.silu: _activation(aten.silu),
    torch.log_softmax: _softmax_like(aten.log_softmax),
    torch.softmax: _softmax_like(aten.softmax),
    torch.special.softmax: _softmax_like(aten.softmax),
    torch.einsum: _einsum,
    torch.functional.einsum: _einsum,
    getattr: _attribute,
    operator.getitem: _getitem,
    operator.sub: _difference,
    operator.truediv: _quotient,
    operator.pow: _plain("pow"),
    abs: _plain("abs"),
    torch.ones: _created("ones"),
    torch.zeros: _created("zeros"),
    torch.empty: _created("empty"),
    torch.tensor: _scalar_tensor,
    torch.permute: _sized("permute"),
    torch.reshape: _sized("reshape", "shape"),
    torch.special.entr: _plain("special_entr"),
    torch.concat: _plain("cat"),
    torch.linalg.matmul: _plain("matmul"),
}
for _name in _OPERATORS.split():
    _name, _, _other = _name.partition(":")
    _FUNCTIONS.setdefault(getattr(operator, _name), _plain(_other or _name))
    _METHODS[f"__{_name.rstrip('_')}__"] = _plain(_other or _name)
for _name, _other in _ALIASES.items():
    _FUNCTIONS[getattr(torch, _name)] = _METHODS[_name] = _plain(_other)
for _name in _BY_NAME:
    _METHODS.setdefault(_name, _plain(_name))
    for _owner in (torch, F, compat.BUILT_IN_FUNCTIONS):
        _function = getattr(_owner, _name, None)
        if _function is not None:
            _FUNCTIONS.setdefault(_function, _plain(_name))
del _name, _other, _owner, _function


def _read_by_table(node: Node) -> Reading | None:
    target, args, kwargs = node.target, node.args, dict(node.kwargs)
    if isinstance(target, OpOverload):
        return (bind(target, args, kwargs),)
    if target in (aten.mT, aten.numpy_T) and not kwargs:
        return _attribute(node, (*args, target), {})
    if isinstance(target, OpOverloadPacket):
        return (_bind_packet(target, args, kwargs),)
    try:
        reader = _METHODS.get(target) if isinstance(target, str) else _FUNCTIONS.get(target)
    except TypeError:  # an unhashable target
        return None
    return None if reader is None else _with_reflection(reader, node, args, kwargs)


_REFLECTED = {operator.mul: aten.mul, operator.add: aten.add}


def _with_reflection(reader: _Reader, node: Node, args: _Args, kwargs: _Kwargs) -> Reading:
    """Represent `30.0 * x` as `x * 30.0`; other operators keep the order of their operands."""
    if node.target in _REFLECTED and len(args) == 2 and not _is_tensor(args[0]):
        args = (args[1], args[0])
    if "input" in kwargs:
        _require(not args)
        args = (kwargs.pop("input"),)
    return reader(node, args, kwargs)


def trace(node: Node) -> Reading | None:
    """Return the ATen calls that `node` makes, found by running the node on fake operands, or
    None.

    Tracing one node takes milliseconds. Tracing is used for nodes that have no entry in this
    module's table of names; the tests compare the table with the trace.
    """
    value = compat.example_value(node)
    if not isinstance(value, torch.Tensor) or isinstance(node.target, compat.HigherOrderOperator):
        return None
    operands = list(dict.fromkeys(node.all_input_nodes))
    values = [compat.example_value(operand) for operand in operands]
    if any(v is None or is_several(o) for v, o in zip(values, operands, strict=True)):
        return None  # make_fx takes a tuple apart: its inputs are no longer the operands

    def run(*given: Any) -> Any:
        binding = dict(zip(operands, given, strict=True))
        args = torch.fx.node.map_arg(node.args, lambda n: binding[n])
        kwargs = torch.fx.node.map_arg(node.kwargs, lambda n: binding[n])
        if node.op == "call_method":
            owner, *rest = args
            return getattr(owner, str(node.target))(*rest, **kwargs)
        assert callable(node.target)
        return node.target(*args, **kwargs)

    from torch.fx.experimental.proxy_tensor import make_fx

    try:
        with torch.no_grad():
            graph = make_fx(run, pre_dispatch=True)(*values).graph  # composite ops kept whole
    except Exception:
        # Any error of a node that runs alone (data-dependent sizes, missing context) means: unread.
        return None
    return _reading_of_trace(graph, operands)


def _reading_of_trace(graph: torch.fx.Graph, operands: Sequence[Node]) -> Reading | None:
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    stands_for: dict[Node, Any] = dict(zip(inputs, operands, strict=True))
    calls: list[Call] = []
    last: Node | None = None
    for traced in graph.nodes:
        if traced.op != "call_function":
            continue
        if not isinstance(traced.target, OpOverload):
            return None
        known = stands_for if last is None else {**stands_for, last: PREVIOUS}
        if any(n not in known for n in traced.all_input_nodes):
            return None
        arguments = compat.schema(traced.target).arguments
        positional = [a.name for a in arguments if not a.kwarg_only]
        given = dict(zip(positional, traced.args, strict=False)) | dict(traced.kwargs)
        ordered = {each.name: given.get(each.name, each.default_value) for each in arguments}
        replaced: Any = torch.fx.node.map_arg(ordered, known.__getitem__)
        calls.append(Call(traced.target, replaced))
        last = traced
    output = next(n for n in graph.nodes if n.op == "output").args[0]
    if last is None and output in stands_for:
        return (Call(aten.alias.default, {"self": stands_for[output]}),)
    return tuple(calls) if last is not None and output is last else None
