"""A node for ComfyUI that compiles a diffusion model by memeff. Copy this folder to custom_nodes.

Attention of the model can run in low bits: `8b` is the most precise level, `4b` the least. The
model of the graph stays as it is; the node returns a copy that ComfyUI compiles when it samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class CompileByMemeff:
    """The node."""

    CATEGORY = "model/memeff"
    RETURN_TYPES = ("MODEL",)
    FUNCTION = "compile"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        """Return what the node asks for."""
        levels = ["exact", "8b", "8b+f16", "4b"]
        return {"required": {"model": ("MODEL",), "attention": (levels,)}}

    def compile(self, model: Any, attention: str) -> tuple[Any]:  # noqa: ANN401
        """Return a copy of a model that is compiled when it is sampled."""
        from comfy_api.torch_helpers import set_torch_compile_wrapper

        copied = model.clone()
        options = {"memeff.attention": attention, "guard_filter_fn": _guards_that_matter}
        set_torch_compile_wrapper(model=copied, backend="memeff", options=options)
        return (copied,)


def _guards_that_matter(entries: Sequence[Any]) -> list[bool]:
    """Leave out ComfyUI's settings of a sampling step, which change from step to step."""
    return ["transformer_options" not in entry.name for entry in entries]


NODE_CLASS_MAPPINGS = {"CompileByMemeff": CompileByMemeff}
NODE_DISPLAY_NAME_MAPPINGS = {"CompileByMemeff": "Compile (memeff)"}
