"""Engines F and S compiled for a GPU that is not there: no spills, shared memory in bounds."""

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
    "is_sparse_ptr",
    "tile_row_ptr",
    "tile_column_ptr",
    "group_tile_ptr",
    "group_column_ptr",
    "weight_start_ptr",
    "weight_tile_ptr",
    "weight_row_ptr",
    "hidden_start_ptr",
    "hidden_tile_ptr",
    "hidden_column_ptr",
    "rank_ptr",
)
BYTE_POINTERS = ("code_ptr", "active_ptr")
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
SCORED = {
    "given": ("stats_ptr", "compact_lse_ptr", "target_logit_ptr", "target_ptr"),
    "group": ("first_row", "group_rows"),
    "counts": ("stats_tiles", "tiles"),
}


def _blocks(name: str, shapes: Any, columns: int) -> dict[str, list[int]]:
    """Return the block of each tile descriptor that a kernel takes."""
    rows, step = shapes.rows, shapes.step
    if name.endswith("forward_kernel"):
        return {"hidden_desc": [rows, step], "weight_desc": [columns, step]}
    if name.endswith("dense_gradient_kernel"):
        return {
            "hidden_desc": [rows, step],
            "weight_desc": [columns, step],
            "g_desc": [rows, columns // 4],
        }
    if name.endswith("sparse_gradient_kernel"):
        return {
            "hidden_desc": [rows, step],
            "weight_desc": [rows, step],
            "g_desc": [rows, rows // 4],
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
    from memeff_compile.kernels.linear_cross_entropy import fused_kernels, sparse_kernels

    kernel = getattr(fused_kernels, name, None) or getattr(sparse_kernels, name)
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
            of = "i32" if argument in INT_POINTERS else "u8" if argument in BYTE_POINTERS else of
            return f"*{of}"
        return "fp32" if argument in ("scale", "softcap", "threshold", "limit") else "i32"

    settings = {"num_warps": warps, "num_stages": stages}
    parts = SCORED if "score" in name or "code" in name else PARTS
    return compile_for(
        capability, kernel, constants, type_of, lambda name: False, parts, **settings
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
    ("_linear_cross_entropy_forward_kernel", {"PARTS": 1}),
    ("_linear_cross_entropy_forward_kernel", {"PARTS": 2}),
    ("_linear_cross_entropy_dense_gradient_kernel", {"GATHER": False}),
    ("_linear_cross_entropy_dense_gradient_kernel", {"GATHER": True}),
    ("_linear_cross_entropy_dense_products_kernel", {"GATHER": False}),
    ("_linear_cross_entropy_dense_products_kernel", {"GATHER": True}),
    ("_linear_cross_entropy_sparse_gradient_kernel", {}),
    ("_linear_cross_entropy_sparse_products_kernel", {}),
]


def _cases(name: str, flags: dict[str, Any], epilogue: str) -> list[Any]:
    """Return a form to the end where none with its tiles is larger; the least of all are slow."""
    case = name, flags, epilogue
    is_least, is_largest = False, True
    if "forward" in name:  # one part of the vocabulary, or one of two
        is_least = epilogue == ("everything" if flags["PARTS"] == 1 else "plain")
        is_largest = epilogue == "everything"
    elif "dense_gradient" in name:
        is_least = epilogue == "plain" and flags["GATHER"]
        is_largest = epilogue == ("everything" if flags["GATHER"] else "entropy")
    elif "sparse_gradient" in name:
        is_largest = epilogue != "plain"
    else:
        is_least = "dense_products" in name and not flags["GATHER"]
    if is_least or epilogue == "softcap":
        return [pytest.param(*case, marks=pytest.mark.slow)]
    return [case] if is_largest else twice(*case)


# The last products have no epilogue of their own.
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
    is_square = name.endswith("sparse_gradient_kernel")
    is_plain = epilogue in ("plain", "entropy")
    columns, warps = shapes.columns, shapes.warps
    if name.endswith("dense_gradient_kernel"):
        columns = shapes.gradient_columns(is_plain=is_plain and not flags["GATHER"])
    if is_square:
        warps = shapes.gradient_square_warps(is_plain=is_plain)
    constants = {
        **dict.fromkeys(EPILOGUE, epilogue == "everything"),
        "HAS_SOFTCAP": epilogue in ("softcap", "everything"),
        "WITH_ENTROPY": epilogue in ("entropy", "everything"),
        "HAS_KEPT": True,
        "HAS_SPARSE": True,
        "NEEDS_WEIGHT": True,
        "NEEDS_HIDDEN": True,
        "ADD": True,
        "GROUP": 16,
        "BM": shapes.rows,
        "BN": columns,
        "BK": shapes.step,
        "TILE": shapes.rows,
        "FLATTEN": shapes.flatten and not flags.get("GATHER"),
        "UPCAST": False,
        **flags,
    }
    stages = shapes.square_stages if is_square else shapes.stages
    if name.endswith("sparse_products_kernel"):
        stages = shapes.sparse_stages
    dtype = "fp16" if epilogue == "everything" else "bf16"
    return _compile(name, capability, constants, warps=warps, stages=stages, dtype=dtype)


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


SMALL = [
    ("_linear_cross_entropy_compact_kernel", {"BLOCK": 2048}, 8),
    ("_linear_cross_entropy_gather_kernel", {"PAD": 128, "BLOCK": 4096}, 4),
    ("_linear_cross_entropy_scatter_kernel", {"BLOCK": 4096}, 4),
    ("_linear_cross_entropy_cotangents_kernel", {"BLOCK": 512}, 4),
    ("_linear_cross_entropy_rows_kernel", {"PARTS": 2, "ROWS": 8, "TILES": 128}, 4),
    ("_linear_cross_entropy_column_sums_kernel", {"BLOCK": 128, "ROWS": 64}, 4),
    ("_linear_cross_entropy_sparse_column_sums_kernel", {}, 4),
    ("_linear_cross_entropy_block_score_kernel", {"CHUNK": 64}, 8),
    ("_linear_cross_entropy_mass_code_kernel", {"CHUNK": 64}, 8),
    ("_linear_cross_entropy_mass_score_kernel", {"CHUNK": 64}, 8),
    ("_linear_cross_entropy_select_kernel", {"CHUNK": 256}, 4),
    ("_linear_cross_entropy_place_kernel", {"BLOCK": 512}, 4),
]


def _helper(
    name: str, sizes: dict[str, int], warps: int, capability: int, *, has_kept: bool = True
) -> Any:
    constants = {
        **sizes,
        "TILE": 128,
        "LEVELS": 16,
        "HAS_KEPT": has_kept,
        "HAS_SPARSE": True,
        "HAS_IGNORE": True,
        "WITH_LOGIT_SUM": True,
        "WITH_ENTROPY": True,
        "WITH_COMPACT_LSE": True,
        "KEEP_TARGETS": True,
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
