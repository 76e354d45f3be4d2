"""End to end: the training step of unmodified transformers models, time and peak memory.

    python benchmarks/models.py --model llama3.2-1b gemma2-2b --backend inductor memeff

A step is forward + backward in bf16 under gradient checkpointing, with ``model(input_ids,
labels=labels)`` returning loss and logits. Every row is a fresh process: peak memory is the
allocator's absolute peak, weights and gradients included. Rounds alternate between the backends, so
a drift of the machine shows.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
import rows

SHAPES: dict[str, tuple[int, int]] = {
    "llama3.2-1b": (8, 2048),
    "gemma2-2b": (4, 2048),
    "tiny": (2, 64),
}


def config(name: str) -> Any:
    """Return the transformers config of a benchmark model: real sizes, random weights."""
    from transformers import Gemma2Config, LlamaConfig

    if name == "llama3.2-1b":
        return LlamaConfig(
            vocab_size=128256,
            hidden_size=2048,
            intermediate_size=8192,
            num_hidden_layers=16,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=64,
            tie_word_embeddings=True,
            max_position_embeddings=131072,
        )
    if name == "gemma2-2b":
        return Gemma2Config(num_hidden_layers=26)
    return LlamaConfig(
        vocab_size=2048,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )


def build(name: str, device: str) -> torch.nn.Module:
    """Build the model for training with non-reentrant gradient checkpointing."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            config(name),
            dtype=torch.bfloat16,
            attn_implementation="eager" if name.startswith("gemma2") else "sdpa",
        )
    model.train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.config.use_cache = False
    return model


def measure(name: str, backend: str, options: dict[str, str], steps: int) -> dict[str, Any]:
    """Run the training step in this process and return its row."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows_, length = SHAPES[name]
    model = build(name, device)
    if backend != "eager":
        model.compile(backend=backend, options=dict(options) or None)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, model.config.vocab_size, (rows_, length), generator=generator).to(device)

    def step() -> float:
        out = model(input_ids=ids, labels=ids)
        out.loss.backward()
        model.zero_grad(set_to_none=True)
        return float(out.loss.detach())

    started = time.perf_counter()
    loss = step()
    first = time.perf_counter() - started
    step()
    samples: list[float] = []
    row: dict[str, Any] = {
        "what": "training step",
        "model": name,
        "batch": rows_,
        "length": length,
        "backend": backend,
        "options": options,
        "loss": loss,
        "first_call_s": round(first, 1),
    }
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(steps):
            start, end = torch.cuda.Event(True), torch.cuda.Event(True)
            start.record()
            step()
            end.record()
            end.synchronize()
            samples.append(start.elapsed_time(end))
        row["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 3)
    else:
        for _ in range(steps):
            started = time.perf_counter()
            step()
            samples.append((time.perf_counter() - started) * 1e3)
    row["ms"] = rows.percentiles(samples)
    if backend == "memeff":
        from memeff_compile import last_report

        report = last_report()
        row["rewrites"] = report.rewrites("fuse_linear_cross_entropy")
        row["bytes_saved_by_formula"] = report.bytes_saved
        print(report, file=sys.stderr)
    return row


def main() -> None:
    """Spawn one fresh process per row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", nargs="+", default=["llama3.2-1b", "gemma2-2b"])
    parser.add_argument("--backend", nargs="+", default=["inductor", "memeff"])
    parser.add_argument("--option", action="append", default=[], help="key=value for memeff")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/models.jsonl"))
    parser.add_argument("--here", action="store_true", help="measure in this process: one row")
    given = parser.parse_args()
    if given.here:
        options = dict(pair.split("=", 1) for pair in given.option)
        name, backend = given.model[0], given.backend[0]
        rows.write(given.out, measure(name, backend, options, given.steps))
        return
    for name in given.model:
        for _ in range(given.rounds):
            for backend in given.backend:
                command = [
                    sys.executable,
                    __file__,
                    "--here",
                    "--model",
                    name,
                    "--backend",
                    backend,
                ]
                command += ["--steps", str(given.steps), "--out", str(given.out)]
                if backend == "memeff":
                    command += [f"--option={pair}" for pair in given.option]
                subprocess.run(command, check=False)


if __name__ == "__main__":
    main()
