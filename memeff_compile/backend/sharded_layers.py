"""Layers that FSDP2 shards, and that Dynamo leaves out of every graph.

FSDP2 puts hooks around each layer, and Dynamo ends a graph at a hook. If a checkpoint surrounds the
hooks, as in transformers before 5.23, Dynamo skips the layer: under any backend that compiles the
whole model, such layers run op by op. If layers are compiled one by one, each has a separate graph
inside its checkpoint.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from .. import compat
from ..report import Record

_in_graphs: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Sharded modules whose weights were seen in a graph."""


def notice(inputs: Iterable[object]) -> list[Tensor]:
    """Return the gathered weights among the inputs of a graph, and record which modules have
    them."""
    weights = [each for each in inputs if isinstance(each, Tensor) and compat.fsdp_group(each)]
    for weight in weights:
        _in_graphs.update(compat.fsdp_group(weight))
    return weights


def left_out(weights: Sequence[Tensor]) -> Record | None:
    """Return a remark on layers that appeared in no graph, after the graph of a head with these
    gathered weights.

    Layers of one class share a graph: if one layer was in it, all layers are.
    """
    every = compat.sharded_with(weights[0]) if weights else []
    every = [each for each in every if not compat.is_compiled_by_itself(each)]
    seen = {type(each) for each in every if each in _in_graphs}
    named = [type(each).__name__.removeprefix("FSDP") for each in every if type(each) not in seen]
    if not named:
        return None
    counted = " and ".join(f"{count} {name}" for name, count in Counter(named).items())
    sentence = (
        f"{counted} run op by op: no graph has their weights. Dynamo ends a graph at the hooks "
        "that FSDP2 puts around each of them, and skips a layer whose checkpoint wraps them."
    )
    hint = (
        "Call memeff_compile.compile(model) after fully_shard and with checkpointing on: it "
        "compiles such layers one by one. Or call layer.compile(backend='memeff') on each."
    )
    return Record("backend", "declined", "layers_left_out", sentence, hint, sites=len(named))


def compile_layers(model: nn.Module, given: Mapping[str, Any]) -> int:
    """Compile layers one by one, in place, if a graph of the whole model cannot contain them.

    Args:
        model: the model to compile.
        given: the arguments of `torch.compile` for it.

    Returns:
        How many layers were compiled.
    """
    found = [each for each in model.modules() if _is_checkpointed_around_hooks(each)]
    for layer in found:
        layer.compile(**{**given, "fullgraph": False})  # its hooks end a graph
    return len(found)


def _is_checkpointed_around_hooks(module: nn.Module) -> bool:
    return (
        compat.is_fsdp2_module(module)
        and getattr(module, "gradient_checkpointing", False) is True
        and type(module).__call__ is not nn.Module.__call__
        and not compat.is_compiled_by_itself(module)
    )
