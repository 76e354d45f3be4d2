"""What counts as a failure: numbers beyond rounding, an exception of ours alone, a lost rewrite."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal
from unittest import mock

import torch
from torch import Tensor

import memeff_compile
from memeff_compile.errors import MemeffError

from .program import WIDE, Fault, Program, World, leaves, run, shaker, start

__all__ = [
    "FAILURES",
    "Kind",
    "Verdict",
    "compare",
    "internal_errors",
    "judge",
    "judge_again",
    "verdict",
]

Kind = Literal[
    "same", "invalid", "decline", "difference", "exception", "internal_error", "crash", "inner"
]

FAILURES: frozenset[str] = frozenset({"difference", "exception", "internal_error", "crash"})

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 3e-2}
"""Largest difference over the largest entry (or over a tenth, where all entries are smaller)."""

_LEAST = 0.1

_SHAKES = 8
"""Enough for each of two ties to come first once."""

_REFUSALS = (
    "aot_autograd does not currently support double backward",
    "compiled with non-empty donated buffers",  # a second backward pass, see worker._settled
)
"""What PyTorch's own compilers cannot do."""


@dataclass(frozen=True)
class Verdict:
    """What became of one program."""

    kind: Kind
    sentence: str = ""

    @property
    def is_failure(self) -> bool:
        """Whether somebody has to look at it."""
        return self.kind in FAILURES

    def resembles(self, other: Verdict) -> bool:
        """Whether both are the same failure, as far as one can say without understanding it."""
        alike = self.kind == other.kind
        if alike and self.kind in ("exception", "internal_error"):
            return self.sentence.split(":")[:2] == other.sentence.split(":")[:2]
        return alike


def judge(program: Program) -> Verdict:
    """Run a program from the start, in both worlds."""
    torch._dynamo.reset()
    eager, ours = start(program, ours=False), start(program, ours=True)
    return verdict(program, eager, ours)


def judge_again() -> Callable[[Program], Verdict]:
    """Return a judge that keeps what a setup has compiled, for bodies that are tried after it.

    Its verdict on the last one wants to be confirmed by `judge`.
    """
    torch._dynamo.reset()
    worlds: dict[tuple[str, ...], tuple[World, World]] = {}

    def again(candidate: Program) -> Verdict:
        if candidate.setup not in worlds:
            worlds[candidate.setup] = start(candidate, ours=False), start(candidate, ours=True)
        return verdict(candidate, *worlds[candidate.setup])

    return again


def verdict(program: Program, eager: World, ours: World) -> Verdict:
    """Run a body in two worlds that have run the setup."""
    found = _verdict(program, eager, ours)
    if found.kind == "difference" and (reason := _why_no_measure(program, eager)):
        return Verdict("invalid", reason)
    if found.kind in ("difference", "exception"):
        alone = program.without_us()
        if alone != program:
            if ours.without_us is None:
                ours.without_us = start(alone, ours=True)
            if _verdict(alone, eager, ours.without_us).is_failure and _agree(
                (program, ours), (alone, ours.without_us)
            ):
                return Verdict("inner", found.sentence)  # what PyTorch's compilers do themselves
    return found


def _agree(*runs: tuple[Program, World]) -> bool:
    """Whether two programs do the same in their worlds: the same numbers, or like exceptions.

    Else ours has a failure of its own, although PyTorch's compilers fail at the program too.
    """
    (ours, fault), (theirs, other) = (_result(*run) for run in runs)
    if fault is None or other is None:
        return fault is other and not compare(ours, theirs, runs[0][0].precision)
    mine, plain = (Verdict("exception", str(each)) for each in (fault, other))
    return mine.resembles(plain)


def _result(program: Program, world: World) -> tuple[Sequence[Any], Fault | None]:
    """What a body appends to `seen`, and its exception; logits are computed."""
    names = world.enter()
    fault = world.fault or run(program.body, names)
    if fault is not None:
        return (), fault
    try:
        compare(names["seen"], names["seen"], program.precision)
    except Exception as error:  # deferred logits compute when they are looked at
        return (), Fault(error, 0)
    return names["seen"], None


def _verdict(program: Program, eager: World, ours: World) -> Verdict:
    names = eager.enter()
    fault = eager.fault or run(program.body, names)
    if fault is not None:
        return Verdict("invalid", str(fault))
    expected = names["seen"]
    names = ours.enter()
    fault = ours.fault or run(program.body, names)
    if fault is None:
        try:
            difference = compare(names["seen"], expected, program.precision)
        except Exception as error:  # deferred logits compute when they are looked at
            fault = Fault(error, 0)
    lost = internal_errors()
    if lost:
        return Verdict("internal_error", lost)
    if fault is not None:
        is_known = isinstance(fault.error, MemeffError) or any(map(str(fault).count, _REFUSALS))
        return Verdict("decline" if is_known else "exception", str(fault))
    if difference and not _is_rounding(program, eager, names["seen"], expected):
        return Verdict("difference", difference)
    return Verdict("same")


_STALE = ("modified by an inplace operation", "its base has been modified inplace")
"""How autograd calls a tensor that was written to after it was saved."""


def _why_no_measure(program: Program, eager: World) -> str:
    """Say why what eager PyTorch returned is not what it should be, or return nothing."""
    noticed = eager.enter()
    fault = run(program.with_writes_counted().body, noticed)
    is_stale = fault is not None and any(map(str(fault).count, _STALE))
    names = eager.enter()
    run(program.body, names)
    if fault is None:  # a view that was written to has another history, and needs no error
        is_stale = bool(compare(noticed["seen"], names["seen"], program.precision))
    if is_stale:
        return "a hidden write (.data, copy.copy) changed what eager itself saved for its backward"
    for seen in _shaken(program, eager):
        if seen is None or compare(seen, names["seen"], program.precision):
            return "the last bits of some numbers decide about the result, as between ties"
    return ""


def internal_errors() -> str:
    """Return what our passes lost since the last reset, or an empty string."""
    for graph in memeff_compile.graphs():
        for record in graph.records:
            if record.action == "internal_error":
                return f"{record.pass_name}: {record.sentence}"
    return ""


def _is_rounding(
    program: Program, eager: World, found: Sequence[Any], expected: Sequence[Any]
) -> bool:
    """Whether ours is at most twice as far from float64 as eager, last bits shaken or not, also of
    what a cache rounds to codes, and with a log-softmax that subtracts one rounded number, as
    every fused loss has it.
    """
    if program.precision == torch.float64:
        return False
    wide = program.widened()
    world = start(wide, ours=False)
    names = world.enter()
    if (world.fault or run(wide.body, names)) is not None:
        return False
    truth, ours = _wide(names["seen"]), _wide(found)
    # Whatever a program of 16 bits has rounded to them could as well be its neighbour.
    dtypes = (*WIDE, torch.bfloat16, torch.float16)
    shaken = [*_shaken(program, eager, dtypes)]
    if "KVCache" in program.imports:
        shaken += _shaken(program, eager, dtypes, _into_caches)
    all_of_theirs = (expected, *shaken, *_by_one_number(program, eager))
    theirs = [_wide(seen) for seen in all_of_theirs if seen is not None]
    if {len(values) for values in (ours, *theirs)} != {len(truth)}:
        return False
    least = torch.finfo(program.precision).eps
    for exact, our, *their in zip(truth, ours, *theirs, strict=True):
        if not isinstance(exact, Tensor):
            continue
        if not all(isinstance(x, Tensor) and x.shape == exact.shape for x in (our, *their)):
            return False
        distance = max(_error(value, exact) for value in their)
        if not _error(our, exact) <= 2 * distance + least * (1 + _size(exact)):
            return False
    return True


Shake = Callable[[Any], None]


def _shaken(
    program: Program,
    eager: World,
    dtypes: Sequence[torch.dtype] = WIDE,
    also: Callable[[Shake], AbstractContextManager[object]] = nullcontext,
) -> Iterator[Sequence[Any] | None]:
    """What eager returns with other last bits in all that has a name, and in what `also` gives to
    the shake; None where it raises.
    """
    shaken = program.with_shakes()
    for seed in range(_SHAKES):
        shake = shaker(seed, dtypes)
        names = {**eager.enter(), "shake": shake}
        with also(shake):
            fault = run(shaken.body, names)
        yield names["seen"] if fault is None else None


def _into_caches(shake: Shake) -> AbstractContextManager[object]:
    """Shake what eager writes to a `KVCache`: of a number between two codes the last bit decides
    which of them is stored, and the logits then differ by what one code's step is in them.
    """
    plain = memeff_compile.KVCache.update

    def update(self: Any, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> Any:
        keys, values = keys.clone(), values.clone()
        shake([keys, values])
        return plain(self, keys, values, *args, **kwargs)

    return mock.patch.object(memeff_compile.KVCache, "update", update)


def _by_one_number(program: Program, eager: World) -> Iterator[Sequence[Any]]:
    """What eager returns where z - logsumexp(z) is a log-softmax: off by the last bit of the sum,
    where (z - peak) - log(mass) is off by that of the difference.
    """

    def log_softmax(z: Tensor, dim: int, *_: object) -> Tensor:
        return z - z.logsumexp(dim, keepdim=True)

    def softmax(z: Tensor, dim: int, *_: object) -> Tensor:
        return log_softmax(z, dim).exp()

    names = eager.enter()
    with (
        mock.patch.object(Tensor, "log_softmax", log_softmax),
        mock.patch.object(Tensor, "softmax", softmax),
    ):
        if run(program.body, names) is None:
            yield names["seen"]


def _wide(seen: Sequence[Any]) -> list[Any]:
    return [x.detach().double() if isinstance(x, Tensor) else x for x in leaves(seen)]


def compare(
    found: Any, expected: Any, precision: torch.dtype, path: str = "seen", least: float = _LEAST
) -> str:
    """Say where two results differ, or return an empty string.

    Gradients that are asked for at once share a scale in float32 and below: those of queries and
    keys are what a softmax leaves of sums as large as that of values, and may be zero.
    """
    if isinstance(expected, Tensor):
        if not isinstance(found, Tensor):
            return f"{path}: {type(found).__name__} instead of a tensor"
        return _compare_tensors(found, expected, precision, path, least)
    if isinstance(expected, list | tuple):
        if not isinstance(found, list | tuple) or len(found) != len(expected):
            return f"{path}: {found!r:.100} instead of {expected!r:.100}"
        if path != "seen" and precision != torch.float64:
            floats = (x for x in expected if isinstance(x, Tensor) and x.is_floating_point())
            least = max(least, *map(_size, floats), 0.0)
        places = range(len(expected))
        lines = (compare(found[i], expected[i], precision, f"{path}[{i}]", least) for i in places)
        return next(filter(None, lines), "")
    if isinstance(expected, float) and isinstance(found, float):
        pair = torch.tensor(found, dtype=torch.float64), torch.tensor(expected, dtype=torch.float64)
        return _compare_tensors(*pair, precision, path, least)
    if expected is None and isinstance(found, Tensor) and not found.any():
        return ""  # AOTAutograd gives zeros to what a result does not depend on
    return "" if found == expected else f"{path}: {found!r:.100} instead of {expected!r:.100}"


def _compare_tensors(
    found: Tensor, expected: Tensor, precision: torch.dtype, path: str, least: float
) -> str:
    for fact in ("shape", "dtype", "requires_grad"):
        ours, theirs = getattr(found, fact), getattr(expected, fact)
        if ours != theirs:
            return f"{path}.{fact}: {ours} instead of {theirs}"
    ours, theirs = found.detach(), expected.detach()
    if not theirs.dtype.is_floating_point:
        wrong = int((ours != theirs).sum())
        return f"{path}: {wrong} of {theirs.numel()} entries differ" if wrong else ""
    error, size = _error(ours, theirs), max(_size(theirs), least)
    if error <= _TOLERANCE[precision] * size:
        return ""
    return f"{path}: off by {error:.2g} where the largest entry is {size:.2g}"


def _error(found: Tensor, expected: Tensor) -> float:
    """The largest difference; entries that are both nan or the same infinity do not differ."""
    if not expected.numel():
        return 0.0
    found, expected = found.double(), expected.double()
    same = (found == expected) | (found.isnan() & expected.isnan())
    error = float((found - expected).abs().masked_fill(same, 0).max())
    return math.inf if math.isnan(error) else error


def _size(expected: Tensor) -> float:
    finite = expected[expected.isfinite()] if expected.numel() else expected
    return float(finite.abs().max()) if finite.numel() else 0.0
