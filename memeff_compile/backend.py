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
from .deferred import attach
from .options import Options
from .passes import PASSES
from .passes.pipeline import run

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
    """
    chosen = Options.parse(mode, options)
    _keep_transformers_losses_in_one_graph()
    outcome = run(gm, PASSES, chosen)
    report.record_graph(outcome.report)
    compiled = _inner(gm, example_inputs, chosen)
    if not outcome.deferred:
        return compiled
    clone = chosen.inner == "inductor" and compat.inductor_uses_cudagraphs(_patches(chosen))
    return attach(compiled, outcome.deferred, clone_hidden=clone)


def reset() -> None:
    """Forget reports; ``torch._dynamo.reset()`` calls this."""
    report.clear()


memeff.reset = reset  # type: ignore[attr-defined]


def _inner(gm: GraphModule, example_inputs: Sequence[Any], options: Options) -> Callable[..., Any]:
    if options.inner == "eager":
        forward: Callable[..., Any] = gm.forward
        return forward
    if options.inner == "aot_eager":
        return compat.compile_with_aot_eager(gm, example_inputs)
    return compat.compile_with_inductor(gm, example_inputs, _patches(options))


def _patches(options: Options) -> dict[str, Any]:
    return options.inductor_patches()


def _keep_transformers_losses_in_one_graph() -> None:
    """Keep a one-time warning of transformers from splitting a model and its loss.

    Classes without a ``loss_type`` (GPT-2) warn once, through a cached logger method, when their loss
    is looked up; Dynamo breaks the graph there, so that head and loss land in two graphs. Naming that
    one bound method as ignorable while tracing keeps them together.
    """
    modeling = sys.modules.get("transformers.modeling_utils")
    warn_once = getattr(getattr(modeling, "logger", None), "warning_once", None)
    if warn_once is None:
        return
    from torch._dynamo import config

    ignored = getattr(config, "ignore_logging_functions", None)
    if isinstance(ignored, set):
        ignored.add(warn_once)


_keep_transformers_losses_in_one_graph()
