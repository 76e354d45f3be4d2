"""The command `memeff explain`; this module imports torch only when the command runs."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ..errors import MemeffError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command `memeff explain` to its parser."""
    add = parser.add_argument
    add("model", help="config.json, a folder with one, or module:function")
    add("--batch", type=int, default=8, help="sequences per GPU")
    add("--length", type=int, default=2048, help="tokens per sequence")
    dtypes = "{bfloat16,float16,float32}"
    said = "of the parameters of a model built from a config"
    add("--dtype", default="bfloat16", metavar=dtypes, help=said)
    add("--checkpointing", action="store_true", help="gradient checkpointing")
    said = "transformers' attn_implementation (default: transformers' choice)"
    add("--attention", metavar="{sdpa,eager,...}", help=said)
    said = "adamw keeps two values per parameter, adamw8bit two of a byte, sgd none"
    add("--optimizer", default="adamw", metavar="{adamw,adamw8bit,sgd,none}", help=said)
    said = "optim_in_backward updates each weight as soon as its gradient is there"
    add("--in-backward", action="store_true", help=said)
    said = "compress_ has compressed the linear layers' weights; trained with --in-backward alone"
    add("--weights", default=None, metavar="CODEC", help=said)
    said = "fp32 weights and states next to 16-bit ones"
    add("--master-weights", action="store_true", help=said)
    add("--gpus", type=int, default=1, help="how many share the batch")
    said = "of one GPU, with its unit, such as 80GB or 79.3GiB: asks for the largest batch"
    add("--memory", metavar="SIZE", help=said)
    said = "a card such as rtx4090 or a100: its kernels, and its memory without --memory"
    add("--gpu", metavar="CARD", help=said)
    said = "of weights, gradients and optimizer state (default: fsdp with more than one GPU)"
    add("--sharding", metavar="{fsdp,none}", help=said)
    said = "every buffer at the worst moment, or what arXiv 2411.09009 counts"
    add("--accounting", default="peak", metavar="{peak,paper}", help=said)
    said = "an option of the backend, such as memeff.logits=eager; may be repeated"
    add("--option", action="append", default=[], metavar="KEY=VALUE", help=said)
    add("--device", default="cuda", metavar="{cuda,cpu}", help="where it would run")
    said = "decoding instead of training: what KV caches of 16 to 2 bits take, and what fits"
    add("--cache", action="store_true", help=said)
    said = "with --cache: layers share directions, from this one or from the middle on"
    add("--merge", nargs="?", type=int, const=-1, metavar="LAYER", help=said)
    said = "with --merge: the layers share the directions of their values, and keep their keys"
    add("--values-only", action="store_true", help=said)
    said = "no progress on stderr, where it is a terminal"
    add("--quiet", action="store_true", help=said)
    add("--json", type=Path, help="write the plan and the report here")
    add("--png", type=Path, help="draw the plan here")


def run(given: argparse.Namespace) -> int:
    """Print two things: the rewrites that the passes would make, and the memory that training the
    model needs. Then write the requested files, and return the exit status."""
    try:
        return _run(given)
    except MemeffError as error:
        sys.stderr.write(f"{error}\n")
        return 1


def _run(given: argparse.Namespace) -> int:
    from ..errors import ExplainError
    from ..planning.cards import target_of
    from ..planning.explain import explain
    from ..planning.models import build
    from ..planning.setting import Setting, read_memory

    names = ("optimizer", "in_backward", "master_weights", "gpus", "accounting")
    setting = {name: getattr(given, name) for name in names}
    if given.weights is not None:
        setting["weights"] = given.weights
    setting["sharding"] = given.sharding or ("fsdp" if given.gpus > 1 else "none")
    Setting(**setting)  # report a wrong setting before minutes of work
    memory = None if given.memory is None else read_memory(given.memory)
    target_of(given.device, given.gpu)
    options = dict(pair.partition("=")[::2] for pair in given.option)
    asked = ("batch", "length", "dtype", "checkpointing", "attention")
    call = build(given.model, **{name: getattr(given, name) for name in asked})
    for path in (given.json, given.png):
        if path is not None and not path.parent.is_dir():
            raise ExplainError(f"There is no folder {path.parent} to write {path.name} into.")
    if given.cache:
        return _caches(given, call.model)
    shown = False if given.quiet else None
    how = {"options": options or None, "device": given.device, "gpu": given.gpu}
    how["progress"] = shown
    found = explain(call.model, *call.args, **how, **call.kwargs)
    try:
        plan = found.plan(memory=memory, **setting)
    except ExplainError:
        sys.stdout.write(found.text() + "\n")  # the report of the passes is valid all the same
        raise
    sys.stdout.write(found.text(plan) + "\n")
    if given.json is not None:
        given.json.write_text(found.to_json(plan, indent=2) + "\n")
    if given.png is not None:
        plan.save_figure(given.png)
    return 0


def _caches(given: argparse.Namespace, model: object) -> int:
    """Print the sizes of the model's KV caches, and write them to a file if requested."""
    from ..errors import ExplainError, UnsupportedInputError
    from ..planning.caches import explain_cache
    from ..planning.cards import given_memory

    if (given.memory or given.gpu) is None or given.png is not None:
        raise ExplainError(
            "--cache asks what fits into a device: give --memory, such as 141GB, or --gpu. It "
            "draws nothing, so --png does not go with it."
        )
    ignored = ("option", "checkpointing", "master_weights", "in_backward")
    named = [f"--{name.replace('_', '-')}" for name in ignored if getattr(given, name)]
    if named:
        raise ExplainError(
            f"--cache plans decoding, in which {' and '.join(named)} would change nothing. Leave "
            f"{'it' if len(named) == 1 else 'them'} out."
        )
    if given.values_only and given.merge is None:
        raise ExplainError("--values-only says how layers are merged: give --merge, too.")
    how = {name: getattr(given, name) for name in ("batch", "length")}
    _card, how["memory"] = given_memory(given.memory, given.gpu)
    how["weights"] = given.weights or "dense"
    if given.merge is not None:
        from ..model.cache.minicache import MiniCache

        start = None if given.merge == -1 else given.merge
        how["merge"] = MiniCache(start_layer=start, values_only=given.values_only)
    try:
        plan = explain_cache(model, **how)
    except UnsupportedInputError as error:
        if "values_only" not in str(error) or given.values_only:
            raise
        here = "In this command, --values-only is values_only=True."
        raise ExplainError(f"{error} {here}") from error
    sys.stdout.write(f"{plan}\n")
    if given.json is not None:
        given.json.write_text(plan.to_json(indent=2) + "\n")
    return 0
