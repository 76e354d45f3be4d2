"""A pytest plugin for `make poison`: memory that nobody has written holds NaN, or the largest integer.

compute-sanitizer's initcheck does not see what asynchronous bulk copies write (products of cuBLAS
and our own stores through descriptors), so it reports reads of memory that was written. Here every
`torch.empty` is filled instead, and each test's own comparison finds a value that came from it.
"""

from __future__ import annotations

import pytest
import torch


def pytest_configure(config: pytest.Config) -> None:
    """Fill what PyTorch allocates; operations that are not deterministic may stay so."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    assert torch.empty(3).isnan().all()
