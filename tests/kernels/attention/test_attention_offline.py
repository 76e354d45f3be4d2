"""The kernels of attention compiled for GPUs that are not there: no spills, shared memory in bounds."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from memeff_compile.kernels._triton.gpus import gpu_of
from memeff_compile.kernels.attention.shapes import (
    BOUNDS_CHUNK,
    BOUNDS_WARPS,
    KERNELS,
    Shape,
    depth_block,
    shape_for,
)
from tests.support.cubins import stack_bytes

pytestmark = pytest.mark.offline

# Shared memory a block may use, in bytes.
SHARED_LIMITS = {80: 166912, 89: 101376, 90: 232448, 100: 232448}
POINTERS = {
    "key_mask_ptr": "*u8",
    "query_ids_ptr": "*i64",
    "key_ids_ptr": "*i64",
    "bounds_ptr": "*i32",
    "lse_ptr": "*fp32",
    "sums_ptr": "*fp32",
    "delta_ptr": "*fp32",
}
FLOATS = ("scale", "inner", "factor")
PLAIN = {
    "HAS_AHEAD": True,
    "HAS_BEHIND": False,
    "HAS_KEY_MASK": False,
    "HAS_IDS": False,
    "HAS_BOUNDS": False,
    "MEAN": False,
    "SIGN": 1,
    "SOFTCAP": False,
    "UPCAST": False,
    "WITH_K": True,
    "WITH_V": True,
}
CAPPED = {**PLAIN, "SOFTCAP": True}
EVERY = {
    **PLAIN,
    "HAS_BEHIND": True,
    "HAS_KEY_MASK": True,
    "HAS_IDS": True,
    "HAS_BOUNDS": True,
    "MEAN": True,
    "SIGN": -1,
    "SOFTCAP": True,
}


def _compile(
    name: str, capability: int, dtype: str, constants: dict[str, Any], warps: int, unit: str = ""
) -> Any:
    """Compile a kernel; the runtime integers that `unit` names by a pattern are 1, a constant."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from memeff_compile.kernels.attention import tiles_kernels

    kernel = getattr(tiles_kernels, name)
    constants = {key: value for key, value in constants.items() if key in kernel.arg_names}
    signature, hints = {}, {}
    for place, argument in enumerate(kernel.arg_names):
        is_number = argument not in FLOATS and not argument.endswith("_ptr")
        if is_number and unit and argument not in constants and re.fullmatch(unit, argument):
            constants[argument] = 1
        if argument in constants:
            signature[argument] = "constexpr"
        elif argument.endswith("_ptr"):
            signature[argument] = POINTERS.get(argument, f"*{dtype}")
            hints[(place,)] = [["tt.divisibility", 16]]
        else:
            signature[argument] = "fp32" if argument in FLOATS else "i32"
            if argument.startswith("stride"):
                hints[(place,)] = [["tt.divisibility", 16]]
    return triton.compile(
        ASTSource(kernel, signature, constants, hints),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": warps},
    )


def _constants(depth: int, shape: Shape, flags: dict[str, Any]) -> dict[str, Any]:
    return {
        "DEPTH": depth,
        "DEPTH_BLOCK": depth_block(depth),
        "ROWS": shape.rows,
        "KEYS": shape.keys,
        "STAGES": shape.stages,
        **flags,
    }


NAMES = {
    "forward": "_attention_kernel",
    "query_gradient": "_attention_query_gradient_kernel",
    "key_gradient": "_attention_key_gradient_kernel",
}


def _check(
    kernel: str, capability: int, depth: int, flags: dict[str, Any], dtype: str, folder: Path
) -> None:
    """Compile a kernel with its own tile: no stack, shared memory in bounds, tensor cores."""
    has_tables = bool(flags["HAS_BOUNDS"])
    shape = shape_for(kernel, depth, gpu_of(divmod(capability, 10)), has_tables=has_tables)
    parts = [{}]
    if kernel == "key_gradient" and shape.is_split:
        parts = [{"WITH_K": False}, {"WITH_V": False}]
    for part in parts:
        constants = _constants(depth, shape, {**flags, **part})
        compiled = _compile(NAMES[kernel], capability, dtype, constants, shape.warps)
        ptx = compiled.asm["ptx"]
        assert compiled.metadata.shared <= SHARED_LIMITS[capability]
        spilled = stack_bytes(compiled.asm["cubin"], folder)
        assert spilled <= SPILLED.get((kernel, capability, depth_block(depth)), 0)
        assert "atom." not in ptx
        assert re.search(PRODUCTS[capability], ptx), "no tensor cores"
        if shape.stages > 1:
            assert "cp.async.cg.shared.global" in ptx, "tiles are not loaded ahead"


# Bytes per thread where the fastest tile of the sweep on an H200 spills: at head size 256 it takes
# 1.1 ms where the best that does not spill takes 1.7.
SPILLED = {("key_gradient", 90, 128): 128, ("key_gradient", 90, 256): 448}

PRODUCTS = {80: r"mma\.sync", 89: r"mma\.sync", 90: r"wgmma", 100: r"tcgen05\.mma"}


@pytest.mark.parametrize("kernel", KERNELS)
def test_attention_compiles_within_the_limits(kernel: str, tmp_path: Path) -> None:
    _check(kernel, 90, 128, PLAIN, "bf16", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("depth", "dtype"), [(64, "bf16"), (96, "bf16"), (128, "fp16"), (256, "bf16")]
)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("capability", list(SHARED_LIMITS))
def test_attention_compiles_within_the_limits_everywhere(
    capability: int, depth: int, dtype: str, kernel: str, tmp_path: Path
) -> None:
    for flags in (CAPPED, EVERY):
        _check(kernel, capability, depth, flags, dtype, tmp_path)


@pytest.mark.parametrize(("ours_are_queries", "from_lse"), [(True, False), (False, True)])
def test_bounds_compile_within_the_limits(
    ours_are_queries: bool, from_lse: bool, tmp_path: Path
) -> None:
    constants = {
        "OURS": 128,
        "OTHERS": 64,
        "CHUNK": BOUNDS_CHUNK // 64,
        "OURS_ARE_QUERIES": ours_are_queries,
        "FROM_LSE": from_lse,
        **EVERY,
    }
    kernel = _compile("_attention_bounds_kernel", 90, "bf16", constants, BOUNDS_WARPS)
    assert stack_bytes(kernel.asm["cubin"], tmp_path) == 0
    assert "atom." not in kernel.asm["ptx"]


# One sequence, one head, one query or one key: Triton makes constants of such numbers.
UNITS = (
    r"stride_.*|queries|keys|heads|groups|repeat|batch_heads|batch_groups|tiles|query_tiles|"
    r"key_tiles"
)


@pytest.mark.parametrize("name", [*NAMES.values(), "_attention_bounds_kernel"])
def test_numbers_that_are_one_compile(name: str) -> None:
    constants = {**_constants(64, Shape(16, 16, 4, 1), EVERY), "OURS": 16, "OTHERS": 16}
    constants |= {"CHUNK": 4, "OURS_ARE_QUERIES": True, "FROM_LSE": False}
    _compile(name, 80, "bf16", constants, 4, UNITS)
