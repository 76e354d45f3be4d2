"""Losses of deferred logits outside the graph: eager's numbers, and never the logits themselves."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.trainer_pt_utils import LabelSmoother

from memeff_compile.errors import DoubleBackwardError, StaleLogitsError, TargetRangeError
from memeff_compile.kernels.linear_cross_entropy import walk
from memeff_compile.logits.attach import defer
from memeff_compile.logits.recipe import LogitsRecipe, LossSettings
from memeff_compile.logits.row_gradient import RowGradient
from memeff_compile.logits.tensor import DeferredLogits
from memeff_compile.report import LogitsUse

BATCH, LENGTH, HIDDEN, VOCAB = 3, 10, 8, 300
ROWS = BATCH * LENGTH

_generator = torch.Generator().manual_seed(0)
IDS = torch.randint(0, VOCAB, (BATCH, LENGTH), generator=_generator)
PADDED = torch.where(torch.arange(LENGTH) < 3, -100, IDS)
CLASS_WEIGHTS = torch.rand(VOCAB, generator=_generator) + 0.1
ADVANTAGES = torch.linspace(0.1, 1, ROWS).view(BATCH, LENGTH)


class World(NamedTuple):
    """The logits of one forward pass, the leaves that gradients reach, and the counts."""

    logits: Tensor
    leaves: dict[str, Tensor]
    use: LogitsUse


KINDS = ("fp64", "fp32", "fp32 bias", "fp64 softcap and vector", "fp32 transposed", "bf16")


def world(kind: str = "fp32", *, deferred: bool = True) -> World:
    """One forward pass, the same numbers each time, with eager or deferred logits."""
    generator = torch.Generator().manual_seed(1)
    dtype = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}[kind.split()[0]]

    def leaf(*shape: int) -> Tensor:
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        return values.to(dtype).requires_grad_()

    is_transposed = "transposed" in kind
    x = leaf(BATCH, LENGTH, HIDDEN)
    weight = leaf(HIDDEN, VOCAB) if is_transposed else leaf(VOCAB, HIDDEN)
    leaves = {"x": x, "weight": weight}
    steps: tuple[tuple[str, object], ...] = ()
    if "bias" in kind:
        leaves["bias"] = leaf(VOCAB)
    if "vector" in kind:
        leaves["vector"] = leaf(VOCAB)
        steps += (("mul", 0.5), ("bias", None))
    if "softcap" in kind:
        steps += (("div", 3.0), ("tanh", None), ("mul", 3.0))
    recipe = LogitsRecipe(dtype, is_transposed, steps)
    vectors = (leaves["vector"],) if "vector" in leaves else ()
    hidden, bias, use = torch.tanh(x), leaves.get("bias"), LogitsUse()
    if deferred:
        logits = defer(hidden, weight, bias, vectors, recipe, loss=LossSettings(), use=use)
    else:
        logits = recipe.logits(hidden, weight, bias, vectors)
    return World(logits, leaves, use)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


class Largest(TorchDispatchMode):
    """The most elements that any memory had, below the deferred tensors and autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.elements, self.operation = 0, ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(result):
            is_plain = isinstance(leaf, Tensor) and leaf.device.type != "meta"
            if is_plain and not isinstance(leaf, (DeferredLogits, RowGradient)):
                elements = leaf.untyped_storage().nbytes() // leaf.element_size()
                if elements > self.elements:
                    self.elements, self.operation = elements, str(func)
        return result


# Served by the fused op -------------------------------------------------------------------------


def selected_by_logsumexp(z: Tensor, index: Tensor = IDS) -> Tensor:
    """Per-token log-probabilities as trainers take them of fp32 logits."""
    picked = torch.gather(z, dim=-1, index=index.unsqueeze(-1)).squeeze(-1)
    return picked - torch.stack([torch.logsumexp(row, dim=-1) for row in z])


def selected_by_log_softmax(z: Tensor, index: Tensor = IDS) -> Tensor:
    """Per-token log-probabilities as trainers take them of bf16 logits."""
    rows = [
        F.log_softmax(row, dim=-1).gather(dim=-1, index=ids.unsqueeze(-1)).squeeze(-1)
        for row, ids in zip(z, index, strict=True)
    ]
    return torch.stack(rows)


def flat(z: Tensor) -> Tensor:
    return z.view(-1, VOCAB)


def smoothed(z: Tensor) -> Tensor:
    log_probs = F.log_softmax(z, dim=-1)
    picked = log_probs.gather(-1, IDS.unsqueeze(-1)).squeeze(-1)
    return (-0.9 * picked - 0.1 * log_probs.mean(dim=-1)).mean()


def chunked(z: Tensor) -> Tensor:
    pieces = zip(z.chunk(3, dim=1), IDS.chunk(3, dim=1), strict=True)
    losses = [
        F.cross_entropy(p.reshape(-1, VOCAB), y.flatten(), reduction="sum") for p, y in pieces
    ]
    return torch.stack(losses).sum() / ROWS


def entropy_by_chunks(z: Tensor, size: int = 7) -> Tensor:
    """Entropies as trainers take them, some rows at a time."""
    found = []
    for chunk in z.reshape(-1, VOCAB).split(size):
        log_probs = F.log_softmax(chunk, dim=-1)
        found.append(-(torch.exp(log_probs) * log_probs).sum(-1))
    return torch.cat(found).view(z.shape[:-1])


def with_entropy(z: Tensor) -> Tensor:
    log_probs = z.log_softmax(-1)
    entropy = -(log_probs * log_probs.exp()).sum(-1, keepdim=True)[..., 0]
    picked = log_probs.gather(-1, IDS.unsqueeze(-1)).squeeze(-1)
    return (picked * ADVANTAGES + 0.1 * entropy * ADVANTAGES.flip(1)).sum()


def weights(z: Tensor) -> Tensor:
    return CLASS_WEIGHTS.to(z.dtype)


Form = Callable[[Tensor], Tensor]
CE: dict[str, Form] = {
    "flat": lambda z: F.cross_entropy(flat(z).float(), PADDED.view(-1)),
    "float first": lambda z: F.cross_entropy(flat(z.float()), PADDED.view(-1)),
    "shifted": lambda z: F.cross_entropy(
        flat(z[..., :-1, :].contiguous()), PADDED[..., 1:].reshape(-1)
    ),
    "labels padded": lambda z: F.cross_entropy(
        flat(z.float()), F.pad(PADDED, (0, 1), value=-100)[..., 1:].contiguous().view(-1)
    ),
    "keywords": lambda z: F.cross_entropy(input=flat(z), target=IDS.view(-1), reduction="sum"),
    "num_items_in_batch": lambda z: (
        F.cross_entropy(flat(z), PADDED.view(-1), reduction="sum") / torch.tensor(17)
    ),
    "module": lambda z: nn.CrossEntropyLoss(ignore_index=int(IDS[0, 0]))(flat(z), IDS.view(-1)),
    "module smoothed": lambda z: nn.CrossEntropyLoss(label_smoothing=0.1)(flat(z), PADDED.view(-1)),
    "weight": lambda z: F.cross_entropy(flat(z), PADDED.view(-1), weight=weights(z)),
    "weight smoothed sum": lambda z: F.cross_entropy(
        flat(z), PADDED.view(-1), weight=weights(z), label_smoothing=0.2, reduction="sum"
    ),
    "none": lambda z: F.cross_entropy(flat(z), PADDED.view(-1), reduction="none").square().sum(),
    "none smoothed": lambda z: (
        F.cross_entropy(flat(z), PADDED.view(-1), reduction="none", label_smoothing=0.3)
        .square()
        .sum()
    ),
    "classes second": lambda z: F.cross_entropy(z.transpose(1, 2), PADDED),
    "classes second, none": lambda z: (
        F.cross_entropy(z.float().permute(0, 2, 1), PADDED, reduction="none").square().mean()
    ),
    "classes second, then float": lambda z: F.cross_entropy(z.mT.float(), PADDED),
    "classes second, shifted": lambda z: F.cross_entropy(
        z[:, :-1].transpose(1, 2).float(), PADDED[:, 1:]
    ),
    "sequence first": lambda z: F.cross_entropy(
        z.transpose(0, 1).reshape(-1, VOCAB), PADDED.T.reshape(-1)
    ),
    "masked rows": lambda z: F.cross_entropy(z[PADDED != -100], PADDED[PADDED != -100]),
    "one row": lambda z: F.cross_entropy(z[0, 1], IDS[0, 1]),
    "loop over sequences": lambda z: torch.stack(
        [F.cross_entropy(z[i], IDS[i]) for i in range(BATCH)]
    ).mean(),
    "chunks": chunked,
    "two targets": lambda z: (
        F.cross_entropy(flat(z), IDS.view(-1)) + F.cross_entropy(flat(z), IDS.flip(0).view(-1))
    ),
    "temperature": lambda z: F.cross_entropy(flat(z / 0.7), IDS.view(-1)),
    "z-loss": lambda z: (
        F.cross_entropy(flat(z), PADDED.view(-1)) + 1e-2 * z.logsumexp(-1).square().mean()
    ),
}
LOG_PROBS: dict[str, Form] = {
    "gather": lambda z: -z.log_softmax(-1).gather(-1, IDS.unsqueeze(-1)).squeeze(-1).mean(),
    "masked mean": lambda z: (
        -(F.log_softmax(z, -1).gather(2, IDS[..., None])[..., 0] * (IDS > 50)).sum()
        / (IDS > 50).sum()
    ),
    "take_along_dim": lambda z: torch.take_along_dim(
        torch.log_softmax(z, 2), IDS[..., None], 2
    ).mean(),
    "take_along_dim, modulo": lambda z: torch.take_along_dim(
        torch.log_softmax(z, 2), PADDED[..., None] * 7, 2
    ).mean(),
    "sum of all": lambda z: -z.log_softmax(-1).sum() / ROWS,
    "smoothing with the mean of all": lambda z: (
        lambda lp: 0.9 * F.nll_loss(lp, PADDED.view(-1)) - 0.1 * lp.mean()
    )(flat(z).log_softmax(-1)),
    "mean of all in fp32": lambda z: -(z / 0.7).log_softmax(-1).mean(dtype=torch.float32),
    "names of NumPy": lambda z: (
        torch.logsumexp(x=z, axis=-1) - torch.gather(z, axis=-1, index=IDS[..., None])[..., 0]
    ).mean(),
    "names of NumPy, methods": lambda z: (
        z.log_softmax(-1).mean(axis=-1, keepdims=True).mean()
        + z.log_softmax(axis=2).gather(axis=2, index=IDS[..., None]).mean()
    ),
    "index": lambda z: F.log_softmax(z.float(), -1)[
        torch.arange(BATCH)[:, None], torch.arange(LENGTH), IDS
    ].mean(),
    "index, negative": lambda z: flat(F.log_softmax(z, -1))[
        torch.arange(ROWS), PADDED.view(-1)
    ].mean(),
    "nll_loss": lambda z: F.nll_loss(
        F.log_softmax(flat(z), -1, dtype=torch.float32), PADDED.view(-1)
    ),
    "nll_loss weight": lambda z: F.nll_loss(
        torch.log_softmax(flat(z), -1), PADDED.view(-1), weight=weights(z)
    ),
    "modules": lambda z: nn.NLLLoss()(nn.LogSoftmax(dim=-1)(z).transpose(1, 2), PADDED),
    "negative, then a view": lambda z: (
        (-F.log_softmax(z, -1)).view(-1, VOCAB).gather(1, IDS.view(-1, 1)).mean()
    ),
    "slices": lambda z: F.log_softmax(z, -1)[:, 2:].gather(-1, IDS[:, 2:, None]).mean(),
    "smoothed by hand": smoothed,
    "label smoother": lambda z: LabelSmoother(0.1)({"logits": z}, PADDED, shift_labels=True),
    "selected, fp32 form": lambda z: (selected_by_logsumexp(z) * ADVANTAGES).sum(),
    "selected, bf16 form": lambda z: (selected_by_log_softmax(z) * ADVANTAGES).sum(),
    "selected with a temperature": lambda z: (selected_by_logsumexp(z / 0.9) * ADVANTAGES).sum(),
    "selected of a slice": lambda z: (
        selected_by_logsumexp(z[:, 2:-1], IDS[:, 3:]) * ADVANTAGES[:, 3:]
    ).sum(),
    "policy ratio": lambda z: torch.exp(
        selected_by_logsumexp(z) - selected_by_logsumexp(z).detach()
    ).mean(),
}
ENTROPIES: dict[str, Form] = {
    "entropy": lambda z: (lambda lp: -(lp.exp() * lp).sum(-1).mean())(z.log_softmax(-1)),
    "entropy of all rows": lambda z: -(lambda lp: (lp.exp() * lp).sum() / ROWS)(z.log_softmax(-1)),
    "entropies by chunks": lambda z: (entropy_by_chunks(z / 0.7) * ADVANTAGES).sum(),
    "selected beside entropies": lambda z: (
        (selected_by_logsumexp(z) + 0.1 * entropy_by_chunks(z)) * ADVANTAGES
    ).sum(),
    "policy with entropy": with_entropy,
}
FORMS = {**CE, **LOG_PROBS, **ENTROPIES}


def assert_close(ours: Tensor, theirs: Tensor, tolerance: float, what: str = "") -> None:
    assert ours.shape == theirs.shape, what
    assert ours.dtype == theirs.dtype, what
    difference = (ours.double() - theirs.double()).norm()
    bound = tolerance * theirs.double().norm().clamp(min=1e-3)
    assert difference <= bound, f"{what}: {difference:.1e} of {theirs.norm():.1e}"


TOLERANCES = {"fp64": (1e-6, 1e-6), "fp32": (1e-6, 1e-5), "bf16": (2e-2, 3e-2)}


def compare(form: Form, kind: str = "fp32") -> World:
    """Run a loss forward and backward on eager and on deferred logits; return the latter."""
    value_tolerance, gradient_tolerance = TOLERANCES[kind.split()[0]]
    ours, theirs = world(kind), world(kind, deferred=False)
    found, expected = form(ours.logits), form(theirs.logits)
    assert_close(found.detach(), expected.detach(), value_tolerance, "loss")
    expected.backward()
    found.backward()
    for name, leaf in theirs.leaves.items():
        grad = ours.leaves[name].grad
        assert grad is not None
        assert leaf.grad is not None
        assert_close(grad, leaf.grad, gradient_tolerance, name)
    return ours


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients_are_eagers_and_no_logits_are_made(form: Form, kind: str) -> None:
    at = compare(form, kind)
    assert at.use.computed == {}
    assert at.use.calls > 0
    assert isinstance(at.logits, DeferredLogits)
    assert at.logits.materialisations == 0


@pytest.fixture
def one_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with kernels, a loss that is one number computes its gradients in the forward pass."""
    monkeypatch.setattr(walk, "is_faster_in_one_walk", lambda _: True)


class Calls(TorchDispatchMode):
    """The calls of the ops of a loss, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).removeprefix("memeff.linear_cross_entropy").removesuffix(".default")
        self.seen += [name] if str(func).startswith("memeff.linear") else []
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("one_walk")
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("kind", ["fp64", "fp32 bias"])
def test_gradients_of_the_forward_pass_are_eagers(form: Form, kind: str) -> None:
    at = compare(form, kind)
    assert at.use.computed == {}
    assert at.logits.materialisations == 0


@pytest.mark.usefixtures("one_walk")
@pytest.mark.parametrize("form", ["flat", "shifted", "num_items_in_batch"])
def test_a_single_loss_takes_three_products(form: str) -> None:
    at = world()
    with Calls() as calls:
        CE[form](at.logits).backward()
    assert calls.seen == ["_total"]


@pytest.mark.usefixtures("one_walk")
def test_gradients_of_the_forward_pass_serve_again_and_are_recomputed_for_readers() -> None:
    at, eager = world("fp64"), world("fp64", deferred=False)
    for each in (at, eager):
        each.logits.retain_grad()
        loss = CE["flat"](each.logits)
        loss.backward(retain_graph=True)
        (3 * loss).backward()
    assert at.logits.grad is not None
    torch.testing.assert_close(at.logits.grad + 0, eager.logits.grad)
    for name, leaf in eager.leaves.items():
        torch.testing.assert_close(at.leaves[name].grad, leaf.grad)


@pytest.mark.usefixtures("one_walk")
def test_a_second_loss_of_the_logits_ends_gradients_in_the_forward_pass() -> None:
    """Gradients of two losses in the forward pass would compute the logits twice."""
    at, seen = world(), []
    for _ in range(2):
        step = defer(
            torch.tanh(at.leaves["x"]),
            at.leaves["weight"],
            None,
            (),
            LogitsRecipe(torch.float32, False, ()),
            loss=LossSettings(),
            use=at.use,
        )
        at.use.count_step()
        with Calls() as calls:
            CE["z-loss"](step).backward()
        seen.append(calls.seen)
    assert seen[0].count("_total") == 1
    assert seen[1] == ["", "", "_backward"]


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_nothing_as_large_as_the_logits_is_allocated(form: Form) -> None:
    at = world("fp32 bias")
    with Largest() as ours:
        form(at.logits).backward()
    assert ours.elements < BATCH * (LENGTH - 3) * VOCAB, ours.operation
    with Largest() as theirs:
        form(world("fp32 bias", deferred=False).logits).backward()
    assert theirs.elements >= ours.elements


@pytest.mark.parametrize("factor", [1e-200, 1e200])
@pytest.mark.parametrize("is_log", [False, True])
def test_scales_that_multiply_to_zero_or_infinity_are_left_to_eager(
    is_log: bool, factor: float
) -> None:
    def form(z: Tensor) -> Tensor:
        scaled = (z.log_softmax(-1) if is_log else z) * factor * factor
        return F.nll_loss(flat(scaled if is_log else scaled.log_softmax(-1)), IDS.view(-1))

    found = []
    for deferred in (True, False):
        at = world("fp64", deferred=deferred)
        loss = form(at.logits)
        loss.backward()
        found.append([loss.detach(), *(leaf.grad for leaf in at.leaves.values())])
    torch.testing.assert_close(*found, equal_nan=True)


def test_the_counter_sees_what_eager_allocates() -> None:
    with Largest() as theirs:
        CE["flat"](world(deferred=False).logits).backward()
    assert theirs.elements >= ROWS * VOCAB


SHARED = {
    "label smoother": (LOG_PROBS["label smoother"], 1, 1),
    "selected, fp32 form": (LOG_PROBS["selected, fp32 form"], 1, 1),
    "selected, bf16 form": (LOG_PROBS["selected, bf16 form"], BATCH, 1),
    "chunks": (CE["chunks"], 3, 1),
    "z-loss": (CE["z-loss"], 2, 1),
    "policy with entropy": (with_entropy, 2, 1),
    "entropies by chunks": (ENTROPIES["entropies by chunks"], 5, 1),
}


@pytest.mark.parametrize(("form", "forwards", "backwards"), SHARED.values(), ids=SHARED)
def test_calls_over_the_same_rows_share_the_op(form: Form, forwards: int, backwards: int) -> None:
    class Calls(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.forward = self.backward = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.forward += func is torch.ops.memeff.linear_cross_entropy.default
            self.backward += func is torch.ops.memeff.linear_cross_entropy_backward.default
            return func(*args, **(kwargs or {}))

    at = world()
    with Calls() as calls:
        form(at.logits).backward()
    assert (calls.forward, calls.backward) == (forwards, backwards)


@pytest.mark.parametrize("kind", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["flat", "shifted", "gather", "label smoother", "z-loss"])
def test_results_under_autocast_have_eagers_dtype(name: str, kind: str) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        ours = FORMS[name](world(kind).logits)
        theirs = FORMS[name](world(kind, deferred=False).logits)
    assert_close(ours.detach(), theirs.detach(), TOLERANCES[kind][0])


@pytest.mark.parametrize("name", ["flat", "label smoother", "selected, fp32 form"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_runs_the_forward_only(name: str, mode: Any) -> None:
    with mode():
        at = world()
        loss = FORMS[name](at.logits)
        expected = FORMS[name](world(deferred=False).logits)
    assert not loss.requires_grad
    assert_close(loss, expected, 1e-6)
    assert at.use.computed == {}


@pytest.mark.parametrize("frozen", ["x", "weight"])
def test_what_is_frozen_gets_no_gradient(frozen: str) -> None:
    found = []
    for deferred in (True, False):
        x, weight = torch.randn(2, 5, 8, generator=_seeded()), torch.randn(64, 8)
        leaf = weight if frozen == "x" else x
        torch.manual_seed(0)
        weight.copy_(torch.randn(64, 8))
        leaf.requires_grad_()
        recipe = LogitsRecipe(torch.float32)
        make = recipe.logits if not deferred else None
        logits = (
            make(x, weight, None)
            if make
            else defer(x, weight, None, (), recipe, loss=LossSettings())
        )
        F.cross_entropy(logits.view(-1, 64), torch.arange(10)).backward()
        found.append(leaf.grad)
    assert_close(found[0], found[1], 1e-5)


def _seeded() -> torch.Generator:
    return torch.Generator().manual_seed(2)


def test_gradients_accumulate_and_a_scaled_loss_scales_them() -> None:
    ours, theirs = world(), world(deferred=False)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for at in (ours, theirs):
        for name in ("flat", "gather"):
            scaler.scale(FORMS[name](at.logits) / 2).backward(retain_graph=True)
    for name, leaf in theirs.leaves.items():
        assert_close(ours.leaves[name].grad, leaf.grad, 1e-5, name)


# Autograd's own rules ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["flat", "label smoother", "selected, fp32 form", "entropy"])
def test_a_retained_graph_runs_twice_and_a_freed_one_raises(name: str) -> None:
    ours, theirs = world(), world(deferred=False)
    for at in (ours, theirs):
        loss = FORMS[name](at.logits)
        loss.backward(retain_graph=True)
        loss.backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
    for leaf, grad in ((k, v.grad) for k, v in theirs.leaves.items()):
        assert_close(ours.leaves[leaf].grad, grad, 1e-5, leaf)


@pytest.mark.parametrize("name", ["flat", "shifted", "classes second", "gather", "z-loss"])
def test_gradients_of_the_logits_themselves_are_eagers(name: str) -> None:
    found = []
    for deferred in (True, False):
        at = world(deferred=deferred)
        z = at.logits
        part = z.float()[:, 1:]
        seen: list[Tensor] = []
        z.register_hook(lambda g, seen=seen: seen.append(g + 0))
        z.retain_grad()
        loss = FORMS[name](z) + F.cross_entropy(part.reshape(-1, VOCAB), IDS[:, 1:].reshape(-1))
        (of_part,) = torch.autograd.grad(loss, part, retain_graph=True)
        loss.backward()
        assert z.grad is not None
        found.append([of_part, *seen, z.grad, at.leaves["x"].grad, at.leaves["weight"].grad])
    for place, (ours, theirs) in enumerate(zip(*found, strict=True)):
        assert type(ours) is Tensor
        assert_close(ours, theirs, 1e-5, str(place))


@pytest.mark.parametrize("watched", ["log_probs", "probs", "terms"])
def test_gradients_inside_an_entropy_are_eagers(watched: str) -> None:
    found = []
    for deferred in (True, False):
        at = world("fp64", deferred=deferred)
        log_probs = at.logits.log_softmax(-1)
        probs = log_probs.exp()
        terms = probs * log_probs
        tensor = {"log_probs": log_probs, "probs": probs, "terms": terms}[watched]
        seen: list[Tensor] = []
        tensor.register_hook(lambda g, seen=seen: seen.append(g + 0))
        tensor.retain_grad()
        (-terms.sum(-1) * ADVANTAGES).sum().backward()
        assert tensor.grad is not None
        found.append([*seen, tensor.grad, at.leaves["x"].grad, at.leaves["weight"].grad])
    for place, (ours, theirs) in enumerate(zip(*found, strict=True)):
        assert_close(ours, theirs, 1e-6, str(place))


def test_a_scaled_copy_does_not_keep_the_computed_logits() -> None:
    logits = world().logits.detach()
    logits.argmax()
    value = weakref.ref(logits.memory.value)
    kept = logits / 2
    del logits
    assert value() is None
    assert type(kept) is DeferredLogits


@pytest.mark.parametrize("cut", ["nothing", "log_probs", "probs", "probs in place", "terms"])
def test_gradients_of_an_entropy_go_where_eagers_go(cut: str) -> None:
    found = []
    for deferred in (True, False):
        at = world("fp64", deferred=deferred)
        log_probs = at.logits.log_softmax(-1)
        with torch.set_grad_enabled(cut != "probs"):
            probs = log_probs.exp()
        if "in place" in cut:
            probs.detach_()
        if cut == "log_probs":
            log_probs.detach_()
        with torch.set_grad_enabled(cut != "terms"):
            terms = probs * log_probs
        loss = (-terms.sum(-1) * ADVANTAGES).sum() + log_probs[..., 1].sum() + at.logits.sum()
        inside = [x for x in (log_probs, probs, terms, at.logits) if x.requires_grad]
        grads = torch.autograd.grad(loss, inside, retain_graph=True, allow_unused=True)
        loss.backward()
        kept = [grad for grad in grads if grad is not None]
        found.append([*kept, at.leaves["x"].grad, at.leaves["weight"].grad])
    for place, (ours, theirs) in enumerate(zip(*found, strict=True)):
        assert type(ours) is Tensor
        assert_close(ours, theirs, 1e-6, str(place))


SUMMED: dict[str, Form] = {
    "log_probs": lambda lp: lp,
    "scaled": lambda lp: -lp / 0.7,
    "p log p": lambda lp: lp.exp() * lp,
}
SUMS: dict[str, Form] = {"sum": lambda x: x.sum(-1), "mean": lambda x: x.mean(-1, True)}


@pytest.mark.parametrize("form", SUMS.values(), ids=SUMS)
@pytest.mark.parametrize("summed", SUMMED.values(), ids=SUMMED)
def test_sums_over_the_classes_are_eagers_to_the_last_digits_and_save_nothing(
    summed: Form, form: Form
) -> None:
    found = []
    for deferred in (True, False):
        at = world("fp64", deferred=deferred)
        log_probs = at.logits.log_softmax(-1)
        terms = summed(log_probs)
        total = form(terms).square().sum()
        (once,) = torch.autograd.grad(total, log_probs, create_graph=True)
        (twice,) = torch.autograd.grad(once.square().sum(), log_probs, retain_graph=True)
        linear = form(terms).sum()
        linear.backward()
        (again,) = torch.autograd.grad(linear, terms)
        found.append([total.detach(), once.detach(), twice, again, at.leaves["x"].grad])
    for ours, theirs in zip(*found, strict=True):
        assert_close(ours, theirs, 1e-12)


@pytest.mark.parametrize(
    "cut", ["nothing", "probs", "probs, in place", "probs, a leaf", "log_probs"]
)
def test_second_derivatives_of_an_entropy_go_where_eagers_go(cut: str) -> None:
    found = []
    for deferred in (True, False):
        at = world("fp64", deferred=deferred)
        log_probs = at.logits.log_softmax(-1)
        with torch.set_grad_enabled(cut not in ("probs", "probs, a leaf")):
            probs = log_probs.exp()
        if cut == "probs, in place":
            probs.detach_()
        if cut == "probs, a leaf":
            probs.requires_grad_()
        if cut == "log_probs":
            log_probs.detach_()
        loss = ((probs * log_probs).sum(-1) * ADVANTAGES).sum()
        inside = [x for x in (at.logits, log_probs, probs) if x.requires_grad]
        grads = torch.autograd.grad(loss, inside, create_graph=True, allow_unused=True)
        grads = tuple(grad for grad in grads if grad is not None)
        again: list[Tensor | None] = []
        if any(grad.requires_grad for grad in grads):
            sums = [grad.square().sum() for grad in grads if grad.requires_grad]
            leaves = [x for x in (*inside, *at.leaves.values()) if x.requires_grad]
            again = list(torch.autograd.grad(sum(sums), leaves, allow_unused=True))
        found.append((grads, again))
    (ours, ours_again), (theirs, theirs_again) = found
    assert [x.requires_grad for x in ours] == [x.requires_grad for x in theirs]
    assert [x is None for x in ours_again] == [x is None for x in theirs_again]
    pairs = zip([*ours, *ours_again], [*theirs, *theirs_again], strict=True)
    for place, (mine, eagers) in enumerate(pairs):
        if mine is not None and eagers is not None:
            assert_close(mine.detach(), eagers.detach(), 1e-6, str(place))


def test_an_entropy_of_terms_made_without_gradients_needs_none() -> None:
    log_probs = world("fp64").logits.log_softmax(-1)
    with torch.no_grad():
        terms = log_probs.exp() * log_probs
    assert not terms.sum(-1).requires_grad


def test_an_entropy_beside_classes_of_probability_zero() -> None:
    """Where eager has nan, of 0 times minus infinity, a class of probability 0 adds 0."""
    leaves = world().leaves
    found = []
    for columns in (VOCAB, 40):
        x = leaves["x"].detach().clone().requires_grad_()
        bias = torch.zeros(columns).index_fill(0, torch.arange(40, columns), float("-inf"))
        given = torch.tanh(x), leaves["weight"][:columns].detach(), bias
        entropy = ENTROPIES["entropy"](
            defer(*given, (), LogitsRecipe(torch.float32), loss=LossSettings())
            if columns == VOCAB
            else F.linear(*given)
        )
        entropy.backward()
        found.append((entropy.detach(), x.grad))
    for masked, cut in zip(*found, strict=True):
        assert_close(masked, cut, 1e-5)


def test_an_entropy_of_written_log_probabilities_reads_what_was_written() -> None:
    found = []
    for deferred in (True, False):
        with torch.no_grad():
            log_probs = world(deferred=deferred).logits.log_softmax(-1)
            probs = log_probs.exp()
            log_probs.mul_(1.5)
            found.append((probs * log_probs).sum(-1))
    assert_close(*found, 1e-6)


def test_a_gradient_kept_by_a_hook_survives_the_step() -> None:
    at = world()
    kept: list[Tensor] = []
    at.logits.register_hook(kept.append)
    at.logits.retain_grad()
    CE["flat"](at.logits).backward()
    with torch.no_grad():
        at.leaves["weight"].add_(1)
    theirs = world(deferred=False)
    (expected,) = torch.autograd.grad(CE["flat"](theirs.logits), theirs.logits)
    assert_close(kept[0], expected, 1e-5)
    assert at.logits.grad is not None
    assert_close(at.logits.grad, expected, 1e-5)


def test_the_loss_and_another_use_of_the_logits_train_together() -> None:
    at = compare(lambda z: CE["flat"](z) + z.square().mean() + z[:, -1].exp().sum() * 1e-3)
    assert at.use.fused == {"cross_entropy": 1}
    assert at.use.products > 0


def penalised(z: Tensor, leaves: dict[str, Tensor], form: Form) -> Tensor:
    loss = form(z)
    grads = torch.autograd.grad(loss, list(leaves.values()), create_graph=True)
    return loss + sum(grad.square().sum() for grad in grads)


@pytest.mark.parametrize(
    "name",
    ["float first", "weight smoothed sum", "label smoother", "z-loss", "policy with entropy"],
)
def test_second_derivatives_are_eagers_and_compute_the_logits(name: str) -> None:
    ours, theirs = world("fp64 bias"), world("fp64 bias", deferred=False)
    for at in (ours, theirs):
        penalised(at.logits, at.leaves, FORMS[name]).backward()
    for leaf, grad in ((k, v.grad) for k, v in theirs.leaves.items()):
        assert_close(ours.leaves[leaf].grad, grad, 1e-5, leaf)
    assert set(ours.use.computed) - {"gradient of the logits"} == {"a second derivative"}


@pytest.mark.parametrize(
    ("name", "is_seen"), [("flat", False), ("flat", True), ("gather", False)], ids=str
)
def test_second_derivatives_are_of_the_logits_that_the_loss_saw(name: str, is_seen: bool) -> None:
    def scribbled(z: Tensor) -> Tensor:
        loss = FORMS[name](z)
        (z if is_seen else z.detach()).mul_(-1.25)
        return loss

    ours, theirs = world("fp64 bias"), world("fp64 bias", deferred=False)
    for at in (ours, theirs):
        penalised(at.logits, at.leaves, scribbled).backward()
    for leaf, grad in ((k, v.grad) for k, v in theirs.leaves.items()):
        assert_close(ours.leaves[leaf].grad, grad, 1e-5, leaf)


def test_second_derivatives_of_logits_that_autograd_saw_changed_are_refused() -> None:
    at = world("fp64 bias")
    loss = FORMS["keywords"](at.logits)
    at.logits.mul_(2)
    with pytest.raises(DoubleBackwardError, match="changed in place since"):
        torch.autograd.grad(loss, at.leaves["x"], create_graph=True)


@pytest.mark.parametrize("write", ["fill_", "mul_"])
def test_second_derivatives_of_a_copy_that_was_detached_and_changed_are_refused(write: str) -> None:
    """Autograd has no way back to a view of it; without a change it has, and the numbers."""
    found = []
    for deferred in (True, False):
        at = world("fp64 bias", deferred=deferred)
        copied = at.logits.clone()
        loss = FORMS["keywords"](copied)
        copied.detach_()
        (first,) = torch.autograd.grad(loss, at.leaves["x"], create_graph=True)
        found.append((first.detach(), *torch.autograd.grad(first.square().sum(), at.leaves["x"])))
    for ours, theirs in zip(*found, strict=True):
        assert_close(ours, theirs, 1e-6)

    at = world("fp64 bias")
    copied = at.logits.clone()
    loss = FORMS["keywords"](copied)
    copied.detach_()
    getattr(copied, write)(2.0)
    with pytest.raises(DoubleBackwardError, match="changed in place since"):
        torch.autograd.grad(loss, at.leaves["x"], create_graph=True)


def test_second_derivatives_ask_log_probabilities_and_not_the_logits_changed_since() -> None:
    found = []
    for deferred in (True, False):
        at = world("fp64 bias", deferred=deferred)
        loss = FORMS["gather"](at.logits)
        at.logits.mul_(2)
        (first,) = torch.autograd.grad(loss, at.leaves["x"], create_graph=True)
        found.append((first.detach(), *torch.autograd.grad(first.square().sum(), at.leaves["x"])))
    for ours, theirs in zip(*found, strict=True):
        assert_close(ours, theirs, 1e-6)


@pytest.mark.parametrize("name", ["flat", "gather", "entropy"])
def test_second_derivatives_after_an_ordinary_backward_are_refused(name: str) -> None:
    at = world()
    loss = FORMS[name](at.logits)
    loss.backward(retain_graph=True)
    with pytest.raises(DoubleBackwardError, match=r"memeff\.linear_cross_entropy': 'off'"):
        torch.autograd.grad(loss, at.leaves["x"], create_graph=True)


def test_saved_tensor_hooks_meet_no_logits() -> None:
    sizes: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        sizes.append(tensor.numel())
        return tensor.clone()

    at = world()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = CE["shifted"](at.logits) + LOG_PROBS["label smoother"](at.logits)
    loss.backward()
    assert max(sizes) == VOCAB * HIDDEN
    assert at.use.computed == {}


# Staleness and memory -----------------------------------------------------------------------------

CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "in place": lambda weight: weight.add_(1),
    "data": lambda weight: weight.data.add_(1),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("name", ["flat", "gather", "selected, fp32 form"])
def test_a_loss_after_the_weights_changed_raises(name: str, change: Any) -> None:
    at = world()
    CE["flat"](at.logits).backward(retain_graph=True)
    with torch.no_grad():
        change(at.leaves["weight"])
    with pytest.raises(StaleLogitsError, match=r"Read out.logits before optimizer.step\(\)"):
        FORMS[name](at.logits)


def test_a_loss_of_values_computed_before_the_step_is_of_these_values() -> None:
    at = world()
    expected = CE["flat"](at.logits.detach() + 0)
    with torch.no_grad():
        at.leaves["weight"].add_(1)
        found = CE["flat"](at.logits)
    assert_close(found, expected, 1e-6)


def test_logits_written_in_place_are_what_the_loss_sees() -> None:
    def form(z: Tensor) -> Tensor:
        z = z * 1
        z[:, :, 5] = 3.0
        return CE["flat"](z)

    at = compare(form)
    assert at.use.fused == {}


def test_a_write_behind_autograds_back_does_not_reach_the_gradient_of_log_softmax() -> None:
    ours, theirs = world(), world(deferred=False)
    log_probs = ours.logits.log_softmax(-1)
    log_probs[..., :5].detach().zero_()
    (2 * log_probs).exp().sum().backward()

    expected = theirs.logits.log_softmax(-1)
    written = torch.where(torch.arange(VOCAB) < 5, 0.0, expected.detach())
    expected.backward(2 * (2 * written).exp())
    for name, leaf in theirs.leaves.items():
        assert_close(ours.leaves[name].grad, leaf.grad, 1e-5, name)


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("name", ["flat", "label smoother", "selected, fp32 form", "entropy"])
def test_a_loss_kept_for_logging_holds_no_hidden_states(name: str) -> None:
    at = world()
    source = weakref.ref(at.logits.memory.source)
    loss = FORMS[name](at.logits)
    loss.backward()
    del at
    assert source() is None
    assert loss.isfinite()

    at = world()
    source = weakref.ref(at.logits.memory.source)
    loss = FORMS[name](at.logits)
    del at, loss  # without a backward: no reference cycle
    assert source() is None


# Left to PyTorch ----------------------------------------------------------------------------------

SOFT = torch.softmax(torch.randn(ROWS, VOCAB, generator=_generator), -1)
DECLINED: dict[str, tuple[Form, str]] = {
    "probabilities": (
        lambda z: F.cross_entropy(flat(z), SOFT),
        "cross_entropy: the targets are class probabilities",
    ),
    "double": (
        lambda z: F.cross_entropy(flat(z.double()), IDS.view(-1)),
        "cross_entropy: they are cast to float64",
    ),
    "classes of positions": (
        lambda z: F.cross_entropy(z, IDS[:, :1].expand(-1, VOCAB) % LENGTH),
        "cross_entropy: the loss reads its classes from dimension 1 and the head's are last",
    ),
    "legacy reduction": (
        lambda z: F.cross_entropy(flat(z), IDS.view(-1), size_average=False),
        "cross_entropy: size_average or reduce is given",
    ),
    "several classes per row": (
        lambda z: z.log_softmax(-1).gather(-1, IDS[..., None].expand(-1, -1, 2)).sum(),
        "gather: gather of several classes, or of some rows",
    ),
    "another dimension": (
        lambda z: z.log_softmax(1).square().mean(),
        "log_softmax: log_softmax over another dimension",
    ),
    "probabilities of other log-probabilities": (
        lambda z: -(z.log_softmax(-1).exp() * z.log_softmax(-1)).sum(-1).mean(),
        "mul",
    ),
    "an entropy over another dimension": (
        lambda z: (lambda lp: -(lp.exp() * lp).sum(1).mean())(z.log_softmax(-1)),
        "sum: an entropy over another dimension",
    ),
    "an entropy whose probabilities are read": (
        lambda z: (lambda lp, p: ((p * lp).sum(-1) + p.square().sum(-1)).mean())(
            *(lambda lp: (lp, lp.exp()))(z.log_softmax(-1))
        ),
        "pow|square",
    ),
    "divergence": (
        lambda z: F.kl_div(flat(z.log_softmax(-1)), SOFT, reduction="batchmean"),
        "kl_div: a divergence; compute it in the compiled function, or by "
        "memeff_compile.linear_divergence",
    ),
    "written log-probabilities": (
        lambda z: F.nll_loss(flat(z.log_softmax(-1)).masked_fill(SOFT > 0.01, -2.0), IDS.view(-1)),
        "masked_fill",
    ),
    "sum over rows": (
        lambda z: z.log_softmax(-1).sum(1).square().sum(),
        "sum: sum over another dimension",
    ),
}


@pytest.mark.parametrize(("form", "reason"), DECLINED.values(), ids=DECLINED)
@pytest.mark.filterwarnings("ignore:size_average and reduce args")
def test_what_is_not_served_computes_the_logits_and_says_why(form: Form, reason: str) -> None:
    at = compare(form)
    assert any(name in at.use.computed for name in reason.split("|")), at.use


def test_without_settings_the_loss_is_pytorchs_own() -> None:
    hidden, weight = torch.randn(5, 8, requires_grad=True), torch.randn(64, 8)
    logits = defer(hidden, weight, None, (), LogitsRecipe(torch.float32))
    F.cross_entropy(logits, torch.arange(5)).backward()
    assert isinstance(logits, DeferredLogits)
    assert logits.materialisations == 1


def test_targets_out_of_range_are_named() -> None:
    with pytest.raises(TargetRangeError, match=r"target holds 300 \(row 4\)"):
        F.cross_entropy(
            flat(world().logits), torch.full((ROWS,), 300).where(torch.arange(ROWS) > 3, 1)
        )


def test_an_index_out_of_range_is_named_as_one() -> None:
    with pytest.raises(TargetRangeError, match=r"columns run from 0 to 299\. Fix the index\."):
        world().logits.log_softmax(-1).gather(-1, IDS[..., None] - VOCAB)


@pytest.mark.parametrize(
    "call",
    [
        lambda z: z.log_softmax(-1).sum(-1, True, False),
        lambda z: z.log_softmax(-1).mean(dim=-1, axis=-1),
        lambda z: z.logsumexp(-1, keep=True),
        lambda z: F.cross_entropy(flat(z), IDS.view(-1), smoothing=0.1),
        lambda z: torch.gather(z, -1),
    ],
)
def test_arguments_that_a_function_does_not_take_are_refused_by_pytorch(call: Form) -> None:
    said: list[str] = []
    for deferred in (True, False):
        with pytest.raises(TypeError) as refused:
            call(world(deferred=deferred).logits)
        said.append(str(refused.value).replace("DeferredLogits", "Tensor"))
    assert said[0] == said[1]


SEVERAL: dict[str, Form] = {
    "cross entropy": lambda z: F.cross_entropy(flat(z), PADDED.view(-1), reduction="none"),
    "smoothed": lambda z: F.cross_entropy(
        flat(z), PADDED.view(-1), weights(z), reduction="none", label_smoothing=0.2
    ),
    "shifted": lambda z: F.cross_entropy(
        z[:, :-1].reshape(-1, VOCAB), IDS[:, 1:].reshape(-1), reduction="none"
    ),
    "log-probabilities": lambda z: z.log_softmax(-1).gather(-1, IDS[..., None]).flatten(),
    "logsumexp": lambda z: z.logsumexp(-1).flatten(),
    "last rows": lambda z: (z / 0.7)[:, -1].logsumexp(-1),
    "entropy": lambda z: entropy_by_chunks(z).flatten(),
    "beside another use": lambda z: (
        F.cross_entropy(z.mT, IDS, reduction="none") + z.logsumexp(-1).square()
    ).flatten(),
    "values": lambda z: z[0, :, 0] * z[0, :, 1],
}


@pytest.mark.parametrize("how", ["is_grads_batched", "vmap"])
@pytest.mark.parametrize("name", SEVERAL)
def test_several_gradients_at_once_are_eagers(name: str, how: str) -> None:
    found: list[Any] = []
    for deferred in (True, False):
        logits, leaves, _ = world("fp64 softcap and vector", deferred=deferred)
        values = SEVERAL[name](logits)
        asked, rows = [logits, *leaves.values()], torch.eye(len(values), dtype=values.dtype)
        if how == "vmap":
            found.append(
                torch.vmap(lambda row, v=values, a=asked: torch.autograd.grad(v, a, row, True))(
                    rows
                )
            )
        else:
            found.append(torch.autograd.grad(values, asked, rows, is_grads_batched=True))
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", SEVERAL)
def test_hooks_of_nodes_and_edges_of_the_graph_have_gradients_to_compute_with(name: str) -> None:
    found: list[Any] = []
    for deferred in (True, False):
        logits, leaves, _ = world("fp64", deferred=deferred)
        total, seen = SEVERAL[name](logits).sum(), []
        assert logits.grad_fn is not None
        edge = torch.autograd.graph.get_gradient_edge(logits)
        (grad,) = torch.autograd.grad(total, [edge], retain_graph=True)
        seen += [grad + 1, 1 - grad, grad.add(grad), grad * 2, grad.numpy(), grad.zero_() + grad]
        logits.grad_fn.register_prehook(lambda grads: (grads[0] * 0.5 + 1e-3,))
        total.backward()
        found.append([*seen, *(leaf.grad for leaf in leaves.values())])
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-9)


def test_transforms_of_functions_compute_the_logits() -> None:
    ours, theirs = world(), world(deferred=False)
    results = [
        torch.vmap(lambda row, y: F.cross_entropy(row, y))(at.logits.detach(), IDS)
        for at in (ours, theirs)
    ]
    assert_close(results[0], results[1], 1e-6)


MOVES: dict[str, Callable[[Tensor], Tensor]] = {
    "transpose": lambda z: z.transpose(1, 2),
    "transpose and back": lambda z: z.mT.mT,
    "sequence first": lambda z: z.transpose(0, 1),
    "permute": lambda z: z.permute(2, 0, 1),
    "permute twice": lambda z: z.permute(2, 0, 1).permute(2, 1, 0),
    "moved float": lambda z: z.mT.double(),
    "moved negative": lambda z: -z.mT,
    "half": lambda z: z * 0.5,
    "divided": lambda z: z / 3,
    "negative slice": lambda z: -z[:, 1:, :],
    "moved slice": lambda z: z[:, 2:].transpose(1, 2),
    "log_softmax": lambda z: z.log_softmax(-1),
    "log_softmax of a slice": lambda z: F.log_softmax(z[1], -1, dtype=torch.float32),
    "slice of log_softmax": lambda z: (-z.log_softmax(-1))[:, -1],
}


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
@pytest.mark.parametrize("first", ["computed", "not computed"])
def test_lazy_form_has_eagers_values_strides_and_gradients(
    move: Callable[[Tensor], Tensor], first: str
) -> None:
    found = []
    for deferred in (True, False):
        at = world("fp32 bias", deferred=deferred)
        if deferred and first == "computed":
            at.logits.argmax()
        moved = move(at.logits)
        if deferred:
            assert isinstance(moved, DeferredLogits)
            assert at.use.products == (first == "computed")
        place = moved.stride(), moved.storage_offset()
        (
            moved.double().square() * torch.linspace(0, 1, moved.numel()).view(moved.shape)
        ).sum().backward()
        found.append((place, moved.detach() + 0, [leaf.grad for leaf in at.leaves.values()]))
    (place, values, grads), (eager_place, eager_values, eager_grads) = found
    assert place == eager_place
    assert_close(values, eager_values, 1e-6)
    for ours, theirs in zip(grads, eager_grads, strict=True):
        assert_close(ours, theirs, 1e-5)


def test_random_rows_and_scales_agree_with_eager() -> None:
    generator = torch.Generator().manual_seed(5)

    def draw(count: int) -> int:
        return int(torch.randint(0, count, (), generator=generator))

    steps: list[Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = [
        lambda z, y: (z[..., 1:, :], y[..., 1:]) if z.dim() > 1 and z.shape[-2] > 1 else (z, y),
        lambda z, y: (z.reshape(-1, VOCAB), y.reshape(-1)),
        lambda z, y: (z[:2], y[:2]),
        lambda z, y: (z / 1.3, y),
        lambda z, y: (z.float(), y),
        lambda z, y: (z.contiguous(), y),
        lambda z, y: (z.unsqueeze(0).squeeze(0), y),
        lambda z, y: (z[y > 40], y[y > 40]),
        lambda z, y: (-z, y),
        lambda z, y: (
            (z.transpose(0, 1).contiguous(), y.transpose(0, 1)) if z.dim() == 3 else (z, y)
        ),
    ]
    ends: list[Callable[[Tensor, Tensor], Tensor]] = [
        lambda z, y: F.cross_entropy(z.reshape(-1, VOCAB), y.reshape(-1), reduction="sum"),
        lambda z, y: -z.log_softmax(-1).gather(-1, y.unsqueeze(-1)).sum(),
        lambda z, y: (z.logsumexp(-1) - z.gather(-1, y.unsqueeze(-1)).squeeze(-1)).sum(),
        lambda z, y: F.nll_loss(F.log_softmax(z.reshape(-1, VOCAB), 1), y.reshape(-1)),
        lambda z, y: -F.log_softmax(z, -1).sum(-1).square().mean() * 1e-3,
    ]
    for _ in range(40):
        chosen = [steps[draw(len(steps))] for _ in range(draw(5))]
        end = ends[draw(len(ends))]

        def form(z: Tensor, chosen: Any = chosen, end: Any = end) -> Tensor:
            y = IDS
            for step in chosen:
                z, y = step(z, y)
            return end(z, y)

        assert compare(form, "fp64").use.computed == {}


TOKENS: dict[str, Callable[[Tensor], Tensor]] = {
    "logsumexp": lambda a: a.logsumexp(-1),
    "logsumexp, dimension kept": lambda a: a.logsumexp(-1, keepdim=True),
    "gather": lambda a: a.gather(-1, IDS[..., None]),
    "log-probabilities": lambda a: a.log_softmax(-1).take_along_dim(IDS[..., None], -1),
    "sum of log-probabilities": lambda a: a.log_softmax(-1).sum(-1, keepdim=True),
    "cross entropy": lambda a: F.cross_entropy(a.mT, IDS, reduction="none"),
    "cross entropy of rows": lambda a: F.cross_entropy(
        a.flatten(0, 1), IDS.flatten(), reduction="none"
    ),
    "nll of rows": lambda a: F.nll_loss(
        a.log_softmax(-1).flatten(0, 1), IDS.flatten(), reduction="none"
    ),
}


@pytest.mark.parametrize("part", [slice(None), slice(1)], ids=["all", "part"])
@pytest.mark.parametrize("name", TOKENS)
def test_numbers_of_tokens_are_views_and_are_written_to_as_eagers(name: str, part: slice) -> None:
    seen: list[Any] = []
    for deferred in (True, False):
        logits, leaves, _ = world("fp64", deferred=deferred)
        tokens = TOKENS[name](logits)
        hooked: list[Tensor] = []
        seen.append([tokens._is_view(), hooked])
        tokens.register_hook(hooked.append)
        if not tokens._is_view():
            tokens.retain_grad()
        for _ in range(2):
            tokens.view(-1)[part].mul_(2)
        if "logsumexp" not in name:  # of which eager has saved the result
            seen[-1] += torch.autograd.grad(tokens.square().sum(), [*leaves.values()])
        seen[-1].append(tokens.detach())
    torch.testing.assert_close(seen[0], seen[1])
