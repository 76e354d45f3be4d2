"""torchtitan's chunked loss with our op: with the installed torchtitan, or a stand-in for it.

torchtitan 0.3 pins datasets below the version that TRL needs, so no environment of this project has
both.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

STAND_IN = """
from dataclasses import dataclass, field, fields
from torch.nn import functional as F

@dataclass(kw_only=True, slots=True)
class _Config:
    owner = None
    def build(self, **given):
        return type(self).made(self, **given)

class CrossEntropyLoss:
    @dataclass(kw_only=True, slots=True)
    class Config(_Config):
        pass
    def __init__(self, config, **given):
        pass
    def __call__(self, pred, labels, valid=None):
        loss = F.cross_entropy(pred.flatten(0, 1).float(), labels.flatten(), reduction="sum")
        return loss if valid is None else loss / valid, {}

class MSELoss(CrossEntropyLoss):
    @dataclass(kw_only=True, slots=True)
    class Config(_Config):
        pass

class ChunkedLossWrapper:
    @dataclass(kw_only=True, slots=True)
    class Config(_Config):
        num_chunks: int = 8
        loss_fn: object = field(default_factory=CrossEntropyLoss.Config)
    def __init__(self, config, **given):
        self.num_chunks, self.loss_fn = config.num_chunks, CrossEntropyLoss(config.loss_fn)
        self.lm_head = None
    def __init_subclass__(cls):
        cls.Config.made = cls
    def set_lm_head(self, lm_head):
        self.lm_head = lm_head
    def __call__(self, pred, labels, valid=None):
        chunks = zip(pred.chunk(self.num_chunks, 1), labels.chunk(self.num_chunks, 1))
        return sum(self.loss_fn(self.lm_head(h), y, valid)[0] for h, y in chunks), {}

ChunkedLossWrapper.Config.made = ChunkedLossWrapper

def derive(source, target_cls, **deltas):
    return target_cls(**{f.name: getattr(source, f.name) for f in fields(source)}, **deltas)

def override(*, target, description, exact):
    return lambda factory: factory

def get_spmd_backend():
    return "default"

def spmd_mesh_size(name):
    return 1

def _maybe_regional_inductor_backend(model, backend):
    if backend == "inductor":
        return backend
    raise ValueError("Model uses FlexAttention")
"""
MODULES = (
    *("components.loss", "config", "distributed.compile"),
    *("distributed.spmd_types", "distributed.utils"),
)


@pytest.fixture(scope="module")
def ours() -> Iterator[Any]:
    """Return our module for torchtitan."""
    name = "memeff_compile.integrations.torchtitan"
    sys.modules.pop(name, None)  # another test may have imported it without torchtitan
    with pytest.MonkeyPatch.context() as patch:
        try:
            import_module("torchtitan.components.loss")
        except ImportError:
            made = ModuleType("torchtitan")
            for each in ("", ".components", ".distributed", *(f".{one}" for one in MODULES)):
                patch.setitem(sys.modules, f"torchtitan{each}", made)
            exec(STAND_IN, made.__dict__)
            made.compile = made  # type: ignore[attr-defined]
        yield import_module(name)
    sys.modules.pop(name, None)


class Decoder(nn.Module):
    """A decoder whose forward stops before its output projection, as in torchtitan."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.lm_head = nn.Linear(16, 16), nn.Linear(16, 64, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def train(config: Any, model: Decoder) -> tuple[Tensor, dict[str, Tensor], Tensor, Any]:
    """Return the loss, gradients and a validation loss of the second of two steps."""
    loss = config.build()
    loss.set_lm_head(model.lm_head)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 8, 16, generator=generator)
    labels = torch.randint(0, 64, (2, 8), generator=generator)
    labels[0, :3] = -100
    for _ in range(2):
        model.zero_grad()
        value, metrics = loss(model(x), labels, torch.tensor(13.0))
        value.backward()
    assert metrics == {}
    whole = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    gradients = {name: getattr(g, "full_tensor", g.clone)() for name, g in whole.items()}
    with torch.no_grad():
        validated = loss(model(x), labels)[0]
    return value.detach(), gradients, validated, loss


def assert_same_training(ours: Any, model: Decoder, other: Decoder) -> Any:
    """Compare with torchtitan's chunks; return our loss."""
    chunks = ours.ChunkedLossWrapper.Config(num_chunks=4)
    expected = train(chunks, other)
    actual = train(ours.fused_loss(chunks), model)
    for one, two in zip(actual[:3], expected[:3], strict=True):
        torch.testing.assert_close(one, two)
    return actual[3]


@pytest.mark.parametrize("bias", [False, True])
def test_the_loss_and_its_gradients_are_those_of_the_chunks_and_the_head_is_not_called(
    ours: Any, bias: bool
) -> None:
    model = Decoder(bias)
    loss = assert_same_training(ours, model, Decoder(bias))
    assert type(loss).__name__ == "FusedLoss"
    assert "memeff_loss" in vars(model.lm_head)


def test_a_head_that_fsdp2_shards_is_gathered_for_the_loss(ours: Any) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        models = Decoder(), Decoder()
        for model in models:
            for module in (model.body, model.lm_head, model):
                fully_shard(module)
        assert_same_training(ours, *models)
        assert "memeff_loss" in vars(models[0].lm_head)
    finally:
        dist.destroy_process_group()


class Doubled(nn.Linear):
    """A subclass of nn.Linear that computes another function."""

    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def hooked(model: Decoder) -> None:
    model.lm_head.register_forward_hook(lambda module, given, found: 2 * found)


def replaced(model: Decoder) -> None:
    torch.manual_seed(0)
    model.lm_head = Doubled(16, 64, bias=False)


@pytest.mark.parametrize(
    ("change", "said"), [(hooked, "has forward hooks"), (replaced, "is a Doubled, and no plain")]
)
def test_another_head_is_left_to_torchtitan_with_the_reason(
    ours: Any, change: Any, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    models = Decoder(), Decoder()
    for model in models:
        change(model)
    assert_same_training(ours, *models)
    assert "memeff_loss" not in vars(models[0].lm_head)
    assert said in caplog.text


def test_a_head_split_by_tensor_parallelism_is_left_to_torchtitan(
    ours: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ours, "get_spmd_backend", lambda: "spmd_types")
    monkeypatch.setattr(ours, "spmd_mesh_size", lambda name: 2)
    loss = ours.fused_loss(ours.ChunkedLossWrapper.Config(num_chunks=4)).build()
    loss.set_lm_head(Decoder().lm_head)
    assert "tensor parallelism" in (ours._unserved(loss.lm_head) or "")


def test_a_chunked_loss_of_another_kind_stays(ours: Any, caplog: pytest.LogCaptureFixture) -> None:
    other = import_module("torchtitan.components.loss").MSELoss.Config()
    config = ours.ChunkedLossWrapper.Config(loss_fn=other)
    assert ours.fused_loss(config) is config
    assert "no cross entropy" in caplog.text


def test_blocks_with_flex_attention_are_compiled_by_this_backend(ours: Any) -> None:
    kind: type[nn.Module] = nn.Identity  # a stand-in refuses every model
    with suppress(ImportError):
        kind = import_module("torchtitan.models.common.attention").FlexAttention
    model = nn.Module()
    model.attention = kind.__new__(kind)
    nn.Module.__init__(model.attention)
    choose = import_module("torchtitan.distributed.compile")._maybe_regional_inductor_backend
    assert choose(model, "memeff") == "memeff"
    assert choose(model, "inductor") == "inductor"
    with pytest.raises(ValueError, match="uses FlexAttention"):
        choose(model, "eager")
