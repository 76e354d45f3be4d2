"""`memeff fit` against a GPU's allocator: train by the lines it prints, and count.

    memeff fit FOLDER --gpu h100 --length 2048 --batch 4 --json plan.json
    python benchmarks/models/fitted.py FOLDER plan.json

Each setting of the plan runs in a process of its own: a model of the folder's config with random
weights in bf16 on the GPU, the lines of the setting as they are printed, and four steps of the
plan's batch and length. A row has the peak that the plan gives, the most bytes that the allocator
held, and their ratio. Settings whose lines need a package that is not there are left out; of two
settings that share a name, the first one runs.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import torch

import memeff_compile
from benchmarks import RESULTS, rows

STEPS = 4
PACKAGES = ("bitsandbytes", "peft")


def measure(folder: str, plan: dict[str, Any], setting: str) -> dict[str, Any]:
    """Train by one setting's lines, and return its row."""
    import transformers

    row = next(each for each in plan["rows"] if each["setting"] == setting)
    config = transformers.AutoConfig.from_pretrained(folder)
    torch.manual_seed(0)
    with torch.device("cuda"):
        made: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    known: dict[str, Any] = {"model": made.train(), "memeff_compile": memeff_compile}
    known |= {name: importlib.import_module(name) for name in ("torch", *PACKAGES) if _has(name)}
    for line in row["lines"]:
        exec(line, known)
    model, optimizer = known["model"], known["optimizer"]
    shape = (plan["batch"], plan["length"])
    for _ in range(STEPS):
        ids = torch.randint(5, config.vocab_size, shape, device="cuda")
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    found = torch.cuda.max_memory_allocated()
    facts = {"model": plan["model"], "parameters": plan["parameters"], "setting": setting}
    facts |= {"batch": plan["batch"], "length": plan["length"], "planned": row["peak_bytes"]}
    return {**facts, "peak": found, "ratio": round(row["peak_bytes"] / found, 4)}


def _has(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def main() -> None:
    """Measure the settings, so many at once."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("folder", help="with config.json")
    parser.add_argument("plan", type=Path, help="the file that memeff fit --json wrote")
    parser.add_argument("--setting", help="this one alone, in this process")
    parser.add_argument("--jobs", type=int, default=1, help="processes at once")
    parser.add_argument("--out", type=Path, default=RESULTS / "nvidia-h100" / "fit.jsonl")
    given = parser.parse_args()
    plan = json.loads(given.plan.read_text())
    if given.setting:
        rows.write(given.out, measure(given.folder, plan, given.setting))
        return
    lines = {each["setting"]: " ".join(each["lines"]) for each in reversed(plan["rows"])}
    here = [s for s, code in lines.items() if all(_has(p) or p not in code for p in PACKAGES)]
    again = [sys.executable, __file__, *sys.argv[1:], "--setting"]
    with ThreadPoolExecutor(given.jobs) as pool:
        list(pool.map(lambda setting: subprocess.run([*again, setting], check=False), here))


if __name__ == "__main__":
    main()
