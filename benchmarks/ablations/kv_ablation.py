"""Effects of a low-bit KV cache on a small trained model: perplexity and passkey retrieval.

    python benchmarks/ablations/kv_ablation.py train
    python benchmarks/ablations/kv_ablation.py measure
    python benchmarks/ablations/kv_ablation.py decode  # steps of one token, compiled
    python benchmarks/ablations/kv_ablation.py table

`train`: a Llama of 8 layers of width 512 on the text of corpus.py, sequences of 2048. Few models of
this size and training can copy from far away, so half of the rows teach it: two of eight repeat
random pieces; two hold a pass key, eight random bytes after a phrase, which is asked for later. In
the first third of the steps there is no other text.

`measure`: held-out text goes through the cache in pieces of 64 tokens, of 256 for pass keys. Each
piece attends to the cache's decoded tokens before it, as in decoding, except that the piece itself
is exact. Losses count from position 512 on. A pass key is retrieved if each of its eight tokens is
the likeliest one; it lies in the first three quarters of the sequence, among validation text.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.models import training

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import memeff_compile
from benchmarks import GENERATED_8192, RESULTS, rows
from benchmarks.ablations.ternary_ablation import CORPUS
from benchmarks.models import small_training
from benchmarks.tiles import wide_product

PHRASE = "\n# The pass key is"


@dataclass(frozen=True)
class Plan:
    """Sizes of the copying task and of the measurement.

    Attributes:
        cell: tokens of a place where a key is told or asked for.
        key: tokens of a pass key.
        alphabet: how many tokens keys and repeated pieces are made of: those of single bytes.
        phrase: the most tokens of the phrase before it.
        repeating, telling: rows of a batch that repeat, and that hold a key; the others are text.
        without_text: so many steps come first in which all other rows repeat.
        questions: how often a key is asked for.
        piece, asked_piece: tokens that go through the cache at once, of text and of passkeys.
        counted_from: the first position whose loss counts.
        sequences: of text, and of passkeys twice as many.
        group, recents, keeps: settings of the cache.
    """

    cell: int = 32
    key: int = 8
    alphabet: int = 256
    phrase: int = 8
    repeating: int = 2
    telling: int = 2
    without_text: int = 1500
    questions: int = 8
    piece: int = 64
    asked_piece: int = 256
    counted_from: int = 512
    sequences: int = 64
    group: int = 64
    recents: tuple[int, ...] = (128, 16)
    keeps: tuple[int, ...] = (4, 0)


RECIPES = {
    "full": dataclasses.replace(
        training.RECIPES["full"],
        vocabulary=8192,
        layers=8,
        batch=8,
        length=2048,
        steps=4500,
        warm_up=100,
        validation_batches=8,
    ),
    "tiny": dataclasses.replace(training.RECIPES["tiny"], length=128, batch=3, steps=6),
}
PLANS = {
    "full": Plan(),
    "tiny": Plan(
        cell=8,
        key=2,
        phrase=3,
        repeating=1,
        telling=1,
        without_text=2,
        questions=2,
        piece=32,
        asked_piece=32,
        counted_from=64,
        sequences=2,
        group=32,
        recents=(16,),
        keeps=(4,),
    ),
}


class Copying:
    """Rows of text into which repetitions and pass keys are written."""

    def __init__(self, plan: Plan, recipe: training.Recipe, folder: Path, device: str) -> None:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        ids = tokenizer.encode(PHRASE, add_special_tokens=False).ids[-plan.phrase :]
        self.phrase = torch.tensor(ids, device=device)
        self.plan, self.recipe, self.device = plan, recipe, device

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """Return random tokens of the alphabet, on the CPU; token 0 ends a text."""
        return torch.randint(1, self.plan.alphabet + 1, (count,), generator=generator)

    def repeat(self, row: Tensor, generator: torch.Generator) -> None:
        """Fill a row with random pieces, each two to four times; of any length equally often."""
        octaves = math.log2(len(row) / 4 / 8)
        pieces: list[Tensor] = []
        while sum(map(len, pieces)) < len(row):
            period = int(8 * 2 ** (octaves * float(torch.rand(1, generator=generator))))
            times = int(torch.randint(2, 5, (1,), generator=generator))
            pieces.append(self.draw(period, generator).repeat(times))
        row.copy_(torch.cat(pieces)[: len(row)])

    def tell(self, row: Tensor, generator: torch.Generator, questions: int) -> None:
        """Write a key somewhere into a row, ask for it later, and at the very end."""
        plan, cells = self.plan, len(row) // self.plan.cell
        told = int(torch.randint(1, 3 * cells // 4, (1,), generator=generator))
        later = torch.randperm(cells - told - 2, generator=generator)[: questions - 1] + told + 1
        text = torch.cat([self.phrase, self.draw(plan.key, generator).to(self.device)])
        for cell in [told, *later.tolist()]:
            row[cell * plan.cell : cell * plan.cell + len(text)] = text
        row[-len(text) :] = text

    def batch(self, ids: Tensor, step: int) -> Tensor:
        """Return rows of text of which the first ones, or all in the first steps, teach copying."""
        generator = torch.Generator().manual_seed(step)
        ids, plan = ids.clone(), self.plan
        for row in ids[: plan.telling]:
            self.tell(row, generator, plan.questions)
        repeating = len(ids) if step < plan.without_text else plan.telling + plan.repeating
        for row in ids[plan.telling : repeating]:
            self.repeat(row, generator)
        return ids


# --- training -------------------------------------------------------------------------------------


def device_of() -> str:
    """Return where to compute."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def train(given: argparse.Namespace) -> int:
    """Train the model and save it."""
    if given.model.exists():
        print(f"{given.model} exists")
        return 0
    small_training.ensure_corpus(given.folder, given.corpus or CORPUS)
    device, recipe, plan = device_of(), RECIPES[given.size], PLANS[given.size]
    recipe = dataclasses.replace(recipe, steps=given.steps or recipe.steps)
    text = training.Tokens(given.folder, "python-train", recipe, device)
    held_out = training.Tokens(given.folder, "python-validation", recipe, device)
    copying = Copying(plan, recipe, given.folder, device)
    order = text.order(recipe.steps, 0)
    torch.manual_seed(0)
    model = training.build_model(recipe, device)
    curve: list[dict[str, Any]] = []

    def note(row: dict[str, Any]) -> None:
        curve.append(row)
        print(row, flush=True)

    loop = small_training.Loop(
        model, recipe, device, lambda step: copying.batch(text[order[step]], step), held_out, note
    )
    small_training.compile_whole(model, "memeff", given.inner)
    loop.run(0, recipe.steps)
    training.save(model, given.folder, given.model)
    row = {
        "kind": "kv model",
        "recipe": dataclasses.asdict(recipe),
        "plan": dataclasses.asdict(plan),
        "corpus": training.corpus_digest(given.folder),
        "curve": [(r["step"], r["validation"]) for r in curve],
        "seconds": round(loop.seconds, 1),
    }
    rows.write(given.out, row)
    return 0


# --- measuring ------------------------------------------------------------------------------------


def load(given: argparse.Namespace, device: str) -> Any:
    """Return the trained model in bf16, with PyTorch's attention."""
    from transformers import LlamaForCausalLM

    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = LlamaForCausalLM.from_pretrained(given.model, dtype=dtype, attn_implementation="sdpa")
    return model.to(device).eval()


def questions(given: argparse.Namespace, device: str) -> Tensor:
    """Return validation text with pass keys, asked for at the very end."""
    recipe, plan = RECIPES[given.size], PLANS[given.size]
    text = training.Tokens(given.folder, "python-validation", recipe, device).rows
    copying = Copying(plan, recipe, given.folder, device)
    generator = torch.Generator().manual_seed(1)
    ids = text[torch.arange(2 * plan.sequences) % len(text)].long().clone()
    for row in ids:
        copying.tell(row, generator, 1)
    return ids


@torch.no_grad()
def hidden_states(model: Any, ids: Tensor, cache: Any, piece: int) -> Tensor:
    """Return the last hidden states of tokens that go through a cache piece by piece."""
    found = []
    for part in ids.split(piece, 1):
        out = model.model(input_ids=part, past_key_values=cache, use_cache=True)
        found.append(out.last_hidden_state)
    return torch.cat(found, 1)


@torch.no_grad()
def answers(model: Any, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss and the likeliest token of each position, (B, N)."""
    losses, likeliest = [], []
    weight = model.lm_head.weight
    for row, wanted in zip(hidden, targets, strict=True):
        logits = wide_product(row, weight)
        losses.append(F.cross_entropy(logits, wanted, reduction="none"))
        likeliest.append(logits.argmax(-1))
    return torch.stack(losses), torch.stack(likeliest)


Setting = tuple[int, str, int, int]
"""Bits, scheme, recent, keep_first."""


def settings(plan: Plan) -> Iterator[Setting]:
    """Yield the settings to measure, 16 bits first."""
    yield 16, "kivi", plan.recents[0], 4
    schemes = ("kivi", "per_head")
    for keep, recent, scheme, bits in itertools.product(
        plan.keeps, plan.recents, schemes, (8, 4, 3, 2)
    ):
        yield bits, scheme, recent, keep


class Measured:
    """The model, the texts, and the answers with 16 bits."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.device = device_of()
        self.plan, self.recipe = PLANS[given.size], RECIPES[given.size]
        self.model = load(given, self.device)
        self.texts: dict[str, Tensor] = {}
        for name in ("python", "other"):
            held = training.Tokens(given.folder, f"{name}-validation", self.recipe, self.device)
            self.texts[name] = held[slice(0, self.plan.sequences)]
        self.asked = questions(given, self.device)
        self.exact: dict[str, Tensor] = {}

    def cache(self, setting: Setting) -> Any:
        """Return an empty cache."""
        bits, scheme, recent, keep = setting
        return memeff_compile.KVCache(
            self.model.config, self.recipe.length, bits, scheme=scheme, group=self.plan.group,
            recent=recent, keep_first=keep,
        )  # fmt: skip

    def text(self, name: str, setting: Setting) -> dict[str, float]:
        """Return perplexity and accuracy, and how often 16 bits have the same likeliest token."""
        plan, ids = self.plan, self.texts[name]
        cache = self.cache(setting)
        hidden = hidden_states(self.model, ids, cache, plan.piece)
        counted = slice(plan.counted_from - 1, -1)
        losses, likeliest = answers(self.model, hidden[:, counted], ids[:, plan.counted_from :])
        if setting[0] == 16:
            self.exact[name] = likeliest
        right = likeliest == ids[:, plan.counted_from :]
        loss = float(losses.double().mean())
        return {
            "loss": loss,
            "perplexity": math.exp(loss),
            "deviation_of_mean": float(losses.mean(1).std() / len(ids) ** 0.5),
            "accuracy": float(right.float().mean()),
            "same_as_16": float((likeliest == self.exact[name]).float().mean()),
            "bytes": cache.nbytes,
        }

    def passkeys(self, setting: Setting) -> dict[str, float]:
        """Return the share of keys retrieved, and of their tokens, and the loss of these."""
        key = self.plan.key
        found, lost = [], []
        for ids in self.asked.split(self.plan.sequences):
            hidden = hidden_states(self.model, ids, self.cache(setting), self.plan.asked_piece)
            losses, likeliest = answers(self.model, hidden[:, -key - 1 : -1], ids[:, -key:])
            found.append(likeliest == ids[:, -key:])
            lost.append(losses)
        right = torch.cat(found)
        whole, single = right.all(1).float().mean(), right.float().mean()
        loss = float(torch.cat(lost).double().mean())
        return {"keys": float(whole), "tokens": float(single), "loss": loss, "asked": len(right)}


SETTING = ("bits", "scheme", "recent", "keep_first")


def described(setting: Setting) -> dict[str, Any]:
    """Return a setting with names."""
    return dict(zip(SETTING, setting, strict=True))


def measure(given: argparse.Namespace) -> int:
    """Write a row per setting."""
    measured = Measured(given)
    started = time.monotonic()
    for setting in settings(measured.plan):
        if given.budget_seconds and time.monotonic() - started > given.budget_seconds:
            print("out of time")
            break
        texts = {name: measured.text(name, setting) for name in measured.texts}
        row = {"kind": "kv quality", **described(setting), "text": texts}
        rows.write(given.out, {**row, "passkey": measured.passkeys(setting)})
    return 0


@torch.no_grad()
def decode(given: argparse.Namespace) -> int:
    """Compare steps of one token, compiled, with pieces: the same text, the same cache."""
    measured = Measured(given)
    plan, model = measured.plan, measured.model
    ids = measured.texts["python"][: max(1, plan.sequences // 4)]
    first, last = plan.counted_from, min(measured.recipe.length, 2 * plan.counted_from)
    for setting in decoded(plan):
        torch._dynamo.reset()
        memeff_compile.reset()
        small_training.compile_whole(model, "memeff", given.inner)
        cache = measured.cache(setting)
        hidden_states(model, ids[:, :first], cache, plan.piece)
        losses = []
        started = time.perf_counter()
        for place in range(first, last - 1):
            step = ids[:, place : place + 1]
            logits = model(input_ids=step, past_key_values=cache, use_cache=True).logits
            losses.append(F.cross_entropy(logits[:, 0].float(), ids[:, place + 1]))
        loss = float(torch.stack(losses).double().mean())
        seconds = time.perf_counter() - started
        hidden = hidden_states(model, ids[:, :last], measured.cache(setting), plan.piece)
        pieces, _ = answers(model, hidden[:, first:-1], ids[:, first + 1 : last])
        row = {
            "kind": "kv decode",
            **described(setting),
            "sequences": len(ids),
            "steps": last - 1 - first,
            "loss": loss,
            "loss_in_pieces": float(pieces.double().mean()),
            "seconds": round(seconds, 1),
            "rewrites": small_training.rewrites(),
        }
        rows.write(given.out, row)
    return 0


def decoded(plan: Plan) -> list[Setting]:
    """Return the settings of which single steps are compared."""
    recent = plan.recents[-1]
    return [
        (16, "kivi", recent, 4),
        (4, "kivi", recent, 4),
        (4, "per_head", recent, 4),
        (3, "kivi", recent, 4),
        (2, "kivi", recent, 4),
    ]


# --- tables ---------------------------------------------------------------------------------------


def table(given: argparse.Namespace) -> int:
    """Print the rows as Markdown, one table per window."""
    found = [row for row in rows.read(given.out) if row["kind"] == "kv quality"]
    latest = {
        tuple(row[k] for k in ("bits", "scheme", "recent", "keep_first")): row for row in found
    }
    exact = next(row for setting, row in latest.items() if setting[0] == 16)
    print("| latest tokens that stay exact | first tokens that stay exact | scheme | bits ", end="")
    print(
        "| perplexity on Python code | its change | perplexity on other text | its change ", end=""
    )
    print("| positions with the same likeliest token | pass keys retrieved |")
    print("|---:|---:|---|---:|---:|---:|---:|---:|---:|---:|")
    for row in latest.values():
        cells = [str(row[k]) for k in ("recent", "keep_first", "scheme", "bits")]
        if row is exact:
            cells[:3] = ["", "", ""]
        for name in ("python", "other"):
            found_here, wanted = (r["text"][name]["perplexity"] for r in (row, exact))
            cells += [format(found_here, ".3f"), f"{found_here / wanted - 1:+.2%}"]
        cells += [f"{row['text']['python']['same_as_16']:.1%}", f"{row['passkey']['keys']:.0%}"]
        print(f"| {' | '.join(cells)} |")
    return 0


def main() -> int:
    """Run the requested command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=["train", "measure", "decode", "table"])
    parser.add_argument("--size", choices=RECIPES, default="full")
    parser.add_argument("--steps", type=int, help="if not the recipe's own")
    parser.add_argument("--budget-seconds", type=float, help="start no setting after that")
    parser.add_argument("--inner", default="inductor", help="aot_eager, or none")
    parser.add_argument("--folder", type=Path, default=GENERATED_8192, help="of text")
    parser.add_argument("--corpus", nargs="+", help="arguments of corpus.py, for other text")
    parser.add_argument("--model", type=Path, default=GENERATED_8192 / "kv_model")
    parser.add_argument("--out", type=Path, default=RESULTS / "kv-quality.jsonl")
    given = parser.parse_args()
    actions = {"train": train, "measure": measure, "decode": decode, "table": table}
    return actions[given.action](given)


if __name__ == "__main__":
    sys.exit(main())
