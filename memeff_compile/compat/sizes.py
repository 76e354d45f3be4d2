"""Compare and read sizes and numbers that may be symbols while a graph is compiled."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from .dynamo import example_value, source_name


def statically_true(condition: Any) -> bool:
    """Return whether `condition` holds for every possible size, without adding a guard."""
    if isinstance(condition, bool):
        return condition
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return bool(statically_known_true(condition))


def holds(condition: Any) -> bool:
    """Return whether `condition` on sizes holds for the current sizes, and add a guard for the
    answer.

    If the answer changes in a later call, Dynamo compiles the graph again. If a condition depends
    on data, the function returns False.
    """
    if isinstance(condition, bool):
        return condition
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    return not free_unbacked_symbols(condition) and bool(condition)


def known_number(value: Any) -> int | float | None:
    """Return a number unchanged; for a graph node whose value is a symbol, return the symbol's
    value in the call for which the graph is compiled.

    The function adds no guard. A node's value may be a symbol, because with `dynamic=True` Dynamo
    turns numbers of a config into symbols. If the symbol is a tensor's size, the function returns
    None.
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


def known_size(size: Any) -> int | None:
    """Return a size if it is the same number in every call, otherwise None, without adding a
    guard."""
    if isinstance(size, int):
        return size
    known = size.node.maybe_as_int()
    return None if known is None else int(known)


def hold_constant(value: Any) -> None:
    """Add a guard on the current value of a symbolic number, so that another value makes Dynamo
    compile the graph again.

    `value` is the number's graph node. If `value` is not such a node, the function does nothing.
    """
    symbol = example_value(value) if isinstance(value, Node) else None
    if isinstance(symbol, torch.SymInt):
        int(symbol)
    elif isinstance(symbol, torch.SymFloat):
        float(symbol)


def symbols_of(value: Any) -> set[str]:
    """Return the names of the symbols in the sizes and strides of a value."""
    from torch.fx.experimental.symbolic_shapes import free_symbols

    if isinstance(value, (tuple, list)):
        return set[str]().union(*map(symbols_of, value))
    if not isinstance(value, (torch.Tensor, torch.SymInt)):
        return set()
    return {symbol.name for symbol in free_symbols(value)}


def size_hint(size: Any) -> int:
    """Return an example number for a size, without adding a guard: for a symbol, its hint, or 0 if
    the symbol has no hint.
    """
    if isinstance(size, int):
        return size
    hint = getattr(getattr(size, "node", None), "hint", None)
    return int(hint) if isinstance(hint, int) else 0


def size_formula(size: Any) -> Any:
    """Return a size as a sympy formula over Dynamo's symbols, without adding a guard."""
    import sympy

    return sympy.Integer(size) if isinstance(size, int) else size.node.expr
