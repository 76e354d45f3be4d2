"""Kernels compiled for GPUs that are not present, and checks on all of them."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from memeff_compile.kernels._triton.gpus import gpu_of
from memeff_compile.kernels._triton.key_tiles import Cells, Rows, Tables
from memeff_compile.kernels._triton.launch import packed

ROOT = Path(__file__).parents[2]
HOPPER = 90
every_size: int | None = None
"""The value of all numbers of a kernel, as in the fixture `sizes_of_one`."""
NARROWEST = 89
"""The one with the least shared memory of those that the kernels are for."""


def gpus(*capabilities: int) -> list[Any]:
    """Return test parameters: Hopper as it is, the others marked slow.

    For the others, a separate test compiles each kernel's largest form for the one with the least
    shared memory.
    """
    slow = pytest.mark.slow
    return [each if each == HOPPER else pytest.param(each, marks=slow) for each in capabilities]


def twice(*case: Any) -> list[Any]:
    """Return a test's parameters for Triton's own passes alone, and for all, which is slow."""
    name = "-".join(map(str, case))
    return [
        pytest.param(*case, marks=pytest.mark.triton_alone, id=f"{name}-Triton alone"),
        pytest.param(*case, marks=pytest.mark.slow, id=name),
    ]


class Reached(Exception):
    """Triton's passes have finished."""


def stop_behind_triton(patch: pytest.MonkeyPatch) -> None:
    """Let compiling raise `Reached` where LLVM and ptxas would start: six parts in seven of it."""
    import triton
    from triton.backends.nvidia.compiler import CUDABackend

    def stop(*given: Any) -> None:
        raise Reached

    patch.setattr(triton.knobs.compilation, "always_compile", True)
    patch.setattr(CUDABackend, "make_llir", stop)


def shared_of(capability: int) -> int:
    """Return the bytes of shared memory that a block may use, as of 89 for 8.9."""
    return gpu_of(divmod(capability, 10)).shared


TABLES_NAMED = Tables(
    *("key_mask_ptr", "stride_mask_batch", "query_ids_ptr", "stride_query_ids_batch"),
    *("key_ids_ptr", "stride_key_ids_batch"),
)
"""The names of the fields of a kernel's `Tables`."""


def rows_named(name: str) -> Rows:
    """Return the names of the fields of a kernel's `Rows`."""
    return Rows(f"{name}_ptr", f"stride_{name}_batch", f"stride_{name}_head", f"stride_{name}_row")


def cells_named(name: str) -> Cells:
    """Return the names of the fields of a kernel's `Cells`."""
    return Cells(*rows_named(name), f"stride_{name}_depth")


def compile_for(
    capability: int,
    kernel: Any,
    given: Mapping[str, Any],
    type_of: Callable[[str], str | None],
    is_aligned: Callable[[str], bool] = lambda argument: argument.startswith("stride"),
    parts: Mapping[str, Sequence[str]] | None = None,
    **options: Any,
) -> Any:
    """Compile a kernel of Triton or Gluon for a GPU.

    Args:
        capability: of the GPU, as 89 for 8.9.
        kernel: the kernel.
        given: constants, by name; those that the kernel does not know are left out.
        type_of: the type of any other argument, or None for an argument that is the constant None.
        is_aligned: which numbers sixteen divides; pointers are all aligned.
        parts: of arguments that are tuples, the names by which their parts are asked for above.
        **options: of the compiler, such as `num_warps`.
    """
    import triton
    from triton import compiler
    from triton.backends.compiler import GPUTarget

    # No test reads the lines of a kernel, which cost LLVM and ptxas a tenth of the time.
    triton.knobs.compilation.disable_line_info = True

    given = packed(kernel, given)
    constants: dict[tuple[int, ...], Any] = {}
    signature, hints = {}, {}
    for place, argument in enumerate(kernel.arg_names):
        names = (parts or {}).get(argument, argument)
        is_one = isinstance(names, str)
        kinds = []
        for index, name in enumerate([names] if is_one else names):
            path = (place,) if is_one else (place, index)
            kind = "constexpr" if name in given else type_of(name)
            if kind in (None, "constexpr"):
                constants[path], kind = given.get(name), "constexpr"
            kinds.append(kind)
            is_number = kind in ("i32", "i64")
            if is_number and every_size is not None:
                constants[path], kinds[-1] = every_size, "constexpr"
            elif kind.startswith("*") or (is_number and is_aligned(name)):
                hints[path] = [["tt.divisibility", 16]]
        named = getattr(names, "_make", tuple)
        signature[argument] = kinds[0] if is_one else named(kinds)
    assert every_size is None or every_size in constants.values(), "a kernel without sizes"
    source: Any = compiler.ASTSource
    if type(kernel).__name__ == "GluonJITFunction":
        from triton.experimental.gluon import _runtime

        source = _runtime.GluonASTSource
    return triton.compile(
        source(kernel, signature, constants, hints),
        target=GPUTarget("cuda", capability, 32),
        options=options,
    )


def stack_bytes(cubin: bytes) -> int:
    """Return the bytes of stack a kernel uses, which is where spilled registers go."""
    return _used(cubin, "STACK")


def registers_of(cubin: bytes) -> int:
    """Return the registers of a thread."""
    return _used(cubin, "REG")


def _used(cubin: bytes, what: str) -> int:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        listing = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    return max(int(found) for found in re.findall(rf"{what}:(\d+)", listing))


def is_pinned() -> bool:
    """Return whether this is the Triton that constraints.txt pins."""
    import triton

    return f"triton=={triton.__version__}\n" in (ROOT / "constraints.txt").read_text()


# Bytes of stack per thread that a Triton spills of kernels which the pinned one keeps in registers.
SPILLS = {
    "3.6": {"_linear_cross_entropy_hopper_specialized_products_kernel": 384},
    "3.9": {
        "_linear_cross_entropy_hopper_statistics_kernel": 168,
        "_linear_cross_entropy_hopper_specialized_products_kernel": 40,
        "_coded_kv_cache_append_codes_rows_kernel": 104,
    },
}


def stack_limit(compiled: Any) -> int:
    """Return the bytes of stack that a kernel may use under the installed Triton.

    The pinned Triton does not spill. Triton 3.6 and 3.8 spill a few bytes of a few kernels.
    """
    import triton

    if is_pinned():
        return 0
    return SPILLS.get(triton.__version__[:3], {}).get(compiled.metadata.name, 32)


def within_limits(compiled: Any, capability: int, stack: int = 0) -> str:
    """Check shared memory and stack, and that no floats are added in any order; return the PTX."""
    assert compiled.metadata.shared <= shared_of(capability)
    assert stack_bytes(compiled.asm["cubin"]) <= max(stack, stack_limit(compiled))
    ptx: str = compiled.asm["ptx"]
    assert not re.search(r"\b(atom|red)\.\S*\.(f16|bf16|f32|f64)", ptx), "sums in any order"
    return ptx
