"""Part c: attention under every form of mask that the docs name, as one call or spelled out."""

from __future__ import annotations

from random import Random

import torch

from .program import Names
from .sketch import Sketch

TITLE = "attention"
REUSE = 16
IMPORTS = ""

_CONDITIONS = [
    *("cols <= rows", "cols <= rows + 1", "(cols <= rows) & (cols > rows - 3)", "cols < 4"),
    *("(rows - cols).abs() <= 2", "rows // 3 == cols // 3", "cols >= rows", "cols <= rows"),
    *("pad[:, None, None, :N]", "ids[:, None, :M, None] == ids[:, None, None, :N]", "cols >= 0"),
    *("(cols <= rows) & pad[:, None, None, :N]", "(cols <= rows) | (cols < 2)", "cols < lens"),
    *("torch.ones(M, N, dtype=torch.bool, device=q.device).tril()", "cols - rows <= 0"),
    *("torch.ones(M, N, device=q.device).triu(1) == 0", "~(cols > rows)", "rows >= cols"),
    *("pad[:, None, :M, None] & pad[:, None, None, :N]", "(cols < 0) | (cols == rows)"),
    *("(cols <= rows) & (ids[:, None, :M, None] == ids[:, None, None, :N])", "cols % 2 == 0"),
    # A row of a stored mask for each position, as gpt-fast, litgpt and torchtune decode.
    *("table[None, None, at[:1].expand(M)][..., :N]", "table[None, None, at.new_ones(M)][..., :N]"),
    *("table[rows[:, 0]][None, None][..., :N]", "table[None, None, :M, :N]", "table[:M, :N]"),
]
_MASKS = [
    *("seen_by", "seen_by", "torch.where(seen_by, 0.0, float('-inf')).to(q.dtype)"),
    "torch.zeros(M, N, dtype=q.dtype, device=q.device).masked_fill(~seen_by, float('-inf'))",
    "(~seen_by).to(q.dtype) * torch.finfo(q.dtype).min",
    "(1 - seen_by.to(q.dtype)) * -1e9",
    "torch.where(seen_by, 0, torch.finfo(q.dtype).min).to(q.dtype)",
    "seen_by.expand(q.shape[0], q.shape[1], M, N)",
    "torch.where(seen_by, 0.5, float('-inf')).to(q.dtype) + q[..., :1] * 0",
]
_REPEATS = [
    "k, v = k.repeat_interleave(G, 1), v.repeat_interleave(G, 1)",
    "k, v = (t[:, :, None].expand(-1, -1, G, -1, -1).flatten(1, 2) for t in (k, v))",
    "k, v = k.repeat(1, G, 1, 1), v.repeat(1, G, 1, 1)",
]
_CALLS = [
    *("F.scaled_dot_product_attention(q, k, v, mask{more})",) * 3,
    *("F.scaled_dot_product_attention(q, k, v, attn_mask=mask{more}).transpose(1, 2)",) * 2,
]


def setup(random: Random) -> list[str]:
    """Draw a function of attention."""
    dtype = random.choice(("float64", "float64", "float32"))
    group = random.choice((1, 1, 2, 3))
    lines = ["M, N = q.shape[2], k.shape[2]"]
    if random.random() < 0.25:
        lines = ["kc, vc = kc.clone(), vc.clone()"] + [
            f"{c}.index_copy_(2, at, {t})" for c, t in (("kc", "k"), ("vc", "v"))
        ]
        lines += ["k, v = kc, vc", "M, N = q.shape[2], k.shape[2]"]
        rows = "at[:, None]"
    else:
        rows = "torch.arange(M, device=q.device)[:, None]"
        rows += random.choice(("", "", " + N - M", " + 1"))
    lines[-1] += f"; rows, cols = {rows}, torch.arange(N, device=q.device)[None]"
    lines += [
        f"seen_by = {random.choice(_CONDITIONS)}",
    ]
    for _ in range(random.choice((0, 0, 1, 2))):
        lines.append(f"seen_by = seen_by {random.choice('&|')} ({random.choice(_CONDITIONS)})")
    is_called, shares = random.random() < 0.55, group > 1 and random.random() < 0.4
    if group > 1 and not (is_called and shares):
        lines.append(random.choice(_REPEATS))
    if is_called:
        more = ", enable_gqa=True" if group > 1 and shares else ""
        more += random.choice(("", "", ", scale=0.3", ", dropout_p=0.0"))
        call = random.choice(_CALLS).replace("{more}", more)
        plain = random.random()
        if plain < 0.1:
            call = call.replace("attn_mask=mask", "is_causal=True").replace(
                "v, mask", "v, is_causal=True"
            )
        elif plain < 0.2:
            call = call.replace("attn_mask=mask", "None").replace("mask", "None")
        lines += [f"mask = {random.choice(_MASKS)}", f"o = {call}"]
    else:
        lines += random.choice((_spelled, _spelled, _by_products))(random)
    lines[-1] += f"; return o{random.choice(('', '', ' * 2', ', q.sum()'))}"
    inner = random.choice(["eager"] * 30 + ["aot_eager"] * 20 + ["inductor"])
    dynamic = random.choice((None, None, True, False))
    options, name, outer = f"'memeff.inner': '{inner}'", "forward", []
    if random.random() < 0.25:
        kept = random.choice(("as_written", "attention", "attention", 1 << 12, 1 << 20))
        options, name = f"{options}, 'memeff.recompute': {kept!r}", "block"
        outer = [
            "def forward(*given):",
            "    return torch.utils.checkpoint.checkpoint(block, *given, use_reentrant=False)",
        ]
    return [
        f"D, G = torch.{dtype}, {group}",
        f"def {name}(q, k, v, pad, ids, lens, kc, vc, at, table):",
        *(f"    {line}" for line in lines),
        *outer,
        f"f = torch.compile(forward, backend=memeff, options={{{options}}},"
        f" dynamic={dynamic}) if ours else forward",
    ]


def _spelled(random: Random) -> list[str]:
    scores = ("q @ k.mT * 0.5", "q @ k.transpose(2, 3) / 2", "(q * 0.5) @ k.mT", "(q @ k.mT) / 2")
    lines = [f"s = {random.choice((*scores, 'torch.matmul(q, k.transpose(-1, -2)) * 0.5'))}"]
    if random.random() < 0.3:
        lines.append("s = 3 * torch.tanh(s / 3)")
    if random.random() < 0.3:
        hidden = random.choice(("float('-inf')", "torch.finfo(q.dtype).min", "-1e9"))
        masked = ("s.masked_fill(~seen_by, {})", "torch.where(seen_by, s, {})")
        lines.append(f"s = {random.choice(masked).format(hidden)}")
    elif random.random() < 0.85:
        mask = random.choice([mask for mask in _MASKS if mask != "seen_by"][:-2])
        lines += [f"mask = {mask}", "s = s + mask"]
    softmax = ("s.softmax(-1)", "F.softmax(s, dim=-1)", "torch.softmax(s, -1)", "F.softmax(s, -1)")
    lines.append(f"p = {random.choice(softmax)}")
    if random.random() < 0.3:
        lines.append(random.choice(("p = F.dropout(p, 0.0)", "p = p.to(v.dtype)")))
    lines.append(f"o = {random.choice(('p @ v', 'torch.matmul(p, v).transpose(1, 2)'))}")
    return lines


_SCORES = [
    *(
        "torch.einsum('bhid,bhjd->bhij', q, k) * 0.5",
        "torch.einsum('b h i d, b h j d -> b h i j', q * 0.5, k)",
    ),
    *(
        "torch.einsum('bhjd,bhid->bhij', k, q) / 2",
        "torch.einsum('...id,...jd->...ij', q, k).mul(0.5)",
    ),
    "torch.bmm(q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2)).view(*q.shape[:3], N) * 0.5",
    "torch.bmm(q.flatten(0, 1) * 0.5, k.flatten(0, 1).mT).unflatten(0, q.shape[:2])",
    "torch.baddbmm(q.new_empty(q.shape[0] * q.shape[1], M, N), q.flatten(0, 1), k.flatten(0, 1).mT,"
    " beta=0, alpha=0.5).view(*q.shape[:3], N)",
    "torch.baddbmm((cols * 0.1).to(q.dtype).expand(M, N), q.flatten(0, 1), k.flatten(0, 1).mT,"
    " alpha=0.5).view(*q.shape[:3], N)",
    *(
        "torch.einsum('bhid,bjd->bhij', q, k[:, 0])",
        "q @ k.mT * -0.5",
        "q @ k.mT * q.new_tensor(0.5)",
    ),
    *(
        "torch.einsum('bihd,bjhd->bhij', q.transpose(1, 2), k.transpose(1, 2)) * 0.5",
        "q @ k.mT * q.mean()",
    ),
]
_SEEN = [
    *(
        "s.masked_fill_(~seen_by, float('-inf'))",
        "s.masked_fill_(~seen_by, -1e9)",
        "s += mask",
        "s.add_(mask)",
    ),
    *(
        "s = s.masked_fill(~seen_by, -torch.finfo(s.dtype).max)",
        "s = s + mask",
        "s[..., 1:] += 0.5",
    ),
    *("s = torch.where(seen_by, s, -1e9)", "s = s + mask.expand_as(s)", "s.mul_(0.5)"),
    "s = s.flatten(0, 1).masked_fill(~seen_by.expand_as(s).flatten(0, 1), -1e9).view_as(s)",
]
_RESULTS = [
    *("torch.einsum('bhij,bhjd->bhid', p, v)", "torch.einsum('bhij,bhjd->bihd', p, v)", "p @ v"),
    *("torch.bmm(p.flatten(0, 1), v.flatten(0, 1)).view(*p.shape[:3], -1)", "p.matmul(v)"),
    *("torch.einsum('bhij,bjd->bhid', p, v[:, 0])", "torch.einsum('bhjd,bhij->bhid', v, p)"),
]


def _by_products(random: Random) -> list[str]:
    """Attention as packages write it that use einsum, bmm or baddbmm, or mask scores in place."""
    lines = [
        "mask = torch.where(seen_by, 0.0, -1e9).to(q.dtype)",
        f"s = {random.choice(_SCORES)}",
    ]
    if random.random() < 0.3:
        lines.append("s = 3 * torch.tanh(s / 3)")
    lines += [random.choice(_SEEN) for _ in range(random.choice((0, 1, 1, 1, 2)))]
    lines.append("p = s.softmax(-1)")
    if random.random() < 0.3:
        lines.append(random.choice(("p = F.dropout(p, 0.0)", "p = p.type_as(v)", "p.mul_(0.5)")))
    return [*lines, f"o = {random.choice(_RESULTS)}"]


def body(random: Random, sketch: Sketch) -> None:
    """Draw the sizes and tables of one call, and what is asked of it."""
    batch, queries = random.choice((1, 2, 2, 3)), random.choice((1, 4, 4, 6, 7))
    keys = random.choice((queries, queries, queries + 3))
    room = keys + random.choice((0, 2, 5))
    gradients = random.random() < 0.7
    leaf = "torch.randn(B, {}, {}, 4, dtype=D)" + (".requires_grad_()" if gradients else "")
    sketch.add(f"torch.manual_seed({random.randrange(1000)}); B, L = {batch}, {room}")
    sketch.add(
        f"q, k, v = {leaf.format('2 * G', queries)}, {leaf.format(2, keys)}, {leaf.format(2, keys)}"
    )
    nobody = random.choice(("", "", "", "; pad[0] = False"))
    first = random.choice((0, 0, room - keys))
    sketch.add(
        f"pad = torch.arange(L)[None] >= torch.randint(3, (B, 1)){nobody}"
        "; ids, lens = torch.arange(L).expand(B, L) // 3, torch.tensor(3)"
        f"; kc, vc = torch.randn(2, B, 2, L, 4, dtype=D); at = torch.arange({keys}) + {first}"
        "; table = torch.ones(24, 24, dtype=torch.bool).tril()"
    )
    if not sketch.add("o = f(q, k, v, pad, ids, lens, kc, vc, at, table)"):
        return
    sketch.add("seen.append(o)")
    if gradients:
        sketch.add("o = o if isinstance(o, torch.Tensor) else o[0]")
        sketch.add("w = torch.randn(o.shape, dtype=D)")
        sketch.add("seen.append(torch.autograd.grad((o * w).sum(), [q, k, v], allow_unused=True))")


def is_exact(names: Names) -> bool:
    """Whether a setup computes in float64."""
    return bool(names["D"] == torch.float64)
