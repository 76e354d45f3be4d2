"""The private torch names this package leans on, each behind one function.

One file to mend per torch release: ``tests/test_compat.py`` probes every name here.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import inspect
import os
import re
import sys
import threading
import types
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeGuard, TypeVar, cast

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import CompileContext, TracingContext, tracing
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._subclasses import fake_tensor
from torch.autograd import forward_ad
from torch.fx import Graph, GraphModule, Node, traceback
from torch.nn import _reduction
from torch.optim import optimizer as optimizers
from torch.utils import _pytree as pytree
from torch.utils import checkpoint
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakTensorKeyDictionary

__all__ = ["HigherOrderOperator", "OpOverload", "OpOverloadPacket", "pytree"]

Compiled = Callable[..., Sequence[Any]]
_Tensor = TypeVar("_Tensor", bound=torch.Tensor)
_Function = TypeVar("_Function", bound=Callable[..., Any])

# Where functions of torch.nn.functional that are written in C++ live under their own names.
BUILT_IN_FUNCTIONS: Any = torch._C._nn
# What torch asks, through `__torch_function__`, before new data is put into a tensor.
TAKES_ANOTHERS_INSIDES: Any = torch._has_compatible_shallow_copy_type
# The `__torch_function__` of a subclass that has none.
NO_TORCH_FUNCTION: Any = torch._C._disabled_torch_function_impl
NO_LIMIT = 1 << 20  # of graphs that Dynamo makes of one function
# Returns the index of the GPU that is current.
current_gpu: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
# Returns the schema of an op: its name, arguments and returns.
schema: Callable[[Any], Any] = attrgetter("_schema")


def reduction_of(size_average: bool | None, reduce: bool | None) -> str:
    """Return the reduction that the two old arguments of a loss stand for."""
    return str(_reduction.legacy_get_string(size_average, reduce, emit_warning=False))


def wrapper_subclass(kind: type[_Tensor], *args: Any, **kwargs: Any) -> _Tensor:
    """Return a tensor of a subclass that has sizes and no memory of its own."""
    made: Any = torch.Tensor._make_wrapper_subclass(kind, *args, **kwargs)
    return cast("_Tensor", made)


def as_class(kind: type[_Tensor], plain: torch.Tensor) -> _Tensor:
    """Return a tensor of a subclass with the memory of another, cut off from autograd."""
    made: Any = torch.Tensor._make_subclass(kind, plain)
    return cast("_Tensor", made)


_Context = Callable[[], contextlib.AbstractContextManager[Any]]
# A context that calls functions of torch on subclasses as on plain tensors.
without_torch_function = torch._C.DisableTorchFunctionSubclass
# A context in which Python implementations of ops go before those in C++, as symbols need.
python_dispatcher: _Context = enable_python_dispatcher
# A context that suspends every dispatch mode: fake modes, tracing and the user's own.
outside_dispatch_modes: _Context = _disable_current_modes
# A context in which no mode sees what runs.
on_real_tensors: _Context = no_dispatch
# Returns a number that every in-place write to a tensor's memory raises.
version_of: Callable[[torch.Tensor], int] = attrgetter("_version")


def untraced(function: _Function) -> _Function:
    """Keep Dynamo out of a function."""
    return cast("_Function", torch._dynamo.disable(function))


def constant_in_traces(function: _Function) -> _Function:
    """Have Dynamo ask a function while it traces, and take the answer for the one of every call."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


# Returns the call of a module as it is, also of one that was compiled in place.
forward_of: Callable[[torch.nn.Module], Callable[..., Any]] = attrgetter("_call_impl")


def has_state_dict_hook(module: torch.nn.Module, hook: Callable[..., Any]) -> bool:
    """Return whether a hook already runs after a module's state dict is made."""
    return hook in module._state_dict_hooks.values()


def copy_graph(gm: GraphModule) -> Graph:
    """Return a copy of ``gm``'s graph that can take its place again."""
    copied = Graph()
    copied.set_codegen(copy.deepcopy(gm.graph._codegen))
    mapping: dict[Node, Node] = {}
    for node in gm.graph.nodes:
        mapping[node] = copied.node_copy(node, lambda n: mapping[n])
        if hasattr(node, "_dynamo_source"):  # AOTAutograd asks every placeholder for it
            mapping[node]._dynamo_source = node._dynamo_source
    return copied


def example_value(node: Node) -> Any:
    """Return what Dynamo recorded for ``node`` (a FakeTensor, SymInt, tuple, ...), or None."""
    return node.meta.get("example_value")


def example_input(node: Node) -> Any:
    """Return the real object behind a placeholder while its graph compiles, or None."""
    with contextlib.suppress(AttributeError, AssertionError):
        return node.meta.get("grapharg").example  # type: ignore[union-attr]
    return None


def source_name(node: Node) -> str:
    """Return Dynamo's name for a placeholder, such as ``L['self'].lm_head.weight``."""
    source = getattr(node.meta.get("grapharg"), "source", None)
    return "" if source is None else plain_source(str(source.name))


def plain_source(path: str) -> str:
    """Return Dynamo's way to something without what a class with a ``__getattr__`` adds to it."""
    return re.sub(r"\.__dict__\['(_modules|_parameters|_buffers)'\]", r".\1", path)


def running_modules() -> list[torch.nn.Module]:
    """Return the modules whose calls led here: those that ``torch.compile`` was called on, the
    nearest first, then others, the outermost first. Data parallelism is taken off.
    """
    from torch._dynamo import eval_frame

    wrappers = (eval_frame.OptimizedModule, torch.nn.parallel.DistributedDataParallel)
    files = {torch.nn.modules.module.__file__, eval_frame.__file__}
    compiled: list[torch.nn.Module] = []
    others: list[torch.nn.Module] = []
    frame: Any = sys._getframe()
    while frame is not None:
        module = frame.f_locals.get("self") if frame.f_code.co_filename in files else None
        if isinstance(module, torch.nn.Module):
            is_compiled = module._compiled_call_impl is not None
            while isinstance(module, wrappers):
                is_compiled = is_compiled or isinstance(module, eval_frame.OptimizedModule)
                module = next(module.children())
            if is_compiled:
                others.clear()  # parts of it, which it has names for
            (compiled if is_compiled else others).append(module)
        frame = frame.f_back
    found = {id(module): module for module in (*compiled, *reversed(others))}
    return list(found.values())


def frame_variables() -> Mapping[str, Any]:
    """Return local and global variables of the frame that Dynamo captures, as "L" and "G"."""
    from torch._dynamo import symbolic_convert

    captured = getattr(symbolic_convert.tls, "current_tx", None)
    return {} if captured is None else {"L": captured.f_locals, "G": captured.f_globals}


def readable_source(node: Node) -> str:
    """Return the name of a placeholder as its owner would say it: ``lm_head.weight``."""
    held = r"\._(?:modules|parameters|buffers)\[['\"](.*?)['\"]\]"
    name = re.sub(held, r".\1", source_name(node))
    local = re.fullmatch(r"L\[['\"](\w+)['\"]\](.*)", name)
    if local is None:
        return name
    owner, rest = local.groups()
    inner = re.fullmatch(r"\[['\"](\w+)['\"]\]", rest)
    if owner == "kwargs" and inner is not None:
        return inner[1]
    return rest.lstrip(".") if owner == "self" and rest else f"{owner}{rest}"


def inputs_from_other_graphs(gm: GraphModule) -> list[int]:
    """Return the positions of the tensors that another piece of the model hands to ``gm``: DDP cuts
    a captured graph where its buckets end, and what crosses a cut is no input of the user's.
    """
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    return [
        position
        for position, node in enumerate(placeholders)
        if isinstance(example_value(node), torch.Tensor) and node.meta.get("grapharg") is None
    ]


def notes_between_pieces() -> MutableMapping[torch.Tensor, Any] | None:
    """Return where pieces of one model that DDP cuts leave notes for later ones, under the example
    values of what crosses: weakly held, for this compilation alone. None where nothing is cut.
    """
    context: Any = TracingContext.try_get()
    cut = getattr(context, "ddp_optimizer_ctx", None)
    if cut is None:
        return None
    notes: MutableMapping[torch.Tensor, Any] = vars(cut).setdefault(
        "memeff_notes", WeakTensorKeyDictionary()
    )
    return notes


def has_checkpoint_policy(gm: GraphModule) -> bool:
    """Return whether the body of a checkpoint has a ``context_fn``: a say in what is kept."""
    return gm.meta.get("_checkpoint_context_fn") is not None


_KEPT = "memeff_kept"
_PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::mv")


class _KeepsMarked:
    """The `context_fn` of a checkpoint that keeps what calls with a mark return."""

    def __init__(self, cache_hash: str) -> None:
        self.cache_hash = cache_hash  # what tells two of them apart in the caches of AOTAutograd

    def __call__(self) -> Any:
        return checkpoint.create_selective_checkpoint_contexts(self._policy)

    @staticmethod
    def _policy(context: object, op: Any, *args: object, **kwargs: object) -> Any:
        del context, args, kwargs
        kind, name = traceback.current_meta.get(_KEPT), op.name()
        if kind == "attention":
            is_kept = kind in name
        else:
            is_kept = name in _PRODUCTS if kind == "product" else name.partition(".")[0] == kind
        policies = checkpoint.CheckpointPolicy
        return policies.MUST_SAVE if is_kept else policies.PREFER_RECOMPUTE


def keep_in_checkpoint(gm: GraphModule, kept: Mapping[Node, str]) -> Callable[[], None]:
    """Have the body of a checkpoint keep what some calls return, and return how to take it back: of
    "attention" what its fused kernel returns, of a "product" what that returns, else of the ATen or
    other op by its name, such as "aten::add".
    """
    for node, kind in kept.items():
        node.meta[_KEPT] = kind
    named = ",".join(sorted(f"{node.name}:{kind}" for node, kind in kept.items()))
    gm.meta["_checkpoint_context_fn"] = _KeepsMarked(f"memeff_compile keeps {named}")

    def undo() -> None:
        del gm.meta["_checkpoint_context_fn"]
        for node in kept:
            del node.meta[_KEPT]

    return undo


def may_be_under_policy(target: object) -> bool:
    """Return whether a call may stand in a checkpoint with a policy: some on graphs have no rule.
    Nested checkpoints and autograd functions are traced through, and need none.
    """
    if not isinstance(target, HigherOrderOperator):
        return True
    is_traced = target.name() in ("tag_activation_checkpoint", "autograd_function_apply")
    return is_traced or checkpoint._CachingTorchDispatchMode in target.python_key_table


def is_kept(node: Node) -> bool:
    """Return whether the checkpoint around a call keeps what it returns."""
    return _KEPT in node.meta


def recompute_in_backward(node: Node) -> None:
    """Have AOTAutograd's partition compute a call again in the backward, and keep its inputs."""
    node.meta["recompute"] = checkpoint.CheckpointPolicy.MUST_RECOMPUTE
    node.meta.setdefault("ac_graph_id", 0)


def compile_id() -> str:
    """Return the id of the compile in progress, such as ``0/1``, or an empty string."""
    current = CompileContext.current_compile_id()
    return "" if current is None else str(current)


def ignore_while_tracing(function: Callable[..., Any]) -> None:
    """Let Dynamo treat a logging function as a no-op instead of breaking the graph at it."""
    from torch._dynamo import config

    ignored = getattr(config, "ignore_logging_functions", None)
    if isinstance(ignored, set) and function not in ignored:
        ignored.add(_NamedFunction(function))


class _NamedFunction(str):
    """A function's name that equals the function: Dynamo writes its ignored functions to its logs
    as JSON, and up to torch 2.12 a bare function there fails every compile's log entry.
    """

    _function: Callable[..., Any]

    def __new__(cls, function: Callable[..., Any]) -> _NamedFunction:
        named = super().__new__(cls, getattr(function, "__qualname__", repr(function)))
        named._function = function
        return named

    def __eq__(self, other: object) -> bool:
        return bool(self._function == getattr(other, "_function", other))

    def __hash__(self) -> int:
        return hash(self._function)


def trace_artifact(name: str, text: Callable[[], str]) -> None:
    """Write ``text()`` into the structured trace of TORCH_TRACE; not called where that is unset."""
    tracing: Any = torch._logging
    tracing.trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": "json"},
        payload_fn=text,
        expect_trace_id=False,
    )


def statically_true(condition: Any) -> bool:
    """Return whether ``condition`` holds for every size, without adding a guard."""
    if isinstance(condition, bool):
        return condition
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return bool(statically_known_true(condition))


def holds(condition: Any) -> bool:
    """Return whether ``condition`` on sizes holds at present, and guard it: where it does not, or
    does, the graph is compiled anew. What depends on data does not hold.
    """
    if isinstance(condition, bool):
        return condition
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    return not free_unbacked_symbols(condition) and bool(condition)


def known_number(value: Any) -> int | float | None:
    """Return the number that ``value`` is or, for a node, stands for at present; adds no guard.

    ``dynamic=True`` makes symbols of a config's numbers; the sizes of tensors have no answer here.
    """
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return value
    symbol = example_value(value) if isinstance(value, Node) else None
    if isinstance(symbol, torch.SymFloat):
        from torch.utils._sympy.symbol import SymT, symbol_is_type

        is_given = all(symbol_is_type(s, SymT.FLOAT) for s in symbol.node.expr.free_symbols)
    elif isinstance(symbol, torch.SymInt):
        is_given = known_size(symbol) is not None or (
            value.op == "placeholder" and ".size()" not in source_name(value)
        )
    else:
        return None
    number = symbol.node.hint if is_given else None
    return number if isinstance(number, (int, float)) else None


def without_autocast(device_type: str) -> contextlib.AbstractContextManager[object]:
    """Keep autocast, which reaches into opaque ops, away from what runs meanwhile; devices that
    have none, as meta, are left alone.
    """
    if _has_autocast(device_type) and torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return contextlib.nullcontext()


@functools.lru_cache(maxsize=16)
def _has_autocast(device_type: str) -> bool:
    return device_type != "meta" and bool(torch.amp.is_autocast_available(device_type))


def known_size(size: Any) -> int | None:
    """Return a size that is the same in every call, or None; adds no guard."""
    if isinstance(size, int):
        return size
    known = size.node.maybe_as_int()
    return None if known is None else int(known)


def hold_constant(value: Any) -> None:
    """Guard the symbol behind a node at its present number: another number compiles anew."""
    symbol = example_value(value) if isinstance(value, Node) else None
    if isinstance(symbol, torch.SymInt):
        int(symbol)
    elif isinstance(symbol, torch.SymFloat):
        float(symbol)


def size_hint(size: Any) -> int:
    """Return a number for a size, the hint of a symbol; 0 when it has none. Adds no guard."""
    if isinstance(size, int):
        return size
    hint = getattr(getattr(size, "node", None), "hint", None)
    return int(hint) if isinstance(hint, int) else 0


def inductor_modes() -> dict[str, dict[str, Any]]:
    """Return the config keys that each mode of Inductor stands for."""
    from torch._inductor import list_mode_options

    return cast("dict[str, dict[str, Any]]", list_mode_options())


def inductor_config() -> tuple[dict[str, Any], Callable[[str], Any]]:
    """Return Inductor's config as it is, and what tells the type of a key."""
    from torch._inductor import config

    return config.get_config_copy(), config.get_type  # type: ignore[attr-defined]


def inductor_uses_cudagraphs(patches: Mapping[str, Any]) -> bool:
    """Return whether Inductor will replay CUDA graphs under ``patches``."""
    if "triton.cudagraphs" in patches:
        return bool(patches["triton.cudagraphs"])
    from torch._inductor import config

    return bool(config.triton.cudagraphs)


def compile_with_inductor(
    gm: GraphModule, example_inputs: Sequence[Any], patches: Mapping[str, Any], tag: str = ""
) -> Compiled:
    """Hand the graph to Inductor; ``patches`` also hold for the backward it compiles later.

    Its caches on disk know our ops by name only, so what they keep is tagged with our schemas:
    other versions have other ops. ``tag`` is what else our ops were compiled for and no graph
    shows.
    """
    from torch._inductor.compile_fx import compile_fx
    from torch.compiler import config

    tagged = f"{config.cache_key_tag}memeff:{op_fingerprint()}:{tag}"
    with config.patch(cache_key_tag=tagged):  # type: ignore[attr-defined]
        compiled: Any = compile_fx(gm, example_inputs, config_patches=dict(patches))
    return cast("Compiled", compiled)


def is_to_be_saved() -> bool:
    """Return whether `aot_compile` asks for a graph, which its caller may save."""
    from torch._functorch import config

    return bool(getattr(config, "bypass_autograd_cache_key", False))


def has_artifact(compiled: Compiled) -> bool:
    """Return whether AOTAutograd has made a callable, and can save what is behind it."""
    return getattr(compiled, "serialize", None) is not None


def let_be_saved(kind: type) -> None:
    """Let `aot_compile` take callables of a class, which says how they are saved."""
    from torch._dynamo.aot_compile_types import SerializableCallable

    SerializableCallable.register(kind)


def serialized(compiled: Compiled) -> bytes:
    """Return the artifact of the inner compiler behind a callable."""
    from torch._dynamo.aot_compile_types import BundledAOTAutogradSerializableCallable as Bundled

    return Bundled.serialize_compile_artifacts(Bundled(compiled))


def deserialized(artifact: bytes) -> Compiled:
    """Return the callable of an inner compiler's artifact."""
    from torch._dynamo.aot_compile_types import BundledAOTAutogradSerializableCallable as Bundled

    return cast("Compiled", Bundled.deserialize_compile_artifacts(artifact))


@contextlib.contextmanager
def apart_in_tracing() -> Iterator[None]:
    """Compile one of several graphs that Dynamo captured as one: what AOTAutograd notes about it,
    and reads when it compiles its backward, is not to be taken for another's.
    """
    context = TracingContext.try_get()
    if context is None:
        yield
        return
    own = copy.copy(context)
    own.fw_metadata = None
    with tracing(own):
        yield


def call_in_inductor(op: torch._ops.OpOverload) -> None:
    """Have code that Inductor writes call `op.direct`: the way through the dispatcher, twice where
    a gradient is written in Python, takes longer than many a kernel.

    Code in C++ calls the op.
    """
    from torch._inductor import ir, lowering
    from torch._inductor.virtualized import V
    from torch._library.utils import get_layout_constraint_tag

    if op in lowering.lowerings:
        return
    tag = get_layout_constraint_tag(op, with_default=True)
    constraint = lowering.tag_to_layout_constraint(tag)
    lowering.add_needs_realized_inputs(op)
    if constraint is not None:
        lowering.add_layout_constraint(op, constraint)
    fall_back = lowering.fallback_handler(op)

    def call(*args: Any, **kwargs: Any) -> Any:
        found = fall_back(*args, **kwargs)
        if not V.graph.cpp_wrapper:
            called = (o for o in reversed(V.graph.operations) if isinstance(o, ir.FallbackKernel))
            kernel = next(called)
            kernel.set_python_kernel_name(f"{kernel.python_kernel_name}.direct")
        return found

    lowering.register_lowering(op, type_promotion_kind=None)(call)


def op_fingerprint() -> str:
    """Return a digest of the schemas of every registered op of ours, and of our version."""
    version = sys.modules["memeff_compile"].__version__
    names = sorted(n for n in torch._C._dispatch_get_all_op_names() if n.startswith("memeff::"))
    schemas = (str(torch._C._get_schema(*name.partition(".")[::2])) for name in names)
    return hashlib.sha256("\n".join((version, *schemas)).encode()).hexdigest()[:16]


def compile_with_aot_eager(gm: GraphModule, example_inputs: Sequence[Any]) -> Compiled:
    """Hand the graph to AOTAutograd and run the result op by op."""
    from torch._dynamo.backends.debugging import aot_eager

    inputs: Any = example_inputs
    return cast("Compiled", aot_eager(gm, inputs))


@contextlib.contextmanager
def beside_autograd() -> Iterator[None]:
    """Run autograd beside the caller's: out of sight of its hooks, modes and compilers.

    These would count or save what is thrown away, see each operation, or compile its backward.
    """
    from torch._dynamo import compiled_autograd

    with unseen_by_saved_tensor_hooks(), outside_dispatch_modes(), compiled_autograd._disable():
        yield


@contextlib.contextmanager
def unseen_by_saved_tensor_hooks() -> Iterator[None]:
    """Save tensors for a backward pass, also on fake tensors, without the hooks around the call."""
    if torch._C._autograd._top_saved_tensors_default_hooks(False) is None:
        yield
        return
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        yield


@functools.cache
def _let_fake_modes_ask() -> None:
    """Have fake modes, which answer for fake tensors alone, hand on the question for the device."""
    op = torch.ops.prim.device.default
    handlers: Any = fake_tensor._DISPATCH_META_HANDLERS
    usual = handlers[op]

    def device_of(args: Sequence[Any]) -> Any:
        tensor = args[0]
        is_fake = isinstance(tensor, fake_tensor.FakeTensor)
        return usual(args) if is_fake else tensor.__torch_dispatch__(op, (type(tensor),), args)

    handlers[op] = device_of


def can_be_swapped(tensor: torch.Tensor) -> bool:
    """Return whether `torch.utils.swap_tensors` takes a tensor: not where a weak reference, as
    compiled code has, or an autograd graph holds it.
    """
    return not weakref.getweakrefs(tensor) and tensor._use_count() == 1  # type: ignore[attr-defined]


def is_fake(value: Any) -> TypeGuard[torch.Tensor]:
    """Return whether ``value`` is a plain fake tensor: not a fake wrapper subclass."""
    return type(value) is fake_tensor.FakeTensor


def is_dtensor(value: Any) -> TypeGuard[torch.Tensor]:
    """Return whether ``value`` is a tensor spread over ranks."""
    tensor_module = sys.modules.get("torch.distributed.tensor")
    return tensor_module is not None and isinstance(value, tensor_module.DTensor)


def is_tensor_parallel(weight: torch.Tensor) -> bool:
    """Return whether ranks compute with parts of ``weight``: not FSDP2 alone has spread it."""
    return is_dtensor(weight) and getattr(_find_fsdp2_shard(weight), "is_dtensor", True)


def offset_of_part(tensor: Any) -> tuple[int, ...]:
    """Return where in a DTensor the part of this rank begins, as DTensor itself cuts it."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape = [int(size) for size in tensor.shape]
    given = (shape, tensor.device_mesh, tensor.placements)
    return tuple(compute_local_shape_and_global_offset(*given)[1])


def gathering_ops() -> tuple[Any, Any]:
    """Return the op that gathers a tensor from all ranks of a named group, and that waits for it:
    those that DTensor calls, known to AOTAutograd and Inductor.
    """
    ops = torch.ops._c10d_functional
    return ops.all_gather_into_tensor.default, ops.wait_tensor.default


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
    """Make a wrapper subclass that nothing takes for a tensor with memory.

    A wrapper has its device's dispatch keys and a null pointer, so that whatever reaches memory
    without Python crashes: raw pointers, storages, a plain tensor whose `.data` it became. This one
    has keys and storage of the meta device, and only says that it is on `device`.

    The class answers what it says and refuses (`ABOUT_MEMORY`) from its `__torch_dispatch__`, and
    has a property `device` and a method `refuse_memory`, which raises.
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
    """Answer what an assignment to `.data` asks: both have to be of one class."""
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
"""What tensors made by `make_without_memory` are asked below autograd, and the answers."""


@functools.cache
def _refuse_assigned_data() -> torch.library.Library:
    """Have assignments to `.data` ask `_shares_metadata` where one of the tensors has meta's keys:
    PyTorch asks an operation that is never dispatched to Python.
    """
    library = torch.library.Library("aten", "IMPL")
    library.impl("_has_compatible_shallow_copy_type", _shares_metadata, "AutogradMeta")
    return library


def add_buffer(gm: GraphModule, name: str, tensor: torch.Tensor) -> None:
    """Let Dynamo's graph have a buffer of ours; AOTAutograd asks where each one came from."""
    from torch._dynamo.source import ConstantSource

    gm.register_buffer(name, tensor, persistent=False)
    sources: Any = getattr(gm, "_param_name_to_source", {})
    sources[name] = ConstantSource(f"memeff_{name}")


def remove_buffer(gm: GraphModule, name: str) -> None:
    """Take back what `add_buffer` added."""
    delattr(gm, name)
    sources: Any = getattr(gm, "_param_name_to_source", {})
    sources.pop(name, None)


def empty_bf16(size: tuple[int, ...], strides: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    """Return empty memory on the device of a tensor, which is the current one if it is a GPU.

    Code of Inductor's makes its buffers so: the way through the dispatcher takes three times as
    long.
    """
    if like.is_cuda and _empty_on_gpu is not None:
        return cast("torch.Tensor", _empty_on_gpu(size, strides, torch.bfloat16))
    return torch.empty_strided(size, strides, dtype=torch.bfloat16, device=like.device)


_empty_on_gpu = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)


def storage_key(value: torch.Tensor) -> int:
    """Return a key equal for fake tensors that share memory."""
    return int(value.untyped_storage()._cdata)


def parts_of(tensor: torch.Tensor) -> tuple[Sequence[str], Any]:
    """Return the names of the tensors that a wrapper subclass is made of, and what else it is."""
    names, about = cast("Any", tensor).__tensor_flatten__()
    return names, about


def storage_keys(value: torch.Tensor) -> set[int]:
    """Return keys equal for fake tensors that share memory, one per part of a subclass."""
    if not hasattr(type(value), "__tensor_flatten__"):
        return {storage_key(value)}
    names, _ = parts_of(value)
    return {key for name in names for key in storage_keys(getattr(value, name))}


def guard_by_attribute(node: Node, name: str) -> None:
    """Have a number that an input has as an attribute stand for all that is guarded of the input:
    of a tensor made of others Dynamo guards each, and asks Python for what they are.
    """
    from torch._dynamo.guards import GuardBuilder
    from torch._dynamo.source import AttrSource

    context, graph_arg = TracingContext.try_get(), node.meta.get("grapharg")
    source = getattr(graph_arg, "source", None)
    if context is None or source is None:
        return
    guards = context.guards_context.dynamo_guards
    guard = AttrSource(source, name).make_guard(GuardBuilder.EQUALS_MATCH)
    guards.remove_guards_with_source(source)  # before torch 2.13 it finds nothing in a module
    guards.inner = type(guards.inner)(g for g in guards.inner if not _is_part(g, source))
    guards.add(guard)


def _is_part(guard: Any, whole: Any) -> bool:
    source = guard.originating_source
    while source != whole and hasattr(source, "base"):
        source = source.base
    return bool(source == whole)


def mark_static_input(node: Node) -> None:
    """Tell AOTAutograd that an input stays where it is, so that CUDA graphs may write to it."""
    node.meta.setdefault("tensor_dict", {})["_dynamo_static_input_type"] = "unguarded"


def is_unsafe_to_record(node: Node) -> bool:
    """Return whether a call may not be part of a CUDA graph: it waits for the device, its sizes are
    data, it is control flow, or an op of somebody else's, whose host work a replay would leave out.
    """
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    if node.op not in ("call_function", "call_method"):
        return node.op == "call_module"
    value = example_value(node)
    values = [value] if isinstance(value, (torch.Tensor, torch.SymInt, torch.SymFloat)) else []
    if any(free_unbacked_symbols(each) for each in values):
        return True
    target: Any = node.target
    if isinstance(target, HigherOrderOperator):
        return not target.name().startswith(("triton_kernel_wrapper", "flex_attention"))
    is_packet = isinstance(target, OpOverloadPacket)
    ops = [getattr(target, name) for name in target.overloads()] if is_packet else [target]
    ops = [op for op in ops if isinstance(op, OpOverload)]
    names = ("cudagraph_unsafe", "data_dependent_output", "dynamic_output_shape")
    unsafe = {getattr(torch.Tag, name) for name in names if hasattr(torch.Tag, name)}
    is_known = all(op.namespace in ("aten", "prims", "memeff") for op in ops)
    return not is_known or any(unsafe & set(op.tags) for op in ops)


@contextlib.contextmanager
def capturing_alone() -> Iterator[None]:
    """Record no two CUDA graphs at a time: a capture is a state of the process."""
    from torch._inductor import cudagraph_trees

    lock = getattr(cudagraph_trees, "graph_capture_lock", None)  # since torch 2.13
    with _capture_lock if lock is None else lock:
        yield


_capture_lock = threading.Lock()


def forget_workspaces() -> None:
    """Have cuBLAS allocate its workspaces anew: one from before a capture may be freed after it."""
    torch._C._cuda_clearCublasWorkspaces()


def leave_pool(pool: Any) -> None:
    """Let the allocator go back to its usual memory after a capture that failed."""
    with contextlib.suppress(RuntimeError):
        torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)


def feeds_resumed_code(gm: GraphModule) -> bool:
    """Return whether Dynamo cut the user's function behind ``gm`` and resumes it with the outputs.

    DDP calls its pieces cut, too: what they return goes to other pieces, or to the user.
    """
    why = getattr(gm, "compile_subgraph_reason", None)
    return why is not None and "DDPOptimizer" not in str(why.reason) and bool(why.graph_break)


def cut_inside(gm: GraphModule) -> str:
    """Return the name of the function inside which Dynamo cut the user's behind ``gm``, or ""."""
    why = getattr(gm, "compile_subgraph_reason", None)
    frames = getattr(why, "user_stack", None) or []
    return str(frames[-1].name) if feeds_resumed_code(gm) and frames else ""


# Lets the device stop with a message when it finds a condition false; the host goes on.
assert_on_device: Callable[[torch.Tensor, str], None] = torch._assert_async
# Returns whether ``torch.func`` or ``torch.vmap`` is transforming what runs now.
is_functorch_active: Callable[[], bool] = torch._C._are_functorch_transforms_active


def is_batched(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` is several under ``vmap`` or ``is_grads_batched``, which hides it
    from Python.
    """
    functorch = torch._C._functorch
    return bool(functorch.is_batchedtensor(tensor) or functorch.is_legacy_batchedtensor(tensor))


def is_forward_mode_active() -> bool:
    """Return whether forward-mode derivatives are being computed."""
    return bool(forward_ad._current_level >= 0)


def is_traced(*tensors: torch.Tensor) -> bool:
    """Return whether tensors stand for others, or a mode watches what is done to them."""
    stands_for_others = any(type(tensor) is not torch.Tensor for tensor in tensors)
    return stands_for_others or torch._C._len_torch_dispatch_stack() > 0


def frees_saved_tensors() -> bool:
    """Return whether a backward runs that drops what a node saved as soon as the node is done."""
    return (
        torch._C._current_graph_task_id() != -1
        and not torch._C._autograd._get_current_graph_task_keep_graph()
    )


def packs_saved_tensors() -> bool:
    """Return whether hooks get to see what autograd saves now."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def ignores_gradients(hook: Any) -> bool:
    """Return whether a tensor hook only marks the time: FSDP2's look at no gradient."""
    owner = getattr(hook, "__self__", None)
    states = sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_state")
    return states is not None and isinstance(owner, states.FSDPState)


def fsdp_shard(weight: torch.Tensor) -> torch.Tensor | None:
    """Return this rank's shard of ``weight`` when FSDP2 gathered it, else None: optimizers and
    checkpoints write to it, and ``weight`` follows at its next gathering.
    """
    param, _ = _fsdp2_owner(weight)
    return cast("torch.Tensor | None", getattr(param, "sharded_param", None))


def put_fsdp_shard(module: torch.nn.Module, name: str, local: torch.Tensor) -> bool:
    """Make ``local`` what this rank holds of a parameter that FSDP2 shards, with gradients off.

    ``local`` may be of a subclass with FSDP2's hooks around its all-gather. False unless FSDP2
    shards the parameter, keeps shards on their device, and has it in shards now.
    """
    old: Any = module._parameters[name]
    param = _find_fsdp2_shard(old)
    if param is None or param.offload_to_cpu or param.sharded_state.name != "SHARDED":
        return False
    new = with_local_part(old, local)
    module._parameters[name] = torch.nn.Parameter(new, requires_grad=False)
    # What it keeps flat goes first: it would look for the memory behind the new shard.
    param._sharded_param_data = local_part(module._parameters[name]).view(-1)  # type: ignore[arg-type]
    param.reset_sharded_param()
    param._init_extensions()
    return True


def is_fsdp_shard(weight: torch.Tensor) -> bool:
    """Return whether ``weight`` is a parameter that FSDP2 holds in shards on their device."""
    param = _find_fsdp2_shard(weight)
    return param is not None and not param.offload_to_cpu


@dataclass(frozen=True)
class FsdpShard:
    """What FSDP2 does with a parameter that it holds in shards."""

    _param: Any

    def holds(self, parameter: torch.Tensor) -> bool:
        """Return whether a parameter is the one whose hooks it runs: others may take its place."""
        return self._param.sharded_param is parameter

    @property
    def is_on_host(self) -> bool:
        """Whether the shard is kept in memory of the host."""
        return bool(self._param.offload_to_cpu)


def fsdp_shards() -> dict[int, FsdpShard]:
    """Return what FSDP2 does with every parameter that it holds in shards, by `id`."""
    return {id(param.sharded_param): FsdpShard(param) for param, _ in _fsdp2_parameters()}


def shards_by_fsdp2() -> bool:
    """Return whether FSDP2 shards any parameter of this process."""
    return next(_fsdp2_parameters(), None) is not None


def is_fsdp2_module(module: torch.nn.Module) -> bool:
    """Return whether FSDP2 has hooks around ``module``."""
    states = sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_state")
    return states is not None and states._get_module_fsdp_state(module) is not None


def is_compiled_by_itself(module: torch.nn.Module) -> bool:
    """Return whether a module runs compiled, or as someone wishes, wherever it is called from."""
    return module._compiled_call_impl is not None or "forward" in vars(module)


def fsdp_group(weight: torch.Tensor) -> tuple[torch.nn.Module, ...]:
    """Return the modules that FSDP2 gathers together with ``weight``; none if it did not."""
    _, group = _fsdp2_owner(weight)
    return () if group is None else tuple(group.modules)


def sharded_with(weight: torch.Tensor) -> list[torch.nn.Module]:
    """Return all modules that FSDP2 shards under the root of the one that ``weight`` belongs to."""
    for state in _fsdp2_states():
        if any(module in state._modules for module in fsdp_group(weight)):
            return [module for each in state._state_ctx.all_states for module in each._modules]
    return []


def _find_fsdp2_shard(weight: torch.Tensor) -> Any:
    return next((p for p, _ in _fsdp2_parameters() if p.sharded_param is weight), None)


def _fsdp2_states() -> Iterator[Any]:
    """Yield FSDP2's objects for the modules that it shards."""
    states = sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_state")
    if states is None:
        return
    from torch.distributed._composable_state import _module_state_mapping

    for entry in list(_module_state_mapping.values()):
        state = entry() if isinstance(entry, weakref.ref) else entry
        if isinstance(state, states.FSDPState):
            yield state


def _fsdp2_parameters() -> Iterator[tuple[Any, Any]]:
    """Yield FSDP2's objects for every parameter it shards, and for its group."""
    for state in _fsdp2_states():
        groups = getattr(state, "_fsdp_param_groups", None)  # one group, unnumbered, before 2.12
        for group in (state._fsdp_param_group,) if groups is None else groups:
            for param in () if group is None else group.fsdp_params:
                yield param, group


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return the plain tensor that this rank holds of a distributed one."""
    return cast("torch.Tensor", getattr(tensor, "_local_tensor", tensor))


def with_local_part(tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Return a distributed tensor like ``tensor``, of which this rank holds ``local``."""
    from torch.distributed.tensor import DTensor

    like: Any = tensor
    how = {"run_check": False, "shape": like.shape, "stride": like.stride()}
    made = DTensor.from_local(local, like.device_mesh, like.placements, **how)
    return cast("torch.Tensor", made)


def fsdp_frees_after_forward(weight: Any) -> bool:
    """Return whether FSDP frees ``weight`` before the caller of the model can use it: FSDP1, and
    FSDP2 but for the outermost group and those that are told not to reshard.
    """
    if not isinstance(weight, torch.Tensor):
        return False
    if _is_fsdp1_view(weight):
        return True
    param, group = _fsdp2_owner(weight)
    return param is not None and getattr(group, "post_forward_mesh_info", group) is not None


def is_sharded_by_fsdp(weight: torch.Tensor) -> bool:
    """Return whether ``weight`` was gathered from shards by FSDP, 1 or 2."""
    return _is_fsdp1_view(weight) or _fsdp2_owner(weight)[0] is not None


def _is_fsdp1_view(weight: torch.Tensor) -> bool:
    return any(getattr(t, "_is_flat_param", False) for t in (weight, weight._base))


# Gathered parameters live as long as their module: a tensor is looked for once.
_fsdp2_owners: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _fsdp2_owner(weight: torch.Tensor) -> tuple[Any, Any]:
    """Return FSDP2's objects for a gathered parameter and its group; (None, None) if it is none."""
    if "torch.distributed.fsdp._fully_shard._fsdp_state" not in sys.modules:
        return None, None
    if weight not in _fsdp2_owners:
        every = _fsdp2_parameters()
        mine = (pair for pair in every if getattr(pair[0], "_unsharded_param", None) is weight)
        found = next(mine, None)
        if found is None:  # not remembered: tensors with weak references cannot be swapped
            return None, None
        _fsdp2_owners[weight] = tuple(map(weakref.ref, found))
    param, group = (reference() for reference in _fsdp2_owners[weight])
    return param, group


def fake_mode(outside: Callable[..., Any]) -> Any:
    """Return a mode under which tensors have sizes and no memory.

    What runs outside of Dynamo's traces goes to ``outside(op, args, kwargs, run)``, which returns
    the result; ``run()`` runs it on sizes.
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

    return Told(shape_env=shapes, allow_non_fake_inputs=True)


def is_view(op: Any) -> bool:
    """Return whether what an op returns is, or is a view of, what it was given."""
    found = schema(op)
    return found is None or any(returned.alias_info for returned in found.returns)


def written_to(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the arguments of an op that it writes to."""
    known = getattr(schema(op), "arguments", ())
    given = {**dict(zip((a.name for a in known), args, strict=False)), **kwargs}
    changed = [a.name for a in known if a.alias_info is not None and a.alias_info.is_write]
    return [given[name] for name in changed if name in given]


def reads_values(op: Any) -> bool:
    """Return whether what an op returns has sizes, or is a number, that depends on values."""
    tags = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)
    return any(tag in op.tags for tag in tags)


def is_item(op: Any) -> bool:
    """Return whether an op is what `item()` calls."""
    return op is torch.ops.aten._local_scalar_dense.default


def is_drawn(op: Any) -> bool:
    """Return whether chance decides what an op returns, or what was in its memory."""
    return torch.Tag.nondeterministic_seeded in op.tags or "empty" in op.name()


@contextlib.contextmanager
def fresh_capture() -> Iterator[None]:
    """Have captures be limited by no other compiles, learn nothing from them, nor teach them: sizes
    seen here would be dynamic in the next compile.
    """
    from torch._dynamo import config, pgo

    limits: dict[str, Any] = {"recompile_limit": NO_LIMIT, "accumulated_recompile_limit": NO_LIMIT}
    learned, pgo._CODE_STATE = pgo.get_code_state(), defaultdict(pgo.CodeState)
    try:
        with config.patch(**limits, automatic_dynamic_shapes=False):
            yield
    finally:
        pgo._CODE_STATE = learned


def size_formula(size: Any) -> Any:
    """Return a size as a sympy formula over Dynamo's symbols; adds no guard."""
    import sympy

    return sympy.Integer(size) if isinstance(size, int) else size.node.expr


def forget_failures(functions: Iterable[Any]) -> None:
    """Let Dynamo compile functions again: it skips those whose capture ended in an exception."""
    from torch._C._dynamo.eval_frame import reset_code

    for function in functions:
        if hasattr(function, "__code__"):
            reset_code(function.__code__)


def multiplies_bf16() -> bool:
    """Return whether the CPU's matrix library has instructions for products of bfloat16."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def keep_address(tensor: torch.Tensor) -> None:
    """Tell Dynamo that a tensor stays where it is, so that CUDA graphs need no copy of it. While
    Dynamo traces it cannot be told; nothing is done then.
    """
    if not torch.compiler.is_compiling():
        torch._dynamo.mark_static_address(tensor)


def compile_in_place(module: torch.nn.Module, given: Mapping[str, Any]) -> None:
    """Compile a module in place with these arguments of torch.compile.

    `Module.compile` compiles nothing of a module that is PyTorch's own, such as an nn.Sequential:
    Dynamo leaves out the frames of PyTorch's files. What `torch.compile(module)` returned gives way
    to the compilation in place, which it would else hide.
    """
    from torch._dynamo import external_utils, trace_rules
    from torch._dynamo.eval_frame import OptimizedModule

    if isinstance(module, OptimizedModule):
        module.forward = module._orig_mod.__call__
        module = module._orig_mod
    forward, call = module.forward, module._call_impl
    if isinstance(forward, types.MethodType) and trace_rules.check(forward):
        call = external_utils.wrap_inline(call)
    module._compiled_call_impl = torch.compile(call, **given)


def backend_of(call: object) -> tuple[str, Mapping[str, Any]] | None:
    """Return the name and options of the backend of what torch.compile returned for a function, or
    of what runs in the place of a module compiled in place; None where nothing is compiled.
    """
    seen: list[object] = []  # what is wrapped may be what wraps it
    while call is not None and call not in seen:
        cells = getattr(call, "__closure__", None) or ()
        held = [each.cell_contents for each in cells if not _is_empty(each)]
        backend = next((b for b in map(_asked_of, held) if hasattr(b, "compiler_name")), None)
        if backend is not None:
            return backend.compiler_name, getattr(backend, "kwargs", {}).get("options") or {}
        seen.append(call)
        call = getattr(call, "__wrapped__", None)
    return None


def _is_empty(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return True
    return False


def _asked_of(held: object) -> Any:
    """Return the backend behind the callback of what Dynamo runs a function in."""
    from torch._dynamo.eval_frame import OptimizeContext

    backend: Any = held.callback if isinstance(held, OptimizeContext) else None
    while hasattr(backend, "_torchdynamo_orig_backend"):
        backend = backend._torchdynamo_orig_backend
    return backend


def undo_compile(module: torch.nn.Module, name: str) -> str:
    """Take away what a backend compiled of a module by itself; say what that was, or "".

    What `torch.compile(module)` returned stays the object that it is, and runs the module.
    """
    from torch._dynamo.eval_frame import OptimizedModule

    def is_its(call: object) -> bool:
        found = backend_of(call)
        return found is not None and found[0] == name

    if isinstance(module, OptimizedModule):
        if not is_its(module.forward):
            return ""
        module.forward = module._orig_mod.__call__
        return "what torch.compile returned runs the module itself"
    found = ""
    if is_its(module._compiled_call_impl):
        module._compiled_call_impl = None
        found = "no longer compiled"
    forward = vars(module).get("forward")
    if is_its(forward):
        before: Any = getattr(forward, "_torchdynamo_orig_callable", None)
        if getattr(before, "__func__", None) is type(module).forward:
            del module.forward
        else:
            module.forward = before
        found = "no longer compiled"
    return found


def original_of(module: torch.nn.Module) -> torch.nn.Module | None:
    """Return the module that `torch.compile(module)` was given, None for any other module."""
    from torch._dynamo.eval_frame import OptimizedModule

    return module._orig_mod if isinstance(module, OptimizedModule) else None


def compiling_is_off() -> bool:
    """Return whether PyTorch is told to compile nothing, by its environment variables, its config
    or a stance.
    """
    if os.environ.get("TORCHDYNAMO_DISABLE") == "1":
        return True
    if "torch._dynamo.eval_frame" not in sys.modules:  # then nothing else has said so
        return os.environ.get("TORCH_COMPILE_DISABLE") == "1"
    from torch._dynamo import config, eval_frame

    return bool(config.disable) or eval_frame._stance.stance == "force_eager"


def wrap_compiled(module: torch.nn.Module, wrap: Callable[[Any], Any]) -> None:
    """Put a function around what runs in the place of a module that is compiled in place."""
    module = without_compile(module)
    around = wrap(module._compiled_call_impl)
    around.__wrapped__ = module._compiled_call_impl
    module._compiled_call_impl = around


def users_line() -> str:
    """Return the line that runs and is neither PyTorch's nor ours, as "train.py:12", or ""."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_USERS):
        frame = frame.f_back
    return "" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


_NOT_USERS = (
    *(str(Path(f).parent) + os.sep for f in (__file__, torch.__file__)),
    str(Path(contextlib.__file__)),
    "<",
)


def names_around() -> dict[str, Any]:
    """Return what the names stand for in the function that called the one that asks."""
    return sys._getframe(2).f_locals


def mark_varying(tensor: torch.Tensor, dim: int) -> None:
    """Tell Dynamo that a size will not be the same in every call; code may still hold it."""
    torch._dynamo.maybe_mark_dynamic(tensor, dim)


def room_for_graphs(limit: int = 64) -> dict[str, Any]:
    """Return arguments of torch.compile that give a model its own, larger limit of graphs. Without
    them all models of a process share one, since what is compiled is a decorator of transformers.
    Before torch 2.13 there are no such arguments, and the shared limit is raised.
    """
    from torch._dynamo import config

    wanted = {"recompile_limit": limit, "isolate_recompiles": True}
    if wanted.keys() <= inspect.signature(torch.compile).parameters.keys():
        return wanted
    config.recompile_limit = max(config.recompile_limit, 64)
    return {}


def without_compile(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module that ``torch.compile(module)`` was given, or the module itself."""
    inner = module.__dict__.get("_modules", {}).get("_orig_mod")
    return module if inner is None else inner


def tracing_again() -> Callable[[], Any]:
    """Return a function, that of a context: what is compiled in it is as if it were here."""
    return functools.partial(tracing, TracingContext.try_get())


def inductor_graphs(gm: GraphModule, example_inputs: Sequence[Any]) -> list[GraphModule]:
    """Return AOTAutograd's graphs for ``gm`` as Inductor asks for them, the forward first."""
    from torch._functorch import config as functorch_config
    from torch._inductor.compile_fx import compile_fx

    graphs: list[GraphModule] = []

    def keep(graph: GraphModule, inputs: Sequence[Any], **settings: Any) -> Callable[..., Any]:
        graphs.append(graph)
        forward: Callable[..., Any] = graph.forward
        return forward

    patches = {"pattern_matcher": False, "force_disable_caches": True}
    with functorch_config.patch(enable_autograd_cache=False, force_non_lazy_backward_lowering=True):
        inner: Any = keep
        compile_fx(gm, example_inputs, inner_compile=inner, config_patches=patches)
    return graphs


def tensor_hooks(tensor: torch.Tensor) -> bool:
    """Return whether hooks are registered on a tensor, of its gradient or after it."""
    after = getattr(tensor, "_post_accumulate_grad_hooks", None)
    return bool(tensor._backward_hooks) or bool(after)


def drop_empty_hooks(tensor: torch.Tensor) -> None:
    """Forget hooks that were registered on a tensor and removed again: what is left of them makes
    torch believe that it runs hooks of this tensor. After `torch.utils.swap_tensors`, which moving
    a module with subclass weights uses, those registered from then on would never run.
    """
    if not getattr(tensor, "_post_accumulate_grad_hooks", None):
        tensor._post_accumulate_grad_hooks = None  # type: ignore[assignment]
    if not tensor._backward_hooks:
        tensor._backward_hooks = None


def references(held: list[torch.Tensor]) -> tuple[int, int, int, int]:
    """Count who holds the one tensor in a list: its memory, the tensor, the Python object of each.

    No variable of the caller may hold the tensor beside the list. See `SOLE_OWNER`.
    """
    return (
        torch._C._storage_Use_Count(held[0].untyped_storage()._cdata),
        held[0]._use_count(),  # type: ignore[attr-defined]
        sys.getrefcount(held[0]),
        sys.getrefcount(held[0].untyped_storage()),
    )


# What `references` counts where nobody but the list holds the tensor or its memory.
SOLE_OWNER = (2, 1, 2, 2)


def is_sole_owner(held: list[torch.Tensor]) -> bool:
    """Return whether nobody but a list of one tensor holds that tensor or its memory: no view,
    detached tensor, array of NumPy or saved tensor. Not known, hence False, where Dynamo traces.
    """
    return not torch.compiler.is_compiling() and references(held) == SOLE_OWNER


def revive_hooks(tensor: torch.Tensor) -> None:
    """Have the hooks of a tensor whose insides were swapped run again; their handles stay good."""
    tensor._post_accumulate_grad_hooks = getattr(tensor, "_post_accumulate_grad_hooks", None)  # type: ignore[assignment]
    tensor._backward_hooks = tensor._backward_hooks


def optimizer_hooks(optimizer: torch.optim.Optimizer, *, but: Callable[..., Any]) -> bool:
    """Return whether hooks run around the steps of an optimizer, those after every step aside.
    ``but`` is a hook before every step that does not count.
    """
    return bool(
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or any(hook is not but for hook in optimizers._global_optimizer_pre_hooks.values())
    )


def run_hooks_after_every_step(optimizer: torch.optim.Optimizer) -> None:
    """Run the hooks that were registered to run after a step of any optimizer."""
    for hook in list(optimizers._global_optimizer_post_hooks.values()):
        hook(optimizer, (), {})


def after_gradients(results: Iterable[Any], function: Callable[[], None]) -> None:
    """Call a function when the gradients of what made these results have been computed, before
    autograd hands them on.
    """
    for result in results:
        made_by = result.grad_fn if isinstance(result, torch.Tensor) else None
        if made_by is not None:
            made_by.register_hook(lambda *_: function())
            return


def after_backward(function: Callable[[], None]) -> bool:
    """Call a function at the end of the backward that runs; return False where none does."""
    try:
        torch.autograd.Variable._execution_engine.queue_callback(function)
    except RuntimeError:
        return False
    return True
