"""Deferred logits have no memory: every door to it gives the values, or one sentence."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from memeff_compile.logits.attach import defer
from memeff_compile.logits.recipe import LogitsRecipe, LossSettings
from memeff_compile.logits.tensor import DeferredLogits
from tests.support.memory_doors import DOORS, check_door

# Another shape or other memory for these logits, or their memory for another tensor.
REFUSED = {
    "detached_given_as_data",
    "given_as_data",
    "given_as_data_in_inference_mode",
    "given_as_data_of_a_gradient",
    "given_as_data_of_a_parameter",
    "mapped_onto",
    "output_of_another_size",
    "resized",
    "set_from",
    "takes_other_data",
    "to_dlpack",
    "transposed_in_place",
    "view_given_as_data",
}

FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "logits": lambda logits: logits,
    "detached": lambda logits: logits.detach(),
    "some_rows": lambda logits: logits[1:4],
    "shifted": lambda logits: logits.reshape(2, 3, 7)[:, 1:],
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", DOORS)
def test_a_door_to_memory_gives_values_or_a_sentence(name: str, form: str) -> None:
    generator = torch.Generator().manual_seed(3)
    # Small whole numbers: every way to compute them gives the same bits.
    hidden = torch.randint(-4, 5, (6, 8), generator=generator).float().requires_grad_()
    weight = torch.randint(-4, 5, (7, 8), generator=generator).float().requires_grad_()
    recipe = LogitsRecipe(torch.float32)
    tensor = FORMS[form](defer(hidden, weight, None, (), recipe))
    plain = FORMS[form](recipe.logits(hidden, weight, None))
    assert isinstance(tensor, DeferredLogits)
    check_door(name, tensor, plain, gives_values=name not in REFUSED)


def _square(rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Deferred and eager logits of whole numbers, (rows, columns, 5)."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randint(-4, 5, (rows, columns, 8), generator=generator).float().requires_grad_()
    weight = torch.randint(-4, 5, (5, 8), generator=generator).float().requires_grad_()
    recipe = LogitsRecipe(torch.float32)
    deferred = defer(hidden, weight, None, (), recipe, loss=LossSettings())
    return deferred, recipe.logits(hidden, weight, None)


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.transpose(0, 1),
    "transposed_twice_and_cut": lambda x: x.transpose(0, 1)[1:].transpose(0, 1),
    "permuted_there_and_back": lambda x: x.permute(1, 2, 0).permute(2, 0, 1),
    "cut_to_a_square": lambda x: x[1:, :2],
    "shifted": lambda x: x.as_strided(x.shape, x.stride(), 0),
    "restrided": lambda x: x.as_strided(x.shape, (5, 15, 1), 0),
    "shifted_by_a_row": lambda x: x.reshape(9, 5)[1:7],
    "rolled": lambda x: x.roll(1, 0),
    "flattened_over_the_other_axis": lambda x: x.transpose(0, 1).reshape(9, 5),
    "every_other_row": lambda x: x.reshape(9, 5)[::2],
    "transposed_and_cast": lambda x: x.transpose(0, 1).double(),
    "transposed_and_copied": lambda x: x.transpose(0, 1).clone(),
    "transposed_and_scaled": lambda x: x.transpose(0, 1) / 2,
    "transposed_data": lambda x: x.data.transpose(0, 1),
    "picked_by_a_mask_and_an_index": lambda x: x[torch.eye(3).bool(), torch.tensor([0, 3, 4])],
    "picked_by_a_mask": lambda x: x.transpose(0, 1)[torch.ones(3, 3).triu().bool()],
    "picked_around_an_axis": lambda x: x[torch.tensor([2, 0]), :, torch.tensor([1, 1])],
    "picked_rows": lambda x: x.transpose(0, 1)[torch.tensor([2, 0]), torch.tensor([1, 1])],
}


@pytest.mark.parametrize("is_computed", [False, True], ids=["fresh", "computed"])
@pytest.mark.parametrize("view", VIEWS)
def test_views_of_square_logits_are_made_of_strides(view: str, is_computed: bool) -> None:
    grads, values = [], []
    for logits in _square(3, 3):
        if is_computed:
            logits.sum().item()
        seen = VIEWS[view](logits)
        (grad,) = (
            torch.autograd.grad(
                (seen * torch.arange(seen.numel()).reshape(seen.shape)).sum(), [logits]
            )
            if seen.requires_grad
            else (logits.detach() + 0,)
        )
        grads.append(grad)
        values.append((seen.argmax(-1), seen + 0, seen.shape, seen.stride(), logits + 0))
    assert torch.equal(grads[0] + 0, grads[1] + 0)
    for mine, eager in zip(*values, strict=True):
        assert torch.equal(mine, eager) if isinstance(eager, Tensor) else mine == eager


def test_transposed_logits_of_a_compiled_model_are_transposed() -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(67, 8), torch.nn.Linear(8, 67))
    x = torch.randint(67, (3, 3), generator=torch.Generator().manual_seed(0))
    options = {"memeff.inner": "aot_eager"}
    logits = torch.compile(model, backend="memeff", options=options)(x)
    assert torch.equal(logits.transpose(0, 1).argmax(-1), model(x).transpose(0, 1).argmax(-1))


def test_views_in_inference_mode_are_those_of_eager_pytorch() -> None:
    logits, eager = _square(2, 3)
    with torch.inference_mode():
        for one, two in ((logits.detach(), eager.detach()), (logits[0], eager[0])):
            assert one.is_inference() == two.is_inference()
            assert torch.equal(one, two)
    assert torch.equal(logits[0].detach() + 0, eager[0])


def test_copies_of_two_tensors_are_two() -> None:
    logits, eager = _square(2, 3)
    copies = copy.deepcopy([row.detach() for row in logits.reshape(6, 5)])
    assert torch.equal(torch.stack(copies), eager.reshape(6, 5))
