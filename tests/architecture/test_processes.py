"""The two special test processes are what they say, so that kernel tests can rely on them."""

from __future__ import annotations

import re
from pathlib import Path

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


def test_the_special_processes_are_given_every_file_that_needs_them() -> None:
    root = Path(__file__).resolve().parents[2]
    given = re.search(r"^KERNEL_TESTS := (.*)$", (root / "Makefile").read_text(), re.MULTILINE)
    assert given is not None
    folders = [root / folder for folder in given[1].split()]
    marked = re.compile(r"pytest\.mark\.(interpreter|offline)\b")
    needing = [path for path in (root / "tests").rglob("*.py") if marked.search(path.read_text())]
    assert len(needing) > 20
    assert all(any(path.is_relative_to(f) for f in folders) for path in needing)
