"""The backend "memeff": it validates options, runs the passes, compiles the graph with the inner
compiler (usually Inductor), and wraps the compiled graph.

    torch.compile(model, backend="memeff")

torch finds :func:`memeff` through the entry point group `torch_dynamo_backends`, so you need not
import memeff_compile. :func:`memeff_compile.last_report` shows the results of the passes.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, cast, overload

import torch
from torch.fx import GraphModule

from .. import compat, report, system
from ..errors import OptionError, UnsupportedInputError
from ..kernels.library import direct_in_inductor
from ..options import Options, key_of, or_off
from ..passes import PASSES, in_order
from ..passes.graph.cuts import compiled_in_pieces
from .ahead import compile_ahead, start_workers
from .few_graphs import for_any_batch
from .sharded_layers import compile_apart, compile_layers
from .torch_loss import trace_torch_losses_whole
from .trip import WRAPPERS, Trip, let_be_saved

log = logging.getLogger(__name__)

Compilable = TypeVar("Compilable", bound=Callable[..., Any])


def memeff(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Run the passes on a captured graph, then compile the graph with Inductor or another compiler.

    Args:
        gm: the graph that Dynamo captured.
        example_inputs: the tensors and sizes with which Dynamo captured the graph.
        mode: an Inductor mode, as `mode=` of torch.compile.
        options: `memeff.*` keys, and keys for Inductor.

    Raises:
        OptionError: an option has an unknown name, a wrong type or a value out of range.
        StrictError: a pass named in `memeff.strict` did not apply.
        MemeffError: `memeff.logits` is `none`, and DDP splits the model between the logits and the
            code that reads them.
    """
    chosen = or_off(Options.parse(mode, options))
    for hooks in system.hooks():
        hooks.refuse(chosen)
    if chosen.inner == "inductor":
        start_workers()
    trip = Trip(gm, example_inputs, chosen)
    if chosen.preset != "off" and compat.shards_by_fsdp2():
        trip.apart = compile_apart(chosen)
    keep_transformers_losses_in_one_graph()
    trip.rewrite(in_order(PASSES, chosen.passes))
    compiled = inner = _inner(trip)
    for wrapper in WRAPPERS:
        compiled = wrapper(compiled, trip)
    return let_be_saved(compiled, inner, trip)


# torch._dynamo.reset() calls this.
memeff.reset = report.clear  # type: ignore[attr-defined]
trace_torch_losses_whole(memeff)  # torch loads this module before it traces a function for it


def _inner(trip: Trip) -> Callable[..., Any]:
    """Compile the rewritten graph with the compiler that `memeff.inner` names, by default Inductor.

    If the optimizer updates weights during the backward pass, the graph is split into partitions,
    and each partition is compiled separately.
    """
    gm, options = trip.gm, trip.options
    if options.inner == "eager":
        forward: Callable[..., Any] = gm.forward
        return forward
    tag = "".join(each.identity() for each in options.passes)
    if options.inner == "inductor" and not torch.compiler.is_exporting():
        compile_ahead(gm, trains=trip.outcome.report.training)

    def compile_one(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        if options.inner == "aot_eager":
            return compat.compile_with_aot_eager(gm, example_inputs)
        direct_in_inductor()
        return compat.compile_with_inductor(gm, example_inputs, trip.inductor_patches, tag)

    if trip.cuts:
        # A CUDA graph of Inductor's keeps the addresses of weights, so each layer needs its own.
        shares = not trip.reuses_memory
        how: dict[str, Any] = {"shares": shares, "is_last_plain": trip.is_last_plain}
        with _at_once(trip):
            return compiled_in_pieces(gm, trip.example_inputs, trip.cuts, compile_one, **how)
    return compile_one(gm, trip.example_inputs)


def _at_once(trip: Trip) -> AbstractContextManager[None]:
    """Return a context in which Inductor compiles the kernels of several graph partitions in
    parallel."""
    tensors = [each for each in trip.example_inputs if isinstance(each, torch.Tensor)]
    if trip.options.inner != "inductor" or any(each.device.type != "cpu" for each in tensors):
        return nullcontext()
    trains = trip.outcome.report.training
    return compat.waits_for_kernels_at_end(trip.inductor_patches, trains=trains)


def keep_transformers_losses_in_one_graph() -> None:
    """Make Dynamo ignore a one-time warning of transformers while tracing.

    transformers warns for model classes without a `loss_type` (such as GPT-2), and this would
    cause a graph break between output projection and loss.
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
    kv_cache: int | str | Mapping[str, Any] | None = None,
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
    kv_cache: int | str | Mapping[str, Any] | None = None,
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
    kv_cache: int | str | Mapping[str, Any] | None = None,
    **settings: object,
) -> Compilable | Callable[[Compilable], Compilable]:
    """Compile with `backend="memeff"`, and check the options immediately instead of at the first
    call.

    A module is compiled in place and returned, as `module.compile()` does. `undo(model)` undoes the
    compilation. `torch.compile` reads a backend's options only at the first call, and refuses
    `mode` together with `options`. This function checks the two immediately and accepts them
    together. Dynamo skips a layer if the layer's activation checkpoint surrounds FSDP2's hooks.
    This function compiles such layers one by one.

    Args:
        model: A module or function; leave it out to use the call as a decorator.
        mode: An Inductor mode, such as "reduce-overhead".
        options: As in `torch.compile(options=...)`, or an `Options`.
        dynamic: As in `torch.compile`.
        fullgraph: As in `torch.compile`.
        disable: As in `torch.compile`.
        kv_cache: For a transformers model that generates: the number of bits of a `KVCache`, a
            mapping of its settings, or "static" for an uncompressed cache. Every later
            `generate()` then uses such a cache, as after `use_kv_cache_`.
        **settings: Options of memeff as keywords: `logits="eager"` sets `memeff.logits`.
            `weights="win4"` calls `compress_(model, "win4")` before the compilation. The call
            compresses the bf16 weights of linear layers with the lossless codec `win4`. Any codec
            (compressed format) of `compress_` can be passed. `compression_report(model)` returns
            the report of the compression. `ternary="a4.8"` calls `ternarize_(model, "a4.8")` before
            the compilation. The call makes the weights of linear layers ternary, except for output
            projections. The recipe "a4.8" says that these ternary layers quantise their inputs to 4
            or 8 bits. Any recipe of `ternarize_` can be passed.

    Returns:
        The module itself, compiled; for a function, the result of `torch.compile`.

    Raises:
        OptionError: An option has an unknown name, a wrong type or a value out of range.
        UnsupportedInputError: The model is neither a module nor a function. If you pass `kv_cache`,
            the error may also mean that the cache does not support a setting, or that the model
            cannot use a KVCache. Such a model has no `generate`, is an encoder-decoder, or needs
            another kind of cache.

    Example:
        >>> memeff_compile.compile(model, logits="eager")  # doctest: +SKIP
        >>> memeff_compile.compile(model, kv_cache=4).generate(ids)  # doctest: +SKIP
    """
    if not (model is None or callable(model)):
        said = f"compile was given a {type(model).__name__}; it needs a module or a function."
        raise UnsupportedInputError(said)
    if isinstance(model, type) and issubclass(model, torch.nn.Module):
        # torch.compile would change the class, and with it all its instances.
        said = f"compile was given the class {model.__name__}; it needs a model that is made of it."
        raise UnsupportedInputError(said)
    if dynamic not in (None, True, False):
        raise OptionError(f"dynamic is {dynamic!r}; True, False or None is needed.")
    checked = or_off(_parse(mode, options, settings))
    if checked.inner == "inductor" and not disable:
        start_workers()  # again: this module may have been loaded before CUDA was initialized
    given: dict[str, Any] = {"dynamic": dynamic, "fullgraph": fullgraph, "disable": disable}
    if model is None:  # a decorator: the function or module that follows decides
        given |= settings
        return partial(compile, mode=mode, options=options, kv_cache=kv_cache, **given)
    request = system.Request(model, checked, kv_cache)
    asked = [hooks for hooks in system.hooks() if hooks.wants(request)]
    for hooks in asked:  # all of them, before one changes the model
        hooks.check(request)
    for hooks in asked:
        request = replace(request, options=hooks.prepare(request))
    given |= {"backend": "memeff", "options": request.options.to_dict() or None}
    if not isinstance(model, torch.nn.Module):
        return cast("Compilable", torch.compile(model, **given))
    if not any(hooks.compile(request, given) for hooks in asked):
        compile_layers(model, given)
        # Models of one class go on to share graphs, as in a search over hyperparameters.
        compat.compile_in_place(model, {**given, **compat.room_for_graphs(shared=True)})
        if dynamic is None:
            compat.wrap_compiled(model, for_any_batch)
    return cast("Compilable", model)


def _parse(
    mode: str | None, options: Mapping[str, object] | Options | None, settings: Mapping[str, object]
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
    """Delete every compiled graph, report and reusable KV cache; this function also calls
    `torch._dynamo.reset()`."""
    torch.compiler.reset()
    for hooks in system.hooks():
        hooks.forget()
    report.clear()


keep_transformers_losses_in_one_graph()
start_workers()  # torch loads this module before it traces a model for it
