"""Run a call: choose the implementation, the order of blocks, and when ranks exchange statistics.

An implementation (engine) is a module with three functions: `forward`, `backward` and `total`. Each
takes the arguments of an op's call and returns an object of the class `Walk`. A `Walk` is a loop
over blocks of rows (tokens) or of classes, and the work on each block. If a call returns one loss
per row, two such loops run. The loop of `forward` computes statistics. The loop of `backward`
computes the logits again, and from the logits the gradients. A scalar loss takes only the loop of
`total`, over the rows, if the implementation supports one loop. For each block, this loop computes
the statistics and then the gradients. Between these two steps, ranks with different classes
exchange statistics.

- The implementation `reference` processes blocks of classes for a loss per row. For a scalar loss
  without an adapter, `reference` processes blocks of rows.
- The implementation `library` processes blocks of classes. `library` processes blocks of rows only
  for a scalar loss whose weight is frozen and has an adapter.
- The implementation `hopper` processes blocks of rows. In the backward pass of a loss per row,
  `hopper` may process blocks of classes instead.

An implementation, and with it its kernels, is imported when it runs for the first time.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import compat
from .._gradient_filter.levels import leaves_out, needs_two_walks
from .._head_loss.call import (
    Gradients,
    LossAndGradients,
    Operands,
    RowGradients,
    RowResults,
    Saved,
    ScalarLoss,
    Settings,
    check_range,
    zero_gradients,
)
from .._head_loss.ranks import Ranks, counted_first, own_columns
from ..device import gpu, kernels_serve, on_device, where_it_runs, without_autocast
from .shapes import is_minimal

_FILTERED = ".._gradient_filter.filtered"


class Call(NamedTuple):
    """The properties of a linear + cross entropy call that decide which implementation computes
    it."""

    device: torch.device  # of the hidden states
    dtype: torch.dtype  # likewise
    depth: int  # likewise
    with_top: bool  # whether the likeliest class of a row is asked for
    is_adapted: bool  # whether the output projection has a LoRA adapter
    is_contiguous: bool  # whether rows of the weight follow each other in memory


class Engine(NamedTuple):
    """An implementation of linear + cross entropy: its Python module, and the conditions for its
    use."""

    name: str  # of its module
    how: str
    needs: str
    serves: Callable[[Call], bool]
    # whether one loop computes both a loss that is a single number and the loss's gradients; the
    # arguments are the dtype, whether the output projection has a LoRA adapter, and whether its
    # weight is trained
    has_one_walk: Callable[[torch.dtype, bool, bool], bool]
    # dtypes in which the implementation has a gradient filter
    filters: tuple[torch.dtype, ...] = ()

    def __str__(self) -> str:
        return f"{self.how} ({self.needs})"

    @property
    def module(self) -> Any:
        """Import and return the Python module that contains this implementation of the loss."""
        return importlib.import_module(f".{self.name}", __package__)


def _hopper_serves(call: Call) -> bool:
    return (
        kernels_serve(call.device, call.dtype)
        and call.dtype in (torch.bfloat16, torch.float16)
        and call.depth % 8 == 0
        and not call.with_top
        and not call.is_adapted
        and call.is_contiguous
        and gpu(call.device).is_hopper
    )


ENGINES = {
    engine.name: engine
    for engine in (
        Engine(
            "hopper",
            "products in Triton that keep only statistics and gradients of the logits",
            "CUDA, compute capability 9.0; bf16, fp16",
            _hopper_serves,
            # The range of fp16 is too small for gradients that are scaled afterwards.
            lambda dtype, is_adapted, trains_weight: dtype == torch.bfloat16,
            filters=(torch.bfloat16,),
        ),
        Engine(
            "library",
            "library products in fp32 and one Triton pass per piece of the vocabulary",
            "CUDA, compute capability 8.0 or later; bf16, fp16, fp32",
            lambda call: kernels_serve(call.device, call.dtype),
            # The gradient of a trained weight would be rounded once per block, or stored in fp32.
            lambda dtype, is_adapted, trains_weight: is_adapted and not trains_weight,
            filters=(torch.bfloat16,),
        ),
        Engine(
            "reference",
            "plain PyTorch, piece by piece over the vocabulary",
            "any device, also fp64",
            lambda call: True,
            lambda dtype, is_adapted, trains_weight: not is_adapted,
        ),
    )
}
"""The engines by their names; the first one that supports a call computes it.

"hopper" comes before "library", although "library" supports the same calls: at 8192 x 2304 x 256000
on an H200 it takes 46.0 ms in one walk and 60.9 in two (`nvidia-h200/gradients-in-forward.jsonl`),
"library" 66.2 (`nvidia-h200/linear_cross_entropy.jsonl`, "memeff H, workspace auto").
"""


def engine_for(
    device: torch.device,
    dtype: torch.dtype,
    depth: int = 8,
    *,
    with_top: bool = False,
    is_adapted: bool = False,
    is_contiguous: bool = True,
) -> str:
    """Return the name of the implementation for a call of the loss op: a key of `ENGINES`.

    `device`, `dtype` and `depth`, the hidden size, are those of the hidden states. `with_top` says
    whether the call requests the likeliest class of each row. `is_adapted` says whether the output
    projection has a LoRA adapter. `is_contiguous` says whether rows of the weight follow each other
    in memory.
    """
    call = Call(device, dtype, depth, with_top, is_adapted, is_contiguous)
    return next(name for name, engine in ENGINES.items() if engine.serves(call))


def engine_of(given: Operands, *, with_top: bool = False) -> Engine:
    """Return the implementation that computes a call with the given flattened operands."""
    hidden = given.hidden
    name = engine_for(
        *(hidden.device, hidden.dtype, hidden.shape[-1]),
        with_top=with_top,
        is_adapted=given.low is not None,
        is_contiguous=is_read_in_tiles(given.weight),
    )
    return ENGINES[name]


def is_read_in_tiles(weight: Tensor) -> bool:
    """Return whether the GPU can load tiles of a weight through a descriptor."""
    return (
        weight.stride() == (weight.shape[1], 1)
        and compat.is_aligned(weight)
        and weight.shape[0] < 2**30
    )


def is_faster_in_one_walk(has_kernels: bool) -> bool:
    """Return whether a scalar loss and its gradients are faster in one loop over blocks of rows
    (tokens) than in two loops.

    Two loops are a forward pass and a backward pass. `has_kernels` says whether an implementation
    with Triton kernels computes the loss. One loop takes three matrix products, two loops
    take four. On an H200, one loop took 46.0 ms and two loops took 60.9 ms
    (`nvidia-h200/gradients-in-forward.jsonl`). The call had 8192 rows, a hidden size of 2304 and
    256000 classes. For the implementation `reference`, in plain PyTorch, the speed was not
    measured.
    """
    return has_kernels


@compat.constant_in_traces
def makes_gradients_in_forward(
    device: torch.device,  # of the hidden states
    dtype: torch.dtype,  # likewise
    depth: int,  # likewise
    *,
    gradient_filter: str = "exact",  # as for `linear_cross_entropy`
    filter_parts: str = "both",  # likewise
    workspace: int = 0,  # likewise
) -> bool:
    """Return whether to compute a scalar loss and its gradients in one loop over blocks of tokens.

    Three settings need a second loop that computes the logits again:

    - the gradient filter `published`, which drops small gradients as in the Cut Cross-Entropy
      paper;
    - a gradient filter only for the hidden states or only for the weight;
    - a limit of temporary memory (`workspace`) from 1 byte to 8 MiB, unless the gradient filter
      `mass` or `block` drops unlikely classes. The filters drop classes only if the hidden size is
      at least 2048.

    For fp16, the result is false, because the range of fp16 is too small for gradients that are
    scaled afterwards.
    """
    if filter_parts != "both" or dtype == torch.float16:
        return False
    if gradient_filter == "published":
        return False
    if is_minimal(workspace) and not leaves_out(gradient_filter, depth):
        return False
    name = engine_for(device, dtype, depth)
    if name == "reference" and gradient_filter != "exact":
        return False
    return is_faster_in_one_walk(name != "reference") and ENGINES[name].has_one_walk(
        dtype, False, True
    )


@compat.constant_in_traces
def makes_gradients_in_forward_adapted(
    device: torch.device,  # of the hidden states
    dtype: torch.dtype,  # likewise
    *,
    trains_weight: bool,  # whether the output projection's own weight has a gradient
    workspace: int = 0,  # as for the op
) -> bool:
    """Return whether one loop over blocks of tokens computes a scalar loss and its gradients.

    The output projection has a LoRA adapter. The result is false if the projection's own weight
    trains. In one loop, the weight's gradient would be rounded once per block, or stored in fp32.
    For fp16, the result is false, because the range of fp16 is too small for gradients that are
    scaled afterwards.
    """
    if trains_weight or is_minimal(workspace) or dtype == torch.float16:
        return False
    return is_faster_in_one_walk(kernels_serve(device, dtype))


@compat.constant_in_traces
def makes_gradients_in_forward_over_ranks(
    device: torch.device,  # as for `makes_gradients_in_forward`
    dtype: torch.dtype,  # likewise
    depth: int,  # likewise
    *,
    gradient_filter: str = "exact",  # likewise
    filter_parts: str = "both",  # likewise
    workspace: int = 0,  # likewise
) -> bool:
    """Return whether one loop over blocks of tokens computes a scalar loss and its gradients.

    The output projection is split over ranks. All ranks get the same result, whatever their GPUs.
    The result is false with a gradient filter, which drops small gradients of the logits. A filter
    chooses these gradients by the softmax over all classes, which a single loop knows too late.
    """
    if gradient_filter != "exact" or filter_parts != "both" or is_minimal(workspace):
        return False
    if where_it_runs(device).type == "cuda":
        return dtype == torch.bfloat16 and depth % 8 == 0
    return dtype != torch.float16


def forward(engine: Any, given: Operands, settings: Settings) -> RowResults:
    """Compute each row's loss, log-sum-exp and requested statistics.

    A row is a token. `engine` is one implementation of the loss, such as the module `hopper`. An
    implementation contains loops over blocks of rows or of classes.
    """
    with on_device(given.hidden):
        walk = engine.forward(given, settings)
        for block in walk.blocks():
            walk.statistics(block)
        found: RowResults = walk.results()
    return found


def backward(
    engine: Any,
    grads: RowGradients,
    given: Operands,
    saved: Saved,
    settings: Settings,
    output_mask: Sequence[bool],
) -> Gradients:
    """Compute the loss's gradients that `output_mask` requests, such as the weight's gradient.

    `engine` is one implementation of the loss, such as the module `hopper`. An implementation
    contains loops over blocks of rows (tokens) or of classes. Each block of the loop adds its part
    to the gradients.
    """
    with on_device(given.hidden):
        walk = engine.backward(grads, given, saved, settings, output_mask)
        for block in walk.blocks():
            walk.gradients(block)
        found: Gradients = walk.results()
    return found


def total(engine: Any, given: ScalarLoss) -> LossAndGradients:
    """Compute a scalar loss and its gradients in one loop over blocks of rows.

    A row is a token. `engine` is one implementation of the loss, such as the module `hopper`. An
    implementation contains loops over blocks of rows or of classes. If ranks split the classes,
    each block also has a step `meet`. In this step, ranks exchange the log-sum-exps and losses of
    the block's rows.
    """
    with on_device(given.hidden):
        walk = engine.total(given)
        for block in walk.blocks():
            walk.statistics(block)
            if given.ranks is not None:
                walk.meet(block, given.ranks)
            walk.gradients(block)
        found: LossAndGradients = walk.results()
    return found


def walks_of(engine: Engine, given: Operands, settings: Settings) -> Any:
    """Return an object with the loops of one implementation of the loss, over blocks of rows
    (tokens) or of classes.

    The object is usually the implementation's module. If a gradient filter drops small gradients of
    the call's logits, the object has loops that apply this filter."""
    hidden, weight = given.hidden, given.weight
    is_served = hidden.dtype in engine.filters and given.low is None and is_read_in_tiles(weight)
    if is_served and leaves_out(settings.gradient_filter, hidden.shape[-1]):
        return importlib.import_module(_FILTERED, __package__).Walks(engine.module)
    return engine.module


def row_results(given: Operands, settings: Settings) -> RowResults:
    """Compute each row's loss, log-sum-exp and requested statistics, for operands with any leading
    dimensions."""
    target = given.target
    if target.numel() == 0:
        return RowResults.new(given.hidden, target.shape, settings)
    with without_autocast(given.hidden.device.type):
        flat = given.flat()
        check_range(flat.target, given.weight.shape[0], settings.ignore_index)
        engine = engine_of(flat, with_top=settings.with_top)
        found = forward(engine.module, flat, settings)
    parts = zip(found, settings.wanted, strict=True)
    return RowResults(*(part.view(target.shape) if wanted else part for part, wanted in parts))


def row_gradients(
    grads: RowGradients,
    given: Operands,
    saved: Saved,
    settings: Settings,
    output_mask: Sequence[bool],
) -> Gradients:
    """Compute the gradients that `output_mask` requests, for flattened operands."""
    rows = given.target.numel()
    if rows == 0:
        return zero_gradients(given, output_mask)
    with without_autocast(given.hidden.device.type):
        asked = zip(grads, settings.wanted, strict=False)
        grads = RowGradients(*(grad.reshape(rows if wanted else 0) for grad, wanted in asked))
        entropy = saved.entropy.reshape(rows if settings.with_entropy else 0)
        saved, flat = Saved(saved.lse.reshape(rows), entropy), given.flat()
        engine = engine_of(flat, with_top=settings.with_top)
        walks = walks_of(engine, flat, settings)
        return backward(walks, grads, flat, saved, settings, output_mask)


def loss_and_gradients(given: ScalarLoss) -> LossAndGradients:
    """Compute the loss and the gradients of flattened inputs.

    If ranks split the classes, the caller has already checked the targets."""
    operands = given.operands
    if given.hidden.shape[0] == 0:
        # A total of 0, or nan where a mean of no rows is asked for.
        nothing = given.total_of(given.hidden.new_zeros(0, dtype=given.wide))
        return LossAndGradients(nothing, *zero_gradients(operands, given.output_mask))
    if given.ranks is None:
        check_range(given.target, given.weight.shape[0], given.ignore_index)
    engine, is_adapted = engine_of(operands), given.low is not None
    of_bias = given.bias is not None and given.output_mask[2]
    depth = given.hidden.shape[1]
    needs_two = needs_two_walks(given.gradient_filter, depth, of_bias=of_bias)
    if not needs_two and engine.has_one_walk(given.hidden.dtype, is_adapted, given.output_mask[1]):
        return total(walks_of(engine, operands, given.settings), given)
    return in_two_walks(walks_of(engine, operands, given.settings), given)


def in_two_walks(engine: Any, given: ScalarLoss) -> LossAndGradients:
    """Compute a scalar loss, and its gradients, by an implementation's forward pass and then its
    backward pass.

    If ranks split the classes, they exchange log-sum-exps and losses between the two passes, once
    per block of rows (tokens).
    """
    operands, settings, ranks = given.operands, given.settings, given.ranks
    if ranks is not None:
        target, here, elsewhere = own_columns(given.target)
        operands = operands._replace(target=target)
    found = forward(engine, operands, settings)
    nll, lse = found.nll, found.lse
    of_nll = given.row_gradients(nll.dtype)
    grads = RowGradients(of_nll, torch.zeros_like(lse), found.logit_sum, found.entropy)
    if ranks is not None:
        # The rank that has the target raises the target's logit; every rank lowers the logits of
        # all its classes.
        grads = grads._replace(nll=of_nll.where(here, 0), lse=of_nll.where(elsewhere, 0))
        met = _met(ranks, lse, nll.where(here, 0), counted_first(given.target))
        lse, nll = (each.where(here | elsewhere, 0) for each in met)
    saved = Saved(lse, found.entropy)
    gradients = backward(engine, grads, operands, saved, settings, given.output_mask)
    return LossAndGradients(given.total_of(nll), *gradients)


def _met(ranks: Ranks, lse: Tensor, nll: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
    """Exchange the rows' log-sum-exps and losses with the other ranks, block by block.

    `lse` and `nll` are over this rank's classes. The blocks contain the rows in the order `order`,
    which is the same on all ranks. Return the log-sum-exps and losses over all classes."""
    whole = torch.empty_like(lse), torch.empty_like(nll)
    for at in order.split(ranks.height):
        whole[0][at], whole[1][at] = ranks.meet(lse[at], nll[at], ranks.owner[at], len(at))
    return whole


def kept_rows(target: Tensor, settings: Settings, *, forward: bool) -> Tensor | None:
    """Return the indices of the rows that a call computes, or None if the call computes all rows.

    Even if some rows are ignored, a call computes all rows in two cases:

    - the caller requests a statistic of ignored rows;
    - the tensors are not on a CPU. To leave out rows, the CPU would have to wait until the GPU has
      counted them.
    """
    wants_all = settings.reads_ignored_rows if forward else settings.keeps_ignored_rows
    if wants_all or settings.ignore_index is None or target.device.type != "cpu":
        return None
    is_kept = target != settings.ignore_index
    return None if bool(is_kept.all()) else is_kept.nonzero().squeeze(1)
