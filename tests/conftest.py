"""The set-up of every test: a seed, few threads, a clean Dynamo, and a backend found by name.

Torch is imported only where it is used: the process that distributes tests does not need it.

The suite is run twice (see the Makefile), because Triton reads TRITON_INTERPRET when it is
imported. A test whose marker does not fit its process fails with the command to use.
"""

from __future__ import annotations

import atexit
import gc
import importlib.util
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Generator, Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

from tests.support.fresh_python import fresh_python as fresh_python
from tests.support.inductors_code import calling_ops as calling_ops
from tests.support.inductors_code import inductors_loops as inductors_loops
from tests.support.quick_dynamo import (
    let_cycles_wait,
    measure_nothing,
    read_configs_plainly,
    seed_what_is_there,
)
from tests.support.quick_interpreter import do_once
from tests.support.strict_interpreter import refuse_masks_of_numbers

ROOT = Path(__file__).resolve().parent.parent

# Inductor starts a pool of processes, each importing torch: dearer than all that the tests compile.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# And g++ takes half the time over loops of numbers that it takes over loops of vectors.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")

# Reports fit the terminal; goldens are as wide as where there is none.
os.environ["COLUMNS"] = "96"

OPTIONAL = ("expecttest", "hypothesis", "transformers", "accelerate", "peft")
"""Test files that import one of these are left out where it is missing (`make gpu`)."""

MISSING = tuple(name for name in OPTIONAL if importlib.util.find_spec(name) is None)

# Until collection ends: imported objects stay alive, and scanning them takes a seventh of the time.
gc.disable()

left_out: list[str] = []


def _make_backend_visible() -> None:
    """Announce the entry point of a source checkout that is not installed."""
    if any(entry.name == "memeff" for entry in entry_points(group="torch_dynamo_backends")):
        return
    folder = Path(tempfile.mkdtemp(prefix="memeff-entry-point-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    info = folder / "memeff_compile-0.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: memeff_compile\nVersion: 0.0\n")
    (info / "entry_points.txt").write_text(
        "[torch_dynamo_backends]\nmemeff = memeff_compile.backend:memeff\n"
    )
    sys.path.append(str(folder))
    inherited = os.environ.get("PYTHONPATH")
    paths = [inherited] if inherited else []
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, str(ROOT), str(folder)])


_make_backend_visible()


NAMED_BY_MARKER = ("gpu", "interpreter")
"""If a test file's name ends so, all its tests have this marker: `tests/architecture/test_layout.py`
tests it."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out a test file whose optional package is not installed, and list it in the header.

    Leave out a file, too, if its name says that all its tests have a marker that this run excludes:
    collecting them to deselect them takes a fifth of the start.
    """
    ending = collection_path.stem.rpartition("_")[2]
    if ending in NAMED_BY_MARKER and f"not {ending}" in config.option.markexpr:
        return True
    if not MISSING or collection_path.suffix != ".py" or collection_path == Path(__file__):
        return None
    text = collection_path.read_text()
    needs = [name for name in MISSING if re.search(rf"^(import|from) {name}\b", text, re.MULTILINE)]
    if not needs:
        return None
    left_out.append(f"{collection_path.relative_to(ROOT)} (needs {', '.join(needs)})")
    return True


def pytest_report_collectionfinish() -> list[str]:
    """List the files left out, so that skipping is visible."""
    return [f"left out, package not installed: {name}" for name in left_out]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run tests of a group first: another process takes its share of the rest from the end."""
    items.sort(key=lambda item: item.get_closest_marker("xdist_group") is None)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Keep the garbage collector from scanning modules and tests, which live until the end, and
    Dynamo's objects while it builds them: a tenth of the time. A test that depends on a cycle's
    collection triggers it.
    """
    measure_nothing()
    seed_what_is_there()
    if "not slow" in session.config.option.markexpr:  # the slow ones see them as everybody does
        read_configs_plainly()
        let_cycles_wait()
    if os.environ.get("TRITON_INTERPRET") == "1":
        do_once()
        refuse_masks_of_numbers()
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """Let a test marked triton_alone end where Triton's own passes do, in its first kernel."""
    if not pyfuncitem.get_closest_marker("triton_alone"):
        return (yield)
    from tests.support.offline import Reached, stop_behind_triton

    with pytest.MonkeyPatch.context() as patch:
        stop_behind_triton(patch)
        with pytest.raises(Reached):
            yield
    return True


@pytest.fixture(autouse=True)
def _fits_this_process(request: pytest.FixtureRequest) -> None:
    import torch

    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if request.node.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.fail("this test needs a CUDA device; `make gpu` runs it on a machine that has one")
    if request.node.get_closest_marker("interpreter") and not interpreted:
        pytest.fail("run interpreter tests with `TRITON_INTERPRET=1 pytest -m interpreter`")
    if request.node.get_closest_marker("offline") and interpreted:
        pytest.fail("run offline tests with TRITON_INTERPRET unset: `pytest -m offline`")


@pytest.fixture(autouse=True)
def _same_start() -> Iterator[None]:
    import torch

    torch.manual_seed(0)
    torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else 2)
    yield
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    if "memeff_compile.report" in sys.modules:
        sys.modules["memeff_compile.report"].clear()


@pytest.fixture
def nan_filled_empty() -> Iterator[None]:
    """Fill whatever torch.empty returns with NaN, so that an unwritten output cannot pass."""
    import torch

    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=["for the GPU", pytest.param("to the end", marks=pytest.mark.slow)])
def sizes_of_one(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile as for a launch whose sizes and strides are all 1: Triton makes them constants.

    A kernel that cannot take one fails in Python or in Triton's passes. LLVM and ptxas, six parts
    in seven of the time, are left to the slow tests.
    """
    import triton

    from tests.support import offline

    monkeypatch.setattr(offline, "every_size", 1)
    if request.param == "to the end":
        return

    compile_all = triton.compile

    def compile_first(*given: Any, **options: Any) -> None:
        with pytest.raises(offline.Reached):
            compile_all(*given, **options)

    offline.stop_behind_triton(monkeypatch)
    monkeypatch.setattr(triton, "compile", compile_first)
