"""Switch between the two training stages of BitNet a4.8 (TernaryStages)."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from memeff_compile.errors import OptionError, UnsupportedInputError
from memeff_compile.model.ternary.verbs import require_recipe, ternarize_

log = logging.getLogger(__name__)

_MARK = "memeff_first_stage"
"""The name, in the second stage, of an entry in an optimizer's groups (the settings of the first
stage), and of an attribute of a scheduler (the factor of its base rates). Both are saved with their
owner.
"""
_RATES = ("initial_lr", "max_lr", "min_lr")
"""Entries that schedulers keep in an optimizer's groups."""


class TernaryStages:
    """The two training stages of BitNet a4.8.

    In the first stage, which is most of the training, linear layers quantise their inputs to 8
    bits. In the second stage, the layers follow the recipe `second`, by default "a4.8". A recipe
    says how each linear layer quantises its inputs, as in `ternarize_`. The switch to the second
    stage changes an attribute of each linear layer, so a compiled model is compiled once more. The
    parameters remain the same objects, so the optimizer state stays valid after the switch.

    Args:
        model: A model that `ternarize_` can change, or has already changed.
        steps: The number of steps of the whole training.
        share: The fraction of steps in the first stage; in the paper 95 of 100 billion tokens.
        second: The recipe of the second stage.
        kinds: Patterns of module paths, with input formats that override the recipe `second`; as
            in `ternarize_`.
        skip: Patterns for paths of modules that stay dense in both stages; as in `ternarize_`.
        activation: The activation function of gated MLPs in both stages; as in `ternarize_`. The
            paper uses "relu2".
        low_bit_heads: The bits of keys and values in attention, for the second stage; as in
            `ternarize_`.
        optimizer: The optimizer whose learning rate and weight decay change at the switch, in every
            parameter group.
        scheduler: The scheduler of the optimizer's learning rate, if there is one. The scheduler's
            base rates change too, because the scheduler would otherwise restore the learning rate
            of the first stage.
        rate: The factor by which the learning rate is multiplied at the switch; in the paper,
            1.5e-3 becomes 1e-3 (for 700M parameters).
        weight_decay: The weight decay of the second stage; the paper's 0.1 becomes 0.

    Example:
        >>> stages = TernaryStages(  # doctest: +SKIP
        ...     model, steps=1000, activation="relu2", optimizer=optimizer
        ... )
        >>> for batch in batches: train(batch); stages.step()  # doctest: +SKIP
    """

    def __init__(
        self,
        model: nn.Module,
        steps: int,
        *,
        share: float = 0.95,
        second: str = "a4.8",
        kinds: Mapping[str, str] | None = None,
        skip: Iterable[str] = (),
        activation: str | None = None,
        low_bit_heads: int | Mapping[str, int] | None = None,
        optimizer: Optimizer | None = None,
        scheduler: Any = None,  # noqa: ANN401 - torch's, or a wrapper of it
        rate: float = 2 / 3,
        weight_decay: float = 0.0,
    ) -> None:
        require_recipe(second)
        if steps < 1 or not 0 <= share <= 1:
            raise OptionError(
                f"steps is {steps} and share {share}; at least 1 and 0 to 1 are needed."
            )
        if rate <= 0 or weight_decay < 0:
            raise OptionError(
                f"rate is {rate} and weight_decay {weight_decay}; a factor above 0 and at least 0 "
                "are needed."
            )
        _require_lasting(optimizer, scheduler, rate)
        self.model, self.second = model, second
        self.kinds, self.skip = dict(kinds or {}), tuple([skip] if isinstance(skip, str) else skip)
        self.activation, self.low_bit_heads = activation, low_bit_heads
        self.optimizer, self.scheduler = optimizer, scheduler
        self.rate, self.weight_decay = rate, weight_decay
        self.switch_after = round(steps * share)
        self.done = 0
        ternarize_(model, "b1.58", skip=self.skip, activation=activation)
        self._set_optimizer()
        self._switch_if_due()

    @property
    def stage(self) -> int:
        """Return the stage of BitNet a4.8, 1 or 2, to which the next training step belongs."""
        return 2 if self.done >= self.switch_after else 1

    def step(self) -> None:
        """Count a training step; after the last step of the first stage, switch to the second.

        In the first stage, linear layers quantise their inputs to 8 bits. In the second stage, the
        layers quantise their inputs as the argument `second` of `TernaryStages` says."""
        self.done += 1
        self._switch_if_due()

    def state_dict(self) -> dict[str, int]:
        """Return the number of completed training steps, under the key `done`."""
        return {"done": self.done}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue after the number of training steps in `state`, a result of `state_dict`.

        The model gets the training stage to which the next step belongs.

        In the first stage, linear layers quantise their inputs to 8 bits. In the second stage, the
        layers quantise their inputs as the argument `second` of `TernaryStages` says.

        You may load the states of optimizer and scheduler before or after this call. These states
        contain the learning rate and weight decay of the stage in which they were saved. This call
        does not change these two numbers.
        """
        self.done = state["done"]
        self._set_stage()

    def _set_stage(self) -> None:
        settings: dict[str, Any] = {"skip": self.skip, "activation": self.activation}
        if self.stage == 2:
            settings |= {"kinds": self.kinds, "low_bit_heads": self.low_bit_heads}
            ternarize_(self.model, self.second, **settings)
        else:
            ternarize_(self.model, "b1.58", **settings)
            if self.low_bit_heads is not None:
                from memeff_compile.model.low_bit_heads import full_heads_again

                full_heads_again(self.model)
        self._set_optimizer()

    def _switch_if_due(self) -> None:
        if self.done == self.switch_after:
            self._set_stage()
            log.info("second stage of ternary training after %d steps", self.done)

    def _set_optimizer(self) -> None:
        """Set the current training stage's learning rate and weight decay, unless already set.

        The method changes the optimizer's parameter groups and the schedulers' base rates."""
        is_second = self.stage == 2
        for group in [] if self.optimizer is None else self.optimizer.param_groups:
            if (_MARK in group) == is_second:
                continue
            if is_second:
                group[_MARK] = {"rate": self.rate, "weight_decay": group.get("weight_decay")}
                factor, decay = self.rate, self.weight_decay
            else:
                before = group.pop(_MARK)
                factor, decay = 1 / before["rate"], before["weight_decay"]
            # Inductor's code and CUDA graphs hold the address of a rate that is a tensor.
            rate = group["lr"]
            group["lr"] = rate.mul_(factor) if isinstance(rate, Tensor) else rate * factor
            group.update({key: group[key] * factor for key in _RATES if key in group})
            if "weight_decay" in group:
                group["weight_decay"] = decay
        for each in _with_base_rates(self.scheduler):
            held = getattr(each, _MARK, None)  # part of its state dict, as any attribute is
            if is_second and held is None:
                each.base_lrs = [base * self.rate for base in each.base_lrs]
            elif held is not None and not is_second:
                each.base_lrs = [base / held for base in each.base_lrs]
            setattr(each, _MARK, (held or self.rate) if is_second else None)


def _with_base_rates(scheduler: Any) -> Iterator[Any]:  # noqa: ANN401
    """Yield the schedulers that have base learning rates.

    These are the given scheduler, the scheduler that the given one wraps, and the schedulers that a
    `SequentialLR` or `ChainedScheduler` contains.
    """
    if hasattr(scheduler, "base_lrs"):
        yield scheduler
    for inner in (getattr(scheduler, "scheduler", None), *getattr(scheduler, "_schedulers", ())):
        if inner is not None:
            yield from _with_base_rates(inner)


def _require_lasting(optimizer: Any, scheduler: Any, rate: float) -> None:  # noqa: ANN401
    """Raise an error if a scheduler would overwrite the learning rate of the second training stage.

    BitNet a4.8 trains in two stages. When the second stage begins, `TernaryStages` multiplies the
    optimizer's learning rate by `rate`."""
    if optimizer is None:
        if scheduler is not None:
            raise OptionError("TernaryStages has a scheduler and no optimizer; pass both.")
        return
    if not hasattr(optimizer, "param_groups"):
        raise UnsupportedInputError(
            f"optimizer is a {type(optimizer).__name__}; one with param_groups is needed."
        )
    is_scheduled = any("initial_lr" in group for group in optimizer.param_groups)
    if is_scheduled and rate != 1 and not any(True for _ in _with_base_rates(scheduler)):
        raise OptionError(
            "The optimizer has a scheduler, which would set the rate of the first stage again. "
            "Pass it as scheduler=: one of torch.optim.lr_scheduler, with base_lrs. Or lower the "
            "rate in your own schedule, and pass rate=1."
        )
