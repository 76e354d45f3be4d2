"""Part a: logits that are computed on first use, in the graph and after it.

One compiled model serves many programs, so that this part runs tens of them a second.
"""

from __future__ import annotations

from random import Random

import torch

from .program import Names, run
from .sketch import Sketch

TITLE = "deferred logits"
REUSE = 600
IMPORTS = ""

VIEWS = [
    *("{a}[{i}]", "{a}[:, {i}]", "{a}[..., {i}]", "{a}[{n}:]", "{a}[:, :{n}]", "{a}[..., :-1, :]"),
    *("{a}[None]", "{a}[::2]", "{a}[..., 1:, :]", "{a}[:, -1:]", "{a}[..., ::2]", "{a}[:, None]"),
    *("{a}.view({shape})", "{a}.reshape({shape})", "{a}.view({shape})", "{a}.flatten(0, 1)"),
    *("{a}.flatten()", "{a}.unflatten({d}, (-1, {n}))", "{a}.squeeze({d})", "{a}.unsqueeze({d})"),
    *("{a}.transpose({d}, {d})", "{a}.transpose(0, 1)", "{a}.transpose(1, 2)", "{a}.mT"),
    *("{a}.permute({order})", "{a}.movedim({d}, {d})", "{a}.swapaxes({d}, {d})", "{a}.T"),
    *("{a}.narrow({d}, {n}, 1)", "{a}.select({d}, {i})", "{a}.split({n}, {d})[-1]"),
    *("{a}.chunk(2, {d})[0]", "{a}.unbind({d})[{i}]", "{a}.tensor_split(2, {d})[-1]"),
    *("{a}.as_strided({strided})", "{a}.expand(2, *{a}.shape)", "{a}.diagonal(0, {d}, {d})"),
    *("{a}.unfold({d}, 2, 1)", "{a}.view_as({like})", "{a}.detach()", "{a}.data", "{a}[...]"),
    *("{a}.expand_as({a})", "list({a})[{i}]", "{a}.ravel()", "{a}.squeeze()", "{a}.contiguous()"),
    *("torch.atleast_3d({a})", "{a}.hsplit({n})[0]", "{a}.adjoint()", "{a}.real"),
]
_SELECTIONS = [
    *("{a}[torch.arange({a}.shape[0]) != 1]", "{a}[[0, -1]]", "{a}[torch.tensor([1, 0])]"),
    *("{a}[:, torch.tensor([0, 0, 1])]", "{a}.index_select({d}, torch.tensor([1, 0]))"),
    *("{a}[torch.tensor(1), ..., torch.tensor([0, 2])]", "{a}[torch.tensor([[0, 1]])]"),
    *("{a}.take_along_dim({a}.argsort({d}), {d})", "{a}.flip({d})", "{a}.roll(1, {d})"),
    *("{a}.masked_select({a} > 0)", "{a}[torch.ones({a}.shape[:-1], dtype=torch.bool)]"),
]
VALUES = [
    *("{a} * {x}", "{a} / {x}", "-{a}", "{a} + {b}", "{a} * {like}", "{a} - {a}.mean({d}, True)"),
    *("{a}.clone()", "{a}.contiguous()", "{a}.to(D)", "{a}.double()", "{a}.type_as({b})"),
    *("{a}.softmax({d})", "{a}.log_softmax(-1)", "F.log_softmax({a}, {d})", "{a}.logsumexp({d})"),
    *("{a}.tanh()", "{a}.sum({d})", "{a}.mean({d})", "{a}.sigmoid()", "{a}.square()", "{a}.norm()"),
    *("torch.cat([{a}, {b}], {d})", "torch.stack([{a}, {like}], {d})", "{a}.repeat({n}, 1, 1)"),
    *("torch.where({a} > 0, {a}, {x})", "{a}.masked_fill({a} > 1, {x})", "{a}.cumsum({d})"),
    *("{a}.std({d})", "{a} @ {a}.mT", "torch.einsum('...v->...', {a})", "torch.zeros_like({a})"),
    *("{a}.new_ones(2) + {a}.sum()", "{a}.float()", "{a}.triu()", "F.normalize({a}, dim={d})"),
    *("{a}.log_softmax(-1).exp()", "F.softmax({a} / {x}, -1)", "{a}.tile(2)", "F.pad({a}, (1, 0))"),
    *("copy.copy({a})", "torch.outer({a}.flatten()[:3], {a}.flatten()[:2])", "{a}.clamp(-1, 1)"),
    *("torch.func.vmap(torch.sum)({a})", "{a}.detach().clone()", "{a}.abs().amax({d})"),
    *("torch.addcmul({a}, {like}, {like})", "torch._foreach_mul([{a}, {b}], 2)[1]", "{a}.half()"),
    *("{a}.bfloat16()", "torch.utils.checkpoint.checkpoint(torch.tanh, {a}, use_reentrant=False)"),
]
_METRICS = [
    *("{a}.argmax({d})", "{a}.argmax(-1)", "{a}.topk(2, {d})", "{a}.sort({d}).indices", "{a} > 0"),
    *("{a}.max({d})", "{a}.argmax().item()", "({a}.argmax(-1) == 1).sum()", "{a}.topk(1).indices"),
    # PyTorch's median over a dimension of stride 0 looks at the memory after each entry.
    *("{a}.kthvalue(1, {d})", "{a}.contiguous().median({d})", "{a}.isnan().any()"),
    "{a}.argsort({d})",
]
_FACTS = [
    *("{a}.tolist()", "{a}.sum().item()", "{a}.detach().numpy().sum().item()", "{a}.shape"),
    # Along an axis of one entry copies on PyTorch's own meta device have another stride, too.
    "([s for s, n in zip({a}.stride(), {a}.shape) if n > 1], {a}.is_contiguous())",
    *("{a}.storage_offset()", "len({a})", "{a}.dtype"),
    *("{a}.requires_grad", "{a}.is_leaf", "{a}.grad", "pickle.loads(pickle.dumps({a}.detach()))"),
    # Not torch.equal: rows that are read alone and with others may round apart.
    *("copy.deepcopy({a}.detach())", "torch.allclose({a}, {like})"),
    *("float({a}.mean())", "{a}.numel()", "{a}.retains_grad"),
]
WRITES = [
    *("{a}.mul_({x})", "{a}.add_({x})", "{a}.add_({like})", "{a}[{i}] = {x}", "{a}[:, {i}] = {x}"),
    *("{a}[..., {i}] = {x}", "{a}.masked_fill_({a} > 0, {x})", "{a}.div_({x})", "{a} /= {x}"),
    *("{a}.zero_()", "{a}.fill_({x})", "{a}.copy_({like})", "{a}[{a} > 0] = {x}", "{a}.tanh_()"),
    *("{a}.clamp_(-1, 1)", "{a}.index_fill_({d}, torch.tensor([0]), {x})", "{a}.detach_()"),
    *("torch.mul({a}, {x}, out={like})", "{a}[:1].mul_({x})", "{a}.T.mul_({x})", "{a}.neg_()"),
    *("{a}.detach().mul_({x})", "{a}.data.mul_({x})", "{a}.flatten(0, 1)[0] = {x}", "{a} *= {a}"),
    *("{a}.scatter_(-1, torch.zeros_like({a}, dtype=torch.int64), {x})", "{a}[0], {a}[1] = 1, 2"),
    *("{a}.transpose({d}, {d}).mul_({x})", "{a}.view({shape}).add_({x})", "{a}.exp_()"),
]
_LABELS = "torch.randint({last}, {a}.shape[:-1])"
_CLASSES = f"{_LABELS}.unsqueeze(-1)"
_LOSSES = [
    f"F.cross_entropy({{a}}.reshape(-1, {{last}}), {_LABELS}.flatten())",
    f"F.cross_entropy({{a}}.view(-1, {{last}}), {_LABELS}.view(-1), ignore_index=3)",
    f"F.cross_entropy({{a}}.flatten(0, -2), {_LABELS}.flatten(), label_smoothing=0.1)",
    f"F.cross_entropy({{a}}.flatten(0, -2), {_LABELS}.flatten(), reduction='none').square().sum()",
    f"F.cross_entropy({{a}}.flatten(0, -2), {_LABELS}.flatten(), {{a}}.new_ones({{last}}) / 2)",
    f"F.cross_entropy({{a}}, {_LABELS}, reduction='sum')",
    f"F.cross_entropy({{a}}.mT, {_LABELS})",
    "F.cross_entropy({a}, torch.randint({a}.shape[1], {a}[:, 0].shape))",
    f"nn.CrossEntropyLoss()({{a}}.reshape(-1, {{last}}) * {{x}}, {_LABELS}.flatten())",
    f"-{{a}}.log_softmax(-1).gather(-1, {_CLASSES}).mean()",
    f"-F.log_softmax({{a}}.float(), -1).take_along_dim({_CLASSES}, -1).sum()",
    f"F.nll_loss(F.log_softmax({{a}}, -1).flatten(0, -2), {_LABELS}.flatten())",
    f"({{a}}.gather(-1, {_CLASSES}).squeeze(-1) - {{a}}.logsumexp(-1)).mean()",
    "{a}.logsumexp(-1).square().mean()",
    "F.kl_div({a}.log_softmax(-1), {like}.softmax(-1))",
    "-({a}.softmax(-1) * {a}.log_softmax(-1)).sum()",
    "{a}.square().mean()",
    "{a}.sum()",
    "({a} * torch.randn({a}.shape, dtype=D)).sum()",
    "F.cross_entropy({a}, {a}.detach().softmax(-1))",
    # Written explicitly, as other packages do.
    f"-{{a}}.log_softmax(-1)[torch.arange(len({{a}})), {_LABELS}].mean()",
    f"({{a}}.logsumexp(-1) - {{a}}[torch.arange(len({{a}})), {_LABELS}]).mean()",
    f"(-{{a}}.log_softmax(-1)).gather(-1, {_CLASSES}).sum()",
    f"-(F.one_hot({_LABELS}, {{last}}) * {{a}}.log_softmax(-1)).sum(-1).mean()",
    f"sum(-p.gather(-1, {_CLASSES}).mean() - 0.1 * p.mean(-1).mean()"
    " for p in [{a}.log_softmax(-1)])",
    f"sum(-p.gather(-1, {_CLASSES}).sum() - 0.1 * p.sum(-1).sum()"
    " for p in [{a}.log_softmax(-1)])",
    "(({a} - {a}.amax(-1, True).detach()).exp().sum(-1).log() + {a}.amax(-1).detach()).mean()",
]
_ENTROPY = [  # each of the one before
    ["{a}.log_softmax(-1)", "F.log_softmax({a}, -1)", "({a} / {x}).log_softmax(-1)"],
    ["{a}.exp()", "{a}.exp()", "torch.no_grad()(torch.exp)({a})", "{a}.exp().detach()"],
    ["{a} * {logs}", "{logs} * {a}", "torch.no_grad()(torch.mul)({a}, {logs})"],
    ["{a}.sum(-1)", "{a}.sum(-1)", "{a}.sum(-1, True)", "{a}.mean(-1)", "{a}[0].sum(-1)"],
    ["{a}.mean()", "-{a}.sum()", "{a}.square().sum()"],
]
_BACKWARD = [
    *(
        "{loss}.backward(retain_graph=True)",
        "{loss}.backward(retain_graph=True)",
        "{loss}.backward()",
    ),
    "seen.append(torch.autograd.grad({loss}, {a}, retain_graph=True, allow_unused=True))",
    "seen.append(torch.autograd.grad({loss}, m[1].weight, retain_graph=True, allow_unused=True))",
    "seen.append(torch.autograd.grad({loss}, [{a}, {b}], retain_graph=True, allow_unused=True))",
    "seen.append(torch.autograd.grad({loss}, {a}, create_graph=True, allow_unused=True))",
]
# torch 2.13 crashes where a hook is the first to ask a rewritten view for its grad_fn.
_HOOKS = [
    f"{{a}}.grad_fn and {{a}}.{hook}"
    for hook in (
        *("retain_grad()", "register_hook(lambda g: g * 2)", "register_hook(seen.append)"),
        *("register_hook(lambda g: seen.append(g.abs().sum()))", "register_hook(lambda g: None)"),
    )
] + ["m[1].weight.register_hook(lambda g: g * 3)"]
_CHANGES = [
    *("m.zero_grad()", "torch.optim.SGD(m.parameters(), 0.1).step()", "m.zero_grad()"),
    *("m[1].weight.data.mul_(0.5)", "m[1].weight.requires_grad_(False)"),
]


_INSIDE = [
    *("a = 3 * torch.tanh(a / 3)", "a = a * 0.5", "a = a.to(D)", "a = a[..., :-1, :]"),
    *("a = a.view(x.shape[1], x.shape[0], V)", "a = a.transpose(0, 1)", "a = a.flatten(0, 1)"),
    *("a = a[:, -1:]", "a = a[..., 1:]", "a = a.contiguous()", "a = a.float()", "a = a / 2"),
    *("a = a.masked_fill(a > 1, 0.5)", "a[..., 0] = 1.5", "a = a.reshape(-1, V)", "a = a.mT"),
    *("a = a.unsqueeze(0)", "a = a.clone(); a.mul_(2)", "a = a.log_softmax(-1)"),
]
_HEADS = [
    *("m[1](h)", "m[1](h)", "F.linear(h, m[1].weight)", "h @ m[1].weight.t()", "m[1](h)"),
    *("F.linear(h, m[1].weight.to(D))", "F.linear(h, F.normalize(m[1].weight, dim=-1))"),
    *("m[1](h)[..., :V]", "m[1](h)[..., : V - 3]", "m[1](h) * m[0].weight[0, 0].exp()"),
]
_LOSS = "F.cross_entropy(a.reshape(-1, V), y.flatten()[: a.shape[:-1].numel()])"
_RESULTS = [
    *("a", "a", f"a, {_LOSS}", f"{_LOSS}, a", "a, a[:, -1]", "a, a.detach()", "a, h.sum()"),
    "(a,)",
]


def setup(random: Random) -> list[str]:
    """Draw a model, what is done with its logits inside the graph, and how it is compiled."""
    dtype = random.choice(("float64", "float64", "float64", "float32"))
    hidden = random.choice((2, 4, 8))
    vocabulary = random.choice((36, 36, 41, 67))  # as narrow as heads that are deferred can be
    bias = random.choice(("", ", bias=False"))
    inner = random.choice(("eager", "eager", "aot_eager"))
    head = random.choice(_HEADS)
    lines = [
        f"torch.manual_seed({random.randrange(100)}); D, V = torch.{dtype}, {vocabulary}",
        f"m = nn.Sequential(nn.Embedding(V, {hidden}), nn.Linear({hidden}, V{bias})).to(D)",
        "def forward(x, y):",
        f"    h = m[0](x){random.choice(('', '.tanh()', ' * 2'))}",
        f"    a = {head}",
    ]
    if random.random() < 0.5:
        lines += [f"    {random.choice(_INSIDE)}" for _ in range(random.choice((1, 1, 2)))]
    result = random.choice(_RESULTS)
    lines += [
        f"    return {result}",
        f"f = torch.compile(forward, backend=memeff, options={{'memeff.inner': '{inner}'}})"
        " if ours else forward",
    ]
    if "," in result:
        # A compiled graph knows no gradient of one of its outputs with respect to another.
        lines[-1] = lines[-1].replace("f =", "g =", 1).replace(inner, "aot_eager")
        lines.append("f = lambda *given: [r.view_as(r) for r in g(*given)]")
    return lines


def body(random: Random, sketch: Sketch) -> None:
    """Draw what is done with the logits of one call."""
    rows, columns = random.choice(((2, 5), (3, 3), (4, 4), (3, 4), (1, 6), (3, 2), (2, 2), (5, 1)))
    if random.random() < 0.1:
        columns = sketch.names["V"]
    sketch.add(f"torch.manual_seed({random.randrange(1000)})")
    sketch.add(f"x, y = torch.randint(V, (2, {rows}, {columns}))")
    if rows * columns <= sketch.names["V"] and random.random() < 0.5:  # nothing ties
        sketch.add(f"x = torch.randperm(V)[: {rows * columns}].view({rows}, {columns})")
    _call(random, sketch)
    if not sketch.tensors:
        return
    kinds = [VIEWS] * 9 + [_SELECTIONS] * 2 + [VALUES] * 4 + [WRITES] * 3 + [_LOSSES] * 4
    kinds += [_FACTS, _HOOKS, _BACKWARD, _BACKWARD, _BACKWARD, _METRICS]
    entropy = [""] if random.random() < 0.1 else []
    for _ in range(random.randint(4, 14)):
        _step(random.choice(kinds), sketch)
        while entropy and random.random() < 0.6:
            _entropy(entropy, sketch)
    if random.random() < 0.05:
        _call(random, sketch)
    if random.random() < 0.05:
        sketch.add(random.choice(_CHANGES))
    shown = [name for name in sketch.tensors if random.random() < 0.5]
    random.shuffle(shown)
    for name in shown:
        sketch.add(f"seen.append({name})")
    sketch.add("seen.append([p.grad for p in m.parameters()])")


def _call(random: Random, sketch: Sketch) -> None:
    if run(["r = f(x, y)"], sketch.names) is not None:
        return
    result = sketch.names["r"]
    names = [sketch.fresh() for _ in range(1 if isinstance(result, torch.Tensor) else len(result))]
    targets = names[0] if isinstance(result, torch.Tensor) else f"({', '.join(names)},)"
    sketch.add(f"{targets} = f(x, y)")
    sketch.tensors += names


def _step(kind: list[str], sketch: Sketch) -> None:
    """Try one template; a line that eager refuses is not there."""
    text = sketch.fill(kind, sketch.pick(lambda t: t.is_floating_point() and t.dim() > 0))
    if text is None or (not sketch.is_exact and kind in (_METRICS, _FACTS)):
        return  # a comparison may hang on rounding
    if text.endswith(".detach_()") and sketch.is_shared(text.removesuffix(".detach_()")):
        return  # see tests/fuzz: PyTorch fails where a write made a view stale before or after
    if kind is WRITES and any(map(sketch.overlaps_itself, sketch.named_in(text))):
        return
    if kind in (WRITES, _HOOKS, _BACKWARD):
        sketch.add(text)
    elif kind in (_METRICS, _FACTS):
        sketch.add(f"seen.append({text})")
    else:
        sketch.bind(text)


def _entropy(parts: list[str], sketch: Sketch) -> None:
    """Draw the next part of an entropy from the one before; an empty list is over."""
    place = len(parts) - 1
    of = parts[-1] or sketch.pick(lambda t: t.is_floating_point() and t.dim() > 0)
    if of is not None and place < len(_ENTROPY):
        logs = parts[min(place, 1)]
        text = sketch.fill([part.replace("{logs}", logs) for part in _ENTROPY[place]], of)
        if text is not None and (name := sketch.bind(text)):
            parts.append(name)
            return
    parts.clear()


def is_exact(names: Names) -> bool:
    """Whether a setup computes in float64."""
    return bool(names["D"] == torch.float64)
