"""Coded weights on a GPU: every bit, products against cuBLAS, memory, and models."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from memeff_compile.kernels.coded_weight import (
    CODECS,
    CodedWeight,
    Room,
    codecs,
    coded_weight_linear,
    coded_weight_linears,
    encode,
    make_refuge,
    parse,
    shapes,
)
from memeff_compile.kernels.device import gpu
from memeff_compile.model.weights.compress import compress_
from memeff_compile.model.weights.optim_in_backward import optim_in_backward, plain_step
from tests.support.hostile_weights import all_patterns, bits, hostile, trained

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("shape", [(1024, 4096), (70, 513), (1, 1), (515, 1111)], ids=str)
def test_decoding_returns_every_bit(shape: tuple[int, int], codec: str) -> None:
    weight = hostile(*shape, device="cuda")
    parts = encode(weight, codec, Room(0.1, 256))
    found = CodedWeight(parts, codec, shape)
    assert torch.equal(bits(found.decode()), bits(weight))
    other = hostile(*shape, seed=1, device="cuda")
    found.store(other)
    assert torch.equal(bits(found.decode()), bits(other))
    on_cpu = found.to("cpu").decode()
    assert torch.equal(bits(on_cpu), bits(other.cpu()))


@pytest.mark.parametrize("codec", CODECS)
def test_every_pattern_comes_back(codec: str) -> None:
    weight = all_patterns().cuda()
    found = CodedWeight(encode(weight, codec), codec, weight.shape)
    assert torch.equal(bits(found.decode()), bits(weight))


@pytest.mark.parametrize("tokens", [1, 2, 8, 16, 17, 32, 64, 65, 128, 200, 256, 300])
@pytest.mark.parametrize(
    ("rows", "columns"), [(33, 256), (1024, 4096), (8960, 1536), (4096, 14336), (14336, 4096)]
)
def test_a_linear_is_as_close_as_the_dense_one(rows: int, columns: int, tokens: int) -> None:
    weight = trained(rows, columns).cuda()
    weight.view(-1)[:: rows * 7] = 300.0
    coded = CodedWeight(encode(weight, "win4"), "win4", weight.shape)
    x = torch.randn(tokens, columns, device="cuda", dtype=torch.bfloat16)
    bias = torch.randn(rows, device="cuda", dtype=torch.bfloat16)
    exact = x.double() @ weight.double().t() + bias.double()
    found, dense = F.linear(x, coded, bias), F.linear(x, weight, bias)
    assert torch.equal(bits(F.linear(x, coded, bias)), bits(found)), "other bits in another run"
    off, usual = (float((y.double() - exact).abs().max()) for y in (found, dense))
    assert off <= 1.5 * usual
    if not codecs.fuses(parse("win4"), tokens, weight.shape, x.device):
        assert torch.equal(found, dense)


@pytest.mark.parametrize("tokens", [9, 16])
@pytest.mark.parametrize(("rows", "columns"), [(33, 256), (1000, 1536), (1024, 4096), (64, 14336)])
def test_each_order_of_loads_gives_the_same_products(rows: int, columns: int, tokens: int) -> None:
    weight = trained(rows, columns).cuda()
    weight[5] *= 1e-9  # all of it patches, which take several rounds
    parts = encode(weight, "win4")
    x = torch.randn(tokens, columns, device="cuda", dtype=torch.bfloat16)
    bias = torch.randn(rows, device="cuda", dtype=torch.bfloat16)
    exact = x.double() @ weight.double().t() + bias.double()
    usual = float((F.linear(x, weight, bias).double() - exact).abs().max())
    plain = shapes.matrix_tile(16, rows, columns, 132)
    for patches, is_early in ((16, True), (32, True), (16, False), (32, False)):
        tile = replace(plain, patches=patches, is_early=is_early)
        found = codecs.product(x, parts, bias, weight.shape, setting=tile)
        assert float((found.double() - exact).abs().max()) <= 1.5 * usual, tile


LOSSY = ("win4:k3:b512", "win4:k1:b128", "win4:k0:b32", "win4:k3:b64")
HALVES = ("win4:k3:b512", "win4:k3:b256", "win4:k1:b512", "win4:k0:b512")
"""Formats of which one token is multiplied in fp16."""


@pytest.mark.parametrize("name", [*LOSSY, "tier:k3:b512", "tier:k0:b32", "rans:k1:b256"])
@pytest.mark.parametrize(("rows", "columns"), [(33, 256), (1000, 1537)])
def test_both_engines_write_the_same_parts_of_lossy_modes(
    rows: int, columns: int, name: str
) -> None:
    weight = trained(rows, columns)
    weight.view(-1)[::997] = 300.0
    weight[1] = 0.0
    weight[2] *= 1e-38
    parts, plain = encode(weight.cuda(), name), encode(weight, name)
    for part, found, expected in zip(parse(name).parts, parts, plain, strict=True):
        assert torch.equal(found.cpu(), expected), part


@pytest.mark.parametrize("name", HALVES)
@pytest.mark.parametrize(
    ("rows", "columns"), [(33, 256), (1024, 4096), (8960, 1536), (4096, 14336)]
)
def test_one_token_in_fp16_has_the_range_of_bf16(rows: int, columns: int, name: str) -> None:
    weight = trained(rows, columns).cuda()
    weight.view(-1)[:: rows * 7] = 300.0
    weight[1] = 0.0
    coded = CodedWeight(encode(weight, name), name, weight.shape)
    decoded = coded.decode()
    for at in (0, columns // 2 + 3, columns - 1):
        x = torch.zeros(1, columns, device="cuda", dtype=torch.bfloat16)
        x[0, at] = 1.0
        assert torch.equal(F.linear(x, coded), F.linear(x, decoded)), at
    for scale in (1e-37, 1e-20, 1.0, 1e20, 1e33):
        x = torch.randn(1, columns, device="cuda").exp().mul(scale).to(torch.bfloat16)
        exact = x.double() @ decoded.double().t()
        found, dense = F.linear(x, coded), F.linear(x, decoded)
        off, usual = (float((y.double() - exact).abs().max()) for y in (found, dense))
        assert off <= 1.5 * usual + 1e-39, scale
    assert not bool(F.linear(torch.zeros_like(x), coded).any())
    for wrong in (float("inf"), float("nan")):
        x[0, 5] = wrong
        assert not bool(F.linear(x, coded)[0, 2:].isfinite().any())


@pytest.mark.parametrize("name", HALVES[::2])
def test_several_weights_in_fp16_give_the_bits_of_each_alone(name: str) -> None:
    weights = [trained(rows, 2048).cuda() for rows in (4096, 1000, 33)]
    coded = [CodedWeight(encode(w, name), name, w.shape) for w in weights]
    x = torch.randn(1, 2048, device="cuda", dtype=torch.bfloat16)
    for count in (2, 3):
        outs = coded_weight_linears(x, coded[:count], [None] * count)
        for out, weight in zip(outs, coded, strict=False):
            assert torch.equal(bits(out), bits(coded_weight_linear(x, weight)))


@pytest.mark.parametrize("tokens", [1, 2, 5, 8, 9, 16, 17, 64, 200])
@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize(("rows", "columns"), [(33, 256), (8960, 1536), (1024, 4096)])
def test_a_lossy_linear_multiplies_decoded_weights(
    rows: int, columns: int, name: str, tokens: int
) -> None:
    weight = trained(rows, columns).cuda()
    weight.view(-1)[:: rows * 7] = 300.0
    coded = CodedWeight(encode(weight, name), name, weight.shape)
    decoded = coded.decode()
    # One column at a time: its weights, bit by bit.
    x = torch.zeros(tokens, columns, device="cuda", dtype=torch.bfloat16)
    x[range(tokens), [7 * at % columns for at in range(tokens)]] = 1.0
    assert torch.equal(F.linear(x, coded), F.linear(x, decoded))
    x.normal_()
    bias = torch.randn(rows, device="cuda", dtype=torch.bfloat16)
    exact = x.double() @ decoded.double().t() + bias.double()
    found, dense = F.linear(x, coded, bias), F.linear(x, decoded, bias)
    assert torch.equal(bits(F.linear(x, coded, bias)), bits(found)), "other bits in another run"
    off, usual = (float((y.double() - exact).abs().max()) for y in (found, dense))
    assert off <= 1.5 * usual
    is_fused = codecs.fuses(parse(name), tokens, weight.shape, x.device)
    assert is_fused or (tokens > 16 and torch.equal(found, dense))
    if tokens > 16 and gpu(x.device).is_hopper:  # whatever the costs say
        wide = shapes.WideTile(64, 64, splits=min(2, columns // 256))
        again = codecs.product(x, coded.parts, bias, weight.shape, parse(name), setting=wide)
        assert float((again.double() - exact).abs().max()) <= 1.5 * usual


@pytest.mark.parametrize("tokens", [1, 16, 200])
def test_a_linear_that_trains_has_the_bits_of_the_dense_one(tokens: int) -> None:
    weight = trained(1024, 4096).cuda()
    coded = CodedWeight(encode(weight, "win4"), "win4", weight.shape, True)
    x = torch.randn(tokens, 4096, device="cuda", dtype=torch.bfloat16)
    assert torch.equal(F.linear(x, coded), F.linear(x, weight))


def test_a_product_can_be_captured_in_a_graph() -> None:
    weight = trained(1024, 4096).cuda()
    coded = CodedWeight(encode(weight, "tier"), "tier", weight.shape)
    x = torch.randn(3, 4096, device="cuda", dtype=torch.bfloat16)
    F.linear(x, coded)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        out = F.linear(x, coded)
    x.normal_()
    graph.replay()
    assert torch.equal(out, F.linear(x, weight))


def test_compressing_never_takes_more_than_one_tensor_beyond_the_model() -> None:
    model = nn.Sequential(*(nn.Linear(4096, 4096, bias=False) for _ in range(6)))
    model = model.to("cuda", torch.bfloat16)
    for codec in CODECS:
        compress_(nn.Linear(4096, 4096, device="cuda", dtype=torch.bfloat16), codec)  # warm up
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    report = compress_(model, "win4", progress=False)
    assert torch.cuda.max_memory_allocated() - before <= 2 * 4096 * 4096 + (1 << 20)
    freed = before - torch.cuda.memory_allocated()
    assert freed >= 0.24 * report.bytes_before
    x = torch.randn(512, 4096, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        model(x)
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        model(x)
    scratch = 2 * 4096 * 4096
    assert torch.cuda.max_memory_allocated() - held <= scratch + 4 * x.nbytes


@pytest.mark.parametrize("settings", [{}, {"weight_decay": 0.1}, {"foreach": False}], ids=str)
@pytest.mark.parametrize("codec", CODECS)
def test_a_step_in_the_gradients_memory_has_the_bits_of_sgd(
    codec: str, settings: dict[str, Any]
) -> None:
    weight = trained(1024, 4096).cuda()
    weight.view(-1)[: 4 * 8192 : 3] *= 2.0**-20  # many patches in some chunks
    gradient = trained(1024, 4096, seed=1).cuda()
    gradient.view(-1)[:5] = torch.tensor([float("nan"), float("inf"), 3e38, 1e-40, -0.0])
    held = nn.Parameter(weight.clone())
    held.grad = gradient.clone()
    optimizer = torch.optim.SGD([held], lr=0.0137, **settings)
    optimizer.step()
    by = plain_step(optimizer)
    coded = CodedWeight(encode(weight, codec, Room(0.2, 4096)), codec, weight.shape)
    assert by is not None
    assert coded.steps(gradient)
    counts = coded.step(gradient, by)
    assert torch.equal(bits(gradient), bits(held.detach()))
    coded.store_soon(gradient, counts=counts)
    assert torch.equal(bits(coded.decode()), bits(held.detach()))


@pytest.mark.parametrize("codec", CODECS)
def test_a_step_that_leaves_the_windows_loses_nothing(codec: str) -> None:
    models = [nn.Linear(1024, 1024, bias=False, device="cuda", dtype=torch.bfloat16)] * 2
    models[1] = copy.deepcopy(models[0])
    compress_(models[1], codec, progress=False)
    x = torch.randn(64, 1024, device="cuda", dtype=torch.bfloat16)
    for model in models:
        optim_in_backward(model, lambda p: torch.optim.SGD([p], lr=1e30))
        model(x).float().sum().backward()
    assert torch.equal(bits(models[0].weight.detach()), bits(models[1].weight.decode()))


def test_kernels_write_to_memory_of_the_host() -> None:
    assert make_refuge(1 << 20, torch.device("cuda")) is not None


@pytest.mark.parametrize("codec", ["win4", "tier"])
def test_values_that_do_not_fit_come_back_from_the_host_one_after_the_other(codec: str) -> None:
    """More of them than the ring holds, in weights of two sizes."""
    sizes = [1024, 2048, 1024, 1024, 2048, 1024, 1024, 1024]
    torch.manual_seed(0)
    layers = [nn.Linear(a, b, bias=False) for a, b in itertools.pairwise(sizes)]
    dense = nn.Sequential(*layers).to("cuda", torch.bfloat16)
    model = copy.deepcopy(dense)
    compress_(model, codec, progress=False)
    x = torch.randn(64, 1024, device="cuda", dtype=torch.bfloat16)
    for each in (dense, model):
        optim_in_backward(each, lambda p: torch.optim.SGD([p], lr=1e30))
        each(x).float().sum().backward()
    for found, expected in zip(model, dense, strict=True):
        assert torch.equal(bits(found.weight.decode()), bits(expected.weight.detach()))


@pytest.mark.parametrize("rows", [(4096, 1024, 1024), (14336, 14336), (130, 70, 1)], ids=str)
def test_weights_of_one_input_give_the_bits_of_each_alone(rows: tuple[int, ...]) -> None:
    columns = 4096 if rows[0] > 1000 else 768
    weights = [torch.randn(n, columns, device="cuda").mul_(0.02).to(torch.bfloat16) for n in rows]
    weights[0][::3, ::37] = 300.0
    coded = [CodedWeight(encode(w, "win4"), "win4", w.shape) for w in weights]
    biases = [torch.randn(rows[0], device="cuda", dtype=torch.bfloat16), None, None][: len(rows)]
    for tokens in (1, 2, 5, 16, 40):
        x = torch.randn(tokens, columns, device="cuda", dtype=torch.bfloat16)
        found = coded_weight_linears(x, coded, biases)
        for out, weight, bias in zip(found, coded, biases, strict=True):
            assert torch.equal(bits(out), bits(coded_weight_linear(x, weight, bias)))


@pytest.mark.parametrize("codec", ["win4", "tier"])
def test_lists_of_many_weights_take_what_they_hold(codec: str) -> None:
    with torch.device("cuda"):
        layers = [nn.Linear(4096, 4096, bias=False, dtype=torch.bfloat16) for _ in range(24)]
    model = nn.Sequential(*layers)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    report = compress_(model, codec, progress=False)
    freed = before - torch.cuda.memory_allocated()
    assert report.bytes_before - report.bytes_after - freed <= 3 << 20


@pytest.mark.parametrize("codec", ["win4", "tier"])
def test_the_host_does_not_wait_inside_a_backward(codec: str) -> None:
    layers = [nn.Linear(2048, 2048, bias=False) for _ in range(4)]
    model = nn.Sequential(*layers).to("cuda", torch.bfloat16)
    compress_(model, codec, progress=False)
    optim_in_backward(model, lambda p: torch.optim.SGD([p], lr=1e-3))
    x = torch.randn(64, 2048, device="cuda", dtype=torch.bfloat16)
    for _ in range(2):
        model(x).float().sum().backward()  # warm up
    seen: list[bool] = []
    done = torch.cuda.Event()
    for layer in layers:
        layer.weight.register_post_accumulate_grad_hook(lambda _: seen.append(done.query()))
    loss = model(x).float().sum()
    torch.cuda._sleep(2_000_000_000)
    done.record()
    loss.backward()
    assert seen == [False] * 4
    assert done.query()


@pytest.mark.parametrize("codec", ["win4", "tier"])
def test_a_step_keeps_no_dense_weight(codec: str) -> None:
    """Besides its gradient, which a dense weight has too, an update takes almost no memory."""
    size = 4096
    model = nn.Linear(size, size, bias=False, device="cuda", dtype=torch.bfloat16)
    compress_(model, codec, progress=False)
    optim_in_backward(model, lambda p: torch.optim.SGD([p], lr=1e-7))
    x = torch.randn(64, size, device="cuda", dtype=torch.bfloat16)
    for _ in range(2):
        model(x).float().sum().backward()
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    out = model(x).float().sum()
    torch.cuda.reset_peak_memory_stats()
    out.backward()
    assert torch.cuda.max_memory_allocated() - held <= 2 * size * size + (8 << 20)


@pytest.mark.parametrize("factory", ["SGD", "AdamW"])
@pytest.mark.parametrize("codec", CODECS)
def test_training_steps_equal_the_dense_run(codec: str, factory: str) -> None:
    torch.manual_seed(0)
    layers = [
        nn.Linear(1024, 1024),
        nn.SiLU(),
        nn.Linear(1024, 1024),
        nn.SiLU(),
        nn.Linear(1024, 8),
    ]
    dense = nn.Sequential(*layers).to("cuda", torch.bfloat16)
    model = nn.Sequential(*(type(m)(*_sizes(m)) for m in layers)).to("cuda", torch.bfloat16)
    model.load_state_dict(dense.state_dict())
    assert len(compress_(model, codec, progress=False).compressed) == 2
    x = torch.randn(256, 1024, device="cuda", dtype=torch.bfloat16)
    for each in (dense, model):
        optim_in_backward(each, lambda p: getattr(torch.optim, factory)([p], lr=1e-2))
        for _ in range(20):
            each(x).float().square().mean().backward()
    state = dense.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def _sizes(module: nn.Module) -> tuple[int, ...]:
    return (module.in_features, module.out_features) if isinstance(module, nn.Linear) else ()
