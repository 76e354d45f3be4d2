"""A pytest plugin for `make sanitize`: tests that are feasible under a tool, and the kernels they
launched.

    SHARD=0/4 compute-sanitizer --tool memcheck ... python -m pytest -p tests.support.sanitized -m gpu ...

Under a sanitizer a kernel runs ten to a hundred times longer. So the first case of each test
function comes first, then those cases that a checksum of their names picks, and after
`SANITIZED_SECONDS` no further one starts. `SHARD=i/n` takes every n-th test, for parallel processes
on one GPU. Each test's name is printed before it runs, so that a finding in a log follows the
test's name.
"""

from __future__ import annotations

import ast
import os
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHARE = int(os.environ.get("SANITIZED_SHARE", "6"))
SECONDS = float(os.environ.get("SANITIZED_SECONDS", "210"))
LEFT_OUT = {
    "a capture cannot allocate without the caching allocator, which hides what the tools look for": (
        "captured",
        "cuda_graph",
        "a_graph_is_replayed",
        "start_early",
    ),
    "it counts what that allocator has": (
        "allocated",
        "allocator",
        "keeps_no_dense_weight",
        "take_what_they_hold",
        "never_takes_more",
        "a_checkpointed_step_writes",
        "takes_no_more_than",
    ),
    "tensors of many GiB, an hour under a tool; what it shows is shown without one": (
        "32_bits",
        "two_gibibytes",
    ),
    "it looks at time or at errors of large tensors": (
        "waits_for_the_gpu",
        "does_not_wait",
        "accuracy_that_is_promised",
        "peaked_data_has_less_error",
        "where_it_is_faster",
    ),
    "it ends with an assertion on the device, which ends the process too": ("stops_on_the_device",),
    "most of it is what Inductor compiles or models of transformers launch": (
        "compiles_with_inductor",
        "a_compiled_call",
        "a_model_decodes",
        "training_steps_equal",
    ),
}
"""Words in the names of tests that are not run, by the reason."""

launched: set[str] = set()
unreached: list[str] = []
_began = time.monotonic()


def host_kernels() -> set[str]:
    """Return the names of the package's kernels that are launched from the host."""
    found = set()
    for path in (ROOT / "memeff_compile" / "kernels").rglob("*_kernels.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel"):
                found.add(node.name)
    return found


def why_left_out(function: str) -> str | None:
    """Return the reason not to run a test function under a tool, or None."""
    for reason, words in LEFT_OUT.items():
        if any(word in function for word in words):
            return reason
    return None


def pick(names: list[str], shard: str) -> list[str]:
    """Return which tests run, and in which order: the first case of each function, then others."""
    first: dict[str, str] = {}
    others = []
    for name in names:
        function = name.split("[")[0]
        if why_left_out(function.split("::")[-1]) is not None:
            continue
        if first.setdefault(function, name) != name and zlib.crc32(name.encode()) % SHARE == 0:
            others.append(name)
    place, count = map(int, shard.split("/"))
    return [*first.values(), *others][place::count]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the picked tests, in that order."""
    by_name = {item.nodeid: item for item in items}
    kept = [by_name[name] for name in pick(list(by_name), os.environ.get("SHARD", "0/1"))]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    """Print the name of a test that starts; start none when the time is over."""
    if time.monotonic() - _began > SECONDS:
        unreached.append(item.nodeid)
        return True
    print(f"\n@ {time.monotonic() - _began:.0f} s {item.nodeid}", flush=True)
    return None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Report the launched kernels and the tests that were not reached."""
    missing = sorted(host_kernels() - launched)
    write = terminalreporter.write_line
    write(f"kernels launched: {len(launched)}; not launched by this shard: {', '.join(missing)}")
    write(f"picked and not reached within {SECONDS:.0f} s: {len(unreached)}")
    for name in unreached:
        write(f"  {name}")


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
