"""What of this op a measurement on the user's GPU decides, and what decides without one."""

from __future__ import annotations

import torch

from memeff_compile.kernels.device import tuned, tuned_number
from memeff_compile.kernels.linear_cross_entropy.filters import DENSE_SHARE
from memeff_compile.kernels.linear_cross_entropy.pieces import HYBRID_AUTO_BYTES_PER_ROW
from memeff_compile.kernels.linear_cross_entropy.shapes import FUSED_AUTO_BYTES_PER_ROW

ENGINE = "linear_cross_entropy.engine"
GRADIENTS = "linear_cross_entropy.gradients"
SHARE = "linear_cross_entropy.dense_share"

BYTES_PER_ROW = {"fused": FUSED_AUTO_BYTES_PER_ROW, "hybrid": HYBRID_AUTO_BYTES_PER_ROW}


def bytes_per_row_of(engine: str) -> str:
    """Name the decision about an engine's automatic workspace."""
    return f"linear_cross_entropy.{engine}.bytes_per_row"


def engine_of_both(device: torch.device) -> str:
    """Name the engine for calls that "fused" and "hybrid" could both serve on this device."""
    return str(tuned(device, ENGINE, "fused"))


def gradients_in(device: torch.device) -> str:
    """Name the pass in which the gradients of a loss that is one number are made."""
    return str(tuned(device, GRADIENTS, "backward"))


def bytes_per_row(engine: str, device: torch.device, dtype: torch.dtype) -> int:
    """Return what the automatic workspace of "fused" or "hybrid" is per row, where above 64 MiB.

    What is measured is measured in 16 bits and decides nothing else.
    """
    if dtype.itemsize != 2:
        return BYTES_PER_ROW[engine]
    return int(tuned_number(device, bytes_per_row_of(engine), BYTES_PER_ROW[engine]))


def dense_share(device: torch.device) -> float:
    """Return the share of active tiles from which the dense kernels are taken."""
    return float(tuned_number(device, SHARE, DENSE_SHARE))
