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
    leave_alike_operands_alone()


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


def leave_alike_operands_alone() -> None:
    """Keep the language from asking how to make operands alike that are alike: a third of the time.

    Two tensors of one of these types, which no rule converts, stay as they are, and a small number
    gets the type of its tensor. Shapes are compared by identity, as `remember_shapes` makes each
    once.
    """
    import triton.language as tl
    from triton.language import semantic as given

    core: Any = tl.core
    semantic: Any = getattr(given, "TritonSemantic", None)
    if semantic is None:
        return
    find, broadcast = semantic.binary_op_type_checking_impl, semantic.broadcast_impl_value
    tensor, types = core.tensor, (core.int32, core.int64, core.float32, core.float64)
    unchanged = {id(each) for each in types}  # pointers have no hash

    def takes(left: Any, number: Any) -> bool:
        if type(left) is not tensor or id(left.dtype) not in unchanged:
            return False
        is_small = type(number) is int and -(2**31) <= number < 2**31
        return is_small or (type(number) is float and left.dtype.is_floating())

    def broadcast_unlike(self: Any, left: Any, right: Any) -> Any:
        if left.shape is right.shape and type(left) is type(right) is tensor:
            return left, right
        return broadcast(self, left, right)

    def find_unlike(self: Any, left: Any, right: Any, *more: Any, **named: Any) -> Any:
        if type(left) is type(right) is tensor and left.dtype is right.dtype:
            if id(left.dtype) in unchanged:
                return broadcast_unlike(self, left, right)
        elif takes(left, right):
            return broadcast_unlike(self, left, self.scalar_constant(right, dtype=left.dtype))
        elif takes(right, left):
            return broadcast_unlike(self, self.scalar_constant(left, dtype=right.dtype), right)
        return find(self, left, right, *more, **named)

    semantic.broadcast_impl_value = broadcast_unlike
    semantic.binary_op_type_checking_impl = find_unlike
