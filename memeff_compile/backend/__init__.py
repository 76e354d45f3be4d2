"""The backend "memeff" of torch.compile: its entry points, the processing of one graph, and CUDA
graphs.

PyTorch finds the function `memeff` in this module through the entry point group
`torch_dynamo_backends`.
"""

from __future__ import annotations

from .entry import compile as compile
from .entry import memeff as memeff
from .entry import reset as reset
