"""Further families of transformers, one step each: the loss is fused, the logits deferred, all equals eager."""

from __future__ import annotations

import copy

import pytest
import torch

import memeff_compile
from tests.integrations.tiny import assert_same_gradients, gradients
from tests.support.zoo import FURTHER, Family, build, inputs

pytestmark = pytest.mark.slow
pytest.importorskip("transformers", minversion="5.23", reason="older ones lack some families")


@pytest.mark.parametrize("family", FURTHER, ids=lambda family: family.name)
def test_a_step_of_a_further_family_is_eagers(family: Family) -> None:
    model = build(family)
    eager = copy.deepcopy(model)
    batch = inputs(family)
    expected = eager(**batch)
    expected.loss.backward()
    model.compile(backend="memeff", options={"memeff.inner": "eager"})
    out = model(**batch)
    out.loss.backward()
    found = {(r.pass_name, r.code) for r in memeff_compile.last_report().records}
    assert ("fuse_linear_cross_entropy", "rewrote") in found
    assert ("defer_logits", "logits_deferred") in found
    torch.testing.assert_close(out.loss, expected.loss, rtol=2e-6, atol=0.0)
    torch.testing.assert_close(out.logits + 0, expected.logits, rtol=1e-5, atol=1e-5)
    assert_same_gradients(gradients(model), gradients(eager))
