"""Rewrite an output projection and its cross entropy into memeff::linear_cross_entropy.

The op never builds the N x V logits.

    before: logits = linear(h, W)
            f = logits.float().view(-1, V)
            loss = cross_entropy(f, y)
            return loss, logits
    after:  nll, lse, *_ = memeff.linear_cross_entropy(h, W, y)
            loss = nll.sum() / (y != -100).sum()
            return loss, h       (the logits are computed from h if code reads them)

If the output projection has a LoRA adapter, the fused op takes the adapter's low-rank matrices as
arguments.

Paper: Cut Your Losses in Large-Vocabulary Language Models (Cut Cross-Entropy), arXiv 2411.09009.

A *site* is one output projection and every consumer of its logits that the fused op supports:

- cross_entropy, log_softmax followed by nll_loss, and log_softmax followed by gather;
- logsumexp (z-loss);
- metrics of the same logits (argmax, entropy, losses without a gradient).

Consumers that use the same rows (tokens) and targets share one call of the fused op. Sums and means
over rows stay ATen nodes. So the mean is nan if all tokens of a batch are ignored, as in eager
PyTorch.

The pass declines if one of these conditions holds:

- the targets are class probabilities;
- a node that the fused op does not support uses the logits;
- between the output projection and the loss, a node writes in place to the logits or to the
  projection's inputs;
- between two losses, a node writes in place to their targets or class weights;
- the output projection runs with gradients, and every loss runs with gradients switched off;
- the output projection runs with gradients switched off, and a loss runs with gradients;
- the weight is an integer tensor or a tensor subclass;
- each class of the logits is multiplied by a different number;
- the output projection is in another graph.

The page docs/passes/fuse-linear-cross-entropy.md lists the compilation report's code for each
reason to decline.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import sympy
import torch
from torch.fx import Node

from .. import compat
from ..kernels import linear_cross_entropy as op_folder
from ..kernels.device import speed_note, where_it_runs
from .graph.base import Decline, Done, Gain, GraphPass
from .graph.canonical import is_several
from .graph.editor import Editor
from .graph.graph_info import GraphInfo, node_name, written_by
from .losses import outputs, shards
from .losses.checks import check_operands, check_regions, check_tails, check_writes, mutated
from .losses.chunked import CHUNKED_NAMES, is_chunked, read_chunked
from .losses.emit import emit_group, emit_size, gathered, groups_of, is_total, pieces_met
from .losses.head import Chain, HeadReader
from .losses.tails import (
    ENTROPIES,
    LOSSES,
    METRICS,
    Site,
    SizeRead,
    Tail,
    TailReader,
    has_sum,
    loss_outside,
    reads_a_size,
    reads_sum,
    unread,
    without_parts,
)
from .losses.unfused import unfused_heads

NO_LOSS = (*METRICS, "logit_sum")
"""Tails that may also occur in a model without a loss."""


class FuseLinearCrossEntropy(GraphPass):
    name = "fuse_linear_cross_entropy"

    def find(self, info: GraphInfo) -> Iterable[Site | Decline]:
        """Yield one match for each output projection and its losses.

        Also yield a Decline (the reason for no rewrite) for losses, and for trained output
        projections, that are in no match."""
        reader = HeadReader(info)
        tail_reader = TailReader(info, reader)
        by_head: dict[Node, list[Tail]] = defaultdict(list)
        losses, judged = False, set[Node]()
        for node in info.visit(info.gm.graph.nodes):
            is_own = node_name(node) in CHUNKED_NAMES
            for answer in [read_chunked(info, node)] if is_own else tail_reader.tails(node):
                losses = losses or isinstance(answer, Decline) or answer.kind not in NO_LOSS
                if isinstance(answer, Decline):
                    judged.add(answer.node or node)
                    yield answer
                else:
                    by_head[answer.chain.head.node].append(answer)
        for head_node in info.visit(by_head):
            tails = by_head[head_node]
            if any(t.kind in LOSSES or (t.kind == "logit" and has_sum(t, tails)) for t in tails):
                site = self._site(info, reader, tail_reader, head_node, without_parts(tails))
                judged.update([head_node, *tails[0].chain.head.nodes])
                yield site
        if not losses:
            for answer in loss_outside(info):
                judged.add(answer.node or info.output)
                yield answer
        yield from unfused_heads(info, reader, judged)

    def _site(
        self,
        info: GraphInfo,
        reader: HeadReader,
        tail_reader: TailReader,
        head_node: Node,
        tails: list[Tail],
    ) -> Site | Decline:
        site = Site(tails[0].chain.head, tails)
        for node in site.head.summed:
            for user in node.users:
                if user not in site.head.nodes:
                    return _reused(node, user, tails[0], "logits")
            site.covered.append(node)
        site.aside.extend(node for t in tails for node in t.aside)
        served = {t.node for t in tails}
        throughs = {node for t in tails for node in t.through}
        # The op of F.linear_cross_entropy is head and loss: no other node reads its logits.
        queue, seen = [] if head_node in served else [head_node], {head_node}
        output = info.output
        while queue:
            node = queue.pop()
            site.covered.append(node)
            chain = reader.chain(node) if node not in throughs else None
            for user in node.users:
                if user in served or user in seen or user in site.aside:
                    continue
                if reads_a_size(user) and not compat.is_dtensor(info.value(head_node)):
                    shaped = chain or tail_reader.chain_of_log_probs(node)
                    if isinstance(shaped, Chain) and not shaped.moved:
                        site.sizes.append(SizeRead(user, node, shaped))
                        site.covered.append(user)
                        continue
                if user is output and isinstance(chain, Chain):
                    site.outputs.append(outputs.LogitsOutput(node, chain))
                    continue
                is_parted = is_several(user) and all(
                    part in throughs or isinstance(reader.chain(part), Chain) for part in user.users
                )
                is_apart = node in throughs or user is output or user in throughs or is_parted
                onward = None if is_apart else reader.chain(user)
                is_logits = isinstance(onward, Chain) and onward.head.node is head_node
                if user in throughs or is_parted or is_logits:
                    seen.add(user)
                    queue.append(user)
                    continue
                rest = unread(user)
                if rest:
                    site.aside.extend(rest)
                    continue
                what = "log-probabilities" if node in throughs else "logits"
                return _reused(node, user, tails[0], what)
        site.covered.extend(served)
        return site

    def check(self, info: GraphInfo, match: Site) -> Decline | None:
        for judge in (check_operands, check_tails, check_regions, check_writes):
            refusal = judge(info, match)
            if refusal is not None:
                return refusal
        return outputs.check(info, match.outputs)

    def gain(self, info: GraphInfo, match: Site) -> Gain | None:
        """Return the formula for the bytes of the logits, before and after the rewrite.

        Return None if the loss is PyTorch's own fused op, which never builds more than a chunk of
        logits.
        """
        head = match.head
        if is_chunked(match.tails[0]):
            return None
        hidden, weight = info.value(head.hidden), info.value(head.weight)
        n, d, v = sympy.symbols("N D V", integer=True, positive=True)
        training = info.region.grad and (hidden.requires_grad or weight.requires_grad)
        upcast = any(s.kind == "to" for t in match.tails for s in t.chain.steps)
        how: dict[str, Any] = {"dtype": head.compute_dtype, "training": training, "upcast": upcast}
        how |= {"returns_logits": bool(match.outputs), "compiled": info.options.inner == "inductor"}
        before = op_folder.bytes_before(n, d, v, **how)
        sizes = {
            "N": math.prod(compat.size_hint(size) for size in hidden.shape[:-1]),
            "D": compat.size_hint(hidden.shape[-1]),
            "V": compat.size_hint(weight.shape[1 if head.transposed else 0]),
        }
        # the operands of a call, apart from N rows and V columns, have R more features
        if head.parts:
            rank = sum(compat.size_hint(info.value(part.low).shape[-1]) for part in head.parts)
            sizes, d = {**sizes, "R": rank}, d + sympy.Symbol("R", integer=True, positive=True)
        common: dict[str, Any] = {
            "dtype": head.compute_dtype,
            "workspace": info.options.linear_cross_entropy_workspace,
            "has_softcap": any(s.kind == "tanh" for s in match.tails[0].chain.steps),
            "gradient_filter": info.options.linear_cross_entropy,
        }
        split, columns = shards.split_of(info, head), sizes["V"]
        if isinstance(split, op_folder.Split):
            columns = split.shard.columns
            if all(compat.is_dtensor(info.value(tail.node)) for tail in match.tails):
                sizes["V"] = columns  # logits that no rank gathers
        seen = (max(sizes["N"], 1), sizes["D"] + sizes.get("R", 0), columns)
        b, w = sympy.symbols("B W", integer=True, positive=True)
        groups, engine = groups_of(info, match.tails), _engine_name(info, match)
        from_ranks = sympy.Integer(0)  # values gathered from every rank
        if isinstance(split, op_folder.Split):
            numbers = sum(len(gathered(group)) for group in groups)
            from_ranks = 4 * split.shard.ranks * numbers * n
        if all(is_total(info, group) for group in groups):
            # The forward computes the gradients.
            if isinstance(split, op_folder.Split):
                seen = (*seen[:2], split.shard.chunk)  # which pieces of rows go by
            walks = head.compute_dtype, bool(head.parts), False
            if op_folder.ENGINES[engine].has_one_walk(*walks):
                if head.parts:
                    how = {"dtype": head.compute_dtype, "workspace": common["workspace"]}
                    held = op_folder.adapted_total_bytes(*seen[::2], sizes["R"], **how)
                else:
                    held = op_folder.total_bytes(*seen, device=hidden.device, **common)
                after = b + op_folder.TOTAL_BYTES_PER_ROW * n + from_ranks
                return Gain(before, after, sizes | {"B": int(held)})
        call = {
            **common,
            "engine": engine,
            "device_type": where_it_runs(hidden.device).type,
            "with_entropy": any(t.kind in ENTROPIES for t in match.tails),
            "training": training,
        }
        held = op_folder.piece_sizes(*seen, **call)
        sizes |= {"B": int(held.bytes), "W": int(held.columns)}
        after = op_folder.bytes_after(n, d, v, **call, pieces=op_folder.Pieces(b, w))
        return Gain(before, after + from_ranks, sizes)

    def anchor(self, match: Site) -> Node:
        return match.tails[0].node

    def places(self, match: Site) -> Sequence[Node]:
        return [match.head.node, *(t.node for t in match.tails)]

    def rewrite(self, info: GraphInfo, match: Site, editor: Editor) -> Done:
        """Insert one call of the fused op (such as memeff::linear_cross_entropy) for each set of
        losses with the same rows (tokens) and targets, then replace the losses' results.
        """
        spellings: list[str] = []
        chains = [*(t.chain for t in match.tails), *(o.chain for o in match.outputs)]
        symbols = [step.symbol for chain in chains for step in chain.steps]
        symbols += [each for part in match.head.parts for each in part.symbols]
        for symbol in (*symbols, *(s for t in match.tails for s in t.symbols)):
            compat.hold_constant(symbol)
        for size in match.sizes:
            emit_size(info, editor, size)
        groups = groups_of(info, match.tails)
        is_all_totals = all(is_total(info, group) for group in groups)
        for group in groups:
            match.covered.extend(emit_group(info, editor, group))
            spellings.extend(t.name for t in group)
        deferred, notes = outputs.rewrite(info, match.outputs, editor)
        engine = _engine(info, match, groups)
        # Each call multiplies with the whole head: other rows, targets or modifiers cost time.
        times = f", {len(groups)} calls" if len(groups) > 1 else ""
        if is_all_totals:
            engine += "; the gradients are made in the forward"
            walks = match.head.compute_dtype, False, False
            if op_folder.ENGINES[_engine_name(info, match)].has_one_walk(*walks):
                engine += ", in three products instead of four,"
            engine += " and held to the backward"
        split = shards.split_of(info, match.head)
        apart = ""
        if isinstance(split, op_folder.Split):
            pieces = [pieces_met(info, group, split.shard) for group in groups]
            numbers = [len(gathered(group)) for group in groups]
            apart = shards.sentence(split, numbers, sum(pieces))
        head, name = node_name(match.head.node), "linear_cross_entropy"
        if match.head.parts:
            several = len(match.head.parts) > 1
            head = f"linear with {len(match.head.parts) if several else 'a'} low-rank part"
            head, name = f"{head}{'s' * several}", "linear_cross_entropy_adapted"
            name += "_total" if is_all_totals else ""
            is_timed = is_all_totals and match.head.compute_dtype == torch.bfloat16
            cost = "took 1.1 times Inductor's time where it was timed (8192 x 4096 x 128256, H100)"
            engine += f"; with an adapter it {cost if is_timed else 'was not timed'}"
        before = f"{head} + {' + '.join(dict.fromkeys(spellings))}"
        if is_chunked(match.tails[0]):
            before = f"{spellings[0]} with options"
            engine += "; the engine chooses its own blocks of rows, not those of the options"
        sentence = f"{before} -> memeff::{name}{times}{apart}; {engine}"
        return Done(match.tails[0].node, sentence, notes, deferred)

    def dead(self, match: Site) -> Sequence[Node]:
        return [*match.covered, *match.aside, *match.head.casts]

    def joins_ranks(self, info: GraphInfo, match: Site) -> bool:
        """Return whether the new op communicates between ranks, so that all ranks must insert this
        op.
        """
        return compat.is_dtensor(info.value(match.head.node))


def _reused(node: Node, user: Node, loss: Tail, what: str) -> Decline:
    if node in written_by(user):
        return mutated(user, loss.node)
    hint = "return the logits and compute that outside the compiled function"
    if user.op == "output":
        hint = f"return the logits, and compute the {what} of them outside the compiled function"
    elif what == "log-probabilities":
        hint = "compute it from the entries that the loss takes, as in log_probs.gather(-1, "
        hint += "y).exp(), or outside the compiled function from logits that it returns"
    return Decline(
        f"logits_reused({node_name(user)})",
        f"the {what} are also used by `{node_name(user)}`"
        + (" as an output" if user.op == "output" else ""),
        hint,
        loss.node,
    )


def _engine_name(info: GraphInfo, match: Site) -> str:
    head = match.head
    hidden, weight = info.value(head.hidden), info.value(head.weight)
    depth, columns = hidden.shape[-1], weight.t() if head.transposed else weight
    return op_folder.engine_for(
        hidden.device,
        head.compute_dtype,
        depth if isinstance(depth, int) else 8,
        with_top=any(tail.kind == "top" for tail in match.tails),
        is_adapted=bool(head.parts),
        is_contiguous=columns.stride() == (columns.shape[1], 1),
    )


def _engine(info: GraphInfo, match: Site, groups: Sequence[list[Tail]]) -> str:
    """Return the compilation report's text on the engine, the implementation of the fused loss op.

    The text names the engine. For a GPU, the text also says whether speed was measured on this GPU.
    A gradient filter drops classes with small gradients. If a filter is on, the text also names the
    filter and its bound. The filter `mass` has as its bound the probability mass that a row may
    lose. The filters `block` and `published` have a threshold. If the filter cannot drop any class
    of this match, the text says instead that the gradients are exact.
    """
    hidden, options = info.value(match.head.hidden), info.options
    weight = info.value(match.head.weight)
    name, speed = _engine_name(info, match), speed_note(hidden.device)
    sentence = f"engine {name}: {op_folder.ENGINES[name]}" + (f"; {speed}" if speed else "")
    mode = options.linear_cross_entropy
    if mode == "exact":
        return sentence
    columns = weight.t() if match.head.transposed else weight
    is_served = match.head.compute_dtype in op_folder.ENGINES[name].filters
    is_served = is_served and columns.stride() == (columns.shape[1], 1) and not match.head.parts
    depth = compat.size_hint(hidden.shape[-1])
    is_served = is_served and op_folder.leaves_out(mode, depth)
    # If all classes have a gradient, no tile can be left out.
    exact = [any(reads_sum(t) or t.kind in ENTROPIES for t in each) for each in groups]
    filtered = exact.count(False) if is_served else 0
    if not filtered:
        return f"{sentence}; '{mode}' leaves nothing out here: the gradients are exact"
    level = op_folder.filter_level(mode, options.filter_level)
    bound = "a row loses at most" if mode == "mass" else "leaves out classes under"
    calls = f" in {filtered} of the calls" if filtered < len(groups) else ""
    return f"{sentence}; gradient filter '{mode}'{calls}: {bound} {level:g}"
