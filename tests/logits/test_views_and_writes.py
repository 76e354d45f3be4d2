"""Views of deferred logits have the place of eager's in memory, and every write is seen in all."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import product
from typing import cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memeff_compile.logits.tensor import DeferredLogits

V = 67


@pytest.fixture(params=[(3, 3), (1, V), (2, 5)], ids=str)
def both(request: pytest.FixtureRequest) -> tuple[Tensor, Tensor]:
    """Deferred logits and those of eager PyTorch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(V, 8), nn.Linear(8, V)).double()
    ids = torch.randint(V, request.param)
    compiled = torch.compile(model, backend="memeff", options={"memeff.inner": "eager"})
    return compiled(ids), model(ids)


@pytest.mark.parametrize(
    "order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)], ids=str
)
def test_permuted_logits_are_permuted_whatever_their_shape(
    both: tuple[Tensor, Tensor], order: tuple[int, ...]
) -> None:
    found, expected = (logits.permute(order) for logits in both)
    assert torch.equal(found.argmax(-1), expected.argmax(-1))
    torch.testing.assert_close(found + 0, expected + 0)


@pytest.mark.parametrize("order", [(0, 2, 1), (2, 1, 0), (1, 0, 2), (0, 1, 2)], ids=str)
def test_a_copy_made_behind_a_write_through_another_view_has_what_was_written(
    both: tuple[Tensor, Tensor], order: tuple[int, ...]
) -> None:
    copies = []
    for logits in both:
        logits.view(V, -1).add_(0.5)  # a plain view: its last dimension is not the vocabulary
        copies.append(logits.permute(order).clone() * 2)
    torch.testing.assert_close(*copies)


ALIASES: dict[str, Callable[[Tensor], object]] = {
    "copy": copy.copy,
    "numpy": lambda a: torch.from_numpy(a.detach().numpy()),
    "dlpack": lambda a: torch.from_dlpack(a.detach()),
    "data": lambda a: a.data,
    "untyped storage": lambda a: (
        torch.empty(0)
        .double()
        .set_(a.detach().untyped_storage(), a.storage_offset(), a.shape, a.stride())
    ),
}


@pytest.mark.parametrize("alias", ALIASES)
@pytest.mark.parametrize("part", ["a[::9]", "a[-1:]", "a[:, 1:2]", "a[:, ::9].mT"])
def test_what_is_made_of_one_row_lies_as_in_eager(
    both: tuple[Tensor, Tensor], part: str, alias: str
) -> None:
    """A dimension of one entry keeps its stride, by which PyTorch tells the same from an overlap."""
    laid = []
    for logits in both:
        row = eval(part, {"a": logits})
        made = cast("Tensor", ALIASES[alias](row))
        laid.append((made.stride(), made.storage_offset()))
        with torch.no_grad():
            row.add_(made)  # the very same memory is allowed, another that overlaps is not
    assert laid[0] == laid[1]
    torch.testing.assert_close(*(logits.detach() + 0 for logits in both))


Model = Callable[[Tensor], Tensor]


@pytest.fixture(scope="module")
def models() -> tuple[nn.Module, Model, Tensor]:
    """Return a model, its compiled form, and the arguments of both."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(V, 8), nn.Linear(8, V)).double()
    compiled = torch.compile(model, backend="memeff", options={"memeff.inner": "eager"})
    return model, compiled, torch.randint(V, (3, 3))


WRITES: dict[str, Callable[[Tensor], object]] = {
    "part of a part": lambda a: a[:, -1][:, :5].zero_(),
    "data of a part of a part": lambda a: a[:, -1][:, :5].data.zero_(),
    "part of data of a part": lambda a: a[:, -1].data[:, :5].zero_(),
    "diagonal": lambda a: a.diagonal().data.mul_(3),
    "expanded": lambda a: a[1].view_as(a[1]).expand_as(a[1])[:, -1:].data.mul_(3),
    "unfolded": lambda a: a[:, -1].unfold(-1, 2, 2).data.fill_(2),
    "one number": lambda a: a[0, -1, 5].data.fill_(2),
    "all in one dimension": lambda a: a.flatten().data[::2].neg_(),
    "part of a transpose": lambda a: a.mT[:, 2:].data.mul_(3),
    "several parts": lambda a: [
        part.data.mul_(i) for i, part in enumerate(a[1].tensor_split(3, -1))
    ],
    "strides": lambda a: a.as_strided((2, 2), (1, 3), 1).data.fill_(2),
    "an assignment": lambda a: a[:, -1].__setitem__((slice(None), slice(5)), 2.0),
    "numpy": lambda a: a[:, -1][:, 1:3].numpy().fill(2),
    "data of another tensor": lambda a: (
        setattr(b := torch.zeros(()), "data", a[:, :, 1].data) or b.fill_(2)
    ),
    "another dtype": lambda a: a[:, -1].view(torch.int64).zero_(),
    "an optimizer's kind": lambda a: torch._foreach_mul_([a[0, :, 1:], a[1, :, ::2]], 3),
}

READERS: dict[str, Callable[[Tensor], Tensor]] = {
    "all": lambda a: a + 0,
    "the same part": lambda a: a[:, -1] + 0,
    "a copy": lambda a: a[1:].clone()[:, 1] * 2,
    "a cast": lambda a: a.float()[:, -1] + 0,
    "a loss": lambda a: F.cross_entropy(
        a.flatten(0, 1), torch.ones(len(a) ** 2, dtype=torch.int64)
    ),
    "a shifted loss": lambda a: F.cross_entropy(a[:, 1:].mT, torch.ones_like(a[:, 1:, 0]).long()),
    "masked rows": lambda a: a[a[..., 0] > -99].sum(0),
}


@pytest.mark.parametrize("write", WRITES)
def test_a_write_through_any_alias_is_seen_by_every_reader(
    models: tuple[nn.Module, Model, Tensor], write: str
) -> None:
    """Tensors taken before the write, including a part computed separately, and after it."""
    model, compiled, ids = models
    for reader, is_known in product(READERS.values(), (False, True)):
        results = []
        for logits in (compiled(ids), model(ids)):
            part, window = logits[:, -1].detach(), logits[1, :, 3:].detach()
            copied = logits.float()
            part.argmax(), window.argmax()  # of some rows, each computed on its own
            if is_known:
                logits.argmax()
            WRITES[write](logits.detach())
            results.append([part + 0, window + 0, copied + 0, reader(logits)])
        torch.testing.assert_close(*results)


def test_data_and_a_copy_of_a_view_that_a_write_made_stale_are_given(
    both: tuple[Tensor, Tensor],
) -> None:
    copies = []
    for logits in both:
        part = logits.split(1, -2)[-1][..., ::2]  # of several views, which autograd cannot rebase
        logits.mul_(3)
        copies.append(copy.copy(part).detach() + 0)
        part.data.mul_(-1.25)
    torch.testing.assert_close(*copies)
    torch.testing.assert_close(*(logits.detach() + 0 for logits in both))


PARTS: dict[str, Callable[[Tensor], Tensor]] = {
    "expand": lambda z: z.view_as(z).expand_as(z),
    "row": lambda z: z[0],
    "classes": lambda z: z[..., 1:3],
    "diagonal": lambda z: z.diagonal(0, 0, 1),
}


@pytest.mark.parametrize("part", PARTS)
def test_data_of_a_part_is_no_view_and_is_written_to_as_eagers(
    both: tuple[Tensor, Tensor], part: str
) -> None:
    found = []
    for logits in both:
        shown = PARTS[part](logits)
        data = shown.data
        alias = data.view_as(data)
        facts: list[object] = [alias._base is data or data._base is None]
        alias.copy_(shown)
        data.fill_(2)
        found.append([*facts, data.requires_grad, data.is_leaf, logits.detach().sum().item()])
    assert found[0] == pytest.approx(found[1], rel=1e-9)


@pytest.mark.parametrize("write", WRITES)
def test_a_write_before_the_backward_pass_has_the_gradients_of_eager(
    models: tuple[nn.Module, Model, Tensor], write: str
) -> None:
    model, compiled, ids = models
    gradients = []
    for logits in (compiled(ids), model(ids)):
        window = logits[:, -1][:, 2:9] * 2
        with torch.no_grad():
            WRITES[write](logits)
        loss = logits.sin().sum() + logits[1, :, ::3].cos().sum() + window.sum()
        gradients.append(torch.autograd.grad(loss, list(model.parameters())))
    torch.testing.assert_close(*gradients)


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "part": lambda a: a[:, -1, 2:],
    "number": lambda a: a[1, -1, 4],
    "diagonal": lambda a: a[1:].diagonal(1, 1, 2),
    "expanded": lambda a: a[1].expand(2, *a[1].shape),
    "flat part of a transpose": lambda a: a.transpose(0, 1).permute(2, 1, 0).flatten(1)[:, 1:],
    "unfolded": lambda a: a[:, 1:].unfold(2, 3, 2),
    "split": lambda a: a[1].split(7, -1)[2],
    "strided": lambda a: a[1].as_strided((2, 3), (5, 1)),
    "data": lambda a: a[1, ..., 3:].data,
    "detached": lambda a: a[1, ..., 3:].detach()[1:],
    "masked rows of a transpose": lambda a: a.transpose(0, 1)[torch.tensor([True, False, True])],
    "copy of a part of a transpose": lambda a: a.transpose(0, 1)[1:].clone(),
    "sum of a part of a transpose": lambda a: a[:, 1:].transpose(0, 1) + 1,
    "like a transpose": lambda a: torch.ones_like(a.transpose(0, 1)),
    "like a part of the classes": lambda a: torch.zeros_like(a.mT[1:, 3:]),
}


@pytest.mark.parametrize("view", VIEWS)
def test_views_and_copies_lie_in_memory_as_in_eager(
    models: tuple[nn.Module, Model, Tensor], view: str
) -> None:
    model, compiled, ids = models
    found, expected = (VIEWS[view](logits) for logits in (compiled(ids), model(ids)))
    assert (found.stride(), found.storage_offset()) == (
        expected.stride(),
        expected.storage_offset(),
    )
    assert found.is_contiguous() == expected.is_contiguous()
    assert repr(found.detach() + 0) == repr(expected.detach() + 0)
    torch.testing.assert_close(found + 0, expected + 0)


def test_a_part_of_the_classes_computes_its_own_rows(
    models: tuple[nn.Module, Model, Tensor],
) -> None:
    logits = models[1](torch.randint(V, (200, 3)))
    assert isinstance(logits, DeferredLogits)
    parts = [logits[:, -1][:, :5], logits[:, -1, 3]]
    assert logits.materialisations == 0
    assert f"{parts[1][3]:.2f}" == f"{float(parts[0][3, 3]):.2f}"
    parts[0].sum().backward()
    assert logits.memory.value is None
    assert not logits.memory.is_open


def test_what_was_read_stays_when_all_rows_are_computed(
    models: tuple[nn.Module, Model, Tensor],
) -> None:
    logits = models[1](torch.randint(V, (40, 3)))
    part, turned = logits[:, -1].detach(), logits.transpose(0, 1)[:2, 3:].detach()
    before = part + 0, turned + 0
    part.own.add_(1e-12)  # a product of few rows may round otherwise
    logits.argmax()
    assert logits.memory.value is not None
    assert torch.equal(part + 0, before[0] + 1e-12)
    assert torch.equal(logits[:, -1] + 0, part + 0)
    assert torch.equal(logits.transpose(0, 1)[:2, 3:] + 0, before[1])
