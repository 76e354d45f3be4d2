"""Linear + cross entropy, every method: gradient error first, then memory, then time.

    python benchmarks/ops/linear_cross_entropy.py --shape gemma2 llama3 --data peaked
    python benchmarks/ops/linear_cross_entropy.py --ignored 0 50 90 --method eager "memeff mass"
    python benchmarks/ops/linear_cross_entropy.py --scaling V --method inductor "memeff mass"

A method whose loss or gradients are off is not timed: its row says why. Peak memory comes from a
fresh process per row. Times are taken in one process per shape and data, every method in turn, with
device events and an emptied cache; rows hold median, 20th and 80th percentile.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks import RESULTS, measuring, methods, registry, rows

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
DEFAULT_METHODS = [
    "eager",
    "inductor",
    "memeff exact",
    "memeff mass",
    "memeff block",
    "apple",
    "apple no filter",
    "liger",
]
SCALING = {
    "N": [f"{n}x2304x256000" for n in (1024, 2048, 4096, 8192, 16384, 32768)],
    "D": [f"8192x{d}x128256" for d in (1024, 2048, 3072, 4096, 6144, 8192)],
    "V": [f"8192x2304x{v}" for v in (32000, 64000, 128000, 256000, 512000)],
}
"""Shapes of which one size varies around Gemma-2-2B and Llama-3-8B heads."""


def device() -> str:
    """Return the device that everything is measured on."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def describe(shape: str, data: str, ignored: int, dtype: str, method: str) -> dict[str, Any]:
    """Return the part of a row that describes the measurement."""
    n, d, v = registry.sizes(shape) if data in registry.DATA else registry.saved_sizes(data)
    return {
        "what": "linear cross entropy",
        "shape": shape if data in registry.DATA else f"{n}x{d}x{v}",
        "method": method,
        "N": n,
        "D": d,
        "V": v,
        "data": data if data in registry.DATA else Path(data).stem,
        "ignored_percent": ignored,
        "dtype": dtype,
    }


def memory_here(shape: str, data: str, ignored: int, dtype: str, method: str) -> dict[str, Any]:
    """Return the memory of one method, measured in this process."""
    tensors = registry.inputs(shape, data, device(), DTYPES[dtype], ignored)
    try:
        return measuring.memory(methods.method(method).build(), tensors)
    except torch.cuda.OutOfMemoryError as problem:
        return {"error": str(problem)[:100]}


def memory_in_a_fresh_process(given: argparse.Namespace, case: tuple[Any, ...]) -> dict[str, Any]:
    """Return the memory of one method, from a separate process."""
    shape, data, ignored, method = case
    command = [sys.executable, __file__, "--memory-here", "--shape", shape, "--data", data]
    command += ["--ignored", str(ignored), "--dtype", given.dtype, "--method", method]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        return {"error": result.stderr.strip().splitlines()[-1][:200]}
    found: dict[str, Any] = json.loads(result.stdout.strip().splitlines()[-1])
    return found


def checked(
    names: list[str], tensors: registry.Inputs, base: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """Fill in errors for every method and return the losses that may be timed."""
    wanted = measuring.reference(tensors)
    losses = {}
    for name in names:
        method = methods.method(name)
        row = base[name]
        reason = method.why_not()
        if reason is not None:
            row["unavailable"] = reason
            continue
        try:
            loss = method.build()
            row |= measuring.gate(method, loss, tensors, wanted)
        except Exception as problem:
            row["error"] = f"{type(problem).__name__}: {problem}"[:200]
            continue
        finally:
            tensors.without_gradients()
        if "failed" not in row:
            losses[name] = loss
    return losses


def measure(
    names: list[str], shape: str, data: str, ignored: int, given: argparse.Namespace
) -> list[dict[str, Any]]:
    """Return one row per method of one shape and data: errors, memory, times."""
    torch._dynamo.reset()  # shapes are compiled one by one; more than eight would not be
    base = {name: describe(shape, data, ignored, given.dtype, name) for name in names}
    tensors = registry.inputs(shape, data, device(), DTYPES[given.dtype], ignored)
    losses = checked(names, tensors, base)
    if given.repeats:
        timed = measuring.interleaved(losses, tensors, given.repeats, device())
        for name, times in timed.items():
            base[name] |= times
    del tensors
    gc.collect()
    if device() == "cuda":
        torch.cuda.empty_cache()
        cases = [(shape, data, ignored, name) for name in losses]
        with ThreadPoolExecutor(given.at_once) as pool:
            peaks = list(pool.map(lambda case: memory_in_a_fresh_process(given, case), cases))
        for name, found in zip(losses, peaks, strict=True):
            base[name]["memory_mib"] = found
    return list(base.values())


def arguments(description: str | None = __doc__) -> argparse.ArgumentParser:
    """Return the parser that `run` and `ablations` share."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", nargs="+", default=["gemma2", "llama3"])
    parser.add_argument("--data", nargs="+", type=registry.data_named, default=["peaked"])
    parser.add_argument("--ignored", nargs="+", type=int, default=[0], help="percent of targets")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--repeats", type=int, default=10, help="rounds; 0 for no times")
    parser.add_argument("--at-once", type=int, default=4, help="memory processes at a time")
    return parser


def main() -> int:
    """Measure every method on every shape and data; fail if a method's gradients are off."""
    parser = arguments()
    parser.add_argument(
        "--method", nargs="+", default=DEFAULT_METHODS, help="or memeff mass sort=0"
    )
    parser.add_argument("--scaling", choices=SCALING, help="shapes of which one size varies")
    parser.add_argument("--out", type=Path, default=RESULTS / "head-and-loss.jsonl")
    parser.add_argument("--memory-here", action="store_true", help="one case, in this process")
    given = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    if given.memory_here:
        case = (given.shape[0], given.data[0], given.ignored[0], given.dtype, given.method[0])
        print(json.dumps(memory_here(*case)))
        return 0
    shapes = SCALING[given.scaling] if given.scaling else given.shape
    failed = 0
    for shape, data, ignored in product(shapes, given.data, given.ignored):
        for row in measure(given.method, shape, data, ignored, given):
            if given.scaling:
                row["scaling"] = given.scaling
            rows.write(given.out, row)
            failed += "failed" in row
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
