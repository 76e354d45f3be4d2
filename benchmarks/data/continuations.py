"""Save what a model writes by itself, so that every mode and machine judges the same tokens.

    python benchmarks/data/continuations.py MODEL --to FILE.safetensors --length 2048 --sequences 16
    python benchmarks/quality/lossy_modes.py measure --model MODEL --texts own=FILE.safetensors

MODEL is a folder that `from_pretrained` takes. Each sequence begins with the first words of a text
of quality/texts.py; what follows is the model's own, drawn at temperature 1 from a fixed seed.
Another machine or another dtype draws other tokens from the same seed, which is why they are saved.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks import rows
from benchmarks.quality import texts


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--to", type=Path, required=True, metavar="FILE")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="bfloat16 on a GPU")
    given = parser.parse_args()
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = given.dtype or ("bfloat16" if device == "cuda" else "float32")
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=getattr(torch, dtype))
    started = time.monotonic()
    ids = texts.own(model.eval().to(device), tokenizer, given.length, given.sequences)
    facts = {**rows.environment(), "model": given.model.name, "dtype": dtype}
    facts |= {"sequences": given.sequences, "length": given.length}
    save_file({"ids": ids}, given.to, {name: str(fact) for name, fact in facts.items()})
    print(f"{tuple(ids.shape)} {texts.digest(ids)} in {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
