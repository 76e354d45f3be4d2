"""Private names of AOTAutograd, Inductor and CUDA graphs, with which this package compiles a graph,
saves it and records it as a CUDA graph."""

from __future__ import annotations

import contextlib
import contextvars
import copy
import functools
import hashlib
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch._guards import TracingContext, tracing
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.fx import GraphModule, Node
from torch.utils import checkpoint

from .dynamo import example_value

Compiled = Callable[..., Sequence[Any]]
# Returns the index of the GPU that is current.
current_gpu: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)


def recompute_in_backward(node: Node) -> None:
    """Make AOTAutograd's partitioner save a call's inputs instead of its result, and recompute the
    call in the backward pass.
    """
    node.meta["recompute"] = checkpoint.CheckpointPolicy.MUST_RECOMPUTE
    node.meta.setdefault("ac_graph_id", 0)


def inductor_modes() -> dict[str, dict[str, Any]]:
    """Return, for each mode of torch.compile, the Inductor config keys that the mode sets."""
    from torch._inductor import list_mode_options

    return cast("dict[str, dict[str, Any]]", list_mode_options())


def inductor_config() -> tuple[dict[str, Any], Callable[[str], Any]]:
    """Return Inductor's current config, and a function that returns the type of a config key."""
    from torch._inductor import config

    return config.get_config_copy(), config.get_type  # type: ignore[attr-defined]


def inductor_uses_cudagraphs(patches: Mapping[str, Any]) -> bool:
    """Return whether Inductor will use CUDA graphs with the config changes `patches`."""
    if "triton.cudagraphs" in patches:
        return bool(patches["triton.cudagraphs"])
    from torch._inductor import config

    return bool(config.triton.cudagraphs)


def start_compile_workers() -> None:
    """Start the processes in which Inductor compiles GPU kernels, as Inductor's own backend does.

    Compiler processes take seconds to start. Until these processes run, Inductor compiles kernels
    one after another.
    """
    from torch._inductor import async_compile

    async_compile.maybe_warm_pool()


def compile_with_inductor(
    gm: GraphModule, example_inputs: Sequence[Any], patches: Mapping[str, Any], tag: str = ""
) -> Compiled:
    """Compile the graph with Inductor, with the changes `patches` of Inductor's config.

    The changes also apply to the backward graph, which Inductor compiles later.

    Inductor's on-disk caches identify an op of this package only by its name, but the op may change
    between versions. So this function adds the schemas of the ops to the key of each cache entry.
    The string `tag` is also part of the key. `tag` describes all other facts that affect the
    compiled ops but are not in the graph.
    """
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx

    # A setting of Inductor, for keys of graphs alone: torch.compiler.config.cache_key_tag would
    # also change the keys of the kernel settings that Inductor measured in the first run.
    name = "unsafe_marked_cacheable_functions"
    given = patches.get(name, getattr(config, name))
    versions = {"memeff_compile": f"{op_fingerprint()}:{tag}", **_operations_to_cache()}
    changed = {**patches, name: {**given, **versions}}
    compiled: Any = compile_fx(gm, example_inputs, config_patches=changed)
    return cast("Compiled", compiled)


def _operations_to_cache() -> dict[str, str]:
    """Return the names and versions of operations that Inductor must be told to cache.

    Unless a setting names these operations, torch 2.11 and 2.12 do not cache graphs with them.

    With activation checkpointing, the backward pass may repeat an operation that draws random
    numbers, such as dropout. On a GPU, AOTAutograd wraps such an operation in
    `graphsafe_run_with_rng_state`. PyTorch also counts its fused attention without dropout as
    random. The state of the random numbers is an argument of the compiled code, so Inductor can
    cache the code. From torch 2.13 on, PyTorch itself marks `graphsafe_run_with_rng_state` as
    cacheable.
    """
    from torch._prims import rng_prims

    wrapper = getattr(rng_prims, "graphsafe_run_with_rng_state", None)
    if wrapper is None or wrapper.cacheable():
        return {}
    return {f"{wrapper.__module__}.{wrapper.__name__}": torch.__version__}


@contextlib.contextmanager
def waits_for_kernels_at_end(patches: Mapping[str, Any], *, trains: bool) -> Iterator[None]:
    """In this context, Inductor compiles several CPU graphs without waiting for the C++ compiler.

    At its end, the context waits for the C++ compiler. Usually Inductor waits for the kernels of a
    graph when it loads the graph's code. In this context, Inductor does not wait, so that several
    graphs compile in parallel. With `trains`, the backward graph also compiles in parallel with the
    forward graph. Do not use this context for GPU graphs: a cached graph contains its Triton
    kernels, which must be compiled before Inductor caches the graph. If an exception occurs, the
    context ends without waiting.
    """
    from torch._functorch import config as functorch_config
    from torch._inductor import config
    from torch._inductor.async_compile import AsyncCompile

    chosen = {**config.get_config_copy(), **patches}
    if chosen["max_autotune"] or chosen["max_autotune_gemm"]:  # runs kernels to choose one
        yield
        return
    wait, here = AsyncCompile.wait, threading.get_ident()
    left: list[tuple[AsyncCompile, dict[str, Any]]] = []

    def wait_later(self: AsyncCompile, scope: dict[str, Any]) -> None:
        if threading.get_ident() == here:
            left.append((self, scope))
        else:
            wait(self, scope)

    lazily = functorch_config.patch(force_non_lazy_backward_lowering=trains)
    with lazily, checks_best_vectors_only(patches):
        AsyncCompile.wait = wait_later  # type: ignore[method-assign]
        try:
            yield
        finally:
            AsyncCompile.wait = wait  # type: ignore[method-assign]
    for each, scope in left:
        wait(each, scope)


@contextlib.contextmanager
def checks_best_vectors_only(patches: Mapping[str, Any]) -> Iterator[None]:
    """In this context, Inductor checks only the best set of vector instructions of an x86 CPU.

    Before Inductor first generates C++, it compiles and loads test programs for each set of vector
    instructions that the CPU has. Inductor tests one set after another, and then uses the best set.
    In this context, Inductor checks the next best set only if the check of the best one failed.
    When the context begins, a thread starts to check the best set. If a setting asks for a certain
    set, this context does not apply: Inductor checks all sets.
    """
    from torch._inductor import cpu_vec_isa

    every = cpu_vec_isa.valid_vec_isa_list
    if not any(key.startswith("cpp.") for key in patches) and _uses_best_vectors(every):
        context = contextvars.copy_context()  # Inductor's config may differ between threads
        threading.Thread(target=context.run, args=(_check_ahead,), daemon=True).start()

    def best_only() -> list[Any]:
        if not _uses_best_vectors(every):
            return every()
        return _best_vectors() or every()

    cpu_vec_isa.valid_vec_isa_list = best_only  # type: ignore[assignment]
    try:
        yield
    finally:
        cpu_vec_isa.valid_vec_isa_list = every


def _uses_best_vectors(every: Any) -> bool:
    from torch._inductor import config

    asks = os.environ.get("ATEN_CPU_CAPABILITY"), config.cpp.simdlen, config.cpp.vec_isa_ok
    are_checked = hasattr(every, "cache_info") and every.cache_info().currsize
    return not any(each is not None for each in asks) and not are_checked


def _best_vectors() -> list[Any]:
    """Return the best set of vector instructions that passes Inductor's check, in a list, or an
    empty list."""
    from torch._inductor import cpu_vec_isa

    with _checking_vectors:
        if not _best_found:
            flags = {*cpu_vec_isa.x86_isa_checker()}
            known = cpu_vec_isa.supported_vec_isa_list
            _best_found.append(
                next((each for each in known if {*str(each).split()} <= flags and each), None)
            )
    return [each for each in _best_found if each is not None]


def _check_ahead() -> None:
    with contextlib.suppress(Exception):  # Inductor's own check raises the exception again
        _best_vectors()


_checking_vectors = threading.Lock()
_best_found: list[Any] = []


def is_to_be_saved() -> bool:
    """Return whether `aot_compile` compiles the graph, in which case the caller may save it."""
    from torch._functorch import config

    return bool(config.bypass_autograd_cache_key)


def has_artifact(compiled: Compiled) -> bool:
    """Return whether AOTAutograd created the given callable.

    Only callables created by AOTAutograd have an artifact that can be saved.
    """
    return getattr(compiled, "serialize", None) is not None


def let_be_saved(kind: type) -> None:
    """Let `aot_compile` accept callables of a class that defines how its objects are saved."""
    from torch._dynamo.aot_compile_types import SerializableCallable

    SerializableCallable.register(kind)


def serialized(compiled: Compiled) -> bytes:
    """Return a compiled callable as bytes, in AOTAutograd's format for saving to disk."""
    from torch._dynamo.aot_compile_types import BundledAOTAutogradSerializableCallable as Bundled

    return Bundled.serialize_compile_artifacts(Bundled(compiled))


def deserialized(artifact: bytes) -> Compiled:
    """Return the compiled callable that `serialized` turned into bytes."""
    from torch._dynamo.aot_compile_types import BundledAOTAutogradSerializableCallable as Bundled

    return cast("Compiled", Bundled.deserialize_compile_artifacts(artifact))


@contextlib.contextmanager
def apart_in_tracing() -> Iterator[None]:
    """Isolate the compilation of one partition of a captured graph from the compilation of its
    other partitions.

    AOTAutograd records facts about a graph, and reads these facts when it compiles the graph's
    backward pass. Inside this context, AOTAutograd cannot by mistake read the facts about another
    partition.
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
    """Make Inductor's generated Python code call `op.direct` instead of the op.

    `op.direct` is the Python function that computes the op, without PyTorch's dispatcher. The
    direct call saves time on the CPU: a call through the dispatcher takes longer than many kernels
    run. An op whose gradient is written in Python passes through the dispatcher twice. C++ code
    that Inductor generates still calls the op.
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


def record_artifact(name: str, content: Mapping[str, Any]) -> None:
    """Add an object to the artifacts that `torch.compiler.save_cache_artifacts` saves.

    The object must be serialisable as JSON. The artifact has one of Inductor's artifact types, so
    that PyTorch can load it in a process that has not imported this package. For an unknown type,
    PyTorch would load no artifact at all.
    """
    from torch._inductor.runtime.autotune_cache import AutotuneCacheArtifact
    from torch.compiler._cache import CacheArtifactManager

    kind = AutotuneCacheArtifact.type()
    CacheArtifactManager.record_artifact(kind, f"{_ARTIFACTS}/{name}.json", dict(content))


def loaded_artifacts() -> dict[str, Callable[[], Any]]:
    """Return the artifacts of this package that `torch.compiler.load_cache_artifacts` has loaded.

    The keys of the dictionary are the names of the artifacts. Each value is a function that reads
    one artifact.
    """
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    def read(path: Path) -> Any:
        return json.loads(path.read_bytes())

    found = (Path(cache_dir()) / _ARTIFACTS).glob("*.json")
    return {path.stem: functools.partial(read, path) for path in found}


_ARTIFACTS = "memeff_compile"


def op_fingerprint() -> str:
    """Return a digest of this package's version and of the schemas of all its ops."""
    version = sys.modules["memeff_compile"].__version__
    names = sorted(n for n in torch._C._dispatch_get_all_op_names() if n.startswith("memeff::"))
    schemas = (str(torch._C._get_schema(*name.partition(".")[::2])) for name in names)
    return hashlib.sha256("\n".join((version, *schemas)).encode()).hexdigest()[:16]


def compile_with_aot_eager(gm: GraphModule, example_inputs: Sequence[Any]) -> Compiled:
    """Compile the graph with AOTAutograd only; the result runs op by op, without Inductor."""
    from torch._dynamo.backends.debugging import aot_eager

    inputs: Any = example_inputs
    return cast("Compiled", aot_eager(gm, inputs))


def empty_bf16(size: tuple[int, ...], strides: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    """Return an empty bf16 tensor on the device of `like`; if this device is a GPU, it must be
    the current GPU.

    The function bypasses the dispatcher, as Inductor's generated code does, because an allocation
    through the dispatcher takes three times as long.
    """
    if like.is_cuda and _empty_on_gpu is not None:
        return cast("torch.Tensor", _empty_on_gpu(size, strides, torch.bfloat16))
    return torch.empty_strided(size, strides, dtype=torch.bfloat16, device=like.device)


_empty_on_gpu = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)


def mark_static_input(node: Node) -> None:
    """Tell AOTAutograd that an input keeps its address, so that CUDA graphs can write to it."""
    node.meta.setdefault("tensor_dict", {})["_dynamo_static_input_type"] = "unguarded"


def is_unsafe_to_record(node: Node) -> bool:
    """Return whether the call `node` must not be recorded in a CUDA graph.

    An unsafe call waits for the device, returns sizes that depend on data, or is control flow. Ops
    of other libraries are unsafe too, because they may do work on the CPU, which a replay would
    skip.
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
    unsafe = {getattr(torch.Tag, name) for name in names}
    is_known = all(op.namespace in ("aten", "prims", "memeff") for op in ops)
    return not is_known or any(unsafe & set(op.tags) for op in ops)


@contextlib.contextmanager
def capturing_alone() -> Iterator[None]:
    """Let only one CUDA graph be recorded at a time, because a recording affects the whole
    process."""
    from torch._inductor import cudagraph_trees

    lock = getattr(cudagraph_trees, "graph_capture_lock", None)  # since torch 2.13
    with _capture_lock if lock is None else lock:
        yield


_capture_lock = threading.Lock()


def forget_workspaces() -> None:
    """Free the workspaces of cuBLAS, so that cuBLAS allocates new workspaces.

    The workspaces of a recorded CUDA graph must lie in the graph's memory pool. Memory outside of
    the pool may be freed while the graph still uses it.
    """
    torch._C._cuda_clearCublasWorkspaces()


def leave_pool(pool: Any) -> None:
    """Make the allocator use its usual memory pool again after the recording of a CUDA graph
    failed.

    `pool` is the memory pool in which the recording allocated memory.
    """
    with contextlib.suppress(RuntimeError):
        torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)


def multiplies_bf16() -> bool:
    """Return whether the CPU's matrix library has bfloat16 instructions for matrix products."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def tracing_again() -> Callable[[], Any]:
    """Return a function that creates a context; code that compiles in this context uses the
    compilation settings of the time when `tracing_again` was called."""
    return functools.partial(tracing, TracingContext.try_get())


def inductor_graphs(gm: GraphModule, example_inputs: Sequence[Any]) -> list[GraphModule]:
    """Return the graphs that AOTAutograd would pass to Inductor for `gm`, the forward graph
    first."""
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
