"""The first call of a training step and its later ones, with `memeff.regions` on and off.

    python benchmarks/models/start.py
    python benchmarks/models/start.py --device cuda --family gemma3 --hidden 1152 --layers 26

Each compilation runs in a process of its own with empty caches: Inductor alone, memeff, and memeff
with `memeff.regions="auto"`. A row has the seconds of the first forward and backward pass, the
median milliseconds of later ones, the peak of the allocator on a GPU, the largest relative
difference of a gradient from eager PyTorch's, and what the report says of layers.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import torch

from benchmarks import RESULTS, rows

BACKENDS = ("inductor", "memeff", "regions")
STEPS = 10


def model_of(arguments: argparse.Namespace) -> torch.nn.Module:
    """Build a model of transformers with random weights."""
    import transformers

    width, classes = arguments.hidden, arguments.vocabulary
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "vocab_size": classes}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": width // 4}
    settings: dict[str, Any] = {**sizes, **heads, "num_hidden_layers": arguments.layers}
    torch.manual_seed(0)
    if arguments.family == "gemma3":
        window = arguments.length // 2
        config: Any = transformers.Gemma3TextConfig(**settings, sliding_window=window)
    else:
        config = transformers.LlamaConfig(**settings)
    config.use_cache = False
    made: Any = transformers.AutoModelForCausalLM.from_config(config)
    if arguments.checkpointing:
        made.gradient_checkpointing_enable()
    dtype = torch.bfloat16 if arguments.device == "cuda" else torch.float32
    return made.to(arguments.device, dtype).train()


def measure(arguments: argparse.Namespace, backend: str) -> dict[str, Any]:
    """Compile a model, run its steps, and compare its gradients with eager PyTorch's."""
    import memeff_compile

    model = model_of(arguments)
    shape = (arguments.batch, arguments.length)
    ids = torch.randint(0, arguments.vocabulary, shape, device=arguments.device)

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        if arguments.device == "cuda":
            torch.cuda.synchronize()

    step()
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    options = {"memeff.regions": "auto"} if backend == "regions" else None
    name = "inductor" if backend == "inductor" else "memeff"
    begun = time.perf_counter()
    model.compile(backend=name, options=options)
    step()
    first = time.perf_counter() - begun
    pairs = zip((p.grad for p in model.parameters() if p.grad is not None), expected, strict=True)
    worst = max(float((found - each).norm() / each.norm()) for found, each in pairs)
    if arguments.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(STEPS):
        begun = time.perf_counter()
        step()
        times.append(time.perf_counter() - begun)
    peak = torch.cuda.max_memory_allocated() if arguments.device == "cuda" else None
    report = memeff_compile.last_report() if name == "memeff" else None
    said = [r.sentence for r in report.records if r.pass_name == "backend"] if report else []
    return {
        **{key: value for key, value in vars(arguments).items() if key != "out"},
        "backend": backend,
        "first_call_s": round(first, 1),
        "step_ms": round(1e3 * statistics.median(times), 2),
        "peak": peak,
        "worst_gradient": worst,
        "layers_said": said,
    }


def main() -> None:
    """Measure every backend in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--family", choices=("llama", "gemma3"), default="llama")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--vocabulary", type=int, default=512)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--out", type=Path, default=RESULTS / "cpu" / "start.jsonl")
    parser.add_argument("--backend", choices=BACKENDS, help="this one alone, in this process")
    arguments = parser.parse_args()
    if arguments.backend:
        rows.write(arguments.out, measure(arguments, arguments.backend))
        return
    for backend in BACKENDS:
        with tempfile.TemporaryDirectory() as folder:
            caches = {"TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": f"{folder}/triton"}
            again = [sys.executable, __file__, *sys.argv[1:], "--backend", backend]
            subprocess.run(again, check=True, env={**os.environ, **caches})


if __name__ == "__main__":
    main()
