"""One training run of the convergence figure: a small Llama on the text of `corpus.py`.

Every method trains the same model through `torch.compile`: fp32 weights, bf16 autocast, AdamW, a
cosine schedule. Only the loss differs. Validation is the same code for all of them: the model's
trunk and products with fp32 results, never the op that is being judged.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import methods
from benchmarks.tiles import wide_product

Report = Callable[[dict[str, Any]], None]
ROWS_AT_ONCE = 4096


@dataclass(frozen=True)
class Recipe:
    """The settings of a run, apart from method and seed."""

    vocabulary: int = 65536
    width: int = 512
    inner: int = 1408
    layers: int = 12
    heads: int = 8
    batch: int = 32
    length: int = 512
    steps: int = 2000
    warm_up: int = 100
    peak_lr: float = 1e-3
    last_lr_share: float = 0.1
    weight_decay: float = 0.1
    clip: float = 1.0
    train_every: int = 10
    validate_every: int = 100
    validation_batches: int = 8
    final_batches: int = 60
    corpus: str = "python"


RECIPES = {
    "full": Recipe(),
    "tiny": Recipe(
        vocabulary=512,
        width=32,
        inner=64,
        layers=2,
        heads=2,
        batch=4,
        length=32,
        steps=20,
        warm_up=4,
        train_every=5,
        validate_every=10,
        validation_batches=2,
        final_batches=3,
    ),
}
PHASES = ("scratch", "tune")


def recipe_for(size: str, phase: str, steps: int | None = None) -> Recipe:
    """Return the recipe of a phase; fine-tuning takes other text, half the steps, a fifth the rate.

    Args:
        size: a key of `RECIPES`.
        phase: "scratch", or "tune" from a saved model.
        steps: steps from scratch, if not the recipe's own.
    """
    recipe = RECIPES[size]
    recipe = replace(recipe, steps=steps or recipe.steps)
    if phase == "scratch":
        return recipe
    return replace(
        recipe, corpus="other", steps=max(1, recipe.steps // 2), peak_lr=recipe.peak_lr / 5
    )


def build_model(recipe: Recipe, device: str) -> Any:
    """Build the transformers model in fp32, with causal attention that needs no mask tensor."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from benchmarks.models.causal_attention import use_causal_attention

    config = LlamaConfig(
        vocab_size=recipe.vocabulary,
        hidden_size=recipe.width,
        intermediate_size=recipe.inner,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.heads,
        max_position_embeddings=2 * recipe.length,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    with torch.device(device):
        model = LlamaForCausalLM(config)
    model.set_attn_implementation(use_causal_attention())
    return model.train()


class Tokens:
    """One slice of the corpus on the device, as rows of `length` tokens."""

    def __init__(self, folder: Path, name: str, recipe: Recipe, device: str) -> None:
        flat = numpy.fromfile(folder / f"{name}.u16", dtype=numpy.uint16).astype(numpy.int32)
        rows = len(flat) // recipe.length
        if rows < recipe.batch:
            raise ValueError(
                f"{folder / name}.u16 holds {len(flat)} tokens; one batch is "
                f"{recipe.batch} x {recipe.length}. Build a larger corpus."
            )
        trimmed = torch.from_numpy(flat[: rows * recipe.length])
        self.rows = trimmed.view(rows, recipe.length).to(device)
        self.batch = recipe.batch

    def order(self, steps: int, seed: int) -> Tensor:
        """Return (steps, batch) row numbers: a new permutation of all rows per epoch."""
        generator = torch.Generator().manual_seed(seed)
        needed, drawn = steps * self.batch, []
        while sum(map(len, drawn)) < needed:
            drawn.append(torch.randperm(len(self.rows), generator=generator))
        return torch.cat(drawn)[:needed].view(steps, self.batch).to(self.rows.device)

    def __getitem__(self, index: Any) -> Tensor:
        return self.rows[index].long()

    def first(self, batches: int) -> Iterator[Tensor]:
        """Yield so many batches in order, or all."""
        for number in range(min(batches, len(self.rows) // self.batch)):
            yield self[number * self.batch : (number + 1) * self.batch]


def autocast(device: str) -> torch.autocast:
    """Return bf16 autocast, as people train."""
    return torch.autocast(device, dtype=torch.bfloat16)


@torch.no_grad()
def validate(model: Any, batches: Iterable[Tensor], device: str) -> float:
    """Return the mean loss per token of ids (B, T), the same for every method."""
    total, count = torch.zeros((), dtype=torch.float64, device=device), 0
    weight = model.lm_head.weight.bfloat16()
    for ids in batches:
        with autocast(device):
            hidden = model.model(input_ids=ids).last_hidden_state
        flat = hidden[:, :-1].reshape(-1, hidden.shape[-1]).bfloat16()
        targets = ids[:, 1:].reshape(-1)
        for first in range(0, len(flat), ROWS_AT_ONCE):
            part = slice(first, first + ROWS_AT_ONCE)
            logits = wide_product(flat[part], weight)
            total += F.cross_entropy(logits, targets[part], reduction="sum")
        count += len(flat)
    return float(total) / count


def learning_rate(recipe: Recipe, step: int) -> float:
    """Return the rate of a step: a linear warm-up, then half a cosine."""
    if step < recipe.warm_up:
        return recipe.peak_lr * (step + 1) / recipe.warm_up
    progress = (step - recipe.warm_up) / max(1, recipe.steps - recipe.warm_up)
    share = recipe.last_lr_share
    return recipe.peak_lr * (share + (1 - share) * (1 + math.cos(math.pi * progress)) / 2)


def optimizer_for(model: Any, recipe: Recipe, device: str) -> torch.optim.AdamW:
    """Return AdamW with weight decay on matrices only."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": recipe.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=recipe.peak_lr, betas=(0.9, 0.95), fused=device == "cuda")


class OutOfTime(Exception):
    """The run reached its deadline; its reports are valid, but it is not complete."""


class Trainer:
    """Runs of one size on one device; a method's model is compiled once and used for every seed."""

    def __init__(self, size: str, folder: Path, device: str, inner: str = "inductor") -> None:
        self.size, self.folder, self.device, self.inner = size, folder, device, inner
        self._models: dict[tuple[str, ...], Any] = {}
        self._tokens: dict[str, Tokens] = {}
        self._rewrites: dict[int, int | None] = {}

    def tokens(self, name: str, recipe: Recipe) -> Tokens:
        """Return a slice and split of the corpus."""
        if name not in self._tokens:
            self._tokens[name] = Tokens(self.folder, name, recipe, self.device)
        return self._tokens[name]

    def _model(self, method: str, options: dict[str, str], recipe: Recipe) -> Any:
        key = (method, *(f"{name}={value}" for name, value in options.items()))
        if key not in self._models:
            model = build_model(recipe, self.device)
            methods.compile_model(model, method, options, self.inner)
            self._models[key] = model
        return self._models[key]

    def _start(self, model: Any, recipe: Recipe, seed: int, base: Path | None) -> None:
        if base is None:
            torch.manual_seed(seed)
            fresh = build_model(recipe, self.device).state_dict()
        else:
            from safetensors.torch import load_file

            fresh = load_file(base / "model.safetensors", device=self.device)
        model.load_state_dict(fresh)

    def run(
        self,
        method: str,
        phase: str,
        seed: int,
        report: Report,
        *,
        steps: int | None = None,
        options: dict[str, str] | None = None,
        base: Path | None = None,
        save_to: Path | None = None,
        deadline: float = math.inf,
    ) -> dict[str, Any]:
        """Train, report a row every `validate_every` steps, and return the final row.

        Args:
            method: a key of `methods.MODEL_METHODS`.
            phase: "scratch" or "tune"; the latter starts from `base`.
            seed: of the initial weights and of the order of the text.
            report: called with {"step", "loss": [...], "validation"} as the run goes.
            options: further `memeff.` options of the method.
            save_to: folder for the trained weights and the tokenizer.
            deadline: time.monotonic() at which to stop with `OutOfTime`.
        """
        recipe = recipe_for(self.size, phase, steps)
        model = self._model(method, options or {}, recipe)
        self._start(model, recipe, seed, base if phase == "tune" else None)
        text = self.tokens(f"{recipe.corpus}-train", recipe)
        held_out = self.tokens(f"{recipe.corpus}-validation", recipe)
        optimizer = optimizer_for(model, recipe, self.device)
        order = text.order(recipe.steps, seed)
        losses = torch.zeros(recipe.steps, device=self.device)
        fused_before = methods.rewrites(method)
        peak = _Peak(model, self.device)
        started, reported, validating = time.perf_counter(), 0, 0.0
        for step in range(recipe.steps):
            if step % recipe.validate_every == 0 and time.monotonic() > deadline:
                raise OutOfTime(f"stopped at step {step} of {recipe.steps}")
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(recipe, step)
            ids = text[order[step]]
            with autocast(self.device):
                loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
            optimizer.step()
            optimizer.zero_grad()
            losses[step] = loss.detach()
            if step == 0:
                losses[0].item()
                first_step = time.perf_counter() - started
                if fused_before is not None:
                    fused = (methods.rewrites(method) or 0) - fused_before
                    self._rewrites.setdefault(id(model), fused)
            if (step + 1) % recipe.validate_every == 0 or step + 1 == recipe.steps:
                curve = _thin(losses[reported : step + 1], recipe.train_every)  # waits for them
                paused = time.perf_counter()
                held = validate(model, held_out.first(recipe.validation_batches), self.device)
                validating += time.perf_counter() - paused
                report({"step": step + 1, "loss": curve, "validation": round(held, 5)})
                reported = step + 1
        stepping = time.perf_counter() - started - first_step - validating
        last = {
            "done": True,
            "validation": validate(model, held_out.first(recipe.final_batches), self.device),
            "train": float(losses[-recipe.validate_every :].mean()),
            "seconds": round(time.perf_counter() - started, 1),
            "first_step_s": round(first_step, 1),
            "step_ms": round(1e3 * stepping / max(1, recipe.steps - 1), 3),
            "parameters": sum(p.numel() for p in model.parameters()),
            "rewrites": self._rewrites.get(id(model)),
            **peak.row(),
        }
        if not math.isfinite(last["validation"]):
            raise FloatingPointError(f"validation loss is {last['validation']}")
        if save_to is not None:
            save(model, self.folder, save_to)
        return last


def _thin(curve: Tensor, every: int) -> list[float]:
    """Return the mean loss of each `every` steps."""
    means = [float(part.mean()) for part in curve.cpu().split(every)]
    return [round(mean, 5) for mean in means]


class _Peak:
    """Allocator peak of a run: weights, gradients, optimiser and activations, without the text."""

    def __init__(self, model: Any, device: str) -> None:
        self.is_cuda = device == "cuda"
        if self.is_cuda:
            own = sum(p.numel() * p.element_size() for p in model.parameters())
            self.others = torch.cuda.memory_allocated() - own
            torch.cuda.reset_peak_memory_stats()

    def row(self) -> dict[str, float]:
        if not self.is_cuda:
            return {}
        return {"peak_gib": round((torch.cuda.max_memory_allocated() - self.others) / 2**30, 3)}


def save(model: Any, corpus: Path, folder: Path) -> None:
    """Save weights (fp32 safetensors), config and tokenizer, loadable with from_pretrained."""
    from transformers import PreTrainedTokenizerFast

    from benchmarks.data.corpus import END_OF_TEXT

    building = folder.with_name(folder.name + ".part")
    model.save_pretrained(building)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(corpus / "tokenizer.json"), eos_token=END_OF_TEXT, bos_token=END_OF_TEXT
    )
    tokenizer.save_pretrained(building)
    (building / "corpus.json").write_text((corpus / "corpus.json").read_text())
    building.rename(folder)


def corpus_digest(folder: Path) -> str:
    """Return a short name of the tokens that runs on this folder see."""
    slices = json.loads((folder / "corpus.json").read_text())["slices"]
    return "-".join(facts["digest"][:8] for facts in slices.values())
