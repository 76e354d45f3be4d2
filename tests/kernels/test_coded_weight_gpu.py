"""Coded weights on a GPU: every bit, products against cuBLAS, memory, and models."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from memeff_compile.kernels.coded_weight import CODECS, CodedWeight, Room, encode, launch, parse
from memeff_compile.model.compress import compress_
from memeff_compile.model.optim_in_backward import optim_in_backward
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


@pytest.mark.parametrize("tokens", [1, 2, 16, 17, 64, 65, 300])
@pytest.mark.parametrize(("rows", "columns"), [(33, 256), (4096, 14336), (14336, 4096)])
def test_a_linear_is_as_close_as_the_dense_one(rows: int, columns: int, tokens: int) -> None:
    weight = trained(rows, columns).cuda()
    weight.view(-1)[:: rows * 7] = 300.0
    coded = CodedWeight(encode(weight, "win4"), "win4", weight.shape)
    x = torch.randn(tokens, columns, device="cuda", dtype=torch.bfloat16)
    bias = torch.randn(rows, device="cuda", dtype=torch.bfloat16)
    exact = x.double() @ weight.double().t() + bias.double()
    found, dense = F.linear(x, coded, bias), F.linear(x, weight, bias)
    off, usual = (float((y.double() - exact).abs().max()) for y in (found, dense))
    assert off <= 1.5 * usual
    if not launch.fuses(parse("win4"), tokens, weight.shape):
        assert torch.equal(found, dense)


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


@pytest.mark.parametrize("codec", CODECS)
def test_training_steps_equal_the_dense_run(codec: str) -> None:
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
        optim_in_backward(each, lambda p: torch.optim.AdamW([p], lr=1e-3))
        for _ in range(5):
            each(x).float().square().mean().backward()
    state = dense.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def _sizes(module: nn.Module) -> tuple[int, ...]:
    return (module.in_features, module.out_features) if isinstance(module, nn.Linear) else ()
