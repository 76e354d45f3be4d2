"""Private names of PyTorch for subclasses of tensors, dispatch modes, fake tensors, memory, and op
schemas."""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, TypeGuard, TypeVar, cast

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import TracingContext
from torch._subclasses import fake_tensor
from torch.nn import _reduction
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import _disable_current_modes

_Tensor = TypeVar("_Tensor", bound=torch.Tensor)

# Where functions of torch.nn.functional that are written in C++ live under their own names.
BUILT_IN_FUNCTIONS: Any = torch._C._nn
# torch calls it, through `__torch_function__`, before it puts new data into a tensor.
TAKES_ANOTHERS_INSIDES: Any = torch._has_compatible_shallow_copy_type
# The `__torch_function__` for a subclass that does not define one.
NO_TORCH_FUNCTION: Any = torch._C._disabled_torch_function_impl
# Returns the schema of an op: its name, arguments and returns.
schema: Callable[[Any], Any] = attrgetter("_schema")


def reduction_of(size_average: bool | None, reduce: bool | None) -> str:
    """Return the `reduction` that corresponds to the deprecated arguments `size_average` and
    `reduce` of a loss.
    """
    return str(_reduction.legacy_get_string(size_average, reduce, emit_warning=False))


def wrapper_subclass(kind: type[_Tensor], *args: Any, **kwargs: Any) -> _Tensor:
    """Return a tensor of a wrapper subclass, which has sizes but no memory."""
    made: Any = torch.Tensor._make_wrapper_subclass(kind, *args, **kwargs)
    return cast("_Tensor", made)


def as_class(kind: type[_Tensor], plain: torch.Tensor) -> _Tensor:
    """Return a tensor of a subclass that shares another tensor's memory, detached from autograd."""
    made: Any = torch.Tensor._make_subclass(kind, plain)
    return cast("_Tensor", made)


_Context = Callable[[], contextlib.AbstractContextManager[Any]]
# A context in which functions of torch treat subclasses as plain tensors.
without_torch_function = torch._C.DisableTorchFunctionSubclass
# A context in which Python implementations of ops take precedence over C++, as symbols need.
python_dispatcher: _Context = enable_python_dispatcher
# A context that suspends every dispatch mode: fake modes, tracing and the user's own.
outside_dispatch_modes: _Context = _disable_current_modes
# A context in which no mode sees operations.
on_real_tensors: _Context = no_dispatch
# Returns a number that every in-place write to a tensor's memory raises.
version_of: Callable[[torch.Tensor], int] = attrgetter("_version")


@functools.cache
def _let_fake_modes_ask() -> None:
    """While a fake tensor mode is active, let code read the device of a tensor that is not fake."""
    op = torch.ops.prim.device.default
    handlers: Any = fake_tensor._DISPATCH_META_HANDLERS
    usual = handlers[op]

    def device_of(args: Sequence[Any]) -> Any:
        tensor = args[0]
        is_fake = isinstance(tensor, fake_tensor.FakeTensor)
        return usual(args) if is_fake else tensor.__torch_dispatch__(op, (type(tensor),), args)

    handlers[op] = device_of


def can_be_swapped(tensor: torch.Tensor) -> bool:
    """Return whether `torch.utils.swap_tensors` accepts a tensor.

    `swap_tensors` raises an error if an autograd graph or a weak reference refers to the tensor;
    compiled code has weak references.
    """
    return not weakref.getweakrefs(tensor) and tensor._use_count() == 1  # type: ignore[attr-defined]


def is_fake(value: Any) -> TypeGuard[torch.Tensor]:
    """Return whether `value` is a plain fake tensor, not a fake tensor of a wrapper subclass."""
    return type(value) is fake_tensor.FakeTensor


def make_without_memory(
    cls: type[torch.Tensor],
    size: Sequence[int],
    *,
    dtype: torch.dtype,
    device: torch.device,
    strides: Sequence[int] | None = None,
    storage_offset: int | None = None,
    requires_grad: bool = False,
) -> torch.Tensor:
    """Create a tensor of a wrapper subclass that no code can mistake for a tensor with memory.

    A tensor of a usual wrapper subclass has the dispatch keys of its device, and a null pointer as
    its address. C++ code that reads the memory of such a tensor crashes. Examples are code that
    uses raw pointers or storages, and code that reads a plain tensor after the wrapper was assigned
    to its `.data`. The tensor that this function creates has the dispatch keys and the storage of
    the meta device. The tensor's attribute `device` names the given device.

    The keys of the dict `ABOUT_MEMORY` are ops that query a tensor's device or memory, and its
    values are functions. The subclass's `__torch_dispatch__` must answer each of these ops by
    calling the op's function. The subclass must also have a property `device`, and a method
    `refuse_memory` that raises an error.
    """
    made = torch.Tensor._make_wrapper_subclass(
        cls,
        tuple(size),
        strides=None if strides is None else tuple(strides),
        storage_offset=storage_offset,
        dtype=dtype,
        device=torch.device("meta"),
        dispatch_device=True,
        requires_grad=requires_grad,
        _extra_dispatch_keys=_autocast_keys(device.type),
    )
    torch._C._set_throw_on_mutable_data_ptr(made)
    _refuse_assigned_data()
    _let_fake_modes_ask()
    return made


@functools.cache
def _autocast_keys(kind: str) -> Any:
    if kind == "meta":
        return None
    name = f"Autocast{torch._C._dispatch_key_for_device(kind)}"
    return torch._C.DispatchKeySet(torch._C._dispatch_key_parse(name))


def _shares_metadata(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether one tensor may be assigned to the `.data` of another: both must have the same
    class.
    """
    for each in (tensor, other):
        refuse = getattr(each, "refuse_memory", None)
        if refuse is not None and type(tensor) is not type(other):
            refuse()
    op = torch.ops.aten._has_compatible_shallow_copy_type.default
    return bool(op.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.Meta), tensor, other))


ABOUT_MEMORY: dict[Any, Callable[..., Any]] = {
    torch.ops.prim.device.default: lambda tensor: tensor.device,
    torch.ops.aten._has_compatible_shallow_copy_type.default: _shares_metadata,
}
"""Ops below autograd that query tensors made by `make_without_memory`, and the answers."""


@functools.cache
def _refuse_assigned_data() -> torch.library.Library:
    """Make PyTorch call `_shares_metadata` before `tensor.data = other`, to refuse the assignment.

    PyTorch makes this call only if one of the two tensors has the meta device's dispatch keys.
    `_shares_metadata` raises an error if one tensor has no memory (`make_without_memory`) and the
    other has another class. PyTorch checks such an assignment in an operation that is never
    dispatched to Python. So the Python code of a tensor subclass has no way to refuse the
    assignment.
    """
    library = torch.library.Library("aten", "IMPL")
    library.impl("_has_compatible_shallow_copy_type", _shares_metadata, "AutogradMeta")
    return library


def storage_key(value: torch.Tensor) -> int:
    """Return a key that is equal for two fake tensors if they share memory."""
    return int(value.untyped_storage()._cdata)


def parts_of(tensor: torch.Tensor) -> tuple[Sequence[str], Any]:
    """Return the names of the inner tensors of a wrapper subclass, and the metadata with which
    `__tensor_unflatten__` rebuilds the subclass."""
    names, about = cast("Any", tensor).__tensor_flatten__()
    return names, about


def storage_keys(value: torch.Tensor) -> set[int]:
    """Return keys of a fake tensor's memory: tensors that share memory have equal keys, and a
    subclass has one key per inner tensor.
    """
    if not hasattr(type(value), "__tensor_flatten__"):
        return {storage_key(value)}
    names, _ = parts_of(value)
    return {key for name in names for key in storage_keys(getattr(value, name))}


# Makes the device stop with a message if a condition is false; the host does not wait.
assert_on_device: Callable[[torch.Tensor, str], None] = torch._assert_async


def is_traced(*tensors: torch.Tensor) -> bool:
    """Return whether one of the tensors stands for another one (as fake tensors do in tracing), or
    a `TorchDispatchMode` intercepts operations."""
    stands_for_others = any(type(tensor) is not torch.Tensor for tensor in tensors)
    return stands_for_others or torch._C._len_torch_dispatch_stack() > 0


def fake_mode(outside: Callable[..., Any], *, has_addresses: bool = True) -> Any:
    """Return a fake tensor mode, in which tensors have sizes but no memory.

    For each op that runs while Dynamo is not tracing, the mode calls `outside(op, args, kwargs,
    run)`, which returns the op's result. `run()` computes the sizes of this result. With
    `has_addresses`, the address of each tensor is 0; without it, reading an address raises an
    error.
    """
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    shapes = ShapeEnv()

    class Told(fake_tensor.FakeTensorMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            kwargs = kwargs or {}
            run = functools.partial(super().__torch_dispatch__, func, types, args, kwargs)
            if TracingContext.try_get() is not None:
                return run()
            with shapes.ignore_fresh_unbacked_symbols():  # they are in no graph
                return outside(func, args, kwargs, run)

    mode = Told(shape_env=shapes, allow_non_fake_inputs=True)
    if not has_addresses:
        mode._allow_unsafe_data_ptr_access = False
    return mode


def is_aligned(tensor: torch.Tensor, to: int = 16) -> bool:
    """Return whether a tensor's address is a multiple of `to` bytes; for a fake tensor, check its
    offset in its memory instead."""
    if is_fake(tensor):
        return tensor.storage_offset() * tensor.element_size() % to == 0
    return tensor.data_ptr() % to == 0


def is_view(op: Any) -> bool:
    """Return whether an op returns one of its arguments, or a view of one."""
    found = schema(op)
    return found is None or any(returned.alias_info for returned in found.returns)


def written_to(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the arguments to which an op writes."""
    known = getattr(schema(op), "arguments", ())
    given = {**dict(zip((a.name for a in known), args, strict=False)), **kwargs}
    changed = [a.name for a in known if a.alias_info is not None and a.alias_info.is_write]
    return [given[name] for name in changed if name in given]


def reads_values(op: Any) -> bool:
    """Return whether an op returns a number that depends on the values of tensors, or a tensor
    whose sizes depend on them.
    """
    tags = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)
    return any(tag in op.tags for tag in tags)


def is_item(op: Any) -> bool:
    """Return whether an op is the one that `Tensor.item()` calls."""
    return op is torch.ops.aten._local_scalar_dense.default


def is_drawn(op: Any) -> bool:
    """Return whether an op returns random numbers or uninitialized memory."""
    return torch.Tag.nondeterministic_seeded in op.tags or "empty" in op.name()


def references(held: list[torch.Tensor]) -> tuple[int, int, int, int]:
    """Return four counts for the only tensor in a list: the references to its memory, to its C++
    tensor, to its Python object, and to its memory's Python object.

    Apart from the list, no variable of the caller may refer to the tensor. For a tensor without any
    other reference, the four counts are those of `SOLE_OWNER`.
    """
    return (
        torch._C._storage_Use_Count(held[0].untyped_storage()._cdata),
        held[0]._use_count(),  # type: ignore[attr-defined]
        sys.getrefcount(held[0]),
        sys.getrefcount(held[0].untyped_storage()),
    )


# The result of `references` if only the list holds the tensor or its memory.
SOLE_OWNER = (2, 1, 2, 2)


def is_sole_owner(held: list[torch.Tensor]) -> bool:
    """Return whether a one-element list has the only reference to its tensor, and no other object
    uses the tensor's memory.

    Views, detached tensors, NumPy arrays and saved tensors count as other references. While Dynamo
    traces, the references are unknown, so the function returns False.
    """
    return not torch.compiler.is_compiling() and references(held) == SOLE_OWNER
