"""Every node of every surface form, read by the table and by tracing."""

from __future__ import annotations

import pytest
import torch
from torch.fx import Node

from memeff_compile.passes.graph.canonical import read, trace
from tests.support.captured_graphs import calls, capture
from tests.support.surfaces import SURFACES, SurfaceModel, batch

from .test_canonical_spellings import plain

BESIDE_THE_LOSS = {"pad", "clamp", "linspace"}
"""Ops that the surfaces use on labels and class weights, which no pass needs to read."""


def _name(node: Node) -> str:
    return str(getattr(node.target, "__name__", node.target))


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_surfaces_are_read_as_they_trace(dynamic: bool) -> None:
    dtype = torch.bfloat16  # so that casts to float32 are casts
    compared = 0
    for name, surface in SURFACES.items():
        gm = capture(SurfaceModel(surface, dtype), *batch(dtype=dtype), dynamic=dynamic)
        for node in calls(gm):
            if not isinstance(node.meta["example_value"], torch.Tensor):
                continue
            reading, traced = read(node), trace(node)
            if _name(node) in BESIDE_THE_LOSS:
                continue
            assert reading is not None, f"{name}: {node.format_node()}"
            if traced is not None:
                value = node.meta["example_value"]
                assert plain(reading, value) == plain(traced, value), f"{name}: {node}"
                compared += 1
    assert compared > 4 * len(SURFACES)
