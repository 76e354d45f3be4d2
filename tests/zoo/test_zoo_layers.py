"""Families with enough equal layers to share code: loss, gradients and tokens equal the whole graph's.

Both sides run the same passes; only `memeff.regions` differs.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from packaging.version import Version
from torch import Tensor

import memeff_compile
from tests.support.closeness import assert_same_gradients
from tests.support.zoo import FAMILIES, FURTHER, Family, build, inputs

pytestmark = pytest.mark.slow
transformers = pytest.importorskip("transformers", reason="builds models of transformers")

_NAMES = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "decoder_layers")
_NAMES += ("num_decoder_layers", "encoder_layers")
_ALTERNATING = ("gemma2", "gpt_oss", "vaultgemma")  # by default, every second layer has a window
_ALTERNATE = {"layer_types", "block_types", "attn_layer_indices", "attention_types"}


def deep(family: Family, **more: Any) -> Any:
    """Build a model of the family with at least four equal layers."""
    if family.name not in transformers.models.auto.configuration_auto.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {family.name}")
    alternates = _ALTERNATE & family.overrides.keys() or family.name in _ALTERNATING
    depth = 8 if alternates else 5
    changed: dict[str, Any] = dict.fromkeys(_NAMES, depth)
    for name in {"layer_types", "block_types"} & family.overrides.keys():
        changed[name] = family.overrides[name] * (depth // 2)
    if "attn_layer_indices" in family.overrides:
        changed["attn_layer_indices"] = [1, 3, 5, 7]
    if "attention_types" in family.overrides:
        changed["attention_types"] = [[["global", "local"], depth // 2]]
    return build(family, **{**changed, **more})


def step(model: Any, batch: dict[str, Tensor], regions: str) -> list[Tensor | None]:
    """Return the loss and the gradients of a step that is compiled with `memeff.regions`."""
    memeff_compile.reset()
    options = {"memeff.inner": "aot_eager", "memeff.regions": regions}
    call = torch.compile(model, backend="memeff", options=options)
    torch.manual_seed(0)
    loss = call(**batch).loss
    model.zero_grad()
    loss.backward()
    return [loss.detach(), *(None if p.grad is None else p.grad for p in model.parameters())]


UNEQUAL = {"diffllama", "dbrx", "jetmoe", "nllb-moe"}
"""Families in which each layer has another constant, or in which Dynamo breaks each layer's graph
at its experts, so that no graph has several layers."""


def assert_shared(family: Family) -> None:
    """Assert that at least four layers shared a function with others.

    Older transformers branch on values in some families, so that each layer is a graph of its own.
    """
    records = [r for graph in memeff_compile.graphs() for r in graph.records]
    said = [r.sentence for r in records if r.code == "repeated_layers"]
    count = sum(int(sentence.split()[0]) for sentence in said)
    if Version(transformers.__version__) >= Version("5.23"):
        assert count == 0 if family.name in UNEQUAL else count >= 4


EVERY = (*FAMILIES, *FURTHER)


@pytest.mark.parametrize("family", EVERY, ids=lambda family: family.name)
def test_a_step_of_shared_layers_is_the_whole_graphs(family: Family) -> None:
    model = deep(family)
    batch = inputs(family)
    expected = [None if g is None else g.clone() for g in step(model, batch, "off")]
    found = step(model, batch, "on")
    assert_shared(family)
    assert_same_gradients(found, expected)


@pytest.mark.parametrize("family", [f for f in EVERY if f.kind == "causal"], ids=lambda f: f.name)
def test_tokens_of_shared_layers_are_the_whole_graphs(family: Family) -> None:
    model = deep(family).eval()
    ids = inputs(family)["input_ids"]
    given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 3, "do_sample": False}
    tokens = []
    for regions in ("off", "on"):
        memeff_compile.reset()
        memeff_compile.compile(model, inner="aot_eager", regions=regions)
        tokens.append(model.generate(ids, **given))
        memeff_compile.undo(model)
    assert_shared(family)
    assert torch.equal(*tokens)
