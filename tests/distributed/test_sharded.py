"""FSDP2 and FSDP1: rewrites, declines, and that no result is garbage."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)

import memeff_compile
from memeff_compile import compat
from memeff_compile.errors import StaleLogitsError
from tests.distributed.compressed_shards import compressed_shards
from tests.distributed.models import (
    AOTAUTOGRAD,
    OPTIONS,
    TRAINING,
    VOCABULARY,
    LogitsOnly,
    Small,
    assert_deferred,
    assert_same_gradients,
    assert_served_outside,
    codes,
    fresh_start,
    gradients,
    ids,
    outside_loss,
)
from tests.distributed.processes import RANKS, TwoProcesses
from tests.support.ternary_layers import Block, Detached


@cache
def mesh() -> DeviceMesh:
    """Both processes on the CPU, also where there is a GPU."""
    return init_device_mesh("cpu", (RANKS,))


def sharded(module: nn.Module, **settings: Any) -> nn.Module:
    return fully_shard(module, mesh=mesh(), **settings)


def small(**settings: Any) -> nn.Module:
    model = Small()
    sharded(model.block, **settings)
    return sharded(model, **settings)


def compiled(model: nn.Module, **options: str) -> Any:
    fresh_start()
    model.compile(backend="memeff", options={**OPTIONS, **options})
    return model


def llama(*, tied: bool) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        tie_word_embeddings=tied,
    )
    return transformers.LlamaForCausalLM(config)


def shard_layers(model: nn.Module) -> nn.Module:
    for layer in model.get_submodule("model.layers").children():
        sharded(layer)
    return sharded(model)


def transformers_model_in_place() -> None:
    eager = shard_layers(llama(tied=False))
    expected = eager(input_ids=ids(), labels=ids())
    expected.loss.backward()

    model = compiled(shard_layers(llama(tied=False)))
    unread = model(input_ids=ids(), labels=ids())
    assert codes() == TRAINING
    unread.loss.backward()
    assert_deferred(unread.logits)
    with pytest.raises(StaleLogitsError, match=r"read out.logits before loss.backward\(\)"):
        unread.logits.argmax(-1)
    report = memeff_compile.last_report().details()
    assert "FSDP frees the gathered head in the backward pass" in " ".join(report.split())
    assert_same_gradients(gradients(model), gradients(eager))

    model.zero_grad()
    out = model(input_ids=ids(), labels=ids())
    torch.testing.assert_close(out.logits + 0, expected.logits)
    torch.testing.assert_close(out.loss, expected.loss, rtol=1e-6, atol=0)
    out.loss.backward()
    torch.testing.assert_close(out.logits.detach() + 0, expected.logits.detach())
    assert_same_gradients(gradients(model), gradients(eager))


def transformers_model_compiled_before_sharding() -> None:
    eager = shard_layers(llama(tied=True))
    expected = eager(input_ids=ids(), labels=ids())
    expected.loss.backward()

    fresh_start()
    model = llama(tied=True)
    run = torch.compile(model, backend="memeff", options={**OPTIONS, "memeff.logits": "none"})
    shard_layers(model)
    out = run(input_ids=ids(), labels=ids())
    out.loss.backward()
    assert codes() == {"rewrote", "logits_none"}
    assert out.logits is None
    torch.testing.assert_close(out.loss, expected.loss, rtol=1e-6, atol=0)
    assert_same_gradients(gradients(model), gradients(eager))


def a_model_compiled_before_sharding() -> None:
    eager, model = small(), Small()
    run = torch.compile(model, backend="memeff", options={**OPTIONS, "memeff.logits": "none"})
    sharded(model.block)
    sharded(model)
    for step in (eager, run):
        loss, logits = step(ids())
        loss.backward()
    assert logits is None
    assert codes() == {"rewrote", "logits_none"}
    assert_same_gradients(gradients(model), gradients(eager))


def a_tied_table_in_one_graph() -> None:
    """One group for the whole model: embedding and head meet in a graph, on the gathered weight."""
    eager = sharded(llama(tied=True))
    model = compiled(sharded(llama(tied=True)), **AOTAUTOGRAD)
    for _ in range(2):
        for each in (eager, model):
            each.zero_grad()
            each(input_ids=ids(), labels=ids()).loss.backward()
        assert_same_gradients(gradients(model), gradients(eager))
    assert memeff_compile.last_report().rewrites("fuse_embedding_gradient") == 1


def a_gated_mlp_in_a_checkpoint() -> None:
    def make() -> nn.Module:
        model = llama(tied=False)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return sharded(model)

    eager, model = make(), compiled(make())
    for _ in range(2):
        for each in (eager, model):
            each.zero_grad()
            each(input_ids=ids(), labels=ids(), use_cache=False).loss.backward()
        assert_same_gradients(gradients(model), gradients(eager))
    assert memeff_compile.last_report().rewrites("fuse_gated_linear") == 1


def a_function_that_returns_the_loss() -> None:
    eager, model = small(), small()
    eager(ids())[0].backward()
    fresh_start()
    run = torch.compile(lambda x: model(x)[0], backend="memeff", options=OPTIONS)
    run(ids()).backward()
    assert "rewrote" in codes()
    assert_same_gradients(gradients(model), gradients(eager))


def a_loss_on_the_logits_too() -> None:
    eager, model = small(), compiled(small())
    for each in (eager, model):
        loss, logits = each(ids())
        (loss + logits.square().mean()).backward()
    assert codes() == TRAINING
    assert_same_gradients(gradients(model), gradients(eager))


def parameters_in_bf16() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    eager, model = small(mp_policy=policy), compiled(small(mp_policy=policy))
    expected, expected_logits = eager(ids())
    expected.backward()
    loss, logits = model(ids())
    assert codes() == TRAINING
    assert logits.dtype == expected_logits.dtype == torch.bfloat16
    torch.testing.assert_close(logits + 0, expected_logits)
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-3, atol=0)
    assert_same_gradients(gradients(model), gradients(eager), tolerance=1e-2)


def evaluation() -> None:
    eager, model = small(), compiled(small())
    with torch.no_grad():
        _, logits = model(ids())
        torch.testing.assert_close(logits + 0, eager(ids())[1])


def by_hand(parameters: Any) -> Callable[[], None]:
    listed = list(parameters)

    def step() -> None:
        with torch.no_grad():
            for parameter in listed:
                parameter.sub_(parameter.grad, alpha=1e-3)

    return step


def foreach(parameters: Any) -> Callable[[], Any]:
    return torch.optim.AdamW(parameters, lr=1e-3, foreach=True).step


def fused(parameters: Any) -> Callable[[], Any]:
    return torch.optim.AdamW(parameters, lr=1e-3, fused=True).step


def logits_of_an_earlier_step(make: Callable[[Any], Callable[[], Any]], stays: bool) -> None:
    """Each step changes only the shards; the gathered weight stays, or is gathered again."""
    model = compiled(small())
    model.set_reshard_after_backward(not stays)
    step = make(model.parameters())
    loss, logits = model(ids())
    loss.backward()
    if stays:
        assert logits[:1].argmax(-1).shape == (1, 12)
    step()
    with pytest.raises(StaleLogitsError):
        logits.argmax(-1)
    model(ids())
    with pytest.raises(StaleLogitsError):
        logits.argmax(-1)


def logits_of_an_earlier_micro_batch() -> None:
    model = compiled(small())
    loss, earlier = model(ids())
    loss.backward()
    _, later = model(ids())  # gathers the same weights again
    assert torch.equal(earlier + 0, later + 0)


class Outer(nn.Module):
    """Makes `inner` a group that FSDP frees after its forward, as it frees every layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.factor = Small(), nn.Parameter(torch.ones(2))

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        loss, logits = self.inner(ids)
        return loss * self.factor.sum(), logits


def nested(**settings: bool) -> nn.Module:
    model = Outer()
    sharded(model.inner, **settings)
    return sharded(model)


def a_head_that_is_freed_after_forward() -> None:
    eager, model = nested(), compiled(nested())
    for each in (eager, model):
        loss, logits = each(ids())
        loss.backward()
    assert type(logits) is Tensor
    (record,) = memeff_compile.last_report().records
    assert record.code == "logits_not_deferrable"
    assert "FSDP frees the gathered head weight after the forward pass" in record.sentence
    assert "memeff.logits': 'none'" in record.hint
    assert record.bytes_saved > 0
    assert_same_gradients(gradients(model), gradients(eager))

    model = compiled(nested(), **{"memeff.logits": "none"})
    loss, logits = model(ids())
    loss.backward()
    assert logits is None
    assert codes() == {"rewrote", "logits_none"}
    assert_same_gradients(gradients(model), gradients(eager))

    root = Small()
    sharded(root, reshard_after_forward=True)
    compiled(root)(ids())
    assert codes() == {"logits_not_deferrable"}

    model = compiled(nested(reshard_after_forward=False))
    loss, logits = model(ids())
    assert codes() == TRAINING
    assert_deferred(logits)


def a_loss_outside_the_model() -> None:
    """FSDP's hook on the logits sees their gradient in factored form, and frees no tensor too
    early.
    """

    def make() -> nn.Module:
        model = LogitsOnly()
        sharded(model.block)
        return sharded(model)

    eager, model = make(), compiled(make())
    for _ in range(2):
        for each in (eager, model):
            each.zero_grad()
            logits = each(ids())
            outside_loss(logits).backward()
        assert_deferred(logits)
        assert_same_gradients(gradients(model), gradients(eager))
    assert codes() == {"logits_deferred"}
    assert_served_outside(2)
    with pytest.raises(StaleLogitsError, match=r"read out.logits before loss.backward\(\)"):
        outside_loss(logits)


def head_apart(*together: str, root: bool = True, **settings: Any) -> nn.Module:
    """Make a group of the head and other modules."""
    model = Small()
    grouped = [model.get_submodule(name) for name in (*together, "head")]
    fully_shard(grouped if together else model.head, mesh=mesh(), **settings)
    return sharded(model) if root else model


GROUPS: list[tuple[tuple[str, ...], dict[str, Any]]] = [
    ((), {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}),
    ((), {"root": False}),
    (("block",), {"reshard_after_forward": False}),
    ((), {}),
    ((), {"reshard_after_forward": False}),
    (("block",), {}),
]
"""Of heads: what else is in the group, and how it is sharded. The first three differ most."""


def a_head_with_a_group_of_its_own(first: int, last: int) -> None:
    """FSDP's hooks around the head split the graph between the head and the loss."""
    for together, settings in GROUPS[first:last]:
        eager, model = (head_apart(*together, **settings) for _ in range(2))
        model = compiled(model)
        for _ in range(2):
            for each in (eager, model):
                each.zero_grad()
                loss, logits = each(ids())
                loss.backward()
            assert_deferred(logits)
            is_rounded = "mp_policy" in settings
            assert_same_gradients(gradients(model), gradients(eager), 1e-2 if is_rounded else 1e-5)
        assert codes() == {"head_compiled", "logits_deferred"}, settings
        assert_served_outside(2)
        with pytest.raises(StaleLogitsError, match=r"read out.logits before loss.backward\(\)"):
            logits.argmax(-1)
        kept, value = model(ids())[1], eager(ids())[1]
        torch.testing.assert_close(kept + 0, value)
        with torch.no_grad():  # freed after the forward pass, as configured
            _, logits = model(ids())
        assert type(logits) is Tensor
        is_freed = settings.get("reshard_after_forward", True) and settings.get("root", True)
        assert compat.is_dtensor(model.head.weight) == is_freed
    memeff_compile.undo(model)
    assert "forward" not in vars(model.head)


def a_head_apart_is_gathered_once() -> None:
    """When its loss begins, FSDP2 holds no second copy of the gathered weight."""
    eager = head_apart()
    model = compiled(head_apart())
    for each, expected in ((eager, True), (model, False)):
        held: list[bool] = []

        @torch._dynamo.disable
        def look(head: Any, *_: Any, held: list[bool] = held) -> None:
            held.append(head._get_fsdp_state()._comm_ctx.all_gather_state is not None)

        each.head.register_forward_hook(look)
        for _ in range(2):
            each(ids())[0].backward()
        assert held == [expected] * 2


def a_head_apart_of_a_model_that_is_not_compiled() -> None:
    """Blocks compiled one by one leave the rest of the model to its owner."""
    model = head_apart()
    fresh_start()
    model.block.forward = torch.compile(model.block.forward, backend="memeff", options=OPTIONS)
    model(ids())[0].backward()
    assert "forward" not in vars(model.head)
    assert codes() == set()


def a_head_apart_whose_logits_are_eager() -> None:
    model = compiled(head_apart(), **{"memeff.logits": "eager"})
    loss, logits = model(ids())
    loss.backward()
    assert type(logits) is Tensor
    (record,) = memeff_compile.last_report().records
    assert record.code == "graph_break_between"
    model = compiled(head_apart(), **{"memeff.logits": "none"})
    loss, logits = model(ids())
    loss.backward()
    assert_deferred(logits)


def the_older_fsdp() -> None:
    def make() -> nn.Module:
        cpu = torch.device("cpu")
        return FullyShardedDataParallel(Small(), use_orig_params=True, device_id=cpu)

    eager, model = make(), compiled(make())
    for each in (eager, model):
        loss, logits = each(ids())
        loss.backward()
    assert type(logits) is Tensor
    assert codes() == {"logits_not_deferrable"}
    assert_same_gradients(gradients(model), gradients(eager))

    model = compiled(make(), **{"memeff.logits": "none"})
    loss, logits = model(ids())
    loss.backward()
    assert logits is None
    assert codes() == {"rewrote", "logits_none"}
    assert_same_gradients(gradients(model), gradients(eager))


def ternary_linears() -> None:
    """Gathered weights are whole in the graph, and so is the scale of each."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        model = Block(Detached)
        sharded(model.down)
        return sharded(model)

    eager, model = make(), compiled(make())
    x = torch.randn(6, 20, generator=torch.Generator().manual_seed(0))
    losses = []
    for each in (eager, model):
        loss = each(x).square().mean()
        loss.backward()
        losses.append(loss.detach())
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=0)
    assert codes() == {"rewrote"}
    assert_same_gradients(gradients(model), gradients(eager))


def verify_leaves_sharded_models_alone() -> None:
    eager, model = small(), compiled(small(), **{"memeff.verify": "raise"})
    for each in (eager, model):
        each(ids())[0].backward()
    assert codes() == {*TRAINING, "verify_not_run"}
    (record,) = [r for r in memeff_compile.last_report().records if r.action == "unverified"]
    assert "is sharded over processes" in record.sentence
    assert_same_gradients(gradients(model), gradients(eager))


CASES = [
    pytest.param(transformers_model_in_place, marks=pytest.mark.slow),
    pytest.param(transformers_model_compiled_before_sharding, marks=pytest.mark.slow),
    a_model_compiled_before_sharding,
    a_tied_table_in_one_graph,
    a_gated_mlp_in_a_checkpoint,
    a_function_that_returns_the_loss,
    a_loss_on_the_logits_too,
    parameters_in_bf16,
    evaluation,
    logits_of_an_earlier_micro_batch,
    a_head_that_is_freed_after_forward,
    a_loss_outside_the_model,
    pytest.param(
        partial(a_head_with_a_group_of_its_own, 0, 3), id="a_head_with_a_group_of_its_own"
    ),
    pytest.param(
        partial(a_head_with_a_group_of_its_own, 3, 6),
        marks=pytest.mark.slow,
        id="more_heads_with_a_group_of_their_own",
    ),
    a_head_apart_is_gathered_once,
    a_head_apart_of_a_model_that_is_not_compiled,
    a_head_apart_whose_logits_are_eager,
    the_older_fsdp,
    ternary_linears,
    verify_leaves_sharded_models_alone,
    compressed_shards,
]
STEPS = [
    pytest.param(make, stays, marks=pytest.mark.slow if is_slow else ())
    for make, stays, is_slow in (
        (by_hand, True, False),
        (by_hand, False, True),
        (foreach, True, True),
        (foreach, False, False),
        (fused, True, False),
        (fused, False, True),
    )
]


@pytest.mark.xdist_group("two processes")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_sharded_models(case: Callable[[], None], two_processes: TwoProcesses, inner: str) -> None:
    two_processes.run(case, inner=inner)


@pytest.mark.xdist_group("two processes")
@pytest.mark.parametrize(("make", "stays"), STEPS)
def test_logits_of_an_earlier_step(
    make: Callable[[Any], Callable[[], Any]], stays: bool, two_processes: TwoProcesses, inner: str
) -> None:
    two_processes.run(partial(logits_of_an_earlier_step, make, stays), inner=inner)
