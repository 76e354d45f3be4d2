"""Coded weights on the CPU: every bit comes back, linears equal the dense ones, writes are refused."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from memeff_compile.errors import CodedWeightError, DoubleBackwardError, UnsupportedInputError
from memeff_compile.kernels.coded_weight import (
    CODECS,
    ENGINES,
    CodedWeight,
    Room,
    bits_per_weight,
    bytes_before,
    codecs,
    coded_weight_decode,
    coded_weight_linear,
    encode,
    engine_for,
    op,
    parse,
    shapes,
    supports_weight,
    tensor,
)
from memeff_compile.kernels.coded_weight.layout import BLOCKS, LOSSY, frequencies
from memeff_compile.kernels.coded_weight.op import (
    coded_weight_product,
)
from memeff_compile.kernels.coded_weight.shapes import (
    MAX_WIDE_TOKENS,
    ROW_TILES,
    WIDE_TILES,
    chunks_touched,
    matrix_tile,
    row_tile,
    wide_tile,
)
from tests.support.hostile_weights import all_patterns, bits, hostile, normal, trained
from tests.support.live_bytes import LiveBytes

CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor")


def coded(weight: Tensor, codec: str = "win4", *, requires_grad: bool = False) -> CodedWeight:
    return CodedWeight(encode(weight, codec), codec, weight.shape, requires_grad)


def size_in_bits(weight: Tensor, codec: str) -> float:
    return bits_per_weight(sum(part.nbytes for part in encode(weight, codec)), weight.numel())


# --- every bit comes back -------------------------------------------------------------------------

EDGES: dict[str, Callable[[], Tensor]] = {
    "every pattern": all_patterns,
    "strange values": lambda: hostile(70, 513),
    "zeros": lambda: torch.zeros(5, 7, dtype=torch.bfloat16),
    "negative zeros": lambda: -torch.zeros(130, 127, dtype=torch.bfloat16),
    "all denormals": lambda: torch.arange(1, 128).to(torch.int16).view(torch.bfloat16),
    "constant": lambda: torch.full((300, 301), 0.3, dtype=torch.bfloat16),
    "one element": lambda: torch.full((1, 1), -math.inf, dtype=torch.bfloat16),
    "one column": lambda: normal(999, 1),
    "large values": lambda: (normal(64, 300).float() * 1e30).to(torch.bfloat16),
    "tiny values": lambda: (normal(64, 300).float() * 1e-35).to(torch.bfloat16),
    "transposed": lambda: hostile(130, 257).t(),
    "strided": lambda: hostile(64, 600)[::2, ::3],
    "three dimensions": lambda: hostile(3, 50, 70),
    "one dimension": lambda: hostile(20000),
    "a chunk less one": lambda: hostile(1, 16383),
    "a chunk and one": lambda: hostile(1, 16385),
}


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("case", EDGES)
def test_decoding_returns_every_bit(case: str, codec: str) -> None:
    weight = EDGES[case]()
    found = coded(weight, codec).decode()
    assert found.shape == weight.shape
    assert found.is_contiguous()
    assert torch.equal(bits(found), bits(weight))


@settings(max_examples=15, deadline=None)
@given(
    st.sampled_from([codec for codec in CODECS if codec != "rans"]),
    st.tuples(st.integers(1, 40), st.integers(1, 700)),
    st.integers(0, 255),
    st.integers(1, 256),
    st.integers(0, 2**31),
)
def test_random_patterns_come_back(
    codec: str, shape: tuple[int, int], low: int, spread: int, seed: int
) -> None:
    """Exponents from a window of any place and width, signs and mantissas at random."""
    generator = torch.Generator().manual_seed(seed)
    exponent = torch.randint(low, low + spread, shape, generator=generator) % 256
    rest = torch.randint(0, 256, shape, generator=generator)
    pattern = ((rest & 0x80) << 8) | (exponent << 7) | (rest & 0x7F)
    weight = pattern.to(torch.int16).view(torch.bfloat16)
    assert torch.equal(bits(coded(weight, codec).decode()), bits(weight))


@pytest.mark.parametrize("seed", range(3))
def test_random_patterns_come_back_through_the_entropy_coder(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    pattern = torch.randint(-(2**15), 2**15, (40, 500), generator=generator, dtype=torch.int16)
    assert torch.equal(bits(coded(pattern.view(torch.bfloat16), "rans").decode()), pattern)


@pytest.mark.parametrize("codec", CODECS)
def test_more_than_one_piece_is_worked_on(codec: str) -> None:
    """The CPU path takes a million weights at a time; offsets go on from piece to piece."""
    weight = hostile(1100, 1024)
    assert torch.equal(bits(coded(weight, codec).decode()), bits(weight))


# --- how small ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("codec", "normal_bits", "trained_bits"),
    [("win4", 12.02, 12.04), ("tier", 10.75, 11.08), ("rans", 10.68, 10.98)],
)
def test_bits_per_weight_with_everything_counted(
    codec: str, normal_bits: float, trained_bits: float
) -> None:
    assert 10.5 < size_in_bits(normal(128, 4096), codec) <= normal_bits
    assert 10.5 < size_in_bits(trained(128, 4096), codec) <= trained_bits


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 10**6), min_size=256, max_size=256).filter(any))
def test_frequencies_fill_the_table_and_forget_nobody(counts: list[int]) -> None:
    found = frequencies(counts)
    assert sum(found) == 1024
    assert all((slots > 0) == (count > 0) for slots, count in zip(found, counts, strict=True))


def test_one_exponent_fills_the_table() -> None:
    assert frequencies([0] * 100 + [7] + [0] * 155)[100] == 1024


# --- lossy modes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(
    ("kept", "error", "worst"), [(0, 0.195, 0.34), (1, 0.103, 0.21), (3, 0.0265, 0.066)]
)
def test_lossy_modes_have_the_published_errors(
    codec: str, kept: int, error: float, worst: float
) -> None:
    weight = normal(128, 1024)
    found = coded(weight, f"{codec}:k{kept}:b512").decode().float()
    off = (found - weight.float()).abs()
    relative = float(off.norm() / weight.float().norm())
    assert relative == pytest.approx(error, rel=0.03)
    assert float((off / weight.float().abs().clamp_min(1e-30)).max()) <= worst


def test_smaller_blocks_lose_less() -> None:
    weight = trained(128, 1024)
    errors = [
        float((coded(weight, f"win4:k0:b{block}").decode().float() - weight.float()).norm())
        for block in BLOCKS
    ]
    assert errors == sorted(errors)


@pytest.mark.parametrize("kept", LOSSY)
def test_lossy_modes_take_the_bits_they_say(kept: int) -> None:
    """Four bits of exponent, sign and mantissa kept, a byte per block."""
    found = size_in_bits(normal(64, 4096), f"win4:k{kept}:b512")
    assert found == pytest.approx(4 + kept + 1 + 8 / 512, abs=0.02)


def test_the_largest_weight_of_a_block_is_kept_by_every_lossy_mode() -> None:
    """The normaliser ensures that: its mantissa becomes zero."""
    weight = normal(4, 512)
    largest = weight.abs().argmax(1, keepdim=True)
    for kept in LOSSY:
        found = coded(weight, f"win4:k{kept}:b512").decode()
        assert torch.equal(found.gather(1, largest), weight.gather(1, largest))


def test_a_lossy_mode_refuses_what_is_not_finite() -> None:
    with pytest.raises(UnsupportedInputError, match="not finite"):
        encode(hostile(8, 64), "win4:k3:b64")


@pytest.mark.parametrize(
    "name", ["zip", "win4:k7:b512", "win4:k2:b512", "win4:k3:b100", "win4:k2", "tier:", ""]
)
def test_an_unknown_codec_is_named_with_the_known_ones(name: str) -> None:
    with pytest.raises(UnsupportedInputError, match="win4, tier, rans"):
        parse(name)


# --- encoding again -------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", CODECS)
def test_a_new_value_is_stored_in_place_or_anew(codec: str) -> None:
    weight = coded(normal(64, 256), codec)
    version = weight._version
    for value in (normal(64, 256, seed=1), hostile(64, 256), torch.zeros(64, 256)):
        weight.store(value)
        assert torch.equal(bits(weight.decode()), bits(value.to(torch.bfloat16)))
    assert weight._version > version


def test_encoding_into_parts_says_whether_it_fitted() -> None:
    parts = encode(torch.zeros(64, 256, dtype=torch.bfloat16), "win4")
    assert op.encode_soon(parts, -torch.zeros(64, 256, dtype=torch.bfloat16), "win4")
    assert not op.encode_soon(parts, hostile(64, 256), "win4")


def test_room_is_a_share_and_a_least() -> None:
    assert Room().length(100) == 100
    assert Room(0.1, 3).length(100) == 110
    assert Room(0.1, 30).length(100) == 130


def test_a_value_of_another_shape_is_refused() -> None:
    with pytest.raises(CodedWeightError, match=r"\(3, 256\).*\(64, 256\)"):
        coded(normal(64, 256)).store(torch.zeros(3, 256))


# --- linears --------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("has_bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("lead", [(), (3,), (2, 5), (0,)], ids=["one row", "rows", "3-D", "empty"])
def test_a_linear_and_its_gradients_equal_the_dense_one(
    lead: tuple[int, ...], has_bias: bool, codec: str
) -> None:
    dense = hostile(48, 256).nan_to_num(0, 0, 0).requires_grad_()
    weight = coded(dense, codec, requires_grad=True)
    results = []
    for each in (dense, weight):
        x = normal(*lead, 256, seed=1).requires_grad_()
        bias = normal(48, seed=2).requires_grad_() if has_bias else None
        out = F.linear(x, each, bias)
        out.float().square().sum().backward()
        results.append((out, x.grad, each.grad, None if bias is None else bias.grad))
    for expected, found in zip(*results, strict=True):
        assert (expected is None and found is None) or torch.equal(expected, found)
    assert type(weight.grad) is Tensor


@pytest.mark.parametrize("name", ["input", "x", "a", "x1"])
def test_a_linear_takes_its_arguments_by_name(name: str) -> None:
    weight, bias = coded(normal(48, 256), requires_grad=True), normal(48, seed=2)
    given: Any = {"weight": weight, "bias": bias, name: normal(3, 256)}
    assert torch.equal(F.linear(**given), F.linear(normal(3, 256), weight.decode(), bias))
    with pytest.raises(TypeError):
        F.linear(normal(3, 256), **given)


def test_no_dense_weight_is_saved_for_the_backward() -> None:
    weight = coded(normal(48, 256), requires_grad=True)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        F.linear(normal(3, 256).requires_grad_(), weight).sum()
    assert [type(each) for each in saved if each.shape == (48, 256)] == [CodedWeight]


def test_a_frozen_weight_does_not_keep_its_input() -> None:
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        F.linear(normal(3, 256).requires_grad_(), coded(normal(48, 256))).sum()
    assert not [each for each in saved if each.shape == (3, 256)]


def test_a_weight_stored_anew_before_the_backward_is_noticed() -> None:
    weight = coded(normal(48, 256), requires_grad=True)
    loss = F.linear(normal(3, 256), weight).sum()
    weight.store(normal(48, 256, seed=3))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_linear_says_whether_it_trains() -> None:
    """Where it does, sums are taken as in the dense layer, however few tokens there are."""
    seen: list[bool] = []

    class Calls(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is coded_weight_linear:
                seen.append(args[3] if len(args) > 3 else False)
            return func(*args, **(kwargs or {}))

    frozen, trained = coded(normal(64, 256)), coded(normal(64, 256), requires_grad=True)
    x = normal(3, 256)
    with Calls():
        F.linear(x, frozen)
        F.linear(x, trained)
        F.linear(x.clone().requires_grad_(), frozen)
        with torch.no_grad():
            F.linear(x, trained)
    assert seen == [False, True, True, False]
    for tokens in (1, 16, 256):
        assert not codecs.fuses(parse("win4"), tokens, (64, 256), trains=True)
    assert codecs.fuses(parse("win4"), 1, (64, 256))


ROWS: dict[str, Callable[[], Tensor]] = {
    "a vector": lambda: normal(256),
    "rows": lambda: normal(6, 256),
    "rows across": lambda: normal(256, 6).t(),
    "rows of rows": lambda: normal(6, 256).view(2, 3, 256),
    "no view of rows": lambda: normal(6, 256).view(3, 2, 256).transpose(0, 1),
    "the same rows again": lambda: normal(3, 256).expand(2, 3, 256),
}


@pytest.mark.parametrize("trains", ["weight", "input"])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("make", ROWS.values(), ids=list(ROWS))
def test_a_linear_that_trains_takes_the_dense_layers_products(
    make: Callable[[], Tensor], has_bias: bool, trains: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another product, or a bias added elsewhere, may round in another way."""
    dense = normal(48, 256).requires_grad_(trains == "weight")
    x, bias = make().requires_grad_(trains == "input"), normal(48) if has_bias else None
    weight = coded(dense.detach(), requires_grad=trains == "weight")
    monkeypatch.setattr(op, "_decode", lambda *_: dense.detach())
    aten, seen = torch.ops.aten, list[Any]()

    def product(*args: Any) -> Tensor:
        return op._product(op.Product(*args))

    class Calls(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            inside = {coded_weight_linear: tensor._product, coded_weight_product: product}
            inside |= {each: each.decompose for each in (aten.linear.default, aten.matmul.default)}
            if func in inside:
                with self:
                    return inside[func](*args)
            if func.overloadpacket in (aten.mm, aten.addmm, aten.bmm, aten.mv, aten.add):
                seen.append((func, [each.shape for each in args]))
            return func(*args, **(kwargs or {}))

    with Calls():
        expected = F.linear(x, dense, bias)
        wanted = seen[:]
        seen.clear()
        found = F.linear(x, weight, bias)
    assert torch.equal(found, expected)
    assert seen == wanted


def test_a_second_derivative_is_refused() -> None:
    x = normal(3, 256).requires_grad_()
    out = coded_weight_linear(x, coded(normal(48, 256), requires_grad=True))
    (first,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    with pytest.raises(DoubleBackwardError, match="Decompress"):
        first.sum().backward()


def test_autocast_runs_a_linear_of_fp32_inputs() -> None:
    dense = normal(48, 256)
    x, bias = torch.randn(3, 256), torch.randn(48)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(F.linear(x, coded(dense), bias), F.linear(x, dense, bias))
    with pytest.raises(RuntimeError, match="dtype"):
        F.linear(x, coded(dense), bias)


def test_ops_say_what_does_not_fit() -> None:
    weight = coded(normal(48, 256))
    with pytest.raises(UnsupportedInputError, match="parts were given"):
        coded_weight_decode(weight.parts[:-1], "win4", [48, 256])
    with pytest.raises(UnsupportedInputError, match="cast one"):
        coded_weight_product(torch.ones(2, 256), weight.parts, None, "win4", [48, 256])
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        coded_weight_linear(normal(2, 255), weight)


def test_ops_pass_opcheck() -> None:
    weight = coded(normal(48, 256))
    size = [48, 256]
    torch.library.opcheck(coded_weight_decode, (weight.parts, "win4", size), test_utils=CHECKS)
    given = (normal(3, 256), weight.parts, normal(48), "win4", size)
    torch.library.opcheck(coded_weight_product, given, test_utils=CHECKS)
    given = (weight.parts, "win4", size, normal(3, 48))
    torch.library.opcheck(coded_weight_decode, given, test_utils=CHECKS)
    dense = (normal(3, 256).requires_grad_(), normal(48, 256).requires_grad_(), normal(48))
    torch.library.opcheck(coded_weight_linear, dense, test_utils=CHECKS)


# --- the tensor -----------------------------------------------------------------------------------


def test_any_other_operation_reads_the_decoded_weight() -> None:
    dense = normal(48, 256)
    weight = coded(dense)
    assert torch.equal(weight + 1, dense + 1)
    assert torch.equal(weight[3:5].t(), dense[3:5].t())
    assert torch.equal(weight.float(), dense.float())
    assert torch.equal(torch.cat([weight, dense]), torch.cat([dense, dense]))
    assert type(weight * 1) is Tensor
    assert "codec='win4'" in repr(weight)


def test_copies_stay_coded_and_are_their_own() -> None:
    weight = nn.Parameter(coded(hostile(48, 256)))
    for made in (weight.clone(), copy.deepcopy(weight), weight.to("cpu", copy=True)):
        assert isinstance(made, CodedWeight)
        assert torch.equal(bits(made.decode()), bits(weight.decode()))
        assert made.parts[1].data_ptr() != weight.parts[1].data_ptr()
    assert isinstance(copy.deepcopy(weight), nn.Parameter)
    assert weight.to("meta").device.type == "meta"


WRITES: dict[str, Callable[[Any], object]] = {
    "add_": lambda w: w.add_(1),
    "zero_": lambda w: w.zero_(),
    "out=": lambda w: torch.add(torch.ones(64, 256), 1, out=w),
    "index": lambda w: w.__setitem__(0, 1.0),
    "data.add_": lambda w: w.data.add_(1),
    "apply_": lambda w: w.apply_(lambda number: number + 1),
    "map_": lambda w: w.map_(normal(64, 256), lambda one, two: two),
    "foreach": lambda w: torch._foreach_add_([torch.zeros(1), w], 1),
    "resize_": lambda w: w.resize_(3, 3),
    "init": lambda w: nn.init.normal_(w),
}


@pytest.mark.parametrize("case", WRITES)
def test_a_write_in_place_raises_and_changes_nothing(case: str) -> None:
    weight = coded(normal(64, 256))
    before = bits(weight.decode())
    with torch.no_grad(), pytest.raises(CodedWeightError, match="memeff_compile"):
        WRITES[case](weight)
    assert torch.equal(bits(weight.decode()), before)


def test_copying_a_whole_value_in_encodes_it() -> None:
    weight = coded(normal(64, 256))
    with torch.no_grad():
        weight.copy_(normal(64, 256, seed=5).float())
    assert torch.equal(weight.decode(), normal(64, 256, seed=5))


def test_whole_data_is_encoded_and_any_other_makes_the_weight_dense() -> None:
    weight = nn.Parameter(coded(normal(64, 256)))
    weight.data = normal(64, 256, seed=5)
    assert isinstance(weight, CodedWeight)
    assert torch.equal(weight.decode(), normal(64, 256, seed=5))
    with pytest.warns(UserWarning, match="became a dense one of torch.float16"):
        weight.data = normal(64, 256).half()
    assert type(weight) is nn.Parameter
    assert torch.equal(weight, normal(64, 256).half())


@pytest.mark.parametrize(
    ("weight", "needed"),
    [
        (torch.ones(2, 3), "bfloat16"),
        (torch.ones(2, 3, dtype=torch.float16), "bfloat16"),
        (torch.ones(2, 3, dtype=torch.bfloat16, device="meta"), "meta"),
        (torch.ones(0, 3, dtype=torch.bfloat16), "0 elements"),
        (torch.ones(2, 3).to_sparse(), "strided"),
    ],
    ids=["fp32", "fp16", "meta", "empty", "sparse"],
)
def test_what_cannot_be_coded_is_said(weight: Tensor, needed: str) -> None:
    sentence = supports_weight(weight)
    assert sentence is not None
    assert needed in sentence
    with pytest.raises(UnsupportedInputError, match=needed):
        encode(weight, "win4")


# --- memory and settings --------------------------------------------------------------------------


def test_a_linear_allocates_its_weight_once_and_the_formula_says_so() -> None:
    weight = coded(normal(512, 1024), requires_grad=True)
    x = normal(4, 1024).requires_grad_()
    with LiveBytes() as live:
        out = F.linear(x, weight)
        kept = sum(size for _, size in dict(live._alive()).values())
    assert kept - out.nbytes <= 4096
    assert bytes_before(512, 1024) == 512 * 1024 * 2


@pytest.mark.parametrize("mantissa", [3, 1, 0])
def test_queries_keys_and_values_of_one_token_have_one_tile(mantissa: int) -> None:
    assert shapes.fits_halves(512, 4096, mantissa)
    assert not shapes.fits_halves(128, 4096, mantissa)
    assert shapes.fits_halves(512, 14336, mantissa) == (mantissa == 3)
    tiles = {shapes.halves_tile(rows, 4096, mantissa, 132) for rows in (4096, 1024)}
    assert tiles == {shapes.MatrixTile(16, 8, 8)}
    assert shapes.halves_tile(1024, 512, mantissa, 132).warps == 2
    assert shapes.halves_tile(4096, 14336, mantissa, 132).warps == 4


def test_an_engine_has_a_sentence() -> None:
    assert engine_for(torch.device("cpu")) == "reference"
    assert all(ENGINES.values())


@pytest.mark.parametrize("tokens", [1, 2, 8, 9, 16])
@pytest.mark.parametrize(("rows", "columns"), [(33, 256), (1024, 4096), (28672, 8192)])
def test_tiles_in_registers_hold_their_tokens(tokens: int, rows: int, columns: int) -> None:
    found = matrix_tile(tokens, rows, columns, 132)
    assert tokens <= found.tokens <= 16
    assert found.rows % 16 == 0
    assert found.warps <= max(1, columns // 256)
    assert chunks_touched(found.rows, columns) * 8192 >= found.rows * columns + 8192


def test_two_groups_are_loaded_early_where_that_was_faster() -> None:
    # 8960 rows are 560 programs, and an H200 runs 528 at a time that load two groups.
    early = ((6144, 2048), (1024, 4096), (18944, 3584), (12288, 4096))
    sizes = (*early, (8960, 1536), (4096, 12288), (28672, 8192))
    tiles = [matrix_tile(16, *size, 132, is_lossless=True) for size in sizes]
    assert [tile.is_early for tile in tiles] == [size in early for size in sizes]
    assert {tile.patches for tile in tiles} == {16}
    for tokens, is_lossless in ((8, True), (16, False)):
        tile = matrix_tile(tokens, 6144, 2048, 132, is_lossless=is_lossless)
        assert (tile.is_early, tile.patches) == (False, 32)


def test_wide_tiles_fit_into_shared_memory_as_often_as_their_cost_says() -> None:
    for found, cost in WIDE_TILES.items():
        of_x, of_codes = 128 * found.tokens * found.x_stages, 192 * found.rows * found.stages
        taken = of_x + of_codes + 10 * found.noted + 1024
        assert taken <= 232448
        assert cost.resident * (taken + 1024) <= 233472


@pytest.mark.parametrize("tokens", [17, 32, 33, 64, 100, 128, 200, MAX_WIDE_TOKENS])
@pytest.mark.parametrize(
    ("rows", "columns"), [(33, 256), (1024, 4096), (6144, 2048), (4096, 12288), (18944, 3584)]
)
def test_wide_tiles_use_the_gpu_and_take_less_than_the_decoded_weight(
    tokens: int, rows: int, columns: int
) -> None:
    found = wide_tile(tokens, rows, columns, 132)
    if found is None:
        assert rows * columns < 1 << 25, "a large weight is not decoded first"
        return
    groups = columns // 256
    assert found.splits <= groups
    assert 0 <= found.whole * found.rows <= rows
    assert found.whole % 132 == 0
    shared = rows - found.whole * found.rows
    if found.splits > 1:
        assert 4 * found.splits * tokens * shared <= 2 * rows * columns
    if rows < 64 * 132 and columns >= 4096:
        assert found.splits > 1, "most multiprocessors have nothing to do"


def test_narrow_weights_are_decoded_first_for_many_tokens() -> None:
    assert wide_tile(256, 1024, 4096, 132) is None
    assert wide_tile(256, 28672, 8192, 132) is not None


def test_linears_of_one_input_in_a_llama_have_one_tile_each_time() -> None:
    for rows in ((4096, 1024, 1024), (14336, 14336)):
        assert len({matrix_tile(1, each, 4096, 132) for each in rows}) == 1


def test_a_lossy_name_without_a_block_has_blocks_of_512() -> None:
    assert str(parse("win4:k3")) == "win4:k3:b512"


def test_few_rows_get_more_threads_each() -> None:
    tiles = [row_tile(rows, 132) for rows in (28672, 6144, 4096, 1024, 1)]
    assert tiles == [ROW_TILES[0], ROW_TILES[0], ROW_TILES[1], ROW_TILES[2], ROW_TILES[2]]
    threads = [32 * each.warps / each.rows for each in ROW_TILES]
    assert threads == sorted(threads)
    assert threads[0] < threads[-1]


@pytest.mark.parametrize(
    ("codec", "name"),
    [("win4", "WIN4_DECODE_WARPS"), ("tier", "TIER_DECODE_WARPS"), ("rans", "RANS_WARPS")],
)
def test_a_setting_that_a_sweep_puts_in_place_reaches_the_launch(
    codec: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []
    monkeypatch.setattr(codecs, "_run_often", lambda *given: taken.append(given[5]))
    monkeypatch.setattr(shapes, name, 16)
    weight = torch.ones(64, 256, dtype=torch.bfloat16)
    codecs.decode(encode(weight, codec), parse(codec), weight.shape)
    assert taken == [16]
