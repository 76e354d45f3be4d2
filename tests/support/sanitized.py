"""A pytest plugin for `make sanitize`: a share of the tests, and which Triton kernels they launched.

    compute-sanitizer --tool memcheck ... python -m pytest -p tests.support.sanitized -m gpu ...

Under a sanitizer a kernel runs ten to a hundred times longer, so of each test function the first case
runs, and of the other cases those that a checksum of their names picks: the same ones every time.
Tests of tensors beyond 2**31 elements are left out; what they would show is shown without a tool.
"""

from __future__ import annotations

import ast
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHARE = int(os.environ.get("SANITIZED_SHARE", "12"))
LARGE = (
    "beyond_31_bits",
    "large",
    "huge",
    "peak",
    "allocated",
    "memory",
    "graph",
    "captured",
    "waits",
)
launched: set[str] = set()


def host_kernels() -> set[str]:
    """Return the names of the package's kernels that are launched from the host."""
    found = set()
    for path in (ROOT / "memeff_compile" / "kernels").rglob("*_kernels.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel"):
                found.add(node.name)
    return found


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the first case of each test function and one in `SHARE` of the others."""
    seen: set[str] = set()
    kept, left = [], []
    for item in items:
        function = item.nodeid.split("[")[0]
        is_large = any(word in function.split("::")[-1] for word in LARGE)
        picked = function not in seen or zlib.crc32(item.nodeid.encode()) % SHARE == 0
        (kept if picked and not is_large else left).append(item)
        seen.add(function)
    items[:] = kept
    config.hook.pytest_deselected(items=left)


@pytest.fixture(autouse=True, scope="session")
def _watch_launches() -> Iterator[None]:
    from triton.runtime.jit import JITFunction

    plain: Any = JITFunction.run

    def run(self: Any, *args: Any, **settings: Any) -> Any:
        launched.add(self.fn.__name__)
        return plain(self, *args, **settings)

    JITFunction.run = run  # type: ignore[method-assign]
    yield
    JITFunction.run = plain  # type: ignore[method-assign]
    folder = os.environ.get("SANITIZED_KERNELS")
    if folder:
        name = f"kernels-{os.environ.get('PYTEST_XDIST_WORKER', 'main')}-{os.getpid()}.txt"
        (Path(folder) / name).write_text("\n".join(sorted(launched)) + "\n")
