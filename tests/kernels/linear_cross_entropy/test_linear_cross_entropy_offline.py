"""Engine H's Triton kernels compiled for GPUs that are not there: no spills, shared memory in bounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.cubins import stack_bytes

pytestmark = pytest.mark.offline

# Shared memory a block may use, in bytes.
SHARED_LIMITS = {80: 166912, 89: 101376, 90: 232448, 100: 232448}
FLAGS = (
    "HAS_BIAS",
    "HAS_COLUMN_WEIGHT",
    "HAS_IGNORE",
    "HAS_SOFTCAP",
    "WITH_LSE",
    "WITH_LOGIT_SUM",
    "WITH_ENTROPY",
    "WITH_TOP",
)
POINTERS = {
    "_linear_cross_entropy_statistics_kernel": {
        "s_ptr": "*fp32",
        "bias_ptr": "*{dtype}",
        "column_weight_ptr": "*fp32",
        "target_ptr": "*i64",
        "state_ptr": "*fp32",
        "nll_ptr": "*fp32",
        "lse_ptr": "*fp32",
        "logit_sum_ptr": "*fp32",
        "entropy_ptr": "*fp32",
        "top_ptr": "*i64",
    },
    "_linear_cross_entropy_gradient_kernel": {
        "s_ptr": "*fp32",
        "g_ptr": "*{dtype}",
        "bias_ptr": "*{dtype}",
        "column_weight_ptr": "*fp32",
        "target_ptr": "*i64",
        "lse_ptr": "*fp32",
        "grad_nll_ptr": "*fp32",
        "grad_lse_ptr": "*fp32",
        "grad_logit_sum_ptr": "*fp32",
        "entropy_ptr": "*fp32",
        "grad_entropy_ptr": "*fp32",
    },
}
OPTIONAL = {
    "bias_ptr": "HAS_BIAS",
    "column_weight_ptr": "HAS_COLUMN_WEIGHT",
    "logit_sum_ptr": "WITH_LOGIT_SUM",
    "grad_logit_sum_ptr": "WITH_LOGIT_SUM",
    "entropy_ptr": "WITH_ENTROPY",
    "grad_entropy_ptr": "WITH_ENTROPY",
    "top_ptr": "WITH_TOP",
}


def _compile(
    name: str, capability: int, dtype: str, block: int, *, everything: bool, aligned: bool
) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from memeff_compile.kernels.linear_cross_entropy import hybrid_kernels

    kernel = getattr(hybrid_kernels, name)
    flags = [flag for flag in FLAGS if flag in kernel.arg_names]
    constants: dict[str, Any] = dict.fromkeys(flags, everything)
    constants |= {"HAS_IGNORE": True, "BLOCK": block}
    signature, hints = {}, {}
    for place, argument in enumerate(kernel.arg_names):
        if argument in constants:
            signature[argument] = "constexpr"
        elif OPTIONAL.get(argument) and not everything:
            signature[argument] = "constexpr"
            constants[argument] = None
        elif argument.endswith("_ptr"):
            signature[argument] = POINTERS[name][argument].format(dtype=dtype)
            hints[(place,)] = [["tt.divisibility", 16]]
        elif argument in ("scale", "softcap"):
            signature[argument] = "fp32"
        else:
            signature[argument] = "i32"
            if aligned and argument != "ignore_index":
                hints[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, hints)
    return triton.compile(
        source,
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": hybrid_kernels.WARPS},
    )


@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "ragged"])
@pytest.mark.parametrize("everything", [False, True], ids=["plain", "everything"])
@pytest.mark.parametrize(("dtype", "block"), [("bf16", 2048), ("fp16", 1024), ("fp32", 2048)])
@pytest.mark.parametrize("name", list(POINTERS))
@pytest.mark.parametrize("capability", list(SHARED_LIMITS))
def test_kernel_compiles_within_the_limits(
    name: str,
    capability: int,
    dtype: str,
    block: int,
    everything: bool,
    aligned: bool,
    tmp_path: Path,
) -> None:
    kernel = _compile(name, capability, dtype, block, everything=everything, aligned=aligned)
    assert kernel.metadata.shared <= SHARED_LIMITS[capability]
    assert stack_bytes(kernel.asm["cubin"], tmp_path) == 0
    if aligned:
        assert "ld.global.v4.b32" in kernel.asm["ptx"]


@pytest.mark.usefixtures("sizes_of_one")
@pytest.mark.parametrize("everything", [False, True], ids=["plain", "everything"])
@pytest.mark.parametrize("name", list(POINTERS))
def test_kernel_compiles_for_sizes_of_one(name: str, everything: bool) -> None:
    _compile(name, 90, "bf16", 1024, everything=everything, aligned=False)
