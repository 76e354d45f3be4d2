"""SageAttention2's tables for a small trained model of ours: what each part of low bits is worth.

    python benchmarks/convergence.py model --to benchmarks/data/small_model
    python benchmarks/ablations.py attention --model benchmarks/data/small_model

The arithmetic is the op's own reference, so that it runs anywhere; what differs from the op's
levels is named. Each attention of the model is computed by one variant:

    perplexity   the model's, on validation text, with every attention replaced (Tables 1 and 11)
    layers       each attention on the exact model's own q, k and v, scored alone: average and worst
                 layer (granularity: Tables 2 and 3; formats of weights and values: 4 and 5;
                 values with and without their mean: 6)

`adaptive` takes 4b where its score is at least that of so many layers, 8b elsewhere, as the paper
does; the share of 4b is part of the name. Table 7, the error of the tensor cores' sums, needs a GPU
and is not here.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

sys.path.insert(0, str(Path(__file__).resolve().parent))
import rows
from probabilities import validation_rows

from memeff_compile.kernels.attention.conditions import Conditions
from memeff_compile.kernels.quantized_attention import reference
from memeff_compile.kernels.quantized_attention.settings import GRANULARITIES, Settings

EIGHT = Settings(127, "e4m3", "row", "kv", with_lse=False)
FOUR = replace(EIGHT, limit=7, smooth="qkv")
SHARES = (25, 50, 75)
"""Percentages of layers that the adaptive choice leaves in 4 bits."""

TABLE_1 = {
    "exact": None,
    "4b scores, nothing taken away": replace(FOUR, values="exact", smooth=""),
    "4b scores, keys": replace(FOUR, values="exact", smooth="k"),
    "4b scores, queries and keys": replace(FOUR, values="exact", smooth="qk"),
}
TABLE_11 = {"8b": EIGHT, "8b+f16": replace(EIGHT, values="f16"), "4b": FOUR}
TABLES_2_3 = {name: replace(FOUR, values="exact", granularity=name) for name in GRANULARITIES}
TABLES_4_5 = {name: replace(FOUR, values=name) for name in ("int8", "e5m2", "e4m3", "f16")}
TABLE_6 = {"values as they are": replace(FOUR, smooth="qk"), "without their mean": FOUR}

Attend = Callable[[int, Tensor, Tensor, Tensor, bool, Any], Tensor | None]


@dataclass
class Replaced(TorchFunctionMode):
    """Lets a function see, and answer, each attention of a forward pass."""

    attend: Attend
    place: int = 0

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        given = dict(kwargs or {})
        if given.get("attn_mask") is not None or given.get("dropout_p"):
            raise SystemExit("attention has a mask or dropout, which these tables do not cover")
        q, k, v = (*args, *(given[name] for name in ("query", "key", "value")[len(args) :]))[:3]
        found = self.attend(self.place, q, k, v, given.get("is_causal", False), given.get("scale"))
        self.place += 1
        return func(*args, **given) if found is None else found


@contextmanager
def attention_is(attend: Attend) -> Iterator[Replaced]:
    """Let `attend` answer each attention, by its place in the forward pass."""
    with Replaced(attend) as mode:
        yield mode


def coded(
    settings: Settings, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: Any
) -> Tensor:
    """Return attention by a variant."""
    factor = q.shape[3] ** -0.5 if scale is None else scale
    ahead = 0 if is_causal else None
    given = Conditions(None, None, None, ahead, None, factor, 0.0, False)
    return reference.attend(q, k, v, given, settings)[0]


# --- end to end -----------------------------------------------------------------------------------


def perplexity(
    model: Any, tokens: Tensor, batch: int, choose: Callable[[int], Settings | None]
) -> float:
    """Return the perplexity of rows of tokens, the attention of each layer as `choose` says."""

    def attend(place: int, *given: Any) -> Tensor | None:
        settings = choose(place)
        return None if settings is None else coded(settings, *given)

    total = torch.zeros((), dtype=torch.float64)
    for first in range(0, len(tokens), batch):
        part = tokens[first : first + batch]
        with torch.no_grad(), attention_is(attend):
            logits = model(input_ids=part, use_cache=False).logits[:, :-1]
        total += F.cross_entropy(
            logits.flatten(0, 1).float(), part[:, 1:].flatten(), reduction="sum"
        ).cpu()
    return math.exp(float(total) / (len(tokens) * (tokens.shape[1] - 1)))


# --- layer by layer -------------------------------------------------------------------------------


@dataclass
class Layer:
    """q, k, v of one attention, how it is called, and its exact result in float64."""

    given: tuple[Any, ...]
    exact: Tensor
    scores: dict[str, dict[str, float]] = field(default_factory=dict)

    def distance(self, settings: Settings) -> dict[str, float]:
        """Return cosine, relative L1 and root mean square of a variant."""
        found = coded(settings, *self.given).double()
        difference = found - self.exact
        return {
            "cosine": float(F.cosine_similarity(found.flatten(), self.exact.flatten(), 0)),
            "relative_l1": float(difference.abs().sum() / self.exact.abs().sum()),
            "rmse": float(difference.square().mean().sqrt()),
        }


def layers(model: Any, tokens: Tensor) -> list[Layer]:
    """Return every attention of one forward pass."""
    found: list[Layer] = []

    def keep(place: int, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: Any) -> None:
        wide = F.scaled_dot_product_attention(
            q.double(), k.double(), v.double(), is_causal=is_causal, scale=scale, enable_gqa=True
        )
        found.append(Layer((q, k, v, is_causal, scale), wide))

    with torch.no_grad(), attention_is(keep):
        model(input_ids=tokens, use_cache=False)
    return found


def average_and_worst(found: list[dict[str, float]]) -> dict[str, Any]:
    """Return the mean over layers, and the layer that is furthest away."""
    count = len(found)
    average = {key: sum(each[key] for each in found) / count for key in found[0]}
    return {"average": average, "worst": max(found, key=lambda each: each["relative_l1"])}


def adaptive(measured: list[Layer], share: int) -> Callable[[int], Settings]:
    """Return the choice that leaves the best `share` percent of layers in 4 bits."""
    scores = []
    for layer in measured:
        found = layer.distance(FOUR)
        scores.append(found["cosine"] * (1.0 - found["relative_l1"]))
    order = sorted(range(len(scores)), key=lambda place: -scores[place])
    few = set(order[: round(len(order) * share / 100)])
    return lambda place: FOUR if place in few else EIGHT


# --- the tables -----------------------------------------------------------------------------------


def tables(model: Any, tokens: Tensor, batch: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each line of each table."""
    base = perplexity(model, tokens, batch, lambda place: None)
    for table, variants in (("1", TABLE_1), ("11", TABLE_11)):
        for name, settings in variants.items():
            found = perplexity(model, tokens, batch, lambda place, s=settings: s)  # type: ignore[misc]
            yield {
                "table": table,
                "variant": name,
                "perplexity": found,
                "against_exact": found / base,
            }
    measured = layers(model, tokens[:batch])
    for share in SHARES:
        found = perplexity(model, tokens, batch, adaptive(measured, share))
        name = f"adaptive, {share} % of the layers 4b"
        yield {"table": "11", "variant": name, "perplexity": found, "against_exact": found / base}
    for table, variants in (("2, 3", TABLES_2_3), ("4, 5", TABLES_4_5), ("6", TABLE_6)):
        for name, settings in variants.items():
            distances = [layer.distance(settings) for layer in measured]
            yield {"table": table, "variant": name, **average_and_worst(distances)}


def show(row: dict[str, Any]) -> str:
    """Return a row as a line of Markdown."""
    cells = [row["table"], row["variant"]]
    if "perplexity" in row:
        cells += [f"{row['perplexity']:.3f}", f"{100 * (row['against_exact'] - 1):+.2f} %"]
    for which in ("average", "worst"):
        if which in row:
            found = row[which]
            cells.append(
                f"{100 * found['cosine']:.2f} % / {found['relative_l1']:.4f} / {found['rmse']:.4f}"
            )
    return f"| {' | '.join(cells)} |"


def run(given: Any) -> None:
    """Measure a saved model, print the tables and append their rows."""
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cuda.matmul.allow_tf32 = False
    model = AutoModelForCausalLM.from_pretrained(
        given.model, dtype=torch.bfloat16, attn_implementation="sdpa"
    )
    model = model.to(device).eval()
    tokens = validation_rows(given.folder, given.length, given.rows_of_text, device)
    facts = {
        "what": "attention ablation",
        "model": json.loads((given.model / "config.json").read_text())["model_type"],
        "parameters": sum(p.numel() for p in model.parameters()),
        "sequences": len(tokens),
        "length": given.length,
        **rows.environment(),
    }
    for row in tables(model, tokens, given.batch):
        rows.append(given.out, {**row, **facts})
        print(show(row), flush=True)
