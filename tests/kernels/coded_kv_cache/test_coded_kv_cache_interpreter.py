"""The kernels of coded_kv_cache on a CPU: the same source, run by Triton's interpreter.

The interpreter cannot multiply bf16 and has no inline assembly; bf16 is left to the GPU's tests.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from memeff_compile.kernels.coded_kv_cache import POOL, Layout, append_codes, reference, split_codes
from tests.support.coded_caches import allocate, by_hand, draw, filled

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("nan_filled_empty")]

BUDGET = {torch.float32: 5e-6, torch.float16: 2**-8}

SMALL = {"group": 16, "recent": 16, "kept": 2}
FOUR = Layout(16, 4, **SMALL)  # type: ignore[arg-type]
KINDS = [
    *[pytest.param(Layout(16, bits, **SMALL), id=f"{bits} bits") for bits in (8, 4, 3, 2)],  # type: ignore[arg-type]
    pytest.param(Layout(16, 3, "per_head", **SMALL), id="3 bits per head"),  # type: ignore[arg-type]
    pytest.param(Layout(128, 4, group=16, recent=16, kept=0), id="two shares of channels"),
    pytest.param(Layout(128, 8, group=16, recent=16, kept=2), id="two shares, a byte each"),
    pytest.param(Layout(16, 3, value_bits=2, **SMALL), id="3 and 2 bits"),  # type: ignore[arg-type]
    pytest.param(Layout(128, 4, group=16, recent=16, kept=2, value_bits=8), id="4 and 8 bits"),
    pytest.param(Layout(16, 2, "per_head", value_bits=4, **SMALL), id="2 and 4 bits per head"),  # type: ignore[arg-type]
]


def compare(pool: list[Tensor], expected: list[Tensor]) -> None:
    """Compare the parts in use: codes and scales of coded tokens, the window, the kept ones."""
    assert pool[-1].tolist() == expected[-1].tolist()
    length, coded = filled(pool)
    window = pool[4].shape[2]
    slots = torch.arange(coded, length) % window
    for name, found, wanted in zip(POOL, pool, expected, strict=True):
        if name.endswith("window"):
            found, wanted = found[:, :, slots], wanted[:, :, slots]
        assert torch.equal(found, wanted), name


@pytest.mark.parametrize("layout", KINDS)
def test_appending_leaves_what_the_reference_leaves(layout: Layout) -> None:
    k, v = draw(2, 1, 50, layout.depth, torch.float32)
    pools = [allocate(layout, 2, 1, 80, torch.float32, first=(0, 3)) for _ in range(2)]
    for start, end in ((0, 1), (1, 33), (33, 50)):
        for pool, append in zip(pools, (append_codes.append, reference.append), strict=True):
            append(pool, k[:, :, start:end], v[:, :, start:end], layout.bits, layout.recent, 80)
        compare(*pools)
    assert filled(pools[0]) == (50, 32)


SHARES = [(4, 16), (1, 1), (1, 16), (2, 64)]
# Each layout shared one way, each way of the first layout: they do not meet in the kernel.
SHARED = [
    pytest.param(
        *kind.values,
        *share,
        id=f"{kind.id}, {share[0]} of {share[1]}",
        marks=[] if kind is KINDS[0] or share == SHARES[0] else pytest.mark.slow,
    )
    for kind in KINDS
    for share in SHARES
]


@pytest.mark.parametrize(("layout", "share", "programs"), SHARED)
def test_programs_that_share_a_prompt_leave_what_the_reference_leaves(
    layout: Layout, share: int, programs: int
) -> None:
    """Prompts in pieces, so that some groups have tokens of the window; padding, kept tokens."""
    k, v = (
        x.transpose(1, 2).contiguous().transpose(1, 2) for x in draw(2, 1, 200, 128, torch.float32)
    )
    k, v = k[..., : layout.depth], v[..., : layout.depth]
    pools = [allocate(layout, 2, 1, 200, torch.float32, first=(0, 37)) for _ in range(2)]
    for start, end in ((0, 90), (90, 95), (95, 96), (96, 178), (178, 200)):
        new = k[:, :, start:end], v[:, :, start:end], layout.bits, layout.recent, 200
        append_codes.append(pools[0], *new, new_groups=(share, 4), programs=programs)
        reference.append(pools[1], *new)
        compare(*pools)
    assert filled(pools[0]) == (200, 176)


@pytest.mark.parametrize("scheme", ["kivi", "per_head"])
@pytest.mark.parametrize("bits", [8, 4, 3, 2])
def test_programs_that_share_a_group_leave_what_one_leaves(bits: int, scheme: str) -> None:
    layout = Layout(64, bits, scheme, **SMALL)  # type: ignore[arg-type]
    k, v = draw(1, 1, 32, 64, torch.float32)
    pools = [allocate(layout, 1, 1, 48, torch.float32, first=(1,)) for _ in range(2)]
    for pool in pools:
        reference.append(pool, k[:, :, :31], v[:, :, :31], bits, 16, 48)
    last = k[:, :, 31:], v[:, :, 31:]
    append_codes.append(pools[0], *last, bits, 16, 48, pieces=4)
    reference.append(pools[1], *last, bits, 16, 48)
    compare(*pools)
    assert filled(pools[0]) == (32, 16)


@pytest.mark.parametrize("tokens", [31, 32])
def test_a_group_is_coded_when_the_window_is_full(tokens: int) -> None:
    layout = Layout(16, 4, **SMALL)  # type: ignore[arg-type]
    k, v = draw(1, 1, tokens, 16, torch.float16)
    pool = allocate(layout, 1, 1, 80, torch.float16)
    append_codes.append(pool, k[:, :, :-1], v[:, :, :-1], 4, 16, 80)
    append_codes.append(pool, k[:, :, -1:], v[:, :, -1:], 4, 16, 80)
    assert filled(pool) == (tokens, 0 if tokens < 32 else 16)


def test_more_tokens_than_there_is_room_for_are_no_numbers() -> None:
    layout = Layout(16, 4, **SMALL)  # type: ignore[arg-type]
    k, v = draw(1, 1, 41, 16, torch.float32)
    pool = allocate(layout, 1, 1, 40, torch.float32)
    append_codes.append(pool, k[:, :, :40], v[:, :, :40], 4, 16, 40)
    append_codes.append(pool, k[:, :, 40:], v[:, :, 40:], 4, 16, 40)
    assert filled(pool) == (40, 16)
    found = split_codes.attend(k[:, :, :1], pool, (None, None), None, 0.25, 4)
    assert found.isnan().all()


@pytest.mark.parametrize("layout", KINDS)
def test_attention_equals_a_float64_softmax(layout: Layout) -> None:
    check(layout, tokens=50, splits=2)


def test_attention_in_half_precision() -> None:
    check(FOUR, torch.float16, tokens=50, splits=2)


def check(
    layout: Layout,
    dtype: torch.dtype = torch.float32,
    *,
    tokens: int,
    splits: int,
    repeat: int = 2,
    mask: Tensor | None = None,
    has_norms: bool = False,
) -> Tensor:
    k, v = draw(2, 1, tokens, layout.depth, dtype)
    pool = allocate(layout, 2, 1, 96, dtype, first=(0, 3))
    reference.append(pool, k, v, layout.bits, layout.recent, 96)
    norms: tuple[Tensor | None, Tensor | None] = (None, None)
    if has_norms:
        norms = tuple(torch.rand(2, 1, 96, dtype=dtype) + 0.5 for _ in range(2))  # type: ignore[assignment]
        places = pool[POOL.index("places")]
        places.copy_(torch.tensor([5, -1], dtype=torch.int32))
        assert norms[0] is not None
        norms[0][:, :, 5] *= -1
    q = draw(2, repeat, 1, layout.depth, dtype)[1]
    shapes = split_codes.shapes_for(layout.depth, layout.bits, repeat)
    plan = split_codes.Plan(shapes, splits)
    scale = layout.depth**-0.5
    found = split_codes.attend(q, pool, norms, mask, scale, layout.bits, plan=plan)
    expected = by_hand(q, pool, layout.bits, scale, mask, norms)
    assert found.shape == q.shape
    assert found.dtype == dtype
    assert float((found.double() - expected).abs().max()) <= BUDGET[dtype] * 4
    return found


@pytest.mark.parametrize(
    ("tokens", "splits"), [(1, 1), (1, 5), (32, 1), (33, 5), (48, 2), (96, 1), (96, 5)]
)
def test_every_length_is_right(tokens: int, splits: int) -> None:
    check(FOUR, tokens=tokens, splits=splits)


def test_a_mask_hides_tokens_of_every_segment() -> None:
    mask = torch.rand(2, 1, 1, 96, generator=torch.Generator().manual_seed(1)) < 0.5
    check(FOUR, tokens=70, splits=2, mask=mask)
    check(FOUR, tokens=70, splits=2, mask=mask[:1, ..., :64])
    mask[1] = False
    found = check(FOUR, tokens=40, splits=2, mask=mask)
    assert found[1].count_nonzero() == 0


@pytest.mark.parametrize("repeat", [1, 6, 12])
def test_any_number_of_query_heads_shares_a_key_value_head(repeat: int) -> None:
    check(FOUR, tokens=40, splits=2, repeat=repeat)


def test_norms_multiply_codes_and_kept_tokens_replace_them() -> None:
    check(FOUR, tokens=50, splits=2, has_norms=True)


def test_small_weights_keep_their_digits_in_half_precision() -> None:
    """A token with value zero takes nearly all the weight; the others' parts are not rounded
    away.
    """
    layout = Layout(16, 8, **SMALL)  # type: ignore[arg-type]
    k, v = draw(1, 1, 96, 16, torch.float16)
    k[..., 3] = 0.0
    k[:, :, 5], v[:, :, 5] = 0.0, 0.0
    k[:, :, 5, 3] = 40.0
    pool = allocate(layout, 1, 1, 96, torch.float16)
    reference.append(pool, k, v, 8, 16, 96)
    q = torch.zeros(1, 1, 1, 16, dtype=torch.float16)
    q[..., 3] = 1.0
    plan = split_codes.Plan(split_codes.shapes_for(16, 8), 1)
    found = split_codes.attend(q, pool, (None, None), None, 0.25, 8, plan=plan)
    expected = by_hand(q, pool, 8, 0.25)
    assert 0 < float(expected.abs().max()) < 1e-2
    assert float((found.double() - expected).norm() / expected.norm()) < 2e-3


def test_the_plan_of_the_sizes_is_right_too() -> None:
    k, v = draw(1, 2, 70, 16, torch.float32)
    pool = allocate(FOUR, 1, 2, 80, torch.float32)
    reference.append(pool, k, v, 4, 16, 80)
    q = draw(1, 4, 1, 16, torch.float32)[1]
    found = split_codes.attend(q, pool, (None, None), None, 0.25, 4)
    assert float((found.double() - by_hand(q, pool, 4, 0.25)).abs().max()) <= 2e-5
