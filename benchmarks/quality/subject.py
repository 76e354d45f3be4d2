"""A real model in a folder, and its last hidden states under a cache, an attention, other weights.

Logits are fp32 products of hidden states and the head: a 16-bit model's own would be rounded, which
is more than 4-bit caches do.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

import memeff_compile
from benchmarks.methods import registered
from benchmarks.tiles import wide_product
from memeff_compile.errors import UnsupportedInputError
from memeff_compile.kernels.quantized_attention import supports
from memeff_compile.model.weights.compress import decompress_

CHECKED = 8
"""Tokens on which the head is compared with the model's own logits."""


class States(NamedTuple):
    """The last hidden states (B, N, D), and those after each layer."""

    last: Tensor
    layers: list[Tensor]


class Lowered(TorchFunctionMode):
    """Replaces causal attention by the low-bit op, and records each layer's error.

    Attributes:
        levels: one for all attentions of a forward pass, or one for each.
        judged: whether the exact result is computed, too, for the errors.
        off, size: sums of squares by attention: of the errors, and of the exact results.
        exact: attentions left as they were, for the level says so or the op cannot serve them.
    """

    def __init__(self, levels: str | Sequence[str], judged: bool = True) -> None:
        super().__init__()
        self.levels, self.judged = levels, judged
        self.off: dict[int, float] = {}
        self.size: dict[int, float] = {}
        self.exact: set[int] = set()
        self.place = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        if func is not F.scaled_dot_product_attention:
            return func(*args, **given)
        place, self.place = self.place, self.place + 1
        q, k, v = (*args, *(given[name] for name in ("query", "key", "value")[len(args) :]))[:3]
        levels = [self.levels] if isinstance(self.levels, str) else self.levels
        level = levels[place % len(levels)]  # several passes may be one text
        ahead = _ahead(q, k, given)
        if level == "exact" or ahead is None or supports(q, k, v, level=level) is not None:
            self.exact.add(place)
            return func(*args, **given)
        found = self.low(q, k, v, given.get("scale"), level, ahead)
        if not self.judged:
            return found
        result = func(*args, **given)
        off, size = float((found - result).float().norm() ** 2), float(result.float().norm() ** 2)
        self.off[place] = self.off.get(place, 0.0) + off
        self.size[place] = self.size.get(place, 0.0) + size
        return found

    def low(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float | None, level: str, ahead: int = 0
    ) -> Tensor:
        """Return causal attention in low bits; so many keys come before the first query."""
        found: Tensor = torch.ops.memeff.quantized_attention(
            q, k, v, ahead=ahead, scale=scale, level=level, with_lse=False
        )[0]
        return found

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Answer the attentions of one forward pass."""
        self.place = 0
        with self:
            yield

    def errors(self) -> list[float]:
        """Return the relative error of each attention, 0 where it was left exact."""
        places = sorted({*self.off, *self.exact})
        return [
            (self.off[place] / self.size[place]) ** 0.5 if place in self.off else 0.0
            for place in places
        ]


def _ahead(q: Tensor, k: Tensor, given: dict[str, Any]) -> int | None:
    """Return how many keys come before the first query, or None if attention is not causal."""
    mask, ahead = given.get("attn_mask"), k.shape[2] - q.shape[2]
    if mask is None:
        return 0 if given.get("is_causal") and ahead == 0 else None
    places = torch.arange(k.shape[2], device=k.device)
    wanted = places <= places[ahead:, None]
    is_same = mask.dtype == torch.bool and bool((mask == wanted).all())
    return ahead if is_same and mask.shape[-2:] == wanted.shape else None


class Subject:
    """A model and its tokenizer.

    Args:
        folder: as `from_pretrained` takes it; MODEL+METHOD-SEED is a fine-tuned one.
        device: where to run.
        dtype: to compute in; weights that are compressed are bf16 before.
    """

    def __init__(self, folder: Path, device: str, dtype: torch.dtype) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.name, _, self.tuned = folder.name.partition("+")
        self.device, self.dtype = device, dtype
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        load: Callable[..., Any] = AutoModelForCausalLM.from_pretrained
        self.stored = load(folder, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
        self.model = self._ready(copy.deepcopy(self.stored))
        config = self.model.config.get_text_config(decoder=True)
        self.layers, self.longest = config.num_hidden_layers, config.max_position_embeddings
        self.softcap = getattr(config, "final_logit_softcapping", None)
        self.facts = {
            "model": self.name,
            "layers": self.layers,
            "hidden": config.hidden_size,
            "vocabulary": config.vocab_size,
            "dtype": str(dtype).removeprefix("torch."),
            "parameters": sum(p.numel() for p in self.model.parameters()),
        }
        self._check_head()

    def _ready(self, model: Any) -> Any:
        return model.to(self.device, self.dtype)

    def with_weights(self, mantissa: int, coded: bool = False) -> tuple[Any, dict[str, Any]]:
        """Return the model with so many mantissa bits of its linears, and their size.

        `coded`: its weights stay as codes, which each forward pass decodes.
        """
        model = copy.deepcopy(self.stored).to(self.device)
        report = memeff_compile.compress_(
            model, "tier", mantissa=mantissa, min_size=1, progress=False
        )
        count = len(report.compressed) if coded else decompress_(model)
        if not count:
            raise UnsupportedInputError(f"no weight of {self.name} was compressed:\n{report}")
        return self._ready(model), {"bits": report.bits, "compressed": count}

    def compiled(self, level: str | dict[str, Any] | None) -> Any:
        """Return the model compiled, with attention of a level, or of a table, at any length."""
        registered()
        options: dict[str, Any] = {}
        if level is not None:
            options = {"memeff.attention": level, "memeff.attention.length": 0}
        options["memeff.inner"] = "aot_eager"  # the rest is the exact model's own arithmetic
        torch.compiler.reset()
        memeff_compile.reset()
        body = torch.compile(self.model.base_model, backend="memeff", options=options)
        return SimpleNamespace(base_model=body)

    def sites(self) -> int:
        """Return how many attentions of the compiled model run in low bits, at least one."""
        found = memeff_compile.last_report().rewrites("quantize_attention")
        if not found:
            raise UnsupportedInputError(f"no attention of {self.name} runs in low bits here")
        return found

    def logits(self, last: Tensor) -> Tensor:
        """Return the fp32 logits of hidden states (N, D)."""
        head = self.model.get_output_embeddings()
        found = wide_product(last, head.weight)
        if head.bias is not None:
            found += head.bias.float()
        return found if self.softcap is None else self.softcap * (found / self.softcap).tanh()

    @torch.no_grad()
    def _check_head(self) -> None:
        ids = torch.arange(1, 1 + CHECKED, device=self.device)[None]
        wanted = self.model(input_ids=ids).logits[0].float()
        off = (self.logits(self.states(ids).last[0]) - wanted).norm() / wanted.norm()
        if not off < 0.02:
            raise SystemExit(
                f"{self.name}: its logits are not the product with its head (off by {off:.2g}); "
                "such models are not measured here"
            )

    @torch.no_grad()
    def states(
        self,
        ids: Tensor,
        model: Any = None,
        cache: Any = None,
        pieces: tuple[int, int] | None = None,
        around: AbstractContextManager[Any] | None = None,
        layers: bool = True,
    ) -> States:
        """Return the states of tokens (B, N) in one go, or through a cache piece by piece.

        Args:
            ids: tokens.
            model: another than the exact one.
            cache: the cache of the pieces.
            pieces: tokens of the first, and of all others.
            around: a context manager around the forward pass.
            layers: whether those after each layer are kept.
        """
        body = (model or self.model).base_model
        parts = [ids]
        if pieces is not None:
            parts = [ids[:, : pieces[0]], *ids[:, pieces[0] :].split(pieces[1], 1)]
            parts = [part for part in parts if part.shape[1]]
        given = {"use_cache": False} if cache is None else {"past_key_values": cache}
        found = []
        with nullcontext() if around is None else around:
            for part in parts:
                out = body(input_ids=part, output_hidden_states=layers, **given)
                after = list(out.hidden_states[1:]) if layers else []
                found.append(States(out.last_hidden_state, after))
        each = [torch.cat(parts, 1) for parts in zip(*(s.layers for s in found), strict=True)]
        return States(torch.cat([s.last for s in found], 1), each)
