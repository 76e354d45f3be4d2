"""`memeff demo`: train a small Llama with and without the backend, and compare loss and memory.

The training text is the Python sources on this machine, so the demo downloads no data. Each run is
a new process that compiles, warms up, and then reports the peak memory of its training steps. On a
GPU, this is the peak that the allocator counts. On the CPU, it is the peak of the process's
resident memory. If matplotlib is installed, a plot of the losses and the peak memory is saved in
demo_output/.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import memeff_compile

from .doctor import inductor_problem, installed

WARM_UP = 2
NEEDS = ("transformers", "tokenizers", "tqdm")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCABULARY = 32768
LAYERS, HEADS = 2, 4
if DEVICE == "cuda":
    DTYPE, WIDTH, BATCH, LENGTH = torch.bfloat16, 1024, 16, 1024
else:
    DTYPE, WIDTH, BATCH, LENGTH = torch.float32, 128, 8, 256


def say(text: str) -> None:
    """Print a line and flush the output, because the demo's next step takes a while."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def installed_text(megabytes: float = 4) -> str:
    """Return source text of Python's standard library, a little more than the given number of
    megabytes."""
    text = ""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_text(errors="ignore")
        if len(text) > megabytes * 1e6:
            break
    return text


def make_batches(steps: int) -> torch.Tensor:
    """Return token ids of shape (steps, BATCH, LENGTH); this function trains the tokenizer on the
    text that it encodes."""
    from tokenizers import ByteLevelBPETokenizer

    text = installed_text()
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(text.splitlines(keepends=True), VOCABULARY, show_progress=False)
    ids = torch.tensor(tokenizer.encode(text).ids)
    starts = torch.randint(len(ids) - LENGTH, (steps, BATCH))
    return torch.stack([torch.stack([ids[s : s + LENGTH] for s in row]) for row in starts])


def reset_peak() -> None:
    """Reset the counter of peak memory, so that the measurement starts at this call."""
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
    elif sys.platform == "linux":
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    """Return the peak memory since `reset_peak`, or since the process started if the counter cannot
    be reset."""
    if DEVICE == "cuda":
        return torch.cuda.max_memory_allocated()
    if sys.platform == "linux":
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) * 1024
    import resource  # Windows has no such module

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def train(name: str, inner: str, batches: torch.Tensor) -> dict[str, Any]:
    """Train on every batch; return losses, memory, speed, and the backend's report on its
    rewrites."""
    from tqdm import tqdm
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=11 * WIDTH // 4,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        max_position_embeddings=LENGTH,
    )
    model: Any = LlamaForCausalLM(config)
    model.to(DEVICE, DTYPE)
    if name == "memeff":
        model.compile(backend="memeff", options={"memeff.inner": inner})
    else:
        model.compile(backend=inner)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, started = [], time.perf_counter()
    progress = tqdm(batches.to(DEVICE), desc=f"{name:>9}", unit="step", ncols=90, mininterval=1)
    for step, ids in enumerate(progress):
        if step == WARM_UP:
            reset_peak()
            started = time.perf_counter()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        progress.set_postfix(loss=f"{losses[-1]:.3f}")
    seconds = (time.perf_counter() - started) / (len(batches) - WARM_UP)
    report = str(memeff_compile.last_report())
    return {"losses": losses, "peak": peak_bytes(), "seconds": seconds, "report": report}


def run_in_fresh_process(name: str, inner: str, batches: Path) -> dict[str, Any]:
    """Run `train` in a new process, so that the runs' memory is measured separately."""
    result = batches.with_name(f"{name}.json")
    arguments = ["-m", "memeff_compile", "demo", "--run", name, inner, str(batches), str(result)]
    subprocess.run([sys.executable, *arguments], check=True)
    run: dict[str, Any] = json.loads(result.read_text())
    return run


def draw(runs: dict[str, dict[str, Any]], path: Path) -> None:
    """Plot the loss curves in one chart, and the peak memory of each run as bars from zero."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), width_ratios=[2, 1])
    for (name, run), style in zip(runs.items(), ("-", "--"), strict=True):
        left.plot(run["losses"], style, label=name)
        right.bar_label(right.bar(name, run["peak"] / 2**30), fmt="%.2f")
    left.set(xlabel="step", ylabel="loss", title="Loss")
    left.legend()
    right.set(ylabel="GiB", title="Peak memory while training")
    figure.tight_layout()
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=150)


def compare(steps: int) -> None:
    """Train without and with the backend `memeff`, each in a new process, then print both results.

    Without `memeff`, the compiler is Inductor, or `aot_eager` if Inductor cannot compile here."""
    problem = inductor_problem(DEVICE)
    inner = "aot_eager" if problem else "inductor"
    if problem:
        say(f"Inductor cannot compile here ({problem}); both runs use aot_eager instead.")
    with tempfile.TemporaryDirectory() as folder:
        batches = Path(folder) / "batches.pt"
        say(f"Tokenizing installed Python sources; training on {DEVICE} with {inner}.")
        torch.manual_seed(0)
        torch.save(make_batches(steps), batches)
        runs = {name: run_in_fresh_process(name, inner, batches) for name in (inner, "memeff")}
    plain, ours = runs[inner], runs["memeff"]
    say(f"\n{ours['report']}\n")
    for name, run in runs.items():
        memory = f"{run['peak'] / 2**30:.2f} GiB"
        say(f"{name:>9}: last loss {run['losses'][-1]:.4f}, {memory}, {run['seconds']:.2f} s/step")
    difference = max(abs(a - b) for a, b in zip(plain["losses"], ours["losses"], strict=True))
    say(f"Largest difference between the loss curves: {difference:.1e}")
    path = Path("demo_output") / "train_tiny_llama.png"
    if importlib.util.find_spec("matplotlib") is None:
        say("No plot: matplotlib is not installed.")
    else:
        draw(runs, path)
        say(f"Plot: {path}")


def run(given: argparse.Namespace) -> int:
    """Run `memeff demo`, or with `--run` train once with one backend.

    `memeff demo` starts a new process with `--run` for each backend. Return 1 if a package is
    missing or `--steps` is too small, otherwise 0.
    """
    missing = [name for name in NEEDS if not installed(name)]
    if missing:
        sys.stderr.write(
            f'The demo needs {" and ".join(missing)}: pip install "memeff_compile[demo]", or '
            f"pip install {' '.join(missing)}.\n"
        )
        return 1
    if given.steps <= WARM_UP:
        sys.stderr.write(f"--steps is {given.steps}; {WARM_UP + 1} are needed at least.\n")
        return 1
    if given.run is None:
        compare(given.steps)
    else:
        name, inner, batches, result = given.run
        Path(result).write_text(json.dumps(train(name, inner, torch.load(batches))))
    return 0
