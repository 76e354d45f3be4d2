"""The calls that the core makes to ternary linears: dense linears again, for `undo`."""

from __future__ import annotations

from torch import nn

from memeff_compile.system import Hooks, Undone


class TernaryHooks(Hooks):
    """Put the linears back that `ternarize_` changed."""

    def undo(self, model: nn.Module) -> Undone:
        from memeff_compile.model.ternary.verbs import dense_again

        return dense_again(model)
