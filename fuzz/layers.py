"""Part f: models of repeated layers, each distinct layer compiled once; the twin is eager."""

from __future__ import annotations

from random import Random

import torch

from .program import Names
from .sketch import Sketch

TITLE = "repeated layers"
REUSE = 8
IMPORTS = "from torch.utils.checkpoint import checkpoint"

_NORMS = (
    ("self.n = nn.LayerNorm(W)", "h = self.n(x)"),
    ("self.n = nn.Parameter(torch.randn(W))", "h = x * (x.square().mean(-1, True) + 1).rsqrt()"),
    ("self.n = nn.RMSNorm(W)", "h = self.n(x)"),
    ("self.n = nn.LayerNorm(W, bias=False)", "h = self.n(x) + c.mean()"),
    ("", "h = x"),
)
_MIXERS = (
    (
        "self.q, self.k = nn.Linear(W, W), nn.Linear(W, W, bias=False)",
        "q, k = (p(h).unflatten(-1, (2, -1)).transpose(1, 2) for p in (self.q, self.k))\n"
        "h = F.scaled_dot_product_attention(q, k, k, is_causal={causal})\n"
        "h = h.transpose(1, 2).flatten(2)",
    ),
    (
        "self.q = nn.Linear(W, W)",
        "s = (self.q(h) @ h.mT / {x}).masked_fill(self.hidden(h, {window}), -1e9)\n"
        "h = s.softmax(-1) @ h",
    ),
    ("self.q = nn.Conv1d(W, W, 3, padding=1)", "h = self.q(h.mT).mT"),
    ("", "h = h + h.roll({window}, 1)"),
    ("", ""),
)
_MAPS = (
    (
        "self.g, self.u, self.d = nn.Linear(W, 8), nn.Linear(W, 8), nn.Linear(8, W)",
        "h = self.d(F.silu(self.g(h)) * self.u(h))",
    ),
    (
        "self.g, self.d = nn.Linear(W, 12), nn.Linear(12, W)",
        "t = self.g(h); t = t.relu_(); h = self.d(t)",
    ),
    (
        "self.g = nn.Linear(W, W).requires_grad_(False); self.a = nn.Parameter(torch.randn(2, W));"
        " self.b = nn.Parameter(torch.randn(W, 2))",
        "h = self.g(h) + {x} * F.linear(F.linear(h, self.a), self.b)",
    ),
    (
        "self.g = nn.ModuleList(nn.Linear(W, W) for _ in range(3)); self.r = nn.Linear(W, 3)",
        "w = self.r(h).softmax(-1); h = sum(w[..., i, None] * e(h) for i, e in enumerate(self.g))",
    ),
    ("self.g = nn.Linear(W, W)", "h = checkpoint(self.g, h, use_reentrant=False).tanh()"),
    (
        "self.g = nn.Linear(W, W)",
        "t = torch.zeros_like(h); t[:, 1:] = self.g(h)[:, 1:]; t.add_({x}); h = t",
    ),
    ("self.g = nn.Parameter(torch.randn(W, W).mT)", "h = torch.einsum('bsw,wv->bsv', h, self.g)"),
)
_ENDS = (
    *("return x + h", "return x + h", "return x + h", "return h", "return x.add(h, alpha={x})"),
    *("return x + self.factor * h", "x = x.clone(); x += h; return x", "return (x + h) * c"),
    "return torch.where(c.abs() > 0.1, x + h, x - h)",
)
_CALLS = (
    *("x = b(x, c)", "x = b(x, c)", "x = b(x, c)", "x = x + b(x, c)", "x = b(x, c) * {x}"),
    "x = checkpoint(b, x, c, use_reentrant=False)",
    "x = b(x, c); c = c + 1",
    "x = b(x, x.mean())",
    "x = b(x, c); seen.append(x) if i == 2 else None",
    "x = b(x, c) if i % 3 else b(b(x, c), c)",
    "y = b(x, c); x = y + x if i % 2 else y - x",
)
_MAKES = (
    *("Block()", "Block()", "Block()", "Block(0.5)", "Block(i)"),
    *("Block(i % 2)", "Block(i % 2)", "Block(1.5 if i == 2 else 1)", "Block(0 if i else 1)"),
    *("Block().requires_grad_(i != 1)", "Block().requires_grad_(i > 2)"),
    "(self.same if i % 2 else Block())",
)
_BODIES = (
    "x = torch.randn({batch}, {length}, W, dtype=D{grad})\ny, s = f(x)\nseen += [y, *s]",
    "x = torch.randn({batch}, {length}, W, dtype=D{grad})\n"
    "y, s = f(x)\n(y + sum(t.mean() for t in s)).backward()\n"
    "seen += [y, x.grad, *[p.grad for p in m.parameters()]]",
    "x = torch.randn({batch}, {length}, W, dtype=D{grad})\n"
    "f(x)[0].backward()\nf(x * 2)[0].backward()\n"
    "seen += [x.grad, *[p.grad for p in m.parameters()]]",
    "x = torch.randn({batch}, {length}, W, dtype=D)\nwith torch.no_grad(): seen += [f(x)[0]]",
)


def setup(random: Random) -> list[str]:
    """Draw a layer, and a model of four to six of them."""
    drawn = [random.choice(each) for each in (_NORMS, _MIXERS, _MAPS)]
    made = [first for first, _ in drawn if first]
    runs = [*(line for _, lines in drawn for line in lines.split("\n") if line)]
    text = "\n        ".join([*runs, random.choice(_ENDS)])
    call, make = random.choice(_CALLS), random.choice(_MAKES)
    numbers = {"x": random.choice((0.5, 2.0, -1.25)), "window": random.choice((1, 2))}
    # Layers that differ in a number alone have other code, wherever the number is.
    own = {"x": "self.factor", "window": "self.window"}
    for name in own if random.random() < (0.9 if "i" in make else 0.3) else ():
        text = text.replace(f"{{{name}}}", own[name])
    text = text.replace("{causal}", str(random.random() < 0.5))
    count = random.choice((4, 5, 6, 6))
    for name, value in numbers.items():
        text, call = (each.replace(f"{{{name}}}", str(value)) for each in (text, call))
    inner = "inductor" if random.random() < 0.01 else "aot_eager"
    return [
        f"torch.manual_seed({random.randrange(100)}); W, D = {random.choice((4, 6, 8))}, "
        f"torch.{random.choice(('float64', 'float64', 'float32'))}",
        "class Block(nn.Module):\n"
        "    def __init__(self, factor=1):\n"
        "        super().__init__(); self.factor = factor; "
        "self.window = 1 + round(2 * factor) % 3\n"
        f"        {'; '.join(made) or 'pass'}\n"
        "    def hidden(self, h, window):\n"
        "        at = torch.arange(h.shape[1]); return (at[:, None] - at).abs() > window\n"
        "    def forward(self, x, c):\n"
        f"        {text}",
        "class Model(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__(); self.same = Block(); self.head = nn.Linear(W, 3)\n"
        f"        self.blocks = nn.ModuleList({make} for i in range({count}))\n"
        "    def forward(self, x):\n"
        "        seen, c = [], x[:, :1].cos()\n"
        "        for i, b in enumerate(self.blocks):\n"
        f"            {call}\n"
        "        return self.head(x).square().mean(), seen",
        "m = Model().to(D); f = m",
        f"if ours: f = torch.compile(m, backend=memeff, options={{'memeff.inner': '{inner}', "
        "'memeff.regions': 'on'})",
    ]


def body(random: Random, sketch: Sketch) -> None:
    """Draw one or two calls, with gradients or without."""
    for _ in range(random.choice((1, 1, 2))):
        grad = random.choice(("", ", requires_grad=True"))
        text = random.choice(_BODIES).format(batch=random.choice((2, 2, 2, 3)), length=5, grad=grad)
        for line in text.split("\n"):
            if not sketch.add(line):
                return


def is_exact(names: Names) -> bool:
    """Whether a setup computes in float64."""
    return bool(names["D"] == torch.float64)
