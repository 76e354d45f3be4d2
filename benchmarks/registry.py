"""The measured cases: the shapes of every op and how its inputs are drawn.

`OPS` has an op for each folder of the package's kernels. Shapes of `h200` are those that tables
show, those of `tiny` what the tests run.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.methods import IGNORED

# --- linear + cross entropy -----------------------------------------------------------------------

LOSS_SHAPES = {  # N tokens, D hidden size, V vocabulary
    "gemma2": (8192, 2304, 256000),
    "llama3": (8192, 4096, 128256),
    "llama1b": (16384, 2048, 128256),
    "tiny": (128, 32, 512),
}


def sizes(shape: str) -> tuple[int, int, int]:
    """Return (N, D, V) of a named or spelled-out shape.

    Example: sizes("128x32x512") == (128, 32, 512).
    """
    if shape in LOSS_SHAPES:
        return LOSS_SHAPES[shape]
    try:
        n, d, v = map(int, shape.split("x"))
    except ValueError:
        known = ", ".join(LOSS_SHAPES)
        raise ValueError(
            f"shape is {shape!r}; it takes NxDxV, such as 8192x2304x256000, or one of {known}"
        ) from None
    return n, d, v


@dataclass(frozen=True)
class Inputs:
    """Tensors of one measurement: hidden (N, D), weight (V, D), target (N,) int64."""

    hidden: Tensor
    weight: Tensor
    target: Tensor

    def without_gradients(self) -> None:
        """Drop the gradients of the last call."""
        self.hidden.grad = self.weight.grad = None


def _head(v: int, d: int, generator: torch.Generator) -> Tensor:
    """Return weight rows of length about 1."""
    return torch.randn(v, d, device=generator.device, generator=generator).div_(math.sqrt(d))


def _peaked(shape: tuple[int, int, int], generator: torch.Generator) -> tuple[Tensor, ...]:
    """Draw hidden states that are mixtures of vocabulary rows: far more peaked than in real models.

    A row mixes 24 vocabulary rows, drawn log-uniformly over the ids so that low ids are frequent,
    with falling amounts; how fast they fall differs from row to row. A few entries per row exceed
    2**-12. The target is drawn from the softmax over the 24.
    """
    n, d, v = shape
    device, mixed = generator.device, 24
    weight = _head(v, d, generator).bfloat16()
    hidden = torch.empty(n, d, device=device)
    target = torch.empty(n, device=device, dtype=torch.int64)
    place = torch.arange(mixed, device=device)
    for first in range(0, n, 1024):
        span = slice(first, min(first + 1024, n))
        count = span.stop - span.start
        uniform = torch.rand(count, mixed, device=device, generator=generator)
        ids = (torch.exp(uniform * math.log(v)) - 1).long().clamp_(0, v - 1)
        fall = 0.165 + 1.1 * torch.rand(count, 1, device=device, generator=generator)
        amount = (17.0 - fall * place).clamp_min(0.0)
        chosen = weight[ids].float()
        hidden[span] = torch.einsum("nk,nkd->nd", amount, chosen)
        scores = torch.einsum("nd,nkd->nk", hidden[span], chosen)
        pick = torch.multinomial(scores.softmax(-1), 1, generator=generator)
        target[span] = ids.gather(1, pick).squeeze(1)
    return hidden, weight, target


def _trained(shape: tuple[int, int, int], generator: torch.Generator) -> tuple[Tensor, ...]:
    """Draw softmaxes like those measured on real models, with ids in no order.

    A logit is a token's frequency after Zipf's law, a row's own normal numbers, more spread in some
    rows than in others, and for six tokens a row an extra that makes them likely here. At 49,152 to
    151,936 tokens the loss is 2.0 to 2.6, 90 to 110 entries a row exceed 2**-12 and 5 to 7 % of the
    mass lies below, most of it in some rows. Targets are drawn from the softmax.
    """
    n, d, v = shape
    told: dict[str, Any] = {"device": generator.device, "generator": generator}
    steepness, liked = 1.25, 6
    rank = torch.randperm(v, **told)
    token = torch.argsort(rank)
    weight = _head(v, d, generator)
    weight[:, 0] = -(1.0 + rank).log() / math.log(v)
    weight = weight.bfloat16()
    hidden = torch.empty(n, d, device=generator.device)
    target = torch.empty(n, device=generator.device, dtype=torch.int64)
    fall = torch.arange(liked, device=generator.device)
    for first in range(0, n, 256):
        span = slice(first, min(first + 256, n))
        count = span.stop - span.start
        spread, height, pace = torch.rand(3, count, 1, **told)
        own = torch.randn(count, d, **told) * (1.8 + 0.8 * spread)
        ranks = (torch.exp(torch.rand(count, liked, **told) * math.log(v)) - 1).long().clamp_(0)
        amount = (6.4 * height - 2 * pace * fall).clamp_min(0)
        amount += 0.9 * steepness * (1.0 + ranks).log()
        chosen = weight[token[ranks.clamp_max(v - 1)]].float()
        own += torch.einsum("nk,nkd->nd", amount, chosen)
        own[:, 0] = steepness * math.log(v)
        hidden[span] = own
        logits = own.bfloat16().float() @ weight.float().t()
        pick = torch.multinomial(logits.softmax(-1), 1, generator=generator)
        target[span] = pick.squeeze(1)
    return hidden, weight, target


def _normal(
    spread: float, shape: tuple[int, int, int], generator: torch.Generator
) -> tuple[Tensor, ...]:
    """Draw logits that are normal with this standard deviation; targets are uniform."""
    n, d, v = shape
    weight = _head(v, d, generator)
    hidden = torch.randn(n, d, device=generator.device, generator=generator).mul_(spread)
    target = torch.randint(v, (n,), device=generator.device, generator=generator)
    return hidden, weight, target


DATA: dict[str, Callable[[tuple[int, int, int], torch.Generator], tuple[Tensor, ...]]] = {
    "peaked": _peaked,
    "trained": _trained,
    "flat": partial(_normal, 0.25),
    "spread": partial(_normal, 1.5),
}
"""trained: as in real models; peaked: a few likely tokens a row, of low ids; flat: as at random
initialisation; spread: the filter's worst. A file of `data/hidden_states.py` is data, too."""


def data_named(text: str) -> str:
    """Return the name of a kind of data, or of a file that is there, as a command line has it."""
    if text in DATA or Path(text).is_file():
        return text
    raise argparse.ArgumentTypeError(f"{text!r} is no file and none of {', '.join(DATA)}")


def saved_sizes(path: str) -> tuple[int, int, int]:
    """Return (N, D, V) of a file."""
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        n, d = file.get_slice("hidden").get_shape()
        return n, d, file.get_slice("weight").get_shape()[0]


def _saved(path: str, device: str) -> tuple[Tensor, ...]:
    """Load hidden states, head and targets of a real model."""
    from safetensors.torch import load_file

    found = load_file(path, device=device)
    return found["hidden"], found["weight"], found["target"]


def inputs(
    shape: str, data: str, device: str, dtype: torch.dtype, ignored: int = 0, seed: int = 1
) -> Inputs:
    """Draw the tensors of one measurement; `ignored` percent of the targets do not count.

    Data of a file have the file's shape.
    """
    generator = torch.Generator(device=device).manual_seed(seed)
    if data in DATA:
        hidden, weight, target = DATA[data](sizes(shape), generator)
    else:
        hidden, weight, target = _saved(data, device)
    if ignored:
        chance = torch.rand(target.shape, device=device, generator=generator)
        target = torch.where(chance < ignored / 100, IGNORED, target)
    hidden, weight = hidden.to(dtype), weight.to(dtype)
    return Inputs(hidden.requires_grad_(), weight.requires_grad_(), target)


# --- attention ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Case:
    """One attention: sizes, and its mask's conditions.

    Attributes:
        sizes: B, H, G, M (= N), D.
        window: keys that a query sees, itself included, or None.
        softcap: 0 for none.
        padding: half of the sequences start with so large a share of padding.
        documents: sequences are packed from so many.
        tensor: the mask is a tensor without known structure, one of `TENSORS`; "" for a mask given
            as conditions.
    """

    name: str
    sizes: tuple[int, int, int, int, int]
    window: int | None = None
    softcap: float = 0.0
    padding: float = 0.0
    documents: int = 0
    tensor: str = ""

    def is_causal_alone(self) -> bool:
        """Say whether PyTorch can express the mask without a dense one."""
        return not (self.window or self.softcap or self.padding or self.documents or self.tensor)


BLOCK = 128
TENSORS = {
    "causal": "truth values",
    "lowest": "causal too, 0 and the lowest number of bf16, which are added",
    "numbers": "causal too, random numbers and minus infinity, which are added",
    "blocks": f"truth values, blocks of {BLOCK} x {BLOCK} of which half are empty, by sequence",
}


ATTENTION_CASES = {
    "h200": [
        Case("causal-d128-4k", (4, 32, 8, 4096, 128)),
        Case("causal-d128-16k", (1, 32, 8, 16384, 128)),
        Case("causal-d64-2k", (8, 32, 8, 2048, 64)),
        Case("gemma2-d256-2k", (4, 8, 4, 2048, 256), softcap=50.0),
        Case("window-d128-16k", (1, 32, 8, 16384, 128), window=4096),
        Case("padding-d128-2k", (8, 32, 8, 2048, 128), padding=0.5),
        Case("packed-d128-8k", (1, 32, 8, 8192, 128), documents=8),
        Case("tensor-causal-d64-2k", (8, 32, 8, 2048, 64), tensor="causal"),
        Case("tensor-causal-d128-2k", (8, 32, 8, 2048, 128), tensor="causal"),
        Case("tensor-blocks-d64-2k", (8, 32, 8, 2048, 64), tensor="blocks"),
        Case("tensor-blocks-d128-2k", (8, 32, 8, 2048, 128), tensor="blocks"),
        Case("tensor-lowest-d128-2k", (8, 32, 8, 2048, 128), tensor="lowest"),
        Case("tensor-numbers-d128-2k", (8, 32, 8, 2048, 128), tensor="numbers"),
    ],
    "tiny": [
        Case("causal", (1, 4, 2, 64, 16)),
        Case("gemma2", (1, 4, 2, 64, 16), softcap=50.0),
        Case("padding", (2, 4, 2, 64, 16), padding=0.5),
        Case("packed", (1, 4, 2, 64, 16), documents=4, window=9),
        Case("tensor-blocks", (2, 4, 2, 256, 16), tensor="blocks"),
        Case("tensor-lowest", (2, 4, 2, 64, 16), tensor="lowest"),
        Case("tensor-numbers", (2, 4, 2, 64, 16), tensor="numbers"),
    ],
}


@dataclasses.dataclass
class AttentionData:
    """Leaves, the gradient of the output, and the mask in each method's words."""

    case: Case
    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor
    key_mask: Tensor | None
    ids: Tensor | None
    dense: Tensor | None = None
    block_mask: Any = None
    blocks: Tensor | None = None

    def seen(self, batch: int, first: int, stop: int) -> Tensor:
        """Return bool (stop - first, N): the keys that some queries of a sequence see."""
        length = self.case.sizes[3]
        query = torch.arange(first, stop, device=self.q.device)[:, None]
        key = torch.arange(length, device=self.q.device)[None]
        found = key <= query
        if self.blocks is not None:
            found = self.blocks[batch][query // BLOCK, key // BLOCK]
        if self.case.window:
            found = found & (query - key < self.case.window)
        if self.key_mask is not None:
            found = found & self.key_mask[batch][None]
        if self.ids is not None:
            found = found & (self.ids[0, first:stop, None] == self.ids[0, None])
        return found

    def pairs(self) -> int:
        """Return the pairs of a query and a key that count, over all sequences."""
        batch, _, _, length, _ = self.case.sizes
        steps = range(0, length, 2048)
        found = [self.seen(b, i, min(i + 2048, length)).sum() for b in range(batch) for i in steps]
        return int(torch.stack(found).sum())

    def added(self, batch: int, first: int, stop: int) -> Tensor | None:
        """Return the numbers that the mask adds to the scores of some queries where their keys
        count.
        """
        if self.case.tensor != "numbers" or self.dense is None:
            return None
        return self.dense[batch, 0, first:stop]

    def mask_as_tensor(self) -> Tensor:
        """Return the mask over all queries, (B or 1, 1, M, N): bool, or numbers to add."""
        batch, _, _, length, _ = self.case.sizes
        if self.key_mask is None and not self.case.tensor:
            batch = 1
        shown = torch.stack([self.seen(b, 0, length) for b in range(batch)])[:, None]
        if self.case.tensor == "lowest":
            return torch.where(shown, 0.0, torch.finfo(self.q.dtype).min).to(self.q.dtype)
        if self.case.tensor == "numbers":
            numbers = torch.randn(shown.shape, device=shown.device)
            return torch.where(shown, numbers, -math.inf).to(self.q.dtype)
        return shown

    def settings(self) -> dict[str, Any]:
        """Return the op's keyword arguments."""
        window = self.case.window
        behind = None if window is None else window - 1
        return {"ahead": 0, "behind": behind, "softcap": self.case.softcap}


def attention_inputs(case: Case, device: str) -> AttentionData:
    """Return random data for a case."""
    batch, heads, groups, length, depth = case.sizes
    like: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
    # As in models: heads next to the depth.
    q, k, v, grad = (
        torch.randn(batch, length, n, depth, **like).transpose(1, 2)
        for n in (heads, groups, groups, heads)
    )
    key_mask = ids = None
    places = torch.arange(length, device=device)
    if case.padding:
        starts = torch.tensor([int(case.padding * length) * (b % 2) for b in range(batch)])
        key_mask = places[None] >= starts[:, None].to(device)
    if case.documents:
        ids = (places // (length // case.documents))[None].int()
    for leaf in (q, k, v):
        leaf.requires_grad_()
    data = AttentionData(case, q, k, v, grad, key_mask, ids)
    if case.tensor == "blocks":
        tiles = -(-length // BLOCK)
        data.blocks = torch.rand(batch, tiles, tiles, device=device) < 0.5
        data.blocks |= torch.eye(tiles, dtype=torch.bool, device=device)
    return data


def attention_rows(
    device: str, heads: int, groups: int, length: int, depth: int, kind: str = "iid", seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v in bf16; of kind `bias` with means of 3, 4 and 1 deviations."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, generator=generator)

    found = [normal(1, count, length, depth) for count in (heads, groups, groups)]
    if kind == "bias":
        for place, size in enumerate((3.0, 4.0, 1.0)):
            found[place] = found[place] + size * normal(1, found[place].shape[1], 1, depth)
    q, k, v = (each.bfloat16() for each in found)
    return q, k, v


# --- caches ---------------------------------------------------------------------------------------

CACHES = {
    "h200": [(16, 4096), (16, 32768), (1, 32768), (1, 4096)],
    "cpu": [(1, 256), (1, 1024), (1, 4096), (4, 2048)],
    "tiny": [(2, 64), (1, 96)],
}

CACHE_HEADS = {"h200": (32, 8, 128), "cpu": (8, 2, 64), "tiny": (4, 2, 16)}


@dataclasses.dataclass(frozen=True)
class CacheData:
    """Queries, and caches of which the first `filled` keys count."""

    q: Tensor
    k: Tensor
    v: Tensor
    filled: int
    last: Tensor


def cache_inputs(batch: int, filled: int, length: int, options: Any) -> CacheData:
    """Return random data; `options` has heads, dtype and device."""
    heads, kv_heads, depth = options.heads
    device = options.device
    like: dict[str, Any] = {"dtype": getattr(torch, options.dtype), "device": device}
    q = torch.randn(batch, heads, 1, depth, **like)
    k, v = (torch.empty(batch, kv_heads, length, depth, **like).normal_() for _ in range(2))
    return CacheData(q, k, v, filled, torch.full((1, 1), filled - 1, device=device))


CODED_CACHES = {
    "h200": [
        (4, 16, 32768),
        (4, 16, 4096),
        (4, 64, 32768),
        (4, 1, 32768),
        (4, 1, 131072),
        (2, 16, 32768),
        (3, 16, 32768),
        (8, 16, 32768),
    ],
    "tiny": [(4, 2, 300), (3, 1, 300)],
}

CODED_HEADS = {"h200": (32, 8, 128), "tiny": (4, 2, 16)}


def layout_of(bits: int, options: Any) -> Any:
    """Return the layout of the caches."""
    from memeff_compile.kernels.coded_kv_cache import Layout

    return Layout(options.heads[2], bits, options.scheme)


def coded_cache(layout: Any, batch: int, tokens: int, options: Any) -> list[Tensor]:
    """Return a full cache with random codes, and scales as keys and values have them."""
    from memeff_compile.kernels.coded_kv_cache import CODED, LENGTH

    pool: list[Tensor] = []
    device, dtype = options.device, getattr(torch, options.dtype)
    for name, shape in layout.shapes(batch, options.heads[1], tokens).items():
        kind = name.split("_")[-1]
        if kind == "codes":
            drawn = torch.randint(0, 256, shape, dtype=torch.uint8, device=device)
        elif kind == "scales":
            drawn = torch.rand(shape, device=device, dtype=dtype).mul_(0.2).add_(0.1)
            drawn *= 16.0 / 2**layout.bits
            if layout.scheme == "kivi":  # the zeros
                drawn[..., 1] *= -(2.0 ** (layout.bits - 1))
        elif kind in ("window", "kept"):
            drawn = torch.randn(shape, device=device, dtype=dtype)
        elif kind == "places":
            drawn = torch.arange(layout.kept, dtype=torch.int32, device=device)
            drawn = drawn.expand(shape).contiguous()
        else:
            drawn = torch.zeros(shape, dtype=torch.int64, device=device)
        pool.append(drawn)
    pool[-1][LENGTH] = tokens
    pool[-1][CODED] = layout.groups(tokens) * layout.group
    return pool


# --- weights --------------------------------------------------------------------------------------

WEIGHTS = {"h200": [(14336, 4096), (28672, 8192)], "tiny": [(128, 256)]}

WEIGHT_TOKENS = {"h200": (1, 16, 64, 256, 4096), "tiny": (1, 5)}


def weight_of(kind: str, shape: tuple[int, ...], device: str) -> Tensor:
    """Return a random bf16 weight."""
    weight = torch.randn(shape, device=device)
    if kind == "normal":
        return weight.mul_(0.02).to(torch.bfloat16)
    weight /= torch.rand(shape, device=device).mul_(0.9).add_(0.1).sqrt_()
    weight *= 0.012 * torch.exp(0.4 * torch.randn(shape[0], 1, device=device))
    weight *= torch.exp(0.3 * torch.randn(1, shape[1], device=device))
    return weight.to(torch.bfloat16)


def hostile_weight(rows: int, columns: int, device: str) -> Tensor:
    """Draw a normal weight with everything strange in it."""
    weight = (torch.randn(rows, columns, device=device) * 0.02).to(torch.bfloat16)
    flat = weight.view(-1)
    odd = [float("nan"), float("inf"), -float("inf"), 3.38e38, 0.0, -0.0, 1e-40, -1e-39, 300.0]
    places = torch.randperm(flat.numel(), device=device)[: 5 * len(odd)]
    flat[places] = torch.tensor(odd * 5, device=device).to(torch.bfloat16)[: places.numel()]
    flat.view(torch.int16)[0] = 0x7FA5
    return weight


TERNARY = {
    "h200": [(4096, 14336), (14336, 4096), (8192, 28672), (2560, 6912)],
    "tiny": [(64, 96)],
}

TERNARY_TOKENS = {"h200": [1, 4, 16, 64, 256, 4096], "tiny": [1, 8]}


def draw_packed(columns: int, rows: int, device: str) -> Tensor:
    """Return random packed weights."""
    from memeff_compile.kernels.ternary_linear import reference

    codes = torch.randint(-1, 2, (rows, columns), device=device, dtype=torch.int8)
    return reference.pack_codes(codes)


# --- every op -------------------------------------------------------------------------------------

TIED = {"h200": [(8192, 2304, 256000)], "tiny": [(16, 8, 64)]}
"""Tokens, width and vocabulary of an embedding: Gemma-2-2B's."""
GATED = {"h200": [(8192, 14336, 4096)], "tiny": [(16, 24, 8)]}
"""Tokens, intermediate and hidden size of a gated MLP: Llama-3-8B's."""


@dataclass(frozen=True)
class Op:
    """One op of the package.

    Attributes:
        shapes: by size, "h200" and "tiny"; a shape's meaning differs from op to op.
        draw: shape and device -> the arguments of `call`.
        call: the op itself; its result carries a gradient where the op has one.
    """

    shapes: Mapping[str, Sequence[Any]]
    draw: Callable[[Any, str], Any]
    call: Callable[[Any], Tensor]


@dataclass(frozen=True)
class _Options:
    heads: tuple[int, int, int]
    device: str
    dtype: str = "bfloat16"
    scheme: str = "kivi"


def _heads_of(device: str) -> _Options:
    return _Options(CACHE_HEADS["h200" if device == "cuda" else "tiny"], device)


def _loss(data: Inputs) -> Tensor:
    from benchmarks.methods import memeff

    return memeff(gradient_filter="exact")(data.hidden, data.weight, data.target)


def _attention(data: AttentionData) -> Tensor:
    from memeff_compile.kernels.attention import attention

    ids = (data.key_mask, data.ids, data.ids)
    return attention(data.q, data.k, data.v, *ids, **data.settings())[0]


def _quantized(rows: tuple[Tensor, ...]) -> Tensor:
    from memeff_compile.kernels.quantized_attention import quantized_attention

    return quantized_attention(*rows, ahead=0, level="8b", with_lse=False)[0]


def _cached(data: CacheData) -> Tensor:
    from memeff_compile.kernels.kv_cache import kv_cache_attention

    return kv_cache_attention(data.q, data.k, data.v, data.last)


def _coded_cache(shape: tuple[int, int, int], device: str) -> tuple[Tensor, list[Tensor], int]:
    bits, batch, tokens = shape
    options = _heads_of(device)
    pool = coded_cache(layout_of(bits, options), batch, tokens, options)
    heads, _, depth = options.heads
    q = torch.randn(batch, heads, 1, depth, device=device, dtype=torch.bfloat16)
    return q, pool, bits


def _over_codes(data: tuple[Tensor, list[Tensor], int]) -> Tensor:
    from memeff_compile.kernels.coded_kv_cache import coded_kv_cache_attention

    q, pool, bits = data
    return coded_kv_cache_attention(q, *pool, None, None, bits, None, None)


def _coded_weight(shape: tuple[int, int], device: str) -> tuple[Tensor, Tensor]:
    from memeff_compile.kernels.coded_weight import CodedWeight, encode

    x = torch.randn(1, shape[1], device=device, dtype=torch.bfloat16)
    parts = encode(weight_of("trained", shape, device), "win4")
    return x, CodedWeight(parts, "win4", shape)


def _coded_linear(data: tuple[Tensor, Tensor]) -> Tensor:
    from memeff_compile.kernels.coded_weight import coded_weight_linear

    return coded_weight_linear(*data, None)


def _ternary(shape: tuple[int, int], device: str) -> tuple[Tensor, Tensor, Tensor]:
    columns, rows = shape
    x = torch.randn(1, columns, device=device, dtype=torch.bfloat16)
    return x, draw_packed(columns, rows, device), torch.full((), 40.0, device=device)


def _ternary_linear(data: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    from memeff_compile.kernels.ternary_linear import ternary_linear

    x, packed, scale = data
    return ternary_linear(x, [packed], [scale], [None], x.dtype)[0]


def _table(shape: tuple[int, int, int], device: str) -> tuple[Tensor, Tensor]:
    tokens, width, vocabulary = shape
    table = torch.randn(vocabulary, width, device=device, dtype=torch.bfloat16)
    return table.requires_grad_(), torch.randint(0, vocabulary, (tokens,), device=device)


def _embedding(data: tuple[Tensor, Tensor]) -> Tensor:
    from memeff_compile.kernels.embedding import embedding

    return embedding(*data, -1)


def _gate(shape: tuple[int, int, int], device: str) -> tuple[Tensor, ...]:
    tokens, inner, width = shape
    like: dict[str, Any] = {"device": device, "dtype": torch.bfloat16, "requires_grad": True}
    gate, up = (torch.randn(tokens, inner, **like) for _ in range(2))
    return gate, up, torch.randn(width, inner, **like)


def _gated(data: tuple[Tensor, ...]) -> Tensor:
    from memeff_compile.kernels.gated_linear import gated_linear

    return gated_linear(*data, None, "silu")


def _heads(shape: tuple[int, int, int, int], device: str) -> tuple[Tensor, ...]:
    tokens, width, of_teacher, vocabulary = shape
    like: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
    student = [(tokens, width), (vocabulary, width)]
    teacher = [(tokens, of_teacher), (vocabulary, of_teacher)]
    hidden, weight = (torch.randn(size, **like).requires_grad_() for size in student)
    return hidden, weight, *(torch.randn(size, **like) for size in teacher)


def _divergence(data: tuple[Tensor, ...]) -> Tensor:
    from memeff_compile import linear_divergence

    return linear_divergence(*data)


OPS = {
    "attention": Op(ATTENTION_CASES, attention_inputs, _attention),
    "coded_kv_cache": Op(CODED_CACHES, _coded_cache, _over_codes),
    "coded_weight": Op(WEIGHTS, _coded_weight, _coded_linear),
    "embedding": Op(TIED, _table, _embedding),
    "gated_linear": Op(GATED, _gate, _gated),
    "kv_cache": Op(
        CACHES, lambda shape, device: cache_inputs(*shape, shape[1], _heads_of(device)), _cached
    ),
    "linear_cross_entropy": Op(
        {"h200": ["gemma2", "llama3", "llama1b"], "tiny": ["tiny"]},
        lambda shape, device: inputs(shape, "peaked", device, torch.bfloat16),
        _loss,
    ),
    "linear_divergence": Op(
        {"h200": [(8192, 4096, 4096, 128_256)], "tiny": [(16, 8, 12, 64)]}, _heads, _divergence
    ),
    "quantized_attention": Op(
        {"h200": [(32, 8, 4096, 128)], "tiny": [(4, 2, 64, 16)]},
        lambda shape, device: attention_rows(device, *shape),
        _quantized,
    ),
    "ternary_linear": Op(TERNARY, _ternary, _ternary_linear),
}
"""Folder of `memeff_compile/kernels` -> the op."""
