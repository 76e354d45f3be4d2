"""Attention, forward and backward, with masks described by conditions instead of a stored tensor.

A dense mask contains B x M x N numbers (sequences, queries, keys), which every layer reads. Without
fused attention, matmul, softcap, mask and softmax also build M x N numbers for every head. The
masks of nearly all models combine a few conditions. A visible key is at most some distance after or
before its query, is not padding, and belongs to the same document as its query. Any other mask is
passed as a tensor, which the kernels read tile by tile.

- `attention` computes softmax attention over the keys for which all given conditions hold.
- `attention_backward` computes the gradients of q, k and v; it computes the scores again, tile by
  tile.
- `attention_mask_tiles` finds, on the GPU, the tiles of a mask in which every key is hidden.
  `attention_mask_tiles` also finds the tiles in which every key is visible.

If several query heads share a key-value head, the kernels read that head without copying it.
"""

from __future__ import annotations

from ..checks import MAX_DEPTH as MAX_DEPTH
from .memory import backward_bytes as backward_bytes
from .memory import bytes_after as bytes_after
from .memory import bytes_before as bytes_before
from .memory import mask_bytes as mask_bytes
from .op import EMPTY_ROWS as EMPTY_ROWS
from .op import ENGINES as ENGINES
from .op import attention as attention
from .op import attention_backward as attention_backward
from .op import attention_mask_tiles as attention_mask_tiles
from .op import engine_for as engine_for
from .op import served as served
from .op import supports as supports
