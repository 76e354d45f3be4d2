"""Launches from compiled kernels: cache look-ups, and when Triton is called again."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from memeff_compile.kernels._triton import launch as launches


class Kernel:
    """Stands in for a kernel of Triton: remembers who compiled and who launched."""

    arg_names = ("x_ptr", "size", "factor", "BLOCK", "IS_ON")
    device_caches = ()

    def __init__(self) -> None:
        self.pre_run_hooks: list[Callable[..., None]] = []
        self.asked: list[tuple[Any, ...]] = []
        self.launched: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def run(*arguments: Any, **constants: Any) -> Any:
            self.asked.append((grid, *arguments, constants))
            return SimpleNamespace(
                run=lambda *given: self.launched.append(given),
                function="function",
                packed_metadata="metadata",
            )

        return run


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A GPU whose number can be changed."""
    from triton.runtime import driver

    found = SimpleNamespace(number=0)
    active = SimpleNamespace(get_current_stream=lambda number: 100 + number)
    monkeypatch.setattr(launches, "_compiled", {})
    monkeypatch.setattr(launches, "current_gpu", lambda: found.number)
    monkeypatch.setattr(driver, "_active", active)
    return found


CONSTANTS = {"BLOCK": 32, "IS_ON": True, "num_warps": 4}


def run(kernel: Kernel, *arguments: Any, name: tuple[Any, ...] = (32, True)) -> None:
    launches.launch(kernel, (3, 2), arguments, CONSTANTS, name)


@pytest.mark.usefixtures("device")
def test_what_was_compiled_is_launched_with_the_arguments_in_their_order() -> None:
    kernel, x, other = Kernel(), torch.ones(64), torch.zeros(64)
    run(kernel, x, 48, 0.5)
    run(kernel, other, 96, 0.25)
    assert kernel.asked == [((3, 2), x, 48, 0.5, CONSTANTS)]
    (given,) = kernel.launched
    assert given[:9] == (3, 2, 1, 100, "function", "metadata", None, None, None)
    assert given[9] is other
    assert given[10:] == (96, 0.25, 32, True)


def test_tensors_of_the_gpu_are_launched_as_addresses_and_others_are_left_to_triton(
    device: SimpleNamespace,
) -> None:
    kernel, x, other = Kernel(), torch.ones(64), torch.zeros(64)
    device.number = -1  # as tensors of a CPU name theirs
    for tensor in (x, other, torch.nn.Parameter(other)):
        run(kernel, (tensor, (tensor, 3)), 48, 0.5)
    assert len(kernel.asked) == 1
    here = other.data_ptr()
    assert [given[9] for given in kernel.launched] == [(here, (here, 3))] * 2
    device.number = 0
    for _ in range(2):
        run(kernel, (other, 3), 48, 0.5)
    assert kernel.launched[-1][9] == (other, 3), "Triton says that it is nowhere near the GPU"


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
    "changed",
    [
        (torch.ones(64)[1:], 48, 0.5),
        (torch.ones(64, dtype=torch.float16), 48, 0.5),
        (torch.ones(64), 47, 0.5),
        (torch.ones(64), 1, 0.5),
        (torch.ones(64), 1 << 40, 0.5),
        (torch.ones(64), 48, 1),
        (torch.ones(64), 48.0, 0.5),
        ((torch.ones(64),), 48, 0.5),
    ],
    ids=["16 bytes", "dtype", "16", "one", "64 bits", "no fraction", "a fraction", "a tuple"],
)
def test_triton_is_asked_again_where_it_would_compile_anew(changed: tuple[Any, ...]) -> None:
    kernel = Kernel()
    run(kernel, torch.ones(64), 48, 0.5)
    run(kernel, *changed)
    assert len(kernel.asked) == 2
    assert not kernel.launched


def test_constants_and_devices_have_launches_of_their_own(device: SimpleNamespace) -> None:
    kernel, x = Kernel(), torch.ones(64)
    run(kernel, x, 48, 0.5)
    run(kernel, x, 48, 0.5, name=(64, True))
    device.number = 1
    run(kernel, x, 48, 0.5)
    assert len(kernel.asked) == 3
    run(kernel, x, 48, 0.5)
    assert kernel.launched[0][3] == 101


@pytest.mark.usefixtures("device")
def test_who_watches_launches_sees_each_of_them() -> None:
    from triton import knobs

    kernel, x = Kernel(), torch.ones(64)
    run(kernel, x, 48, 0.5)
    watcher = lambda metadata: None  # noqa: E731
    knobs.runtime.launch_enter_hook.add(watcher)
    run(kernel, x, 48, 0.5)
    knobs.runtime.launch_enter_hook.remove(watcher)
    kernel.pre_run_hooks.append(lambda *arguments: None)
    run(kernel, x, 48, 0.5)
    assert len(kernel.asked) == 3
    assert not kernel.launched


@pytest.mark.usefixtures("device")
def test_only_so_many_launches_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launches, "_MOST", 2)
    kernel, x = Kernel(), torch.ones(64)
    for size in range(5):
        run(kernel, x, 48, 0.5, name=(size,))
    assert len(launches._compiled) <= 2


def test_tensors_that_are_aligned_are_launched_by_their_addresses_alone(
    device: SimpleNamespace,
) -> None:
    kernel, x, other = Kernel(), torch.ones(64), torch.zeros(64)

    def run_plain(tensor: torch.Tensor, name: int = 32) -> None:
        launches.launch_plain(kernel, (3,), [tensor], [48, 0.5], CONSTANTS, (name,))

    for tensor in (x, other):
        run_plain(tensor)
    assert kernel.asked == [((3,), x, 48, 0.5, CONSTANTS)]
    (given,) = kernel.launched
    assert given[9:] == (other.data_ptr(), 48, 0.5, 32, True)
    run_plain(other[1:])
    run_plain(x, 64)
    device.number = 1
    run_plain(x)
    assert len(kernel.asked) == 4, "another alignment, other constants, another GPU"


class Packing(Kernel):
    """A kernel that takes its constants as one."""

    arg_names = ("x_ptr", "size", "factor", "C")


@pytest.mark.usefixtures("device")
def test_a_kernel_that_takes_constants_as_one_gets_one_object_for_the_same() -> None:
    kernel, x = Packing(), torch.ones(64)
    for _ in range(2):
        launches.start(kernel, (3,), x, 48, factor=0.5, **CONSTANTS)
    launches.start(kernel, (3,), x, 48, factor=0.5, **{**CONSTANTS, "BLOCK": 64})
    run(kernel, x, 48, 0.5)
    first, second, other, held = (asked[-1] for asked in kernel.asked)
    assert {**first, "C": None} == {"C": None, "factor": 0.5, "num_warps": 4}
    assert (first["C"].BLOCK.value, first["C"].IS_ON.value) == (32, True)
    assert first["C"] is second["C"] is held["C"]
    assert repr(first["C"]) != repr(other["C"]), "compiled code is found by what is printed"
    run(kernel, x, 48, 0.5)
    assert kernel.launched[0][-3:] == (48, 0.5, first["C"])


def test_the_interpreter_reads_constants_as_they_were_given() -> None:
    kernel = SimpleNamespace(arg_names=["x_ptr", "C"])
    assert launches.packed(kernel, CONSTANTS)["C"].BLOCK == 32
    assert launches.packed(SimpleNamespace(arg_names=["BLOCK", "IS_ON"]), CONSTANTS) == CONSTANTS


@pytest.mark.usefixtures("device")
def test_what_stands_in_a_tuple_is_looked_at_too() -> None:
    kernel, x = Kernel(), torch.ones(64)
    for argument in ((x, 48), (x, 96), (x, 47), (x[1:], 48), x):
        run(kernel, argument, 48, 0.5)
    assert len(kernel.asked) == 4
    assert kernel.launched[0][9] == (x, 96)


@pytest.mark.usefixtures("device")
def test_descriptors_of_other_tiles_are_compiled_anew() -> None:
    kernel, base = Kernel(), torch.ones(64, 64)
    for given, block in (
        (base, [8, 16]),
        (base, [8, 16]),
        (base, [16, 16]),
        (base.half(), [8, 16]),
    ):
        run(kernel, SimpleNamespace(base=given, block_shape=block), 16, 0.5)
    assert len(kernel.asked) == 3
    assert len(kernel.launched) == 1


@pytest.mark.usefixtures("device")
def test_constants_are_the_name_of_a_kernel_that_is_run() -> None:
    kernel, x = Kernel(), torch.ones(64)
    for size in (32, 32, 64):
        launches.run_kernel(kernel, (3,), x, 16, 0.5, BLOCK=size, IS_ON=True, num_warps=4)
    assert len(kernel.asked) == 2
    assert kernel.launched[0][-2:] == (32, True)


@pytest.mark.usefixtures("device")
def test_a_call_of_equal_sizes_finds_its_launches_by_their_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernel, another, x = Kernel(), Kernel(), torch.ones(64)
    looked: list[Any] = []
    plain = launches.launch

    def seen(*given: Any) -> None:
        looked.append(given)
        plain(*given)

    def call(kernel: Kernel, *arguments: Any, **constants: Any) -> int:
        """Launch, and return how many launches have been looked up."""
        launch = launches.Launches("sizes")
        launch(kernel, (3, 2), *arguments, **CONSTANTS | constants)
        return len(looked)

    monkeypatch.setattr(launches, "_launched", {})
    monkeypatch.setattr(launches, "launch", seen)
    assert call(kernel, x, 48, 0.5) == 1
    other = torch.zeros(64)
    assert call(kernel, other, 48, 0.5) == 1
    assert kernel.launched[-1][9:] == (other.data_ptr(), 48, 0.5, 32, True)
    assert call(kernel, x, 96, 0.5) == 2
    assert call(kernel, x.double(), 96, 0.5) == 3
    assert call(kernel, x.double(), 96, 0.5, IS_ON=False) == 4
    assert call(another, x.double(), 96, 0.5, IS_ON=False) == 5
    # Memory that is not aligned is looked up each time, and does not take the place.
    assert call(another, x.double()[1:], 96, 0.5, IS_ON=False) == 6
    assert call(another, x.double(), 96, 0.5, IS_ON=False) == 6
    assert len(another.asked) == 2
