"""MiniCache's ablations on a trained model: effects of merging layers on its answers, and the cost.

    python benchmarks/ablations/merging_ablation.py --part train
    python benchmarks/ablations/merging_ablation.py --part fidelity
    python benchmarks/ablations/merging_ablation.py --part memory
    python benchmarks/ablations/merging_ablation.py --part overhead
    python benchmarks/ablations/merging_ablation.py --part table

`train`: a Llama of 16 layers of width 512 on the text of `corpus.py`, for `--seconds`; with
`--one-projection` all layers share theirs of keys and of values, so that neighbours are alike.

`fidelity`: one row per setting: the configurations whose memory is published, by the default rule
and by `max_norm`; bits with and without merging, by both; the rule by the layer that merging starts
from, layer by layer; one pair of layers at a time; the share of rows kept; gamma; t; both readings
of the retention rule; both scales. Held-out text goes through the cache: a prompt, then pieces,
each of which attends to the cache's decoded tokens before it. Losses count from the first piece on.
Rows of named configurations also have the result of `fidelity_report`.

`memory`: bytes of caches of Llama-3-8B's shape (32 layers, 8 key-value heads of 128), allocated,
against bf16 keys and values; and those of Llama-2-7B's (32 heads).

`overhead`: microseconds of one layer pair's work at a decoding step in CUDA graphs, 32 query and 8
key-value heads of 128: both appends without and with a group to merge, attention of one layer that
is merged and of one that is not, and merging a prompt by component. Attention reads copies in turn,
so that its operands come from memory.

`--size tiny` runs everything on the CPU in seconds.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import functools
import itertools
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import memeff_compile
from benchmarks import GENERATED_8192, RESULTS, rows, timing
from benchmarks.models import small_training, training
from benchmarks.tiles import wide_product
from memeff_compile import KVCache
from memeff_compile import MiniCache as _MiniCache
from memeff_compile.kernels.coded_kv_cache import (
    CODED,
    LENGTH,
    OWN,
    PLAIN,
    Layout,
    alignment,
    append_pairs,
    coded_kv_cache_append_lower,
    coded_kv_cache_append_pair,
    coded_kv_cache_attention,
    dtype_of,
    identity,
    merging,
    pair_reference,
    pool_of,
    reference,
    shapes_of_maps,
    shapes_of_pair,
)
from memeff_compile.kernels.coded_kv_cache.layout import Maps, Own, Pair, Shared
from memeff_compile.kernels.kv_cache import kv_cache_attention

# The loss is the measured quantity, of rows merged as they are, as the paper merges them.
MiniCache = functools.partial(_MiniCache, align="none", force=True)

SHAPES = {
    "h200": {"llama-3-8b": (32, 32, 8, 128), "llama-2-7b": (32, 32, 32, 128)},
    "tiny": {"tiny": (4, 4, 2, 16)},
}
"""Layers, query heads, key-value heads, depth."""
NAMED: dict[str, dict[str, Any]] = {
    "4 bits": {"bits": 4},
    "3 bits": {"bits": 3},
    "2 bits": {"bits": 2},
    "merging alone, from a quarter on": {"bits": 16, "from": 0.25},
    "merging alone, from a quarter on, last layer apart": {"bits": 16, "from": 0.25, "apart": True},
    "merging alone, from half on": {"bits": 16, "from": 0.5},
    "4 bits, merging from a quarter on": {"bits": 4, "from": 0.25},
    "4 bits, merging from a quarter on, last layer apart": {"bits": 4, "from": 0.25, "apart": True},
    "4 bits, merging from half on": {"bits": 4, "from": 0.5},
    "4 bits, merging from half on, last layer apart": {"bits": 4, "from": 0.5, "apart": True},
    "4 bits, merging all layers": {"bits": 4, "from": 0.0},
    "4 bits, merging all layers, a twentieth kept": {"bits": 4, "from": 0.0, "retained": 0.05},
    "2 bits, merging from half on": {"bits": 2, "from": 0.5},
}
"""The configurations whose memory is published; each is run for its fidelity too. Models of 16 and
of 32 layers merge the same share of their layers."""


def cache_settings(named: dict[str, Any], layers: int, rule: str = "slerp") -> dict[str, Any]:
    """Return the settings of `KVCache` that a named configuration stands for."""
    if "from" not in named:
        return {"bits": named["bits"], "merge": None}
    start = int(layers * named["from"])
    if named.get("apart") and (layers - start) % 2 == 0:
        start -= 1  # as many pairs, a layer earlier
    merge = MiniCache(start_layer=start, retained=named.get("retained", 0.01), rule=rule)
    return {"bits": named["bits"], "merge": merge}


# --- the model ------------------------------------------------------------------------------------

RECIPES = {
    "h200": dataclasses.replace(
        training.RECIPES["full"],
        vocabulary=8192,
        layers=16,
        batch=8,
        length=2048,
        validation_batches=4,
    ),
    "tiny": dataclasses.replace(
        training.RECIPES["tiny"], length=128, batch=3, layers=4, warm_up=2, validation_batches=1
    ),
}
MEASURED_STEPS = 100
"""Steps after which it is known how many fit."""


def train(options: argparse.Namespace) -> None:
    """Train the model for some seconds, compiling aside, and save it."""
    if options.model.exists():
        print(f"{options.model} exists")
        return
    words = ["--vocabulary", str(RECIPES[options.size].vocabulary)]
    small_training.ensure_corpus(options.corpus, words)
    recipe, device = RECIPES[options.size], options.device
    text = training.Tokens(options.corpus, "python-train", recipe, device)
    held_out = training.Tokens(options.corpus, "python-validation", recipe, device)
    order = text.order(100 * MEASURED_STEPS, 0)
    model = training.build_model(recipe, device)
    attentions = [layer.self_attn for layer in model.model.layers]
    if options.one_projection:
        for layer in attentions:
            layer.k_proj, layer.v_proj = attentions[0].k_proj, attentions[0].v_proj
    small_training.compile_whole(model, "inductor", options.inner)
    curve: list[tuple[int, float]] = []

    def note(row: dict[str, Any]) -> None:
        curve.append((row["step"], row["validation"]))
        print(row, flush=True)

    loop = small_training.Loop(
        model, recipe, device, lambda step: text[order[step]], held_out, note
    )
    first = min(MEASURED_STEPS, recipe.steps // 2)
    loop.run(0, first)
    each = (loop.seconds - loop.first_step_s) / max(1, first - 1)
    fitting = first + int((options.seconds - each * first) / each)
    loop.recipe = dataclasses.replace(recipe, steps=max(first + 1, min(len(order), fitting)))
    loop.deadline = time.monotonic() + 1.15 * options.seconds
    try:
        loop.run(first, loop.recipe.steps)
    except training.OutOfTime as stop:
        print(stop, flush=True)
    for layer in attentions:  # a file has no two names for one tensor
        layer.k_proj, layer.v_proj = map(copy.deepcopy, (layer.k_proj, layer.v_proj))
    training.save(model, options.corpus, options.model)
    row = {"what": "merging: model", "projections": projections(options), "curve": curve}
    row |= {"recipe": dataclasses.asdict(loop.recipe)}
    row |= {"corpus": training.corpus_digest(options.corpus), "step_ms": round(1e3 * each, 2)}
    rows.write(options.out, row)


def projections(options: argparse.Namespace) -> str:
    """Return whose projections of keys and values the layers have."""
    return "one" if options.one_projection else "their own"


def load(options: argparse.Namespace) -> Any:
    """Return the trained model with PyTorch's attention; without one, a random model."""
    from transformers import LlamaConfig, LlamaForCausalLM

    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    if options.size == "tiny" and not options.model.exists():
        layers, heads, kv_heads, depth = SHAPES["tiny"]["tiny"]
        config = LlamaConfig(
            vocab_size=64,
            hidden_size=heads * depth,
            intermediate_size=32,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
        )
        return LlamaForCausalLM(config).eval()
    model = LlamaForCausalLM.from_pretrained(options.model, dtype=dtype, attn_implementation="sdpa")
    return model.to(options.device).eval()


# --- fidelity -------------------------------------------------------------------------------------


def texts(options: argparse.Namespace, vocabulary: int) -> dict[str, Tensor]:
    """Return rows of validation text, or random tokens without one."""
    shape = (options.sequences, options.length)
    if not (options.corpus / "corpus.json").exists():
        draw = torch.Generator().manual_seed(0)
        return {name: torch.randint(0, vocabulary, shape, generator=draw) for name in TEXTS}
    recipe = dataclasses.replace(RECIPES[options.size], length=options.length, batch=1)
    found = {}
    for name in TEXTS:
        held = training.Tokens(options.corpus, f"{name}-validation", recipe, options.device)
        found[name] = held[: options.sequences]
    return found


TEXTS = ("python", "other")
"""Texts like the model's training text, and unlike it; the latter for named settings and bits."""


def trials(layers: int) -> list[tuple[str, str, dict[str, Any]]]:
    """Return study, setting and arguments of `KVCache`, the most telling first."""
    found: list[tuple[str, str, dict[str, Any]]] = [
        ("named", name, cache_settings(named, layers)) for name, named in NAMED.items()
    ]
    found += [
        ("named, max_norm", name, cache_settings(named, layers, "max_norm"))
        for name, named in NAMED.items()
        if "from" in named
    ]
    half = layers // 2
    for start, bits in itertools.product((None, half, layers // 4), (16, 8, 4, 3, 2)):
        merge = None if start is None else MiniCache(start_layer=start)
        shown = "apart" if start is None else f"merged from layer {start} on"
        found.append(("bits", f"{bits} bits, {shown}", {"bits": bits, "merge": merge}))
    for start, bits in itertools.product((half, layers // 4), (16, 8, 4, 3, 2)):
        merge = MiniCache(start_layer=start, rule="max_norm")
        shown = f"{bits} bits, merged from layer {start} on"
        found.append(("bits, max_norm", shown, {"bits": bits, "merge": merge}))
    for rule, start in itertools.product(merging.RULES, range(layers - 1)):
        merge = MiniCache(start_layer=start, rule=rule)
        found.append(("rule by start", f"{rule}, {start}", {"bits": 16, "merge": merge}))
    for lower in range(layers - 1):
        merge = MiniCache(start_layer=lower, end_layer=lower + 2)
        found.append(("one pair", f"{lower}, {lower + 1}", {"bits": 16, "merge": merge}))
    for share in (0.0, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.2, 1.0):
        merge = MiniCache(start_layer=half, gamma=1.0, retained=share)
        found.append(("share kept", str(share), {"bits": 16, "merge": merge}))
    for gamma in (0.0, 0.01, 0.05, 0.1, 0.2, 0.5, 1.0):
        merge = MiniCache(start_layer=half, gamma=gamma, retained=1.0)
        found.append(("gamma", str(gamma), {"bits": 16, "merge": merge}))
    for t in (0.0, 0.3, 0.4, 0.5, 0.6, 0.7, 1.0):
        found.append(("t", str(t), {"bits": 16, "merge": MiniCache(start_layer=half, t=t)}))
    for reading in merging.READINGS:
        merge = MiniCache(start_layer=half, reading=reading, gamma=0.2, retained=0.1)
        found.append(("reading", reading, {"bits": 16, "merge": merge}))
    for scale in merging.SCALES:
        merge = MiniCache(start_layer=half, scale=scale)
        found.append(("scale", scale, {"bits": 4, "merge": merge}))
    return found


class Answers:
    """A model's answers to given text, from caches of any setting, compared with an exact one."""

    def __init__(self, model: Any, options: argparse.Namespace) -> None:
        self.model, self.options = model, options
        self.exact: dict[str, tuple[float, Tensor]] = {}

    @torch.no_grad()
    def ask(self, ids: Tensor, cache: Any) -> tuple[float, Tensor]:
        """Return the mean loss of the tokens after the prompt, and the likeliest tokens."""
        given = self.options
        pieces = [ids[:, : given.prompt], *ids[:, given.prompt :].split(given.piece, 1)]
        losses, likeliest = [], []
        for number, part in enumerate(pieces):
            out = self.model.model(input_ids=part, past_key_values=cache, use_cache=True)
            if number == 0:
                continue
            at = given.prompt + (number - 1) * given.piece
            targets = ids[:, at + 1 : at + 1 + part.shape[1]]
            hidden = out.last_hidden_state[:, : targets.shape[1]].flatten(0, 1)
            logits = wide_product(hidden, self.model.lm_head.weight)
            losses.append(F.cross_entropy(logits, targets.flatten(), reduction="none"))
            likeliest.append(logits.argmax(-1))
        return float(torch.cat(losses).double().mean()), torch.cat(likeliest)

    def compare(self, name: str, ids: Tensor, settings: dict[str, Any]) -> dict[str, Any]:
        """Return perplexity and agreement with the exact cache, and the cache's size."""
        if name not in self.exact:
            self.exact[name] = self.ask(ids, self.cache({"bits": 16, "merge": None}))
        cache = self.cache(settings)
        loss, likeliest = self.ask(ids, cache)
        exact, wanted = self.exact[name]
        merged = cache.merged()
        return {
            "perplexity": math.exp(loss),
            "perplexity_exact": math.exp(exact),
            "same": float((likeliest == wanted).float().mean()),
            "kept": sum(line["kept"] for line in merged) / max(1, len(merged)),
            "left_over": sum(line["left_over"] for line in merged) / max(1, len(merged)),
        }

    def cache(self, settings: dict[str, Any]) -> Any:
        """Return an empty cache."""
        given = self.options
        shape = {"recent": given.recent, "group": given.group}
        return KVCache(self.model.config, given.length, **settings, **shape)

    def report(self, ids: Tensor, settings: dict[str, Any]) -> Any:
        """Return the `fidelity_report` of the first sequences."""
        given = self.options
        shape = {"steps": given.piece, "recent": given.recent, "group": given.group}
        return memeff_compile.fidelity_report(self.model, ids[:8], **settings, **shape)


def fidelity(options: argparse.Namespace) -> None:
    """Measure every setting's effect on the model's answers."""
    started = time.perf_counter()
    model = load(options)
    config = model.config
    given = {name: getattr(options, name) for name in ("length", "prompt", "piece", "recent")}
    facts = {"layers": config.num_hidden_layers, "hidden": config.hidden_size}
    facts |= {"heads": config.num_attention_heads, "kv_heads": config.num_key_value_heads}
    facts |= {"sequences": options.sequences, **given, "group": options.group}
    facts |= {"projections": projections(options)}
    held = {name: ids.to(model.device) for name, ids in texts(options, config.vocab_size).items()}
    answers = Answers(model, options)
    for study, name, settings in trials(config.num_hidden_layers):
        if options.study and study not in options.study:
            continue
        if time.perf_counter() - started > options.budget:
            print(f"left out for lack of time: {study} {name}", flush=True)
            continue
        row = {"what": "merging: fidelity", "study": study, "setting": name, **facts}
        is_named = study.startswith("named")
        asked = TEXTS if is_named or study.startswith("bits") else TEXTS[:1]
        row["text"] = {text: answers.compare(text, held[text], settings) for text in asked}
        if is_named:
            report = answers.report(held["python"], settings)
            row |= said(report)
            if name == "4 bits" and options.plot:
                report.plot(options.plot)
        rows.write(options.out, row)


def said(report: Any) -> dict[str, Any]:
    """Return a row's fields from a fidelity report."""
    row = {name: report.logits[name] for name in ("kl", "kl_worst", "agreement")}
    row["attention_cosine"] = [round(line["mean"], 5) for line in report.attention]
    row["attention_worst"] = min(line["worst"] for line in report.attention)
    row["ratio_here"] = report.memory["ratio"]
    if report.settings["merge"] is None:
        row["cosines"] = [
            [pair["layers"][0], *(round(pair[kind]["mean"], 4) for kind in ("keys", "values"))]
            for pair in report.pairs
        ]
    return row


def table(options: argparse.Namespace) -> None:
    """Print the rows of `fidelity` as Markdown, a table per study."""
    found = [row for row in rows.read(options.out) if row["what"] == "merging: fidelity"]
    found = [row for row in found if row.get("projections", "their own") == projections(options)]
    studies = dict.fromkeys(row["study"] for row in found)
    for study in studies:
        print(f"\n{study}\n\n| setting | perplexity | | other text | | same token | kept |")
        print("|---|---:|---:|---:|---:|---:|---:|")
        for row in {r["setting"]: r for r in found if r["study"] == study}.values():
            cells = [row["setting"]]
            for name in TEXTS:
                text = row["text"].get(name)
                change = text and text["perplexity"] / text["perplexity_exact"] - 1
                cells += [f"{text['perplexity']:.3f}", f"{change:+.1%}"] if text else ["", ""]
            first = row["text"][TEXTS[0]]
            cells += [f"{first['same']:.1%}", f"{first['kept']:.1f}"]
            print(f"| {' | '.join(cells)} |")


# --- memory ---------------------------------------------------------------------------------------


def memory(options: argparse.Namespace) -> None:
    """Allocate named caches of a model's shape, and say how much smaller than bf16 they are."""
    from transformers import LlamaConfig

    for shape, (layers, heads, kv_heads, depth) in SHAPES[options.size].items():
        config = LlamaConfig(
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            hidden_size=heads * depth,
        )
        tokens = options.cache_tokens
        before = 4 * layers * kv_heads * depth * tokens
        for name, named in NAMED.items():
            cache = KVCache(config, tokens, **cache_settings(named, layers))
            like = torch.empty(1, kv_heads, 0, depth, dtype=torch.bfloat16, device=options.device)
            used = allocated(options.device)
            for layer in cache.layers:
                layer.lazy_initialization(like, like)
            used = allocated(options.device) - used
            row = {"what": "merging: memory", "shape": shape, "setting": name, "tokens": tokens}
            row |= {"bytes": cache.nbytes, "before": before, "ratio": before / cache.nbytes}
            if options.device == "cuda":
                row["allocated"] = used
            rows.write(options.out, row)
            del cache, layer


def allocated(device: str) -> int:
    """Return the bytes in use on a GPU, 0 elsewhere."""
    return torch.cuda.memory_allocated() if device == "cuda" else 0


# --- overhead -------------------------------------------------------------------------------------


def pair_of(bits: int, batch: int, tokens: int, shape: tuple[int, ...], device: str) -> Any:
    """Return the tensors of a pair with random contents, and its layout."""
    _, _, heads, depth = shape
    group, recent = (64, 128) if depth > 16 else (32, 32)
    room = 4 + MiniCache().capacity(tokens)
    layout = Layout(depth, bits, group=group, recent=recent, kept=room)
    shared_shapes, own_shapes = shapes_of_pair(layout, batch, heads, tokens)

    def make(shapes: dict[str, tuple[int, ...]]) -> list[Tensor]:
        found = []
        for name, size in shapes.items():
            kind = dtype_of(name, torch.bfloat16, bits)
            tensor = torch.zeros(size, dtype=kind, device=device)
            if name.endswith("codes") and kind == torch.uint8:
                tensor.random_(0, 256)
            elif name.endswith(("codes", "window", "kept")):
                tensor.normal_()
            elif name.endswith("scales"):
                tensor.uniform_(0.01, 0.02)
            elif name.endswith("norms"):
                tensor.uniform_(0.5, 1.5)
            found.append(tensor)
        return found

    shared, lower, upper = make(shared_shapes), make(own_shapes), make(own_shapes)
    order = torch.linspace(0, max(0, tokens - recent - group - 1), room, device=device).long()
    shared[4].copy_(order.int())
    shared[6].fill_(0.4)
    for own in (lower, upper):
        own[5][:, :, order.clamp_max(own[5].shape[2] - 1), 0] = -1.0
    return layout, shared, lower, upper


def maps_for(layout: Layout, batch: int, heads: int, device: str) -> list[Tensor]:
    """Return the maps of aligned layers, without a rotation: their contents cost no time."""
    shapes = shapes_of_maps(layout, batch, heads)
    maps = [
        torch.zeros(size, dtype=dtype_of(name, torch.bfloat16, layout.bits), device=device)
        for name, size in shapes.items()
    ]
    identity(maps)
    return maps


def set_counts(layout: Layout, own: list[Tensor], tokens: int, coded: int) -> None:
    """Say how many tokens there are, and how many of them are merged."""
    counts = own[OWN.index("counts")]
    counts.copy_(counts_of(tokens, coded, str(counts.device)))


@functools.lru_cache(maxsize=64)
def counts_of(tokens: int, coded: int, device: str) -> Tensor:
    """Return counts as a cache has them."""
    found = torch.zeros(3, dtype=torch.int64, device=device)
    found[LENGTH], found[CODED] = tokens, coded
    return found


def timed(function: Any, device: str, repeats: int, *, in_graph: bool = True) -> dict[str, float]:
    """Return percentiles of microseconds of calls, in a CUDA graph if that is asked for."""
    for _ in range(2):
        function()
    if device != "cuda":
        return rows.percentiles([1e3 * timing.milliseconds(function, device=device) for _ in "12"])
    repeated = timing.Repeated([function] * 20) if in_graph else None
    run = function if repeated is None else repeated.run
    samples = []
    for _ in range(repeats):
        run()
        samples.append(1e3 * timing.milliseconds(run) / (20 if in_graph else 1))
    return rows.percentiles(samples)


def overhead(options: argparse.Namespace) -> None:
    """Time the parts of a decoding step of one pair of layers, then those of a prompt."""
    shape = next(iter(SHAPES[options.size].values()))
    for (batch, tokens), bits in itertools.product(options.cases, options.bits):
        one_step(batch, tokens, bits, shape, options)
    components(options, shape)


def one_step(
    batch: int, tokens: int, bits: int, shape: tuple[int, ...], options: argparse.Namespace
) -> None:
    """Time both appends and one layer's attention."""
    _, heads, kv_heads, depth = shape
    copies = [pair_of(bits, batch, tokens, shape, options.device)]
    layout, shared, lower, upper = copies[0]
    while options.device == "cuda" and len(copies) * bytes_read(shared) < COLD:
        copies.append(pair_of(bits, batch, tokens, shape, options.device))
    like = {"device": options.device, "dtype": torch.bfloat16}
    q = torch.randn(batch, heads, 1, depth, **like)
    k = torch.randn(batch, kv_heads, 1, depth, **like)
    coded = layout.groups(tokens - 1) * layout.group - layout.group
    due = layout.window - 1

    def lower_step(behind: int) -> None:
        set_counts(layout, lower, coded + behind, coded)
        coded_kv_cache_append_lower(lower[0], lower[1], lower[4], k, k, tokens)

    def counts_alone(behind: int) -> None:
        set_counts(layout, upper, coded + behind, coded)
        set_counts(layout, lower, coded + behind + 1, coded)

    maps = maps_for(layout, batch, kv_heads, options.device)

    def pair_step(behind: int, *maps: Tensor) -> None:
        counts_alone(behind)
        settings = (4, "slerp", 0.5, 0.05, "distinct", "norm", False)
        new = (None, None, k, k, bits, layout.recent, tokens)
        coded_kv_cache_append_pair(*shared, *lower, *upper, *new, *settings, *maps)

    merged = itertools.cycle(copies)

    def read(*maps: Tensor) -> Tensor:
        _, shared, _, upper = next(merged)
        pool, norms = pool_of(shared, upper), upper[5].unbind(-1)
        return coded_kv_cache_attention(q, *pool, *norms, bits, None, None, *maps)

    for _, _, *layers in copies:
        for own in layers:
            set_counts(layout, own, coded + due, coded)
    apart = itertools.cycle([reader_apart(copy, q, coded, due) for copy in copies])
    parts = {
        "attention of one layer": read,
        "attention of an aligned layer, lower": lambda: read(*maps[:1]),
        "attention of an aligned layer, upper": lambda: read(*maps[1:]),
        "attention of a layer that is apart": lambda: next(apart)(),
        "append, lower (with counts set)": lambda: lower_step(3),
        "append, nothing due (with counts set)": lambda: pair_step(3),
        "append, a group merged (with counts set)": lambda: pair_step(due),
        "append, nothing due, aligned (with counts set)": lambda: pair_step(3, *maps),
        "append, a group merged, aligned (with counts set)": lambda: pair_step(due, *maps),
        "counts set": lambda: counts_alone(3),
    }
    facts = {"batch": batch, "tokens": tokens, "bits": bits, "kept": layout.kept}
    for name, function in parts.items():
        found = timed(function, options.device, options.repeats)
        rows.write(options.out, {"what": "merging: step", "part": name, **facts, "us": found})


COLD = 400e6
"""Bytes to read in turn so that no copy is still in the GPU's cache."""


def bytes_read(shared: list[Tensor]) -> int:
    """Return the bytes that attention of one layer reads of the shared tensors."""
    return sum(tensor.nbytes for tensor in shared[:4])


def reader_apart(copy: Any, q: Tensor, coded: int, due: int) -> Callable[[], Tensor]:
    """Return attention over the same numbers as a layer that is not merged has them."""
    layout, shared, _, upper = copy
    if layout.bits == PLAIN:
        k, v = (x.view(*x.shape[:2], -1, layout.depth) for x in shared[:2])
        last = torch.full((1, 1), coded + due - 1, dtype=torch.int64, device=q.device)
        k, v = (
            x[:, :, : coded + due].contiguous() if x.device.type == "cpu" else x for x in (k, v)
        )
        return lambda: kv_cache_attention(q, k, v, last, None, None)
    pool = pool_of(shared, upper)
    kept = [tensor[:, :, :4].contiguous() for tensor in (pool[6], pool[7], pool[8])]
    pool[6:9] = kept
    return lambda: coded_kv_cache_attention(q, *pool, None, None, layout.bits, None, None)


def components(options: argparse.Namespace, shape: tuple[int, ...]) -> None:
    """Time merging a prompt of one pair of layers: by component, and as it is done."""
    _, heads, kv_heads, depth = shape
    batch, tokens = options.cases[-1] if options.prompt_tokens > 4096 else options.cases[0]
    tokens = min(tokens, options.prompt_tokens)
    facts = {"batch": batch, "tokens": tokens, "bits": 4}
    layout, shared, lower, upper = pair_of(4, batch, tokens + 256, shape, options.device)
    group = layout.group
    draw = torch.randn(4, batch, kv_heads, tokens, depth, device=options.device).bfloat16()
    like = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in draw]  # as models have them
    below, above = like[0], like[2]
    settings = pair_reference.Merging()
    u, v = (merging.direction_and_length(each)[0] for each in (below, above))
    apart = merging.distance(u, v)
    behind = torch.arange(tokens, device=options.device).expand_as(apart)
    e = merging.shared_direction(below, above).unflatten(2, (-1, group))
    coded = reference.encode(e, 4, "kivi", is_value=True, dtype=torch.bfloat16)
    decoded = reference.decode(*coded, 4, depth, is_value=True)
    q = torch.randn(batch, heads, tokens, depth, device=options.device).bfloat16()
    pair = Pair(Shared(*shared), Own(*lower), Own(*upper))
    whole = (pair, like, 0, group, 4, settings)

    def choose() -> Tensor:
        pair.shared.kept_count.zero_()
        return pair_reference.keep(pair.shared, apart, behind, settings)

    parts: dict[str, Any] = {
        "magnitude, plain PyTorch": lambda: merging.direction_and_length(below),
        "direction, plain PyTorch": lambda: merging.shared_direction(below, above),
        "distance, plain PyTorch": lambda: merging.distance(u, v),
        "codes, plain PyTorch": lambda: reference.encode(
            e, 4, "kivi", is_value=True, dtype=torch.bfloat16
        ),
        "lengths, plain PyTorch": lambda: merging.folded_length(below, decoded),
        "all, plain PyTorch": lambda: pair_reference.merge(*whole),
        "choice of rows": choose,
        "replacement: rows that are kept": lambda: pair_reference.keep_rows(pair, like, 0),
        "attention of the prompt, one layer": lambda: F.scaled_dot_product_attention(
            q, below, like[1], is_causal=True, enable_gqa=True
        ),
    }
    if options.device == "cuda":
        keys, values = (like[0], like[2]), (like[1], like[3])
        is_kept = choose()
        parts |= {
            "magnitude and distance, kernel": lambda: append_pairs.measure_prompt(
                keys, values, group
            ),
            "direction, codes and lengths, kernels": lambda: [
                append_pairs.code_prompt(pair, some, is_kept, group, 4, settings, place)
                for place, some in enumerate((keys, values))
            ],
            "all, kernels": lambda: append_pairs.merge_prompt(*whole),
        }
    maps = Maps(*maps_for(layout, batch, kv_heads, options.device))
    whole = (pair._replace(maps=maps), *whole[1:])
    counted = torch.ones(batch, tokens, dtype=torch.bool, device=options.device)
    parts["maps fitted"] = lambda: alignment.fit(maps, like, counted)
    if options.device == "cuda":
        parts["all, kernels, aligned"] = lambda: append_pairs.merge_prompt(*whole)
    for name, function in parts.items():
        found = timed(function, options.device, options.repeats, in_graph=False)
        row = {"what": "merging: prompt", "part": name, **facts, "us": found}
        rows.write(options.out, row)


def main() -> None:
    """Run one part."""
    parts = {each.__name__: each for each in (train, fidelity, memory, overhead, table)}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=parts, required=True)
    parser.add_argument("--size", choices=["h200", "tiny"], default="h200")
    parser.add_argument("--model", type=Path, default=GENERATED_8192 / "merging_model")
    parser.add_argument("--corpus", type=Path, default=GENERATED_8192, help="folder of text")
    parser.add_argument("--seconds", type=float, default=90.0, help="of `train`, compiling aside")
    parser.add_argument("--inner", default="inductor", help="none: `train` does not compile")
    parser.add_argument("--one-projection", action="store_true", help="a model of like layers")
    parser.add_argument("--study", nargs="*", default=[])
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--piece", type=int, default=64)
    parser.add_argument("--recent", type=int, default=64)
    parser.add_argument("--group", type=int, default=64)
    parser.add_argument("--cache-tokens", type=int, default=32768)
    parser.add_argument("--budget", type=float, default=150.0, help="seconds of `fidelity`")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--prompt-tokens", type=int, default=4096, help="of `overhead`'s prompt")
    parser.add_argument("--bits", type=int, nargs="+", default=[4, PLAIN], help="of `overhead`")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.one_projection and options.model == parser.get_default("model"):
        options.model = options.model.with_name("merging_model_alike")
    options.device = "cuda" if torch.cuda.is_available() and options.size != "tiny" else "cpu"
    if options.size == "tiny":
        options.sequences, options.length, options.prompt, options.piece = 2, 128, 64, 16
        options.recent, options.group, options.cache_tokens = 16, 32, 256
    options.cases = [(2, 256)] if options.size == "tiny" else [(16, 32768), (1, 32768)]
    where = "nvidia-h200" if options.device == "cuda" else "cpu"
    options.out = options.out or RESULTS / where / "merging.jsonl"
    torch.manual_seed(0)
    parts[options.part](options)


if __name__ == "__main__":
    main()
