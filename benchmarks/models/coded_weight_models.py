"""Compressed weights on small trained models, and encoding and decoding against matrix size.

    python benchmarks/data/corpus.py --folder text --megabytes 12 --vocabulary 16384
    python benchmarks/models/coded_weight_models.py --part curves --folder text
    python benchmarks/models/coded_weight_models.py --part t5 --folder text
    python benchmarks/models/coded_weight_models.py --part exponents --folder text
    python benchmarks/models/coded_weight_models.py --part throughput
    python benchmarks/models/coded_weight_models.py --part grouping

`curves`: the Llama of `convergence.py` in bf16, AdamW in the backward, on dense and on compressed
weights, from the same start on the same text: the losses, and how many of them differ in any bit.
`t5`: the loss of an encoder-decoder on held-out text for every number of mantissa bits; then its
training, likewise. `exponents`: how often each exponent occurs in the weights that `curves` trains,
and the entropy of sign, exponent and mantissa. `throughput`: bytes of bf16 per second, encoding and
decoding, compared with moving the weight to pinned memory of the host and back, and int8 codes with
a scale per row, written as plain PyTorch. `grouping`: one token through a model of Llama-3-8B's
shape, compiled by this backend with only its passes, in CUDA graphs: dense, compressed with linears
of one input in one launch, and with one launch for each; the results of the latter two are compared
bit for bit.

`--size tiny` runs everything on the CPU in seconds, on random tokens.
"""

from __future__ import annotations

import argparse
import copy
import functools
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import memeff_compile
from benchmarks import registry, rows, timing
from benchmarks.models import training
from benchmarks.ops.coded_weights import LOSSY, build, encode_into
from memeff_compile.kernels.coded_weight import CODECS, Room, coded_weight_decode, encode

STEPS = {"h200": 150, "tiny": 3}
BATCH = {"h200": 16, "tiny": 2}
RATE = 5e-4
SIDES = {"h200": (1024, 2048, 4096, 8192, 16384), "tiny": (256,)}
KEPT = (7, 3, 1, 0)


class Text:
    """Batches of tokens, the same for everyone; random ones for the smoke test."""

    def __init__(self, options: argparse.Namespace, split: str) -> None:
        """Read a split of the corpus in `options.folder`."""
        recipe = training.RECIPES["full" if options.size == "h200" else "tiny"]
        self.batch = BATCH[options.size]
        if options.size == "tiny":
            generator = torch.Generator().manual_seed(0)
            shape = (64, recipe.length)
            self.rows = torch.randint(0, 512, shape, generator=generator)
            self.vocabulary = 512
            return
        import json

        found = training.Tokens(options.folder, f"python-{split}", recipe, options.device)
        self.rows = found.rows.long()
        facts = json.loads((options.folder / "corpus.json").read_text())
        self.vocabulary = int(facts["vocabulary"])

    def __getitem__(self, step: int) -> Tensor:
        start = step * self.batch % (len(self.rows) - self.batch)
        return self.rows[start : start + self.batch]


def llama(options: argparse.Namespace, vocabulary: int) -> nn.Module:
    """Return the Llama of `convergence.py` in bf16."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tiny = options.size == "tiny"
    recipe = training.RECIPES["tiny" if tiny else "full"]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=128 if tiny else recipe.width,
        intermediate_size=256 if tiny else recipe.inner,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.heads,
        use_cache=False,
    )
    return LlamaForCausalLM(config).to(options.device, torch.bfloat16)


def t5_model(options: argparse.Namespace, vocabulary: int) -> nn.Module:
    """Return an encoder-decoder of T5-small's shape in bf16."""
    from transformers import T5Config, T5ForConditionalGeneration

    tiny = options.size == "tiny"
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=vocabulary,
        d_model=128 if tiny else 512,
        d_kv=32 if tiny else 64,
        d_ff=256 if tiny else 2048,
        num_layers=1 if tiny else 6,
        num_heads=4 if tiny else 8,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        use_cache=False,
    )
    return T5ForConditionalGeneration(config).to(options.device, torch.bfloat16)


def language_loss(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the loss of predicting each token from those before it."""
    return model(input_ids=ids, labels=ids).loss


def second_half_loss(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the loss of predicting the second half of a row from the first."""
    half = ids.shape[1] // 2
    return model(input_ids=ids[:, :half], labels=ids[:, half:].contiguous()).loss


def train(
    model: nn.Module,
    text: Text,
    steps: int,
    loss_of: Callable[[nn.Module, Tensor], Tensor],
    factory: Callable[[nn.Parameter], torch.optim.Optimizer],
) -> list[float]:
    """Train in the backward; return the losses."""
    optimizer = memeff_compile.optim_in_backward(model, factory)
    losses = []
    for step in range(steps):
        loss = loss_of(model, text[step])
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    optimizer.remove()
    return [float(loss) for loss in losses]


def adamw(parameter: nn.Parameter) -> torch.optim.Optimizer:
    """Return AdamW for one parameter."""
    return torch.optim.AdamW([parameter], lr=RATE, betas=(0.9, 0.95))


def sgd(parameter: nn.Parameter) -> torch.optim.Optimizer:
    """Return plain SGD for one parameter."""
    return torch.optim.SGD([parameter], lr=0.05)


def compared(
    options: argparse.Namespace,
    make: Callable[[argparse.Namespace, int], nn.Module],
    loss_of: Callable[[nn.Module, Tensor], Tensor],
    optimizers: dict[str, tuple[Callable[[nn.Parameter], torch.optim.Optimizer], int]],
) -> Iterator[dict[str, Any]]:
    """Train dense and compressed models from the same start; yield a row for each."""
    text = Text(options, "train")
    for name, (factory, steps) in optimizers.items():
        expected: list[float] = []
        weights: dict[str, Tensor] = {}
        for way in ("dense", *options.codec):
            model = make(options, text.vocabulary).train()
            bits = 16.0
            if way != "dense":
                report = memeff_compile.compress_(model, way, min_size=0, progress=False)
                bits = round(report.bits, 4)
            losses = train(model, text, steps, loss_of, factory)
            state = model.state_dict()
            if way == "dense":
                expected, weights = losses, {k: v.clone() for k, v in state.items()}
            row = {"optimizer": name, "way": way, "steps": steps, "bits": bits}
            row["differing_losses"] = sum(a != b for a, b in zip(losses, expected, strict=True))
            row["differing_weights"] = sum(not torch.equal(state[k], weights[k]) for k in weights)
            yield {**row, "loss": [round(loss, 5) for loss in losses]}
            del model, state


def curves(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Compare training of the small Llama."""
    found = compared(options, llama, language_loss, {"AdamW": (adamw, STEPS[options.size])})
    for row in found:
        yield {"model": "Llama", **row}


@torch.no_grad()
def held_out(model: nn.Module, text: Text, batches: int) -> float:
    """Return the mean loss on some batches, from fp32 logits."""
    model.eval()
    total = 0.0
    for number in range(batches):
        ids = text[number]
        half = ids.shape[1] // 2
        targets = ids[:, half:].contiguous()
        logits = model(input_ids=ids[:, :half], labels=targets).logits.float()
        total += float(F.cross_entropy(logits.flatten(0, 1), targets.flatten()))
    return total / batches


def t5(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Compare the loss of an encoder-decoder with fewer mantissa bits, then its training."""
    yield from kept_bits(options)
    twenty = min(20, STEPS[options.size])
    ways = {"SGD": (sgd, twenty), "AdamW": (adamw, twenty)}
    for row in compared(options, t5_model, second_half_loss, ways):
        yield {"model": "T5", **row}


def kept_bits(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Train an encoder-decoder; yield its held-out loss dense and for every number of bits kept."""
    text, other = Text(options, "train"), Text(options, "validation")
    model = t5_model(options, text.vocabulary).train()
    steps = 2 * STEPS[options.size]
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95))
    for step in range(steps):
        second_half_loss(model, text[step]).backward()
        optimizer.step()
        optimizer.zero_grad()
    del optimizer
    trained = {name: value.clone() for name, value in model.state_dict().items()}
    batches = 8 if options.size == "h200" else 1
    base = {"model": "T5", "batches": batches, "steps": steps}
    yield {**base, "kept": "dense", "bits": 16.0, "loss": held_out(model, other, batches)}
    for codec in options.codec:
        for kept in KEPT:
            memeff_compile.decompress_(model)
            model.load_state_dict(trained)
            report = memeff_compile.compress_(
                model, codec, mantissa=kept, min_size=0, progress=False
            )
            row = {**base, "kept": kept, "codec": codec, "bits": round(report.bits, 4)}
            yield {**row, "loss": held_out(model, other, batches)}


def entropy(counts: Tensor) -> float:
    """Return the bits that a symbol with these counts carries."""
    share = counts[counts > 0].double() / counts.sum()
    return float(-(share * share.log2()).sum())


def exponents(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Count exponents of weights before and after training, and measure entropies."""
    text = Text(options, "train")
    model = llama(options, text.vocabulary).train()
    for when in ("initial", "trained"):
        if when == "trained":
            train(model, text, STEPS[options.size], language_loss, adamw)
        patterns = [
            module.weight.detach().view(torch.int16).flatten().int() & 0xFFFF
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear) and "lm_head" not in name
        ]
        flat = torch.cat(patterns)
        found = torch.bincount((flat >> 7) & 0xFF, minlength=256)
        yield {
            "model": "Llama",
            "when": when,
            "weights": flat.numel(),
            "exponents": found.tolist(),
            "entropy": {
                "sign": round(entropy(torch.bincount(flat >> 15)), 4),
                "exponent": round(entropy(found), 4),
                "mantissa": round(entropy(torch.bincount(flat & 0x7F)), 4),
            },
        }


# --- throughput -----------------------------------------------------------------------------------


def to_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes of 8 bits and a scale per row."""
    scale = weight.abs().amax(1, keepdim=True).float() / 127
    return (weight.float() / scale).round().to(torch.int8), scale


def from_int8(codes: Tensor, scale: Tensor) -> Tensor:
    """Return the weight that codes stand for."""
    return (codes.float() * scale).to(torch.bfloat16)


def pairs(
    weight: Tensor, device: str
) -> dict[str, tuple[Callable[[], object], Callable[[], object]]]:
    """Return, per way, a function that compresses the weight or moves it away, and its inverse."""
    found: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {}
    for codec in CODECS:
        parts = encode(weight, codec, Room(0.02, 1024))
        found[codec] = (
            lambda parts=parts, codec=codec: encode_into(parts, weight, codec),
            lambda parts=parts, codec=codec: coded_weight_decode(parts, codec, list(weight.shape)),
        )
    for codec in LOSSY:
        parts = encode(weight, codec)
        found[codec.rpartition(":")[0] + " (lossy)"] = (
            lambda codec=codec: encode(weight, codec),
            lambda parts=parts, codec=codec: coded_weight_decode(parts, codec, list(weight.shape)),
        )
    codes, scale = to_int8(weight)
    found["int8 (lossy, plain PyTorch)"] = (
        lambda: to_int8(weight),
        lambda: from_int8(codes, scale),
    )
    host = torch.empty(weight.shape, dtype=weight.dtype, pin_memory=device == "cuda")
    found["host memory"] = (
        lambda: host.copy_(weight, non_blocking=True),
        lambda: torch.empty_like(weight).copy_(host, non_blocking=True),
    )
    return found


def throughput(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Time both directions on square matrices; wall time of a call with the wait for its end."""
    for side in SIDES[options.size]:
        weight = registry.weight_of("trained", (side, side), options.device)
        for way, both in pairs(weight, options.device).items():
            row: dict[str, Any] = {"way": way, "side": side, "mib": 2 * side * side / 2**20}
            for direction, call in zip(("in", "out"), both, strict=True):
                call()
                once = timing.waited(call)  # encoding lossy codes is plain PyTorch, and slow
                calls = max(1, min(20, int(20 / once))) if options.device == "cuda" else 1
                rounds = (7 if once < 20 else 3) if options.device == "cuda" else 1
                times = [1e3 * timing.waited(call, calls) for _ in range(rounds)]
                row[f"{direction}_us"] = rows.percentiles(times, 1)
                rate = 2 * weight.numel() / row[f"{direction}_us"]["median"] / 1e3
                row[f"{direction}_gb_per_s"] = round(rate, 1)
            yield row


# --- grouping -------------------------------------------------------------------------------------


@torch.no_grad()
def grouping(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Time one token through the whole model; graphs of all ways take turns."""
    from transformers import StaticCache

    from memeff_compile.kernels import coded_weight

    model = build(options).eval()
    ids = torch.randint(0, model.config.vocab_size, (1, 1), device=options.device)
    place = torch.tensor([64], device=options.device)
    together = coded_weight.MAX_TOGETHER
    ways = {"dense": ("", 1), "win4, apart": ("win4", 1), "win4, grouped": ("win4", together)}
    runs: dict[str, Callable[[], object]] = {}
    kept: list[object] = []  # the graphs' inputs
    found: dict[str, Tensor] = {}
    launches: dict[str, int] = {}
    for way, (codec, most) in ways.items():
        if codec and way == "win4, apart":
            model = copy.deepcopy(model)
            limit = 0 if options.size == "tiny" else 1 << 20
            memeff_compile.compress_(model, codec, min_size=limit, progress=False)
        torch._dynamo.reset()
        coded_weight.MAX_TOGETHER = most
        run = torch.compile(model, backend="memeff", options={"memeff.inner": "eager"})
        cache = StaticCache(config=model.config, max_cache_len=512)

        def step(run: Any = run, cache: Any = cache) -> Tensor:
            return run(
                input_ids=ids,
                past_key_values=cache,
                cache_position=place,
                position_ids=place[None],
            ).logits

        for _ in range(2):
            found[way] = step().clone()
        runs[way] = timing.captured(step)
        kept += [model, cache, step]
        records = memeff_compile.last_report().records
        launches[way] = sum("coded_weight_linears" in r.sentence for r in records)
    coded_weight.MAX_TOGETHER = together
    _wait(options.wait_for)
    timers = {way: functools.partial(timing.milliseconds, run) for way, run in runs.items()}
    taken = timing.in_turns(timers, 25 if options.device == "cuda" else 1)
    for way, times in taken.items():
        found_us = rows.percentiles([1e3 * each for each in times], 1)
        yield {"way": way, "graph": options.device == "cuda", "us": found_us}
    same = torch.equal(found["win4, apart"], found["win4, grouped"])
    yield {"same_bits": same, "records_of_groups": launches["win4, grouped"]}


def _wait(flag: Path | None) -> None:
    """Wait until a file is there: others may use the GPU before."""
    while flag is not None and not flag.exists():
        time.sleep(0.2)


PARTS = {
    "curves": curves,
    "t5": t5,
    "exponents": exponents,
    "throughput": throughput,
    "grouping": grouping,
}


def main() -> None:
    """Run the parts that were asked for and write their rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=PARTS, action="append")
    parser.add_argument("--size", choices=tuple(STEPS), default="h200")
    parser.add_argument("--folder", type=Path, help="of the corpus")
    parser.add_argument("--codec", choices=CODECS, action="append")
    parser.add_argument("--out", type=Path, default=Path("."), help="folder of the rows")
    parser.add_argument("--wait-for", type=Path, help="a file that ends compiling; time then")
    options = parser.parse_args()
    options.device = "cpu" if options.size == "tiny" else "cuda"
    options.codec = options.codec or ["win4", "tier"]
    for name in options.part or PARTS:
        # Two runs are compared bit for bit: the library must not choose among orders of sums.
        torch.use_deterministic_algorithms(name in ("curves", "t5"))
        torch.manual_seed(0)
        for row in PARTS[name](options):
            rounded = row.get("loss")
            if isinstance(rounded, float) and math.isfinite(rounded):
                row["loss"] = round(rounded, 5)
            rows.write(options.out / f"coded-weight-{name}.jsonl", {"part": name, **row})


if __name__ == "__main__":
    main()
