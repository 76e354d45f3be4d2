"""Linear of a gated product, act(gate) * up, whose gradients are written over gate and up.

The backward of a gated MLP's last linear needs three tensors of tokens x intermediate size from
three others: the product act(gate) * up again (for the weight's gradient), and the gradients of
gate and up. A compiler that computes them in one kernel needs all six at once. Here the kernel is
in place: it reads gate, up and the product's gradient, and writes the gradient of gate, the
gradient of up and the product to the same three buffers.

    gated_linear            linear(act(gate) * up, weight, bias)
    gated_linear_backward   the gradient of the weight; those of gate and up over gate and up

Autograd gives the backward pass copies of gate and up, so other readers never see these writes. If
an activation checkpoint recomputes gate and up for the backward pass, a compiler drops the copies,
because the originals have no other reader.
"""

from __future__ import annotations

from .memory import bytes_after as bytes_after
from .memory import bytes_before as bytes_before
from .memory import transient_bytes as transient_bytes
from .op import ACTIVATIONS as ACTIVATIONS
from .op import ENGINES as ENGINES
from .op import engine_for as engine_for
from .op import gated_linear as gated_linear
from .op import gated_linear_backward as gated_linear_backward
from .op import supports as supports
