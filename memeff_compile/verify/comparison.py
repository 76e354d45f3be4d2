"""Run two graphs on the arguments of one call, and measure how much their results differ.

The caller's state does not change:

- tensors that a graph may write to are copied;
- parameters are read through detached aliases;
- backward passes start from output gradients that the comparison generates;
- the random state is restored.

The caller's saved-tensor hooks and dispatch modes do not run for operations of the comparison.
Compiled autograd does not compile the backward passes of the comparison.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from .. import compat, system
from ..logits.attach import attach
from ..logits.recipe import DeferredOutput
from ..logits.tensor import DeferredLogits
from ..options import Options
from ..passes.graph.graph_info import levels_of
from .op_by_op import WIDER, KeptGraph, run_op_by_op, wide_outputs
from .tolerance import EXACT, Gap, Tolerance, gradient_gaps, slack_of, value_gap

log = logging.getLogger(__name__)

Compiled = Callable[..., Any]

# Outputs whose gradients are compared in one backward pass; none can hide another's.
_GROUPS = ("scalars", "tensors", "deferred")

_THROUGH = {"scalars": "", "tensors": " through other outputs", "deferred": " through the logits"}

_MOST_ENTRIES = 1 << 26  # of a larger output, evenly spaced rows are compared
# Values of `memeff.linear_cross_entropy` that change gradients on purpose, on a GPU.
LOSSY = ("mass", "block", "published")
LOSSY_OPS = tuple(f"memeff.{name}" for each in system.systems() for name in each.lossy_ops)
_GRADIENT_ROWS = 64  # rows of deferred logits that get a cotangent


class NotRunError(Exception):
    """The error for a comparison that is not possible; the message gives the reason."""


class PostponedError(Exception):
    """The error for a call with which the original and the rewritten graph cannot be compared.

    A later call may allow the comparison.
    """


@dataclass
class Verdict:
    """The result of comparing the rewritten graph with the original graph on one call's arguments.

    `exact` has the gaps (differences) in float64, and `as_run` those in the model's dtypes.
    `uncompiled` has the gaps of the rewritten graph without the compiler."""

    exact: list[Gap] = field(default_factory=list)
    as_run: list[Gap] = field(default_factory=list)
    uncompiled: list[Gap] = field(default_factory=list)
    has_gradients: bool = False
    why_not_exact: str = ""
    ran: str = "compiled"
    lossy: str = ""
    is_coded: bool = False

    @property
    def mismatches(self) -> list[Gap]:
        """Return the gaps (differences between tensors) that are larger than allowed.

        The gaps of the comparison in float64 come first, then the gaps in the model's dtypes. In
        each of the two groups, values come before gradients, each with the largest gap first.
        """
        return [*_too_far(self.exact), *_too_far(self.as_run)]

    @property
    def is_of_the_compiler(self) -> bool:
        """Return whether the mismatch comes from the compiler (by default Inductor).

        This is so if the rewritten graph agrees with the original graph when the rewritten graph
        runs op by op, without the compiler.
        """
        return bool(self.uncompiled) and not _too_far((*self.exact, *self.uncompiled))

    def difference(self) -> str:
        """Return text that lists up to three differences that are larger than allowed.

        If differences in float64 are larger than allowed, list only those. Otherwise list those in
        the model's dtypes."""
        exact = _too_far(self.exact)
        gaps, where = (exact, "in float64") if exact else (_too_far(self.as_run), "as run")
        more = f", and {len(gaps) - 3} more" if len(gaps) > 3 else ""
        return f"{where}, {'; '.join(map(str, gaps[:3]))}{more}."

    def agreement(self) -> str:
        """Return sentences that say how many values were compared, and how well they agree."""
        kinds = {gap.what for gap in (*self.exact, *self.as_run)}
        gradients = sum(what.startswith("gradient") for what in kinds)
        more = f" and {gradients} gradients" if self.has_gradients else ""
        counted = f"{len(kinds) - gradients} values{more}"
        parts = [f"The first call also ran the original graph, and {counted} agree."]
        if self.why_not_exact:
            parts.append(f"They were not compared in float64: {self.why_not_exact}.")
        elif self.exact:
            parts.append(f"Nearest to its bound in float64: {_nearest(self.exact)}.")
        if self.as_run:
            parts.append(f"As run ({self.ran}): {_nearest(self.as_run)}.")
        if self.lossy:
            mode = f"memeff.linear_cross_entropy={self.lossy!r} leaves a part of them out"
            parts.append(f"Gradients were not compared as run: {mode}.")
        if self.is_coded:
            why = "memeff.attention computes in low bits, of which float64 has none"
            parts.append(f"Nothing was compared as run: {why}.")
        return " ".join(parts)


def _too_far(gaps: Sequence[Gap]) -> list[Gap]:
    """Return the gaps (differences between tensors) that are too large.

    The gaps of values come first, then the gaps of gradients, each with the largest first."""
    far = (gap for gap in gaps if gap.share > 1)
    return sorted(far, key=lambda gap: (gap.what.startswith("gradient"), -gap.share))


def _nearest(gaps: Sequence[Gap]) -> Gap:
    return max(gaps, key=lambda gap: gap.share)


@dataclass
class _Trial:
    """The results of one run of one graph."""

    values: list[Any]
    groups: dict[str, list[int]]
    asks_gradient: list[bool]
    gradients: list[Tensor | None] | None
    after: dict[int, Tensor]
    drew: bool

    def named(self, inputs: Sequence[str]) -> list[tuple[str, Any]]:
        """Return the outputs and the written inputs of this run of a graph, each with its name.

        The written inputs are those to which the original or the rewritten graph may write. Their
        values are those after the run. `inputs` has the names of all inputs of the graph. Messages
        about differences use the names."""
        outputs = [(f"output {place}", value) for place, value in enumerate(self.values)]
        return outputs + [(f"{inputs[p]} after the call", value) for p, value in self.after.items()]


@dataclass
class Comparison:
    """Runs the original and the rewritten graph on the arguments of one call, and measures how much
    the results differ.
    """

    compiled: Compiled
    original: KeptGraph
    rewritten: KeptGraph
    plan: tuple[DeferredOutput, ...]
    options: Options
    reuses_memory: bool

    @cached_property
    def dropped(self) -> set[int]:
        """Return the positions of outputs that the rewritten graph does not compute because of
        `memeff.logits=none`."""
        if self.options.logits != "none":
            return set()
        values: Any = self.rewritten.module.graph.output_node().args[0]
        return {place for place, value in enumerate(values) if value is None}

    def make(self, args: Sequence[Any]) -> Verdict:
        """Run the original and the rewritten graph on these arguments and compare their results,
        without changing the caller's state.

        Raise NotRunError if the graph cannot be compared, or memory is too small. Raise
        PostponedError if the original graph raises an error for these arguments.
        """
        reason = self._obstacle(args)
        if reason:
            raise NotRunError(reason)
        verdict = Verdict()
        groups: Mapping[str, Sequence[int]] = {_GROUPS[0]: ()}
        try:
            with compat.beside_autograd():
                for group in _GROUPS:
                    if group in groups:
                        groups = {**groups, **self._compare_group(args, group, verdict)}
        except (NotRunError, PostponedError):
            raise
        except Exception as error:  # comparing must never cost the user a run
            log.debug("memeff_compile: a comparison failed", exc_info=True)
            raise NotRunError(_why_not(error)) from error
        factor = self.options.verify_tolerance
        for gaps in (verdict.exact, verdict.as_run, verdict.uncompiled):
            gaps[:] = [replace(gap, allowed=gap.allowed * factor) for gap in gaps]
        return verdict

    def _obstacle(self, args: Sequence[Any]) -> str:
        if self.original.obstacle:
            return self.original.obstacle
        memory: dict[int, int] = {}
        for place, (name, arg) in enumerate(zip(self.original.names, args, strict=True)):
            if not isinstance(arg, Tensor):
                continue
            if compat.is_dtensor(arg) or compat.is_sharded_by_fsdp(arg):
                return f"{name} is sharded over processes"
            if type(arg) not in (Tensor, nn.Parameter):
                return f"{name} is a {type(arg).__name__}, which cannot be copied blindly"
            if arg.layout != torch.strided:
                return f"{name} has the layout {arg.layout}"
            key = arg.untyped_storage().data_ptr()
            other = memory.setdefault(key, place) if key else place
            if other != place and (self.is_written(place) or self.is_written(other)):
                shared = self.original.names[other]
                return f"{name} and {shared} share memory that the graph writes to"
        return ""

    def is_written(self, place: int) -> bool:
        """Return whether the original or the rewritten graph may write to the input at `place`."""
        return self.original.is_written[place] or self.rewritten.is_written[place]

    def _compare_group(
        self, args: Sequence[Any], group: str, verdict: Verdict
    ) -> dict[str, list[int]]:
        """Run the original and the rewritten graph, and compare the gradients of one group of
        outputs.

        The groups are outputs with one element, deferred logits (computed when first read), and
        other outputs. In the call for outputs with one element, also compare the values of all
        outputs. The graphs run in the model's dtypes and in float64. Return the names of all
        groups, each with the indices of its outputs.
        """
        positions = {place for entry in self.plan for place in entry.places}
        run = partial(self._trial, args, group, positions)
        try:
            plain = run(partial(_run, self.original))
        except Exception as error:
            if _is_out_of_memory(error):
                raise NotRunError("the original graph ran out of memory") from None
            raise PostponedError(f"the original graph raised {in_one_line(error)}") from None
        truth = exact = None
        odd = self.original.dtypes - WIDER.keys() - set(WIDER.values())
        if not verdict.why_not_exact and odd:
            verdict.why_not_exact = f"the graph computes in {next(iter(odd))}"
        if not verdict.why_not_exact:
            try:
                truth = run(partial(_run, self.original, wide=True), wide=True)
                wide = self._op_by_op(wide_outputs(self.plan), wide=True)
                exact = run(wide, wide=True)
            except Exception as error:
                truth = exact = None
                verdict.why_not_exact = _why_not(error)
        if truth is not None and exact is not None:
            verdict.exact += self._gaps(exact, truth, None, EXACT, group, with_integers=True)
            del exact
        # Dropout draws other numbers for another dtype: then there is no truth to measure by.
        yardstick = None if plain.drew else truth
        # On a GPU, products of fp32 may be multiplied in fewer bits.
        on_gpu = any(isinstance(v, Tensor) and v.device.type == "cuda" for v in plain.values)
        coarse = on_gpu and torch.get_float32_matmul_precision() != "highest"
        slack = slack_of(self.original.dtypes, coarse_products=coarse)

        nodes = (n for level in levels_of(self.rewritten.module) for n in level.graph.nodes)
        is_coded = any(str(n.target).startswith(LOSSY_OPS) for n in nodes)

        def measured(ours: _Trial | Gap) -> list[Gap]:
            if isinstance(ours, Gap):
                return [ours]
            gaps = self._gaps(ours, plain, yardstick, slack, group)
            if self.options.linear_cross_entropy in LOSSY:
                verdict.lossy = self.options.linear_cross_entropy
                gaps = [gap for gap in gaps if not gap.what.startswith("gradient")]
            if is_coded:
                verdict.is_coded, gaps = True, []
            return [*(self._kinds(ours, plain) if group == _GROUPS[0] else []), *gaps]

        # A compiler draws other random numbers, rounds elsewhere, or keeps pointers.
        changes_more = plain.drew or truth is None or self.reuses_memory
        verdict.ran = "op by op" if changes_more else "compiled"
        ours = self._tried(run, self._op_by_op(self.plan) if changes_more else self.compiled)
        gaps = measured(ours)
        verdict.as_run += gaps
        limit = self.options.verify_tolerance
        if verdict.ran == "compiled" and any(gap.share > limit for gap in gaps):
            verdict.uncompiled += measured(self._tried(run, self._op_by_op(self.plan)))
        if isinstance(ours, Gap):
            return {}
        verdict.has_gradients |= plain.gradients is not None
        return plain.groups

    def _op_by_op(self, plan: Sequence[DeferredOutput], *, wide: bool = False) -> Compiled:
        """Return the rewritten graph as a function that runs op by op, without the compiler (by
        default Inductor)."""
        return attach(partial(_run, self.rewritten, wide=wide), plan, clone_hidden=False)

    @staticmethod
    def _tried(run: Callable[..., _Trial], call: Compiled) -> _Trial | Gap:
        try:
            return run(call)
        except Exception as error:
            if _is_out_of_memory(error):
                raise NotRunError("the rewritten graph ran out of memory beside it") from None
            return Gap("the rewritten graph", 0.0, 0.0, words=f"raised {in_one_line(error)}")

    def _trial(
        self,
        args: Sequence[Any],
        group: str,
        deferred: set[int],
        call: Compiled,
        *,
        wide: bool = False,
    ) -> _Trial:
        given, leaves = self._inputs(args, wide)
        with _autocast_restored(args, off=wide), _same_random_numbers(args) as has_drawn:
            outputs = list(call(*given))
            values = [_seen(output) for output in outputs]
            asks = [isinstance(o, Tensor) and o.requires_grad for o in outputs]
            groups: dict[str, list[int]] = {}
            for place, output in enumerate(outputs):
                if asks[place] and place not in self.dropped:
                    kind = "scalars" if output.numel() == 1 else "tensors"
                    groups.setdefault("deferred" if place in deferred else kind, []).append(place)
            chosen = {place: outputs[place] for place in groups.get(group, ())}
            del outputs
            gradients = _gradients(chosen, leaves, group)
            drew = has_drawn()
        after = {
            place: given[place].detach()
            for place in range(len(args))
            if isinstance(args[place], Tensor) and self.is_written(place)
        }
        return _Trial(values, groups, asks, gradients, after, drew)

    def _inputs(self, args: Sequence[Any], wide: bool) -> tuple[list[Any], list[Tensor | None]]:
        """Return the arguments for one run of the original or of the rewritten graph, and the leaf
        tensors that get gradients.

        With `wide`, floating-point tensors are converted to float64, and complex tensors to
        complex128. Tensors are copied, except parameters that no graph writes to and whose dtype
        does not change. The list of leaf tensors has None for each argument that gets no
        gradient."""
        made: list[tuple[Any, Tensor | None]] = []
        known: dict[int, int] = {}
        for place, arg in enumerate(args):
            first = known.setdefault(id(arg), place) if isinstance(arg, Tensor) else place
            made.append(made[first] if first < place else self._input(place, arg, wide))
        return [value for value, _ in made], [leaf for _, leaf in made]

    def _input(self, place: int, arg: Any, wide: bool) -> tuple[Any, Tensor | None]:
        if not isinstance(arg, Tensor):
            return arg, None
        dtype = WIDER.get(arg.dtype, arg.dtype) if wide else arg.dtype
        is_read_only = self.original.is_parameter[place] and not self.is_written(place)
        is_shared = is_read_only and dtype == arg.dtype
        with torch.no_grad():
            value = arg.detach() if is_shared else _copy(arg.detach(), dtype)
        if not arg.requires_grad:
            return value, None
        leaf = value.requires_grad_()
        # Writes to a leaf raise, but were legal for the user's tensor.
        return (_copy(leaf, dtype) if self.is_written(place) else leaf), leaf

    def _kinds(self, ours: _Trial, plain: _Trial) -> list[Gap]:
        """Compare the outputs of two runs except for their values: which outputs are None, their
        dtypes, and whether they require a gradient."""
        words: dict[int, str] = {}
        for place, (mine, theirs) in enumerate(zip(ours.values, plain.values, strict=True)):
            if isinstance(mine, Tensor) != isinstance(theirs, Tensor):
                words[place] = f"is {_kind(mine)} and not {_kind(theirs)}"
            elif isinstance(mine, Tensor) and mine.dtype != theirs.dtype:
                words[place] = f"has dtype {mine.dtype} and not {theirs.dtype}"
            elif ours.asks_gradient[place] != plain.asks_gradient[place]:
                words[place] = f"has requires_grad={ours.asks_gradient[place]}"
        kept = words.keys() - self.dropped
        return [Gap(f"output {place}", 0.0, 0.0, words=words[place]) for place in sorted(kept)]

    def _gaps(
        self,
        ours: _Trial,
        plain: _Trial,
        truth: _Trial | None,
        tolerance: Tolerance,
        group: str,
        *,
        with_integers: bool = False,
    ) -> list[Gap]:
        """Measure how far the results of the rewritten graph (`ours`) are from those of the
        original graph (`plain`). If there is a result in float64 (`truth`), measure the errors of
        `ours` and `plain` with respect to `truth`.
        """
        names = self.original.names
        goal, own = (plain, None) if truth is None else (truth, plain)
        gaps = []
        if group == _GROUPS[0]:
            found, wanted = ours.named(names), goal.named(names)
            yardstick = [None] * len(found) if own is None else [v for _, v in own.named(names)]
            gaps = [
                value_gap(what, value, expected, tolerance, mine)
                for (what, value), (_, expected), mine in zip(found, wanted, yardstick, strict=True)
                if isinstance(value, Tensor)
                and isinstance(expected, Tensor)
                and (with_integers or expected.is_floating_point() or expected.is_complex())
            ]
        if ours.gradients is not None and goal.gradients is not None:
            yardsticks = None if own is None else own.gradients
            named = [f"{name}{_THROUGH[group]}" for name in names]
            gaps += gradient_gaps(named, ours.gradients, goal.gradients, tolerance, yardsticks)
        return gaps


def _run(graph: KeptGraph, *args: object, wide: bool = False) -> tuple[Any, ...]:
    return run_op_by_op(graph, args, wide=wide)


def run_plainly(graph: KeptGraph, *args: object) -> tuple[Any, ...]:
    """Run a graph op by op, without a compiler such as Inductor.

    If the results of the original and the rewritten graph differ too much, this function runs the
    original graph in place of the compiled rewritten graph."""
    with _autocast_restored(args):
        return run_op_by_op(graph, args)


def _kind(value: Any) -> str:
    return "a tensor" if isinstance(value, Tensor) else repr(value)


def _seen(output: Any) -> Any:
    """Return the values of an output that are compared; for a large output, only evenly spaced
    rows."""
    if not isinstance(output, Tensor):
        return output
    rows = _rows(output, _MOST_ENTRIES // max(output.shape[-1] if output.dim() else 1, 1))
    value = output.detach() if rows is None else _by_rows(output.detach())[rows]
    return value.mul(1) if isinstance(value, DeferredLogits) else value


def _rows(output: Tensor, most: int) -> Tensor | None:
    """Return the positions of evenly spaced rows, or None if there are few enough rows to compare
    all."""
    count = output.numel() // max(output.shape[-1], 1) if output.dim() > 1 else output.numel()
    most = max(most, 1)
    if count <= most or (output.dim() <= 1 and count <= _MOST_ENTRIES):
        return None
    return torch.arange(most, device=output.device) * count // most


def _by_rows(output: Tensor) -> Tensor:
    return output.reshape(-1, output.shape[-1]) if output.dim() > 1 else output


def _gradients(
    outputs: Mapping[int, Tensor], leaves: Sequence[Tensor | None], group: str
) -> list[Tensor | None] | None:
    """Return the gradient of each input.

    This function chooses gradients of the outputs, from which the backward pass starts. The chosen
    gradients are equal in every run.
    """
    asked = [leaf for leaf in leaves if leaf is not None]
    if not outputs or not asked:
        return None
    heads, cotangents = [], []
    for number, (place, output) in enumerate(outputs.items()):
        if group == "deferred":
            rows = _rows(output, _GRADIENT_ROWS)
            output = output if rows is None else _by_rows(output)[rows]
        heads.append(output)
        if group == "scalars":
            cotangents.append(torch.full_like(output, 1 + number % 8 / 4))
            continue
        # Halves up to two, which every dtype holds exactly.
        halves = torch.Generator().manual_seed(place)
        drawn = torch.randint(1, 5, output.shape, generator=halves) / 2
        sign = torch.randint(0, 2, output.shape, generator=halves) * 2 - 1
        cotangents.append((drawn * sign).to(output.device, output.dtype))
    unique = {id(leaf): leaf for leaf in asked}
    found = torch.autograd.grad(heads, list(unique.values()), cotangents, allow_unused=True)
    by_leaf = dict(zip(unique, found, strict=True))
    return [None if leaf is None else by_leaf[id(leaf)] for leaf in leaves]


def _copy(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Copy a tensor with its strides, because compiled code relies on them."""
    if tensor.numel() == 0:
        return tensor.to(dtype, copy=True)
    sides = zip(tensor.shape, tensor.stride(), strict=True)
    extent = 1 + sum((size - 1) * stride for size, stride in sides)
    memory = tensor.as_strided((extent,), (1,), tensor.storage_offset())
    return memory.to(dtype, copy=True).as_strided(tensor.shape, tensor.stride(), 0)


@contextlib.contextmanager
def _same_random_numbers(args: Sequence[Any]) -> Iterator[Callable[[], bool]]:
    """Restore the current state of the random number generators when the context ends.

    Yield a function that returns whether any random numbers were drawn since the context began.
    """
    places = {arg.device for arg in args if isinstance(arg, Tensor)} - {torch.device("cpu")}
    kinds = {device.type for device in places} or {"cuda"}
    with contextlib.ExitStack() as stack:
        for kind in kinds:
            indices = [device.index or 0 for device in places if device.type == kind]
            stack.enter_context(torch.random.fork_rng(indices, device_type=kind))

        def states() -> list[Tensor]:
            modules = [(torch.get_device_module(device), device) for device in places]
            return [torch.get_rng_state(), *(m.get_rng_state(device) for m, device in modules)]

        before = states()
        yield lambda: not all(map(torch.equal, before, states()))


@contextlib.contextmanager
def _autocast_restored(args: Sequence[Any], *, off: bool = False) -> Iterator[None]:
    """Restore autocast at the end of this context, even if a graph raises an error inside an
    autocast region. In this context, autocast does not cache casts, because cached casts of
    temporary copies would stay in memory until the outermost autocast region ends.
    """
    kinds = sorted({"cpu"} | {arg.device.type for arg in args if isinstance(arg, Tensor)})
    kinds = [kind for kind in kinds if kind != "meta"]
    before = [(k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in kinds]
    caches = torch.is_autocast_cache_enabled()
    depth = _autocast_depth()
    torch.set_autocast_cache_enabled(False)
    try:
        for kind in kinds if off else ():
            torch.set_autocast_enabled(kind, False)
        with torch.set_grad_enabled(torch.is_grad_enabled()):
            yield
    finally:
        for kind, is_on, dtype in before:
            torch.set_autocast_enabled(kind, is_on)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(caches)
        while _autocast_depth() > depth:
            torch.autocast_decrement_nesting()


def _autocast_depth() -> int:
    torch.autocast_increment_nesting()
    return int(torch.autocast_decrement_nesting())


def _is_out_of_memory(error: BaseException) -> bool:
    text = str(error).lower()
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and ("not enough memory" in text or "out of memory" in text)
    )


def _why_not(error: BaseException) -> str:
    return "there was no memory for it" if _is_out_of_memory(error) else in_one_line(error)


def in_one_line(error: BaseException) -> str:
    """Return the text of an error as one line."""
    first = str(error).strip().split("\n")[0]
    text = f"{type(error).__name__}: {first}" if first else type(error).__name__
    return text.rstrip(".") if len(text) <= 300 else f"{text[:297]} (and so on)"
