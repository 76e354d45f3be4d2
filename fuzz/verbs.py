"""Part d: sequences of verbs on a small model; the twin is eager and knows none of them."""

from __future__ import annotations

from random import Random

from .program import Names
from .sketch import Sketch

TITLE = "sequences of verbs"
REUSE = 1
IMPORTS = "from memeff_compile.errors import MemeffError"

_EVERYWHERE = [
    *("m = copy.deepcopy(m)", "m = pickle.loads(pickle.dumps(m))", "m.eval()", "m.train()"),
    *("m.zero_grad()", "m.to('cpu')", "f = m", "f = m", "m = m.apply(lambda part: None)"),
    "m.load_state_dict(copy.deepcopy(m.state_dict()))",
    "b = io.BytesIO(); torch.save(m.state_dict(), b); b.seek(0); m.load_state_dict(torch.load(b))",
    "b = io.BytesIO(); torch.save(m, b); b.seek(0); m = torch.load(b, weights_only=False)",
]
_LOOKS = [
    *("m.requires_grad_(False)", "m.requires_grad_(True)", "m[0].weight.requires_grad_(False)"),
    "seen.append([t + 0 for t in m.state_dict().values()])",
    "seen.append([p.sum() for p in m.parameters()])",
    "seen.append([p.tolist() for p in m.parameters()])",
    "seen.append([p.detach().float().norm().item() for p in m.parameters()])",
    "seen.append([p * 2 for p in m.parameters()])",
    "seen.append([(n, tuple(p.shape), p.dtype, p.requires_grad) for n, p in m.named_parameters()])",
    "seen.append(torch.func.functional_call(m, dict(m.named_parameters()), (x,)))",
]
_CODECS = ("win4", "tier", "rans")
_CODED = "'Coded' in str([type(p) for p in m.parameters()])"
_REFUSED = (
    *("m.half()", "m.to(torch.float32)", "m.double()", "next(m.parameters()).data.mul_(2)"),
    "torch.optim.SGD(m.parameters(), 0.1, foreach=False).step()",
    "torch.optim.AdamW(m.parameters(), 0.1, foreach=False).step()",
    "torch.optim.AdamW(m.parameters(), 0.1).step()",
    "torch.optim.RMSprop(m.parameters(), 0.1, foreach=False).step()",
    "torch.nn.init.zeros_(next(m.parameters()))",
)


def setup(random: Random) -> list[str]:
    """Draw a model."""
    width = random.choice((16, 32, 48))
    bias = random.choice(("", ", bias=False"))
    tied = random.choice(("", "", "; m[2].weight = m[0].weight"))
    return [
        f"torch.manual_seed({random.randrange(100)})",
        f"m = nn.Sequential(nn.Linear({width}, {width}{bias}), nn.ReLU(),"
        f" nn.Linear({width}, {width}{bias}), nn.Linear({width}, 8{bias})).bfloat16(){tied}",
        f"f, x = m, torch.randn(5, {width}).bfloat16()",
    ]


def body(random: Random, sketch: Sketch) -> None:
    """Draw verbs; what is compressed or ternary decides which come next."""
    state = "dense"
    for _ in range(random.randint(3, 10)):
        choice = random.random()
        if choice < 0.35:
            _look(random, sketch, state)
        elif choice < 0.6:
            sketch.add(random.choice(_EVERYWHERE + (_LOOKS if state != "packed" else [])))
        elif choice < 0.7:
            inner = random.choice(["eager"] * 20 + ["aot_eager"] * 20 + ["inductor"])
            sketch.add(
                f"f = torch.compile(m, backend=memeff, options={{'memeff.inner': '{inner}'}})"
                " if ours else m"
            )
        else:
            state = _change(random, sketch, state)
    _look(random, sketch, state)
    if state == "coded" and random.random() < 0.5:
        sketch.add("if ours: memeff_compile.decompress_(m)")
    if state != "packed":
        sketch.add("seen.append([p + 0 for p in m.state_dict().values()])")


def _look(random: Random, sketch: Sketch, state: str) -> None:
    rows = random.choice(("x", "x[:1]", "x[None]"))
    if state == "packed" or random.random() < 0.4:
        sketch.add(f"with torch.no_grad(): seen.append(f({rows}))")
    elif sketch.add(f"y = f({rows}); seen.append(y)") and random.random() < 0.7:
        sketch.add("y.float().square().mean().backward()")
        sketch.add("seen.append([p.grad for p in m.parameters()])")


def _change(random: Random, sketch: Sketch, state: str) -> str:
    """Draw a verb that changes how the model is held; return what it is then."""
    if state == "dense":
        choice = random.randrange(5)
        if choice < 2:
            codec = random.choice(_CODECS)
            sketch.add(f"if ours: memeff_compile.compress_(m, '{codec}', min_size=0)")
            return "coded"
        if choice == 2:
            sketch.add("torch.optim.SGD(m.parameters(), 0.1).step()")
        elif choice == 3:
            sketch.add(random.choice(("m.float().bfloat16()", "m.bfloat16()")))
        elif sketch.add("memeff_compile.ternarize_(m, kinds={'*': 'int8'}); f = m"):
            return "ternary"
        return "dense"
    if state == "coded":
        if random.random() < 0.5:
            sketch.add("if ours: memeff_compile.decompress_(m)")
            return "dense"
        verb = random.choice(_REFUSED)
        sketch.add(f"if ours and {_CODED}:\n    try: {verb}\n    except MemeffError: pass")
        return "coded"
    if state == "ternary":
        if random.random() < 0.5:
            sketch.add("m.requires_grad_(False); f = m")
            sketch.add("if ours: memeff_compile.pack_ternary_(m)")
            return "packed"
        sketch.add("torch.optim.SGD(m.parameters(), 0.1).step()")
    return state


def is_exact(names: Names) -> bool:
    """Weights are in 16 bits."""
    return False
