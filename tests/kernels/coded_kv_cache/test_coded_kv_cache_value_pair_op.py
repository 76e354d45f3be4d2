"""coded_kv_cache_append_values: what is stored, first tokens, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from memeff_compile.errors import UnsupportedInputError
from memeff_compile.kernels.coded_kv_cache import (
    Layout,
    coded_kv_cache_append_values,
    coded_kv_cache_attention,
    coded_kv_cache_view,
)
from memeff_compile.kernels.coded_kv_cache.alignment import aligned
from memeff_compile.kernels.coded_kv_cache.layout import Maps
from tests.support.coded_caches import by_hand
from tests.support.merged_caches import Values, aligned_rows

LIMIT = 90
SMALL: dict[str, Any] = {"group": 16, "recent": 16, "kept": 2}


def append(pair: Values, rows: list[Tensor], *, is_first: bool = False, **given: Any) -> None:
    settings = {"rule": "slerp", "t": 0.5, "scale": "norm", **given}
    how = (pair.layout.bits, pair.layout.recent, LIMIT, *settings.values(), is_first)
    coded_kv_cache_append_values(*pair.all(), *rows, *how)


def view(pair: Values, *, is_upper: bool) -> tuple[Tensor, Tensor]:
    held = [*pair.pool(is_upper=is_upper), *pair.norms(is_upper=is_upper)]
    maps = pair.maps_of(is_upper=is_upper)
    found = coded_kv_cache_view(*held, pair.layout.bits, LIMIT, *maps)
    keys, values = found
    return keys, values


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_lengths_come_back_in_both_layers(dtype: torch.dtype) -> None:
    """Two of the layers' values differ twofold in length, and each keeps its own."""
    rows = aligned_rows(2, 2, 60, 16, dtype)
    pair = Values(Layout(16, 8, **SMALL), 2, 2, LIMIT, dtype)
    append(pair, rows, is_first=True)
    for is_upper in (False, True):
        _, values = view(pair, is_upper=is_upper)
        came = rows[2 * is_upper + 1]
        mean = pair.maps[int(is_upper)][:, :, 0, None]
        length, wanted = ((x[:, :, 2:32] - mean).norm(dim=-1) for x in (values, came))
        near = 1e-9 if dtype == torch.float64 else 2e-2
        torch.testing.assert_close(length, wanted, rtol=near, atol=near)
        off = (values[:, :, 2:32] - came[:, :, 2:32]).norm() / wanted.norm()
        assert float(off) < 0.1


def test_a_value_without_length_stays_without() -> None:
    """A lower layer's value that is the mean: the shared direction is that of the upper layer's."""
    rows = aligned_rows(1, 1, 60, 16, torch.float64)
    pair = Values(Layout(16, 8, **SMALL), 1, 1, LIMIT, torch.float64)
    append(pair, [x[:, :, :30] for x in rows], is_first=True)
    later = [x[:, :, 30:].clone() for x in rows]
    later[1][:] = pair.maps[0][:, :, 0, None]
    append(pair, later)
    _, lower = view(pair, is_upper=False)
    _, upper = view(pair, is_upper=True)
    assert bool(lower.isfinite().all())
    places = slice(30, 32)
    _, aligned_upper = aligned([later[1], later[3]], Maps(*pair.maps))
    off = (lower[:, :, places] - later[1][:, :, :2]).norm(dim=-1)
    assert bool((off <= 2e-3 * aligned_upper[:, :, :2].norm(dim=-1)).all())
    torch.testing.assert_close(upper[:, :, places], later[3][:, :, :2], rtol=0.05, atol=0.05)


def test_attention_is_that_over_the_view() -> None:
    rows = aligned_rows(2, 2, 60, 16, torch.float64)
    pair = Values(Layout(16, 3, value_bits=2, **SMALL), 2, 2, LIMIT, torch.float64, first=(0, 3))
    append(pair, rows, is_first=True)
    q = torch.randn(2, 4, 1, 16, dtype=torch.float64)
    mask = torch.ones(2, 1, 1, LIMIT, dtype=torch.bool)
    mask[1, ..., :3] = False
    for is_upper in (False, True):
        held = [*pair.pool(is_upper=is_upper), *pair.norms(is_upper=is_upper)]
        maps = pair.maps_of(is_upper=is_upper)
        found = coded_kv_cache_attention(q, *held, 3, mask, None, *maps)
        keys, values = (x[:, :, :60].repeat_interleave(2, 1) for x in view(pair, is_upper=is_upper))
        score = (q @ keys.mT * 16**-0.5).masked_fill(~mask[..., :60], -torch.inf)
        torch.testing.assert_close(found, score.softmax(-1) @ values)


def test_codes_of_other_bits_are_read_with_their_own() -> None:
    """Attention in fp32 over keys of 4 bits and values of 8, against float64."""
    from memeff_compile.kernels.coded_kv_cache import reference
    from tests.support.coded_caches import allocate, draw

    layout = Layout(16, 4, value_bits=8, **SMALL)
    pool = allocate(layout, 2, 1, LIMIT, torch.float32)
    reference.append(pool, *draw(2, 1, 60, 16, torch.float32), 4, 16, LIMIT)
    q = torch.randn(2, 2, 1, 16)
    found = coded_kv_cache_attention(q, *pool, None, None, 4, None, None)
    torch.testing.assert_close(found.double(), by_hand(q, pool, 4, 0.25), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("t", 1.5, "a number from 0 to 1"),
        ("rule", "other", "rule is 'other'"),
        ("scale", "other", "scale is 'other'"),
        ("recent", 32, "a window of 32 rows"),
        ("norms", torch.zeros(1), "norms is"),
        ("turns", torch.zeros(1), "turns is"),
        ("v_codes", torch.zeros(2, 2, 4, 7, dtype=torch.uint8), "a block of v_codes has 7 bytes"),
        ("lower_v", None, "come together"),
        ("k", torch.zeros(2, 2, 5, 16), "v is"),
        ("tokens", 17, "at most a group"),
    ],
)
def test_what_cannot_be_appended_is_refused(name: str, value: Any, words: str) -> None:
    rows: list[Any] = aligned_rows(2, 2, 20, 16, torch.float32)
    pair = Values(Layout(16, 4, **SMALL), 2, 2, LIMIT, torch.float32)
    settings: dict[str, Any] = {"recent": 16, "rule": "slerp", "t": 0.5, "scale": "norm"}
    held: dict[str, tuple[list[Any], int]] = {
        "norms": (pair.shared, 2),
        "turns": (pair.maps, 2),
        "v_codes": (pair.shared, 0),
        "lower_v": (rows, 1),
        "k": (rows, 2),
    }
    if name in held:
        where, place = held[name]
        where[place] = value
    elif name == "tokens":
        rows = [None, None, *(x[:, :, :value] for x in rows[2:])]
    else:
        settings[name] = value
    recent, *rule = settings.values()
    with pytest.raises(UnsupportedInputError, match=words):
        coded_kv_cache_append_values(*pair.all(), *rows, 4, recent, LIMIT, *rule, False)
