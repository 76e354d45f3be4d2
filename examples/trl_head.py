"""TRL's trainers on the fused loss: their head, spelled as logits that the backend leaves out.

The trainers of TRL 1.16 give the model a head of their own, which returns log-probabilities in
place of logits and which no pass rewrites. After `trainer = DPOTrainer(...)`, GRPO or SFT:

    spell_out_head(trainer.model, getattr(trainer, "temperature", 1.0))
    trainer.model.compile(backend="memeff")
    trainer.train()

Do the same for `trainer.ref_model` where there is one; under PEFT give it
`trainer.model.get_base_model()` and compile `trainer.model`. The means of the logits, which DPO
logs as `logits/chosen` and `logits/rejected`, are nan: they would need the logits. Calls with
router logits or shifted labels are left to TRL's head; `cast_lm_head_to_fp32` is not for this one.
"""

from __future__ import annotations

import functools
import types
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput
from trl.trainer.utils import FusedCausalLMOutput

NOT_SPELLED = ("output_router_logits", "shift_labels", "num_items_in_batch")


def spell_out_head(model: nn.Module, temperature: float = 1.0) -> None:
    """Make `model(..., labels=labels, fused_lm_head=True)` compute TRL's outputs from logits."""
    before: Any = model.forward

    @functools.wraps(type(model).forward)
    def forward(
        self: nn.Module,
        *args: object,
        fused_lm_head: bool = False,
        labels: Tensor | None = None,
        **kwargs: object,
    ) -> ModelOutput:
        if not fused_lm_head:
            return before(*args, labels=labels, **kwargs)
        if labels is None or any(kwargs.get(name) is not None for name in NOT_SPELLED):
            return before(*args, labels=labels, fused_lm_head=True, **kwargs)
        logits = before(*args, **kwargs).logits[:, :-1].float() / temperature
        labels = labels[:, 1:]
        mask = labels != -100
        every = torch.log_softmax(logits, -1)
        log_probs = every.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        log_probs = log_probs.masked_fill(~mask, 0.0)
        entropy = -(every.exp() * every).sum(-1)
        return FusedCausalLMOutput(
            loss=-log_probs.sum() / mask.sum().clamp(min=1),
            log_probs=log_probs,
            entropy=entropy.masked_fill(~mask, 0.0),
            mean_logits=torch.full_like(log_probs, torch.nan),
            is_top1=(logits.argmax(-1) == labels) & mask,
            label_mask=mask,
        )

    model.forward = types.MethodType(forward, model)
