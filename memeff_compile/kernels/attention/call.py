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
        """Return two scales that turn products of queries and keys into exponents of 2.

        If the mask is not a bias, neither scale is negative. A kernel then first multiplies the
        products by the sign of the call's scale (`given.scale`). The kernel computes raw scores
        from the products, with the second scale:

        - If the mask is a bias, a raw score is the product times the second scale, which is then
          the call's scale. The bias is added to this raw score.
        - With a softcap, the product is multiplied by the second scale. A raw score is the tanh of
          the result.
        - Otherwise a raw score is the product, and the second scale is 1.

        The first scale then turns raw scores into exponents of 2. If the mask is a bias, the first
        scale only converts scores to base 2.
        """
        size = abs(self.given.scale)
        if self.given.is_bias:
            return math.log2(math.e), self.given.scale
        if self.given.softcap:
            return self.given.softcap * math.log2(math.e), size / self.given.softcap
        return (size or 1.0) * math.log2(math.e), 1.0
