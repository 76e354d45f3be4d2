"""memeff::quantized_attention on the CPU: distance from exact, exact cases, layouts, errors."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from memeff_compile.errors import UnsupportedInputError
from memeff_compile.kernels.quantized_attention import (
    ENGINES,
    GRANULARITIES,
    LEVELS,
    code_bytes,
    engine_for,
    has_fp8,
    quantized_attention,
    reference,
    supports,
    tiles,
)
from memeff_compile.kernels.quantized_attention.settings import (
    QUERY_ROWS,
    VALUES,
    Settings,
    sampled_queries,
    settings_for,
)
from tests.support.coded_attention import KINDS, biased, conditions, exact, half, relative_l1
from tests.support.dense_attention import Case, compose, counting, draw

# Relative L1 on (iid, bias, channels), 1.3 times the measured values.
BUDGET = {
    "8b": (0.046, 0.022, 0.046),
    "8b+f16": (0.015, 0.015, 0.026),
    "4b": (0.28, 0.080, 0.30),
}


def plain(case: Case) -> dict[str, Any]:
    """Return the settings of a case that this op knows."""
    return {name: case.settings.get(name) for name in ("ahead", "behind", "scale")}


def ours(case: Case, **settings: Any) -> tuple[Tensor, Tensor]:
    found: tuple[Tensor, Tensor] = quantized_attention(
        case.q, case.k, case.v, *case.tables, **plain(case), **settings
    )
    return found


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("place", range(len(KINDS)), ids=KINDS)
def test_every_level_is_as_close_as_it_says(level: str, place: int) -> None:
    case = half(512, 512, 64, KINDS[place])
    out, lse = ours(case, level=level)
    wanted, sums = exact(case)
    assert relative_l1(out, wanted) <= BUDGET[level][place]
    sharp = 10.0 if KINDS[place] == "channels" else 1.0
    assert float((lse - sums).abs().max()) <= sharp * (1.5 if level == "4b" else 0.2)
    assert out.dtype == case.q.dtype
    assert lse.dtype == torch.float32


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_every_granularity_serves(granularity: str) -> None:
    case = half(300, 300, 64, "bias", ahead=0)
    wanted = exact(case)[0]
    assert relative_l1(ours(case, granularity=granularity)[0], wanted) <= 0.03
    assert relative_l1(ours(case, granularity=granularity, level="4b")[0], wanted) <= 0.12


def test_finer_scales_are_closer() -> None:
    """In 4 bits, where scales decide: token <= thread <= warp <= block <= tensor."""
    case = biased(draw(1, 2, 2, 384, 384, 64, torch.bfloat16), "channels")
    wanted = exact(case)[0]
    order = ("token", "thread", "warp", "block", "tensor")
    found = [relative_l1(ours(case, level="4b", granularity=g)[0], wanted) for g in order]
    assert found == sorted(found)


def test_what_is_taken_away_makes_codes_closer() -> None:
    case = half(256, 256, 64, "bias")
    wanted = exact(case)[0]
    found = [
        relative_l1(ours(case, level="4b", smooth=smooth)[0], wanted)
        for smooth in ("", "k", "kv", "qkv")
    ]
    assert found[1] < 0.8 * found[0]
    assert found[3] < 0.8 * found[2]
    eight = [relative_l1(ours(case, smooth=smooth)[0], wanted) for smooth in ("k", "kv")]
    assert eight[1] < 0.95 * eight[0]


def turning(size: float) -> Case:
    """Return inputs whose keys have a constant that rotary embedding turned, in two channels.

    No mean takes it away. Queries are small there, and large where keys are small.
    """
    case = draw(1, 4, 2, 300, 300, 64, torch.float32, ahead=0)
    place = torch.arange(300.0)
    case.k[..., 0] += size * place.cos()
    case.k[..., 32] += size * place.sin()
    case.q[..., [0, 32]] /= size
    case.q[..., 15] += size
    case.k[..., 15] /= size
    return case


@pytest.mark.parametrize("level", ["8b", "8b+f16", "4b"])
def test_channels_that_are_large_in_keys_alone_do_not_widen_all_steps(level: str) -> None:
    case = turning(60.0)
    budget = 0.3 if level == "4b" else 0.06
    assert relative_l1(ours(case, level=level)[0], exact(case)[0]) <= budget


def unturned(x: Tensor, far: int, near: int) -> Tensor:
    """Return rows scaled as `reference.turned` scales them, with channels as they are."""
    return x * (far * near) ** 0.5


def test_heads_of_4_bits_are_turned_and_keys_have_a_scale_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without either 4 bits are further away."""
    case = biased(draw(1, 2, 2, 384, 384, 64, torch.float32), "channels")
    wanted = exact(case)[0]
    found = relative_l1(ours(case, level="4b")[0], wanted)
    monkeypatch.setattr(reference, "turned", unturned)
    assert found <= 0.9 * relative_l1(ours(case, level="4b")[0], wanted)
    monkeypatch.undo()
    monkeypatch.setattr(Settings, "steps", 1)
    assert found <= 0.95 * relative_l1(ours(case, level="4b")[0], wanted)


@pytest.mark.parametrize("depth", [64, 200, 256])
def test_heads_of_8_bits_are_turned(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it 8 bits are further away."""
    case = biased(draw(1, 2, 2, 384, 384, depth, torch.float32), "channels")
    wanted = exact(case)[0]
    found = relative_l1(ours(case, level="8b+f16")[0], wanted)
    monkeypatch.setattr(reference, "turned", unturned)
    assert found <= 0.9 * relative_l1(ours(case, level="8b+f16")[0], wanted)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("depth", [40, 64, 200])
def test_evening_and_turning_change_no_score(level: str, depth: int) -> None:
    """With codes of many bits and unrounded weights their effect vanishes."""
    case = biased(draw(1, 4, 2, 150, 140, depth, torch.float32, ahead=20), "bias")
    settings = replace(settings_for(level), limit=1 << 20, values="exact")
    out, lse = reference.attend(case.q, case.k, case.v, conditions(case), settings)
    wanted, sums = exact(case)
    assert relative_l1(out, wanted) <= 1e-3
    torch.testing.assert_close(lse.double(), sums, rtol=0, atol=2e-3)


def test_queries_and_keys_have_the_same_energy_in_each_channel() -> None:
    case = turning(6.0)
    whole = case.k[:, :, :: reference.SAMPLE].square().sum(2)
    evened = reference.evened_by(case.q, case.k, whole, settings_for("8b"))
    assert bool((evened[..., [0, 15, 32]] != 1.0).all())
    assert float((2.0 * evened.log2() - (2.0 * evened.log2()).round()).abs().max()) <= 1e-5
    assert float(evened.log2().sum(-1).abs().max()) <= 3.0
    q = case.q / evened.repeat_interleave(2, 1)[:, :, None]
    energy = [x.square().sum(2) for x in (q.unflatten(1, (2, 2)).flatten(2, 3), case.k)]
    share = energy[0] / (energy[1] * evened.square())
    assert float(share.amax(-1).max() / share.amin(-1).min()) < 8
    nothing = torch.zeros_like(case.q)
    nothing[..., 0] = math.nan
    nothing[..., 1] = math.inf
    assert bool((reference.evened_by(nothing, case.k, whole, settings_for("8b")) == 1.0).all())


def test_a_channel_whose_sampled_keys_are_one_number_stays_as_it_is() -> None:
    case = draw(1, 2, 1, 70, 160, 64, torch.float32)
    case.k[:, :, :: reference.SAMPLE, :24] = torch.linspace(-9.0, 7.7, 24)
    assert relative_l1(ours(case)[0], exact(case)[0]) <= 0.055


def test_what_rounding_takes_from_values_on_average_is_given_back() -> None:
    """The paper's scale per key is finer, and yet further away."""
    case = half(256, 1024, 64, ahead=768)
    wanted = exact(case)[0]
    found = relative_l1(ours(case)[0], wanted)
    assert found <= 0.038
    assert found <= 0.95 * relative_l1(ours(case, granularity="token")[0], wanted)


def test_keys_are_rounded_with_the_mean_of_queries_in_view(monkeypatch: pytest.MonkeyPatch) -> None:
    """If heads that share keys have different means, rounding does not use them."""
    case, shared = half(256, 512, 64, "bias"), half(256, 512, 64, "bias")
    case = Case(case.q, *(each.repeat(1, 2, 1, 1) for each in (case.k, case.v)))
    shared.q[:, 1:] = shared.q[:, :1]
    ours_of = [relative_l1(ours(c, level="8b+f16")[0], exact(c)[0]) for c in (case, shared)]
    monkeypatch.setattr(reference, "LEAST_SHARE", 2.0)
    others = [relative_l1(ours(c, level="8b+f16")[0], exact(c)[0]) for c in (case, shared)]
    assert all(found <= 0.85 * other for found, other in zip(ours_of, others, strict=True))


def test_a_direction_of_queries_is_one_they_share() -> None:
    for case, is_shared in ((half(100, 9, 64, "bias"), False), (half(100, 9, 64), False)):
        assert bool(reference.direction_of(case.q.float(), 1)[0].any()) == is_shared
    assert bool(reference.direction_of(half(100, 9, 64, "bias").q.float(), 2)[0].any())
    assert not settings_for("4b").aligns
    assert not settings_for("8b", "thread").aligns


def test_a_bad_query_does_not_reach_others_by_the_rounding_of_keys() -> None:
    case = half(200, 200, 16, "bias")
    clean = ours(case)[0]
    for bad in (math.nan, math.inf):
        case.q[0, 0, 7, 3] = bad
        found = ours(case)[0]
        assert not bool(found[0, 0, 7].isfinite().any())
        kept = torch.arange(200) != 7
        assert relative_l1(found[:, :, kept], clean[:, :, kept]) <= 0.03


@pytest.mark.parametrize("queries", [1, 64, 65, 1024, 1025, 16384, 100000])
def test_sampled_queries_are_counted(queries: int) -> None:
    stride, samples, count = sampled_queries(queries)
    place = torch.arange(queries) // QUERY_ROWS
    assert int((place % stride == 0).sum()) == count
    assert len(place[place % stride == 0].unique()) == samples <= 8


@pytest.mark.parametrize("smooth", ["", "k", "v", "q", "qkv"])
def test_what_is_taken_away_is_given_back_exactly(smooth: str) -> None:
    """With codes of many bits and unrounded weights its effect vanishes."""
    case = half(300, 260, 40, "bias", ahead=-40, behind=200)
    case = Case(*(each.float() for each in (case.q, case.k, case.v)), settings=case.settings)
    settings = replace(settings_for("8b", "token", smooth), limit=1 << 20, values="exact")
    out, lse = reference.attend(case.q, case.k, case.v, conditions(case), settings)
    wanted, sums = exact(case)
    is_number = sums != -math.inf
    assert torch.equal(lse != -math.inf, is_number)
    assert relative_l1(out, wanted.nan_to_num(0.0)) <= 1e-3
    assert float((lse - sums)[is_number].abs().max()) <= 2e-3


@pytest.mark.parametrize("seed", range(18))
def test_conditions_are_those_of_exact_attention(seed: int) -> None:
    sizes = [(9, 11), (140, 150), (5, 300), (300, 5), (1, 140), (130, 1)][seed % 6]
    case = compose(draw(2, 4, (1, 2, 4)[seed % 3], *sizes, 24, torch.float32, seed), seed)
    kept = {name: case.settings[name] for name in plain(case) if name in case.settings}
    case = Case(case.q, case.k, case.v, case.tables, kept)
    out, lse = ours(case, level="8b+f16")
    wanted, sums = exact(case)
    is_number = sums != -math.inf
    assert torch.equal(lse != -math.inf, is_number)
    assert torch.equal(out[~is_number], torch.zeros_like(out[~is_number]))
    if bool(is_number.any()):
        assert relative_l1(out[is_number], wanted[is_number]) <= 0.05
        assert float((lse - sums)[is_number].abs().max()) <= 0.3
    settings = replace(settings_for("8b", "token"), limit=1 << 20, values="exact")
    out, lse = reference.attend(case.q, case.k, case.v, conditions(case), settings)
    torch.testing.assert_close(out, wanted.nan_to_num(0.0).float(), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(lse, sums.float(), rtol=1e-3, atol=1e-3)


def test_many_blocks_of_queries_equal_one(monkeypatch: pytest.MonkeyPatch) -> None:
    case = half(260, 140, 16, ahead=20)
    whole = ours(case)
    monkeypatch.setattr(reference, "BLOCK_SCORES", 1)
    torch.testing.assert_close(ours(case), whole, rtol=0, atol=1e-2)


def test_inputs_stay_as_they_were_and_strides_are_followed() -> None:
    case = half(140, 140, 24, "bias", ahead=0)
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (case.q, case.k, case.v)]
    before = [x.clone() for x in turned]
    out, _ = quantized_attention(*turned, ahead=0)
    assert torch.equal(out, ours(case)[0])
    assert out.transpose(1, 2).is_contiguous()
    assert all(map(torch.equal, turned, before))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_what_is_not_finite_does_not_come_out_as_numbers(bad: float, which: str) -> None:
    """Where exact attention gives nan or infinity, so does this; never zeros."""
    case = half(20, 200, 16)
    getattr(case, which)[0, 0, 7, 3] = bad
    found, wanted = ours(case)[0], exact(case)[0]
    assert not bool(wanted.isfinite().all())
    assert not bool(found[~wanted.isfinite()].isfinite().any())


@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=str)
def test_what_masked_keys_hold_reaches_nothing(bad: float) -> None:
    case = half(20, 200, 16)
    key_mask = torch.arange(200)[None] < 130
    hidden = Case(case.q, case.k.clone(), case.v.clone(), (key_mask, None, None))
    hidden.k[:, :, 130:], hidden.v[:, :, 130:] = bad, bad
    clean = Case(case.q, case.k, case.v, hidden.tables)
    assert all(map(torch.equal, ours(hidden), ours(clean)))


def test_padding_does_not_coarsen_the_codes() -> None:
    """Huge masked keys and values would, were they not left out of means and scales."""
    case = half(64, 256, 32)
    key_mask = torch.arange(256)[None] < 200
    wanted = exact(Case(case.q, case.k, case.v, (key_mask, None, None)))[0]
    loud = Case(case.q, case.k.clone(), case.v.clone(), (key_mask, None, None))
    loud.k[:, :, 200:], loud.v[:, :, 200:] = 1e4, 1e4
    assert relative_l1(ours(loud)[0], wanted) <= BUDGET["8b"][0]


def test_zeros_and_tiny_and_huge_numbers() -> None:
    case = half(40, 40, 16)
    zero = torch.zeros_like(case.k)
    out, lse = quantized_attention(case.q, zero, case.v)
    torch.testing.assert_close(
        out.float(), case.v.float().mean(2, keepdim=True).expand(1, 2, 40, 16), rtol=0.02, atol=0.01
    )
    torch.testing.assert_close(lse, torch.full_like(lse, math.log(40)))
    assert not bool(quantized_attention(case.q, case.k, torch.zeros_like(case.v))[0].any())
    for size in (1e-6, 1e4):
        big = Case(case.q, case.k, case.v * size)
        assert relative_l1(ours(big)[0], exact(big)[0]) <= 0.05
    sharp = Case(case.q * 100, case.k * 100, case.v)
    assert bool(ours(sharp)[0].isfinite().all())


def test_without_the_sums_the_result_is_the_same() -> None:
    case = half(140, 140, 16, ahead=0)
    out, lse = ours(case, with_lse=False)
    assert torch.equal(out, ours(case)[0])
    assert lse.shape == (1, 2, 0)


@pytest.mark.parametrize("sizes", [(0, 5, 6), (2, 0, 6), (2, 5, 0)], ids=str)
def test_nothing_to_do(sizes: tuple[int, int, int]) -> None:
    batch, queries, keys = sizes
    case = draw(batch, 4, 2, queries, keys, 8, torch.float32)
    out, lse = ours(case)
    assert out.shape == case.q.shape
    assert not bool(out.any())
    assert bool((lse == -math.inf).all())


@pytest.mark.parametrize("level", LEVELS)
def test_the_op_is_what_torch_asks_of_one(level: str) -> None:
    case = compose(draw(2, 4, 2, 9, 11, 8, torch.float32), 3)
    for with_lse in (True, False):
        torch.library.opcheck(
            quantized_attention,
            (case.q, case.k, case.v, *case.tables),
            {**plain(case), "level": level, "with_lse": with_lse},
            test_utils=("test_schema", "test_faketensor"),
        )


def test_a_gradient_is_refused_and_not_cut() -> None:
    case = draw(1, 2, 2, 9, 9, 8, torch.float32)
    out, _ = quantized_attention(case.q.requires_grad_(), case.k, case.v)
    with pytest.raises(UnsupportedInputError, match="no backward"):
        out.sum().backward()


def test_one_graph_with_lengths_that_change() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return quantized_attention(q, k, v, ahead=0)[0]

    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True, dynamic=True)
    for length in (20, 33, 150):
        case = half(length, length, 8)
        assert torch.equal(compiled(case.q, case.k, case.v), attend(case.q, case.k, case.v))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"level": "2b"}, "level is '2b'; one of 8b, 8b+f16, 4b is needed"),
        ({"granularity": "row "}, "granularity is 'row '"),
        ({"smooth": "x"}, "smooth is 'x'"),
        ({"dtype": torch.int8}, "int8"),
        ({"groups": 3}, "4 heads and k and v 3"),
        ({"depth": 257}, "257; 1 to 256"),
    ],
    ids=str,
)
def test_bad_inputs_are_named(changes: dict[str, Any], words: str) -> None:
    dtype = changes.pop("dtype", torch.float32)
    sizes = {"groups": changes.pop("groups", 2), "depth": changes.pop("depth", 8)}
    case = draw(1, 4, queries=5, keys=5, dtype=dtype, **sizes)
    assert words in (supports(case.q, case.k, case.v, **changes) or "")
    with pytest.raises(UnsupportedInputError, match="quantized_attention: "):
        quantized_attention(case.q, case.k, case.v, **changes)


@pytest.mark.parametrize("which", ["queries", "keys"])
def test_more_rows_than_kernels_can_name_are_refused(which: str) -> None:
    few, many = torch.empty(1, 8, 1, 1), torch.empty(1).expand(1, 8, 1 << 28, 1)
    q, k = (many, few) if which == "queries" else (few, many)
    given = conditions(Case(q, k, k))
    with pytest.raises(UnsupportedInputError, match=f"2147483648 rows of {which}"):
        tiles.pack(q, k, k, given, settings_for("8b"))


def test_in_float64_nothing_is_coded() -> None:
    """memeff.verify compares with it."""
    case = compose(draw(2, 4, 2, 20, 30, 8), 5)
    kept = {name: case.settings[name] for name in plain(case) if name in case.settings}
    case = Case(case.q, case.k, case.v, case.tables, kept)
    out, lse = ours(case)
    wanted, sums = exact(case)
    torch.testing.assert_close(out, wanted.nan_to_num(0.0))
    torch.testing.assert_close(lse, sums.float())
    assert ours(case, with_lse=False)[1].shape == (2, 4, 0)


def test_engines_and_formats_of_devices() -> None:
    assert engine_for(torch.device("cpu"), torch.bfloat16) == "reference"
    assert set(ENGINES) == {"tiles", "reference"}
    assert has_fp8(torch.device("cpu"))
    assert settings_for("8b", has_fp8=False).values == "f16"
    assert settings_for("8b+f16").values == "f16"
    for level in ("8b", "4b"):
        found = [settings_for(level, depth=depth).values for depth in (64, 128, 129, 256)]
        assert found == ["e4m3", "e4m3", "f16", "f16"]
    assert set(VALUES) > {"e4m3", "f16"}


def test_the_formula_counts_the_codes() -> None:
    """E4M3 and int8 halve bf16; scales and rounding errors of each block are added."""
    assert int(code_bytes(1, 32, 8, 16384, 16384, 128)) == sum(
        (
            32 * 16384 * 128,
            8 * (16384 * 128 + 4 * 128),
            8 * 128 * (16384 + 8 + 4 * 129),
            8 * 4 * (16384 + 2 * 129),
        )
    )
    plain_bytes = int(code_bytes(1, 4, 2, 100, 130, 64))
    assert plain_bytes < int(code_bytes(1, 4, 2, 100, 130, 64, value_bytes=2))


def test_a_query_without_keys_is_counted_as_one() -> None:
    case = half(30, 20, 8, ahead=-12)
    out, lse = ours(case)
    is_empty = ~counting(case).any(-1)[0]
    assert int(is_empty.sum()) == 12
    assert not bool(out[:, :, is_empty].any())
    assert bool((lse[:, :, is_empty] == -math.inf).all())
