"""The kernels of coded weights on a CPU: the same source, run by Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from memeff_compile.kernels.coded_weight import Format, codecs, parse, reference, shapes
from tests.support.hostile_weights import bits, hostile, normal

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("nan_filled_empty")]

WIN4 = parse("win4")


@pytest.mark.parametrize("codec", ["win4", "tier"])
@pytest.mark.parametrize("shape", [(18, 513), (1, 1)], ids=str)
def test_both_engines_write_the_same_parts_and_read_them(
    shape: tuple[int, int], codec: str
) -> None:
    form, weight = parse(codec), hostile(*shape)
    parts, plain = codecs.encode(weight, form), reference.encode(weight, form)
    for name, found, expected in zip(form.parts, parts, plain, strict=True):
        assert torch.equal(found, expected), name
    assert torch.equal(bits(codecs.decode(plain, form, shape)), bits(weight))


def test_the_entropy_coder_writes_the_same_parts_and_reads_them() -> None:
    form, weight = parse("rans"), hostile(40, 409)
    parts, plain = codecs.encode(weight, form), reference.encode(weight, form)
    for name, found, expected in zip(form.parts, parts, plain, strict=True):
        assert torch.equal(found, expected), name
    assert torch.equal(bits(codecs.decode(plain, form, weight.shape)), bits(weight))


@pytest.mark.parametrize("name", ["win4:k0:b32", "tier:k1:b64", "win4:k3:b512", "tier:k3:b32"])
def test_lossy_modes_are_read_as_the_plain_path_reads_them(name: str) -> None:
    form, weight = parse(name), normal(30, 301)
    weight.view(-1)[3] = 1000.0
    parts = reference.encode(weight, form)
    found = codecs.decode(parts, form, weight.shape)
    assert torch.equal(bits(found), bits(reference.decode(parts, form, weight.shape)))


@pytest.mark.parametrize("name", ["win4:k0:b32", "win4:k3:b512", "tier:k1:b64", "rans:k3:b128"])
def test_both_engines_write_the_same_parts_of_lossy_modes(name: str) -> None:
    form, weight = parse(name), normal(18, 513)
    weight.view(-1)[:40] = hostile(1, 40).view(-1).nan_to_num(0.0, 1e30, -1e30)
    parts, plain = codecs.encode(weight, form), reference.encode(weight, form)
    for part, found, expected in zip(form.parts, parts, plain, strict=True):
        assert torch.equal(found, expected), part


@pytest.mark.parametrize("codec", ["win4", "tier"])
def test_a_weight_is_encoded_into_parts_with_room(codec: str) -> None:
    form = parse(codec)
    parts = codecs.encode(normal(64, 256), form, codecs.Room(0.05, 64))
    value = hostile(64, 256, seed=4)
    refuge = torch.zeros(codecs.sheltered(value.numel()), dtype=torch.int16)
    outcome = codecs.encode_soon(parts, value, form, refuge)
    assert isinstance(outcome, codecs.Outcome)
    assert outcome.fits()
    plain = dict(zip(form.parts, codecs.encode(value, form), strict=True))
    streams = [
        plain[name].numel() - reference.STREAM_TAIL for name in ("second", "third") if name in plain
    ]
    needed = [*streams, plain["patch_places"].numel()]
    assert refuge[: codecs.HEADING].view(torch.int32)[: len(needed)].tolist() == needed
    assert not refuge[codecs.HEADING :].any()
    assert torch.equal(bits(codecs.decode(parts, form, value.shape)), bits(value))
    tight = codecs.encode(torch.zeros(64, 256, dtype=torch.bfloat16), form)
    short = codecs.encode_soon(tight, value, form)
    assert isinstance(short, codecs.Outcome)
    assert not short.fits()


@pytest.mark.parametrize(
    ("codec", "decay"),
    [
        pytest.param("win4", 0.0, marks=pytest.mark.slow),
        ("win4", 0.5),
        ("tier", 0.0),
        pytest.param("tier", 0.5, marks=pytest.mark.slow),
        pytest.param("rans", 0.5, marks=pytest.mark.slow),
    ],
)
def test_a_gradient_becomes_the_weight_after_a_step(codec: str, decay: float) -> None:
    """Rates are powers of two, so no number is rounded twice, with or without an FMA."""
    form, weight = parse(codec), hostile(32, 512)
    gradient = hostile(32, 512, seed=1)
    held = torch.nn.Parameter(weight.clone())
    held.grad = gradient.clone()
    torch.optim.SGD([held], lr=0.25, weight_decay=decay).step()
    # Both write the same parts, as tests above say; interpreted, the entropy coder takes seconds.
    parts = (reference if codec == "rans" else codecs).encode(weight, form)
    assert codecs.steps(form, gradient)
    counts = codecs.step(parts, form, gradient, codecs.Step(0.25, decay))
    is_nan = held.detach().isnan()
    assert torch.equal(gradient.isnan(), is_nan)
    assert torch.equal(bits(gradient)[~is_nan], bits(held.detach())[~is_nan])
    if codec == "win4":  # which encodes on the way
        new = [*parts[:3], *(part.new_zeros(32 * 512) for part in parts[3:5]), parts[5]]
        assert codecs.encode_soon(new, gradient, form, counts=counts)
        plain = reference.decode(new, form, weight.shape)
        assert torch.equal(bits(plain), bits(gradient))


@pytest.mark.parametrize("codec", ["win4", "tier"])
def test_what_does_not_fit_is_noticed_and_written_nowhere(codec: str) -> None:
    form = parse(codec)
    parts = codecs.encode(torch.zeros(64, 256, dtype=torch.bfloat16), form, codecs.Room(0, 3))
    names = [
        name for name in ("second", "third", "patch_places", "patch_values") if name in form.parts
    ]
    whole = {}
    for name in names:  # a list inside a larger piece of memory
        part = parts[form.parts.index(name)]
        whole[name] = torch.cat([part, torch.full_like(part, 77)])
        parts[form.parts.index(name)] = whole[name][: part.numel()]
    value = hostile(64, 256, seed=4)
    refuge = torch.full((codecs.sheltered(64 * 256) + 9,), 77, dtype=torch.int16)
    outcome = codecs.encode_soon(parts, value, form, refuge)
    assert isinstance(outcome, codecs.Outcome)
    assert not outcome.fits()
    kept = refuge[codecs.HEADING :]
    assert torch.equal(kept[: 64 * 256], bits(value).view(-1))
    assert (kept[64 * 256 :] == 77).all()
    for name, memory in whole.items():
        assert (memory[memory.numel() // 2 :] == 77).all(), name


def product(x: Tensor, weight: Tensor, bias: Tensor, setting: shapes.RowTile | None = None) -> None:
    """Hold a product that decodes on the way against float64."""
    parts = codecs.encode(weight, WIN4)
    found = codecs.product(x, parts, bias, weight.shape, setting=setting).double()
    exact = x.double() @ weight.double().t() + bias.double()
    assert found.shape == exact.shape
    # The interpreter cuts bf16 instead of rounding it.
    assert float((found - exact).abs().max()) <= 2**-6 * float(exact.abs().max())


def outliers(rows: int, columns: int) -> Tensor:
    """Return a weight with patches in every third row, and zeros."""
    weight = normal(rows, columns)
    weight[::3, ::37] = 300.0
    weight[1, :9] = 0.0
    return weight


@pytest.mark.parametrize(
    "setting",
    [None, shapes.RowTile(4, 64, 1), shapes.RowTile(8, 32, 1, 2)],
    ids=["default", "4 rows", "8 rows"],
)
def test_one_token_is_multiplied_while_decoding(setting: shapes.RowTile | None) -> None:
    product(normal(1, 768, seed=1), outliers(21, 768), normal(21, seed=2), setting)


@pytest.mark.parametrize("count", [2, 3])
def test_one_token_and_several_weights_give_the_bits_of_each_alone(count: int) -> None:
    weights = [outliers(rows, 512) for rows in (21, 2, 9)[:count]]
    parts = [codecs.encode(weight, WIN4) for weight in weights]
    biases = [normal(21, seed=2), None, None][:count]
    x = normal(2, 513)[1:, 1:]
    sizes = [weight.shape for weight in weights]
    found = codecs.products(x, parts, biases, sizes)
    alone = [codecs.product(x, *each) for each in zip(parts, biases, sizes, strict=True)]
    for one, other in zip(found, alone, strict=True):
        assert torch.equal(bits(one), bits(other))


LOSSY = ["win4:k3:b512", "win4:k1:b128", "win4:k0:b32", "win4:k3:b64", "win4:k1:b32"]


def lossy(name: str, weight: Tensor) -> tuple[Format, list[Tensor], Tensor]:
    """Return a weight's lossy format, parts and decoded value."""
    form = parse(name)
    parts = reference.encode(weight, form)
    return form, parts, reference.decode(parts, form, weight.shape)


@pytest.mark.parametrize("name", LOSSY)
def test_lossy_weights_are_multiplied_as_they_are_decoded(name: str) -> None:
    weight = outliers(7, 768)
    weight[2, 300:303] = torch.tensor([3.38e38, -1e-39, -0.0]).bfloat16()
    form, parts, decoded = lossy(name, weight)
    # One column is read at a time, of each pair and half of a word, and those with patches.
    for column in (0, 69, 130, 203, 256, 300, 301, 302, 703, 37):
        x = torch.zeros(1, 768, dtype=torch.bfloat16)
        x[0, column] = 1.0
        tile = shapes.RowTile(8, 128, 1)
        found = codecs.product(x, parts, None, weight.shape, form, setting=tile)
        assert torch.equal(found[0], decoded[:, column]), column


@pytest.mark.parametrize("name", LOSSY)
def test_a_lossy_product_adds_up_its_columns(name: str) -> None:
    x, bias = normal(1, 768, seed=1), normal(21, seed=2)
    form, parts, decoded = lossy(name, outliers(21, 768))
    assert codecs.fuses(form, 1, decoded.shape)
    exact = x.double() @ decoded.double().t() + bias.double()
    found = codecs.product(x, parts, bias, decoded.shape, form).double()
    # The interpreter cuts bf16 instead of rounding it.
    assert float((found - exact).abs().max()) <= 2**-7 * float(exact.abs().max())


@pytest.mark.parametrize("name", LOSSY[:3])
def test_several_lossy_weights_give_the_bits_of_each_alone(name: str) -> None:
    found = [lossy(name, outliers(rows, 256)) for rows in (21, 2, 9)]
    parts, sizes = [each[1] for each in found], [each[2].shape for each in found]
    biases = [normal(21, seed=2), None, None]
    x, form = normal(1, 256), found[0][0]
    together = codecs.products(x, parts, biases, sizes, form)
    alone = [codecs.product(x, *each, form) for each in zip(parts, biases, sizes, strict=True)]
    for one, other in zip(together, alone, strict=True):
        assert torch.equal(bits(one), bits(other))


def test_an_input_that_is_not_finite_gives_a_result_that_is_not() -> None:
    form, parts, decoded = lossy("win4:k3:b512", outliers(9, 512))
    for value in (float("nan"), float("inf")):
        x = normal(1, 512)
        x[0, 37] = value
        assert not codecs.product(x, parts, None, decoded.shape, form).isfinite().any()


def test_a_product_of_an_input_between_two_words() -> None:
    product(normal(2, 513)[1:, 2:258], outliers(8, 256), normal(8))


def test_shares_of_columns_are_added_behind_the_rows_that_are_whole() -> None:
    shares, out = torch.randn(3, 5, 37), normal(5, 64)
    expected = torch.cat([out[:, :27], shares.sum(0).bfloat16()], 1)
    # The interpreter cuts bf16 instead of rounding it.
    torch.testing.assert_close(codecs._add(shares, out), expected, rtol=2**-7, atol=0)


def test_columns_are_ordered_for_operands_and_turned() -> None:
    x = normal(33, 512)
    ordered, turned = codecs._ordered(x)
    assert torch.equal(turned[:, :33], x.t())
    place = torch.arange(512).view(2, 4, 2, 4, 4, 2)  # group, pair, half, fours of lanes, lane, low
    expected = place.permute(0, 2, 1, 4, 3, 5).reshape(-1)
    assert torch.equal(ordered, x[:, expected])
