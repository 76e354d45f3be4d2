"""Deferred logits: lazy operations, single computation, and equality with eager in every use."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from memeff_compile.errors import StaleLogitsError, UnsupportedInputError
from memeff_compile.logits.attach import attach, defer
from memeff_compile.logits.recipe import DeferredOutput, LogitsRecipe
from memeff_compile.logits.row_gradient import RowGradient
from memeff_compile.logits.tensor import DeferredLogits

BATCH, LENGTH, HIDDEN, VOCAB = 3, 70, 8, 21
EAGER = 'options={"memeff.logits": "eager"}'


class World(NamedTuple):
    """The logits of one forward pass, and the leaves that gradients reach."""

    logits: Tensor
    leaves: list[Tensor]
    hidden: Tensor


def world(
    *, deferred: bool, dtype: torch.dtype = torch.float32, upcast: bool = False, bias: bool = False
) -> World:
    """One forward pass, the same numbers each time, with eager or deferred logits."""
    generator = torch.Generator().manual_seed(7)

    def leaf(*shape: int) -> Tensor:
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        return values.to(dtype).requires_grad_()

    x, weight = leaf(BATCH, LENGTH, HIDDEN), leaf(VOCAB, HIDDEN)
    vector = leaf(VOCAB) if bias else None
    hidden = torch.tanh(x)
    recipe = LogitsRecipe(dtype, steps=(("to", torch.float32),) if upcast else ())
    if deferred:
        logits = defer(hidden, weight, vector, (), recipe)
    else:
        logits = recipe.logits(hidden, weight, vector)
    return World(logits, [t for t in (x, weight, vector) if t is not None], hidden)


def products(logits: Tensor) -> int:
    assert isinstance(logits, DeferredLogits)
    return logits.materialisations


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Tensors this small spend their time waking threads up."""
    torch.set_num_threads(1)


@pytest.fixture
def logits() -> Tensor:
    return world(deferred=True).logits


@pytest.fixture
def eager() -> Tensor:
    return world(deferred=False).logits


def same(left: Any, right: Any) -> None:
    """Assert equal types of values, closely equal values; deferred tensors count as plain ones."""
    if isinstance(right, Tensor):
        assert left.shape == right.shape
        assert left.dtype == right.dtype
        assert left.requires_grad == right.requires_grad
        left, right = left.detach(), right.detach()
        torch.testing.assert_close(left + 0, right + 0, equal_nan=True)
    elif isinstance(right, (list, tuple)):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            same(one, other)
    elif isinstance(right, np.ndarray):
        np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-6)
    else:
        assert left == right


# Lazy operations ----------------------------------------------------------------------------------

MASK = torch.arange(BATCH * LENGTH).reshape(BATCH, LENGTH) % 9 == 0

LAZY: dict[str, Callable[[Tensor], Any]] = {
    "shape": lambda z: z.shape,
    "size": lambda z: (z.size(), z.size(-1), z.ndim, z.dim(), z.numel(), len(z), z.nbytes),
    "dtype and device": lambda z: (z.dtype, z.device, z.layout, z.element_size()),
    "stride": lambda z: (z.stride(), z.storage_offset(), z.is_contiguous()),
    "slice stride": lambda z: (z[:, -1].stride(), z[1:, ::2].storage_offset()),
    "flags": lambda z: (z.requires_grad, z.is_leaf, z.is_floating_point(), z.is_cuda, z.is_sparse),
    "isinstance": lambda z: (isinstance(z, Tensor), torch.is_tensor(z)),
    "version": lambda z: z._version,
    "hash": lambda z: z in {z},
    "is_shared": lambda z: z.is_shared(),
    "is_pinned": lambda z: z.is_pinned(),
    "hasattr cuda interface": lambda z: hasattr(z, "__cuda_array_interface__"),
    "dlpack device": lambda z: z.detach().__dlpack_device__(),
    "zeros_like": lambda z: torch.zeros_like(z),
    "new_full": lambda z: z.new_full((2, 2), 3.0),
    "full_like bool": lambda z: torch.full_like(z, True, dtype=torch.bool),
}

LAZY_TENSORS: dict[str, Callable[[Tensor], Tensor]] = {
    "detach": lambda z: z.detach(),
    "data": lambda z: z.data,
    "clone": lambda z: z.clone(),
    "contiguous": lambda z: z.contiguous(),
    "contiguous slice": lambda z: z[:, :-1].contiguous(),
    "float": lambda z: z.float(),
    "half": lambda z: z.half(),
    "bfloat16": lambda z: z.bfloat16(),
    "double": lambda z: z.double(),
    "to dtype": lambda z: z.to(torch.bfloat16),
    "to device": lambda z: z.to("cpu"),
    "to device and dtype": lambda z: z.to("cpu", torch.float16),
    "to copy": lambda z: z.to(torch.float32, copy=True),
    "to other": lambda z: z.to(torch.empty(0, dtype=torch.float64)),
    "cpu": lambda z: z.cpu(),
    "type_as": lambda z: z.type_as(torch.empty(0, dtype=torch.bfloat16)),
    "bf16 round trip": lambda z: z.bfloat16().float(),
    "view": lambda z: z.view(-1, VOCAB),
    "view_as": lambda z: z.view_as(torch.empty(BATCH * LENGTH, VOCAB)),
    "reshape": lambda z: z.reshape(LENGTH, BATCH, VOCAB),
    "reshape of a shift": lambda z: z[:, :-1].reshape(-1, VOCAB),
    "flatten": lambda z: z.flatten(0, 1),
    "unflatten": lambda z: z.flatten(0, 1).unflatten(0, (BATCH, LENGTH)),
    "unsqueeze": lambda z: z.unsqueeze(1),
    "squeeze": lambda z: z.unsqueeze(0).squeeze(0),
    "squeeze all": lambda z: z[:1].squeeze(),
    "last position": lambda z: z[:, -1],
    "last position kept": lambda z: z[:, -1:, :],
    "shift": lambda z: z[..., :-1, :],
    "none and ellipsis": lambda z: z[None, ..., 3, :],
    "steps": lambda z: z[::2, 1:-1:3],
    "full slices": lambda z: z[:, :, :],
    "one row": lambda z: z[1, 2],
    "narrow": lambda z: z.narrow(1, 4, 3),
    "select": lambda z: z.select(0, 1),
    "long index": lambda z: z[:, torch.tensor([0, 5, 5])],
    "two long indices": lambda z: z[torch.arange(BATCH), torch.tensor([3, 1, 4])],
    "mask": lambda z: z[MASK],
    "mask of sequences": lambda z: z[torch.tensor([True, False, True])],
    "index_select": lambda z: z.index_select(1, torch.tensor([7, 2])),
    "unbind": lambda z: z.unbind(0)[1],
    "iteration": lambda z: list(z)[2],
    "split": lambda z: z.split(2)[1],
    "chunk": lambda z: z.chunk(2, dim=1)[0],
    "chain": lambda z: z.float()[:, :-1].contiguous().view(-1, VOCAB)[3:].clone().detach(),
}


@pytest.mark.parametrize("use", LAZY.values(), ids=LAZY.keys())
def test_attribute_is_eagers_and_computes_nothing(
    use: Callable[[Tensor], Any], logits: Tensor, eager: Tensor
) -> None:
    same(use(logits), use(eager))
    assert products(logits) == 0


@pytest.mark.parametrize("use", LAZY_TENSORS.values(), ids=LAZY_TENSORS.keys())
def test_lazy_form_computes_nothing_and_then_once_for_its_rows(
    use: Callable[[Tensor], Tensor], logits: Tensor, eager: Tensor
) -> None:
    ours, theirs = use(logits), use(eager)
    assert isinstance(ours, DeferredLogits)
    assert products(logits) == 0
    assert (ours.shape, ours.dtype, ours.stride()) == (theirs.shape, theirs.dtype, theirs.stride())
    same(ours, theirs)
    assert products(logits) == 1
    same(ours.float() * 2, theirs.float() * 2)


@pytest.mark.parametrize("use", LAZY_TENSORS.values(), ids=LAZY_TENSORS.keys())
@pytest.mark.parametrize("first", ["whole logits first", "lazy form first"])
def test_lazy_form_of_computed_logits_agrees_with_them(
    use: Callable[[Tensor], Tensor], first: str, logits: Tensor, eager: Tensor
) -> None:
    ours = use(logits)
    if first == "whole logits first":
        same(logits, eager)
        same(use(logits), use(eager))
        assert products(logits) == 1
    same(ours, use(eager))
    same(logits, eager)
    assert products(logits) <= 2


@pytest.mark.parametrize("use", LAZY_TENSORS.values(), ids=LAZY_TENSORS.keys())
@pytest.mark.parametrize("kind", ["fp32", "bf16", "bf16 upcast", "bias"])
def test_gradients_through_lazy_form_are_eagers(use: Callable[[Tensor], Tensor], kind: str) -> None:
    settings: dict[str, Any] = {
        "fp32": {},
        "bf16": {"dtype": torch.bfloat16},
        "bf16 upcast": {"dtype": torch.bfloat16, "upcast": True},
        "bias": {"bias": True},
    }[kind]
    found = []
    for deferred in (True, False):
        at = world(deferred=deferred, **settings)
        part = use(at.logits)
        if not part.requires_grad:
            return
        loss = part.double().log_softmax(-1)[..., 2].square().sum()
        loss.backward()
        found.append([leaf.grad for leaf in at.leaves])
    for ours, theirs in zip(*found, strict=True):
        scale = theirs.abs().max()
        # Sums over rows run over these rows only, so that half precision rounds elsewhere.
        tolerance = 1e-5 if theirs.dtype == torch.float32 else 2e-2
        assert (ours - theirs).abs().max() <= tolerance * scale


def test_slice_costs_its_rows_forward_and_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    at = world(deferred=True)
    sizes: list[int] = []
    plain_logits, plain_gradients = LogitsRecipe.logits, LogitsRecipe.gradients

    def logits_spy(self: LogitsRecipe, hidden: Tensor, *args: Any) -> Tensor:
        sizes.append(hidden[..., 0].numel())
        return plain_logits(self, hidden, *args)

    def gradients_spy(self: LogitsRecipe, grad: Tensor, hidden: Tensor, *args: Any) -> Any:
        sizes.append(grad[..., 0].numel())
        assert hidden.shape[:-1] == grad.shape[:-1]
        return plain_gradients(self, grad, hidden, *args)

    monkeypatch.setattr(LogitsRecipe, "logits", logits_spy)
    monkeypatch.setattr(LogitsRecipe, "gradients", gradients_spy)
    at.logits.float()[:, -1].log_softmax(-1).sum().backward()
    assert sizes == [BATCH, BATCH]


def test_several_slices_send_one_gradient_in_pieces() -> None:
    found = []
    for deferred in (True, False):
        at = world(deferred=deferred)
        z = at.logits
        loss = z[:, -1].exp().sum() + z[1, 3:9].square().sum() + z[MASK].sin().sum()
        loss = loss + z.view(-1, VOCAB)[5].sum()
        loss.backward()
        found.append([leaf.grad for leaf in at.leaves])
    same(*found)


def test_slices_that_cover_all_rows_send_a_dense_gradient() -> None:
    found = []
    for deferred in (True, False):
        at = world(deferred=deferred)
        sum(at.logits[:, step].square().sum() for step in range(LENGTH)).backward()
        found.append([leaf.grad for leaf in at.leaves])
    same(*found)


def test_reading_row_by_row_computes_everything_once_that_is_cheaper(logits: Tensor) -> None:
    for step in range(LENGTH):
        logits[:, step].argmax(-1)
    # 210 rows; a product of few rows costs as much as one of 64.
    assert products(logits) == 4 + 1


def test_slice_of_a_small_batch_computes_once_for_forward_and_backward() -> None:
    hidden, weight = torch.randn(2, 5, 8, requires_grad=True), torch.randn(6, 8)
    logits = defer(hidden, weight, None, (), LogitsRecipe(torch.float32))
    last = logits[:, -1]
    (last.square().sum() + last.exp().sum()).backward()
    assert products(logits) == 1


def test_views_of_all_rows_share_one_computation(logits: Tensor, eager: Tensor) -> None:
    views = [logits, logits.detach(), logits.view(-1, VOCAB), logits.unsqueeze(0)]
    for view in views:
        view.argmax(-1)
    same(logits[0, 3], eager[0, 3])
    assert products(logits) == 1


def test_float_of_bfloat16_logits_is_rounded_first() -> None:
    ours = world(deferred=True, dtype=torch.bfloat16).logits.float()
    theirs = world(deferred=False, dtype=torch.bfloat16).logits.float()
    assert torch.equal(ours, theirs)
    assert not torch.equal(theirs, world(deferred=False).logits)


def test_slice_of_last_dimension_computes_the_rows_only(logits: Tensor, eager: Tensor) -> None:
    same(logits[0, -1, 3], eager[0, -1, 3])
    same(logits[..., :4][0, 0], eager[..., :4][0, 0])
    assert logits[0, -1, 3].item() == pytest.approx(eager[0, -1, 3].item())


# Computed once ------------------------------------------------------------------------------------

USES: dict[str, Callable[[Tensor], Any]] = {
    "argmax": lambda z: z.argmax(-1),
    "topk": lambda z: z.topk(3).values,
    "softmax": lambda z: z.softmax(-1),
    "log_softmax": lambda z: F.log_softmax(z, -1),
    "logsumexp": lambda z: torch.logsumexp(z, -1),
    "cross_entropy": lambda z: F.cross_entropy(
        z.view(-1, VOCAB), torch.arange(BATCH * LENGTH) % VOCAB
    ),
    "nn.CrossEntropyLoss": lambda z: nn.CrossEntropyLoss()(
        z.transpose(1, 2), torch.arange(BATCH * LENGTH).view(BATCH, LENGTH) % VOCAB
    ),
    "allclose": lambda z: torch.allclose(z, z.clone()),
    "multinomial": lambda z: torch.multinomial(
        z[0].softmax(-1), 2, generator=torch.Generator().manual_seed(1)
    ),
    "cat": lambda z: torch.cat([z, z]),
    "stack": lambda z: torch.stack([z, z, z]),
    "matmul": lambda z: z @ torch.ones(VOCAB, 2),
    "einsum": lambda z: torch.einsum("btv,btw->bvw", z, z),
    "where": lambda z: torch.where(z > 0, z, torch.zeros_like(z)),
    "arithmetic": lambda z: (2 * z + 1, z - z, z / 2, -z, z**2),
    "comparison": lambda z: (z > 0, z == z, z.isnan().any()),
    "transpose": lambda z: z.transpose(1, 2),
    "permute": lambda z: z.permute(2, 0, 1),
    "expand": lambda z: z[0, 0].expand(4, VOCAB),
    "masked_fill": lambda z: z.masked_fill(z > 1, 0.0),
    "gather": lambda z: z.gather(-1, torch.zeros(BATCH, LENGTH, 1, dtype=torch.long)),
    "int cast": lambda z: z.to(torch.int64),
    "view as integers": lambda z: z.detach().view(torch.int32),
    "split of the vocabulary": lambda z: z.split(7, dim=-1)[1],
    "tolist": lambda z: z.tolist(),
    "numpy": lambda z: z.detach().numpy(),
    "numpy force": lambda z: z.numpy(force=True),
    "np.asarray": lambda z: np.asarray(z.detach()),
    "np.argmax": lambda z: np.argmax(z.detach().cpu().numpy(), axis=-1),
    "bool": lambda z: bool(z.abs().sum()),
    "format of one number": lambda z: f"{z[0, 0, 0]:.3f}",
    "item": lambda z: round(z[0, 0, 0].item(), 4),
    "dlpack": lambda z: torch.from_dlpack(z.detach()),
    "storage size": lambda z: z.untyped_storage().nbytes(),
    "typed storage": lambda z: len(z.storage()),
    "as_strided": lambda z: z[:, 1].as_strided((2, 2), (VOCAB, 1), 3),
    "torch.asarray": lambda z: torch.asarray(z.detach()) + 0,
    "chunked loss": lambda z: sum(part.exp().sum() for part in z.detach().chunk(3, dim=1)),
    "vmap": lambda z: torch.vmap(lambda row: row.softmax(-1)[0])(z.detach()),
    "vmap with grad": lambda z: torch.vmap(lambda row: row[1:].exp().sum())(z),
    "torch.func.grad": lambda z: torch.func.grad(lambda y: y.square().sum())(z.detach()),
    "torch.func.vjp": lambda z: torch.func.vjp(lambda y: y[:, 0].exp(), z.detach())[0],
    "parameter": lambda z: nn.Parameter(z.detach()) * 2,
    "buffer": lambda z: nn.Module().register_buffer("kept", z.detach()),
    "nested tensor": lambda z: torch.nested.nested_tensor([z[0].detach(), z[1].detach()]).size(0),
    "foreach": lambda z: torch._foreach_add([z.detach(), z.detach()], 1.0)[1],
    "sparse": lambda z: z.detach().to_sparse().to_dense(),
    "autocast matmul": lambda z: _under_autocast(lambda: z @ torch.ones(VOCAB, 2)),
    "autocast loss": lambda z: _under_autocast(
        lambda: F.cross_entropy(z[:, 0].bfloat16(), torch.arange(BATCH))
    ),
}


def _under_autocast(body: Callable[[], Tensor]) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return body()


# Uses that read separate parts, each of which is computed on its own, or a copy as well.
PARTWISE = ("chunked loss", "nested tensor", "split of the vocabulary")


@pytest.mark.parametrize("name", USES)
@pytest.mark.filterwarnings("ignore:.*TypedStorage is deprecated", "ignore:.*[Nn]ested")
def test_use_computes_once_and_gives_what_eager_gives(
    name: str, logits: Tensor, eager: Tensor
) -> None:
    use = USES[name]
    same(use(logits), use(eager))
    assert products(logits) <= (3 if name in PARTWISE else 1)
    before = products(logits)
    logits.argmax(-1)
    logits.argmax(-1)
    assert products(logits) <= before + 1


@pytest.mark.parametrize("use", USES.values(), ids=USES.keys())
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=["no_grad", "infer"])
@pytest.mark.filterwarnings("ignore:.*TypedStorage is deprecated", "ignore:.*[Nn]ested")
def test_use_without_gradients_gives_what_eager_gives(
    use: Callable[[Tensor], Any], mode: Callable[[], Any]
) -> None:
    with mode():
        ours, theirs = world(deferred=True).logits, world(deferred=False).logits
        assert not ours.requires_grad
        assert ours.is_inference() == theirs.is_inference()
        same(use(ours), use(theirs))


@pytest.mark.parametrize("name", LAZY_TENSORS)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=["no_grad", "infer"])
def test_lazy_form_without_gradients_is_lazy_unless_it_is_made_to_be_kept(
    name: str, mode: Callable[[], Any]
) -> None:
    use, is_kept = LAZY_TENSORS[name], name in ("clone", "cpu", "chain")
    with mode():
        ours, theirs = world(deferred=True).logits, world(deferred=False).logits
        part = use(ours)
        assert products(ours) == is_kept
        same(part, use(theirs))
        assert products(ours) == 1


def test_logits_read_in_inference_mode_are_usable_for_training_afterwards(eager: Tensor) -> None:
    at = world(deferred=True)
    with torch.inference_mode():
        at.logits.argmax(-1)
    at.logits.square().sum().backward()
    reference = world(deferred=False)
    reference.logits.square().sum().backward()
    same([leaf.grad for leaf in at.leaves], [leaf.grad for leaf in reference.leaves])


# Gradients ----------------------------------------------------------------------------------------

LOSSES: dict[str, Callable[[World], Tensor]] = {
    "logits alone": lambda at: at.logits.square().mean(),
    "loss and logits": lambda at: at.hidden.exp().mean() + F.mse_loss(at.logits, at.logits * 0),
    "cross entropy": lambda at: F.cross_entropy(
        at.logits[:, :-1].reshape(-1, VOCAB), torch.arange(BATCH * (LENGTH - 1)) % VOCAB
    ),
    "distillation": lambda at: F.kl_div(
        F.log_softmax(at.logits.float(), -1),
        F.softmax(at.logits.detach() * 0.5, -1),
        reduction="batchmean",
    ),
    "after a read": lambda at: (at.logits.argmax(-1).sum(), at.logits.exp().sum())[1],
    "in-place": lambda at: (at.logits.clone().mul_(2).exp_()).sum(),
    "twice": lambda at: at.logits.sin().sum() + at.logits.view(-1, VOCAB).cos().sum(),
}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())
@pytest.mark.parametrize("kind", [{}, {"bias": True}], ids=["no bias", "bias"])
def test_gradients_are_eagers(loss: Callable[[World], Tensor], kind: dict[str, Any]) -> None:
    found = []
    for deferred in (True, False):
        at = world(deferred=deferred, **kind)
        loss(at).backward()
        found.append([leaf.grad for leaf in at.leaves])
    same(*found)


def test_gradcheck_in_double() -> None:
    recipe = LogitsRecipe(torch.float64, steps=(("div", 3.0), ("tanh", None), ("bias", None)))
    hidden = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    bias, vector = torch.randn(2, 5, dtype=torch.float64).unbind(0)
    bias.requires_grad_()
    vector.requires_grad_()

    def logits(h: Tensor, w: Tensor, b: Tensor, v: Tensor) -> Tensor:
        # Read at once: gradcheck writes into its inputs where no version counter shows it.
        return defer(h, w, b, (v,), recipe) * 1

    def rows(h: Tensor, w: Tensor, b: Tensor, v: Tensor) -> Tensor:
        return defer(h, w, b, (v,), recipe)[:, 1:].reshape(-1, 5)[1] * 2

    for function in (logits, rows):
        assert torch.autograd.gradcheck(function, (hidden, weight, bias, vector))
        assert torch.autograd.gradgradcheck(function, (hidden, weight, bias, vector))


def test_frozen_head_and_frozen_trunk_get_no_gradient() -> None:
    for frozen in (0, 1):
        tensors = [torch.randn(4, 8), torch.randn(6, 8)]
        tensors[1 - frozen].requires_grad_()
        logits = defer(*tensors, None, (), LogitsRecipe(torch.float32))
        logits[2].sum().backward(retain_graph=True)
        logits.sum().backward()
        assert tensors[frozen].grad is None
        assert tensors[1 - frozen].grad is not None


def test_gradients_with_respect_to_the_logits_and_their_slices() -> None:
    found = []
    for deferred in (True, False):
        z = world(deferred=deferred).logits
        last = z[:, -1]
        row = last[1]
        loss = row.exp().sum() + z.view(-1, VOCAB)[2].sum()
        found.append(torch.autograd.grad(loss, [z, last, row], retain_graph=True))
        with pytest.raises(RuntimeError, match="not have been used"):
            torch.autograd.grad(loss, z[:, 0], retain_graph=True)
    assert all(type(grad) is Tensor for grad in found[0])
    same(*found)


def test_retain_grad_and_hooks_see_plain_gradients() -> None:
    found: list[list[Any]] = []
    for deferred in (True, False):
        z = world(deferred=deferred).logits
        last, seen = z[:, -1], []
        z.retain_grad()
        last.retain_grad()
        z.register_hook(lambda grad, seen=seen: seen.append(grad))
        last.register_hook(lambda grad: grad * 2)
        handle = last.register_hook(lambda grad: grad * 1000)
        handle.remove()
        last.square().sum().backward()
        found.append([z.grad, last.grad, *seen])
    assert all(type(grad) is Tensor for grad in found[0])
    same(*found)


def test_logits_as_a_leaf_collect_gradients_and_take_optimizer_steps() -> None:
    found = []
    for deferred in (True, False):
        leaf = world(deferred=deferred).logits.detach().requires_grad_()
        leaf[:, -1].square().sum().backward()
        first = leaf.grad.clone()
        (leaf[0].sum() + leaf.exp().sum()).backward()
        torch.optim.SGD([leaf], lr=0.1, momentum=0.9).step()
        found.append([first, leaf.grad, leaf.detach()])
    assert all(type(grad) is Tensor for grad in found[0][:2])
    same(*found)


def test_tensor_and_module_backward_functions_accept_logits() -> None:
    found = []
    for deferred in (True, False):
        at = world(deferred=deferred)
        at.logits.backward(torch.ones_like(at.logits), retain_graph=True)
        whole, part = torch.ones(BATCH, LENGTH, VOCAB), torch.full((LENGTH, VOCAB), 3.0)
        torch.autograd.backward([at.logits, at.logits[0]], [whole, part])
        found.append([leaf.grad for leaf in at.leaves])
    same(*found)


def test_gradients_accumulate_over_two_backward_passes() -> None:
    found = []
    for deferred in (True, False):
        at = world(deferred=deferred)
        at.logits[:, 3].sum().backward(retain_graph=True)
        at.logits.exp().sum().backward()
        found.append([leaf.grad for leaf in at.leaves])
        with pytest.raises(RuntimeError, match="second time"):
            at.logits[:, 3].sum().backward()
    same(*found)


def test_anomaly_mode_and_checkpointing_work() -> None:
    from torch.utils.checkpoint import checkpoint

    found = []
    for deferred in (True, False):
        at = world(deferred=deferred)
        with torch.autograd.set_detect_anomaly(True):
            loss = checkpoint(lambda z: z[:, -2:].exp().sum(), at.logits, use_reentrant=False)
            (loss + at.logits.sin().sum()).backward()
        found.append([leaf.grad for leaf in at.leaves])
    same(*found)


def test_a_function_of_the_users_own_takes_deferred_logits() -> None:
    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x * 3

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            return grad * 3 + 0 * x

    found = []
    for deferred in (True, False):
        at = world(deferred=deferred)
        Scale.apply(at.logits[:, -1]).sum().backward()
        found.append([leaf.grad for leaf in at.leaves])
    same(*found)


# Reads that bypass the dispatcher, and copies ------------------------------------------------------


def test_printing_computes_nothing(logits: Tensor) -> None:
    texts = [repr(logits), str(logits), f"{logits}", f"{{'logits': {logits[:, -1]!r}}}"]
    assert all("DeferredLogits(shape=(" in text for text in texts)
    assert "grad_fn=<_DeferBackward>" in texts[0]
    assert products(logits) == 0


def test_printing_shows_values_once_they_are_there(logits: Tensor, eager: Tensor) -> None:
    logits.argmax()
    assert repr(eager.detach()) in repr(logits)


def test_pickle_and_save_give_plain_tensors(logits: Tensor, eager: Tensor) -> None:
    for tensor, expected in ((logits, eager), (logits[:, -1], eager[:, -1])):
        restored = pickle.loads(pickle.dumps(tensor))
        assert type(restored) is Tensor
        same(restored, expected)
        file = io.BytesIO()
        torch.save({"logits": tensor}, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)["logits"]
        assert type(loaded) is Tensor
        same(loaded, expected)
    assert products(logits) == 1


def test_copies_are_plain_and_refused_where_eager_refuses(logits: Tensor, eager: Tensor) -> None:
    for tensor in (logits, eager):
        with pytest.raises(RuntimeError, match="deepcopy protocol"):
            copy.deepcopy(tensor)
    duplicate = copy.deepcopy([logits.detach()] * 2)
    assert duplicate[0] is duplicate[1]
    assert type(duplicate[0]) is Tensor
    same(duplicate[0], eager.detach())
    shallow = copy.copy(logits)
    assert type(shallow) is Tensor
    same(shallow, eager)


def test_shallow_copy_shares_memory_as_in_eager(logits: Tensor) -> None:
    part = logits.detach()[:, -1]
    copy.copy(part).zero_()
    assert not part.any()
    assert not logits[:, -1].any()


def test_numpy_refuses_tensors_that_require_grad_as_eager_does(logits: Tensor) -> None:
    for read in (Tensor.numpy, np.asarray):
        with pytest.raises(RuntimeError, match="requires grad"):
            read(logits)


def test_numpy_and_dlpack_share_memory_as_in_eager(logits: Tensor) -> None:
    part = logits.detach()[:, 1]
    part.numpy()[...] = 5
    assert (logits[:, 1] == 5).all()
    torch.from_dlpack(logits.detach()).fill_(6)
    assert (part == 6).all()
    assert logits.data_ptr() == logits.detach().data_ptr() != 0
    assert products(logits) == 1


def test_share_memory_never_crashes() -> None:
    at = world(deferred=True)
    expected = world(deferred=False).logits
    for tensor in (at.logits[:, -1], at.logits.detach(), at.logits):
        assert tensor.share_memory_() is tensor
        assert tensor.is_shared()
        assert tensor.untyped_storage().is_shared()
    same(at.logits, expected)
    assert products(at.logits) == 1


def test_sending_to_another_process_gives_values(eager: Tensor) -> None:
    from multiprocessing.reduction import ForkingPickler

    logits = world(deferred=True).logits
    with pytest.raises(RuntimeError, match=r"[Cc]owardly"):
        ForkingPickler.dumps(logits)
    received = pickle.loads(ForkingPickler.dumps(logits.detach()))
    assert type(received) is Tensor
    same(received, eager.detach())


def test_cuda_interface_is_missing_on_the_cpu(logits: Tensor) -> None:
    with pytest.raises(AttributeError):
        _ = logits.__cuda_array_interface__
    assert products(logits) == 0


def test_pinning_gives_what_eager_gives(logits: Tensor, eager: Tensor) -> None:
    try:
        expected = eager.detach().pin_memory()
    except RuntimeError as refusal:
        with pytest.raises(RuntimeError, match=str(refusal)[:30]):
            logits.detach().pin_memory()
    else:
        same(logits.detach().pin_memory(), expected)


def test_another_subclass_meets_plain_tensors(logits: Tensor, eager: Tensor) -> None:
    class Tagged(Tensor):
        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            assert not any(isinstance(arg, DeferredLogits) for arg in args)
            return super().__torch_function__(func, types, args, kwargs or {})

    result = torch.add(logits, torch.ones(VOCAB).as_subclass(Tagged))
    assert type(result) is Tagged
    same(result.as_subclass(Tensor), eager + 1)


# In-place writes ----------------------------------------------------------------------------------

WRITES: dict[str, Callable[[Tensor], Any]] = {
    "mul_": lambda z: z.mul_(2),
    "augmented": lambda z: z.__itruediv__(0.7),
    "fill_": lambda z: z.fill_(1.5),
    "masked_fill_": lambda z: z.masked_fill_(z > 0.3, -1.0),
    "clamp_": lambda z: z.clamp_(min=0),
    "copy_": lambda z: z.copy_(torch.ones(VOCAB)),
    "setitem": lambda z: z.__setitem__((0, slice(2, 5)), 0.25),
    "setitem of a column": lambda z: z.__setitem__((Ellipsis, 3), -5.0),
    "setitem by mask": lambda z: z.__setitem__(z > 0.5, 0.0),
    "setitem of itself": lambda z: z.__setitem__((0, 0), z[1, 1] * 2),
    "out=": lambda z: torch.add(z.detach(), 1, out=z.detach()),
    "scatter_": lambda z: z.scatter_(-1, torch.zeros(BATCH, LENGTH, 1, dtype=torch.long), 9.0),
    "index_fill_": lambda z: z.index_fill_(1, torch.tensor([1, 2]), 3.0),
    "foreach": lambda z: torch._foreach_mul_([z], 3.0),
    "view": lambda z: z.view(-1, VOCAB).mul_(2),
    "detached": lambda z: z.detach().mul_(2),
    "data": lambda z: z.data.mul_(2),
    "slice": lambda z: z[:, -1].mul_(2),
    "slice of a slice": lambda z: z[1:][:, 2:4].add_(1),
    "augmented slice": lambda z: z.__setitem__((0, 1), z[0, 1].__itruediv__(3)),
    "transpose": lambda z: z.transpose(1, 2).mul_(2),
    "vocabulary slice": lambda z: z[..., 1:3].mul_(2),
    "no_grad": lambda z: _without_grad(lambda: z.mul_(2)),
}


def _without_grad(body: Callable[[], Any]) -> None:
    with torch.no_grad():
        body()


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
@pytest.mark.parametrize("before", ["untouched", "slice read", "computed"])
def test_write_is_seen_by_all_views_and_by_gradients(
    write: Callable[[Tensor], Any], before: str
) -> None:
    found: list[Any] = []
    for deferred in (True, False):
        at = world(deferred=deferred)
        z = at.logits
        views = [z.view(-1, VOCAB), z[:, -1], z[0, 1:4].detach(), z.detach()]
        copies = [z.clone(), z.double(), z[:, 1].clone(), z[torch.tensor([1])]]
        if before == "slice read":
            views[1].argmax(-1)
            views[2].argmax(-1)
        if before == "computed":
            z.argmax(-1)
        write(z)
        result = [z, *views, *copies, z[0], z.half(), z._version]
        values = [part.detach() + 0 if isinstance(part, Tensor) else part for part in result]
        loss = z.sin().sum() + copies[0].cos().sum() + z[:, -1].sigmoid().sum()
        loss.backward()
        found.append([values, [leaf.grad for leaf in at.leaves]])
    same(*found)


def test_write_returns_the_tensor_itself(logits: Tensor) -> None:
    assert logits.mul_(2) is logits
    assert torch.exp(logits.detach(), out=(out := torch.empty_like(logits))) is out
    part = logits[0]
    assert part.add_(1) is part


def test_write_keeps_copies_made_before(logits: Tensor, eager: Tensor) -> None:
    before = [logits.clone(), logits.double()[0], logits[:, torch.tensor([2])]]
    expected = [eager.clone(), eager.double()[0], eager[:, torch.tensor([2])]]
    with torch.no_grad():
        logits.zero_()
    same(before, expected)


def test_copy_made_after_a_write_through_an_alias_has_the_new_values(logits: Tensor) -> None:
    logits.argmax()
    alias = logits.transpose(0, 1)
    untouched = logits.clone()
    with torch.no_grad():
        alias.zero_()
    changed = logits.clone()
    assert not changed.any()
    assert untouched.any()


def test_write_into_logits_that_backward_needs_raises_as_eager_does() -> None:
    for deferred in (True, False):
        z = world(deferred=deferred).logits
        loss = z.square().sum()
        z.detach().mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_write_after_aliases_have_gone_is_fine(logits: Tensor, eager: Tensor) -> None:
    part, expected = logits.detach()[:, -1], eager.detach()[:, -1]
    same(part[0, :5], expected[0, :5])
    assert part[0, 0].item() == pytest.approx(expected[0, 0].item())
    del part
    part = logits.detach()[:, -1]
    part.mul_(2)
    expected.mul_(2)
    same(part, expected)
    same(logits, eager)


def test_write_in_inference_mode_is_seen_everywhere() -> None:
    with torch.inference_mode():
        ours, theirs = world(deferred=True).logits, world(deferred=False).logits
        for z in (ours, theirs):
            z[:, -1][:, :5].zero_()
            z[0].mul_(2)
        same(ours, theirs)
        same(ours.float()[:, -1], theirs.float()[:, -1])


@pytest.mark.parametrize("name", ["unsqueeze_", "squeeze_", "t_", "resize_", "transpose_"])
def test_changing_the_shape_in_place_is_refused_with_a_sentence(name: str, logits: Tensor) -> None:
    arguments = {"unsqueeze_": (0,), "resize_": (2, 2), "transpose_": (0, 1)}.get(name, ())
    with pytest.raises(UnsupportedInputError, match=name) as error:
        getattr(logits.detach()[0], name)(*arguments[-2:])
    assert EAGER in str(error.value)


def test_replacing_the_data_is_refused_with_a_sentence(logits: Tensor) -> None:
    with pytest.raises(UnsupportedInputError, match="data") as error:
        logits.data = torch.ones(2)
    assert EAGER in str(error.value)


def test_detach_in_place_detaches() -> None:
    logits = world(deferred=True).logits
    assert logits.detach_() is logits
    assert not logits.requires_grad
    same(logits, world(deferred=False).logits.detach())


# Staleness ----------------------------------------------------------------------------------------


class Fused(torch.optim.Optimizer):
    """An optimizer that no version counter shows, as fused kernels and `.data` writers are."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data.sub_(parameter.grad)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "through .data": Fused,
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_first_read_after_a_step_raises_with_both_remedies(
    make: Callable[[Any], torch.optim.Optimizer],
) -> None:
    fresh = world(deferred=True)
    optimizer = make([fresh.leaves[1]])
    fresh.hidden.sum().backward()
    fresh.leaves[1].grad = torch.ones_like(fresh.leaves[1])
    derived = [fresh.logits, fresh.logits[:, -1], fresh.logits.double(), fresh.logits.clone()]
    optimizer.step()
    for tensor in derived:
        with pytest.raises(StaleLogitsError) as error:
            tensor.argmax(-1)
        assert "Read out.logits before optimizer.step()" in str(error.value)
        assert EAGER in str(error.value)
    assert products(fresh.logits) == 0
    assert fresh.logits.shape == (BATCH, LENGTH, VOCAB)
    assert "not computed yet" in repr(fresh.logits)


KEPT: dict[str, Callable[[Tensor], Tensor]] = {
    "clone of detached": lambda z: z.detach().clone(),
    "torch.clone of .data": lambda z: torch.clone(input=z.data),
    "clone of a row": lambda z: z.detach()[:, -1].clone(),
    "clone of a transpose": lambda z: z.detach().transpose(1, 2).clone(),
    "clone of a cast": lambda z: z.detach().double().clone(),
    "cpu": lambda z: z.detach().cpu(),
    "numpy": lambda z: torch.from_numpy(z.detach().cpu().numpy().copy()),
}


@pytest.mark.parametrize("keep", KEPT.values(), ids=KEPT.keys())
def test_copy_without_a_gradient_keeps_the_values_of_before_the_step(
    keep: Callable[[Tensor], Tensor], eager: Tensor
) -> None:
    at = world(deferred=True)
    kept = keep(at.logits)
    assert products(at.logits) == 1
    with torch.no_grad():
        at.leaves[1].mul_(2)
    same(kept, keep(eager))
    assert kept.stride() == keep(eager).stride()


def test_copy_under_no_grad_of_a_part_computes_its_rows_only() -> None:
    z = world(deferred=True).logits.detach()
    last = z[:, -1].clone()
    assert type(last) is Tensor
    assert last.shape == (BATCH, VOCAB)
    assert z.memory.value is None


def test_stale_copy_with_a_gradient_names_the_copy_that_keeps_values() -> None:
    at = world(deferred=True)
    copied = at.logits.clone()
    with torch.no_grad():
        at.leaves[1].mul_(2)
    with pytest.raises(StaleLogitsError, match=r"keep out\.logits\.detach\(\)\.clone\(\)"):
        copied.argmax(-1)


def test_computed_values_stay_readable_after_a_step(eager: Tensor) -> None:
    at = world(deferred=True)
    at.logits.argmax(-1)
    lazy = at.logits.double()
    with torch.no_grad():
        at.leaves[1].zero_()
    same(at.logits, eager)
    same(at.logits[:, -1].float(), eager[:, -1].float())
    same(lazy, eager.double())
    same(at.logits.half(), eager.half())
    same(at.logits.view(-1, VOCAB)[torch.tensor([1])], eager.view(-1, VOCAB)[torch.tensor([1])])
    assert products(at.logits) == 1


def test_optimizer_of_another_model_changes_nothing(eager: Tensor) -> None:
    at, other = world(deferred=True), nn.Linear(3, 3)
    other(torch.ones(1, 3)).sum().backward()
    Fused(other.parameters()).step()
    same(at.logits, eager)


def test_step_that_leaves_the_head_alone_changes_nothing(eager: Tensor) -> None:
    at = world(deferred=True)
    at.hidden.sum().backward()
    assert at.leaves[1].grad is None
    Fused(at.leaves).step()
    same(at.logits, eager)


def test_manual_step_through_data_raises() -> None:
    at = world(deferred=True)
    at.leaves[1].data -= 0.1 * torch.ones(VOCAB, HIDDEN)
    with pytest.raises(StaleLogitsError, match=r"\.data"):
        at.logits.argmax()


def test_weight_with_nans_is_no_change() -> None:
    weight = torch.full((VOCAB, HIDDEN), float("nan"), requires_grad=True)
    logits = defer(torch.ones(2, HIDDEN), weight, None, (), LogitsRecipe(torch.float32))
    assert logits.isnan().all()


def test_skipped_step_of_a_gradient_scaler_changes_nothing(eager: Tensor) -> None:
    at = world(deferred=True)
    at.leaves[1].grad = torch.full_like(at.leaves[1], float("inf"))
    scaler = torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD([at.leaves[1]], lr=0.1)
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    same(at.logits, eager)


@pytest.mark.parametrize("place", ["hidden", "weight", "bias"])
def test_in_place_change_of_any_ingredient_raises(place: str) -> None:
    at = world(deferred=True, bias=True)
    tensor = {"hidden": at.hidden, "weight": at.leaves[1], "bias": at.leaves[2]}[place]
    with torch.no_grad():
        tensor.add_(1)
    with pytest.raises(StaleLogitsError, match=place):
        at.logits.argmax()


def test_replaced_weight_still_gives_the_values_of_the_forward_pass(eager: Tensor) -> None:
    at = world(deferred=True)
    at.leaves[1].data = torch.zeros(VOCAB, HIDDEN)
    same(at.logits, eager)


def test_freed_weight_raises_and_is_never_read() -> None:
    at = world(deferred=True)
    at.leaves[1].untyped_storage().resize_(0)
    with pytest.raises(StaleLogitsError, match="freed"):
        at.logits.argmax()


def test_logits_are_readable_after_backward_of_the_loss(eager: Tensor) -> None:
    at = world(deferred=True)
    at.hidden.sum().backward()
    same(at.logits, eager)
    with pytest.raises(RuntimeError, match="second time"):
        at.logits.sum().backward()
    at = world(deferred=True)
    at.hidden.sum().backward(retain_graph=True)
    at.logits.sum().backward()
    assert at.leaves[1].grad is not None


def test_backward_after_a_step_raises_as_eager_does() -> None:
    for deferred in (True, False):
        at = world(deferred=deferred)
        loss = at.logits.square().sum()
        with torch.no_grad():
            at.leaves[1].add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


# The wrapper around a compiled callable -------------------------------------------------------------


class Trunk(nn.Module):
    """A graph as the compiler leaves it: the loss, and hidden states in the place of logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.mix = nn.Linear(HIDDEN, HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCAB)

    def forward(self, ids: Tensor, head: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = torch.tanh(self.mix(self.embed(ids)))
        loss = F.cross_entropy(F.linear(hidden, head, bias).view(-1, VOCAB), ids.view(-1))
        return loss, hidden, ids.sum()


PLAN = [DeferredOutput(1, 1, 2, (), LogitsRecipe(torch.float32))]


class Model(nn.Module):
    """The result of compilation for a user."""

    def __init__(self, *, compiled: bool = False, clone_hidden: bool = False) -> None:
        super().__init__()
        self.trunk = Trunk()
        # Kept out of the module's children: it holds the same parameters.
        graph = torch.compile(self.trunk, backend="aot_eager") if compiled else self.trunk
        self.__dict__["run"] = attach(graph, PLAN, clone_hidden=clone_hidden)

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        loss, logits, _ = self.run(ids, self.trunk.head.weight, self.trunk.head.bias)
        return {"loss": loss, "logits": logits}

    def reference(self, ids: Tensor) -> dict[str, Tensor]:
        head = self.trunk.head
        loss, hidden, _ = self.trunk(ids, head.weight, head.bias)
        return {"loss": loss, "logits": head(hidden)}


IDS = torch.arange(BATCH * LENGTH).view(BATCH, LENGTH) % VOCAB


@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "compiled"])
def test_attached_outputs_are_eagers_and_other_outputs_untouched(compiled: bool) -> None:
    model = Model(compiled=compiled)
    loss, logits, total = model.run(IDS, model.trunk.head.weight, model.trunk.head.bias)
    assert isinstance(logits, DeferredLogits)
    assert total == IDS.sum()
    expected = model.reference(IDS)
    same(loss, expected["loss"])
    same(logits, expected["logits"])


@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "compiled"])
def test_loss_and_logits_train_together(compiled: bool) -> None:
    found = []
    model = Model(compiled=compiled)
    for forward in (model, model.reference):
        model.zero_grad()
        out = forward(IDS)
        (out["loss"] + out["logits"][:, -1].square().mean()).backward()
        found.append([parameter.grad.clone() for parameter in model.parameters()])
    same(*found)


def test_training_loop_that_reads_only_the_loss_computes_nothing() -> None:
    model = Model(compiled=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        out = model(IDS)
        out["loss"].backward()
        optimizer.step()
        losses.append(out["loss"].item())
        assert products(out["logits"]) == 0
    assert losses[-1] < losses[0]


def test_result_keeps_the_kind_of_sequence() -> None:
    hidden, weight = torch.randn(2, 4), torch.randn(3, 4)
    plan = [DeferredOutput(0, 1, None, (), LogitsRecipe(torch.float32))]

    as_list = attach(lambda h, w: [h * 1], plan, clone_hidden=False)(hidden, weight)
    assert isinstance(as_list, list)
    same(as_list[0], hidden @ weight.T)
    assert isinstance(attach(lambda h, w: (h,), plan, clone_hidden=False)(hidden, weight), tuple)


def test_cloned_hidden_states_survive_the_reuse_of_their_memory() -> None:
    pool, weight = torch.empty(2, 4), torch.randn(3, 4, requires_grad=True)
    plan = [DeferredOutput(0, 1, None, (), LogitsRecipe(torch.float32))]
    run = attach(lambda h, w: (pool.copy_(h),), plan, clone_hidden=True)
    first, second = torch.randn(2, 2, 4).unbind(0)
    (logits,) = run(first, weight)
    run(second, weight)
    same(logits, first @ weight.T)
    (bare,) = attach(lambda h, w: (pool.copy_(h),), plan, clone_hidden=False)(first, weight)
    pool.copy_(second)
    with pytest.raises(StaleLogitsError, match="hidden"):
        bare.argmax()


# Memory -------------------------------------------------------------------------------------------


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def _watched(part: Tensor) -> list[weakref.ref[Any]]:
    memory = part.memory
    kept = [part, memory, memory.source, memory.source.hidden, memory.value]
    return [weakref.ref(thing) for thing in kept if thing is not None]


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("use", ["nothing", "read", "slice", "backward", "cast", "write", "error"])
def test_nothing_outlives_the_logits_and_no_cycle_needs_the_collector(use: str) -> None:
    at = world(deferred=True)
    logits = at.logits
    if use == "read":
        logits.argmax()
    if use == "slice":
        logits[:, -1].argmax()
    if use == "backward":
        logits[:, -1].sum().backward()
    if use == "cast":
        logits.double()[0].argmax()
    if use == "write":
        logits.mul_(2)
    if use == "error":
        with torch.no_grad():
            at.leaves[1].add_(1)
        with pytest.raises(StaleLogitsError):
            logits.argmax()
    watched = [*_watched(logits), weakref.ref(at.hidden)]
    del at, logits
    assert [reference() for reference in watched] == [None] * len(watched)


@pytest.mark.usefixtures("no_collector")
def test_detached_logits_release_the_graph_of_the_hidden_states() -> None:
    class Marker:
        pass

    marker = Marker()
    at = world(deferred=True)
    at.hidden.grad_fn.metadata["marker"] = marker  # type: ignore[union-attr]
    marker, graph = None, weakref.ref(marker)  # type: ignore[assignment]
    kept = [at.logits.detach(), at.logits.detach()[:, -1].clone(), at.logits.detach().double()]
    assert graph() is not None
    del at
    assert graph() is None
    for tensor in kept:
        tensor.argmax()


@pytest.mark.usefixtures("no_collector")
def test_copy_of_a_slice_does_not_keep_the_computed_logits() -> None:
    logits = world(deferred=True).logits.detach()
    logits.argmax()
    value = weakref.ref(logits.memory.value)
    kept = logits[:, -1].clone(), logits.half()
    del logits
    assert value() is None
    assert kept[0].shape == (BATCH, VOCAB)


def test_slice_allocates_its_rows_only() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        size = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            result = func(*args, **(kwargs or {}))
            if isinstance(result, Tensor) and result.device.type != "meta":
                memory = 0 if isinstance(result, (DeferredLogits, RowGradient)) else result.numel()
                self.size = max(self.size, memory)
            return result

    at = world(deferred=True)
    with Largest() as largest:
        at.logits.float()[:, -1].argmax(-1)
    assert largest.size <= max(BATCH * VOCAB, BATCH * LENGTH * HIDDEN)


# Dynamo -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_another_compiled_function_takes_deferred_logits(backend: str) -> None:
    @torch.compile(backend=backend)
    def accuracy(logits: Tensor, ids: Tensor) -> Tensor:
        return (logits[:, :-1].argmax(-1) == ids[:, 1:]).float().mean()

    @torch.compile(backend=backend)
    def penalty(logits: Tensor) -> Tensor:
        return logits.float().logsumexp(-1).square().mean()

    found: list[Any] = []
    for deferred in (True, False):
        at = world(deferred=deferred)
        penalty(at.logits).backward()
        found.append([accuracy(at.logits, IDS), *[leaf.grad for leaf in at.leaves]])
    same(*found)


def test_use_after_a_graph_break_in_the_same_compiled_function() -> None:
    model = Model()

    def step(ids: Tensor) -> tuple[Tensor, Tensor, int]:
        with torch.autograd.set_grad_enabled(True):
            out = forward(ids)
        torch._dynamo.graph_break()
        version = out["logits"]._version
        return out["logits"][:, -1].softmax(-1), out["logits"].detach().argmax(-1), version

    forward: Callable[..., Any] = torch._dynamo.disable(model)
    ours = torch.compile(step, backend="aot_eager")(IDS)
    forward = torch._dynamo.disable(model.reference)
    torch._dynamo.reset()
    same(ours, step(IDS))


# Frameworks ---------------------------------------------------------------------------------------


@pytest.fixture
def one_process(tmp_path: Any) -> Iterator[None]:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_process")
def test_collectives_take_deferred_logits(eager: Tensor) -> None:
    at = world(deferred=True)
    gathered = [torch.empty_like(eager)]
    torch.distributed.all_gather(gathered, at.logits.detach())
    same(gathered[0], eager.detach())
    into = torch.empty(eager.shape)
    torch.distributed.all_gather_into_tensor(into, at.logits.detach())
    same(into, eager.detach())
    reduced = at.logits.detach()
    torch.distributed.all_reduce(reduced)
    torch.distributed.broadcast(reduced[0], 0)
    same(reduced, eager.detach())
    assert products(at.logits) == 1


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("settings", [{}, {"find_unused_parameters": True}, {"static_graph": True}])
@pytest.mark.filterwarnings("ignore:find_unused_parameters")
def test_ddp_leaves_logits_deferred(settings: dict[str, bool]) -> None:
    model = Model()
    parallel = nn.parallel.DistributedDataParallel(model, **settings)
    for step in range(2):
        model.zero_grad()
        out = parallel(IDS)
        assert isinstance(out["logits"], DeferredLogits)
        (out["loss"] + (out["logits"][:, -1].sum() if step else 0)).backward()
        assert products(out["logits"]) == step
        same(out["logits"], model.reference(IDS)["logits"])
    ours = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    out = model.reference(IDS)
    (out["loss"] + out["logits"][:, -1].sum()).backward()
    same(ours, [parameter.grad for parameter in model.parameters()])


def test_gathering_functions_of_data_parallel_take_deferred_logits() -> None:
    ours, theirs = world(deferred=True).logits, world(deferred=False).logits
    same(torch.cat([ours, ours.detach()], dim=0), torch.cat([theirs, theirs.detach()], dim=0))
    same(torch.stack([ours[0], ours[1]]), torch.stack([theirs[0], theirs[1]]))


def test_reports_of_the_optimizer_hook_do_not_keep_sources_alive() -> None:
    from memeff_compile.logits import source as logits_source

    before = len(logits_source._live)
    at = world(deferred=True)
    assert len(logits_source._live) == before + 1
    del at
    assert len(logits_source._live) == before
