"""The engine `in_place`: one elementwise Triton kernel for the forward pass and one for the
backward pass.

The engine needs CUDA, sm_80 or later.

The CPU never waits for the GPU, and the engine allocates no memory, so calls can be captured in
CUDA graphs. Expected time of the gradients on an H200 for 16384 x 8192 numbers in bf16: 1.5 GiB are
read and written, which takes 0.38 ms at 4.28 TB/s.
"""

from __future__ import annotations

from torch import Tensor

from .._triton.launch import start
from ..device import on_device


def product(gate: Tensor, up: Tensor, out: Tensor, activation: str) -> None:
    """Write act(gate) * up to ``out``, as `reference.product` does, for bf16, fp16 or fp32."""
    _launch("_gated_linear_in_place_product_kernel", gate, up, out, activation)


def gradients(gate: Tensor, up: Tensor, grad: Tensor, activation: str) -> None:
    """Write the gradient of gate over ``gate``, that of up over ``up``, and the product over
    ``grad``.

    The arguments are those of `reference.gradients`, in bf16, fp16 or fp32.
    """
    _launch("_gated_linear_in_place_gradients_kernel", gate, up, grad, activation)


def _launch(name: str, gate: Tensor, up: Tensor, third: Tensor, activation: str) -> None:
    from . import in_place_kernels as kernels

    count, block = gate.numel(), kernels.BLOCK
    with on_device(gate):
        start(
            *(getattr(kernels, name), (-(-count // block),), gate, up, third, count),
            ACTIVATION=activation,
            BLOCK=block,
            num_warps=kernels.WARPS,
        )
