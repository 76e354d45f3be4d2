"""A real model continued in ternary weights, in the two stages of BitNet a4.8.

    python benchmarks/models/ternary_model.py text --model FOLDER --state DIR
    python benchmarks/models/ternary_model.py first --model FOLDER --state DIR --seconds 60
    python benchmarks/models/ternary_model.py second --model FOLDER --state DIR --variant a4.8
    python benchmarks/models/ternary_model.py table

FOLDER is a causal model with its tokenizer. Its gated MLPs get the squared ReLU, its linears
ternary weights with INT8 tokens (b1.58), and it trains on sources and prose that Python packages
bring along, one file in sixteen for judging; `text` writes its tokens. `first` trains until its
steps or seconds are over and saves weights and optimizer under --state; a second call goes on from
there. `second` takes up that state for each variant, switches quantisers, rate (times 2/3) and
weight decay (to 0) with `TernaryStages`, and lets the rate fall to zero over its steps. So all
variants share the first stage and see the same text. fp32 weights, bf16 autocast, AdamW; each layer
is compiled by memeff. --rotate first rotates the hidden states of the dense model
(`rotate_hidden_states_`).

All processes of a run may start at once with --wait: they compile, then wait for the text and the
first stage. Its end says how many steps all variants do: as many as fit into the time until
--second-until if --processes of them share the GPU.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import math
import os
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks import GENERATED, RESULTS, rows
from benchmarks.ablations.ternary_ablation import zeros
from benchmarks.data.corpus import roots, texts
from benchmarks.methods import registered
from benchmarks.models import training
from benchmarks.models.causal_attention import use_causal_attention
from benchmarks.tiles import wide_product
from memeff_compile.functional import linear_cross_entropy
from memeff_compile.model import TernaryStages, rotate_hidden_states_, ternarize_

SLICES = ("python", "other")
SHARE = 16
CHARACTERS_A_TOKEN = 4.5
"""More than the texts have, so that enough of them is read."""
BEGAN = time.monotonic()
RATE, DECAY, WARM_UP, CLIP = 1e-3, 0.1, 40, 1.0


@dataclass(frozen=True)
class Variant:
    """What the second stage quantises."""

    recipe: str
    low_bit_heads: dict[str, int] | None = None
    kinds: dict[str, str] | None = None


BASE = "b1.58"
VARIANTS = {
    "b1.58": Variant("b1.58"),
    "a4.8": Variant("a4.8"),
    "a4.8-fp4": Variant("a4.8-fp4"),
    "a4.8, heads in 4 bits": Variant("a4.8", {"query": 4, "key_value": 4}),
    "a4.8, keys in 3 bits": Variant("a4.8", {"query": 4, "key_value": 3, "first": 1}),
    "a4.8, without top-K": Variant("a4.8", kinds={"*.o_proj": "int8"}),
    "b1.58, with top-K": Variant("b1.58", kinds={"*.o_proj": "topk8"}),
}


# --- text and model -------------------------------------------------------------------------------


def tokens(given: argparse.Namespace) -> dict[str, Tensor]:
    """Return (rows, length) token ids: `train`, and the text of each slice to judge by."""
    path = given.state / f"tokens-{given.train_tokens}-{given.length}-{given.judged}.pt"
    if given.wait:
        wait_for(path, given)
    if path.exists():
        return dict(torch.load(path, weights_only=True))
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(given.model)
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    found: dict[str, list[int]] = {"train": []}
    limits = {"train": given.train_tokens // len(SLICES), "validation": given.judged * given.length}
    for name in SLICES:
        size = int(limits["train"] * CHARACTERS_A_TOKEN)
        read: dict[str, list[str]] = {split: [] for split in limits}
        for text in texts(name, given.root or roots(), size, SHARE):
            read[text.split].append(text.content)
        for split, contents in read.items():
            coded = tokenizer.backend_tokenizer.encode_batch_fast(
                contents, add_special_tokens=False
            )
            ids = itertools.chain.from_iterable((*each.ids, *end) for each in coded)
            found.setdefault("train" if split == "train" else name, []).extend(
                itertools.islice(ids, limits[split])
            )
        note(f"{name}: {len(found['train'])} tokens to train on, {len(found[name])} to judge by")
    kept = {}
    for name, ids in found.items():
        whole = len(ids) // given.length * given.length
        kept[name] = torch.tensor(ids[:whole], dtype=torch.int32).view(-1, given.length)
    given.state.mkdir(parents=True, exist_ok=True)
    save(kept, path)
    return kept


def note(said: str) -> None:
    """Print a line with the seconds since the process began."""
    print(f"{time.monotonic() - BEGAN:.1f} s: {said}", flush=True)


def wait_for(path: Path, given: argparse.Namespace) -> None:
    """Wait for a file of another process."""
    while not path.exists():
        if is_over(given):
            raise SystemExit(f"{path} did not come in time")
        time.sleep(0.2)
    note(f"{path.name} is there")


def is_over(given: argparse.Namespace) -> bool:
    """Return whether the time of this process is over."""
    return time.monotonic() - BEGAN > given.seconds or time.time() > given.until


def save(state: Any, path: Path) -> None:
    """Write a file that is there whole or not at all."""
    part = path.with_suffix(f".{os.getpid()}.part")
    torch.save(state, part)
    part.rename(path)


def has_weights(given: argparse.Namespace) -> bool:
    """Return whether the folder has weights, and not only their sizes."""
    return any(given.model.glob("*.safetensors"))


def load(given: argparse.Namespace, device: str) -> Any:
    """Return the model in fp32, or one of its shape with random weights where it has none."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(given.seed)
    fewer = {"num_hidden_layers": given.layers} if given.layers else {}
    if has_weights(given):
        model = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32, **fewer)
    else:
        config = AutoConfig.from_pretrained(given.model, **fewer)
        model = AutoModelForCausalLM.from_config(config).float()
    model.config.use_cache = False
    model.set_attn_implementation(use_causal_attention())
    model.to(device).train()
    if given.rotate:
        rotate_hidden_states_(model, seed=given.seed)
    return model


def compile_layers(model: Any, inner: str) -> None:
    """Compile each layer; they share one function, as their sizes are equal."""
    registered()
    for layer in model.model.layers:
        layer.compile(backend="memeff", options={"memeff.inner": inner})


def loss_of(model: Any, ids: Tensor) -> Tensor:
    """Return the mean loss per token."""
    hidden = model.model(input_ids=ids).last_hidden_state[:, :-1].flatten(0, 1)
    loss: Tensor = linear_cross_entropy(
        hidden.bfloat16(), model.lm_head.weight.bfloat16(), ids[:, 1:].flatten()
    )
    return loss


# --- training -------------------------------------------------------------------------------------


class Run:
    """A model in training, with the order of its text, and the steps that it has done."""

    def __init__(self, given: argparse.Namespace, variant: Variant) -> None:
        self.given = given
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.text: dict[str, Tensor] = {}
        self.model = load(given, self.device)
        recipe = training.Recipe(peak_lr=RATE, weight_decay=DECAY)
        self.optimizer = training.optimizer_for(self.model, recipe, self.device)
        self.stages = TernaryStages(
            self.model, 1 << 30, second=variant.recipe, activation="relu2",
            low_bit_heads=variant.low_bit_heads, kinds=variant.kinds, optimizer=self.optimizer,
        )  # fmt: skip
        self.done, self.second_steps = 0, 0
        compile_layers(self.model, given.inner)
        note("the model is there")

    def read(self) -> None:
        """Read the text, and draw its order."""
        self.text = {name: ids.to(self.device) for name, ids in tokens(self.given).items()}
        draw = torch.Generator().manual_seed(self.given.seed)
        count = len(self.text["train"])
        passes = [torch.randperm(count, generator=draw) for _ in range(self.given.passes)]
        self.order = torch.cat(passes).to(self.device)

    def warm_up(self) -> None:
        """Compile: do a step of random text that changes no weight."""
        shape = self.given.batch, self.given.length
        ids = torch.randint(self.model.config.vocab_size, shape, device=self.device)
        with training.autocast(self.device):
            loss_of(self.model, ids).backward()
        self.optimizer.zero_grad()
        if self.device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        note("compiled")

    @property
    def state_path(self) -> Path:
        """Where the end of the first stage is kept."""
        return self.given.state / f"first-{self.given.seed}.pt"

    def batch(self, step: int) -> Tensor:
        """Return the token ids of a step."""
        at = step * self.given.batch % (len(self.order) - self.given.batch + 1)
        return self.text["train"][self.order[at : at + self.given.batch]].long()

    def step(self, share: float) -> Tensor:
        """Do a step with a share of the stage's rate; return its loss."""
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial"] * share
        with training.autocast(self.device):
            loss = loss_of(self.model, self.batch(self.done))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.done += 1
        return loss.detach()

    def judge(self, sequences: int) -> dict[str, float]:
        """Return the loss per token of each slice, on its first sequences."""
        each = self.judge_each(sequences)
        return {name: round(statistics.mean(losses), 5) for name, losses in each.items()}

    def judge_each(self, sequences: int) -> dict[str, list[float]]:
        """Return the loss per token of each of the first sequences of each slice."""
        with torch.compiler.set_stance("force_eager"):
            return {
                name: self._judge(self.text[name][:sequences])
                for name in SLICES
                if len(self.text[name])
            }

    @torch.no_grad()
    def _judge(self, ids: Tensor) -> list[float]:
        head, found = self.model.lm_head.weight.bfloat16(), []
        for part in ids.split(self.given.batch):
            with training.autocast(self.device):
                hidden = self.model.model(input_ids=part.long()).last_hidden_state[:, :-1]
            for states, targets in zip(hidden.bfloat16(), part[:, 1:].long(), strict=True):
                found.append(F.cross_entropy(wide_product(states, head), targets))
        return [round(each, 5) for each in torch.stack(found).tolist()]

    @torch.no_grad()
    def inputs(self) -> dict[str, float]:
        """Return what a4.8 would do to the linears' inputs now, as means over layers: the share of
        energy that top-K drops, the error of INT4, and the share of energy that is the same for all
        tokens."""
        found: dict[str, list[float]] = {"top-K drops": [], "INT4 error": [], "constant": []}

        def out(rows: Tensor) -> None:
            kept = rows.square().topk(rows.shape[-1] // 2).values.sum(-1)
            found["top-K drops"].append(float((1 - kept / rows.square().sum(-1)).mean()))

        def read(rows: Tensor) -> None:
            unit = rows.abs().mean(-1, keepdim=True) / 7**0.5
            error = (rows / unit).round().clamp(-8, 7) * unit - rows
            found["INT4 error"].append(float(error.norm() / rows.norm()))
            energy = rows.square().sum(-1).mean()
            found["constant"].append(float(rows.mean(0).square().sum() / energy))

        hooks = []
        for layer in self.model.model.layers:
            block, mlp = layer.self_attn, layer.mlp
            for linear, see in ((block.o_proj, out), (block.v_proj, read), (mlp.up_proj, read)):
                hook = lambda _, given, see=see: see(given[0].flatten(0, -2).float())  # noqa: E731
                hooks.append(linear.register_forward_pre_hook(hook))
        ids = torch.cat([self.text[name][:2] for name in SLICES]).long()
        with torch.compiler.set_stance("force_eager"), training.autocast(self.device):
            self.model.model(input_ids=ids)
        for hook in hooks:
            hook.remove()
        return {name: round(statistics.mean(values), 4) for name, values in found.items()}

    def switched(self, sequences: int) -> dict[str, dict[str, list[float]]]:
        """Return how much the loss of each slice would rise if the second stage began now, and the
        standard error, for each variant that quantises inputs alone."""
        found = {}
        for name, variant in VARIANTS.items():
            if variant.low_bit_heads is None:
                ternarize_(self.model, variant.recipe, kinds=variant.kinds, activation="relu2")
                found[name] = self.judge_each(sequences)
        ternarize_(self.model, BASE, activation="relu2")
        rises: dict[str, dict[str, list[float]]] = {name: {} for name in found if name != BASE}
        for name, of_parts in rises.items():
            for part, base in found[BASE].items():
                pairs = zip(found[name][part], base, strict=True)
                rise = [own - other for own, other in pairs]
                error = statistics.stdev(rise) / len(rise) ** 0.5
                of_parts[part] = [round(statistics.mean(rise), 5), round(error, 5)]
        return rises

    def save(self) -> None:
        """Keep weights, optimizer, number of steps, and that of the second stage."""
        parts = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        counts = {"done": self.done, "second_steps": self.second_steps}
        save({**parts, **counts}, self.state_path)

    def resume(self) -> bool:
        """Take up the kept state; return whether there is one."""
        if not self.state_path.exists():
            return False
        state = torch.load(self.state_path, map_location=self.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.done, self.second_steps = state["done"], state.get("second_steps", 0)
        return True


def facts(given: argparse.Namespace, stage: int) -> dict[str, Any]:
    """Return what every row of a run says."""
    said = {"what": "ternary model", "model": given.model.name, "stage": stage}
    said |= {"begins": "weights" if has_weights(given) else "random", "rate": RATE}
    names = ("seed", "batch", "length", "train_tokens", "layers")
    if given.rotate:
        said["rotated"] = True
    return said | {name: getattr(given, name) for name in names}


def first(given: argparse.Namespace) -> None:
    """Train the first stage, until its steps or its seconds are over."""
    run = Run(given, VARIANTS["b1.58"])
    for group in run.optimizer.param_groups:
        group["initial"] = RATE
    run.warm_up()
    run.read()
    row = facts(given, 1)
    if not run.resume():
        rows.append(given.out, {**row, "step": 0, "judged": run.judge(given.few)})
    row["text"] = hashlib.sha256(run.text["train"].cpu().numpy().tobytes()).hexdigest()[:12]
    losses: list[Tensor] = []
    started, counted = time.perf_counter(), 0
    ms = 0.0
    while run.done < given.steps and not is_over(given):
        losses.append(run.step(min(1.0, (run.done + 1) / WARM_UP)))
        if len(losses) == 4:  # compiled by now
            float(losses[-1])
            started, counted = time.perf_counter(), 0
        counted += 1
        if run.done % given.every == 0:
            mean = float(torch.stack(losses).mean())  # waits
            ms = 1e3 * (time.perf_counter() - started) / max(1, counted - 1)
            line = {**row, "step": run.done, "loss": round(mean, 4), "step_ms": round(ms, 2)}
            line["since_start_s"] = round(time.monotonic() - BEGAN, 1)
            if run.done % (4 * given.every) == 0:
                line["judged"] = run.judge(given.few)
            rows.append(given.out, line)
            losses, started, counted = [losses[-1]] * 4, time.perf_counter(), 0
    if losses and not ms:
        float(losses[-1])
        ms = 1e3 * (time.perf_counter() - started) / max(1, counted)
    run.second_steps = fitting(given, ms)
    run.save()
    note(f"{run.done} steps; {run.second_steps} in the second stage")
    peak = torch.cuda.max_memory_allocated() / 2**30 if run.device == "cuda" else 0.0
    end = {"step": run.done, "judged": run.judge(given.judged), "peak_gib": round(peak, 2)}
    end |= {"inputs": run.inputs(), "switched": run.switched(given.judged)}
    rows.append(given.out, {**row, **end, **rows.environment()})


def second(given: argparse.Namespace) -> None:
    """Train the second stage of a variant from the end of the first."""
    variant = VARIANTS[given.variant]
    run = Run(given, variant)
    run.stages.load_state_dict({"done": run.stages.switch_after})
    run.warm_up()
    run.stages.load_state_dict({"done": 0})
    run.read()
    if given.wait:
        wait_for(run.state_path, given)
    if not run.resume():
        raise SystemExit(f"{run.state_path} is not there; run `first` before")
    at = run.done
    steps = run.second_steps if given.wait else given.steps
    row = facts(given, 2) | {"variant": given.variant, "first_steps": at, "of_steps": steps}
    before = run.judge(given.few)
    for group in run.optimizer.param_groups:
        group["lr"] = group["initial"]
    run.stages.load_state_dict({"done": run.stages.switch_after})
    for group in run.optimizer.param_groups:
        group["initial"] = group["lr"]
    rows.append(given.out, {**row, "step": 0, "before": before, "judged": run.judge(given.few)})
    losses: list[Tensor] = []
    started = time.perf_counter()
    every = max(1, steps // given.evaluations) if given.evaluations else given.every
    for number in range(steps):
        if is_over(given):
            break
        losses.append(run.step(1 - number / steps))
        if number == 3:
            float(losses[-1])
            started = time.perf_counter()
        if (number + 1) % every == 0:
            mean = float(torch.stack(losses).mean())
            ms = 1e3 * (time.perf_counter() - started) / max(1, number - 3)
            line = {"step": number + 1, "loss": round(mean, 4), "judged": run.judge(given.few)}
            line |= {"step_ms_and_judging": round(ms, 2)}
            line["since_start_s"] = round(time.monotonic() - BEGAN, 1)
            rows.append(given.out, {**row, **line})
            losses = []
    sample = torch.cat([run.text[name][: given.batch // 2] for name in SLICES]).long()
    with torch.compiler.set_stance("force_eager"):
        shares = zeros(run.model, sample, run.device)
    each = run.judge_each(given.judged)
    judged = {name: round(statistics.mean(losses), 5) for name, losses in each.items()}
    last = {"step": run.done - at, "judged": judged, "judged_each": each, "zeros": shares}
    rows.append(given.out, {**row, **last, "done": True, **rows.environment()})


def fitting(given: argparse.Namespace, ms: float) -> int:
    """Return how many steps of the second stage fit into its time, if processes share the GPU."""
    if not math.isfinite(given.second_until):
        return int(given.steps)
    if not ms:
        raise SystemExit("there was no time for a step of the first stage")
    left = given.second_until - time.time()
    return max(given.evaluations, int(1e3 * left / (ms * given.processes)))


# --- tables ---------------------------------------------------------------------------------------

FirstStage: TypeAlias = tuple[int, int | None]


def table(given: argparse.Namespace) -> None:
    """Print the loss of each variant at the end, its gap from b1.58 and its zeros; then the gaps on
    the way.

    Gaps are differences on the same text from `b1.58` in the same run: from the same first stage.
    The number in brackets is the standard error over sequences.
    """
    every = rows.read(given.out)
    second_stage = [row for row in every if row.get("stage") == 2]
    for start in sorted({_start(row) for row in second_stage}):
        found = [row for row in second_stage if _start(row) == start]
        _table(found, f", {start}" if start else "")
    _switches([row for row in every if "switched" in row])


def _first_stage(row: dict[str, Any]) -> FirstStage:
    """Return the seed and the steps of the first stage that a run began with."""
    return row["seed"], row.get("first_steps")


def _start(row: dict[str, Any]) -> str:
    """Return what was rotated before the training; rows with `turned` are of commits that rotated
    more than hidden states."""
    if not row.get("rotated"):
        return ""
    return " and ".join(["rotated", *(f"{part} turned" for part in row.get("turned", ()))])


def _switches(ends: list[dict[str, Any]]) -> None:
    """Print the rise of the loss at the switch of stages, for the end of each first stage."""
    shown = ("a4.8", "a4.8, without top-K", "b1.58, with top-K")
    if ends:
        print(f"\n| start | steps | python | other | {' | '.join(shown)} |")
        print("|---" + "|---:" * (3 + len(shown)) + "|")
    for row in ends:
        losses = [f"{row['judged'][part]:.4f}" for part in SLICES]
        rises = [
            " and ".join(f"{row['switched'][name][part][0]:+.4f}" for part in SLICES)
            for name in shown
        ]
        print(f"| {_start(row)} | {row['step']} | {' | '.join([*losses, *rises])} |")


def _table(found: list[dict[str, Any]], also: str) -> None:
    ends = {(row["variant"], _first_stage(row)): row for row in found if "judged_each" in row}
    print("\n| variant | runs | steps | python | other | gap, python | gap, other | zeros |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for name in VARIANTS:
        mine = {run: row for (variant, run), row in ends.items() if variant == name}
        if not mine:
            continue
        steps = " and ".join(f"{row['step']}" for row in mine.values())
        losses = [statistics.mean(r["judged"][part] for r in mine.values()) for part in SLICES]
        gaps = [gap_of(mine, ends, part) for part in SLICES]
        zero = statistics.mean(row["zeros"]["overall"] for row in mine.values())
        cells = [name + also, f"{len(mine)}", steps, *(f"{loss:.4f}" for loss in losses), *gaps]
        print(f"| {' | '.join(cells)} | {zero:.1%} |")
    _gaps_on_the_way(found, also)


def gap_of(
    mine: dict[FirstStage, dict[str, Any]],
    ends: dict[tuple[str, FirstStage], dict[str, Any]],
    part: str,
) -> str:
    """Return the mean gap from b1.58 over the sequences of all runs, and its standard error."""
    gaps = []
    for run, row in mine.items():
        base = ends.get((BASE, run), {})
        if base.get("step") == row["step"]:
            pairs = zip(row["judged_each"][part], base["judged_each"][part], strict=True)
            gaps += [own - other for own, other in pairs]
    if len(gaps) < 2:
        return ""
    return f"{statistics.mean(gaps):+.4f} ({statistics.stdev(gaps) / len(gaps) ** 0.5:.4f})"


def _gaps_on_the_way(found: list[dict[str, Any]], also: str) -> None:
    """Print a column for each evaluation: means over slices and runs."""
    losses: dict[tuple[str, FirstStage, int], dict[str, float]] = {}
    for row in found:
        if "of_steps" in row and not row.get("done"):
            variant, run = row["variant"], _first_stage(row)
            number = sum(key[:2] == (variant, run) for key in losses)
            losses[variant, run, number] = row["judged"]
    shares = sorted({number for _, _, number in losses})
    print(f"\n| gap of | {' | '.join(f'evaluation {number}' for number in shares)} |")
    print("|---" + "|---:" * len(shares) + "|")
    for name in VARIANTS:
        cells = []
        for share in shares:
            gaps = [
                own[part] - losses[BASE, run, share][part]
                for (variant, run, at), own in losses.items()
                if (variant, at) == (name, share) and (BASE, run, share) in losses
                for part in SLICES
            ]
            cells.append(f"{statistics.mean(gaps):+.4f}" if gaps else "")
        if name != BASE and any(cells):
            print(f"| {name}{also} | {' | '.join(cells)} |")


ACTIONS = {"text": tokens, "first": first, "second": second, "table": table}


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=list(ACTIONS))
    parser.add_argument("--model", type=Path, help="a folder that from_pretrained takes")
    parser.add_argument("--state", type=Path, default=GENERATED / "ternary-model")
    parser.add_argument("--variant", choices=list(VARIANTS), default="a4.8")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layers", type=int, default=0, help="fewer than the model has")
    parser.add_argument("--rotate", action="store_true", help="hidden states, before the training")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=math.inf, help="since the process began")
    parser.add_argument("--until", type=float, default=math.inf, help="the same as a time of day")
    parser.add_argument("--second-until", type=float, default=math.inf)
    parser.add_argument("--processes", type=int, default=1, help="variants that share the GPU")
    parser.add_argument("--wait", action="store_true", help="for text and state of other processes")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--train-tokens", type=int, default=10_000_000)
    parser.add_argument("--passes", type=int, default=2, help="over the text, at most")
    parser.add_argument("--judged", type=int, default=64, help="sequences of each slice at the end")
    parser.add_argument("--few", type=int, default=16, help="sequences of each slice on the way")
    parser.add_argument("--every", type=int, default=20, help="steps between rows")
    parser.add_argument("--evaluations", type=int, default=0, help="in the second stage")
    parser.add_argument("--root", type=Path, nargs="+", help="folders to take the text from")
    parser.add_argument("--inner", default="inductor", help="aot_eager where no compiler is")
    parser.add_argument("--out", type=Path, default=RESULTS / "ternary-model.jsonl")
    given = parser.parse_args()
    if given.action != "table" and given.model is None:
        parser.error("--model is needed: a folder of weights and a tokenizer")
    ACTIONS[given.action](given)


if __name__ == "__main__":
    main()
