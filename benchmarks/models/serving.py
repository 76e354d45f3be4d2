"""generate() of a whole model: time to the first token, a step, tokens per second, peak memory.

    python benchmarks/models/serving.py --part check
    python benchmarks/models/serving.py --part time --paths eager static verb-4 all
    python benchmarks/models/serving.py --part host
    python benchmarks/models/serving.py --part pair --paths verb-4 --layers 8
    python benchmarks/models/serving.py --part memory --paths verb-static verb-4

`check`: a small model; tokens generated with steps replayed as CUDA graphs, twice, against the same
compiled steps without replay, in a loop that waits for each token, for `--kinds`: other lengths and
batches, ends at several tokens, left padding, logits kept over all steps, from a thread, with
beams. Prints a line per case and ends with an error where one differs.

`time`: random weights in the widths of a model (`--size`), greedy, in bf16. A streamer notes when
each token is on the host. The first call compiles (`first_call_s`, of it our passes `passes_s`;
`three_calls_s` are the seconds of the first three calls together);
`step_ms` is of the last call; `host_ms` is the host's time in the model's call of a step, and
`waiting_step_ms` a step of a loop that waits for each token, as generate() itself does.

    eager          transformers' growing cache, not compiled
    gpt-fast       a loop by hand over a StaticCache: the prompt eagerly, a step with its choice
                   under Inductor's reduce-overhead; each token is read while the next step runs
    torchao-int8, torchao-int4
                   the same loop over torchao's weights of so many bits (4: in groups of 128)
    bnb-int8, bnb-nf4
                   the same loop over bitsandbytes' linears of 8 bits and of NF4 (blocks of 64)
    inductor       StaticCache, which generate() compiles by itself: Inductor, reduce-overhead
    static-config  StaticCache, CompileConfig(backend="memeff", memeff.mode=reduce-overhead)
    static         StaticCache, model.compile(backend="memeff")
    kv4-config, kv4, kv4-mode
                   KVCache of 4 bits: by CompileConfig, in place, in place with the mode
    verb-static, verb-4
                   memeff_compile.compile(model, kv_cache="static"), kv_cache=4
    verb-merged    KVCache of 4 bits whose layers share directions
    verb-windows, verb-windows-4
                   the verb, every other layer sees 64 tokens (`check` alone)
    verb-win4, verb-tier, verb-k3, verb-k1, verb-k0
                   the verb with an exact cache and compressed weights: without loss, or `win4` with
                   so many mantissa bits
    win4           compressed weights and StaticCache, in place
    all            compressed weights, KVCache of 4 bits, attention in 8 bits, by the verb

Each path in each of `--batch` and `--prompt`, one model after the other; `read_gb` is the data that
a step has to read: weights and the tokens that are there, in the bits that they are held in. Where
several processes share a GPU, `--turns FILE` has one of them on it at a time; they compile in
parallel, so that `compile_s` is longer than alone. `--brief` leaves out the loops of `step_ms`.
`--regions on` compiles equal layers once, which shortens the first call of deep models.

`host`: the host's time for one step without generate()'s loop: calls in a row while the GPU is busy
with other work.

`pair`: steps of one model with `memeff.regions` off and of an equal model with it on, whose calls
alternate (`--repeats` of each); `step_ms` and `waiting_step_ms` are of all these calls.

`memory`: objects alive after 10 to 200 calls of other lengths, batches and numbers of new tokens:
tensors and the bytes of their memory, objects of Python, the bytes of CUDA's allocator, recordings.

`--size tiny` runs everything on the CPU in seconds; there nothing is recorded.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import memeff_compile
from benchmarks import rows, timing
from benchmarks.turns import Turns, clean
from memeff_compile.backend import replay
from memeff_compile.model.cache import run_ahead

WIDTHS: dict[str, dict[str, Any]] = {  # of Qwen3, but for those that name another family
    "h200": {  # Qwen3-8B
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
    },
    "qwen3-1.7b": {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "llama3.2-1b": {
        "family": "Llama",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 128256,
        "tie_word_embeddings": True,
    },
    "llama3-8b": {
        "family": "Llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
    },
    "mistral-7b": {  # each layer sees a window of 4,096 tokens
        "family": "Mistral",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 32000,
        "sliding_window": 4096,
    },
    "gemma2-2b": {  # every other layer sees a window of 4,096 tokens
        "family": "Gemma2",
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 256000,
        "tie_word_embeddings": True,
    },
    "gemma3-4b": {  # five of six layers see a window of 1,024 tokens
        "family": "Gemma3",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262208,
        "sliding_window": 1024,
        "tie_word_embeddings": True,
    },
    "small": {
        "hidden_size": 1024,
        "intermediate_size": 2048,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "vocab_size": 4096,
    },
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 64,
    },
    "tiny-windows": {
        "family": "Gemma3",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 64,
        "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}
ON_CPU = ("tiny", "tiny-windows")
BY_HAND = ("gpt-fast", "torchao-int8", "torchao-int4", "bnb-int8", "bnb-nf4")
WEIGHTS = {"verb-win4": "win4", "verb-tier": "tier"}
WEIGHTS |= {f"verb-k{kept}": f"win4:k{kept}" for kept in (3, 1, 0)}
PATHS = (
    "eager",
    *BY_HAND,
    "inductor",
    "static-config",
    "static",
    "kv4-config",
    "kv4",
    "kv4-mode",
    "verb-static",
    "verb-4",
    "verb-merged",
    "verb-windows",
    "verb-windows-4",
    *WEIGHTS,
    "win4",
    "all",
)
COMPILED = PATHS[2 + len(BY_HAND) :]
VERBS: dict[str, dict[str, Any]] = {
    "verb-static": {"kv_cache": "static"},
    "verb-4": {"kv_cache": 4},
    "verb-merged": {
        "kv_cache": {"bits": 4, "merge": memeff_compile.MiniCache(start_layer=0, force=True)}
    },
    "verb-windows": {"kv_cache": "static"},
    "verb-windows-4": {"kv_cache": 4},
    "all": {"kv_cache": 4, "weights": "win4", "attention": "8b"},
    **{path: {"kv_cache": "static", "weights": weights} for path, weights in WEIGHTS.items()},
}
REGIONS = ("off", "on")
MODE = {"memeff.mode": "reduce-overhead"}


def build(size: str, layers: int, device: str, *, windows: bool = False) -> Any:
    """Return a model with random weights that never ends a sequence by itself."""
    import transformers

    widths = {"tie_word_embeddings": False, **WIDTHS[size]}
    family = widths.pop("family", "Qwen3")
    if windows:
        kinds = ["sliding_attention", "full_attention"]
        widths |= {"layer_types": [kinds[i % 2] for i in range(layers)], "sliding_window": 64}
        widths["use_sliding_window"] = True
    settings = "Gemma3TextConfig" if family == "Gemma3" else f"{family}Config"
    config = getattr(transformers, settings)(
        **widths,
        num_hidden_layers=layers,
        max_position_embeddings=40960,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    dtype = torch.float32 if size in ON_CPU else torch.bfloat16
    with torch.device(device):
        kind = getattr(transformers, f"{family}ForCausalLM")
        model: Any = kind._from_config(config, dtype=dtype)
    return model.eval()


def prompt(model: Any, batch: int, tokens: int) -> Tensor:
    """Return random ids, the same every time."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(2, model.config.vocab_size, (batch, tokens), generator=generator)
    return ids.to(model.device)


class Times:
    """A streamer that notes when each token is there."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def put(self, value: Tensor) -> None:
        """Take a prompt or a token, which generate() has brought to the host."""
        del value
        self.at.append(time.perf_counter())

    def end(self) -> None:
        """Do no more work."""


# --- paths ----------------------------------------------------------------------------------------


def prepare(path: str, model: Any, *, regions: str = "off") -> None:
    """Compress and compile a model as a path says."""
    if path in VERBS:
        memeff_compile.compile(model, options={"memeff.regions": regions}, **VERBS[path])
    elif path == "win4":
        memeff_compile.compress_(model, "win4", progress=False)
    elif path.startswith("torchao"):
        quantise(model, path)
    elif path.startswith("bnb"):
        replace_linears(model, path)
    if path in ("static", "kv4", "kv4-mode", "win4"):
        model.compile(backend="memeff", options=dict(MODE) if path == "kv4-mode" else None)


def quantise(model: Any, path: str) -> None:
    """Round the weights of a model's linears by torchao."""
    from torchao import quantization

    if path.endswith("int8"):
        how = quantization.Int8WeightOnlyConfig()
    else:  # as its kernels for few rows read them
        how = quantization.Int4WeightOnlyConfig(int4_packing_format="tile_packed_to_4d")
    quantization.quantize_(model, how)


def replace_linears(model: Any, path: str) -> None:
    """Put bitsandbytes' linears in place of a model's, except for the output projection."""
    import bitsandbytes

    for owner in list(model.modules()):
        for name, linear in list(owner.named_children()):
            if not isinstance(linear, torch.nn.Linear) or name == "lm_head":
                continue
            if path.endswith("int8"):
                made = bitsandbytes.nn.Linear8bitLt(
                    linear.in_features, linear.out_features, False, has_fp16_weights=False
                )
                made.weight = bitsandbytes.nn.Int8Params(
                    linear.weight.data.cpu(), has_fp16_weights=False, requires_grad=False
                )
            else:
                made = bitsandbytes.nn.Linear4bit(
                    *(linear.in_features, linear.out_features, False),
                    compute_dtype=torch.bfloat16,
                    quant_type="nf4",
                )
                made.weight = bitsandbytes.nn.Params4bit(
                    linear.weight.data, requires_grad=False, quant_type="nf4", blocksize=64
                )
            setattr(owner, name, made.to(model.device))


class ByHand:
    """A greedy loop in gpt-fast's way, whose cache and compiled step serve every call."""

    def __init__(self, model: Any, batch: int, tokens: int) -> None:
        from transformers import StaticCache

        self.model = model
        self.cache: Any = StaticCache(config=model.config, max_cache_len=tokens)
        widths = (model.config.num_key_value_heads, model.config.head_dim)
        self.cache.early_initialization(batch, *widths, model.dtype, model.device)
        on_gpu = model.device.type == "cuda"
        how: dict[str, Any] = {"mode": "reduce-overhead"} if on_gpu else {"backend": "eager"}
        self.step = torch.compile(self.after, fullgraph=True, **how)

    def after(self, ids: Tensor) -> Tensor:
        """Return the token after these."""
        logits = self.model(input_ids=ids, past_key_values=self.cache, logits_to_keep=1).logits
        return logits[:, -1].argmax(-1, keepdim=True)

    def generate(self, ids: Tensor, *, max_new_tokens: int, streamer: Times) -> Tensor:
        """Return a prompt and so many tokens."""
        self.cache.reset()
        streamer.put(ids)
        found = [self.after(ids)]
        for _ in range(max_new_tokens - 1):
            found.append(self.step(found[-1]).clone())
            streamer.put(found[-2].cpu())
        streamer.put(found[-1].cpu())
        return torch.cat([ids, *found], 1)


def arguments(path: str, model: Any, tokens: int) -> dict[str, Any]:
    """Return generate()'s arguments on a path, for so many tokens."""
    from transformers import CompileConfig

    given: dict[str, Any] = {"do_sample": False}
    if path.endswith("-config"):
        given["compile_config"] = CompileConfig(backend="memeff", options=MODE, mode=None)
    if path in ("inductor", "static", "static-config", "win4"):
        given["cache_implementation"] = "static"
    elif path.startswith("kv4"):
        given["past_key_values"] = memeff_compile.KVCache(model.config, tokens, bits=4)
    return given


# --- check ----------------------------------------------------------------------------------------


def cases() -> Iterator[tuple[str, Callable[[Any, str], Any]]]:
    """Yield the cases of `check`: a name, and a function of a model."""
    new = 24

    def ask(model: Any, kind: str, length: int, batch: int = 4, **more: Any) -> Any:
        ids = prompt(model, batch, length)
        beams = more.get("num_beams", 1)
        given = arguments(kind, model, length + new)
        return model.generate(ids, max_new_tokens=new, **{**given, **more}), beams

    def tokens(length: int, **more: Any) -> Callable[[Any, str], Any]:
        return lambda model, kind: ask(model, kind, length, **more)[0]

    def padded(model: Any, kind: str) -> Any:
        mask = torch.ones(4, 300, dtype=torch.long, device=model.device)
        mask[0, :120] = 0
        return ask(model, kind, 300, attention_mask=mask)[0]

    def kept(model: Any, kind: str) -> Any:
        asked = {"return_dict_in_generate": True, "output_logits": True}
        found = ask(model, kind, 300, **asked)[0]
        return torch.stack(found.logits)

    def ended(model: Any, kind: str) -> Any:
        new = ask(model, kind, 300)[0][:, 300:]
        ends = [int(new[row, 2 + 3 * row]) for row in range(4)]  # each sequence somewhere
        found = [ask(model, kind, 300, eos_token_id=each)[0] for each in (ends, ends[:1])]
        return torch.cat([each.flatten() for each in found])

    def from_a_thread(model: Any, kind: str) -> Any:
        found: list[Tensor] = []
        times = Times()

        def run() -> None:
            found.append(ask(model, kind, 300, streamer=times)[0])

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        assert len(times.at) == new + 1
        return found[0]

    yield "tokens", tokens(300)
    yield "another length", tokens(431)
    yield "back", tokens(300)
    yield "another batch", tokens(300, batch=1)
    yield "ends", ended
    yield "left padding", padded
    yield "logits kept", kept
    yield "from a thread", from_a_thread
    yield "beams", tokens(64, batch=1, num_beams=3)


@contextlib.contextmanager
def replaying(is_on: bool, *, waits: bool = False) -> Iterator[None]:
    """Run compiled steps as they are where recordings are off; then or if asked wait for tokens."""
    was, devices = replay.CudaEngine.is_free, run_ahead.DEVICES
    if not is_on:
        replay.CudaEngine.is_free = lambda self: False  # type: ignore[method-assign]
    if waits or not is_on:
        run_ahead.DEVICES = ()
    try:
        yield
    finally:
        replay.CudaEngine.is_free = was  # type: ignore[method-assign]
        run_ahead.DEVICES = devices


@torch.no_grad()
def check(options: argparse.Namespace) -> None:
    """Compare replayed steps with the same compiled steps that are not."""
    wrong = 0
    size = "tiny" if options.device == "cpu" else "small"
    for kind in options.kinds:
        clean()
        model = build(size, 2, options.device, windows="windows" in kind)
        if kind in VERBS:
            memeff_compile.compile(model, **VERBS[kind])
        else:
            prepare(kind, model)
        for name, case in cases():
            started = time.perf_counter()
            found = []
            for is_on in (False, True, True):
                with replaying(is_on):
                    found.append(case(model, kind))
            seconds = time.perf_counter() - started
            is_equal = all(torch.equal(found[0], each) for each in found[1:])
            wrong += not is_equal
            print(f"{'equal' if is_equal else 'DIFFERENT'}  {kind}: {name} ({seconds:.1f} s)")
        counts = [g.replays for g in memeff_compile.graphs() if g.replays is not None]
        print(f"{kind}: " + "; ".join(" ".join(str(c).split()) for c in counts), flush=True)
        if options.device == "cuda":
            stopped = [c for c in counts if c.stopped or not c.replays]
            wrong += len(stopped) + (not counts)
    if wrong:
        raise SystemExit(f"{wrong} cases differ, or were not replayed")


# --- time -----------------------------------------------------------------------------------------


def one_call(model: Any, path: str, ids: Tensor, new: int) -> dict[str, Any]:
    """Return the times of one call of generate()."""
    times = Times()
    given = {} if path in BY_HAND else arguments(path, model, ids.shape[1] + new)
    timing.synchronize()
    started = time.perf_counter()
    found = model.generate(ids, max_new_tokens=new, streamer=times, **given)
    total = time.perf_counter() - started
    first, *rest = times.at[1:]
    steps = [1e3 * (b - a) for a, b in zip([first, *rest], rest, strict=False)]
    return {
        "first_token_s": round(first - started, 3),
        "step_ms": rows.percentiles(steps),
        "mean_step_ms": round(1e3 * (times.at[-1] - first) / len(steps), 3),
        "tokens_per_s": round(ids.shape[0] * new / total, 1),
        "tokens": found[:, ids.shape[1] :],
        "steps": steps,
    }


@contextlib.contextmanager
def host_times(model: Any) -> Iterator[list[float]]:
    """Note how many milliseconds the host spends in each call of a model compiled in place."""
    spent: list[float] = []
    call = model._compiled_call_impl

    def timed(*args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        found = call(*args, **kwargs)
        spent.append(1e3 * (time.perf_counter() - started))
        return found

    model._compiled_call_impl = timed
    try:
        yield spent
    finally:
        model._compiled_call_impl = call


def held_bytes(tensor: Tensor) -> int:
    """Return how many bytes a tensor is held in, where it is made of others too."""
    if type(tensor) in (Tensor, torch.nn.Parameter):
        return tensor.nbytes
    if not hasattr(tensor, "__tensor_flatten__"):  # bitsandbytes: codes, with scales apart
        scales = getattr(getattr(tensor, "quant_state", None), "absmax", None)
        return tensor.nbytes + (0 if scales is None else scales.nbytes)
    names = tensor.__tensor_flatten__()[0]
    return sum(held_bytes(getattr(tensor, name)) for name in names)


def read_gb(path: str, model: Any, batch: int, tokens: int) -> dict[str, float]:
    """Return the gigabytes that a step reads: of weights, and of a cache with so many tokens."""
    config = model.config
    linears = [m.weight for m in model.modules() if isinstance(m, torch.nn.Linear)]
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    window = getattr(config, "sliding_window", None) or tokens
    is_coded = path.startswith("kv4") or path in ("verb-4", "all")
    per_token = 2 * batch * config.num_key_value_heads * config.head_dim * model.dtype.itemsize
    cache = 0.0
    for kind in kinds:
        is_full = kind == "full_attention"
        share = 4.5 / (8 * model.dtype.itemsize) if is_full and is_coded else 1
        cache += per_token * (tokens if is_full else min(tokens, window)) * share
    return {
        "weights": round(sum(map(held_bytes, linears)) / 1e9, 3),
        "cache": round(cache / 1e9, 3),
    }


@torch.no_grad()
def measure(options: argparse.Namespace) -> None:
    """Time paths, each on a separate model."""
    exact: dict[tuple[int, int], Tensor] = {}
    turns = Turns(options.turns)
    for path in options.paths:
        turns.start()
        model = build(options.size, options.layers, options.device)
        row: dict[str, Any] = {"kind": "serving", "path": path, "layers": options.layers}
        if options.size != "h200":
            row["size"] = options.size
        if options.regions != "off":
            row["regions"] = options.regions
        try:
            prepare(path, model, regions=options.regions)
        except Exception as error:  # a path that fails is a result
            rows.write(options.out, {**row, "error": f"{type(error).__name__}: {error}"[:300]})
            continue
        for batch, length in itertools.product(options.batch, options.prompt):
            cell = {**row, "batch": batch, "prompt": length, "new": options.new}
            try:
                found, tokens = measured(path, model, batch, length, turns, options)
            except Exception as error:
                found, tokens = {"error": f"{type(error).__name__}: {error}"[:300]}, None
            if tokens is not None and len(options.paths) > 1:
                first = exact.setdefault((batch, length), tokens)
                found["same_as_first_path"] = round(float((tokens == first).float().mean()), 4)
            rows.write(options.out, {**cell, **found})
        if options.verbose:
            print(memeff_compile.last_report().details())
        del model
    clean()
    turns.give()


def measured(
    path: str, model: Any, batch: int, length: int, turns: Turns, options: argparse.Namespace
) -> tuple[dict[str, Any], Tensor]:
    """Return a path's times for so many prompts of a length, and its tokens."""
    row: dict[str, Any] = {}
    if path in (*BY_HAND, "inductor") or path.endswith("-config"):  # not for any length, or batch
        turns.start()
    ids, new = prompt(model, batch, length), options.new
    called: Any = ByHand(model, batch, length + new) if path in BY_HAND else model
    passes, turns.compile_s = sum(each.seconds for each in memeff_compile.graphs()), 0.0
    started = time.perf_counter()
    one_call(called, path, ids, new)
    if options.turns is None:
        row["first_call_s"] = round(time.perf_counter() - started, 1)
    row["compile_s"] = round(turns.compile_s, 1)
    row["passes_s"] = round(sum(each.seconds for each in memeff_compile.graphs()) - passes, 3)
    if options.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for number in range(options.repeats):
        result = one_call(called, path, ids, new)
        if number == 1 and options.turns is None:
            row["three_calls_s"] = round(time.perf_counter() - started, 1)
    if options.device == "cuda":
        row["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    if getattr(model, "_compiled_call_impl", None) is not None and not options.brief:
        with host_times(model) as spent:
            one_call(called, path, ids, new)
        row["host_ms"] = rows.percentiles(spent[3:])  # the first two are prompt and fill
        with replaying(True, waits=True):
            waited = one_call(called, path, ids, new)
        row["waiting_step_ms"] = waited["step_ms"]
    tokens: Tensor = result.pop("tokens")
    del result["steps"]
    row["graphs"] = len(memeff_compile.graphs())
    row["read_gb"] = read_gb(path, model, batch, length + new)
    return {**row, **result}, tokens


@torch.no_grad()
def pair(options: argparse.Namespace) -> None:
    """Time the steps of two equal models, with separately compiled and with shared layers."""
    batch, length, new = options.batch[0], options.prompt[0], options.new
    for path in options.paths:
        clean()
        models = {way: build(options.size, options.layers, options.device) for way in REGIONS}
        ids = prompt(models["off"], batch, length)
        cells: dict[str, dict[str, Any]] = {}
        for way, model in models.items():
            prepare(path, model, regions=way)
            for _ in range(3):
                started = time.perf_counter()
                tokens = one_call(model, path, ids, new)["tokens"]
                print(f"{way}: a call took {time.perf_counter() - started:.1f} s", flush=True)
            cells[way] = {"step_ms": [], "waiting_step_ms": [], "tokens": tokens}
        for _ in range(options.repeats):
            for name, waits in (("step_ms", False), ("waiting_step_ms", True)):
                for way, model in models.items():
                    with replaying(True, waits=waits):
                        cells[way][name] += one_call(model, path, ids, new)["steps"]
        row = {"kind": "serving pair", "path": path, "layers": options.layers}
        row |= {"size": options.size, "batch": batch, "prompt": length, "new": new}
        first = cells["off"]["tokens"]
        for way, cell in cells.items():
            same = round(float((cell.pop("tokens") == first).float().mean()), 4)
            found: dict[str, Any] = {key: rows.percentiles(steps) for key, steps in cell.items()}
            found |= {"repeats": options.repeats, "same_as_off": same}
            rows.write(options.out, {**row, "regions": way, **found})
        del models, model


@torch.no_grad()
def host(options: argparse.Namespace) -> None:
    """Time the host's work for one step while the GPU is busy."""
    for path in options.paths:
        if path in ("eager", *BY_HAND) or path.endswith("-config"):
            continue
        clean()
        model = build(options.size, options.layers, options.device)
        prepare(path, model)
        length = 512
        cache: Any = memeff_compile.KVCache(model.config, length, bits=4)
        if path in ("static", "verb-static", "win4"):
            from transformers import StaticCache

            cache = StaticCache(config=model.config, max_cache_len=length)
        token = prompt(model, options.batch[0], 64)
        model(input_ids=token, past_key_values=cache, use_cache=True)
        token = token[:, :1].contiguous()
        for _ in range(8):
            model(input_ids=token, past_key_values=cache, use_cache=True)
        samples = []
        for _ in range(32):
            timing.synchronize()
            if options.device == "cuda":
                torch.cuda._sleep(50_000_000)
            started = time.perf_counter()
            model(input_ids=token, past_key_values=cache, use_cache=True)
            samples.append(1e3 * (time.perf_counter() - started))
        row = {"kind": "serving host", "path": path, "layers": options.layers}
        rows.write(options.out, {**row, "batch": options.batch[0], "ms": rows.percentiles(samples)})
        del model, cache


# --- memory ---------------------------------------------------------------------------------------


def alive() -> dict[str, int]:
    """Count tensors, their bytes, and objects, after a collection of garbage."""
    gc.collect()
    objects = gc.get_objects()
    kinds = (Tensor, torch.nn.Parameter)
    tensors = [t for t in objects if type(t) in kinds and t.layout is torch.strided]
    storages = {s.data_ptr(): s.nbytes() for s in map(Tensor.untyped_storage, tensors)}
    on_gpu = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
    held = {"tensors": len(tensors), "bytes": sum(storages.values())}
    return {**held, "objects": len(objects), "cuda_bytes": on_gpu}


@torch.no_grad()
def memory(options: argparse.Namespace) -> None:
    """Count the objects alive after many different calls."""
    for path in options.paths:
        clean()
        model = build(options.size, options.layers, options.device, windows="windows" in path)
        prepare(path, model)
        pick = random.Random(0)
        for call in range(1, 201):
            batch, length, new = (
                pick.choice((1, 2, 4)),
                pick.randrange(2, 700),
                pick.randrange(4, 24),
            )
            given = arguments(path, model, length + new)
            model.generate(prompt(model, batch, length), max_new_tokens=new, **given)
            if call in (10, 25, 50, 100, 150, 200):
                counts = [g.replays for g in memeff_compile.graphs() if g.replays is not None]
                row = {"kind": "serving memory", "path": path, "size": options.size, "calls": call}
                row |= {"graphs": len(memeff_compile.graphs())}
                row |= {"recordings": sum(each.recordings for each in counts)}
                rows.write(options.out, {**row, "layers": options.layers, **alive()})
        del model


def main() -> None:
    """Run the parts that were asked for."""
    parts = {"check": check, "time": measure, "host": host, "pair": pair, "memory": memory}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", nargs="+", choices=parts, default=["check", "time"])
    parser.add_argument("--paths", nargs="+", choices=PATHS, default=["static", "verb-4", "all"])
    parser.add_argument("--kinds", nargs="+", choices=COMPILED, default=["static", "verb-4"])
    parser.add_argument("--size", choices=WIDTHS, default="h200")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--batch", type=int, nargs="+", default=[8])
    parser.add_argument("--prompt", type=int, nargs="+", default=[12000])
    parser.add_argument("--turns", type=Path, help="a file that processes on a GPU share")
    parser.add_argument("--brief", action="store_true")
    parser.add_argument("--regions", choices=REGIONS, default="off", help="of the verb")
    parser.add_argument("--new", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--verbose", action="store_true", help="print the report of each path")
    parser.add_argument("--out", type=Path, default=Path("serving.jsonl"))
    options = parser.parse_args()
    options.device = "cpu" if options.size in ON_CPU else "cuda"
    for part in options.part:
        parts[part](options)


if __name__ == "__main__":
    main()
