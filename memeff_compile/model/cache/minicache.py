"""Which layers of a KV cache share directions, and how: the settings of merging.

Paper: MiniCache, arXiv 2405.14366.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from memeff_compile.errors import UnsupportedInputError
from memeff_compile.kernels.coded_kv_cache import READINGS, RULES, SCALES


@dataclass(frozen=True)
class MiniCache:
    """How neighbouring layers of a `KVCache` are merged; lossy, see `fidelity_report`.

    Args:
        start_layer: layers before it stay apart; pairs are this layer and the next, and so on. By
            default half of the layers.
        end_layer: layers from it on stay apart; by default none. The last layer alone may be what
            costs most: `fidelity_report` says.
        rule: what direction stands for two: ``slerp``, on the arc between them; ``average``, their
            weighted mean; ``max_norm``, the longer row's, which loses least by far where layers are
            not alike.
        t: where on the arc, or what weight: 0 is the lower layer's, 1 the upper's.
        gamma: rows are kept as they came whose distance is within this share of the largest; a
            larger one keeps more, 1 all that there is room for.
        retained: share of `max_cache_len` that there is room for among the rows kept so. The rows
            that differ most come first.
        reading: ``distinct`` keeps the rows that differ most; ``similar``, another reading of the
            paper's inequality, those that differ least.
        scale: ``norm`` restores each row's length; ``projection`` makes its error smallest.

    Raises:
        UnsupportedInputError: A setting that cannot be served; the sentence says why.

    Example:
        cache = memeff_compile.KVCache(config, 32768, bits=4, merge=MiniCache(start_layer=24))
    """

    start_layer: int | None = None
    end_layer: int | None = None
    rule: str = "slerp"
    t: float = 0.5
    gamma: float = 0.05
    retained: float = 0.01
    reading: str = "distinct"
    scale: str = "norm"

    def __post_init__(self) -> None:
        words = {"rule": RULES, "reading": READINGS, "scale": SCALES}
        for name, given in vars(self).items():
            if name in words:
                is_right, needed = given in words[name], ", ".join(map(repr, words[name]))
            elif name in ("t", "gamma", "retained"):
                is_right = isinstance(given, (int, float)) and 0 <= given <= 1
                needed = "a number from 0 to 1"
            else:
                is_right = given is None or (isinstance(given, int) and given >= 0)
                needed = "the number of a layer, from 0,"
            if not is_right:
                said = f"MiniCache: {name} is {given!r}; {needed} is needed."
                raise UnsupportedInputError(said)

    def capacity(self, tokens: int) -> int:
        """Return the rows that a cache for so many tokens has room for.

        Example: MiniCache(retained=0.01).capacity(32768) == 328.
        """
        return math.ceil(self.retained * tokens)


def pairs_of(kinds: Sequence[object], start: int, end: int | None = None) -> list[tuple[int, int]]:
    """Return the pairs of neighbouring layers from `start` on, each layer in one at most.

    Args:
        kinds: what each layer is; None for layers that are never merged.
        start: first layer that may be in a pair.
        end: first layer behind those that may.

    Example: pairs_of(["a", "a", "a", None, "a", "b"], 1) == [(1, 2)].
    """
    found = []
    at = start
    while at + 1 < min(len(kinds), len(kinds) if end is None else end):
        if kinds[at] is not None and kinds[at] == kinds[at + 1]:
            found.append((at, at + 1))
            at += 1
        at += 1
    return found
