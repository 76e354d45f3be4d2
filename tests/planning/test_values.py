"""Values that steer a model are known where its inputs have them, and memory is counted with them."""

from __future__ import annotations

from typing import Any

import pytest
import sympy
import torch
from torch import Tensor, nn

from memeff_compile import compat
from memeff_compile.errors import ExplainError
from memeff_compile.planning.capture import _fake_inputs
from memeff_compile.planning.explain import explain
from memeff_compile.planning.sizes import BATCH, LENGTH, Sizes, Told
from memeff_compile.planning.values import Values

WIDTH, CLASSES, IMAGE = 32, 512, 7
B, L, PATCHES = 4, 64, 16


class Images(nn.Module):
    """Reads sizes and places of images off tensors, as vision-language models do."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(CLASSES, WIDTH)
        self.tower = nn.Linear(12, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)

    def forward(self, input_ids: Tensor, pixels: Tensor, grid: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of text with images in it."""
        counts = grid.prod(-1).tolist()
        seen = torch.cat([part.softmax(0) for part in self.tower(pixels).split(counts)])
        first = [(row == IMAGE).nonzero()[0, 0] for row in input_ids]
        starts = torch.tensor(first)  # of numbers that are tensors
        assert int((input_ids == IMAGE).sum()) == len(seen)
        assert starts.tolist() == [1] * len(input_ids)
        x = self.embed(input_ids).masked_scatter((input_ids == IMAGE)[..., None], seen)
        logits = self.head(x).flatten(0, 1)
        return nn.functional.cross_entropy(logits, labels.flatten())


def call(batch: int = B, length: int = L) -> dict[str, Tensor]:
    ids = torch.full((batch, length), 3)
    ids[:, 1 : 1 + PATCHES] = IMAGE
    pixels = torch.empty(batch * PATCHES, 12, device="meta")
    grid = torch.tensor([[1, 4, 4]] * batch)
    return {"grid": grid, "input_ids": ids, "pixels": pixels, "labels": ids.clone()}


@pytest.mark.parametrize("batch", [pytest.param(1, marks=pytest.mark.slow), B])
def test_a_model_that_reads_where_images_are_is_planned(batch: int) -> None:
    found = explain(Images(), **call(batch))
    assert (found.sizes.batch, found.sizes.length) == (batch, L)
    assert set(found.fixed) == {"batch", "length"}  # parts one by one: others for another batch
    plan = found.plan(memory="1GiB")
    assert plan.before.groups["logits"] >= 4 * batch * L * CLASSES
    assert plan.after.peak < plan.before.peak
    assert plan.before.largest_batch is None
    with pytest.raises(ExplainError, match="operations at other sizes"):
        found.plan(batch=batch + 1)


def test_values_that_are_not_given_are_asked_for() -> None:
    given = call()
    with pytest.raises(ExplainError, match=r"image_grid_thw, on the CPU with their values"):
        explain(Images(), **{**given, "grid": given["grid"].to("meta")})


def test_what_something_unknown_is_written_to_is_unknown() -> None:
    values = Values()

    def outside(op: Any, args: Any, kwargs: Any, run: Any) -> Any:
        return values.run(op, args, kwargs, run, mode)

    mode = compat.fake_mode(outside)
    with mode:
        unknown, known = torch.empty(3), torch.zeros(4)
        part = known[1:]
        known[0] = 2
        assert known.tolist() == [2, 0, 0, 0]
        assert [int(x) for x in known.nonzero()] == [0]
        assert values.of(unknown) is None
        part.copy_(unknown)  # and with it every tensor that shares its memory
        assert values.of(part) is None
        assert values.of(known) is None
        number = torch.zeros(2).sum()
        assert torch.tensor([number, number]).tolist() == [0, 0]
        with pytest.raises(ExplainError, match="make a new tensor there"):
            number.add_(unknown[0])


def test_what_the_cpu_cannot_compute_or_hold_twice_is_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    values = Values()

    def outside(op: Any, args: Any, kwargs: Any, run: Any) -> Any:
        return values.run(op, args, kwargs, run, mode)

    mode = compat.fake_mode(outside)
    given = (torch.ones(2), torch.ones(2).to(torch.float8_e4m3fn), torch.ones(2).to_sparse())
    monkeypatch.setattr("memeff_compile.planning.capture.MOST_BYTES", 8)
    large, small, sparse = _fake_inputs(given, Sizes(2, 0), Told(3), mode, values)
    assert values.of(large) is values.of(sparse) is None
    assert values.of(small) is not None
    with mode:
        assert values.of(small.cos()) is None  # no kernel on a CPU has E4M3


class Joined(nn.Module):
    """Keeps three parts of one product for the backward, and a function of logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.join = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Return a loss."""
        q, k, v = self.join(self.embed(ids)).unflatten(2, (3, 4, -1)).unbind(2)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        x = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        logits = torch.tanh(self.head(x.transpose(1, 2).flatten(2)))
        return (logits * logits).sum()


def test_a_part_that_is_kept_keeps_what_it_is_a_part_of_and_is_written_over_at_last() -> None:
    found = explain(Joined(), torch.zeros(B, L, dtype=torch.int64), device="cpu")
    per_token = [sympy.Poly(m.total, BATCH, LENGTH) for m in found.before.moments]
    most = max(int(p.coeff_monomial(BATCH * LENGTH)) for p in per_token)
    # the whole product, and attention's result kept for the backward pass, whose gradient replaces
    # them
    kept = 4 * (3 + 1) * WIDTH
    logits = 4 * CLASSES  # kept for the backward, whose gradient takes their place
    assert kept + logits <= most < kept + 2 * logits
