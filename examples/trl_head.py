"""Any trainer of TRL on the fused loss: SFT, DPO, KTO, GRPO, RLOO, reward.

The callback compiles the trainer's model in place, and the reference model where there is one. The
loss of TRL's trainers, which they compute by chunks, becomes one op of this backend. Losses and
metrics stay what they are.
"""

from __future__ import annotations

from typing import Any

from memeff_compile.integrations.transformers import MemeffCallback


def train(trainer: Any, **options: Any) -> None:  # noqa: ANN401
    """Train, compiled: `train(SFTTrainer(...))`."""
    trainer.add_callback(MemeffCallback(**options))
    trainer.train()
