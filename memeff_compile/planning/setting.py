"""Compute the memory of a training step from a model's footprint, an optimizer and a number of
GPUs.

The footprint has the bytes of the tensors that exist during a step."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import sympy

from ..errors import ExplainError
from ..kernels import coded_weight as coded_folder
from .sizes import BATCH, LENGTH

Parts = Mapping[str, sympy.Expr]


def require_counts(**given: object) -> None:
    """Raise ExplainError if a count is not an integer of at least 1."""
    for name, value in given.items():
        if type(value) is not int or value < 1:
            raise ExplainError(f"{name} is {value!r}; a whole number is needed, at least 1.")


Accounting = Literal["peak", "paper"]

GROUPS: Mapping[str, tuple[str, ...]] = {
    "weights": ("weights", "master weights"),
    "gradients": ("block gradients", "other gradients", "gradient buckets"),
    "optimizer state": ("optimizer state",),
    "activations": ("activations", "inputs", "working", "library workspace", "decoded weight"),
    "logits": ("logits", "loss workspace"),
}
"""The bars of the figure, and the parts of a moment that each bar contains."""

OPTIMIZER_STATES: Mapping[str, int] = {"adamw": 2, "adamw8bit": 2, "sgd": 0, "none": 0}
"""How many values per parameter an optimizer keeps; SGD without momentum keeps none."""

IN_8_BITS = sympy.Rational(1) + sympy.Rational(4, 256)
"""Bytes of an 8-bit value, including an fp32 scale for each 256 values."""

BITS_PER_WEIGHT: Mapping[str, sympy.Rational] = {
    "dense": sympy.Rational(16),
    **{codec: sympy.Rational(str(bits)) for codec, bits in coded_folder.BITS.items()},
}
"""Bits that `compress_` needs for a 16-bit weight."""

ROOM = sympy.Rational(101, 100)
"""Factor for the spare memory of trained codes."""

LOG_PROBABILITY_BYTES = 4

_UNITS = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}


@dataclass(frozen=True)
class Facts:
    """Byte counts of a model that do not depend on batch size and length."""

    weights: int  # all parameters, tied ones once
    block_weights: int  # those in repeated blocks, which FSDP gathers block by block
    largest_block: int  # of one block
    buffers: int  # all buffers
    parameters: int  # number of values in the parameters
    trained: int  # number and bytes of those that get a gradient
    trained_bytes: int  # likewise
    library: int = 0  # the matrix library's workspaces
    ranks: int = 1  # how many GPUs hold a part of each layer; the bytes are one's
    # the bytes of weights that `compress_` would take: all, those that are trained, the largest
    # one in a block, and the largest one outside of blocks, which is the output projection's
    linear: int = 0
    linear_trained: int = 0
    largest_linear: int = 0
    largest_outside: int = 0


@dataclass(frozen=True)
class Moment:
    """A moment of a step at which memory can be largest: its name, and the memory in use.

    In the result of `moments`, this memory includes the weights and the optimizer state. In a
    `Footprint`, the input of `moments`, it does not."""

    place: str
    parts: Parts
    # what runs then: "block", "outside" of blocks, or "end": the part before the first block
    runs: str = "outside"

    @property
    def total(self) -> sympy.Expr:
        """Return the sum of `parts` (bytes of each kind of tensor) as a formula.

        The sum is the memory in use at the moment of a training step that this object describes.
        If this object is in the result of `moments`, the sum includes weights and optimizer state.
        If it is in a `Footprint`, the argument of `moments`, the sum excludes them."""
        return sum(self.parts.values(), sympy.Integer(0))


@dataclass(frozen=True)
class Footprint:
    """The bytes of the tensors that exist during a step, as formulas in batch size and length.

    The step runs either with or without the passes. From these formulas, the function `moments`
    computes the memory that a step needs with a given `Setting`, for example with a given
    optimizer."""

    facts: Facts  # bytes of weights
    moments: tuple[Moment, ...]  # every moment that is the peak for some batch and length
    kept: Parts  # tensors kept after the forward pass
    # the moments where weights are updated in the backward, and gradients come block by block
    in_backward: tuple[Moment, ...] = ()


@dataclass(frozen=True)
class Setting:
    """The way in which a model is trained: GPUs, optimizer, accumulation and compressed weights."""

    # "adamw" (two values per parameter), "adamw8bit" (the same, a byte each), "sgd" (none), or
    # "none": no optimizer
    optimizer: str = "adamw"
    in_backward: bool = False  # whether `optim_in_backward` updates weights during the backward
    weights: str = "dense"  # or the codec with which `compress_` compressed the linear layers'
    master_weights: bool = False  # fp32 copies of 16-bit weights, with optimizer state in fp32
    gpus: int = 1  # number of GPUs
    # "fsdp" shards weights, gradients and optimizer state over the GPUs; "none" gives every GPU all
    # of them, and a copy of the gradients in buckets, as DDP does
    sharding: str = "none"
    # "peak" counts every buffer at the worst moment; "paper" counts as figure 1 of arXiv
    # 2411.09009 does: weights, gradients and optimizer state, the kept activations, and
    # log-probabilities in fp32, which memeff does not allocate
    accounting: Accounting = "peak"

    def __post_init__(self) -> None:
        sharding, accounting = ("none", "fsdp"), ("peak", "paper")
        known = {"optimizer": [*OPTIMIZER_STATES], "sharding": sharding, "accounting": accounting}
        known["weights"] = [*BITS_PER_WEIGHT]
        for name, values in known.items():
            value = getattr(self, name)
            if value not in values:
                can_be = ", ".join(map(repr, values))
                raise ExplainError(f"{name} is {value!r}; it can be {can_be}.")
        require_counts(gpus=self.gpus)
        if self.in_backward and self.optimizer == "none":
            raise ExplainError("in_backward needs an optimizer: 'sgd', 'adamw' or 'adamw8bit'.")
        if self.in_backward and self.gpus > self.shards:
            raise ExplainError(
                "optim_in_backward does not go with DDP, which needs all gradients at the end. Use "
                "sharding='fsdp', or one GPU."
            )
        if self.weights != "dense" and (self.gpus > 1 or self.master_weights):
            raise ExplainError(
                f"weights={self.weights!r} is planned on one GPU and without master weights: a "
                "compressed weight is the only copy there is."
            )

    def require_served(self, facts: Facts) -> None:
        """Raise ExplainError if this `Setting` cannot train the model with compressed weights.

        A `Setting` describes the training: GPUs, optimizer and the codec (compressed format) of the
        weights. The codec "dense" means no compression, and raises no error. With other codecs,
        `compress_` must be able to compress some of the linear layers' weights. If an optimizer
        trains these weights, the field `in_backward` must be set. With `in_backward`,
        `optim_in_backward` updates weights during the backward pass.
        """
        if self.weights == "dense":
            return
        if not facts.linear:
            raise ExplainError(
                f"weights={self.weights!r} finds nothing to compress: compress_ takes bf16 weights "
                "of nn.Linear with 2^20 elements or more."
            )
        if facts.linear_trained and not self.in_backward and self.optimizer != "none":
            raise ExplainError(
                f"weights={self.weights!r} is trained by optim_in_backward alone: an optimizer "
                "would write to a compressed weight. Set in_backward, or freeze the weights."
            )

    @property
    def shards(self) -> int:
        """Return the number of GPUs over which weights are sharded."""
        return self.gpus if self.sharding == "fsdp" else 1


def resident(facts: Facts, setting: Setting) -> dict[str, sympy.Expr]:
    """Return the bytes that are in use on one GPU during the whole step."""
    states = OPTIMIZER_STATES[setting.optimizer]
    master = 4 * facts.trained if setting.master_weights else 0
    each = IN_8_BITS * facts.trained if "8bit" in setting.optimizer else facts.trained_bytes
    state = states * (each if "8bit" in setting.optimizer else master or each)
    weights: sympy.Expr = sympy.Rational(facts.weights, setting.shards)
    if setting.weights != "dense":
        share = BITS_PER_WEIGHT[setting.weights] / 16
        frozen = facts.linear - facts.linear_trained
        weights += share * (frozen + ROOM * facts.linear_trained) - facts.linear
    if setting.sharding == "fsdp" and setting.accounting == "peak":
        weights += (facts.weights - facts.block_weights) + 2 * facts.largest_block
    has_buckets = setting.gpus > setting.shards and setting.accounting == "peak"
    parts = {
        "weights": weights + facts.buffers,
        "master weights": sympy.Rational(master, setting.shards),
        "optimizer state": sympy.Rational(state, setting.shards),
        "library workspace": sympy.Integer(facts.library if setting.accounting == "peak" else 0),
        "gradient buckets": sympy.Integer(facts.trained_bytes if has_buckets else 0),
    }
    return {name: size for name, size in parts.items() if size != 0}


def moments(footprint: Footprint, setting: Setting, *, after: bool, vocab: int) -> list[Moment]:
    """Return the moments of a step on one GPU, each with the bytes of all tensors that exist at
    that moment."""
    facts = footprint.facts
    setting.require_served(facts)
    always = resident(facts, setting)
    if setting.accounting == "paper":
        return [_as_in_the_paper(footprint, setting, always, after=after, vocab=vocab)]
    found = footprint.in_backward if setting.in_backward else footprint.moments
    decoded = {"block": facts.largest_linear, "outside": facts.largest_outside}
    return [
        Moment(
            moment.place,
            {
                **always,
                **_sharded(moment.parts, facts, setting),
                **_decoded(decoded.get(moment.runs, 0), setting),
            },
            moment.runs,
        )
        for moment in found or footprint.moments
    ]


def _decoded(largest: int, setting: Setting) -> Parts:
    """Return the bytes of the decoded weight that exists while a compressed linear layer runs."""
    return {"decoded weight": sympy.Integer(largest)} if setting.weights != "dense" else {}


def _as_in_the_paper(
    footprint: Footprint, setting: Setting, always: Parts, *, after: bool, vocab: int
) -> Moment:
    parts = {
        **always,
        "other gradients": sympy.Rational(footprint.facts.trained_bytes, setting.shards),
        "activations": footprint.kept.get("activations", sympy.Integer(0)),
    }
    if not after:
        parts["logits"] = sympy.Integer(LOG_PROBABILITY_BYTES * vocab) * BATCH * LENGTH
    return Moment("forward and backward together", parts)


def _sharded(parts: Parts, facts: Facts, setting: Setting) -> Parts:
    """Return the bytes of each kind of tensor on each GPU at a moment of a training step.

    `parts` has these bytes without sharding over GPUs. FSDP may still reduce the gradients of a
    block (layer) when the next block's backward pass runs. So the unsharded gradients of two blocks
    exist at the same time. Gradients of weights outside all blocks exist unsharded until the end of
    the backward pass.
    """
    if setting.shards == 1:
        return parts
    result = dict(parts)
    whole = result.get("block gradients", sympy.Integer(0))
    if whole != 0:
        in_flight = sympy.Min(whole, 2 * facts.largest_block)
        result["block gradients"] = whole / setting.shards + in_flight
    return result


def value_of(formula: sympy.Expr, batch: int, length: int) -> int:
    """Return the value of a formula for a batch size per GPU and a length."""
    return int(sympy.sympify(formula).xreplace({BATCH: batch, LENGTH: length}))


def peak(candidates: Sequence[Moment], batch: int, length: int) -> tuple[Moment, int]:
    """Return the moment of the step at which the most memory is in use, and the bytes in use
    then."""
    sized = [(moment, value_of(moment.total, batch, length)) for moment in candidates]
    return max(sized, key=lambda pair: pair[1])


def grouped(moment: Moment, batch: int, length: int) -> dict[str, int]:
    """Return the bytes in use at a moment of the step, split into the groups of `GROUPS`.

    These groups are weights, gradients, optimizer state, activations and logits."""
    return {
        group: sum(value_of(moment.parts.get(name, 0), batch, length) for name in names)
        for group, names in GROUPS.items()
    }


def largest_batch(candidates: Sequence[Moment], length: int, memory: int) -> int:
    """Return the largest batch per GPU whose peak fits into memory, or 0 if not even one sequence
    fits."""
    found = most(lambda batch: peak(candidates, batch, length)[1] <= memory)
    if found >= 1 << 40:
        raise ExplainError(
            "The peak does not grow with the batch, so no batch is the largest. Mark the batch as "
            "the first dimension of the inputs."
        )
    return found


def most(fits: Callable[[int], bool]) -> int:
    """Return the largest number up to 2**40 for which `fits` returns True, or 0 if there is
    none."""
    low, high = 0, 1
    while fits(high):
        if high >= 1 << 40:
            return high
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


LEAST_MEMORY = 1 << 20
"""Every device has more bytes than this; a smaller number is probably in another unit."""


def read_memory(memory: str | int) -> int:
    """Return a memory size in bytes: "80GB" is 80e9 bytes, "80GiB" is 80 * 2**30 bytes.

    If the number or the unit is missing, raise ExplainError.
    """
    if isinstance(memory, int) and memory >= LEAST_MEMORY:
        return memory
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", str(memory))
    if match is not None and not match[2] and float(match[1]) > 0:
        raise ExplainError(
            f"memory is {memory!r}, without a unit. Say which one, such as {match[1]}GB (10**9 "
            f"bytes each) or {match[1]}GiB (2**30)."
        )
    if match is None or match[2].lower() not in _UNITS or float(match[1]) <= 0:
        raise ExplainError(
            f"memory is {memory!r}; a size with its unit, such as 80GB or 79.3GiB, is needed."
        )
    return int(float(match[1]) * _UNITS[match[2].lower()])
