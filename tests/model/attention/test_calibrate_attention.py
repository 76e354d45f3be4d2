"""calibrate_attention: scores by site and call, the table and its use, no changes to the model."""

from __future__ import annotations

import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any
from unittest import mock
from xml.etree import ElementTree

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import memeff_compile
from memeff_compile import calibrate_attention
from memeff_compile.errors import CalibrationError
from memeff_compile.kernels import quantized_attention as quantized_attention_folder
from memeff_compile.kernels.quantized_attention import attend_under_mask
from memeff_compile.model.attention.calibrate import Calibration, score
from tests.support.coded_attention import relative_l1


class Attend(nn.Module):
    """Attention whose keys lie `loud` times further apart than is good for few bits."""

    def __init__(self, loud: float, repeats: int = 1) -> None:
        super().__init__()
        self.loud = loud
        self.repeats = repeats
        self.weight = 1.0
        self.mask: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.repeats):
            keys = x * self.loud
            causal = self.mask is None
            x = F.scaled_dot_product_attention(x, keys, x, attn_mask=self.mask, is_causal=causal)
        return x * self.weight if self.weight != 1.0 else x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calm = Attend(1.0)
        self.loud = Attend(30.0)
        self.twice = Attend(1.0, repeats=2)

    def forward(self, x: Tensor, steps: int = 1) -> Tensor:
        for _ in range(steps):
            x = self.calm(x) + self.loud(x) + self.twice(x)
        return x


def draw(seed: int = 0, length: int = 60) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, 2, length, 16, generator=generator).bfloat16()


def calibrated(**settings: Any) -> Calibration:
    inputs = [draw(seed) for seed in range(3)]
    return calibrate_attention(Model().eval(), inputs, **settings)


def test_every_site_and_level_has_a_score() -> None:
    table = calibrated(levels=("4b", "8b", "8b+f16"))
    assert set(table["scores"]) == {"calm", "loud", "twice", "twice#1"}
    for found in table["scores"].values():
        (four,), (eight,), (halves,) = (found[level] for level in ("4b", "8b", "8b+f16"))
        assert 0.0 <= four["worst"] <= four["mean"] < eight["mean"] < halves["mean"] <= 1.0
        assert four["std"] > 0.0


def test_the_first_level_that_will_do_is_chosen() -> None:
    scores = calibrated(levels=("4b", "8b"))["scores"]
    edge = scores["calm"]["8b"][0]["worst"]
    assert calibrated(levels=("4b", "8b"), min_score=edge)["levels"]["calm"] == "8b"
    assert (
        calibrated(levels=("4b", "8b"), min_score=min(1.0, edge + 1e-6))["levels"]["calm"]
        == "exact"
    )
    assert set(calibrated(levels=("4b", "8b"), min_score=0.0)["levels"].values()) == {"4b"}


@pytest.mark.parametrize(("share", "count"), [(0.0, 0), (0.25, 1), (0.5, 2), (0.6, 3), (1.0, 4)])
def test_the_worst_share_of_calls_gets_the_more_precise_level(share: float, count: int) -> None:
    table = calibrated(share=share, by="attention")
    found = table["scores"]
    worst = sorted(found, key=lambda site: found[site]["4b"][0]["worst"])
    wanted = {site: "8b" if site in worst[:count] else "4b" for site in found}
    assert table["levels"] == wanted
    assert (table["share"], table["by"], "min_score" in table) == (share, "attention", False)
    assert f"the worst {share} of calls by attention" in str(table)


@pytest.mark.parametrize("by", [None, "output"])
def test_calls_that_change_the_output_most_get_the_more_precise_level(by: str | None) -> None:
    """The calm layer's score is the worst, but its result hardly counts in the output."""
    model = Model().eval()
    model.calm.weight = 1e-4
    inputs = [draw(seed) for seed in range(3)]
    table = calibrate_attention(model, inputs, share=0.25, by=by)
    found = table["scores"]
    assert min(found, key=lambda site: found[site]["4b"][0]["worst"]) == "calm"
    changes = {site: change for site, (change,) in table["changes"].items()}
    assert set(changes) == set(found)
    assert min(changes, key=lambda site: changes[site]) == "calm"
    worst = max(changes, key=lambda site: changes[site])
    assert table["levels"] == {site: "8b" if site == worst else "4b" for site in found}
    lines = str(table).splitlines()
    assert "the worst 0.25 of calls by output" in lines[0]
    assert lines[1].split() == ["site", "calls", "4b", "8b", "output", "chosen"]
    assert lines[2].split()[0] == worst
    x = inputs[0]
    wanted = model(x).float()
    off = []
    for level in ("4b", "8b"):
        with Lower(model.loud, level):
            off.append((model(x).float() - wanted).square().sum() / wanted.square().sum())
    assert changes["loud"] == pytest.approx(
        statistics.mean(
            calibrate_attention(model, [each], share=0.25, by=by)["changes"]["loud"][0]
            for each in inputs
        )
    )
    (first,) = calibrate_attention(model, [x], share=0.25, by=by)["changes"]["loud"]
    assert first == pytest.approx(float(off[0] - off[1]), rel=1e-5)


class Lower:
    """Runs a layer's attention in low bits."""

    def __init__(self, layer: Attend, level: str) -> None:
        def forward(x: Tensor) -> Tensor:
            if level == "exact":
                wide = x.float(), (x * layer.loud).float(), x.float()
                return F.scaled_dot_product_attention(*wide, is_causal=True).to(x.dtype)
            found = attend_under_mask(x, x * layer.loud, x, is_causal=True, level=level)
            assert found is not None
            return found * layer.weight

        self.layer, self.patch = layer, mock.patch.object(layer, "forward", forward)

    def __enter__(self) -> None:
        self.patch.start()

    def __exit__(self, *_: object) -> None:
        self.patch.stop()


def test_changes_of_logits_are_divergences() -> None:
    class Judged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Attend(3.0)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"hidden": x.repeat(1, 9, 1, 1), "logits": 10.0 * self.layer(x).float()}

    model, x = Judged(), draw()
    wanted = model(x)["logits"].log_softmax(-1)
    divergence = {}
    for level in ("4b", "8b", "8b+f16", "exact"):
        with Lower(model.layer, level):
            ours = model(x)["logits"].log_softmax(-1)
        divergence[level] = float((wanted.exp() * (wanted - ours)).sum(-1).mean())
    for pair in (("4b", "8b"), ("4b", "exact"), ("8b+f16", "exact")):
        given = {"share": 0.0, "levels": pair}
        (found,) = calibrate_attention(model, [x], **given)["changes"]["layer"]
        assert found == pytest.approx(divergence[pair[0]] - divergence[pair[1]], rel=1e-3)
        assert found > 0.0


def test_a_result_in_low_bits_has_the_strides_and_the_dtype_of_the_exact_one() -> None:
    class Viewed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                y = F.scaled_dot_product_attention(x, x, x)
            assert y.dtype == torch.bfloat16
            return y.view(-1, *x.shape[2:])

    table = calibrate_attention(Viewed(), [draw().float()], share=1.0, by="output")
    assert table["by"] == "output"


@pytest.mark.parametrize("low", [-math.inf, math.nan])
def test_logits_of_minus_infinity_have_a_divergence_and_nan_has_none(low: float) -> None:
    class Hides(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Attend(3.0)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            logits = self.layer(x).float()
            logits[..., 2] = low
            return {"logits": logits}

    table = calibrate_attention(Hides(), [draw()], share=0.0)
    assert table["by"] == ("output" if low == -math.inf else "attention")
    assert all(math.isfinite(each) for (each,) in table.get("changes", {}).values())


def test_logits_of_one_class_are_compared_as_numbers() -> None:
    class Scores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Attend(3.0)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"logits": self.layer(x).float().mean((1, 2))[:, :1]}

    (found,) = calibrate_attention(Scores(), [draw()], share=0.0)["changes"]["layer"]
    assert found != 0.0


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (lambda model, x: model(x) is None, "returns no floating-point tensor"),
        (lambda model, x: {"ids": model(x).argmax(-1)}, "returns no floating-point tensor"),
        (lambda model, x: model(x + torch.randn_like(x)), "two exact runs on the same input"),
        (lambda model, x: model(x, 2), None),
    ],
)
def test_outputs_that_cannot_be_compared(run: Any, words: str | None) -> None:
    """By default, the scores of the calls are compared then; so they are in loops."""
    inputs = [draw(), draw(1)]
    table = calibrate_attention(Model().eval(), inputs, share=0.5, run=run)
    assert table["by"] == "attention"
    assert "changes" not in table
    if words is None:
        table = calibrate_attention(Model().eval(), inputs, share=0.5, run=run, by="output")
        assert {site: len(found) for site, found in table["changes"].items()} == {
            "calm": 2, "loud": 2, "twice": 2, "twice#1": 2,
        }  # fmt: skip
        each = table["levels"].values()
        calls = [
            call for level in each for call in ([level] * 2 if isinstance(level, str) else level)
        ]
        assert sorted(calls) == ["4b"] * 4 + ["8b"] * 4
        return
    with pytest.raises(CalibrationError, match=words):
        calibrate_attention(Model().eval(), inputs, share=0.5, run=run, by="output")


def test_a_share_counts_calls_not_modules_and_takes_exact() -> None:
    def thrice(model: nn.Module, x: Tensor) -> None:
        for size in (1.0, 12.0, 3.0):
            model(x * size)

    given = {"run": thrice, "levels": ("4b", "exact")}
    table = calibrate_attention(Attend(1.0), [draw()], share=1 / 3, **given)
    scores = [call["worst"] for call in table["scores"][""]["4b"]]
    assert list(table["scores"][""]) == ["4b"]
    place = scores.index(min(scores))
    assert table["levels"][""] == ["exact" if at == place else "4b" for at in range(3)]


def test_each_call_of_a_module_has_its_level() -> None:
    """As the steps of a diffusion model, whose inputs change from noise to image."""

    class Steps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Attend(1.0)

        def forward(self, x: Tensor) -> Tensor:
            first = self.layer(x)
            keys_far_apart = self.layer(x * 12.0)
            return first + keys_far_apart

    model = Steps()
    found = calibrate_attention(model, [draw()], levels=("4b", "8b"), min_score=0.0)
    first, second = (call["worst"] for call in found["scores"]["layer"]["4b"])
    assert second != first
    least = (first + second) / 2
    found = calibrate_attention(model, [draw()], levels=("4b",), min_score=least)
    wanted = ["exact", "4b"] if first < second else ["4b", "exact"]
    assert found["levels"]["layer"] == wanted


class Twice(nn.Module):
    """One module called twice, with two calls of attention in each."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Attend(1.0, repeats=2)

    def forward(self, x: Tensor) -> Tensor:
        first: Tensor = self.layer(x)
        return first + self.layer(x * 12.0)


def compiled(model: nn.Module, table: Any, inner: str = "aot_eager") -> Any:
    options = {
        "memeff.attention": table,
        "memeff.attention.length": 0,
        "memeff.inner": inner,
    }
    return torch.compile(model, backend="memeff", options=options)


def fresh() -> None:
    torch._dynamo.reset()
    memeff_compile.reset()
    memeff_compile.restart_attention_calls()


def test_calibration_and_the_compiler_name_repeated_calls_alike() -> None:
    model = Twice().eval()
    scores = calibrate_attention(model, [draw()])["scores"]
    assert {site: len(found["8b"]) for site, found in scores.items()} == {"layer": 2, "layer#1": 2}
    table = {"layer": ["exact", "8b"], "layer#1": ["8b+f16", "exact"]}
    fresh()
    with torch.no_grad():
        compiled(model, table)(draw())
    records = memeff_compile.last_report().records
    ours = [r for r in records if r.pass_name == "quantize_attention"]
    assert sorted((r.code, r.sites) for r in ours) == [
        ("exact_in_table", 2),
        ("rewrote", 1),
        ("rewrote", 1),
    ]
    after = memeff_compile.graphs()[-1].after
    first, second = after.split("memeff.quantized_attention(")[1:]
    assert "level='8b+f16'" in first
    assert "level=" not in second  # the default, 8b


def test_a_loop_takes_the_levels_of_its_steps() -> None:
    """One graph, called for each step, is compiled once."""
    model = Attend(1.0).eval()
    levels = ["8b+f16", "exact", "8b"]
    fresh()
    step = compiled(model, {"": levels})
    x = draw()
    with torch.no_grad():
        at = {
            level: attend_under_mask(x, x, x, is_causal=True, level=level)
            for level in ("8b", "8b+f16")
        }
        at["exact"] = model(x)
        for level in levels * 2:
            assert torch.equal(step(x), at[level])
        step(x)
        memeff_compile.restart_attention_calls()
        assert torch.equal(step(x), at[levels[0]])
    assert len(memeff_compile.last_report().graphs) == 1
    sentence = next(r.sentence for r in memeff_compile.last_report().records if r.sites)
    assert "level by call: 8b+f16 x 1, exact x 1, 8b x 1" in sentence


class Checkpointed(Attend):
    """The same inside a checkpoint, whose body is a separate graph."""

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return found


@pytest.mark.usefixtures("inductors_loops")
@pytest.mark.parametrize("kind", [Attend, Checkpointed])
@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_a_graph_compiled_anew_counts_on(kind: type[Attend], inner: str) -> None:
    """The counter is a buffer of the graph, which its next graph finds; another model has its own.

    Begun once, a counter is restarted where it stands.
    """
    levels = ["8b+f16", "exact", "8b"]
    fresh()
    seen: list[str] = []
    plain = quantized_attention_folder.by_call._next
    by_call = mock.patch.object(
        quantized_attention_folder.by_call,
        "_next",
        lambda *args: seen.append(plain(*args)) or seen[-1],
    )
    with torch.no_grad(), by_call:
        step = compiled(kind(1.0).eval(), {"": levels}, inner)
        step(draw()), step(draw(length=40)), step(draw())
        assert seen == levels
        other = compiled(nn.Sequential(kind(1.0)).eval(), {"0": levels}, inner)
        other(draw()), step(draw()), other(draw()), step(draw())
        assert seen[3:] == [levels[0], levels[0], levels[1], levels[1]]
        memeff_compile.restart_attention_calls()
        step(draw()), other(draw())
        assert seen[7:] == [levels[0]] * 2
    for graph in memeff_compile.graphs():
        assert "counter=" in graph.after


def test_a_table_of_a_loop_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiled loop uses each call's calibrated level."""
    model = Twice().eval()
    inputs = [draw(seed) * (1.0 + 5.0 * seed) for seed in range(3)]

    def loop(run: Any, given: Any) -> list[Tensor]:
        return [run(each) for each in inputs]

    table = calibrate_attention(model, [None], run=loop, levels=("4b", "8b"), min_score=0.9)
    table["levels"] = {"layer": ["4b", "8b", "exact", "8b", "4b", "8b"], "layer#1": "8b+f16"}
    seen: list[str] = []
    by_call = quantized_attention_folder.by_call
    attend = by_call.quantized_attention
    monkeypatch.setattr(
        by_call,
        "quantized_attention",
        lambda *args, level, **rest: seen.append(level) or attend(*args, level=level, **rest),
    )
    fresh()
    with torch.no_grad():
        loop(compiled(model, table), None)
    assert seen == ["4b", "8b", "8b", "4b", "8b"]


def test_the_table_is_an_option_and_survives_json() -> None:
    table = calibrated(min_score=0.9)
    stored = json.loads(json.dumps(table))
    assert stored == table
    model, x = Model().eval(), draw(7)
    for given in (table, stored):
        options = {
            "memeff.attention": given,
            "memeff.attention.length": 0,
            "memeff.inner": "aot_eager",
        }
        torch._dynamo.reset()
        memeff_compile.reset()
        with torch.no_grad():
            found = torch.compile(model, backend="memeff", options=options)(x)
        chosen = [level for level in table["levels"].values() if level != "exact"]
        assert chosen
        records = memeff_compile.last_report().records
        fired = sum(r.sites for r in records if r.action == "rewrote" and "8b" in r.sentence)
        assert fired == len(chosen)
        assert relative_l1(found, model(x)) <= 0.08


def test_the_table_prints_and_draws(tmp_path: Path) -> None:
    calibrated(share=0.5).plot(tmp_path / "share.svg")
    table = calibrated(levels=("4b", "8b"), min_score=0.9)
    lines = str(table).splitlines()
    assert lines[0].startswith("calibrate_attention: ")
    assert "of 4 sites in low bits" in lines[0]
    assert "at least 0.9 is wanted" in lines[0]
    assert lines[1].split() == ["site", "calls", "4b", "8b", "chosen"]
    worst = [float(line.split()[2]) for line in lines[2:]]
    assert len(worst) == 4
    assert worst == sorted(worst)
    table.plot(tmp_path / "scores.svg")
    drawing = ElementTree.parse(tmp_path / "scores.svg").getroot()
    words = [each.text for each in drawing.iter("{http://www.w3.org/2000/svg}text")]
    assert {"calm", "loud", "twice#1", "4b", "8b", "0.9"} <= set(words)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib", None)
        with pytest.raises(CalibrationError, match="pip install matplotlib"):
            table.plot(tmp_path / "other.svg")
    assert not (tmp_path / "other.svg").exists()


def test_the_model_and_its_results_are_left_alone() -> None:
    model, x = Model().eval(), draw()
    wanted = model(x)
    seen: list[Tensor] = []
    calibrate_attention(model, [x], run=lambda m, given: seen.append(m(given)))
    assert torch.equal(seen[0], wanted)
    assert not seen[0].requires_grad
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())
    assert torch.equal(model(x), wanted)


def test_inputs_come_in_every_form() -> None:
    model = Model().eval()
    forms: list[Any] = [draw(), (draw(), 2), {"x": draw(), "steps": 2}]
    for given, calls in zip(forms, (1, 2, 2), strict=True):
        table = calibrate_attention(model, [given])
        assert len(table["scores"]["calm"]["8b"]) == calls
    for alone in (forms[0], forms[2]):
        assert calibrate_attention(model, alone) == calibrate_attention(model, [alone])


def test_stored_masks_are_scored() -> None:
    model, length = Model().eval(), 60
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    wanted = calibrate_attention(model, [draw()])["scores"]
    for mask in (
        causal,
        torch.zeros(length, length).masked_fill(~causal, float("-inf")).bfloat16(),
    ):
        for layer in (model.calm, model.loud, model.twice):
            layer.mask = mask[None, None]
        found = calibrate_attention(model, [draw()])["scores"]
        for site, levels in wanted.items():
            theirs = found[site]["8b"][0]["mean"]
            assert theirs == pytest.approx(levels["8b"][0]["mean"], abs=2e-3)


def test_a_bias_and_masks_that_differ_between_heads_are_not_scored() -> None:
    q = draw()
    assert attend_under_mask(q, q, q, torch.randn(60, 60)) is None
    mask = torch.ones(1, 2, 60, 60, dtype=torch.bool)
    assert attend_under_mask(q, q, q, mask) is not None
    mask[0, 1, :, 5] = False
    assert attend_under_mask(q, q, q, mask) is None


def test_a_score_is_cosine_times_one_less_the_distance() -> None:
    wanted = torch.tensor([1.0, 2.0, -2.0])
    assert score(wanted, wanted) == pytest.approx(1.0)
    assert score(wanted * 1.1, wanted) == pytest.approx(0.9)
    assert score(-wanted, wanted) == 0.0
    assert score(torch.full((3,), torch.nan), wanted) == 0.0
    assert score(torch.zeros(3), torch.zeros(3)) == 1.0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"min_score": 1.5}, "min_score is 1.5"),
        ({"share": -0.5}, "share is -0.5"),
        ({"share": 0.5, "min_score": 0.9}, "share is 0.5; one of them is needed"),
        ({"share": 0.5, "levels": ("4b",)}, "share needs two"),
        ({"by": "output"}, "together with share"),
        ({"share": 0.5, "by": "loss"}, "by is 'loss'; 'output' or 'attention' is needed"),
        ({"share": 0.5, "levels": ("exact", "8b")}, "share needs two"),
        ({"levels": ("8b", "exact")}, "levels is"),
        ({"levels": ("8b", "2b")}, "a list of '8b', '8b\\+f16', '4b' is needed"),
        ({"levels": "8b"}, "a list of"),
        ({"levels": ()}, "a list of"),
        ({"inputs": []}, "no inputs were given"),
        ({"inputs": "a prompt"}, "inputs is 'a prompt'; a list"),
        ({"inputs": None}, "inputs is None; a list"),
        ({"model": nn.Linear(16, 16).bfloat16()}, "attn_implementation='sdpa'"),
    ],
    ids=str,
)
def test_what_cannot_be_calibrated_is_named(settings: dict[str, Any], words: str) -> None:
    given = {"model": Model().eval(), "inputs": [draw()], **settings}
    with pytest.raises(CalibrationError, match=words):
        calibrate_attention(given.pop("model"), given.pop("inputs"), **given)
