"""memeff::attention on the CPU: values and gradients under every condition, layouts, errors."""

from __future__ import annotations

import math
from typing import Any

import pytest
import sympy
import torch
import torch.nn.functional as F
from torch import Tensor

from memeff_compile.errors import DoubleBackwardError, UnsupportedInputError
from memeff_compile.kernels.attention import (
    ENGINES,
    attention,
    attention_backward,
    backward_bytes,
    bytes_after,
    bytes_before,
    engine_for,
    mask_bytes,
    reference,
    served,
    supports,
)
from tests.support.dense_attention import (
    Case,
    compose,
    counting,
    dense_with_gradients,
    draw,
    largest,
)
from tests.support.live_bytes import LiveBytes

ROUNDING = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2**-8, torch.bfloat16: 2**-5}
NAMES = ("out", "lse", "grad of q", "grad of k", "grad of v")


def gradient_like(case: Case) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(case.q.shape, generator=generator).to(case.q.dtype)


def ours(case: Case, grad: Tensor) -> tuple[Tensor, ...]:
    """Return out, lse and the gradients of q, k and v."""
    leaves = [each.detach().requires_grad_() for each in (case.q, case.k, case.v)]
    out, lse = attention(*leaves, *case.tables, **case.settings)
    assert not lse.requires_grad
    return (out.detach(), lse, *torch.autograd.grad(out, leaves, grad))


def check(case: Case) -> None:
    grad = gradient_like(case)
    found = ours(case, grad)
    for name, ours_, wanted in zip(NAMES, found, dense_with_gradients(case, grad), strict=True):
        assert ours_.shape == wanted.shape
        is_number = wanted != -math.inf
        assert torch.equal(ours_ != -math.inf, is_number), name
        difference = largest(ours_.double()[is_number] - wanted[is_number])
        assert difference <= ROUNDING[case.q.dtype] * max(1.0, largest(wanted[is_number])), name


@pytest.mark.parametrize("seed", range(48))
def test_values_and_gradients_equal_dense_attention(seed: int) -> None:
    sizes = [(9, 11), (16, 16), (5, 20), (20, 5), (1, 7), (13, 1)][seed % 6]
    groups = (1, 2, 4)[seed % 3]
    check(compose(draw(groups=groups, queries=sizes[0], keys=sizes[1], seed=seed), seed))


@pytest.mark.parametrize("dtype", list(ROUNDING), ids=str)
@pytest.mark.parametrize("depth", [40, 64, 96, 128, 256])
def test_every_dtype_and_head_dimension(dtype: torch.dtype, depth: int) -> None:
    case = draw(1, 4, 2, 33, 47, depth, dtype)
    key_mask = torch.arange(47)[None] < 40
    check(Case(case.q, case.k, case.v, (key_mask, None, None), {"ahead": 14, "softcap": 20.0}))


@pytest.mark.parametrize("empty_rows", ["zeros", "mean"])
def test_many_blocks_of_queries_equal_one(empty_rows: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "BLOCK_SCORES", 16)
    for seed in range(8):
        case = compose(draw(queries=70, keys=64, seed=seed, empty_rows=empty_rows), seed)
        assert reference.block_of(8, 70, 64) < 70
        check(case)


def test_a_query_without_keys_gets_zeros_as_in_torch() -> None:
    case = draw(queries=6, keys=6, groups=4, ahead=-2)
    mask = counting(case)
    out, lse = attention(case.q, case.k, case.v, ahead=-2)
    wanted = F.scaled_dot_product_attention(case.q, case.k, case.v, attn_mask=mask[None])
    torch.testing.assert_close(out, wanted)
    assert torch.equal(out[:, :, :2], torch.zeros_like(out[:, :, :2]))
    assert bool((lse[:, :, :2] == -math.inf).all())
    check(case)


def test_a_query_without_keys_gets_what_adding_the_smallest_number_gives() -> None:
    """An eager chain: scores plus finfo.min, in value and gradient."""
    case = draw(groups=4, dtype=torch.float32, empty_rows="mean")
    key_mask = torch.ones(2, 11, dtype=torch.bool)
    key_mask[0] = False
    case = Case(case.q, case.k, case.v, (key_mask, None, None), case.settings)
    leaves = [each.detach().requires_grad_() for each in (case.q, case.k, case.v)]
    bias = torch.where(key_mask, 0.0, torch.finfo(torch.float32).min)[:, None, None]
    weight = (leaves[0] @ leaves[1].transpose(2, 3) * 8**-0.5 + bias).softmax(-1)
    wanted, grad = weight @ leaves[2], gradient_like(case)
    expected = torch.autograd.grad(wanted, leaves, grad)
    found = ours(case, grad)
    torch.testing.assert_close(found[0], wanted.detach())
    torch.testing.assert_close(found[2:], expected)
    assert float(found[2][0].abs().max()) > 0.0


@pytest.mark.parametrize("sizes", [(0, 4, 5, 6), (2, 4, 0, 6), (2, 4, 5, 0)], ids=str)
@pytest.mark.parametrize("empty_rows", ["zeros", "mean"])
def test_empty_inputs_give_empty_or_zero_outputs(sizes: tuple[int, ...], empty_rows: str) -> None:
    batch, heads, queries, keys = sizes
    case = draw(batch, heads, 2, queries, keys, empty_rows=empty_rows, ahead=0)
    found = ours(case, gradient_like(case))
    assert found[0].shape == case.q.shape
    assert all(largest(each) == 0.0 for each in (found[0], *found[2:]))


def test_strides_of_the_inputs_do_not_matter() -> None:
    case = draw(queries=7, keys=7, ahead=0)
    grad = gradient_like(case)
    wide = torch.zeros(2, 2, 7, 16, dtype=torch.float64)
    wide[..., ::2] = case.v
    turned = [each.transpose(1, 2).contiguous().transpose(1, 2) for each in (case.q, case.k)]
    strided = Case(*turned, wide[..., ::2], case.tables, case.settings)
    one = torch.ones(1, 1, 1, 1, dtype=torch.float64).expand(case.q.shape)
    for gradient in (grad, grad.transpose(1, 2).contiguous().transpose(1, 2), one):
        pairs = zip(ours(case, gradient), ours(strided, gradient), strict=True)
        assert all(torch.allclose(*pair) for pair in pairs)


def test_outputs_and_gradients_keep_heads_beside_depth() -> None:
    case = draw()
    found = ours(case, gradient_like(case))
    assert all(found[i].transpose(1, 2).is_contiguous() for i in (0, 2, 3, 4))
    assert found[1].is_contiguous()


@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=str)
def test_what_hidden_keys_hold_reaches_nothing(bad: float) -> None:
    """Unlike eager, where 0 * nan of a padded value is nan."""
    case = draw(queries=6, keys=8)
    key_mask = torch.arange(8)[None] < 5
    hidden = Case(case.q, case.k.clone(), case.v.clone(), (key_mask, None, None), {})
    hidden.k[:, :, 5:], hidden.v[:, :, 5:] = bad, bad
    clean = Case(case.q, case.k, case.v, hidden.tables, {})
    grad = gradient_like(case)
    for found, wanted in zip(ours(hidden, grad), ours(clean, grad), strict=True):
        assert torch.equal(found, wanted)


def test_nan_reaches_the_queries_that_see_it() -> None:
    case = draw(queries=6, keys=6, ahead=0)
    case.k[:, :, 3] = math.nan
    out, _ = attention(case.q, case.k, case.v, ahead=0)
    assert bool(out[:, :, 3:].isnan().all())
    assert not bool(out[:, :, :3].isnan().any())


@pytest.mark.parametrize("softcap", [0.0, 50.0])
def test_outliers_are_as_right_as_ordinary_numbers(softcap: float) -> None:
    case = draw(queries=6, keys=8, dtype=torch.float32, ahead=2, softcap=softcap)
    case.q[:, :, 2] *= 1e4
    case.k[:, :, 1] *= 1e4
    case.v[:, :, 0] *= 1e4
    out, _ = attention(case.q, case.k, case.v, **case.settings)
    wanted = dense_with_gradients(case, gradient_like(case))[0]
    torch.testing.assert_close(out.double(), wanted, rtol=1e-4, atol=1e-2)


def test_gradients_that_nobody_asks_for_are_not_given() -> None:
    case = draw()
    q = case.q.requires_grad_()
    out, _ = attention(q, case.k, case.v)
    out.sum().backward()
    assert q.grad is not None
    assert case.k.grad is None


def test_nothing_given_is_changed() -> None:
    case = compose(draw(), 3)
    before = [each.clone() for each in (case.q, case.k, case.v)]
    ours(case, gradient_like(case))
    assert all(map(torch.equal, before, (case.q, case.k, case.v)))


def test_a_second_derivative_is_refused() -> None:
    case = draw()
    q = case.q.requires_grad_()
    out, _ = attention(q, case.k, case.v)
    (grad,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(DoubleBackwardError, match=r"memeff\.attention"):
        grad.sum().backward()


@pytest.mark.parametrize("seed", [0, 1, 5])
def test_opcheck(seed: int) -> None:
    case = compose(draw(), seed)
    leaves = [each.requires_grad_() for each in (case.q, case.k, case.v)]
    torch.library.opcheck(attention, (*leaves, *case.tables), case.settings)
    out, lse = (each.detach() for each in attention(*leaves, *case.tables, **case.settings))
    operands = [each.detach() for each in leaves]
    given = {"ahead": None, "behind": None, "scale": None, "softcap": 0.0, "empty_rows": "zeros"}
    settings = {**given, **case.settings}.values()
    arguments = (gradient_like(case), *operands, out, lse, *case.tables, None, None, *settings)
    torch.library.opcheck(attention_backward, arguments)


def test_sizes_and_bounds_may_be_dynamic() -> None:
    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ahead = k.shape[2] - q.shape[2]
        out, _ = attention(q, k, v, ahead=ahead, behind=ahead + 3)
        return out.transpose(1, 2).reshape(q.shape[0], q.shape[2], -1)

    compiled = torch.compile(step, backend="aot_eager", dynamic=True, fullgraph=True)
    for queries, keys in ((5, 9), (6, 7), (8, 8)):
        case = draw(queries=queries, keys=keys)
        leaves = [each.requires_grad_() for each in (case.q, case.k, case.v)]
        found, wanted = compiled(*leaves), step(*leaves)
        torch.testing.assert_close(found, wanted)
        pairs = (torch.autograd.grad(each.square().sum(), leaves) for each in (found, wanted))
        torch.testing.assert_close(*pairs)


def test_autocast_does_not_reach_inside() -> None:
    case = draw(dtype=torch.float32)
    plain = attention(case.q, case.k, case.v)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert all(map(torch.equal, attention(case.q, case.k, case.v), plain))


def test_the_scores_of_all_queries_never_exist_at_once() -> None:
    """The largest buffer is a block of scores, in the forward and in the backward."""
    case = draw(1, 4, 2, 1024, 4096, 8, torch.float32, ahead=3072)
    grad = gradient_like(case)
    with LiveBytes() as bytes_:
        out, lse = reference.attend(case.q, case.k, case.v, _plain(case))
        reference.gradients(grad, case.q, case.k, case.v, out, lse, _plain(case))
    assert bytes_.largest <= 4 * reference.BLOCK_SCORES
    assert bytes_.largest < int(bytes_before(1, 4, 1024, 4096, dtype=torch.float32)) / 3


def _plain(case: Case) -> Any:
    from memeff_compile.kernels._triton.conditions import Conditions

    ahead = case.settings.get("ahead")
    return Conditions(None, None, None, ahead, None, case.q.shape[3] ** -0.5, 0.0, mean=False)


def test_the_formulas_count_what_they_say() -> None:
    batch, heads, queries, keys = sympy.symbols("B H M N")
    scores = bytes_before(batch, heads, queries, keys, dtype=torch.bfloat16)
    assert sympy.simplify(scores - 2 * batch * heads * queries * keys) == 0
    assert mask_bytes(8, 2048, 2048, dtype=torch.bool) == 32 << 20
    case = draw(dtype=torch.bfloat16)
    _, lse = attention(case.q, case.k, case.v)
    assert bytes_after(*case.q.shape[:3]) == lse.numel() * lse.element_size()
    assert backward_bytes(*case.q.shape[:3]) == 2 * 4 * lse.numel()


def test_served_says_why_the_kernels_do_not_serve() -> None:
    cuda, cpu = torch.device("cuda", 0), torch.device("cpu")
    assert "CUDA" in served(cpu, torch.bfloat16, 64)
    assert "bfloat16" in served(cuda, torch.float32, 64)
    assert "256" in served(cuda, torch.float16, 320)
    assert engine_for(cpu, torch.float32) == "reference"
    assert set(ENGINES) == {"tiles", "reference"}


def test_a_planned_gpu_is_served() -> None:
    from memeff_compile.kernels.device import planned_for

    with planned_for(torch.device("cuda", 0)):
        assert served(torch.device("cpu"), torch.bfloat16, 128) == ""
        assert engine_for(torch.device("cpu"), torch.bfloat16, 128) == "tiles"
        case = draw()
        attention(case.q, case.k, case.v)  # the tensors are still here


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "softcap": ({"softcap": -1.0}, "softcap is -1.0"),
    "softcap nan": ({"softcap": math.nan}, "softcap is nan"),
    "empty rows": ({"empty_rows": "nan"}, "one of zeros, mean"),
    "dtype": ({"q": torch.ones(2, 4, 9, 8, dtype=torch.int8)}, "q has dtype int8"),
    "two dtypes": ({"k": torch.ones(2, 2, 11, 8).half()}, "cast them to one dtype"),
    "dimensions": ({"v": torch.ones(2, 11, 8)}, "v has 3 dimensions"),
    "k and v": ({"v": torch.ones(2, 2, 12, 8)}, "the same shape"),
    "batch": ({"q": torch.ones(1, 4, 9, 8)}, "batch and depth"),
    "heads": ({"q": torch.ones(2, 3, 9, 8)}, "3 heads and k and v 2"),
    "one id": ({"query_ids": torch.ones(2, 9).int()}, "without key_ids"),
    "mask dtype": ({"key_mask": torch.ones(2, 11)}, "bool of"),
    "mask shape": ({"key_mask": torch.ones(2, 9).bool()}, r"\(1 or 2, 11\) is needed"),
    "mask batch": ({"key_mask": torch.ones(3, 11).bool()}, r"\(1 or 2, 11\) is needed"),
    "id dtypes": (
        {"query_ids": torch.ones(2, 9).int(), "key_ids": torch.ones(2, 11).long()},
        "one dtype",
    ),
    "sparse": ({"q": torch.ones(2, 4, 9, 8).to_sparse()}, "Dequantise or densify"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_in_words(name: str) -> None:
    changed, words = BAD[name]
    case = draw(dtype=torch.float32)
    given = {"q": case.q, "k": case.k, "v": case.v, **changed}
    with pytest.raises(UnsupportedInputError, match=words):
        attention(**given)


def test_a_head_dimension_beyond_the_largest_is_refused() -> None:
    q = torch.ones(1, 1, 2, 264)
    sentence = supports(q, q, q)
    assert sentence is not None
    assert "1 to 256 is served" in sentence
