"""The two special test processes are what they say, so that kernel tests can rely on them."""

from __future__ import annotations

import pytest
import torch


@pytest.mark.interpreter
def test_triton_kernels_run_on_the_cpu_under_the_interpreter() -> None:
    from tests.support.add_kernel import launch_add

    x, y = torch.randn(100), torch.randn(100)
    torch.testing.assert_close(launch_add(x, y), x + y)


@pytest.mark.offline
@pytest.mark.parametrize("capability", [80, 90, 100], ids=lambda value: f"sm_{value}")
def test_triton_kernels_compile_for_a_gpu_that_is_not_there(capability: int) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from tests.support.add_kernel import add_kernel

    source = ASTSource(
        add_kernel,
        {"x_ptr": "*fp32", "y_ptr": "*fp32", "out_ptr": "*fp32", "n": "i32", "BLOCK": "constexpr"},
        {"BLOCK": 128},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    assert f".target sm_{capability}" in compiled.asm["ptx"]
