"""The largest batch that `explain` claims for a model and a memory, run within that memory.

    python benchmarks/models/largest_batch.py CONFIG ... --memory 24GiB --length 1024

For each config.json, or folder with one: `explain` on the CPU, for AdamW in bf16 with gradient
checkpointing, and its largest batches with Inductor and with memeff. Each claimed batch is then
trained, with random weights, in a process whose allocator gets no more than this memory. If it does
not fit, smaller ones are tried. A row has the claim, the batch that ran, and the most bytes that
were allocated and reserved.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import torch

from benchmarks import RESULTS, methods, rows

STEPS = 3
SHARES = (1.0, 0.97, 0.94, 0.9, 0.8)
"""Of the claimed batch: the first that fits is the result."""
SIDES = {"memeff": "after", "inductor": "before"}


def loaded(folder: Path, *, real: bool) -> Any:
    """Return a model in training, with random weights on the GPU, or without any memory."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    here = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(here if real else "meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.config.use_cache = False
    model.gradient_checkpointing_enable()
    return model.train()


def claimed(folder: Path, memory: str, length: int) -> dict[str, Any]:
    """Return the largest batch of each backend, and its predicted peak."""
    from memeff_compile.planning.explain import explain

    ids = torch.randint(5, 3000, (8, length))
    found = explain(loaded(folder, real=False), input_ids=ids, labels=ids)
    plan = found.plan(optimizer="adamw", memory=memory)
    return {
        name: {"batch": getattr(plan, side).largest_batch, "memory": memory, "length": length}
        for name, side in SIDES.items()
    }


def train(folder: Path, backend: str, claim: dict[str, Any], total: int) -> dict[str, Any]:
    """Train with the claimed batch, or with the largest smaller one that fits."""
    is_cuda = torch.cuda.is_available()
    if is_cuda:
        whole = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(total / whole)
    found = None
    for share in SHARES:
        batch = int(claim["batch"] * share)
        if batch == 0:  # `explain` claims that no sequence fits
            break
        found = _steps(folder, backend, batch, claim["length"])
        if found is not None:
            break
    peak, reserved = found or (None, None)
    return {
        "model": folder.name.removesuffix(".json"),
        "backend": backend,
        **claim,
        "ran": batch if found else None,
        "fits": share == 1.0 and found is not None,
        "peak_mib": peak,
        "reserved_mib": reserved,
        "peak_of_memory": None if peak is None else round(peak * 2**20 / total, 3),
    }


def _steps(folder: Path, backend: str, batch: int, length: int) -> tuple[float, float] | None:
    """Return the most allocated and reserved MiB of some steps, or None if memory was too small."""
    torch._dynamo.reset()
    model = loaded(folder, real=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    methods.registered()
    model.compile(backend=backend)
    device = model.device
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    try:
        for _ in range(STEPS):
            ids = torch.randint(5, 3000, (batch, length), device=device)
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    except torch.OutOfMemoryError as problem:
        print(folder.name, backend, batch, str(problem)[:200], flush=True)
        return None
    if device.type != "cuda":
        return 0.0, 0.0
    peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return tuple(round(each / 2**20, 1) for each in peaks)  # type: ignore[return-value]


def main() -> None:
    """Explain every model, then train each in a separate process."""
    from memeff_compile.planning.setting import read_memory

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("folders", nargs="+", type=Path, help="a config.json, or with one")
    parser.add_argument("--memory", default="12GiB")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--backend", nargs="+", default=list(SIDES), choices=list(SIDES))
    parser.add_argument("--jobs", type=int, default=1, help="processes at once")
    parser.add_argument("--claim", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=RESULTS / "nvidia-h200" / "largest-batch.jsonl")
    given = parser.parse_args()
    if given.claim:
        (folder,), (backend,) = given.folders, given.backend
        rows.write(given.out, train(folder, backend, given.claim, read_memory(given.memory)))
        return

    def run(backend: str, folder: Path, claim: dict[str, Any]) -> None:
        print(folder.name, backend, claim, flush=True)
        again = [sys.executable, __file__, str(folder), "--backend", backend]
        again += ["--memory", given.memory, "--out", str(given.out), "--claim", json.dumps(claim)]
        subprocess.run(again, check=False)

    with ThreadPoolExecutor(given.jobs) as pool:
        running = []
        for folder in given.folders:  # not in threads: Dynamo traces one model at a time
            claims = claimed(folder, given.memory, given.length)
            running += [pool.submit(run, each, folder, claims[each]) for each in given.backend]
        for each in running:
            each.result()


if __name__ == "__main__":
    main()
