"""The command `memeff explain`; torch is imported only when it runs."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from ..errors import MemeffError


def _one_of(*values: str) -> str:
    return f"{{{','.join(values)}}}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.add_argument("model", help="config.json, a folder with one, or module:function")
    parser.add_argument("--batch", type=int, default=8, help="sequences per GPU")
    parser.add_argument("--length", type=int, default=2048, help="tokens per sequence")
    parser.add_argument(
        "--dtype",
        default="bfloat16",
        metavar=_one_of("bfloat16", "float16", "float32"),
        help="of the parameters of a model built from a config",
    )
    parser.add_argument("--checkpointing", action="store_true", help="gradient checkpointing")
    parser.add_argument(
        "--attention",
        metavar="{sdpa,eager,...}",
        help="transformers' attn_implementation (default: transformers' choice)",
    )
    parser.add_argument(
        "--optimizer",
        default="adamw",
        metavar=_one_of("adamw", "sgd", "none"),
        help="adamw keeps two values per parameter, sgd none",
    )
    parser.add_argument(
        "--master-weights", action="store_true", help="fp32 weights and states beside 16-bit ones"
    )
    parser.add_argument("--gpus", type=int, default=1, help="how many share the batch")
    parser.add_argument(
        "--memory",
        metavar="SIZE",
        help="of one GPU, with its unit, such as 80GB or 79.3GiB: asks for the largest batch",
    )
    parser.add_argument(
        "--sharding",
        metavar=_one_of("fsdp", "none"),
        help="of weights, gradients and optimizer state (default: fsdp with more than one GPU)",
    )
    parser.add_argument(
        "--accounting",
        default="peak",
        metavar=_one_of("peak", "paper"),
        help="every buffer at the worst moment, or what arXiv 2411.09009 counts",
    )
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="an option of the backend, such as memeff.logits=eager; may be repeated",
    )
    parser.add_argument(
        "--device", default="cuda", metavar=_one_of("cuda", "cpu"), help="where it would run"
    )
    parser.add_argument(
        "--cache",
        action="store_true",
        help="decoding instead of training: what KV caches of 16 to 2 bits take, and what fits",
    )
    parser.add_argument(
        "--merge",
        nargs="?",
        type=int,
        const=-1,
        metavar="LAYER",
        help="with --cache: layers share directions, from this one or from the middle on",
    )
    parser.add_argument(
        "--quiet", action="store_true", help="no progress on stderr, where it is a terminal"
    )
    parser.add_argument("--json", type=Path, help="write the plan and the report here")
    parser.add_argument("--png", type=Path, help="draw the plan here")


def run(given: argparse.Namespace) -> int:
    """Explain, print, write what was asked for; return the exit status."""
    try:
        return _run(given)
    except MemeffError as error:
        sys.stderr.write(f"{error}\n")
        return 1


def _run(given: argparse.Namespace) -> int:
    from ..errors import ExplainError
    from ..planning.explain import explain
    from ..planning.models import build
    from ..planning.setting import Setting, read_memory

    names = ("optimizer", "master_weights", "gpus", "accounting")
    setting = {name: getattr(given, name) for name in names}
    setting["sharding"] = given.sharding or ("fsdp" if given.gpus > 1 else "none")
    Setting(**setting)  # a wrong setting is said before minutes of work
    memory = None if given.memory is None else read_memory(given.memory)
    options = dict(pair.partition("=")[::2] for pair in given.option)
    asked = ("batch", "length", "dtype", "checkpointing", "attention")
    call = build(given.model, **{name: getattr(given, name) for name in asked})
    for path in (given.json, given.png):
        if path is not None and not path.parent.is_dir():
            raise ExplainError(f"There is no folder {path.parent} to write {path.name} into.")
    if given.cache:
        return _caches(given, call.model)
    found = explain(
        call.model,
        *call.args,
        options=options or None,
        device=given.device,
        progress=False if given.quiet else None,
        **call.kwargs,
    )
    try:
        plan = found.plan(memory=memory, **setting)
    except ExplainError:
        sys.stdout.write(found.text() + "\n")  # the passes' part is right all the same
        raise
    sys.stdout.write(found.text(plan) + "\n")
    if given.json is not None:
        given.json.write_text(found.to_json(plan, indent=2) + "\n")
    if given.png is not None:
        plan.save_figure(given.png)
    return 0


def _caches(given: argparse.Namespace, model: object) -> int:
    """Print what KV caches take, and write it if that was asked for."""
    from ..errors import ExplainError
    from ..planning.caches import explain_cache

    if given.memory is None or given.png is not None:
        raise ExplainError(
            "--cache asks what fits into a device: give --memory, such as 141GB. It draws nothing, "
            "so --png does not go with it."
        )
    merge = None
    if given.merge is not None:
        from ..model.cache.minicache import MiniCache

        merge = MiniCache(start_layer=None if given.merge == -1 else given.merge)
    plan = explain_cache(
        model, memory=given.memory, batch=given.batch, length=given.length, merge=merge
    )
    sys.stdout.write(f"{plan}\n")
    if given.json is not None:
        given.json.write_text(json.dumps(plan.to_dict(), indent=2) + "\n")
    return 0
