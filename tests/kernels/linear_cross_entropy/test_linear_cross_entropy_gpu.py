"""`library` on a real GPU: hostile data, repeatability, CUDA graphs, 64-bit offsets, the workspace."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import memeff_compile
from memeff_compile.kernels.linear_cross_entropy import (
    bytes_after,
    engine_for,
    linear_cross_entropy,
)
from tests.support import hostile_rows
from tests.support.oracles import (
    CASES,
    Case,
    Inputs,
    assert_matches_oracle,
    dense_linear_cross_entropy,
    make_inputs,
    relative_error,
    values_and_gradients,
)

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
ROOT = Path(__file__).resolve().parents[3]
MIB = 2**20
PLAIN = CASES[0]
SIZES: dict[str, Any] = {"shape": (3, 43), "depth": 96, "vocab": 3001}
# Strips of 256 columns and pieces of up to 1024 for the 129 rows of SIZES.
NARROW_PIECES = 129 * 12 * 256


@pytest.mark.usefixtures("nan_filled_empty")
@pytest.mark.parametrize("kind", ["flat", "peaked"])
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str
)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_values_and_gradients_match_the_oracle(case: Case, dtype: torch.dtype, kind: str) -> None:
    inputs = make_inputs(case, **SIZES, dtype=dtype, device=DEVICE, kind=kind)
    assert_matches_oracle(linear_cross_entropy, inputs, case.arguments(NARROW_PIECES), slack=2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", hostile_rows.ROWS)
def test_entropy_and_top_of_a_hostile_row_equal_eager(name: str, dtype: torch.dtype) -> None:
    hostile_rows.check(linear_cross_entropy, name, dtype, DEVICE)


@pytest.mark.parametrize("shape", [(1,), (3,), (0,), (2, 0), (2, 65)], ids=str)
@pytest.mark.parametrize("vocab", [1, 2, 64, 65, 4099])
@pytest.mark.parametrize("depth", [1, 7, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_any_size_matches_the_oracle(
    dtype: torch.dtype, depth: int, vocab: int, shape: tuple[int, ...]
) -> None:
    case = Case("sizes", has_bias=True, with_logit_sum=True)
    inputs = make_inputs(case, shape=shape, vocab=vocab, depth=depth, dtype=dtype, device=DEVICE)
    for workspace in (0, 1):
        # With few elements a gradient may be a small difference of sums, where rounding shows.
        assert_matches_oracle(
            linear_cross_entropy, inputs, case.arguments(workspace), slack=100 if vocab == 1 else 20
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_strided_inputs_match_the_oracle(dtype: torch.dtype) -> None:
    inputs = make_inputs(PLAIN, **SIZES, dtype=dtype, device=DEVICE, kind="peaked")
    inputs.weight = inputs.weight.T.contiguous().T  # a head stored as (D, V)
    wide = inputs.hidden.new_zeros(*inputs.hidden.shape[:-1], 2 * inputs.hidden.shape[-1])
    wide[..., ::2] = inputs.hidden
    inputs.hidden = wide[..., ::2]
    inputs.grad_nll = torch.tensor(0.5, device=DEVICE).expand(inputs.grad_nll.shape)
    arguments = PLAIN.arguments(NARROW_PIECES)
    assert_matches_oracle(linear_cross_entropy, inputs, arguments, slack=1.5)
    found = values_and_gradients(linear_cross_entropy, inputs, arguments)
    assert found["grad_weight"].stride() == inputs.weight.stride()
    wide_head = inputs.weight.new_zeros(inputs.weight.shape[0], 2 * inputs.weight.shape[1])
    wide_head[:, ::2] = inputs.weight
    inputs.weight = wide_head[:, ::2]
    assert_matches_oracle(linear_cross_entropy, inputs, arguments, slack=1.5)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_poisoned_row_stays_visible(dtype: torch.dtype, poison: float) -> None:
    inputs = make_inputs(PLAIN, shape=(6,), dtype=dtype, device=DEVICE)
    inputs.hidden[2, 4] = poison
    found = values_and_gradients(linear_cross_entropy, inputs, PLAIN.arguments(1))
    healthy = [0, 1, 3, 4, 5]
    assert found["nll"][2].isnan()
    assert found["grad_hidden"][2].isnan().all()
    assert found["grad_weight"].isnan().any(1).all()
    assert found["nll"][healthy].isfinite().all()
    assert found["grad_hidden"][healthy].isfinite().all()


def test_columns_masked_by_bias_get_no_gradient() -> None:
    case = Case("bias", has_bias=True)
    inputs = make_inputs(case, **SIZES, dtype=torch.bfloat16, device=DEVICE)
    assert inputs.bias is not None
    inputs.bias[:1300] = float("-inf")  # the first block contains only -inf
    inputs.target.clamp_(min=1300)
    arguments = case.arguments(NARROW_PIECES)
    assert_matches_oracle(linear_cross_entropy, inputs, arguments, slack=1.5)
    found = values_and_gradients(linear_cross_entropy, inputs, arguments)
    assert found["grad_weight"][:1300].eq(0).all()


def test_logits_beyond_float16_stay_finite() -> None:
    hidden = torch.full((2, 64), 60.0, dtype=torch.float16, device=DEVICE)
    weight = torch.stack([torch.full((64,), 30.0), torch.full((64,), 29.0)]).half().to(DEVICE)
    target = torch.tensor([0, 1], device=DEVICE)
    nll, lse, *_ = linear_cross_entropy(hidden, weight, None, target, None, **PLAIN.arguments())
    torch.testing.assert_close(nll.cpu(), torch.tensor([0.0, 3840.0]))
    assert lse[0] == 60 * 30 * 64


def test_peaked_data_has_less_error_than_eager_in_bfloat16() -> None:
    inputs = make_inputs(
        PLAIN,
        shape=(512,),
        depth=256,
        vocab=8192,
        dtype=torch.bfloat16,
        device=DEVICE,
        kind="peaked",
    )

    def eager(hidden: Tensor, weight: Tensor, *rest: Any, **arguments: Any) -> Any:
        logits = F.linear(hidden, weight).float()
        nll = F.cross_entropy(logits, rest[1], reduction="none")
        return nll, logits.logsumexp(-1), logits.new_zeros(0), logits.new_zeros(0)

    arguments = PLAIN.arguments()
    expected = values_and_gradients(dense_linear_cross_entropy, inputs, arguments)
    ours = values_and_gradients(linear_cross_entropy, inputs, arguments)
    theirs = values_and_gradients(eager, inputs, arguments)
    for name in ("grad_hidden", "grad_weight"):
        error = relative_error(ours[name], expected[name])
        assert error < 4e-3
        assert error < relative_error(theirs[name], expected[name])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_repeated_calls_give_the_same_bits(dtype: torch.dtype) -> None:
    case = CASES[-1]
    inputs = make_inputs(
        case, shape=(2048,), depth=256, vocab=20_011, dtype=dtype, device=DEVICE, kind="peaked"
    )
    arguments = case.arguments(2**24)
    first = values_and_gradients(linear_cross_entropy, inputs, arguments)
    for _ in range(3):
        again = values_and_gradients(linear_cross_entropy, inputs, arguments)
        for name, value in first.items():
            assert torch.equal(value, again[name]), name


@pytest.mark.parametrize("frozen", ["hidden", "weight", "bias"])
def test_frozen_input_changes_no_other_gradient(frozen: str) -> None:
    # The rest of the workspace widens the blocks, which changes the order of sums.
    case = Case("bias", has_bias=True)
    inputs = make_inputs(case, **SIZES, dtype=torch.bfloat16, device=DEVICE)
    arguments = case.arguments(NARROW_PIECES)
    expected = values_and_gradients(linear_cross_entropy, inputs, arguments)
    for name in ("hidden", "weight", "bias"):
        getattr(inputs, name).requires_grad_(name != frozen)
    nll, lse, *_ = linear_cross_entropy(*inputs.tensors(), **arguments)
    torch.autograd.backward((nll, lse), (inputs.grad_nll, inputs.grad_lse))
    for name in ("hidden", "weight", "bias"):
        gradient = getattr(inputs, name).grad
        if name == frozen:
            assert gradient is None
        else:
            assert relative_error(gradient, expected[f"grad_{name}"]) < 3e-3


def test_autocast_does_not_reach_into_the_op() -> None:
    inputs = make_inputs(PLAIN, **SIZES, device=DEVICE)
    expected = values_and_gradients(linear_cross_entropy, inputs, PLAIN.arguments())
    with torch.autocast(DEVICE, torch.bfloat16):
        found = values_and_gradients(linear_cross_entropy, inputs, PLAIN.arguments())
    for name, value in expected.items():
        assert torch.equal(found[name], value)


def test_nothing_waits_for_the_gpu() -> None:
    case = CASES[-1]
    inputs = make_inputs(case, **SIZES, dtype=torch.bfloat16, device=DEVICE)
    values_and_gradients(linear_cross_entropy, inputs, case.arguments(NARROW_PIECES))
    torch.cuda.set_sync_debug_mode("error")
    try:
        values_and_gradients(linear_cross_entropy, inputs, case.arguments(NARROW_PIECES))
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_cuda_graph_replays_on_new_data() -> None:
    case = CASES[-1]
    static = make_inputs(case, **SIZES, dtype=torch.bfloat16, device=DEVICE)
    arguments = case.arguments(NARROW_PIECES)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            values_and_gradients(linear_cross_entropy, static, arguments)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = values_and_gradients(linear_cross_entropy, static, arguments)
    fresh = make_inputs(case, **SIZES, dtype=torch.bfloat16, device=DEVICE, seed=1)
    for name, tensor in vars(fresh).items():
        getattr(static, name).copy_(tensor)
    graph.replay()
    expected = values_and_gradients(linear_cross_entropy, fresh, arguments)
    for name, value in expected.items():
        assert relative_error(found[name], value) < 5e-3, name


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiles_with_inductor(mode: str) -> None:
    def loss(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        nll, *_ = linear_cross_entropy(hidden, weight, None, target, None, **PLAIN.arguments())
        return nll.mean()

    compiled = torch.compile(loss, fullgraph=True, mode=mode)
    for seed in range(4):
        inputs = make_inputs(PLAIN, **SIZES, dtype=torch.bfloat16, device=DEVICE, seed=seed)
        hidden, weight = inputs.hidden.requires_grad_(), inputs.weight.requires_grad_()
        expected = torch.autograd.grad(loss(hidden, weight, inputs.target), (hidden, weight))
        found = torch.autograd.grad(compiled(hidden, weight, inputs.target), (hidden, weight))
        for ours, reference in zip(found, expected, strict=True):
            assert relative_error(ours, reference) < 5e-3


def test_the_function_is_part_of_a_compiled_graph() -> None:
    """Which pass makes the gradients is asked of the GPU and of a file while the graph is traced."""
    target = torch.randint(0, 4096, (256,), device=DEVICE)
    operands = [
        torch.randn(rows, 2048, device=DEVICE, dtype=torch.bfloat16).requires_grad_()
        for rows in (256, 4096)
    ]

    def step(hidden: Tensor, weight: Tensor) -> Tensor:
        return memeff_compile.linear_cross_entropy(hidden, weight, target, scale=0.02)

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True)
    expected = torch.autograd.grad(step(*operands), operands)
    for ours, reference in zip(
        torch.autograd.grad(compiled(*operands), operands), expected, strict=True
    ):
        assert relative_error(ours, reference) < 5e-3


@pytest.mark.parametrize("workspace", [0, 10**11], ids=["automatic", "half of N x V at once"])
def test_more_logits_than_32_bits_can_index(workspace: int) -> None:
    rows, depth, vocab = 40_000, 64, 128_256
    assert rows * (vocab // 2) > 2**31
    generator = torch.Generator(DEVICE).manual_seed(0)
    hidden = torch.randn(rows, depth, generator=generator, device=DEVICE).bfloat16()
    weight = torch.randn(vocab, depth, generator=generator, device=DEVICE).bfloat16()
    target = torch.randint(0, vocab, (rows,), generator=generator, device=DEVICE)
    hidden.requires_grad_()
    weight.requires_grad_()
    arguments = PLAIN.arguments(workspace)
    nll, *_ = linear_cross_entropy(hidden, weight, None, target, None, **arguments)
    nll.sum().backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    some = torch.tensor([0, 1, 20_000, 33_486, 39_999], device=DEVICE)
    kept = hidden.detach()[some].double().requires_grad_()
    expected, *_ = dense_linear_cross_entropy(
        kept, weight.detach(), None, target[some], None, **arguments
    )
    (expected_grad,) = torch.autograd.grad(expected.sum(), kept)
    assert relative_error(nll.detach()[some], expected) < 1e-5
    assert relative_error(hidden.grad[some], expected_grad) < 4e-3
    columns = torch.randint(0, vocab, (8,), generator=generator, device=DEVICE)
    lse = nll.detach() + (hidden.detach().float() * weight.detach()[target].float()).sum(1)
    p = (hidden.detach().double() @ weight.detach()[columns].double().T - lse[:, None]).exp()
    p -= (target[:, None] == columns).double()
    assert relative_error(weight.grad[columns], p.T @ hidden.detach().double()) < 6e-3


@pytest.mark.parametrize("workspace", [0, 32 * MIB], ids=["automatic", "32 MiB"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_formula_bounds_what_is_allocated(dtype: torch.dtype, workspace: int) -> None:
    rows, depth, vocab = 4096, 1024, 128_256
    arguments = PLAIN.arguments(workspace)
    hidden = torch.randn(rows, depth, device=DEVICE, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocab, depth, device=DEVICE, dtype=dtype, requires_grad=True)
    target = torch.randint(0, vocab, (rows,), device=DEVICE)

    def loss() -> Tensor:
        nll, *_ = linear_cross_entropy(hidden, weight, None, target, None, **arguments)
        return nll.mean()

    loss().backward()  # library workspaces and kernels
    hidden.grad = weight.grad = None
    torch.cuda.synchronize()
    resident = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    value = loss()
    torch.cuda.synchronize()
    forward = torch.cuda.max_memory_allocated() - resident
    value.backward()
    torch.cuda.synchronize()
    assert hidden.grad is not None
    assert weight.grad is not None
    returned = hidden.grad.nbytes + weight.grad.nbytes
    both = torch.cuda.max_memory_allocated() - resident - returned
    bound = int(
        bytes_after(
            rows,
            depth,
            vocab,
            dtype=dtype,
            engine=engine_for(hidden.device, dtype, depth),
            device_type="cuda",
            workspace=workspace,
        )
    )
    slack = 8 * MIB  # the allocator hands out blocks up to 1 MiB larger than asked for
    assert forward <= bound + slack
    assert both <= bound + slack


def test_target_out_of_range_stops_on_the_device() -> None:
    script = """
import torch
import memeff_compile.kernels
hidden, weight = torch.randn(4, 8, device="cuda"), torch.randn(16, 8, device="cuda")
target = torch.tensor([0, 1, 16, 3], device="cuda")
torch.ops.memeff.linear_cross_entropy(
    hidden, weight, None, target, None, ignore_index=-100, scale=1.0, softcap=0.0, with_lse=False,
    with_logit_sum=False, gradient_filter="exact", workspace=0,
)
torch.cuda.synchronize()
"""
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, timeout=300
    )
    assert result.returncode != 0
    assert "_assert_async" in result.stderr


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_inputs_on_another_gpu_than_the_current_one() -> None:
    inputs: Inputs = make_inputs(PLAIN, **SIZES, dtype=torch.bfloat16, device="cuda:1")
    assert_matches_oracle(linear_cross_entropy, inputs, PLAIN.arguments(), slack=1.5)


BESIDE = """
import time
import torch
import torch.nn.functional as F
import memeff_compile

torch.manual_seed(0)
hidden = torch.randn(8192, 2304, device="cuda", dtype=torch.bfloat16, requires_grad=True)
weight = torch.randn(64000, 2304, device="cuda", dtype=torch.bfloat16).mul_(0.1).requires_grad_()
target = torch.randint(64000, (8192,), device="cuda")
loss = torch.compile(
    lambda h, w: F.cross_entropy(h @ w.T, target),
    backend="memeff",
    options={"memeff.inner": "eager"},
)
first, calls, differ = None, 0, 0
stop = time.monotonic() + 25
while time.monotonic() < stop:
    torch.empty(2**28, device="cuda").fill_(float("nan"))  # what lies in memory given next
    found = torch.autograd.grad(loss(hidden, weight), [hidden, weight])
    first = found if first is None else first
    calls, differ = calls + 1, differ + (not all(map(torch.equal, found, first)))
assert memeff_compile.last_report().rewrites("fuse_linear_cross_entropy") == 1
print(differ, calls)
"""


def test_gradients_keep_their_bits_beside_other_processes() -> None:
    """A program that starts late, because another process has the GPU, does its tiles, too."""
    command = [sys.executable, "-c", BESIDE]
    running = [
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(4)
    ]
    said = [each.communicate()[0] for each in running]
    counts = [tuple(map(int, text.split())) for text in said]
    assert all(differ == 0 and calls > 20 for differ, calls in counts), counts
