"""Properties of a GPU, and that no NVIDIA kernel runs on another vendor's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from memeff_compile.kernels import (
    attention,
    coded_kv_cache,
    coded_weight,
    device,
    embedding,
    gated_linear,
    kv_cache,
    linear_cross_entropy,
    quantized_attention,
    ternary_linear,
)
from memeff_compile.kernels._triton.gpus import AMD, GPUS, H200, NVIDIA, gpu_of
from memeff_compile.kernels.attention.op import served
from memeff_compile.kernels.coded_weight import codecs, parse
from memeff_compile.kernels.quantized_attention.op import has_fp8
from memeff_compile.passes import recover_attention

CUDA = torch.device("cuda", 0)
HALF = torch.bfloat16


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Return a function that makes PyTorch find one GPU, of a capability and with or without
    ROCm.
    """
    caches = (device._gpu, device._has_gpu, device._processors, device.runs_kernels)

    def pretend(capability: tuple[int, int], hip: str | None = None) -> None:
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index=0: "a GPU")
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=0: capability)
        for cache in caches:
            cache.cache_clear()

    yield pretend
    monkeypatch.undo()
    for cache in caches:
        cache.cache_clear()


ENGINES: dict[str, Callable[[], str]] = {
    "attention": lambda: attention.engine_for(CUDA, HALF, 64),
    "coded_kv_cache": lambda: coded_kv_cache.engine_for(CUDA, HALF),
    "coded_weight": lambda: coded_weight.engine_for(CUDA),
    "embedding": lambda: embedding.engine_for(CUDA, HALF),
    "gated_linear": lambda: gated_linear.engine_for(CUDA, HALF),
    "kv_cache": lambda: kv_cache.engine_for(CUDA, HALF),
    "linear_cross_entropy": lambda: linear_cross_entropy.engine_for(CUDA, HALF),
    "quantized_attention": lambda: quantized_attention.engine_for(CUDA, HALF),
    "ternary_linear": lambda: ternary_linear.engine_for(CUDA, HALF),
}
# As ROCm numbers them: MI200, MI300, MI350, and cards of RDNA 2 to 4.
OF_AMD = [(9, 0), (9, 4), (9, 5), (10, 3), (11, 0), (12, 0)]


@pytest.mark.parametrize("capability", OF_AMD, ids=str)
@pytest.mark.parametrize("op", list(ENGINES))
def test_no_kernel_of_ours_runs_on_a_gpu_of_amd(
    op: str, capability: tuple[int, int], found: Callable[..., None]
) -> None:
    found(capability, "6.4")
    assert ENGINES[op]() == "reference"


@pytest.mark.parametrize("op", list(ENGINES))
def test_kernels_run_on_hopper_and_not_before_capability_8(
    op: str, found: Callable[..., None]
) -> None:
    found((9, 0))
    assert ENGINES[op]() != "reference"
    found((7, 5))
    assert ENGINES[op]() == "reference"


@pytest.mark.parametrize("capability", OF_AMD, ids=str)
def test_nothing_that_only_nvidia_has_is_asked_of_amd(
    capability: tuple[int, int], found: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    found(capability, "6.4")
    monkeypatch.setattr(codecs, "processors", lambda _: 132)
    gpu = device.gpu(CUDA)
    assert (gpu.vendor, gpu.kind, gpu.measured) == (AMD, "narrow", frozenset())
    assert not any((gpu.is_hopper, gpu.has_fp8, gpu.has_descriptors, gpu.starts_early))
    assert not has_fp8(CUDA)
    assert not device.starts_early(CUDA)
    assert codecs.setting_of(64, (4096, 12288), CUDA) is None
    assert not device.was_measured(CUDA, "attention")
    assert "need triton and an NVIDIA GPU" in served(CUDA, HALF, 64)


@pytest.mark.parametrize("has_gluon", [True, False])
def test_several_tokens_decode_first_where_gluon_is_missing(
    has_gluon: bool, found: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    found((9, 0))
    monkeypatch.setattr(codecs, "processors", lambda _: 132)
    monkeypatch.setattr(codecs, "has_gluon", lambda: has_gluon)
    fused = [codecs.fuses(parse("win4"), n, (14336, 4096), CUDA) for n in (0, 1, 2, 16, 64)]
    assert fused == [False, True, *[has_gluon] * 3]


def test_heads_stay_expanded_on_a_gpu_of_amd(found: Callable[..., None]) -> None:
    """Facts about PyTorch's kernels for grouped heads hold for NVIDIA's GPUs only."""
    fake = SimpleNamespace(device=CUDA, dtype=HALF, shape=(1, 4, 64, 64))
    each = SimpleNamespace(value=fake)
    ask = recover_attention.why_not_grouped
    info, site = Mock(value=lambda node: fake), Mock(operands=[each] * 3)
    found((9, 0), "6.4")
    assert ask(info, site) == "no kernel for grouped heads is known on GPUs other than NVIDIA's"
    found((7, 5))
    assert ask(info, site).endswith("need compute capability 8.0")
    found((9, 0))
    assert ask(info, site) == ""


def test_a_planned_device_is_a_hopper_whatever_gpu_is_here(found: Callable[..., None]) -> None:
    found((9, 4), "6.4")
    with device.planned_for(CUDA):
        assert device.gpu(torch.device("cpu")) is H200
        assert device.was_measured(torch.device("cpu"), "attention")
        assert ENGINES["attention"]() != "reference"


def test_a_gpu_without_a_row_is_the_narrowest() -> None:
    assert gpu_of((8, 6))._replace(capability=(8, 9)) == GPUS[8, 9]
    assert min(gpu.shared for gpu in GPUS.values()) == gpu_of((12, 0)).shared
    assert gpu_of((12, 0)).has_fp8
    assert not gpu_of((8, 6)).has_fp8
    assert gpu_of((9, 4), AMD) == (AMD, (9, 4), "narrow", 99 << 10, frozenset())
    assert all(gpu.vendor == NVIDIA for gpu in GPUS.values())
