"""The private torch names this package leans on, each behind one function.

One file to mend per torch release: ``tests/backend/test_compat.py`` probes every name here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

Compiled = Callable[..., Sequence[Any]]


def example_value(node: Node) -> Any:
    """Return what Dynamo recorded for ``node`` (a FakeTensor, SymInt, tuple, ...), or None."""
    return node.meta.get("example_value")


def example_input(node: Node) -> Any:
    """Return the real object behind a placeholder while its graph compiles, or None."""
    graph_arg = node.meta.get("grapharg")
    if graph_arg is None:
        return None
    try:
        return graph_arg.example
    except (AttributeError, AssertionError):
        return None


def source_name(node: Node) -> str:
    """Return Dynamo's name for a placeholder, such as ``L['self'].lm_head.weight``."""
    graph_arg = node.meta.get("grapharg")
    source = getattr(graph_arg, "source", None)
    if source is None:
        return ""
    name = source.name  # a property today, a method before torch 2.11
    return str(name() if callable(name) else name)


def compile_id() -> str:
    """Return the id of the compile in progress, such as ``0/1``, or an empty string."""
    from torch._guards import CompileContext

    current = CompileContext.current_compile_id()
    return "" if current is None else str(current)


def is_exporting() -> bool:
    """Return whether torch.export drives the capture."""
    return bool(torch.compiler.is_exporting())


def statically_true(condition: Any) -> bool:
    """Return whether ``condition`` holds for every size, without adding a guard."""
    if isinstance(condition, bool):
        return condition
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return bool(statically_known_true(condition))


def mode_options(mode: str) -> dict[str, Any]:
    """Expand an Inductor mode name into its config keys."""
    from torch._inductor import list_mode_options

    expanded: dict[str, Any] = list_mode_options(mode, dynamic=None)
    return expanded


def inductor_uses_cudagraphs(patches: Mapping[str, Any]) -> bool:
    """Return whether Inductor will replay CUDA graphs under ``patches``."""
    if "triton.cudagraphs" in patches:
        return bool(patches["triton.cudagraphs"])
    from torch._inductor import config

    return bool(config.triton.cudagraphs)


def compile_with_inductor(
    gm: GraphModule, example_inputs: Sequence[Any], patches: Mapping[str, Any]
) -> Compiled:
    """Hand the graph to Inductor; ``patches`` also hold for the backward it compiles later."""
    from torch._inductor.compile_fx import compile_fx

    compiled: Compiled = compile_fx(gm, example_inputs, config_patches=dict(patches))
    return compiled


def compile_with_aot_eager(gm: GraphModule, example_inputs: Sequence[Any]) -> Compiled:
    """Hand the graph to AOTAutograd and run the result op by op."""
    from torch._dynamo.backends.debugging import aot_eager

    compiled: Compiled = aot_eager(gm, example_inputs)
    return compiled


def trace_one(function: Callable[..., Any], operands: Sequence[Any]) -> torch.fx.Graph:
    """Trace ``function`` on fake operands before dispatch, composite ops kept whole."""
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(function, pre_dispatch=True)(*operands).graph


def is_fake(value: Any) -> bool:
    """Return whether ``value`` is a plain fake tensor: not a fake wrapper subclass."""
    from torch._subclasses.fake_tensor import FakeTensor

    return type(value) is FakeTensor


def fake_mode_of(value: Any) -> Any:
    """Return the fake mode ``value`` belongs to, or None."""
    return getattr(value, "fake_mode", None)


def storage_key(value: torch.Tensor) -> int:
    """Return a key equal for fake tensors that share memory."""
    return int(value.untyped_storage()._cdata)


def is_fsdp_managed(parameter: Any) -> bool:
    """Return whether FSDP owns ``parameter`` and may free it after forward."""
    if not isinstance(parameter, torch.Tensor):
        return False
    import sys

    if "torch.distributed.fsdp" not in sys.modules:
        return False
    return any(
        name.startswith(("_fsdp", "fsdp")) for name in getattr(parameter, "__dict__", ())
    ) or parameter in _fsdp_unsharded_parameters()


def _fsdp_unsharded_parameters() -> _IdentitySet:
    """Collect the unsharded parameters of every live FSDP2 group."""
    found = _IdentitySet()
    try:
        from torch.distributed._composable_state import _module_state_mapping
        from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
    except ImportError:
        return found
    for module in list(_module_state_mapping):
        states = _module_state_mapping.get(module)
        state = states() if callable(states) else states
        candidates = state.values() if isinstance(state, dict) else (state,)
        for candidate in candidates:
            group = getattr(candidate, "_fsdp_param_group", None)
            if not isinstance(candidate, FSDPState) or group is None:
                continue
            for fsdp_param in group.fsdp_params:
                unsharded = getattr(fsdp_param, "_unsharded_param", None)
                if unsharded is not None:
                    found.add(unsharded)
    return found


class _IdentitySet:
    """Tensors by identity: comparing them by value would run a kernel."""

    def __init__(self) -> None:
        self._items: dict[int, Any] = {}

    def add(self, item: Any) -> None:
        self._items[id(item)] = item

    def __contains__(self, item: Any) -> bool:
        return id(item) in self._items
