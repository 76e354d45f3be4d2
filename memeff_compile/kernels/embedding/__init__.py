"""An embedding lookup whose weight gradient is summed per token id, without an fp32 copy of the
embedding table.

The lookup itself is `aten.embedding`; only the gradient is computed differently. PyTorch's
compilers scatter the gradient with atomic additions into an fp32 buffer as large as the table (V x
D). Then the compilers round that buffer to 16 bits. If an output projection shares the weight, the
compilers add the buffer to that projection's gradient. This package's ops sort the token ids, and
sum the gradients of each distinct id in fp32 in a fixed order. The ops round each sum once, and add
it to a row of the table's gradient. So the ops need no other buffer as large as the table.

- `embedding` looks rows up; its backward pass returns the gradient of the table.
- `embedding_tied` also returns the table, for an output projection that shares it. Its backward
  pass adds the rows' gradient in place to the table's gradient from the output projection.
- `embedding_backward` returns the gradient of the table.
- `embedding_accumulate` adds the rows' gradient to an existing gradient of the table.

The module `sharded` contains further ops for tables that DTensor splits over ranks.
"""

from __future__ import annotations

from .memory import bytes_after as bytes_after
from .memory import bytes_before as bytes_before
from .memory import piece_bytes as piece_bytes
from .op import ENGINES as ENGINES
from .op import embedding as embedding
from .op import embedding_accumulate as embedding_accumulate
from .op import embedding_backward as embedding_backward
from .op import embedding_tied as embedding_tied
from .op import engine_for as engine_for
from .op import supports as supports
from .sharded import Layout as Layout
from .sharded import added_up as added_up
from .sharded import first_row_of as first_row_of
from .sharded import layout_of as layout_of
from .sharded import over_ranks as over_ranks
from .sharded import parts_of as parts_of
