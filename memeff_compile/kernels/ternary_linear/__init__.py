"""Linears with 2-bit ternary weights, and 8-bit or 4-bit activations (BitNet b1.58, BitNet a4.8).

In a model trained with ternary weights, each weight matrix has entries -1, 0 and 1 and one scale.
Activations are integers with one scale per token. Without the ops of this package, a compiler would
multiply dense bf16 matrices.

- `ternary_linear_pack` encodes weights as 2-bit codes, four to a byte.
- `ternary_linear_repack` converts weights from the layout of transformers' BitNet checkpoints to
  these 2-bit codes.
- `ternary_linear_quantize` encodes tokens as int8 codes with one scale per token.
- `ternary_linear` multiplies tokens by one or more packed matrices, for inference.
- `ternary_linear_product` multiplies encoded tokens by packed matrices, with straight-through
  gradients.
- `ternary_linear_product_backward` returns the gradients of x, weight and bias.

The ops sum the integer products exactly.
"""

from __future__ import annotations

from .memory import packed_bytes as packed_bytes
from .memory import saved_after as saved_after
from .memory import saved_before as saved_before
from .op import ENGINES as ENGINES
from .op import engine_for as engine_for
from .op import supports as supports
from .op import ternary_linear as ternary_linear
from .op import ternary_linear_pack as ternary_linear_pack
from .op import ternary_linear_product as ternary_linear_product
from .op import ternary_linear_quantize as ternary_linear_quantize
from .op import ternary_linear_repack as ternary_linear_repack
from .quantizer import KINDS as KINDS
from .quantizer import Quantizer as Quantizer
