"""Inspect and undo the effect of torch.compile on a module or function."""

from __future__ import annotations

import contextlib
import os
import sys
import types
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import torch


def is_compiled_in_place(module: torch.nn.Module) -> bool:
    """Return whether `module.compile()` was called."""
    return module._compiled_call_impl is not None


def is_compiled_by_itself(module: torch.nn.Module) -> bool:
    """Return whether the call of this module was compiled or replaced; a compiled parent module
    does not count.
    """
    return module._compiled_call_impl is not None or "forward" in vars(module)


def without_compile(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module that a `torch.compile` wrapper wraps, or the module itself."""
    inner = module.__dict__.get("_modules", {}).get("_orig_mod")
    return module if inner is None else inner


def compile_in_place(module: torch.nn.Module, given: Mapping[str, Any]) -> None:
    """Compile a module in place with the given arguments of torch.compile.

    `Module.compile` has no effect on PyTorch's own modules, such as an nn.Sequential, because
    Dynamo skips code in PyTorch's files. For these modules, this function compiles a function
    around the module's call; Dynamo does not skip this function. If `module` is a wrapper that
    `torch.compile(module)` returned, this function makes the wrapper call the wrapped module
    directly. The wrapper would otherwise bypass the compilation in place.
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


def compile_once(
    module: torch.nn.Module,
    given: Mapping[str, Any],
    is_idle: Callable[[torch.nn.Module], bool],
) -> None:
    """Compile a module in place, starting with the first call at which `is_idle` returns True.

    A checkpoint runs a module twice and requires that both runs save the same tensors. So a module
    must not be compiled between the two runs.
    """
    original, owner, is_on = module._call_impl, weakref.ref(module), False
    compiled: Any = torch.compile(original, **given)
    is_idle = torch._dynamo.disable(is_idle)  # it reads PyTorch's tables, which Dynamo would trace

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal is_on
        is_on = is_on or is_idle(cast("torch.nn.Module", owner()))
        return (compiled if is_on else original)(*args, **kwargs)

    around: Any = torch._dynamo.disable(call, recursive=False)
    around.__wrapped__ = compiled
    module._compiled_call_impl = around


def compile_between_hooks(
    module: torch.nn.Module,
    given: Mapping[str, Any],
    before: Callable[[torch.nn.Module], None],
) -> None:
    """Compile a module's `forward` in place, so that its hooks run outside of the graph.

    `before` is called before each call, with the module as argument.
    """
    from torch._dynamo import external_utils

    original = module.forward
    compiled: Any = torch.compile(external_utils.wrap_inline(original), **given)
    owner = weakref.ref(module)
    before = torch._dynamo.disable(before)  # it reads PyTorch's tables, which Dynamo would trace

    def forward(*args: Any, **kwargs: Any) -> Any:
        before(cast("torch.nn.Module", owner()))
        return compiled(*args, **kwargs)

    around: Any = torch._dynamo.disable(forward, recursive=False)
    around.__wrapped__, around._torchdynamo_orig_callable = compiled, original
    module.forward = around


def backend_of(call: object) -> tuple[str, Mapping[str, Any]] | None:
    """Return the name and options of the backend for which a function was compiled.

    The function must be the result of torch.compile, or the compiled call of a module that was
    compiled in place. For any other function, return None.
    """
    seen: list[object] = []  # wrappers may refer to each other
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
    """Return the backend that an `OptimizeContext` of Dynamo contains.

    Return None for any other object. The backend has a name and options.
    """
    from torch._dynamo.eval_frame import OptimizeContext

    backend: Any = held.callback if isinstance(held, OptimizeContext) else None
    while hasattr(backend, "_torchdynamo_orig_backend"):
        backend = backend._torchdynamo_orig_backend
    return backend


def undo_compile(module: torch.nn.Module, name: str) -> str:
    """Undo the compilation of one module with the backend `name`.

    Return a text for the user, such as "no longer compiled". Return "" if the module was not
    compiled with this backend. A wrapper that `torch.compile(module)` returned remains usable, and
    runs the module uncompiled.
    """
    from torch._dynamo.eval_frame import OptimizedModule

    def is_its(call: object) -> bool:
        found = backend_of(call)
        return found is not None and found[0] == name

    if isinstance(module, OptimizedModule):
        if not is_its(module.forward):
            return ""
        module.forward = module._orig_mod.__call__
        return "the wrapper that torch.compile returned runs the module itself"
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
    """Return the module that a `torch.compile` wrapper wraps, None for any other module."""
    from torch._dynamo.eval_frame import OptimizedModule

    return module._orig_mod if isinstance(module, OptimizedModule) else None


def compiling_is_off() -> bool:
    """Return whether an environment variable, the config or the stance of PyTorch switches
    compilation off."""
    if os.environ.get("TORCHDYNAMO_DISABLE") == "1":
        return True
    if "torch._dynamo.eval_frame" not in sys.modules:  # then no config or stance was set
        return os.environ.get("TORCH_COMPILE_DISABLE") == "1"
    from torch._dynamo import config, eval_frame

    return bool(config.disable) or eval_frame._stance.stance == "force_eager"


def wrap_compiled(module: torch.nn.Module, wrap: Callable[[Any], Any]) -> None:
    """Replace `call`, the compiled call of a module that was compiled in place, with
    `wrap(call)`."""
    module = without_compile(module)
    around = wrap(module._compiled_call_impl)
    around.__wrapped__ = module._compiled_call_impl
    module._compiled_call_impl = around


def users_line() -> str:
    """Return the innermost running line of the user's code, such as "train.py:12", or ""."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_USERS):
        frame = frame.f_back
    return "" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


_NOT_USERS = (
    *(str(Path(f).parent) + os.sep for f in (Path(__file__).parent, torch.__file__)),
    str(Path(contextlib.__file__)),
    "<",
)
