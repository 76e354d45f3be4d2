"""Recipes: lists of the steps from hidden states to logits.

A pass writes a recipe, and the runtime executes it. A `LogitsRecipe` describes a model's output
projection: the dtype of the product, the orientation of the weight, and the pointwise steps after
the product. The steps are in the model's order. `LogitsRecipe.logits` runs the same PyTorch calls
as the model would, so its values equal the model's bit for bit. `LogitsRecipe.gradients` computes
the gradients as autograd would. This method does not compute the logits again if the gradients do
not depend on the logits.

A recipe has no steps that select rows (tokens). Selecting rows of the hidden states gives the same
result as selecting rows of the logits, so selections are applied to the hidden states.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from memeff_compile.compat import pytree, without_autocast

_Steps: TypeAlias = "dict[str, Callable[[Tensor, Any], Tensor]]"


@dataclass(frozen=True)
class Adapter:
    """The product that a LoRA adapter adds to the product of the output projection.

    For hidden states x, the adapter's product is `scale * B(A(x))`.
    """

    scale: float
    down: torch.dtype  # in which the product with A runs
    up: torch.dtype  # in which that with B runs
    total: torch.dtype  # dtype of the sum of both products

    def product(self, hidden: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """Return the LoRA adapter's product `scale * B(A(hidden))`, computed as the model does.

        `a` and `b` are the adapter's matrices A and B.
        """
        low = F.linear(hidden.to(self.down), a.to(self.down))
        product = F.linear(low.to(self.up), b.to(self.up))
        return product if self.scale == 1 else product * self.scale

    def gradients(
        self,
        grad: Tensor,  # (..., vocabulary) of `total`
        made_of: tuple[Tensor, Tensor, Tensor],  # hidden states, A and B
        needs: Sequence[bool],  # one for each
    ) -> list[Tensor | None]:
        """Return the requested gradients among those of the hidden states and of the adapter's
        matrices A and B.
        """
        hidden, a, b = made_of
        rows = grad.to(self.up).reshape(-1, grad.shape[-1])
        rows = rows if self.scale == 1 else rows * self.scale
        states = hidden.to(self.down).reshape(-1, hidden.shape[-1])
        found: list[Tensor | None] = [None, None, None]
        if needs[0] or needs[1]:
            of_low = (rows @ b.to(self.up)).to(self.down)
        if needs[0]:
            found[0] = (of_low @ a.to(self.down)).view(hidden.shape).to(hidden.dtype)
        if needs[1]:
            found[1] = (of_low.T @ states).to(a.dtype)
        if needs[2]:
            low = F.linear(states, a.to(self.down)).to(self.up)
            found[2] = (rows.T @ low).to(b.dtype)
        return found


_STEPS: _Steps = {
    "to": lambda x, dtype: x.to(dtype),
    "mul": lambda x, factor: x * factor,
    "div": lambda x, factor: x / factor,
    "tanh": lambda x, _: x.tanh(),
    "bias": lambda x, vector: x + vector,
    "adapter": lambda x, product: x + product,
    "classes": lambda x, left: x[..., left[0] : left[1]],
    "log_softmax": lambda x, _: x.log_softmax(-1),
    "exp": lambda x, _: x.exp(),
    "times_exp": lambda x, _: x.exp() * x,
}
_IN_PLACE: _Steps = {
    **_STEPS,
    "mul": lambda x, factor: x.mul_(factor),
    "div": lambda x, factor: x.div_(factor),
    "tanh": lambda x, _: x.tanh_(),
}


@dataclass(frozen=True)
class LogitsRecipe:
    """The steps of a model's output projection, from hidden states to logits.

    The steps are:

    - ("to", dtype), ("mul", number), ("div", number) and ("tanh", None);
    - ("bias", None), which adds a bias. The bias is the first tensor in the argument `vectors` of
      the method `logits` that no earlier step has used. If adding the bias changes the dtype of the
      logits, the step is ("bias", new dtype) instead of ("bias", None).
    - ("adapter", Adapter), which adds a LoRA adapter's product. The next two unused tensors of
      `vectors` are the adapter's matrices A and B. Adapters come before all other steps.
    - ("classes", (start, stop, count)), which selects the classes from `start` up to, not
      including, `stop`. `count` is the number of classes before this step.
    - ("log_softmax", None), ("exp", None) and ("times_exp", None), which is x * exp(x). These three
      steps appear only if code outside of the compiled graph computes log-probabilities of deferred
      logits (logits that are computed when first read).

    Example:
        >>> softcap = (("div", 30.0), ("tanh", None), ("mul", 30.0))
        >>> LogitsRecipe(torch.bfloat16, steps=(*softcap, ("to", torch.float32))).dtype
        torch.float32
    """

    compute_dtype: torch.dtype  # in which the product runs, autocast already resolved
    transposed: bool = False  # the weight is (hidden, vocabulary) instead of (vocabulary, hidden)
    steps: tuple[tuple[str, Any], ...] = ()

    def __post_init__(self) -> None:
        unknown = [name for name, _ in self.steps if name not in _STEPS]
        assert not unknown, f"steps {unknown} are not among {tuple(_STEPS)}"

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the logits."""
        return self._dtypes[-1]

    def vocab(self, weight: Tensor) -> int:
        """Return the number of columns that logits computed with `weight` have."""
        if self.classes is not None:
            return self.classes[1] - self.classes[0]
        return weight.shape[1] if self.transposed else weight.shape[0]

    @cached_property
    def classes(self) -> tuple[int, int] | None:
        """Return the range of the weight's classes that the logits contain.

        The range is the index of the first class and the index after the last class. Return None if
        the logits have all of the weight's classes.
        """
        found = None
        for start, stop, _ in (value for name, value in self.steps if name == "classes"):
            first = 0 if found is None else found[0]
            found = first + start, first + stop
        return found

    def cut(self, weight: Tensor) -> Tensor:
        """Return those rows of an output projection's weight whose classes the logits contain; each
        row of the weight is one class.
        """
        if self.classes is None:
            return weight
        start, stop = self.classes
        return weight[:, start:stop] if self.transposed else weight[start:stop]

    def cast(self, dtype: torch.dtype) -> LogitsRecipe:
        """Return the recipe (list of steps), extended by a cast to `dtype`."""
        return self if dtype == self.dtype else self.then("to", dtype)

    def then(self, name: str, value: object = None) -> LogitsRecipe:
        """Return the recipe (list of steps), extended by one more step."""
        return replace(self, steps=(*self.steps, (name, value)))

    def logits(
        self,
        hidden: Tensor,  # (..., hidden), any floating dtype
        weight: Tensor,  # (vocabulary, hidden), or (hidden, vocabulary) when transposed
        bias: Tensor | None,  # (vocabulary,) or None, the bias inside the product
        # one per bias step, broadcastable to (vocabulary,), and A and B per adapter
        vectors: Sequence[Tensor] = (),
        # returns the product of all classes from that with `weight`, if `weight` has only some
        gather: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Compute differentiable logits, (..., vocabulary) in `self.dtype`, without autocast."""
        with without_autocast(hidden.device.type):
            return self._forward((hidden, weight, bias, vectors), None, gather)

    def gradients(
        self,
        grad: Tensor,  # (..., vocabulary) of `self.dtype`
        hidden: Tensor,  # hidden, weight, bias and vectors are those passed to `logits`
        weight: Tensor,
        bias: Tensor | None,
        vectors: Sequence[Tensor] = (),
        # which gradients to compute, in the order of the result; None: all
        needed: Sequence[bool] | None = None,
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of `hidden`, `weight`, `bias` and each tensor in `vectors`.

        A recipe is the list of steps that compute logits from hidden states and weight. `grad` is
        the gradient of the logits. `vectors` contains the tensors that the steps use: biases, and
        the matrices A and B of LoRA adapters. A gradient that `needed` does not request is None.
        """
        count = 3 + len(vectors)
        needs = [True] * count if needed is None else list(needed)
        result: list[Tensor | None] = [None] * count
        with without_autocast(hidden.device.type):
            tanhs: list[Tensor] = []
            if any(name == "tanh" for name, _ in self.steps):
                self._forward((hidden, weight, bias, vectors), tanhs)
            remaining, through_adapters = list(enumerate(vectors, 3)), list[Tensor]()
            for (name, value), before in zip(self.steps[::-1], self._dtypes[-2::-1], strict=True):
                if name == "bias":
                    place, vector = remaining.pop()
                    if needs[place]:
                        result[place] = grad.sum_to_size(vector.shape).to(vector.dtype)
                if name == "adapter":
                    (of_b, b), (of_a, a) = remaining.pop(), remaining.pop()
                    asked = [needs[place] for place in (0, of_a, of_b)]
                    of_hidden, result[of_a], result[of_b] = value.gradients(
                        grad, (hidden, a, b), asked
                    )
                    through_adapters += [] if of_hidden is None else [of_hidden]
                if name in ("mul", "div"):
                    grad = _STEPS[name](grad, value)
                elif name == "tanh":
                    grad = torch.ops.aten.tanh_backward(grad, tanhs.pop())
                elif name == "classes":
                    grad = F.pad(grad, (value[0], value[2] - value[1]))
                else:
                    grad = grad.to(before)
            result[:3] = self._product_gradients(grad, (hidden, weight, bias), needs)
            for part in through_adapters:
                result[0] = part if result[0] is None else result[0] + part
        return tuple(result)

    @cached_property
    def _dtypes(self) -> tuple[torch.dtype, ...]:
        """Return the dtype of the output projection's product, then the dtype after each step.

        The steps, such as a cast or a bias, turn this product into logits.
        """
        dtypes = [self.compute_dtype]
        for name, value in self.steps:
            if name == "adapter":
                dtypes.append(value.total)
                continue
            changes = name in ("to", "bias") and value is not None
            dtypes.append(value if changes else dtypes[-1])
        return tuple(dtypes)

    def _forward(
        self,
        made_of: Sequence[Any],
        tanhs: list[Tensor] | None,
        gather: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Return the logits; also append the result of every tanh step to the list `tanhs`."""
        hidden, weight, bias, vectors = made_of
        reuses = tanhs is None and not torch.is_grad_enabled()  # one buffer for all steps
        dtype = self.compute_dtype
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
        if not self.transposed:
            value = F.linear(hidden, weight, bias)
        elif bias is None:
            value = torch.matmul(hidden, weight)
        else:
            rows = torch.addmm(bias, hidden.reshape(-1, hidden.shape[-1]), weight)
            value = rows.view(*hidden.shape[:-1], weight.shape[1])
        value = value if gather is None else gather(value)
        run, remaining = _IN_PLACE if reuses else _STEPS, iter(vectors)
        for name, argument in self.steps:
            if name == "bias":
                argument = next(remaining)
            elif name == "adapter":
                argument = argument.product(made_of[0], next(remaining), next(remaining))
            value = run[name](value, argument)
            if name == "tanh" and tanhs is not None:
                tanhs.append(value)
        assert value.dtype == self.dtype, f"recipe says {self.dtype}, product gave {value.dtype}"
        return value

    def _product_gradients(
        self, grad: Tensor, made_of: Sequence[Any], needs: Sequence[bool]
    ) -> list[Tensor | None]:
        """Return the gradients of the hidden states, the weight and the bias.

        `grad` is the gradient of the output projection's product,
        `F.linear(hidden, weight, bias)`."""
        hidden, weight, bias = made_of
        dtype = self.compute_dtype
        rows = grad.reshape(-1, grad.shape[-1])
        found: list[Tensor | None] = [None, None, None]
        if needs[0]:
            columns = weight.to(dtype)
            product = rows @ (columns.T if self.transposed else columns)
            found[0] = product.view(hidden.shape).to(hidden.dtype)
        if needs[1]:
            states = hidden.to(dtype).reshape(-1, hidden.shape[-1])
            product = states.T @ rows if self.transposed else rows.T @ states
            found[1] = product.to(weight.dtype)
        if needs[2] and bias is not None:
            found[2] = rows.sum(0).to(bias.dtype)
        return found


@dataclass(frozen=True)
class LossSettings:
    """The options that the fused loss uses for losses outside of the graph."""

    workspace: int = 0  # memeff.linear_cross_entropy.workspace, in bytes; 0 for automatic


@dataclass(frozen=True)
class DeferredOutput:
    """An output of a rewritten graph that returns hidden states where the original graph returned
    logits.
    """

    output: int  # index of the output
    weight: int  # index of the head's weight among the graph's arguments
    bias: int | None  # index of the bias inside the product, or None
    vectors: tuple[int, ...]  # indices of the operands of the recipe's steps, in order
    recipe: LogitsRecipe  # how the logits come from the hidden states
    detached: bool = False  # the model detaches these logits before it returns them
    # eager PyTorch returns a view of an otherwise unused tensor; a write to a part of a view
    # drops its autograd node, and the hooks there
    is_view: bool = False
    # how a loss outside the graph is fused, or None if it is not
    loss: LossSettings | None = None
    # all outputs that share the memory of these logits, or one that has not all of it in its order;
    # `output` is the first of their places
    views: tuple[LogitsView, ...] = ()

    @property
    def places(self) -> tuple[int, ...]:
        """Return the indices of all graph outputs that are the logits or views of the logits."""
        return tuple(view.output for view in self.views) or (self.output,)

    def put(self, logits: Tensor, results: list[Any]) -> None:
        """Write the logits and their views into `results`, the list of a graph's outputs.

        The property `places` contains the indices at which the logits and views are written.
        """
        logits = logits.detach() if self.detached else logits
        logits = torch.ops.aten.alias.default(logits) if self.is_view else logits
        views = {view.output: view.of(logits, results) for view in self.views}
        for place in self.places:
            results[place] = views.get(place, logits)


@dataclass(frozen=True)
class GivenSize:
    """A size that is symbolic during compilation; the graph returns its value, after all other
    outputs."""

    output: int


@dataclass(frozen=True)
class LogitsView:
    """A graph output that is a view of the logits."""

    output: int  # index of the output
    # the ATen views that lead to it, each by its name and the arguments after `self`
    calls: tuple[tuple[str, tuple[Any, ...]], ...]

    def of(self, logits: Tensor, results: Sequence[Any]) -> Tensor:
        """Apply this object's view operations to `logits`, and return the resulting view."""
        for name, args in self.calls:
            op = attrgetter(name)(torch.ops.aten)
            logits = op(logits, *(_with_sizes(arg, results) for arg in args))
        return logits


def _with_sizes(arg: object, results: Sequence[Any]) -> object:
    if isinstance(arg, (list, tuple)):
        return [_with_sizes(item, results) for item in arg]
    return results[arg.output] if isinstance(arg, GivenSize) else arg


def given_sizes(plan: Sequence[DeferredOutput]) -> int | None:
    """Return the index of the first graph output that is a size, or None if there is none.

    Views of the logits need such sizes.
    """
    calls = [view.calls for entry in plan for view in entry.views]
    sizes = [leaf.output for leaf in pytree.tree_leaves(calls) if isinstance(leaf, GivenSize)]
    return min(sizes, default=None)


@dataclass(frozen=True)
class Modifiers:
    """The pointwise steps that turn the output projection's product s into logits z, as arguments
    of the fused loss op.

    The formula is `z = softcap * tanh(scale * (s + bias) / softcap)`."""

    scale: float = 1.0
    softcap: float = 0.0  # 0 for no cap
    biases: tuple[tuple[Any, float], ...] = ()  # a vector and its divisor
    factors: tuple[Any, ...] = ()  # tensors that multiply or divide the product and its bias
    classes: tuple[int, int] | None = None  # the kept classes: the first, and one after the last


@dataclass(frozen=True)
class Unfoldable:
    """The reason why the fused loss op's arguments cannot express the steps that compute logits.

    The arguments `scale`, `softcap` and `bias` express a multiplication by a number, one tanh, and
    a bias before the tanh. `place` is the index of the unsupported step."""

    code: str
    sentence: str
    place: int


def fold_steps(steps: Sequence[tuple[str, Any]]) -> Modifiers | Unfoldable:
    """Turn the pointwise steps among `steps` into the scale, softcap and bias of the fused loss op.

    `steps` contains the operations from the output projection's product to the logits, in order.
    Each step is a name and a value, such as ("mul", 30.0). If the op cannot express a step, return
    an `Unfoldable`."""
    scale, softcap, capped = 1.0, 0.0, False
    biases: list[tuple[Any, float]] = []
    for place, (name, value) in enumerate(steps):
        if name in ("mul", "div"):
            factor = value if name == "mul" else 1.0 / value
            scale *= factor
            softcap = softcap * factor if capped else 0.0
        elif name == "tanh":
            if capped:
                return Unfoldable("softcap_twice", "the logits pass through tanh twice", place)
            softcap, capped = 1.0, True
        elif name == "bias":
            if capped:
                return Unfoldable("bias_after_softcap", "a bias is added after the softcap", place)
            biases.append((value, scale))
        elif name == "factor" and capped:
            said = "the logits are scaled by a tensor after the softcap"
            return Unfoldable("scale_not_constant", said, place)
    if scale == 0 or not all(map(math.isfinite, (scale, softcap))):
        said = f"the scales of the logits multiply to {scale}"
        return Unfoldable("scale_not_constant", said, len(steps) - 1)
    return Modifiers(scale, abs(softcap), tuple(biases))  # c tanh(u/c) is even in c
