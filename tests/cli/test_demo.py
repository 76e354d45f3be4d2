"""`make demo`, shortened: two processes, the same loss, less memory, a plot."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.fresh_python import FreshPython


@pytest.mark.slow
def test_demo_trains_to_the_same_loss_and_draws_the_plot(
    fresh_python: FreshPython, tmp_path: Path
) -> None:
    pytest.importorskip("transformers", reason="the demo trains a Llama of transformers")
    result = fresh_python("-m", "memeff_compile", "demo", "--steps", "5")
    assert result.returncode == 0, result.stderr
    difference = re.search(r"difference between the loss curves: (\S+)", result.stdout)
    assert difference is not None, result.stdout
    assert float(difference[1]) < 1e-4
    assert "changed: fuse_linear_cross_entropy in lm_head" in result.stdout
    assert (tmp_path / "demo_output" / "train_tiny_llama.png").stat().st_size > 10_000
