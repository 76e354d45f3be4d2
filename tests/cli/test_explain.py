"""explain for a user: the command, the figure, and errors for bad input."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memeff_compile
from memeff_compile import __main__ as command_line
from memeff_compile.errors import ExplainError, OptionError
from memeff_compile.planning.explain import Explanation
from memeff_compile.planning.setting import Facts, Footprint, Moment
from memeff_compile.planning.sizes import BATCH, LENGTH, Sizes
from memeff_compile.report import Report
from tests.support.stacks import Stack, token_ids

FACTORIES = "tests.support.stacks"


@pytest.fixture
def small() -> Explanation:
    """Return an explanation made by hand, without a capture."""
    facts = Facts(1 << 30, 0, 0, 0, 1 << 29, 1 << 29, 1 << 30)
    before = Footprint(facts, (Moment("backward", {"logits": 8192 * BATCH * LENGTH}),), {})
    after = Footprint(facts, (Moment("backward", {"activations": 512 * BATCH * LENGTH}),), {})
    return Explanation("Small", Sizes(4, 1024), 1024, before, after, Report(()))


def test_command_prints_a_plan_and_writes_json_and_figure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="draws a figure")
    data, figure = tmp_path / "plan.json", tmp_path / "plan.png"
    arguments = ["explain", f"{FACTORIES}:stack_of_two", "--memory", "1GiB", "--gpus", "2"]
    status = command_line.main([*arguments, "--json", str(data), "--png", str(figure)])
    printed = capsys.readouterr()
    assert status == 0, printed.err
    assert "rewrote    fuse_linear_cross_entropy in head" in printed.out
    assert "each of 2 GPUs, FSDP, 1.00 GiB each, adamw" in printed.out
    plan = json.loads(data.read_text())["plan"]
    assert plan["setting"]["optimizer"] == "adamw"
    assert plan["with"]["peak_bytes"] < plan["without"]["peak_bytes"]
    assert f"{plan['with']['largest_batch_per_gpu']:,}" in printed.out
    assert figure.read_bytes().startswith(b"\x89PNG")


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return the command's stderr after a refusal."""
    assert command_line.main(["explain", *arguments]) == 1
    printed = capsys.readouterr()
    assert not printed.out
    assert "Traceback" not in printed.err
    return printed.err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "There is no config at"),
        ("not json", "is not valid JSON: Expecting value"),
        ('{"hidden_size": 3}', "has no model_type"),
        ("[]", "has no model_type"),
        ('{"model_type": "no_such_model"}', "no_such_model"),
        ('{"model_type": "llama", "hidden_size": "wide"}', "hidden_size"),
        (
            '{"model_type": "llama", "hidden_size": 100, "num_attention_heads": 3}',
            "(100) is not a multiple of the number of attention heads (3)",
        ),
    ],
    ids=[
        *("no file", "no json", "no model type", "a list", "unknown model type", "wrong value"),
        "values that do not fit each other",
    ],
)
def test_bad_configs_are_named(
    text: str | None, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers", reason="reads a config")
    path = tmp_path / "config.json"
    if text is not None:
        path.write_text(text)
    said = refused(capsys, str(path))
    assert words in said
    assert str(path) in said


def test_without_transformers_a_config_is_refused_and_the_way_out_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text("{}")
    hide(monkeypatch, "transformers")
    said = refused(capsys, str(tmp_path))
    assert "pip install transformers" in said
    assert "module:function" in said


def hide(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    """Pretend that a package is not installed."""
    real: Callable[..., Any] = importlib.import_module

    def hiding(name: str, *arguments: str) -> object:
        if name.split(".")[0] == missing:
            raise ImportError(f"No module named {name!r}")
        return real(name, *arguments)

    monkeypatch.setattr(importlib, "import_module", hiding)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["no_such_module:make"], "'no_such_module' cannot be imported"),
        ([f"{FACTORIES}:missing"], "has no function 'missing'"),
        ([f"{FACTORIES}:unbuildable"], "cannot be built on device 'meta'"),
        ([f"{FACTORIES}:triple"], "may return a model"),
        ([f"{FACTORIES}:module_alone"], "input_ids"),
        ([f"{FACTORIES}:stack_of_two", "--checkpointing"], "leave --checkpointing out"),
        ([f"{FACTORIES}:stack_of_two", "--batch", "0"], "at least 1"),
        ([f"{FACTORIES}:stack_of_two", "--memory", "much"], "such as 80GB"),
        ([f"{FACTORIES}:stack_of_two", "--memory", "80"], "such as 80GB"),
        (
            [f"{FACTORIES}:stack_of_two", "--optimizer", "lion"],
            "'adamw', 'adamw8bit', 'sgd', 'none'",
        ),
        ([f"{FACTORIES}:stack_of_two", "--json", "no/such/folder/x.json"], "There is no folder"),
        ([f"{FACTORIES}:stack_of_two", "--device", "tpu"], "'cuda' or 'cpu'"),
        ([f"{FACTORIES}:stack_of_two", "--option", "memeff.logitz=eager"], "memeff.logits"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_cannot_be_explained_is_said_in_words(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in refused(capsys, *arguments)


def test_a_call_that_fails_says_what_it_needs() -> None:
    with pytest.raises(ExplainError, match="Pass the inputs that its forward needs"):
        memeff_compile.explain(Stack(depth=1), token_ids(2, 8))
    with pytest.raises(ExplainError, match="no tensor"):
        memeff_compile.explain(Stack(depth=1))


def test_a_model_that_is_never_captured_is_refused() -> None:
    class Hidden(nn.Module):
        @torch.compiler.disable
        def forward(self, ids: Tensor) -> Tensor:
            return ids + 1

    with pytest.raises(ExplainError, match="without a graph being captured"):
        memeff_compile.explain(Hidden(), token_ids(2, 8))


def test_an_option_of_ours_is_checked() -> None:
    with pytest.raises(OptionError, match=r"memeff\.logits"):
        memeff_compile.explain(Stack(depth=1), options={"memeff.logitz": "eager"})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"memeff.inner": "eager"}, r"memeff\.inner: a plan is of the memory of Inductor's"),
        ({"memeff.verify": "on"}, r"memeff\.verify: a plan is of the calls after the first"),
        ({"memeff.mode": "max-autotune"}, r"memeff\.mode: a plan is of Inductor's default mode"),
        ({"max_autotune": True}, "'max_autotune': no code is made"),
    ],
    ids=str,
)
def test_an_option_that_changes_nothing_in_a_plan_is_refused(
    options: dict[str, Any], words: str
) -> None:
    with pytest.raises(OptionError, match=f"explain cannot honour {words}.*Leave it out"):
        memeff_compile.explain(Stack(depth=1), token_ids(2, 8), token_ids(2, 8), options=options)


def test_the_codec_among_the_options_is_that_of_the_plan(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(1024, 1024, bias=False)).to(torch.bfloat16)
    x = torch.zeros(2, 1024, dtype=torch.bfloat16, device="meta")
    dense = memeff_compile.explain(model, x)
    coded = memeff_compile.explain(model, x, options={"memeff.weights": "win4"})
    step: dict[str, Any] = {"optimizer": "sgd", "in_backward": True}
    saved = dense.plan(**step).after.groups["weights"] - coded.plan(**step).after.groups["weights"]
    assert saved == pytest.approx((2 << 20) * (1 - 1.01 * 12.02 / 16), abs=2)
    assert "sgd in the backward, weights in win4" in str(coded.plan(**step))
    with pytest.raises(ExplainError, match="trained by optim_in_backward alone"):
        coded.plan(optimizer="adamw")
    assert coded.plan(weights="dense").before.peak == dense.plan().before.peak


def test_what_decoding_does_not_plan_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    source = f"{FACTORIES}:stack_of_two"
    said = refused(capsys, source, "--cache", "--memory", "1GB", "--master-weights")
    assert "--cache plans decoding, in which --master-weights would change nothing" in said


def test_a_setting_is_checked(small: Explanation) -> None:
    with pytest.raises(ExplainError, match="it takes batch, length, memory, optimizer"):
        small.plan(optimiser="adamw")
    silent = Explanation("Silent", Sizes(1, 1), 0, small.before, small.after, Report(()))
    with pytest.raises(ExplainError, match="no head with a loss"):
        silent.plan(accounting="paper")


def test_a_figure_without_matplotlib_is_refused(
    small: Explanation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide(monkeypatch, "matplotlib")
    with pytest.raises(ExplainError, match="pip install matplotlib"):
        small.plan().save_figure(tmp_path / "plan.png")


def test_the_figure_shows_each_part_of_both_columns(
    small: Explanation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib", reason="draws a figure")
    from matplotlib import pyplot

    drawn: list[Any] = []
    monkeypatch.setattr(pyplot, "close", drawn.append)
    plan = small.plan(memory="8GiB", optimizer="adamw")
    plan.save_figure(tmp_path / "plan.png")
    memory, batches = drawn[0].axes
    heights = [round(bar.get_height(), 6) for bars in memory.containers for bar in bars]
    gib = [side.groups[g] / 2**30 for g in plan.before.groups for side in (plan.before, plan.after)]
    assert heights == [round(value, 6) for value in gib]
    assert [bar.get_height() for bar in batches.containers[0]] == [
        side.largest_batch or 0 for side in (plan.before, plan.after)
    ]
    assert "sequences of 1,024" in batches.get_ylabel()
