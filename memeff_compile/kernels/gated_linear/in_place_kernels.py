# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""A kernel for the gated product, and a kernel for the product's gradients, which writes the
gradients over its inputs.

Every program processes BLOCK numbers: it reads all these numbers before it writes a result, and it
accesses no other numbers. The kernels compute in fp32 and round once; offsets are 64-bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

# 8 elements per thread: 16 bytes in 16 bits.
BLOCK = 1024
WARPS = 4


@triton.jit
def _value_and_slope(g, ACTIVATION: tl.constexpr):
    """Return act(g) and its derivative act'(g), by the same formulas as PyTorch's autograd."""
    if ACTIVATION == "silu":
        s = 1.0 / (1.0 + tl.exp(-g))
        value = g * s
        slope = s * (1.0 + g * (1.0 - s))
    elif ACTIVATION == "gelu":
        below = 0.5 * (1.0 + tl.erf(g * 0.7071067811865476))
        value = g * below
        slope = below + g * (tl.exp(-0.5 * g * g) * 0.3989422804014327)
    elif ACTIVATION == "gelu_tanh":
        # (1 + tanh) / 2 and (1 - tanh^2) / 2 from exp(-2|x|): without overflow or cancellation.
        x = 0.7978845608028654 * (g + 0.044715 * g * g * g)
        shrink = tl.exp(-2.0 * tl.abs(x))
        below = tl.where(x < 0.0, shrink, 1.0) / (1.0 + shrink)
        bend = 2.0 * shrink / ((1.0 + shrink) * (1.0 + shrink))
        value = g * below
        slope = below + g * bend * (0.7978845608028654 * (1.0 + 0.134145 * g * g))
    else:
        tl.static_assert(ACTIVATION == "relu")
        value = tl.where(g <= 0.0, 0.0, g)  # keeps NaN
        slope = tl.where(g <= 0.0, 0.0, 1.0)
    return value, slope


@triton.jit
def _gated_linear_in_place_product_kernel(
    gate_ptr, up_ptr, out_ptr, count, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr
):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < count
    g = tl.load(gate_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(up_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    value, _ = _value_and_slope(g, ACTIVATION)
    tl.store(out_ptr + offs, (value * u).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _gated_linear_in_place_gradients_kernel(
    gate_ptr,  # read, then the gradient of gate
    up_ptr,  # read, then the gradient of up
    grad_ptr,  # gradient of the product, then the product
    count,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < count
    g = tl.load(gate_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(up_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    d = tl.load(grad_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    value, slope = _value_and_slope(g, ACTIVATION)
    grad_gate = d * u * slope
    if ACTIVATION == "relu":
        grad_gate = tl.where(g <= 0.0, 0.0, d * u)  # inf * 0 would be NaN
    tl.store(gate_ptr + offs, grad_gate.to(gate_ptr.dtype.element_ty), mask=mask)
    tl.store(up_ptr + offs, (d * value).to(up_ptr.dtype.element_ty), mask=mask)
    tl.store(grad_ptr + offs, (value * u).to(grad_ptr.dtype.element_ty), mask=mask)
