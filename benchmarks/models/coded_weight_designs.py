"""Ways in which training on compressed weights could be done: peak and time of a step of each.

    python benchmarks/models/coded_weight_designs.py

A model of Llama-3-8B's shape, 8 x 1024 tokens, SGD in the backward, as `coded_weights.py --part
training` measures it. Each row is one way, all in one process: dense, compressed as in the package,
and alternatives that were tried. `--profile` also writes the kernels' times in one step.

`--size tiny` runs everything on the CPU in seconds.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import gc
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import memeff_compile
from benchmarks import rows, timing
from benchmarks.ops.coded_weights import BATCHES, GIB, build, sgd
from memeff_compile.kernels.coded_weight import CodedWeight, Room, op
from memeff_compile.model.weights import compress, optim_in_backward


def keep_after(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Keep operands for the backward once the product is there, as an op's formula does."""
    found: Tensor = op.coded_weight_linear(x, weight, bias)
    return found


class OtherStream:
    """Updates and encodes on a separate stream; one gradient is kept until the next update."""

    def __init__(self) -> None:
        """Start without work under way."""
        self.stream = torch.cuda.Stream()
        self.last: tuple[torch.cuda.Event, list[Tensor]] | None = None
        self.plain = optim_in_backward._Update._store

    def __call__(self, update: Any, coded: CodedWeight, make: Callable[[], Tensor]) -> None:
        """Store a new value while the products go on."""
        main, kept = torch.cuda.current_stream(), []
        if self.last is not None:
            main.wait_event(self.last[0])
        self.stream.wait_event(main.record_event())

        def keep() -> Tensor:
            kept.append(make())
            return kept[0]

        with torch.cuda.stream(self.stream):
            self.plain(update, coded, keep)
            self.last = (self.stream.record_event(), kept)


def apart(weights: Any, room: Room | None = None) -> None:
    """Make room in separate lists."""
    for weight in weights if room is not None else ():
        weight.encode_anew(weight.decode())


def in_another_stream() -> contextlib.AbstractContextManager[Any]:
    """Use `OtherStream`."""
    store = OtherStream()
    return mock.patch.object(
        optim_in_backward._Update, "_store", lambda update, coded, make: store(update, coded, make)
    )


def with_lists_apart() -> contextlib.AbstractContextManager[Any]:
    """Leave every list in separate memory."""
    stack = contextlib.ExitStack()
    for module in (compress, optim_in_backward):
        stack.enter_context(mock.patch.object(module, "side_by_side", apart))
    return stack


WAYS: dict[str, tuple[str, Callable[[], contextlib.AbstractContextManager[Any]]]] = {
    "dense": ("", contextlib.nullcontext),
    "win4": ("win4", contextlib.nullcontext),
    "win4, operands kept after the product": (
        "win4",
        lambda: mock.patch.object(op, "linear_in_autograd", keep_after),
    ),
    "win4, updates on another stream": ("win4", in_another_stream),
    "tier": ("tier", contextlib.nullcontext),
    "tier, 2 % of room in lists": (
        "tier",
        lambda: mock.patch.object(optim_in_backward, "TRAINING_ROOM", Room(0.02, 1024)),
    ),
    "tier, lists apart": ("tier", with_lists_apart),
}


def measured(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row for each way."""
    cuda = options.device == "cuda"
    model = build(options)
    model.model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    shape = BATCHES[options.size][-1]
    ids = torch.randint(0, model.config.vocab_size, shape, device=options.device)

    def step(optimizer: torch.optim.Optimizer) -> None:
        hidden = model.model(input_ids=ids).last_hidden_state[:, :-1]
        loss = memeff_compile.linear_cross_entropy(hidden, model.lm_head.weight, ids[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for way, (codec, how) in WAYS.items():
        if way == "win4, updates on another stream" and not cuda:
            continue
        with how():
            memeff_compile.decompress_(model)
            if codec:
                limit = 1 << 20 if cuda else 0
                memeff_compile.compress_(model, codec, min_size=limit, progress=False)
            optimizer = memeff_compile.optim_in_backward(model, sgd)
            step(optimizer)
            step(optimizer)
            if cuda:
                torch.cuda.reset_peak_memory_stats()
            run = functools.partial(step, optimizer)
            times = [1e-3 * timing.waited(run) for _ in range(6 if cuda else 1)]
            peak = torch.cuda.max_memory_allocated() if cuda else 0
            row = {"batch": shape[0], "length": shape[1], "peak_gib": round(peak / GIB, 3)}
            yield {"way": way, **row, "s_per_step": rows.percentiles(times, 4)}
            if options.profile and cuda and "," not in way:
                write_profile(options.out.with_suffix(".txt"), way, run)
            optimizer.remove()
            del optimizer
            gc.collect()


def write_profile(path: Path, way: str, run: Callable[[], None]) -> None:
    """Append the kernels' times in one step."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        run()
        torch.cuda.synchronize()
    total: collections.Counter[str] = collections.Counter()
    count: collections.Counter[str] = collections.Counter()
    for event in found.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            total[event.name[:72]] += event.time_range.elapsed_us()
            count[event.name[:72]] += 1
    with path.open("a") as file:
        file.write(f"== {way}: {sum(total.values()) / 1e3:.1f} ms\n")
        for name, taken in total.most_common(30):
            file.write(f"{taken / 1e3:9.2f} ms {count[name]:6d} {name}\n")


def main() -> None:
    """Measure every way and write its row."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=tuple(BATCHES), default="h200")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("coded-weight-designs.jsonl"))
    options = parser.parse_args()
    options.device = "cpu" if options.size == "tiny" else "cuda"
    torch.manual_seed(0)
    for row in measured(options):
        rows.write(options.out, row)


if __name__ == "__main__":
    main()
