"""Helpers of the integration tests: a tiny Llama, its batches, and the comparison of runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

import memeff_compile
from memeff_compile.logits.tensor import DeferredLogits
from tests.support.zoo import FAMILIES, build, inputs

LLAMA = next(family for family in FAMILIES if family.name == "llama")
OPTIONS = {"memeff.inner": "aot_eager"}
TRAINING = {"rewrote", "logits_deferred"}
OF_BLOCKS = ("expand_multihead", "recover_attention", "fuse_gated_linear")
"""Passes whose records do not concern embedding, output projection and loss."""


def llama(**settings: object) -> nn.Module:
    """Return a Llama of one layer whose logits are larger than its hidden states."""
    return build(LLAMA, **{"vocab_size": 160, "num_hidden_layers": 1, **settings})


def batch(seed: int = 0) -> dict[str, Tensor]:
    return inputs(LLAMA, seed=seed)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_gradients(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Compare gradients of fp32 models: each within 1e-5 relative to its size."""
    assert actual.keys() == expected.keys()
    typical = torch.stack([g.norm() for g in expected.values()]).square().mean().sqrt()
    for name, gradient in expected.items():
        bound = 1e-5 * max(gradient.norm(), 1e-3 * typical)
        assert (actual[name] - gradient).norm() <= bound, name


def codes() -> set[str]:
    """Return all codes about embedding, output projection and loss since the last reset."""
    records = memeff_compile.last_report().records
    return {r.code for r in records if r.pass_name not in OF_BLOCKS}


def products(logits: Iterable[object]) -> Sequence[int]:
    """Return how often each of some deferred logits was computed."""
    counts = []
    for one in logits:
        assert isinstance(one, DeferredLogits)
        counts.append(one.materialisations)
    return counts
