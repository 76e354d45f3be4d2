"""Whole training steps on a GPU: numbers, memory, CUDA graphs, deferred logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytestmark = pytest.mark.gpu

VOCABULARY = 32000


def model(dtype: torch.dtype, seed: int = 0, **overrides: Any) -> nn.Module:
    """Build a small Llama on the GPU."""
    transformers = pytest.importorskip("transformers", reason="builds a transformers model")
    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        **overrides,
    }
    torch.manual_seed(seed)
    with torch.device("cuda"):
        built: nn.Module = transformers.AutoModelForCausalLM.from_config(
            transformers.LlamaConfig(**settings), dtype=dtype
        )
    return built.train()


def batch(seed: int = 1, rows: int = 4, length: int = 256) -> Tensor:
    """Draw token ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCABULARY, (rows, length), generator=generator).cuda()


def step(module: nn.Module, ids: Tensor) -> tuple[float, dict[str, Tensor]]:
    """Run one forward and backward; return the loss and the gradients."""
    module.zero_grad(set_to_none=True)
    out = module(input_ids=ids, labels=ids)
    out.loss.backward()
    grads = {n: p.grad.float().clone() for n, p in module.named_parameters() if p.grad is not None}
    return float(out.loss.detach()), grads


def pooled_error(grads: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """Return the relative Frobenius error over all parameters together."""
    off = sum(float((grads[n] - wanted[n]).square().sum(dtype=torch.float64)) for n in wanted)
    total = sum(float(w.square().sum(dtype=torch.float64)) for w in wanted.values())
    return (off / total) ** 0.5


def test_fp32_training_step_equals_eager() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    module, ids = model(torch.float32), batch()
    wanted_loss, wanted = step(module, ids)
    plain = torch.compile(module)
    _, inductor = step(plain, ids)
    torch._dynamo.reset()
    compiled = torch.compile(module, backend="memeff")
    loss, grads = step(compiled, ids)
    assert abs(loss - wanted_loss) <= 1e-6 * wanted_loss
    scale = 1e-3 * (sum(float(w.norm()) ** 2 for w in wanted.values()) / len(wanted)) ** 0.5
    names = {n.removeprefix("_orig_mod."): n for n in grads}
    plain_names = {n.removeprefix("_orig_mod."): n for n in inductor}
    for name, reference in wanted.items():
        off = float((grads[names[name]] - reference).norm())
        plain_off = float((inductor[plain_names[name]] - reference).norm())
        bound = max(1e-5 * max(float(reference.norm()), scale), 2 * plain_off)
        assert off <= bound, f"{name}: off by {off}, bound {bound}"


def test_bf16_gradients_are_as_close_to_fp32_as_eager() -> None:
    ratios = []
    for seed in range(5):
        exact = model(torch.bfloat16, seed).float()
        ids = batch(seed + 10)
        _, wanted = step(exact, ids)
        half = exact.to(torch.bfloat16)
        _, eager = step(half, ids)
        torch._dynamo.reset()
        _, ours = step(torch.compile(half, backend="memeff"), ids)
        ours = {n.removeprefix("_orig_mod."): g for n, g in ours.items()}
        ratios.append(pooled_error(ours, wanted) / pooled_error(eager, wanted))
    assert sorted(ratios)[2] <= 1.1, ratios


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_cuda_graphs_train_like_eager(tied: bool) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    module = model(torch.float32, tie_word_embeddings=tied)
    twin = model(torch.float32, tie_word_embeddings=tied)
    twin.load_state_dict(module.state_dict())
    compiled = torch.compile(module, backend="memeff", mode="reduce-overhead")
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (module, twin)]
    for number in range(6):
        ids = batch(number)
        out = compiled(input_ids=ids, labels=ids)
        out.loss.backward()
        last = out.logits[:, -1].argmax(-1)
        wanted = twin(input_ids=ids, labels=ids)
        wanted.loss.backward()
        torch.testing.assert_close(out.loss, wanted.loss, rtol=1e-5, atol=0)
        assert torch.equal(last, wanted.logits[:, -1].argmax(-1))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


@pytest.mark.parametrize(
    ("rows", "workspace"), [(48, "auto"), (4, "minimal")], ids=["more-than-640-mib", "minimal"]
)
def test_no_logits_sized_tensor_is_allocated(rows: int, workspace: str) -> None:
    """By itself the workspace holds all logits only where they fit into 640 MiB."""
    module, ids = model(torch.bfloat16), batch(rows=rows)
    options = {"memeff.linear_cross_entropy.workspace": workspace}
    compiled = torch.compile(module, backend="memeff", options=options)
    step(compiled, ids)
    module.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    torch.cuda.memory._record_memory_history(context=None, stacks="python")
    out = compiled(input_ids=ids, labels=ids)
    out.loss.backward()
    torch.cuda.synchronize()
    snapshot = torch.cuda.memory._snapshot()
    torch.cuda.memory._record_memory_history(enabled=None)
    sizes = [
        entry["size"]
        for trace in snapshot["device_traces"]
        for entry in trace
        if entry["action"] == "alloc"
    ]
    logits_bytes = ids.numel() * VOCABULARY * 2
    weight_gradient_bytes = VOCABULARY * 256 * 4
    assert weight_gradient_bytes < logits_bytes
    assert sizes
    assert max(sizes) < logits_bytes


def test_a_tied_table_has_one_gradient_buffer_in_sixteen_bits() -> None:
    """No tensor of the table's shape in fp32, and in bf16 only the head's gradient."""
    # No piece of half of these rows has the bytes of a table.
    module, ids = model(torch.bfloat16, tie_word_embeddings=True), batch(rows=5)
    compiled = torch.compile(module, backend="memeff")
    step(compiled, ids)
    module.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    torch.cuda.memory._record_memory_history(context=None, stacks="python")
    out = compiled(input_ids=ids, labels=ids)
    out.loss.backward()
    torch.cuda.synchronize()
    snapshot = torch.cuda.memory._snapshot()
    torch.cuda.memory._record_memory_history(enabled=None)
    sizes = [
        entry["size"]
        for trace in snapshot["device_traces"]
        for entry in trace
        if entry["action"] == "alloc"
    ]
    table_bytes = VOCABULARY * 256 * 2
    assert sum(size == table_bytes for size in sizes) == 1
    assert sum(size == 2 * table_bytes for size in sizes) == 0


def test_deferred_logits_read_after_backward_equal_eager() -> None:
    module, ids = model(torch.float32), batch()
    torch.backends.cuda.matmul.allow_tf32 = False
    compiled = torch.compile(module, backend="memeff")
    out = compiled(input_ids=ids, labels=ids)
    out.loss.backward()
    wanted = module(input_ids=ids).logits
    torch.testing.assert_close(out.logits, wanted, rtol=1e-5, atol=1e-5)


def test_formula_bounds_what_the_loss_allocates() -> None:
    from memeff_compile import last_report

    ids = batch(rows=16, length=512)
    peaks = {}
    for backend in ("inductor", "memeff"):
        torch._dynamo.reset()
        compiled = torch.compile(model(torch.bfloat16), backend=backend)
        step(compiled, ids)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        compiled.zero_grad(set_to_none=True)
        out = compiled(input_ids=ids, labels=ids)
        out.loss.backward()
        peaks[backend] = torch.cuda.max_memory_allocated()
        del out, compiled
    saved = last_report().bytes_saved
    assert saved > 0
    assert peaks["inductor"] - peaks["memeff"] > 0.5 * saved, (peaks, saved)
