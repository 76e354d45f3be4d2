"""Dynamo: what it records about a graph, how it traces and guards, and what it compiles again."""

from __future__ import annotations

import contextlib
import copy
import inspect
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from operator import attrgetter
from typing import Any, TypeVar, cast

import torch
from torch._guards import CompileContext, TracingContext
from torch.fx import Graph, GraphModule, Node
from torch.utils.weak import WeakTensorKeyDictionary

_Function = TypeVar("_Function", bound=Callable[..., Any])
NO_LIMIT = 1 << 20  # of graphs that Dynamo makes of one function


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


def capturing_backend() -> Any:
    """Return the backend that the graph being captured is for, or None outside of a capture."""
    from torch._dynamo import symbolic_convert

    captured = getattr(symbolic_convert.tls, "current_tx", None)
    backend = None if captured is None else captured.output.compiler_fn
    around = backend
    while around is not None:  # debuggers, and DDP, which cuts graphs, wrap it
        backend = around
        around = getattr(backend, "_torchdynamo_orig_backend", None)
        around = around or getattr(getattr(backend, "__self__", None), "backend_compile_fn", None)
    return getattr(backend, "compiler_fn", backend)  # from torch.compile's settings


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


def compile_id() -> str:
    """Return the id of the compile in progress, such as ``0/1``, or an empty string."""
    current = CompileContext.current_compile_id()
    return "" if current is None else str(current)


def ignore_while_tracing(function: Callable[..., Any]) -> None:
    """Let Dynamo treat a logging function as a no-op instead of breaking the graph at it."""
    from torch._dynamo import config

    ignored: set[Any] = config.ignore_logging_functions
    if function not in ignored:
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


def is_cut_in(gm: GraphModule, file: str) -> bool:
    """Return whether Dynamo ended ``gm`` in code that a file called."""
    frames = getattr(getattr(gm, "compile_subgraph_reason", None), "user_stack", None) or []
    return feeds_resumed_code(gm) and any(frame.filename.endswith(file) for frame in frames)


def forward_hooks(module: torch.nn.Module) -> list[Callable[..., Any]]:
    """Return the hooks that run before and after a module's forward."""
    return [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]


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


def forget_failures(functions: Iterable[Any]) -> None:
    """Let Dynamo compile functions again: it skips those whose capture ended in an exception."""
    from torch._C._dynamo.eval_frame import reset_code

    for function in functions:
        if hasattr(function, "__code__"):
            reset_code(function.__code__)


def keep_address(tensor: torch.Tensor) -> None:
    """Tell Dynamo that a tensor stays where it is, so that CUDA graphs need no copy of it. While
    Dynamo traces it cannot be told; nothing is done then.
    """
    if not torch.compiler.is_compiling():
        torch._dynamo.mark_static_address(tensor)


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
