"""Save the last hidden states, targets and head of a real model, for benchmarks of head and loss.

    python benchmarks/data/hidden_states.py MODEL --to FILE.safetensors --rows 8192
    python benchmarks/ops/linear_cross_entropy.py --data FILE.safetensors --method "memeff mass"

MODEL is anything that `from_pretrained` takes. Sequences are cut from text that lies on this
machine (the slices of `corpus.py`, in turns), or from given files. Computed in fp32, on a GPU where
there is one, and saved in bf16.
Such a file holds a model's weights: it is for measuring and never committed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


def contents(files: list[Path]) -> Iterator[str]:
    """Yield texts: of the files, or of this machine's packages, slice by slice in turns."""
    if files:
        yield from (path.read_text(errors="ignore") for path in files)
        return
    from benchmarks.data.corpus import SLICES, roots, texts

    slices = [texts(name, roots(), 1 << 30, share=2) for name in SLICES]
    for found in zip(*slices, strict=False):
        yield from (text.content for text in found)


def sequences(tokenizer: Any, found: Iterator[str], length: int) -> Iterator[Tensor]:
    """Yield rows of length + 1 tokens, one from the start of each text that is long enough."""
    for text in found:
        ids = tokenizer(text[: 16 * length], add_special_tokens=False).input_ids
        if len(ids) > length:
            yield torch.tensor(ids[: length + 1])


@torch.no_grad()
def states(model: Any, rows: list[Tensor]) -> dict[str, Tensor]:
    """Return hidden (N, D) and weight (V, D) in bf16, and target (N,)."""
    body, weight = model.get_decoder(), model.get_output_embeddings().weight
    hidden = [body(input_ids=row[None, :-1].to(weight.device)).last_hidden_state[0] for row in rows]
    return {
        "hidden": torch.cat(hidden).bfloat16().cpu(),
        "weight": weight.detach().bfloat16().contiguous().cpu(),
        "target": torch.cat([row[1:] for row in rows]),
    }


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--to", type=Path, required=True, metavar="FILE")
    parser.add_argument("--text", type=Path, nargs="+", default=[], metavar="FILE")
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--length", type=int, default=1024, help="tokens of a sequence")
    given = parser.parse_args()
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(given.model)
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32).eval()
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    count = -(-given.rows // given.length)
    rows = list(islice(sequences(tokenizer, contents(given.text), given.length), count))
    if len(rows) < count:
        raise SystemExit(f"{len(rows)} texts of {given.length} tokens were found of {count}")
    found = states(model, rows)
    save_file(found, given.to)
    print({name: tuple(part.shape) for name, part in found.items()})


if __name__ == "__main__":
    main()
