"""A recipe computes the model's own bits, and its hand-written gradients are autograd's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from memeff_compile.logits.recipe import Adapter, LogitsRecipe

HIDDEN, VOCAB = 16, 37
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def softcap(cap: float) -> tuple[tuple[str, object], ...]:
    return (("div", cap), ("tanh", None), ("mul", cap))


# name: recipe, dtype of the parameters, has a bias, the model's own spelling
HEADS: dict[str, tuple[LogitsRecipe, torch.dtype, bool, Callable[..., Tensor]]] = {
    "llama": (LogitsRecipe(FP32), FP32, False, lambda h, w, b, v: F.linear(h, w)),
    "llama upcast": (
        LogitsRecipe(BF16, steps=(("to", FP32),)),
        BF16,
        False,
        lambda h, w, b, v: F.linear(h, w).float(),
    ),
    "phi bias": (LogitsRecipe(BF16), BF16, True, lambda h, w, b, v: F.linear(h, w, b)),
    "gemma softcap": (
        LogitsRecipe(BF16, steps=softcap(30.0)),
        BF16,
        False,
        lambda h, w, b, v: torch.tanh(F.linear(h, w) / 30.0) * 30.0,
    ),
    "softcap after the upcast": (
        LogitsRecipe(FP16, steps=(("to", FP32), *softcap(2.0))),
        FP16,
        True,
        lambda h, w, b, v: torch.tanh(F.linear(h, w, b).float() / 2.0) * 2.0,
    ),
    "cohere scale": (
        LogitsRecipe(FP32, steps=(("mul", 0.0625),)),
        FP32,
        False,
        lambda h, w, b, v: F.linear(h, w) * 0.0625,
    ),
    "final bias": (
        LogitsRecipe(FP32, steps=(("bias", None), ("mul", 3.0), ("bias", None))),
        FP32,
        False,
        lambda h, w, b, v: (F.linear(h, w) + v[0]) * 3.0 + v[1],
    ),
    "bias that promotes": (
        LogitsRecipe(BF16, steps=(("bias", FP32),)),
        BF16,
        False,
        lambda h, w, b, v: F.linear(h, w) + v[0].float(),
    ),
    "right-hand weight": (
        LogitsRecipe(FP32, transposed=True),
        FP32,
        False,
        lambda h, w, b, v: h @ w,
    ),
    "right-hand weight and bias": (
        LogitsRecipe(FP32, transposed=True),
        FP32,
        True,
        lambda h, w, b, v: torch.addmm(b, h.view(-1, HIDDEN), w).view(*h.shape[:-1], VOCAB),
    ),
    "double": (LogitsRecipe(FP64), FP64, True, lambda h, w, b, v: F.linear(h, w, b)),
    "adapter": (
        LogitsRecipe(FP32, steps=(("adapter", Adapter(2.0, FP32, FP32, FP32)), *softcap(1.5))),
        FP32,
        True,
        lambda h, w, b, v: (
            torch.tanh((F.linear(h, w, b) + F.linear(F.linear(h, v[0]), v[1]) * 2.0) / 1.5) * 1.5
        ),
    ),
    "adapter in fp32": (
        LogitsRecipe(BF16, steps=(("adapter", Adapter(0.3, FP32, FP32, FP32)), ("to", BF16))),
        BF16,
        False,
        lambda h, w, b, v: (
            F.linear(h, w) + F.linear(F.linear(h.float(), v[0]), v[1]) * 0.3
        ).bfloat16(),
    ),
}
RANK = 3


@pytest.fixture(params=HEADS.values(), ids=HEADS.keys())
def head(request: pytest.FixtureRequest) -> tuple[LogitsRecipe, Callable[..., Tensor], tuple]:
    recipe, dtype, has_bias, spelling = request.param

    def leaf(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape).to(dtype).requires_grad_()

    weight = leaf(HIDDEN, VOCAB) if recipe.transposed else leaf(VOCAB, HIDDEN)
    vectors = []
    for name, argument in recipe.steps:
        if name == "bias":
            vectors.append(leaf(VOCAB, dtype=argument or dtype))
        elif name == "adapter":
            vectors.append(leaf(RANK, HIDDEN, dtype=argument.down))
            vectors.append(leaf(VOCAB, RANK, dtype=argument.up))
    tensors = (leaf(2, 5, HIDDEN), weight, leaf(VOCAB) if has_bias else None, vectors)
    return recipe, spelling, tensors


def test_values_are_the_bits_of_the_models_own_spelling(head: tuple) -> None:
    recipe, spelling, tensors = head
    logits = recipe.logits(*tensors)
    expected = spelling(*tensors)
    assert logits.dtype == recipe.dtype == expected.dtype
    assert recipe.vocab(tensors[1]) == VOCAB
    assert torch.equal(logits, expected)


def test_gradients_are_the_bits_of_autograd(head: tuple) -> None:
    recipe, spelling, (hidden, weight, bias, vectors) = head
    expected = spelling(hidden, weight, bias, vectors)
    grad = torch.randn_like(expected)
    leaves = [t for t in (hidden, weight, bias, *vectors) if t is not None]
    wanted = torch.autograd.grad(expected, leaves, grad)
    with torch.no_grad():
        found = recipe.gradients(grad, hidden, weight, bias, vectors)
    found_leaves = [g for g in found if g is not None]
    assert len(found) == 3 + len(vectors)
    for ours, theirs in zip(found_leaves, wanted, strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)


def test_gradients_that_nobody_needs_are_not_computed(head: tuple) -> None:
    recipe, _, (hidden, weight, bias, vectors) = head
    grad = torch.ones(2, 5, VOCAB, dtype=recipe.dtype)
    count = 3 + len(vectors)
    for place in range(count):
        needed = [index == place for index in range(count)]
        found = recipe.gradients(grad, hidden, weight, bias, vectors, needed)
        given = [index for index, g in enumerate(found) if g is not None]
        assert given == ([] if place == 2 and bias is None else [place])


def test_gradients_without_a_tanh_multiply_by_the_head_only_twice() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    hidden, weight = torch.randn(4, HIDDEN), torch.randn(VOCAB, HIDDEN)
    recipe = LogitsRecipe(FP32, steps=(("mul", 2.0), ("to", FP64)))
    with FlopCounterMode(display=False) as counter:
        recipe.gradients(torch.ones(4, VOCAB, dtype=FP64), hidden, weight, None)
    assert counter.get_total_flops() == 2 * (2 * 4 * VOCAB * HIDDEN)


def test_autocast_of_the_caller_is_ignored() -> None:
    hidden, weight = torch.randn(3, HIDDEN), torch.randn(VOCAB, HIDDEN)
    with torch.autocast("cpu", BF16):
        logits = LogitsRecipe(FP32).logits(hidden, weight, None)
        dhidden, *_ = LogitsRecipe(FP32).gradients(torch.ones(3, VOCAB), hidden, weight, None)
    assert torch.equal(logits, F.linear(hidden, weight))
    assert torch.equal(dhidden, torch.ones(3, VOCAB) @ weight)


def test_autocast_of_the_model_is_in_the_recipe() -> None:
    hidden, weight = torch.randn(3, HIDDEN), torch.randn(VOCAB, HIDDEN, requires_grad=True)
    with torch.autocast("cpu", BF16):
        expected = F.linear(hidden, weight).float()
    (wanted,) = torch.autograd.grad(expected.sum(), weight)
    recipe = LogitsRecipe(BF16).cast(FP32)
    assert torch.equal(recipe.logits(hidden, weight, None), expected)
    _, found, _ = recipe.gradients(torch.ones(3, VOCAB), hidden, weight, None)
    assert found.dtype == FP32
    assert torch.equal(found, wanted)


def test_second_derivatives_pass_through_the_gradients() -> None:
    hidden = torch.randn(3, HIDDEN, dtype=FP64, requires_grad=True)
    weight = torch.randn(VOCAB, HIDDEN, dtype=FP64, requires_grad=True)
    recipe = LogitsRecipe(FP64, steps=softcap(1.5))

    def second(gradients: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, ...]:
        logits = recipe.logits(hidden, weight, None)
        dhidden = gradients(logits, logits.softmax(-1))
        return torch.autograd.grad(dhidden.square().sum(), [hidden, weight])

    ours = second(lambda z, g: recipe.gradients(g, hidden, weight, None)[0])
    theirs = second(lambda z, g: torch.autograd.grad(z, hidden, g, create_graph=True)[0])
    for left, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(left, right)


def test_empty_batches_have_empty_logits_and_zero_gradients() -> None:
    hidden, weight = torch.randn(0, 5, HIDDEN), torch.randn(VOCAB, HIDDEN)
    logits = LogitsRecipe(FP32).logits(hidden, weight, None)
    assert logits.shape == (0, 5, VOCAB)
    dhidden, dweight, _ = LogitsRecipe(FP32).gradients(logits, hidden, weight, None)
    assert dhidden.shape == hidden.shape
    assert not dweight.any()


def test_recipes_are_plain_values() -> None:
    assert LogitsRecipe(BF16, steps=softcap(30.0)) == LogitsRecipe(BF16, steps=softcap(30.0))
    assert hash(LogitsRecipe(BF16)) != hash(LogitsRecipe(FP32))
    assert LogitsRecipe(BF16).cast(BF16) == LogitsRecipe(BF16)
    assert LogitsRecipe(BF16).cast(FP32).cast(FP32).steps == (("to", FP32),)
