"""Rows on which a running entropy or a running maximum goes wrong first; each engine is held to them.

Every row set is small integers in a one-hot basis, so its logits are exact in every dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from tests.support.oracles import Case, Op

INF, NAN = math.inf, math.nan
VOCAB = 201  # pieces of 64 columns: 0, 64, 128, 192
NARROW = 5 * 64 * 12
CASE = Case("entropy and top", with_entropy=True, with_top=True)


def logits_of(row: dict[int, float], rest: float = 0.0) -> Tensor:
    """Return one row of logits: `rest` but for the named columns."""
    z = torch.full((VOCAB,), rest)
    for column, value in row.items():
        z[column] = value
    return z


ROWS: dict[str, Tensor] = {
    "flat": logits_of({}),
    "flat and low": logits_of({}, -3000.0),
    "one likely": logits_of({150: 40.0}),
    "one certain": logits_of({3: 800.0}),
    "tie across pieces": logits_of({70: 9.0, 5: 9.0, 200: 9.0}),
    "tie within a piece": logits_of({66: 9.0, 65: 9.0}),
    "last column": logits_of({200: 1.0}),
    "rising": torch.arange(VOCAB).float(),
    "falling": -torch.arange(VOCAB).float(),
    "impossible columns": torch.cat([logits_of({})[:140] - INF, logits_of({190: 2.0})[140:]]),
    "all but one impossible": logits_of({100: 5.0}, -INF),
    "all impossible": logits_of({}, -INF),
    "nan": logits_of({90: NAN, 10: 50.0, 95: NAN}),
    "nan before the largest": logits_of({10: NAN, 90: 50.0}),
    "infinity": logits_of({64: INF, 130: INF}),
    "nan after infinity": logits_of({64: INF, 130: NAN}),
}


def run(op: Op, z: Tensor, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return entropy, top, and the entropy's gradient for one row of logits.

    The row comes in as the bias, hidden states and weight are zero: no product can blur it.
    """
    bias = z.to(device, dtype).requires_grad_()
    hidden, weight = bias.new_zeros(1, 8), bias.new_zeros(VOCAB, 8)
    target = torch.zeros(1, dtype=torch.int64, device=device)
    _, _, _, entropy, top, *_ = op(hidden, weight, bias, target, None, **CASE.arguments(NARROW))
    (gradient,) = torch.autograd.grad(entropy.sum(), bias)
    return entropy.detach()[0].cpu(), top[0].cpu(), gradient.cpu()


def check(op: Op, name: str, dtype: torch.dtype, device: str = "cpu") -> None:
    """Compare an engine with eager PyTorch in float64, with 0 log 0 = 0."""
    z = ROWS[name].to(dtype).double().requires_grad_()
    entropy, top, gradient = run(op, ROWS[name], dtype, device)
    assert int(top) == int(z.argmax()), "top"
    log_p = z.log_softmax(0).clamp(min=-1e300)
    expected = -(log_p.exp() * log_p).sum()
    (wanted,) = torch.autograd.grad(expected, z)
    wide = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    # lse is one number of that precision, so logarithms of probabilities are off by its last bit.
    z = z.detach()
    room = 4 * wide * (1 + float(z.nan_to_num(0, 0, 0).abs().max()))
    close: Callable[..., None] = torch.testing.assert_close
    close(entropy.double(), expected.detach(), rtol=20 * wide, atol=room, equal_nan=True)
    if expected.isfinite():
        close(gradient.double(), wanted, rtol=2 * torch.finfo(dtype).eps, atol=room)
    else:
        assert gradient.isnan().any()
