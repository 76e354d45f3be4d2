"""A pytest plugin for `make poison`: unwritten memory contains NaN, or the largest integer.

compute-sanitizer's initcheck does not see writes by asynchronous bulk copies (products of cuBLAS
and stores through descriptors), so it reports reads of memory that was written. Here every
`torch.empty` is filled instead, and each test's own comparison finds a value that came from it.
"""

from __future__ import annotations

import pytest
import torch


def pytest_configure(config: pytest.Config) -> None:
    """Fill PyTorch's new allocations; operations that are not deterministic may stay so."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    assert torch.empty(3).isnan().all()
