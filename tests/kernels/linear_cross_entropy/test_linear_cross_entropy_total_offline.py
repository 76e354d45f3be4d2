"""Engine T compiled for a GPU that is not there: no spills, shared memory in bounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.support.cubins import stack_bytes

pytestmark = pytest.mark.offline

SHARED_LIMIT = 232448  # bytes of a block on compute capability 9.0
INTEGERS = ("target_ptr", "order_ptr", "kept_ptr", "again_ptr", "counter_ptr")
WIDE = (
    "base_ptr",
    "stats_ptr",
    "target_logit_ptr",
    "factor_ptr",
    "row_scale_ptr",
    "nll_ptr",
    "sums_ptr",
)
OPTIONAL = {"bias_ptr": "HAS_BIAS", "again_ptr": "HAS_AGAIN"}
EPILOGUES = {
    "plain": {"HAS_BIAS": False, "HAS_SOFTCAP": False},
    "softcap": {"HAS_BIAS": False, "HAS_SOFTCAP": True},
    "bias and softcap": {"HAS_BIAS": True, "HAS_SOFTCAP": True},
}


def _compile(name: str, constants: dict[str, Any], *, warps: int, stages: int) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from memeff_compile.kernels.linear_cross_entropy import total_kernels

    kernel = getattr(total_kernels, f"_linear_cross_entropy_total_{name}_kernel")
    rows, columns, step = 128, constants.get("BN", 256), 64
    blocks = {
        "hidden_desc": (rows, step),
        "weight_desc": (columns, step) if name == "logits" else (step, columns),
        "x_desc": (rows, columns // 4),
        "x_by_column_desc": (step, rows),
        "x_by_row_desc": (rows, step),
        "scaled_desc": (step, columns),
        "grad_weight_desc": (rows, columns // 4),
    }
    constants = {key: value for key, value in constants.items() if key in kernel.arg_names}
    signature, hints = {}, {}
    for place, argument in enumerate(kernel.arg_names):
        switch = OPTIONAL.get(argument)
        if argument in constants:
            signature[argument] = "constexpr"
        elif switch in kernel.arg_names and not constants[switch]:
            signature[argument], constants[argument] = "constexpr", None
        elif argument.endswith("_desc"):
            block = ", ".join(map(str, blocks[argument]))
            signature[argument] = f"tensordesc<bf16[{block}]>"
        elif argument.endswith("_ptr"):
            kind = "i32" if argument in INTEGERS else "fp32" if argument in WIDE else "bf16"
            signature[argument] = f"*{kind}"
            hints[(place,)] = [["tt.divisibility", 16]]
        else:
            signature[argument] = "fp32" if argument in ("scale", "softcap") else "i32"
    return triton.compile(
        ASTSource(kernel, signature, constants, hints),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": warps, "num_stages": stages},
    )


def _tiles(columns: int) -> dict[str, Any]:
    return {"BM": 128, "BN": columns, "BK": 64, "FLATTEN": True, "UPCAST": False}


def _check(kernel: Any, folder: Path) -> None:
    assert kernel.metadata.shared <= SHARED_LIMIT
    assert stack_bytes(kernel.asm["cubin"], folder) == 0


@pytest.mark.parametrize("is_busy", [False, True], ids=["all rows", "kept rows, again"])
@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_logits_compile_within_the_limits(epilogue: str, is_busy: bool, tmp_path: Path) -> None:
    from memeff_compile.kernels.linear_cross_entropy.shapes import shapes_for_programs

    shapes = shapes_for_programs(132)
    columns = shapes.gradient_columns(is_plain=epilogue == "plain")
    constants = {
        **EPILOGUES[epilogue],
        **_tiles(columns),
        "HAS_AGAIN": is_busy,
        "HAS_KEPT": is_busy,
    }
    kernel = _compile("logits", constants, warps=shapes.warps, stages=shapes.stages)
    _check(kernel, tmp_path)
    assert "wgmma.mma_async" in kernel.asm["ptx"]
    assert "cp.async.bulk.tensor" in kernel.asm["ptx"]


@pytest.mark.parametrize("is_busy", [False, True], ids=["all rows, first", "kept rows, adds"])
def test_products_compile_within_the_limits(is_busy: bool, tmp_path: Path) -> None:
    constants = {
        **_tiles(256),
        "ADD": is_busy,
        "HAS_KEPT": is_busy,
        "NEEDS_WEIGHT": True,
        "NEEDS_HIDDEN": True,
    }
    kernel = _compile("products", constants, warps=8, stages=3)
    _check(kernel, tmp_path)
    assert "wgmma.mma_async" in kernel.asm["ptx"]
    assert "cp.async.bulk.tensor" in kernel.asm["ptx"]


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("base", {"BLOCK": 4096}),
        ("rows", {"ROWS": 8, "TILES": 128, "FINAL": False}),
        ("rows", {"ROWS": 8, "TILES": 128, "FINAL": True}),
        ("scale_rows", {"PAD": 128, "BLOCK": 4096}),
        ("bias", {"BLOCK": 128, "ROWS": 64}),
    ],
    ids=str,
)
def test_helpers_compile_within_the_limits(
    name: str, sizes: dict[str, Any], tmp_path: Path
) -> None:
    constants = {**sizes, **EPILOGUES["bias and softcap"], "HAS_KEPT": True}
    _check(_compile(name, constants, warps=4, stages=3), tmp_path)
