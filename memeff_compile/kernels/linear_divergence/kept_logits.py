"""The engine `kept_logits`: products by cuBLAS, and two Triton passes over the logits.

For a block of rows, each side's products come strip by strip in fp32. The first pass keeps them as
fp16 relative to the maximum of 2048 columns, with that maximum and the sum of exponentials in fp32.
So the error of a kept logit is at most 2^-12 of its distance from the maximum, and that of a likely
class is negligible. In bf16, as a model computes them, logits have an error of 2^-9 of their size.
The second pass reads both sides of a row, computes its sums in fp32, and writes the gradient over
the student's logits. Inputs of 32 bits are kept in 32 bits.

The teacher's logits need memory only until the gradient is computed. `call.SLOTS` says how the
gradients of four blocks get into adjacent memory, so that the weight's gradient is summed in few
steps. Each step rounds it once, as in `linear_cross_entropy`.

No call waits for the GPU or reads a value on the host, and no sum uses atomics.

Expected time on an H200 at 8192 x 4096 x 128256, one number with gradients: four products at 790e12
take 43.6 ms; 6 bytes per logit of each side go through the L2 cache, 2 are written and read, and
the gradient is written and read twice: 14 NV bytes at 4.28e12 are 3.4 ms, and the weight's gradient
is read and written three times, 1.5 ms.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .._triton.launch import run_kernel
from . import kept_logits_kernels as kernels
from .call import CHUNK, STRIP, Found, Request, Slots, slots_for, spans, wanted


def run(given: Request, factors: Tensor | None, mask: Sequence[bool]) -> Found:
    """Compute a number per row, and the gradients of the rows' sum weighted by `factors`."""
    walk = _Walk(given, factors, mask)
    slots, rows = walk.slots, given.rows
    for first in range(0, rows, slots.together):
        stop = min(first + slots.together, rows)
        for slot, (begin, end) in enumerate(spans(stop - first, slots.rows)):
            walk.statistics(slot, first + begin, first + end)
        walk.products(first, stop)
    return walk.found()


class _Walk:
    """The buffers of a call, and the computation of its blocks of rows."""

    def __init__(self, given: Request, factors: Tensor | None, mask: Sequence[bool]) -> None:
        self.given = given = _readable(given)
        hidden, weight = given.hidden, given.weight
        dtype, vocab = hidden.dtype, given.vocab
        itemsize = hidden.itemsize
        self.slots: Slots = slots_for(given.rows, vocab, given.workspace, itemsize)
        self.factors = None
        if factors is not None:
            self.factors = (factors.to(torch.float32) * given.scale).contiguous()
        self.of_hidden, self.of_weight, self.of_bias = wanted(given, factors, mask)
        self.rows = hidden.new_empty(given.rows, dtype=torch.float32)
        self.grad_hidden = hidden.new_empty(hidden.shape) if self.of_hidden else None
        self.grad_weight = weight.new_empty(weight.shape) if self.of_weight else None
        self.grad_bias = hidden.new_zeros(vocab, dtype=torch.float32) if self.of_bias else None
        kept = torch.float32 if itemsize == 4 else torch.float16
        height = self.slots.rows
        self.kept = hidden.new_empty((height * self.slots.number, vocab), dtype=kept)
        self.gradient = self.kept.view(dtype)
        self.strip = hidden.new_empty(height * min(STRIP, vocab), dtype=torch.float32)
        chunks = -(-vocab // CHUNK)
        # of each side, row and chunk: the maximum and the sum of exponentials relative to it
        self.sums = hidden.new_empty((2, height, 2, chunks), dtype=torch.float32)

    def statistics(self, slot: int, first: int, stop: int) -> None:
        """Compute the logits of some rows, their results and their gradient, into a slot."""
        given, height = self.given, self.slots.rows
        here, rows = slice(first, stop), stop - first
        student = self.kept[slot * height : slot * height + rows]
        teacher = self.kept[(slot + 1) * height : (slot + 1) * height + rows]
        self._keep(0, student, given.hidden[here], given.weight, given.bias, given.scale)
        self._keep(
            *(1, teacher, given.teacher[here], given.teacher_weight, given.teacher_bias),
            given.teacher_scale,
        )
        coefficients = given.coefficients
        gradient = self.gradient[slot * height : slot * height + rows]
        run_kernel(
            kernels._linear_divergence_kept_logits_gradient_kernel,
            (rows,),
            *(student, teacher, self.sums, gradient, given.vocab, self.sums.stride(0)),
            *(None if self.factors is None else self.factors[here], self.rows[here]),
            tuple(coefficients),
            HAS_MIXTURE=coefficients.has_mixture,
            HAS_CENTRE=coefficients.has_centre,
            HAS_GRADIENT=self.factors is not None,
            CHUNK=CHUNK,
            CHUNKS=self.sums.shape[-1],
            PADDED=_power_of_two(self.sums.shape[-1]),
            num_warps=8,
        )

    def _keep(
        self,
        side: int,
        out: Tensor,
        rows: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        scale: float,
    ) -> None:
        vocab, width = self.given.vocab, STRIP if weight is not None else self.given.vocab
        for first, stop in spans(vocab, width):
            strip = rows
            if weight is not None:
                strip = self.strip[: len(rows) * (stop - first)].view(len(rows), stop - first)
                _product(rows, weight[first:stop].t(), strip)
            run_kernel(
                kernels._linear_divergence_kept_logits_keep_kernel,
                (len(rows), -(-(stop - first) // CHUNK)),
                *(strip, strip.stride(0), bias, out, out.stride(0), self.sums[side]),
                *(first, stop, scale),
                CHUNK=CHUNK,
                CHUNKS=self.sums.shape[-1],
                HAS_BIAS=bias is not None,
                num_warps=4,
            )

    def products(self, first: int, stop: int) -> None:
        """Multiply the gradients of some blocks of rows by the weight and by the hidden states."""
        gradient, given = self.gradient[: stop - first], self.given
        if self.grad_hidden is not None:
            torch.mm(gradient, given.weight, out=self.grad_hidden[first:stop])
        if self.grad_weight is not None:
            pair = gradient.t(), given.hidden[first:stop]
            if first == 0:
                torch.mm(*pair, out=self.grad_weight)
            else:
                torch.addmm(self.grad_weight, *pair, out=self.grad_weight)
        if self.grad_bias is not None:
            self.grad_bias += gradient.sum(0, dtype=torch.float32)

    def found(self) -> Found:
        """Return the results."""
        of_bias = None
        if self.grad_bias is not None and self.given.bias is not None:
            of_bias = self.grad_bias.to(self.given.bias.dtype)
        return Found(self.rows, self.grad_hidden, self.grad_weight, of_bias)


def scale_into(gradient: Tensor, by: Tensor, out: Tensor) -> None:
    """Write `gradient * by` to `out`, which may be `gradient`, in fp32 and rounded once."""
    count = gradient.numel()
    block = 4096
    run_kernel(
        kernels._linear_divergence_kept_logits_scale_kernel,
        (-(-count // block),),
        *(gradient, by, out, count),
        BLOCK=block,
        num_warps=8,
    )


def _product(left: Tensor, right: Tensor, out: Tensor) -> None:
    """Write left @ right into fp32 `out` without rounding to 16 bits.

    On other devices, products of 16-bit inputs have no fp32 output, so the inputs are widened
    first, for tests under the interpreter.
    """
    if left.dtype == torch.float32 or not left.is_cuda:
        torch.mm(left.float(), right.float(), out=out)
    else:
        torch.mm(left, right, out_dtype=torch.float32, out=out)


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()


def _readable(given: Request) -> Request:
    """Return operands that kernels and cuBLAS can read; copies are made here, once per call."""
    hidden, teacher = given.hidden, given.teacher
    bias, teacher_bias = given.bias, given.teacher_bias
    return given._replace(
        hidden=hidden if 1 in hidden.stride() else hidden.contiguous(),
        teacher=teacher if teacher.stride(1) == 1 else teacher.contiguous(),
        bias=None if bias is None else bias.contiguous(),
        teacher_bias=None if teacher_bias is None else teacher_bias.contiguous(),
    )
