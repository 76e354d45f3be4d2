"""How peaked a trained model is: mean probability by rank, active tiles, and the mass below eps.

    python benchmarks/ablations/probabilities.py --model benchmarks/generated/small_model

The model's validation text goes through its trunk; probabilities are computed with fp32 products of
bf16 hidden states and weights. Tiles are the filter's: a tile is active if any |p - 1(target)|
inside reaches eps = 2**-12. One row of JSON comes out. `trained_figures.py` has real models.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks import GENERATED, RESULTS, rows
from benchmarks.tiles import EPS, measure, wide_product

TILES = ((128, 128), (128, 256))


def ranks(vocabulary: int, per_decade: int = 20) -> list[int]:
    """Return ranks from 1 to the vocabulary's size, evenly spaced on a logarithmic axis."""
    points, rank = {1, vocabulary}, 1.0
    while rank < vocabulary:
        points.add(int(rank))
        rank *= 10 ** (1 / per_decade)
    return sorted(points)


@torch.no_grad()
def hidden_and_targets(
    model: Any, tokens: Tensor, batch: int = 16, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, Tensor]:
    """Return the trunk's last hidden states (N, D) and the next tokens (N,) of rows of tokens."""
    parts = []
    for first in range(0, len(tokens), batch):
        with torch.autocast(tokens.device.type, dtype=torch.bfloat16):
            hidden = model.model(input_ids=tokens[first : first + batch]).last_hidden_state
        parts.append(hidden[:, :-1].reshape(-1, hidden.shape[-1]).to(dtype))
    return torch.cat(parts), tokens[:, 1:].reshape(-1)


@torch.no_grad()
def mean_by_rank(hidden: Tensor, weight: Tensor, at_once: int = 1024) -> Tensor:
    """Return the mean over rows of the sorted probabilities, likeliest first: (V,) fp64."""
    total = torch.zeros(weight.shape[0], dtype=torch.float64, device=hidden.device)
    for first in range(0, len(hidden), at_once):
        logits = wide_product(hidden[first : first + at_once], weight)
        ordered = logits.softmax(-1).sort(-1, descending=True).values
        total += ordered.sum(0, dtype=torch.float64)
    return total / len(hidden)


def validation_rows(corpus: Path, length: int, count: int, device: str) -> Tensor:
    """Return the first rows of the validation text, (count, length) int64."""
    flat = numpy.fromfile(corpus / "python-validation.u16", dtype=numpy.uint16)
    count = min(count, len(flat) // length)
    return torch.from_numpy(flat[: count * length].astype(numpy.int64)).view(-1, length).to(device)


def main() -> None:
    """Measure a saved model and append one row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=GENERATED / "small_model")
    parser.add_argument("--folder", type=Path, default=GENERATED, help="of the text")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--rows", type=int, default=32, help="sequences to measure on")
    parser.add_argument("--out", type=Path, default=RESULTS / "probabilities.jsonl")
    given = parser.parse_args()
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32).to(device).eval()
    tokens = validation_rows(given.folder, given.length, given.rows, device)
    hidden, target = hidden_and_targets(model, tokens)
    weight = model.lm_head.weight.detach().bfloat16()
    by_rank = mean_by_rank(hidden, weight)
    chosen = ranks(len(by_rank))
    row: dict[str, Any] = {
        "what": "probability by rank",
        "model": json.loads((given.model / "config.json").read_text())["model_type"],
        "parameters": sum(p.numel() for p in model.parameters()),
        "N": hidden.shape[0],
        "D": hidden.shape[1],
        "V": weight.shape[0],
        "eps": EPS,
        "rank": chosen,
        "probability": [float(f"{by_rank[rank - 1]:.4g}") for rank in chosen],
        "ranks_above_eps": int((by_rank >= EPS).sum()),
    }
    row |= measure(hidden, weight, target, TILES)
    rows.write(given.out, row)


if __name__ == "__main__":
    main()
