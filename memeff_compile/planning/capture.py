"""Capture a model as the backend would compile it, on tensors that have sizes but no memory.

The model is copied. Weights, buffers and inputs become fake tensors on the CPU. The fake tensors
stand for tensors on the device for which memory is planned. Batch size and length are plain
numbers. So Python code that reads sizes behaves as in a real call.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.fx import GraphModule, Node

from .. import compat
from ..backend.entry import keep_transformers_losses_in_one_graph, memeff
from ..errors import ExplainError, MemeffError, first_line
from ..options import Options
from ..passes import PASSES, in_order
from ..passes.graph.graph_info import levels_of
from ..passes.graph.module_names import clean_module_path
from ..passes.graph.pipeline import enforce_strict, run
from ..report import GraphReport
from .cards import Target
from .depth import config_of, copied_with
from .sizes import BATCH, LENGTH, Sizes, Told, tensors_in
from .values import MOST_BYTES, Values, tensors_of

LOSSES = frozenset({"cross_entropy", "log_softmax", "nll_loss", "logsumexp"})


@dataclass
class Graphs:
    """The forward and backward graphs that Inductor would compile for one captured graph.

    Without training, there is no backward graph.
    """

    forward: GraphModule
    backward: GraphModule | None


class GraphCall(NamedTuple):
    """One call of a captured graph."""

    graph: int  # its number
    parameters: list[str]  # the path of the parameter behind each placeholder, else ""
    root: str  # the path of the module whose forward the graph is of, "" for the model itself


@dataclass
class Capture:
    """The graphs that were captured of a model, without and with the passes."""

    at: Told  # the batch and the length
    # what makes the graphs of each graph that Dynamo captured, without the passes or with them
    lowered: list[Callable[[bool], Graphs]] = field(default_factory=list)
    # the calls of the graphs, in order; blocks may share one
    calls: list[GraphCall] = field(default_factory=list)
    reports: list[GraphReport] = field(default_factory=list)  # the passes' report for each graph
    # the number of classes of every loss, rewritten or not
    classes: set[int] = field(default_factory=set)
    # per graph, each node's op and the sizes of its value
    nodes: list[list[tuple[str, list[int]]]] = field(default_factory=list)
    inputs: list[torch.Tensor] = field(default_factory=list)  # the tensors of the call
    values: Values = field(default_factory=Values)  # the known values
    outside: int = 0  # bytes of the tensors that the model made outside of the graphs

    def graphs(self, *, with_passes: bool) -> list[Graphs]:
        """Return the graphs that Inductor would compile for each graph that Dynamo captured."""
        return [lower(with_passes) for lower in self.lowered]

    def lengths_in(self, other: Capture) -> Told:
        """Return which sizes in the capture `other` are lengths of sequences.

        These are the sequence length of the call's inputs, and longer lengths if the model adds
        tokens (such as those of an image) to each sequence.
        """
        told = other.at
        if told.length is None or self.at.length is None:
            return told
        pairs = {
            pair
            for mine, theirs in zip(self.nodes, other.nodes, strict=False)
            for (_, sizes), (_, grown) in zip(mine, theirs, strict=False)
            for pair in zip(sizes, grown, strict=False)
        }
        own = self.at.length
        more = {a - own for a, b in pairs if a - own == b - told.length and a > own // 2}
        return replace(told, near=(*told.near, *sorted(more - {0, *told.near})))

    def grows_as(self, other: Capture) -> str:
        """Return "" if the tensors in this capture and in `other` have equal sizes.

        The captures are graphs of one model, traced at two pairs of batch size and length. Sizes
        are compared as formulas in batch size and length. If sizes or operations differ, return a
        sentence that names the difference."""
        told = other.at
        mine, theirs = ([[op for op, _ in g] for g in c.nodes] for c in (self, other))
        if mine != theirs:
            return "it runs other operations at other sizes, such as some for each image"
        given = {BATCH: self.at.batch, LENGTH: self.at.length}
        sizes = {size for graph in other.nodes for _, shape in graph for size in shape}
        read = {size: int(told.formula(size).subs(given)) for size in sizes}
        for graph, same in zip(self.nodes, other.nodes, strict=True):
            for (op, shape), (_, grown) in zip(graph, same, strict=True):
                if shape != [read[size] for size in grown]:
                    at = f"{told.batch} x {told.length or self.at.length}"
                    return f"the sizes {shape} of {op} are {grown} at {at}"
        return ""


def sizes_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sizes:
    """Return batch size and length: from input_ids, else from the first integer tensor, else from
    any tensor."""
    tensors = [x for x in tensors_of((kwargs.get("input_ids"), args, kwargs)) if x.dim()]
    if not tensors:
        raise ExplainError(
            "The call has no tensor, so there is no batch to plan for. Pass what the model is "
            "called with, such as input_ids=ids, labels=ids; tensors on device 'meta' do."
        )
    whole = [x for x in tensors if not x.is_floating_point() and x.dim() > 1]
    first = (whole or tensors)[0]
    return Sizes(int(first.shape[0]), int(first.shape[1]) if first.dim() in (2, 3) else 1)


def capture(
    call: tuple[Sequence[Any], Mapping[str, Any]],
    sizes: Sizes,  # batch and length of the call
    options: Options,
    target: Target,
    model: nn.Module | Callable[..., Any],
    told: Told,  # the batch and the length to capture it with
) -> Capture:
    """Capture a call of `model` with and without the passes; raise ExplainError if that fails."""
    is_running = False

    def outside(op: Any, args: Any, kwargs: Any, run: Callable[[], Any]) -> Any:
        result = found.values.run(op, args, kwargs, run, mode)
        if not is_running and not compat.is_view(op):
            made = (t for t in tensors_of(result) if all(type(size) is int for size in t.shape))
            found.outside += sum(tensor.nbytes for tensor in made)
        return result

    mode = compat.fake_mode(outside)
    found = Capture(told)
    copied = _fake_copy(model, mode)
    named_parameters: dict[int, str] = {}
    if isinstance(copied, nn.Module):
        named_parameters = {id(p): name for name, p in copied.named_parameters()}
    given, named = _fake_inputs(call, sizes, told, mode, found.values)
    found.inputs, found.outside = tensors_of((given, named)), 0

    def keep(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        found.nodes.append([_call_and_sizes(n) for m in levels_of(gm) for n in m.graph.nodes])
        number = len(found.nodes) - 1
        said = [compat.source_name(n) for n in gm.graph.nodes if n.op == "placeholder"]
        found.classes |= _classes(gm)
        if target.device != "cpu":
            _attend_as_a_gpu_does(gm)
        unchanged = copy.deepcopy(gm)
        with target.planned():
            outcome = run(gm, in_order(PASSES, options.passes), options)
            enforce_strict(options, outcome.report)
        found.reports.append(outcome.report)

        again = compat.tracing_again()

        @cache
        def lowered(with_passes: bool) -> Graphs:
            if with_passes and not outcome.changed:
                return lowered(False)
            with again(), compat.fresh_capture():
                graph = gm if with_passes else copy.deepcopy(unchanged)
                return _graphs_of(graph, example_inputs)

        found.lowered.append(lowered)

        def run_graph(*inputs: object) -> object:
            nonlocal is_running
            found.calls.append(GraphCall(number, *_parameters(inputs, said, named_parameters)))
            is_running = True
            try:
                return unchanged(*inputs)
            finally:
                is_running = False

        return run_graph

    keep.stands_for = memeff  # type: ignore[attr-defined]  # its graphs are what memeff would get
    keep_transformers_losses_in_one_graph()
    room = compat.room_for_graphs(compat.NO_LIMIT)  # other captures are unaffected
    # this logger repeats, with a traceback, the error that is raised below
    with mode, compat.fresh_capture(), without_log("torch._subclasses.fake_tensor"):
        try:
            compiled: Callable[..., Any] = torch.compile(copied, backend=keep, **room)
            compiled(*given, **named)
        except MemeffError:
            raise
        except Exception as error:
            modules = copied.modules() if isinstance(copied, nn.Module) else ()
            compat.forget_failures([copied, *(type(module).forward for module in modules)])
            said = f"{type(error).__name__}: {first_line(error)}"
            raise ExplainError(
                f"Calling {_name(model)} on tensors without memory failed: {said}\n"
                f"{_too_long(model, sizes)}"
                "Pass the inputs that its forward needs, as in explain(model, input_ids=ids, "
                "labels=ids). If they are right, the model reads values of tensors while it runs: "
                "give those that it reads, such as image_grid_thw, on the CPU with their values. "
                "What it reads off its weights, explain cannot follow."
            ) from error
    if not found.nodes:
        raise ExplainError(
            f"{_name(model)} ran without a graph being captured, so there is nothing to plan. "
            "A torch.compiler.disable around its forward, or a forward without tensor "
            "operations, does that."
        )
    return found


def _too_long(model: object, sizes: Sizes) -> str:
    """Return a sentence for the error if the inputs are longer than a model's config allows."""
    most = getattr(config_of(model), "max_position_embeddings", None)
    if not isinstance(most, int) or not 0 < most < sizes.length:
        return ""
    return (
        f"The inputs have {sizes.length} tokens per sequence, but the model's config has "
        f"max_position_embeddings={most}. Pass shorter inputs, or --length {most} to the "
        "command.\n"
    )


@contextmanager
def without_log(name: str) -> Iterator[None]:
    """Disable one of PyTorch's loggers, and restore its state afterwards."""
    logger = logging.getLogger(name)
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _graphs_of(gm: GraphModule, example_inputs: Sequence[Any]) -> Graphs:
    forward, *backward = compat.inductor_graphs(gm, example_inputs)
    return Graphs(forward, backward[0] if backward else None)


def _attend_as_a_gpu_does(gm: GraphModule) -> None:
    """Remove dropout from fused attention, because the memory of fused attention on a GPU does not
    depend on dropout.

    A GPU's kernel applies dropout itself and saves a seed instead of a mask; on a CPU, dropout
    would make PyTorch choose unfused attention.
    """
    for module in levels_of(gm):
        for node in module.graph.nodes:
            if node.target is torch.nn.functional.scaled_dot_product_attention:
                if len(node.args) > 4:
                    node.args = (*node.args[:4], 0.0, *node.args[5:])
                if "dropout_p" in node.kwargs:
                    node.kwargs = {**node.kwargs, "dropout_p": 0.0}
        module.recompile()


def _name(model: object) -> str:
    return str(getattr(model, "__name__", type(model).__name__))


def _fake_copy(model: Any, mode: Any) -> Any:
    """Return a copy of the model with fake parameters and buffers; the original is not changed."""
    if not isinstance(model, nn.Module):
        return model
    model = getattr(model, "_orig_mod", model)
    memo: dict[int, Any] = {}
    if compat.fsdp_shards().keys() & {id(parameter) for parameter in model.parameters()}:
        raise ExplainError(
            "The model is sharded by FSDP2 already. Explain it before fully_shard, which is a "
            "setting of a plan: plan(gpus=8, sharding='fsdp')."
        )
    with mode:
        for module in model.modules():
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                if tensor is not None and id(tensor) not in memo:
                    memo[id(tensor)] = _fake(tensor)
    return copied_with(model, memo)


def _fake(tensor: torch.Tensor) -> torch.Tensor:
    local = compat.local_part(tensor.data)
    if type(local) is not torch.Tensor and not compat.is_fake(local):
        raise ExplainError(
            f"A parameter is a {type(local).__name__}, and explain reads plain tensors only. "
            "Explain the model before it is quantised."
        )
    empty = torch.empty_strided(local.shape, local.stride(), dtype=local.dtype, device="cpu")
    if compat.is_dtensor(tensor):
        empty = compat.with_local_part(tensor.data, empty)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(empty, requires_grad=tensor.requires_grad)
    return empty.requires_grad_(tensor.requires_grad)


def _fake_inputs(inputs: Any, sizes: Sizes, told: Told, mode: Any, values: Values) -> Any:
    """Return all inputs as fake tensors (without memory) with another batch size and length.

    The values of small inputs are resized in the same way and stored in `values`. Along the first
    dimension, these values are repeated or cut off. Along other dimensions, the values are cut off,
    or the last value is repeated.
    """

    def fake(given: object) -> object:
        if not isinstance(given, torch.Tensor):
            return given
        shape = _shape(given, sizes, told)
        with mode:
            result = torch.empty(shape, dtype=given.dtype, device="cpu")
        is_plain = type(given) is torch.Tensor and given.layout == torch.strided
        if is_plain and not given.is_meta and result.nbytes <= MOST_BYTES:
            value = given.detach().cpu()
            for dim, size in enumerate(shape):
                own, places = value.shape[dim], torch.arange(size)
                if size != own:
                    places = places.clamp(max=own - 1) if dim else places % own
                    value = value.index_select(dim, places)
            values.know(result, value.clone())
        return result.requires_grad_(given.requires_grad)

    return compat.pytree.tree_map(fake, inputs)


def _shape(tensor: torch.Tensor, sizes: Sizes, told: Told) -> list[int]:
    """Return the shape of an input for another batch size and length.

    The batch is the first dimension, or the second one in position ids with three components. For
    images, the first dimension may be a multiple of the batch size. A dimension of images
    (channels, width) that happens to equal the length does not count as the length.
    """
    shape = list(tensor.shape)
    batch, length = told.batch or sizes.batch, told.length or sizes.length
    of_batch = int(len(shape) > 2 and shape[0] != sizes.batch and shape[1] == sizes.batch)
    is_row = len(shape) == 1 and shape[0] != sizes.batch and shape[0] == sizes.length
    is_mask = len(shape) == 4 and shape[1] == 1 and not tensor.is_floating_point()
    most = 1 if tensor.is_floating_point() and len(shape) == 3 else 2
    for dim in range(of_batch + 1, len(shape)):
        is_length = shape[dim] == sizes.length and sizes.length > 1
        if is_length and most and (len(shape) < 4 or is_mask or shape[1] == 1):
            shape[dim], most = length, most - 1
    if is_row:
        shape[0] = length
    elif shape and shape[of_batch] % sizes.batch == 0:
        shape[of_batch] = shape[of_batch] // sizes.batch * batch
    return shape


def _call_and_sizes(node: Node) -> tuple[str, list[int]]:
    """Return the op of a node and the sizes of its result, with 0 for each size that depends on
    data."""
    called = getattr(node.target, "__name__", None) or str(node.target)
    values = map(compat.local_part, tensors_in(compat.example_value(node)))
    sizes = [size for tensor in values for size in tensor.shape]
    return f"{node.op} {called}", [size if type(size) is int else 0 for size in sizes]


def _parameters(
    inputs: Sequence[Any], sources: Sequence[str], named: Mapping[int, str]
) -> tuple[list[str], str]:
    """Return the paths of parameters in the model, and the path of the module to whose forward the
    graph belongs.

    After a graph break, the name of that module in Dynamo's sources is `self`.
    """
    paths, root = [], ""
    for value, source in zip(inputs, sources, strict=True):
        path = named.get(id(value), "")
        said = clean_module_path(source).replace("._parameters", "")
        if said and path.endswith(f".{said}"):
            root = path.removesuffix(f".{said}")
        paths.append(path)
        if compat.is_dtensor(value):  # lowered graphs get its parts, this rank's tensor first
            spread: Any = value
            paths += [""] * (len(spread.__tensor_flatten__()[0]) - 1)
    return paths, root


def _classes(gm: GraphModule) -> set[int]:
    """Return the size of the class dimension of every loss in the graph."""
    found: set[int] = set()
    for node in (node for module in levels_of(gm) for node in module.graph.nodes):
        name = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
        if name in LOSSES and node.args and isinstance(node.args[0], Node):
            value = compat.example_value(node.args[0])
            if isinstance(value, torch.Tensor) and value.dim() > 1:
                found |= set([s for s in (value.shape[1], value.shape[-1]) if type(s) is int][-1:])
    return found
