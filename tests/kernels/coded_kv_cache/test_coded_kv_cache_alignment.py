"""Aligned layers: maps fitted by products alone, rows merged and read through them."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from memeff_compile.errors import UnsupportedInputError
from memeff_compile.kernels.coded_kv_cache import (
    PLAIN,
    Layout,
    alignment,
    coded_kv_cache_append_lower,
    coded_kv_cache_append_pair,
    coded_kv_cache_attention,
    coded_kv_cache_view,
    split_codes,
)
from memeff_compile.kernels.coded_kv_cache.alignment import matched, polar
from memeff_compile.kernels.coded_kv_cache.merging import shared_direction
from memeff_compile.kernels.coded_kv_cache.positions import mean_key, mean_product
from tests.support.merged_caches import Pair, aligned_rows

LIMIT = 90
DEPTH = 16
SETTINGS: dict[str, Any] = {
    "keep_first": 2,
    "rule": "slerp",
    "t": 0.5,
    "gamma": 0.0,
    "reading": "distinct",
    "scale": "norm",
}


def layout(bits: int = PLAIN) -> Layout:
    return Layout(DEPTH, bits, group=16, recent=16, kept=8)


def append(pair: Pair, rows: list[Tensor], *, is_first: bool = False, **given: Any) -> None:
    """Append tokens of both layers together; without both, the lower's token goes before."""
    settings = {**SETTINGS, **given}
    how = (pair.layout.bits, pair.layout.recent, LIMIT, *settings.values(), is_first)
    coded_kv_cache_append_pair(*pair.all(), *rows, *how, *pair.maps)


def views(pair: Pair) -> list[Tensor]:
    found: list[Tensor] = []
    for is_upper in (False, True):
        pool, norms = pair.pool(is_upper=is_upper), pair.norms(is_upper=is_upper)
        maps = pair.maps_of(is_upper=is_upper)
        found += coded_kv_cache_view(*pool, *norms, pair.layout.bits, LIMIT, *maps)
    return found


def by_hand(rows: list[Tensor], slots: Tensor, first: tuple[int, ...] = (0, 0)) -> list[Tensor]:
    """Return the rows as merging in plain directions gives them back, with an SVD's rotations."""
    lower, upper = ([x.clone() for x in some] for some in (rows[:2], rows[2:]))
    for b, h, at in itertools.product(range(2), range(rows[0].shape[1]), range(2)):
        i, start = int(slots[b, h]), first[b] + 2
        x, y = rows[at][b, i], rows[at + 2][b, h]
        mean_x, mean_y = x[start:].mean(0), y[start:].mean(0)
        u, _, v = torch.linalg.svd((y[start:] - mean_y).T @ (x[start:] - mean_x))
        turn, part = u @ v, slice(start, 48)
        one, two = x[part] - mean_x, (y[part] - mean_y) @ turn
        e = shared_direction(one, two)
        lower[at][b, i, part] = e * one.norm(dim=-1, keepdim=True) + mean_x
        upper[at][b, h, part] = e * two.norm(dim=-1, keepdim=True) @ turn.T + mean_y
    return [*lower, *upper]


@pytest.mark.parametrize("first", [(0, 0), (0, 3)], ids=["", "padded"])
def test_rows_come_back_as_an_svd_gives_them(first: tuple[int, int]) -> None:
    rows = aligned_rows(2, 3, 70, DEPTH, torch.float64)
    if first[1]:
        for x in rows:
            x[1, :, :3] = torch.nan  # padding may hold anything
    no_room = Layout(DEPTH, PLAIN, group=16, recent=16, kept=2)  # for more than the first rows
    pair = Pair(no_room, 2, 3, LIMIT, torch.float64, first=first, align=True)
    append(pair, rows, is_first=True)
    slots = pair.maps[3]
    assert slots.tolist() == [[1, 2, 0]] * 2, "the heads whose rows are alike"
    # The identity's small share in the fit turns rows by about a thousandth.
    for found, expected in zip(views(pair), by_hand(rows, slots, first), strict=True):
        for b in range(2):
            torch.testing.assert_close(
                found[b, :, first[b] : 70], expected[b, :, first[b] :], rtol=0, atol=0.03
            )
    assert pair.get("places").amax() == first[1] + 1, "no row but the first ones is kept"


def test_aligned_layers_are_merged_with_a_small_part_of_the_error() -> None:
    rows = aligned_rows(2, 3, 70, DEPTH, torch.float32)
    wrong = []
    for align in (False, True):
        pair = Pair(layout(), 2, 3, LIMIT, torch.float32, align=align)
        append(pair, rows, is_first=True)
        found = views(pair)
        wrong.append([float((f[:, :, :70] - r).norm() / r.norm()) for f, r in zip(found, rows)])  # noqa: B905
    assert min(wrong[0]) > 0.1
    assert all(10 * small < large for large, small in zip(*wrong, strict=True))


@pytest.mark.parametrize("bits", [PLAIN, 8, 4, 3, 2])
def test_later_tokens_go_through_the_maps_of_the_first(bits: int) -> None:
    rows = aligned_rows(2, 2, 80, DEPTH, torch.float32)
    pair = Pair(layout(bits), 2, 2, LIMIT, torch.float32, align=True)
    append(pair, [x[:, :, :40] for x in rows], is_first=True)
    maps = [x.clone() for x in pair.maps]
    for at in range(40, 80):
        one = [x[:, :, at : at + 1] for x in rows]
        window = pair.lower[0], pair.lower[1], pair.lower[4]
        coded_kv_cache_append_lower(*window, *one[:2], LIMIT)
        append(pair, [None, None, *one[2:]])  # type: ignore[list-item]
    assert pair.filled() == [80, 64] * 2
    assert all(map(torch.equal, maps, pair.maps))
    loss = {PLAIN: 0.05, 8: 0.05, 4: 0.15, 3: 0.3, 2: 0.6}[bits]
    for found, came in zip(views(pair), rows, strict=True):
        x = came - came.mean(2, keepdim=True)
        assert float((found[:, :, :64] - came[:, :, :64]).norm() / x[:, :, :64].norm()) < loss
        assert torch.equal(found[:, :, 64:80], came[:, :, 64:])
        assert not found[:, :, 80:].any()


def test_kept_rows_come_back_bit_for_bit_from_either_layer() -> None:
    rows = aligned_rows(2, 3, 70, DEPTH, torch.bfloat16)
    for x in rows[2:]:
        x[:, :, 20] = -x[:, :, 20]  # a row that no map aligns
    pair = Pair(layout(4), 2, 3, LIMIT, torch.bfloat16, align=True)
    append(pair, rows, is_first=True, gamma=0.05)
    places, slots = pair.get("places"), pair.maps[3]
    for at, (found, came) in enumerate(zip(views(pair), rows, strict=True)):
        for b, h in itertools.product(range(2), range(3)):
            kept = places[b, h if at < 2 else int(slots[b, h])]
            kept = kept[kept >= 0].long()
            assert 20 in kept.tolist()
            assert torch.equal(found[b, h, kept], came[b, h, kept])
            others = torch.ones(48, dtype=torch.bool)
            others[kept] = False
            assert not (found[b, h, :48] == came[b, h, :48]).all(-1)[others].any()


@pytest.mark.parametrize("bits", [PLAIN, 4])
def test_attention_reads_what_the_view_says(bits: int) -> None:
    rows = aligned_rows(2, 2, 70, DEPTH, torch.float64)
    pair = Pair(layout(bits), 2, 2, LIMIT, torch.float64, align=True)
    append(pair, rows, is_first=True)
    q = torch.randn(2, 4, 1, DEPTH, dtype=torch.float64)
    mask = (torch.arange(LIMIT) >= torch.tensor([0, 3])[:, None])[:, None, None]
    for is_upper in (False, True):
        maps = pair.maps_of(is_upper=is_upper)
        held = [*pair.pool(is_upper=is_upper), *pair.norms(is_upper=is_upper)]
        found = coded_kv_cache_attention(q, *held, bits, mask, None, *maps)
        keys, values = coded_kv_cache_view(*held, bits, LIMIT, *maps)
        rows_of = (x.repeat_interleave(2, 1) for x in (keys, values))
        seen = mask & (torch.arange(LIMIT) < 70)
        expected = torch.nn.functional.scaled_dot_product_attention(q, *rows_of, attn_mask=seen)
        torch.testing.assert_close(found, expected)


def test_too_few_tokens_to_fit_maps_leave_rows_as_they_are() -> None:
    """Two first tokens stay exact and none is left: then merging is that of layers as they are."""
    rows = aligned_rows(2, 2, 60, DEPTH, torch.float64)
    found = []
    for align in (False, True):
        pair = Pair(layout(), 2, 2, LIMIT, torch.float64, align=align)
        append(pair, [x[:, :, :2] for x in rows], is_first=True)
        append(pair, [x[:, :, 2:] for x in rows])
        found.append(views(pair))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_turns_of_other_rows_serve_where_the_first_tokens_say_little() -> None:
    """Ten tokens do not show a turn of 16 channels; a given one makes later tokens come back."""
    rows = aligned_rows(2, 2, 90, DEPTH, torch.float64)
    counted = torch.ones(2, 90, dtype=torch.bool)
    slots, products = alignment.common([x[:1] for x in rows], counted[:1], None)
    assert slots.tolist() == [1, 0]
    _, more = alignment.common([x[:1] for x in rows], counted[:1], slots)
    torch.testing.assert_close(more, products)
    errors = []
    for is_given in (False, True):
        pair = Pair(layout(), 2, 2, LIMIT, torch.float64, align=True)
        if is_given:
            pair.maps[2].copy_(polar(products))
            pair.maps[3].copy_(slots)
        append(pair, [x[:, :, :12] for x in rows], is_first=True)
        for at in range(12, 60):
            append(pair, [x[:, :, at : at + 1] for x in rows])
        off = [a[:, :, 12:32] - b[:, :, 12:32] for a, b in zip(views(pair), rows, strict=True)]
        errors.append(sum(float(x[0].norm()) for x in off))
        assert pair.maps[3].tolist() == [[1, 0]] * 2 or not is_given
        eye = torch.eye(DEPTH, dtype=torch.float64).expand_as(pair.maps[2])
        torch.testing.assert_close(pair.maps[2] @ pair.maps[2].mT, eye, rtol=0, atol=1e-6)
    assert errors[1] < 0.3 * errors[0]


def test_heads_that_processes_divide_are_aligned_as_those_of_one() -> None:
    """Tensor parallelism by heads: a process has some heads of both layers, and fits these alone.

    In these rows a head's match is on the same process; where it is not, the process takes the best
    of its own.
    """
    parts = [aligned_rows(2, 2, 60, DEPTH, torch.float64) for _ in range(2)]
    parts[1] = [x.flip(2) * 0.5 for x in parts[1]]
    rows = [torch.cat(both, 1) for both in zip(*parts, strict=True)]
    found = []
    for some, heads in ((rows, 4), (parts[0], 2), (parts[1], 2)):
        pair = Pair(layout(4), 2, heads, LIMIT, torch.float64, align=True)
        append(pair, some, is_first=True)
        found.append(views(pair))
    for whole, first, second in zip(*found, strict=True):
        torch.testing.assert_close(whole, torch.cat([first, second], 1), rtol=0, atol=1e-9)


def test_means_over_positions_are_those_of_turned_keys_and_their_products() -> None:
    angles = torch.linspace(0.01, 1.0, DEPTH // 2, dtype=torch.float64)
    x, y = torch.randn(2, DEPTH, dtype=torch.float64)
    shifts = (torch.arange(4000, dtype=torch.float64)[:, None] + 0.5) / 100  # up to 40
    cosine, sine = (shifts * angles).cos(), (shifts * angles).sin()

    def turned(key: Tensor) -> Tensor:
        a, b = key.chunk(2)
        return torch.cat([a * cosine - b * sine, b * cosine + a * sine], 1)

    xs, ys = turned(x), turned(y)
    torch.testing.assert_close(mean_key(x, angles, 40), xs.mean(0), rtol=0, atol=1e-5)
    expected = ys.T @ xs / len(xs)
    found = mean_product(y[:, None] * x, angles, 40)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_polar_factors_are_orthogonal_and_those_of_an_svd() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 2, 24, 24, generator=generator, dtype=torch.float64)
    u, sizes, v = torch.linalg.svd(x)
    x = u * torch.logspace(0, -3, 24, dtype=torch.float64) @ v
    found = polar(x)
    torch.testing.assert_close(found @ found.mT, torch.eye(24).double().expand_as(found))
    trace = torch.linalg.svdvals(x).sum(-1)
    torch.testing.assert_close((found * x).sum((-1, -2)), trace, rtol=1e-3, atol=0)
    assert sizes.numel() > 0


@pytest.mark.parametrize("rank", [0, 1, 5])
def test_matrices_without_full_rank_have_orthogonal_factors(rank: int) -> None:
    generator = torch.Generator().manual_seed(0)
    parts = torch.randn(2, 4, 16, rank, generator=generator)
    found = polar(parts[0] @ parts[1].mT)
    torch.testing.assert_close(found @ found.mT, torch.eye(16).expand_as(found), rtol=0, atol=1e-5)
    if rank == 0:
        assert torch.equal(found, torch.eye(16).expand_as(found))


@pytest.mark.parametrize("heads", [1, 2, 3, 6])
def test_every_head_is_matched_once_and_nearly_as_well_as_can_be(heads: int) -> None:
    likeness = torch.rand(30, heads, heads, generator=torch.Generator().manual_seed(0))
    slots = matched(likeness)
    assert slots.sort(1).values.tolist() == [list(range(heads))] * 30
    got = likeness.gather(2, slots.unsqueeze(2)).sum((1, 2))
    orders = torch.tensor(list(itertools.permutations(range(heads))))
    best = likeness[:, torch.arange(heads), orders].sum(2).amax(1)
    assert float((got / best).min()) > 0.9
    assert float((got / best).mean()) > 0.99


@pytest.mark.parametrize(
    ("at", "change", "words"),
    [
        (0, lambda x: x[..., :8], "lower_means is"),
        (2, lambda x: x.double(), "turns is"),
        (3, lambda x: x.long(), "slots is"),
        (1, lambda x: None, "come together"),
    ],
    ids=["shape", "dtype", "indices", "missing"],
)
def test_maps_that_do_not_fit_are_refused(at: int, change: Any, words: str) -> None:
    rows = aligned_rows(2, 2, 40, DEPTH, torch.float32)
    pair = Pair(layout(4), 2, 2, LIMIT, torch.float32, align=True)
    pair.maps[at] = change(pair.maps[at])
    with pytest.raises(UnsupportedInputError, match=words):
        append(pair, rows, is_first=True)
    if at:
        held = [*pair.pool(is_upper=True), *pair.norms(is_upper=True)]
        with pytest.raises(UnsupportedInputError, match=r"means|turns|slots"):
            coded_kv_cache_view(*held, 4, LIMIT, *pair.maps_of(is_upper=True))


def test_opcheck() -> None:
    rows = aligned_rows(2, 2, 40, DEPTH, torch.float32)
    pair = Pair(layout(4), 2, 2, LIMIT, torch.float32, align=True)
    append(pair, [x[:, :, :31] for x in rows], is_first=True)
    tests = ("test_schema", "test_faketensor")
    how = (4, 16, LIMIT, *SETTINGS.values(), False)
    given = (*pair.all(), *(x[:, :, 31:] for x in rows), *how, *pair.maps)
    torch.library.opcheck(coded_kv_cache_append_pair, given, test_utils=tests)
    held = [*pair.pool(is_upper=True), *pair.norms(is_upper=True)]
    maps = pair.maps_of(is_upper=True)
    torch.library.opcheck(coded_kv_cache_view, (*held, 4, LIMIT, *maps), test_utils=tests)
    q = torch.randn(2, 4, 1, DEPTH)
    given = (q, *held, 4, None, None, *maps)
    torch.library.opcheck(coded_kv_cache_attention, given, test_utils=tests)


@pytest.mark.parametrize(("sequences", "heads"), [(64, 4), (16, 4), (1, 1)])
def test_a_map_is_read_once_for_all_its_heads_if_there_is_enough_to_do(
    sequences: int, heads: int
) -> None:
    q, turns = torch.empty(sequences, 32, 1, 128), torch.empty(sequences, 8, 2, 128, 128)
    assert split_codes.heads_at_once(q, turns) == heads
