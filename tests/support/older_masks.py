"""Masks as transformers 5.17 builds them in a compiled model, under a newer transformers.

It leaves no mask out while a model is compiled, and separates packed sequences in addition to
comparing indices, not positions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from transformers import masking_utils


def use_older_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let models build the masks of transformers 5.17 for the rest of a test."""

    def never(*_: Any, **__: Any) -> bool:
        return False

    def packed(function: Callable[..., Any], positions: Any, sequences: Any) -> Callable[..., Any]:
        same = masking_utils.packed_sequence_mask_function(sequences)
        return masking_utils.and_masks(function, same)

    for name, older in (
        ("_ignore_causal_mask_sdpa", never),
        ("_ignore_bidirectional_mask_sdpa", never),
        ("packed_sequence_compatibility_function", packed),
    ):
        if hasattr(masking_utils, name):
            monkeypatch.setattr(masking_utils, name, older)
