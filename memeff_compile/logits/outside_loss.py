# ruff: noqa: ANN401  (the functions of PyTorch take and return anything)
"""Losses that user code computes outside of the compiled graph from deferred logits.

Deferred logits are computed when they are first read. The op `memeff::linear_cross_entropy`
computes losses such as the following without building the logits:

    loss = F.cross_entropy(out.logits.view(-1, V).float(), labels.view(-1))

`SERVED` names the PyTorch functions that this module handles before autograd sees them. Each
handler returns the function's result, which `memeff::linear_cross_entropy` computes from hidden
states and the output projection. If a handler declines a call, PyTorch's function runs on the
computed logits.

`_Rows` is the autograd function that computes a few numbers per row (token) of deferred logits,
such as the log-sum-exp. The backward pass of `_Rows` returns the gradient of the logits in a
compact form (`FusedRows`, a few numbers per row). Code may take views of the logits, cast them, or
multiply them by a number before it computes the loss. Autograd passes the compact gradient back
through these operations. The autograd graph of the logits is the same as in eager PyTorch. If a
hook, `retain_grad` or `torch.autograd.grad` reads the gradient, it gets a dense tensor.
Log-probabilities (`_LogSoftmax`) are deferred too. Log-probabilities that code only gathers, sums
or passes to `nll_loss` are never computed.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from memeff_compile import compat
from memeff_compile.errors import DoubleBackwardError
from memeff_compile.logits.fused_rows import Folded, FusedRows, Head, Ready, fold_recipe
from memeff_compile.logits.memory import Memory
from memeff_compile.logits.recipe import LogitsRecipe, LossSettings
from memeff_compile.logits.row_gradient import RowGradient, dense
from memeff_compile.logits.source import reading_for
from memeff_compile.logits.view import View

if TYPE_CHECKING:
    from memeff_compile.report import LogitsUse

DType: TypeAlias = "torch.dtype | None"


class _Asked(NamedTuple):
    """A loss function's request for numbers per row (token) of logits, such as the log-sum-exp."""

    target: Tensor | None = None
    ignore_index: int | None = None
    column_weight: Tensor | None = None
    with_lse: bool = False
    with_sum: bool = False
    of_ignored: bool = True  # the log-sum-exp of ignored rows is also requested


class _Function(torch.autograd.Function):
    apply: ClassVar[Callable[..., Any]]  # which torch leaves without types


class _Rows(_Function):
    """The autograd function that computes a few numbers for each row of logits or
    log-probabilities.

    - Row z of logits with target t: the log-sum-exp lse, the loss nll = lse - z_t, and z summed
      with class weights.
    - Row l of log-probabilities: the loss nll = -l_t, and the weighted sum of l.
    """

    @staticmethod
    def forward(
        ctx: Any, view: View, asked: _Asked
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        head, memory = view.head, view.memory
        target, ignore_index, column_weight, *_ = asked
        ctx.factor = head.folded.factor  # None unless these are log-probabilities
        is_log = ctx.factor is not None
        known = memory.statistics(view) if target is None else None
        if known is not None and (known[1] is not None or not asked.with_sum):
            nll, (lse, logit_sum) = None, known
        else:
            given = (target, column_weight, ignore_index)
            nll, lse, logit_sum, _ = head.statistics(
                *given, with_lse=asked.of_ignored, with_logit_sum=asked.with_sum
            )
            if ignore_index is None or asked.of_ignored:
                is_of_all = asked.with_sum and column_weight is None and ignore_index is None
                memory.keep_statistics(view, lse, logit_sum if is_of_all else None)
        total = logit_sum if asked.with_sum else None
        if is_log and total is not None:
            columns = head.vocabulary if column_weight is None else column_weight.sum()
            total = total - lse * columns
        ctx.set_materialize_grads(False)
        ctx.kept, ctx.shape = _Kept.of(ctx, view, target, column_weight, lse), view.dims
        ctx.is_sum = is_log and target is None and column_weight is None
        ctx.asked = asked._replace(target=None, column_weight=None)  # autograd keeps these
        shown = None if is_log or not asked.with_lse else lse.clone()
        of_labels = None if target is None or nll is None else _no_view(nll, nll.shape)
        return of_labels, shown, total

    @staticmethod
    @compat.untraced
    def backward(
        ctx: Any, nll: Tensor | None, lse: Tensor | None, total: Tensor | None
    ) -> tuple[Tensor, None]:
        kept: _Kept = ctx.kept
        if ctx.is_sum and total is not None and _needs_nothing(ctx):
            return _spread(ctx, total / ctx.factor), None
        target, column_weight, row_lse, *made_of = ctx.saved_tensors
        head, asked = kept.head(made_of), ctx.asked
        if torch.is_grad_enabled():
            asked = asked._replace(target=target, column_weight=column_weight)
            return _differentiable(kept.plain(made_of), head, asked, (nll, lse, total)), None
        ctx.kept = kept.after_a_backward()
        rows = FusedRows(
            head,
            nll,
            lse,
            total,
            target if nll is not None else None,
            asked.ignore_index if nll is not None else None,
            column_weight,
            row_lse,
            lse_of_ignored=asked.ignore_index is None or asked.of_ignored,
            outer=1 / (ctx.factor or 1.0),
            is_log=ctx.factor is not None,
        )
        return RowGradient.of_fused(rows), None


class _Total(_Function):
    """The autograd function that computes the sum or the mean of the rows' losses.

    A row is a token. For the mean, the argument `norm` of `forward` is the number of rows whose
    targets are not ignored. The forward pass also computes the gradients.
    """

    @staticmethod
    def forward(
        ctx: Any, view: View, target: Tensor, ignore_index: int, norm: Tensor | None
    ) -> Tensor:
        head, needed = view.head, view.memory.source.trained
        total, *gradients = head.total(target, ignore_index, norm, needed)
        ctx.kept = _Kept.of(ctx, view, target, norm, *gradients)
        ctx.ignore_index = ignore_index
        return total

    @staticmethod
    @compat.untraced
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        kept: _Kept = ctx.kept
        target, norm, *gradients = ctx.saved_tensors[:5]
        made_of = ctx.saved_tensors[5:]
        head, share = kept.head(made_of), grad if norm is None else grad / norm
        nll = share.expand(target.shape)
        if torch.is_grad_enabled():
            asked = _Asked(target, ctx.ignore_index)
            whole = _differentiable(kept.plain(made_of), head, asked, (nll, None, None))
            return whole, None, None, None
        ctx.kept = kept.after_a_backward()
        is_last = compat.frees_saved_tensors()
        ready = Ready(tuple(gradients), grad, is_last)
        rows = FusedRows(head, nll, None, None, target, ctx.ignore_index, None, None, ready=ready)
        return RowGradient.of_fused(rows), None, None, None


def _differentiable(
    plain: Tensor, head: Head, asked: _Asked, grads: Sequence[Tensor | None]
) -> Tensor:
    """Return the gradient of the logits as a dense, differentiable tensor, for second
    derivatives."""
    values = plain if plain.dtype == torch.float64 else plain.float()
    factor, target, is_kept = head.folded.factor, asked.target, None
    values = values if factor is None else values / factor
    if asked.ignore_index is not None and target is not None:
        is_kept = target != asked.ignore_index
        target = torch.where(is_kept, target, 0)
    nll, lse = None, torch.logsumexp(values, -1) if factor is None else None
    if target is not None:
        picked = values.gather(-1, target.long().unsqueeze(-1)).squeeze(-1)
        nll = -picked if lse is None else lse - picked
    weighted = values if asked.column_weight is None else values * asked.column_weight
    used: list[Tensor] = []
    given: list[Tensor] = []
    for out, grad in zip((nll, lse, weighted.sum(-1)), grads, strict=True):
        if out is not None and grad is not None:
            is_whole = is_kept is None or (out is lse and asked.of_ignored)
            used.append(out if is_whole else torch.where(cast("Tensor", is_kept), out, 0))
            given.append(grad)
    if not used:
        return torch.zeros_like(plain)
    return torch.autograd.grad(used, [plain], given, create_graph=True)[0]


class _LogSoftmax(_Function):
    """The autograd function that turns deferred logits into deferred log-probabilities.

    Deferred values are computed when first read.
    """

    @staticmethod
    def forward(ctx: Any, view: View, recipe: LogitsRecipe) -> View:
        result = view.copied(recipe, lambda values: values.to(recipe.dtype).log_softmax(-1))
        ctx.kept, ctx.result = _Kept.of(ctx, view), weakref.ref(result)
        ctx.logs = ctx.kept and ctx.kept._replace(memory=result.memory, recipe=recipe)
        return result

    @staticmethod
    @compat.untraced
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None]:
        kept, logs = cast("_Kept", ctx.kept), cast("_Kept", ctx.logs)
        ctx.kept, ctx.logs = kept.after_a_backward(), logs.after_a_backward()
        if torch.is_grad_enabled():
            if (out := _result(ctx, logs)) is not None:
                grad = dense(grad)
                return (grad - out.exp() * grad.sum(-1, keepdim=True)).to(kept.recipe.dtype), None
            plain = kept.plain(ctx.saved_tensors)
            values = plain.to(logs.recipe.dtype).log_softmax(-1)
            return torch.autograd.grad(values, plain, grad, create_graph=True)[0], None
        dtype = kept.recipe.dtype
        if isinstance(grad, RowGradient) and grad.is_fused:
            return grad.with_rows(FusedRows.before_log_softmax, dtype), None
        value = logs.values(ctx.saved_tensors, "log_softmax")
        found = torch.ops.aten._log_softmax_backward_data(dense(grad), value, -1, value.dtype)
        return found.to(dtype), None


class _Exp(_Function):
    """The autograd function that turns deferred log-probabilities into deferred probabilities.

    Deferred values are computed when first read.
    """

    @staticmethod
    def forward(ctx: Any, logs: View) -> View:
        result = logs.copied(logs.recipe.then("exp"), torch.exp)
        ctx.logs, ctx.result = _Kept.of(ctx, logs), weakref.ref(result)
        return result

    @staticmethod
    @compat.untraced
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        logs: _Kept = ctx.logs
        ctx.logs = logs.after_a_backward()
        if isinstance(grad, RowGradient) and grad.is_fused:
            return grad.with_rows(FusedRows.before_exp)
        out = _result(ctx, logs) if torch.is_grad_enabled() else None
        out = logs.values(ctx.saved_tensors, "exp").exp() if out is None else out
        return dense(grad) * out


class _PLogP(_Function):
    """The autograd function that multiplies probabilities by their logarithms.

    The factors and the product are deferred: their values are computed when first read.
    """

    @staticmethod
    def forward(ctx: Any, probs: View, logs: View) -> View:
        ctx.logs = _Kept.of(ctx, logs)
        # Of probabilities a second derivative asks where they came from: they may be cut off.
        ctx.probs = None if ctx.logs is None else ctx.logs.of_another(probs)
        return logs.copied(logs.recipe.then("times_exp"), lambda x: x.exp() * x)

    @staticmethod
    @compat.untraced
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        logs: _Kept = ctx.logs
        probs: _Kept = ctx.probs
        ctx.logs, ctx.probs = logs.after_a_backward(), probs.after_a_backward()
        if isinstance(grad, RowGradient) and grad.is_fused:
            return grad.with_rows(FusedRows.times_log_p), grad.with_rows(FusedRows.times_p)
        values = logs.values(ctx.saved_tensors, "exp")
        is_first = not torch.is_grad_enabled()
        p = values.exp() if is_first else probs.plain(ctx.saved_tensors)
        return dense(grad) * values, dense(grad) * p


class _NegativeEntropy(_Function):
    """The autograd function that sums p log p over the classes, for probabilities p.

    The fused loss op computes the sum without building the products p log p. The backward pass
    returns no gradient for the argument `logs`, the log-probabilities log p.
    """

    @staticmethod
    def forward(ctx: Any, terms: View, logs: tuple[View]) -> Tensor:
        _, lse, _, entropy = logs[0].head.statistics(
            with_lse=True, with_logit_sum=False, with_entropy=True
        )
        ctx.kept, ctx.shape = _Kept.of(ctx, logs[0], lse, entropy), terms.dims
        return -entropy

    @staticmethod
    @compat.untraced
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        if _needs_nothing(ctx):
            return _spread(ctx, grad), None
        kept: _Kept = ctx.kept
        ctx.kept = kept.after_a_backward()
        lse, entropy, *made_of = ctx.saved_tensors
        given = (kept.head(made_of), None, None, grad, None, None, None, lse)
        return RowGradient.of_fused(FusedRows(*given, is_log=True, row_entropy=entropy)), None


def _needs_nothing(ctx: Any) -> bool:
    """Return whether the backward pass of a sum over the classes must run without saved tensors.

    The sum adds up log-probabilities, or products p log p. The backward pass of eager PyTorch's sum
    uses no saved tensors. A backward pass without saved tensors is necessary for a second
    derivative, and for a second backward pass through the same graph.
    """
    try:
        return torch.is_grad_enabled() or not ctx.saved_tensors
    except RuntimeError:  # a backward pass has freed them
        return True


def _spread(ctx: Any, grad: Tensor) -> Tensor:
    return grad.to(ctx.kept.recipe.dtype).unsqueeze(-1).expand(ctx.shape)


class _Kept(NamedTuple):
    """The data of deferred logits (computed when first read) that a backward pass needs in addition
    to saved tensors."""

    view: View | None
    memory: Memory | None  # may contain the values that the backward pass needs
    recipe: LogitsRecipe
    settings: LossSettings
    use: LogitsUse | None
    written_by: Any

    @classmethod
    def of(cls, ctx: Any, view: View, *others: Tensor | None) -> _Kept | None:
        """Save tensors for the backward pass: `others`, and the hidden states and output projection
        from which the deferred logits `view` are computed.

        Return the data that autograd cannot save, because it is not a tensor. If no gradient is
        needed, save nothing and return None.
        """
        if not any(ctx.needs_input_grad):
            return None
        head = view.head
        ctx.save_for_backward(*others, head.hidden, head.weight, head.bias, *head.vectors)
        kept = (view, view.memory, head.recipe, head.settings, head.use)
        return cls(*kept, _written_by(view))

    def of_another(self, view: View) -> _Kept:
        """Return the data that an autograd function's backward pass needs for the tensor `view`.

        `self` has such data for another tensor with the same hidden states and output projection.
        The two tensors share the saved tensors, which autograd frees after the first backward pass.
        """
        return self._replace(
            view=view, memory=view.memory, recipe=view.recipe, written_by=_written_by(view)
        )

    def after_a_backward(self) -> _Kept:
        """Return a copy of this object without `view` and `memory`, which refer to deferred logits.

        Deferred logits are computed when first read. If the present backward pass runs with
        `create_graph=True`, return this object unchanged.
        """
        return self if torch.is_grad_enabled() else self._replace(view=None, memory=None)

    def head(self, made_of: Sequence[Any]) -> Head:
        """Return rows of logits as a `Head`: their hidden states and the output projection.

        `made_of` contains the tensors that autograd saved: the hidden states, the output
        projection's weight and bias, and vectors that are added to the product.
        """
        hidden, weight, bias, *vectors = made_of
        return Head(hidden, weight, bias, tuple(vectors), self.recipe, self.settings, self.use)

    def values(self, made_of: Sequence[Any], reader: str) -> Tensor:
        """Return the values of the logits at the time of the forward pass, with an autograd graph
        if gradients are needed.
        """
        if torch.is_grad_enabled():
            return self.plain(made_of)
        # Callers may have written to an open memory.
        value = None if self.memory is None or self.memory.is_open else self.memory.value
        if value is not None:
            return value
        if self.use is not None:
            self.use.count_computed(f"the backward pass of {reader}")
        return self.head(made_of).logits(self.recipe)

    def plain(self, made_of: Sequence[Any]) -> Tensor:
        """Return the logits that the forward pass used, as a plain tensor.

        The gradient of this plain tensor flows to the deferred logits (computed when first read).
        """
        if self.view is None:
            raise DoubleBackwardError(
                "linear_cross_entropy: backward was called with create_graph=True on a loss "
                "outside the graph whose backward already ran without it. The op has only a first "
                "derivative. Pass create_graph=True the first time, or compile with "
                "options={'memeff.linear_cross_entropy': 'off'}."
            )
        # They may have been written to since; eager would have the values that its loss saved.
        if self.view.memory.is_open and _written_by(self.view) is not self.written_by:
            raise DoubleBackwardError(
                "linear_cross_entropy: create_graph=True was asked of a loss outside the graph "
                "whose logits were changed in place since; the op has only a first derivative. "
                "Copy the logits before you change them, or compile with "
                "options={'memeff.linear_cross_entropy': 'off'}."
            )
        with reading_for("a second derivative"):
            plain = self.view.to_read()
        if not self.view.memory.is_open:
            return plain
        with torch.no_grad():
            change = self.head(made_of).logits(self.recipe).reshape(plain.shape) - plain
        return plain + change


def _result(ctx: Any, kept: _Kept) -> Tensor | None:
    """Return the log-probabilities or probabilities that the forward pass returned.

    A second derivative needs these values. Return None if the tensor no longer exists or has
    changed.
    """
    result = ctx.result()
    if result is None or result.grad_fn is not ctx:  # detached in place, or written to since
        return None
    return kept.of_another(result)._replace(written_by=ctx).plain(ctx.saved_tensors)


def _written_by(view: Any) -> Any:
    """Return the autograd node of the latest write to the memory of `view`, a view of the logits.

    After each such write, autograd creates a new node for the view.
    """
    return (view if view._base is None else view._base).grad_fn


class Declined(Exception):
    """The exception that a handler raises for a call that PyTorch's own function must run.

    A handler replaces a PyTorch function, such as `F.cross_entropy`, for deferred logits (logits
    that are computed when first read). The exception contains the reason, which the report of the
    compilation shows. The reason is "" if there is nothing to report.
    """


def _check(view: Any, target: Any, column_weight: Any = None) -> Folded:
    """Return the fused loss op's arguments, such as scale and softcap, for the logits `view`.

    The arguments describe how the logits are computed from the output projection's product. `view`
    may also be log-probabilities. Raise `Declined` if the op does not support the call.
    """
    lost = view.lost_factors()
    if lost is not None:
        raise Declined(lost)
    folded = fold_recipe(view.recipe)
    if isinstance(folded, str):
        raise Declined(folded)
    for operand in (target, column_weight):
        if operand is not None and type(operand) not in (Tensor, torch.nn.Parameter):
            raise Declined(f"an operand is a {type(operand).__name__}")
    if compat.is_functorch_active():
        raise Declined("torch.func is at work")
    sentence = view.head.refusal(target, column_weight)
    if sentence is not None:
        raise Declined(sentence)
    return folded


def _is_deferred(value: Any) -> bool:
    """Return whether a tensor is deferred logits or log-probabilities (computed when first read)
    whose loss may be fused."""
    memory = getattr(value, "memory", None)
    return isinstance(memory, Memory) and memory.source.loss is not None and value.window is None


def _last(view: View, dim: Any) -> bool:
    """Return whether `dim` is the last dimension of `view` and the last dimension is the
    vocabulary."""
    rank = len(view.dims)
    if isinstance(dim, (tuple, list)) and len(dim) == 1:
        dim = dim[0]
    is_number = isinstance(dim, int) and not isinstance(dim, bool)
    return is_number and view.order is None and dim in (-1, rank - 1)


def _served(view: View, spelling: str, **asked: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return loss, log-sum-exp and sum of each row (token) of `view`, from the fused loss op.

    `view` contains logits or log-probabilities that are computed when first read. The sum is over a
    row's values, each multiplied by the weight of its class if `asked` has a `column_weight`. The
    op runs with autograd. A result that `asked` does not request is None. `spelling` names the
    PyTorch functions that the op replaces, such as "log_softmax + gather". The report counts fused
    calls by this name.
    """
    source = view.memory.source
    source.require_unchanged()
    result: tuple[Tensor, Tensor, Tensor] = _Rows.apply(view, _Asked(**asked))
    if source.use is not None:
        rows = view.rows.shape[:-1].numel()
        source.use.count_fused(spelling, rows * view.head.vocabulary * view.dtype.itemsize)
    return result


def _no_view(made: Tensor, shape: Sequence[int]) -> Tensor:
    """Reshape `made` to a tensor that autograd does not treat as a view.

    An ordinary reshape would return a view. The PyTorch functions that this module handles, such as
    `logsumexp`, return a tensor that is not a view.
    """
    result: Tensor = torch.ops.aten._unsafe_view.default(made, shape)
    return result


def _column(rows: Tensor) -> Tensor:
    return _no_view(rows, (*rows.shape, 1))


def _need(condition: object, reason: str) -> None:
    if not condition:
        raise Declined(reason)


_result_dtypes: dict[Any, torch.dtype] = {}


def _result_dtype(name: str, view: View, function: Callable[[Tensor], Tensor]) -> torch.dtype:
    """Return the dtype of the result of PyTorch's function `name` under the current autocast.

    One such name is "log_softmax". To find the dtype, run the function on one row.
    """
    kind = view.device.type
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    key = (name, view.dtype, view.device, autocast)
    if key not in _result_dtypes:
        with torch.no_grad():
            row = torch.zeros(1, 2, dtype=view.dtype, device=view.device)
            _result_dtypes[key] = function(row).dtype
    return _result_dtypes[key]


def _class_loss(
    function: Callable[..., Tensor],  # F.cross_entropy, or F.nll_loss, which takes no smoothing
    input: Any,
    target: Any,
    weight: Tensor | None = None,
    size_average: object = None,
    ignore_index: int = -100,
    reduce: object = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    view, is_log = _class_last(input, target), function is F.nll_loss
    factor = _check(view, target, weight).factor
    _need(not is_log or factor is not None, "nll_loss of something other than log-probabilities")
    _need(is_log or factor is None, "cross_entropy of log-probabilities")
    _need(size_average is None and reduce is None, "size_average or reduce is given")
    _need(reduction in ("none", "mean", "sum"), "the reduction is not known")
    is_share = isinstance(label_smoothing, (int, float)) and 0 <= label_smoothing <= 1
    _need(is_share, "the label smoothing is not known")
    if weight is not None:
        _need(not weight.requires_grad, "the class weights need a gradient")
        _need(weight.shape == view.dims[-1:], "the class weights have another size")
        _need(weight.dtype == view.dtype, "the class weights have another dtype")
    dtype = _result_dtype(function.__name__, view, lambda x: function(x, x[:, 0].long()))
    is_smooth = label_smoothing > 0
    is_plain = weight is None and not is_smooth and reduction != "none"
    if is_plain and _makes_gradients(view):
        return _total(view, target, ignore_index, reduction).to(dtype)
    nll, lse, total = _served(
        view,
        "log_softmax + nll_loss" if is_log else "cross_entropy",
        target=target,
        ignore_index=ignore_index,
        column_weight=weight if is_smooth else None,
        with_lse=is_smooth,
        with_sum=is_smooth,
        of_ignored=False,
    )
    kept = target != ignore_index
    norm = kept if weight is None else _row_weights(weight, target, kept, nll.dtype)
    rows = nll if factor is None else nll * factor
    loss = _reduced(rows if weight is None else rows * norm, norm, reduction)
    if is_smooth:
        vocabulary = view.dims[-1]
        mass = vocabulary if weight is None else weight.to(lse.dtype).sum()
        spread = torch.where(kept, lse * mass - total, 0)
        smooth = _reduced(spread, norm, reduction)
        loss = loss * (1 - label_smoothing) + smooth * (label_smoothing / vocabulary)
    return loss.to(dtype)


def _makes_gradients(view: View) -> bool:
    """Return whether a loss of deferred logits computes its gradients in its forward pass.

    Deferred logits are computed when first read. The gradients of hidden states and weight take as
    much memory as these two tensors together. So the forward pass computes gradients only for a
    loss of more than half of the rows (tokens). The forward pass computes no gradients if an
    earlier training step computed two losses from its logits. One backward pass over the logits can
    compute the gradients of both losses. If the first loss computes gradients in its forward pass,
    the second loss has to compute the logits once more.
    """
    source = view.memory.source
    use, rows = source.use, view.rows.shape[:-1].numel()
    is_alone = use is None or (
        set(use.fused) <= {"cross_entropy"}
        and use.calls < max(use.steps, 1)
        and "gradient of the logits" not in use.computed
    )
    return (
        is_alone
        and not source.has_gradients
        and torch.is_grad_enabled()
        and cast("Tensor", view).requires_grad
        and 2 * rows > view.memory.rows.shape[:-1].numel()
        and view.head.recipe.classes is None
        and view.head.folded.factor is None
        and not compat.packs_saved_tensors()  # a checkpoint runs this forward pass again
        and view.head.makes_gradients_in_forward()
    )


def _total(view: View, target: Tensor, ignore_index: int, reduction: str) -> Tensor:
    """Return the mean or the sum of the rows' losses, computed by one call of the fused loss op
    that also computes the gradients."""
    source = view.memory.source
    source.require_unchanged()
    norm = (target != ignore_index).sum() if reduction == "mean" else None
    loss: Tensor = _Total.apply(view, target, ignore_index, norm)
    source.has_gradients = True
    if source.use is not None:
        rows = view.rows.shape[:-1].numel()
        unbuilt = rows * view.head.vocabulary * view.dtype.itemsize
        source.use.count_fused("cross_entropy", unbuilt)
    return loss


def _class_last(input: Any, target: Any) -> View:
    """Return the logits `input` of a loss with the class dimension last.

    If the logits have more than two dimensions, PyTorch's losses expect the classes in the second.
    """
    _need(_is_deferred(input), "")
    _need(isinstance(target, Tensor), "the targets are no tensor")
    _need(not target.dtype.is_floating_point, "the targets are class probabilities")
    _need(target.dtype == torch.int64, "the targets are not int64")
    view: View = input
    rank = len(view.dims)
    if view.order is not None:
        _need(view.order == (0, rank - 1, *range(1, rank - 1)), "the classes are elsewhere")
        with compat.without_torch_function():
            view = input.permute(0, *range(2, rank), 1)
    else:
        _need(rank <= 2, "the loss reads its classes from dimension 1 and the head's are last")
    _need(target.shape == view.dims[:-1], "the shapes of logits and targets differ")
    return view


def _row_weights(weight: Tensor, target: Tensor, kept: Tensor, dtype: torch.dtype) -> Tensor:
    index = torch.where(kept, target, 0)
    return weight.index_select(0, index.reshape(-1)).reshape(index.shape).to(dtype) * kept


def _reduced(rows: Tensor, norm: Tensor, reduction: str) -> Tensor:
    if reduction == "none":
        return rows.view_as(rows) if rows.dim() > 1 else rows  # a view in eager PyTorch, too
    return rows.sum() if reduction == "sum" else rows.sum() / norm.sum()


def _functional_log_softmax(
    input: Any, dim: Any = None, _stacklevel: int = 3, dtype: torch.dtype | None = None
) -> Any:
    return _log_softmax(input, dim, dtype=dtype)


def _log_softmax(input: Any, dim: Any, dtype: torch.dtype | None = None) -> Any:
    _need(_is_deferred(input), "")
    _need(_last(input, dim), "log_softmax over another dimension")
    _need(_check(input, None).factor is None, "log_softmax of log-probabilities")
    result = dtype or _result_dtype("log_softmax", input, lambda x: x.log_softmax(-1))
    recipe = input.recipe.cast(result).then("log_softmax")
    _need(isinstance(fold_recipe(recipe), Folded), "log_softmax in float64")
    return _LogSoftmax.apply(input, recipe)


def _gather(input: Any, dim: Any, index: Any, *, sparse_grad: bool = False, out: Any = None) -> Any:
    _need(_is_deferred(input), "")
    _need(_last(input, dim) and isinstance(index, Tensor), "gather over another dimension")
    _need(out is None and not sparse_grad, "gather with options")
    _need(index.shape == (*input.dims[:-1], 1), "gather of several classes, or of some rows")
    _need(index.dtype == torch.int64, "the index is not int64")
    return _column(_picked(input, index.squeeze(-1)))


def _take_along_dim(input: Any, indices: Any, dim: Any = None, *, out: Any = None) -> Any:
    if _is_deferred(input) and isinstance(indices, Tensor) and indices.dtype == torch.int64:
        indices = indices.remainder(input.dims[-1])  # negative indices count from the end
    return _gather(input, dim, indices, out=out)


def _get_item(input: Any, index: Any) -> Any:
    """Return `log_probs[rows, targets]` from the fused loss op, without building `log_probs`.

    `input` contains log-probabilities or logits that are computed when first read. `index` must
    have one int64 tensor for each dimension of `input`. The last dimension must be the vocabulary.
    Otherwise, return NotImplemented."""
    is_one_each = isinstance(index, tuple) and _is_deferred(input) and len(index) == input.dim()
    if not is_one_each or len(index) < 2 or input.order is not None:
        return NotImplemented
    if not all(isinstance(i, Tensor) and i.dtype == torch.int64 and i.dim() for i in index):
        return NotImplemented
    *rows, target = torch.broadcast_tensors(*index)
    view = input[tuple(rows)]
    _need(_is_deferred(view), "the logits were computed before")
    vocabulary = input.dims[-1]
    return _picked(view, torch.where(target < 0, target + vocabulary, target))


def _picked(view: View, target: Tensor) -> Tensor:
    """Return the log-probability or logit of one class in each row; `target` contains the class
    indices."""
    factor = _check(view, target).factor
    is_log = factor is not None
    spelling = "log_softmax + gather" if is_log else "gather"
    nll, lse, _ = _served(view, spelling, target=target, with_lse=not is_log, with_sum=is_log)
    return (lse - nll if factor is None else nll * -factor).to(view.dtype)


def _logsumexp(input: Any, dim: Any, keepdim: bool = False, *, out: Any = None) -> Any:
    _need(_is_deferred(input), "")
    _need(_last(input, dim) and out is None, "logsumexp over another dimension")
    _need(_check(input, None).factor is None, "logsumexp of log-probabilities")
    dtype = _result_dtype("logsumexp", input, lambda x: x.logsumexp(-1))
    _, lse, _ = _served(input, "logsumexp", with_lse=True)
    # A node of one result: autograd loses retain_grad of a second one that is written to.
    return (_column(lse) if keepdim else _no_view(lse, lse.shape)).to(dtype)


def _exp(input: Any, *, out: Any = None) -> Any:
    """Return probabilities that are computed when first read, if the argument is the unchanged
    result of log_softmax."""
    if not _is_deferred(input) or input.recipe.steps[-1:] != (("log_softmax", None),):
        return NotImplemented
    is_last = input.order is None and out is None
    if not is_last or _result_dtype("exp", input, torch.exp) != input.dtype:
        return NotImplemented
    _check(input, None)
    result = _Exp.apply(input)
    result.log_probs = input
    return result


def _mul(input: Any, other: Any, *, out: Any = None) -> Any:
    """Return p log p, computed when first read, for log-probabilities and the probabilities p that
    were computed from them.

    For other factors, and if `out` is passed, return NotImplemented.
    """
    for probs, logs in ((input, other), (other, input)):
        if not _is_deferred(probs) or probs.log_probs is not logs or out is not None:
            continue
        if probs.recipe.steps[-1:] != (("exp", None),) or probs.lost_factors() is not None:
            continue
        _check(logs, None)
        result = _PLogP.apply(probs, logs)
        result.log_probs = logs
        return result
    return NotImplemented


def _entropy(input: Any, logs: View, dim: Any, keepdim: bool, dtype: torch.dtype | None) -> Any:
    """Return the sum of p log p over the classes, without computing the products p log p.

    `input` represents the products, and `logs` the log-probabilities log p. The values of both
    tensors are computed only when first read.
    """
    if input.recipe.steps[-1:] != (("times_exp", None),) or input.lost_factors() is not None:
        return NotImplemented
    _need(_last(input, dim), "an entropy over another dimension")
    _need(dtype is None or dtype.is_floating_point, "sum in another dtype")
    _check(logs, None)
    logs.memory.source.require_unchanged()
    result = dtype or _result_dtype("sum", input, lambda x: x.sum(-1))
    total = _NegativeEntropy.apply(input, (logs,))
    if logs.memory.source.use is not None:
        logs.memory.source.use.count_fused("entropy")
    return (_column(total) if keepdim else total).to(result)


def _sum(
    input: Any, dim: Any = None, keepdim: bool = False, *, dtype: DType = None, out: Any = None
) -> Any:
    if not _is_deferred(input):
        return NotImplemented
    is_floating = dtype is None or dtype.is_floating_point
    if dim is None and not keepdim and out is None and input.order is None and is_floating:
        result = dtype or _result_dtype("sum", input, lambda x: x.sum())
        rows = _sum(input, -1, dtype=torch.promote_types(result, torch.float32))
        return rows if rows is NotImplemented else rows.sum().to(result)
    if input.log_probs is not None and out is None:
        return _entropy(input, input.log_probs, dim, keepdim, dtype)
    folded = fold_recipe(input.recipe)
    if isinstance(folded, str) or folded.factor is None:
        return NotImplemented
    _need(_last(input, dim) and out is None, "sum over another dimension")
    _check(input, None)
    _need(dtype is None or dtype.is_floating_point, "sum in another dtype")
    result = dtype or _result_dtype("sum", input, lambda x: x.sum(-1))
    _, _, total = _served(input, "log_softmax + sum", with_sum=True)
    # By a number, not a tensor: then the node saves no tensor, like that of eager's sum.
    total = torch.ops.aten.mul.Scalar(total, folded.factor)
    return (_column(total) if keepdim else total).to(result)


def _mean(
    input: Any, dim: Any = None, keepdim: bool = False, *, dtype: DType = None, out: Any = None
) -> Any:
    wide = dtype or torch.promote_types(input.dtype, torch.float32)
    total = _sum(input, dim, keepdim, dtype=wide, out=out)
    if total is NotImplemented:
        return total
    count = prod(input.dims) if dim is None else input.dims[-1]
    return torch.ops.aten.div.Scalar(total, count).to(dtype or input.dtype)


def _divergence(input: Any, target: Any, *rest: Any, **how: Any) -> Any:
    _need(_is_deferred(input) or _is_deferred(target), "")
    raise Declined(
        "a divergence; compute it in the compiled function, or by memeff_compile.linear_divergence"
    )


# Argument names that PyTorch also accepts, from NumPy.
_RENAMED = {"axis": "dim", "keepdims": "keepdim", "x": "input", "a": "input", "x1": "input"}
_RENAMED["x2"] = "other"


def _serving(handler: Any) -> Callable[..., Any]:
    """Wrap a handler so that the handler returns the `Declined` exception instead of raising it.

    A handler replaces a PyTorch function for deferred logits (computed when first read).
    """
    signature = inspect.signature(handler)

    def serve(*args: Any, **kwargs: Any) -> Any:
        if kwargs:
            kwargs = {_RENAMED.get(name, name): value for name, value in kwargs.items()}
        try:
            signature.bind(*args, **kwargs)
        except TypeError:
            return NotImplemented  # PyTorch handles it, or raises its error
        try:
            return handler(*args, **kwargs)
        except Declined as declined:
            return declined

    return serve


SERVED: dict[Any, Callable[..., Any]] = {
    function: _serving(handler)
    for handler, functions in {
        partial(_class_loss, F.cross_entropy): (F.cross_entropy,),
        partial(_class_loss, F.nll_loss): (F.nll_loss,),
        _functional_log_softmax: (F.log_softmax,),
        _log_softmax: (torch.log_softmax, torch.Tensor.log_softmax, torch.special.log_softmax),
        _gather: (torch.gather, torch.Tensor.gather),
        _take_along_dim: (torch.take_along_dim, torch.Tensor.take_along_dim),
        _get_item: (torch.Tensor.__getitem__,),
        _logsumexp: (torch.logsumexp, torch.Tensor.logsumexp, torch.special.logsumexp),
        _exp: (torch.exp, torch.Tensor.exp),
        _mul: (torch.mul, torch.Tensor.mul, torch.Tensor.__mul__, torch.multiply),
        _divergence: (F.kl_div,),
        _sum: (torch.sum, torch.Tensor.sum),
        _mean: (torch.mean, torch.Tensor.mean),
    }.items()
    for function in functions
}
"""Handlers by function: each returns the result, NotImplemented, or a `Declined`."""
