"""Views that have the memory's size and are not the memory, and copies made behind a write."""

from __future__ import annotations

import pytest
import torch
from torch import nn

V = 67


@pytest.fixture(params=[(3, 3), (1, V), (2, 5)], ids=str)
def both(request: pytest.FixtureRequest) -> tuple[torch.Tensor, torch.Tensor]:
    """Deferred logits and those of eager PyTorch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(V, 8), nn.Linear(8, V)).double()
    ids = torch.randint(V, request.param)
    compiled = torch.compile(model, backend="memeff", options={"memeff.inner": "eager"})
    return compiled(ids), model(ids)


@pytest.mark.parametrize(
    "order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)], ids=str
)
def test_permuted_logits_are_permuted_whatever_their_shape(
    both: tuple[torch.Tensor, torch.Tensor], order: tuple[int, ...]
) -> None:
    found, expected = (logits.permute(order) for logits in both)
    assert torch.equal(found.argmax(-1), expected.argmax(-1))
    torch.testing.assert_close(found + 0, expected + 0)


@pytest.mark.parametrize("order", [(0, 2, 1), (2, 1, 0), (1, 0, 2), (0, 1, 2)], ids=str)
def test_a_copy_made_behind_a_write_through_another_view_has_what_was_written(
    both: tuple[torch.Tensor, torch.Tensor], order: tuple[int, ...]
) -> None:
    copies = []
    for logits in both:
        logits.view(V, -1).add_(0.5)  # a plain view: its last dimension is not the vocabulary
        copies.append(logits.permute(order).clone() * 2)
    torch.testing.assert_close(*copies)
