"""Captures a model as the backend would compile it, on tensors that have sizes and no memory.

The model is copied; weights, buffers and inputs become fake tensors on the CPU that stand for
tensors on the planned device. Batch and length get symbols, so that sizes come out as formulas.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import nn
from torch.fx import GraphModule, Node

from .. import backend, compat
from ..errors import ExplainError, MemeffError, first_line
from ..kernels.device import planned_for
from ..options import Options
from ..passes import PASSES
from ..passes.graph.pipeline import enforce_strict, run
from ..report import GraphReport
from .depth import copied_with
from .sizes import BATCH, LENGTH, Sizes

LOSSES = frozenset({"cross_entropy", "log_softmax", "nll_loss", "logsumexp"})


@dataclass
class Graphs:
    """What Inductor would compile for one captured graph; no backward where nothing trains."""

    forward: GraphModule
    backward: GraphModule | None


@dataclass
class Capture:
    """A model without and with the passes."""

    # one entry per graph that Dynamo captured, in the order in which they run. Where only blocks
    # are of interest, and the passes left them alone, `before` is `after`
    before: list[Graphs] = field(default_factory=list)
    after: list[Graphs] = field(default_factory=list)  # likewise
    # per graph, the path of the parameter behind each placeholder, else ""
    parameters: list[list[str]] = field(default_factory=list)
    reports: list[GraphReport] = field(default_factory=list)  # what the passes did to each graph
    # the number of classes of every loss, rewritten or not
    classes: set[int] = field(default_factory=set)
    # dynamo's symbols -> batch and length
    names: dict[sympy.Symbol, sympy.Symbol] = field(default_factory=dict)

    @property
    def changes_blocks(self) -> bool:
        """Whether a pass changed what blocks keep for the backward: attention."""
        records = (record for report in self.reports for record in report.records)
        of_attention = ("expand_multihead", "recover_attention")
        return any(r.pass_name in of_attention and r.action == "rewrote" for r in records)


def sizes_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sizes:
    """Read batch and length off the first integer tensor of a call, or the first tensor.

    Raises:
        ExplainError: the call has no tensor.
    """
    leaves = compat.pytree.tree_leaves((args, kwargs))
    tensors = [x for x in leaves if isinstance(x, torch.Tensor) and x.dim()]
    if not tensors:
        raise ExplainError(
            "The call has no tensor, so there is no batch to plan for. Pass what the model is "
            "called with, such as input_ids=ids, labels=ids; tensors on device 'meta' do."
        )
    whole = [x for x in tensors if not x.is_floating_point() and x.dim() > 1]
    first = (whole or tensors)[0]
    return Sizes(int(first.shape[0]), int(first.shape[1]) if first.dim() > 1 else 1)


def capture(
    model: nn.Module | Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    sizes: Sizes,
    options: Options,
    device: str,
    *,
    compare: bool = True,
) -> Capture:
    """Capture a call of ``model`` with the passes and, to ``compare``, without them.

    Raises:
        ExplainError: the call fails, or Dynamo captured no graph.
    """
    mode = compat.fake_mode()
    copied = _fake_copy(model, mode)
    given, named = _fake_inputs((tuple(args), dict(kwargs)), sizes, mode)
    found = Capture()

    def keep(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        found.names.update(_names(gm))
        found.parameters.append(_parameters(gm, example_inputs))
        found.classes |= _classes(gm)
        if device != "cpu":
            _attend_as_a_gpu_does(gm)
        unchanged = copy.deepcopy(gm)
        with planned_for(torch.device(device, 0)):
            found.reports.append(run(gm, PASSES, options).report)
            enforce_strict(options, found.reports[-1])
        found.after.append(_pair(compat.inductor_graphs(gm, example_inputs)))
        if compare or found.changes_blocks:
            original = copy.deepcopy(unchanged)
            found.before.append(_pair(compat.inductor_graphs(original, example_inputs)))
        else:
            found.before.append(found.after[-1])
        return unchanged.forward

    backend.keep_transformers_losses_in_one_graph()
    with mode, compat.fresh_capture():
        try:
            compiled: Callable[..., Any] = torch.compile(copied, backend=keep)
            compiled(*given, **named)
        except MemeffError:
            raise
        except Exception as error:
            raise ExplainError(_why_it_failed(model, error)) from error
    if not found.after:
        raise ExplainError(
            f"{_name(model)} ran without a graph being captured, so there is nothing to plan. "
            "A torch.compiler.disable around its forward, or a forward without tensor "
            "operations, does that."
        )
    return found


def _attend_as_a_gpu_does(gm: GraphModule) -> None:
    """Take dropout out of fused attention: on a CPU it means the unfused one, on a GPU it does not.

    A GPU draws dropout inside its attention kernel and keeps a seed, no mask.
    """
    for module in _levels(gm):
        for node in module.graph.nodes:
            if node.target is torch.nn.functional.scaled_dot_product_attention:
                if len(node.args) > 4:
                    node.args = (*node.args[:4], 0.0, *node.args[5:])
                if "dropout_p" in node.kwargs:
                    node.kwargs = {**node.kwargs, "dropout_p": 0.0}
        module.recompile()


def _levels(gm: GraphModule) -> list[GraphModule]:
    return [module for module in gm.modules() if isinstance(module, GraphModule)]


def _pair(graphs: Sequence[GraphModule]) -> Graphs:
    return Graphs(graphs[0], graphs[1] if len(graphs) > 1 else None)


def _name(model: object) -> str:
    return str(getattr(model, "__name__", type(model).__name__))


def _why_it_failed(model: object, error: Exception) -> str:
    said = f"{type(error).__name__}: {first_line(error)}"
    return (
        f"Calling {_name(model)} on tensors without memory failed: {said}\n"
        "Pass the inputs that its forward needs, as in explain(model, input_ids=ids, labels=ids). "
        "If they are right, the model reads values of tensors while it runs, which explain "
        "cannot follow."
    )


def _fake_copy(model: Any, mode: Any) -> Any:  # noqa: ANN401 - a module or any callable
    """Return the model with fake parameters and buffers; the original is not touched."""
    if not isinstance(model, nn.Module):
        return model
    model = getattr(model, "_orig_mod", model)
    memo: dict[int, Any] = {}
    with mode:
        for module in model.modules():
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                if tensor is not None and id(tensor) not in memo:
                    memo[id(tensor)] = _fake(tensor)
    return copied_with(model, memo)


def _fake(tensor: torch.Tensor) -> torch.Tensor:
    if type(tensor.data) is not torch.Tensor and not compat.is_fake(tensor.data):
        raise ExplainError(
            f"A parameter is a {type(tensor.data).__name__}, and explain reads plain tensors only. "
            "Explain the model before it is sharded or quantised; sharding is a setting of "
            "largest_batch."
        )
    empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(empty, requires_grad=tensor.requires_grad)
    return empty.requires_grad_(tensor.requires_grad)


def _fake_inputs(inputs: Any, sizes: Sizes, mode: Any) -> Any:  # noqa: ANN401 - a tree
    """Return the inputs as fake tensors whose batch and length are symbols.

    Dynamo fixes sizes of 0 and 1 and takes equal sizes for one, so it sees others in their place.
    """
    length = sizes.length if sizes.length == 1 else max(sizes.length, 3)
    batch = max(sizes.batch, 2)
    seen = {"batch": batch + (batch == length), "length": length}

    def fake(value: object) -> object:
        if not isinstance(value, torch.Tensor):
            return value
        roles = [_role(value, dim, sizes) for dim in range(value.dim())]
        shape = [seen.get(r, size) for r, size in zip(roles, value.shape, strict=True)]
        result = torch.empty(shape, dtype=value.dtype, device="cpu")
        for dim, role in enumerate(roles):
            if role:
                compat.mark_dynamic(result, dim)
        return result.requires_grad_(value.requires_grad)

    with mode:
        return compat.pytree.tree_map(fake, inputs)


def _role(tensor: torch.Tensor, dim: int, sizes: Sizes) -> str:
    if dim == 0:
        return "batch" if tensor.shape[0] == sizes.batch else ""
    return "length" if tensor.shape[dim] == sizes.length and sizes.length > 1 else ""


def _placeholders(gm: GraphModule) -> list[Node]:
    return [node for node in gm.graph.nodes if node.op == "placeholder"]


def _parameters(gm: GraphModule, example_inputs: Sequence[Any]) -> list[str]:
    return [
        compat.source_name(node) if isinstance(value, nn.Parameter) else ""
        for node, value in zip(_placeholders(gm), example_inputs, strict=True)
    ]


def _classes(gm: GraphModule) -> set[int]:
    """Return the sizes of the class dimension of what enters a loss."""
    found: set[int] = set()
    for module in _levels(gm):
        for node in module.graph.nodes:
            name = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
            if name not in LOSSES or not node.args or not isinstance(node.args[0], Node):
                continue
            value = compat.example_value(node.args[0])
            if isinstance(value, torch.Tensor) and value.dim() > 1:
                sizes = [size for size in (value.shape[1], value.shape[-1]) if type(size) is int]
                found |= set(sizes[-1:])
    return found


def _names(gm: GraphModule) -> dict[sympy.Symbol, sympy.Symbol]:
    """Return Dynamo's symbols of batch and length: those of dimension 0 and of the others."""
    names: dict[sympy.Symbol, sympy.Symbol] = {}
    for node in _placeholders(gm):
        value = compat.example_value(node)
        if not isinstance(value, torch.Tensor):
            continue
        for dim, size in enumerate(value.shape):
            formula = compat.size_formula(size)
            if formula.is_Symbol:
                names.setdefault(formula, LENGTH if dim else BATCH)
    return names
