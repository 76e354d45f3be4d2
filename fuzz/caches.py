"""Part e: prompts, steps, beams, crops, resets and padding on KV caches.

A cache that keeps all it was told is held to `DynamicCache`, tightly. One that has coded tokens is
held to itself without a compiled step, tightly, and to `DynamicCache` within what its bits lose.
"""

from __future__ import annotations

from random import Random

import torch

from .program import Names
from .sketch import Sketch

TITLE = "caches"
REUSE = 12
IMPORTS = (
    "import transformers; from transformers import DynamicCache; from memeff_compile import KVCache"
)

_FAMILIES = ("Llama", "Llama", "Qwen2", "Mistral", "Gemma2")


def setup(random: Random) -> list[str]:
    """Draw a small model and how its steps are compiled."""
    family = random.choice(_FAMILIES)
    dtype = random.choice(("float64", "float32"))
    inner = random.choice(("eager", "eager", "aot_eager"))
    more = random.choice(("", ", attn_implementation='eager'"))
    return [
        f"torch.manual_seed({random.randrange(100)}); D = torch.{dtype}",
        "sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2,"
        " num_attention_heads=4, num_key_value_heads=2, head_dim=64, max_position_embeddings=512,"
        f" bos_token_id=1, eos_token_id=None, pad_token_id=0{more})",
        f"c = transformers.{family}Config(**sizes)",
        f"m = transformers.{family}ForCausalLM(c).eval().to(D).requires_grad_(False)",
        f"f = torch.compile(m, backend=memeff, options={{'memeff.inner': '{inner}'}})"
        " if ours else m",
    ]


def body(random: Random, sketch: Sketch) -> None:
    """Draw one conversation with a cache, or one generate()."""
    batch, prompt = random.choice((1, 2, 3)), random.choice((3, 9, 40, 70))
    bits = random.choice((16, 16, 8, 4, 3, 2))
    recent, group = random.choice(((128, 64), (16, 32), (32, 32), (16, 64)))
    keeps_all = bits == 16 or recent >= 128
    scheme = random.choice(("kivi", "kivi", "per_head"))
    cache = f"KVCache(m.config, 192, {bits}, scheme='{scheme}', recent={recent}, group={group}"
    sketch.add(f"torch.manual_seed({random.randrange(1000)})")
    sketch.add(f"x = torch.randint(2, 64, ({batch}, {prompt}))")
    if keeps_all and random.random() < 0.15:
        _generate(random, sketch, cache)
        return
    padded = prompt > 4 and random.random() < 0.3
    if padded:
        sketch.add(f"a = (torch.arange({prompt}) >= torch.randint(3, ({batch}, 1))).long()")
        cache += ", attention_mask=a"
    # What codes lose is the same for both where both have them: then the twin differs in the step.
    dense = "DynamicCache(config=m.config)" if keeps_all else f"{cache})"
    sketch.add(f"k = {cache}) if ours else {dense}")
    mask = "attention_mask=a, " if padded else ""
    keywords = f"{mask}past_key_values=k"
    sketch.add(f"seen.append(m(x, {keywords}).logits[:, -1])")
    for _ in range(random.randint(2, 8)):
        _turn(random, sketch, batch, padded, keywords, keeps_all)


def _turn(
    random: Random, sketch: Sketch, batch: int, padded: bool, keywords: str, keeps_all: bool
) -> None:
    choice = random.random()
    if choice < 0.12 and batch > 1 and not padded:
        order = [random.randrange(batch) for _ in range(batch)]
        sketch.add(f"k.reorder_cache(torch.tensor({order}))")
    elif choice < 0.2 and not padded and keeps_all:
        sketch.add("k.crop(-2)")
    elif choice < 0.25:
        sketch.add("seen.append(int(k.get_seq_length()))")
    else:
        tokens = random.choice((1, 1, 1, 1, 2, 5, 30))
        sketch.add(f"x = torch.randint(2, 64, ({batch}, {tokens}))")
        if padded:
            sketch.add(f"a = F.pad(a, (0, {tokens}), value=1)")
        sketch.add(f"seen.append(f(x, {keywords}).logits)")


def _generate(random: Random, sketch: Sketch, cache: str) -> None:
    beams = random.choice((1, 1, 2, 3))
    settings = f"max_new_tokens={random.choice((2, 9))}, do_sample=False, num_beams={beams}"
    sketch.add(f"k = {cache}) if ours else DynamicCache(config=m.config)")
    sketch.add(f"seen.append(f.generate(x, past_key_values=k, {settings}))")


def is_exact(names: Names) -> bool:
    """Whether a setup computes in float64."""
    return bool(names["D"] == torch.float64)
