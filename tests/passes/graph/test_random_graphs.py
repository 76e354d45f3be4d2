"""Random small programs around a head: whatever the passes decide, the result is eager's.

A program is a head, steps on its logits (some of which the pass must not look through), and one to
three consumers, drawn from a seed. Every program runs in float64 with the inner compiler eager.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.captured_graphs import Outcome, compare_with_eager
from tests.support.surfaces import D, V

SEEDS = {0: "plain", 1: "plain", 2: "plain", 3: "plain", 4: "dynamic", 5: "aot_eager"}
PROGRAMS_PER_SEED = 12

Pair = tuple[Tensor, Tensor]  # logits with the classes last, and labels for their rows
Step = Callable[[Tensor, Tensor, Tensor, Tensor], Pair]  # of logits, labels, bias, hidden
Consumer = Callable[[Tensor, Tensor, Tensor], Any]  # of logits, labels, bias

HEADS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "linear": lambda h, w, b: F.linear(h, w),
    "linear + bias": lambda h, w, b: F.linear(h, w, b),
    "h @ w.T": lambda h, w, b: h @ w.T,
    "einsum": lambda h, w, b: torch.einsum("bsh,vh->bsv", h, w),
    "addmm": lambda h, w, b: torch.addmm(b, h.reshape(-1, D), w.t()).view(*h.shape[:-1], V),
    "transposed weight": lambda h, w, b: h @ w.t().contiguous(),
    "computed weight": lambda h, w, b: F.linear(h, w * 0.5 + 0.1),
    "hidden of one's own": lambda h, w, b: F.linear(torch.tanh(h), w),
    "two heads added": lambda h, w, b: F.linear(h, w) + F.linear(h * 0.5, w),
}

POINTWISE: dict[str, Step] = {
    "* 0.5": lambda x, y, b, h: (x * 0.5, y),
    "2.0 *": lambda x, y, b, h: (2.0 * x, y),
    "* -1": lambda x, y, b, h: (x * -1, y),
    "/ 4": lambda x, y, b, h: (x / 4, y),
    "tanh": lambda x, y, b, h: (torch.tanh(x), y),
    "softcap": lambda x, y, b, h: (3.0 * torch.tanh(x / 3.0), y),
    "+ b": lambda x, y, b, h: (x + b, y),
    "b.view +": lambda x, y, b, h: (b.view(1, V) + x, y),
    "double": lambda x, y, b, h: (x.double(), y),
    "to itself": lambda x, y, b, h: (x.to(x.dtype), y),
    "contiguous": lambda x, y, b, h: (x.contiguous(), y),
    "clone": lambda x, y, b, h: (x.clone(), y),
    "x[...]": lambda x, y, b, h: (x[...], y),
}

ROWS: dict[str, Step] = {
    "flatten": lambda x, y, b, h: (x.reshape(-1, V), y.reshape(-1)),
    "view": lambda x, y, b, h: (x.contiguous().view(-1, V), y.contiguous().view(-1)),
    "drop the last": lambda x, y, b, h: (x[:-1], y[1:]),
    "keep the last": lambda x, y, b, h: (x[..., -1:, :] if x.dim() > 1 else x, y[..., -1:]),
    "every other": lambda x, y, b, h: (x[::2], y[::2]),
    "swap": lambda x, y, b, h: (x.transpose(0, 1), y.transpose(0, 1)),
    "one of the first": lambda x, y, b, h: (x[0], y[0]),
    "new axis": lambda x, y, b, h: (x.unsqueeze(0), y.unsqueeze(0)),
    "no axis": lambda x, y, b, h: (x.squeeze(0), y.squeeze(0)),
    "in another order": lambda x, y, b, h: (x[torch.tensor([1, 0])], y[torch.tensor([1, 0])]),
    "narrow": lambda x, y, b, h: (x.narrow(0, 0, 1), y.narrow(0, 0, 1)),
    "shifted labels": lambda x, y, b, h: (x, F.pad(y, (0, 1), value=-100)[..., 1:]),
}

NEAR_MISSES: dict[str, Step] = {
    "+ 1": lambda x, y, b, h: (x + 1.0, y),
    "+ b, twice": lambda x, y, b, h: (torch.add(x, b, alpha=2), y),
    "relu": lambda x, y, b, h: (F.relu(x), y),
    "learned scale": lambda x, y, b, h: (x * b[0], y),
    "scale per class": lambda x, y, b, h: (x * b, y),
    "* 0": lambda x, y, b, h: (x * 0, y),
    "masked": lambda x, y, b, h: (x.masked_fill(torch.arange(V) == V - 1, -9.0), y.clamp(max=3)),
    "flipped rows": lambda x, y, b, h: (x.flip(0), y),
    "flipped classes": lambda x, y, b, h: (x.flip(-1), y),
    "columns": lambda x, y, b, h: (x[..., torch.arange(V).roll(1)], y),
    "halved and doubled": lambda x, y, b, h: (torch.cat([x[..., : V // 2]] * 2, -1), y),
    "repeated": lambda x, y, b, h: (torch.cat([x, x]), torch.cat([y, y])),
    "regrouped": lambda x, y, b, h: (x.reshape(-1, V // 2).reshape(-1, V), y.reshape(-1)),
    "classes regrouped": lambda x, y, b, h: (x.transpose(-1, -2).reshape(-1, V), y.reshape(-1)),
    "written": lambda x, y, b, h: (x.add_(0.5), y),
    "view written": lambda x, y, b, h: (x, (x.detach().view(-1)[:3].zero_(), y)[1]),
    "detached": lambda x, y, b, h: (x.detach(), y),
    "without gradient": lambda x, y, b, h: (_without_gradient(x), y),
    "labels written": lambda x, y, b, h: (x, y.clamp_(min=1)),
    "other labels": lambda x, y, b, h: (x, y.clamp(min=0)),
}


def _without_gradient(x: Tensor) -> Tensor:
    with torch.no_grad():
        return x * 0.5


def _cross_entropy(**settings: Any) -> Consumer:
    def consume(x: Tensor, y: Tensor, b: Tensor) -> Tensor:
        given = dict(settings)
        if "weight" in given:
            given["weight"] = b.detach().sigmoid()
        return F.cross_entropy(x.reshape(-1, V), y.reshape(-1), **given)

    return consume


def _index(y: Tensor) -> Tensor:
    return y.clamp(min=0).unsqueeze(-1)


CONSUMERS: dict[str, Consumer] = {
    "mean": _cross_entropy(),
    "sum": _cross_entropy(reduction="sum"),
    "none": _cross_entropy(reduction="none"),
    "smooth": _cross_entropy(label_smoothing=0.1),
    "weighted": _cross_entropy(weight=True),
    "weighted, smooth, ignored": _cross_entropy(
        weight=True, label_smoothing=0.3, ignore_index=2, reduction="sum"
    ),
    "classes moved": lambda x, y, b: F.cross_entropy(x.movedim(-1, 1) if x.dim() > 1 else x, y),
    "nll": lambda x, y, b: F.nll_loss(x.reshape(-1, V).log_softmax(-1), y.reshape(-1)),
    "nll over rows": lambda x, y, b: F.nll_loss(x.reshape(-1, V).log_softmax(0), y.reshape(-1)),
    "nll of moved classes": lambda x, y, b: F.nll_loss(
        x.reshape(1, -1, V).transpose(1, 2).log_softmax(-1), y.reshape(1, -1)
    ),
    "log probs": lambda x, y, b: x.log_softmax(-1).gather(-1, _index(y)).squeeze(-1),
    "log probs over rows": lambda x, y, b: x.log_softmax(0).gather(-1, _index(y)),
    "log probs over length": lambda x, y, b: x.log_softmax(-2).gather(-1, _index(y)),
    "two log probs": lambda x, y, b: x.log_softmax(-1).gather(-1, torch.cat([_index(y)] * 2, -1)),
    "logsumexp": lambda x, y, b: x.logsumexp(-1).square(),
    "logsumexp of rows": lambda x, y, b: x.logsumexp(0).square(),
    "logsumexp - logit": lambda x, y, b: x.logsumexp(-1, keepdim=True) - x.gather(-1, _index(y)),
    "logit": lambda x, y, b: x.gather(-1, _index(y)),
    "entropy": lambda x, y, b: -(x.softmax(-1) * x.log_softmax(-1)).sum(-1),
    "argmax": lambda x, y, b: (x.argmax(-1) == y).sum(),
    "logits": lambda x, y, b: x,
    "part of the logits": lambda x, y, b: x[..., -1:, :],
    "detached logits": lambda x, y, b: x.detach(),
    "max": lambda x, y, b: x.amax(-1),
}

LOSSES = [name for name in CONSUMERS if name not in ("argmax", "logits", "max", "entropy")]


def draw(random_: random.Random) -> tuple[str, Callable[..., Any]]:
    """Return a program's description and the program, of (hidden, weight, bias, labels)."""
    head = random_.choice(list(HEADS))
    steps = [random_.choice(list(POINTWISE)) for _ in range(random_.choice([0, 0, 1, 1, 2]))]
    steps += [random_.choice(list(ROWS)) for _ in range(random_.choice([0, 0, 1, 2]))]
    if random_.random() < 0.25:
        steps.append(random_.choice(list(NEAR_MISSES)))
    random_.shuffle(steps)
    consumers = [random_.choice(LOSSES)]
    consumers += [random_.choice(list(CONSUMERS)) for _ in range(random_.choice([0, 0, 0, 1, 2]))]
    # Consumers read the logits after all steps; with two readers some read them a step earlier.
    early = random_.choice([0, 0, 1]) if len(consumers) > 1 else 0
    table = {**POINTWISE, **ROWS, **NEAR_MISSES}

    def program(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
        x = HEADS[head](h, w, b)
        states = [(x, y)]
        for name in steps:
            states.append(table[name](*states[-1], b, h))
        places = [-1 - (early if i and len(states) > 1 else 0) for i in range(len(consumers))]
        return tuple(
            CONSUMERS[name](*states[place], b)
            for name, place in zip(consumers, places, strict=True)
        )

    return f"{head} | {' | '.join(steps)} | {', '.join(consumers)} ({early})", program


def operands(seed: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    h, w, b = (
        torch.randn(size, generator=generator, dtype=torch.float64)
        for size in ((2, 4, D), (V, D), (V,))
    )
    y = torch.randint(0, V, (2, 4), generator=generator)
    y[0, 1] = -100
    return h.requires_grad_(), w.requires_grad_(), b.requires_grad_(), y


def runs_in_eager(program: Callable[..., Any], given: tuple[Tensor, ...]) -> bool:
    try:
        copies = [t.detach().clone().requires_grad_(t.requires_grad) for t in given]
        outputs = [o for o in program(*copies) if o.requires_grad]
        if outputs:
            torch.autograd.backward([o.sum() for o in outputs])
    except (RuntimeError, IndexError, ValueError):
        return False
    return True


@pytest.mark.parametrize(
    ("seed", "how"),
    [
        pytest.param(*each, marks=pytest.mark.slow if each[0] in (1, 2, 3, 5) else ())
        for each in SEEDS.items()
    ],
)
def test_random_programs_equal_eager(seed: int, how: str) -> None:
    random_ = random.Random(seed)
    given = operands(seed)
    tried = fired = 0
    while tried < PROGRAMS_PER_SEED:
        description, program = draw(random_)
        if not runs_in_eager(program, given):
            continue
        tried += 1
        try:
            outcome = compare(program, given, how)
        except AssertionError as difference:
            raise AssertionError(f"{description}: {difference}") from difference
        fired += bool(outcome.fired)
    assert 0 < fired < tried, "the programs neither all match nor all miss"


def compare(program: Callable[..., Any], given: tuple[Tensor, ...], how: str) -> Outcome:
    if how != "dynamic":
        inner = "eager" if how == "plain" else how
        return compare_with_eager(program, *given, rtol=1e-10, atol=1e-11, inner=inner)
    # The head's sizes stay numbers, as those of parameters do; batch and length become symbols.
    h, w, b, y = given
    head = torch.nn.ParameterList([w.detach().clone(), b.detach().clone()])

    def with_parameters(h: Tensor, y: Tensor) -> Any:
        return program(h, head[0], head[1], y)

    return compare_with_eager(with_parameters, h, y, rtol=1e-10, atol=1e-11, dynamic=True)
