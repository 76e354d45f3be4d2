"""End to end: the training step of unmodified transformers models, time and peak memory.

    python benchmarks/models/models.py --model llama3.2-1b gemma2-2b --backend inductor memeff
    python benchmarks/models/models.py --backend inductor "memeff mass" --attention causal
    python benchmarks/models/models.py --model llama3.2-1b --fresh --dynamic --batch 2 4 8 16 32 1

A step is forward + backward in bf16 under gradient checkpointing, with ``model(input_ids,
labels=labels)`` returning loss and logits. The backends share one model in one process and take
turns, step by step, so that a drift of the machine touches all of them; peak memory is the
allocator's absolute peak in a backend's own steps, weights and gradients included. Liger patches
transformers, so its rows come from a separate process; ``--fresh`` does that for every backend.
``--turns FILE`` is for commands that share a GPU: they compile in parallel, and run alone.
"""

from __future__ import annotations

import argparse
import gc
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks import RESULTS, rows, timing
from benchmarks.models.causal_attention import NAME as CAUSAL
from benchmarks.models.causal_attention import use_causal_attention
from benchmarks.turns import Turns

SHAPES: dict[str, tuple[int, int]] = {
    "llama3.2-1b": (8, 2048),
    "gemma2-2b": (4, 2048),
    "gemma3-1b": (8, 2048),
    "qwen3-1.7b": (4, 4096),
    "tiny": (2, 64),
}
BACKENDS = ("eager", "inductor", "memeff", "memeff exact", "memeff mass", "memeff block")
PEERS = ("liger", "liger inductor")


def config(name: str, layers: int | None = None) -> Any:
    """Return the transformers config of a benchmark model: real sizes, maybe fewer layers."""
    from transformers import Gemma2Config, Gemma3TextConfig, LlamaConfig, Qwen3Config

    if name == "llama3.2-1b":
        return LlamaConfig(
            vocab_size=128256,
            hidden_size=2048,
            intermediate_size=8192,
            num_hidden_layers=layers or 16,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=64,
            tie_word_embeddings=True,
            max_position_embeddings=131072,
        )
    if name == "gemma2-2b":
        return Gemma2Config(num_hidden_layers=layers or 26)
    if name == "gemma3-1b":
        return Gemma3TextConfig(
            vocab_size=262144,
            hidden_size=1152,
            intermediate_size=6912,
            num_hidden_layers=layers or 26,
            num_attention_heads=4,
            num_key_value_heads=1,
            head_dim=256,
            sliding_window=512,
        )
    if name == "qwen3-1.7b":
        return Qwen3Config(
            vocab_size=151936,
            hidden_size=2048,
            intermediate_size=6144,
            num_hidden_layers=layers or 28,
            num_attention_heads=16,
            num_key_value_heads=8,
            head_dim=128,
            tie_word_embeddings=True,
            max_position_embeddings=40960,
        )
    return LlamaConfig(
        vocab_size=2048,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers or 2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )


def attention_name(model: str, wanted: str) -> str:
    """Return transformers' name for an attention; the default is the one that the model runs
    today.
    """
    if wanted == "default":
        return "eager" if model.startswith("gemma2") else "sdpa"
    return use_causal_attention() if wanted == CAUSAL else wanted


def build(name: str, wanted: str, device: str, layers: int | None = None) -> torch.nn.Module:
    """Build the model for training with non-reentrant gradient checkpointing."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config(name, layers), dtype=torch.bfloat16)
    model.set_attn_implementation(attention_name(name, wanted))
    model.train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.config.use_cache = False
    return model


def settings(backend: str, options: dict[str, str]) -> dict[str, str]:
    """Return the options of a backend by its name; "memeff mass" is memeff with that filter."""
    if not backend.startswith("memeff"):
        return {}
    _, _, mode = backend.partition(" ")
    return {**({"memeff.linear_cross_entropy": mode} if mode else {}), **options}


def callable_for(model: Any, backend: str, options: dict[str, str]) -> Callable[..., Any]:
    """Return the model as a backend runs it; all of them share its weights."""
    compiler = backend.removeprefix("liger").strip() or "eager"
    if compiler == "eager":
        return model
    chosen = settings(backend, options)
    return torch.compile(model, backend=compiler.split()[0], options=chosen or None)


class Steps:
    """The training step of one backend, and its cost until now."""

    def __init__(
        self,
        model: Any,
        backend: str,
        options: dict[str, str],
        ids: torch.Tensor,
        run: Callable[..., Any] | None = None,
    ) -> None:
        self.model, self.ids = model, ids
        self.backend, self.options = backend, settings(backend, options)
        self.run = callable_for(model, backend, options) if run is None else run
        self.samples: list[float] = []
        self.peak = 0
        self.row: dict[str, Any] = {}

    def step(self) -> torch.Tensor:
        """Do one step and return its loss."""
        out = self.run(input_ids=self.ids, labels=self.ids)
        out.loss.backward()
        self.model.zero_grad(set_to_none=True)
        return out.loss.detach()

    def warm_up(self) -> None:
        """Compile, and do two steps that do not count."""
        started = time.perf_counter()
        self.row["loss"] = float(self.step())
        self.row["first_call_s"] = round(time.perf_counter() - started, 1)
        self.step()

    def timed(self) -> None:
        """Do one step that counts."""
        took, peak = timing.with_peak(self.step, is_cuda=self.ids.is_cuda)
        self.samples.append(took)
        self.peak = max(self.peak, peak)

    def result(self) -> dict[str, Any]:
        """Return the measured part of the row."""
        row = {**self.row, "ms": rows.percentiles(self.samples)}
        if self.ids.is_cuda:
            row["peak_gib"] = round(self.peak / 2**30, 3)
        return row


def measure(
    name: str,
    wanted: str,
    batches: list[int],
    backends: list[str],
    options: dict[str, str],
    steps: int,
    layers: int | None = None,
    turns: Path | None = None,
) -> Iterator[dict[str, Any]]:
    """Run the training steps of all backends in turn, in this process; yield a row for each.

    Of several batches all but one of a single sequence run the code compiled for the first: there
    the batch is a symbol.
    """
    import memeff_compile

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if any(backend in PEERS for backend in backends):
        patch_with_liger()
    memeff_compile.reset()
    gpu = Turns(turns)
    gpu.start()
    length = SHAPES[name][1]
    model = build(name, wanted, device, layers)
    ready: list[Steps] = []
    for batch in batches:
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(0, model.config.vocab_size, (batch, length), generator=generator)
        ids = ids.to(device)
        if len(batches) > 1 and batch > 1:
            torch._dynamo.mark_dynamic(ids, 0)
        calls = {run.backend: run.run for run in ready}
        runs = [Steps(model, backend, options, ids, calls.get(backend)) for backend in backends]
        ready = [run for run in runs if attempt(run, Steps.warm_up)]
        for _ in range(steps):
            ready = [run for run in ready if attempt(run, Steps.timed)]
        for run in runs:
            row: dict[str, Any] = {"what": "training step", "model": name, "batch": batch}
            row |= {"length": length, "attention": wanted, "backend": run.backend.split(" ")[0]}
            row |= {"name": run.backend, "options": run.options}
            row |= {"layers": layers} if layers else {}
            row["interleaved_with"] = [other for other in backends if other != run.backend]
            row |= run.result() if run in ready else run.row
            if turns is not None:
                row.pop("first_call_s", None)  # most of it was waiting
            if row["backend"] == "memeff" and run in ready:
                report = memeff_compile.last_report()
                row["rewrites_of_all"] = report.rewrites("fuse_linear_cross_entropy")
            yield row
    gpu.give()
    if any(run.backend.startswith("memeff") for run in ready):
        print(memeff_compile.last_report().details(), file=sys.stderr)


def attempt(run: Steps, part: Callable[[Steps], None]) -> bool:
    """Do a part of a measurement; on failure note why and return False."""
    try:
        part(run)
    except Exception as problem:
        run.row["error"] = f"{type(problem).__name__}: {problem}"[:200]
    run.model.zero_grad(set_to_none=True)
    if "error" in run.row:
        gc.collect()
        if run.ids.is_cuda:
            torch.cuda.empty_cache()
    return "error" not in run.row


def patch_with_liger() -> None:
    """Replace transformers' modules by Liger's, for this process."""
    from liger_kernel.transformers import apply_liger_kernel_to_gemma2, apply_liger_kernel_to_llama

    apply_liger_kernel_to_llama()
    apply_liger_kernel_to_gemma2()


def processes(backends: list[str], is_fresh: bool) -> list[list[str]]:
    """Return which backends share a process."""
    if is_fresh:
        return [[backend] for backend in backends]
    groups = [
        [b for b in backends if b not in PEERS],
        [b for b in backends if b in PEERS],
    ]
    return [group for group in groups if group]


def main() -> None:
    """Spawn a process for each model and attention, and for backends that cannot share one."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", nargs="+", default=["llama3.2-1b", "gemma2-2b"])
    parser.add_argument(
        "--backend", nargs="+", default=["inductor", "memeff"], choices=[*BACKENDS, *PEERS]
    )
    parser.add_argument(
        "--attention",
        nargs="+",
        default=["default"],
        help="default, causal, or a name that transformers knows, such as flex_attention",
    )
    parser.add_argument("--batch", nargs="+", type=int, help="instead of the model's own")
    parser.add_argument("--layers", type=int, help="instead of the model's own")
    parser.add_argument("--dynamic", action="store_true", help="one compilation for all batches")
    parser.add_argument("--option", action="append", default=[], help="key=value for memeff")
    parser.add_argument("--rounds", type=int, default=1, help="repeat everything")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--fresh", action="store_true", help="one process per backend")
    parser.add_argument("--turns", type=Path, help="a file that processes on a GPU share")
    parser.add_argument("--out", type=Path, default=RESULTS / "models.jsonl")
    parser.add_argument("--here", action="store_true", help="measure in this process")
    given = parser.parse_args()
    if given.here:
        options = dict(pair.split("=", 1) for pair in given.option)
        name, wanted = given.model[0], given.attention[0]
        batches = given.batch or [SHAPES[name][0]]
        for some in [batches] if given.dynamic else [[batch] for batch in batches]:
            asked = given.backend, options, given.steps, given.layers, given.turns
            for row in measure(name, wanted, some, *asked):
                rows.write(given.out, row)
        return
    groups = processes(given.backend, given.fresh)
    for name, wanted, _, group in product(
        given.model, given.attention, range(given.rounds), groups
    ):
        command = [sys.executable, __file__, "--here", "--model", name, "--attention", wanted]
        command += ["--backend", *group, "--steps", str(given.steps), "--out", str(given.out)]
        command += ["--dynamic"] * given.dynamic
        command += ["--layers", str(given.layers)] * bool(given.layers)
        command += ["--turns", str(given.turns)] * bool(given.turns)
        if given.batch:
            command += ["--batch", *map(str, given.batch)]
        subprocess.run([*command, *(f"--option={pair}" for pair in given.option)], check=False)


if __name__ == "__main__":
    main()
