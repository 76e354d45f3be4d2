"""Ways to treat the mass that a gradient filter drops: prototypes, on a model that is fine-tuned.

    python benchmarks/models/left_out.py --model FOLDER --variant exact:6 nothing:6 stays:6

A variant is a way and tau as a power of 1/2. Every way keeps, in 128 rows at a time, the classes
that `mass` keeps (the same levels and ranks of rows, class by class, without tiles), and does with
the rest: `nothing`; `stays`: puts it on the classes of the row that stay, in proportion; `outer`:
puts it on the classes left out, by their sums over the block, `outer all` over the piece, `hidden`
in the gradient of hidden states alone; `sampled`: keeps one of SHARE at random, times SHARE. Loss,
text and optimizer are fine_tuning.py's. Prints a line per run: the improvement, and how many
classes of a block were kept.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.models import fine_tuning
from benchmarks.tiles import wide_product
from memeff_compile.kernels.linear_cross_entropy.gradient_filter import LEVELS, STEP

WAYS = ("exact", "nothing", "stays", "outer", "outer all", "hidden", "sampled")
PIECE, BLOCK, LIGHT, SHARE = 2048, 128, 2.0**-10, 16


def kept_classes(size: Tensor, tau: float) -> Tensor:
    """Return which classes each block keeps, (B, V), of |p - 1(target)|, (B, rows, V).

    Those whose sum over the block reaches the highest level at which no row loses more than tau.
    """
    scores = size.sum(1)
    levels = tau * 2.0 ** (-STEP * torch.arange(LEVELS, device=size.device))
    lost = torch.bmm(size, (scores[:, :, None] < levels).float())
    fits = lost.amax(1) <= tau
    level = torch.where(fits.any(1), levels[fits.float().argmax(1)], -1.0)
    return scores >= level[:, None]


def gradients(away: Tensor, way: str, tau: float, source: torch.Generator) -> list[Tensor]:
    """Return p - 1(target) after the filter, (B, rows, V), for hidden states and for the weight."""
    kept = kept_classes(away.abs(), tau)
    found = away * kept[:, None]
    rest = (away - found).clamp(min=0)
    rows, classes = rest.sum(2, keepdim=True), rest.sum(1, keepdim=True)
    if way == "stays":
        pushed = found.clamp(min=0)
        stays = pushed.sum(2, keepdim=True).clamp(min=1e-9)
        found = found + pushed * (-found.sum(2, keepdim=True) / stays)
    elif way in ("outer", "hidden"):
        whole = found + rows * classes / classes.sum(2, keepdim=True).clamp(min=1e-9)
        return [whole, whole if way == "outer" else found]
    elif way == "outer all":
        found = found + rows * classes.sum(0) / rows.sum().clamp(min=1e-9)
    elif way == "sampled":
        drawn = torch.rand(kept.shape, device=away.device, generator=source) < 1 / SHARE
        found = found + SHARE * away * (drawn & ~kept)[:, None]
    return [found, found]


class Filtered(torch.autograd.Function):
    """The mean loss of a head, with gradients that a way leaves."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, target: Tensor, study: Study) -> Tensor:
        """Return the loss; its gradients are made here, piece by piece."""
        of_hidden, of_weight = torch.empty_like(hidden), torch.zeros_like(weight).float()
        total, count = hidden.new_zeros((), dtype=torch.float32), len(hidden)
        for rows in torch.arange(count, device=hidden.device).split(PIECE):
            logits = wide_product(hidden[rows], weight)
            lse = logits.logsumexp(1)
            places = torch.arange(len(rows), device=hidden.device), target[rows]
            total += (lse - logits[places]).sum()
            away = (logits - lse[:, None]).exp_()
            light = away.where(away < LIGHT, 0).sum(1).argsort()
            away[places] -= 1
            for_hidden, for_weight = study.gradients(away[light])
            of_hidden[rows[light]] = for_hidden @ weight
            of_weight += for_weight.t() @ hidden[rows[light]]
        ctx.save_for_backward(of_hidden / count, of_weight / count)
        return total / count

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients, times the loss's own."""
        of_hidden, of_weight = ctx.saved_tensors
        (grad,) = grads
        scaled = (of_weight * grad).to(of_hidden.dtype)
        return of_hidden * grad.to(of_hidden.dtype), scaled, None, None


class Study:
    """A way, its tau, and the share of classes that was kept."""

    def __init__(self, variant: str, seed: int, device: str) -> None:
        self.way, power = variant.split(":")
        if self.way not in WAYS:
            raise SystemExit(f"{self.way!r} is none of {', '.join(WAYS)}")
        self.tau = 2.0 ** -float(power)
        self.kept: list[float] = []
        self.source = torch.Generator(device=device).manual_seed(seed)

    def gradients(self, away: Tensor) -> list[Tensor]:
        """Return the gradients of logits in bf16 for hidden states and weight, (rows, V)."""
        made = [away, away]
        if self.way != "exact":
            blocks = away.view(-1, min(BLOCK, len(away)), away.shape[1])
            made = gradients(blocks, self.way, self.tau, self.source)
            self.kept.append(float(kept_classes(blocks.abs(), self.tau).float().mean()))
        return [each.reshape(away.shape).bfloat16() for each in made]


def step_of(model: Any, study: Study) -> fine_tuning.Step:
    """Return a function that computes the loss of token ids under a way."""

    def step(ids: Tensor) -> Tensor:
        hidden = model.model(input_ids=ids).last_hidden_state[:, :-1].flatten(0, 1).bfloat16()
        weight = model.lm_head.weight.bfloat16()
        loss: Tensor = Filtered.apply(hidden, weight, ids[:, 1:].flatten(), study)
        return loss

    return step


def main() -> int:
    """Train each variant with each seed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--variant", nargs="+", default=["exact:6", "nothing:6", "stays:6"])
    parser.add_argument("--seed", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=1025, help="tokens; rows and one more")
    parser.add_argument("--judged", type=int, default=32)
    parser.add_argument("--rate", type=float, default=5e-5)
    parser.add_argument("--root", type=Path, nargs="+", help="folders to take the text from")
    parser.add_argument("--inner", default="inductor", help="aot_eager where no compiler is")
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    text, model = fine_tuning.Text(given, device), fine_tuning.load(given, device)
    start = {name: part.clone() for name, part in model.state_dict().items()}
    print("before", fine_tuning.judge(model, text), flush=True)
    model.model.compile(backend=given.inner)
    for variant in given.variant:
        for seed in given.seed:
            study = Study(variant, seed, device)
            step = step_of(model, study)
            found = fine_tuning.train_once(model, step, start, text, seed, given)
            kept = sum(study.kept) / len(study.kept) if study.kept else 1.0
            print(variant, seed, found["validation"], f"kept {kept:.4f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
