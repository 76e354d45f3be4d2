"""Every way to write a loss after a linear head, with half of its classes in each of two
processes.
"""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.distributions import Categorical
from torch.nn import functional as F

import memeff_compile
from tests.distributed.models import assert_same_gradients, gradients
from tests.distributed.processes import TwoProcesses
from tests.distributed.test_tensor_parallel import compiled, mesh
from tests.support import surfaces
from tests.support.surfaces import SURFACES, D, Surface, V, batch


def by_module(x: Tensor, head: nn.Module, bias: Tensor | None = None) -> Tensor:
    """Compute F.linear through a module."""
    logits: Tensor = head(x)
    return logits


def loss_and_accuracy(h: Tensor, w: nn.Module, b: Tensor, y: Tensor) -> Tensor:
    logits = by_module(h, w).float()
    loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
    with torch.no_grad():
        right = sum((each == y).sum() for each in (logits.argmax(-1), logits.max(-1).indices))
    return loss + right


def loss_and_its_first(h: Tensor, w: nn.Module, b: Tensor, y: Tensor) -> Tensor:
    logits = by_module(h, w)
    first = logits.detach().topk(1).indices.squeeze(-1)
    loss = F.cross_entropy(logits.transpose(1, 2), y.clamp(min=0), ignore_index=0)
    return loss + (first == y).sum()


def policy_gradient(h: Tensor, w: nn.Module, b: Tensor, y: Tensor) -> Tensor:
    policy = Categorical(logits=by_module(h, w))
    return -policy.log_prob(y.clamp(min=0)).mean() - 0.1 * policy.entropy().mean()


def entropy_by_entr(h: Tensor, w: nn.Module, b: Tensor, y: Tensor) -> Tensor:
    logits = by_module(h, w).float()
    entropy = torch.special.entr(logits.softmax(-1)).sum(-1)
    return F.cross_entropy(logits.flatten(0, 1), y.flatten()) + entropy.square().mean()


def entropy_by_mean_logit(h: Tensor, w: nn.Module, b: Tensor, y: Tensor) -> Tensor:
    logits = by_module(h, w).float()
    entropy = logits.logsumexp(-1) - (logits.softmax(-1) * logits).sum(-1)
    return F.cross_entropy(logits.flatten(0, 1), y.flatten()) + entropy.mean()


def second_loss_of_detached_logits(h: Tensor, w: nn.Module, b: Tensor, y: Tensor) -> Tensor:
    logits, y = by_module(h, w).float().flatten(0, 1), y.flatten()
    return F.cross_entropy(logits, y) + F.cross_entropy(logits.detach(), y, reduction="sum")


METRICS = {
    f.__name__: f
    for f in (
        *(loss_and_accuracy, loss_and_its_first, policy_gradient, entropy_by_entr),
        *(entropy_by_mean_logit, second_loss_of_detached_logits),
    )
}
EVERY = {n: s for n, s in SURFACES.items() if "linear" in s.__code__.co_names} | METRICS
DECLINED = dict.fromkeys(("vector_bias_after", "scaled_then_bias"), "vector with a gradient")
"""Cases that eager computes, and why: such a vector's gradients would have to be summed over
ranks.
"""


class Model(nn.Module):
    """A surface whose head is a module, which can be split."""

    def __init__(self, surface: Surface) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.head = nn.Linear(D, D), nn.Linear(D, V)
        self.bias = nn.Parameter(torch.randn(V))
        self.surface = surface

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.surface(self.trunk(x), self.head, self.bias, y)  # type: ignore[arg-type]


def every_surface() -> None:
    """All but two have the fused loss, and all the loss and gradients of one process."""
    spread = ModuleType("spread")
    vars(spread).update(vars(F), linear=by_module)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(surfaces, "F", spread)
        for name, surface in EVERY.items():
            one, many = Model(surface), Model(surface)
            parallelize_module(many, mesh(), {"head": ColwiseParallel(output_layouts=Replicate())})
            expected, found = one(*batch()), compiled(many)(*batch())
            (record,) = memeff_compile.last_report().records
            said = DECLINED.get(name)
            assert record.code == ("tensor_parallel_head" if said else "rewrote"), (name, record)
            assert said is None or said in record.sentence
            for each in (expected, found):
                each.backward()
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=0, msg=name)
            assert_same_gradients(gradients(many), gradients(one))


@pytest.mark.slow
@pytest.mark.xdist_group("two processes")
def test_every_surface_of_a_head_split_over_ranks(two_processes: TwoProcesses) -> None:
    assert len(EVERY) > 30
    two_processes.run(every_surface, inner="aot_eager")
