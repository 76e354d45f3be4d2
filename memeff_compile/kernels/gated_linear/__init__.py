"""A linear layer applied to the gated product act(gate) * up, with a backward pass that works in
place.

The backward pass of a gated MLP's last linear computes three tensors of size (tokens, intermediate
size) from three others. The three inputs are gate, up and the product's gradient. The three results
are the product act(gate) * up (for the weight's gradient) and the gradients of gate and up. In
Inductor's fused kernel, all six tensors exist at once. This op's kernel works in place: it writes
its three results over its three inputs.

- `gated_linear` computes linear(act(gate) * up, weight, bias).
- `gated_linear_backward` returns the gradient of the weight, and overwrites gate and up with their
  gradients.

Autograd passes copies of gate and up to the backward pass, so other code that reads gate and up
never sees these writes. If an activation checkpoint recomputes gate and up for the backward pass, a
compiler removes the copies, because no other op reads the originals.
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
