"""Properties of deferred logits that only a GPU shows: memory, devices, raw pointers, graph
pools.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from memeff_compile.logits.attach import attach, defer
from memeff_compile.logits.recipe import DeferredOutput, LogitsRecipe
from memeff_compile.logits.tensor import DeferredLogits

pytestmark = pytest.mark.gpu

ROWS, HIDDEN, VOCAB = 2048, 128, 32_000
BYTES = ROWS * VOCAB * 2


def pair() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Deferred and eager logits of the same bfloat16 hidden states, and their leaves."""
    generator = torch.Generator("cuda").manual_seed(0)

    def leaf(*shape: int) -> Tensor:
        values = torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)
        return values.requires_grad_()

    x, weight = leaf(2, ROWS // 2, HIDDEN), leaf(VOCAB, HIDDEN)
    hidden = torch.tanh(x)
    deferred = defer(hidden, weight, None, (), LogitsRecipe(torch.bfloat16))
    return deferred, F.linear(hidden, weight), x, weight


def peak(body: Callable[[], Any]) -> int:
    """Return the bytes that `body` needs on top of existing allocations."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    body()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def test_training_without_a_look_allocates_no_logits() -> None:
    x = torch.randn(2, ROWS // 2, HIDDEN, device="cuda", requires_grad=True)
    weight = torch.randn(VOCAB, HIDDEN, device="cuda", requires_grad=True)

    def step() -> None:
        hidden = torch.tanh(x)
        logits = defer(hidden, weight, None, (), LogitsRecipe(torch.float32))
        (hidden.sum() + 0 * logits.shape[0]).backward()

    assert peak(step) < BYTES / 8


def test_slice_needs_memory_for_its_rows_forward_and_backward() -> None:
    logits, _, _, weight = pair()
    gradients = 2 * weight.numel() * weight.element_size()

    def read() -> None:
        logits[:, -1].float().log_softmax(-1)[:, 3].sum().backward()

    read_again = peak(read)
    assert read_again < BYTES / 4 + gradients
    assert logits.materialisations == 1


def test_values_and_gradients_are_eagers_bit_for_bit() -> None:
    logits, eager, x, weight = pair()
    found = []
    for values in (logits, eager):
        loss = values.float().log_softmax(-1)[..., 3].mean()
        grads = torch.autograd.grad(loss, [x, weight], retain_graph=True)
        found.append((values.detach() + 0, *grads))
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)


def test_moving_to_the_cpu_computes_and_moving_to_the_same_gpu_does_not() -> None:
    logits, eager, *_ = pair()
    assert isinstance(logits.cuda().to("cuda:0").to("cuda"), DeferredLogits)
    assert logits.is_cuda
    assert logits.is_shared()
    assert logits.materialisations == 0
    on_cpu = logits.cpu()
    assert type(on_cpu) is Tensor
    assert torch.equal(on_cpu, eager.cpu())
    assert on_cpu.requires_grad
    assert torch.equal(logits[0, :2].detach().float().cpu(), eager[0, :2].detach().float().cpu())


def test_raw_pointers_and_interfaces_show_the_values() -> None:
    logits, eager, *_ = pair()
    wide = logits.detach().float()
    interface = wide.__cuda_array_interface__
    assert interface["shape"] == tuple(eager.shape)
    assert interface["data"][0] == wide.data_ptr() != 0
    assert torch.equal(torch.from_dlpack(wide), eager.detach().float())
    with pytest.raises(TypeError, match="cuda"):
        logits.detach().numpy()


def test_use_on_another_stream_is_recorded_without_computing() -> None:
    logits, eager, *_ = pair()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    logits.record_stream(stream)
    assert logits.materialisations == 0
    with torch.cuda.stream(stream):
        choice = logits.argmax(-1)
    torch.cuda.current_stream().wait_stream(stream)
    assert torch.equal(choice, eager.argmax(-1))


def test_cloned_hidden_states_survive_the_next_replay_of_a_cuda_graph() -> None:
    static, weight = torch.randn(8, HIDDEN, device="cuda"), torch.randn(50, HIDDEN, device="cuda")
    torch.tanh(static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        pooled = torch.tanh(static)

    def replay(values: Tensor, head: Tensor) -> tuple[Tensor, ...]:
        static.copy_(values)
        graph.replay()
        return (pooled,)

    plan = [DeferredOutput(0, 1, None, (), LogitsRecipe(torch.float32))]
    run = attach(replay, plan, clone_hidden=True)
    first, second = torch.randn(2, 8, HIDDEN, device="cuda").unbind(0)
    (logits,) = run(first, weight)
    run(second, weight)
    assert torch.equal(logits + 0, F.linear(torch.tanh(first), weight))


def test_fused_optimizer_step_is_noticed() -> None:
    from memeff_compile.errors import StaleLogitsError

    logits, _, _, weight = pair()
    weight.grad = torch.ones_like(weight)
    torch.optim.AdamW([weight], lr=0.1, fused=True).step()
    with pytest.raises(StaleLogitsError, match=r"optimizer\.step"):
        logits.argmax()
