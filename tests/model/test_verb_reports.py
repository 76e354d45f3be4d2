"""Reports of all functions on models share a form: a summary line first, everything as JSON."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memeff_compile
from memeff_compile import OptionError, UnsupportedInputError, VerbReport, verb_report
from tests.model.attention.test_calibrate_attention import calibrated

BF16 = torch.bfloat16


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 256)
        self.up, self.down = (nn.Linear(256, 256, bias=False, dtype=BF16) for _ in range(2))
        self.lm_head = nn.Linear(256, 64, bias=False, dtype=BF16)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.down(self.up(self.embed(ids).to(BF16))))


def compressed() -> Model:
    model = Model()
    memeff_compile.compress_(model, min_size=0, progress=False)
    return model


def tiny_llama() -> Any:
    transformers = pytest.importorskip("transformers", reason="caches are of transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 48, "num_attention_heads": 2}
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(vocab_size=64, num_hidden_layers=4, **sizes)
    ).eval()


def ternary() -> Any:
    return verb_report(memeff_compile.ternarize_(Model(), "b1.58", skip=["down"]))


def packed() -> Any:
    return verb_report(memeff_compile.pack_ternary_(memeff_compile.ternarize_(Model())))


def loaded(folder: Path) -> Any:
    memeff_compile.save_compressed(compressed(), folder / "a")
    return memeff_compile.load_compressed_(Model(), folder / "a")


def explained(_: Path) -> Any:
    ids = torch.zeros(2, 8, dtype=torch.long)
    return memeff_compile.explain(Model(), ids)


REPORTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "compress_": (lambda _: verb_report(compressed()), "2 weights compressed"),
    "decompress_": (lambda _: memeff_compile.decompress_(compressed()), "2 weights dense again"),
    "undo": (lambda _: memeff_compile.undo(compressed()), "2 compressed weights dense again"),
    "save_compressed": (
        lambda folder: memeff_compile.save_compressed(compressed(), folder / "a"),
        "2 compressed weights written to",
    ),
    "load_compressed_": (loaded, "2 compressed weights read from"),
    "optim_in_backward": (
        lambda _: memeff_compile.optim_in_backward(
            compressed(), lambda p: torch.optim.SGD([p], lr=0.1), max_norm=1.0
        ),
        "4 weights updated in the backward, 2 of them compressed, gradients clipped to 1.0",
    ),
    "ternarize_": (lambda _: ternary(), "1 linears ternary by 'b1.58', 2 left dense"),
    "pack_ternary_": (lambda _: packed(), "2 linears packed, 32.0 KiB for 256.0 KiB"),
    "use_kv_cache_": (
        lambda _: memeff_compile.use_kv_cache_(tiny_llama(), bits=4, recent=64),
        "every later generate() of LlamaForCausalLM takes KVCache(bits=4, recent=64)",
    ),
    "calibrate_attention": (lambda _: calibrated(levels=("8b",)), "of 4 sites in low bits"),
    "fidelity_report": (
        lambda _: memeff_compile.fidelity_report(
            tiny_llama(), torch.arange(40)[None], steps=8, bits=4
        ),
        "times smaller, KL",
    ),
    "explain": (explained, "Model: "),
    "explain_cache": (
        lambda _: memeff_compile.explain_cache(tiny_llama(), memory="80GB"),
        "LlamaForCausalLM: weights",
    ),
    "last_report": (lambda _: memeff_compile.last_report(), "Nothing has been compiled"),
}


@pytest.mark.parametrize("verb", REPORTS)
def test_every_verb_reports_in_one_kind(tmp_path: Path, verb: str) -> None:
    memeff_compile.reset()
    make, words = REPORTS[verb]
    report = make(tmp_path)
    assert isinstance(report, VerbReport)
    assert words in report.summary
    assert str(report).splitlines()[0] == report.summary
    assert verb.startswith(("explain", "last")) or report.summary.startswith(f"{verb}: ")
    assert isinstance(json.loads(report.to_json()), dict)
    html = report._repr_html_()
    assert html.startswith("<pre>")
    assert ("<details>" in html) == ("\n" in str(report) or verb == "last_report")


def test_no_verb_is_left_out() -> None:
    names = {n for n in memeff_compile.__all__ if n[0].islower() and n not in REPORTS}
    about = {"compile", "reset", "graphs", "linear_cross_entropy", "restart_attention_calls"}
    about |= {"linear_divergence"}
    about |= {"fit", "fit_serving"}  # tables, which tests/planning reads
    about |= {"from_pretrained"}  # keeps what the verb that it stands for reports
    assert names == about | {"compression_report", "verb_report"}


def test_changes_are_numbers_and_say_place_by_place() -> None:
    found = memeff_compile.decompress_(compressed())
    assert found == 2
    assert found.places == {"up.weight": "was win4", "down.weight": "was win4"}
    assert "up.weight  was win4" in str(found)
    assert memeff_compile.decompress_(Model()) == 0
    for other in (copy.deepcopy(found), pickle.loads(pickle.dumps(found))):
        assert (other, str(other)) == (2, str(found))
    left = ternary().left
    assert left == {"down": "skip names it", "lm_head": "an output head, or tied to an embedding"}
    assert packed().places == {"up": "int8", "down": "int8"}


class Deep(nn.Module):
    def __init__(self, layers: int = 12) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Model() for _ in range(layers))


def test_reports_of_many_layers_fold_and_their_details_do_not() -> None:
    model = Deep()
    report = memeff_compile.compress_(model, min_size=0, progress=False)
    dense = sum(each.bytes_before for each in report.compressed) / 2**20
    assert f"24 weights compressed, {dense:.1f} MiB -> " in report.summary
    assert len(str(report).splitlines()) == 5, str(report)
    assert "layers.0.up.weight and 11 more [256, 256] win4" in str(report)
    assert "layers.0.lm_head.weight and 11 more [64, 256]: skip names 'lm_head'" in str(report)
    assert len(report.details().splitlines()) == 1 + len(report.weights) == 49
    assert report._repr_html_().count("<tr>") == 2
    undone = memeff_compile.undo(model)
    assert len(str(undone).splitlines()) == 3
    assert "  layers.0.up.weight and 11 more  dense, was win4" in str(undone)
    assert len(undone.details().splitlines()) == 25
    memeff_compile.ternarize_(model, skip=["down"])
    assert len(str(verb_report(model)).splitlines()) <= 4


def test_the_last_report_of_a_model_is_kept_and_each_verbs_own() -> None:
    model = Model()
    assert verb_report(model) is None
    report = memeff_compile.compress_(model, min_size=0, progress=False)
    assert verb_report(model) is report
    assert verb_report(torch.compile(model)) is report
    assert verb_report(model.up) is None  # no function was called on it
    memeff_compile.decompress_(model)
    latest = verb_report(model)
    assert latest is not None
    assert latest.summary.startswith("decompress_: 2")
    assert verb_report(model, "compress_") is memeff_compile.compression_report(model) is report
    assert verb_report(model, "ternarize_") is None


def test_what_undoes_a_cache_says_what_it_does() -> None:
    model = tiny_llama()
    with memeff_compile.use_kv_cache_(model, bits=8) as undo:
        assert "bits=8" in str(undo)
    undo()


VERBS: dict[str, tuple[object, ...]] = {
    "verb_report": (),
    "compress_": (),
    "compression_report": (),
    "decompress_": (),
    "undo": (),
    "ternarize_": (),
    "pack_ternary_": (),
    "use_kv_cache_": (),
    "calibrate_attention": ([],),
    "fidelity_report": ([],),
    "optim_in_backward": (torch.optim.SGD,),
    "save_compressed": ("nowhere",),
    "load_compressed_": ("nowhere",),
}


@pytest.mark.parametrize("verb", VERBS)
def test_what_is_no_model_is_refused_by_every_verb(verb: str) -> None:
    name = "verb_report" if verb == "compression_report" else verb
    for given in (3, None, "model", Model, [Model()], Model().state_dict()):
        words = rf"^{name} was given a {type(given).__name__}; it needs an nn\.Module: the model"
        with pytest.raises(UnsupportedInputError, match=words):
            getattr(memeff_compile, verb)(given, *VERBS[verb])


def test_a_report_is_asked_for_by_the_name_of_a_verb() -> None:
    model = Model()
    for name in ("ternarise_", "explain", "", 3):
        with pytest.raises(
            OptionError, match=r"verb is .*; one of compress_, .*ternarize_, undo is needed"
        ):
            verb_report(model, name)  # type: ignore[arg-type]
