"""`hopper` compiled for a GPU that is not there: no spills, shared memory in bounds."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.offline import (
    compile_for,
    gpus,
    twice,
    within_limits,
)

pytestmark = pytest.mark.offline

CAPABILITIES = gpus(90)
TENSOR_CORES = {90: "wgmma.mma_async"}
EPILOGUE = ("HAS_BIAS", "HAS_COLUMN_WEIGHT", "HAS_SOFTCAP", "WITH_LOGIT_SUM", "WITH_ENTROPY")
INT_POINTERS = (
    "order_ptr",
    "place_ptr",
    "target_ptr",
    "compact_target_ptr",
    "kept_ptr",
)
HALF_POINTERS = ("hidden_ptr", "bias_ptr", "g_ptr", "source_ptr", "out_ptr")
OPTIONAL = {
    "bias_ptr": "HAS_BIAS",
    "column_weight_ptr": "HAS_COLUMN_WEIGHT",
    "logit_sum_ptr": "WITH_LOGIT_SUM",
    "grad_logit_sum_ptr": "WITH_LOGIT_SUM",
    "grad_entropy_ptr": "WITH_ENTROPY",
    "entropy_ptr": "WITH_ENTROPY",
    "hidden_ptr": "GATHER",
}


PARTS = {
    "given": ("bias_ptr", "column_weight_ptr", "target_ptr", "row_values_ptr"),
    "cap": ("scale", "softcap"),
}


def _blocks(name: str, shapes: Any, columns: int) -> dict[str, list[int]]:
    """Return the block of each tile descriptor that a kernel takes."""
    rows, step = shapes.rows, shapes.step
    if name.endswith("statistics_kernel"):
        return {"hidden_desc": [rows, step], "weight_desc": [columns, step]}
    if name.endswith("hopper_gradient_kernel"):
        return {
            "hidden_desc": [rows, step],
            "weight_desc": [columns, step],
            "g_desc": [rows, columns // 4],
        }
    return {
        "g_by_column_desc": [step, rows],
        "g_by_row_desc": [rows, step],
        "hidden_desc": [step, columns],
        "weight_desc": [step, columns],
        "grad_weight_desc": [rows, columns // 4],
        "grad_hidden_desc": [rows, columns // 4],
    }


def _compile(
    name: str, capability: int, constants: dict[str, Any], *, warps: int, stages: int, dtype: str
) -> Any:
    from memeff_compile.kernels._head_loss import rows_kernels
    from memeff_compile.kernels.linear_cross_entropy import hopper_kernels

    kernel = getattr(rows_kernels if name.startswith("_head_loss") else hopper_kernels, name)
    shapes = _shapes(capability)

    def type_of(argument: str) -> str | None:
        switch = OPTIONAL.get(argument)
        if {"C", switch} & set(kernel.arg_names) and switch and not constants.get(switch):
            return None
        if argument.endswith("_desc"):
            if argument == "hidden_desc" and constants.get("GATHER"):
                return None
            of = "fp32" if argument == "grad_hidden_desc" else dtype
            block = ", ".join(map(str, _blocks(name, shapes, constants.get("BN", 0))[argument]))
            return f"tensordesc<{of}[{block}]>"
        if argument.endswith("_ptr"):
            of = dtype if argument in HALF_POINTERS else "fp32"
            of = "i32" if argument in INT_POINTERS else of
            return f"*{of}"
        return "fp32" if argument in ("scale", "softcap") else "i32"

    settings = {"num_warps": warps, "num_stages": stages}
    return compile_for(
        capability, kernel, constants, type_of, lambda name: False, PARTS, **settings
    )


def _shapes(capability: int) -> Any:
    from memeff_compile.kernels.linear_cross_entropy.shapes import shapes_for_programs

    assert capability == 90
    return shapes_for_programs(132)


def _check(kernel: Any, capability: int, *, multiplies: bool) -> None:
    within_limits(kernel, capability)
    if multiplies:
        assert TENSOR_CORES[capability] in kernel.asm["ptx"]
        assert "cp.async.bulk.tensor" in kernel.asm["ptx"]


PRODUCTS = [
    ("_linear_cross_entropy_hopper_statistics_kernel", {}),
    ("_linear_cross_entropy_hopper_gradient_kernel", {"GATHER": False}),
    ("_linear_cross_entropy_hopper_gradient_kernel", {"GATHER": True}),
    ("_linear_cross_entropy_hopper_class_products_kernel", {"GATHER": False}),
    ("_linear_cross_entropy_hopper_class_products_kernel", {"GATHER": True}),
]


def _cases(name: str, flags: dict[str, Any], epilogue: str) -> list[Any]:
    """Compile a form completely if no larger one has its tiles; the smallest of all are slow."""
    case = name, flags, epilogue
    is_least, is_largest = False, True
    if "statistics" in name:
        is_largest = epilogue == "everything"
    elif "hopper_gradient" in name:
        is_least = epilogue == "plain" and flags["GATHER"]
        is_largest = epilogue == ("everything" if flags["GATHER"] else "entropy")
    else:
        is_least = not flags["GATHER"]
    if is_least or epilogue == "softcap":
        return [pytest.param(*case, marks=pytest.mark.slow)]
    return [case] if is_largest else twice(*case)


# The last products have no separate epilogue.
EPILOGUES = [
    case
    for name, flags in PRODUCTS
    for epilogue in (
        ["plain"] if "products" in name else ["plain", "entropy", "softcap", "everything"]
    )
    for case in _cases(name, flags, epilogue)
]


def _product(name: str, flags: dict[str, Any], capability: int, epilogue: str) -> Any:
    shapes = _shapes(capability)
    is_plain = epilogue in ("plain", "entropy")
    columns, warps = shapes.columns, shapes.warps
    if name.endswith("hopper_gradient_kernel"):
        columns = shapes.gradient_columns(is_plain=is_plain and not flags["GATHER"])
    constants = {
        **dict.fromkeys(EPILOGUE, epilogue == "everything"),
        "HAS_SOFTCAP": epilogue in ("softcap", "everything"),
        "WITH_ENTROPY": epilogue in ("entropy", "everything"),
        "HAS_KEPT": True,
        "NEEDS_WEIGHT": True,
        "NEEDS_HIDDEN": True,
        "ADD": True,
        "GROUP": 16,
        "BM": shapes.rows,
        "BN": columns,
        "BK": shapes.step,
        "FLATTEN": shapes.flatten and not flags.get("GATHER"),
        "UPCAST": False,
        **flags,
    }
    dtype = "fp16" if epilogue == "everything" else "bf16"
    return _compile(name, capability, constants, warps=warps, stages=shapes.stages, dtype=dtype)


@pytest.mark.parametrize(("name", "flags", "epilogue"), EPILOGUES, ids=str)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_product_compiles_within_the_limits(
    name: str, flags: dict[str, Any], capability: int, epilogue: str
) -> None:
    kernel = _product(name, flags, capability, epilogue)
    _check(kernel, capability, multiplies=True)


@pytest.mark.usefixtures("sizes_of_one")
@pytest.mark.parametrize("has_kept", [False, True], ids=["all", "kept"])
@pytest.mark.parametrize(("name", "flags"), PRODUCTS, ids=str)
def test_product_compiles_for_sizes_of_one(
    name: str, flags: dict[str, Any], has_kept: bool
) -> None:
    _product(name, {**flags, "HAS_KEPT": has_kept}, 90, "softcap")


COPY = {"PAD": 128, "BLOCK": 4096}
SUMS = {"BLOCK": 128, "ROWS": 64}
SMALL = [
    ("_head_loss_rows_compact_kernel", {"BLOCK": 2048}, 8),
    ("_head_loss_rows_copy_kernel", {**COPY, "HAS_ORDER": True, "HAS_SCALE": False}, 4),
    ("_head_loss_rows_copy_kernel", {**COPY, "HAS_ORDER": False, "HAS_SCALE": True}, 4),
    ("_head_loss_rows_cotangents_kernel", {"BLOCK": 512}, 4),
    ("_linear_cross_entropy_hopper_merge_kernel", {"ROWS": 8, "TILES": 128}, 4),
    ("_linear_cross_entropy_hopper_bias_kernel", {**SUMS, "HAS_SCALE": False}, 4),
]


def _helper(
    name: str, sizes: dict[str, int], warps: int, capability: int, *, has_kept: bool = True
) -> Any:
    constants = {
        **sizes,
        "HAS_KEPT": has_kept,
        "WITH_LOGIT_SUM": True,
        "WITH_ENTROPY": True,
    }
    return _compile(name, capability, constants, warps=warps, stages=3, dtype="bf16")


@pytest.mark.parametrize(("name", "sizes", "warps"), SMALL, ids=lambda value: str(value))
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_helper_compiles_within_the_limits(
    name: str, sizes: dict[str, int], warps: int, capability: int
) -> None:
    kernel = _helper(name, sizes, warps, capability)
    _check(kernel, capability, multiplies=False)


@pytest.mark.usefixtures("sizes_of_one")
@pytest.mark.parametrize("has_kept", [False, True], ids=["all", "kept"])
@pytest.mark.parametrize(("name", "sizes", "warps"), SMALL, ids=lambda value: str(value))
def test_helper_compiles_for_sizes_of_one(
    name: str, sizes: dict[str, int], warps: int, has_kept: bool
) -> None:
    _helper(name, sizes, warps, 90, has_kept=has_kept)
