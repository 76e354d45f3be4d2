"""memeff::attention on a GPU: against float64 at real sizes, the same bits twice, graphs, memory."""

from __future__ import annotations

import gc
import math

import pytest
import torch
from torch import Tensor

from memeff_compile.kernels._triton.conditions import Conditions
from memeff_compile.kernels._triton.key_tiles import tiles_of
from memeff_compile.kernels.attention import (
    attention,
    backward_bytes,
    bytes_after,
    engine_for,
    hopper,
    hopper_gradients,
    tiles,
)
from memeff_compile.kernels.attention.call import Call
from tests.support.dense_attention import (
    BUDGET,
    NAMES,
    Case,
    assert_equals_dense,
    compose,
    dense_with_gradients,
    draw,
    gradient_like,
    largest,
)

pytestmark = pytest.mark.gpu


def ours(case: Case, grad: Tensor) -> tuple[Tensor, ...]:
    leaves = [each.detach().requires_grad_() for each in (case.q, case.k, case.v)]
    out, lse = attention(*leaves, *case.tables, **case.settings)
    return (out.detach(), lse, *torch.autograd.grad(out, leaves, grad))


def check(case: Case) -> None:
    case = case.to("cuda")
    grad = gradient_like(case)
    assert_equals_dense(ours(case, grad), case, grad)


@pytest.mark.parametrize("seed", range(24))
def test_values_and_gradients_equal_dense_attention(seed: int) -> None:
    queries, keys = [(512, 512), (300, 1000), (1000, 300), (129, 127), (1, 640), (640, 1)][seed % 6]
    depth = (64, 128, 40, 256, 96)[seed % 5]
    dtype = (torch.bfloat16, torch.float16)[seed % 2]
    case = draw(2, 8, (1, 2, 8)[seed % 3], queries, keys, depth, dtype, seed)
    assert engine_for(torch.device("cuda", 0), dtype, depth) == "tiles"
    check(compose(case, seed))


@pytest.mark.parametrize("depth", [16, 40, 64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_head_dimension(depth: int, dtype: torch.dtype) -> None:
    check(draw(1, 4, 2, 700, 700, depth, dtype, ahead=0))
    check(draw(1, 4, 2, 700, 700, depth, dtype, ahead=0, softcap=30.0, behind=200))


@pytest.mark.parametrize("dtype", [torch.float32], ids=str)
def test_other_dtypes_run_in_plain_torch(dtype: torch.dtype) -> None:
    case = draw(1, 4, 2, 200, 300, 64, dtype, ahead=100)
    assert engine_for(torch.device("cuda", 0), dtype, 64) == "reference"
    check(case)


def test_left_padding_and_packed_documents() -> None:
    case = draw(4, 8, 2, 2048, 2048, 128, torch.bfloat16, ahead=0)
    key_mask = torch.arange(2048)[None] >= torch.tensor([[0], [1024], [5], [2047]])
    check(Case(case.q, case.k, case.v, (key_mask, None, None), {"ahead": 0}))
    settings = {"ahead": 0, "empty_rows": "mean"}
    check(Case(case.q, case.k, case.v, (key_mask, None, None), settings))
    ids = (torch.arange(2048) // 300)[None].int()
    check(Case(case.q, case.k, case.v, (None, ids, ids), {"ahead": 0}))


@pytest.mark.parametrize("softcap", [0.0, 50.0])
def test_outliers_stay_numbers(softcap: float) -> None:
    """Scores of 10^9: weights are at most 1, without overflow."""
    case = draw(1, 2, 2, 300, 300, 128, torch.float16, ahead=0, softcap=softcap).to("cuda")
    case.q[:, :, 7], case.k[:, :, 3] = 1e4, 1e4
    found = ours(case, gradient_like(case))
    wanted = dense_with_gradients(case, gradient_like(case))[0]
    assert all(bool(each.isfinite().all()) for each in (found[0], found[1], found[4]))
    torch.testing.assert_close(found[0].double(), wanted, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=str)
def test_what_hidden_keys_hold_reaches_nothing(bad: float) -> None:
    case = draw(2, 4, 2, 200, 300, 64, torch.bfloat16).to("cuda")
    key_mask = torch.arange(300, device="cuda")[None] < 170
    clean = Case(case.q, case.k, case.v, (key_mask, None, None), {})
    hidden = Case(case.q, case.k.clone(), case.v.clone(), clean.tables, {})
    hidden.k[:, :, 170:], hidden.v[:, :, 170:] = bad, bad
    grad = gradient_like(case)
    assert all(map(torch.equal, ours(hidden, grad), ours(clean, grad)))


def test_the_same_inputs_give_the_same_bits() -> None:
    case = draw(2, 8, 2, 1500, 1500, 128, torch.bfloat16, ahead=0, softcap=30.0).to("cuda")
    grad = gradient_like(case)
    first = ours(case, grad)
    assert all(all(map(torch.equal, first, ours(case, grad))) for _ in range(5))


def _for_hopper(case: Case) -> Call:
    """Return a call as the kernels in Gluon take it, or skip the test if they do not support it."""
    unsaid = {"key_mask": None, "query_ids": None, "key_ids": None, "ahead": None, "behind": None}
    rest = {"scale": case.q.shape[3] ** -0.5, "softcap": 0.0, "mean": False}
    given = Conditions(**{**unsaid, **case.settings, **rest})
    call = tiles._call(case.q, case.k, case.v, given)
    if not hopper.serves(call):
        pytest.skip("needs compute capability 9.0 and Gluon")
    return call


@pytest.mark.parametrize(
    ("depth", "dtype", "settings"),
    [
        (128, torch.bfloat16, {"ahead": 0}),
        (128, torch.float16, {"ahead": 0, "behind": 200}),
        (96, torch.bfloat16, {}),
        (64, torch.bfloat16, {"ahead": 300}),
    ],
)
def test_the_kernel_for_hopper(depth: int, dtype: torch.dtype, settings: dict[str, int]) -> None:
    case = draw(2, 8, 2, 700, 1000, depth, dtype, **settings).to("cuda")
    call = _for_hopper(case)
    found = hopper.attend(call)
    assert all(map(torch.equal, found, hopper.attend(call)))
    for ours_, wanted in zip(found, dense_with_gradients(case, gradient_like(case)), strict=False):
        budget = BUDGET[dtype] * max(1.0, largest(wanted))
        assert largest(ours_.double() - wanted) <= budget


@pytest.mark.parametrize(
    ("sizes", "depth", "dtype", "settings"),
    [
        ((2, 8, 2, 700, 1000), 128, torch.bfloat16, {"ahead": 0}),
        ((2, 8, 1, 1000, 1000), 128, torch.float16, {"ahead": 0, "behind": 200}),
        ((1, 8, 8, 129, 127), 96, torch.bfloat16, {}),
        ((1, 4, 2, 2100, 2100), 128, torch.bfloat16, {"ahead": 0, "behind": 1023}),
        # Some queries see no key, and no query sees some keys.
        ((2, 4, 2, 900, 300), 128, torch.bfloat16, {"ahead": -200}),
        ((2, 4, 2, 300, 900), 128, torch.bfloat16, {"behind": -100}),
        ((1, 4, 2, 1, 640), 64, torch.float16, {}),
        ((2, 8, 2, 700, 1000), 64, torch.bfloat16, {"ahead": 300}),
    ],
    ids=str,
)
def test_the_backward_kernels_for_hopper(
    sizes: tuple[int, int, int, int, int],
    depth: int,
    dtype: torch.dtype,
    settings: dict[str, int],
) -> None:
    case = draw(*sizes, depth, dtype, **settings).to("cuda")
    call, grad = _for_hopper(case), gradient_like(case)
    out, lse = hopper.attend(call)
    assert hopper_gradients.serves(call, grad, out)
    found = hopper_gradients.gradients(call, grad, out, lse)
    again = hopper_gradients.gradients(call, grad, out, lse)
    assert all(map(torch.equal, found, again))
    wanted = dense_with_gradients(case, grad)[2:]
    for name, mine, theirs in zip(NAMES[2:], found, wanted, strict=True):
        budget = BUDGET[dtype] * max(1.0, largest(theirs))
        assert largest(mine.double() - theirs) <= budget, name


def test_more_scores_than_32_bits_count() -> None:
    """1 x 32 x 16384 x 16384: the last rows of the last head are looked at in float64."""
    length = 16384
    generator = torch.Generator("cuda").manual_seed(0)
    like = {"device": "cuda", "dtype": torch.bfloat16, "generator": generator}
    q, k, v, grad = (torch.randn(1, n, length, 64, **like) for n in (32, 8, 8, 32))
    leaves = [each.requires_grad_() for each in (q, k, v)]
    out, lse = attention(*leaves, ahead=0)
    grad[:, :, :-200] = 0.0
    found = torch.autograd.grad(out, leaves, grad)
    rows = slice(length - 200, length)
    exact = [
        each.detach().double().requires_grad_() for each in (q[:, -4:, rows], k[:, -1:], v[:, -1:])
    ]
    case = Case(*exact, settings={"ahead": length - 200})
    wanted = dense_with_gradients(case, grad[:, -4:, rows])
    ours_ = (
        out[:, -4:, rows],
        lse[:, -4:, rows],
        found[0][:, -4:, rows],
        found[1][:, -1:],
        found[2][:, -1:],
    )
    for name, mine, theirs in zip(NAMES, ours_, wanted, strict=True):
        budget = BUDGET[torch.bfloat16] * max(1.0, largest(theirs))
        assert largest(mine.double() - theirs) <= budget, name


def test_a_captured_call_follows_its_tables() -> None:
    case = draw(2, 8, 2, 640, 640, 64, torch.bfloat16, ahead=0).to("cuda")
    key_mask = torch.ones(2, 640, dtype=torch.bool, device="cuda")
    case = Case(case.q, case.k, case.v, (key_mask, None, None), case.settings)
    grad = gradient_like(case)
    ours(case, grad)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        ours(case, grad)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = ours(case, grad)
    for start in (0, 64, 100, 639):
        key_mask.copy_(torch.arange(640, device="cuda")[None] >= start)
        graph.replay()
        assert all(map(torch.equal, captured, ours(case, grad)))


def test_nothing_waits_for_the_gpu() -> None:
    case = compose(draw(2, 8, 2, 300, 300, 64, torch.bfloat16), 3).to("cuda")
    grad = gradient_like(case)
    ours(case, grad)
    torch.cuda.set_sync_debug_mode("error")
    try:
        ours(case, grad)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("padded", [False, True])
def test_the_formulas_are_what_is_allocated(padded: bool) -> None:
    case = draw(4, 8, 4, 2048, 2048, 128, torch.bfloat16, ahead=0).to("cuda")
    tables: tuple[Tensor | None, None, None] = (None, None, None)
    if padded:
        tables = (torch.arange(2048, device="cuda").expand(4, 2048) > 700, None, None)
    leaves = [each.requires_grad_() for each in (case.q, case.k, case.v)]
    grad = gradient_like(case)
    out, _ = attention(*leaves, *tables, ahead=0)
    torch.autograd.grad(out, leaves, grad)
    del out
    torch.cuda.synchronize()
    plan = tiles.plan_for(128, case.q.device, has_tables=padded)
    # memory of other tests must not be freed while this one measures, nor its blocks be reused,
    # which counts as memory of this test
    gc.collect()
    torch.cuda.empty_cache()  # nor its blocks be taken whole, which counts as memory of this one
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out, _ = attention(*leaves, *tables, ahead=0)
    forward = torch.cuda.max_memory_allocated() - before - out.numel() * 2
    tables_of = plan.forward.rows, plan.query_gradient.rows, plan.key_gradient.keys
    # The table of visited tiles: four int32 for each tile of each sequence.
    bounds = [16 * 4 * tiles_of(2048, tile) if padded else 0 for tile in tables_of]
    assert abs(forward - int(bytes_after(4, 8, 2048)) - bounds[0]) <= 1024
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = torch.autograd.grad(out, leaves, grad)
    peak = torch.cuda.max_memory_allocated() - before - sum(g.numel() * 2 for g in found)
    assert abs(peak - int(backward_bytes(4, 8, 2048)) - max(bounds[1:])) <= 2048
