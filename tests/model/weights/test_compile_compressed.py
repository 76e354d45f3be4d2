"""compile(model, weights="win4") is compress_ and compile; torch.compile alone refuses a codec."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memeff_compile
from memeff_compile.errors import CodedWeightError, OptionError
from memeff_compile.kernels.coded_weight import CODECS, CodedWeight
from memeff_compile.model.weights.compress import compress_, compressed_weights, compression_report

IDS = torch.arange(8).view(2, 4)


@pytest.fixture(autouse=True)
def small_weights(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Take small weights for large ones."""
    inner: Any = compress_.__wrapped__  # type: ignore[attr-defined]
    settings = {**inner.__kwdefaults__, "min_size": 0, "progress": False}
    monkeypatch.setattr(inner, "__kwdefaults__", settings)
    memeff_compile.reset()
    yield
    torch._dynamo.reset()


class Model(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(32, 128)
        self.up = nn.Linear(128, 256)
        self.lm_head = nn.Linear(256, 32, bias=False)
        self.to(torch.bfloat16)

    def forward(self, ids: Tensor) -> Tensor:
        found = self.lm_head(torch.relu(self.up(self.embed(ids))))
        assert isinstance(found, Tensor)
        return found


def compiled(model: Any, codec: str = "win4", **settings: Any) -> Any:
    return memeff_compile.compile(model, weights=codec, inner="aot_eager", **settings)


def rewrites() -> int:
    records = memeff_compile.last_report().records
    return sum(r.action == "rewrote" and r.pass_name == "encode_weights" for r in records)


@pytest.mark.parametrize("codec", CODECS)
def test_a_model_is_compressed_before_its_first_call(codec: str) -> None:
    model, twin = Model(), Model()
    made = compiled(model, codec)
    assert isinstance(model.up.weight, CodedWeight)
    assert model.up.weight.codec == codec
    report = compression_report(made)
    assert report is compression_report(model) is not None
    assert report is not None
    assert [each.name for each in report.compressed] == ["up.weight"]
    assert "skip names 'lm_head'" in str(report)
    with torch.no_grad():
        assert torch.equal(made(IDS), twin(IDS))
    assert rewrites() == 1


@pytest.mark.parametrize("mantissa", [3, 1, 0])
def test_a_lossy_codec_is_compress_with_so_many_mantissa_bits(mantissa: int) -> None:
    model, twin = Model(), Model()
    made = compiled(model, f"win4:k{mantissa}")
    compress_(twin, mantissa=mantissa)
    assert isinstance(model.up.weight, CodedWeight)
    assert model.up.weight.codec == f"win4:k{mantissa}:b512"
    assert not model.up.weight.requires_grad
    with torch.no_grad():
        assert torch.equal(made(IDS), twin(IDS))
    assert rewrites() == 1
    options = {"memeff.weights": f"win4:k{mantissa}"}
    with pytest.raises(Exception, match="a backend cannot compress"):
        torch.compile(Model(), backend="memeff", options=options)(IDS)


def test_compiled_embeddings_and_conv1d_train_on_the_bits_of_dense_ones() -> None:
    from transformers.pytorch_utils import Conv1D

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.table = nn.Embedding(128, 128)
            self.mix = Conv1D(256, 128)
            self.back = Conv1D(128, 256)
            self.head = nn.Linear(128, 128, bias=False)
            self.head.weight = self.table.weight
            self.to(torch.bfloat16)

        def forward(self, ids: Tensor) -> Tensor:
            found = self.head(self.back(torch.relu(self.mix(self.table(ids)))))
            assert isinstance(found, Tensor)
            return found

    found = []
    for layers in ((), ("Linear", "Conv1D", "Embedding")):
        model = Tied()
        if layers:
            assert len(compress_(model, layers=layers, skip=()).compressed) == 3
        made = memeff_compile.compile(model, inner="aot_eager")
        for ids in (IDS, IDS + 1):
            made(ids).float().square().mean().backward()
        found.append([p.grad for p in model.parameters()])
        torch._dynamo.reset()
    assert len(found[0]) == 5
    assert all(map(torch.equal, *found))


def test_every_instance_is_compressed_with_its_own_codec() -> None:
    """Dynamo runs the code of the first instance for the second without asking a backend."""
    models = [Model(seed) for seed in range(3)]
    with torch.no_grad():
        for seed, (model, codec) in enumerate(zip(models, ("win4", "win4", "tier"), strict=True)):
            assert torch.equal(compiled(model, codec)(IDS), Model(seed)(IDS))
    held = [model.up.weight for model in models]
    assert [weight.codec for weight in held if isinstance(weight, CodedWeight)] == [
        "win4",
        "win4",
        "tier",
    ]


def test_layers_compiled_one_by_one_are_compressed() -> None:
    model, twin = nn.Sequential(Model(), nn.Linear(32, 512).bfloat16()), None
    twin = copy.deepcopy(model)
    for at, layer in enumerate(model):
        model[at] = compiled(layer)
    assert len(compressed_weights(model)) == 2
    with torch.no_grad():
        assert torch.equal(model(IDS), twin(IDS))


def test_compiling_twice_compresses_once_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    model = Model()
    compiled(compiled(model))
    assert isinstance(model.up.weight, CodedWeight)
    report = compression_report(model)
    assert report is not None
    assert "compressed already" in str(report)
    assert not caplog.records


def test_memeff_skip_is_heeded_and_nothing_compressed_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = Model()
    with caplog.at_level(logging.WARNING):
        compiled(model, skip={"encode_weights": ["up"]})
    assert type(model.up.weight) is nn.Parameter
    assert "compressed nothing" in caplog.text
    assert "skip names 'up'" in caplog.text


def test_weights_that_train_are_compressed_and_an_optimizer_is_refused() -> None:
    model = Model()
    made = compiled(model)
    made(IDS).float().sum().backward()
    with pytest.raises(CodedWeightError, match="optim_in_backward"):
        torch.optim.SGD(model.parameters(), lr=1.0).step()
    assert torch.equal(model.embed.weight, Model().embed.weight)


def test_as_a_decorator_it_compresses_what_it_is_given() -> None:
    model = Model()
    made = memeff_compile.compile(weights="win4", inner="aot_eager")(model)
    assert isinstance(model.up.weight, CodedWeight)
    assert compression_report(made) is not None


def a_function(model: Model) -> Callable[[Tensor], Tensor]:
    return lambda ids: model(ids)


def a_method(model: Model) -> Callable[[Tensor], Tensor]:
    return model.forward


@pytest.mark.parametrize("make", [a_function, a_method])
def test_a_function_has_no_weights_and_is_refused(make: Callable[[Model], Any]) -> None:
    model = Model()
    with pytest.raises(OptionError, match=r"compress_\(module, 'win4'\)"):
        compiled(make(model))
    assert type(model.up.weight) is nn.Parameter


@pytest.mark.parametrize("codec", CODECS)
def test_torch_compile_refuses_a_codec_and_names_the_verb(codec: str) -> None:
    model = Model()
    options = {"memeff.inner": "aot_eager", "memeff.weights": codec}
    made = torch.compile(model, backend="memeff", options=options)
    with pytest.raises(Exception, match=rf"compress_\(model, '{codec}'\)") as caught:
        made(IDS)
    assert isinstance(getattr(caught.value, "inner_exception", caught.value), OptionError)
    assert type(model.up.weight) is nn.Parameter


def test_a_model_that_was_not_compressed_has_no_report() -> None:
    assert compression_report(Model()) is None
    with torch.no_grad():
        memeff_compile.compile(Model(), inner="aot_eager")(IDS)
    assert not rewrites()
