"""A checkpointed layer with random operations is stored in PyTorch's caches, also with torch 2.11."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import memeff_compile

pytestmark = pytest.mark.gpu

DEVICE = "cuda"


class Attention(nn.Module):
    """Attention that is checkpointed and linear in its values."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout

    def attend(self, query: Tensor, value: Tensor) -> Tensor:
        attend = nn.functional.scaled_dot_product_attention
        return attend(query, query, value, is_causal=True, dropout_p=self.dropout)

    def forward(self, query: Tensor, value: Tensor) -> Tensor:
        result: Tensor = checkpoint(self.attend, query, value, use_reentrant=False)
        return result.float().square().sum()


def counts(dropout: float, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, int]]:
    """Compile twice with one cache folder; check gradients; return the counts of the caches."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
    found = []
    for seed in (0, 1):
        memeff_compile.reset()
        counters.clear()
        torch.manual_seed(seed)
        query, value = torch.randn(2, 1, 2, 16, 64, device=DEVICE, dtype=torch.bfloat16)
        value.requires_grad_()
        compiled = torch.compile(Attention(dropout), backend="memeff", fullgraph=True)
        losses = []
        for _ in range(2):
            value.grad = None
            loss = compiled(query, value)
            loss.backward()
            losses.append(float(loss.detach()))
            # The loss is quadratic in the values. The two sides agree only if the backward pass
            # used the random numbers of the forward pass.
            assert value.grad is not None
            product = float((value.grad * value.detach()).float().sum())
            assert product == pytest.approx(2 * losses[-1], rel=0.02)
        assert (losses[0] == losses[1]) is (dropout == 0)
        of = counters["aot_autograd"]
        names = ("hit", "miss", "bypass", "saved")
        found.append({name: of[f"autograd_cache_{name}"] for name in names})
    return found


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_second_compilation_hits_the_cache_and_draws_new_numbers(
    dropout: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = counts(dropout, tmp_path, monkeypatch)
    assert (first["hit"], first["miss"], first["saved"]) == (0, 1, 1), first
    assert (second["hit"], second["miss"], second["bypass"]) == (1, 0, 0), second
