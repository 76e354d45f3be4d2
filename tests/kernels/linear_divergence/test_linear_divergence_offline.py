"""The kernels of divergences compiled for GPUs that are not there: no spills."""

from __future__ import annotations

from typing import Any

import pytest

from memeff_compile.kernels.linear_divergence import Coefficients
from tests.support.offline import compile_for, gpus, within_limits

pytestmark = pytest.mark.offline

CONSTANTS: dict[str, dict[str, Any]] = {
    "keep": {"CHUNK": 2048, "CHUNKS": 63, "HAS_BIAS": True},
    "gradient": {"CHUNK": 2048, "CHUNKS": 63, "PADDED": 64, "HAS_GRADIENT": True},
    "scale": {"BLOCK": 4096},
}
HALVES = ("kept_ptr", "student_ptr", "teacher_ptr")
SUMS = ("sums_ptr", "factor_ptr", "rows_ptr", "by_ptr", "s_ptr")


def kind(argument: str) -> Any:
    if argument in (*Coefficients._fields, "scale"):
        return "fp32"
    if not argument.endswith("_ptr"):
        return "i32"
    return "*fp16" if argument in HALVES else "*fp32" if argument in SUMS else "*bf16"


@pytest.mark.parametrize("flags", [(False, False), (False, True), (True, True)], ids=str)
@pytest.mark.parametrize("step", CONSTANTS)
@pytest.mark.parametrize("capability", gpus(80, 90, 100))
def test_kernel_compiles_without_spills(
    step: str, capability: int, flags: tuple[bool, bool]
) -> None:
    from memeff_compile.kernels.linear_divergence import kept_logits_kernels as kernels

    constants = dict(CONSTANTS[step])
    if step == "gradient":
        constants |= dict(zip(("HAS_MIXTURE", "HAS_CENTRE"), flags, strict=True))
    kernel = compile_for(
        capability,
        getattr(kernels, f"_linear_divergence_kept_logits_{step}_kernel"),
        constants,
        kind,
        lambda argument: True,
        {"coefficients": Coefficients._fields},
        num_warps=4 if step == "keep" else 8,
    )
    within_limits(kernel, capability)
