"""Attention with 8-bit or 4-bit operands, for calls without gradients (SageAttention2, arXiv
2411.10958).

- `quantized_attention` computes softmax attention. The scores are products of codes: integers to
  which queries and keys are rounded. Codes have 8 or 4 bits, and are stored as int8. The product of
  softmax weights and values comes from E4M3 numbers (8-bit floats) or from fp16 numbers.
- `quantized_attention_by_call` is the same op at a precision level that depends on how often the op
  was called.

Numbers without their mean are smaller, so codes with few bits represent them more accurately. The
op therefore subtracts the following means before it rounds numbers to codes:

- the mean of the keys, whose subtraction does not change softmax weights;
- the mean of the values, which is added to every output afterwards;
- for 4-bit codes, the mean of each block of queries. The products of this mean with the keys are
  computed without codes, and added to the scores from the codes.

Masks are described in the same way as for memeff::attention.
"""

from __future__ import annotations

from .by_call import counter_for as counter_for
from .by_call import quantized_attention_by_call as quantized_attention_by_call
from .by_call import restart as restart
from .memory import code_bytes as code_bytes
from .op import ENGINES as ENGINES
from .op import engine_for as engine_for
from .op import has_fp8 as has_fp8
from .op import quantized_attention as quantized_attention
from .op import supports as supports
from .settings import GRANULARITIES as GRANULARITIES
from .settings import LEVELS as LEVELS
from .settings import WIDEST_E4M3 as WIDEST_E4M3
from .under_mask import attend_under_mask as attend_under_mask
