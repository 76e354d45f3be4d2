"""The arguments that all kernel launches of one call of attention share."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from .._triton.conditions import Conditions


@dataclass(frozen=True)
class Call:
    """The operands and masking conditions of one call of attention, in the form that the kernels
    take.
    """

    q: Tensor  # with the depth at unit stride
    k: Tensor  # likewise
    v: Tensor  # likewise
    # the conditions; bounds that hide no key are dropped, others kept within the sizes
    given: Conditions
    mean: bool  # whether a query may have no key and then gets the mean of all values
    sizes: tuple[int, int, int, int, int, int]  # B, H, G, M, N, D

    def scales(self) -> tuple[float, float]:
        """Return two scales: the first turns raw scores into exponents of 2, and the second is
        applied inside the softcap.

        If the mask is a bias, the second scale turns products of queries and keys into scores. The
        first scale then only converts scores to base 2.
        """
        size = abs(self.given.scale)
        if self.given.is_bias:
            return math.log2(math.e), self.given.scale
        if self.given.softcap:
            return self.given.softcap * math.log2(math.e), size / self.given.softcap
        return (size or 1.0) * math.log2(math.e), 1.0
