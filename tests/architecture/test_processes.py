"""Interpreted and compiled kernels run as the tests of kernels rely on."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import torch


@pytest.mark.interpreter
def test_triton_kernels_run_on_the_cpu_under_the_interpreter() -> None:
    from tests.support.add_kernel import launch_add

    x, y = torch.randn(100), torch.randn(100)
    torch.testing.assert_close(launch_add(x, y), x + y)


@pytest.mark.interpreter
def test_a_mask_of_numbers_fails_under_the_interpreter_of_every_triton() -> None:
    from tests.support.add_kernel import masks_by_a_number_kernel

    x = torch.randn(16)
    with pytest.raises(Exception, match="mask"):
        masks_by_a_number_kernel[(1,)](x, torch.empty_like(x), 1, BLOCK=16)


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


@pytest.mark.offline
@pytest.mark.usefixtures("sizes_of_one")
def test_a_kernel_that_cannot_take_a_size_of_one_fails() -> None:
    """A constant is no tensor: Python raises for one kernel, a pass of Triton for the other."""
    from tests.support.add_kernel import add_kernel, casts_its_size_kernel
    from tests.support.offline import compile_for

    def type_of(argument: str) -> str:
        return "*fp32" if argument.endswith("_ptr") else "i32"

    compile_for(90, add_kernel, {"BLOCK": 128}, type_of)
    with pytest.raises(Exception, match="to"):
        compile_for(90, casts_its_size_kernel, {}, type_of)


@pytest.mark.parametrize("command", ["test", "test-newest"])
def test_the_interpreter_is_given_every_file_that_needs_it(command: str) -> None:
    root = Path(__file__).resolve().parents[2]
    marked = re.compile(r"pytest\.mark\.interpreter\b")
    needing = {p for p in (root / "tests").rglob("test_*.py") if marked.search(p.read_text())}
    assert len(needing) > 10
    said = subprocess.run(
        ["make", "--dry-run", "--assume-old=.venv/.installed", command],
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    (line,) = [each for each in said.splitlines() if "TRITON_INTERPRET=1" in each]
    given = {root / word for word in line.split() if word.endswith(".py")}
    assert needing <= given
