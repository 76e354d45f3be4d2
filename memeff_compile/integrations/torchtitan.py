"""Compute torchtitan's loss for the whole sequence with this package's op; torchtitan itself
computes the loss in chunks of the sequence.

Importing this module also lets torchtitan use this backend for transformer blocks that call
FlexAttention.

Pass these arguments to torchtitan:

    --compile.backend memeff --override.imports memeff_compile.integrations.torchtitan.fused_loss
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from types import MethodType
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from .. import compat
from ..functional import linear_cross_entropy
from .hosts import host

host("torchtitan")

from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss  # noqa: E402
from torchtitan.config import derive, override  # noqa: E402
from torchtitan.distributed import compile as compile_blocks  # noqa: E402
from torchtitan.distributed.spmd_types import spmd_mesh_size  # noqa: E402
from torchtitan.distributed.utils import get_spmd_backend  # noqa: E402

log = logging.getLogger(__name__)

_METHOD = "memeff_loss"


class FusedLoss(ChunkedLossWrapper):  # type: ignore[misc]
    """A loss that computes output projection and cross entropy in one op, without building logits.

    torchtitan still computes the loss in chunks in these cases, and the log gives the reason:

    - tensor parallelism splits the projection or its input;
    - the projection has forward hooks other than FSDP2's;
    - the projection is not a plain linear layer.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ChunkedLossWrapper.Config):  # type: ignore[misc]
        """The configuration of `FusedLoss`, which computes projection and cross entropy in one op.

        The fields are those of torchtitan's chunked loss. The chunked loss is still used
        for projections that this package's op does not support.
        """

    def __init__(self, config: Config, **given: Any) -> None:
        super().__init__(config, **given)
        self._left: str | None = None
        self._is_prepared = False

    def __call__(
        self,
        pred: Tensor,
        labels: Tensor,
        global_valid_tokens: Tensor | None = None,
        **loss_inputs: Any,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute the loss from the decoder's hidden states; return the loss and an empty set of
        metrics.

        If `global_valid_tokens` is given, the loss is divided by this number.
        """
        if not self._is_prepared:
            self._prepare(pred, labels)
        if self._left is not None or loss_inputs:
            chunks: Any = super().__call__
            found: tuple[Tensor, dict[str, Tensor]] = chunks(
                pred, labels, global_valid_tokens, **loss_inputs
            )
            return found
        loss = getattr(self.lm_head, _METHOD)(pred, labels)
        return loss if global_valid_tokens is None else loss / global_valid_tokens, {}

    def _prepare(self, pred: Tensor, labels: Tensor) -> None:
        """Give the output projection (`lm_head`) a method that computes cross entropy from hidden
        states and labels.

        FSDP2 gathers the projection's weight when code calls the new method. If this package's op
        does not support the projection or its input, torchtitan computes the loss, and the log
        gives the reason.
        """
        head = self.lm_head
        self._is_prepared, self._left = True, _unserved(head, pred, labels)
        if self._left is not None:
            log.warning("The loss stays in torchtitan's chunks: %s.", self._left)
            return
        setattr(head, _METHOD, MethodType(_loss_of, head))
        register_fsdp_forward_method(head, _METHOD)


def _loss_of(head: nn.Linear, hidden: Tensor, labels: Tensor) -> Tensor:
    return linear_cross_entropy(hidden, head.weight, labels, head.bias, reduction="sum")


def _unserved(head: Any, *tensors: Tensor) -> str | None:
    """Return why torchtitan must compute the loss of an output projection (`head`) itself, or None.

    `tensors` are the hidden states and the labels.
    """
    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
        return f"the output projection is a {type(head).__name__}, and no plain linear layer"
    mesh = head.weight.device_mesh if isinstance(head.weight, DTensor) else None
    is_split = mesh is not None and "tp" in (mesh.mesh_dim_names or ())
    is_split |= get_spmd_backend() == "spmd_types" and spmd_mesh_size("tp") > 1
    if is_split or any(isinstance(tensor, DTensor) for tensor in tensors):
        return "tensor parallelism splits the output projection or what comes before it"
    owners = [getattr(hook, "__module__", None) or "" for hook in compat.forward_hooks(head)]
    if any("fsdp" not in owner for owner in owners):
        return "the output projection has forward hooks"
    return None


@override(  # type: ignore[untyped-decorator]
    target=ChunkedLossWrapper.Config,
    description="Output projection and cross entropy in one op, without logits (memeff_compile)",
    exact=True,
)
def fused_loss(cfg: Any) -> Any:
    """Return the configuration of this package's loss in place of torchtitan's configuration of
    chunked cross entropy.

    For other losses, return torchtitan's configuration unchanged.
    """
    if type(cfg.loss_fn) is not CrossEntropyLoss.Config:
        log.warning("The loss stays in torchtitan's chunks: it is no cross entropy.")
        return cfg
    return derive(cfg, FusedLoss.Config)


def _accept_flex_attention() -> None:
    """Let torchtitan use the backend `memeff` for transformer blocks that call FlexAttention.

    For such blocks torchtitan raises an error for every backend except Inductor and `aot_eager`,
    because other backends may run FlexAttention op by op. The backend `memeff` passes FlexAttention
    on to Inductor.
    """
    refuse = getattr(compile_blocks, "_maybe_regional_inductor_backend", None)  # since 0.3

    def choose(model: nn.Module, backend: Any) -> Any:
        return backend if backend == "memeff" or refuse is None else refuse(model, backend)

    compile_blocks._maybe_regional_inductor_backend = choose


_accept_flex_attention()
