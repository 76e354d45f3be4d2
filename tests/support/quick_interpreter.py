"""Triton's interpreter without what it does again and again."""

from __future__ import annotations

import functools
from typing import Any


def do_once() -> None:
    """Keep the interpreter from preparing the language for each call of a device function.

    It replaces all builtins where a kernel is launched, and looks for what is left to replace
    wherever that kernel calls a function: a quarter of its time. A tenth goes into the table of
    NumPy's types, made for each value.
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
