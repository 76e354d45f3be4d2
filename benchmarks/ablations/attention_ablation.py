"""SageAttention2's tables for trained models: the worth of each part of low bits.

    python benchmarks/models/convergence.py model --to benchmarks/generated/small_model
    python benchmarks/models/small_models.py vit --to benchmarks/generated/small_vit
    python benchmarks/models/small_models.py dit --to benchmarks/generated/small_dit
    python benchmarks/ablations/attention_ablation.py --subject language vision diffusion
    python benchmarks/ablations/attention_ablation.py --subject real --real FOLDER

Part `tables` computes each attention of a model by one variant. The arithmetic is the op's
reference, so that it runs anywhere; differences from the op's levels are named.

    whole model  its perplexity, accuracy or pictures, with every attention replaced (Tables 1, 11)
    layers       each attention on the exact model's own q, k and v, scored alone: average and worst
                 layer (granularity: Tables 2 and 3; formats of weights and values: 4 and 5;
                 values with and without their mean: 6)

`adaptive` takes 4b where its score, on inputs for calibration, is among the best so many percent,
8b elsewhere, as the paper does: by layer, and for a diffusion model by layer and step. `recovered`
is the share of the harm between all 4b and all 8b that this undoes.

Part `door` compiles the model with the backend, at every level, and measures the same. Part `sums`
(Table 7, on a GPU) multiplies the weights and values of layers in E4M3 by the tensor cores and
compares with exact sums of the same products.
"""

from __future__ import annotations

import argparse
import copy
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks import GENERATED, RESULTS, rows
from benchmarks.ablations import attention_subjects as subjects
from benchmarks.ablations.attention_subjects import Subject, attention_is
from memeff_compile.kernels._triton.conditions import Conditions
from memeff_compile.kernels.quantized_attention import quantized_attention, reference
from memeff_compile.kernels.quantized_attention.settings import (
    GRANULARITIES,
    Settings,
    settings_for,
)

EIGHT = settings_for("8b", with_lse=False)
FOUR = settings_for("4b", with_lse=False)
SHARES = (10, 25, 40, 50, 60, 75, 90)
"""Percentages of attentions that the adaptive choice leaves in 4 bits."""
CALIBRATIONS = 3
"""Inputs that the adaptive choice is made on."""

TABLE_1 = {
    "exact": None,
    "4b scores, nothing taken away": replace(FOUR, values="exact", smooth=""),
    "4b scores, keys": replace(FOUR, values="exact", smooth="k"),
    "4b scores, queries and keys": replace(FOUR, values="exact", smooth="qk"),
    "8b scores, nothing taken away": replace(EIGHT, values="exact", smooth=""),
    "8b scores, keys": replace(EIGHT, values="exact", smooth="k"),
}
TABLE_11 = {"8b": EIGHT, "8b+f16": replace(EIGHT, values="f16"), "4b": FOUR}
TABLES_2_3 = {
    name: replace(settings_for("4b", name, with_lse=False), values="exact")
    for name in GRANULARITIES
}
TABLE_1_PAPER = {
    "4b scores of the paper, nothing taken away": replace(TABLES_2_3["thread"], smooth=""),
    "4b scores of the paper, keys": replace(TABLES_2_3["thread"], smooth="k"),
    "4b scores of the paper, queries and keys": replace(TABLES_2_3["thread"], smooth="qk"),
}
"""A scale for the numbers of a thread, neither evened channels nor a Hadamard transform."""
TABLES_4_5 = {name: replace(FOUR, values=name) for name in ("int8", "e5m2", "e4m3", "f16")}
TABLE_6 = {"values as they are": replace(FOUR, smooth="qk"), "without their mean": FOUR}
DOOR = ("exact", "8b", "8b+f16", "4b", "table", "table 40 %")


def coded(
    settings: Settings, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: Any
) -> Tensor:
    """Return attention by a variant; the op's 8b depends on the head dimension."""
    if settings == EIGHT:
        settings = settings_for("8b", with_lse=False, depth=q.shape[3])
    factor = q.shape[3] ** -0.5 if scale is None else scale
    ahead = 0 if is_causal else None
    given = Conditions(None, None, None, ahead, None, factor, 0.0, False)
    return reference.attend(q, k, v, given, settings)[0]


def whole_model(subject: Subject, choose: Callable[[int], Settings | None]) -> dict[str, float]:
    """Return the measures of a model whose attentions are as `choose` says, by their place."""

    def attend(place: int, *given: Any) -> Tensor | None:
        settings = choose(place)
        return None if settings is None else coded(settings, *given)

    return subject.quality(subject.model, attend)


# --- layer by layer -------------------------------------------------------------------------------


@dataclass
class Layer:
    """q, k, v of one attention, how it is called, and its exact result in float64."""

    given: tuple[Any, ...]
    exact: Tensor

    def distance(self, settings: Settings) -> dict[str, float]:
        """Return cosine, relative L1 and root mean square of a variant."""
        return distance(coded(settings, *self.given), self.exact)


def distance(found: Tensor, exact: Tensor) -> dict[str, float]:
    """Return cosine, relative L1 and root mean square of a result."""
    found = found.double()
    difference = found - exact
    return {
        "cosine": float(F.cosine_similarity(found.flatten(), exact.flatten(), 0)),
        "relative_l1": float(difference.abs().sum() / exact.abs().sum()),
        "rmse": float(difference.square().mean().sqrt()),
    }


def exactly(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: Any) -> Tensor:
    """Return attention in float64."""
    return F.scaled_dot_product_attention(
        q.double(), k.double(), v.double(), is_causal=is_causal, scale=scale, enable_gqa=True
    )


def layers(subject: Subject, number: int = 0) -> list[Layer]:
    """Return every attention of one run."""
    found: list[Layer] = []

    def keep(place: int, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: Any) -> None:
        given = (q.clone(), k.clone(), v.clone(), is_causal, scale)
        found.append(Layer(given, exactly(*given)))

    with torch.no_grad(), attention_is(keep):
        subject.run(subject.model, number)
    return found


def average_and_worst(found: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Return the mean over layers, and the layer that is furthest away."""
    count = len(found)
    average = {key: sum(each[key] for each in found) / count for key in found[0]}
    return {"average": average, "worst": max(found, key=lambda each: each["relative_l1"])}


# --- adaptive -------------------------------------------------------------------------------------


def scores(subject: Subject, settings: Settings) -> list[list[float]]:
    """Return the score of a variant for each attention: by place, one for each calibration."""
    found: list[list[float]] = []
    for number in range(CALIBRATIONS):

        def look(place: int, *given: Any) -> None:
            mine = distance(coded(settings, *given), exactly(*given))
            score = mine["cosine"] * (1.0 - mine["relative_l1"])
            if place == len(found):
                found.append([])
            found[place].append(score)

        with torch.no_grad(), attention_is(look):
            subject.run(subject.model, number)
    return found


def best(means: Sequence[float], share: int) -> set[int]:
    """Return the places of the best `share` percent of scores."""
    order = sorted(range(len(means)), key=lambda place: -means[place])
    return set(order[: round(len(order) * share / 100)])


def adaptive_rows(subject: Subject, ends: dict[str, float]) -> Iterator[dict[str, Any]]:
    """Yield the measures with so many attentions in 4 bits, and the scores that chose them.

    Args:
        subject: the model.
        ends: the harm at "4b" and "8b".
    """
    of_four, of_eight = scores(subject, FOUR), scores(subject, EIGHT)
    means = [sum(each) / len(each) for each in of_four]
    yield {
        "table": "scores",
        "variant": "by layer, then by step",
        "calls": len(means) // subject.layers,
        "four": summary(of_four, subject.layers),
        "eight": summary(of_eight, subject.layers),
    }
    by_layer = [
        sum(means[layer :: subject.layers]) * subject.layers / len(means)
        for layer in range(subject.layers)
    ]
    ways: dict[str, Callable[[int], set[int]]] = {"by layer": lambda share: best(by_layer, share)}
    if len(means) > subject.layers:
        ways["by layer and step"] = lambda share: best(means, share)
    for way, pick in ways.items():
        for share in SHARES:
            few = pick(share)
            period = subject.layers if way == "by layer" else len(means)
            measures = whole_model(
                subject, lambda place, few=few, n=period: FOUR if place % n in few else EIGHT
            )
            gap = ends["4b"] - ends["8b"]
            undone = (ends["4b"] - measures[subject.harm]) / gap if gap else math.nan
            count = len(few) * (len(means) // period)
            yield {
                "table": "11",
                "variant": f"adaptive {way}, {share} % of them 4b",
                "share_of_4b": count / len(means),
                "recovered": undone,
                **measures,
            }


def summary(found: Sequence[Sequence[float]], count: int) -> dict[str, list[list[float]]]:
    """Return mean and deviation over inputs of scores, as lists of steps by layer."""
    means = [sum(each) / len(each) for each in found]
    spreads = [
        math.sqrt(sum((score - mean) ** 2 for score in each) / len(each))
        for each, mean in zip(found, means, strict=True)
    ]
    return {
        name: [[round(value, 5) for value in values[layer::count]] for layer in range(count)]
        for name, values in (("mean", means), ("deviation", spreads))
    }


# --- the tables -----------------------------------------------------------------------------------


def tables(subject: Subject) -> Iterator[dict[str, Any]]:
    """Yield a row for each line of each table."""
    ends: dict[str, float] = {}
    for table, variants in (("1", TABLE_1 | TABLE_1_PAPER), ("11", TABLE_11)):
        for name, settings in variants.items():
            measures = whole_model(subject, lambda place, s=settings: s)  # type: ignore[misc]
            ends[name] = measures[subject.harm]
            yield {"table": table, "variant": name, **measures, **against(ends, subject, name)}
    in_fp32 = subject.quality(copy.deepcopy(subject.model).float())
    ends["fp32"] = in_fp32[subject.harm]
    name = "model in fp32, exact"
    yield {"table": "11", "variant": name, **in_fp32, **against(ends, subject, "fp32")}
    measured = layers(subject)
    for table, variants in (("2, 3", TABLES_2_3), ("4, 5", TABLES_4_5), ("6", TABLE_6)):
        for name, settings in variants.items():
            distances = [layer.distance(settings) for layer in measured]
            yield {"table": table, "variant": name, **average_and_worst(distances)}
    for row in adaptive_rows(subject, ends):
        ends["adaptive"] = row.get(subject.harm, math.nan)
        yield {**row, **against(ends, subject, "adaptive")}


def against(ends: dict[str, float], subject: Subject, name: str) -> dict[str, float]:
    """Return how a perplexity compares with the exact model's."""
    if subject.harm != "loss" or math.isnan(ends[name]):
        return {}
    return {"against_exact": math.exp(ends[name] - ends["exact"])}


# --- through the backend --------------------------------------------------------------------------


def door(subject: Subject, inner: str, levels: Sequence[str] = DOOR) -> Iterator[dict[str, Any]]:
    """Yield the measures of the compiled model at each level, or why there are none.

    `table` is the calibrated table of 4b and 8b with half of the calls in 4b, `table 40 %` with
    that share.
    """
    if hasattr(subject.model, "set_attn_implementation"):
        subject.model.set_attn_implementation("sdpa")
    first = subject.quality(subject.model)
    yield {"table": "door", "variant": "eager", **first}
    exact_loss = math.nan
    for level in levels:
        row: dict[str, Any] = {"table": "door", "variant": level, "inner": inner}
        try:
            found, measures = compiled_quality(subject, level, inner)
        except Exception as problem:  # the next level may do
            yield {**row, "failed": f"{type(problem).__name__}: {problem}"[:300]}
            continue
        exact_loss = measures.get("loss", math.nan) if level == "exact" else exact_loss
        if subject.harm == "loss" and not math.isnan(exact_loss):
            row["against_exact"] = math.exp(measures["loss"] - exact_loss)
        yield {**row, **found, **measures}


def compiled_quality(
    subject: Subject, level: str, inner: str
) -> tuple[dict[str, Any], dict[str, float]]:
    """Compile a model at a level; return the backend's rewrites, and the measures."""
    import memeff_compile
    from memeff_compile.backend import memeff  # by name it needs an installation

    torch._dynamo.reset()
    memeff_compile.reset()
    chosen: Any = level
    found: dict[str, Any] = {}
    if level.startswith("table"):
        chosen = in_four_bits(subject, 40 if "40" in level else 50)
        levels: list[str] = []
        for site, each in chosen["levels"].items():
            calls = len(chosen["scores"][site]["4b"])
            levels += each if isinstance(each, list) else [each] * calls
        found["levels"] = {each: levels.count(each) for each in sorted(set(levels))}
        found["min_score"] = chosen["min_score"]
    options = {"memeff.attention": chosen, "memeff.attention.length": 0, "memeff.inner": inner}
    compiled = torch.compile(subject.model, backend=memeff, options=options)
    measures = subject.quality(compiled)
    found["sites"] = sum(
        record.sites
        for record in memeff_compile.last_report().records
        if record.pass_name == "quantize_attention" and record.action == "rewrote"
    )
    wanted = 0 if level == "exact" else 1
    if found["sites"] < wanted:
        raise RuntimeError("the backend left attention as it was")
    return found, measures


def in_four_bits(subject: Subject, share: int) -> Any:
    """Return calibration's table whose least score leaves this percentage of calls in 4b."""
    import memeff_compile

    inputs = list(range(CALIBRATIONS))
    least = 0.0
    for _ in range(2):
        table = memeff_compile.calibrate_attention(
            subject.model, inputs, min_score=least, levels=("4b", "8b"), run=subject.run
        )
        found = sorted(call["worst"] for site in table["scores"].values() for call in site["4b"])
        least = found[len(found) * (100 - share) // 100]
    return table


# --- sums of tensor cores -------------------------------------------------------------------------

LENGTHS = (1024, 8192, 65536)


def sums(subject: Subject) -> Iterator[dict[str, Any]]:
    """Yield the error of E4M3 products on the layers of a model, and on longer random ones."""
    found: dict[str, list[dict[str, float]]] = {}
    for layer in layers(subject):
        q, k, v, is_causal, scale = (
            each[:1] if torch.is_tensor(each) else each for each in layer.given
        )
        for name, row in sums_of(*weights_and_values(q, k, v, is_causal, scale)).items():
            found.setdefault(name, []).append(row)
        found.setdefault("this package's kernel", []).append(kernel_against_reference(layer))
    for name, distances in found.items():
        yield {"table": "7", "variant": name, **average_and_worst(distances)}


def random_sums(device: str) -> Iterator[dict[str, Any]]:
    """Yield the error of E4M3 products over many keys of plain noise."""
    generator = torch.Generator(device).manual_seed(0)
    for length in LENGTHS:
        for mean in (0.0, 2.0):
            weights = torch.randn(1, 1, 256, length, device=device, generator=generator).exp()
            values = torch.randn(1, 1, length, 64, device=device, generator=generator)
            values += mean * torch.randn(1, 1, 1, 64, device=device, generator=generator)
            for name, row in sums_of(weights, values).items():
                variant = f"{name}; {length} keys, means of values {mean:g} deviations"
                yield {"table": "7, random", "variant": variant, "average": row}


def weights_and_values(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: Any
) -> tuple[Tensor, Tensor]:
    """Return the weights of attention, the largest of a row 1, and the values of each head."""
    factor = q.shape[3] ** -0.5 if scale is None else scale
    repeat = q.shape[1] // k.shape[1]
    keys, values = (each.float().repeat_interleave(repeat, 1) for each in (k, v))
    score = q.float() @ keys.transpose(2, 3) * factor
    if is_causal:
        hidden = torch.ones(score.shape[2:], dtype=torch.bool, device=q.device).triu(1)
        score = score.masked_fill(hidden, -math.inf)
    return (score - score.amax(-1, keepdim=True)).exp(), values


def sums_of(weights: Tensor, values: Tensor) -> dict[str, dict[str, float]]:
    """Return how far products of tensor cores are from exact sums of the same E4M3 numbers."""
    top = 448.0
    missing = -values.shape[2] % 16
    rows_missing = -weights.shape[2] % 16
    left = F.pad(weights / weights.amax(-1, keepdim=True) * top, (0, missing, 0, rows_missing))
    size = values.abs().amax(2, keepdim=True).clamp_min(1e-30)
    right = F.pad(values / size * top, (0, 0, 0, missing))
    left, right = left.to(torch.float8_e4m3fn), right.to(torch.float8_e4m3fn)
    parts: dict[str, list[Tensor]] = {}
    for mine, theirs in zip(left.flatten(0, 1), right.flatten(0, 1), strict=True):
        parts.setdefault("exact", []).append(mine.double() @ theirs.double())
        columns = theirs.t().contiguous().t()
        one = torch.ones((), device=left.device)
        for name, fast in (("one sum in the tensor core", True), ("promoted to fp32", False)):
            found = torch._scaled_mm(
                mine, columns, one, one, out_dtype=torch.float32, use_fast_accum=fast
            )
            parts.setdefault(name, []).append(found)
    exact = torch.stack(parts.pop("exact")) / top**2
    return {name: distance(torch.stack(found) / top**2, exact) for name, found in parts.items()}


def kernel_against_reference(layer: Layer) -> dict[str, float]:
    """Return how far the op's kernel is from its reference, whose sums are exact."""
    q, k, v, is_causal, scale = layer.given
    ahead = 0 if is_causal else None
    found = quantized_attention(q, k, v, ahead=ahead, scale=scale, level="8b", with_lse=False)[0]
    return distance(found, coded(EIGHT, q, k, v, is_causal, scale).double())


# --- the command ----------------------------------------------------------------------------------


def show(row: dict[str, Any]) -> str:
    """Return a row as a line of Markdown."""
    cells = [row["model"], row["table"], row["variant"]]
    if "failed" in row:
        cells.append(row["failed"])
    for key in (
        "perplexity",
        "accuracy",
        "same_answers",
        "psnr_db",
        "psnr_db_worst",
        "mse",
        "relative_l1",
        "read_rightly",
        "share_of_4b",
        "recovered",
    ):
        if key in row:
            cells.append(f"{key} {row[key]:.5g}")
    if "against_exact" in row:
        cells.append(f"{100 * (row['against_exact'] - 1):+.3f} %")
    for which in ("average", "worst"):
        if which in row:
            found = row[which]
            cells.append(
                f"{100 * found['cosine']:.2f} % / {found['relative_l1']:.4f} / {found['rmse']:.4f}"
            )
    return f"| {' | '.join(cells)} |"


def arguments() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    data = GENERATED
    parser.add_argument(
        "--subject", nargs="+", choices=list(LOADERS), default=["language"], help="models"
    )
    parser.add_argument("--part", nargs="+", choices=["tables", "door", "sums"], default=["tables"])
    parser.add_argument("--model", type=Path, default=data / "small_model")
    parser.add_argument("--real", type=Path, help="folder of a real model, for --subject real")
    parser.add_argument("--text", default="prose", help="of texts.py, for --subject real")
    parser.add_argument("--vit", type=Path, default=data / "small_vit")
    parser.add_argument("--dit", type=Path, default=data / "small_dit")
    parser.add_argument("--glyphs", type=Path, default=data / "glyphs.npz")
    parser.add_argument("--folder", type=Path, default=data, help="of the text")
    parser.add_argument("--length", type=int, default=512, help="of a sequence of text")
    parser.add_argument("--rows-of-text", type=int, default=128, help="sequences of text")
    parser.add_argument("--batch", type=int, default=8, help="sequences at a time")
    parser.add_argument("--pictures", type=int, default=16384, help="to classify")
    parser.add_argument("--drawn", type=int, default=144, help="pictures to draw")
    parser.add_argument("--sampling-steps", type=int, default=30)
    parser.add_argument("--guidance", type=float, default=1.5)
    parser.add_argument("--seed", type=int, default=0, help="of the models, for the rows")
    parser.add_argument("--keep-pictures", type=Path, help="file for those drawn in part door")
    parser.add_argument("--inner", default="inductor", help="of the backend")
    parser.add_argument("--levels", nargs="+", choices=DOOR, default=list(DOOR), help="of the door")
    parser.add_argument("--out", type=Path, default=RESULTS / "attention-ablation.jsonl")
    return parser


def _language(given: Any, device: str) -> Subject:
    return subjects.language_model(
        given.model, given.folder, given.length, given.rows_of_text, given.batch, device
    )


def _real(given: Any, device: str) -> Subject:
    if given.real is None:
        raise SystemExit("--subject real needs --real FOLDER, the folder of a saved model")
    size = given.length, given.rows_of_text, given.batch
    return subjects.real_model(given.real, given.text, *size, device)


def _vision(given: Any, device: str) -> subjects.Classifier:
    batch = min(512, given.pictures)
    return subjects.classifier(
        given.vit, given.glyphs, given.pictures, batch, device, torch.bfloat16
    )


def _diffusion(given: Any, device: str) -> Subject:
    reader = _vision(given, device) if (given.vit / "sizes.json").exists() else None
    return subjects.painter(
        given.dit, given.drawn, given.sampling_steps, given.guidance, device, torch.bfloat16, reader
    )


LOADERS: dict[str, Callable[[Any, str], Subject]] = {
    "language": _language,
    "real": _real,
    "vision": _vision,
    "diffusion": _diffusion,
}


def main() -> None:
    """Measure saved models, print the tables and append their rows."""
    given = arguments().parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cuda.matmul.allow_tf32 = False
    for name in given.subject:
        subject = LOADERS[name](given, device)
        facts = {
            "what": "attention ablation",
            "model": subject.name,
            "seed": given.seed,
            "inputs": subject.inputs,
            "parameters": sum(p.numel() for p in subject.model.parameters()),
            **rows.environment(),
        }
        kept: dict[str, Tensor] = {}
        for part in given.part:
            for row in rows_of(part, subject, given.inner, given.levels, device):
                whole = {"part": part, **row, **facts}
                rows.append(given.out, whole)
                print(show(whole), flush=True)
                latest = getattr(subject, "latest", None)
                if part == "door" and latest is not None:
                    kept[row["variant"]] = latest[: subject.model.sizes.classes]
        if given.keep_pictures and kept:
            arrays = {name: each.cpu().half().numpy() for name, each in kept.items()}
            numpy.savez_compressed(given.keep_pictures, **arrays)


def rows_of(
    part: str, subject: Subject, inner: str, levels: Sequence[str], device: str
) -> Iterator[dict[str, Any]]:
    """Yield the rows of a part."""
    if part == "tables":
        yield from tables(subject)
    elif part == "door":
        yield from door(subject, inner, levels)
    elif device != "cuda":
        print("part sums needs a GPU: it measures tensor cores", flush=True)
    else:
        yield from sums(subject)
        if isinstance(subject, subjects.LanguageModel):
            yield from random_sums(device)


if __name__ == "__main__":
    main()
