"""Ways to write heads, losses and attention, as the docs show them and as the tests run them.

A row of docs/use/spellings.md is one of these texts: it is the program that the test compiles. The
page alone has the backend's result for each: `make golden` renews it.
"""

from __future__ import annotations

import linecache
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROWS, DEPTH, CLASSES, PADDED = 12, 16, 311, 320
BATCH, HEADS, LENGTH, WIDTH = 2, 4, 6, 8

LOSSES = (
    "F.cross_entropy(z, y)",
    "nn.CrossEntropyLoss(label_smoothing=0.1)(z, y)",
    "F.cross_entropy(z.view(2, -1, V).transpose(1, 2), y.view(2, -1))",
    "F.nll_loss(F.log_softmax(z, -1), y)",
    "F.nll_loss(z.softmax(-1).log(), y)",
    "-z.log_softmax(-1).gather(-1, y[:, None]).mean()",
    "(-z.log_softmax(-1)).gather(-1, y[:, None]).mean()",
    "-z.log_softmax(-1)[torch.arange(N), y].mean()",
    "-z.log_softmax(-1)[range(N), y].mean()",
    "-z.softmax(-1)[torch.arange(N), y].log().mean()",
    "(z.logsumexp(-1) - z.gather(-1, y[:, None]).squeeze(-1)).mean()",
    "(z.logsumexp(-1) - z[torch.arange(N), y]).mean()",
    "-(F.one_hot(y, V) * z.log_softmax(-1)).sum(-1).mean()",
    "m = z.amax(-1, True).detach(); e = (z - m).exp().sum(-1, True).log() + m;"
    " -(z - e).gather(-1, y[:, None]).mean()",
    "d = z - z.gather(-1, y[:, None]); d = d.masked_fill(F.one_hot(y, V) == 1, -torch.inf);"
    " F.softplus(d.logsumexp(-1)).mean()",
    "p = z.log_softmax(-1); -(0.9 * p.gather(-1, y[:, None])[:, 0] + 0.1 * p.mean(-1)).mean()",
    "p = z.log_softmax(-1); -0.9 * p.gather(-1, y[:, None]).sum() - 0.1 / V * p.sum(-1).sum()",
    "-(z.detach().tanh().softmax(-1) * z.log_softmax(-1)).sum(-1).mean()",
    "F.cross_entropy(z, F.one_hot(y, V).to(z.dtype) * 0.9 + 0.1 / V)",
    "y = y.clone(); y[y == 3] = -100; F.cross_entropy(z, y)",
    "n = F.cross_entropy(z, y, reduction='none'); ((1 - (-n).exp()) ** 2 * n).mean()",
    "F.cross_entropy(z, y) + 1e-4 * z.logsumexp(-1).square().mean()",
    "F.cross_entropy(z, y) + 0.1 * (z.softmax(-1) * z.log_softmax(-1)).sum(-1).mean()",
    "sum(F.cross_entropy(a, c, reduction='sum') for a, c in zip(z.chunk(2), y.chunk(2))) / N",
    "F.cross_entropy(z, y), (z.argmax(-1) == y).sum()",
    "F.cross_entropy(z, y), z.detach().softmax(-1).amax(-1)",
    "F.cross_entropy(z, y) + 1e-4 * z.square().mean()",
    "F.kl_div(z.log_softmax(-1), z.detach().softmax(-1), reduction='batchmean')",
    "F.binary_cross_entropy_with_logits(z, F.one_hot(y, V).to(z.dtype))",
)
"""Of logits z (N, V) of one head and class indices y (N)."""

HEADS_OF_LOGITS = (
    "F.linear(h, W)",
    "F.linear(h, W, b)",
    "h @ W.T",
    "torch.einsum('nd,vd->nv', h, W)",
    "F.linear(h, W) + b",
    "0.5 * F.linear(h, W)",
    "30 * torch.tanh(F.linear(h, W) / 30)",
    "F.linear(h, W)[..., :V]",
    "F.linear(h, W)[..., :311]",
    "F.linear(h, W[:311])",
    "F.linear(h, W.to(h.dtype))",
    "F.linear(h, W * keep)",
    "F.linear(h, F.normalize(W, dim=-1))",
    "F.linear(h, g * W / W.norm(dim=-1, keepdim=True))",
    "F.linear(h, W) * s",
    "s * F.linear(h, W)",
    "F.linear(h, W) / s",
    "F.linear(h, W) * b.exp()",
    "F.linear(h, W) + F.linear(F.linear(h, A), B)",
    "F.linear(h, W) + F.linear(h.tanh(), W)",
    "F.linear(h, W).clamp(-30, 30)",
    "F.linear(h, W).masked_fill(b > 2, -1e9)",
    "F.linear(h, W) + torch.where(b > 2, -1e9, 0)",
    "torch.cat([F.linear(h, W[:311]), F.linear(h, W[311:])], -1)",
)
"""Of hidden states h (N, D) and a weight W (V, D)."""

_LOGS = "s, t = F.log_softmax(z / 2, -1), F.log_softmax(t / 2, -1); "
DIVERGENCES = (
    "F.kl_div(F.log_softmax(z / 2, -1), F.softmax(t / 2, -1), reduction='batchmean') * 4",
    "nn.KLDivLoss(reduction='batchmean', log_target=True)(z.log_softmax(-1), t.log_softmax(-1))",
    "F.kl_div(z.log_softmax(-1), t.softmax(-1), reduction='sum') / keep.sum()",
    "F.kl_div(t.log_softmax(-1), z.log_softmax(-1), reduction='batchmean', log_target=True)",
    "d = F.kl_div(z.log_softmax(-1), t.softmax(-1), reduction='none').sum(-1);"
    " (d * keep).sum() / keep.sum()",
    "d = F.kl_div(z.log_softmax(-1), t.softmax(-1), reduction='none').sum(-1);"
    " torch.where(keep, d, 0.0).sum() / keep.sum()",
    "d = F.kl_div(z.log_softmax(-1), t.softmax(-1), reduction='none').sum(-1); (d, d.mean())",
    _LOGS + "(t.exp() * (t - s)).sum(-1).mean()",
    _LOGS + "((t.exp() - s.exp()) * (t - s)).sum(-1).mean()",
    _LOGS + "m = torch.logsumexp(torch.stack([s + math.log(0.7), t + math.log(0.3)]), 0);"
    " d = F.kl_div(m, t, reduction='none', log_target=True) * 0.3;"
    " d = d + F.kl_div(m, s, reduction='none', log_target=True) * 0.7; d.sum() / d.size(0)",
    _LOGS + "m = torch.lerp(s.exp(), t.exp(), 0.3).log();"
    " d = 0.3 * F.kl_div(m, t, reduction='sum', log_target=True);"
    " (d + 0.7 * F.kl_div(m, s, reduction='sum', log_target=True)) / N",
    "p, q = z.softmax(-1), t.softmax(-1); m = 0.1 * q + 0.9 * p;"
    " x = torch.masked_fill(q * m.log(), torch.isinf(z), 0).sum(-1); -(x * keep).sum() / keep.sum()",
    "F.cross_entropy(z, t.softmax(-1))",
    "0.5 * F.cross_entropy(z, y) + 0.5 * F.kl_div(z.log_softmax(-1), t.softmax(-1), reduction='sum')",
    "s = z.log_softmax(-1).gather(-1, i); (l.exp() * (l - s)).sum(-1).mean()",
    "s = torch.take_along_dim(z.log_softmax(-1), i, -1); (l.exp() * (l - s)).sum(-1).mean()",
    "s = z.softmax(-1).gather(-1, i); r = [1 - x.sum(-1, True) for x in (s, l.exp())];"
    " q = torch.cat([l.exp(), r[1]], -1); -(q * torch.cat([s, r[0]], -1).log()).sum(-1).mean()",
    "F.kl_div(z.gather(-1, i).log_softmax(-1), l.log_softmax(-1), reduction='sum', log_target=True)",
    "F.kl_div(z.log_softmax(-1).gather(-1, i), l, reduction='batchmean', log_target=True)",
    "F.mse_loss(z, t)",
    "0.5 * (z.softmax(-1) - t.softmax(-1)).abs().sum(-1).mean()",
)
"""Of a student's logits z and a teacher's t (N, V), a mask of rows keep (N), and of a teacher's k
classes of each row the indices i and the log-probabilities l (N, k)."""

ATTENTION = (
    "F.scaled_dot_product_attention(q, k, v, is_causal=True)",
    "F.scaled_dot_product_attention(q, k, v, causal)",
    "F.scaled_dot_product_attention(q, k, v, causal.expand(2, 1, T, T))",
    "F.scaled_dot_product_attention(q, k, v, table)",
    "F.scaled_dot_product_attention(q, k, v, table[None, None, at])",
    "F.scaled_dot_product_attention(q, k, v, causal & padding[:, None, None])",
    "F.scaled_dot_product_attention(q, k, v, padding[:, None, None])",
    "F.scaled_dot_product_attention(q, k, v, slopes * distance)",
    "(q @ k.mT * 0.25).softmax(-1) @ v",
    "(q @ k.mT * -0.25).softmax(-1) @ v",
    "(q @ k.mT * s).softmax(-1) @ v",
    "torch.softmax(torch.matmul(q / 4, k.transpose(2, 3)), -1).matmul(v)",
    "(q @ k.mT * 0.25).masked_fill(~causal, -torch.inf).softmax(-1) @ v",
    "x = q @ k.mT * 0.25; x.masked_fill_(~causal, -torch.inf); x.softmax(-1) @ v",
    "x = q @ k.mT * 0.25; x = x + q.new_zeros(T, T).masked_fill(~causal, -1e9); x.softmax(-1) @ v",
    "x = q @ k.mT * 0.25; x += q.new_zeros(T, T).masked_fill(~causal, -1e9); x.softmax(-1) @ v",
    "torch.where(causal, q @ k.mT * 0.25, -1e9).softmax(-1) @ v",
    "x = 30 * torch.tanh(q @ k.mT / 30); x.masked_fill(~causal, -torch.inf).softmax(-1) @ v",
    "torch.einsum('bhij,bhjd->bhid',"
    " torch.einsum('bhid,bhjd->bhij', q, k).mul(0.25).softmax(-1), v)",
    "torch.einsum('bhij,bjd->bhid',"
    " torch.einsum('bhid,bjd->bhij', q, k[:, 0]).mul(0.25).softmax(-1), v[:, 0])",
    "q, k, v = (t.flatten(0, 1) for t in (q, k, v));"
    " torch.bmm((torch.bmm(q, k.mT) * 0.25).softmax(-1), v)",
    "q, k, v = (t.flatten(0, 1) for t in (q, k, v));"
    " x = torch.baddbmm(q.new_zeros(8, T, T), q, k.mT, beta=0, alpha=0.25);"
    " torch.bmm(x.softmax(-1), v)",
    "q = q.unflatten(1, (2, 2)); w = torch.einsum('bghij,bgkj->bghik', q, k[:, :2]).softmax(-1);"
    " torch.einsum('bghik,bgkj->bghij', w, v[:, :2]).flatten(1, 2)",
    "(q @ k.mT * 0.25 + slopes * distance).softmax(-1) @ v",
    "(q @ k.mT * 0.25).sigmoid() @ v",
    "w = (q @ k.mT * 0.25).softmax(-1); (w @ v, w)",
)
"""Of queries q, keys k and values v (batch, heads, T, depth); causal is made in the graph, table is not."""


@dataclass(frozen=True)
class Subject:
    """The subject of one table's spellings: their arguments, and the code around each."""

    spellings: tuple[str, ...]
    arguments: str
    inputs: Callable[[], tuple[Any, ...]]
    around: tuple[str, ...]
    """The function's body for each column: {text} stands for the spelling, {value} for its last part.

    An empty one says that the spelling runs outside the graph, on deferred logits.
    """


def _random(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()


def _of_heads() -> tuple[Any, ...]:
    hidden, weight = _random(ROWS, DEPTH, seed=1), _random(PADDED, DEPTH, seed=2)
    labels = torch.arange(ROWS) * 25
    more = (_random(PADDED, seed=3), _random(2, DEPTH, seed=4), _random(PADDED, 2, seed=5))
    keep = (torch.arange(PADDED * DEPTH) % 3 > 0).view(PADDED, DEPTH)
    return hidden, weight, labels, *more, _random(PADDED, 1, seed=6), _random(seed=7), keep


def _of_divergences() -> tuple[Any, ...]:
    hidden, weight, labels, *_ = _of_heads()
    teacher = _random(ROWS, 24, seed=8).detach(), _random(PADDED, 24, seed=9).detach()
    logs = _random(ROWS, PADDED, seed=10).detach().log_softmax(-1).topk(8)
    return hidden, weight, labels, *teacher, torch.arange(ROWS) % 4 > 0, logs.indices, logs.values


def _of_attention() -> tuple[Any, ...]:
    q, k, v = (_random(BATCH, HEADS, LENGTH, WIDTH, seed=seed) for seed in range(3))
    table = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    padding = torch.arange(LENGTH) >= torch.tensor([[0], [2]])
    distance = torch.arange(LENGTH, dtype=torch.float64).expand(LENGTH, LENGTH).contiguous()
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], dtype=torch.float64)[:, None, None]
    at = torch.arange(LENGTH)
    return q, k, v, table, padding, distance, slopes, at, _random(seed=7)


_HEAD = "h, W, y, b, A, B, g, s, keep"
SUBJECTS = {
    "losses": Subject(
        LOSSES,
        _HEAD,
        _of_heads,
        ("z = F.linear(h, W); {text}", ""),
    ),
    "heads": Subject(
        HEADS_OF_LOGITS,
        _HEAD,
        _of_heads,
        ("{text}; F.cross_entropy({value}, y)", "{text}"),
    ),
    "divergences": Subject(
        DIVERGENCES,
        "h, W, y, g, U, keep, i, l",
        _of_divergences,
        ("z, t = F.linear(h, W), F.linear(g, U); {text}",),
    ),
    "attention": Subject(
        ATTENTION,
        "q, k, v, table, padding, distance, slopes, at, s",
        _of_attention,
        ("causal = torch.arange(T) <= torch.arange(T)[:, None]; {text}",),
    ),
}


def function(arguments: str, text: str) -> Callable[..., Any]:
    """Return the function of a text: statements apart by semicolons, the last of which is its value."""
    *lines, value = text.split("; ")
    source = f"def spelling({arguments}):\n"
    source += "".join(f"    {line}\n" for line in (*lines, f"return {value}"))
    names = {"torch": torch, "F": F, "nn": nn, "math": math}
    names |= {"N": ROWS, "V": PADDED, "T": LENGTH}
    file = f"<{text}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    exec(compile(source, file, "exec"), names)
    made: Callable[..., Any] = names["spelling"]
    return made


def programs(subject: Subject, text: str) -> list[Callable[..., Any]]:
    """Return the functions of a spelling, one for each column that is about a graph."""
    *lines, value = text.split("; ")
    found = []
    for around in filter(None, subject.around):
        whole = around.replace("{text}; ", "".join(f"{line}; " for line in lines))
        whole = whole.replace("{text}", text).replace("{value}", value)
        found.append(function(subject.arguments, whole))
    return found
