"""The first call of a training step and its later ones, with `memeff.regions` on and off.

    python benchmarks/models/start.py
    python benchmarks/models/start.py --device cuda --model gemma3-1b
    python benchmarks/models/start.py --device cuda --model gemma3-1b --layers 8 --together
    python benchmarks/models/start.py --device cuda --model llama3.2-1b --artifacts

Each compilation runs in a process of its own with empty caches: Inductor alone, memeff, and memeff
with `memeff.regions="on"`. A row has the seconds of the first forward and backward pass (and
those of the CPU, with child processes), how they divide, the median milliseconds of later ones, the
peak of the allocator on a GPU, the largest relative difference of a gradient from eager PyTorch's,
and what the report says of layers.

`--together` compiles the backends in one process, with the caches that it finds, and measures their
steps in turns: that is how small differences of a step are measured. There each gradient is
compared with that of the first backend. Processes that get the same file as `--turns` share a GPU:
they compile in parallel, but one process at a time runs on the GPU, also while its kernels choose
their settings in a first run. The seconds of a first call are without the wait for other processes.

`--artifacts` saves PyTorch's cache artifacts after the first call with `memeff.regions="on"`, and
loads them in another process with empty caches; `load_s` has the seconds of that.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import torch

from benchmarks import RESULTS, rows, timing
from benchmarks.models import models
from benchmarks.turns import Turns

BACKENDS = ("inductor", "memeff", "regions")
STEPS = 10


def model_of(arguments: argparse.Namespace) -> Any:
    """Build a model of transformers with random weights."""
    import transformers

    if arguments.model:
        return models.build(arguments.model, "sdpa", arguments.device, arguments.layers)
    width, classes = arguments.hidden, arguments.vocabulary
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "vocab_size": classes}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": width // 4}
    settings: dict[str, Any] = {**sizes, **heads, "num_hidden_layers": arguments.layers or 24}
    torch.manual_seed(0)
    if arguments.family == "gemma3":
        window = (arguments.length or 32) // 2
        config: Any = transformers.Gemma3TextConfig(**settings, sliding_window=window)
    else:
        config = transformers.LlamaConfig(**settings)
    config.use_cache = False
    made: Any = transformers.AutoModelForCausalLM.from_config(config)
    if arguments.checkpointing:
        made.gradient_checkpointing_enable()
    dtype = torch.bfloat16 if arguments.device == "cuda" else torch.float32
    return made.to(arguments.device, dtype).train()


class Run:
    """One backend's training step, and the cost of its first call."""

    def __init__(self, model: Any, ids: torch.Tensor, backend: str, turns: Turns) -> None:
        import memeff_compile

        self.model, self.ids, self.backend = model, ids, backend
        regions = {"memeff": "off", "regions": "on"}.get(backend)
        options = {"memeff.regions": regions} if regions else None
        name = "inductor" if backend == "inductor" else "memeff"
        self.call = torch.compile(model, backend=name, options=options)
        self.samples: list[float] = []
        self.peak = 0
        PHASES.clear()
        torch._dynamo.utils.counters.clear()
        before = len(memeff_compile.graphs())
        begun, cpu = time.perf_counter() - turns.waited_s, cpu_seconds()
        self.step()
        first = time.perf_counter() - turns.waited_s - begun
        graphs = memeff_compile.graphs()[before:]
        passes = sum(graph.seconds for graph in graphs)
        said = [r.sentence for g in graphs for r in g.records if r.code == "repeated_layers"]
        self.row: dict[str, Any] = {
            "backend": backend,
            "first_call_s": round(first, 1),
            "first_call_cpu_s": round(cpu_seconds() - cpu, 1),
            "split_s": divided(first, passes),
            "compiled_functions": len(PHASES.get("compile_fx_inner", ())),
            "caches": cache_counts(),
            "layers_said": said,
        }

    def step(self) -> None:
        """Run forward and backward."""
        self.call(input_ids=self.ids, labels=self.ids).loss.backward()
        if self.ids.is_cuda:
            torch.cuda.synchronize()

    def gradients(self) -> list[torch.Tensor]:
        """Return the gradients of one step."""
        self.model.zero_grad()
        self.step()
        return [p.grad.clone() for p in self.model.parameters() if p.grad is not None]

    def timed(self) -> None:
        """Run one step that counts."""
        self.model.zero_grad()
        took, peak = timing.with_peak(self.step, is_cuda=self.ids.is_cuda)
        self.samples.append(took)
        self.peak = max(self.peak, peak)

    def result(self) -> dict[str, Any]:
        """Return the row without what is common to all backends."""
        step = round(statistics.median(self.samples), 2)
        return {**self.row, "step_ms": step, "peak": self.peak if self.ids.is_cuda else None}


PHASES: dict[str, list[float]] = torch._dynamo.utils.compilation_time_metrics
"""Seconds of each call of PyTorch's compilation phases, by name."""


def divided(first: float, passes: float) -> dict[str, float]:
    """Divide the seconds of a first call into those of its phases."""

    def total(*names: str) -> float:
        return sum(sum(PHASES.get(name, ())) for name in names)

    frames = total("_compile.compile_inner")
    backends = total("OutputGraph.call_user_compiler")
    inductor = total("compile_fx_inner")
    lazily = total("backward._backward_impl")
    kernels = total("async_compile.wait")
    parts = {
        "dynamo": frames - backends,
        "passes": passes,
        "aot_autograd": backends + lazily - passes - inductor,
        "inductor": inductor - kernels,
        "compiling_kernels": kernels,
        "running": first - frames - lazily,
    }
    return {name: round(seconds, 2) for name, seconds in parts.items()}


def cache_counts() -> dict[str, int]:
    """Return how many graphs and functions PyTorch's caches had, lacked and refused to store."""
    both = (("aot_autograd", "autograd_cache"), ("inductor", "fxgraph_cache"))
    counters = torch._dynamo.utils.counters
    return {
        name: count
        for group, prefix in both
        for name, count in counters[group].items()
        if name.startswith(prefix)
    }


def cpu_seconds() -> float:
    """Return the seconds that CPUs have spent on this process and its children."""
    both = resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN
    return sum(sum(resource.getrusage(who)[:2]) for who in both)


def worst(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """Return the largest relative difference of a gradient."""
    pairs = zip(found, expected, strict=True)
    return max(float((ours - theirs).norm() / theirs.norm()) for ours, theirs in pairs)


def measure(arguments: argparse.Namespace, backends: list[str]) -> None:
    """Compile a model for each backend, run the steps in turns, and write a row for each."""
    model = model_of(arguments)
    batch, length = models.SHAPES[arguments.model] if arguments.model else (2, 32)
    shape = (arguments.batch or batch, arguments.length or length)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, model.config.vocab_size, shape, generator=generator)
    ids = ids.to(arguments.device)
    expected: list[torch.Tensor] = []
    if not arguments.together and not arguments.model:
        model(input_ids=ids, labels=ids).loss.backward()
        expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
    runs = []
    loading = loaded_in(arguments.load)
    turns = Turns(arguments.turns)
    if arguments.turns:
        turns.start()
    for backend in backends:
        run = Run(model, ids, backend, turns)
        print(run.row, file=sys.stderr, flush=True)
        found = run.gradients()
        if expected:
            run.row["worst_gradient"] = worst(found, expected)
        expected = expected or found
        del found
        runs.append(run)
    del expected
    save(arguments.save)
    for turn in range(arguments.steps):
        for run in runs if turn % 2 else runs[::-1]:
            run.timed()
    turns.give()
    common = {key: value for key, value in vars(arguments).items() if key not in NOT_IN_ROWS}
    common |= {"batch": ids.shape[0], "length": ids.shape[1]}
    if arguments.load:
        common |= {"artifacts": "loaded", "load_s": round(loading, 2)}
    for run in runs:
        rows.write(arguments.out, {**common, **run.result()})


NOT_IN_ROWS = ("out", "backend", "artifacts", "save", "load", "turns")


def save(file: Path | None) -> None:
    """Write PyTorch's cache artifacts to a file."""
    if file is not None and (saved := torch.compiler.save_cache_artifacts()) is not None:
        file.write_bytes(saved[0])


def loaded_in(file: Path | None) -> float:
    """Load PyTorch's cache artifacts, and return the seconds that this takes."""
    begun = time.perf_counter()
    if file is not None:
        torch.compiler.load_cache_artifacts(file.read_bytes())
    return time.perf_counter() - begun


def run_with_empty_caches(*more: str) -> None:
    """Run this script in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        caches = {"TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": f"{folder}/triton"}
        again = [sys.executable, __file__, *sys.argv[1:], *more]
        subprocess.run(again, check=True, env={**os.environ, **caches})


def main() -> None:
    """Measure every backend in a process of its own, or all in this one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", choices=tuple(models.SHAPES), help="real sizes, checkpointed")
    parser.add_argument("--family", choices=("llama", "gemma3"), default="llama")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--vocabulary", type=int, default=512)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--length", type=int)
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--together", action="store_true", help="memeff and regions, in turns")
    parser.add_argument("--out", type=Path, default=RESULTS / "cpu" / "start.jsonl")
    parser.add_argument("--backend", choices=BACKENDS, help="this one alone, in this process")
    parser.add_argument("--turns", type=Path, help="a file that processes on a GPU share")
    parser.add_argument("--artifacts", action="store_true", help="a second process loads them")
    parser.add_argument("--save", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--load", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.together:
        return measure(arguments, ["memeff", "regions"])
    if arguments.backend:
        return measure(arguments, [arguments.backend])
    if arguments.artifacts:
        with tempfile.NamedTemporaryFile() as file:
            run_with_empty_caches("--backend", "regions", "--save", file.name)
            run_with_empty_caches("--backend", "regions", "--load", file.name)
        return None
    for backend in BACKENDS:
        run_with_empty_caches("--backend", backend)
    return None


if __name__ == "__main__":
    main()
