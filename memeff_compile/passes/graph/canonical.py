"""One spelling for every node: reads a Dynamo node as the ATen calls it stands for.

Dynamo records what the user typed: ``x.float()``, ``x.to(torch.float32)`` and ``x.to(dtype=...)``
are three different nodes. Every pass reads through :func:`read`, which gives the pre-dispatch ATen
calls with arguments bound by schema name and defaults filled, so a pass knows one spelling of each
idea.

Reading never changes the graph. Two tiers: a table (names, then schemas) that costs microseconds,
and :func:`trace`, which runs the one node on fake operands under ``make_fx`` and is the table's
judge in the tests. A node neither tier can read is None: whoever asked declines.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Node

from ... import compat
from ...compat import OpOverload, OpOverloadPacket

aten = torch.ops.aten


class _Previous:
    """Stands for the result of the call before, inside a reading of several calls."""

    def __repr__(self) -> str:
        return "PREVIOUS"


PREVIOUS = _Previous()


@dataclass(frozen=True)
class Call:
    """One ATen call: an overload and its arguments by schema name."""

    op: OpOverload
    args: Mapping[str, Any]

    def __repr__(self) -> str:
        inner = ", ".join(f"{name}={value!r}" for name, value in self.args.items())
        return f"{self.op}({inner})"


Reading = tuple[Call, ...]


def read(node: Node) -> Reading | None:
    """Read ``node`` by the table; None when the table does not know it.

    Example: ``read(x.float())`` is ``(Call(aten.to.dtype, {"self": x, "dtype": float32, ...}),)``.
    """
    if node.op not in ("call_function", "call_method"):
        return None
    try:
        return _read_by_table(node)
    except _CannotBind:
        return None


def read_one(node: Node) -> Call | None:
    """Read ``node`` as exactly one call, or None."""
    reading = read(node)
    return reading[0] if reading is not None and len(reading) == 1 else None


# --- binding arguments to schemas ---------------------------------------------------------------


class _CannotBind(Exception):
    """The arguments do not fit the schema."""


_RENAMED = {"input": "self", "axis": "dim", "keepdims": "keepdim", "tensor1": "self"}


def bind(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
    """Bind ``args`` and ``kwargs`` to the schema of ``op``, defaults filled, or raise."""
    schema = compat.schema(op)
    bound: dict[str, Any] = {}
    positional = [a for a in schema.arguments if not a.kwarg_only]
    names = {a.name for a in schema.arguments}
    if len(args) > len(positional):
        raise _CannotBind
    for argument, value in zip(positional, args, strict=False):
        bound[argument.name] = value
    for key, value in kwargs.items():
        name = key if key in names else _RENAMED.get(key, key)
        if name not in names or name in bound:
            raise _CannotBind
        bound[name] = value
    ordered: dict[str, Any] = {}
    for argument in schema.arguments:
        if argument.name in bound:
            value = bound[argument.name]
            if getattr(argument, "N", None) is not None and _is_integer(value):
                value = [value]  # a fixed-size list such as int[1] takes a bare integer
            if not _fits(value, argument.type):
                raise _CannotBind
        elif argument.has_default_value():
            value = argument.default_value
        else:
            raise _CannotBind
        ordered[argument.name] = value
    return Call(op, ordered)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Node) and isinstance(compat.example_value(value), torch.Tensor)


def _is_number(value: Any) -> bool:
    if isinstance(value, Node):
        return isinstance(
            compat.example_value(value), (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)
        )
    return isinstance(value, (int, float, bool, complex))


def _is_integer(value: Any) -> bool:
    if isinstance(value, Node):
        return isinstance(compat.example_value(value), (int, torch.SymInt))
    return isinstance(value, int) and not isinstance(value, bool)


def _fits(value: Any, kind: Any) -> bool:
    """Return whether ``value`` may be passed where the schema says ``kind``."""
    name = kind.kind()
    if name == "OptionalType":
        return value is None or _fits(value, kind.getElementType())
    if name == "ListType":
        element = kind.getElementType()
        return isinstance(value, (list, tuple)) and all(_fits(v, element) for v in value)
    if name == "TensorType":
        return _is_tensor(value)
    if name == "NumberType":
        return _is_number(value)
    if name in ("IntType", "SymIntType"):  # ScalarType, Layout and MemoryFormat print as int
        return _is_integer(value) or isinstance(
            value, (torch.dtype, torch.layout, torch.memory_format)
        )
    if name == "FloatType":
        return _is_number(value)
    if name == "BoolType":
        return isinstance(value, bool)
    if name == "StringType":
        return isinstance(value, str)
    if name == "DeviceObjType":
        return isinstance(value, (torch.device, str))
    return value is None


def _bind_packet(packet: OpOverloadPacket, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
    """Bind to the first overload of ``packet`` that fits, functional overloads only."""
    for overload_name in packet.overloads():
        if overload_name.endswith("out") or overload_name in ("Scalar_Tensor", "names"):
            continue
        op = getattr(packet, overload_name)
        try:
            return bind(op, args, kwargs)
        except _CannotBind:
            continue
    raise _CannotBind


# --- the table ------------------------------------------------------------------------------------

_Reader = Callable[[Node, Sequence[Any], dict[str, Any]], Reading]


def _plain(*packet_names: str) -> _Reader:
    """Read the node as one call of the first named ATen op whose schema its arguments fit."""

    def reader(node: Node, args: Sequence[Any], kwargs: dict[str, Any]) -> Reading:
        for name in packet_names:
            try:
                return (_bind_packet(getattr(aten, name), args, kwargs),)
            except _CannotBind:
                continue
        raise _CannotBind

    return reader


def _sized(name: str, size_keyword: str) -> _Reader:
    """Read ``x.view(a, b)`` and ``x.view((a, b))`` alike."""

    def reader(node: Node, args: Sequence[Any], kwargs: dict[str, Any]) -> Reading:
        if len(args) > 1 and not isinstance(args[1], (list, tuple, torch.dtype)):
            args = (args[0], list(args[1:]))
        if "shape" in kwargs:
            kwargs = dict(kwargs)
            kwargs[size_keyword] = list(kwargs.pop("shape"))
        return (_bind_packet(getattr(aten, name), args, kwargs),)

    return reader


def _cast(dtype: torch.dtype) -> _Reader:
    """Read ``x.float()`` and its kin as ``x.to(dtype)``."""

    def reader(node: Node, args: Sequence[Any], kwargs: dict[str, Any]) -> Reading:
        if len(args) != 1 or kwargs:
            raise _CannotBind
        return (bind(aten.to.dtype, (args[0], dtype), {}),)

    return reader


def _to(node: Node, args: Sequence[Any], kwargs: dict[str, Any]) -> Reading:
    """Read every form of ``Tensor.to`` as a dtype cast when the device stays where it is."""
    if not args or not _is_tensor(args[0]):
        raise _CannotBind
    source, result = compat.example_value(args[0]), compat.example_value(node)
    if not isinstance(result, torch.Tensor):
        raise _CannotBind
    known = all(
        isinstance(a, (torch.dtype, torch.device, str, bool)) or _is_tensor(a) for a in args[1:]
    )
    if not known or set(kwargs) - {"dtype", "device", "non_blocking", "copy", "other"}:
        raise _CannotBind
    if source.device != result.device or True in args[1:] or kwargs.get("copy"):
        raise _CannotBind
    return (bind(aten.to.dtype, (args[0], result.dtype), {}),)


def _cross_entropy(node: Node, args: Sequence[Any], kwargs: dict[str, Any]) -> Reading:
    names = "input target weight size_average ignore_index reduce reduction label_smoothing".split()
    given = _by_name(names, args, kwargs)
    return (
        bind(
            aten.cross_entropy_loss.default,
            (
                given["input"],
                given["target"],
                given.get("weight"),
                _reduction(given),
                given.get("ignore_index", -100),
                given.get("label_smoothing", 0.0),
            ),
            {},
        ),
    )


def _nll_loss(node: Node, args: Sequence[Any], kwargs: dict[str, Any]) -> Reading:
    names = "input target weight size_average ignore_index reduce reduction".split()
    given = _by_name(names, args, kwargs)
    return (
        bind(
            aten.nll_loss_nd.default,
            (
                given["input"],
                given["target"],
                given.get("weight"),
                _reduction(given),
                given.get("ignore_index", -100),
            ),
            {},
        ),
    )


def _by_name(
    names: Sequence[str],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    required: Sequence[str] = ("input", "target"),
) -> dict[str, Any]:
    if len(args) > len(names) or set(kwargs) - set(names):
        raise _CannotBind
    given = dict(zip(names, args, strict=False))
    given.update(kwargs)
    if not given.keys() >= set(required):
        raise _CannotBind
    return given


def _embedding(node: Node, args: Sequence[Any], kwargs: dict[str, Any]) -> Reading:
    """Read ``F.embedding(ids, weight)``, whose ATen op takes the weight first."""
    names = "input weight padding_idx max_norm norm_type scale_grad_by_freq sparse".split()
    given = _by_name(names, args, kwargs, required=("input", "weight"))
    padding = given.get("padding_idx")
    padding = -1 if padding is None else padding
    if given.get("max_norm") is not None or (padding < 0 and given.get("padding_idx") is not None):
        raise _CannotBind
    flags = (given.get("scale_grad_by_freq", False), given.get("sparse", False))
    return (bind(aten.embedding.default, (given["weight"], given["input"], padding, *flags), {}),)


def _dropout(node: Node, args: Sequence[Any], kwargs: dict[str, Any]) -> Reading:
    """Read ``F.dropout``, whose ATen op has no defaults."""
    given = _by_name("input p training inplace".split(), args, kwargs, required=("input",))
    if given.get("inplace"):
        raise _CannotBind
    operands = (given["input"], given.get("p", 0.5), given.get("training", True))
    return (bind(aten.dropout.default, operands, {}),)


def _activation(packet: OpOverloadPacket) -> _Reader:
    """Read ``F.silu(x, inplace=False)``, whose ATen op has no such argument."""

    def reader(node: Node, args: Sequence[Any], kwargs: dict[str, Any]) -> Reading:
        given = _by_name(["input", "inplace"], args, kwargs, required=("input",))
        if given.get("inplace"):
            raise _CannotBind
        return (bind(packet.default, (given["input"],), {}),)

    return reader


def _where_method(node: Node, args: Sequence[Any], kwargs: dict[str, Any]) -> Reading:
    """Read ``x.where(condition, other)``: the ATen op takes the condition first."""
    if len(args) != 3 or kwargs:
        raise _CannotBind
    return (_bind_packet(aten.where, (args[1], args[0], args[2]), {}),)


_REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}


def _reduction(given: Mapping[str, Any]) -> int:
    if given.get("size_average") is not None or given.get("reduce") is not None:
        old = compat.reduction_of(given.get("size_average"), given.get("reduce"))
        return _REDUCTIONS[old]
    reduction = given.get("reduction", "mean")
    if reduction not in _REDUCTIONS:
        raise _CannotBind
    return _REDUCTIONS[reduction]


def _created(name: str, leading: int = 0) -> _Reader:
    """Read ``torch.ones(2, 3)``, ``x.new_ones((2, 3))`` and their kin, sizes in one list."""

    def reader(node: Node, args: Sequence[Any], kwargs: dict[str, Any]) -> Reading:
        kwargs = {k: v for k, v in kwargs.items() if (k, v) != ("requires_grad", False)}
        head, sizes = tuple(args[:leading]), tuple(args[leading:])
        if "size" not in kwargs and not (sizes and isinstance(sizes[0], (list, tuple))):
            sizes = (list(sizes),)
        return (_bind_packet(getattr(aten, name), (*head, *sizes), kwargs),)

    return reader


def _scalar_tensor(node: Node, args: Sequence[Any], kwargs: dict[str, Any]) -> Reading:
    """Read ``torch.tensor(0.5)``, a number without axes, as ``full``."""
    if len(args) != 1 or not _is_number(args[0]) or isinstance(args[0], Node):
        raise _CannotBind
    kwargs = {k: v for k, v in kwargs.items() if (k, v) != ("requires_grad", False)}
    dtype = kwargs.pop("dtype", None) or compat.example_value(node).dtype
    return (bind(aten.full.default, ([], args[0]), {**kwargs, "dtype": dtype}),)


def _difference(node: Node, args: Sequence[Any], kwargs: dict[str, Any]) -> Reading:
    """Read ``1.0 - x`` as ``rsub(x, 1.0)``, every other difference as ``sub``."""
    if len(args) == 2 and not kwargs and not _is_tensor(args[0]) and _is_tensor(args[1]):
        return (_bind_packet(aten.rsub, (args[1], args[0]), {}),)
    return (_bind_packet(aten.sub, args, kwargs),)


def _quotient(node: Node, args: Sequence[Any], kwargs: dict[str, Any]) -> Reading:
    """Read ``127 / x`` as what PyTorch does, ``reciprocal(x) * 127``; others as ``div``."""
    if len(args) == 2 and not kwargs and not _is_tensor(args[0]) and _is_tensor(args[1]):
        inverse = bind(aten.reciprocal.default, (args[1],), {})
        # bind() knows nodes alone as tensors, so the number is bound beside the operand.
        scaled = bind(aten.mul.Scalar, (args[1], args[0]), {})
        return (inverse, Call(aten.mul.Tensor, {"self": PREVIOUS, "other": scaled.args["other"]}))
    return (_bind_packet(aten.div, args, kwargs),)


def _softmax_like(packet: OpOverloadPacket) -> _Reader:
    """Read ``F.log_softmax(x, dim, _stacklevel, dtype)`` and the tensor method alike."""

    def reader(node: Node, args: Sequence[Any], kwargs: dict[str, Any]) -> Reading:
        kwargs = dict(kwargs)
        kwargs.pop("_stacklevel", None)
        rest = [a for i, a in enumerate(args) if not (i == 2 and isinstance(a, int))]
        if len(rest) == 3 and not isinstance(rest[2], (torch.dtype, type(None))):
            raise _CannotBind
        dim = kwargs.pop("dim", rest[1] if len(rest) > 1 else None)
        dtype = kwargs.pop("dtype", rest[2] if len(rest) > 2 else None)
        source = rest[0] if rest else kwargs.pop("input", None)
        kwargs.pop("input", None)
        if dim is None or kwargs:
            raise _CannotBind
        return (bind(packet.int, (source, dim, dtype), {}),)

    return reader


def _einsum(node: Node, args: Sequence[Any], kwargs: dict[str, Any]) -> Reading:
    if kwargs or not args or not isinstance(args[0], str):
        raise _CannotBind
    operands = args[1] if len(args) == 2 and isinstance(args[1], (list, tuple)) else args[1:]
    return (bind(aten.einsum.default, (args[0], list(operands)), {}),)


def _attribute(node: Node, args: Sequence[Any], kwargs: dict[str, Any]) -> Reading:
    """Read ``x.T``, ``x.mT``, ``x.H``: attributes Dynamo records as getattr."""
    if len(args) != 2 or not _is_tensor(args[0]):
        raise _CannotBind
    rank = compat.example_value(args[0]).dim()
    if args[1] == "T" and rank == 2:
        return (bind(aten.t.default, (args[0],), {}),)
    if args[1] == "mT" and rank >= 2:
        return (bind(aten.transpose.int, (args[0], -2, -1), {}),)
    raise _CannotBind


def _getitem(node: Node, args: Sequence[Any], kwargs: dict[str, Any]) -> Reading:
    """Read indexing as the slices, selects, new axes and gathers it is made of."""
    if not kwargs and len(args) == 2 and is_several(args[0]) and _is_integer(args[1]):
        return (_part(args[0], args[1]),)
    if kwargs or len(args) != 2 or not _is_tensor(args[0]):
        raise _CannotBind
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    rank = compat.example_value(args[0]).dim()
    consumed = sum(
        compat.example_value(i).dim() if _is_mask(i) else 1
        for i in index
        if i is not None and i is not Ellipsis
    )
    if index.count(Ellipsis) > 1 or consumed > rank:
        raise _CannotBind
    calls: list[Call] = []
    current: Any = args[0]
    gathers: list[Any] = []
    dim = 0

    def add(op: OpOverload, *rest: Any) -> None:
        nonlocal current
        schema_args = dict(
            zip((a.name for a in compat.schema(op).arguments), (current, *rest), strict=True)
        )
        calls.append(Call(op, schema_args))
        current = PREVIOUS

    for item in index:
        if item is Ellipsis:
            skipped = rank - consumed
            dim += skipped
            gathers.extend([None] * skipped)
        elif item is None:
            add(aten.unsqueeze.default, dim)
            gathers.append(None)
            dim += 1
        elif isinstance(item, slice):
            if any(not (b is None or _is_integer(b)) for b in (item.start, item.stop, item.step)):
                raise _CannotBind
            if (item.start, item.stop, item.step) != (None, None, None):
                step = 1 if item.step is None else item.step
                add(aten.slice.Tensor, dim, item.start, item.stop, step)
            gathers.append(None)
            dim += 1
        elif _is_integer(item):
            add(aten.select.int, dim, item)
        elif _is_tensor(item):
            taken = compat.example_value(item).dim() if _is_mask(item) else 1
            gathers.append(item)
            dim += taken
        else:
            raise _CannotBind
    if any(g is not None for g in gathers):
        while gathers and gathers[-1] is None:
            gathers.pop()
        add(aten.index.Tensor, gathers)
    if not calls:
        calls.append(Call(aten.alias.default, {"self": args[0]}))
    return tuple(calls)


def is_several(value: Any) -> bool:
    """Return whether a node has several results, as ``x.split(2)`` has."""
    return isinstance(value, Node) and isinstance(compat.example_value(value), (tuple, list))


def _part(parted: Node, index: Any) -> Call:
    """Read ``x.chunk(4)[1]`` as the slice of x it is, and ``x.unbind()[1]`` as the row."""
    parts = compat.example_value(parted)
    call = read_one(parted)
    if call is None or not isinstance(index, int) or not -len(parts) <= index < len(parts):
        raise _CannotBind
    index %= len(parts)
    if call.op is aten.unbind.int:
        return bind(aten.select.int, (call.args["self"], call.args["dim"], index), {})
    if call.op not in _CUTS:
        raise _CannotBind
    dim, size = call.args["dim"], call.args.get("split_size")
    if isinstance(size, int):  # the last part may be shorter, by as much as a slice is cut off
        sizes: list[int | None] = [size] * (index + 1)
    else:
        sizes = [compat.known_size(part.shape[dim]) for part in parts[: index + 1]]
    known = [size for size in sizes if size is not None]
    if len(known) < len(sizes):
        raise _CannotBind
    start = sum(known[:-1])
    return bind(aten.slice.Tensor, (call.args["self"], dim, start, start + known[-1]), {})


_CUTS = {
    aten.split.Tensor,
    aten.split.sizes,
    aten.split_with_sizes.default,
    aten.chunk.default,
    aten.tensor_split.sections,
    aten.tensor_split.indices,
}


def _is_mask(item: Any) -> bool:
    return _is_tensor(item) and compat.example_value(item).dtype in (torch.bool, torch.uint8)


def _dims(name: str) -> _Reader:
    """Read ``x.permute(0, 2, 1)`` and ``x.permute((0, 2, 1))`` alike."""

    def reader(node: Node, args: Sequence[Any], kwargs: dict[str, Any]) -> Reading:
        if len(args) > 1 and not isinstance(args[1], (list, tuple)):
            args = (args[0], list(args[1:]))
        return (_bind_packet(getattr(aten, name), args, kwargs),)

    return reader


_METHODS: dict[str, _Reader] = {
    "float": _cast(torch.float32),
    "double": _cast(torch.float64),
    "half": _cast(torch.float16),
    "bfloat16": _cast(torch.bfloat16),
    "bool": _cast(torch.bool),
    "long": _cast(torch.int64),
    "int": _cast(torch.int32),
    "to": _to,
    "type_as": _to,
    "type": _to,
    "view": _sized("view", "size"),
    "reshape": _sized("reshape", "shape"),
    "expand": _sized("expand", "size"),
    "broadcast_to": _sized("broadcast_to", "size"),
    "repeat": _sized("repeat", "repeats"),
    "new_ones": _created("new_ones", 1),
    "new_zeros": _created("new_zeros", 1),
    "permute": _dims("permute"),
    "log_softmax": _softmax_like(aten.log_softmax),
    "softmax": _softmax_like(aten.softmax),
    "where": _where_method,
    "__getitem__": _getitem,
}

_BY_NAME = (
    "flatten unflatten unsqueeze squeeze contiguous clone detach t transpose movedim swapaxes "
    "swapdims select narrow tanh add sub mul div matmul mm addmm bmm gather logsumexp exp log "
    "neg pow mean sum index_copy index_copy_ index_select view_as reshape_as expand_as "
    "repeat_interleave masked_fill relu gelu silu sigmoid softplus dropout layer_norm rms_norm "
    "linear embedding cat stack scaled_dot_product_attention take_along_dim chunk split unbind "
    "split_with_sizes tensor_split ravel pad clamp roll square rsqrt sqrt argmax cos sin where "
    "triu tril ne eq lt le gt ge baddbmm max topk special_entr arange full new_full ones_like "
    "zeros_like full_like "
    "logical_and logical_or logical_xor logical_not bitwise_and bitwise_or bitwise_xor "
    "bitwise_not cumsum diff rsub broadcast_to abs amax amin round round_ clamp_ clamp_min "
    "clamp_min_ reciprocal"
).split()

_FUNCTIONS: dict[Any, _Reader] = {
    F.cross_entropy: _cross_entropy,
    F.nll_loss: _nll_loss,
    F.log_softmax: _softmax_like(aten.log_softmax),
    F.softmax: _softmax_like(aten.softmax),
    F.embedding: _embedding,
    F.dropout: _dropout,
    F.relu: _activation(aten.relu),
    F.silu: _activation(aten.silu),
    torch.log_softmax: _softmax_like(aten.log_softmax),
    torch.softmax: _softmax_like(aten.softmax),
    torch.einsum: _einsum,
    torch.functional.einsum: _einsum,
    getattr: _attribute,
    operator.getitem: _getitem,
    operator.add: _plain("add"),
    operator.sub: _difference,
    operator.mul: _plain("mul"),
    operator.truediv: _quotient,
    operator.matmul: _plain("matmul"),
    operator.neg: _plain("neg"),
    abs: _plain("abs"),
    operator.abs: _plain("abs"),
    operator.pow: _plain("pow"),
    operator.ne: _plain("ne"),
    operator.eq: _plain("eq"),
    operator.lt: _plain("lt"),
    operator.le: _plain("le"),
    operator.gt: _plain("gt"),
    operator.ge: _plain("ge"),
    operator.and_: _plain("bitwise_and"),
    operator.or_: _plain("bitwise_or"),
    operator.xor: _plain("bitwise_xor"),
    operator.invert: _plain("bitwise_not"),
    torch.ones: _created("ones"),
    torch.zeros: _created("zeros"),
    torch.tensor: _scalar_tensor,
    torch.true_divide: _plain("div"),
    torch.divide: _plain("div"),
    torch.multiply: _plain("mul"),
    torch.permute: _dims("permute"),
    torch.reshape: _sized("reshape", "shape"),
    torch.moveaxis: _plain("movedim"),
    torch.special.entr: _plain("special_entr"),
    torch.concat: _plain("cat"),
}
_METHODS.update(
    {
        "true_divide": _plain("div"),
        "divide": _plain("div"),
        "multiply": _plain("mul"),
        "moveaxis": _plain("movedim"),
        "__matmul__": _plain("matmul"),
        "__mul__": _plain("mul"),
        "__truediv__": _plain("div"),
        "__add__": _plain("add"),
        "__sub__": _plain("sub"),
        "__rsub__": _plain("rsub"),
        "__eq__": _plain("eq"),
        "__ne__": _plain("ne"),
        "__le__": _plain("le"),
        "__lt__": _plain("lt"),
        "__ge__": _plain("ge"),
        "__gt__": _plain("gt"),
        "__and__": _plain("bitwise_and"),
        "__or__": _plain("bitwise_or"),
        "__xor__": _plain("bitwise_xor"),
        "__invert__": _plain("bitwise_not"),
        "__neg__": _plain("neg"),
        "__abs__": _plain("abs"),
    }
)
for _name in _BY_NAME:
    _METHODS.setdefault(_name, _plain(_name))
    for _owner in (torch, F, compat.BUILT_IN_FUNCTIONS):
        _function = getattr(_owner, _name, None)
        if _function is not None:
            _FUNCTIONS.setdefault(_function, _plain(_name))
del _name, _owner, _function


def _read_by_table(node: Node) -> Reading | None:
    args, kwargs = node.args, dict(node.kwargs)
    if node.op == "call_method":
        reader = _METHODS.get(str(node.target))
        return None if reader is None else _with_reflection(reader, node, args, kwargs)
    target = node.target
    if isinstance(target, OpOverload):
        return (bind(target, args, kwargs),)
    if isinstance(target, OpOverloadPacket):
        return (_bind_packet(target, args, kwargs),)
    try:
        reader = _FUNCTIONS.get(target)
    except TypeError:  # an unhashable target
        return None
    return None if reader is None else _with_reflection(reader, node, args, kwargs)


_REFLECTED = {operator.mul: aten.mul, operator.add: aten.add}


def _with_reflection(
    reader: _Reader, node: Node, args: Sequence[Any], kwargs: dict[str, Any]
) -> Reading:
    """Read ``30.0 * x`` as ``x * 30.0``; other operators keep their order."""
    if node.target in _REFLECTED and len(args) == 2 and not _is_tensor(args[0]):
        args = (args[1], args[0])
    if args and "input" in kwargs:
        raise _CannotBind
    if not args and "input" in kwargs:
        kwargs = dict(kwargs)
        args = (kwargs.pop("input"),)
    return reader(node, args, kwargs)


# --- tier two: tracing one node -------------------------------------------------------------------


def trace(node: Node) -> Reading | None:
    """Read ``node`` by running it alone on fake operands; None when it cannot be traced so.

    Milliseconds per node: the judge of the table, and the way out where the table has no entry.
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

    try:
        with torch.no_grad():
            graph = compat.trace_one(run, values)
    except Exception:
        # Whatever a lone node cannot do (data-dependent sizes, missing context) means: unread.
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
        if last is not None:
            stands_for[last] = PREVIOUS
        if any(n not in stands_for for n in traced.all_input_nodes):
            return None
        call = bind_traced(traced.target, traced, stands_for)
        calls.append(call)
        if last is not None:
            del stands_for[last]
        last = traced
    output = next(n for n in graph.nodes if n.op == "output").args[0]
    if last is None:
        return None if output not in stands_for else _alias_of(stands_for[output])
    return tuple(calls) if output is last else None


def _alias_of(operand: Any) -> Reading:
    return (Call(aten.alias.default, {"self": operand}),)


def bind_traced(op: OpOverload, traced: Node, stands_for: Mapping[Node, Any]) -> Call:
    """Bind a traced node, its operands replaced by the nodes they stand for."""
    ordered: dict[str, Any] = {}
    schema_args = compat.schema(op).arguments
    positional = [a.name for a in schema_args if not a.kwarg_only]
    given = dict(zip(positional, traced.args, strict=False)) | dict(traced.kwargs)
    for argument in schema_args:
        value = given.get(argument.name, argument.default_value)
        ordered[argument.name] = torch.fx.node.map_aggregate(
            value, lambda v: stands_for[v] if isinstance(v, Node) else v
        )
    return Call(op, ordered)
