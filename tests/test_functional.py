"""memeff_compile.linear_cross_entropy, the plain function, against F.cross_entropy on built logits."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import Categorical

import memeff_compile
from memeff_compile.errors import TargetRangeError, UnsupportedInputError
from memeff_compile.functional import Stats
from memeff_compile.kernels.linear_cross_entropy import walk

D, V = 12, 70


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (
        torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)
        for size in ((3, 5, D), (V, D), (V,))
    )
    target = torch.randint(0, V, (3, 5), generator=generator)
    target[1, :3] = -100
    return hidden.requires_grad_(), weight.requires_grad_(), target, bias.requires_grad_()


def gradients(loss: Tensor, *leaves: Tensor) -> list[Tensor]:
    cotangent = torch.linspace(0.5, 1.5, loss.numel(), dtype=loss.dtype).view(loss.shape)
    return list(torch.autograd.grad(loss, leaves, cotangent))


def assert_equals_eager(settings: dict[str, Any], eager: dict[str, Any]) -> None:
    hidden, weight, target, bias = inputs()
    found = memeff_compile.linear_cross_entropy(hidden, weight, target, bias, **settings)
    logits = F.linear(hidden, weight, bias)
    expected = F.cross_entropy(logits.flatten(0, 1), target.flatten(), **eager)
    expected = expected if expected.dim() == 0 else expected.view(target.shape)
    torch.testing.assert_close(found, expected)
    leaves = hidden, weight, bias
    torch.testing.assert_close(gradients(found, *leaves), gradients(expected, *leaves))


WEIGHTS = torch.linspace(0.1, 2, V, dtype=torch.float64)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("class_weight", [None, WEIGHTS], ids=["", "class weights"])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1, 1.0])
def test_every_reduction_equals_cross_entropy(
    reduction: str, class_weight: Tensor | None, label_smoothing: float
) -> None:
    common = {"reduction": reduction, "label_smoothing": label_smoothing}
    assert_equals_eager(
        {**common, "class_weight": class_weight}, {**common, "weight": class_weight}
    )


def test_any_ignore_index_equals_cross_entropy() -> None:
    hidden, weight, target, _ = inputs()
    target[target == -100] = 7
    found = memeff_compile.linear_cross_entropy(hidden, weight, target, ignore_index=7)
    logits = F.linear(hidden, weight).flatten(0, 1)
    torch.testing.assert_close(found, F.cross_entropy(logits, target.flatten(), ignore_index=7))
    all_count = memeff_compile.linear_cross_entropy(hidden, weight, target, ignore_index=None)
    torch.testing.assert_close(all_count, F.cross_entropy(logits, target.flatten()))


def test_scale_and_softcap_change_the_logits_as_documented() -> None:
    hidden, weight, target, bias = inputs()
    found = memeff_compile.linear_cross_entropy(
        hidden, weight, target, bias, scale=0.5, softcap=3.0
    )
    logits = 3.0 * torch.tanh(0.5 * F.linear(hidden, weight, bias) / 3.0)
    torch.testing.assert_close(found, F.cross_entropy(logits.flatten(0, 1), target.flatten()))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_z_loss_is_added_over_the_rows_that_count(reduction: str) -> None:
    hidden, weight, target, bias = inputs()
    found = memeff_compile.linear_cross_entropy(
        hidden, weight, target, bias, z_loss=1e-2, reduction=reduction
    )
    logits = F.linear(hidden, weight, bias)
    plain = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction=reduction)
    squares = logits.logsumexp(-1).square() * (target != -100)
    extra = {"mean": squares.sum() / (target != -100).sum(), "sum": squares.sum()}
    expected = plain.view(found.shape) + 1e-2 * extra.get(reduction, squares)
    torch.testing.assert_close(found, expected)
    leaves = hidden, weight, bias
    torch.testing.assert_close(gradients(found, *leaves), gradients(expected, *leaves))


def test_stats_and_their_gradients_equal_those_of_built_logits() -> None:
    hidden, weight, target, bias = inputs()
    loss, stats = memeff_compile.linear_cross_entropy(
        hidden, weight, target, bias, return_stats=True
    )
    assert isinstance(stats, Stats)
    logits = F.linear(hidden, weight, bias)
    chosen = target.clamp(min=0).unsqueeze(-1)
    log_probs = logits.log_softmax(-1).gather(-1, chosen).squeeze(-1) * (target != -100)
    expected = Stats(
        logits.logsumexp(-1), Categorical(logits=logits).entropy(), logits.argmax(-1), log_probs
    )
    for ours, theirs in zip(stats, expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert not stats.top.requires_grad
    leaves = hidden, weight, bias
    for name in ("lse", "entropy", "log_probs"):
        ours, theirs = getattr(stats, name), getattr(expected, name)
        torch.testing.assert_close(
            torch.autograd.grad(ours.sum(), leaves, retain_graph=True),
            torch.autograd.grad(theirs.sum(), leaves, retain_graph=True),
        )
    torch.testing.assert_close(loss, -expected.log_probs.sum() / (target != -100).sum())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_narrow_inputs_give_an_fp32_loss_and_gradients_in_their_dtype(dtype: torch.dtype) -> None:
    hidden, weight, target, _ = inputs(dtype)
    loss = memeff_compile.linear_cross_entropy(hidden, weight, target)
    loss.backward()
    assert loss.dtype == torch.float32
    assert hidden.grad is not None
    assert hidden.grad.dtype == dtype
    logits = F.linear(hidden.float(), weight.float()).flatten(0, 1)
    torch.testing.assert_close(loss, F.cross_entropy(logits, target.flatten()))


def test_autocast_casts_the_operands_as_linear_would() -> None:
    hidden, weight, target, bias = inputs(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = memeff_compile.linear_cross_entropy(hidden.bfloat16(), weight, target, bias)
    narrow = (t.bfloat16() for t in (hidden, weight))
    expected = memeff_compile.linear_cross_entropy(*narrow, target, bias.bfloat16())
    assert torch.equal(mixed, expected)


def test_all_rows_ignored_or_none_give_nan_as_eager() -> None:
    hidden, weight, target, _ = inputs()
    ignored = torch.full_like(target, -100)
    assert memeff_compile.linear_cross_entropy(hidden, weight, ignored).isnan()
    assert memeff_compile.linear_cross_entropy(hidden[:0], weight, target[:0]).isnan()
    assert memeff_compile.linear_cross_entropy(hidden, weight, ignored, reduction="sum") == 0


def test_one_row_without_leading_dimensions_is_served() -> None:
    hidden, weight, target, _ = inputs()
    loss = memeff_compile.linear_cross_entropy(hidden[0, 0], weight, target[0, 0])
    torch.testing.assert_close(loss, F.cross_entropy(weight @ hidden[0, 0], target[0, 0]))


COMPILED: list[dict[str, Any]] = [
    {},
    {"reduction": "sum", "softcap": 20.0, "scale": 0.5},
    {"class_weight": torch.linspace(0.5, 1.5, V, dtype=torch.float64), "ignore_index": None},
    {"label_smoothing": 0.1, "z_loss": 1e-3, "return_stats": True},
]


QUICK = [(1, "forward"), (3, "backward")]
"""Cases compiled with symbols among the quick tests: each pass, one number and statistics."""


@pytest.mark.parametrize(
    ("settings", "pass_", "dynamic"),
    [
        pytest.param(
            settings,
            pass_,
            dynamic,
            id=f"{','.join(settings) or 'plain'}-{pass_}-{dynamic}",
            marks=[] if dynamic is None or (place, pass_) in QUICK else pytest.mark.slow,
        )
        for place, settings in enumerate(COMPILED)
        for pass_ in ("forward", "backward")
        for dynamic in (None, True)
    ],
)
def test_it_compiles_into_one_graph(
    settings: dict[str, Any], pass_: str, dynamic: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In whichever pass the gradients of a loss that is one number are made."""
    monkeypatch.setattr(walk, "is_faster_in_one_walk", lambda _: pass_ == "forward")
    torch._dynamo.reset()
    hidden, weight, target, bias = inputs()
    target = target.clamp(min=0)

    def step(hidden: Tensor, weight: Tensor) -> Any:
        return memeff_compile.linear_cross_entropy(hidden, weight, target, bias, **settings)

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    found, expected = compiled(hidden, weight), step(hidden, weight)
    torch.testing.assert_close(found, expected)
    losses = [made[0] if isinstance(made, tuple) else made for made in (found, expected)]
    gradients = [torch.autograd.grad(loss, (hidden, weight)) for loss in losses]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"reduction": "average"}, "'mean', 'sum' or 'none'"),
        ({"label_smoothing": 1.5}, "between 0 and 1"),
        ({"z_loss": -1.0}, "z_loss is -1.0"),
        ({"z_loss": float("nan")}, "z_loss is nan"),
        ({"z_loss": None}, "z_loss is None; a number"),
        ({"label_smoothing": "some"}, "label_smoothing is 'some'; a number"),
        ({"scale": float("nan")}, "scale is nan"),
        ({"scale": "1"}, "scale is '1'; a number"),
        ({"ignore_index": "pad"}, "ignore_index is 'pad'; a whole number"),
        ({"softcap": -2.0}, "softcap is -2.0"),
        ({"filter": "most"}, "known filters are"),
        ({"class_weight": torch.ones(V - 1)}, "class_weight has 69 elements"),
        ({"class_weight": torch.ones(V, dtype=torch.int64)}, "class_weight has dtype int64"),
        ({"class_weight": torch.ones(V, requires_grad=True)}, "Detach it"),
        ({"bias": torch.ones(V)}, "bias has dtype float32"),
    ],
    ids=str,
)
def test_bad_settings_are_refused_in_a_sentence(changes: dict[str, Any], words: str) -> None:
    hidden, weight, target, _ = inputs()
    with pytest.raises(UnsupportedInputError, match=words):
        memeff_compile.linear_cross_entropy(hidden, weight, target, **changes)


def test_what_is_no_tensor_is_named() -> None:
    hidden, weight, _, _ = inputs()
    with pytest.raises(UnsupportedInputError, match="target is a list, not a tensor"):
        memeff_compile.linear_cross_entropy(hidden, weight, [1, 2])  # type: ignore[call-overload]


def test_target_that_is_no_class_is_named() -> None:
    hidden, weight, target, _ = inputs()
    target[2, 1] = V
    with pytest.raises(TargetRangeError, match=f"holds {V}"):
        memeff_compile.linear_cross_entropy(hidden, weight, target)


def test_example_of_the_page_runs() -> None:
    page = Path(__file__).resolve().parents[1] / "docs" / "passes" / "fuse-linear-cross-entropy.md"
    (example,) = re.findall(r"```python\n(.*?)```", page.read_text(), re.S)
    names: dict[str, Any] = {}
    exec(example, names)
    assert names["hidden"].grad is not None
    assert names["accuracy"].dim() == 0
