"""Triton's interpreter without repeated work."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any


def do_once() -> None:
    """Keep the interpreter from preparing the language for each call of a device function.

    It replaces all builtins when a kernel is launched, and looks for further ones whenever that
    kernel calls a function: a quarter of its time. A tenth goes into the table of NumPy's types,
    made for each value.
    """
    import triton.language as tl
    from triton.runtime import interpreter as given

    interpreter: Any = given
    prepare, find = interpreter._patch_lang, interpreter._get_np_dtype
    find_once = functools.cache(find)

    def prepare_once(function: Any) -> Any:
        seen = [each for each in function.__globals__.values() if each is tl or each is tl.core]
        if any(tl.core.is_builtin(each.load) for each in seen):
            return prepare(function)
        return interpreter._LangPatchScope()

    def number_type(of: Any) -> Any:
        return find(of) if of.scalar.is_ptr() else find_once(of.scalar)

    if hasattr(interpreter, "_LangPatchScope"):
        interpreter._patch_lang = prepare_once
        interpreter._get_np_dtype = number_type
    look_for_no_overflow(interpreter)
    remember_shapes()


def look_for_no_overflow(interpreter: Any) -> None:
    """Keep it from computing each sum of integers twice: a third of its time.

    It looks for an overflow that it would report while debugging, and it never debugs.
    """
    builder = getattr(interpreter, "interpreter_builder", None)
    options = getattr(builder, "options", None)
    if getattr(options, "sanitize_overflow", False) and not options.debug:
        builder.options = dataclasses.replace(options, sanitize_overflow=False)


def remember_shapes() -> None:
    """Compute the language's properties of a shape once, not for each value: a quarter of the
    time.
    """
    import triton.language as tl

    core: Any = tl.core
    begin_block, begin_tensor = core.block_type.__init__, core.tensor.__init__
    known: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def begin_block_once(self: Any, element_ty: Any, shape: Any) -> None:
        key = tuple(shape)
        if key in known and isinstance(shape, list | core.tuple):
            self.element_ty, self.name = element_ty, f"<{key}, {element_ty}>"
            self.shape, self.numel = known[key]
            return
        begin_block(self, element_ty, shape)
        if all(type(size) is int for size in key):
            known[key] = self.shape, self.numel

    @functools.cache
    def sizes_of(shape: tuple[int, ...]) -> tuple[Any, Any]:
        made = core.tensor(None, core.block_type(core.int32, [*shape]) if shape else core.int32)
        return made.shape, made.numel

    def begin_tensor_once(self: Any, handle: Any, type: Any) -> None:
        if handle is None:
            begin_tensor(self, handle, type)
            return
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = sizes_of(tuple(type.shape) if type.is_block() else ())

    core.block_type.__init__ = begin_block_once
    core.tensor.__init__ = begin_tensor_once
