"""Compressed weights have no dense memory: every door to it gives the values, or one sentence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memeff_compile.kernels.coded_weight import CodedWeight, encode
from tests.support.memory_doors import DOORS, check_door

# Dense memory, of which there is none, or a write to a part of it.
REFUSED = {
    "applied",
    "data_ptr",
    "detached_given_as_data",
    "given_as_data",
    "given_as_data_in_inference_mode",
    "given_as_data_of_a_gradient",
    "given_as_data_of_a_parameter",
    "mapped_onto",
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


def test_a_worker_process_collates_weights() -> None:
    """Workers put a batch into shared memory of their own making."""
    dataset = [coded(dense()) for _ in range(2)]
    (batch,) = torch.utils.data.DataLoader(dataset, batch_size=2, num_workers=1)  # type: ignore[arg-type]
    assert torch.equal(batch, torch.stack([dense(), dense()]))
