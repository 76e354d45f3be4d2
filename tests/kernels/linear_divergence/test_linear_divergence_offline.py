"""The kernels of divergences compiled for GPUs that are not there: no spills."""

from __future__ import annotations

from typing import Any

import pytest

from memeff_compile.kernels.linear_divergence import Coefficients
from tests.support.offline import compile_for, gpus, within_limits

pytestmark = pytest.mark.offline

CONSTANTS: dict[str, dict[str, Any]] = {
    "keep": {"CHUNK": 2048, "TILE": 256, "HAS_BIAS": True},
    "gradient": {"CHUNK": 2048, "TILE": 256, "PADDED": 512, "HAS_GRADIENT": True},
    "pick": {"TILE": 256, "PADDED": 512, "WIDTH": 64, "NORMALISED": True},
    "spread": {"TILE": 256, "PADDED": 512, "WIDTH": 64, "NORMALISED": True, "CHUNK": 2048},
    "place": {"TILE": 256, "PADDED": 512, "WIDTH": 64, "NORMALISED": True},
}
HALVES = ("kept_ptr", "student_ptr", "teacher_ptr")
SUMS = (
    "sums_ptr",
    "of_student_ptr",
    "of_teacher_ptr",
    "factor_ptr",
    "rows_ptr",
    "by_ptr",
    "s_ptr",
    "found_ptr",
)


def kind(argument: str) -> Any:
    if argument in (*Coefficients._fields, "scale"):
        return "fp32"
    if not argument.endswith("_ptr"):
        return "i32"
    if argument == "index_ptr":
        return "*i64"
    return "*fp16" if argument in HALVES else "*fp32" if argument in SUMS else "*bf16"


FLAGS = [(False, False), (False, True), (True, True)]
STEPS = [(step, flags) for step in CONSTANTS for flags in FLAGS if flags[0] <= (step == "gradient")]


@pytest.mark.parametrize(("step", "flags"), [s for s in STEPS if s[0] == "gradient" or not s[1][1]])
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
        num_warps=4 if step in ("keep", "pick", "place") else 8,
    )
    within_limits(kernel, capability)


@pytest.mark.parametrize(
    ("dtype", "has_bias"),
    [
        pytest.param("bf16", False, id="bf16-plain"),
        pytest.param("fp16", True, id="fp16-bias"),
        pytest.param("bf16", True, id="bf16-bias", marks=pytest.mark.slow),
        pytest.param("fp16", False, id="fp16-plain", marks=pytest.mark.slow),
    ],
)
def test_products_compile_without_spills(dtype: str, has_bias: bool) -> None:
    from memeff_compile.kernels.linear_divergence import kept_logits_kernels as kernels

    tile = 128 if has_bias else 256
    blocks = {"hidden_desc": [128, 64], "weight_desc": [tile, 64], "kept_desc": [128, tile // 4]}

    def type_of(argument: str) -> str | None:
        if argument in blocks:
            of = "fp16" if argument == "kept_desc" else dtype
            return f"tensordesc<{of}[{', '.join(map(str, blocks[argument]))}]>"
        if argument == "bias_ptr":
            return f"*{dtype}" if has_bias else None
        return "*fp32" if argument == "sums_ptr" else "fp32" if argument == "scale" else "i32"

    constants = {"BM": 128, "BK": 64, "TILE": tile, "HAS_BIAS": has_bias, "FLATTEN": True}
    kernel = compile_for(
        90,
        kernels._linear_divergence_kept_logits_product_kernel,
        {**constants, "UPCAST": False},
        type_of,
        lambda argument: False,
        {},
        num_warps=8,
        num_stages=3,
    )
    within_limits(kernel, 90)
