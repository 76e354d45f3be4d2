"""The backend: options, passes, inner compiler, and the wrapper that hands out deferred logits.

    torch.compile(model, backend="memeff")

torch finds :func:`memeff` through the entry point group ``torch_dynamo_backends``; nothing of ours
needs to be imported. What the passes did is in :func:`memeff_compile.last_report`.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, cast, overload

import torch
from torch.fx import GraphModule

from . import compat, report
from .errors import MemeffError, OptionError
from .kernels.coded_weight import CODECS
from .kernels.device import decided_by_measurement
from .logits.attach import accept, attach
from .model.weights.compress import compress_for_compile
from .options import Options, key_of
from .passes import PASSES
from .passes.graph.pipeline import enforce_strict, run
from .verify.first_call import verified
from .verify.op_by_op import keep

log = logging.getLogger(__name__)

Compilable = TypeVar("Compilable", bound=Callable[..., Any])


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
    _refuse_codec(chosen)
    keep_transformers_losses_in_one_graph()
    pieces = compat.inputs_from_other_graphs(gm)
    _refuse_dropped(example_inputs, pieces)
    original = None if chosen.verify == "off" else keep(gm, chosen)
    # A checkpoint around the compiled function would count what our fake operations save.
    with compat.unseen_by_saved_tensor_hooks():
        outcome = run(gm, PASSES, chosen)
    report.record_graph(outcome.report)
    enforce_strict(chosen, outcome.report)
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


def _refuse_codec(options: Options) -> None:
    if options.weights in CODECS:
        raise OptionError(
            f"memeff.weights is {options.weights!r}, and a backend cannot compress a model: it "
            "sees graphs, which other instances of a class run too, and not who owns their "
            f"weights. Call memeff_compile.compress_(model, {options.weights!r}) before "
            f"torch.compile, or memeff_compile.compile(model, weights={options.weights!r}), which "
            "does so; memeff.weights itself is 'exact' or 'off'."
        )


# torch._dynamo.reset() calls this.
memeff.reset = report.clear  # type: ignore[attr-defined]


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


@overload
def compile(
    model: Compilable,
    *,
    mode: str | None = None,
    options: Mapping[str, object] | Options | None = None,
    dynamic: bool | None = None,
    fullgraph: bool = False,
    disable: bool = False,
    **settings: object,
) -> Compilable: ...


@overload
def compile(
    model: None = None,
    *,
    mode: str | None = None,
    options: Mapping[str, object] | Options | None = None,
    dynamic: bool | None = None,
    fullgraph: bool = False,
    disable: bool = False,
    **settings: object,
) -> Callable[[Compilable], Compilable]: ...


def compile(
    model: Compilable | None = None,
    *,
    mode: str | None = None,
    options: Mapping[str, object] | Options | None = None,
    dynamic: bool | None = None,
    fullgraph: bool = False,
    disable: bool = False,
    **settings: object,
) -> Compilable | Callable[[Compilable], Compilable]:
    """Compile with `backend="memeff"`, checking the options now and not at the first call.

    `torch.compile` does not look at the options of a backend until the first call, and refuses
    `mode` next to `options`; this does neither.

    Args:
        model: A module or function; leave it out to use the call as a decorator.
        mode: An Inductor mode, such as "reduce-overhead".
        options: As in `torch.compile(options=...)`, or an `Options`.
        dynamic, fullgraph, disable: As in `torch.compile`.
        **settings: Options of ours by keyword: `logits="eager"` is `memeff.logits`.
            `weights="win4"` (or "tier", "rans") calls `compress_` on the model first;
            `compression_report(model)` is what it returned.

    Returns:
        What `torch.compile` returns.

    Raises:
        OptionError: An option has an unknown name, a wrong type or a value out of range.

    Example:
        >>> compiled = memeff_compile.compile(model, logits="eager")  # doctest: +SKIP
    """
    checked = _parse(mode, options, settings)
    if checked.weights in CODECS:
        if model is None:  # a decorator: what it decorates decides
            return partial(
                compile,
                mode=mode,
                options=options,
                dynamic=dynamic,
                fullgraph=fullgraph,
                disable=disable,
                **settings,
            )
        skip = (*checked.skip.get("*", ()), *checked.skip.get("encode_weights", ()))
        compress_for_compile(model, checked.weights, skip)
        checked = replace(checked, weights="exact")
    wrapped = torch.compile(
        model,
        backend="memeff",
        options=checked.to_dict() or None,
        dynamic=dynamic,
        fullgraph=fullgraph,
        disable=disable,
    )
    return cast("Compilable | Callable[[Compilable], Compilable]", wrapped)


def _parse(
    mode: str | None,
    options: Mapping[str, object] | Options | None,
    settings: Mapping[str, object],
) -> Options:
    given = options.to_dict() if isinstance(options, Options) else options
    named = {key_of(name): value for name, value in settings.items()}
    if not isinstance(given, Mapping):
        return Options.parse(mode, named if given is None else given)
    twice = sorted(key for key in named if key in given)
    if twice:
        raise OptionError(f"{twice[0]} is given by keyword and in options; give it once.")
    return Options.parse(mode, {**given, **named})


def reset() -> None:
    """Forget every compiled graph and every report; calls `torch._dynamo.reset()`."""
    torch._dynamo.reset()
    report.clear()


keep_transformers_losses_in_one_graph()
