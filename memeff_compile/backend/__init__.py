"""The backend: entry points, the steps of one graph through the passes, CUDA graphs.

torch finds `memeff` here by the entry point group ``torch_dynamo_backends``.
"""

from __future__ import annotations

from .entry import compile as compile
from .entry import memeff as memeff
from .entry import reset as reset
