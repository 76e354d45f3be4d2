"""`library`'s Triton kernels compiled for GPUs that are not there: no spills, shared memory in bounds."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.offline import NARROWEST, compile_for, gpus, twice, within_limits

pytestmark = pytest.mark.offline

CAPABILITIES = gpus(80, 89, 90, 100)
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
    "_linear_cross_entropy_library_statistics_kernel": {
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
    "_linear_cross_entropy_library_gradient_kernel": {
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
NUMBERS = {
    "_linear_cross_entropy_library_statistics_kernel": (
        *("first_column", "width", "vocab", "ignore_index", "scale", "softcap"),
    ),
    "_linear_cross_entropy_library_gradient_kernel": (
        *("first_column", "width", "ignore_index", "scale", "softcap"),
    ),
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
    from memeff_compile.kernels.linear_cross_entropy import library_kernels, shapes

    constants: dict[str, Any] = dict.fromkeys(FLAGS, everything)

    def type_of(argument: str) -> str | None:
        if OPTIONAL.get(argument) and not everything:
            return None
        if argument.endswith("_ptr"):
            return POINTERS[name][argument].format(dtype=dtype)
        return "fp32" if argument in ("scale", "softcap") else "i32"

    return compile_for(
        capability,
        getattr(library_kernels, name),
        {**constants, "HAS_IGNORE": True, "BLOCK": block},
        type_of,
        lambda argument: aligned and argument != "ignore_index",
        {"numbers": NUMBERS[name]},
        num_warps=shapes.LIBRARY_WARPS,
    )


@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "ragged"])
@pytest.mark.parametrize(
    ("dtype", "block", "everything"),
    [
        *twice("bf16", 2048, False),
        ("bf16", 2048, True),
        *[pytest.param("fp16", 1024, each, marks=pytest.mark.slow) for each in (False, True)],
        *twice("fp32", 2048, False),
        *twice("fp32", 2048, True),
    ],
)
@pytest.mark.parametrize("name", list(POINTERS))
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_kernel_compiles_within_the_limits(
    name: str,
    capability: int,
    dtype: str,
    block: int,
    everything: bool,
    aligned: bool,
) -> None:
    kernel = _compile(name, capability, dtype, block, everything=everything, aligned=aligned)
    within_limits(kernel, capability)
    if aligned:
        assert "ld.global.v4.b32" in kernel.asm["ptx"]


@pytest.mark.parametrize("name", list(POINTERS))
def test_the_largest_form_compiles_for_the_narrowest_gpu(name: str) -> None:
    kernel = _compile(name, NARROWEST, "fp32", 2048, everything=True, aligned=True)
    assert "ld.global.v4.b32" in within_limits(kernel, NARROWEST)


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_gradients_in_fp32_of_a_head_in_16_bits_compile(
    capability: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with an adapter in fp32."""
    name = "_linear_cross_entropy_library_gradient_kernel"
    monkeypatch.setitem(POINTERS[name], "g_ptr", "*fp32")
    kernel = _compile(name, capability, "bf16", 2048, everything=True, aligned=True)
    assert "ld.global.v4.b32" in within_limits(kernel, capability)


@pytest.mark.usefixtures("sizes_of_one")
@pytest.mark.parametrize("everything", [False, True], ids=["plain", "everything"])
@pytest.mark.parametrize("name", list(POINTERS))
def test_kernel_compiles_for_sizes_of_one(name: str, everything: bool) -> None:
    _compile(name, 90, "bf16", 1024, everything=everything, aligned=False)
