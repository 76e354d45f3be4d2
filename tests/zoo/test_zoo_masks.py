"""Unmodified transformers models with padding, packed sequences, windows and softcaps.

Their masks become arguments of memeff::attention; a fixture pretends that it is fast on this CPU,
where the reference engine runs. Every token must equal the model's, also padding, which attends to
no key; so must the gradients.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memeff_compile
from memeff_compile.passes.attention import told_to_op as masked_attention
from tests.support.zoo import FAMILIES, build, inputs

transformers = pytest.importorskip("transformers", reason="the zoo is built from its configs")

from tests.support.older_masks import use_older_masks  # noqa: E402

BY_NAME = {family.name: family for family in FAMILIES}
NAME = "recover_attention"
LENGTH = 12
WINDOWED = {"mistral": {"sliding_window": 4}, "gemma2": {"sliding_window": 4}}


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masked_attention, "why_not_fast", lambda *_: "")


def extra(side: str, ids: Tensor) -> dict[str, Any]:
    if side == "none":
        return {}
    if side == "packed":
        lengths = (5, 4, LENGTH - 9)
        positions = torch.cat([torch.arange(length) for length in lengths])
        return {"position_ids": positions.expand(2, -1), "use_cache": False}
    mask = torch.ones_like(ids)
    mask[0, (slice(0, 3) if side == "left" else slice(-3, None))] = 0
    return {"attention_mask": mask}


def outcome(run: Any, model: nn.Module, mode: str, given: dict[str, Any]) -> list[Tensor]:
    """Return logits, and for training the gradients of all weights."""
    labels = given["input_ids"]
    if mode == "prefill":
        with torch.no_grad():
            return [run(**given).logits]
    model.zero_grad()
    result = run(**given, labels=labels)
    logits = result.logits.detach() + 0
    result.loss.backward()
    return [logits, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def check(name: str, attention: str, side: str, mode: str, *, is_checkpointed: bool = False) -> str:
    """Compare with the model itself; return the graph's rewrites."""
    overrides = WINDOWED.get(name, {})
    model = build(BY_NAME[name], attn_implementation=attention, **overrides)
    if is_checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    ids = inputs(BY_NAME[name], length=LENGTH)["input_ids"]
    given = {"input_ids": ids, **extra(side, ids)}
    expected = outcome(model, model, mode, given)
    torch._dynamo.reset()
    memeff_compile.reset()
    inner = "aot_eager" if is_checkpointed else "eager"
    compiled = torch.compile(model, backend="memeff", options={"memeff.inner": inner})
    found = outcome(compiled, model, mode, given)
    assert len(found) == len(expected)
    for part in (
        slice(0, 1),
        slice(1, None),
    ):  # logits; gradients, of which some are rounding alone
        largest = max((float(t.abs().max()) for t in expected[part]), default=0.0)
        for ours, theirs in zip(found[part], expected[part], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=1e-6 * largest)
    report = memeff_compile.last_report()
    assert not [r for r in report.records if r.action == "internal_error"], report.details()
    declined = [r for r in report.records if r.pass_name == NAME and r.action == "declined"]
    assert not declined, report.details()
    return "\n".join(graph.after for graph in memeff_compile.graphs())


EVERY = [
    (name, attention, side, mode)
    for name in ("llama", "mistral", "gemma2", "bert")
    for attention in ("sdpa", "eager")
    for side in ("left", "right", "packed", "none")
    for mode in ("train", "prefill")
    if not (name == "bert" and (side == "packed" or mode == "prefill"))
    if (name, attention) != ("gemma2", "sdpa")  # transformers has none
]
FAST = {
    ("mistral", "eager", "packed", "train", "5.23"),
    ("gemma2", "eager", "left", "train", "5.23"),
    ("mistral", "sdpa", "packed", "prefill", "5.17"),
    ("bert", "sdpa", "right", "train", "5.17"),
}


def _needs_op(name: str, attention: str, side: str) -> bool:
    softcap = name == "gemma2" and attention == "eager"
    return softcap or side != "none" or name in WINDOWED


@pytest.mark.parametrize(
    ("name", "attention", "side", "mode", "stack"),
    [
        pytest.param(*case, stack, marks=() if (*case, stack) in FAST else pytest.mark.slow)
        for case in EVERY
        for stack in ("5.23", "5.17")
    ],
)
def test_models_attend_as_before(
    name: str, attention: str, side: str, mode: str, stack: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if stack == "5.17":
        use_older_masks(monkeypatch)
    after = check(name, attention, side, mode)
    assert ("memeff.attention" in after) == _needs_op(name, attention, side)
    assert "softmax" not in after.replace("log_softmax", "")


@pytest.mark.parametrize(
    "case",
    [("llama", "sdpa", "left"), pytest.param(("gemma2", "eager", "right"), marks=pytest.mark.slow)],
)
def test_checkpointed_layers_share_the_table_of_the_model(case: tuple[str, str, str]) -> None:
    after = check(*case, "train", is_checkpointed=True)
    assert after.count("memeff.attention(") == 2
    assert after.count("aten.clone(") == 1


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_generation_with_left_padding_gives_the_same_tokens(attention: str) -> None:
    model = build(BY_NAME["llama"], attn_implementation=attention).eval()
    ids = inputs(BY_NAME["llama"], length=20)["input_ids"]
    given = {"attention_mask": torch.ones_like(ids)}
    given["attention_mask"][0, :5] = 0
    settings = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(ids, **given, **settings)
    torch._dynamo.reset()
    memeff_compile.reset()
    model.forward = torch.compile(
        model.forward, backend="memeff", options={"memeff.inner": "eager"}
    )
    assert torch.equal(model.generate(ids, **given, **settings), expected)
    assert any("memeff.attention" in graph.after for graph in memeff_compile.graphs())
