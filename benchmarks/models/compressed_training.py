"""Compiled training with compressed weights: peak, time, and the bits of every weight at the end.

    python benchmarks/models/compressed_training.py --models llama3-8b qwen2.5-0.5b

The whole model is compiled by this backend, checkpointed, with plain SGD: after the backward (the
usual step), in the backward on dense weights, and in the backward on compressed ones. Each way is a
separate process; all compile in parallel, then take turns, alone on the GPU. Steps after the timed
ones run in parallel again, and a digest of all weights says whether ways agree bit for bit, for
which PyTorch is asked for deterministic algorithms (its attention adds atomically otherwise).
`--models tiny` runs on the CPU in seconds.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import memeff_compile
from benchmarks import rows, timing
from memeff_compile.kernels.coded_weight import CODECS

GIB = 2**30
RATE = 1e-3
AFTER, INSIDE = "dense, after the backward", "dense, in the backward"
WAYS = (AFTER, INSIDE, *CODECS)
QWEN = {"vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864}
QWEN |= {"num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2}
LLAMA = {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336}
LLAMA |= {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
TINY = {"vocab_size": 64, "hidden_size": 128, "intermediate_size": 256}
TINY |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
MODELS: dict[str, tuple[str, dict[str, Any], tuple[int, int]]] = {
    "qwen2.5-0.5b": ("Qwen2", {**QWEN, "tie_word_embeddings": True}, (8, 1024)),
    "llama3-8b": ("Llama", LLAMA, (8, 1024)),
    "tiny": ("Llama", TINY, (2, 16)),
}
LEAST_ELEMENTS = {"tiny": 0}
"""Of a weight that is compressed; small models have small weights."""
STEPS = {"qwen2.5-0.5b": 100}
"""Of one way, in all; as many as are timed, and three, of other models."""
OPTIONS = {"qwen2.5-0.5b": {"memeff.linear_cross_entropy.workspace": "64MiB"}}
"""Of a small model with a large vocabulary the loss, left to itself, holds more than any layer."""


def build(name: str, device: str) -> Any:
    """Return a checkpointed model in bf16, drawn from one seed."""
    import transformers

    kind, sizes, _ = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(**sizes, use_cache=False)
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model = getattr(transformers, f"{kind}ForCausalLM")(config)
    finally:
        torch.set_default_dtype(before)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def sgd(parameter: torch.nn.Parameter) -> torch.optim.Optimizer:
    """Return plain SGD for one parameter."""
    return torch.optim.SGD([parameter], lr=RATE)


def digest(model: torch.nn.Module) -> str:
    """Return a digest of the weights, whatever codes they are in."""
    memeff_compile.decompress_(model)
    found = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        found.update(name.encode())
        for part in parameter.detach().flatten().view(torch.int16).split(1 << 26):
            found.update(part.cpu().numpy().tobytes())
    return found.hexdigest()[:16]


def meet(given: argparse.Namespace, stage: str) -> None:
    """Wait until everyone is there, or patience is out."""
    (given.meet / f"{stage}, {given.model}, {given.way}").touch()
    deadline = time.time() + given.patience
    while len(list(given.meet.glob(f"{stage},*"))) < given.count and time.time() < deadline:
        time.sleep(0.2)


def one(given: argparse.Namespace) -> None:
    """Train in one way; write a row."""
    device = "cpu" if given.model == "tiny" else "cuda"
    shape = MODELS[given.model][2]
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # takes time, changes no result
    model = build(given.model, device)
    if given.way in CODECS:
        least = LEAST_ELEMENTS.get(given.model, 1 << 16)
        memeff_compile.compress_(model, given.way, min_size=least, progress=False)
    if given.way == AFTER:
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=RATE)
    else:
        optimizer = memeff_compile.optim_in_backward(model, sgd)
    options = {"memeff.inner": given.inner, **OPTIONS.get(given.model, {})}
    options |= dict(pair.split("=", 1) for pair in given.option)
    model.compile(backend="memeff", options=options)
    draw = torch.Generator().manual_seed(1)
    losses: list[Any] = []

    def step() -> None:
        ids = torch.randint(0, model.config.vocab_size, shape, generator=draw).to(device)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())

    started = time.perf_counter()
    for _ in range(2):
        step()
    timing.synchronize()
    first = round(time.perf_counter() - started, 1)
    meet(given, "compiled")
    with (given.meet.parent / "turn").open("w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        step()
        if device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        times = [1e-3 * timing.waited(step) for _ in range(given.timed)]
        peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
        timing.synchronize()
    row = {"what": "compiled training", "model": given.model, "way": given.way}
    row |= {"batch": shape[0], "length": shape[1], "peak_gib": round(peak / GIB, 3)}
    row |= {"s_per_step": rows.percentiles(times, 4), "first_two_steps_s": first}
    rows.write(given.out, row | {"options": options})
    meet(given, "timed")
    while len(losses) < (given.steps or STEPS.get(given.model, 0)):
        step()
    steps = len(losses)
    if hasattr(optimizer, "remove"):
        optimizer.remove()
    row = {"what": "weights behind compiled training", "model": given.model, "way": given.way}
    rows.write(given.out, row | {"steps": steps, "loss": float(losses[-1]), "sha": digest(model)})


def main() -> None:
    """Run every way of every model in parallel, or the requested one."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["tiny"])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--steps", type=int, help="in all; three are never timed")
    parser.add_argument("--timed", type=int, default=8, help="of these")
    parser.add_argument("--inner", default="inductor")
    parser.add_argument("--option", action="append", default=[], help="key=value for memeff")
    parser.add_argument(
        "--patience", type=float, default=200, help="seconds to wait for others, twice"
    )
    parser.add_argument("--out", type=Path, default=Path("compressed-training.jsonl"))
    parser.add_argument("--model", help=argparse.SUPPRESS)
    parser.add_argument("--way", help=argparse.SUPPRESS)
    parser.add_argument("--meet", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--count", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.way:
        one(given)
        return
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder) / "here"
        here.mkdir()
        runs = [(model, way) for model in given.models for way in given.ways]
        shared = ["--meet", str(here), "--count", str(len(runs))]
        each = [sys.executable, *sys.argv, *shared]
        begun = [subprocess.Popen([*each, "--model", model, "--way", way]) for model, way in runs]
        ended = [process.wait() for process in begun]
        failed = [f"{model} {way}" for (model, way), code in zip(runs, ended, strict=True) if code]
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
