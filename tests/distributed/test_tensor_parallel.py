"""Heads split over two processes by classes: the loss and every gradient of one process."""

from __future__ import annotations

import contextlib
import os
import random
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import BackendCompilerFailed
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import memeff_compile
from memeff_compile.errors import ShardedLogitsError, StaleLogitsError, UnsupportedInputError
from memeff_compile.kernels.linear_cross_entropy import reference
from memeff_compile.passes.losses import emit
from tests.distributed.models import (
    AOTAUTOGRAD,
    OPTIONS,
    assert_same_gradients,
    fresh_start,
    gradients,
    outside_loss,
    whole,
)
from tests.distributed.processes import RANKS, TwoProcesses


@cache
def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (RANKS,))


@dataclass(frozen=True)
class Case:
    """A head, its loss, how both are laid out, and the targets."""

    layout: str = "gathered"  # or "parallel loss", and "sequence" in front of either
    vocabulary: int = 161
    dtype: torch.dtype = torch.float32
    reduction: str = "mean"
    smoothing: float = 0.0
    weighted: bool = False
    bias: bool = False
    softcap: float = 0.0
    z_loss: float = 0.0
    entropy: bool = False
    hidden_classes: int = 0  # the last classes, at minus infinity
    targets: str = "all"  # or "half", "none", "low" classes alone


class Model(nn.Module):
    """Embedding, norm, head and the loss of a case."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.case = case
        self.embed, self.norm = nn.Embedding(case.vocabulary, 16), nn.RMSNorm(16)
        self.head = nn.Linear(16, case.vocabulary, bias=case.bias)
        self.register_buffer("weight", torch.rand(case.vocabulary) + 0.5)
        offset = torch.zeros(case.vocabulary)
        offset[case.vocabulary - case.hidden_classes :] = -torch.inf
        self.register_buffer("offset", offset)
        self.to(case.dtype)

    def forward(self, ids: Tensor, target: Tensor) -> Tensor:
        case, logits = self.case, self.head(self.norm(self.embed(ids)))
        if case.dtype == torch.float32:
            logits = logits.float()
        if case.softcap:
            logits = torch.tanh(logits * 0.5 / case.softcap) * case.softcap
        if case.hidden_classes:
            logits = logits + self.offset
        logits, target = logits.flatten(0, 1), target.flatten()
        how: dict[str, Any] = {"reduction": case.reduction, "label_smoothing": case.smoothing}
        loss = F.cross_entropy(logits, target, self.weight if case.weighted else None, **how)
        if case.reduction == "none":
            loss = loss.square().sum()
        if case.z_loss:
            loss = loss + case.z_loss * torch.logsumexp(logits, -1).square().mean()
        if case.entropy:
            logs = logits.log_softmax(-1)
            loss = loss - 0.1 * -(logs.exp() * logs).sum(-1).mean()
        return loss


class Returning(Model):
    """Returns the logits with the loss, as models of transformers do."""

    def forward(self, ids: Tensor, target: Tensor) -> Any:
        logits = self.head(self.norm(self.embed(ids)))
        logits = logits.float() * 2
        if "parallel loss" not in self.case.layout:
            logits = logits + self.offset
        return F.cross_entropy(logits.flatten(0, 1), target.flatten()), logits


class Measured(Model):
    """Uses of logits in reinforcement learning and distillation, and metrics of them."""

    def forward(self, ids: Tensor, target: Tensor) -> Any:
        logits = self.head(self.norm(self.embed(ids))).flatten(0, 1).float() * 0.5
        target = target.flatten()
        log_probs = logits.log_softmax(-1)
        own = log_probs.gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        entropy = -(log_probs.exp() * log_probs).sum(-1)
        with torch.no_grad():
            right = (logits.argmax(-1) == target).float().mean()
        return own.square().mean() + 0.1 * entropy.mean(), own, entropy, logits.argmax(-1), right


def data(case: Case, length: int = 12) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(length)
    ids = torch.randint(case.vocabulary, (2, length), generator=draw)
    highest = 7 if case.targets == "low" else case.vocabulary - case.hidden_classes
    target = torch.randint(highest, (2, length), generator=draw)
    if case.targets != "low":
        target[{"half": 1, "none": slice(None), "all": slice(0)}[case.targets]] = -100
    return ids, target


def split(model: Model) -> Model:
    layout = model.case.layout
    plan: dict[str, Any] = {}
    entry: Any = Replicate()
    if "sequence" in layout:
        plan["embed"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
        plan["norm"], entry = SequenceParallel(), Shard(1)
    if "parallel loss" in layout:
        out: dict[str, Any] = {"output_layouts": Shard(-1), "use_local_output": False}
    else:
        out = {"output_layouts": Replicate()}
    plan["head"] = ColwiseParallel(input_layouts=entry, **out)
    found: Any = parallelize_module(model, mesh(), plan)
    return found


def context(case: Case) -> Any:
    return loss_parallel() if "parallel loss" in case.layout else contextlib.nullcontext()


def compiled(model: nn.Module, **options: Any) -> Any:
    fresh_start()
    return torch.compile(model, backend="memeff", options={**OPTIONS, **options})


def codes() -> list[str]:
    return [record.code for record in memeff_compile.last_report().records]


def assert_like_one_process(case: Case, length: int = 12, **options: Any) -> None:
    one, many = Model(case), split(Model(case))
    run = compiled(many, **options)
    expected = one(*data(case, length))
    expected.backward()
    with context(case):
        loss = run(*data(case, length))
        loss.backward()
    assert codes() == ["rewrote"], memeff_compile.last_report()
    assert isinstance(loss, DTensor) == ("parallel loss" in case.layout)
    exact = case.dtype == torch.float64
    torch.testing.assert_close(
        whole(loss), expected, rtol=1e-12 if exact else 1e-6, atol=0, equal_nan=True
    )
    if case.targets == "none":
        return
    assert_same_gradients(gradients(many), gradients(one), 1e-12 if exact else 1e-5)


LAYOUTS = [
    Case("sequence", 160),
    Case("sequence, parallel loss"),
    Case("parallel loss", 160, torch.float64, "sum"),
    Case("gathered"),
    Case("parallel loss"),
    Case("sequence"),
    Case("gathered", 160, torch.float64, "sum"),
]
"""The first three have each layout and each kind of split; losses have the heads that are gathered."""


def layouts(first: int, last: int) -> None:
    for case in LAYOUTS[first:last]:
        assert_like_one_process(case)


def losses() -> None:
    plain = Case(bias=True)
    for case in (
        replace(plain, reduction="none", targets="half"),
        replace(plain, smoothing=0.1, weighted=True, targets="half", dtype=torch.float64),
        replace(plain, softcap=3.0, z_loss=1e-2, entropy=True, dtype=torch.float64),
        replace(plain, z_loss=1e-2, targets="half", dtype=torch.float64),
        replace(plain, hidden_classes=81, dtype=torch.float64),
        replace(plain, weighted=True, reduction="sum", softcap=3.0, dtype=torch.float64),
        replace(plain, targets="low"),
        replace(plain, targets="none"),
    ):
        assert_like_one_process(case)


def random_cases(first: int, count: int) -> None:
    """For any draw, ranks gather consistently and agree with one process."""
    for seed in range(first, first + count):
        draw = random.Random(seed)
        layout = draw.choice(["gathered", "parallel loss", "sequence", "sequence, parallel loss"])
        case = Case(layout, draw.randint(33, 200), torch.float64, draw.choice(["mean", "sum"]))
        case = replace(case, bias=draw.random() < 0.5, targets=draw.choice(["all", "half", "low"]))
        if "parallel loss" not in layout:
            case = replace(
                case,
                reduction=draw.choice(["mean", "sum", "none"]),
                smoothing=draw.choice([0.0, 0.1]),
                weighted=draw.random() < 0.5,
                softcap=draw.choice([0.0, 3.0]),
                z_loss=draw.choice([0.0, 1e-2]),
                entropy=draw.random() < 0.3,
            )
        length = draw.randint(1, 7) * 2  # the sequence is split evenly, as torch wants it
        try:
            assert_like_one_process(case, length)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {case}") from error


def through_inductor() -> None:
    assert_like_one_process(Case("sequence"), **{"memeff.inner": "inductor"})
    case = Case(bias=True)
    assert_like_one_process(case, **{"memeff.inner": "inductor"})
    loss = compiled(split(Model(case)), **{"memeff.inner": "inductor"})(*data(case))
    with mock.patch.object(reference, "forward", side_effect=AssertionError("computed again")):
        loss.backward()


MEASURED = [
    Case("sequence", 160, bias=True, targets="half", hidden_classes=81),
    Case(bias=True, targets="half"),
    Case("sequence", 160, hidden_classes=81),
]


def measured(first: int, last: int) -> None:
    """Log-probabilities, entropies and likeliest classes of every token, accuracy, and gradients."""
    for case in MEASURED[first:last]:
        one, many = Measured(case), split(Measured(case))
        expected, found = one(*data(case)), compiled(many, **AOTAUTOGRAD)(*data(case))
        assert codes() == ["rewrote"], memeff_compile.last_report()
        (record,) = memeff_compile.last_report().records
        assert "one all-gather of 5 numbers per row" in record.sentence
        for mine, whole_one in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, whole_one, rtol=1e-5, atol=1e-5)
        for each in (expected, found):
            (each[0] + each[1].mean()).backward()
        assert_same_gradients(gradients(many), gradients(one))


def lengths_that_change() -> None:
    """Steps of other lengths, one of them without tokens that count and one without any."""
    case = Case()
    one, many = Model(case), split(Model(case))
    fresh_start()
    run = torch.compile(many, backend="memeff", options=OPTIONS, dynamic=True)
    for length, targets in ((12, "all"), (9, "half"), (7, "none"), (5, "all")):
        given = data(replace(case, targets=targets), length)
        for each in (one, many):
            each.zero_grad()
        expected, loss = one(*given), run(*given)
        expected.backward()
        loss.backward()
        torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0, equal_nan=True)
        if targets != "none":
            assert_same_gradients(gradients(many), gradients(one))
    assert set(codes()) == {"rewrote"}


@contextlib.contextmanager
def seen_by_the_inner_compiler() -> Iterator[list[torch.fx.Graph]]:
    graphs: list[torch.fx.Graph] = []

    def keep(gm: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append(gm.graph)
        return gm.forward

    # As Inductor parts them; torch's default leaves dead copies of the forward in the backward.
    how = {"partition_fn": min_cut_rematerialization_partition}
    inner = aot_autograd(fw_compiler=keep, bw_compiler=keep, **how)
    with mock.patch("memeff_compile.compat.compile_with_aot_eager", inner):
        yield graphs


def collectives(graph: torch.fx.Graph) -> list[str]:
    names = [str(node.target) for node in graph.nodes]
    return [name.split(".")[1] for name in names if name.startswith("_c10d") and "wait" not in name]


def what_crosses_and_what_is_kept() -> None:
    """Forward: one number from each rank before the head's gathers and one after them, which fix
    their position; backward: one sum of dX, and the logits of no rank.
    """
    for layout, sums in (("gathered", "all_reduce"), ("sequence", "reduce_scatter_tensor")):
        case = Case(layout)
        kind = Model if layout == "gathered" else Returning
        with seen_by_the_inner_compiler() as graphs:
            found = compiled(split(kind(case)), **AOTAUTOGRAD)(*data(case))
            (found if kind is Model else found[0]).backward()
        forward, backward = graphs
        (sentence, *_) = (r.sentence for r in memeff_compile.last_report().records)
        # 24 rows, of which half are a piece
        assert "2 all-gathers of 2 numbers per row" in sentence
        assert (
            "the gradients are made in the forward, in three products instead of four" in sentence
        )
        gathers = [n for n in forward.nodes if str(n.target).startswith("_c10d_functional.all_ga")]
        assert [n.meta["val"].shape for n in gathers][-2:] == [(RANKS,), (RANKS,)]
        before = [] if layout == "gathered" else ["reduce_scatter_tensor", "all_gather_into_tensor"]
        assert collectives(forward) == [*before, *2 * ["all_gather_into_tensor"]]
        after = [] if layout == "gathered" else ["all_gather_into_tensor"]  # the embedding's
        assert collectives(backward) == [sums, *after], collectives(backward)
        names = [str(n.target) for n in backward.nodes]
        assert not [name for name in names if "linear_cross_entropy" in name]
        rows = 24
        for node in (*forward.nodes, *backward.nodes):
            value = node.meta.get("val")
            shape = value.shape if isinstance(value, Tensor) else ()
            is_of_rows = len(shape) > 1 and shape[:-1].numel() == rows
            assert not is_of_rows or shape[-1] < 80, node


def a_model_of_transformers(*ties: bool) -> None:
    """Its own plan splits the head; a tied table is one parameter, looked up and multiplied."""
    for tied in ties:
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=160,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=tied,
        )
        folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
        one = transformers.LlamaForCausalLM(config)
        if folder[0]:
            one.save_pretrained(folder[0])
        dist.broadcast_object_list(folder)
        places = {name: str(dist.get_rank()) for name in ("RANK", "LOCAL_RANK")}
        with mock.patch.dict(os.environ, {**places, "WORLD_SIZE": str(RANKS)}):
            many = transformers.LlamaForCausalLM.from_pretrained(
                folder[0], tp_plan="auto", device_mesh=mesh()
            )
        assert isinstance(many.lm_head.weight, DTensor)
        one.train(), many.train()
        ids = torch.randint(3, 160, (2, 12), generator=torch.Generator().manual_seed(1))
        run = compiled(many, **({"memeff.logits": "none"} if tied else {}))
        expected, found = one(input_ids=ids, labels=ids), run(input_ids=ids, labels=ids)
        for each in (expected, found):
            each.loss.backward()
        records = memeff_compile.last_report().records
        mine = [r for r in records if r.pass_name == "fuse_linear_cross_entropy"]
        assert [r.code for r in mine] == ["rewrote"], memeff_compile.last_report()
        assert "on 2 ranks" in mine[0].sentence
        looked_up = [r for r in records if r.pass_name == "fuse_embedding_gradient"]
        assert [r.code for r in looked_up] == (["rewrote"] if tied else [])  # small on its own
        torch.testing.assert_close(found.loss, expected.loss, rtol=1e-6, atol=0)
        assert_same_gradients(gradients(many), gradients(one))
        if not tied:
            torch.testing.assert_close(found.logits.full_tensor(), expected.logits)


def logits_beside_the_loss() -> None:
    case = Case("sequence", bias=True)
    one, many = Returning(case), split(Returning(case))
    run = compiled(many)
    step = torch.optim.AdamW(many.parameters(), lr=1e-2).step
    expected, kept = one(*data(case))
    expected.backward()
    loss, logits = run(*data(case))
    assert set(codes()) == {"rewrote", "logits_deferred"}
    assert logits.shape == kept.shape
    assert logits.requires_grad
    if dist.get_rank() == 0:  # at once, and the other rank is not waited for
        for read in (lambda x: x.argmax(-1), lambda x: x[0, 0].tolist(), lambda x: x.numpy()):
            with pytest.raises(
                ShardedLogitsError, match=r"out.logits.full_tensor\(\) on every rank"
            ):
                read(logits.detach())
        assert "values not computed yet" in repr(logits)
        with pytest.raises(ShardedLogitsError):
            outside_loss(logits)
    torch.testing.assert_close(logits[:, -1].full_tensor(), kept[:, -1])
    whole_logits = logits.full_tensor()
    torch.testing.assert_close(whole_logits, kept)
    assert torch.equal(logits.argmax(-1), whole_logits.argmax(-1))  # there by now
    with pytest.raises(ShardedLogitsError, match="A gradient reached"):
        whole_logits.square().mean().backward(retain_graph=True)
    loss.backward()
    assert_same_gradients(gradients(many), gradients(one))

    loss, logits = run(*data(case))
    loss.backward()
    step()
    with pytest.raises(StaleLogitsError):
        logits.full_tensor()
    _, logits = run(*data(case))
    if dist.get_rank() == 1:
        with torch.no_grad():
            many.head.weight.to_local().data.add_(1)
    with pytest.raises(StaleLogitsError, match="changed since then"):
        logits.full_tensor()
    with torch.no_grad():
        _, logits = run(*data(case))
    assert type(logits) is Tensor
    assert codes()[-1] == "logits_not_deferrable"


def logits_in_parts_beside_the_loss() -> None:
    case = Case("parallel loss")
    many = split(Returning(case))
    with context(case):
        loss, logits = compiled(many)(*data(case))
    assert codes() == ["logits_not_deferrable"]
    assert isinstance(logits, DTensor)
    with context(case):
        loss, logits = compiled(many, **{"memeff.logits": "none"})(*data(case))
        loss.backward()
    assert logits is None
    assert set(codes()) == {"rewrote", "logits_none"}


class Alone(Model):
    """Leaves the loss to its caller."""

    def forward(self, ids: Tensor, target: Tensor) -> Tensor:
        return self.head(self.norm(self.embed(ids)))  # type: ignore[no-any-return]


class Checkpointed(Model):
    """Head and loss inside an activation checkpoint."""

    def forward(self, ids: Tensor, target: Tensor) -> Tensor:
        found: Tensor = checkpoint(super().forward, ids, target, use_reentrant=False)
        return found


def around_the_head() -> None:
    """Checkpoints, autocast, frozen heads, no gradients at all, verify, and a loss outside."""
    case = Case(bias=True)
    one, many = Checkpointed(case), split(Checkpointed(case))
    for each in (one, compiled(many)):
        each(*data(case)).backward()
    assert codes()[0] == "rewrote"
    assert_same_gradients(gradients(many), gradients(one))

    eager, many = split(Model(case)), split(Model(case))
    with torch.autocast("cpu", torch.bfloat16):
        expected, loss = eager(*data(case)), compiled(many)(*data(case))
    assert codes() == ["rewrote"]
    torch.testing.assert_close(loss, expected, rtol=1e-2, atol=0)
    for each in (expected, loss):
        each.backward()
    assert_same_gradients(gradients(many), gradients(eager), 2e-2)

    one, many = Model(case), split(Model(case))
    for each in (one, many):
        each.head.requires_grad_(False)
    run = compiled(many, **{"memeff.verify": "raise"})
    for each in (one, run):
        each(*data(case)).backward()
    assert codes() == ["rewrote", "verify_not_run"]
    assert_same_gradients(gradients(many), gradients(one))
    with torch.no_grad():
        torch.testing.assert_close(run(*data(case)), one(*data(case)), rtol=1e-6, atol=0)

    one, many = Alone(case), split(Alone(case))
    run = compiled(many)
    for each in (one, run):
        F.cross_entropy(each(*data(case)).flatten(0, 1), data(case)[1].flatten()).backward()
    assert codes() == ["graph_break_between", "logits_not_deferrable"]
    assert_same_gradients(gradients(many), gradients(one))


def the_function() -> None:
    """On a head that ranks have split, with hidden states as they come: its loss, and a block's."""
    draw = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(2, 6, 8, generator=draw), torch.randn(41, 8, generator=draw)
    bias = torch.randn(41, generator=draw)
    class_weight = torch.rand(41, generator=draw)
    target = torch.randint(41, (2, 6), generator=draw)
    target[0, :3] = -100
    function = memeff_compile.linear_cross_entropy
    compiled_one = torch.compile(function, backend="memeff", options=OPTIONS)
    for how in (
        {},
        {"reduction": "sum", "softcap": 3.0, "z_loss": 1e-2},
        {"label_smoothing": 0.1, "class_weight": class_weight},
    ):
        whole_parts = [x.double().requires_grad_() for x in (hidden, weight, bias)]
        how = {k: v.double() if isinstance(v, Tensor) else v for k, v in how.items()}
        function(*whole_parts[:2], target, whole_parts[2], **how).backward()
        expected = dict(zip("hwb", (x.grad for x in whole_parts), strict=True))
        for places in (None, [Replicate()], [Shard(1)]):
            given = whole_parts[0].detach()
            x = given if places is None else distribute_tensor(given, mesh(), places)
            w, b = (distribute_tensor(x.detach(), mesh(), [Shard(0)]) for x in whole_parts[1:])
            parts = [x.requires_grad_() for x in (x, w, b)]
            run = compiled_one if places == [Shard(1)] else function
            run(x, w, target, b, **how).backward()
            found = dict(zip("hwb", (whole(x.grad) for x in parts), strict=True))
            assert_same_gradients(found, expected, 1e-12)
    stats, spread = function(hidden, weight, target, return_stats=True), []
    for run in (function, compiled_one):
        w = distribute_tensor(weight, mesh(), [Shard(0)])
        spread.append(run(hidden, w, target, return_stats=True))
    for loss, each in spread:
        for mine, of_one in zip((loss, *each), (stats[0], *stats[1]), strict=True):
            torch.testing.assert_close(mine, of_one)
    for wrong, said in (
        ({"weight": distribute_tensor(weight, mesh(), [Shard(1)])}, "not split by its classes"),
        ({"bias": bias}, "bias is not laid out like it"),
    ):
        given = {"weight": distribute_tensor(weight, mesh(), [Shard(0)]), **wrong}
        with pytest.raises(UnsupportedInputError, match=said):
            function(hidden, target=target, **given)


def rows_that_differ() -> None:
    """Both ranks raise: gathering rows of two sizes would give garbage or hang."""
    run = compiled(split(Model(Case())))
    with pytest.raises(UnsupportedInputError, match=r"different numbers of rows \(24, 18\)"):
        run(*data(Case(), 12 - 3 * dist.get_rank()))
    case = Case(dtype=torch.float64)
    assert_like_one_process(case)


def an_error_on_one_rank() -> None:
    """It ends the compilation there; the other rank, which would wait, is not asked to run."""
    run = compiled(split(Model(Case())))
    if dist.get_rank() == 1:
        with (
            mock.patch.object(emit.GroupEmitter, "result", side_effect=RuntimeError("halfway")),
            pytest.raises(BackendCompilerFailed, match="failed on this process"),
        ):
            run(*data(Case()))


CASES = [
    pytest.param(partial(layouts, 0, 3), id="layouts"),
    pytest.param(partial(layouts, 3, 7), marks=pytest.mark.slow, id="more_layouts"),
    losses,
    pytest.param(partial(measured, 0, 1), id="measured"),
    pytest.param(partial(measured, 1, 3), marks=pytest.mark.slow, id="measured_one_by_one"),
    pytest.param(through_inductor, marks=pytest.mark.slow),
    pytest.param(partial(random_cases, 0, 12), marks=pytest.mark.slow, id="random_cases"),
    lengths_that_change,
    what_crosses_and_what_is_kept,
    pytest.param(partial(a_model_of_transformers, True), id="a_tied_model_of_transformers"),
    pytest.param(
        partial(a_model_of_transformers, False), marks=pytest.mark.slow, id="an_untied_model"
    ),
    logits_beside_the_loss,
    pytest.param(logits_in_parts_beside_the_loss, marks=pytest.mark.slow),
    around_the_head,
    the_function,
    rows_that_differ,
    an_error_on_one_rank,
]


@pytest.mark.xdist_group("two processes")
@pytest.mark.parametrize("case", CASES, ids=lambda case: getattr(case, "__name__", None))
def test_heads_split_over_ranks(
    case: Callable[[], None], two_processes: TwoProcesses, inner: str
) -> None:
    two_processes.run(case, inner=inner)
