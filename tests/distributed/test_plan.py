"""`explain`'s plans for several GPUs, against the bytes that two processes allocate."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import memeff_compile
from memeff_compile import compat
from memeff_compile.planning.setting import value_of
from tests.distributed.models import LENGTH, VOCABULARY, ids
from tests.distributed.processes import RANKS, TwoProcesses
from tests.distributed.test_tensor_parallel import seen_by_the_inner_compiler


def llama() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config)


def planned(found: Any, sharding: str, batch: int = 1) -> Mapping[str, int]:
    """Return the bytes of each part of a step's largest moment on one of two GPUs, or two of each
    rank of a model that is cut.
    """
    how = {"optimizer": "adamw", "gpus": RANKS, "sharding": sharding}
    moment = found.plan(batch=batch, **how).after.moment
    return {n: value_of(formula, batch, LENGTH) for n, formula in moment.parts.items()}


def nbytes(tensors: Any) -> int:
    return sum(compat.local_part(tensor).nbytes for tensor in tensors)


def held(model: nn.Module) -> tuple[int, int]:
    """Return the bytes of the weights that FSDP2 holds whole, and of the gradients it has reduced."""
    modules = set(model.modules())
    every = [
        p for p, _ in compat.distributed._fsdp2_parameters() if p._module_info.module in modules
    ]
    whole = (getattr(param, "_unsharded_param", None) for param in every)
    local = (compat.local_part(p) for p in whole if p is not None)
    gathered = sum(p.untyped_storage().nbytes() for p in local)
    return gathered, nbytes(p.sharded_param.grad for p in every if p.sharded_param.grad is not None)


def states(optimizer: torch.optim.Optimizer) -> int:
    each = (state for state in optimizer.state.values())
    return nbytes(value for state in each for name, value in state.items() if name != "step")


def saved(node: Any) -> list[torch.Tensor]:
    """Return the tensors that a compiled function saves for its loss."""
    while not hasattr(node, "saved_tensors"):
        ((node, _), *_) = node.next_functions
    return [compat.local_part(each) for each in node.saved_tensors]


def a_step_under_fsdp2(parts: Mapping[str, int], model: Any, mesh: DeviceMesh) -> None:
    blocks = [nbytes(layer.parameters()) for layer in model.model.layers]
    outside = nbytes(model.parameters()) - sum(blocks)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    shards = nbytes(model.parameters())
    assert parts["weights"] == shards + outside + 2 * blocks[0] + nbytes(model.buffers())
    whole, reduced = list[int](), list[int]()

    def look(*_: object) -> None:
        for found, now in zip((whole, reduced), held(model), strict=True):
            found.append(now)

    for layer in model.model.layers:
        layer.mlp.register_forward_hook(look)
        layer.mlp.register_full_backward_hook(look)
    optimizer = torch.optim.AdamW(model.parameters())
    model(input_ids=ids(), labels=ids()).loss.backward()
    assert len(whole) == 6
    # The next block is gathered after this one on a GPU, if nothing waits for it.
    assert all(outside + blocks[0] <= found <= outside + 2 * blocks[0] for found in whole)
    done = nbytes(p.grad for layer in model.model.layers for p in layer.parameters())
    assert reduced == [0, 0, 0, 0, blocks[0] // RANKS, 2 * blocks[0] // RANKS]
    assert parts["block gradients"] == done + 2 * blocks[0], "two blocks' are not reduced yet"
    assert parts["other gradients"] == outside
    optimizer.step()
    assert parts["optimizer state"] == states(optimizer)


def a_step_under_ddp(parts: Mapping[str, int]) -> None:
    model = llama()
    wrapped = DistributedDataParallel(model)
    assert parts["weights"] == nbytes(model.parameters()) + nbytes(model.buffers())
    optimizer = torch.optim.AdamW(model.parameters())
    wrapped(input_ids=ids(), labels=ids()).loss.backward()
    buckets = nbytes(bucket.buffer() for bucket in wrapped.reducer._get_zeros_like_grad_buckets())
    assert parts["gradient buckets"] == buckets
    assert buckets == nbytes(parameter.grad for parameter in model.parameters())
    optimizer.step()
    assert parts["optimizer state"] == states(optimizer)


def steps(sharded: Mapping[str, int], replicated: Mapping[str, int]) -> None:
    a_step_under_fsdp2(sharded, llama(), init_device_mesh("cpu", (RANKS,)))
    a_step_under_ddp(replicated)


def cut(model: Any, mesh: DeviceMesh) -> Any:
    """Cut attention, feed-forward and head over processes."""
    layer, plan = "model.layers.*.", {}
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj"):
        plan[layer + name] = ColwiseParallel()
    plan[f"{layer}mlp.up_proj"] = ColwiseParallel()
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        plan[layer + name] = RowwiseParallel()
    plan["lm_head"] = ColwiseParallel(output_layouts=Replicate())
    return parallelize_module(model, mesh, plan)


def a_step_of_a_model_that_is_cut() -> None:
    """Weights, gradients and optimizer states, and all that its forward keeps for the backward."""
    given = {"input_ids": ids(), "labels": ids()}
    whole = memeff_compile.explain(llama(), **given, device="cpu")
    model = cut(llama(), init_device_mesh("cpu", (RANKS,)))
    found = memeff_compile.explain(model, **given, device="cpu")
    assert "(B" not in str(found.fixed)
    plan = found.plan(optimizer="adamw")
    assert "each of 2 GPUs, 2 of them for each layer" in str(plan)
    assert plan.after.peak < whole.plan(optimizer="adamw").after.peak
    facts = found.after.facts
    assert facts.weights == nbytes(model.parameters())
    assert facts.buffers == nbytes(model.buffers())
    optimizer = torch.optim.AdamW(model.parameters())
    with seen_by_the_inner_compiler():
        run = torch.compile(model, backend="memeff", options={"memeff.inner": "aot_eager"})
        out = run(**given)
    kept = {each.untyped_storage().data_ptr(): each for each in saved(out.loss.grad_fn)}
    for each in (*model.parameters(), *model.buffers(), *given.values()):
        kept.pop(compat.local_part(each).untyped_storage().data_ptr(), None)
    planned = {name: value_of(f, *ids().shape) for name, f in found.after.kept.items()}
    counted = sum(each.untyped_storage().nbytes() for each in kept.values())
    assert sum(planned.values()) == pytest.approx(counted, rel=0.1)
    out.loss.backward()
    optimizer.step()
    assert value_of(plan.after.moment.parts["optimizer state"], 1, 1) == states(optimizer)


@pytest.mark.slow
@pytest.mark.xdist_group("two processes")
def test_a_plan_of_a_model_that_is_cut_has_the_bytes_of_a_process(
    two_processes: TwoProcesses,
) -> None:
    two_processes.run(a_step_of_a_model_that_is_cut)


@pytest.mark.xdist_group("two processes")
def test_a_plan_has_the_bytes_of_steps_on_two_processes(two_processes: TwoProcesses) -> None:
    given = torch.zeros(2, LENGTH, dtype=torch.long)
    found = memeff_compile.explain(llama(), input_ids=given, labels=given, device="cpu")
    # With one sequence the largest moment is the end of the backward pass, whatever PyTorch keeps.
    # With two, the last block's backward pass needs as much, and most blocks have no gradients yet.
    two_processes.run(partial(steps, *(planned(found, how) for how in ("fsdp", "none"))))
