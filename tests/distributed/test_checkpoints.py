"""torch.distributed.checkpoint across numbers of processes: plain, compressed and ternary models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import memeff_compile
from memeff_compile import compat
from memeff_compile.kernels.coded_weight import CodedWeight
from tests.distributed.models import whole
from tests.distributed.processes import TwoProcesses

pytestmark = [
    pytest.mark.xdist_group("two processes"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]
WIDTH = 256
KINDS = ("plain", "compressed", "ternary", "packed")


def made(kind: str, seed: int) -> nn.Module:
    """Return a model of one process, its values as they are saved: compressed ones dense."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    if kind in ("ternary", "packed"):
        memeff_compile.ternarize_(model)
    model.bfloat16()
    if kind == "packed":
        memeff_compile.pack_ternary_(model)
    return model.requires_grad_(kind != "compressed")


def served(kind: str, seed: int) -> nn.Module:
    """Return the model as it trains or serves: sharded where there are processes, and coded."""
    model = made(kind, seed)
    if dist.is_initialized():
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for each in (model[0], model[2], model):
            fully_shard(each, mesh=mesh)
    if kind == "compressed":
        memeff_compile.compress_(model, min_size=0, progress=False)
    return model


def save(kind: str, path: Path) -> None:
    dcp.save(served(kind, 0).state_dict(), checkpoint_id=path, no_dist=not dist.is_initialized())
    if not dist.is_initialized() or dist.get_rank() == 0:
        torch.save(made(kind, 0).state_dict(), path / "whole.pt")


def load(kind: str, path: Path) -> None:
    model, wanted = served(kind, 1), torch.load(path / "whole.pt")
    state = model.state_dict()
    differ = [name for name in wanted if not torch.equal(whole(state[name]), wanted[name])]
    assert "0.packed" in differ or "0.weight" in differ
    dcp.load(state, checkpoint_id=path, no_dist=not dist.is_initialized())
    model.load_state_dict(state)
    found = model.state_dict()
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(whole(found[name]), value), name
    coded = [isinstance(compat.local_part(each), CodedWeight) for each in model.parameters()]
    assert sum(coded) == 2 * (kind == "compressed")


def alone(work: Callable[[], None]) -> None:
    work()


@pytest.fixture(scope="module")
def four_processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoProcesses]:
    four = TwoProcesses(tmp_path_factory, ranks=4)
    yield four
    four.stop()


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_goes_from_two_processes_to_one_and_back(
    kind: str, two_processes: TwoProcesses, tmp_path: Path
) -> None:
    two_processes.run(partial(save, kind, tmp_path / "of two"))
    two_processes.run(partial(load, kind, tmp_path / "of two"))
    load(kind, tmp_path / "of two")
    save(kind, tmp_path / "of one")
    two_processes.run(partial(load, kind, tmp_path / "of one"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_goes_from_four_processes_to_fewer_and_back(
    kind: str, two_processes: TwoProcesses, four_processes: TwoProcesses, tmp_path: Path
) -> None:
    four_processes.run(partial(save, kind, tmp_path / "of four"))
    two_processes.run(partial(load, kind, tmp_path / "of four"))
    load(kind, tmp_path / "of four")
    for saved, run in (("of two", two_processes.run), ("of one", alone)):
        run(partial(save, kind, tmp_path / saved))
        four_processes.run(partial(load, kind, tmp_path / saved))
