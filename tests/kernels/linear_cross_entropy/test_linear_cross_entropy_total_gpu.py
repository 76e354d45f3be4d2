"""`hopper` on a real GPU: one process with a whole head, and ranks with parts of one that meet."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from memeff_compile.kernels._head_loss.call import ScalarLoss
from tests.kernels.linear_cross_entropy.engines import hopper
from tests.kernels.linear_cross_entropy.meeting import (
    assert_close,
    cast_to,
    hostile,
    loss_of,
    moved_to,
    together,
    whole,
)

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("nan_filled_empty")]

CASES: dict[str, dict[str, Any]] = {
    "all count": {},
    "half ignored": {"ignored": 0.5},
    "all ignored": {"ignored": 1.0},
    "none is ignored": {"ignore_index": None},
    "softcap": {"softcap": 3.0, "ignored": 0.3},
    "all on one rank": {"highest": 60},
    "one row": {"rows": 1},
    "several pieces": {"rows": 1100, "workspace": 256 * 700 * 4},
    "features of two turned tiles and a half": {
        "rows": 1100,
        "workspace": 256 * 700 * 4,
        "depth": 320,
    },
    "of almost two tiles, few rows count": {
        **{"rows": 1100, "workspace": 256 * 700 * 4, "depth": 456, "ignored": 0.9}
    },
}


def check(given: ScalarLoss, ranks: int) -> None:
    given = moved_to(given, "cuda")
    expected = whole(given)
    if ranks == 1:
        found = [part for part in hopper.total(given) if part is not None]
    else:
        found, _ = together(given, *ranks * [hopper.total])
    assert_close(found, expected, 1e-2)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_gradients_are_those_of_the_whole_head(case: dict[str, Any], ranks: int) -> None:
    check(loss_of(**{"rows": 150, "vocab": 699, "dtype": torch.bfloat16} | case), ranks)


@pytest.mark.parametrize("given", list(hostile()))
def test_ranks_with_nothing_of_a_row(given: ScalarLoss) -> None:
    check(cast_to(given, torch.bfloat16), 2)
