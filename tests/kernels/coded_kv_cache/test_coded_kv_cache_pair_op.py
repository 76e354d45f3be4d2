"""coded_kv_cache_append_lower and _append_pair: stored tensors, kept rows, refusals."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import torch
from torch import Tensor

from memeff_compile.errors import UnsupportedInputError
from memeff_compile.kernels.coded_kv_cache import (
    PLAIN,
    Layout,
    coded_kv_cache_append_lower,
    coded_kv_cache_append_pair,
    coded_kv_cache_attention,
    coded_kv_cache_view,
    pair_reference,
)
from memeff_compile.kernels.coded_kv_cache.pair_reference import Merging
from tests.support.coded_caches import by_hand
from tests.support.merged_caches import Pair, draw

SMALL: dict[str, Any] = {"group": 16, "recent": 16, "kept": 8}
LIMIT = 90
DEFAULTS: dict[str, Any] = {
    "keep_first": 2,
    "rule": "slerp",
    "t": 0.5,
    "gamma": 0.3,
    "reading": "distinct",
    "scale": "norm",
    "is_first": False,
}


def append(pair: Pair, rows: list[Tensor], *, parked: bool, **given: Any) -> None:
    """Append as the layers do: the lower's token first, or both layers' tokens together."""
    settings = {**DEFAULTS, **given}
    if not parked:
        window = pair.lower[0], pair.lower[1], pair.lower[4]
        coded_kv_cache_append_lower(*window, *rows[:2], LIMIT)
    coded_kv_cache_append_pair(
        *pair.all(),
        *(rows[:2] if parked else (None, None)),
        *rows[2:],
        pair.layout.bits,
        pair.layout.recent,
        LIMIT,
        *settings.values(),
    )


def fill(pair: Pair, rows: list[Tensor], start: int, end: int, **given: Any) -> None:
    for at in range(start, end):
        append(pair, [x[:, :, at : at + 1] for x in rows], parked=False, **given)


def views(pair: Pair) -> list[Tensor]:
    found: list[Tensor] = []
    for is_upper in (False, True):
        pool, norms = pair.pool(is_upper=is_upper), pair.norms(is_upper=is_upper)
        found += coded_kv_cache_view(*pool, *norms, pair.layout.bits, LIMIT)
    return found


@pytest.mark.parametrize("bits", [PLAIN, 8, 4, 3, 2])
def test_tokens_one_by_one_are_stored_as_tokens_at_once(bits: int) -> None:
    """The bound is set by the first tokens that are merged, so those are the same in both."""
    rows = draw(2, 2, 70, 16, torch.float64)
    layout = Layout(16, bits, group=16, recent=16, kept=40)
    pairs = [Pair(layout, 2, 2, LIMIT, torch.float64) for _ in range(2)]
    first = [x[:, :, :32] for x in rows]
    append(pairs[0], first, parked=True, is_first=True)
    append(pairs[0], [x[:, :, 32:] for x in rows], parked=True)
    append(pairs[1], [x[:, :, :1] for x in rows], parked=False, is_first=True)
    fill(pairs[1], rows, 1, 70)
    assert pairs[0].filled() == pairs[1].filled() == [70, 48] * 2
    assert int(pairs[0].get("left_over").sum()) == 0, "a lack of room is met in another order"
    assert int(pairs[0].get("kept_count").min()) > 0
    for found, other in zip(views(pairs[0]), views(pairs[1]), strict=True):
        torch.testing.assert_close(found, other)
        assert torch.equal(found[:, :, 70:], torch.zeros_like(found[:, :, 70:]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bits", [PLAIN, 4])
def test_kept_rows_and_recent_ones_come_back_bit_for_bit(bits: int, dtype: torch.dtype) -> None:
    rows = draw(2, 2, 60, 16, dtype)
    pair = Pair(Layout(16, bits, **SMALL), 2, 2, LIMIT, dtype, first=(0, 3))
    append(pair, rows, parked=True, is_first=True)
    places = pair.get("places")
    assert places[:, :, :2].tolist() == [[[0, 1]] * 2, [[3, 4]] * 2]
    for found, came in zip(views(pair), rows, strict=True):
        assert torch.equal(found[:, :, 32:60], came[:, :, 32:])
        for b in range(2):
            for h in range(2):
                row = places[b, h][places[b, h] >= 0].long()
                assert torch.equal(found[b, h, row], came[b, h, row])
                merged = torch.ones(32, dtype=torch.bool)
                merged[row] = False
                merged[: 3 * b] = False  # padding comes back as anything
                assert not (found[b, h, :32] == came[b, h, :32]).all(-1)[merged].any()
    assert 0 < int(pair.get("kept_count").min()) <= int(pair.get("kept_count").max()) <= 6


@pytest.mark.parametrize("reading", ["distinct", "similar"])
def test_either_reading_keeps_the_rows_that_it_names(reading: str) -> None:
    """Both ends of the same distances, computed here from the rows themselves."""
    rows = draw(1, 2, 60, 16, torch.float64)
    pair = Pair(Layout(16, PLAIN, group=16, recent=16, kept=40), 1, 2, LIMIT, torch.float64)
    append(pair, rows, parked=True, is_first=True, keep_first=0, gamma=0.2, reading=reading)
    angles = [torch.cosine_similarity(rows[at], rows[at + 2], dim=-1).acos() for at in (0, 1)]
    apart = torch.maximum(*angles)[:, :, :32] / torch.pi
    low, high = apart.aminmax(dim=-1, keepdim=True)
    spread = 0.2 * (high - low)
    is_kept = apart > high - spread if reading == "distinct" else apart < low + spread
    for head in range(2):
        places = pair.get("places")[0, head]
        wanted = is_kept[0, head].nonzero().flatten()
        assert 0 < len(wanted) < 32
        assert places[places >= 0].sort().values.tolist() == wanted.tolist()
        for found, came in zip(views(pair), rows, strict=True):
            assert torch.equal(found[0, head, wanted], came[0, head, wanted])


@pytest.mark.parametrize("t", [0.3, 0.5])
def test_plain_directions_are_wrong_by_their_angle_alone(t: float) -> None:
    """Section by section of the error's formula: 2 sin(t a / 2) of the lower row, (1 - t) above."""
    rows = draw(1, 2, 60, 16, torch.float64)
    pair = Pair(Layout(16, PLAIN, **SMALL), 1, 2, LIMIT, torch.float64)
    append(pair, rows, parked=True, is_first=True, t=t, gamma=0.0, keep_first=0)
    found = views(pair)
    for lower, upper in ((0, 2), (1, 3)):
        x, y = rows[lower][:, :, :32], rows[upper][:, :, :32]
        cosine = (x * y).sum(-1) / (x.norm(dim=-1) * y.norm(dim=-1))
        angle = cosine.clamp(-1, 1).acos()
        for place, row, share in ((lower, x, t), (upper, y, 1 - t)):
            wrong = (found[place][:, :, :32] - row).norm(dim=-1) / row.norm(dim=-1)
            torch.testing.assert_close(wrong, 2 * (share * angle / 2).sin(), rtol=0, atol=1e-6)
            assert float(wrong.min()) > 1e-3, "every row is merged"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_lengths_are_kept_through_the_codes(dtype: torch.dtype) -> None:
    rows = draw(1, 2, 60, 16, dtype)
    for bits in (4, 2):
        pair = Pair(Layout(16, bits, **SMALL), 1, 2, LIMIT, dtype)
        append(pair, rows, parked=True, is_first=True)
        for found, came in zip(views(pair), rows, strict=True):
            torch.testing.assert_close(
                found[:, :, :32].double().norm(dim=-1),
                came[:, :, :32].double().norm(dim=-1),
                rtol=1e-2 if dtype == torch.bfloat16 else 1.5e-3,
                atol=1e-6,
            )


def test_room_is_a_bound_and_what_found_none_is_counted() -> None:
    rows = draw(1, 2, 60, 16, torch.float32)
    layout = Layout(16, 4, group=16, recent=16, kept=5)
    pair = Pair(layout, 1, 2, LIMIT, torch.float32)
    append(pair, rows, parked=True, is_first=True, gamma=1.0)
    assert pair.get("kept_count").tolist() == [[3, 3]]
    assert pair.get("left_over").tolist() == [[27, 27]]
    fill(pair, [torch.cat([x, x], 2) for x in rows], 60, 64)
    assert pair.get("left_over").tolist() == [[43, 43]]


def test_later_rows_are_held_to_the_bound_of_the_first() -> None:
    rows = draw(1, 1, 80, 16, torch.float32)
    pair = Pair(Layout(16, 4, group=16, recent=16, kept=60), 1, 1, LIMIT, torch.float32)
    append(pair, [x[:, :, :40] for x in rows], parked=True, is_first=True, gamma=0.4)
    bound = float(pair.get("bound"))
    append(pair, [x[:, :, 40:] for x in rows], parked=True, gamma=0.4)
    assert float(pair.get("bound")) == bound
    x = [row.double() for row in rows]
    apart = torch.maximum(
        *((torch.cosine_similarity(x[a], x[a + 2], dim=-1)).acos() / torch.pi for a in (0, 1))
    )[0, 0, :64]
    expected = {0, 1, *(at for at in range(2, 64) if float(apart[at]) > bound)}
    places = pair.get("places")[0, 0]
    assert set(places[places >= 0].tolist()) == expected
    assert int(pair.get("left_over")) == 0


@pytest.mark.parametrize("bits", [PLAIN, 4])
def test_attention_reads_what_the_view_says(bits: int) -> None:
    rows = draw(2, 2, 60, 16, torch.float64)
    pair = Pair(Layout(16, bits, **SMALL), 2, 2, LIMIT, torch.float64, first=(0, 3))
    append(pair, rows, parked=True, is_first=True)
    q = torch.randn(2, 6, 1, 16, dtype=torch.float64)
    mask = (torch.arange(LIMIT) >= torch.tensor([0, 3])[:, None])[:, None, None]
    for is_upper in (False, True):
        pool, norms = pair.pool(is_upper=is_upper), pair.norms(is_upper=is_upper)
        found = coded_kv_cache_attention(q, *pool, *norms, bits, mask, None)
        torch.testing.assert_close(found, by_hand(q, pool, bits, 0.25, mask, norms))


def test_a_step_before_the_upper_layer_is_read_with_both_in_the_window() -> None:
    """The lower layer's read comes between its append and the one that merges."""
    rows = draw(1, 2, 40, 16, torch.float32)
    pair = Pair(Layout(16, 4, **SMALL), 1, 2, LIMIT, torch.float32)
    append(pair, [x[:, :, :31] for x in rows], parked=True, is_first=True)
    window = pair.lower[0], pair.lower[1], pair.lower[4]
    coded_kv_cache_append_lower(*window, *(x[:, :, 31:32] for x in rows[:2]), LIMIT)
    assert pair.filled() == [32, 0, 31, 0]
    keys, _ = coded_kv_cache_view(*pair.pool(is_upper=False), *pair.norms(is_upper=False), 4, LIMIT)
    assert torch.equal(keys[:, :, :32], rows[0][:, :, :32])


def test_opcheck() -> None:
    rows = draw(2, 2, 40, 16, torch.float32)
    pair = Pair(Layout(16, 4, **SMALL), 2, 2, LIMIT, torch.float32)
    append(pair, [x[:, :, :31] for x in rows], parked=True, is_first=True)
    one = [x[:, :, 31:32] for x in rows]
    window = pair.lower[0], pair.lower[1], pair.lower[4]
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(coded_kv_cache_append_lower, (*window, *one[:2], LIMIT), test_utils=tests)
    coded_kv_cache_append_lower(*window, *one[:2], LIMIT)
    torch.library.opcheck(
        coded_kv_cache_append_pair,
        (*pair.all(), None, None, *one[2:], 4, 16, LIMIT, *DEFAULTS.values()),
        test_utils=tests,
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rule": "mean"}, "rule is 'mean'"),
        ({"reading": "all"}, "reading is 'all'"),
        ({"scale": "one"}, "scale is 'one'"),
        ({"t": 2.0}, "t=2.0"),
        ({"keep_first": 99}, "keep_first=99"),
    ],
)
def test_settings_that_mean_nothing_are_refused(change: dict[str, Any], words: str) -> None:
    rows = draw(1, 2, 40, 16, torch.float32)
    pair = Pair(Layout(16, 4, **SMALL), 1, 2, LIMIT, torch.float32)
    with pytest.raises(UnsupportedInputError, match=words):
        append(pair, rows, parked=True, **change)


def test_tensors_that_do_not_fit_are_refused() -> None:
    rows = draw(1, 2, 40, 16, torch.float32)
    pair = Pair(Layout(16, 4, **SMALL), 1, 2, LIMIT, torch.float32)
    with pytest.raises(UnsupportedInputError, match="lower_k is"):
        append(pair, [rows[0][..., :8], *rows[1:]], parked=True)
    with pytest.raises(UnsupportedInputError, match=r"k is torch\.float64"):
        append(pair, [*rows[:2], *(x.double() for x in rows[2:])], parked=True)
    with pytest.raises(UnsupportedInputError, match="without the lower layer's"):
        coded_kv_cache_append_pair(
            *pair.all(), None, None, *rows[2:], 4, 16, LIMIT, *DEFAULTS.values()
        )
    with pytest.raises(UnsupportedInputError, match="k is"):
        coded_kv_cache_append_lower(
            pair.lower[0], pair.lower[1], pair.lower[4], rows[0][..., :8], rows[1], LIMIT
        )


@pytest.mark.parametrize(
    ("bits", "digest"),
    [
        (16, "0a746528b867fd91"),
        (4, "c53b4568faa40ce9"),
        (3, "de348d0486578dc2"),
        (2, "3e9463e6a6e0a775"),
    ],
)
def test_layers_that_are_not_aligned_are_stored_as_before_there_was_alignment(
    bits: int, digest: str
) -> None:
    """The digests are those of commit 98be7921, the last one without maps."""
    if (kind := torch.backends.cpu.get_cpu_capability()) != "AVX512":
        pytest.skip(f"the digests were taken with AVX512, and this processor has {kind}")
    rows = draw(2, 2, 66, 16, torch.bfloat16)
    small = Layout(16, bits, group=16, recent=16, kept=8)
    pair = Pair(small, 2, 2, 90, torch.bfloat16, first=(0, 3))
    for start, end in ((0, 50), (50, 66)):
        part = [x[:, :, start:end] for x in rows]
        both = (part[0], part[1]), (part[2], part[3])
        settings = Merging(keep_first=2)
        given = (pair.tensors(), *both, bits, 16, 90, settings)
        pair_reference.append(*given, is_first=start == 0)
    found = hashlib.sha256()
    for tensor in pair.all():
        found.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    assert found.hexdigest()[:16] == digest
