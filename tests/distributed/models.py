"""A model small enough for two processes on two cores, and how two runs of it are compared."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import memeff_compile
from memeff_compile.logits.tensor import DeferredLogits

VOCABULARY, LENGTH = 160, 12
OPTIONS = {"memeff.inner": "eager"}
"""Of models compiled here; the slow tests go through AOTAutograd, too."""
AOTAUTOGRAD = {"memeff.inner": "aot_eager"}
TRAINING = {"rewrote", "logits_deferred"}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Small(nn.Module):
    """Embedding, block, head; returns the loss and the logits."""

    def __init__(self, width: int = 16, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.block = nn.Embedding(vocabulary, width), Block(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(self.block(self.embed(ids)))
        return F.cross_entropy(logits.flatten(0, 1).float(), ids.roll(-1).flatten()), logits


class LogitsOnly(Small):
    """Leaves the loss to its caller."""

    def forward(self, ids: Tensor) -> Tensor:  # type: ignore[override]
        return self.head(self.block(self.embed(ids)))


def outside_loss(logits: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), ids().roll(-1).flatten())


def assert_served_outside(count: int) -> None:
    """Each of `count` losses used the fused op, without computing logits or their gradient."""
    uses = [g.logits for g in memeff_compile.last_report().graphs if g.logits is not None]
    assert [use.fused for use in uses] == [{"cross_entropy": count}]
    assert [use.computed for use in uses] == [{}]


def ids() -> Tensor:
    """Return ids; each rank has different rows."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    return torch.randint(3, 101, (2, LENGTH), generator=generator)


def whole(tensor: Tensor) -> Tensor:
    full: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full.clone()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def assert_same_gradients(
    actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-5
) -> None:
    assert actual.keys() == expected.keys()
    typical = torch.stack([g.norm() for g in expected.values()]).square().mean().sqrt()
    for name, gradient in expected.items():
        bound = tolerance * max(gradient.norm(), 1e-3 * typical)
        assert (actual[name] - gradient).norm() <= bound, name


def assert_ranks_agree(gradients: dict[str, Tensor]) -> None:
    for name, gradient in gradients.items():
        first = gradient.clone()
        dist.broadcast(first, 0)
        assert torch.equal(gradient, first), name


def fresh_start() -> None:
    torch._dynamo.reset()
    memeff_compile.reset()


def codes() -> set[str]:
    records = memeff_compile.last_report().records
    of_blocks = ("expand_multihead", "recover_attention", "fuse_gated_linear")
    return {r.code for r in records if r.pass_name not in of_blocks}


def assert_deferred(logits: object, products: int = 0) -> None:
    assert isinstance(logits, DeferredLogits)
    assert logits.materialisations == products
