"""Compile layers and output projections sharded by FSDP2 that Dynamo would leave out of every
graph.

FSDP2 puts hooks around each layer, and Dynamo ends a graph at a hook. If a checkpoint surrounds the
hooks, as in transformers before 5.23, Dynamo skips the layer. If you compile the model as a whole,
such layers then run without compilation (a PyTorch limitation). So this module compiles each layer
separately, which gives each layer a graph inside its checkpoint.

Dynamo also leaves out an output projection with hooks around it, because Dynamo skips the code of
PyTorch's linear layer. This module compiles the projection's `forward`, between the hooks. The
logits are then deferred, so that a loss after the projection is computed from hidden states and
weight, without the logits. FSDP2 gathers the weight before the output projection runs. Loss and
backward pass need the weight right after the projection. So in training this module keeps FSDP2
from freeing the weight in between, even if `reshard_after_forward` is set.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from .. import compat
from ..options import Options
from ..passes.losses.head import is_wide
from ..report import Record

_in_graphs: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Sharded modules whose weights were seen in a graph."""


def notice(inputs: Iterable[object]) -> list[Tensor]:
    """Return those inputs of a graph that are weights gathered by FSDP2, and record the modules to
    which these weights belong.
    """
    weights = [each for each in inputs if isinstance(each, Tensor) and compat.fsdp_group(each)]
    for weight in weights:
        _in_graphs.update(compat.fsdp_group(weight))
    return weights


def left_out(weights: Sequence[Tensor]) -> Record | None:
    """Return a remark for the report about layers that no graph contains, or None.

    Call this function after the graph that takes the gathered `weights` was captured. Layers of
    one class share a graph. So if one layer of the class is in a graph, all layers of the class are
    compiled.
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


def compile_apart(options: Options) -> list[Record]:
    """Compile, in place, the modules that Dynamo leaves out of the graphs of the model being
    captured.

    Returns: A note on the layers that this call compiled, and a note on the output projections that
        it compiled.
    """
    model = compat.compiled_module()
    if model is None:
        return []
    found = list[Record]()
    given = {"backend": "memeff", "options": options.to_dict(), "fullgraph": False}
    if layers := _layers_apart(model):
        for layer in layers:
            compat.compile_once(layer, given, lambda layer: not compat.awaits_backward(layer))
        said = (
            f"{len(layers)} layers are compiled one by one, in place: Dynamo skips a layer whose "
            "checkpoint wraps the hooks of FSDP2."
        )
        found.append(Record("backend", "note", "layers_compiled", said, sites=len(layers)))
    if options.logits != "eager" and (heads := compile_heads(model, options)):
        said = (
            "The output projection has an FSDP2 group of its own, or one with other modules. Its "
            "forward is compiled by itself, and in training the group stays gathered until the "
            "backward pass."
        )
        found.append(Record("backend", "note", "head_compiled", said, sites=heads))
    return found


def compile_heads(model: nn.Module, options: Options) -> int:
    """Compile, in place, output projections that have FSDP2's hooks around them; return how many
    were compiled.

    These projections return deferred logits, which are computed only on first use.
    `memeff.logits=none` (return no logits) has no effect here, because the loss is in a later graph
    and takes the deferred logits as input.
    """
    found = [each for each in model.modules() if _is_head_apart(each)]
    given = {"backend": "memeff", "options": replace(options, logits="deferred").to_dict()}
    for head in found:
        compat.compile_between_hooks(head, given, _stays_gathered)
    return len(found)


def _is_head_apart(module: nn.Module) -> bool:
    return (
        isinstance(module, nn.Linear)
        and is_wide(module.out_features, module.in_features)
        and compat.is_fsdp2_module(module)
        and not compat.is_compiled_by_itself(module)
        and not compat.is_tensor_parallel(module.weight)
    )


def _stays_gathered(head: nn.Module) -> None:
    """Keep the weights of an FSDP2 group gathered from now until the backward pass; in inference,
    let FSDP2 free them as usual.

    FSDP2 holds a second copy of the gathered weights until the end of the outermost module's
    forward pass, in which the loss usually runs. So this function also frees the second copy.
    """
    compat.keep_gathered(head, torch.is_grad_enabled())
    compat.free_last_gather(head)


def compile_layers(model: nn.Module, given: Mapping[str, Any]) -> int:
    """Compile layers one by one, in place, if Dynamo would leave them out of the graph of the whole
    model.

    Args:
        model: the model to compile.
        given: the arguments of `torch.compile` for the model.

    Returns:
        The number of layers compiled.
    """
    found = _layers_apart(model)
    for layer in found:
        layer.compile(**{**given, "fullgraph": False})  # its hooks end a graph
    return len(found)


def _layers_apart(model: nn.Module) -> list[nn.Module]:
    return [each for each in model.modules() if _is_checkpointed_around_hooks(each)]


def _is_checkpointed_around_hooks(module: nn.Module) -> bool:
    return (
        compat.is_fsdp2_module(module)
        and getattr(module, "gradient_checkpointing", False) is True
        and type(module).__call__ is not nn.Module.__call__
        and not compat.is_compiled_by_itself(module)
    )
