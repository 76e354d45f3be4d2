"""The command `memeff fit`; this module imports torch only when the command runs."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ..errors import MemeffError


def add_fit_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command `memeff fit` to its parser."""
    add = parser.add_argument
    add("model", help="config.json, a folder with one, or module:function")
    said = "a card such as rtx4090 or a100, whose memory and kernels are planned with"
    add("--gpu", metavar="CARD", help=said)
    said = "of one GPU, with its unit, such as 24GB or 23.6GiB (default: that of the card)"
    add("--memory", metavar="SIZE", help=said)
    add("--length", type=int, help="tokens per sequence (default: 2048, with --serve 8192)")
    add("--batch", type=int, default=1, help="sequences for which memory is given")
    add("--rank", type=int, default=16, help="of LoRA's matrices")
    dtypes = "{bfloat16,float16,float32}"
    said = "of the parameters of a model built from a config"
    add("--dtype", default="bfloat16", metavar=dtypes, help=said)
    said = "transformers' attn_implementation (default: transformers' choice)"
    add("--attention", metavar="{sdpa,eager,...}", help=said)
    said = "serving in place of training: codecs of the weights times bits of the KV cache"
    add("--serve", action="store_true", help=said)
    said = "no progress on stderr, where it is a terminal"
    add("--quiet", action="store_true", help=said)
    add("--json", type=Path, help="write the table here")


def fit(given: argparse.Namespace) -> int:
    """Print a table of training settings with the memory that each setting needs.

    If requested, write the table to a file. Return the exit status. The status is 0 even if no
    setting fits in memory, because this is a valid answer.
    """
    try:
        return _fit(given)
    except MemeffError as error:
        sys.stderr.write(f"{error}\n")
        return 1


def _fit(given: argparse.Namespace) -> int:
    from ..errors import ExplainError
    from ..planning.cards import given_memory
    from ..planning.fit import fit
    from ..planning.serving import fit_serving
    from ..report import VerbReport

    given_memory(given.memory, given.gpu)  # report a wrong one before half a minute of work
    if given.json is not None and not given.json.parent.is_dir():
        raise ExplainError(f"There is no folder {given.json.parent} to write {given.json.name} in.")
    how = {name: getattr(given, name) for name in ("memory", "gpu", "batch", "dtype")}
    how["length"] = given.length or (8192 if given.serve else 2048)
    found: VerbReport
    if given.serve:
        found = fit_serving(given.model, **how)
    else:
        how |= {"rank": given.rank, "attention": given.attention}
        found = fit(given.model, **how, progress=False if given.quiet else None)
    sys.stdout.write(f"{found}\n")
    if given.json is not None:
        given.json.write_text(found.to_json(indent=2) + "\n")
    return 0
