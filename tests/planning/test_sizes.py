"""Plans whose sizes are hard to know: split graphs, images, lengths in chunks, blocks of kinds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from memeff_compile.errors import ExplainError
from memeff_compile.planning import explain as explaining
from memeff_compile.planning.capture import _shape
from memeff_compile.planning.depth import stacks_of
from memeff_compile.planning.explain import Explanation, explain
from memeff_compile.planning.sizes import Sizes, Told
from tests.support.stacks import Block, Stack, token_ids

VOCABULARY, WIDTH, B, L = 4096, 64, 4, 128
LOGITS = 4 * B * L * VOCABULARY


class Split(Stack):
    """Its graph breaks before the head."""

    def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        torch._dynamo.graph_break()
        logits = self.head(x)
        loss = nn.functional.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))
        return loss, logits


class Whole(Split):
    """The same in one graph."""

    def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        loss = nn.functional.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))
        return loss, logits


def explained(model: nn.Module) -> Explanation:
    return explain(model, token_ids(B, L), token_ids(B, L))


def whole(model: nn.Module, *args: Any, **kwargs: Any) -> Explanation:
    """Explain a model with all of its blocks captured."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(explaining, "stacks_of", lambda m: [stack.whole() for stack in stacks_of(m)])
        return explain(model, *args, **kwargs)


def test_a_split_graph_is_planned_as_the_whole_one_is() -> None:
    split, one = (explained(kind(VOCABULARY, WIDTH, 5)) for kind in (Split, Whole))
    assert (len(split.report.graphs), len(one.report.graphs)) == (2, 1)
    assert split.vocabulary == VOCABULARY
    for batch, length in ((B, L), (64, 512)):
        ours, theirs = (e.plan(batch=batch, length=length, memory="1GiB") for e in (split, one))
        assert ours.before.peak == pytest.approx(theirs.before.peak, rel=0.1)
        assert ours.after.peak == pytest.approx(theirs.after.peak, rel=0.1)
        assert ours.before.groups["logits"] >= 3 * LOGITS * batch * length // (B * L)
        # None claims a batch whose logits alone do not fit.
        assert ours.before.largest_batch
        assert 3 * 4 * length * VOCABULARY * ours.before.largest_batch < 1 << 30


def test_the_gradients_of_a_later_graph_exist_while_an_earlier_one_runs() -> None:
    found = explained(Split(VOCABULARY, WIDTH, 5))
    weight = 4 * VOCABULARY * WIDTH
    last = [m for m in found.before.moments if m.place.startswith("backward, blocks.0")]
    parts = (last or list(found.before.moments))[0].parts
    assert int(parts["other gradients"]) >= weight


class Looped(Stack):
    """Its graph breaks in a loop, which Dynamo gives up: only the blocks are compiled."""

    def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
            torch._dynamo.graph_break()
        logits = self.head(x)
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


def test_what_runs_outside_of_graphs_is_named_and_no_number_is_given() -> None:
    found = explained(Looped(VOCABULARY, WIDTH, 5))
    assert found.outside >= LOGITS
    with pytest.raises(ExplainError, match=r"outside of captured graphs.*graph_breaks"):
        found.plan()
    assert "No plan: Looped makes" in str(found)
    assert "memeff_compile: no loss was fused, 1 graph, no changes" in str(found)


class Chunked(nn.Module):
    """Pads a length to whole chunks of 48 tokens; another length would show."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = nn.functional.pad(x, (0, 0, 0, -x.shape[1] % 48))
        chunks = x.view(x.shape[0], -1, 48, WIDTH).softmax(2)
        return self.head(chunks.flatten(1, 2)).float().square().mean()


def test_a_length_that_grows_in_steps_is_planned_for_the_length_given_alone() -> None:
    found = explain(Chunked(), token_ids(B, 384))
    assert set(found.fixed) == {"length"}
    plan = found.plan(memory="1GiB")
    assert plan.before.largest_batch
    assert found.plan(batch=2 * B).before.peak > plan.before.peak
    with pytest.raises(ExplainError, match=r"length 192 is not known from that at 384"):
        found.plan(length=192)
    assert "At this length only" in found.text(plan)


class OfFour(nn.Module):
    """Takes four sequences and no other number."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        if ids.shape[0] != 4:
            raise ValueError("four sequences")
        return self.embed(ids).softmax(2).sum()


def test_a_batch_that_cannot_change_has_no_largest_one() -> None:
    found = explain(OfFour(), token_ids(4, L))
    assert set(found.fixed) == {"batch", "length"}
    plan = found.plan(memory="1GiB")
    assert plan.after.largest_batch is None
    assert plan.after.peak > 0
    assert "What fits is not known" in found.text(plan)
    with pytest.raises(ExplainError, match="batch 8 is not known"):
        found.plan(batch=8)


IDS = torch.zeros(B, L, dtype=torch.int64)


@pytest.mark.parametrize(
    ("shape", "dtype", "expected"),
    [
        ((B, L), torch.int64, [11, 113]),
        ((B, 1, L, L), torch.bool, [11, 1, 113, 113]),
        ((B, 1, L, L), torch.float32, [11, 1, 113, 113]),
        ((3, B, L), torch.int64, [3, 11, 113]),
        ((B, L, L), torch.float32, [11, 113, L]),
        ((B, 3, L, L), torch.float32, [11, 3, L, L]),
        ((6 * B, 1176), torch.float32, [66, 1176]),
        ((2 * B, 3), torch.int64, [22, 3]),
        ((L,), torch.int64, [113]),
        ((B,), torch.float32, [11]),
        ((), torch.float32, []),
    ],
    ids=str,
)
def test_inputs_at_another_batch_and_length(
    shape: tuple[int, ...], dtype: torch.dtype, expected: list[int]
) -> None:
    given = torch.empty(shape, dtype=dtype, device="meta")
    assert _shape(given, Sizes(B, L), Told(11, 113)) == expected


def test_images_grow_with_the_batch() -> None:
    class Seeing(Stack):
        def forward(self, ids: Tensor, patches: Tensor) -> Tensor:
            seen = self.blocks[0](patches).view(ids.shape[0], -1, WIDTH)
            return self.head(torch.cat([seen, self.embed(ids)], 1)).float().logsumexp(-1).mean()

    patches = torch.empty(6 * B, WIDTH, device="meta")
    found = explain(Seeing(VOCABULARY, WIDTH, 2), token_ids(B, L), patches)
    assert not found.fixed
    one, two = (found.plan(batch=batch).before for batch in (B, 2 * B))
    assert two.peak - one.peak > 4 * B * (L + 6) * VOCABULARY
    longer = found.plan(length=2 * L).before
    assert longer.peak - one.peak > 4 * B * L * VOCABULARY


# --- blocks ---------------------------------------------------------------------------------------


class Gated(Block):
    """Another kind of block, which keeps more."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.sigmoid(self.up(x)) * self.up(x).tanh())


class Mixed(Whole):
    """Blocks of two kinds, as layers with and without a window."""

    def __init__(self, kinds: str, checkpointed: bool = False) -> None:
        super().__init__(VOCABULARY, WIDTH, 0, checkpointed=checkpointed)
        made: dict[str, Callable[[int], nn.Module]] = {"a": Block, "b": Gated}
        self.blocks = nn.ModuleList(made[kind](WIDTH) for kind in kinds)


@pytest.mark.parametrize(
    "kinds",
    [
        "aabaabaa",
        pytest.param("aaaaaaa", marks=pytest.mark.slow),
        pytest.param("babbbba", marks=pytest.mark.slow),
        pytest.param("aaab", marks=pytest.mark.slow),
    ],
)
def test_a_block_of_each_kind_says_what_all_do(kinds: str) -> None:
    model = Mixed(kinds)
    few, all_ = explained(model), whole(model, token_ids(B, L), token_ids(B, L))
    assert not all_.stacks
    for batch, length in ((B, L), (64, 16), (1, 1024)):
        ours, theirs = (e.plan(batch=batch, length=length) for e in (few, all_))
        assert ours.before.peak == theirs.before.peak
        assert ours.after.peak == theirs.after.peak
        assert ours.after.moment.place == theirs.after.moment.place


class Attending(nn.Module):
    """Attention spelled out, which a pass rewrites in each block."""

    def forward(self, x: Tensor) -> Tensor:
        """Attend to all of x (batch, length, width)."""
        q = x.unflatten(2, (4, -1)).transpose(1, 2)
        weights = torch.softmax(torch.tanh(q @ q.mT / 5.0) * 5.0, -1)
        return x + (weights @ q).transpose(1, 2).flatten(2)


def test_the_report_counts_the_places_of_all_blocks() -> None:
    model = Whole(VOCABULARY, WIDTH, 0)
    model.blocks = nn.ModuleList(Attending() for _ in range(9))
    found = explained(model.to(torch.bfloat16))
    assert [stack.kept for stack in found.stacks] == [(0, 1, 8)]
    records = [r for r in found.report.records if r.pass_name == "recover_attention"]
    assert sum(record.sites for record in records) == 9
    assert "and 8 more" in found.report.details()
    assert {p for r in records for p in (r.module, *r.also)} == {f"blocks.{i}" for i in range(9)}


def test_a_block_that_options_name_is_captured_as_itself() -> None:
    model = Whole(VOCABULARY, WIDTH, 0)
    model.blocks = nn.ModuleList(Attending() for _ in range(4))
    options = {"memeff.skip": ["blocks.2"]}
    found = explain(model.to(torch.bfloat16), *[token_ids(B, L)] * 2, options=options)
    assert not found.stacks
    records = [r for r in found.report.records if r.pass_name == "recover_attention"]
    assert [(r.code, r.place) for r in records if r.action == "declined"] == [
        ("skipped", "blocks.2")
    ]
    assert [r.sites for r in records if r.action == "rewrote"] == [3]


def test_bytes_that_blocks_share_are_given_out_block_by_block() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def inner(self, x: Tensor) -> Tensor:
            y: Tensor = self.second(torch.sin(self.first(x)))
            return y

        def forward(self, x: Tensor) -> Tensor:
            return x + checkpoint(self.inner, x, use_reentrant=False)

    model = Whole(VOCABULARY, WIDTH, 0)
    model.blocks = nn.ModuleList(Checkpointed() for _ in range(9))
    options = {"memeff.recompute": 4 * B * L * WIDTH * 2}  # of four linears
    found = explain(model.to(torch.bfloat16), *[token_ids(B, L)] * 2, options=options)
    assert not found.stacks
    (record,) = (r for r in found.report.records if r.pass_name == "keep_activations")
    assert (record.sites, record.module) == (4, "blocks.5.first")


def test_attention_that_is_computed_again_is_planned() -> None:
    """Its state of the generator of random numbers has a size that no graph says."""

    class Fused(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            q = x.unflatten(2, (4, -1)).transpose(1, 2)
            return x + nn.functional.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(
                2
            )

    model = Stack(VOCABULARY, WIDTH, 0)
    model.blocks = nn.ModuleList(Fused() for _ in range(4))
    plan = explained(model).plan()
    assert plan.before.groups["logits"] >= 3 * LOGITS
    assert plan.after.groups["logits"] < LOGITS


# --- progress -------------------------------------------------------------------------------------


def test_progress_is_said_where_asked_for_and_not_by_default(
    capsys: pytest.CaptureFixture[str],
) -> None:
    explain(OfFour(), token_ids(4, L))
    assert not capsys.readouterr().err
    explain(OfFour(), token_ids(4, L), progress=True)
    said = capsys.readouterr().err
    assert "what the passes do" in said
    assert "memory with memeff" in said


FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 6, "num_key_value_heads": 2},
    "gemma3_text": {
        "num_hidden_layers": 8,
        "query_pre_attn_scalar": 8,
        "sliding_window": 16,
        "sliding_window_pattern": 3,
    },
    "qwen3_moe": {
        "num_hidden_layers": 5,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    },
    "t5": {"num_layers": 4, "num_decoder_layers": 5},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_few_layers_of_a_family_say_what_all_do(name: str) -> None:
    pytest.importorskip("transformers", reason="builds models from configs")
    from tests.support import zoo

    known = {family.name: family for family in zoo.FAMILIES}
    family = known.get(name, zoo.Family(name))
    model = zoo.build(family, **FAMILIES[name])
    call = zoo.inputs(family, rows=B, length=48)
    few, all_ = explain(model, **call), whole(model, **call)
    assert few.stacks
    assert not all_.stacks
    # Partitions of all blocks may keep a hidden state of each more; an allocator says the former.
    assert few.plan().before.peak == pytest.approx(all_.plan().before.peak, rel=0.03)
    assert few.plan().after.peak == pytest.approx(all_.plan().after.peak, rel=0.03)
