"""The engine `split` of kv_cache_attention on a CPU: the same source, run by Triton's interpreter.

The interpreter stores bf16 by cutting bits off instead of rounding, which doubles the error of
stored values; the budget is doubled to match.
"""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from memeff_compile.kernels.kv_cache import split_keys

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("nan_filled_empty")]

BUDGET = {torch.float32: 3e-6, torch.float16: 2**-9, torch.bfloat16: 2**-5}


def by_hand(
    q: Tensor, k: Tensor, v: Tensor, last: Tensor, mask: Tensor | None, scale: float
) -> Tensor:
    """Softmax attention in float64 over visible keys; zeros if there are none."""
    repeat = q.shape[1] // k.shape[1]
    q, k, v = (t.double() for t in (q, k, v))
    seen = torch.arange(k.shape[2]) <= last[:, None, :, None]
    seen = seen if mask is None else seen & mask
    score = q @ k.repeat_interleave(repeat, 1).nan_to_num().transpose(2, 3) * scale
    weight = score.masked_fill(~seen, -math.inf).softmax(-1).nan_to_num()
    return weight @ v.repeat_interleave(repeat, 1).nan_to_num()


def planned(q: Tensor, k: Tensor, splits: int) -> split_keys.Plan:
    """Return the plan of these tensors with another number of programs."""
    sizes = (*q.shape[:3], *k.shape[2:])
    plan = split_keys.plan_for(sizes, k.shape[1], q.element_size(), q.device)
    return dataclasses.replace(plan, splits=splits)


def check(
    q: Tensor, k: Tensor, v: Tensor, last: Tensor, mask: Tensor | None = None, *, splits: int = 2
) -> Tensor:
    scale = q.shape[3] ** -0.5
    found = split_keys.attend(q, k, v, last, mask, scale, plan=planned(q, k, splits))
    expected = by_hand(q, k, v, last, mask, scale)
    assert found.shape == q.shape
    assert found.dtype == q.dtype
    assert found.transpose(1, 2).is_contiguous()
    assert float((found.double() - expected).abs().max()) <= BUDGET[q.dtype]
    return found


def draw(
    batch: int,
    heads: int,
    kv_heads: int,
    queries: int,
    keys: int,
    depth: int,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return tuple(  # type: ignore[return-value]
        torch.randn(size, generator=generator).to(dtype)
        for size in (
            (batch, heads, queries, depth),
            (batch, kv_heads, keys, depth),
            (batch, kv_heads, keys, depth),
        )
    )


@pytest.mark.parametrize("dtype", list(BUDGET), ids=str)
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("depth", [64, 96], ids=str)
def test_attention_equals_a_float64_softmax(dtype: torch.dtype, splits: int, depth: int) -> None:
    q, k, v = draw(2, 8, 2, 1, 200, depth, dtype)
    check(q, k, v, torch.tensor([[150], [37]]), splits=splits)


@pytest.mark.parametrize("filled", [1, 15, 16, 17, 31, 64, 70])
def test_only_filled_keys_are_read(filled: int) -> None:
    """Keys beyond are nan; 0 * nan would show."""
    q, k, v = draw(1, 4, 2, 1, 70, 16)
    k[:, :, filled:], v[:, :, filled:] = math.nan, math.nan
    check(q, k, v, torch.tensor([[filled - 1]], dtype=torch.int32), splits=4)


def test_more_programs_than_tiles_and_a_position_beyond_the_cache() -> None:
    q, k, v = draw(1, 2, 1, 1, 40, 16)
    check(q, k, v, torch.tensor([[3]]), splits=8)
    check(q, k, v, torch.tensor([[10**12]]))


def test_queries_see_up_to_their_own_position() -> None:
    q, k, v = draw(2, 4, 2, 5, 60, 32)
    check(q, k, v, torch.tensor([[20, 21, 22, 23, 24]]))
    check(q, k, v, torch.tensor([[0, 59, 7, 1, 2], [3, 3, 3, -1, 40]]))


@pytest.mark.parametrize("splits", [1, 3])
def test_a_query_that_sees_nothing_gets_zeros(splits: int) -> None:
    q, k, v = draw(2, 4, 2, 2, 40, 16)
    found = check(q, k, v, torch.tensor([[-1, 5], [-1, -1]]), splits=splits)
    assert found[0, :, 0].count_nonzero() == 0
    assert found[1].count_nonzero() == 0
    mask = torch.ones(2, 1, 2, 40, dtype=torch.bool)
    mask[1, 0, 1] = False
    found = check(q, k, v, torch.tensor([[39]]), mask, splits=splits)
    assert found[1, :, 1].count_nonzero() == 0


@pytest.mark.parametrize("queries", [1, 3])
def test_a_mask_hides_keys(queries: int) -> None:
    q, k, v = draw(2, 6, 3, queries, 50, 16)
    mask = torch.rand(2, 1, queries, 50, generator=torch.Generator().manual_seed(1)) < 0.5
    check(q, k, v, torch.full((2, queries), 44), mask)
    check(q, k, v, torch.full((1, 1), 44), mask[:1, :, :1])


def test_the_plan_of_the_sizes_is_right_too() -> None:
    q, k, v = draw(1, 4, 2, 1, 150, 16)
    found = split_keys.attend(q, k, v, torch.tensor([[140]]), None, 0.25)
    torch.testing.assert_close(found, check(q, k, v, torch.tensor([[140]])))


def test_more_rows_than_a_tile_holds() -> None:
    q, k, v = draw(1, 24, 1, 3, 33, 16)
    check(q, k, v, torch.tensor([[30, 31, 32]]))


def test_strides_are_followed() -> None:
    """A cache of (B, N, Hkv, D), and queries as a linear layer leaves them."""
    q, k, v = draw(2, 4, 2, 3, 40, 16)
    turned = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)]
    wide = torch.zeros(2, 2, 40, 32)
    wide[..., ::2] = v
    check(turned[0], turned[1], wide[..., ::2], torch.tensor([[9, 10, 11]]))


def test_the_same_inputs_give_the_same_bits() -> None:
    q, k, v = draw(1, 4, 2, 1, 90, 16)
    last = torch.tensor([[80]])
    first, second = (check(q, k, v, last, splits=3) for _ in range(2))
    assert torch.equal(first, second)
