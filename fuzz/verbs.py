"""Part d: sequences of verbs on a small model; the twin is eager and knows none of them."""

from __future__ import annotations

from random import Random

from .program import Names
from .sketch import Sketch

TITLE = "sequences of verbs"
REUSE = 1
IMPORTS = (
    "import contextlib, transformers; from transformers import DynamicCache"
    "; from memeff_compile import KVCache; from memeff_compile.errors import MemeffError"
)

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
_EXACT = ("16", "16, recent=16", "8, recent=128", "4, recent=128", "2, recent=256, group=32")
"""Settings of caches that keep what these programs tell them as it came."""


def setup(random: Random) -> list[str]:
    """Draw a model."""
    if random.random() < 0.3:
        return _language_model(random)
    width = random.choice((16, 32, 48))
    bias = random.choice(("", ", bias=False"))
    tied = random.choice(("", "", "; m[2].weight = m[0].weight"))
    return [
        f"torch.manual_seed({random.randrange(100)})",
        f"m = nn.Sequential(nn.Linear({width}, {width}{bias}), nn.ReLU(),"
        f" nn.Linear({width}, {width}{bias}), nn.Linear({width}, 8{bias})).bfloat16(){tied}",
        f"f, x = m, torch.randn(5, {width}).bfloat16()",
    ]


def _language_model(random: Random) -> list[str]:
    heads, layers = random.choice((1, 2)), random.choice((1, 2))
    return [
        f"torch.manual_seed({random.randrange(100)}); undo = []",
        "sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=32, num_attention_heads=2,"
        f" num_hidden_layers={layers}, num_key_value_heads={heads}, head_dim=64,"
        " bos_token_id=1, eos_token_id=None, pad_token_id=0)",
        "m = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).eval()",
        "f, x = m, torch.randint(2, 64, (2, 9))",
    ]


def body(random: Random, sketch: Sketch) -> None:
    """Draw verbs; what is compressed or ternary decides which come next."""
    if "undo" in sketch.names:
        _speak(random, sketch)
        return
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


def _speak(random: Random, sketch: Sketch) -> None:
    """Draw verbs on a language model, whose tokens are looked at where they hang on no rounding."""
    state = "float"
    for _ in range(random.randint(3, 9)):
        bits, tokens, codec = map(random.choice, (_EXACT, (1, 4, 9), _CODECS))
        said = f"max_new_tokens={tokens}, do_sample=False, num_beams={random.choice((1, 1, 2))}"
        mine = f"KVCache(m.config, 64, {bits}) if ours else DynamicCache(config=m.config)"
        use = f"memeff_compile.use_kv_cache_(m, {bits})"
        looks = [
            "seen.append(m(x).logits)",
            f"k = {mine}\nwith torch.no_grad():"
            " seen.append([m(t, past_key_values=k).logits for t in x.split(3, 1)])",
            "m(x, labels=x).loss.backward(); seen.append([p.grad for p in m.parameters()])",
        ]
        if state == "float":
            looks += [
                f"seen.append(m.generate(x, {said}))",
                f"seen.append(m.generate(x, {said}))",
                f"seen.append(m.generate(x, past_key_values={mine}, {said}))",
                f"with {use} if ours else contextlib.nullcontext():"
                f" seen.append(m.generate(x, {said}))",
                "m.train(); torch.optim.SGD(m.parameters(), 0.1).step(); m.eval()",
            ]
        verbs = [*_EVERYWHERE, *_LOOKS[:2], "m = m.eval()"]
        changes = {
            "float": [("m.bfloat16()", "bfloat16")],
            "bfloat16": [
                ("m.float()", "float"),
                (f"if ours: memeff_compile.compress_(m, '{codec}', min_size=0)", "coded"),
            ],
            "coded": [("if ours: memeff_compile.decompress_(m)", "bfloat16")],
        }
        choice = random.random()
        if choice < 0.5:
            sketch.add(random.choice(looks))
        elif choice < 0.6:
            sketch.add(f"if ours: undo.append({use})")
        elif choice < 0.65:
            sketch.add(f"if undo: undo.pop({random.choice((0, -1))})()")
        elif choice < 0.85:
            sketch.add(random.choice(verbs))
        else:
            line, after = random.choice(changes[state])
            state = after if sketch.add(line) else state


def _train(random: Random, sketch: Sketch) -> None:
    """Draw steps of an optimizer in the backward, and of one after it."""
    more = random.choice(("", ", momentum=0.5", ", weight_decay=0.1"))
    sketch.add("p = [p for p in m.parameters() if p.requires_grad]")
    optimizer = f"memeff_compile.optim_in_backward(m, lambda p: torch.optim.SGD([p], 0.1{more}))"
    if not sketch.add(f"o = {optimizer} if ours else torch.optim.SGD(p, 0.1{more})"):
        return
    between = [
        "o.load_state_dict(copy.deepcopy(o.state_dict()))",
        "seen.append(copy.deepcopy(m)(x))",
        "t = pickle.loads(pickle.dumps(m)); t(x).float().sum().backward();"
        " seen.append([p.grad for p in t.parameters()])",
        "for g in o.param_groups: g['lr'] = 0.05",
        "m.to('cpu'); seen.append(f(x))",
        "with torch.no_grad(): seen.append(f(x[:2]))",
    ]
    for _ in range(random.randint(1, 4)):
        sketch.add("f(x).float().square().mean().backward(); o.step(); o.zero_grad()")
        if random.random() < 0.5:
            sketch.add(random.choice(between))
        sketch.add("seen.append([p + 0 for p in m.parameters()])")
    sketch.add("if ours: o.remove()")


def _look(random: Random, sketch: Sketch, state: str) -> None:
    rows = random.choice(("x", "x[:1]", "x[None]"))
    if state == "packed" or random.random() < 0.4:
        sketch.add(f"with torch.no_grad(): seen.append(f({rows}))")
    elif sketch.add(f"y = f({rows}); seen.append(y)") and random.random() < 0.7:
        sketch.add("y.float().square().mean().backward()")
        sketch.add("seen.append([p.grad for p in m.parameters()])")


def _change(random: Random, sketch: Sketch, state: str) -> str:
    """Draw a verb that changes how the model is held; return what it is then."""
    if state in ("dense", "coded") and random.random() < 0.3:
        _train(random, sketch)
        return state
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
