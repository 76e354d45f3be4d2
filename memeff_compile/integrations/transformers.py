"""Compile the model of a transformers Trainer or a TRL trainer in place.

Usage:

    Trainer(..., callbacks=[MemeffCallback()])
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from ..errors import UnsupportedInputError
from ..options import Options
from .hosts import host
from .in_place import Request, compile_in_place

host("transformers", "5.16")

from transformers import TrainerCallback  # noqa: E402

if TYPE_CHECKING:
    from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments


class MemeffCallback(TrainerCallback):
    """Compile the Trainer's model in place with `backend="memeff"`.

    The arguments are those of `memeff_compile.compile`, including options by keyword:
    `MemeffCallback(logits="eager")`. The options are checked when you create the callback.

    The Trainer calls the callback at the end of its own constructor, so that `evaluate()` and
    `predict()` run compiled even without an earlier `train()`. The Trainer calls the callback again
    when training begins. At that time, the callback compiles everything that it could not compile
    earlier:

    - a model from `model_init`;
    - layers that FSDP2 has sharded since the Trainer was created;
    - the reference model of a TRL trainer;
    - the whole model, if you added the callback by `add_callback` after the Trainer was created.

    A model that is already compiled is not changed. Compilation happens at the first call of the
    model. So the compiled code includes all changes that accelerate, PEFT or TRL make to
    `forward` before the first step.

    For TRL's trainers, the backend also computes the loss (`integrations.trl`).

    Raises:
        OptionError: For the same reasons as `memeff_compile.compile`.
        UnsupportedInputError: When the Trainer is created, if it would replicate the model on
            several GPUs in one process (`nn.DataParallel`).

    Example:
        >>> Trainer(model=model, args=args, callbacks=[MemeffCallback()])  # doctest: +SKIP
    """

    def __init__(
        self,
        *,
        mode: str | None = None,
        options: Mapping[str, object] | Options | None = None,
        dynamic: bool | None = None,
        fullgraph: bool = False,
        **settings: object,
    ) -> None:
        self.request = Request.of(
            settings, mode=mode, options=options, dynamic=dynamic, fullgraph=fullgraph
        )

    def on_init_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **given: Any,
    ) -> None:
        """Compile the model of the Trainer that was just created."""
        self._compile(args, model)

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **given: Any,
    ) -> None:
        """Compile the models and layers that `on_init_end` could not compile.

        These are, for example, a TRL trainer's reference model or a model from `model_init`.
        """
        self._compile(args, model)
        for trainer in self._trainers():
            self._compile(args, getattr(trainer, "ref_model", None))

    def _compile(self, args: TrainingArguments, model: object) -> None:
        if not isinstance(model, nn.Module):
            return
        if args.n_gpu > 1:
            raise UnsupportedInputError(
                f"The Trainer sees {args.n_gpu} GPUs in one process and would wrap the model in "
                "nn.DataParallel, whose replicas all run the compiled code of the first one with "
                "its weights. Start one process per GPU (torchrun --nproc-per-node "
                f"{args.n_gpu} train.py), or set CUDA_VISIBLE_DEVICES=0."
            )
        from accelerate.utils import extract_model_from_parallel

        from .trl import hand_over_head

        if hasattr(sys.modules.get("trl.trainer.utils"), "add_fused_lm_head"):
            hand_over_head()
        compile_in_place(extract_model_from_parallel(model), self.request)

    def _trainers(self) -> Iterator[Trainer]:
        """Yield the Trainer that calls this callback. The Trainer passes only its model to
        callbacks, so this method searches for the Trainer."""
        from transformers import Trainer

        frame = inspect.currentframe()
        while frame is not None:
            caller = frame.f_locals.get("self")
            if isinstance(caller, Trainer) and self in caller.callback_handler.callbacks:
                yield caller
                return
            frame = frame.f_back
