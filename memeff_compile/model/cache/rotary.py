"""Find the angles by which a model's rotary embedding rotates keys, if the model's config
determines them.

A cache receives only the model's config, and keys that the rotary embedding has already rotated.
The config determines the angles; calling the function `rotate_half` of the model's Python module
with a few numbers shows which channels are rotated together.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from memeff_compile.model.cache.layers import ROPE_INIT_FUNCTIONS

_CHANNELS = 4
_HALVES = (-2.0, -3.0, 0.0, 1.0)
"""0, 1, 2, 3 after a `rotate_half` that pairs the channels i and i + D / 2."""


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _pairs_halves(name: str) -> bool:
    """Return whether the `rotate_half` of a module pairs the channels i and i + D / 2.

    Dynamo does not trace this function: reading numbers from a tensor would break the graph.
    """
    turn = getattr(sys.modules.get(name), "rotate_half", None)
    return turn is not None and tuple(turn(torch.arange(float(_CHANNELS))).tolist()) == _HALVES


def angles_of(config: Any, depth: int) -> Tensor | None:  # noqa: ANN401
    """Return the angles by which the channels of a key rotate from one position to the next.

    The tensor has the shape (D / 2,). Element i is the angle of channels i and i + D / 2. Return
    None if adjacent channels rotate together, if some channels do not rotate, or if the embedding's
    scaling depends on the length. The angles are then not known.
    """
    text = config.get_text_config(decoder=True)
    if not _pairs_halves(type(text).__module__.replace(".configuration_", ".modeling_")):
        return None
    given = getattr(text, "rope_parameters", None) or {}
    # Where layers with a window have other angles: those of the layers that attend to all tokens.
    named = {"layer_type": "full_attention"} if "full_attention" in given else {}
    given = given.get("full_attention", given)
    kind, base = given.get("rope_type"), given.get("rope_theta")
    if kind == "default" and base and given.get("partial_rotary_factor", 1.0) == 1.0:
        share = torch.arange(0, depth, 2, dtype=torch.float64) / depth
        found: Tensor = (base**-share).float()
        return found
    if kind not in ("llama3", "linear"):
        return None
    found = ROPE_INIT_FUNCTIONS[kind](text, torch.device("cpu"), **named)[0]
    return found if found.shape == (depth // 2,) else None
