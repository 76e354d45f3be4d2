"""Compress bf16 weights without loss by coding their exponents (NeuZip, arXiv 2410.20650).

In a bf16 weight, the sign and mantissa bits are almost random, and the 8 exponent bits carry 2.5 to
2.9 bits of information. Three codecs store the exponent in fewer bits and restore it exactly:

- `win4` stores 4 bits for an exponent in a range (window) of 15 exponents. It is the fastest codec,
  and needs about 12.0 bits per weight.
- `tier` stores 2, 4 or 8 bits, fewer for frequent exponents: about 10.7 to 11.1 bits per weight.
- `rans` is NeuZip's entropy coder. It needs the fewest bits, about 10.6 to 11.0 per weight, and is
  the slowest codec.

Callers use one tensor class and two ops:

- `CodedWeight` is the tensor that replaces the dense weight.
- `coded_weight_linear` computes x @ W.T + bias; its backward pass decodes the weight again.
- `coded_weight_decode` returns the dense weight.
"""

from __future__ import annotations

from .codecs import MAX_TOGETHER as MAX_TOGETHER
from .codecs import Room as Room
from .codecs import Step as Step
from .codecs import sheltered as sheltered
from .dtypes import dtype_of as dtype_of
from .layout import ADVISED as ADVISED
from .layout import BITS as BITS
from .layout import CODECS as CODECS
from .layout import LISTS as LISTS
from .layout import WIDER as WIDER
from .layout import Format as Format
from .layout import parse as parse
from .memory import bits_per_weight as bits_per_weight
from .memory import bytes_before as bytes_before
from .op import ENGINES as ENGINES
from .op import coded_weight_decode as coded_weight_decode
from .op import coded_weight_linear as coded_weight_linear
from .op import coded_weight_linears as coded_weight_linears
from .op import encode as encode
from .op import engine_for as engine_for
from .op import make_refuge as make_refuge
from .op import supports_weight as supports_weight
from .pieces import sheltered_together as sheltered_together
from .slabs import side_by_side as side_by_side
from .tensor import OWN_ATTRIBUTES as OWN_ATTRIBUTES
from .tensor import CodedWeight as CodedWeight
from .tensor import Unsettled as Unsettled
from .tensor import UnsettledTogether as UnsettledTogether
from .tensor import refuse_step as refuse_step
