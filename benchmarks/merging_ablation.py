"""MiniCache's ablations on a trained model: what merging layers does to its answers, and its cost.

    python benchmarks/convergence.py model --to benchmarks/data/small_model
    python benchmarks/merging_ablation.py --part fidelity --model benchmarks/data/small_model
    python benchmarks/merging_ablation.py --part memory
    python benchmarks/merging_ablation.py --part overhead

`fidelity`: memeff_compile.fidelity_report on validation text of the corpus, one row per setting:
bits without merging; the rule by the layer that merging starts from, layer by layer; t; gamma and
room; both readings of the retention rule; the configurations whose memory is published. The loss is
of given tokens, predicted from the cache.

`memory`: bytes of caches of Llama-3-8B's shape (32 layers, 8 key-value heads of 128), allocated,
against bf16 keys and values; and those of Llama-2-7B's (32 heads).

`overhead`: microseconds of one layer pair's work at a decoding step in CUDA graphs, 32 query and 8
key-value heads of 128: both appends where nothing is due and where a group is merged, attention of
one layer over merged and over plain codes, and merging a prompt by component.

`--size tiny` runs everything on the CPU in seconds.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent))
import rows

import memeff_compile
from memeff_compile import KVCache, MiniCache
from memeff_compile.kernels.coded_kv_cache import (
    CODED,
    LENGTH,
    OWN,
    PLAIN,
    Layout,
    coded_kv_cache_append_lower,
    coded_kv_cache_append_pair,
    coded_kv_cache_attention,
    dtype_of,
    merging,
    pool_of,
    reference,
    shapes_of_pair,
)

HERE = Path(__file__).resolve().parent
SHAPES = {
    "h200": {"llama-3-8b": (32, 32, 8, 128), "llama-2-7b": (32, 32, 32, 128)},
    "tiny": {"tiny": (4, 4, 2, 16)},
}
"""Layers, query heads, key-value heads, depth."""
NAMED: dict[str, dict[str, Any]] = {
    "4 bits": {"bits": 4},
    "merging alone, from a quarter on": {"bits": 16, "from": 0.25, "retained": 0.01},
    "merging alone, from half on": {"bits": 16, "from": 0.5, "retained": 0.01},
    "4 bits, merging from a quarter on": {"bits": 4, "from": 0.25, "retained": 0.01},
    "4 bits, merging from half on": {"bits": 4, "from": 0.5, "retained": 0.01},
    "4 bits, merging all layers": {"bits": 4, "from": 0.0, "retained": 0.01},
    "4 bits, merging all layers, a twentieth kept": {"bits": 4, "from": 0.0, "retained": 0.05},
    "2 bits": {"bits": 2},
    "2 bits, merging from half on": {"bits": 2, "from": 0.5, "retained": 0.01},
}
"""The configurations whose memory is published; each is run for its fidelity too."""


def cache_settings(named: dict[str, Any], layers: int) -> dict[str, Any]:
    """Return the settings of `KVCache` that a named configuration stands for."""
    if "from" not in named:
        return {"bits": named["bits"], "merge": None}
    merge = MiniCache(start_layer=int(layers * named["from"]), retained=named["retained"])
    return {"bits": named["bits"], "merge": merge}


# --- fidelity -------------------------------------------------------------------------------------


def text(options: argparse.Namespace, vocabulary: int) -> Tensor:
    """Return rows of validation text, or random tokens for the smallest size."""
    shape = (options.sequences, options.length)
    if options.size == "tiny":
        return torch.randint(0, vocabulary, shape, generator=torch.Generator().manual_seed(0))
    import numpy

    flat = numpy.fromfile(options.corpus / "python-validation.u16", dtype=numpy.uint16)
    needed = shape[0] * shape[1]
    step = max(1, (len(flat) - needed) // shape[0])
    picked = [flat[at * step : at * step + shape[1]] for at in range(shape[0])]
    return torch.from_numpy(numpy.stack(picked).astype(numpy.int64))


def load(options: argparse.Namespace) -> Any:
    """Return the trained model, or a random one for the smallest size."""
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    if options.size == "tiny":
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
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16)
    return model.to(options.device).eval()


def trials(layers: int) -> list[tuple[str, str, dict[str, Any]]]:
    """Return study, setting and arguments of `fidelity_report`, the most telling first."""
    found: list[tuple[str, str, dict[str, Any]]] = [
        ("named", name, cache_settings(named, layers)) for name, named in NAMED.items()
    ]
    found += [("bits", str(bits), {"bits": bits, "merge": None}) for bits in (16, 8, 3)]
    for start, rule in itertools.product(range(layers - 1), merging.RULES):
        merge = MiniCache(start_layer=start, rule=rule, retained=0.01)
        found.append(("rule by start", f"{rule}, {start}", {"bits": 16, "merge": merge}))
    half = layers // 2
    for share in (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0):
        merge = MiniCache(start_layer=half, gamma=1.0, retained=share)
        found.append(("share kept", str(share), {"bits": 16, "merge": merge}))
    for gamma in (0.0, 0.01, 0.05, 0.1, 0.2, 0.5, 1.0):
        merge = MiniCache(start_layer=half, gamma=gamma, retained=1.0)
        found.append(("gamma", str(gamma), {"bits": 16, "merge": merge}))
    for t in (0.3, 0.4, 0.5, 0.6, 0.7):
        found.append(("t", str(t), {"bits": 16, "merge": MiniCache(start_layer=half, t=t)}))
    for reading in merging.READINGS:
        merge = MiniCache(start_layer=half, reading=reading, gamma=0.2, retained=0.1)
        found.append(("reading", reading, {"bits": 16, "merge": merge}))
    for scale in merging.SCALES:
        merge = MiniCache(start_layer=half, scale=scale)
        found.append(("scale", scale, {"bits": 4, "merge": merge}))
    return found


def fidelity(options: argparse.Namespace) -> None:
    """Measure what every setting does to the model's answers."""
    started = time.perf_counter()
    model = load(options)
    layers = model.config.num_hidden_layers
    ids = text(options, model.config.vocab_size).to(model.device)
    batches = list(ids.split(options.batch))
    given = {"steps": options.steps, "recent": options.recent, "group": options.group}
    facts = {
        "layers": layers,
        "hidden": model.config.hidden_size,
        "heads": model.config.num_attention_heads,
        "kv_heads": model.config.num_key_value_heads,
        "tokens": options.length,
        "sequences": len(ids),
    }
    for study, name, settings in trials(layers):
        if options.study and study not in options.study:
            continue
        if time.perf_counter() - started > options.budget:
            print(f"left out for lack of time: {study} {name}", flush=True)
            continue
        try:
            report = memeff_compile.fidelity_report(model, batches, **settings, **given)
        except memeff_compile.errors.UnsupportedInputError as error:
            print(f"{study} {name}: {error}", flush=True)
            continue
        row = {"what": "merging: fidelity", "study": study, "setting": name, **facts, **given}
        row |= {"perplexity": 2.718281828459045 ** report.logits["loss"]}
        row |= {"perplexity_exact": 2.718281828459045 ** report.logits["loss_exact"]}
        row |= {name: report.logits[name] for name in ("kl", "kl_worst", "agreement")}
        if report.attention:
            worst = [line["worst"] for line in report.attention]
            row["attention_cosine"] = [round(line["mean"], 5) for line in report.attention]
            row["attention_worst"] = min(worst)
        row["kept"] = sum(line["kept"] for line in report.merged) / max(1, len(report.merged))
        row["ratio_here"] = report.memory["ratio"]
        if study == "named" and name == "4 bits":
            row["cosines"] = [
                [pair["layers"][0], *(round(pair[kind]["mean"], 4) for kind in ("keys", "values"))]
                for pair in report.pairs
            ]
            if options.plot:
                report.plot(options.plot)
        rows.write(options.out, row)


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


def timed(function: Any, device: str, repeats: int) -> dict[str, float]:
    """Return percentiles of microseconds of calls in a CUDA graph, or as they are on a CPU."""
    for _ in range(2):
        function()
    samples = []
    if device != "cuda":
        for _ in range(2):
            start = time.perf_counter()
            function()
            samples.append((time.perf_counter() - start) * 1e6)
        return rows.percentiles(samples)
    inside = 20
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for _ in range(inside):
            function()
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(start.elapsed_time(end) * 1e3 / inside)
    return rows.percentiles(samples)


def overhead(options: argparse.Namespace) -> None:
    """Time the parts of a decoding step of one pair of layers, then those of a prompt."""
    shape = next(iter(SHAPES[options.size].values()))
    for (batch, tokens), bits in itertools.product(options.cases, (4, PLAIN)):
        one_step(batch, tokens, bits, shape, options)
    components(options, shape)


def one_step(
    batch: int, tokens: int, bits: int, shape: tuple[int, ...], options: argparse.Namespace
) -> None:
    """Time both appends and one layer's attention."""
    _, heads, kv_heads, depth = shape
    layout, shared, lower, upper = pair_of(bits, batch, tokens, shape, options.device)
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

    def pair_step(behind: int) -> None:
        counts_alone(behind)
        settings = (4, "slerp", 0.5, 0.05, "distinct", "norm", False)
        new = (None, None, k, k, bits, layout.recent, tokens)
        coded_kv_cache_append_pair(*shared, *lower, *upper, *new, *settings)

    def read(*, has_lengths: bool = True) -> Tensor:
        pool = pool_of(shared, upper)
        norms = upper[5].unbind(-1) if has_lengths else (None, None)
        return coded_kv_cache_attention(q, *pool, *norms, bits, None, None)

    set_counts(layout, upper, coded + due, coded)
    set_counts(layout, lower, coded + due, coded)
    parts = {
        "attention of one layer": read,
        "attention without lengths": lambda: read(has_lengths=False),
        "append, lower (with counts set)": lambda: lower_step(3),
        "append, nothing due (with counts set)": lambda: pair_step(3),
        "append, a group merged (with counts set)": lambda: pair_step(due),
        "counts set": lambda: counts_alone(3),
    }
    facts = {"batch": batch, "tokens": tokens, "bits": bits, "kept": layout.kept}
    for name, function in parts.items():
        found = timed(function, options.device, options.repeats)
        rows.write(options.out, {"what": "merging: step", "part": name, **facts, "us": found})


def components(options: argparse.Namespace, shape: tuple[int, ...]) -> None:
    """Time what merging a prompt is made of, in plain PyTorch, for keys of one pair of layers."""
    _, heads, kv_heads, depth = shape
    batch, tokens = options.cases[0]
    tokens = min(tokens, 4096)
    draw = torch.randn(2, batch, kv_heads, tokens, depth, device=options.device).bfloat16()
    x, y = draw.unbind(0)
    u, v = (merging.direction_and_length(each)[0] for each in (x, y))
    apart = merging.distance(u, v)
    counted = torch.ones_like(apart, dtype=torch.bool)
    bound = merging.threshold(apart, counted, gamma=0.05, reading="distinct")
    room = torch.full_like(apart[..., 0], MiniCache().capacity(tokens), dtype=torch.int32)
    e = merging.shared_direction(x, y)
    grouped = e.unflatten(2, (-1, 64 if tokens >= 64 else tokens))
    codes = reference.encode(grouped, 4, "kivi", is_value=True, dtype=torch.bfloat16)
    q = torch.randn(batch, heads, 1, depth, device=options.device).bfloat16()
    parts: dict[str, Any] = {
        "magnitude": lambda: merging.direction_and_length(x),
        "direction": lambda: merging.shared_direction(x, y),
        "distance": lambda: merging.distance(u, v),
        "retention": lambda: merging.kept_rows(apart, counted, bound, room, reading="distinct"),
        "codes": lambda: reference.encode(grouped, 4, "kivi", is_value=True, dtype=torch.bfloat16),
        "lengths": lambda: merging.folded_length(
            x, reference.decode(*codes, 4, depth, is_value=True)
        ),
        "attention of the prompt": lambda: torch.nn.functional.scaled_dot_product_attention(
            q.expand(-1, -1, tokens, -1), x, y, is_causal=True, enable_gqa=True
        ),
    }
    for name, function in parts.items():
        found = timed(function, options.device, options.repeats)
        row = {"what": "merging: prompt", "part": name, "batch": batch, "tokens": tokens}
        rows.write(options.out, {**row, "us": found})


def main() -> None:
    """Run one part."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=["fidelity", "memory", "overhead"], required=True)
    parser.add_argument("--size", choices=["h200", "tiny"], default="h200")
    parser.add_argument("--model", type=Path, default=HERE / "data" / "small_model")
    parser.add_argument("--corpus", type=Path, default=HERE / "data")
    parser.add_argument("--study", nargs="*", default=[])
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--recent", type=int, default=64)
    parser.add_argument("--group", type=int, default=64)
    parser.add_argument("--cache-tokens", type=int, default=32768)
    parser.add_argument("--budget", type=float, default=150.0, help="seconds of `fidelity`")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    options.device = "cuda" if torch.cuda.is_available() and options.size != "tiny" else "cpu"
    if options.size == "tiny":
        options.sequences, options.length, options.steps = 2, 96, 8
        options.recent, options.group, options.cache_tokens = 16, 32, 256
    options.cases = [(2, 256)] if options.size == "tiny" else [(16, 32768), (1, 32768)]
    where = "nvidia-h200" if options.device == "cuda" else "cpu"
    options.out = options.out or HERE / "results" / where / "merging.jsonl"
    torch.manual_seed(0)
    {"fidelity": fidelity, "memory": memory, "overhead": overhead}[options.part](options)


if __name__ == "__main__":
    main()
