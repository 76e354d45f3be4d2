"""BitNet a4.8's tables and figures on a small Llama, trained with its quantisers.

    python benchmarks/ablations/ternary_ablation.py run --budget-seconds 450 --workers 5
    python benchmarks/ablations/ternary_ablation.py run --only "b1.58 relu2" --seed 0 1 2
    python benchmarks/ablations/ternary_ablation.py table

A run is a variant and a seed. The same seed gives every variant the same initial weights and the
same text in the same order. Variants with a second stage start from the weights and the optimizer
state that the run "a4.8" has when its first stage ends (INT8 tokens for 95 % of the steps); "a4.8"
itself goes through `TernaryStages`. Models are made by `ternarize_` and compiled by memeff.
Quantisers that only the paper's ablations have are `reference_quantizers.py`; "spelled" variants
are a model whose linears are written as published, for the pass `ternarize_linear` to find, and the
same under Inductor.

`run` appends to one file of curves and leaves out complete runs. Lines of a run: its description;
then loss and validation loss of every hundred steps; then the figures of the trained model.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import itertools
import math
import os
import sys
import time
import traceback
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks import GENERATED_8192, RESULTS, ROOT, rows
from benchmarks.ablations.reference_quantizers import QUANTIZERS, ReferenceLinear
from benchmarks.models import small_training, training
from benchmarks.models.convergence import read_curves
from memeff_compile.kernels.ternary_linear import KINDS, Quantizer, reference
from memeff_compile.model import TernaryLinear, TernaryStages, ternarize_, use_low_bit_heads_

ROLES = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "out": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}
SWITCH_SHARE = 0.95
FAMILY = "a4.8"
"""The run whose first stage the second stages start from."""

Kinds = tuple[str, str, str, str]
"""Quantisers of the inputs of `ROLES`, in their order."""

INT8: Kinds = ("int8", "int8", "int8", "int8")
HYBRID: Kinds = ("int4", "topk8", "int4", "int8")
HYBRID_FP4: Kinds = ("fp4", "fp4", "fp4", "int8")


@dataclass(frozen=True)
class Variant:
    """The properties of a run.

    Attributes:
        kinds: of the inputs of q/k/v, attention's output, gate/up and down; None: a dense model.
        activation: of the gated MLP: "relu2" or "silu".
        stages: `kinds` are those of the second stage; the first has INT8.
        heads: bits of queries, of keys and values, and how many first tokens keep 4; second stage.
        linears: "memeff": made by `ternarize_`; "spelled": written as published.
        backend: "memeff" or "inductor".
    """

    kinds: Kinds | None
    activation: str = "relu2"
    stages: bool = False
    heads: tuple[int, int, int] | None = None
    linears: str = "memeff"
    backend: str = "memeff"


VARIANTS: dict[str, Variant] = {
    FAMILY: Variant(HYBRID, stages=True),
    "full precision": Variant(None, "silu"),
    "b1.58": Variant(INT8, "silu"),
    "all int4": Variant(("int4", "int4", "int4", "int4-2mean")),
    "all fp4": Variant(("fp4", "fp4", "fp4", "fp4")),
    "hybrid": Variant(HYBRID),
    "down int4 relu2": Variant(("int8", "int8", "int8", "int4-2mean")),
    "b1.58 relu2": Variant(INT8, stages=True),
    "a4.8 fp4": Variant(HYBRID_FP4, stages=True),
    "down int4 silu": Variant(("int8", "int8", "int8", "int4-2mean"), "silu"),
    "down fp4 relu2": Variant(("int8", "int8", "int8", "fp4")),
    "down fp4 silu": Variant(("int8", "int8", "int8", "fp4"), "silu"),
    "inputs int4 absmean": Variant(("int4", "int8", "int4", "int8")),
    "inputs int4 absmax": Variant(("int4-absmax", "int8", "int4-absmax", "int8")),
    "inputs fp4 e2m1": Variant(("fp4", "int8", "fp4", "int8")),
    "no top-k": Variant(("int4", "int8", "int4", "int8"), stages=True),
    "kv4": Variant(HYBRID, stages=True, heads=(16, 4, 0)),
    "qkv4": Variant(HYBRID, stages=True, heads=(4, 4, 0)),
    "q4 kv3": Variant(HYBRID, stages=True, heads=(4, 3, 1)),
    "q4 kv3, first in 3": Variant(HYBRID, stages=True, heads=(4, 3, 0)),
    "full precision relu2": Variant(None),
    "spelled": Variant(INT8, linears="spelled"),
    "spelled, inductor": Variant(INT8, linears="spelled", backend="inductor"),
}
"""In the order in which they are worth most; the first stage comes first."""

RECIPES = {
    "full": dataclasses.replace(
        training.RECIPES["full"],
        vocabulary=8192,
        layers=8,
        steps=800,
        warm_up=80,
        validation_batches=6,
        final_batches=60,
    ),
    "tiny": dataclasses.replace(
        training.RECIPES["tiny"],
        steps=8,
        validate_every=4,
        train_every=2,
        validation_batches=1,
        final_batches=1,
        width=64,
        inner=96,
    ),
}
TEXTS = ("python", "other")
CORPUS = ["--megabytes", "72", "--other-megabytes", "24", "--vocabulary", "8192"]
CORPUS += ["--sample-megabytes", "12", "--validation-share", "16"]


@dataclass(frozen=True)
class Job:
    """One run, with the settings that a worker process needs."""

    variant: str
    seed: int
    size: str
    folder: Path
    out: Path
    inner: str
    deadline: float
    command: str
    steps: int | None = None

    @property
    def name(self) -> str:
        """Variant and seed, as the file of curves spells them."""
        return f"{self.variant}/{self.seed}"

    @property
    def recipe(self) -> training.Recipe:
        """The recipe."""
        recipe = RECIPES[self.size]
        return dataclasses.replace(recipe, steps=self.steps or recipe.steps)

    @property
    def switch(self) -> int:
        """Steps of the first stage."""
        return round(self.recipe.steps * SWITCH_SHARE)

    @property
    def start(self) -> Path:
        """Where the state at the end of the first stage lies."""
        return self.folder / f"first-stage-{self.size}-{self.recipe.steps}-{self.seed}.pt"


# --- models ---------------------------------------------------------------------------------------


def build(recipe: training.Recipe, activation: str, seed: int, device: str) -> Any:
    """Build the dense model of a seed."""
    from transformers.activations import ACT2FN

    torch.manual_seed(seed)
    model = training.build_model(recipe, device)
    for layer in model.model.layers:
        layer.mlp.act_fn = ACT2FN[activation]
    model.config.hidden_act = activation
    return model


def patterns(kinds: Kinds) -> dict[str, str]:
    """Return a quantiser for each pattern of module paths."""
    pairs = zip(ROLES.values(), kinds, strict=True)
    return {f"*.{name}": kind for names, kind in pairs for name in names}


def spell(model: Any, kinds: Kinds, only: set[str]) -> None:
    """Replace linears whose quantiser is among `only` by their published spelling."""
    by_name = {pattern[2:]: kind for pattern, kind in patterns(kinds).items()}
    for parent in list(model.model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear) and by_name.get(name) in only:
                setattr(parent, name, ReferenceLinear.of(child, by_name[name]))


def quantize_linears(model: Any, variant: Variant, kinds: Kinds) -> None:
    """Make the linears of a dense model those of the variant."""
    if variant.linears == "spelled":
        spell(model, kinds, set(QUANTIZERS))
        return
    others = set(kinds) - set(KINDS)
    spell(model, kinds, others)
    ours = {pattern: kind for pattern, kind in patterns(kinds).items() if kind not in others}
    ternarize_(model, "b1.58", kinds=ours, skip=[p for p in patterns(kinds) if p not in ours])


@torch.no_grad()
def zeros(model: Any, ids: Tensor, device: str) -> dict[str, float]:
    """Return the share of zeros among the codes of each projection's input (table 2).

    "up" also counts outputs that the activation of the gate makes zero, and need no input;
    "overall" weights the projections by their size.
    """
    counts: dict[str, list[float]] = {}

    def note(name: str, x: Tensor) -> None:
        counts.setdefault(name, []).append(float((x == 0).float().mean()))

    def of_input(name: str) -> Any:
        def look(module: nn.Module, inputs: tuple[Tensor]) -> None:
            x = inputs[0].flatten(0, -2)
            if isinstance(module, TernaryLinear):
                note(name, reference.codes_and_scale(x, Quantizer(module.kind))[0])
            elif isinstance(module, ReferenceLinear):
                note(name, QUANTIZERS[module.kind](x.float()))
            else:
                note(name, x)

        return look

    hooks = []
    for layer in model.model.layers:
        for path, module in layer.named_modules():
            if isinstance(module, nn.Linear):
                hooks.append(module.register_forward_pre_hook(of_input(path.split(".")[-1])))
        gate = layer.mlp.act_fn.register_forward_hook(lambda m, i, out: note("gate_out", out))
        hooks.append(gate)
    try:
        with training.autocast(device):
            model.model(input_ids=ids)
    finally:
        for hook in hooks:
            hook.remove()
    mean = {name: sum(found) / len(found) for name, found in counts.items()}
    up = 1 - (1 - mean["up_proj"]) * (1 - mean["gate_out"])
    share = {
        "qkv": (mean["q_proj"] + mean["k_proj"] + mean["v_proj"]) / 3,
        "out": mean["o_proj"],
        "up": up,
        "gate": mean["gate_proj"],
        "down": mean["down_proj"],
    }
    attention, wide = model.model.layers[0].self_attn, model.model.layers[0].mlp.gate_proj.weight
    inputs = (attention.q_proj, attention.k_proj, attention.v_proj)
    size = {"qkv": sum(each.weight.numel() for each in inputs)}
    size |= {"out": attention.o_proj.weight.numel()}
    size |= dict.fromkeys(("up", "gate", "down"), wide.numel())
    share["overall"] = sum(share[k] * size[k] for k in size) / sum(size.values())
    return {name: round(value, 4) for name, value in share.items()}


# --- a run ----------------------------------------------------------------------------------------


def perform(job: Job) -> str:
    """Do one run and report it; return a line about it."""
    started = time.monotonic()
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()

    def report(row: dict[str, Any]) -> None:
        rows.append(job.out, {"run": job.name, **row})

    try:
        last = train(job, report)
    except training.OutOfTime as stop:
        report({"stopped": str(stop)})
        return f"{job.name}: {stop}"
    except Exception as problem:
        if job.variant == FAMILY:
            job.start.with_suffix(".failed").touch()
        text = f"{type(problem).__name__}: {problem}"[:300]
        report({"error": text})
        traceback.print_exc()
        return f"{job.name}: {text}"
    report({"done": True, **last, "seconds": round(time.monotonic() - started, 1)})
    return f"{job.name}: {last['python']['loss']:.4f}, {time.monotonic() - started:.0f} s"


def train(job: Job, report: small_training.Report) -> dict[str, Any]:
    """Train the run's model and return its figures."""
    variant, recipe = VARIANTS[job.variant], job.recipe
    device = "cuda" if torch.cuda.is_available() else "cpu"
    branches = variant.stages and job.variant != FAMILY
    state = wait_for(job) if branches else None
    described = {**dataclasses.asdict(variant), "recipe": dataclasses.asdict(recipe)}
    corpus = training.corpus_digest(job.folder)
    report({**described, "corpus": corpus, **rows.environment(), "command": job.command})
    text = training.Tokens(job.folder, "python-train", recipe, device)
    held_out = training.Tokens(job.folder, "python-validation", recipe, device)
    order = text.order(recipe.steps, job.seed)
    model = build(recipe, variant.activation, job.seed, device)
    if variant.kinds is not None:
        quantize_linears(model, variant, INT8 if variant.stages else variant.kinds)
    loop = small_training.Loop(
        model, recipe, device, lambda step: text[order[step]], held_out, report,
        deadline=job.deadline,
    )  # fmt: skip
    small_training.compile_whole(model, variant.backend, job.inner)
    if variant.stages:
        two_stages(job, variant, loop, state, device)
    else:
        loop.run(0, recipe.steps)
    return figures(job, loop, device)


def two_stages(
    job: Job, variant: Variant, loop: small_training.Loop, state: Any, device: str
) -> None:
    """Go through both stages, or take up the state at the end of the first."""
    recipe, model = loop.recipe, loop.model
    assert variant.kinds is not None
    stages = TernaryStages(model, recipe.steps, share=SWITCH_SHARE, kinds=patterns(variant.kinds))
    if state is None:
        loop.after_step = lambda done: stages.step()
        loop.run(0, job.switch)
        save(loop.state(), job.start)
    else:
        loop.load(state)
        del state
        loop.report({"step": job.switch, "validation": round(loop.validate(), 5), "stage": 1})
        stages.load_state_dict({"done": job.switch})
    if variant.heads is not None:
        query, key_value, first = variant.heads
        use_low_bit_heads_(model, query=query, key_value=key_value, first=first)
    loop.report({"step": job.switch, "validation": round(loop.validate(), 5), "stage": 2})
    loop.recipe = dataclasses.replace(recipe, validate_every=recipe.train_every)
    loop.run(job.switch, recipe.steps)


def save(state: dict[str, Any], path: Path) -> None:
    """Write a state atomically."""
    part = path.with_suffix(".part")
    torch.save(state, part)
    part.rename(path)


def wait_for(job: Job) -> Any:
    """Return the state at the end of the first stage, once it is there."""
    while not job.start.exists():
        if time.monotonic() > job.deadline:
            raise training.OutOfTime("the first stage was not there in time")
        if job.start.with_suffix(".failed").exists():
            raise RuntimeError(f"the first stage, {FAMILY}/{job.seed}, failed")
        time.sleep(2)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.load(job.start, map_location=device, weights_only=True)


def figures(job: Job, loop: small_training.Loop, device: str) -> dict[str, Any]:
    """Return the trained model's figures, on held-out text of both slices."""
    recipe, found = loop.recipe, {}
    for name in TEXTS:
        held_out = training.Tokens(job.folder, f"{name}-validation", recipe, device)
        found[name] = small_training.judge(loop.model, held_out, recipe.final_batches, device)
        if not math.isfinite(found[name]["loss"]):
            raise FloatingPointError(f"validation loss is {found[name]['loss']}")
    shares = zeros(loop.model, loop.held_out[: recipe.batch], device)
    variant = VARIANTS[job.variant]
    return {
        **found,
        "zeros": shares,
        "rewrites": small_training.rewrites() if variant.backend == "memeff" else None,
        "first_step_s": round(loop.first_step_s, 1),
        "loop_s": round(loop.seconds, 1),
        "parameters": sum(p.numel() for p in loop.model.parameters()),
    }


# --- the driver -----------------------------------------------------------------------------------


def jobs(given: argparse.Namespace) -> list[Job]:
    """Return the runs that are not complete: low seeds first, then in the order of `VARIANTS`."""
    finished = {
        name: lines[0]["recipe"]
        for name, lines in read_curves(given.out).items()
        if lines[-1].get("done")
    }
    deadline = math.inf
    if given.budget_seconds is not None:
        deadline = time.monotonic() + given.budget_seconds
    found = []
    for seed, name in itertools.product(given.seed, given.only or VARIANTS):
        job = Job(
            name, seed, given.size, given.folder, given.out, given.inner, deadline,
            rows.command(), given.steps,
        )  # fmt: skip
        if finished.get(job.name) != dataclasses.asdict(job.recipe):
            found.append(job)
    wanting = {j.seed: j for j in found if VARIANTS[j.variant].stages and not j.start.exists()}
    there = {j.seed for j in found if j.variant == FAMILY}
    families = [
        dataclasses.replace(j, variant=FAMILY) for s, j in wanting.items() if s not in there
    ]
    worth = list(VARIANTS)
    return sorted(families + found, key=lambda job: (job.seed, worth.index(job.variant)))


def run(given: argparse.Namespace) -> int:
    """Do the runs that are not complete, in several processes."""
    small_training.ensure_corpus(given.folder, given.corpus or CORPUS)
    waiting = jobs(given)
    if given.workers == 0:
        results = map(perform, waiting)
        for line in results:
            print(line, flush=True)
    else:
        os.environ["PYTHONPATH"] = os.pathsep.join(
            filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
        )
        with ProcessPoolExecutor(given.workers, get_context("spawn")) as pool:
            for line in pool.map(perform, waiting):
                print(line, flush=True)
    lines = read_curves(given.out).values()
    failed = [found[0]["run"] for found in lines if "error" in found[-1]]
    print(f"{sum(bool(f[-1].get('done')) for f in lines)} complete; failed: {failed}")
    return 1 if failed else 0


# --- tables ---------------------------------------------------------------------------------------


Curves = dict[str, list[list[dict[str, Any]]]]


def finished_by_variant(path: Path) -> Curves:
    """Return the lines of complete runs by variant, one list per seed."""
    found: Curves = {}
    for name, lines in read_curves(path).items():
        if lines[-1].get("done"):
            found.setdefault(name.rsplit("/", 1)[0], []).append(lines)
    return found


def mean(values: list[float]) -> float:
    """Return the mean."""
    return sum(values) / len(values)


def final(curves: Curves, name: str, text: str = "python", key: str = "loss") -> list[float]:
    """Return a figure of each seed."""
    return [lines[-1][text][key] for lines in curves.get(name, [])]


def shown(curves: Curves, name: str, base: str) -> list[str]:
    """Return the cells of a table: perplexities, accuracies, loss against the base, seeds."""
    if name not in curves:
        return ["-"] * 6
    cells = [format(math.exp(mean(final(curves, name, t))), ".3f") for t in TEXTS]
    cells += [f"{mean(final(curves, name, t, 'accuracy')):.2%}" for t in TEXTS]
    seeds = {lines[0]["run"].rsplit("/", 1)[1]: lines[-1] for lines in curves[name]}
    others = {lines[0]["run"].rsplit("/", 1)[1]: lines[-1] for lines in curves.get(base, [])}
    apart = [seeds[s]["python"]["loss"] - others[s]["python"]["loss"] for s in seeds if s in others]
    cells.append(format(mean(apart), "+.4f") if apart else "-")
    return [*cells, str(len(seeds))]


TABLES: dict[str, tuple[str, list[str]]] = {
    "Table 1": ("b1.58 relu2", ["full precision", "full precision relu2", "b1.58", "b1.58 relu2",
                                "a4.8 fp4", "a4.8"]),
    "Table 3": ("a4.8", ["a4.8", "kv4", "qkv4", "q4 kv3", "q4 kv3, first in 3"]),
    "Table 4": ("no top-k", ["no top-k", "a4.8"]),
    "Figure 4": ("b1.58 relu2", ["b1.58 relu2", "hybrid", "all int4", "all fp4"]),
    "Figure 5": ("b1.58 relu2", ["b1.58 relu2", "down int4 relu2",
                 "down fp4 relu2", "b1.58", "down int4 silu", "down fp4 silu"]),
    "Figure 6": ("b1.58 relu2", ["inputs int4 absmean", "inputs int4 absmax",
                                         "inputs fp4 e2m1"]),
    "Spellings": ("b1.58 relu2", ["b1.58 relu2", "spelled", "spelled, inductor"]),
}  # fmt: skip
"""Table of the paper -> the run that losses are compared with, and its runs."""


def tables(given: argparse.Namespace) -> int:
    """Print the paper's tables from the curves."""
    curves = finished_by_variant(given.out)
    for title, (base, names) in TABLES.items():
        print(f"\n{title} (loss against {base!r})\n")
        heads = "perplexity on Python code | perplexity on other text"
        heads += " | next tokens predicted rightly, Python code | the same, other text"
        print(f"| run | {heads} | difference of loss to `{base}` | seeds |")
        print("|---|---:|---:|---:|---:|---:|---:|")
        for name in names:
            print(f"| {name} | {' | '.join(shown(curves, name, base))} |")
    print("\nTable 2: zeros\n")
    parts = ["qkv", "out", "up", "gate", "down", "overall"]
    print(f"| run; cells: zeros among the inputs of | {' | '.join(parts)} |")
    print(f"|---|{'---:|' * len(parts)}")
    for name in ("b1.58", "b1.58 relu2", "a4.8 fp4", "a4.8"):
        if name in curves:
            cells = [f"{mean(final(curves, name, 'zeros', p)):.1%}" for p in parts]
            print(f"| {name} | {' | '.join(cells)} |")
    print("\nThe switch: validation loss before, at once after, and at the end\n")
    print("| run | loss before the switch of stages | loss directly after the switch ", end="")
    print("| loss 40 steps after the switch |\n|---|---:|---:|---:|")
    for name in curves:
        found = [at_switch(lines) for lines in curves[name] if VARIANTS[name].stages]
        if found:
            cells = [format(mean(list(part)), ".4f") for part in zip(*found, strict=True)]
            print(f"| {name} | {' | '.join(cells)} |")
    return 0


def at_switch(lines: list[dict[str, Any]]) -> tuple[float, float, float]:
    """Return the validation loss before the switch, at once after it, and at the end."""
    steps = [line for line in lines if "step" in line]
    place = next(i for i, line in enumerate(steps) if line.get("stage") == 2)
    before, after, end = steps[place - 1], steps[place], steps[-1]
    return before["validation"], after["validation"], end["validation"]


def main() -> int:
    """Run, or print the runs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=["run", "table"])
    parser.add_argument("--only", nargs="+", choices=VARIANTS, help="variants; else all")
    parser.add_argument("--seed", nargs="+", type=int, default=[0])
    parser.add_argument("--size", choices=RECIPES, default="full")
    parser.add_argument("--steps", type=int, help="if not the recipe's own")
    parser.add_argument("--workers", type=int, default=0, help="processes; 0: this one")
    parser.add_argument("--budget-seconds", type=float, help="no step after that")
    parser.add_argument("--inner", default="inductor", help="aot_eager, or none")
    parser.add_argument("--folder", type=Path, default=GENERATED_8192, help="of text")
    parser.add_argument("--corpus", nargs="+", help="arguments of corpus.py, for other text")
    parser.add_argument("--out", type=Path, default=RESULTS / "ternary-qat.jsonl")
    given = parser.parse_args()
    return {"run": run, "table": tables}[given.action](given)


if __name__ == "__main__":
    sys.exit(main())
