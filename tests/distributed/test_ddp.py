"""DistributedDataParallel: Dynamo compiles a model in pieces, one per bucket of gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import memeff_compile
from tests.distributed.models import (
    AOTAUTOGRAD,
    OPTIONS,
    TRAINING,
    VOCABULARY,
    LogitsOnly,
    Small,
    assert_deferred,
    assert_ranks_agree,
    assert_same_gradients,
    assert_served_outside,
    codes,
    gradients,
    ids,
    outside_loss,
)
from tests.distributed.processes import TwoProcesses

WIDTH = 512  # a linear layer of this width fills the smallest bucket that PyTorch makes
BUCKET_MIB = 1


class Crossing(Small):
    """Hands its logits on to layers in a later bucket."""

    def __init__(self) -> None:
        super().__init__(WIDTH)
        self.mix, self.score = nn.Linear(VOCABULARY, 2048), nn.Linear(2048, 256)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        loss, logits = super().forward(ids)
        return loss + self.score(torch.tanh(self.mix(logits))).square().mean(), logits


class LossOnly(Small):
    def forward(self, ids: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(ids)[0]


def pieces() -> int:
    return len(memeff_compile.last_report().graphs)


def llama(layers: int) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    return transformers.LlamaForCausalLM(config)


def transformers_model_in_pieces() -> None:
    model = partial(llama, 1)
    eager = DistributedDataParallel(model(), bucket_cap_mb=BUCKET_MIB)
    expected = eager(input_ids=ids(), labels=ids())
    expected.loss.backward()
    wrapped = DistributedDataParallel(
        model(), bucket_cap_mb=BUCKET_MIB, find_unused_parameters=True
    )
    compiled = torch.compile(wrapped, backend="memeff", options=OPTIONS)
    for _ in range(2):
        wrapped.zero_grad()
        out = compiled(input_ids=ids(), labels=ids())
        out.loss.backward()
        assert_deferred(out.logits)
    assert codes() == TRAINING
    assert pieces() > 1
    torch.testing.assert_close(out.loss, expected.loss, rtol=1e-6, atol=0)
    torch.testing.assert_close(out.logits + 0, expected.logits)
    assert_same_gradients(gradients(wrapped), gradients(eager))
    assert_ranks_agree(gradients(wrapped))


def check(make: Any, modes: dict[str, Any], options: dict[str, str], in_place: bool) -> Any:
    """Hold two compiled steps against one of eager; return the logits."""
    eager = DistributedDataParallel(make(), bucket_cap_mb=BUCKET_MIB)
    model = make()
    expected = eager(ids())
    expected = expected if isinstance(expected, tuple) else (expected,)
    expected[0].backward()
    settings = {**OPTIONS, **options}
    if in_place:
        model.compile(backend="memeff", options=settings)
    ours = DistributedDataParallel(model, bucket_cap_mb=BUCKET_MIB, **modes)
    run = ours if in_place else torch.compile(ours, backend="memeff", options=settings)
    for _ in range(2):
        ours.zero_grad()
        out = run(ids())
        loss, *logits = out if isinstance(out, tuple) else (out,)
        loss.backward()
    torch.testing.assert_close(loss, expected[0], rtol=1e-6, atol=0)
    assert_same_gradients(gradients(ours), gradients(eager))
    assert_ranks_agree(gradients(ours))
    return logits


def a_model_compiled_in_place() -> None:
    (logits,) = check(partial(Small, WIDTH), {"static_graph": True}, AOTAUTOGRAD, in_place=True)
    assert_deferred(logits)
    assert codes() == TRAINING
    assert pieces() > 1


def dropped_logits() -> None:
    (logits,) = check(partial(Small, WIDTH), {}, {"memeff.logits": "none"}, in_place=False)
    assert logits is None
    assert codes() == {"rewrote", "logits_none"}
    assert pieces() > 1


def verified_pieces() -> None:
    check(partial(LossOnly, WIDTH), {}, {"memeff.verify": "raise"}, in_place=False)
    assert codes() == {"rewrote", "verify_passed"}


def logits_that_a_later_piece_reads() -> None:
    (logits,) = check(Crossing, {}, {}, in_place=False)
    assert_deferred(logits, products=1)  # the later partition read a value that was computed once
    assert pieces() > 1


def a_loss_outside_the_model(mode: str, in_place: bool) -> None:
    eager = DistributedDataParallel(LogitsOnly(WIDTH, 5 * WIDTH), bucket_cap_mb=BUCKET_MIB)
    outside_loss(eager(ids())).backward()
    model = LogitsOnly(WIDTH, 5 * WIDTH)
    if in_place:
        model.compile(backend="memeff", options=OPTIONS)
    modes: dict[str, Any] = {mode: True} if mode else {}
    ours = DistributedDataParallel(model, bucket_cap_mb=BUCKET_MIB, **modes)
    run = ours if in_place else torch.compile(ours, backend="memeff", options=OPTIONS)
    for _ in range(2):
        ours.zero_grad()
        logits = run(ids())
        outside_loss(logits).backward()
    if in_place:
        assert_deferred(logits)
        assert_served_outside(2)
    assert_same_gradients(gradients(ours), gradients(eager))
    assert_ranks_agree(gradients(ours))


def dropped_logits_that_a_later_piece_reads() -> None:
    ours = DistributedDataParallel(Crossing(), bucket_cap_mb=BUCKET_MIB)
    run = torch.compile(ours, backend="memeff", options={**AOTAUTOGRAD, "memeff.logits": "none"})
    with pytest.raises(Exception, match="dropped logits that a later part of the model reads"):
        run(ids())


def layers_that(code: str) -> int:
    """Return how many layers' attention a code was said of."""
    records = memeff_compile.last_report().records
    return sum(r.sites for r in records if (r.pass_name, r.code) == ("recover_attention", code))


def masks_made_in_an_earlier_piece(*, checkpoint: bool, others: bool) -> None:
    """The first partition makes the mask; those after it attend, each using the first one's
    proof.
    """
    eager, ours = (
        DistributedDataParallel(model, bucket_cap_mb=BUCKET_MIB) for model in (llama(3), llama(3))
    )
    for each in (eager, ours) if checkpoint else ():
        each.module.gradient_checkpointing_enable({"use_reentrant": False})
    run = torch.compile(ours, backend="memeff", options=OPTIONS)

    def same_step(tokens: Tensor, **inputs: Tensor) -> None:
        for each, step in ((eager, eager), (ours, run)):
            each.zero_grad()
            step(input_ids=tokens, labels=tokens, use_cache=False, **inputs).loss.backward()
        assert_same_gradients(gradients(ours), gradients(eager))

    same_step(ids())
    assert pieces() > 3
    assert layers_that("rewrote") == 3
    said = memeff_compile.last_report().details()
    assert "made in an earlier piece of the model, is causal: dropped" in " ".join(said.split())
    if others:
        same_step(ids(), attention_mask=(torch.arange(12) > 2).long().expand(2, -1))
        assert layers_that("rewrote") == layers_that("unread_mask") == 3
        same_step(ids()[:, :9].contiguous())
        assert layers_that("rewrote") == 6


class Attending(nn.Module):
    """Makes a causal mask in its first piece, may write to it in the second, attends in the last."""

    def __init__(self, write: Callable[[Tensor], object] | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.write = write

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1])
        mask = positions <= positions[:, None]
        for place, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if place == 1 and self.write is not None:
                self.write(mask.view(-1))
        heads = x.unflatten(-1, (8, -1)).transpose(1, 2)
        return F.scaled_dot_product_attention(heads, heads, heads, mask)


def masks_written_in_between() -> None:
    """Records about a mask hold for the model, until a partition may write to it."""
    x = torch.randn(2, 12, WIDTH)
    for write in (None, lambda flat: flat.fill_(True), lambda flat: flat.data[5:].fill_(True)):
        before = layers_that("rewrote")
        eager, ours = Attending(write), DistributedDataParallel(Attending(write), bucket_cap_mb=1)
        out = torch.compile(ours, backend="memeff", options=OPTIONS)(x)
        torch.testing.assert_close(out, eager(x))
        assert layers_that("rewrote") == before + (write is None)
        assert pieces() > 3


def a_wrapper_compiled_by_the_verb() -> None:
    """In place, in the pieces that DDP's buckets ask for, with gradients that ranks agree on."""
    torch.manual_seed(dist.get_rank())
    x = torch.randn(2, 12, WIDTH)
    eager = DistributedDataParallel(Attending(None), bucket_cap_mb=1)
    ours = DistributedDataParallel(Attending(None), bucket_cap_mb=1)
    assert memeff_compile.compile(ours, options=OPTIONS) is ours
    out, expected = ours(x), eager(x)
    torch.testing.assert_close(out, expected)
    assert pieces() > 3
    out.square().sum().backward()
    expected.square().sum().backward()
    assert_same_gradients(gradients(ours), gradients(eager))
    assert_ranks_agree(gradients(ours))


CASES = [
    transformers_model_in_pieces,
    a_model_compiled_in_place,
    dropped_logits,
    verified_pieces,
    logits_that_a_later_piece_reads,
    dropped_logits_that_a_later_piece_reads,
    masks_written_in_between,
    a_wrapper_compiled_by_the_verb,
]
WAYS = [
    pytest.param(mode, in_place, marks=pytest.mark.slow if is_slow else ())
    for mode, in_place, is_slow in (
        ("", True, False),
        ("", False, True),
        ("find_unused_parameters", True, True),
        ("find_unused_parameters", False, False),
        ("static_graph", True, False),
        ("static_graph", False, True),
    )
]


@pytest.mark.xdist_group("two processes")
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[pytest.mark.slow] * (case is transformers_model_in_pieces))
        for case in CASES
    ],
    ids=lambda case: case.__name__,
)
def test_ddp(case: Callable[[], None], two_processes: TwoProcesses, inner: str) -> None:
    two_processes.run(case, inner=inner)


@pytest.mark.xdist_group("two processes")
@pytest.mark.parametrize(("mode", "in_place"), WAYS)
def test_a_loss_outside_the_model(
    mode: str, in_place: bool, two_processes: TwoProcesses, inner: str
) -> None:
    two_processes.run(partial(a_loss_outside_the_model, mode, in_place), inner=inner)


@pytest.mark.xdist_group("two processes")
@pytest.mark.parametrize(
    ("checkpoint", "others"),
    [
        pytest.param(False, False, id="plain"),
        pytest.param(True, False, id="checkpointed", marks=pytest.mark.slow),
        pytest.param(False, True, id="padding and another length", marks=pytest.mark.slow),
    ],
)
def test_masks_made_in_an_earlier_piece(
    checkpoint: bool, others: bool, two_processes: TwoProcesses, inner: str
) -> None:
    case = partial(masks_made_in_an_earlier_piece, checkpoint=checkpoint, others=others)
    two_processes.run(case, inner=inner)
