"""Compressed weights have no dense memory: every door to it gives the values, or one sentence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from memeff_compile.errors import CodedWeightError
from memeff_compile.kernels.coded_weight import CodedWeight, encode
from tests.support.memory_doors import DOORS, check_door

# Dense memory, of which there is none, or a write to a part of it.
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


def test_storages_tell_weights_apart() -> None:
    one, two = coded(dense()), coded(dense())
    assert one.untyped_storage()._cdata == one.untyped_storage()._cdata
    assert one.untyped_storage()._cdata != two.untyped_storage()._cdata
    assert StorageWeakRef(one.untyped_storage()) == StorageWeakRef(one.untyped_storage())
    assert one.untyped_storage().nbytes() == dense().untyped_storage().nbytes()


def test_a_worker_process_collates_weights() -> None:
    """Workers put a batch into shared memory of their own making."""
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
