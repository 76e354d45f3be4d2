"""Print a captured graph as text that is the same on every supported torch version.

In this text:

- inputs have the names that they have in the user's model;
- operations have the names of their canonical ATen calls;
- sizes are named s0, s1 and so on, in order of appearance.

The text contains no file paths and no generated names. Tests compare this text with stored text.
"""

from __future__ import annotations

import re
from functools import reduce
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ... import compat
from ...compat import HigherOrderOperator, OpOverload
from .canonical import PREVIOUS, Call, arguments_of, read
from .module_names import clean_module_path

_DTYPES = {
    **{torch.float32: "f32", torch.float64: "f64", torch.float16: "f16", torch.bfloat16: "bf16"},
    **{torch.int64: "i64", torch.int32: "i32", torch.int8: "i8", torch.uint8: "u8"},
    torch.bool: "b8",
}


def render(gm: GraphModule) -> str:
    """Return the text of `gm`; nested graphs follow, indented, under their names."""
    return "\n".join(_Renderer(gm).lines())


class _Renderer:
    def __init__(
        self, gm: GraphModule, indent: str = "", symbols: dict[str, str] | None = None
    ) -> None:
        self.gm, self.indent = gm, indent
        self.names: dict[Node, str] = {}
        self.taken: set[str] = set()  # names of inputs
        self.symbols = {} if symbols is None else symbols
        self.formulas: dict[str, str] = {}  # formulas of sizes, and their names here

    def lines(self) -> list[str]:
        """Return one line of text per node."""
        inputs, body, count = [], [], 0
        for node in self.gm.graph.nodes:
            if node.op == "placeholder":
                self.names[node] = self._placeholder_name(node)
                self.taken.add(self.names[node])
                inputs.append(f"{self.names[node]}: {self._role(node)}{self._type(node)}")
            elif node.op == "get_attr":
                self.names[node] = str(node.target)
            elif node.op == "output":
                body.append(f"return {self._value(node.args[0])}")
            else:
                self.names[node] = f"%{count}"
                count += 1
                reading = read(node)
                said = self._unread(node) if reading is None else reduce(self._call, reading, "")
                kept = "  # kept for the backward" if compat.is_kept(node) else ""
                body.append(f"{self.names[node]}: {self._type(node)} = {said}{kept}")
        text = [f"{self.indent}graph("]
        text += [f"{self.indent}    {line}," for line in inputs]
        text += [f"{self.indent}):"]
        text += [f"{self.indent}    {line}" for line in body]
        for name, child in self.gm.named_children():
            if isinstance(child, GraphModule):
                text.append(f"{self.indent}  {name}:")
                text += _Renderer(child, self.indent + "    ", self.symbols).lines()
        return text

    def _placeholder_name(self, node: Node) -> str:
        source = compat.source_name(node)
        path = clean_module_path(source)
        for noise in ("_modules.", "_parameters.", "_buffers."):
            path = path.replace(noise, "")
        match = re.fullmatch(r"[LG]\['([^']*)'\]", source)
        name = match.group(1) if match else path
        name = name or re.sub(r"^[lsL]_+|_+$", "", str(node.target))
        if name in self.taken:
            name = f"{name}_{sum(t.split('#')[0] == name for t in self.taken)}"
        if isinstance(compat.example_value(node), torch.SymInt):
            return self._symbolic(str(compat.example_value(node)))
        return name

    def _role(self, node: Node) -> str:
        if isinstance(compat.example_input(node), torch.nn.Parameter):
            return "param "
        return "buffer " if "_buffers[" in compat.source_name(node) else "input "

    def _type(self, node: Node) -> str:
        return self._type_of(compat.example_value(node))

    def _type_of(self, value: Any) -> str:
        if isinstance(value, torch.Tensor):
            sizes = ", ".join(
                str(s) if isinstance(s, int) else self._symbolic(str(s)) for s in value.shape
            )
            return f"{_DTYPES.get(value.dtype, str(value.dtype).removeprefix('torch.'))}[{sizes}]"
        if isinstance(value, (tuple, list)):
            return f"({', '.join(self._type_of(v) for v in value)})"
        if isinstance(value, (torch.SymInt, int)) and not isinstance(value, bool):
            return "size"
        return "none" if value is None else type(value).__name__

    def _symbolic(self, text: str) -> str:
        def rename(match: re.Match[str]) -> str:
            return self.symbols.setdefault(match.group(0), f"s{len(self.symbols)}")

        if text not in self.formulas:
            self.formulas[text] = re.sub(r"\b[suz]+\d+\b", rename, text)
        return self.formulas[text]

    def _call(self, previous: str, call: Call) -> str:
        parts, is_bare = [], True
        for argument in arguments_of(call.op):
            value = call.args[argument.name]
            if argument.has_default and _same(value, argument.default):
                is_bare = False  # the arguments after this one are named
                continue
            text = previous if value is PREVIOUS else self._value(value)
            is_named = argument.is_named or not is_bare
            parts.append(f"{argument.name}={text}" if is_named else text)
        namespace, _, name = compat.schema(call.op).name.partition("::")
        return f"{namespace}.{name}({', '.join(parts)})"

    def _unread(self, node: Node) -> str:
        target = node.target
        if isinstance(target, (OpOverload, HigherOrderOperator)):
            name = str(target.name()).replace("::", ".")  # type: ignore[no-untyped-call]
        else:
            name = target if isinstance(target, str) else getattr(target, "__name__", "call")
        parts = [self._value(a) for a in node.args]
        parts += [f"{k}={self._value(v)}" for k, v in sorted(node.kwargs.items())]
        return f"{name}({', '.join(parts)})"

    def _value(self, value: Any) -> str:
        if isinstance(value, Node):
            return self.names.get(value, value.name)
        if isinstance(value, (tuple, list)):
            inner = ", ".join(self._value(v) for v in value)
            return f"[{inner}]" if isinstance(value, list) else f"({inner})"
        if isinstance(value, torch.dtype):
            return _DTYPES.get(value, str(value).removeprefix("torch."))
        if isinstance(value, slice):
            step = "" if value.step is None else f":{value.step}"
            return f"{_bound(value.start)}:{_bound(value.stop)}{step}"
        if isinstance(value, (torch.SymInt, torch.SymFloat)):
            return self._symbolic(str(value))
        return repr(value)


def _bound(value: Any) -> str:
    return "" if value is None else str(value)


def _same(value: Any, default: Any) -> bool:
    return type(value) is type(default) and value == default
