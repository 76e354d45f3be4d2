"""The trained models whose attention is ablated, and the measures of their results.

A subject knows how to run its model on its inputs and how good the results are. Text, images and
noise are the same in every call, so that only attention differs.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.ablations.probabilities import validation_rows
from benchmarks.models import small_models
from benchmarks.quality import texts

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
def attention_is(attend: Attend | None) -> Iterator[None]:
    """Let `attend` answer each attention, by its place in the forward pass; None: the model's."""
    with nullcontext() if attend is None else Replaced(attend):
        yield


# --- subjects -------------------------------------------------------------------------------------


@dataclass
class Subject:
    """A model, its inputs, and measures of its results.

    Attributes:
        name: its name in rows.
        model: in eval mode.
        harm: the measure that grows with damage, for shares of it.
        layers: attentions in one call of the model.
    """

    name: str
    model: Any
    harm: str
    layers: int

    @property
    def inputs(self) -> str:
        """The inputs of the measures."""
        raise NotImplementedError

    def run(self, model: Any, number: int) -> None:
        """Run a model on input `number` of those for calibration, unlike those that are judged."""
        raise NotImplementedError

    def quality(self, model: Any, attend: Attend | None = None) -> dict[str, float]:
        """Return the measures of a model's results, its attention as `attend` says."""
        raise NotImplementedError


@dataclass
class LanguageModel(Subject):
    """A causal model of transformers on validation text."""

    tokens: Tensor
    others: Tensor
    batch: int
    text: str = "validation text"

    @property
    def inputs(self) -> str:
        """The inputs of the measures."""
        return f"{len(self.tokens)} x {self.tokens.shape[1]} tokens of {self.text}"

    def run(self, model: Any, number: int) -> None:
        """Run on another text than the judged one."""
        first = number * self.batch % len(self.others)
        model(input_ids=self.others[first : first + self.batch], use_cache=False)

    def quality(self, model: Any, attend: Attend | None = None) -> dict[str, float]:
        """Return loss and perplexity on the validation text."""
        total = torch.zeros((), dtype=torch.float64)
        for first in range(0, len(self.tokens), self.batch):
            part = self.tokens[first : first + self.batch]
            with torch.no_grad(), attention_is(attend):
                logits = model(input_ids=part, use_cache=False).logits[:, :-1]
            total += F.cross_entropy(
                logits.flatten(0, 1).float(), part[:, 1:].flatten(), reduction="sum"
            ).cpu()
        loss = float(total) / (len(self.tokens) * (self.tokens.shape[1] - 1))
        return {"loss": loss, "perplexity": math.exp(loss)}


@dataclass
class Classifier(Subject):
    """A vision transformer on noisy pictures of characters."""

    glyphs: small_models.Glyphs
    count: int
    batch: int
    wanted: Tensor | None = None

    @property
    def inputs(self) -> str:
        """The inputs of the measures."""
        return f"{self.count} pictures"

    def pictures(self, model: Any, seed: int, count: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield batches of pictures, in the dtype of a model, and classes."""
        generator = torch.Generator(self.glyphs.device).manual_seed(seed)
        dtype = next(model.parameters()).dtype
        for _ in range(0, count, self.batch):
            pictures, label = self.glyphs.draw(min(self.batch, count), generator)
            yield pictures.to(dtype), label

    def run(self, model: Any, number: int) -> None:
        """Run on other pictures."""
        for pictures, _ in self.pictures(model, 1_000 + number, min(self.batch, 64)):
            model(pixel_values=pictures)

    def quality(self, model: Any, attend: Attend | None = None) -> dict[str, float]:
        """Return loss, accuracy in percent, and the percentage of answers as at first."""
        answers, loss, right, seen = [], 0.0, 0, 0
        for pictures, label in self.pictures(model, 99, self.count):
            with torch.no_grad(), attention_is(attend):
                logits = model(pixel_values=pictures).logits.float()
            loss += float(F.cross_entropy(logits, label, reduction="sum"))
            answers.append(logits.argmax(1))
            right += int((answers[-1] == label).sum())
            seen += len(label)
        found = torch.cat(answers)
        self.wanted = found if self.wanted is None else self.wanted
        same = float((found == self.wanted).double().mean())
        return {"loss": loss / seen, "accuracy": 100.0 * right / seen, "same_answers": 100.0 * same}


@dataclass
class Painter(Subject):
    """A diffusion transformer that draws characters, and the classifier that reads them."""

    count: int
    steps: int
    guidance: float
    reader: Classifier | None = None
    wanted: Tensor | None = None
    latest: Tensor | None = None

    @property
    def inputs(self) -> str:
        """The inputs of the measures."""
        return f"{self.count} pictures in {self.steps} steps, guidance {self.guidance:g}"

    def draw(self, model: Any, seed: int, count: int) -> tuple[Tensor, Tensor]:
        """Return pictures drawn from noise of a seed, and the classes asked for."""
        sizes = self.model.sizes
        device = next(self.model.parameters()).device
        generator = torch.Generator().manual_seed(seed)
        start = torch.randn(count, 1, sizes.side, sizes.side, generator=generator).to(device)
        label = torch.arange(count, device=device) % sizes.classes
        return small_models.sample(model, start, label, self.steps, self.guidance), label

    def run(self, model: Any, number: int) -> None:
        """Draw other pictures."""
        self.draw(model, 1_000 + number, min(self.count, 36))

    def quality(self, model: Any, attend: Attend | None = None) -> dict[str, float]:
        """Return distances to the original drawings, and the percentage that is read correctly."""
        with torch.no_grad(), attention_is(attend):
            found, label = self.draw(model, 99, self.count)
        self.latest = found
        self.wanted = found if self.wanted is None else self.wanted
        shown, wanted = found.clamp(-1, 1).double(), self.wanted.clamp(-1, 1).double()
        error = float((shown - wanted).square().mean())
        of_each = (shown - wanted).square().flatten(1).mean(1).clamp_min(1e-12)
        measures = {
            "mse": error,
            "psnr_db": 10.0 * math.log10(4.0 / max(error, 1e-12)),
            "psnr_db_mean": float((10.0 * (4.0 / of_each).log10()).mean()),
            "psnr_db_worst": float((10.0 * (4.0 / of_each).log10()).min()),
            "cosine": float(F.cosine_similarity(shown.flatten(), wanted.flatten(), 0)),
            "relative_l1": float((shown - wanted).abs().sum() / wanted.abs().sum()),
        }
        if self.reader is not None:
            measures["read_rightly"] = self._read(found, label)
        return measures

    def _read(self, pictures: Tensor, label: Tensor) -> float:
        """Return the percentage of pictures whose class the classifier names, under its noise."""
        assert self.reader is not None
        sizes = self.reader.glyphs.sizes
        generator = torch.Generator().manual_seed(7)
        noise = torch.randn(pictures.shape, generator=generator).to(pictures.device)
        seen = pictures.clamp(-1, 1) + sizes.noise * noise
        dtype = next(self.reader.model.parameters()).dtype
        with torch.no_grad():
            answers = self.reader.model(pixel_values=seen.to(dtype)).logits.argmax(1)
        return 100.0 * float((answers == label).double().mean())


# --- loading --------------------------------------------------------------------------------------


def language_model(
    folder: Path, text: Path, length: int, count: int, batch: int, device: str
) -> LanguageModel:
    """Load a saved model; attention is causal and has no mask tensor."""
    from transformers import AutoModelForCausalLM

    from benchmarks.models.causal_attention import use_causal_attention

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model.set_attn_implementation(use_causal_attention())
    tokens = validation_rows(text, length, count, device)
    flat = numpy.fromfile(text / "python-train.u16", dtype=numpy.uint16, count=8 * batch * length)
    others = torch.from_numpy(flat.astype(numpy.int64)).view(-1, length).to(device)
    layers = model.config.num_hidden_layers
    return LanguageModel(
        "language model", model.to(device).eval(), "loss", layers, tokens, others, batch
    )


def real_model(
    folder: Path, text: str, length: int, count: int, batch: int, device: str
) -> LanguageModel:
    """Load a real model, named after its folder, and a text of texts.py.

    Training text is replaced by the other named text. Attention is causal and has no mask tensor;
    sequences must be no longer than the windows of the model.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from benchmarks.models.causal_attention import use_causal_attention

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model.set_attn_implementation(use_causal_attention())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    other = "source" if text == "prose" else "prose"
    judged = texts.rows_of(tokenizer, text, length, count).to(device)
    others = texts.rows_of(tokenizer, other, length, 8 * batch).to(device)
    layers = model.config.num_hidden_layers
    return LanguageModel(
        folder.name, model.to(device).eval(), "loss", layers, judged, others, batch, text
    )


def classifier(
    folder: Path, glyphs: Path, count: int, batch: int, device: str, dtype: torch.dtype
) -> Classifier:
    """Load a saved vision transformer."""
    model, sizes = small_models.load(folder, device, dtype)
    drawn = small_models.Glyphs(glyphs, sizes, device)
    return Classifier("vision transformer", model, "loss", sizes.layers, drawn, count, batch)


def painter(
    folder: Path,
    count: int,
    steps: int,
    guidance: float,
    device: str,
    dtype: torch.dtype,
    reader: Classifier | None = None,
) -> Painter:
    """Load a saved diffusion transformer."""
    model, sizes = small_models.load(folder, device, dtype)
    return Painter(
        "diffusion transformer", model, "mse", sizes.layers, count, steps, guidance, reader
    )
