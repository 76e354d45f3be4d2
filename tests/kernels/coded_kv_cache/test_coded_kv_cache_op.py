"""The ops of coded_kv_cache on the CPU: codes, refusals, allocations, the formulas."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from memeff_compile.errors import UnsupportedInputError
from memeff_compile.kernels.coded_kv_cache import (
    ENGINES,
    POOL,
    Layout,
    bytes_after,
    bytes_per_token,
    coded_kv_cache_append,
    coded_kv_cache_attention,
    coded_kv_cache_view,
    engine_for,
    supports,
    supports_append,
    unproven,
)
from memeff_compile.kernels.coded_kv_cache.layout import (
    block_of,
    channel_group,
    codes_of,
    pack,
    unpack,
)
from memeff_compile.kernels.coded_kv_cache.reference import decode, encode
from memeff_compile.kernels.coded_kv_cache.shapes import part_width, rows_for, splits_for
from memeff_compile.kernels.device import planned_for
from memeff_compile.kernels.kv_cache import bytes_before
from tests.support.coded_caches import allocate, by_hand, draw, filled

CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor")
SMALL = Layout(16, 4, group=16, recent=16, kept=2)
ALL_BITS = (8, 4, 3, 2)


def append(pool: list[Tensor], k: Tensor, v: Tensor, layout: Layout, limit: int = 90) -> None:
    coded_kv_cache_append(*pool, k, v, layout.bits, layout.recent, limit)


def view(pool: list[Tensor], layout: Layout, tokens: int = 90) -> tuple[Tensor, Tensor]:
    keys, values = coded_kv_cache_view(*pool, None, None, layout.bits, tokens)
    return keys, values


# --- codes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", ALL_BITS)
@pytest.mark.parametrize("is_value", [False, True], ids=["keys", "values"])
def test_packed_codes_come_back(bits: int, is_value: bool) -> None:
    codes = torch.randint(0, 2**bits, (3, 2, 32, 64), dtype=torch.uint8)
    if bits != 3:
        packed = pack(codes, bits)
        assert packed.shape[-1] == 64 * bits // 8
        assert torch.equal(unpack(packed, bits), codes)
    block = block_of(codes, bits, is_value=is_value)
    assert block.shape == (3, 2, 32 * 64 * bits // 8)
    assert torch.equal(codes_of(block, bits, 64, is_value=is_value), codes)


def test_a_byte_holds_the_channels_that_the_layout_says() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    assert pack(codes, 4).tolist() == [j | (j + 8) << 4 for j in range(8)]
    two = codes % 4
    assert pack(two, 2).tolist() == [j | j << 2 | j << 4 | j << 6 for j in range(4)]


def test_codes_of_3_bits_are_two_planes_and_two_tokens_share_a_byte_of_high_bits() -> None:
    codes = torch.randint(0, 8, (16, 16), dtype=torch.uint8)
    for is_value in (False, True):
        block = block_of(codes, 3, is_value=is_value)
        low, high = block[:64], block[64:]
        shape = (4, 16) if is_value else (16, 4)
        low = low.view(shape).T if is_value else low.view(shape)
        assert torch.equal(low, pack(codes & 3, 2))
        high = high.view(4, 8).T if is_value else high.view(8, 4)
        for row in range(8):
            tokens = (row, row + 8) if is_value else (2 * row, 2 * row + 1)
            for byte in range(4):
                wanted = 0
                for second, token in enumerate(tokens):
                    for part, place in enumerate((2, 4, 6, 0)):
                        bit = int(codes[token, part * 4 + byte]) >> 2
                        wanted |= bit << (place + second)
                assert int(high[row, byte]) == wanted


def by_definition(x: Tensor, bits: int) -> Tensor:
    """Code one group as the paper writes it, with stored scales, and decode it."""
    zero = x.min()
    step = ((x.max() - zero) / (2**bits - 1)).bfloat16().double()
    step, zero = (step if step else torch.tensor(1.0)), zero.bfloat16().double()
    return ((x - zero) / step + 0.5).floor().clamp(0, 2**bits - 1) * step + zero


@pytest.mark.parametrize("bits", ALL_BITS)
def test_keys_are_coded_per_channel_and_values_per_token(bits: int) -> None:
    x = torch.randn(1, 1, 2, 16, 128).bfloat16()
    x[..., 5] = 3.0  # a group whose largest is its smallest
    keys = decode(*encode(x, bits, "kivi", is_value=False), bits, 128, is_value=False)
    values = decode(*encode(x, bits, "kivi", is_value=True), bits, 128, is_value=True)
    for group in range(2):
        rows = slice(16 * group, 16 * group + 16)
        for channel in (0, 5, 127):
            wanted = by_definition(x[0, 0, group, :, channel].double(), bits)
            torch.testing.assert_close(
                keys[0, 0, rows, channel].double(), wanted, atol=2e-6, rtol=0
            )
        for share in (slice(0, 64), slice(64, 128)):
            wanted = by_definition(x[0, 0, group, 3, share].double(), bits)
            found = values[0, 0, 16 * group + 3, share].double()
            torch.testing.assert_close(found, wanted, atol=2e-6, rtol=0)


@pytest.mark.parametrize(
    ("bits", "wanted"), [(8, 0.006), (4, 0.09), (3, 0.193), (2, 0.45)], ids=str
)
def test_the_error_of_gaussian_rows_is_what_the_formula_says(bits: int, wanted: float) -> None:
    x = torch.randn(1, 1, 8, 64, 128)
    for is_value in (False, True):
        codes, scales = encode(x, bits, "kivi", is_value=is_value)
        found = decode(codes, scales, bits, 128, is_value=is_value)
        error = (found - x.flatten(2, 3)).norm() / x.norm()
        assert 0.8 * wanted <= float(error) <= 1.02 * wanted


@pytest.mark.parametrize("bits", [4, 3])
def test_one_scale_per_head_codes_around_zero(bits: int) -> None:
    x = torch.randn(1, 2, 1, 16, 32).double()
    x[0, 0, 0, 3] = 0
    codes, scales = encode(x, bits, "per_head", is_value=False)
    found = decode(codes, scales, bits, 32, is_value=False)
    step = x.abs().amax(-1) / (2 ** (bits - 1) - 1)
    assert found[0, 0, 3].count_nonzero() == 0
    difference = (found.view_as(x) - x).abs()
    assert bool((difference <= step[..., None] / 2 + 1e-12).all())


def test_a_token_that_is_left_out_has_no_say_in_scales() -> None:
    x = torch.randn(1, 1, 1, 16, 16)
    wild = x.clone()
    wild[0, 0, 0, 0] = 1e4
    hidden = torch.zeros(1, 1, 1, 16, dtype=torch.bool)
    hidden[..., 0] = True
    plain = encode(x, 4, "kivi", is_value=False, left_out=hidden)
    other = encode(wild, 4, "kivi", is_value=False, left_out=hidden)
    assert torch.equal(plain[1], other[1])
    everything = encode(wild, 4, "kivi", is_value=False, left_out=torch.ones_like(hidden))
    assert everything[1].isfinite().all()


# --- the cache ------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", ALL_BITS)
@pytest.mark.parametrize("scheme", ["kivi", "per_head"])
def test_tokens_one_by_one_leave_what_all_at_once_leave(bits: int, scheme: str) -> None:
    layout = Layout(16, bits, scheme, group=16, recent=16, kept=2)
    k, v = draw(2, 2, 75, 16, torch.float32)
    pools = [allocate(layout, 2, 2, 90, torch.float32, first=(0, 5)) for _ in range(2)]
    append(pools[0], k, v, layout)
    for start, end in ((0, 1), (1, 2), (2, 40), (40, 74), (74, 75)):
        append(pools[1], k[:, :, start:end], v[:, :, start:end], layout)
    assert filled(pools[0]) == filled(pools[1]) == (75, 48)
    for found, expected in zip(view(pools[1], layout), view(pools[0], layout), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_the_latest_and_the_first_tokens_stay_bit_for_bit(dtype: torch.dtype) -> None:
    k, v = draw(2, 2, 75, 16, dtype)
    pool = allocate(SMALL, 2, 2, 90, dtype, first=(0, 5))
    append(pool, k, v, SMALL)
    for found, wanted in zip(view(pool, SMALL), (k, v), strict=True):
        assert torch.equal(found[:, :, 48:75], wanted[:, :, 48:])
        assert torch.equal(found[0, :, :2], wanted[0, :, :2])
        assert torch.equal(found[1, :, 5:7], wanted[1, :, 5:7])
        assert not torch.equal(found[0, :, 2:7], wanted[0, :, 2:7])
        assert found[:, :, 75:].count_nonzero() == 0


@pytest.mark.parametrize("tokens", [0, 1, 31, 32, 75])
def test_attention_equals_a_float64_softmax(tokens: int) -> None:
    k, v = draw(2, 2, tokens, 16, torch.float32)
    pool = allocate(SMALL, 2, 2, 90, torch.float32)
    append(pool, k, v, SMALL)
    q = torch.randn(2, 6, 1, 16)
    mask = torch.rand(2, 1, 1, 90) < 0.5
    mask[1] = False
    for seen in (None, mask):
        found = coded_kv_cache_attention(q, *pool, None, None, 4, seen, None)
        if tokens == 0:
            assert found.count_nonzero() == 0
        else:
            assert float((found - by_hand(q, pool, 4, 0.25, seen)).abs().max()) <= 3e-6
    assert found[1].count_nonzero() == 0


@pytest.mark.parametrize("scheme", ["kivi", "per_head"])
def test_a_group_is_coded_once_and_never_again(scheme: str) -> None:
    layout = Layout(16, 4, scheme, group=16, recent=16, kept=2)
    pool = allocate(layout, 1, 2, 90, torch.float32)
    k, v = draw(1, 2, 80, 16, torch.float32)
    append(pool, k[:, :, :40], v[:, :, :40], layout)
    assert filled(pool) == (40, 16)
    before = [pool[place][:, :, :1].clone() for place in range(4)]
    for token in range(40, 80):
        append(pool, k[:, :, token : token + 1], v[:, :, token : token + 1], layout)
    assert filled(pool)[1] == 64
    for place, held in enumerate(before):
        assert torch.equal(pool[place][:, :, :1], held), POOL[place]


def test_too_many_tokens_raise_and_leave_the_cache_alone() -> None:
    pool = allocate(SMALL, 1, 2, 90, torch.float32)
    k, v = draw(1, 2, 91, 16, torch.float32)
    with pytest.raises(IndexError, match="holds 90 tokens, has 0 and is given 91"):
        append(pool, k, v, SMALL)
    assert filled(pool) == (0, 0)


@pytest.mark.parametrize("op", ["append", "view", "attention"])
def test_opcheck(op: str) -> None:
    pool = allocate(SMALL, 2, 2, 90, torch.float32)
    k, v = draw(2, 2, 40, 16, torch.float32)
    append(pool, k, v, SMALL)
    mask = torch.ones(1, 1, 1, 90, dtype=torch.bool)
    calls = {
        "append": (coded_kv_cache_append, (*pool, k, v, 4, 16, 90)),
        "view": (coded_kv_cache_view, (*pool, None, None, 4, 90)),
        "attention": (
            coded_kv_cache_attention,
            (torch.randn(2, 4, 1, 16), *pool, None, None, 4, mask, None),
        ),
    }
    torch.library.opcheck(*calls[op], test_utils=CHECKS)


def test_another_length_is_compiled_once_for_all_lengths() -> None:
    """Prompt and step of generate() write to caches of many lengths, and read them whole."""
    counter, (k, v) = CompileCounter(), draw(2, 2, 7, 16, torch.float32)
    pool = allocate(SMALL, 2, 2, 160, torch.float32)

    def write_and_read(limit: int) -> tuple[Tensor, Tensor]:
        append(pool, k, v, SMALL, limit)
        return view(pool, SMALL, limit)

    torch._dynamo.reset()
    compiled = torch.compile(write_and_read, backend=counter, fullgraph=True)
    lengths = 90, 112, 144
    assert [compiled(length)[0].shape[2] for length in lengths] == [*lengths]
    assert counter.frame_count == 2


def test_a_gradient_is_refused() -> None:
    pool = allocate(SMALL, 1, 2, 90, torch.float32)
    k, v = draw(1, 2, 40, 16, torch.float32)
    append(pool, k, v, SMALL)
    q = torch.randn(1, 4, 1, 16, requires_grad=True)
    with pytest.raises(UnsupportedInputError, match="no backward"):
        coded_kv_cache_attention(q, *pool, None, None, 4, None, None).sum().backward()


REFUSED = {
    "bits": lambda a: a | {"bits": 5},
    "two queries": lambda a: a | {"q": torch.ones(2, 4, 2, 16)},
    "dtype": lambda a: a | {"q": torch.ones(2, 4, 1, 16).half()},
    "heads": lambda a: a | {"q": torch.ones(2, 3, 1, 16)},
    "batch": lambda a: a | {"q": torch.ones(1, 4, 1, 16)},
    "float mask": lambda a: a | {"mask": torch.zeros(2, 1, 1, 90)},
    "mask of heads": lambda a: a | {"mask": torch.ones(2, 4, 1, 90).bool()},
    "scales": lambda a: a | {"pool": [*a["pool"][:2], a["pool"][2][:, :, :1], *a["pool"][3:]]},
    "codes": lambda a: a | {"pool": [a["pool"][0].int(), *a["pool"][1:]]},
    "strides": lambda a: a | {"pool": [a["pool"][0].transpose(2, 3), *a["pool"][1:]]},
}


@pytest.mark.parametrize("case", list(REFUSED))
def test_what_cannot_be_served_is_said_in_a_sentence(case: str) -> None:
    given = {"q": torch.ones(2, 4, 1, 16), "bits": 4, "mask": None}
    given |= {"pool": allocate(SMALL, 2, 2, 90, torch.float32)}
    assert supports(given["q"], given["pool"], given["bits"], given["mask"]) is None
    given = REFUSED[case](given)
    sentence = supports(given["q"], given["pool"], given["bits"], given["mask"])
    assert sentence is not None
    assert sentence.endswith((".", "move one."))
    with pytest.raises(UnsupportedInputError, match="coded_kv_cache_attention"):
        coded_kv_cache_attention(
            given["q"], *given["pool"], None, None, given["bits"], given["mask"], None
        )


def test_what_a_gpu_should_not_be_given_is_named() -> None:
    served = [
        (Layout(128, 4), torch.bfloat16),
        (Layout(64, 2, kept=0), torch.bfloat16),
        (Layout(256, 4), torch.bfloat16),
        (Layout(128, 4, "per_head"), torch.float16),
    ]
    refused = [
        (Layout(128, 4), torch.float64),
        (Layout(128, 4, group=16), torch.bfloat16),
        (Layout(32, 4), torch.bfloat16),
        (Layout(128, 3), torch.float16),
    ]
    for layout, dtype in (*served, *refused):
        pool = allocate(layout, 1, 2, 300, dtype)
        q = torch.ones(1, 32, 1, layout.depth, dtype=dtype)
        assert unproven(q, pool, layout.bits) is None
        with planned_for(torch.device("cuda", 0)):
            sentence = unproven(q, pool, layout.bits)
            assert (sentence is None) == ((layout, dtype) in served), sentence
            assert sentence is None or "compared" in sentence or "do not serve" in sentence
            many = torch.ones(1, 34, 1, layout.depth, dtype=dtype)
            assert unproven(many, pool, layout.bits) is not None


def test_an_append_of_something_else_is_refused() -> None:
    pool = allocate(SMALL, 2, 2, 90, torch.float32)
    k = torch.ones(2, 2, 3, 16)
    assert supports_append(pool, k, k, 4) is None
    for new in (k.half(), torch.ones(2, 2, 3, 32), torch.ones(2, 3, 3, 16), torch.ones(2, 2, 16)):
        assert supports_append(pool, new, new, 4) is not None
    assert "same shape" in str(supports_append(pool, k, torch.ones(2, 2, 4, 16), 4))


# --- sizes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["kivi", "per_head"])
@pytest.mark.parametrize("bits", ALL_BITS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_formula_is_what_is_allocated(scheme: str, bits: int, dtype: torch.dtype) -> None:
    layout = Layout(128, bits, scheme)
    pool = allocate(layout, 2, 4, 1000, dtype)
    held = sum(t.nbytes for name, t in zip(POOL, pool, strict=True) if name != "counts")
    assert held == bytes_after(layout, 2, 4, 1000, dtype.itemsize)


@pytest.mark.parametrize(("bits", "ratio"), [(8, 1.88), (4, 3.56), (3, 4.57), (2, 6.4)])
def test_the_ratio_to_bf16_is_the_published_one(bits: int, ratio: float) -> None:
    before = bytes_before(1, 8, 1, 128, dtype=torch.bfloat16)
    after = bytes_per_token(8, 128, bits, group=64, shares=2)
    assert float(before / after) == pytest.approx(ratio, abs=0.005)


def test_cuts_follow_from_sizes() -> None:
    assert [rows_for(r) for r in (1, 4, 8, 12)] == [8, 8, 8, 16]
    assert [part_width(128, b, 64) for b in ALL_BITS] == [64, 64, 32, 32]
    assert channel_group(64, "kivi") == 64
    for pairs in (1, 8, 128, 512):
        for groups in (1, 5, 510, 2046):
            splits = splits_for(pairs, groups, 528)
            assert 1 <= splits <= groups
            assert splits == 1 or pairs < 2112
    assert engine_for(torch.device("cpu"), torch.bfloat16) == "reference"
    assert set(ENGINES) == {"codes", "rows", "reference"}
