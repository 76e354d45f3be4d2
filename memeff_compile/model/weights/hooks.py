"""Hooks through which `memeff_compile.compile` compresses a model before it is compiled, and adds
guards for compressed weights."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from memeff_compile import compat
from memeff_compile.errors import OptionError
from memeff_compile.kernels.coded_weight import CodedWeight
from memeff_compile.model.weights.compress import compress_for_compile, dense_again
from memeff_compile.options import Options
from memeff_compile.system import Graph, Hooks, Request, Undone


class WeightHooks(Hooks):
    """The hooks that compress a model before compilation, and simplify the guards on its compressed
    weights.

    For each compressed weight, one guard on an integer replaces all other guards on this weight.
    The integer is equal for all weights that the same compiled code can process."""

    def refuse(self, options: Options) -> None:
        if options.weights not in ("exact", "off"):
            raise OptionError(
                f"memeff.weights is {options.weights!r}, but a backend cannot compress a model: it "
                "sees graphs, which several models of a class may share, and not the model that "
                f"owns the weights. Call memeff_compile.compress_(model, {options.weights!r}) "
                "before torch.compile, or let memeff_compile.compile(model, "
                f"weights={options.weights!r}) call it; memeff.weights itself is 'exact' or 'off'."
            )

    def wants(self, request: Request) -> bool:
        return request.options.weights not in ("exact", "off")

    def prepare(self, request: Request) -> Options:
        options: Options = request.options
        skip = (*options.skip.get("*", ()), *options.skip.get("encode_weights", ()))
        compress_for_compile(request.model, options.weights, skip)
        return replace(options, weights="exact")

    def undo(self, model: nn.Module) -> Undone:
        return dense_again(model)

    def guard(self, graph: Graph) -> None:
        coded = [
            node
            for node in graph.placeholders
            if isinstance(compat.example_input(node), CodedWeight)
            and not graph.may_be_written(node)
        ]
        compat.guard_by_attribute(coded, "number")
