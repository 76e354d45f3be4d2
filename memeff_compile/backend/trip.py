"""Take one captured graph through all steps of the backend, and wrap the compiled result.

The class `Trip` holds the state of the graph during these steps. The backend analyses the graph
twice: before the passes and after them. After compilation, functions of this module wrap the
compiled graph, for example to check its first call. Each of these functions takes the compiled
callable and the `Trip` object. Each returns a callable with the same arguments, or the compiled
callable itself if no wrapping is needed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch.fx import GraphModule, Node

from .. import compat, report, system
from ..errors import MemeffError
from ..logits.attach import accept, attach, with_missing_outputs
from ..logits.saved_graphs import Around, savable
from ..options import Options
from ..passes.attention.mask_reader import hand_over
from ..passes.graph import cuts, last_product
from ..passes.graph import repeated_layers as layers
from ..passes.graph.base import GraphPass
from ..passes.graph.graph_info import GraphInfo, ambient_region
from ..passes.graph.pipeline import Outcome, enforce_strict, run
from ..verify.first_call import verified
from ..verify.op_by_op import KeptGraph, keep
from . import cuda_graphs, sharded_layers
from .few_graphs import cause_of
from .replay import Recorder, engine_for

log = logging.getLogger(__name__)

Compiled: TypeAlias = Callable[..., Any]


@dataclass
class Trip:
    """One captured graph, and the results of the backend's steps on this graph."""

    gm: GraphModule  # the graph, which the passes edit in place
    example_inputs: Sequence[Any]  # the tensors and sizes it was captured with
    options: Options  # of this compilation
    apart: list[report.Record] = field(default_factory=list)  # notes on layers compiled with it
    pieces: list[int] = field(init=False)  # inputs that another compiled partition passes on
    original: KeptGraph | None = None  # the original graph, if it will be compared
    outcome: Outcome = field(init=False)  # the passes' results
    # whether it is recorded as a CUDA graph
    choice: cuda_graphs.Choice = field(default_factory=cuda_graphs.Choice)
    rewritten: KeptGraph | None = None  # the rewritten graph, if it will be compared
    present: list[bool] | None = None  # which outputs exist, if the passes set some to None
    cuts: tuple[Node, ...] = ()  # the nodes at which partitions of the graph start
    is_last_plain: bool = False  # whether the last partition runs op by op
    unread: list[int] = field(default_factory=list)  # inputs that the rewritten graph does not read

    def rewrite(self, passes: Sequence[GraphPass]) -> None:
        """Analyse the graph, run the passes, report their results, and analyse the graph again."""
        gm, options = self.gm, self.options
        self.pieces = compat.inputs_from_other_graphs(gm)
        _refuse_dropped(self.example_inputs, self.pieces)
        self.original = None if options.verify == "off" else keep(gm, options)
        # A checkpoint around the compiled function would count tensors saved by fake operations.
        with compat.unseen_by_saved_tensor_hooks():
            self.outcome = run(gm, passes, options)
        if options.preset == "off":
            records = (*self.outcome.report.records, _OFF)
            self.outcome.report = replace(self.outcome.report, records=records)
        if self.apart:
            records = (*self.outcome.report.records, *self.apart)
            self.outcome.report = replace(self.outcome.report, records=records)
        info = GraphInfo(gm, options, ambient_region())
        self._choose(info)
        self._guard(info)
        self._cut(info)
        self._hand_over(info)
        self._look_for_layers(info)
        if reason := compat.recompile_reason():
            self.outcome.report = replace(self.outcome.report, cause=cause_of(reason))
        report.record_graph(self.outcome.report)
        enforce_strict(options, self.outcome.report)
        if self.outcome.changed:
            self.rewritten = None if self.original is None else keep(gm, options)
            self.present = _drop_missing_outputs(gm)
            writes = {write.node for write in info.writes}
            counts = [
                any(user.users or user.op == "output" or user in writes for user in node.users)
                for node in info.placeholders
            ]
            self.unread = [place for place, is_read in enumerate(counts) if not is_read]

    def _choose(self, info: GraphInfo) -> None:
        """Decide whether the graph is recorded as a CUDA graph, and report the decision."""
        try:
            choice = cuda_graphs.decide(info, self.options)
        except Exception as error:  # the graph runs all the same
            choice = cuda_graphs.undecided(error)
        self.choice = choice
        if choice.record is not None:
            records = (*self.outcome.report.records, choice.record)
            replays = None if choice.roles is None else report.Replays()
            self.outcome.report = replace(self.outcome.report, records=records, replays=replays)

    def _cut(self, info: GraphInfo) -> None:
        """Decide where to split the graph into partitions, and report the decision.

        The graph may be split in these cases:

        - weights are updated during the backward pass;
        - the graph has repeated layers;
        - the graph is a block in an activation checkpoint.
        """
        try:
            self.cuts = cuts.starts(info)
            said = [cuts.said(info, self.cuts) if self.cuts else None]
        except Exception as error:  # the graph runs whole all the same
            said = [cuts.undecided(error)]
        for find in (self._find_layers, self._find_last_product):
            if not self.cuts:
                said.append(find(info))
        if found := tuple(record for record in said if record is not None):
            records = (*self.outcome.report.records, *found)
            self.outcome.report = replace(self.outcome.report, records=records)

    def _find_layers(self, info: GraphInfo) -> report.Record | None:
        """Split the graph between repeated layers; return a record of the split for the graph's
        report."""
        try:
            repeated = layers.repeated_layers(info)
            if repeated.starts and self.reuses_memory:
                repeated = layers.Repeated(why_not="cuda_graphs_of_inductor")
            found = layers.said(repeated)
        except Exception as error:  # the graph is compiled whole
            return layers.undecided(error)
        self.cuts = repeated.starts
        return found

    def _find_last_product(self, info: GraphInfo) -> report.Record | None:
        """Split the graph before the last matrix product of a checkpointed block; return a
        record of the split for the graph's report."""
        try:
            found = None if self.cuts or self.reuses_memory else last_product.last_product(info)
        except Exception as error:  # the graph is compiled whole
            return last_product.undecided(error)
        if found is None:
            return None
        self.cuts, self.is_last_plain = (found,), True
        return last_product.said(found)

    def _hand_over(self, info: GraphInfo) -> None:
        """Record the formulas of the attention masks that this graph partition computes, so that
        passes can recognize these masks in later partitions."""
        try:
            hand_over(info)
        except Exception:  # later partitions find no records
            log.warning("memeff_compile: internal error, masks were not handed over", exc_info=True)

    def _look_for_layers(self, info: GraphInfo) -> None:
        """Once the loss of a sharded model has been captured, report those layers of the model that
        are in no graph."""
        if not compat.shards_by_fsdp2():
            return
        done = self.outcome.report
        returned = map(info.tensor, info.output.all_input_nodes)
        has_loss = any(value is not None and value.dim() == 0 for value in returned)
        inputs = map(compat.example_input, info.placeholders)
        try:
            gathered = sharded_layers.notice(inputs)
            found = sharded_layers.left_out(gathered) if has_loss and done.training else None
        except Exception:  # the graph runs all the same
            log.warning("memeff_compile: internal error, layers were not counted", exc_info=True)
            return
        if found is not None:
            self.outcome.report = replace(done, records=(*done.records, found))

    def _guard(self, info: GraphInfo) -> None:
        """Replace Dynamo's guards on graph inputs that belong to an optional part of this package,
        such as compressed weights.

        In the code, such an optional part is called a system. Each system replaces the guards on
        its own tensors by cheaper guards. Graphs in which gradients are enabled, and exported
        graphs, keep Dynamo's guards.
        """
        if torch.compiler.is_exporting() or any(each.grad for each in info.regions.values()):
            return
        for hooks in system.hooks():
            hooks.guard(info)

    @property
    def inductor_patches(self) -> dict[str, Any]:
        """Return changes to Inductor's config: the changes that passes need, the user's changes,
        and the changes that keep results correct.
        """
        advice, given = self.outcome.inductor, self.options.inductor_patches()
        return {**advice, **given, **self.choice.patches}

    @property
    def reuses_memory(self) -> bool:
        """Return whether the compiled graph stores addresses of its tensors, as CUDA graphs do."""
        patches = self.inductor_patches
        return self.options.inner == "inductor" and compat.inductor_uses_cudagraphs(patches)


_OFF = report.Record(
    "backend",
    "note",
    "switched_off",
    "memeff.preset is 'off', so that no pass ran: the graph went on as it came.",
    "Leave memeff.preset out, and MEMEFF_DISABLE out of the environment, for the passes to run.",
)


def _refuse_dropped(example_inputs: Sequence[Any], pieces: Sequence[int]) -> None:
    if any(example_inputs[place] is None for place in pieces):
        raise MemeffError(
            "memeff.logits='none' dropped logits that a later part of the model reads: DDP "
            "compiles the model in pieces, one per bucket of gradients, and the logits cross from "
            "one to the next. Set memeff.logits to 'deferred' or 'eager', or "
            "torch._dynamo.config.optimize_ddp = False."
        )


def _drop_missing_outputs(gm: GraphModule) -> list[bool] | None:
    """Remove outputs that are None from the graph, and return which outputs remain.

    The list has one flag for each original output: whether the output remains. Return None if there
    was no output to remove.

    AOTAutograd rejects outputs that are None, but only if DDP splits the model.
    """
    output = gm.graph.output_node()
    values: Any = output.args[0]
    present = [value is not None for value in values]
    if all(present):
        return None
    output.args = (tuple(value for value in values if value is not None),)
    gm.recompile()
    return present


def replay(compiled: Compiled, trip: Trip) -> Compiled:
    """Replay a decoding step as a CUDA graph if the same step is called again."""
    roles, device, use = trip.choice.roles, trip.choice.device, trip.outcome.report.replays
    if roles is None or device is None or use is None:
        return compiled
    return Recorder(compiled, roles, use, engine_for(device))


def put_back(compiled: Compiled, trip: Trip) -> Compiled:
    """Wrap the compiled callable so that it returns None in the positions of outputs that were
    removed from the graph."""
    return compiled if trip.present is None else with_missing_outputs(compiled, trip.present)


def accept_pieces(compiled: Compiled, trip: Trip) -> Compiled:
    """Wrap the compiled callable so that its arguments may be deferred logits (logits that are
    computed when first read) that another graph partition returned."""
    return accept(compiled, trip.pieces) if trip.pieces else compiled


def attach_logits(compiled: Compiled, trip: Trip) -> Compiled:
    """Wrap the compiled callable so that it returns deferred logits (computed when first read)
    instead of the hidden states that the rewritten graph returns."""
    plan, use = trip.outcome.deferred, trip.outcome.report.logits
    if not plan:
        return compiled
    return attach(compiled, plan, clone_hidden=trip.reuses_memory, unread=trip.unread, use=use)


def let_be_saved(compiled: Compiled, inner: Compiled, trip: Trip) -> Compiled:
    """Return the compiled callable in a form that `aot_compile` can save.

    The saved form contains only the inner compiler's callable and the wrappers that every process
    needs. A loaded graph is not compared with the original graph, and is not recorded as a CUDA
    graph.
    """
    around = Around(trip.present, trip.outcome.deferred, trip.reuses_memory, trip.unread)
    how = "in pieces" if trip.cuts else f"with memeff.inner={trip.options.inner!r}"
    return savable(compiled, inner, around, how)


def verify_first_call(compiled: Compiled, trip: Trip) -> Compiled:
    """Wrap the compiled callable so that its first call is compared with the original graph, if the
    option `memeff.verify` is set."""
    if trip.original is None or trip.rewritten is None:
        return compiled
    return verified(
        compiled,
        original=trip.original,
        rewritten=trip.rewritten,
        plan=trip.outcome.deferred,
        pieces=trip.pieces,
        options=trip.options,
        graph_report=trip.outcome.report,
        reuses_memory=trip.reuses_memory,
    )


WRAPPERS: tuple[Callable[[Compiled, Trip], Compiled], ...] = (
    replay,  # a recording takes and returns only tensors of the graph
    put_back,
    accept_pieces,
    attach_logits,  # outside of the wrapper that restores missing outputs: a plan counts them
    verify_first_call,  # around all the others, which it compares
)
