"""The backend: options, passes, inner compiler, and the wrapper that hands out deferred logits.

    torch.compile(model, backend="memeff")

torch finds :func:`memeff` through the entry point group ``torch_dynamo_backends``; nothing of ours
needs to be imported. What the passes did is in :func:`memeff_compile.last_report`.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.fx import GraphModule

from . import compat, report
from .deferred import accept, attach
from .errors import MemeffError
from .kernels.coded_weight import CODECS
from .kernels.linear_cross_entropy import decided_by_measurement
from .model.compress_when_safe import CompressWhenSafe
from .op_by_op import keep
from .options import Options
from .passes import PASSES
from .passes.encode_weights import dense_weights
from .passes.pipeline import run
from .verify import verified

log = logging.getLogger(__name__)


def memeff(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile a captured graph: our passes, then the inner compiler.

    Args:
        gm: the graph Dynamo captured.
        example_inputs: the tensors and sizes it was captured with.
        mode: an Inductor mode, as torch.compile's ``mode=``.
        options: ``memeff.*`` keys for us, every other key for Inductor.

    Raises:
        OptionError: an option is unknown, mistyped or out of range.
        StrictError: a pass named in ``memeff.strict`` did not fire.
        MemeffError: ``memeff.logits`` is ``none`` and another part of the model reads the logits.
    """
    chosen = Options.parse(mode, options)
    keep_transformers_losses_in_one_graph()
    pieces = compat.inputs_from_other_graphs(gm)
    _refuse_dropped(example_inputs, pieces)
    original = None if chosen.verify == "off" else keep(gm, chosen)
    # A checkpoint around the compiled function would count what our fake operations save.
    with compat.unseen_by_saved_tensor_hooks():
        dense = dense_weights(gm, chosen) if chosen.weights in CODECS else []
        outcome = run(gm, PASSES, chosen)
    report.record_graph(outcome.report)
    rewritten = keep(gm, chosen) if original is not None and outcome.changed else None
    outputs = _drop_missing_outputs(gm) if outcome.changed else None
    compiled = _inner(gm, example_inputs, chosen, outcome.inductor)
    if outputs is not None:
        compiled = _put_back(compiled, outputs)
    if pieces:
        compiled = accept(compiled, pieces)
    reuses = chosen.inner == "inductor" and compat.inductor_uses_cudagraphs(
        chosen.inductor_patches()
    )
    if outcome.deferred:
        compiled = attach(
            compiled, outcome.deferred, clone_hidden=reuses, use=outcome.report.logits
        )
    if dense and not outcome.report.training:
        compiled = CompressWhenSafe(compiled, dense, chosen.weights, outcome.report)
    if original is None or rewritten is None:
        return compiled
    return verified(
        compiled,
        original=original,
        rewritten=rewritten,
        plan=outcome.deferred,
        pieces=pieces,
        options=chosen,
        graph_report=outcome.report,
        reuses_memory=reuses,
    )


def _drop_missing_outputs(gm: GraphModule) -> list[bool] | None:
    """Take outputs that are None out of the graph and return which ones stayed; None if all did.

    AOTAutograd takes them, but not where DDP compiles a model in pieces.
    """
    output = compat.output_node(gm.graph)
    values: Any = output.args[0]
    present = [value is not None for value in values]
    if all(present):
        return None
    output.args = (tuple(value for value in values if value is not None),)
    gm.recompile()
    return present


def _put_back(compiled: Callable[..., Any], present: Sequence[bool]) -> Callable[..., Any]:
    """Wrap a compiled callable so that it returns None again where outputs were taken out."""

    def run(*args: object) -> tuple[Any, ...]:
        results = iter(compiled(*args))
        return tuple(next(results) if is_there else None for is_there in present)

    return run


def _refuse_dropped(example_inputs: Sequence[Any], pieces: Sequence[int]) -> None:
    if any(example_inputs[place] is None for place in pieces):
        raise MemeffError(
            "memeff.logits='none' dropped logits that a later part of the model reads: DDP "
            "compiles the model in pieces, one per bucket of gradients, and the logits cross from "
            "one to the next. Set memeff.logits to 'deferred' or 'eager', or "
            "torch._dynamo.config.optimize_ddp = False."
        )


def reset() -> None:
    """Forget reports; ``torch._dynamo.reset()`` calls this."""
    report.clear()


memeff.reset = reset  # type: ignore[attr-defined]


def _inner(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    options: Options,
    advised: Mapping[str, Any],
) -> Callable[..., Any]:
    if options.inner == "eager":
        forward: Callable[..., Any] = gm.forward
        return forward
    if options.inner == "aot_eager":
        return compat.compile_with_aot_eager(gm, example_inputs)
    patches = {**advised, **options.inductor_patches()}
    return compat.compile_with_inductor(gm, example_inputs, patches, decided_by_measurement())


def keep_transformers_losses_in_one_graph() -> None:
    """Keep a one-time warning of transformers from splitting a model and its loss.

    Classes without a ``loss_type`` (GPT-2) warn once, through a cached logger method, when their
    loss is looked up; Dynamo breaks the graph there, so that head and loss land in two graphs.
    Naming that one bound method as ignorable while tracing keeps them together.
    """
    modeling = sys.modules.get("transformers.modeling_utils")
    warn_once = getattr(getattr(modeling, "logger", None), "warning_once", None)
    if warn_once is not None:
        compat.ignore_while_tracing(warn_once)


keep_transformers_losses_in_one_graph()
