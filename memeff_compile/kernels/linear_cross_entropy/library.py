"""The fused loss's implementation `library`: cuBLAS products, and a Triton kernel after each.

The forward pass multiplies the hidden states by the weight's rows for one strip (range) of classes
after another. The products are fp32, even for 16-bit inputs. After each strip, a kernel merges its
products into a running maximum and a running sum of exponentials per row (token).

The backward pass processes one block of classes after another, and computes the products of a block
again, strip by strip. A kernel turns each strip into the logits' gradient G in the input dtype.
Then cuBLAS writes the product of G and the hidden states into the block's rows of the weight's
gradient. This product is written once, without an fp32 copy. Then cuBLAS adds the product of G and
the weight's rows to the hidden states' gradient (dE) in fp32. For 16-bit inputs, the logits'
gradient G has its own buffer. Writing G over the fp32 products of a strip (range) of classes would
save no memory. For N rows and a block of W classes, the buffer of G takes 2NW bytes. The fp32
products of a strip of W / 2 classes take another 2NW bytes. If G overwrote the products, the strip
would be as wide as the block, and its products would take 4NW bytes. The results would then also
depend on the order in which warps read and write.

For a scalar loss of a frozen output projection with a LoRA adapter, this implementation processes
blocks of rows, not blocks of classes. For each block of rows, it multiplies hidden states and
weight once, for all classes, and adds the adapter's product `low @ up.T`. A kernel computes the
rows' statistics from this sum, and then the logits' gradient G from the same sum. G times the
weight is the gradient of the block's hidden states (dE). G times `up` is the gradient of the
block's `low` (the adapter's input to `up`). The gradient of `up` is summed over the blocks in fp32.

The CPU never waits for the GPU and reads no value from it. Which kernels are launched does not
depend on the values in the tensors. So a CUDA graph can capture the calls. The kernels sum without
atomic operations.

In the times below, N is the number of rows (tokens), D the hidden size and V the number of classes.
In 16 bits, an H200 does at most 790e12 operations per second. An H200 reads or writes 4.28e12
bytes per second. On an H200, forward plus backward pass take at least the sum of the first three
times below (in s):
- 4 * 2NDV / 790e12 for four products: logits (twice), weight's gradient, hidden states' gradient;
- 10 NV / 4.28e12 to read the fp32 logits twice and write their gradient once (16-bit inputs);
- 8 ND * blocks / 4.28e12 to read and write the hidden states' gradient once per block;
- 8 NV / 4.28e12 to write the fp32 logits twice, partly while other logits are computed.

For N, D, V = 16384, 2048, 128256, the four times of this list are 43.6, 4.9, 2.0 and 3.9 ms. For N,
D, V = 8192, 2304, 256000, the times are 48.9, 4.9, 2.4 and 3.9 ms. A frozen projection with an
adapter takes at least 2 * 2NDV / 790e12 seconds for products. In 16 bits, the memory traffic takes
at least 28 NV / 4.28e12 seconds. The fp32 logits are written, then the adapter's product is added
to them, and then two kernels read them (20 NV bytes). The gradient of the logits is written once
and read in three products (8 NV bytes). For N, D, V = 8192, 4096, 128256, the products take at
least 21.8 ms. The memory traffic takes at least 6.9 ms.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .._head_loss.call import (
    Gradients,
    LossAndGradients,
    Operands,
    RowGradients,
    RowResults,
    Saved,
    ScalarLoss,
    Settings,
    vector,
)
from .._head_loss.products import product_into
from .._head_loss.shapes import spans, window
from .._head_loss.walks import Block, Differentiating, Statistics
from .._triton.launch import start
from ..device import processors
from . import library_kernels as kernels
from .shapes import (
    LIBRARY_STATE,
    LIBRARY_WARPS,
    Widths,
    library_block,
    library_rows,
    library_widths,
)


class Forward(Statistics):
    """A forward pass over blocks of classes, which keeps a few numbers per row (token)."""

    def __init__(self, given: Operands, settings: Settings) -> None:
        self.given, self.settings = _readable(given), settings
        hidden, rows, self.extent = self.given.hidden, len(given.hidden), len(given.weight)
        self.step = _widths(self.given, settings).strip
        self.found = RowResults.new(hidden, (rows,), settings)
        self.state = hidden.new_empty((rows, LIBRARY_STATE), dtype=torch.float32)
        self.strip = hidden.new_empty(rows * min(self.step, self.extent), dtype=torch.float32)

    def statistics(self, block: Block) -> None:
        s = window(self.strip, len(self.given.hidden), block.stop - block.first)
        _products(self.given, block.first, block.stop, s)
        _merge(s, self.given, self.state, self.found, block.first, self.settings)

    def results(self) -> RowResults:
        return self.found


class Backward(Differentiating):
    """A backward pass over blocks of classes, which computes the logits of each block again.

    The logits are computed in strips, which are ranges of a block's classes.
    """

    def __init__(
        self,
        grads: RowGradients,
        given: Operands,
        saved: Saved,
        settings: Settings,
        output_mask: Sequence[bool],
    ) -> None:
        bias, self.settings = given.bias, settings
        self.given = given = _readable(given)
        hidden, low, up = given.hidden, given.low, given.up
        self.grads = RowGradients(*(grad.contiguous() for grad in grads))
        self.saved = Saved(saved.lse.contiguous(), saved.entropy.contiguous())
        rows, self.extent = len(hidden), len(given.weight)
        self.strip, self.step = _widths(given, settings)
        of_hidden, of_weight, of_bias, of_low, of_up = (*output_mask, False, False)[:5]
        wide = torch.float32
        self.grad_hidden = hidden.new_empty(hidden.shape, dtype=wide) if of_hidden else None
        self.grad_weight = torch.empty_like(given.weight) if of_weight else None
        self.grad_bias = torch.empty_like(bias) if of_bias and bias is not None else None
        self.grad_low = self.grad_up = None
        if low is not None and up is not None:
            self.grad_low = low.new_empty(low.shape, dtype=wide) if of_low else None
            self.grad_up = torch.empty_like(up) if of_up else None
        # For a LoRA adapter of another dtype the gradients of the logits are not rounded.
        self.is_apart = low is not None and low.dtype != hidden.dtype
        self.products = hidden.new_empty(rows * min(self.strip, self.extent), dtype=wide)
        self.buffer = self.products
        if hidden.dtype != wide:
            self.buffer = hidden.new_empty(rows * min(self.step, self.extent))

    def gradients(self, block: Block) -> None:
        (_, first, stop), given = block, self.given
        hidden, weight, rows = given.hidden, given.weight, len(given.hidden)
        g = window(self.buffer, rows, stop - first)
        for begin, end in spans(first, stop, self.strip):
            s = window(self.products, rows, end - begin)
            _products(given, begin, end, s)
            g_strip = g[:, begin - first : end - first]
            out = s if self.is_apart else g_strip
            _differentiate(s, out, given, self.saved, self.grads, begin, self.settings)
            if self.is_apart:
                self._add_low_rank(s, begin)
                g_strip.copy_(s)
        if not self.is_apart:
            self._add_low_rank(g, first)
        if self.grad_weight is not None:
            torch.mm(g.t(), hidden, out=self.grad_weight[first:stop])
        if self.grad_hidden is not None:
            product_into(g, weight[first:stop], self.grad_hidden, accumulate=first > 0)
        if self.grad_bias is not None:
            self.grad_bias[first:stop] = g.sum(0, dtype=torch.float32)

    def _add_low_rank(self, g: Tensor, first: int) -> None:
        stop, low, up = first + g.shape[1], self.given.low, self.given.up
        if self.grad_up is not None and low is not None:
            torch.mm(g.t(), low, out=self.grad_up[first:stop])
        if self.grad_low is not None and up is not None:
            product_into(g, up[first:stop], self.grad_low, accumulate=first > 0)

    def results(self) -> Gradients:
        hidden, low = self.grad_hidden, self.grad_low
        return Gradients(
            None if hidden is None else hidden.to(self.given.hidden.dtype),
            self.grad_weight,
            self.grad_bias,
            None if low is None or self.given.low is None else low.to(self.given.low.dtype),
            self.grad_up,
        )


class Total(Statistics, Differentiating):
    """The loss and gradients of a frozen projection with a LoRA adapter, in blocks of rows."""

    def __init__(self, given: ScalarLoss) -> None:
        self.request, self.given = given, _readable(given.operands)
        hidden, weight, low, up = (*self.given[:2], *self.given[-2:])
        assert low is not None
        assert up is not None
        of_hidden, of_weight, of_bias, of_low, of_up = given.output_mask
        assert not of_weight, "only frozen heads are served"
        self.settings, dtype, vocab = given.settings, hidden.dtype, len(weight)
        self.extent = len(hidden)
        self.step = int(library_rows(self.extent, vocab, given.workspace, dtype.itemsize))
        self.is_apart = low.dtype != dtype

        def zeros(*sizes: int) -> Tensor:
            return hidden.new_zeros(sizes, dtype=torch.float32)

        self.factors, self.nll = given.row_gradients(torch.float32), zeros(self.extent)
        self.grad_hidden = hidden.new_empty(hidden.shape) if of_hidden else None
        self.grad_low = low.new_empty(low.shape) if of_low else None
        self.sums = zeros(*up.shape) if of_up else None
        self.bias_sums = zeros(vocab) if of_bias and given.bias is not None else None
        self.strip = hidden.new_empty(self.step * vocab, dtype=torch.float32)
        is_wide = dtype == torch.float32
        self.narrow = self.strip if is_wide else hidden.new_empty(self.step * vocab)
        self.state, self.nothing = zeros(self.step, LIBRARY_STATE), zeros(0)
        self.silent = zeros(self.step)

    def statistics(self, block: Block) -> None:
        here, rows = slice(block.first, block.stop), block.stop - block.first
        hidden, weight, _, target, _, low, _ = self.given
        assert low is not None
        self.here = self.given._replace(hidden=hidden[here], target=target[here], low=low[here])
        self.s, self.g = (window(each, rows, len(weight)) for each in (self.strip, self.narrow))
        _products(self.here, 0, len(weight), self.s)
        self.found = RowResults.new(self.here.hidden, (rows,), self.settings)
        _merge(self.s, self.here, self.state, self.found, 0, self.settings)
        self.nll[here] = self.found.nll

    def gradients(self, block: Block) -> None:
        here, (s, g) = slice(block.first, block.stop), (self.s, self.g)
        silent, nothing = self.silent[: len(s)], self.nothing
        grads = RowGradients(self.factors[here], silent, nothing, nothing)
        saved, out = Saved(self.found.lse, self.found.entropy), s if self.is_apart else g
        _differentiate(s, out, self.here, saved, grads, 0, self.settings)
        low, up = self.here.low, self.here.up
        assert low is not None
        assert up is not None
        if self.grad_low is not None:
            torch.mm(out, up, out=self.grad_low[here])
        if self.sums is not None:
            product_into(out.t(), low, self.sums, accumulate=True)
        if self.bias_sums is not None:
            self.bias_sums += out.sum(0, dtype=torch.float32)
        if self.grad_hidden is not None:
            if out is not g:
                g.copy_(out)
            torch.mm(g, self.here.weight, out=self.grad_hidden[here])

    def results(self) -> LossAndGradients:
        bias, up = self.request.bias, self.given.up
        assert up is not None
        of_bias = None
        if self.bias_sums is not None and bias is not None:
            of_bias = self.bias_sums.to(bias.dtype)
        of_up = None if self.sums is None else self.sums.to(up.dtype)
        gradients = Gradients(self.grad_hidden, None, of_bias, self.grad_low, of_up)
        return LossAndGradients(self.request.total_of(self.nll), *gradients)


forward, backward, total = Forward, Backward, Total


def _products(given: Operands, first: int, stop: int, out: Tensor) -> None:
    """Write the products of the hidden states with the weight's rows for the classes [first, stop)
    into the fp32 buffer `out`."""
    product_into(given.hidden, given.weight[first:stop].t(), out)
    if given.low is not None and given.up is not None:
        product_into(given.low, given.up[first:stop].t(), out, accumulate=True)


def _merge(
    s: Tensor, given: Operands, state: Tensor, found: RowResults, first: int, settings: Settings
) -> None:
    """Merge the products `s` of one strip (range) of classes into the running statistics `state` of
    the rows (tokens).

    `s` contains the products of the hidden states and the weight's rows of these classes, in fp32.
    If there is a LoRA adapter, `s` includes the adapter's products. The strip starts at the class
    `first`. `state` has `LIBRARY_STATE` numbers for each row. After the last strip of classes, the
    function also writes each row's results, such as the loss, to `found`.
    """
    (_, weight, bias, target, column_weight, *_), (rows, width) = given, s.shape
    start(
        kernels._linear_cross_entropy_library_statistics_kernel,
        (rows,),
        *(s, s.stride(0), bias, column_weight, target, state, found.nll, found.lse),
        found.logit_sum if settings.with_logit_sum else None,
        *(found.entropy if settings.with_entropy else None,),
        *(found.top if settings.with_top else None,),
        (first, width, len(weight), settings.ignore_index or 0, settings.scale, settings.softcap),
        **given.flags(settings),
        HAS_IGNORE=settings.ignore_index is not None,
        WITH_LSE=settings.with_lse,
        WITH_TOP=settings.with_top,
        BLOCK=library_block(width),
        num_warps=LIBRARY_WARPS,
    )


def _differentiate(
    s: Tensor,
    g: Tensor,
    given: Operands,
    saved: Saved,
    grads: RowGradients,
    first: int,
    settings: Settings,
) -> None:
    """Write the loss's gradients with respect to the products `s` to the buffer `g`.

    `s` contains the products of the hidden states and a range of the weight's rows. `g` has the
    input dtype and unit stride along columns, and may be `s` itself. `grads` contains the gradients
    of the total loss with respect to the op's results for each row, such as the log-sum-exp. These
    gradients are contiguous fp32 vectors.
    """
    (_, _, bias, target, column_weight, *_), (rows, width) = given, s.shape
    block = library_block(width)
    start(
        kernels._linear_cross_entropy_library_gradient_kernel,
        (rows, -(-width // block)),
        *(s, s.stride(0), g, g.stride(0), bias, column_weight, target, saved.lse),
        *(saved.entropy if settings.with_entropy else None, grads.nll, grads.lse),
        grads.logit_sum if settings.with_logit_sum else None,
        grads.entropy if settings.with_entropy else None,
        (first, width, settings.ignore_index or 0, settings.scale, settings.softcap),
        **given.flags(settings),
        HAS_IGNORE=settings.ignore_index is not None,
        WITH_LSE=settings.with_lse,
        BLOCK=block,
        num_warps=LIBRARY_WARPS,
    )


def _widths(given: Operands, settings: Settings) -> Widths:
    hidden = given.hidden
    sizes = (*hidden.shape, len(given.weight), settings.workspace, hidden.element_size())
    return library_widths(*sizes, processors(hidden.device))


def _readable(given: Operands) -> Operands:
    """Return a call's operands in a memory layout that Triton kernels and cuBLAS can read.

    Operands with other strides are copied here, once per call of the loss op.
    """
    hidden, weight, bias, target, column_weight, low, up = given
    return Operands(
        hidden if 1 in hidden.stride() else hidden.contiguous(),
        weight,
        vector(bias, None),
        target.contiguous(),
        vector(column_weight, torch.float32),
        low if low is None or 1 in low.stride() else low.contiguous(),
        up,
    )
