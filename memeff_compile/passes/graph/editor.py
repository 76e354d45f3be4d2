"""The editor through which passes change graphs; it keeps metadata, checks edits and can undo them.

New nodes are calls of op overloads with `example_value`, `stack_trace` and `nn_module_stack`.
AOTAutograd's cache rejects graphs without `example_value`. Reports read the line of user code and
the module path of a node from `stack_trace` and `nn_module_stack`.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial, reduce
from typing import Any

import sympy
import torch
from torch.fx import Graph, Node

from ... import compat
from ...compat import OpOverload
from .graph_info import GraphInfo, Region, same_shape


class EditRefused(Exception):
    """The error for an edit that would change a property (such as the dtype) of a value.

    A match is a group of nodes that a pass rewrites. After such an edit, nodes outside of the
    match, or the code that calls the graph, could see the changed property. The error is also
    raised for an edit that the editor cannot make. For example, the edit may need a size that the
    editor cannot compute from the graph's nodes. In all cases, the edits of the current match are
    undone.
    """


class Editor:
    """The edits of one match (a group of nodes that a pass rewrites) in one graph."""

    def __init__(self, info: GraphInfo) -> None:
        self.info = info
        self._undo: list[
            Callable[[], object]
        ] = []  # one function per edit that undoes it, in order
        self._touched: dict[Node, None] = {}  # nodes that are new or were given other operands
        self._outer: Editor | None = None
        self._at: tuple[Node, Node, Region] | None = None

    @property
    def graph(self) -> Graph:
        """Return the graph that the editor changes."""
        return self.info.gm.graph

    @contextlib.contextmanager
    def at(
        self, node: Node, *, like: Node | None = None, region: Region | None = None
    ) -> Iterator[None]:
        """Make later calls of this editor insert their nodes before `node`, with the source line
        and the module path of `like`.

        `region` is the autograd and autocast state of the inserted nodes, by default that of
        `node`. Pass `region` if `node` itself changes this state, for example by disabling
        gradients.
        """
        before, self._at = self._at, (node, like or node, region or self.info.regions[node])
        try:
            yield
        finally:
            self._at = before

    def call(self, op: OpOverload | Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        """Insert a call, and compute its example value under the autograd and autocast state of its
        position."""
        with self._inserting():
            node = self._adopted(self.graph.call_function(op, args, kwargs))
        node.meta["example_value"] = self._evaluate(node, args, kwargs)
        return node

    def cast(self, node: Node, dtype: torch.dtype) -> Node:
        """Return a node's value in a dtype; if the node already has that dtype, return the node
        itself."""
        is_same = compat.example_value(node).dtype == dtype
        return node if is_same else self.call(torch.ops.aten.to.dtype, node, dtype)

    def hold(self, name: str, tensor: torch.Tensor) -> Node:
        """Insert a buffer whose contents remain between calls of the graph, and to which the graph
        may write.
        """
        if self.info.parent is not None:
            return self.bring_in(self.around().hold(name, tensor))
        gm, first = self.info.gm, _first_call(self.graph)
        held = dict(gm.named_buffers(recurse=False))
        target = next((name for name, found in held.items() if found is tensor), "")
        if not target:
            target = next(n for n in map(f"{name}_{{}}".format, itertools.count()) if n not in held)
            compat.add_buffer(gm, target, tensor)
            self._undo.append(partial(compat.remove_buffer, gm, target))
        with self.graph.inserting_before(first):
            node = self._inserted(self.graph.get_attr(target))
        self.info.regions[node] = self.info.regions[first]
        node.meta["example_value"] = self._fake_mode().from_tensor(tensor)
        return node

    def item(self, node: Node, index: int) -> Node:
        """Insert `node[index]`, which is one result of an op with several results."""
        with self._inserting():
            got = self._adopted(self.graph.call_function(operator.getitem, (node, index)))
        got.meta["example_value"] = compat.example_value(node)[index]
        return got

    def copy(self, node: Node, replaced: Mapping[Node, Node]) -> Node:
        """Insert a copy of `node`; operands that are keys of the mapping `replaced` are
        replaced by its values.
        """
        with self._inserting():
            return self._adopted(self.graph.node_copy(node, lambda n: replaced.get(n, n)))

    def arithmetic(self, function: Callable[..., Any], *args: Any) -> Node:
        """Insert arithmetic on sizes, such as the product of two sizes."""
        with self._inserting():
            node = self._adopted(self.graph.call_function(function, args))
        values = [compat.example_value(a) if isinstance(a, Node) else a for a in args]
        node.meta["example_value"] = function(*values)
        return node

    def size(self, value: int | torch.SymInt) -> int | Node:
        """Return a size in the form in which a call takes it: a number, or the node that computes
        the size.

        If the editor cannot compute the size from the graph's nodes, raise EditRefused.
        """
        return value if isinstance(value, int) else self._size_of(compat.size_formula(value))

    def _size_of(self, formula: sympy.Expr) -> Any:
        if formula.is_Integer:
            return int(formula)
        source = self.info.sources_of_sizes.get(formula)
        if isinstance(source, Node):
            return source
        if source is not None:
            return self.call(torch.ops.aten.sym_size.int, *source)
        join = operator.add if formula.is_Add else operator.mul if formula.is_Mul else None
        if join is None:
            raise EditRefused(f"the size {formula} is not known from the graph's inputs")
        return reduce(partial(self.arithmetic, join), map(self._size_of, formula.args))

    def shared(self, key: Hashable, build: Callable[[], Node]) -> Node:
        """Return the node that an earlier rewrite stored under a key.

        If there is no such node, build a node with `build` and store it under this key.
        """
        if key not in self.info.shared:
            self.info.shared[key] = build()
            self._undo.append(partial(self.info.shared.pop, key))
        found: Node = self.info.shared[key]
        return found

    def around(self) -> Editor:
        """Return the editor of the graph that contains this graph as an activation checkpoint.

        The edits of both editors are committed or undone together.
        """
        assert self.info.parent is not None
        if self._outer is None:
            self._outer = Editor(self.info.parent)
        return self._outer

    def bring_in(self, node: Node) -> Node:
        """Make a node of a surrounding graph available in this graph, an activation checkpoint's
        body.

        Return this graph's placeholder that receives the value of `node`. If there is no such
        placeholder, add one.
        """
        if node.graph is self.graph:
            return node
        called_by: Any = self.info.called_by
        if not self.info.is_called_once:
            raise EditRefused("the body of the checkpoint is called more than once")
        given = self.around().bring_in(node)
        for placeholder, argument in zip(self.info.placeholders, called_by.args[1:], strict=False):
            if argument is given:
                return placeholder
        with self.graph.inserting_before(_first_call(self.graph)):
            placeholder = self._inserted(self.graph.placeholder(f"{given.name}_given"))
        placeholder.meta["example_value"] = compat.example_value(given)
        self._undo.append(partial(setattr, called_by, "args", called_by.args))
        called_by.args = (*called_by.args, given)
        self.around().touch(called_by)
        self.info.refresh()
        return placeholder

    def _inserting(self) -> contextlib.AbstractContextManager[Any]:
        assert self._at is not None, "an edit outside at()"
        return self.graph.inserting_before(self._at[0])

    def _inserted(self, node: Node) -> Node:
        self._undo.append(partial(self.graph.erase_node, node))
        self.touch(node)
        return node

    def _adopted(self, node: Node) -> Node:
        """Record a new node, so that it can be removed again.

        Give it the source line, the module path and the autograd state of its position."""
        assert self._at is not None
        _, like, region = self._at
        self._inserted(node)
        for key in ("stack_trace", "nn_module_stack"):
            if key in like.meta:
                node.meta.setdefault(key, like.meta[key])
        self.info.regions[node] = region
        return node

    def replace(self, old: Node, new: Node) -> None:
        """Make every user of `old` read `new`.

        If the two nodes' values differ in a property, such as the dtype, raise EditRefused."""
        self.reroute([user for user in old.users if user is not new], old, new)
        self.info.replaced[old] = new
        self._undo.append(partial(self.info.replaced.pop, old, None))

    def reroute(self, users: Sequence[Node], old: Node, new: Node) -> None:
        """Make only `users` read `new` instead of `old`; raise EditRefused if the two nodes'
        values differ in a property, such as the dtype."""
        difference = describe_difference(compat.example_value(old), compat.example_value(new))
        if difference:
            raise EditRefused(f"{old.name} would change {difference}")
        for user in users:
            user.replace_input_with(old, new)
            self._undo.append(partial(user.replace_input_with, new, old))
            self.touch(user)

    def set_output(self, arguments: Any) -> None:
        """Replace the graph's outputs."""
        output = self.info.output
        self._undo.append(partial(setattr, output, "args", output.args))
        output.args = arguments
        self.touch(output)

    def touch(self, node: Node) -> None:
        """Record that `commit` must check the operands of a node."""
        self._touched[node] = None

    def keep(self, kept: Mapping[Node, str]) -> None:
        """If this graph is the body of an activation checkpoint, make the checkpoint save the
        results of the calls in `kept`.

        The string of a call names the op inside the call whose result is saved, such as
        "attention" or "aten::add"."""
        self._undo.append(compat.keep_in_checkpoint(self.info.gm, kept))

    def commit(self, dead: Sequence[Node]) -> None:
        """Check the edited nodes, then permanently erase those nodes of `dead` that are unused.

        If an operand does not come before the node that reads it, raise RuntimeError. The whole
        graph is checked by FX's lint once, after all passes.
        """
        order = sorted(set(dead), key=lambda n: self.info.positions.get(n, 0), reverse=True)
        assert all(node.graph is self.graph for node in order), "a dead node of another graph"
        for node in self._touched:
            for operand in node.all_input_nodes:
                if operand.graph is not node.graph or not operand < node:
                    raise RuntimeError(f"{operand.name} does not come before {node.name}")
        if self._outer is not None:
            self._outer.commit([])
        for node in order:
            if not node.users and node.op in ("call_function", "call_method"):
                self.graph.erase_node(node)
        self.info.refresh()

    def rollback(self) -> None:
        """Undo every edit of the current match."""
        while self._undo:
            self._undo.pop()()
        self.info.refresh()
        if self._outer is not None:
            self._outer.rollback()

    def _evaluate(self, node: Node, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        values = torch.fx.node.map_arg((tuple(args), kwargs), compat.example_value)
        operands = compat.pytree.tree_leaves(values)
        mode = self._fake_mode(operands)
        region = self.info.regions[node]
        devices = [v.device for v in operands if isinstance(v, torch.Tensor)]
        device = next(iter(devices), None) or kwargs["device"]
        with (
            mode,
            compat.python_dispatcher(),
            torch.set_grad_enabled(region.grad),
            compat.without_autocast(torch.device(device).type),
        ):
            op: Any = node.target
            return op(*values[0], **values[1])

    def _fake_mode(self, operands: Sequence[Any] = ()) -> Any:
        """Return the fake tensor mode of the operands, or of any other value in the graph; the
        values may be inside DTensors."""
        values = itertools.chain(operands, map(compat.example_value, self.graph.nodes))
        fake: Any = next(filter(compat.is_fake, map(compat.local_part, values)))
        return fake.fake_mode


def _first_call(graph: Graph) -> Node:
    found: Node = next(n for n in graph.nodes if n.op not in ("placeholder", "get_attr"))
    return found


def describe_difference(old: Any, new: Any) -> str:
    """Return text that names a difference between two example values, or an empty string.

    The function compares type, shape, dtype, device, `requires_grad` and DTensor placements."""
    if not isinstance(old, torch.Tensor) or not isinstance(new, torch.Tensor):
        return "its type" if isinstance(old, torch.Tensor) != isinstance(new, torch.Tensor) else ""
    if old.dtype == new.dtype and not same_shape(old.shape, new.shape):
        return f"shape from {tuple(old.shape)} to {tuple(new.shape)}"
    for name in ("dtype", "device", "requires_grad", "placements"):  # the last of DTensors
        before, after = getattr(old, name, None), getattr(new, name, None)
        if before != after:
            return f"{name} from {before} to {after}"
    return ""
