"""Private names of Dynamo, for captured graphs, tracing, guards and recompilation."""

from __future__ import annotations

import contextlib
import copy
import inspect
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping
from operator import attrgetter
from types import FunctionType
from typing import Any, TypeVar, cast

import torch
from torch._guards import CompileContext, TracingContext
from torch.fx import Graph, GraphModule, Node
from torch.utils.weak import WeakTensorKeyDictionary

_Function = TypeVar("_Function", bound=Callable[..., Any])
NO_LIMIT = 1 << 20  # on the graphs that Dynamo makes of one function


def untraced(function: _Function) -> _Function:
    """Return a function that Dynamo does not trace."""
    return cast("_Function", torch._dynamo.disable(function))


def constant_in_traces(function: _Function) -> _Function:
    """Make Dynamo call a function while it traces, and store the result as a constant in the
    graph."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


# Returns the uncompiled call of a module, also if the module was compiled in place.
forward_of: Callable[[torch.nn.Module], Callable[..., Any]] = attrgetter("_call_impl")


def has_state_dict_hook(module: torch.nn.Module, hook: Callable[..., Any]) -> bool:
    """Return whether `hook` is registered to run after the state dict of `module` is created."""
    return hook in module._state_dict_hooks.values()


def copy_graph(gm: GraphModule) -> Graph:
    """Return a copy of the graph of `gm`, from which the original graph can be restored later."""
    copied = Graph()
    copied.set_codegen(copy.deepcopy(gm.graph._codegen))
    mapping: dict[Node, Node] = {}
    for node in gm.graph.nodes:
        mapping[node] = copied.node_copy(node, lambda n: mapping[n])
        if hasattr(node, "_dynamo_source"):  # AOTAutograd asks every placeholder for it
            mapping[node]._dynamo_source = node._dynamo_source
    return copied


def example_value(node: Node) -> Any:
    """Return the example value of `node` (such as a FakeTensor, SymInt or tuple), or None."""
    return node.meta.get("example_value")


def example_input(node: Node) -> Any:
    """Return the real object that the user passed for a placeholder.

    The object is known only while the placeholder's graph is being compiled. At other times, return
    None.
    """
    with contextlib.suppress(AttributeError, AssertionError):
        return node.meta.get("grapharg").example  # type: ignore[union-attr]
    return None


def source_name(node: Node) -> str:
    """Return Dynamo's name for a placeholder, such as `L['self'].lm_head.weight`."""
    source = getattr(node.meta.get("grapharg"), "source", None)
    return "" if source is None else plain_source(str(source.name))


def plain_source(path: str) -> str:
    """Return Dynamo's name of an input, without the extra attribute accesses that Dynamo adds for a
    class with `__getattr__`."""
    return re.sub(r"\.__dict__\['(_modules|_parameters|_buffers)'\]", r".\1", path)


def running_modules() -> list[torch.nn.Module]:
    """Return the modules whose forward is running, without wrappers for data parallelism.

    Modules that were compiled with `torch.compile` come first, starting with the innermost.
    The other modules follow, starting with the outermost.
    """
    compiled, others = _calling_modules()
    found = {id(module): module for module in (*compiled, *reversed(others))}
    return list(found.values())


def compiled_module() -> torch.nn.Module | None:
    """Return the innermost running module that was compiled with `torch.compile`, or None.

    A module is running while its `forward` is on the call stack, also while Dynamo captures it.
    """
    compiled, _ = _calling_modules()
    return compiled[0] if compiled else None


def _calling_modules() -> tuple[list[torch.nn.Module], list[torch.nn.Module]]:
    """Return the compiled modules, and the other modules, whose `forward` is running around the
    current call.

    The second list leaves out modules that run inside a compiled module. Each list has the
    innermost module first.
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
                others.clear()  # they are submodules, which its names cover
            (compiled if is_compiled else others).append(module)
        frame = frame.f_back
    return compiled, others


def frame_variables() -> Mapping[str, Any]:
    """Return the local and global variables of the function that Dynamo captures, under the keys
    "L" and "G"."""
    from torch._dynamo import symbolic_convert

    captured = getattr(symbolic_convert.tls, "current_tx", None)
    return {} if captured is None else {"L": captured.f_locals, "G": captured.f_globals}


def capturing_backend() -> Any:
    """Return the backend for which Dynamo captures a graph now, or None if Dynamo captures none."""
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
    """Return a placeholder's name as it is written in user code, such as `lm_head.weight`."""
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
    """Return the positions of those inputs of the graph that an earlier graph partition of DDP
    computes.

    DDP splits a captured graph into partitions. Each cut is at the end of one of DDP's gradient
    buckets. An input that an earlier partition computed is not an input that the user passes.
    """
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    return [
        position
        for position, node in enumerate(placeholders)
        if isinstance(example_value(node), torch.Tensor) and node.meta.get("grapharg") is None
    ]


def notes_between_pieces() -> MutableMapping[torch.Tensor, Any] | None:
    """Return a mapping for information about the tensors that DDP's graph partitions exchange.

    While the backend compiles one partition, it stores in the mapping the information that it needs
    to compile later partitions. The keys are the example values of tensors that one partition
    returns and another takes as input. The mapping has weak references to its keys, and exists only
    until all partitions of the graph are compiled. Return None if the graph is not split.
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
    """Return the id of the current compilation, such as `0/1`, or an empty string."""
    current = CompileContext.current_compile_id()
    return "" if current is None else str(current)


def recompile_reason() -> str:
    """Return Dynamo's reason why it compiles the current function again, or an empty string if
    Dynamo gives none.
    """
    from torch._dynamo.utils import get_metrics_context

    context = get_metrics_context()
    if not context.in_progress():
        return ""
    found = str(context._metrics.get("recompile_reason") or "")
    return "" if found.startswith("Unable to find") else found


def ignore_while_tracing(function: Callable[..., Any]) -> None:
    """Let Dynamo skip calls of a logging function while it traces, instead of breaking the graph at
    each call."""
    from torch._dynamo import config

    ignored: set[Any] = config.ignore_logging_functions
    if function not in ignored:
        ignored.add(_NamedFunction(function))


def substitute_while_tracing(
    function: Callable[..., Any], substitute: Callable[..., Any]
) -> Callable[..., Any]:
    """Let Dynamo trace `substitute` where user code calls `function`; return a copy of
    `function`.

    The substitute may call the copy, which Dynamo traces like any other function.
    """
    original = FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    original.__kwdefaults__ = function.__kwdefaults__
    register: Any = torch.compiler.substitute_in_graph
    register(function, skip_signature_check=True)(substitute)
    return original


def chunks_probability_targets() -> bool:
    """Return whether PyTorch's chunked loss accepts class probabilities, as it does from torch 2.14
    on."""
    adjust: Any = torch.nn.LinearCrossEntropyOptions._adjust
    return "prob_target" in inspect.signature(adjust).parameters


class _NamedFunction(str):
    """The name of a function as a string that compares equal to the function object.

    Dynamo writes its list of ignored functions to its logs as JSON. Up to torch 2.12, a function
    object in this list makes the log entry of every compilation fail.
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
    """Write `text()` into PyTorch's structured trace; call this function only if TORCH_TRACE is
    set."""
    tracing: Any = torch._logging
    tracing.trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": "json"},
        payload_fn=text,
        expect_trace_id=False,
    )


def add_buffer(gm: GraphModule, name: str, tensor: torch.Tensor) -> None:
    """Add a buffer to the graph, together with a Dynamo source, which AOTAutograd needs for each
    buffer."""
    from torch._dynamo.source import ConstantSource

    gm.register_buffer(name, tensor, persistent=False)
    sources: Any = getattr(gm, "_param_name_to_source", {})
    sources[name] = ConstantSource(f"memeff_{name}")


def remove_buffer(gm: GraphModule, name: str) -> None:
    """Remove a buffer that `add_buffer` added."""
    delattr(gm, name)
    sources: Any = getattr(gm, "_param_name_to_source", {})
    sources.pop(name, None)


def guard_by_attribute(nodes: Iterable[Node], name: str) -> None:
    """For each of the inputs `nodes`, replace all guards on the input by a single guard.

    The new guard requires that the input's integer attribute `name` has the same value as at
    compilation.

    For a tensor subclass, Dynamo would guard each inner tensor, and each of these guards calls
    Python code. Pass all inputs in one call of this function. Each call goes through all guards of
    the graph, and a deep model's graph has thousands of them.
    """
    from torch._dynamo.guards import GuardBuilder
    from torch._dynamo.source import AttrSource

    context = TracingContext.try_get()
    found = (getattr(node.meta.get("grapharg"), "source", None) for node in nodes)
    sources = [source for source in found if source is not None]
    if context is None or not sources:
        return
    guards, whole = context.guards_context.dynamo_guards, set(sources)
    guards.inner = type(guards.inner)(g for g in guards.inner if not _is_part(g, whole))
    guards.remove_guards_with_source(sources[0])  # none is left; torch builds its index again
    for source in sources:
        guards.add(AttrSource(source, name).make_guard(GuardBuilder.EQUALS_MATCH))


def _is_part(guard: Any, whole: Collection[Any]) -> bool:
    source = guard.originating_source
    while source not in whole and hasattr(source, "base"):
        source = source.base
    return source in whole


def feeds_resumed_code(gm: GraphModule) -> bool:
    """Return whether a graph break follows `gm`, so that code after the break reads the graph's
    outputs.

    Dynamo gives such a graph the attribute `compile_subgraph_reason`. DDP's graph partitions have
    this attribute too, but their outputs go to other partitions or to the user.
    """
    why = getattr(gm, "compile_subgraph_reason", None)
    return why is not None and "DDPOptimizer" not in str(why.reason) and bool(why.graph_break)


def cut_inside(gm: GraphModule) -> str:
    """Return the name of the function in which the graph `gm` ended with a graph break, or ""."""
    why = getattr(gm, "compile_subgraph_reason", None)
    frames = getattr(why, "user_stack", None) or []
    return str(frames[-1].name) if feeds_resumed_code(gm) and frames else ""


def is_cut_in(gm: GraphModule, file: str) -> bool:
    """Return whether the graph break that ended `gm` is in the code of the given file, or in code
    that this file's code called.
    """
    frames = getattr(getattr(gm, "compile_subgraph_reason", None), "user_stack", None) or []
    return feeds_resumed_code(gm) and any(frame.filename.endswith(file) for frame in frames)


def forward_hooks(module: torch.nn.Module) -> list[Callable[..., Any]]:
    """Return the hooks that run before and after a module's forward pass."""
    return [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]


@contextlib.contextmanager
def fresh_capture() -> Iterator[None]:
    """Isolate captures in this context from other compilations of the process.

    Inside this context, graphs of other compilations do not count for Dynamo's recompilation limit.
    After the context, Dynamo also forgets the sizes that it saw inside; otherwise, a size that
    differs in the next compilation would become dynamic.
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
    """Let Dynamo try again to compile functions that it skipped because their capture raised an
    exception."""
    from torch._C._dynamo.eval_frame import reset_code

    for function in functions:
        if hasattr(function, "__code__"):
            reset_code(function.__code__)


def keep_address(tensor: torch.Tensor) -> None:
    """Tell Dynamo that a tensor keeps its address, so that CUDA graphs need not copy it.

    While Dynamo traces, this function has no effect.
    """
    if not torch.compiler.is_compiling():
        torch._dynamo.mark_static_address(tensor)


def names_around() -> dict[str, Any]:
    """Return the variables of the function two levels up the call stack, by name.

    If f calls g, and g calls `names_around`, the result has the variables of f.
    """
    return sys._getframe(2).f_locals


def mark_varying(tensor: torch.Tensor, dim: int) -> None:
    """Tell Dynamo that the size of a dimension differs between calls; unlike `mark_dynamic`, this
    function lets traced code specialize on the size."""
    torch._dynamo.maybe_mark_dynamic(tensor, dim)


def functions_over_limit() -> int:
    """Return how many times Dynamo gave a function up in this process, because its number of graphs
    had reached the limit. If a later call of such a function needs another graph, PyTorch runs the
    call without compilation.
    """
    from torch._dynamo.utils import counters

    counts = (counts for counts in list(counters.values()))
    return sum(
        number
        for messages in counts
        for message, number in list(messages.items())
        if re.match(r"Dynamo (recompile|cache) limit exceeded", str(message))
    )


def room_for_graphs(limit: int = 64, *, shared: bool = False) -> dict[str, Any]:
    """Return arguments of torch.compile that give a model a larger limit on the number of graphs.

    Dynamo counts graphs per code object, and transformers wraps the forward of every model in the
    same decorator. So the graphs of all models count towards one limit, and models of one class use
    the same graphs. With `shared`, this stays so. Otherwise the model has its own graphs, and only
    these graphs count towards its limit. Before torch 2.13, torch.compile has no argument that sets
    a limit for a single model. This function then returns no arguments, and increases the limit of
    all models instead.
    """
    from torch._dynamo import config

    wanted = {"recompile_limit": limit, "isolate_recompiles": True}
    if wanted.keys() <= inspect.signature(torch.compile).parameters.keys():
        return {"recompile_limit": limit} if shared else wanted
    config.recompile_limit = max(config.recompile_limit, 64)
    return {}
