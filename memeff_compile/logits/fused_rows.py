"""Compute numbers per row (token) of deferred logits, such as the log-sum-exp.

Deferred logits are computed from hidden states when first read. Losses outside of the compiled
graph use the numbers. The op `memeff::linear_cross_entropy` (the fused loss op) computes the
numbers without building the logits.

`Head` is some rows of logits in factored form: hidden states, and the output projection that turns
them into logits. For each of these rows, the fused loss op returns the log-sum-exp of the logits,
the target's logit and the sum of the logits. `FusedRows` is the gradient of such rows of logits.
Like `Head`, `FusedRows` is compact: it contains a few numbers per row instead of one number per
class. The backward pass of the deferred logits passes `FusedRows` to the fused loss op. The op
computes the gradients of the hidden states and the output projection.

Code outside of the compiled graph may compute a loss from deferred logits. Such a loss calls the
fused loss op only through this module. This module always uses the op's exact mode (no class is
dropped). The lossy modes of memeff.linear_cross_entropy apply only inside the graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from memeff_compile import compat
from memeff_compile.errors import StaleLogitsError
from memeff_compile.kernels import linear_cross_entropy as op_folder
from memeff_compile.logits.recipe import LogitsRecipe, LossSettings, Unfoldable, fold_steps
from memeff_compile.report import LogitsUse

_BACKWARD_TENSORS = [
    argument.name
    for argument in compat.schema(op_folder.linear_cross_entropy_backward).arguments
    if not (argument.kwarg_only or argument.has_default_value())
]


class Folded(NamedTuple):
    """The steps that turn the output projection's product s into logits z, as arguments of the
    fused loss op `memeff::linear_cross_entropy`.

    The formula is `z = softcap * tanh(scale * (s + bias) / softcap)`."""

    scale: float  # as above, softcap 0 for none
    softcap: float  # likewise
    # divisors with which each vector of the recipe is added inside the scale
    divisors: tuple[float, ...]
    # None for logits; for log-probabilities their factor (-1 for negative ones)
    factor: float | None
    logits: LogitsRecipe  # the recipe up to the log-softmax


@lru_cache(maxsize=256)
def fold_recipe(recipe: LogitsRecipe) -> Folded | str:
    """Convert the steps that compute logits into scale, softcap and other arguments of the fused
    loss op.

    If the op's arguments cannot express one of the steps, return a sentence with the reason."""
    names = [name for name, _ in recipe.steps]
    end = names.index("log_softmax") if "log_softmax" in names else len(names)
    factor = _product(recipe.steps[end + 1 :])
    if factor is None:
        return "they are changed after log_softmax"
    steps: list[tuple[str, Any]] = []
    vectors = 0
    for name, value in recipe.steps[:end]:
        if value == torch.float64 and recipe.compute_dtype != torch.float64:
            return "they are cast to float64"
        steps.append((name, vectors if name == "bias" else value))
        vectors += name == "bias"
    folded = fold_steps(steps)
    if isinstance(folded, Unfoldable):
        return folded.sentence
    return Folded(
        folded.scale,
        folded.softcap,
        tuple(divisor for _, divisor in folded.biases),
        factor if end < len(names) else None,
        replace(recipe, steps=recipe.steps[:end]),
    )


def _product(steps: Sequence[tuple[str, Any]]) -> float | None:
    """Combine steps that compute logits (casts, multiplications and divisions) into one factor;
    return None if there is a step of another kind.
    """
    factor = 1.0
    for name, value in steps:
        if name not in ("to", "mul", "div"):
            return None
        if name != "to":
            factor = factor * value if name == "mul" else factor / value
    return factor if factor != 0 and math.isfinite(factor) else None


@dataclass(frozen=True)
class Head:
    """Some rows of logits, stored as their two factors: the hidden states and the output
    projection. All tensors are detached from autograd."""

    hidden: Tensor  # (..., hidden), one per row
    weight: Tensor  # as a `LogitsRecipe` takes them
    bias: Tensor | None  # likewise
    vectors: tuple[Tensor, ...]  # likewise
    # from the hidden states to the tensor's values, log-probabilities included
    recipe: LogitsRecipe
    settings: LossSettings  # the options of the fused loss
    use: LogitsUse | None = None  # where uses of the op are counted

    @property
    def folded(self) -> Folded:
        """Return the fused loss op's arguments, such as scale and softcap, for these logits.

        The arguments describe the steps from the output projection's product to the logits."""
        folded = fold_recipe(self.recipe)
        assert isinstance(folded, Folded), folded
        return folded

    @property
    def vocabulary(self) -> int:
        """Return the number of vocabulary entries, which are the columns of the logits."""
        return self.recipe.vocab(self.weight)

    @property
    def any_target(self) -> Tensor:
        """Return an arbitrary valid target for each row, for calls of the fused loss op that need
        no target."""
        return torch.zeros(self.hidden.shape[:-1], dtype=torch.int64, device=self.hidden.device)

    def refusal(self, target: Tensor | None, column_weight: Tensor | None) -> str | None:
        """Return the reason why the fused loss op does not support these rows of logits, or
        None."""
        return op_folder.supports(
            self.hidden,
            self._weight.t() if self.recipe.transposed else self._weight,
            self._bias,
            self.any_target if target is None else target,
            column_weight,
            dtype=self.recipe.compute_dtype,
            softcap=self.folded.softcap,
            workspace=self.settings.workspace,
        )

    def statistics(
        self,
        target: Tensor | None = None,
        column_weight: Tensor | None = None,
        ignore_index: int | None = None,
        **wanted: bool,
    ) -> tuple[Tensor, ...]:
        """Return negative log-likelihood, log-sum-exp, sum of the logits and entropy of every row
        (token).

        With a `column_weight`, each logit in the sum is multiplied by the weight of its class."""
        target = self.any_target if target is None else target
        given, knobs = (*self._operands(), target, column_weight), self._knobs(ignore_index)
        found: tuple[Tensor, ...] = op_folder.linear_cross_entropy(*given, **knobs, **wanted)
        return found[:4]

    def total(
        self, target: Tensor, ignore_index: int, norm: Tensor | None, needed: Sequence[bool]
    ) -> tuple[Tensor, ...]:
        """Return the sum of the rows' losses divided by `norm`, and the gradients of hidden states,
        weight and bias that `needed` requests."""
        knobs = self._knobs(ignore_index)
        found: tuple[Tensor, ...] = op_folder.linear_cross_entropy_total(
            *self._operands(), target, None, norm, **knobs, output_mask=list(needed)
        )
        return found[:4]

    def makes_gradients_in_forward(self) -> bool:
        """Return whether a scalar loss should compute its gradients already in its forward pass."""
        hidden, dtype = self.hidden, self.recipe.compute_dtype
        asked = hidden.device, dtype, hidden.shape[-1]
        return op_folder.makes_gradients_in_forward(*asked, workspace=self.settings.workspace)

    def factors(self) -> tuple[Tensor, Tensor, Tensor | None, float] | None:
        """Return the hidden states, weight, bias and scale from which these logits are computed.

        Return None if the logits have a softcap, or if this object represents other values than
        logits, such as log-probabilities.
        """
        folded = fold_recipe(self.recipe)
        if isinstance(folded, str) or folded.softcap or folded.factor is not None:
            return None
        return *self._operands(), folded.scale

    def logits(self, recipe: LogitsRecipe) -> Tensor:
        """Compute logits from this object's hidden states, by the steps of `recipe`.

        `recipe` contains all steps of the object's own recipe, or only its first steps. With only
        the first steps, the result is an intermediate value, such as the logits before the
        log-softmax.
        """
        return recipe.logits(self.hidden, self.weight, self.bias, self.vectors)

    @property
    def _weight(self) -> Tensor:
        return self.recipe.cut(self.weight)

    @property
    def _bias(self) -> Tensor | None:
        classes = self.recipe.classes
        return self.bias if self.bias is None or classes is None else self.bias[slice(*classes)]

    def _operands(self) -> tuple[Tensor, Tensor, Tensor | None]:
        dtype = self.recipe.compute_dtype
        weight = self._weight.to(dtype)
        total = None if self._bias is None else self._bias.to(dtype)
        for vector, divisor in zip(self.vectors, self.folded.divisors, strict=True):
            flat = vector.to(dtype).reshape(-1)
            flat = flat if divisor == 1 else flat / divisor
            total = flat if total is None else total + flat
        return self.hidden.to(dtype), weight.t() if self.recipe.transposed else weight, total

    def _knobs(self, ignore_index: int | None) -> dict[str, Any]:
        return {
            "ignore_index": ignore_index,
            "scale": self.folded.scale,
            "softcap": self.folded.softcap,
            "gradient_filter": "exact",
            "workspace": self.settings.workspace,
        }


def _padded(part: Tensor, whole: Tensor, head: Head) -> Tensor:
    """Return the gradient of a weight or bias for all classes, with zeros for classes that were not
    computed."""
    total = torch.zeros_like(whole)
    classes = slice(*head.recipe.classes or (None, None))
    is_last = part.dim() == 2 and head.recipe.transposed
    (total[:, classes] if is_last else total[classes]).copy_(part)
    return total


@dataclass
class Ready:
    """The gradients of hidden states, weight and bias that a loss computed in its forward pass."""

    gradients: tuple[Tensor, ...] | None  # of the loss; None once they were taken
    by: Tensor  # the gradient of the loss
    is_last: bool  # no later backward pass reads them

    def take(self, factor: float, needed: Sequence[bool]) -> list[Tensor] | None:
        """Return the gradients that the loss computed and stored in its forward pass, multiplied by
        the incoming gradient of the loss and by `factor`.

        Return None if an earlier call has already taken these gradients.
        """
        if self.gradients is None:
            return None
        gradients, by = self.gradients, self.by if factor == 1 else self.by * factor
        self.gradients = None
        return op_folder.scaled_gradients(gradients, by, needed, in_place=self.is_last)


_OF_ROWS = ("nll", "lse", "total", "target", "row_lse", "plogp", "row_entropy")


@dataclass(frozen=True)
class FusedRows:
    """The gradient of some rows of logits z, as a few numbers per row.

    Instead of logits, the rows may be log-probabilities or probabilities. The fields `nll`, `lse`,
    `total` and `plogp` have one number per row. The number `outer` multiplies the whole gradient.
    In the formulas, w is the field `column_weight`, with one weight per class. For rows of logits,
    `nll`, `lse` and `total` are the incoming gradients of the row's loss, log-sum-exp and sum of
    w * z. `plogp` is the incoming gradient of the row's sum of p * log p.

    With p = softmax(z) and its entropy H, the gradient in column j of a row is computed from these
    fields::

        logits:             outer * ((nll + lse) * p_j - nll * [j = target] + total * w_j
                                     + plogp * p_j * (log p_j + H))
        log-probabilities:  outer * (lse * p_j         - nll * [j = target] + total * w_j
                                     + plogp * p_j * log p_j)
        probabilities:      outer * plogp * log p_j
    """

    head: Head  # the rows
    nll: Tensor | None  # one number per row, or None for zeros
    lse: Tensor | None  # one number per row, or None for zeros
    total: Tensor | None  # one number per row, or None for zeros
    target: Tensor | None  # one column per row, or None if nll is None
    ignore_index: int | None  # rows with this target have neither nll nor total
    column_weight: Tensor | None  # (vocabulary,), the w above; None for ones
    row_lse: Tensor | None  # log-sum-exp of the rows; None with `ready`
    lse_of_ignored: bool = True  # `row_lse` is also valid in ignored rows
    outer: float = 1.0  # the factor of the gradient, from later steps
    is_log: bool = False  # the rows are log-probabilities
    is_exp: bool = False  # the rows are probabilities
    plogp: Tensor | None = None  # one number per row, or None for zeros
    row_entropy: Tensor | None = None  # entropy of the rows, if plogp is given
    ready: Ready | None = None  # the gradients of `head`, if they exist already
    versions: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "versions", self.versions or self._versions())

    def _versions(self) -> tuple[int, ...]:
        head = self.head
        made_of = (t for t in (head.weight, head.bias, *head.vectors) if t is not None)
        return tuple(compat.version_of(t) for t in made_of if not t.is_inference())

    @property
    def recomputed(self) -> FusedRows:
        """Return this gradient of logits without the gradients in its field `ready`.

        The field contains gradients of hidden states, weight and bias, which the loss's forward
        pass computed. Without the field, the backward pass computes these gradients again.
        """
        if self.ready is None:
            return self
        _, lse, *_ = self.head.statistics(with_lse=True, with_logit_sum=False)
        return replace(self, ready=None, row_lse=lse)

    @property
    def is_batched(self) -> bool:
        """Return whether autograd computes several gradients at once, as it does with
        `is_grads_batched`."""
        given = (self.nll, self.lse, self.total, self.plogp)
        return any(each is not None and compat.is_batched(each) for each in given)

    def scaled(self, factor: float) -> FusedRows:
        """Return this gradient of rows of logits, multiplied by `factor`."""
        return replace(self, outer=self.outer * factor)

    def reshaped(self, rows: Sequence[int]) -> FusedRows:
        """Return this gradient of logits, with all dimensions but the last reshaped to `rows`.

        The last dimension is the vocabulary. The other dimensions are those of rows (tokens), such
        as batch and sequence.
        """
        hidden = self.head.hidden
        head = replace(self.head, hidden=hidden.reshape(*rows, hidden.shape[-1]))
        held = {name: getattr(self, name) for name in _OF_ROWS}
        shaped = {n: x.reshape(tuple(rows)) for n, x in held.items() if x is not None}
        return replace(self, head=head, **shaped)

    @staticmethod
    def joined(
        parts: Sequence[FusedRows], join: Callable[[Sequence[Tensor]], Tensor]
    ) -> FusedRows | None:
        """Join `parts`, the gradients of several groups of rows of logits, into one `FusedRows`.

        `join` concatenates or stacks the rows along a dimension. Return None if the parts differ in
        more than their rows. For example, the parts may differ in the output projection, or in the
        number `outer`, which multiplies the whole gradient.
        """
        parts = [part.recomputed for part in parts]
        first = parts[0]
        settings = (first.outer, first.ignore_index)
        if not all(first._is_like(p) and (p.outer, p.ignore_index) == settings for p in parts):
            return None
        tensors: dict[str, Any] = {}
        for name in _OF_ROWS:
            values = [getattr(part, name) for part in parts]
            present = [value for value in values if value is not None]
            if len(present) not in (0, len(parts)):
                return None
            tensors[name] = join(present) if present else None
        head = replace(first.head, hidden=join([part.head.hidden for part in parts]))
        of_ignored = all(part.lse_of_ignored for part in parts)
        return replace(first, head=head, lse_of_ignored=of_ignored, **tensors)

    def _is_like(self, other: FusedRows) -> bool:
        mine, theirs = self.head, other.head
        return (
            (self.is_log, self.is_exp) == (other.is_log, other.is_exp)
            and self.column_weight is other.column_weight
            and mine.recipe.compute_dtype == theirs.recipe.compute_dtype
            and mine.folded[:3] == theirs.folded[:3]
            and mine.weight.data_ptr() == theirs.weight.data_ptr()
            and self.versions == other.versions
        )

    def merged(self, other: FusedRows) -> FusedRows | None:
        """Return the sum of two gradients of the same rows of logits.

        Return None if one call of the fused loss op cannot compute the sum."""
        if self.ready is not None or other.ready is not None or not self._is_like(other):
            return None
        if self.target is None and other.target is not None:
            return other.merged(self)
        if self.target is not None and other.target is not None:
            if self.target is not other.target or self.ignore_index != other.ignore_index:
                return None
        elif self.ignore_index is not None and other.total is not None:
            return None  # in ignored rows the op would omit the other gradient's sum
        lse_from = self if self.target is None or not other.lse_of_ignored else other

        def total(name: str) -> Any:  # noqa: ANN401
            given = ((getattr(piece, name), piece.outer) for piece in (self, other))
            parts = [p if outer == 1 else p * outer for p, outer in given if p is not None]
            return sum(parts[1:], parts[0]) if parts else None

        return replace(
            self,
            **{name: total(name) for name in ("nll", "lse", "total", "plogp")},
            row_entropy=other.row_entropy if self.row_entropy is None else self.row_entropy,
            row_lse=lse_from.row_lse,
            lse_of_ignored=lse_from.lse_of_ignored,
            outer=1.0,
        )

    def times_p(self) -> FusedRows:
        """Return this gradient multiplied by p, the probabilities of the classes.

        A loss may contain the products p log p, for example in the entropy of a row's softmax.
        `self` is the loss's gradient with respect to these products. The result is the loss's
        gradient with respect to the factor log p, with the factor p held constant. The products
        must be summed over the classes. Then their gradient is one number per row, the same for all
        classes. The field `total` contains these numbers, and the fields `nll`, `lse` and `plogp`
        are None.
        """
        return replace(self, total=None, lse=self.total)

    def times_log_p(self) -> FusedRows:
        """Return this gradient multiplied by log p, the log-probabilities of the classes.

        A loss may contain the products p log p, for example in the entropy of a row's softmax.
        `self` is the loss's gradient with respect to these products. The result is the loss's
        gradient with respect to the factor p, with the factor log p held constant."""
        return replace(self, total=None, plogp=self.total, is_log=False, is_exp=True)

    def before_exp(self) -> FusedRows:
        """Return the gradient of the log-probabilities, given that `self` is the gradient of the
        probabilities."""
        return replace(self, is_log=True, is_exp=False)

    def before_log_softmax(self) -> FusedRows:
        """Return the gradient of the logits, given that `self` is the gradient of the
        log-probabilities."""
        lse = None
        if self.total is not None:
            weight = self.column_weight
            columns = self.head.vocabulary if weight is None else weight.sum().to(self.total.dtype)
            lse = -self.total * columns
        head = replace(self.head, recipe=self.head.folded.logits)
        return replace(self, head=head, lse=lse, is_log=False)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Return this gradient of logits, log-probabilities or probabilities as a dense tensor
        (..., vocabulary), as eager PyTorch would compute it."""
        if self.versions != self._versions():
            raise StaleLogitsError(
                "The gradient of deferred logits was kept in factored form, and the head "
                "changed in place since the backward pass: its values are gone. Read "
                'it before optimizer.step(), or compile with options={"memeff.logits": "eager"}.'
            )
        if self.ready is not None:
            return self.recomputed.dense(dtype)
        assert self.row_lse is not None
        wide, target, lse = self.row_lse.dtype, self.target, self.row_lse
        end = "" if self.is_batched else "_"  # vmap cannot write to tensors that it does not batch
        mul, add, scatter = (getattr(Tensor, f"{n}{end}") for n in ("mul", "add", "scatter_add"))
        nll, total = self.nll, self.total
        if self.ignore_index is not None and target is not None:
            is_ignored = target == self.ignore_index
            target = target.masked_fill(is_ignored, 0)
            nll = None if nll is None else nll.masked_fill(is_ignored, 0)
            total = None if total is None else total.masked_fill(is_ignored, 0)
            if not self.lse_of_ignored:
                lse = lse.masked_fill(is_ignored, torch.inf)
        given = (self.lse,) if self.is_log else (nll, self.lse)
        on_probability = [x for x in given if x is not None]
        if on_probability or self.plogp is not None:
            if self.head.use is not None:
                self.head.use.count_computed("gradient of the logits")
            logits = self.head.logits(self.head.folded.logits).to(wide, copy=True)
            logs = logits.sub_(lse.unsqueeze(-1))
            factor = sum(on_probability, torch.zeros_like(lse)).unsqueeze(-1)
            if self.plogp is not None:
                # A class of probability 0 adds 0.
                slant = logs.clamp(min=-1e4)
                if self.row_entropy is not None and not (self.is_log or self.is_exp):
                    slant += self.row_entropy.unsqueeze(-1)
                factor = factor + mul(slant, self.plogp.unsqueeze(-1))
            grad = factor if self.is_exp else mul(logs.exp_(), factor)
        else:
            shape = (*lse.shape, self.head.vocabulary)
            grad = torch.zeros(shape, dtype=wide, device=lse.device)
        if nll is not None and target is not None:
            grad = scatter(grad, -1, target.long().unsqueeze(-1), -nll.unsqueeze(-1))
        if total is not None:
            weight = self.column_weight
            by_row = total.unsqueeze(-1)
            grad = add(grad, by_row if weight is None else by_row * weight.to(wide))
        return grad.mul_(self.outer).to(dtype)

    def gradients(self, base: LogitsRecipe, needed: Sequence[bool]) -> tuple[Tensor | None, ...]:
        """Return the gradients of the tensors from which the deferred logits are computed.

        Deferred logits are computed when first read. Their source tensors are the hidden states,
        the output projection's weight and bias, and vectors that are added to the product. `base`
        is the recipe (list of steps) that computes the deferred logits. This object's recipe must
        start with the steps of `base`.
        """
        assert not self.is_log, "log_softmax has a backward of its own"
        head = self.head
        between = _product(head.recipe.steps[len(base.steps) :])
        assert between, "steps outside the graph are casts and scales"
        scale = self.outer / between
        if self.ready is not None:
            mask = [needed[0], needed[1], any(needed[2:])]
            found = self.ready.take(scale, mask)
            if found is None:
                return self.recomputed.gradients(base, needed)
            rows, *others = found
            rows = rows.reshape(head.hidden.shape) if mask[0] else rows
            return self._parts(needed, (rows, *others))
        assert self.row_lse is not None
        zeros = torch.zeros_like(self.row_lse)
        nll, lse, total, plogp = (
            None if x is None else x if scale == 1 else x * scale
            for x in (self.nll, self.lse, self.total, self.plogp)
        )
        hidden, weight, bias = head._operands()
        nothing = zeros.new_empty(0)
        given = {
            "grad_nll": zeros if nll is None else nll,
            "grad_lse": zeros if lse is None else lse,
            "grad_logit_sum": nothing if total is None else total,
            "hidden": hidden,
            "weight": weight,
            "bias": bias,
            "target": head.any_target if self.target is None else self.target,
            "column_weight": self.column_weight,
            "lse": self.row_lse,
        }
        if plogp is not None and self.row_entropy is not None:
            given |= {"grad_entropy": -plogp, "entropy": self.row_entropy}
        # Further results of the op were not requested in the forward pass, and are empty here.
        found = op_folder.linear_cross_entropy_backward(
            *(given.get(name, nothing) for name in _BACKWARD_TENSORS),
            **head._knobs(self.ignore_index),
            with_entropy=plogp is not None,
            with_lse=self.lse_of_ignored,
            with_logit_sum=total is not None,
            output_mask=[needed[0], needed[1], any(needed[2:])],
        )
        return self._parts(needed, found)

    def _parts(self, needed: Sequence[bool], found: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        """Turn the fused loss op's gradients `found` into gradients of the logits' source tensors.

        The source tensors are the hidden states, the output projection's weight and bias, and
        vectors that are added to the product. The result is None for each tensor that `needed` does
        not request.
        """
        head, (grad_hidden, grad_weight, grad_bias, *_) = self.head, found
        parts: list[Tensor | None] = [None] * len(needed)
        if needed[0]:
            parts[0] = grad_hidden.to(head.hidden.dtype)
        if needed[1]:
            grad_weight = grad_weight.t() if head.recipe.transposed else grad_weight
            part = grad_weight.to(head.weight.dtype)
            parts[1] = part if head.recipe.classes is None else _padded(part, head.weight, head)
        if needed[2] and head.bias is not None:
            part = grad_bias.to(head.bias.dtype)
            parts[2] = part if head.recipe.classes is None else _padded(part, head.bias, head)
        vectors = zip(head.vectors, head.folded.divisors, strict=True)
        for place, (vector, divisor) in enumerate(vectors, 3):
            if needed[place]:
                part = (grad_bias / divisor).sum_to_size(vector.numel()).reshape(vector.shape)
                parts[place] = part.to(vector.dtype)
        return tuple(parts)
