"""Retrieval from a KV cache of few bits, by a small model that was trained to retrieve.

    python benchmarks/ablations/retrieval_ablation.py train
    python benchmarks/ablations/retrieval_ablation.py measure
    python benchmarks/ablations/retrieval_ablation.py table

`train`: a small Llama learns to read records back: a mark, a name and a value of eight tokens, told
somewhere among filler; later the mark and the name, and the model writes the value. No token of
names and values occurs twice in the records, so that the token after the last one's first place is
the answer: what induction heads do. Sequences grow from 64 to 2048 tokens, each time that the model
answers rightly; only answers count in the loss.

`measure`: the records go through the cache as one prompt, which attends to itself exactly; then the
question with its answer, which reads the cached prompt. A value is retrieved if each of its tokens
is the likeliest one, as greedy generation would write. One record in filler is a pass key; as many
as fit are told apart by their names only.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import memeff_compile
from benchmarks import GENERATED, RESULTS, rows
from memeff_compile import MiniCache

MARK = 1
FIRST = 2
"""The first token of filler; those of names and values follow it."""
BITS = (16, 8, 4, 3, 2)
KEPT = (0.01, 0.05, 0.25)
"""Shares of a prompt's rows that merged layers keep as they came, if distance alone decides."""
FIRST_TOLD = 0.9
"""Records that are asked for stand in this share of a prompt: its last tokens are kept exact."""


@dataclass(frozen=True)
class Plan:
    """Sizes of the task, the model, its training and the measurement.

    Attributes:
        value: tokens of a value; with its mark and name a record takes two more.
        filler, alphabet: how many tokens filler, and names and values, are drawn from.
        lengths: of the sequences trained on, one after the other; the last one is measured.
        tokens: of a batch.
        enough: share of right tokens at which sequences get longer.
        patience: so many steps at least are done with each length.
        steps: of training, at most.
        records: told at a time in the measurement.
        questions: asked in all, for each number of records.
        batch: of the measurement.
        group, recent, keep_first: settings of the cache.
    """

    width: int = 256
    layers: int = 4
    heads: int = 4
    value: int = 8
    filler: int = 256
    alphabet: int = 1024
    lengths: tuple[int, ...] = (64, 128, 256, 512, 1024, 2048)
    tokens: int = 32768
    enough: float = 0.98
    patience: int = 100
    steps: int = 8000
    warm_up: int = 100
    peak_lr: float = 1e-3
    records: tuple[int, ...] = (1, 16, 100)
    questions: int = 512
    batch: int = 64
    group: int = 64
    recent: int = 16
    keep_first: int = 4

    @property
    def cell(self) -> int:
        """Tokens of a record."""
        return self.value + 2

    @property
    def vocabulary(self) -> int:
        """Tokens of the model."""
        return FIRST + self.filler + self.alphabet


PLANS = {
    "full": Plan(),
    "small": Plan(
        width=128, layers=2, heads=4, value=2, filler=16, alphabet=64, lengths=(32, 64, 128),
        tokens=4096, steps=4000, records=(1, 8), questions=64, group=32,
    ),
    "tiny": Plan(
        width=64, layers=4, heads=2, value=2, filler=16, alphabet=64, lengths=(32, 64),
        tokens=256, patience=1, enough=0.0, steps=8, warm_up=1, records=(4,), questions=2,
        batch=2, group=32,
    ),
}  # fmt: skip


# --- the task -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Asked:
    """Sequences that tell records and then ask for some.

    Attributes:
        ids: (B, T) tokens; the last `questions * cell` are questions with their answers.
        is_answer: (T,) which tokens are answers.
        told: (B, Q) where the record of each question begins.
    """

    ids: Tensor
    is_answer: Tensor
    told: Tensor


def draw(
    plan: Plan,
    shape: tuple[int, int],
    records: int,
    questions: int,
    generator: torch.Generator,
    first: float = 1.0,
) -> Asked:
    """Return newly drawn sequences.

    Args:
        plan: the sizes.
        shape: how many sequences, and their tokens.
        records: told in each; as many as fit if that is less.
        questions: asked at the end of each, about different records.
        generator: of the device.
        first: all are in this first share of the text before the questions.
    """
    count, length = shape
    where: dict[str, Any] = {"generator": generator, "device": generator.device}
    cells = int((length // plan.cell - questions) * first)
    records = min(records, cells, plan.alphabet // (plan.value + 1))
    body = torch.randint(
        FIRST, FIRST + plan.filler, (count, length - questions * plan.cell), **where
    )
    order = torch.rand(count, plan.alphabet, **where).argsort(1)[:, : records * (plan.value + 1)]
    texts = (order + FIRST + plan.filler).view(count, records, plan.value + 1)
    texts = F.pad(texts, (1, 0), value=MARK)
    place = torch.rand(count, cells, **where).argsort(1)[:, :records]
    at = place[:, :, None] * plan.cell + torch.arange(plan.cell, device=generator.device)
    body.scatter_(1, at.flatten(1), texts.flatten(1))
    chosen = torch.rand(count, records, **where).argsort(1)[:, :questions]
    asked = texts.gather(1, chosen[:, :, None].expand(-1, -1, plan.cell))
    part = torch.arange(length, device=generator.device) - body.shape[1]
    is_answer = (part >= 0) & (part % plan.cell >= 2)
    return Asked(
        torch.cat([body, asked.flatten(1)], 1), is_answer, place.gather(1, chosen) * plan.cell
    )


# --- training -------------------------------------------------------------------------------------


def build(plan: Plan, device: str) -> Any:
    """Return a new model."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=plan.vocabulary,
        hidden_size=plan.width,
        intermediate_size=2 * plan.width,
        num_hidden_layers=plan.layers,
        num_attention_heads=plan.heads,
        num_key_value_heads=plan.heads,
        max_position_embeddings=plan.lengths[-1],
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM._from_config(config, attn_implementation="sdpa").to(device)


@dataclass
class Lesson:
    """Where the curriculum stands: longer sequences as soon as answers are right."""

    plan: Plan
    stage: int = 0
    since: int = 0
    right: float = 0.0

    @property
    def length(self) -> int:
        """Tokens of a sequence."""
        return self.plan.lengths[self.stage]

    @property
    def questions(self) -> int:
        """Questions at the end of a sequence: a third of it, at most 16."""
        return max(1, min(16, self.length // (3 * self.plan.cell)))

    def draw(self, step: int, generator: torch.Generator) -> Asked:
        """Return a batch: from a few records to as many as fit, in turn; every eighth has one."""
        shape = (max(1, self.plan.tokens // self.length), self.length)
        if step % 8 == 7:
            return draw(self.plan, shape, 1, 1, generator)
        fit = self.length // self.plan.cell - self.questions
        records = max(self.questions, round(fit * (1 + step % 4) / 4))
        return draw(self.plan, shape, records, self.questions, generator)

    def learn(self, right: float) -> bool:
        """Take note of the share of right tokens; return whether sequences get longer."""
        self.right += 0.1 * (right - self.right)
        self.since += 1
        is_last = self.stage + 1 == len(self.plan.lengths)
        if is_last or self.since < self.plan.patience or self.right < self.plan.enough:
            return False
        self.stage, self.since, self.right = self.stage + 1, 0, 0.0
        return True


def device_of() -> str:
    """Return where to compute."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def rate(plan: Plan, step: int, spent: float) -> float:
    """Return the learning rate: a warm-up, level for half of the run, a cosine to zero."""
    progress = max(spent, step / plan.steps)
    fall = (1 + math.cos(math.pi * min(1.0, max(0.0, 2 * progress - 1)))) / 2
    return plan.peak_lr * min(1.0, (step + 1) / plan.warm_up) * fall


def train(given: argparse.Namespace) -> int:
    """Train the model and save it."""
    device, plan = device_of(), plan_of(given)
    torch.manual_seed(given.seed)
    model = build(plan, device).train()
    generator = torch.Generator(device).manual_seed(given.seed)
    optimizer = torch.optim.AdamW(
        model.parameters(), weight_decay=0.01, betas=(0.9, 0.98), fused=device == "cuda"
    )
    lesson, curve = Lesson(plan), []
    started = time.perf_counter()
    for step in range(plan.steps):
        spent = (time.perf_counter() - started) / given.seconds
        for group in optimizer.param_groups:
            group["lr"] = rate(plan, step, spent)
        loss, right = answer_loss(model, lesson.draw(step, generator), device)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        grows = lesson.learn(right.item())
        is_last = step + 1 == plan.steps or spent >= 1.0
        if grows or is_last or step % max(1, plan.steps // 40) == 0:
            curve.append([step, lesson.length, round(loss.item(), 4), round(lesson.right, 4)])
            print(curve[-1], flush=True)
        if is_last:
            break
    model.save_pretrained(given.model)
    row = {
        "kind": "retrieval model",
        "plan": dataclasses.asdict(plan),
        "seed": given.seed,
        "parameters": sum(p.numel() for p in model.parameters()),
        "steps": curve[-1][0] + 1,
        "curve": curve,
        "seconds": round(time.perf_counter() - started, 1),
    }
    rows.write(given.out, row)
    return 0


def answer_loss(model: Any, asked: Asked, device: str) -> tuple[Tensor, Tensor]:
    """Return the loss of the answers, and the share of their tokens that are the likeliest."""
    wanted = asked.ids[:, asked.is_answer]
    with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
        hidden = model.model(input_ids=asked.ids, use_cache=False).last_hidden_state
        before = hidden[:, :-1][:, asked.is_answer[1:]]
        logits = model.lm_head(before).float()
    right = (logits.argmax(-1) == wanted).float().mean()
    return F.cross_entropy(logits.flatten(0, 1), wanted.flatten()), right


# --- measuring ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """A cache: its codes, and from which layer on neighbours share directions, if they do."""

    bits: int
    scheme: str = "kivi"
    start_layer: int | None = None
    retained: float = 0.01
    gamma: float = 0.05

    def cache(self, model: Any, plan: Plan) -> Any:
        """Return an empty cache of this kind."""
        merge = None
        if self.start_layer is not None:
            given = {"retained": self.retained, "gamma": self.gamma}
            merge = MiniCache(self.start_layer, align="none", force=True, **given)
        return memeff_compile.KVCache(
            model.config, plan.lengths[-1] + plan.group, self.bits, scheme=self.scheme,
            group=plan.group, recent=plan.recent, keep_first=plan.keep_first, merge=merge,
        )  # fmt: skip


def settings(layers: int, widths: Sequence[int] = BITS) -> Iterator[Setting]:
    """Yield the settings to measure with these bits, caches without merging first."""
    for scheme, bits in itertools.product(("kivi", "per_head"), widths):
        if bits < 16 or scheme == "kivi":
            yield Setting(bits, scheme)
    for start, bits in itertools.product((layers // 2, 0), widths):
        yield Setting(bits, "kivi", start)
    for start, retained in itertools.product((layers // 2, 0), KEPT):
        yield Setting(16, "kivi", start, retained, gamma=1.0)


@torch.no_grad()
def retrieved(model: Any, plan: Plan, asked: Asked, cache: Any) -> tuple[Tensor, Tensor]:
    """Return which tokens of the answers are the likeliest, (B, value), and their loss."""
    prompt, question = asked.ids[:, : -plan.cell], asked.ids[:, -plan.cell :]
    model.model(input_ids=prompt, past_key_values=cache, use_cache=True)
    out = model.model(input_ids=question, past_key_values=cache, use_cache=True)
    logits = model.lm_head(out.last_hidden_state[:, 1:-1]).float()
    wanted = question[:, 2:]
    loss = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="none")
    return logits.argmax(-1) == wanted, loss.view(wanted.shape)


def asked_of(plan: Plan, records: int, device: str) -> Iterator[Asked]:
    """Yield the questions about so many records: the same ones for every cache."""
    generator = torch.Generator(device).manual_seed(10_000 + records)
    for _ in range(0, plan.questions, plan.batch):
        yield draw(plan, (plan.batch, plan.lengths[-1]), records, 1, generator, FIRST_TOLD)


def quality(model: Any, plan: Plan, setting: Setting, records: int, device: str) -> dict[str, Any]:
    """Return how many values are retrieved; and by the quarter of the prompt they are told in."""
    right, lost, told = [], [], []
    cache = None
    for asked in asked_of(plan, records, device):
        cache = setting.cache(model, plan)
        found, loss = retrieved(model, plan, asked, cache)
        right.append(found)
        lost.append(loss)
        told.append(asked.told[:, 0])
    tokens, where = torch.cat(right), torch.cat(told)
    whole = tokens.all(1).double()
    quarter = where * 4 // plan.lengths[-1]
    by_quarter = [whole[quarter == n].mean() for n in range(4) if bool((quarter == n).any())]
    return {
        "values": float(whole.mean()),
        "tokens": float(tokens.double().mean()),
        "loss": float(torch.cat(lost).double().mean()),
        "by_quarter": [round(float(share), 4) for share in by_quarter],
        "asked": len(tokens),
        "bytes": cache.nbytes if cache is not None else 0,
    }


def measure(given: argparse.Namespace) -> int:
    """Write a row for each cache."""
    from transformers import LlamaForCausalLM

    device, plan = device_of(), plan_of(given)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    loaded: Any = LlamaForCausalLM.from_pretrained(given.model, dtype=dtype)
    model = loaded.to(device).eval()
    for setting in settings(plan.layers, given.bits):
        row: dict[str, Any] = {"kind": "retrieval", "seed": given.seed}
        row |= {"length": plan.lengths[-1], "group": plan.group, "recent": plan.recent}
        row |= {"keep_first": plan.keep_first, **dataclasses.asdict(setting)}
        found = {str(n): quality(model, plan, setting, n, device) for n in plan.records}
        rows.write(given.out, {**row, "records": found})
    return 0


# --- tables ---------------------------------------------------------------------------------------


def table(given: argparse.Namespace) -> int:
    """Print the rows of each trained model as Markdown: the share of values retrieved."""
    found = rows.read(given.out)
    for model in (row for row in found if row["kind"] == "retrieval model"):
        key = (model["seed"], model["commit"])
        mine = [
            row
            for row in found
            if row["kind"] == "retrieval" and (row["seed"], row["commit"]) == key
        ]
        reached = f"sequences of {model['curve'][-1][1]} tokens"
        print(f"\nSeed {key[0]}, {model['steps']} steps, {reached}, {len(mine)} caches\n")
        if mine:
            print("\n".join(lines_of(mine)))
    return 0


def lines_of(found: list[dict[str, Any]]) -> list[str]:
    """Return a table: values retrieved by records told, tokens with the most, and bytes."""
    counts = list(found[0]["records"])
    most = counts[-1]
    heads = ["codes", "merged", "bits", *(f"{n} told" for n in counts), "tokens", "bytes"]
    shown = [f"| {' | '.join(heads)} |", f"|---|---|{'---:|' * (len(heads) - 2)}"]
    for row in found:
        merged = "-"
        if row["start_layer"] is not None:
            merged = f"from layer {row['start_layer']}, room {row['retained']:.0%}"
            merged += ", all used" if row.get("gamma") == 1.0 else ""
        cells = [row["scheme"] if row["bits"] < 16 else "none", merged, str(row["bits"])]
        cells += [f"{row['records'][n]['values']:.1%}" for n in counts]
        last, first = row["records"][most], found[0]["records"][most]
        cells += [f"{last['tokens']:.1%}", f"{last['bytes'] / first['bytes']:.2f}"]
        shown.append(f"| {' | '.join(cells)} |")
    return shown


def plan_of(given: argparse.Namespace) -> Plan:
    """Return the plan of a size, with the other arguments."""
    changed = json.loads(given.plan)
    changed = {k: tuple(v) if isinstance(v, list) else v for k, v in changed.items()}
    return dataclasses.replace(PLANS[given.size], **changed)


def main() -> int:
    """Run the requested command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=["train", "measure", "table"])
    parser.add_argument("--size", choices=PLANS, default="full")
    parser.add_argument("--plan", default="{}", help="JSON of what differs from the size's plan")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bits", type=int, nargs="+", choices=BITS, default=BITS)
    parser.add_argument("--seconds", type=float, default=math.inf, help="of training")
    data = GENERATED
    parser.add_argument("--model", type=Path, default=data / "retrieval_model")
    parser.add_argument("--out", type=Path, default=RESULTS / "kv-retrieval.jsonl")
    given = parser.parse_args()
    return {"train": train, "measure": measure, "table": table}[given.action](given)


if __name__ == "__main__":
    sys.exit(main())
