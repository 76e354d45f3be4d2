"""Part e: prompts, steps, beams, crops, resets and padding on KV caches.

A cache that keeps all it was told is held to `DynamicCache`, tightly. One that has coded tokens is
held to itself without a compiled step, tightly, and to `DynamicCache` within what its bits lose.
A setup has one model and one kind of cache, whose compiled steps serve all of its conversations.
"""

from __future__ import annotations

from random import Random

import torch

from .program import Names
from .sketch import Sketch

TITLE = "caches"
REUSE = 400
IMPORTS = (
    "import transformers; from transformers import DynamicCache; from memeff_compile import KVCache"
)

_FAMILIES = ("Llama", "Llama", "Qwen2", "Mistral", "Gemma2")
_ROOM = 192
_STEPS = ((1, 2, 5), (1, 30), (1, 1, 1, 7), (1, 5, 30))
_LOST = {8: 0.05, 4: 0.5}
"""What codes may be off in the logits, relative to their norm; fewer bits lose too much to say."""


def setup(random: Random) -> list[str]:
    """Draw a small model, how its steps are compiled, and a kind of cache."""
    family = random.choice(_FAMILIES)
    dtype = random.choice(("float64", "float32"))
    inner = random.choice(("eager", "eager", "aot_eager"))
    more = random.choice(("", "", ", attn_implementation='eager'"))
    if family in ("Mistral", "Gemma2"):
        more += random.choice(("", ", sliding_window=8"))
    bits = random.choice((16, 16, 8, 8, 4, 3, 2))
    recent, group = random.choice(((128, 64), (16, 32), (32, 32), (16, 64), (16, 128)))
    keeps_all = bits == 16 or recent >= 128
    scheme = random.choice(("kivi", "kivi", "per_head"))
    cache = f"KVCache(m.config, {_ROOM}, {bits}, scheme='{scheme}', recent={recent}, group={group}"
    cache += random.choice(("", "", ", keep_first=0"))
    merges = bits < 16 and scheme == "kivi" and "sliding" not in more and random.random() < 0.15
    if merges:
        cache += ", merge=memeff_compile.MiniCache(start_layer=0, force=True)"
        keeps_all = False
    # What codes lose is the same for both where both have them: then the twin differs in the step.
    dense = "DynamicCache(config=m.config)" if keeps_all else f"{cache}, **more)"
    lost = 0.0 if keeps_all or merges else _LOST.get(bits, 0.0)
    generates = keeps_all and random.random() < 0.15
    compiled = "nn.Module.compile" if generates else "f = torch.compile"
    longest = _ROOM if bits == 16 or not keeps_all else recent
    return [
        f"torch.manual_seed({random.randrange(100)}); D = torch.{dtype}",
        "sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=32,"
        f" num_hidden_layers={2 if merges else random.choice((1, 1, 2))}, num_attention_heads=4,"
        f" num_key_value_heads=2, head_dim={random.choice((64, 64, 32, 128))},"
        f" max_position_embeddings=512, bos_token_id=1, eos_token_id=None, pad_token_id=0{more})",
        f"c = transformers.{family}Config(**sizes)",
        f"m = transformers.{family}ForCausalLM(c).eval().to(D).requires_grad_(False)",
        f"f, generates = m, {generates}",
        f"if ours: {compiled}(m, backend=memeff, options={{'memeff.inner': '{inner}'}})",
        f"new = lambda **more: {cache}, **more) if ours else {dense}",
        "again = lambda k, **more: (k.reset(**more), k)[1] if ours else new(**more)",
        f"B, longest, keeps_all, lost = {random.choice((1, 2, 3))}, {longest}, {keeps_all}, {lost}",
        f"is_padded, steps = {random.random() < 0.35}, {random.choice(_STEPS)}",
        "near = lambda y, e, x, **more: not ours or bool("
        "(m(x, past_key_values=e, **more).logits - y)[:, -1].norm() <= lost * y[:, -1].norm())",
    ]


def body(random: Random, sketch: Sketch) -> None:
    """Draw one conversation with a cache, or one generate()."""
    names = sketch.names
    sketch.add(f"torch.manual_seed({random.randrange(1000)})")
    if names["generates"]:
        _generate(random, sketch)
    else:
        _Conversation(random, sketch).draw()


class _Conversation:
    """A cache, and what it is told."""

    def __init__(self, random: Random, sketch: Sketch) -> None:
        self.random, self.sketch = random, sketch
        self.batch: int = sketch.names["B"]
        self.left = 0
        self.padded = False
        self.caches = ("k", "e") if sketch.names["lost"] else ("k",)

    def draw(self) -> None:
        """Draw it all."""
        self._begin("new({})")
        for _ in range(self.random.randint(2, 10)):
            self._turn()

    def _begin(self, made: str) -> None:
        """Draw a prompt, of a cache that is new or empty again."""
        random, sketch = self.random, self.sketch
        prompt = random.choice((1, 3, 9, 40, 70))
        self.left = sketch.names["longest"] - prompt
        sketch.add(f"x = torch.randint(2, 64, (B, {prompt}))")
        self.padded = prompt > 4 and sketch.names["is_padded"]
        if self.padded:
            sketch.add(f"a = (torch.arange({prompt}) >= torch.randint(3, (B, 1))).long()")
        sketch.add(f"k = {made.format('attention_mask=a' * self.padded)}")
        if "e" in self.caches:
            sketch.add("e = DynamicCache(config=m.config)")
        self._call("m", "[:, -1]")

    def _call(self, model: str, shown: str = "") -> None:
        mask = "attention_mask=a, " if self.padded else ""
        self.sketch.add(f"y = {model}(x, {mask}past_key_values=k).logits; seen.append(y{shown})")
        if "e" in self.caches:
            self.sketch.add(f"seen.append(near(y, e, x{', attention_mask=a' * self.padded}))")

    def _turn(self) -> None:
        random, sketch, batch = self.random, self.sketch, self.batch
        choice = random.random()
        if choice < 0.1 and batch > 1 and not self.padded:
            order = [random.randrange(batch) for _ in range(batch)]
            self._both(f"{{k}}.reorder_cache(torch.tensor({order}))")
        elif choice < 0.14 and not self.padded:
            order = [random.randrange(2 * batch) for _ in range(batch)]
            self._both(
                "{k}.batch_repeat_interleave(2); "
                f"{{k}}.batch_select_indices(torch.tensor({order}))"
            )
        elif choice < 0.22 and not self.padded:
            removed = random.choice((1, 2, 2, 5))
            if self._both(f"{{k}}.crop(-{removed})"):
                self.left += removed
        elif choice < 0.25:
            sketch.add("seen.append(int(k.get_seq_length()))")
        elif choice < 0.3:
            copies = "{k} = copy.deepcopy({k})", "{k} = pickle.loads(pickle.dumps({k}))"
            self._both(random.choice(copies))
        elif choice < 0.34:
            self._begin("again(k, {})")
        else:
            tokens = min(random.choice(sketch.names["steps"]), self.left)
            if tokens < 1:
                return
            self.left -= tokens
            sketch.add(f"x = torch.randint(2, 64, (B, {tokens}))")
            if self.padded:
                sketch.add(f"a = F.pad(a, (0, {tokens}), value=1)")
            self._call("f")

    def _both(self, line: str) -> bool:
        return all(self.sketch.add(line.format(k=name)) for name in self.caches)


def _generate(random: Random, sketch: Sketch) -> None:
    beams = random.choice((1, 1, 2, 3))
    settings = f"max_new_tokens={random.choice((2, 9))}, do_sample=False, num_beams={beams}"
    sketch.add(f"x = torch.randint(2, 64, (B, {random.choice((3, 9, 40))}))")
    sketch.add(f"seen.append(f.generate(x, past_key_values=new(), {settings}))")


def is_exact(names: Names) -> bool:
    """Whether a setup computes in float64."""
    return bool(names["D"] == torch.float64)
