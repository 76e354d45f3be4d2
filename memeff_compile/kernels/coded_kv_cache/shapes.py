"""Choose how the attention implementation `codes` divides its work: programs per sequence and head,
warps and pipeline stages.

The implementation `codes` (module `split_codes`) attends to a KV cache of low-bit codes. The chosen
sizes depend on static sizes, not on the number of cached tokens. So a launch in a CUDA graph stays
valid as the cache fills up.
"""

from __future__ import annotations

from dataclasses import dataclass

from .._triton.gpus import H200, Gpu

MAX_SPLITS = 64

MIN_ROWS = 8
"""Query heads per tile; with fewer, a part of a tensor core's tile would be empty."""


@dataclass(frozen=True)
class Shapes:
    """The constants of the attention kernel: warps, pipeline stages, and how work is divided.

    Most cached tokens are encoded in groups. A step is an iteration of a program's loop over these
    groups. In each step, the program processes one or a few groups.
    """

    warps: int  # warps per program
    stages: int  # steps in flight
    at_once: int  # a step covers `at_once` * `halves_for` groups
    programs: int  # intended number of programs per multiprocessor


def shapes_for(depth: int, bits: int, repeat: int = 1, gpu: Gpu = H200) -> Shapes:
    """Return the constants of the attention kernel: warps, pipeline stages, and how work is
    divided.

    Most cached tokens are encoded in groups. The constants say how many groups a program processes
    in one iteration of its loop, and how many programs a multiprocessor should run. `depth` is the
    head dimension, and `bits` the number of bits of a key's or value's code. `repeat` is the number
    of query heads per key-value head. On Hopper, some tensor-core instructions are for one warp,
    others for a group of four warps. Programs with one or two warps, or with tiles for 8 query
    heads, use those for one warp. With tiles for 16 query heads, Triton's instructions for four
    warps gave wrong results. For tiles with space for more than 8 query heads, the result has two
    warps. So the programs of these tiles use the instructions for one warp. The returned sizes were
    the fastest on an H200, in `benchmarks/ops/coded_kv.py --part sweep`.
    """
    if rows_for(repeat) > MIN_ROWS:
        return Shapes(2, 2, 1, 3)
    if depth > 128:
        return Shapes(4, 2, 1, 2)
    if bits == 2 and gpu.is_hopper:
        return Shapes(1, 3, 1, 8)  # elsewhere one warp has too few registers
    return Shapes(2, 3, 1, 4)


def rows_for(repeat: int) -> int:
    """Return for how many query heads a tile of the attention kernel has space.

    A tile covers the `repeat` query heads of one key-value head. For example, the result is 8 for 4
    query heads and 16 for 12 query heads.
    """
    return max(MIN_ROWS, 1 << (repeat - 1).bit_length())


def halves_for(repeat: int, bits: int) -> int:
    """Return how many groups of tokens one tile of scores covers: one or two.

    The columns of a tile are query heads. A group is the tokens that are encoded together. If the
    query heads of a key-value head fill at most half of the columns, a second group uses the other
    half. With 8-bit codes, the result is one. There, tiles take more shared memory, and tiles with
    one group were faster.
    """
    return 2 if 2 * repeat <= rows_for(repeat) and bits != 8 else 1


def part_width(depth: int, bits: int, channels: int) -> int:
    """Return the number of channels of values that one matrix product covers.

    A value is a token's value vector in one head, with `depth` channels. With 2 or 4 bits, the
    result equals the number of bytes of a value's codes. With 3 bits, the result equals the number
    of bytes of the codes' low two bits. With 8 bits, the result is `channels`, the number of
    channels that share a scale.
    """
    if bits == 8:
        return channels
    return depth // 4 if bits == 3 else depth * bits // 8


def splits_for(pairs: int, groups: int, slots: int) -> int:
    """Return the number of programs that share the attention of one sequence and key-value head.

    The result is the number, at most 64, with the shortest estimated time (`_cost`). The programs
    divide the groups of cached tokens among themselves. A group is a block of cached tokens.
    `pairs` is the number of pairs (sequence and head), and `groups` the number of groups that fit
    into the cache. The GPU runs `slots` programs at once. For example, take 510 groups and 528
    programs at once. Then 8 pairs get 64 programs each, and 256 pairs get 2 programs each.
    """
    most = max(1, min(MAX_SPLITS, groups))
    return min(range(1, most + 1), key=lambda splits: _cost(pairs, groups, splits, slots))


def _cost(pairs: int, groups: int, splits: int, slots: int) -> float:
    """Return the estimated time of attention over a KV cache.

    The unit is a program's time for one group, a block of cached tokens. `splits` programs share
    the `groups` groups of each of `pairs` pairs of a sequence and a key-value head. The GPU runs
    `slots` programs at once. Further programs wait until others end.
    """
    waves = -(-pairs * splits // slots)
    filling = pairs * splits / slots
    rounds = waves if waves < 4 else filling + 0.5
    combine = 2.0 + 0.05 * splits if splits > 1 else 0.0
    return rounds * (-(-groups // splits) + 3.0) + combine
