"""Codes and arithmetic that the package does not have, put into a real model: what would each lose?

`Coded` puts codes in the place of older keys and values, in a text that is read in one go: a query
sees the same as with a cache that has read a prompt and then pieces. With the codes of `KVCache`
the results equal `KVCache`'s (a test). `Told` puts attention in low bits there, with other settings
of its reference.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from benchmarks.quality.subject import Lowered
from memeff_compile.kernels._triton.conditions import Conditions
from memeff_compile.kernels.coded_kv_cache.reference import groups_due
from memeff_compile.kernels.quantized_attention import reference
from memeff_compile.kernels.quantized_attention.settings import Settings

WINDOW_STEP = 64
"""Tokens that become codes together where keys do not say how many."""
SHRUNK = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)
"""Shares of the range of numbers among which the one of least squared error is taken."""
NORMAL = {
    4: (0.128, 0.388, 0.657, 0.942, 1.256, 1.618, 2.069, 2.733),
    3: (0.245, 0.756, 1.344, 2.152),
}
"""Levels above zero that lose least of normal numbers (Max 1960), by bits."""

SHARES = {
    "quarters": (-1.0, 0.0, 0.0, 1.0),
    "eighths": (-1.0, -1.0, -1.0, 0.0, 0.0, 0.0, 1.0, 2.0),
}
"""Bits of channels, by the weight of their errors: the least ones first."""


@dataclass(frozen=True)
class Codes:
    """How keys or values of older tokens are coded.

    Attributes:
        bits: of a code; None leaves them as they are.
        along: what shares a scale, ``tokens`` of a channel or ``channels`` of a token.
        group: how many of them.
        scale: ``ends``, from the smallest to the largest; ``centred``, around zero, without a zero
            of its own; ``least``, the share of the range of least squared error; ``normal``, from
            end to end in the steps of a normal distribution.
        before: what is done before and undone behind: nothing; ``rotated`` by a Hadamard matrix
            over channels; ``turned`` back by the rotary embedding; ``mean`` of each channel over
            the prompt taken away.
        uneven: channels get other bits, no more in all, by what errors of theirs weigh in the
            prompt: a key of `SHARES`.
    """

    bits: int | None = 4
    along: str = "tokens"
    group: int = 64
    scale: str = "ends"
    before: str = ""
    uneven: str = ""


KEYS, VALUES = Codes(), Codes(along="channels")
"""The settings of `KVCache`."""


@dataclass(frozen=True)
class Cached:
    """A cache: its codes, and the tokens that are not coded.

    Attributes:
        keys, values: in codes of these.
        recent: latest tokens that never are.
        keep_first: first tokens that never are.
        finer: layers that have 8 bits, whatever the others have.
    """

    keys: Codes = KEYS
    values: Codes = VALUES
    recent: int = 128
    keep_first: int = 4
    finer: tuple[int, ...] = ()

    def at_bits(self, bits: int) -> Cached:
        """Return the same in codes of so many bits."""
        keys, values = (replace(codes, bits=bits) for codes in (self.keys, self.values))
        return replace(self, keys=keys, values=values)

    @property
    def step(self) -> int:
        """Return how many tokens become codes together."""
        return self.keys.group if self.keys.along == "tokens" else WINDOW_STEP

    def at(self, layer: int) -> Cached:
        """Return the settings of a layer."""
        return self.at_bits(8) if layer in self.finer else self


def rounded(x: Tensor, bits: Tensor, scale: str, dtype: torch.dtype) -> Tensor:
    """Round rows (..., n) that share a scale to codes; nan has no say in it. Scales are stored."""
    if scale == "centred":
        top = 2.0 ** (bits - 1) - 1
        step = (x.abs().nan_to_num().amax(-1, True) / top).to(dtype).to(x.dtype)
        step = step.masked_fill(step == 0, 1.0)
        return (x / step).round().clamp(-top, top) * step
    low = x.nan_to_num(torch.inf).amin(-1, True)
    high = x.nan_to_num(-torch.inf).amax(-1, True)
    if scale == "normal":
        half = torch.tensor(NORMAL[int(bits.flatten()[0])], dtype=x.dtype, device=x.device)
        levels = torch.cat([-half.flip(0), half]) / half[-1]
        middle, reach = ((high + low) / 2).to(dtype), ((high - low) / 2).to(dtype)
        middle, reach = middle.to(x.dtype), reach.to(x.dtype).clamp_min(1e-20)
        borders = (levels[1:] + levels[:-1]) / 2
        nearest = torch.bucketize(((x - middle) / reach).contiguous(), borders)
        return levels[nearest] * reach + middle
    tops, found, least = 2.0**bits - 1, x, torch.full_like(low, torch.inf)
    for share in SHRUNK if scale == "least" else SHRUNK[:1]:
        cut = (1 - share) / 2 * (high - low)
        step = ((high - low - 2 * cut) / tops).to(dtype).to(x.dtype)
        step = step.masked_fill(step == 0, 1.0)
        zero = (low + cut).to(dtype).to(x.dtype)
        codes = ((x - zero) / step + 0.5).floor()
        tried = codes.clamp(torch.zeros_like(tops), tops) * step + zero
        error = (tried - x).nan_to_num().square().sum(-1, True)
        found = torch.where(error < least, tried, found)
        least = least.minimum(error)
    return found


def hadamard(size: int) -> Tensor:
    """Return the orthogonal matrix of signs."""
    found, pair = torch.ones(1, 1), torch.tensor([[1.0, 1.0], [1.0, -1.0]])
    while found.shape[0] < size:
        found = torch.kron(found, pair)
    return found / size**0.5


def turned(x: Tensor, rotary: tuple[Tensor, Tensor], sign: int) -> Tensor:
    """Apply a rotary embedding to (B, H, N, D), or with a sign of -1 take it back."""
    cos, sin = (t.to(x.dtype).unsqueeze(1) for t in rotary)
    first, second = x.chunk(2, -1)
    return x * cos + sign * sin * torch.cat([-second, first], -1)


class Coded(TorchFunctionMode):
    """Puts codes in the place of older keys and values in causal attention.

    Args:
        cached: the cache.
        prompt: tokens that are read first, exactly.
        piece: tokens of each later piece.
        rotary: cosines and sines (1, N, D) of the model, for keys that are turned back.
    """

    def __init__(
        self, cached: Cached, prompt: int, piece: int, rotary: tuple[Tensor, Tensor]
    ) -> None:
        super().__init__()
        self.cached, self.prompt, self.piece, self.rotary = cached, prompt, piece, rotary
        self.place = 0

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Answer the attentions of one forward pass."""
        self.place = 0
        with self:
            yield

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        if func is not F.scaled_dot_product_attention:
            return func(*args, **given)
        q, k, v = (*args, *(given.pop(n) for n in ("query", "key", "value")[len(args) :]))[:3]
        given.pop("attn_mask", None)
        if not given.pop("is_causal", False):
            raise NotImplementedError("attention is not causal")
        cached, self.place = self.cached.at(self.place), self.place + 1
        weigh = q[:, :, : self.prompt].float().square().sum(2)  # (B, H, D)
        weigh = weigh.unflatten(1, (k.shape[1], -1)).sum(2)
        keys, values = (
            self.coded(x, codes, cached, weigh)
            for x, codes in ((k, cached.keys), (v, cached.values))
        )
        found = [func(*(x[:, :, : self.prompt] for x in (q, k, v)), is_causal=True, **given)]
        for start in range(self.prompt, q.shape[2], self.piece):
            end = min(start + self.piece, q.shape[2])
            until = groups_due(end, cached.recent + cached.step, cached.step) * cached.step
            seen = [
                torch.cat([made[:, :, :until], x[:, :, until:end]], 2)
                for made, x in ((keys, k), (values, v))
            ]
            mask = torch.ones(end - start, end, dtype=torch.bool, device=q.device).tril(start)
            found.append(func(q[:, :, start:end], *seen, attn_mask=mask, **given))
        return torch.cat(found, 2)

    def coded(self, x: Tensor, codes: Codes, cached: Cached, weigh: Tensor) -> Tensor:
        """Return decoded keys or values (B, G, N, D), of whole groups only."""
        if codes.bits is None:
            return x
        first = cached.keep_first
        whole = x.shape[2] // cached.step * cached.step
        held = x[:, :, :whole].float()
        rotary = (self.rotary[0][:, :whole], self.rotary[1][:, :whole])
        matrix = hadamard(x.shape[3]).to(x.device)
        mean = held[:, :, first : self.prompt].mean(2, True)
        if codes.before == "rotated":
            held = held @ matrix
        elif codes.before == "turned":
            held = turned(held, rotary, -1)
        elif codes.before == "mean":
            held = held - mean
        bits = torch.full((*x.shape[:2], 1, x.shape[3], 1), float(codes.bits), device=x.device)
        if codes.uneven:
            ranges = held[:, :, first : self.prompt]
            order = (weigh.sqrt() * (ranges.amax(2) - ranges.amin(2))).argsort(-1)
            more = torch.tensor(SHARES[codes.uneven], device=x.device)
            more = more.repeat_interleave(x.shape[3] // len(more)).expand_as(order)
            bits = codes.bits + torch.zeros_like(weigh).scatter(2, order, more)
            bits = bits[:, :, None, :, None]
        if codes.along == "tokens":
            held = held.clone()
            held[:, :, :first] = torch.nan
            rows = held.unflatten(2, (-1, codes.group)).transpose(3, 4)  # (B, G, n, D, group)
            made = rounded(rows, bits, codes.scale, x.dtype).transpose(3, 4).flatten(2, 3)
        else:
            rows = held.unflatten(3, (-1, min(codes.group, x.shape[3])))
            made = rounded(rows, bits[:, :, :, :1], codes.scale, x.dtype).flatten(3)
        if codes.before == "rotated":
            made = made @ matrix
        elif codes.before == "turned":
            made = turned(made, rotary, 1)
        elif codes.before == "mean":
            made = made + mean
        return torch.cat([x[:, :, :first], made[:, :, first:].to(x.dtype)], 2)


@dataclass(frozen=True)
class Study(Settings):
    """Arithmetic of attention in low bits that the op does not have, or not for a model.

    Attributes:
        constants: other values of the reference's.
        sums_rounded: whether weights are summed as they were rounded.
    """

    constants: dict[str, Any] = field(default_factory=dict)
    sums_rounded: bool = False

    @property
    def aligns(self) -> bool:
        """Whether keys are rounded with the mean of queries in view, whatever shares a scale."""
        return "q" not in self.smooth

    @property
    def restores(self) -> bool:
        """Whether the mean rounding error of values is added back."""
        return "v" in self.smooth and self.values == "e4m3"


@dataclass(frozen=True)
class Published(Study):
    """Arithmetic of attention as SageAttention2 publishes it: 4-bit scores, unless `limit` differs.

    `granularity` is one of the paper's, so that the op's own steps are left out.
    """

    limit: int = 7
    values: str = "exact"
    granularity: str = "thread"
    smooth: str = "qk"
    aligns = Settings.aligns
    restores = Settings.restores


class Told(Lowered):
    """Attention in low bits by the reference, with settings of a study."""

    def __init__(self, study: Settings) -> None:
        super().__init__("8b")
        self.study = study if isinstance(study, Study) else Study(**vars(study))

    def low(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float | None, level: str, ahead: int = 0
    ) -> Tensor:
        """Return attention by the reference."""
        given = Conditions(None, None, None, ahead, None, scale or q.shape[3] ** -0.5, 0.0, False)
        with ExitStack() as stack:
            for name, value in self.study.constants.items():
                stack.enter_context(mock.patch.object(reference, name, value))
            found = reference.attend(q, k, v, given, self.study)[0]
            if not self.study.sums_rounded:
                return found
            # If all values are one, the result is the sum of rounded over exact weights.
            wide, plain = (x.float() for x in (q, k)), replace(self.study, smooth="k")
            share = reference.attend(*wide, torch.ones_like(v).float(), given, plain)[0]
            mean = v.float().mean(2, True).repeat_interleave(q.shape[1] // v.shape[1], 1)
            return ((found.float() - mean) / share + mean).to(q.dtype)
