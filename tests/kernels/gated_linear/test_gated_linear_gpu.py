"""The gated linear's engine on a GPU, and a checkpointed step that uses it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import memeff_compile
from memeff_compile.kernels.gated_linear import gated_linear

pytestmark = pytest.mark.gpu

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}
BOUNDS = {torch.bfloat16: 6e-3, torch.float16: 1e-3, torch.float32: 2e-6}


def results(call: Callable[..., Tensor], tensors: list[Tensor], grad: Tensor) -> list[Tensor]:
    """Return the value and the gradients of a call in fp64."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    value = call(*leaves)
    value.backward(grad.to(value.dtype))
    return [t.double() for t in (value.detach(), *(leaf.grad for leaf in leaves)) if t is not None]


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_value_and_gradients_are_those_of_the_formula(dtype: torch.dtype, activation: str) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    generator = torch.Generator(device="cuda").manual_seed(0)
    shapes = ((3, 77, 1537), (3, 77, 1537), (640, 1537), (3, 77, 640))
    drawn = [torch.randn(s, device="cuda", generator=generator).to(dtype) for s in shapes]
    drawn[2] /= 40
    *tensors, grad = drawn
    before = [tensor.clone() for tensor in tensors]
    found = results(lambda g, u, w: gated_linear(g, u, w, None, activation), tensors, grad)
    chosen = ACTIVATIONS[activation]
    wanted = results(
        lambda g, u, w: F.linear(chosen(g) * u, w), [t.double() for t in tensors], grad.double()
    )
    for one, other in zip(found, wanted, strict=True):
        assert float((one - other).norm() / other.norm()) <= BOUNDS[dtype]
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))


def test_a_checkpointed_step_writes_gradients_over_gate_and_up() -> None:
    transformers = pytest.importorskip("transformers", reason="builds a transformers model")
    config = transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=512,
        intermediate_size=8192,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=8,
        use_cache=False,
    )
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
        ids = torch.randint(0, 512, (8, 1024))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    peaks = {}
    for mode in ("off", "exact"):
        memeff_compile.reset()
        compiled: Callable[..., object] = torch.compile(
            model, backend="memeff", options={"memeff.gated_linear": mode}
        )
        for _ in range(3):
            torch.cuda.reset_peak_memory_stats()
            compiled(input_ids=ids, labels=ids).loss.backward()  # type: ignore[attr-defined]
            model.zero_grad(set_to_none=True)
        peaks[mode] = torch.cuda.max_memory_allocated()
    product = 8 * 1024 * 8192 * 2
    assert peaks["exact"] <= peaks["off"] - product
