"""Answer questions about a captured graph.

For example: which inputs are parameters, where gradients are enabled, which nodes write in place,
and which line of user code made a node. This module never changes the graph. Sizes of tensors may
be symbolic. The methods of this module never replace a symbol by a number, because that would add a
guard and cause recompilations.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import islice
from typing import Any, cast

import torch
from torch.fx import GraphModule, Node

from ... import compat
from ...compat import HigherOrderOperator, OpOverload, OpOverloadPacket
from ...options import Options
from .canonical import Call, read_one
from .module_names import ModuleNames, module_stack


@dataclass(frozen=True)
class Region:
    """The autograd, autocast and inference modes in which a node runs."""

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, torch.dtype | None, bool], ...] = ()


@dataclass(frozen=True)
class Write:
    """An in-place write: the node that writes, and the tensors to which it may write."""

    node: Node
    position: int
    targets: tuple[Node, ...]


_CHECKPOINTS = ("tag_activation_checkpoint",)


@dataclass
class GraphInfo:
    """Answers questions about one graph: the captured graph, or the body of an activation
    checkpoint inside it. Each nested graph has a separate `GraphInfo`.
    """

    gm: GraphModule
    options: Options
    region: Region
    parent: GraphInfo | None = None
    called_by: Node | None = None
    regions: dict[Node, Region] = field(default_factory=dict)
    positions: dict[Node, int] = field(default_factory=dict)
    # Results that a pass has computed and reuses until the graph changes.
    notes: dict[str, Any] = field(default_factory=dict)
    # Nodes that edits have replaced, with their replacements.
    replaced: dict[Node, Node] = field(default_factory=dict)
    # Nodes that edits have inserted for several matches, by the key that describes them.
    shared: dict[Hashable, Node] = field(default_factory=dict)
    candidate: Node | None = None  # the candidate of the running search
    left_out: set[Node] = field(default_factory=set)  # candidates at which that search has failed
    # Names of modules; the infos of bodies share it.
    names: ModuleNames = field(default_factory=ModuleNames)

    def __post_init__(self) -> None:
        self.refresh()

    def refresh(self) -> None:
        """Analyse the graph again after an edit, because an edit changes the positions of nodes and
        their regions (autograd, autocast and inference modes).
        """
        self.notes.clear()
        for name in self.__dict__.keys() - self.__dataclass_fields__.keys():
            del self.__dict__[name]  # the stored result of a cached_property
        self.regions, self.positions = {}, {}
        stack: list[tuple[Node, Region]] = []
        current = self.region
        for position, node in enumerate(self.gm.graph.nodes):
            self.positions[node] = position
            current = _step_region(node, current, stack)
            self.regions[node] = current

    def visit(self, candidates: Iterable[Node]) -> Iterator[Node]:
        """Yield the given nodes, except those at which the pass's earlier search raised an error.

        After such an error, the pass searches the graph again.
        """
        outer = self.candidate
        for node in candidates:
            if node not in self.left_out:
                self.candidate = node
                yield node
        self.candidate = outer

    def current(self, node: Node) -> Node:
        """Return the node that now stands for `node`: edits may have replaced `node` since the
        pass found its matches.
        """
        while node in self.replaced:
            node = self.replaced[node]
        return node

    def call(self, node: Node) -> Call | None:
        """Return the single ATen call to which a node is equivalent, or None."""
        return read_one(node)

    def tensor(self, node: Any) -> torch.Tensor | None:
        """Return the fake tensor of `node`, or None if the node's value is not a tensor or has
        no fake tensor."""
        value = compat.example_value(node) if isinstance(node, Node) else None
        return value if isinstance(value, torch.Tensor) else None

    def value(self, node: Any) -> torch.Tensor:
        """Return the fake tensor of `node`, which must exist."""
        value = compat.example_value(node)
        assert isinstance(value, torch.Tensor)
        return value

    @cached_property
    def placeholders(self) -> list[Node]:
        """Return the graph's inputs, in the order of its arguments."""
        return [n for n in self.gm.graph.nodes if n.op == "placeholder"]

    @cached_property
    def sources_of_sizes(self) -> dict[Any, Node | tuple[Node, int]]:
        """Return a mapping from the formula of each symbolic size to the graph input that contains
        it.

        A value of the mapping is an input that is itself the size, or a pair. The pair consists of
        an input tensor and the dimension of the tensor that has this size.
        """
        said: dict[Any, Node | tuple[Node, int]] = {}
        held: dict[Any, Node | tuple[Node, int]] = {}
        for node in self.placeholders:
            value = compat.example_value(node)
            if isinstance(value, torch.SymInt):
                said[compat.size_formula(value)] = node
            for place, size in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
                if not isinstance(size, int):
                    held.setdefault(compat.size_formula(size), (node, place))
        return held | said

    def says(self, size: int | torch.SymInt) -> bool:
        """Return whether a size is a plain number, or a symbolic number that can be computed from
        the sizes of the graph's inputs.
        """
        return isinstance(size, int) or self._says(compat.size_formula(size))

    def _says(self, formula: Any) -> bool:
        if formula.is_Integer or formula in self.sources_of_sizes:
            return True
        return (formula.is_Add or formula.is_Mul) and all(map(self._says, formula.args))

    @property
    def is_called_once(self) -> bool:
        """Return whether this graph is the body of an activation checkpoint and is called exactly
        once."""
        if self.parent is None or self.called_by is None:
            return False
        body: Any = self.called_by.args[0]
        calls = [n for n in self.parent.gm.graph.nodes if n.op == "get_attr"]
        return [n.target for n in calls].count(body.target) == 1

    @property
    def checkpoints_for_nothing(self) -> bool:
        """Return whether a checkpoint runs with gradients enabled, although no output of the
        checkpoint's graph requires a gradient.
        """
        *_, root = self.outward()
        results = compat.pytree.tree_leaves(root.output.args[0])
        trains = any(t is not None and t.requires_grad for t in map(root.tensor, results))
        return self is not root and self.region.grad and not trains

    @property
    def output(self) -> Node:
        """Return the output node."""
        return self.gm.graph.output_node()

    @cached_property
    def needs_grad(self) -> bool:
        """Return whether gradients are enabled and an input of the graph requires a gradient.

        A backward pass may then follow."""
        values = map(self.tensor, self.placeholders)
        return self.region.grad and any(v is not None and v.requires_grad for v in values)

    def outward(self) -> Iterator[GraphInfo]:
        """Yield the graph itself and the graphs around it, from the innermost to the outermost."""
        yield self
        if self.parent is not None:
            yield from self.parent.outward()

    def inward(self) -> Iterator[GraphInfo]:
        """Yield the graph itself and the graphs of activation checkpoints inside it, from the
        outermost to the innermost."""
        yield self
        for body in self.bodies():
            yield from body.inward()

    @property
    def has_checkpoint_policy(self) -> bool:
        """Return whether a checkpoint around the graph has a `context_fn`.

        A `context_fn` chooses which tensors are saved.
        """
        return any(compat.has_checkpoint_policy(level.gm) for level in self.outward())

    def bodies(self) -> Iterator[GraphInfo]:
        """Yield the graphs inside activation checkpoints, the only nested graphs that passes may
        edit."""
        for node in self.gm.graph.nodes:
            target = node.target
            if not isinstance(target, HigherOrderOperator) or target.name() not in _CHECKPOINTS:
                continue
            body = node.args[0] if node.args else None
            if not isinstance(body, Node) or body.op != "get_attr" or len(body.users) != 1:
                continue
            child = getattr(self.gm, str(body.target), None)
            if isinstance(child, GraphModule):
                region = self.regions[node]
                yield GraphInfo(child, self.options, region, self, node, names=self.names)

    def argument_of(self, placeholder: Node) -> Node | None:
        """Return the node that the surrounding graph passes for a placeholder of a checkpoint
        body."""
        if self.called_by is None:
            return None
        index = self.placeholders.index(placeholder) + 1
        argument = self.called_by.args[index] if index < len(self.called_by.args) else None
        return argument if isinstance(argument, Node) else None

    def root_placeholder(self, node: Node) -> Node | None:
        """Return the input of the whole graph whose value is passed for `node`.

        `node` may be an input of an activation checkpoint's graph, which is nested in the whole
        graph. If a node of a surrounding graph computes the value, return None. If `node` is an
        input of the whole graph, return `node`.
        """
        if node.op != "placeholder":
            return None
        if self.parent is None:
            return node
        outer = self.argument_of(node)
        return None if outer is None else self.parent.root_placeholder(outer)

    def module_path(self, node: Node) -> str:
        """Return the path of the module in which `node` was called, such as
        `model.layers.0.mlp`."""
        return self.module_names(node)[0]

    def module_names(self, node: Node) -> tuple[str, ...]:
        """Return all names of the module in which `node` was called; the first is its path."""
        stack = module_stack(node)
        return self.names.of(*stack[-1]) if stack else ("",)

    def module_key(self, node: Node) -> str:
        """Return a key that identifies one particular call of the module of `node`.

        The keys of repeated calls end in `@1`, `@2` and so on.
        """
        return str(next(reversed(node.meta.get("nn_module_stack") or {"": ""})))

    def source_line(self, node: Node) -> str:
        """Return the line of user code that created `node`: `file.py:12 in forward: loss =
        ...`."""
        frames = _FRAME.findall(node.meta.get("stack_trace") or "")
        if not frames:
            return ""
        libraries = ("/torch/", "/memeff_compile/backend/")
        own = (f for f in reversed(frames) if not any(folder in f[0] for folder in libraries))
        file, line, function, text = next(own, frames[-1])
        return f"{_short_path(file)}:{line} in {function}: {text.strip()}"

    @cached_property
    def writes(self) -> list[Write]:
        """Return every in-place write of the graph, in order."""
        return list(_writes(self.positions.items()))

    def written_between(self, nodes: Sequence[Node], first: Node, last: Node) -> Node | None:
        """Return a node between `first` and `last` (included) that may write to the memory of
        `nodes`."""
        lo, hi = self.positions[first], self.positions[last]
        # Each edit of one layer would make `writes` read the nodes of all layers again.
        for write in _writes(islice(self.positions.items(), lo + 1, hi + 1)):
            if self.may_write(write, nodes):
                return write.node
        return None

    def written_alike(self, node: Node, first: int, last: int) -> Node | None:
        """Return a node between position `first` and `last` (included) that may write to the
        memory of `node`. Unlike `written_between`, this method assumes that graph inputs whose
        dtype differs from the node's do not share its memory.
        """
        value = self.tensor(node)
        for write in self.writes:
            for target in write.targets if first < write.position <= last else ():
                written = self.tensor(target)
                is_alike = value is None or written is None or value.dtype == written.dtype
                if is_alike and self.may_share_memory(target, node):
                    return write.node
        return None

    def may_write(self, write: Write, nodes: Iterable[Node]) -> bool:
        """Return whether a write may change the memory of one of `nodes`."""
        return any(self.may_share_memory(t, node) for node in nodes for t in write.targets)

    def may_share_memory(self, a: Node, b: Node) -> bool:
        """Return whether the memory of two nodes may overlap.

        The memory may overlap if both nodes have the same fake storage, or if both are inputs whose
        memory is unknown. Inputs of different dtypes are assumed not to overlap, because a KV cache
        and a mask, for example, are separate tensors. If `memeff.inner=eager` runs the rewritten
        graph in eager PyTorch, inputs of different dtypes count as possibly overlapping. Eager
        PyTorch supports overlapping inputs, whereas AOTAutograd assumes that different storages
        never overlap.
        """
        if a is b:
            return True
        left, right = self.tensor(a), self.tensor(b)
        if left is None or right is None:
            return False
        keys = storage_of(left), storage_of(right)
        if None in keys or keys[0] == keys[1]:
            return True
        if left.dtype != right.dtype and self.options.inner != "eager":
            return False
        return self._is_user_memory(left) and self._is_user_memory(right)

    def may_be_written(self, node: Node) -> bool:
        """Return whether any node of the graph may write to the memory of `node`."""
        value = self.tensor(node)
        if value is None or not self.writes:
            return False
        keys, is_everything, users_dtypes = self._written_memory
        key = storage_of(value)
        if is_everything or key is None or key in keys:
            return True
        is_alike = value.dtype in users_dtypes or self.options.inner == "eager"
        return bool(users_dtypes) and is_alike and self._is_user_memory(value)

    @cached_property
    def _written_memory(self) -> tuple[set[int], bool, set[torch.dtype]]:
        """Return three facts about the writes of the graph:

        - the storages to which the graph writes;
        - whether the graph may write to unknown memory;
        - the dtypes of written tensors that use the memory of inputs other than parameters and
          buffers.
        """
        targets = {target for write in self.writes for target in write.targets}
        values = [v for v in map(self.tensor, targets) if v is not None]  # as in may_share_memory
        keys = set(map(storage_of, values))
        users_dtypes = {value.dtype for value in values if self._is_user_memory(value)}
        return {key for key in keys if key is not None}, None in keys, users_dtypes

    def _is_user_memory(self, value: torch.Tensor) -> bool:
        """Return whether `value` uses the memory of a graph input that is neither a parameter nor
        a buffer."""
        return self._inputs_by_storage.get(compat.storage_key(value), False)

    @cached_property
    def _inputs_by_storage(self) -> dict[int, bool]:
        """Return, for every input, its storage, and whether the input is neither a parameter nor a
        buffer.
        """
        found: dict[int, bool] = {}
        for placeholder in self.placeholders:
            held = self.tensor(placeholder)
            if held is None:
                continue
            real, name = compat.example_input(placeholder), compat.source_name(placeholder)
            is_held = any(part in name for part in ("._parameters[", "._buffers[", "_modules["))
            key = storage_of(held)
            if key is not None:
                found.setdefault(key, not is_held and not isinstance(real, torch.nn.Parameter))
        return found


def _writes(positions: Iterable[tuple[Node, int]]) -> Iterator[Write]:
    for node, position in positions:
        if targets := written_by(node):
            yield Write(node, position, targets)


_FRAME = re.compile(r'File "([^"]+)", line (\d+), in ([^\n]+)\n\s+([^\n]*)')


def _short_path(path: str) -> str:
    parts = path.replace("\\", "/").split("/")
    if "site-packages" in parts:
        return "/".join(parts[len(parts) - parts[::-1].index("site-packages") :])
    return parts[-1]


def _step_region(node: Node, current: Region, stack: list[tuple[Node, Region]]) -> Region:
    """Return the region (autograd, autocast and inference modes) that applies after `node`, which
    may switch such a mode."""
    if node.op != "call_function" or isinstance(node.target, OpOverload):
        return current
    name = getattr(node.target, "__name__", "")
    if name == "_set_grad_enabled":
        return Region(bool(node.args[0]), current.inference, current.autocast)
    if name == "_enter_inference_mode":
        stack.append((node, current))
        mode = bool(node.args[0]) if node.args else True
        return Region(current.grad and not mode, mode, current.autocast)
    if name == "_enter_autocast":
        stack.append((node, current))
        device, dtype, enabled, *_ = (*node.args, None, None, True)
        entry = (str(device), dtype, bool(enabled))
        return Region(current.grad, current.inference, (*current.autocast, entry))
    if name in ("_exit_inference_mode", "_exit_autocast"):
        opened = node.args[0] if node.args else None
        while stack:
            entered, before = stack.pop()
            if entered is opened:
                if name == "_exit_autocast":
                    return Region(current.grad, current.inference, before.autocast)
                return Region(before.grad, before.inference, current.autocast)
    return current


def ambient_region() -> Region:
    """Return the region (autograd, autocast and inference modes) in which user code called the
    compiled function."""
    return Region(torch.is_grad_enabled(), torch.is_inference_mode_enabled())


_IN_PLACE = "iadd isub imul imatmul itruediv ifloordiv imod ipow ilshift irshift iand ior ixor"
_IN_PLACE_OPERATORS = {getattr(operator, name) for name in _IN_PLACE.split()}
_NAMED_LIKE_WRITES = {operator.and_, operator.or_, operator.not_, operator.is_}
_NOT_WRITES = {"requires_grad_", "retain_grad_"}
_SWITCHES = ("_set_grad_enabled", "_enter_autocast", "_exit_autocast")


def written_by(node: Node) -> tuple[Node, ...]:
    """Return the tensors to which `node` may write in place; for a node without side effects,
    return an empty result.
    """
    if node.op == "call_module":
        return tuple(node.all_input_nodes)
    if node.op == "call_method":
        name = str(node.target)
        is_in_place = _is_named_in_place(name) or name == "__setitem__"
        is_write = is_in_place and name not in _NOT_WRITES
        return _first_tensor(node) if is_write else _out_argument(node)
    if node.op != "call_function":
        return ()
    target = node.target
    if isinstance(target, OpOverload):
        return _written_by_schema(node, target)
    if isinstance(target, OpOverloadPacket):
        overloads = (getattr(target, name) for name in target.overloads())
        return tuple(n for overload in overloads for n in _written_by_schema(node, overload))
    if isinstance(target, HigherOrderOperator):
        return _written_by_higher_order(node)
    name = getattr(target, "__name__", "")
    if target in _NAMED_LIKE_WRITES or name in _SWITCHES:
        return ()
    if (
        _is_told_inplace(node)
        or _is_named_in_place(name)
        or target in (operator.setitem, *_IN_PLACE_OPERATORS)
    ):
        return _first_tensor(node)
    if name == "batch_norm":
        return tuple(n for n in node.args[1:3] if isinstance(n, Node))
    return _out_argument(node)


def _is_named_in_place(name: str) -> bool:
    return name.endswith("_") and not name.endswith("__")


def _first_tensor(node: Node) -> tuple[Node, ...]:
    first = node.args[0] if node.args else None
    return (first,) if isinstance(first, Node) else tuple(node.all_input_nodes)


def _out_argument(node: Node) -> tuple[Node, ...]:
    out = node.kwargs.get("out")
    given = out if isinstance(out, (tuple, list)) else (out,)
    return tuple(n for n in given if isinstance(n, Node))


def _is_told_inplace(node: Node) -> bool:
    """Return whether a Python function is called with `inplace=True`, as a keyword or by
    position."""
    code = getattr(node.target, "__code__", None)
    names = () if code is None else code.co_varnames[: code.co_argcount]
    if "inplace" not in names and "inplace" not in node.kwargs:
        return False
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}.get("inplace") is True


@lru_cache(maxsize=4096)
def _written_arguments(op: OpOverload) -> tuple[tuple[int, str], ...]:
    """Return the positions and names of the arguments to which an op writes; each op's schema is
    read once."""
    arguments = enumerate(compat.schema(op).arguments)
    return tuple(
        (index, each.name)
        for index, each in arguments
        if each.alias_info is not None and each.alias_info.is_write
    )


def _written_by_schema(node: Node, op: OpOverload) -> tuple[Node, ...]:
    written: list[Node] = []
    for index, name in _written_arguments(op):
        value = node.args[index] if index < len(node.args) else node.kwargs.get(name)
        values = value if isinstance(value, (list, tuple)) else (value,)
        written.extend(v for v in values if isinstance(v, Node))
    return tuple(written)


_PURE_HIGHER_ORDER = {"flex_attention", "cond", "while_loop", "scan", "map_impl"}


def _written_by_higher_order(node: Node) -> tuple[Node, ...]:
    """Return the operands to which a nested graph may write.

    These are all operands if the nested graph may contain an in-place write, otherwise none.
    """
    name, root = cast("HigherOrderOperator", node.target).name(), node.graph.owning_module
    held = (getattr(root, str(n.target), None) for n in node.all_input_nodes if n.op == "get_attr")
    modules = [body for body in held if isinstance(body, GraphModule)]
    known = name in _PURE_HIGHER_ORDER or name in _CHECKPOINTS
    if (known or modules) and not any(written_by(n) for b in modules for n in b.graph.nodes):
        return ()
    return tuple(n for n in node.all_input_nodes if n.op != "get_attr")


def levels_of(gm: GraphModule) -> list[GraphModule]:
    """Return a graph and all graphs nested in it."""
    return [module for module in gm.modules() if isinstance(module, GraphModule)]


def kind_among(nodes: Iterable[Node | None]) -> str:
    """Return the type of the first of `nodes` whose value is a tensor subclass.

    If there is no such node, return an empty string."""
    values = (compat.example_value(node) for node in nodes if node is not None)
    odd = (v for v in values if isinstance(v, torch.Tensor) and not compat.is_fake(v))
    return next((type(value).__name__ for value in odd), "")


def same_shape(shape: Sequence[Any], wanted: Sequence[Any]) -> bool:
    """Return whether two shapes, or two lists of strides, are known to be equal."""
    return len(shape) == len(wanted) and all(
        compat.statically_true(a == b) for a, b in zip(shape, wanted, strict=True)
    )


def node_name(node: Node) -> str:
    """Return the name of a node's operation, for reports."""
    if isinstance(node.target, str):
        return node.target
    if isinstance(node.target, OpOverload):
        return str(compat.schema(node.target).name.split("::")[-1])
    return getattr(node.target, "__name__", str(node.target))


def storage_of(value: torch.Tensor) -> int | None:
    """Return a key that identifies the memory of a tensor, or None if it has no storage."""
    try:
        return compat.storage_key(value)
    except (RuntimeError, NotImplementedError):  # raised by torch for sparse and wrapped tensors
        return None
