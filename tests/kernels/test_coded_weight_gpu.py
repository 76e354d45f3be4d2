"""Coded weights on a GPU: every bit, products against cuBLAS, memory, and models."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from memeff_compile.kernels.coded_weight import CODECS, CodedWeight, Room, encode, launch, parse
from memeff_compile.model.compress import compress_
from memeff_compile.model.optim_in_backward import optim_in_backward, plain_step
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
    found = coded.step(gradient, by)
    assert torch.equal(bits(found), bits(held.detach()))
    coded.store_soon(found)
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


@pytest.mark.parametrize("codec", ["win4", "tier"])
def test_the_host_does_not_wait_inside_a_backward(codec: str) -> None:
    """Few weights are ahead; with more, it waits for the one before the last two, not the last."""
    model = nn.Linear(2048, 2048, bias=False, device="cuda", dtype=torch.bfloat16)
    compress_(model, codec, progress=False)
    optim_in_backward(model, lambda p: torch.optim.SGD([p], lr=1e-3))
    x = torch.randn(64, 2048, device="cuda", dtype=torch.bfloat16)
    model(x).float().sum().backward()  # warm up
    seen: list[bool] = []
    done = torch.cuda.Event()

    def after(_: object) -> None:
        seen.append(done.query())

    model.weight.register_post_accumulate_grad_hook(after)
    loss = model(x).float().sum()
    torch.cuda._sleep(1_000_000_000)
    done.record()
    loss.backward()
    assert seen == [False]


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
