"""The kernels of attention compiled for GPUs that are not there: no spills, shared memory in bounds."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from memeff_compile.kernels.attention.shapes import (
    BOUNDS_CHUNK,
    KERNELS,
    Shape,
    depth_block,
    shape_for,
)

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
WINDOW = {**PLAIN, "HAS_BEHIND": True}
TABLES = {**WINDOW, "HAS_KEY_MASK": True, "HAS_IDS": True, "HAS_BOUNDS": True}
CAPPED = {**PLAIN, "SOFTCAP": True}
EVERY = {**TABLES, "MEAN": True, "SIGN": -1, "SOFTCAP": True}


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


def _stack_bytes(cubin: bytes, folder: Path) -> int:
    """Return the bytes of stack a kernel uses, which is where spilled registers go."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    file = folder / "kernel.cubin"
    file.write_bytes(cubin)
    listing = subprocess.run(
        [tool, "-res-usage", file], capture_output=True, text=True, check=True
    ).stdout
    return max(int(found) for found in re.findall(r"STACK:(\d+)", listing))


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
