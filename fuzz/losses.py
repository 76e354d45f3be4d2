"""Part b: heads and losses in one graph, with whatever people put between them."""

from __future__ import annotations

from random import Random

import torch

from .logits import VALUES, VIEWS, WRITES
from .program import Names, run, start
from .program import Program as _Program
from .sketch import Sketch

TITLE = "heads and losses"
REUSE = 16
IMPORTS = ""

_HEADS = [
    *("m[1](h)", "F.linear(h, m[1].weight)", "h @ m[1].weight.t()", "h.matmul(m[1].weight.T)"),
    *("torch.einsum('bsh,vh->bsv', h, m[1].weight)", "F.linear(h, m[1].weight[: V - 3])"),
    *("F.linear(h, m[1].weight.clone())", "m[1](h.reshape(-1, h.shape[-1]))", "m[1](h[:, -2:])"),
    *("F.linear(h, m[0].weight)", "m[1](h) + m[2].bias.sum()", "m[1](h) * m[2].weight[0, 0]"),
    "m[1](h) + 0.5 * F.linear(F.linear(h, m[2].weight[:2]), m[0].weight[:, :2])",
    "F.linear(m[2](h)[..., :3], m[0].weight[:, :3]) * 2 + m[1](h)",
    "m[1](h) + (h @ m[2].weight.t()[:, :2]) @ m[1].weight.t()[:2]",
    # As other packages spell it: weights that the graph computes, scales that are tensors, classes
    # that are cut.
    *("F.linear(h, m[1].weight.to(h.dtype))", "h @ torch.transpose(m[1].weight.to(h.dtype), 0, 1)"),
    *("F.linear(h, F.normalize(m[1].weight, dim=-1))", "m[1](h)[..., :V]", "m[1](h)[..., : V - 3]"),
    "F.linear(h, m[1].weight * (m[1].weight.detach().abs() > 0.1))",
    "F.linear(h, m[1].weight * (m[1].bias[:, None] / m[1].weight.norm(dim=-1, keepdim=True)))",
    *(
        "m[2].bias[0].exp() * m[1](h)",
        "m[2].weight[0, 0] * m[1](h)",
        "m[1](h) / m[2].bias[1].exp()",
    ),
    *("m[1](h) * m[1].weight[:, 0]", "m[1](h) * torch.tensor(0.5, dtype=D)", "m[1](h)[..., 2:]"),
    *("m[1](h) * h[..., :1]", "m[1](h).narrow(-1, 0, V - 1)", "-m[1](h) * -m[2].bias[0]"),
]
_TARGETS = ["y", "y.flatten()", "y[:, 1:]", "y[:, 1:].reshape(-1)", "y.mT", "y[:, -2:].flatten()"]
_TARGET_WRITES = [
    *(
        "{y}[{y} == 2] = 0",
        "{y}[{y} == 2] = -100",
        "{y}.clamp_(max=4)",
        "{y}.masked_fill_({y} > 5, 0)",
    ),
    *(
        "{y}[..., -1] = -100",
        "{y}[:, 0] = 3",
        "{y}.remainder_(V - 3)",
        "{y}.add_(1).clamp_(max=V - 4)",
    ),
]
_TUPLES = [
    *("torch.cat({a}.chunk(2, {d}), {d})", "{a}.split(2, {d})[0]", "{a}.unbind({d})[0]"),
    *("torch.stack({a}.unbind(0))", "{a}.tensor_split(3, {d})[0]", "{a}.sort({d}).values"),
    *("{a}.topk(2, {d})[0]", "torch.cat({a}.split([1, {a}.shape[0] - 1]))", "{a}.max({d})[0]"),
    *("sum({a}.chunk(2, {d})).tanh()", "torch.meshgrid({a}[0, 0], {a}[0, 1], indexing='ij')[0]"),
]
_LOSSES = [
    *("F.cross_entropy({a}.reshape(-1, {last}), {y})", "F.cross_entropy({a}, {y})"),
    "F.cross_entropy({a}.flatten(0, -2), {y}, ignore_index=2)",
    "F.cross_entropy({a}.reshape(-1, {last}), {y}, label_smoothing=0.1, reduction='sum')",
    "F.cross_entropy({a}.view(-1, {last}), {y}, reduction='none')",
    "F.cross_entropy({a}.mT, {y})",
    "F.cross_entropy({a}.reshape(-1, {last}), {y}, m[1].weight.detach()[: {last}, 0].abs())",
    "-{a}.log_softmax(-1).gather(-1, {y}.unsqueeze(-1)).mean()",
    "F.nll_loss({a}.log_softmax(-1).flatten(0, -2), {y})",
    "({a}.logsumexp(-1) - {a}.gather(-1, {y}.unsqueeze(-1)).squeeze(-1)).sum()",
    "{a}.logsumexp(-1).square().mean()",
    "sum(F.cross_entropy(p.mT, t) for p, t in zip({a}.chunk(2), {y}.chunk(2)))",
    "sum(F.cross_entropy(p, t) for p, t in zip({a}.unbind(1), {y}.unbind(1)))",
    "-({a}.softmax(-1) * {a}.log_softmax(-1)).sum(-1).mean()",
    "sum((p.softmax(-1) * p.log_softmax(-1)).sum(-1).square().sum() for p in {a}.split(2))",
    "(torch.stack([p.logsumexp(-1) for p in {a}]) - {a}.gather(-1, {y}.unsqueeze(-1)).squeeze(-1))"
    ".square().sum()",
    "nn.CrossEntropyLoss(ignore_index=1)({a}.reshape(-1, {last}).float(), {y})",
]
_WRITTEN_OUT = [
    # The entry of each row's target, by an index of the row's own position, or of another one.
    "-{a}.flatten(0, -2).log_softmax(-1)[torch.arange({y}.numel()), {y}.flatten()].mean()",
    "-{a}.log_softmax(-1).flatten(0, -2)[torch.arange({y}.numel()), {y}.reshape(-1)].sum()",
    "(-{a}.reshape(-1, {last}).log_softmax(-1))[torch.arange({y}.numel()), {y}.flatten()].sum()",
    "sum((z.logsumexp(-1) - z[torch.arange(len(z)), {y}.flatten()]).mean()"
    " for z in [{a}.flatten(0, -2)])",
    "sum((z[torch.arange(len(z)), {y}.flatten()] - z.logsumexp(-1)).square().mean()"
    " for z in [{a}.flatten(0, -2)])",
    "-({a} - {a}.logsumexp(-1, True)).reshape(-1, {last})[torch.arange({y}.numel()), {y}.flatten()]"
    ".mean()",
    "-{a}.flatten(0, -2).log_softmax(-1)[torch.arange({y}.numel()).flip(0), {y}.flatten()].mean()",
    # Of any rows.
    "-{a}.log_softmax(-1)[torch.arange(len({a}))[:, None], torch.arange({a}.shape[1]), {y}].sum()",
    "(-{a}.log_softmax(-1)).gather(-1, {y}.unsqueeze(-1)).mean()",
    "({a}.logsumexp(-1, keepdim=True) - {a}.take_along_dim({y}[..., None], -1)).square().mean()",
    "-(F.one_hot({y}, {last}) * {a}.log_softmax(-1)).sum(-1).mean()",
    "-(F.one_hot({y}, {last}).to({a}.dtype) * F.log_softmax({a}, -1)).sum()",
    "({a}.logsumexp(-1) - (F.one_hot({y}, {last}) * {a}).sum(-1)).mean()",
    "-(F.one_hot({y}, {last}) * {a}.log_softmax(-1)).sum(0).square().mean()",
    "-({a}.detach().softmax(-1) * {a}.log_softmax(-1)).sum(-1).mean()",
    "F.cross_entropy({a}.flatten(0, -2), F.one_hot({y}.flatten(), {last}).to({a}.dtype) * 0.9)",
    "F.cross_entropy({a}, {a}.detach().softmax(-1))",
    "(({a} - {a}.amax(-1, True).detach()).exp().sum(-1).log() + {a}.amax(-1).detach()"
    " - {a}.gather(-1, {y}[..., None])[..., 0]).mean()",
    "(({a} - {a}.max(-1, True).values).exp().sum(-1, True).log() + {a}.max(-1, True)[0]"
    " - {a}.gather(-1, {y}[..., None])).square().sum()",
    "({a}.exp().sum(-1).log() - {a}.gather(-1, {y}[..., None]).squeeze(-1)).mean()",
    "F.softplus(torch.where(torch.arange({last}) == {y}[..., None], -torch.inf,"
    " {a} - {a}.gather(-1, {y}[..., None])).logsumexp(-1)).mean()",
    "sum((-0.9 * p.gather(-1, {y}[..., None])[..., 0] - 0.1 * p.mean(-1)).mean()"
    " for p in [{a}.log_softmax(-1)])",
    "sum(-0.9 * p.gather(-1, {y}[..., None]).sum() - 0.01 * p.sum(-1, keepdim=True).sum()"
    " for p in [{a}.log_softmax(-1)])",
    "sum((-0.9 * p.gather(-1, {y}[..., None]).squeeze(-1) - 0.1 * p.mean(-1))"
    ".masked_fill({y} == 2, 0).sum() for p in [{a}.log_softmax(-1)])",
    "({a}.logsumexp(-1) - {a}.gather(-1, {y}[..., None])[..., 0] - 0.1 * {a}.mean(-1)).mean()",
    "F.nll_loss({a}.softmax(-1).log().flatten(0, -2), {y}.flatten())",
    "((1 - {a}.log_softmax(-1).gather(-1, {y}[..., None]).exp()) ** 2).mean()",
    "F.kl_div({a}.log_softmax(-1), {a}.detach().softmax(-1), reduction='batchmean')",
]
"""Losses written explicitly, as timm, fairseq, x-transformers and the trainers do."""
_PARTS = [
    *("m[0].weight.requires_grad_(False)", "m[1].weight.requires_grad_(False)", "m[1].bias = None"),
    *("m[0].weight = m[1].weight", "m[0].weight = m[1].weight", "m.requires_grad_(False)"),
    "m[1].weight = nn.Parameter(m[1].weight.detach().t().contiguous().t())",
    "m[1].weight.register_hook(lambda g: g * 2)",
]
_SHAPES = ((2, 5), (3, 3), (4, 4), (3, 7), (1, 6), (5, 5), (2, 2), (6, 3))


def setup(random: Random) -> list[str]:
    """Draw a model, a function of its head and losses, and how that is compiled."""
    dtype = random.choice(("float64", "float64", "float32"))
    hidden = random.choice((4, 8))
    lines = [
        f"D, V = torch.{dtype}, {random.choice((13, 36, 36, 41, 67))}",
        f"m = nn.Sequential(nn.Embedding(V, {hidden}), nn.Linear({hidden}, V),"
        f" nn.Linear({hidden}, {hidden})).to(D)",
    ]
    if random.random() < 0.4:
        lines.append(random.choice(_PARTS))
    world = start(_Program(tuple(lines), ()), ours=False)
    run([f"x, y = torch.randint(V, (2, {_shape(random)}))"], world.names)
    sketch = Sketch(random, world.names, is_exact=dtype == "float64")
    sketch.add(f"h = m[0](x){random.choice(('', '.tanh()', ' * 2'))}")
    if random.random() < 0.3:
        sketch.add("h = m[2](h)")
    losses = _inside(random, sketch)
    others = [name for name in sketch.tensors if name not in losses and random.random() < 0.2]
    autocast = dtype == "float32" and random.random() < 0.3
    inner = random.choice(["eager"] * 30 + ["aot_eager"] * 20 + ["inductor"])
    dynamic = random.choice((None, None, None, True, False))
    return [
        *lines,
        *(["@torch.autocast('cpu', dtype=torch.bfloat16)"] if autocast else []),
        "def forward(x, y):",
        *(f"    {line}" for line in sketch.lines),
        f"    return {', '.join(losses + others[:2])},",
        f"f = torch.compile(forward, backend=memeff, options={{'memeff.inner': '{inner}'}},"
        f" dynamic={dynamic}) if ours else forward",
    ]


def _shape(random: Random) -> str:
    rows, columns = random.choice(_SHAPES)
    return f"{rows}, {columns}"


def _inside(random: Random, sketch: Sketch) -> list[str]:
    """Draw the lines of a graph until it has a loss; return the names of its losses."""
    losses: list[str] = []
    kinds = [VIEWS] + [_LOSSES] * 6 + [_WRITTEN_OUT] * 3  # of such graphs most can be fused
    if random.random() < 0.5:
        kinds = [VIEWS] * 3 + [_TUPLES] * 2 + [VALUES, WRITES] + [_LOSSES] * 4 + [_WRITTEN_OUT] * 2
    sketch.bind(random.choice(_HEADS)) or sketch.bind("m[1](h)")
    for _ in range(60):
        if losses and random.random() < 0.3:
            break
        kind = random.choice(kinds)
        a = sketch.pick(lambda t: t.is_floating_point() and t.dim() > 0)
        text = sketch.fill(kind, a)
        if text is None or any(word in text for word in ("copy.", "torch.func", "checkpoint")):
            continue
        if kind in (_LOSSES, _WRITTEN_OUT):
            targets = _targets(random, sketch, a if kind is _WRITTEN_OUT else None)
            name = sketch.bind(text.replace("{y}", targets), "l")
            losses += [name] if name else []
        elif kind is WRITES:
            sketch.add(text)
        else:
            sketch.bind(text)
    return losses or ["h.sum()"]


def _targets(random: Random, sketch: Sketch, of: str | None) -> str:
    """Draw the targets of a loss: sometimes a copy that is written in place before it.

    Args:
        random: where choices come from.
        sketch: the program so far.
        of: the logits whose rows the targets are, where a loss needs one for each row.
    """
    targets = random.choice([each for each in _TARGETS if _fits(sketch, each, of)] or _TARGETS)
    if random.random() > 0.2:
        return targets
    name = sketch.fresh("t")
    if not sketch.add(f"{name} = {targets}.clone()"):
        return targets
    for _ in range(random.choice((1, 1, 2))):
        sketch.add(random.choice(_TARGET_WRITES).replace("{y}", name))
    return name


def _fits(sketch: Sketch, targets: str, of: str | None) -> bool:
    if of is None:
        return True
    run([f"fits = {targets}.shape == {of}.shape[:-1]"], sketch.names)
    return bool(sketch.names.pop("fits", False))


def body(random: Random, sketch: Sketch) -> None:
    """Draw the sizes of one call."""
    sketch.add(f"x, y = torch.randint(V, (2, {_shape(random)}))")
    if random.random() < 0.1:
        sketch.add("y[0, 0] = 2")
    if not sketch.add("r = f(x, y)"):
        return
    if random.random() < 0.3:
        sketch.add("seen.append(r)")
    sketch.add("sum(p.square().mean() for p in r if p.requires_grad).backward()")
    sketch.add("seen.append([p.grad for p in m.parameters()])")
    sketch.add("seen.append(r)")


def is_exact(names: Names) -> bool:
    """Whether a setup computes in float64."""
    return bool(names["D"] == torch.float64)
