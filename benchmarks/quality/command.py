"""The command line that the scripts of this folder share: measure a model, or show its rows."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from benchmarks import RESULTS
from benchmarks.quality.subject import Subject

Action = Callable[[argparse.Namespace], int]


def parser_of(
    about: str | None, *, texts: list[str], prompt: int, sequences: int
) -> argparse.ArgumentParser:
    """Return a parser of the arguments that all scripts share, with a script's defaults."""
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=["measure", "table"])
    parser.add_argument("--model", type=Path, help="a folder that from_pretrained takes")
    parser.add_argument("--texts", nargs="+", default=texts)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--prompt", type=int, default=prompt, help="tokens before those judged")
    parser.add_argument("--sequences", type=int, default=sequences)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="bfloat16 on a GPU")
    parser.add_argument("--budget", type=float, default=math.inf, help="seconds")
    parser.add_argument("--out", type=Path)
    return parser


def run(parser: argparse.ArgumentParser, actions: Mapping[str, Action], name: str) -> int:
    """Run the command line; rows go to a file of this name unless it names another."""
    given = parser.parse_args()
    where = "nvidia-h200" if torch.cuda.is_available() else "cpu"
    given.out = given.out or RESULTS / where / name
    if given.action == "measure" and given.model is None:
        parser.error("--model is needed: a folder of weights and a tokenizer")
    return actions[given.action](given)


def subject_of(given: argparse.Namespace) -> Subject:
    """Return the model to measure, on a GPU where there is one, without TF32."""
    torch.backends.cuda.matmul.allow_tf32 = False
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = getattr(torch, given.dtype or ("bfloat16" if device == "cuda" else "float32"))
    return Subject(given.model, device, dtype)
