"""Compressed weights have no dense memory: every door to it gives the values, or one sentence."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from memeff_compile.errors import CodedWeightError
from memeff_compile.kernels.coded_weight import CodedWeight, encode
from tests.support.memory_doors import DOORS, check_door

# Dense memory, which does not exist, or a write to a part of it.
REFUSED = {
    "applied",
    "data_ptr",
    "detached_given_as_data",
    "diagonal_filled",
    "given_as_data",
    "given_as_data_in_inference_mode",
    "given_as_data_of_a_gradient",
    "given_as_data_of_a_parameter",
    "mapped_onto",
    "output_of_another_size",
    "output_read",
    "output_through_a_view",
    "resized",
    "set_from",
    "set_to_storage",
    "shared_storage",
    "storage_by_the_base",
    "storage_bytes",
    "storage_copied_from",
    "storage_element",
    "storage_of_detached",
    "to_dlpack",
    "transposed_in_place",
    "untyped_storage",
}

REFUSED_OF_VIEWS = {
    "applied",
    "diagonal_filled",
    "mapped_onto",
    "output_of_another_size",
    "output_read",
    "output_through_a_view",
    "resized",
    "set_from",
    "set_to_storage",
    "storage_of_detached",
    "transposed_in_place",
    "untyped_storage",
}


def dense() -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(-4, 5, (6, 8), generator=generator).bfloat16()


def coded(values: Tensor) -> CodedWeight:
    return CodedWeight(encode(values, "win4"), "win4", values.shape)


@pytest.mark.parametrize("form", ["tensor", "parameter"])
@pytest.mark.parametrize("name", DOORS)
def test_a_door_to_memory_gives_values_or_a_sentence(name: str, form: str) -> None:
    values = dense()
    tensor: Any = coded(values)
    if form == "parameter":
        tensor, values = nn.Parameter(tensor), nn.Parameter(values)
    before = values.detach().clone()
    check_door(name, tensor, values, gives_values=name not in REFUSED)
    if name in REFUSED:
        assert torch.equal(tensor.decode(), before)


WRITES: dict[str, Callable[[Any, Any], object]] = {
    "set": lambda storage, other: storage.__setitem__(0, 1),
    "set a slice": lambda storage, other: storage.__setitem__(slice(0, 2), 1),
    "fill_": lambda storage, other: storage.fill_(1),
    "copy_": lambda storage, other: storage.copy_(other),
    "resize_": lambda storage, other: storage.resize_(4),
}
STORAGES: dict[str, Callable[[Tensor], Any]] = {
    "untyped": lambda weight: weight.untyped_storage(),
    "of the base": torch.Tensor.untyped_storage,
    "of detached": lambda weight: weight.detach().untyped_storage(),
    "of .data": lambda weight: weight.data.untyped_storage(),
    "typed": lambda weight: weight.storage(),
    "untyped of typed": lambda weight: weight.storage().untyped(),
}


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("write", WRITES)
def test_a_storage_is_not_written_to(storage: str, write: str) -> None:
    weight = nn.Parameter(coded(dense()))
    before, found = weight.decode(), STORAGES[storage](weight)
    size = found.nbytes() if hasattr(found, "nbytes") else 0
    with pytest.raises(CodedWeightError, match="write to its storage would write in place"):
        WRITES[write](found, found)
    assert torch.equal(weight.decode(), before)
    assert size == (found.nbytes() if hasattr(found, "nbytes") else 0)


def _stepped(view: Tensor) -> None:
    parameter = nn.Parameter(view)
    parameter.grad = torch.ones_like(view)
    torch.optim.SGD([parameter]).step()


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "row": lambda weight: weight[0],
    "columns of .data": lambda weight: weight.data[:, :2],
    "as a row": lambda weight: weight.view(-1)[:],
    "detached": lambda weight: weight.detach()[2:],
    "a row of a view, detached": lambda weight: weight[2:].detach()[0],
    "transposed": lambda weight: weight.t(),
    "diagonal": torch.diagonal,
    "chunk": lambda weight: weight.chunk(2)[1],
    "split": lambda weight: weight.split([2, 4])[0],
    "unsafe_split": lambda weight: weight.unsafe_split(2)[0],
    "unbind": lambda weight: weight.unbind(1)[0],
    "iter": lambda weight: list(weight)[3],
    "reshaped": lambda weight: weight.reshape(2, 3, 8),
    "expanded": lambda weight: torch.broadcast_tensors(weight, torch.ones(2, 6, 8))[0],
    "as bits": lambda weight: weight.view(torch.int16),
    "as_strided": lambda weight: weight.as_strided((2, 2), (8, 1)),
    "flattened": lambda weight: weight[:2].flatten(),
    "of no copy": lambda weight: weight[:2].contiguous().to(weight.dtype),
    "parameter": lambda weight: nn.Parameter(weight[:4]),
}
WRITES_TO_VIEWS: dict[str, Callable[[Tensor], object]] = {
    "zero_": lambda view: view.zero_(),
    "mul_": lambda view: view.detach().mul_(2),
    "add_ to .data": lambda view: view.data.add_(1),
    "copy_": lambda view: view.copy_(torch.zeros(view.shape)),
    "out=": lambda view: torch.add(view.clone(), 1, out=view),
    "index": lambda view: view.__setitem__(0, 0),
    "foreach": lambda view: torch._foreach_add_([torch.ones(2), view], 1),
    "storage": lambda view: view.untyped_storage().fill_(0),
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("view", VIEWS)
def test_a_view_is_not_written_to(view: str, mode: Any) -> None:
    weight = nn.Parameter(coded(dense()))
    before = weight.decode()
    with mode():
        for write in WRITES_TO_VIEWS.values():
            found = VIEWS[view](weight)
            with pytest.raises(CodedWeightError, match="in place to a compressed weight"):
                write(found)
            expected = VIEWS[view](nn.Parameter(dense()))
            assert torch.equal(found, expected)
            assert torch.equal(weight.decode(), before)


@pytest.mark.parametrize(
    "write",
    [nn.init.normal_, _stepped, lambda view: nn.functional.relu(view, inplace=True)],
    ids=["init", "optimizer", "relu"],
)
def test_no_writer_of_torchs_changes_a_view(write: Callable[[Tensor], object]) -> None:
    weight = coded(dense())
    with pytest.raises(CodedWeightError, match="in place to a compressed weight"):
        write(weight[:4])
    with pytest.raises(ValueError, match="read-only"):
        weight[:4].view(torch.int16).numpy().fill(0)
    assert torch.equal(weight.decode(), dense())


COPIES: dict[str, Callable[[Tensor], Tensor]] = {
    "clone": lambda weight: weight[0].clone(),
    "advanced index": lambda weight: weight[[0, 2]],
    "mask": lambda weight: weight[weight > 0],
    "sum": lambda weight: weight[:4] + 1,
    "cast": lambda weight: weight[:4].float(),
    "transposed, contiguous": lambda weight: weight.t().contiguous(),
    "transposed, as a row": lambda weight: weight.t().reshape(-1),
    "pickled": lambda weight: pickle.loads(pickle.dumps(weight[:4])),
    "deepcopy": lambda weight: copy.deepcopy(weight[:4]),
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", COPIES)
def test_a_copy_of_a_part_is_the_users_own(name: str, mode: Any) -> None:
    weight = coded(dense())
    with mode():
        found, expected = COPIES[name](weight), COPIES[name](dense())
        assert torch.equal(found.zero_(), expected.zero_())
        assert type(found) is Tensor


@pytest.mark.parametrize("name", DOORS)
def test_a_door_to_a_views_memory_gives_values_or_a_sentence(name: str) -> None:
    values = torch.cat([dense(), dense()])
    check_door(
        name, coded(values)[:6], values[:6].clone(), gives_values=name not in REFUSED_OF_VIEWS
    )


def test_compiled_code_reads_views_and_does_not_write_to_them() -> None:
    weight = nn.Parameter(coded(dense()))
    view, other = weight[:2], weight[2:4].detach()
    read = torch.compile(
        lambda a, b, w: (a + b + w[4:], w[1:]), backend="aot_eager", fullgraph=True
    )
    total, part = read(view, other, weight)
    assert torch.equal(total, dense()[:2] + dense()[2:4] + dense()[4:])
    assert torch.equal(part, dense()[1:])
    write = torch.compile(lambda w: w.detach()[0].zero_(), backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match="in place to a compressed weight"):
        write(weight)
    (total.sum() + part.sum()).backward(retain_graph=True)
    total.sum().backward()
    assert weight.grad is not None
    assert weight.grad.sum(1).tolist() == [16, 24, 8, 8, 24, 24]


def test_storages_tell_weights_apart() -> None:
    one, two = coded(dense()), coded(dense())
    assert one.untyped_storage()._cdata == one.untyped_storage()._cdata
    assert one.untyped_storage()._cdata != two.untyped_storage()._cdata
    assert StorageWeakRef(one.untyped_storage()) == StorageWeakRef(one.untyped_storage())
    assert one.untyped_storage().nbytes() == dense().untyped_storage().nbytes()


def test_a_worker_process_collates_weights() -> None:
    """Workers put a batch into shared memory that they make."""
    dataset = [coded(dense()) for _ in range(2)]
    (batch,) = torch.utils.data.DataLoader(dataset, batch_size=2, num_workers=1)  # type: ignore[arg-type]
    assert torch.equal(batch, torch.stack([dense(), dense()]))


@pytest.mark.parametrize("of", ["module", "function"])
def test_a_traced_linear_is_right_without_gradients_and_says_so_with_them(of: str) -> None:
    linear = nn.Linear(256, 256).bfloat16()
    linear.weight = nn.Parameter(coded(linear.weight.detach()))
    traced: Any = linear if of == "module" else lambda x: linear(x)
    x = torch.ones(2, 256, dtype=torch.bfloat16)
    with pytest.raises(CodedWeightError, match=r"Trace under torch\.no_grad"):
        torch.jit.trace(traced, x)
    linear.requires_grad_(False)
    assert torch.equal(torch.jit.trace(traced, x)(x + 1), linear(x + 1))
