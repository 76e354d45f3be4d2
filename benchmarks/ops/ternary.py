"""Ternary linears: the kernels, whole models, and candidate tiles.

    python benchmarks/ops/ternary.py --part kernels
    python benchmarks/ops/ternary.py --part sweep
    python benchmarks/ops/ternary.py --part step --backend memeff
    python benchmarks/ops/ternary.py --part decode --backend memeff

`kernels`: one linear, K columns to N rows, bf16 tokens in and out, quantising them included, and
the dense bf16 linear; PyTorch's int8 product is timed on codes that were quantised before, and
without scales. Every result is compared with float64 arithmetic on the codes first. Calls sit in
CUDA graphs over rotated weights, so that these come from memory; the graphs take turns.

`step`: forward and backward of a BitNet model of transformers whose linears are AutoBitLinear,
quantising online, with random weights; one backend per process, so that the peak belongs to it.

`decode`: one decoding step of a model of the widths of BitNet a4.8's 3B model with a StaticCache,
under torch.compile(mode="reduce-overhead"): with --backend inductor dense in bf16, with memeff the
same model ternarised and packed. Both are compiled by memeff, so that attention is the same.

`steps`: decoding steps of several batches and a prompt of one recipe, or dense; the whole model is
one CUDA graph. `--turns NAME --processes 4` times four recipes one after the other.

`sweep`: every tile, number of warps and stages per shape; the fastest are printed.

`--turns FILE:COUNT` lets COUNT processes compile in parallel and measure one by one.

`--size tiny` runs everything on the CPU in seconds.
"""

from __future__ import annotations

import argparse
import fcntl
import gc
import itertools
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import memeff_compile
from benchmarks import RESULTS, registry, timing
from benchmarks import rows as records
from benchmarks.methods import registered
from benchmarks.ops.kv_decode import filled_cache, set_filled
from benchmarks.timing import Repeated
from memeff_compile.kernels.ternary_linear import (
    Quantizer,
    op,
    reference,
    shapes,
    ternary_linear,
    ternary_linear_quantize,
)
from memeff_compile.model import TernaryLinear

Call = Callable[[], Any]

ROTATED_BYTES = 192 << 20


def copies_of(tensor: Tensor) -> list[Tensor]:
    """Return enough copies that each comes from memory when its turn is there."""
    count = 2 if not tensor.is_cuda else ROTATED_BYTES // tensor.nbytes + 2
    return [tensor, *(tensor.clone() for _ in range(min(count, 48) - 1))]


def error_of(x: Tensor, packed: Tensor, scale: Tensor, quantizer: Quantizer) -> float:
    """Return the largest difference from float64 on the codes, over the largest value."""
    columns = x.shape[1]
    x = x[-64:]
    codes, by_token, _ = ternary_linear_quantize(x, *quantizer.arguments())
    whole = reference.from_planes(codes, columns).double()
    wanted = whole @ reference.unpack_codes(packed, columns).double().t()
    wanted = wanted / by_token.double()[:, None] / scale.double()
    (found,) = ternary_linear(x, [packed], [scale], [None], x.dtype, False, *quantizer.arguments())
    return float((found.double() - wanted).abs().max() / wanted.abs().max())


# --- kernels --------------------------------------------------------------------------------------


def methods(x: Tensor, packed: Tensor, scale: Tensor) -> Iterator[tuple[str, list[Call]]]:
    """Yield each method's calls over rotated weights."""
    columns, rows = x.shape[1], packed.shape[0]
    for kind in ("int8", "int4", "topk8") if x.shape[0] in (1, 256) else ("int8",):
        yield (
            f"memeff, {kind}",
            [
                lambda w=w, kind=kind: ternary_linear(
                    x, [w], [scale], [None], x.dtype, False, kind
                )[0]
                for w in copies_of(packed)
            ],
        )
    dense = copies_of(torch.randn(rows, columns, device=x.device, dtype=x.dtype))
    yield "bf16 linear", [lambda w=w: F.linear(x, w) for w in dense]
    if x.is_cuda and x.shape[0] > 16:
        codes = torch.randint(-127, 128, x.shape, device=x.device, dtype=torch.int8)
        wide = copies_of(reference.unpack_codes(packed, columns))
        yield "int8 product alone", [lambda w=w: torch._int_mm(codes, w.t()) for w in wide]


def measure_kernels(options: argparse.Namespace) -> None:
    """Write a row per shape, number of tokens and method."""
    for (columns, height), tokens in itertools.product(options.shapes, options.tokens):
        x = torch.randn(tokens, columns, device=options.device, dtype=torch.bfloat16)
        packed = registry.draw_packed(columns, height, options.device)
        scale = torch.full((), 40.0, device=options.device)
        error = error_of(x, packed, scale, Quantizer())
        graphs = {name: Repeated(calls) for name, calls in methods(x, packed, scale)}
        if options.alone:
            samples = {
                name: [rested(graph) for _ in range(options.repeats)]
                for name, graph in graphs.items()
            }
        else:
            timers = {name: graph.microseconds for name, graph in graphs.items()}
            samples = timing.in_turns(timers, options.repeats)
        for name, found in samples.items():
            row = {
                "kind": "ternary linear",
                "method": name,
                "columns": columns,
                "rows": height,
                "tokens": tokens,
                "us": records.percentiles(found),
                "alone": options.alone,
            }
            if name == "memeff, int8":
                row["error"] = error
            records.write(options.out, row)
        del graphs
        clean()


def rested(graph: Repeated) -> float:
    """Return the time of a call on a GPU that has had time to cool, and whose clock is up again."""
    time.sleep(0.1)
    started = time.perf_counter()
    while time.perf_counter() - started < 0.02:
        found = graph.microseconds()
    return found


def clean() -> None:
    """Free the memory of the last case."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# --- whole models ---------------------------------------------------------------------------------

MODELS = {
    "h200": {
        "step": {"hidden_size": 1536, "intermediate_size": 4096, "num_attention_heads": 24},
        "decode": {"hidden_size": 3200, "intermediate_size": 8640, "num_attention_heads": 32},
    },
    "tiny": {
        "step": {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4},
        "decode": {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4},
    },
}
"""Table 6 of BitNet a4.8: the 700M and the 3B model; 24 and 26 layers."""
LAYERS = {"h200": {"step": 24, "decode": 26}, "tiny": {"step": 1, "decode": 1}}
BATCH = {"h200": (4, 2048), "tiny": (1, 16)}
FILLED = {"h200": (2048, 512), "tiny": (32, 8)}
BACKENDS = (
    "inductor",
    "memeff",
    "memeff, ternary alone",
    "memeff, no ternary",
    "memeff, gates kept",
)


def model_of(options: argparse.Namespace, part: str) -> torch.nn.Module:
    """Return a BitNet model of transformers with dense linears and random weights."""
    from transformers import BitNetConfig, BitNetForCausalLM

    layers = options.layers or LAYERS[options.size][part]
    sizes = MODELS[options.size][part]
    config = BitNetConfig(
        vocab_size=32000 if options.size == "h200" else 128,
        num_hidden_layers=layers,
        num_key_value_heads=sizes["num_attention_heads"],
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        **sizes,
    )
    torch.manual_seed(0)
    with torch.device(options.device):
        return BitNetForCausalLM(config).to(torch.bfloat16)


def make_online(model: torch.nn.Module) -> torch.nn.Module:
    """Replace every linear but the head by transformers' AutoBitLinear, quantising online."""
    from transformers.integrations.bitnet import AutoBitLinear

    for name, module in list(model.named_modules()):
        if type(module) is torch.nn.Linear and name != "lm_head":
            new = AutoBitLinear(
                module.in_features, module.out_features, False, "meta", online_quant=True
            )
            new.weight = module.weight
            model.set_submodule(name, new)
    return model


def settings_of(backend: str, mode: str = "") -> dict[str, Any]:
    """Return the arguments of torch.compile."""
    if backend == "inductor":
        return {"backend": "inductor", **({"mode": mode} if mode else {})}
    chosen: dict[str, Any] = {}
    if backend == "memeff, ternary alone":
        chosen = {"memeff.linear_cross_entropy": "off", "memeff.logits": "eager"}
        chosen |= {"memeff.attention": "off", "memeff.embedding": "off"}
    if backend == "memeff, no ternary":
        chosen = {"memeff.ternary": "off"}
    if backend == "memeff, gates kept":
        chosen = {"memeff.ternary_gate": "keep"}
    if mode and not chosen:
        return {"backend": "memeff", "mode": mode}
    if mode:
        chosen["triton.cudagraphs"] = mode == "reduce-overhead"
    return {"backend": "memeff", "options": chosen}


@contextmanager
def my_turn(name: str, rest: float = 1.0) -> Iterator[None]:
    """Wait until as many processes as `FILE:COUNT` says are ready; then they measure one by one.

    A process that was stopped is not waited for longer than `PATIENCE` seconds.
    """
    if not name:
        yield
        return
    path, count = name.rsplit(":", 1)
    with Path(path).open("a+") as stream:
        stream.write("ready\n")
        stream.flush()
        began = time.monotonic()
        while Path(path).read_text().count("ready") < int(count):
            if time.monotonic() - began > PATIENCE:
                break
            time.sleep(0.5)
        fcntl.flock(stream, fcntl.LOCK_EX)
        time.sleep(rest)
        yield


def measure_step(options: argparse.Namespace) -> None:
    """Write time and peak memory of forward and backward."""
    model = make_online(model_of(options, "step"))
    batch, length = BATCH[options.size]
    vocabulary = 32000 if options.size == "h200" else 128
    ids = torch.randint(3, vocabulary, (batch, length), device=options.device)
    compiled = torch.compile(model, **settings_of(options.backend, options.mode))

    def step() -> None:
        if options.mode:
            torch.compiler.cudagraph_mark_step_begin()
        compiled(input_ids=ids, labels=ids).loss.backward()
        model.zero_grad()

    started = time.perf_counter()
    step()
    compiling = time.perf_counter() - started
    for _ in range(3):
        step()
    clean()
    with my_turn(options.turns):
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        samples = [timing.waited(step) for _ in range(options.repeats)]
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    reserved = torch.cuda.max_memory_reserved() if torch.cuda.is_available() else 0
    row = {
        "kind": "ternary training step",
        "method": options.backend,
        "layers": options.layers or LAYERS[options.size]["step"],
        "batch": batch,
        "length": length,
        "mode": options.mode or "default",
        "ms": records.percentiles(samples),
        "peak_gib": round(peak / 2**30, 3),
        "reserved_gib": round(reserved / 2**30, 3),
        "weights_gib": round(sum(p.nbytes for p in model.parameters()) / 2**30, 3),
        "compile_s": round(compiling, 1),
        "ternarized": 0,
    }
    if options.backend != "inductor":
        row["ternarized"] = memeff_compile.last_report().rewrites("ternarize_linear")
    records.write(options.out, row)


@torch.no_grad()
def measure_decode(options: argparse.Namespace) -> None:
    """Write the time of one decoding step, and the bytes that the weights take."""
    model = model_of(options, "decode").eval()
    is_packed = options.backend == "memeff"
    linears = [m for n, m in model.named_modules() if type(m) is torch.nn.Linear and n != "lm_head"]
    count = sum(m.weight.numel() for m in linears)
    if is_packed:
        memeff_compile.pack_ternary_(memeff_compile.ternarize_(model, options.recipe))
    length, filled = FILLED[options.size]
    cache = filled_cache(model, 1, length, options.device)
    set_filled(cache, filled)
    vocabulary = model.config.vocab_size
    token = torch.randint(3, vocabulary, (1, 1), device=options.device)
    mode = {"mode": "reduce-overhead"} if options.device == "cuda" else {}
    compiled = torch.compile(model, backend="memeff", **mode)

    def step() -> None:
        compiled(input_ids=token, past_key_values=cache, use_cache=True)

    for _ in range(4):
        step()
    with my_turn(options.turns):
        samples = [timing.milliseconds(step, 5, is_ahead=True) for _ in range(options.repeats)]
        waited = [timing.waited(step) for _ in range(options.repeats)]
    held = sum(t.nbytes for t in model.state_dict().values())
    ends = 2 * vocabulary * model.config.hidden_size * 2
    row = {
        "kind": "ternary decoding step",
        "method": f"packed, {options.recipe}" if is_packed else "dense bf16",
        "layers": options.layers or LAYERS[options.size]["decode"],
        "filled": filled,
        "ms": records.percentiles(samples),
        "ms_with_host": records.percentiles(waited),
        "merged": memeff_compile.last_report().rewrites("ternarize_linear"),
        "bytes_per_ternary_weight": round((held - ends) / count, 4),
        "head_and_embedding_mib": round(ends / 2**20, 1),
    }
    records.write(options.out, row)


RECIPES = ("dense", "b1.58", "a4.8", "a4.8-fp4")
PROMPT = {"h200": 512, "tiny": 8}
PATIENCE = 400.0


def kinds_by_recipe(model: torch.nn.Module) -> dict[str, dict[str, str]]:
    """Return each linear's quantiser by recipe; the model is ternary afterwards."""
    found = {}
    for recipe in RECIPES[1:]:
        memeff_compile.ternarize_(model, recipe)
        named = model.named_modules()
        found[recipe] = {p: m.kind for p, m in named if isinstance(m, TernaryLinear)}
    return found


@torch.no_grad()
def measure_steps(options: argparse.Namespace) -> None:
    """Write the time of a decoding step per batch, and of a prompt, as a CUDA graph of the model.

    One recipe per process; `--turns` lets all of them time a case one after the other.
    """
    model = model_of(options, options.model).eval()
    if options.recipe != "dense":
        kinds = kinds_by_recipe(model)[options.recipe]
        memeff_compile.ternarize_(model, kinds=kinds)
        memeff_compile.pack_ternary_(model)
    if options.apart:
        op.GROUPED_TOKENS = 0
    if options.shared:
        op.GROUPED_TOKENS = options.shared
    length, filled = FILLED[options.size]
    length = options.cache_length or length
    chosen = {"memeff.regions": "auto", "memeff.cuda_graphs": "off"}
    if options.size == "tiny":
        chosen["memeff.inner"] = "aot_eager"
    model.compile(backend="memeff", options=chosen, dynamic=False)
    for number, case in enumerate(options.cases.split(",")):
        is_prompt = case == "prompt"
        batch, count = (1, PROMPT[options.size]) if is_prompt else (int(case), 1)
        cache = filled_cache(model, batch, length, options.device)
        ids = torch.randint(3, model.config.vocab_size, (batch, count), device=options.device)
        begin = partial(set_filled, cache, 0 if is_prompt else filled)
        begin()
        started = time.perf_counter()
        run = partial(model, input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        if is_prompt:  # each run starts in an empty cache, also those that warm up
            run = partial(_after, begin, run)
        if torch.cuda.is_available():
            repeated = Repeated([run], least=1)
        else:
            run()
        compiling = time.perf_counter() - started
        samples = []
        turn = f"{options.turns}-{number}:{options.processes}" if options.turns else ""
        with my_turn(turn, rest=0.3):
            for _ in range(options.repeats):
                begin()
                if torch.cuda.is_available():
                    samples.append(repeated.microseconds() / 1e3)
                else:
                    samples.append(timing.waited(run))
        row = {
            "kind": "ternary prompt" if is_prompt else "ternary decoding step",
            "method": options.recipe + (", matrices apart" if options.apart else ""),
            **({"shared_launch_tokens": options.shared} if options.shared else {}),
            "model": options.model,
            "layers": options.layers or LAYERS[options.size][options.model],
            "batch": batch,
            "tokens": count,
            "filled": 0 if is_prompt else filled,
            "cache_length": length,
            "cuda_graph": "whole",
            "ms": records.percentiles(samples),
            "compile_s": round(compiling, 1),
            "merged": memeff_compile.last_report().rewrites("ternarize_linear"),
        }
        records.write(options.out, row)
        del cache, run
        clean()


def _after(begin: Call, run: Call) -> Any:
    begin()
    return run()


# --- sweep ----------------------------------------------------------------------------------------

Candidate = tuple[int, int, int, Any]
"""Columns, rows, tokens and the launch."""


def candidates(options: argparse.Namespace) -> list[Candidate]:
    """Return every launch to try."""
    found: list[Candidate] = []
    for (columns, height), tokens in itertools.product(options.shapes, options.tokens):
        if tokens <= shapes.MAX_VECTORS:
            launches: list[Any] = [
                shapes.VectorShapes(r, w, t)
                for r, w, t in itertools.product((4, 8, 16, 32, 64), (4, 8, 16), (1, 2, 4, 8))
                if 2048 <= r * columns // 16 <= 1024 * min(16, 4 * w) and height // (r * t) >= 100
            ]
        else:
            launches = list(tile_candidates(tokens))
        found += [(columns, height, tokens, launch) for launch in launches]
    return found


def tile_candidates(tokens: int) -> Iterator[shapes.TileShapes]:
    """Yield launches on tensor cores."""
    if tokens <= 16:
        for high, wide, warps, stages, splits, ahead in itertools.product(
            (32, 64), (64, 128, 256), (4,), (3, 4), (1, 2), (True, False)
        ):
            if stages * wide < 1000 and (splits == 1 or stages == 3):
                yield shapes.TileShapes(16, high, wide, warps, stages, splits, ahead)
    elif tokens <= 64:
        for high, wide, stages, splits in itertools.product((64, 128), (64, 128), (3, 4), (1, 2)):
            yield shapes.TileShapes(min(tokens, 64), high, wide, 4, stages, splits)
    else:
        for block, high, warps in (
            (64, 64, 4),
            (64, 128, 4),
            (128, 64, 4),
            (128, 128, 4),
            (256, 64, 4),
            (64, 256, 4),
            (128, 256, 8),
            (256, 128, 8),
            (128, 128, 8),
        ):
            if tokens > 512 and block * high < 128 * 96:
                continue
            for wide, stages in ((32, 3), (32, 4), (64, 2), (64, 3), (64, 4), (128, 2), (128, 3)):
                yield shapes.TileShapes(block, high, wide, warps, stages)
                if tokens <= 512 and stages == 3:
                    yield shapes.TileShapes(block, high, wide, warps, stages, 1, True)


def launch(candidate: Candidate, x: Tensor, packed: Tensor, scale: Tensor) -> Tensor:
    """Run one linear with the given tiles, quantising included."""
    from memeff_compile.kernels.device import starts_early
    from memeff_compile.kernels.ternary_linear import tiles

    settings: dict[str, Any] = {"dtype": x.dtype, "weight_is_step": False, "shapes": candidate[3]}
    if isinstance(candidate[3], shapes.VectorShapes):
        return tiles.vectors(x, [packed], [scale], [None], Quantizer(), **settings)[0]
    settings["is_chained"] = starts_early(x.device)
    codes = tiles.quantize(x, Quantizer(), is_chained=settings["is_chained"])
    return tiles.product(*codes, packed, scale, None, is_step=False, **settings)


def compile_share(share: list[Candidate]) -> None:
    """Compile candidates in a separate process; an error here is raised again where it is
    reported.
    """
    data: dict[tuple[int, int, int], Any] = {}
    for candidate in share:
        key = candidate[:3]
        if key not in data:
            data.clear()
            data[key] = problem(*key, "cuda")
        try:
            launch(candidate, *data[key])
        except Exception:
            continue


def problem(columns: int, height: int, tokens: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, packed weights and their scale."""
    torch.manual_seed(0)
    x = torch.randn(tokens, columns, device=device, dtype=torch.bfloat16)
    return x, registry.draw_packed(columns, height, device), torch.full((), 40.0, device=device)


def sweep(options: argparse.Namespace) -> None:
    """Print the fastest launches per shape."""
    todo = candidates(options)
    started = time.perf_counter()
    if options.device == "cuda":
        count = min(14, os.cpu_count() or 1)
        context = multiprocessing.get_context("spawn")
        workers = [
            context.Process(target=compile_share, args=(todo[i::count],)) for i in range(count)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    print(f"compiled {len(todo)} in {time.perf_counter() - started:.1f} s", flush=True)
    for key, group in itertools.groupby(todo, key=lambda candidate: candidate[:3]):
        x, packed, scale = problem(*key, options.device)
        (wanted,) = ternary_linear(x, [packed], [scale], [None], x.dtype)
        timed = []
        for candidate in group:
            if time.perf_counter() - started > options.seconds:
                print("out of time at", candidate)
                break
            try:
                is_right = torch.equal(launch(candidate, x, packed, scale), wanted)
                calls = [partial(launch, candidate, x, w, scale) for w in copies_of(packed)]
                repeated = Repeated(calls)
                us = min(repeated.microseconds() for _ in range(3))
            except Exception as error:
                if type(error).__name__ != "OutOfResources":
                    print("failed:", candidate, type(error).__name__, str(error)[:120])
                continue
            timed.append((us, is_right, candidate[3]))
        timed.sort(key=lambda entry: entry[0])
        for us, is_right, chosen in timed[: options.best]:
            print(f"{key} {us:8.2f} us {'' if is_right else 'WRONG '}{chosen}")
        wrong = [c for _, is_right, c in timed if not is_right]
        if wrong:
            print(f"{key} WRONG: {wrong[:4]} and {max(0, len(wrong) - 4)} more")
        clean()


# --- command --------------------------------------------------------------------------------------


def parse() -> argparse.Namespace:
    """Return the settings of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", default="kernels", choices=list(PARTS))
    parser.add_argument("--backend", default="memeff", choices=BACKENDS)
    parser.add_argument("--recipe", default="b1.58", help="of the packed model that decodes")
    parser.add_argument("--model", default="decode", choices=("step", "decode"), help="700M or 3B")
    parser.add_argument("--cases", default="1,8,32,prompt", help="of steps: batches, or prompt")
    parser.add_argument("--cache-length", type=int, default=0, help="of the static cache")
    parser.add_argument("--apart", action="store_true", help="no launch has several matrices")
    parser.add_argument(
        "--shared", type=int, default=0, help="tokens up to which matrices share a launch"
    )
    parser.add_argument("--processes", type=int, default=1, help="that take turns by --turns")
    parser.add_argument("--layers", type=int, default=0, help="other than the model's own number")
    parser.add_argument("--size", default="h200", choices=list(registry.TERNARY))
    parser.add_argument("--shapes", default="", help="columns x rows, as 4096x14336,2560x6912")
    parser.add_argument("--tokens", default="", help="numbers of tokens, as 1,16")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--mode", default="", help="of torch.compile, in a training step")
    parser.add_argument("--alone", action="store_true", help="each method for itself, with pauses")
    parser.add_argument("--turns", default="", help="FILE:COUNT of processes that share a GPU")
    parser.add_argument("--best", type=int, default=4, help="launches that a sweep prints")
    parser.add_argument("--seconds", type=float, default=600.0, help="after which a sweep stops")
    parser.add_argument("--out", type=Path, default=RESULTS / "nvidia-h200/ternary.jsonl")
    options = parser.parse_args()
    given = [tuple(map(int, pair.split("x"))) for pair in options.shapes.split(",") if pair]
    options.shapes = given or registry.TERNARY[options.size]
    options.tokens = [int(n) for n in options.tokens.split(",") if n] or registry.TERNARY_TOKENS[
        options.size
    ]
    options.device = "cuda" if options.size != "tiny" else "cpu"
    return options


PARTS = {
    "kernels": measure_kernels,
    "sweep": sweep,
    "step": measure_step,
    "decode": measure_decode,
    "steps": measure_steps,
}


def main() -> None:
    """Run one part."""
    options = parse()
    registered()
    torch.manual_seed(0)
    PARTS[options.part](options)


if __name__ == "__main__":
    main()
