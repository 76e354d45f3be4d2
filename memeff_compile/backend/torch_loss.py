"""Trace `F.linear_cross_entropy(options=...)` into one graph, despite a warning of PyTorch.

PyTorch forces `allow_retain_graph=True` while Dynamo traces, and warns that this keeps one more
buffer. The warning breaks the graph inside the function, so that the loss runs outside any graph.
This module sets `allow_retain_graph=True` itself before Dynamo traces, so PyTorch does not warn and
the loss stays in the graph. The pass `fuse_linear_cross_entropy` then replaces PyTorch's loss,
which therefore never allocates the extra buffer of `allow_retain_graph=True`. For other backends,
PyTorch's function is traced unchanged.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F

from .. import compat


@cache
def trace_torch_losses_whole(backend: Callable[..., Any]) -> None:
    """Let Dynamo trace PyTorch's chunked loss in one graph, if Dynamo captures the graph for this
    backend."""
    function: Any = getattr(F, "linear_cross_entropy", None)
    if function is None:  # before torch 2.13
        return

    chunks_probabilities = compat.chunks_probability_targets()

    @compat.constant_in_traces
    def is_ours() -> bool:
        capturing = compat.capturing_backend()
        return getattr(capturing, "stands_for", capturing) is backend

    def traced(
        input: torch.Tensor,
        linear_weight: torch.Tensor,
        target: torch.Tensor,
        *,
        options: Any = None,
        **settings: Any,
    ) -> Any:
        if options is not None and is_ours():
            of_classes = target.dtype == torch.int64 or chunks_probabilities
            is_smoothed = settings.get("label_smoothing", 0.0) != 0.0
            if is_smoothed or not of_classes or linear_weight.dim() != 2:
                options = None  # as PyTorch does, after a warning
            elif not options.allow_retain_graph:
                options = dataclasses.replace(options, allow_retain_graph=True)
        return original(input, linear_weight, target, options=options, **settings)

    original = compat.substitute_while_tracing(function, traced)
