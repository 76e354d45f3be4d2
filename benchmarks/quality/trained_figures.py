"""Rows for the papers' figures of trained models, from real ones; `plot.py` draws them.

    python benchmarks/quality/trained_figures.py --models FOLDER [FOLDER ...]

`probabilities`: mean probability of the i-th likeliest token (Cut Cross-Entropy, figure 3).
`exponents`: how often each exponent occurs in weights, and in random ones of the same deviation
(NeuZip, figure 1). `codes`: channels of keys, and how often each 4-bit code occurs in queries and
keys, with their means and without (SageAttention2, figures 4 and 5). `layers`: cosines of
neighbouring layers' keys and values, as they are and aligned (MiniCache, figure 1). `inputs`:
errors of the quantisers of BitNet a4.8 on the inputs of linears, without any training for them.
`rotated`: the same after `rotate_hidden_states_`, which changes the model.

FOLDER is an argument of `from_pretrained`. The text is "prose" of texts.py.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks import RESULTS, rows
from benchmarks.ablations.probabilities import mean_by_rank, ranks
from benchmarks.quality import texts
from benchmarks.quality.subject import Subject
from benchmarks.tiles import EPS
from memeff_compile.kernels.ternary_linear import Quantizer, reference
from memeff_compile.model import rotate_hidden_states_

FIRST = 4
"""Tokens that a merged cache keeps as they are."""
HEADS = 6
"""The most heads whose best matching is searched."""
BLOCK = 128
"""Tokens that share a mean of queries, and a scale of keys."""


class Seen(TorchFunctionMode):
    """Keeps queries, keys and values (H, N, D) of every attention."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Tensor, Tensor, Tensor]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        if func is F.scaled_dot_product_attention:
            named = (given[name] for name in ("query", "key", "value")[len(args) :])
            q, k, v = (each[0].float() for each in (*args, *named))
            self.calls.append((q, k, v))
        return func(*args, **given)


def probabilities(subject: Subject, ids: Tensor, _: Seen) -> dict[str, Any]:
    """Return the mean probability by rank."""
    hidden = subject.states(ids, layers=False).last[0, :-1]
    mean = mean_by_rank(hidden, subject.model.get_output_embeddings().weight, at_once=256)
    shown = ranks(len(mean))
    return {
        "rank": shown,
        "probability": [float(f"{mean[rank - 1]:.4g}") for rank in shown],
        "eps": EPS,
        "ranks_above_eps": int((mean >= EPS).sum()),
        "V": len(mean),
    }


def exponents(subject: Subject, ids: Tensor, _: Seen) -> dict[str, Any]:
    """Return counts of exponents, and entropies, of the weights of linears."""
    weights = [
        module.weight.detach().bfloat16().flatten()
        for name, module in subject.stored.named_modules()
        if isinstance(module, torch.nn.Linear) and "lm_head" not in name
    ]
    draw = torch.Generator().manual_seed(0)
    random = [torch.randn(w.shape, generator=draw) * w.float().std() for w in weights]
    found: dict[str, Any] = {"weights": sum(map(len, weights))}
    for kind, each in (("trained", weights), ("random", random)):
        bits = torch.cat([w.bfloat16().view(torch.int16).int() & 0xFFFF for w in each])
        counts = torch.bincount((bits >> 7) & 0xFF, minlength=256)
        parts = {"sign": bits >> 15, "exponent": (bits >> 7) & 0xFF, "mantissa": bits & 0x7F}
        found[kind] = {
            "exponents": counts.tolist(),
            "entropy": {name: round(entropy(part), 3) for name, part in parts.items()},
        }
    return found


def entropy(values: Tensor) -> float:
    """Return the entropy of integers, in bits."""
    share = torch.bincount(values.flatten()).double() / values.numel()
    share = share[share > 0]
    return float(-(share * share.log2()).sum())


def codes_of(x: Tensor, block: int) -> Tensor:
    """Return 4-bit codes of (H, N, D), with one scale for so many tokens of a head."""
    parts = torch.stack(x.split(block, 1), 1)
    scale = parts.abs().amax((-1, -2), keepdim=True) / 7
    return (parts / scale).round().to(torch.int64)


def codes(subject: Subject, ids: Tensor, seen: Seen) -> dict[str, Any]:
    """Return channels of one layer's keys, and counts of 4-bit codes of all layers."""
    whole = ids.shape[1] // BLOCK * BLOCK
    counts: dict[str, Tensor] = {}
    shifted: list[tuple[float, int, int]] = []
    for layer, (q, k, _) in enumerate(seen.calls):
        q, k = q[:, :whole], k[:, :whole]
        blocks = torch.stack(q.split(BLOCK, 1), 1)
        smooth_q = (blocks - blocks.mean(2, keepdim=True)).flatten(1, 2)
        smooth_k = k - k.mean(1, keepdim=True)
        for name, x, block in (
            ("queries", q, 1),
            ("queries, smoothed", smooth_q, 1),
            ("keys", k, BLOCK),
            ("keys, smoothed", smooth_k, BLOCK),
        ):
            own = torch.bincount(codes_of(x, block).cpu().flatten() + 7, minlength=15)
            counts[name] = counts.get(name, torch.zeros(15, dtype=torch.int64)) + own
        means = (k.mean(1).norm(dim=-1) / smooth_k.norm(dim=(1, 2)) * whole**0.5).tolist()
        shifted += [(mean, layer, head) for head, mean in enumerate(means)]
    _, layer, head = sorted(shifted)[len(shifted) // 2]
    k = seen.calls[layer][1][head, :whole]
    deviations, averages = k.std(0), k.mean(0)
    return {
        "counts": {name: own.tolist() for name, own in counts.items()},
        "entropy": {name: round(entropy_of(own), 3) for name, own in counts.items()},
        "shown": {"layer": layer, "head": head},
        "channel_mean": [round(each, 4) for each in averages.tolist()],
        "channel_deviation": [round(each, 4) for each in deviations.tolist()],
        "mean_over_deviation": round(sorted(shifted)[len(shifted) // 2][0], 3),
    }


def entropy_of(counts: Tensor) -> float:
    """Return the entropy of counted codes, in bits."""
    share = counts[counts > 0].double() / counts.sum()
    return float(-(share * share.log2()).sum())


def layers(subject: Subject, ids: Tensor, seen: Seen) -> dict[str, Any]:
    """Return mean cosines of each layer and the next one: as they are, and aligned.

    Aligned are the rows that means and rotations are fitted on, as a cache's prompt is. "later" are
    the second half of the tokens, with means and rotations of the first half.
    """
    found: dict[str, list[float | None]] = {}
    for below, above in itertools.pairwise(seen.calls):
        for name, place in (("keys", 1), ("values", 2)):
            x, y = below[place][:, FIRST:], above[place][:, FIRST:]
            count = x.shape[1]
            is_pair = x.shape == y.shape
            plain = cosine(x, y) if is_pair else None
            aligned = cosine(*turned(x, y, count)) if is_pair else None
            half = [part[:, count // 2 :] for part in turned(x, y, count // 2)] if is_pair else []
            later = cosine(*half) if is_pair else None
            for end, value in (("", plain), (", aligned", aligned), (", later", later)):
                shown = None if value is None else round(value, 4)
                found.setdefault(name + end, []).append(shown)
    return {"cosines": found}


def cosine(x: Tensor, y: Tensor) -> float:
    """Return the mean cosine of rows."""
    return float(F.cosine_similarity(x, y, dim=-1).mean())


def turned(x: Tensor, y: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return x and y (H, N, D) without their means, and y's heads turned onto those of x.

    Means, the order of heads and rotations are those of the first `count` tokens.
    """
    x, y = x - x[:, :count].mean(1, keepdim=True), y - y[:, :count].mean(1, keepdim=True)
    a, b = x[:, :count], y[:, :count]
    order = list(range(len(x)))
    if len(x) <= HEADS:
        products = torch.einsum("jnd,ine->ijde", b, a)
        fit = torch.linalg.svdvals(products).sum(-1)
        order = list(
            max(
                itertools.permutations(order),
                key=lambda each: float(fit[range(len(x)), list(each)].sum()),
            )
        )
    u, _, v = torch.linalg.svd(b[order].mT @ a)
    return x, y[order] @ (u @ v)


ROLES = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "out": ("o_proj",),
    "gate and up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}
QUANTIZERS = ("int8", "int4", "fp4", "topk8")


def inputs(subject: Subject, ids: Tensor, _: Seen) -> dict[str, Any]:
    """Return the relative L2 errors of BitNet a4.8's quantisers on the inputs of linears."""
    squares: dict[tuple[str, str], Tensor] = {}

    def add(role: str, x: Tensor) -> None:
        for kind in QUANTIZERS:
            codes, scale = reference.codes_and_scale(x, Quantizer(kind))
            off = torch.stack([(codes / scale[:, None] - x).square().sum(), x.square().sum()])
            squares[role, kind] = squares.get((role, kind), 0) + off.double().cpu()

    def hook(role: str) -> Callable[[Any, tuple[Any, ...]], None]:
        return lambda _, given: add(role, given[0].flatten(0, -2).float())

    draw = torch.Generator().manual_seed(0)
    add("normal numbers", torch.randn(256, subject.facts["hidden"], generator=draw))
    handles = [
        module.register_forward_pre_hook(hook(role))
        for name, module in subject.model.named_modules()
        for role, ends in ROLES.items()
        if name.endswith(ends) and isinstance(module, torch.nn.Linear)
    ]
    try:
        subject.states(ids[:, :512], layers=False)
    finally:
        for handle in handles:
            handle.remove()
    errors: dict[str, dict[str, float]] = {}
    for (role, kind), (off, whole) in squares.items():
        errors.setdefault(role, {})[kind] = round(float((off / whole).sqrt()), 4)
    return {"errors": errors}


def rotated(subject: Subject, ids: Tensor, seen: Seen) -> dict[str, Any]:
    """Return what `inputs` returns, of the rotated model; or why it cannot be rotated."""
    try:
        rotate_hidden_states_(subject.model)
    except ValueError as problem:
        return {"refused": str(problem)}
    return inputs(subject, ids, seen)


PARTS: dict[str, Callable[[Subject, Tensor, Seen], dict[str, Any]]] = {
    "probabilities": probabilities,
    "exponents": exponents,
    "codes": codes,
    "layers": layers,
    "inputs": inputs,
    "rotated": rotated,
}


@torch.no_grad()
def main() -> int:
    """Write a row for each model and part."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", type=Path, required=True, help="folders")
    parser.add_argument("--parts", nargs="+", choices=[*PARTS], default=[*PARTS])
    parser.add_argument("--length", type=int, default=1024)
    where = "nvidia-h200" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--out", type=Path, default=RESULTS / where / "trained-figures.jsonl")
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    environment = rows.environment()
    for folder in given.models:
        subject = Subject(folder, device, torch.float32)
        ids = texts.rows_of(subject.tokenizer, "prose", given.length, 1).to(device)
        seen = Seen()
        with seen:
            subject.states(ids, layers=False)
        for name in given.parts:
            facts = {"what": "trained figures", **subject.facts, "part": name}
            facts |= {"tokens": given.length, "digest": texts.digest(ids.cpu())}
            found = PARTS[name](subject, ids, seen)
            rows.append(given.out, {**facts, **found, **environment})
            print(f"{subject.name}, {name}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
