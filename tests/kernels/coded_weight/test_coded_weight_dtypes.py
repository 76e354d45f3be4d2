"""Weights of fp32 and fp16: every bit comes back, and models with them train, save and load."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memeff_compile
from memeff_compile.errors import OptionError, UnsupportedInputError
from memeff_compile.kernels.coded_weight import CodedWeight, encode, parse, supports_weight
from memeff_compile.kernels.coded_weight.dtypes import DTYPES
from memeff_compile.model.weights.compress import compress_, decompress_
from memeff_compile.model.weights.compressed_file import load_compressed_, save_compressed
from memeff_compile.model.weights.optim_in_backward import optim_in_backward

CODECS = [f"{codec}:{dtype}" for codec in ("win4", "tier", "rans") for dtype in ("fp32", "fp16")]
MODELS = ["tier:fp32", "tier:fp16"]


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.detach().contiguous().view(torch.int16 if x.element_size() == 2 else torch.int32)


def layers(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 128), nn.SiLU(), nn.Linear(128, 256, bias=False)).to(dtype)


def compressed(codec: str) -> tuple[nn.Sequential, nn.Sequential]:
    dense = layers(DTYPES[parse(codec).dtype])
    model = copy.deepcopy(dense)
    compress_(model, codec, min_size=1, progress=False)
    assert all(isinstance(model[at].weight, CodedWeight) for at in (0, 2))
    return dense, model


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("shape", [(1,), (7,), (3, 8193)], ids=str)
def test_every_bit_comes_back(codec: str, shape: tuple[int, ...]) -> None:
    dtype = DTYPES[parse(codec).dtype]
    kind = torch.int32 if dtype == torch.float32 else torch.int16
    limits = torch.iinfo(kind)
    patterns = torch.randint(limits.min, limits.max, shape, dtype=kind)
    special = torch.tensor([float("nan"), float("-inf"), -0.0, 1e-7, 6e4]).to(dtype).view(kind)
    patterns.view(-1)[: len(special)] = special[: patterns.numel()]
    weight = patterns.view(dtype)
    coded = CodedWeight(encode(weight, codec), codec, shape)
    assert coded.dtype == dtype
    assert torch.equal(bits(coded.decode()), patterns)


@pytest.mark.parametrize(
    ("codec", "most"),
    [("win4:fp32", 28.1), ("tier:fp32", 27.2), ("tier:fp16", 14.2), ("rans:fp16", 14.1)],
)
def test_exponents_of_other_dtypes_are_coded_too(codec: str, most: float) -> None:
    weight = (torch.randn(1024, 256) * 0.02).to(DTYPES[parse(codec).dtype])
    size = sum(part.nbytes for part in encode(weight, codec))
    assert 8 * size / weight.numel() <= most


@pytest.mark.parametrize("codec", MODELS)
def test_linears_have_the_dense_layers_bits(codec: str) -> None:
    dense, model = compressed(codec)
    x = torch.randn(5, 256).to(dense[0].weight.dtype)
    assert torch.equal(bits(model(x)), bits(dense(x)))
    with pytest.raises((UnsupportedInputError, RuntimeError), match="dtype"):
        model(x.bfloat16())


@pytest.mark.parametrize("codec", MODELS)
def test_steps_in_the_backward_have_the_dense_bits(codec: str) -> None:
    models = compressed(codec)
    x = torch.randn(8, 256).to(models[0][0].weight.dtype)
    for each in models:
        optim_in_backward(each, torch.optim.SGD, lr=0.05)
        for _ in range(3):
            each(x).float().square().mean().backward()
    for at in (0, 2):
        coded, expected = models[1][at].weight, models[0][at].weight
        assert isinstance(coded, CodedWeight)
        assert torch.equal(bits(coded.decode()), bits(expected))


@pytest.mark.parametrize("codec", MODELS)
def test_a_value_outside_the_windows_is_encoded_again(codec: str) -> None:
    _, model = compressed(codec)
    weight: Any = model[0].weight
    scales = 10.0 ** torch.arange(-4, 4).repeat(32)
    value = (torch.rand(128, 256) * scales).to(weight.dtype)
    with torch.no_grad():
        weight.copy_(value)
    assert torch.equal(bits(weight.decode()), bits(value))


@pytest.mark.parametrize("codec", MODELS)
def test_the_pass_runs_them_in_a_compiled_model(codec: str) -> None:
    dense, model = compressed(codec)
    x = torch.randn(4, 256).to(dense[0].weight.dtype)
    options = {"memeff.inner": "aot_eager"}
    found = torch.compile(model, backend="memeff", options=options)(x)
    assert sum(r.sites for r in memeff_compile.last_report().records) == 2
    assert torch.equal(bits(found), bits(dense(x)))
    size = 128 * 256 * dense[0].weight.element_size() // 1024
    assert f"{size}.0 KiB of decoded weight" in memeff_compile.last_report().records[0].sentence


@pytest.mark.parametrize("codec", MODELS)
def test_files_keep_codes_and_dtype(codec: str, tmp_path: Path) -> None:
    dense, model = compressed(codec)
    save_compressed(model, tmp_path / "codes.safetensors")
    fresh = layers(dense[0].weight.dtype)
    nn.init.zeros_(fresh[0].weight)
    load_compressed_(fresh, tmp_path / "codes.safetensors")
    assert isinstance(fresh[0].weight, CodedWeight)
    assert torch.equal(bits(fresh[0].weight.decode()), bits(dense[0].weight))
    assert torch.equal(bits(model.state_dict()["2.weight"]), bits(dense[2].weight))
    decompress_(model)
    assert torch.equal(bits(model[2].weight), bits(dense[2].weight))


def test_autocast_computes_in_its_dtype() -> None:
    dense, model = compressed("tier:fp32")
    x = torch.randn(5, 256)
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = model(x), dense(x)
        compiled = torch.compile(model, backend="memeff", options={"memeff.inner": "eager"})(x)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, expected)
    assert torch.equal(compiled, expected)
    (record,) = {r.code for r in memeff_compile.last_report().records if "other_dtype" in r.code}
    assert record == "other_dtype(bfloat16)"


def test_each_codec_takes_one_dtype() -> None:
    weight = torch.randn(64, 64)
    said = supports_weight(weight, "win4")
    assert said is not None
    assert "'tier:fp32' codes float32" in said
    half = supports_weight(weight.half(), "tier:fp32")
    assert half is not None
    assert "'tier:fp16' codes float16" in half
    report = compress_(layers(torch.bfloat16), "tier:fp32", min_size=1, progress=False)
    assert not report.compressed
    assert "'tier' codes bfloat16" in str(report)
    with pytest.raises(OptionError, match="tier:fp32:k3"):
        compress_(layers(torch.float32), "tier:fp32", mantissa=3, progress=False)
