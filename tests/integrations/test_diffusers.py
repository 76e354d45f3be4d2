"""A training step of diffusers' DiT with the real package: no vocabulary loss, and no change."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import memeff_compile
from tests.integrations.frameworks import framework
from tests.integrations.tiny import OPTIONS, assert_same_gradients, gradients


@pytest.mark.slow
def test_step_of_a_diffusion_transformer_is_eagers() -> None:
    diffusers = framework("diffusers")
    torch.manual_seed(0)
    model: Any = diffusers.DiTTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        sample_size=8,
        patch_size=2,
        num_embeds_ada_norm=10,
        norm_num_groups=2,
    )
    eager = copy.deepcopy(model)
    model.compile(backend="memeff", options=OPTIONS)
    scheduler = diffusers.DDPMScheduler(num_train_timesteps=50)
    pictures, noise = torch.randn(2, 2, 4, 8, 8)
    steps, classes = torch.tensor([3, 40]), torch.tensor([1, 2])
    losses = []
    for one in (eager, model):
        torch.manual_seed(5)  # classes are dropped at random
        noisy = scheduler.add_noise(pictures, noise, steps)
        loss = F.mse_loss(one(noisy, timestep=steps, class_labels=classes).sample, noise)
        loss.backward()
        losses.append(loss.detach())
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-6, atol=0.0)
    assert_same_gradients(gradients(model), gradients(eager))
    report = memeff_compile.last_report()
    assert len(report.graphs) == 1
    assert not report.records
