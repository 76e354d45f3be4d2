"""Decides whether a logits output can be handed back as a deferred tensor, and plans it.

A Hugging Face model returns its logits beside the loss. As a graph output that needs a gradient
they would be kept, and the backward would add a logits-sized tensor of zeros. So the fused loss
replaces that output by the hidden states (N x D) and the backend wraps them: ``out.logits`` has the
right shape, dtype and gradient, and is computed when somebody looks.

    before: logits = linear(h, W);  loss = cross_entropy(logits, y);  return loss, logits
    after:  loss = memeff.linear_cross_entropy(h, W, y);              return loss, h   (+ a plan)

Not deferred, with the reason in the report: weights that are not direct inputs of the graph or that
FSDP frees after the forward pass, checkpoint bodies, export.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from .. import compat
from ..logits import DeferredOutput, LogitsRecipe
from .base import Decline, Note
from .editor import Editor
from .graph_info import GraphInfo
from .linear_head import Chain, replay_rows

NAME = "defer_logits"

STALE_SENTENCE = (
    "out.logits is computed when first read; reading it after the weights changed raises "
    "StaleLogitsError; options={'memeff.logits': 'eager'} restores eager logits"
)

GATHERED_SENTENCE = (
    "out.logits is computed when first read; FSDP frees the gathered head in the "
    "backward pass, and "
    "a first read after loss.backward() raises StaleLogitsError; "
    "options={'memeff.logits': 'eager'} "
    "restores eager logits"
)


@dataclass(frozen=True)
class LogitsOutput:
    """A logits tensor among the graph's outputs: which ones, and how it comes from the head."""

    node: Node
    chain: Chain
    detached: bool


def check(info: GraphInfo, outputs: Sequence[LogitsOutput]) -> Decline | None:
    """Return why these outputs cannot be deferred (or dropped), or None."""
    if not outputs:
        return None
    node = outputs[0].node
    path = info.module_path(outputs[0].chain.head.node)
    mode = "eager" if info.options.skips(NAME, path) else info.options.logits
    if info.parent is not None:
        return Decline(
            "logits_leave_checkpoint",
            "the logits leave an activation checkpoint",
            "return only the loss from the checkpointed function",
            node,
        )
    if mode == "none":
        return None
    if mode == "eager":
        return Decline(
            "logits_kept",
            "the logits are an output of the compiled graph and memeff.logits is 'eager' "
            "(or memeff.skip names them), so they are computed and kept; a fused loss would "
            "compute them a second time",
            "return only the loss from the compiled function, or set memeff.logits to "
            "'deferred' or 'none'",
            node,
        )
    reason = _why_not_deferrable(info, outputs)
    if not reason:
        return None
    return Decline(
        "logits_not_deferrable",
        f"the logits are an output of the compiled graph and cannot be deferred: {reason}",
        "set options={'memeff.logits': 'none'} if nobody reads out.logits, or return only the loss "
        "from the compiled function",
        node,
    )


def _why_not_deferrable(info: GraphInfo, outputs: Sequence[LogitsOutput]) -> str:
    if compat.is_exporting():
        return "torch.export needs plain tensors as outputs"
    for output in outputs:
        head = output.chain.head
        weights = [
            head.weight,
            head.bias,
            *(s.value for s in output.chain.steps if s.kind == "bias"),
        ]
        for weight in weights:
            if weight is None:
                continue
            if weight.op != "placeholder":
                return f"{weight.name} is computed inside the graph"
            if compat.fsdp_frees_after_forward(compat.example_input(weight)):
                return "FSDP frees the gathered head weight after the forward pass"
        if output.chain.moved:
            return "they are returned with the vocabulary dimension moved"
    return ""


def rewrite(
    info: GraphInfo, outputs: Sequence[LogitsOutput], editor: Editor
) -> tuple[list[DeferredOutput], list[Note]]:
    """Replace the outputs by hidden states (or None); return the plan and the notes."""
    if not outputs:
        return [], []
    by_node = {o.node: o for o in outputs}
    values: Any = info.output.args[0]
    slots = list(values)
    plan: list[DeferredOutput] = []
    notes: list[Note] = []
    for index, slot in enumerate(slots):
        output = by_node.get(slot) if isinstance(slot, Node) else None
        if output is None:
            continue
        if info.options.logits == "none":
            slots[index] = None
            notes.append(("dropped", "logits_none", "out.logits is None, as memeff.logits asks"))
            continue
        chain = output.chain
        hidden_value = info.tensor(chain.head.hidden)
        assert hidden_value is not None
        with editor.at(info.output, like=output.node):
            hidden = replay_rows(
                editor, chain.head.hidden, chain.row_steps, _static_size(hidden_value)
            )
        slots[index] = hidden
        plan.append(_planned(info, index, output))
        notes.append(("deferred", "logits_deferred", _stale_sentence(output)))
    editor.set_output((type(values)(slots),))
    return plan, notes


def _stale_sentence(output: LogitsOutput) -> str:
    weight = compat.example_input(output.chain.head.weight)
    is_gathered = weight is not None and compat.fsdp_shard(weight) is not None
    return GATHERED_SENTENCE if is_gathered else STALE_SENTENCE


def _static_size(hidden: torch.Tensor) -> int:
    size = compat.known_size(hidden.shape[-1])
    assert size is not None, "the check admits only a static hidden size"
    return size


def _planned(info: GraphInfo, index: int, output: LogitsOutput) -> DeferredOutput:
    positions = {placeholder: i for i, placeholder in enumerate(info.placeholders)}
    head = output.chain.head
    steps: list[tuple[str, object]] = []
    vectors: list[int] = []
    dtype = head.compute_dtype
    for step in output.chain.point_steps:
        value = info.tensor(step.node)
        assert value is not None
        if step.kind == "bias":  # a wider vector widens the logits
            vectors.append(positions[step.value])
            steps.append(("bias", None if value.dtype == dtype else value.dtype))
        else:
            steps.append((step.kind, step.value))
        dtype = value.dtype
    return DeferredOutput(
        output=index,
        weight=positions[head.weight],
        bias=None if head.bias is None else positions[head.bias],
        vectors=tuple(vectors),
        recipe=LogitsRecipe(head.compute_dtype, head.transposed, tuple(steps)),
        detached=output.detached,
    )
