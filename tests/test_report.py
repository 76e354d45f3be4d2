"""The report: its text, its JSON and its store."""

from __future__ import annotations

import json
import re
import threading
from dataclasses import replace

import pytest
import sympy
from expecttest import assert_expected_inline

from memeff_compile import report
from memeff_compile.notebook import bars
from memeff_compile.report import (
    GraphReport,
    LogitsUse,
    Record,
    Report,
    fold_names,
    format_bytes,
)

N, V, D = (sympy.Symbol(name, integer=True, positive=True) for name in "NVD")
SIZES = {"N": 8192, "V": 128256, "D": 2048}

REWROTE = Record(
    "fuse_linear_cross_entropy",
    "rewrote",
    "rewrote",
    "Linear and cross entropy run as memeff::linear_cross_entropy; no N x V tensor is built.",
    source="train.py:12 in forward: loss = F.cross_entropy(self.lm_head(h), labels)",
    module="lm_head",
    bytes_before=8 * N * V,
    bytes_after=sympy.Min(64 << 20, 4 * N * V),
    sizes=SIZES,
)
DEFERRED = Record(
    "defer_logits",
    "deferred",
    "deferred",
    "out.logits is computed from the hidden states on first use.",
    source="model.py:7 in forward: logits = self.lm_head(h)",
    module="lm_head",
    bytes_before=2 * N * V,
    bytes_after=2 * N * D,
    sizes=SIZES,
)
DECLINED = Record(
    "fuse_linear_cross_entropy",
    "declined",
    "logits_reused",
    "The logits are read again by softmax, so they have to exist.",
    hint="compute the softmax outside of the compiled function.",
    source="train.py:14 in forward: p = logits.softmax(-1)",
    bytes_before=4 * N * V,
    sizes=SIZES,
)


def graph(*records: Record, name: str = "graph 0/0", training: bool = True) -> GraphReport:
    """Return the report of a graph of 412 nodes."""
    return GraphReport(name, training, records, nodes=412, seconds=0.018, before="b", after="a")


def test_text_of_a_training_step() -> None:
    report = Report((graph(REWROTE, DEFERRED), graph(DECLINED, name="graph 1/0")))
    assert_expected_inline(
        str(report),
        """\
memeff_compile: a loss is not fused (logits_reused), 2 graphs, 2 changes, 1 declined, 9.69 GiB never allocated
changed: fuse_linear_cross_entropy in lm_head (7.77 GiB), defer_logits in lm_head (1.93 GiB)
next: compute the softmax outside of the compiled function (fuse_linear_cross_entropy:
  logits_reused, would save 3.91 GiB); read out.logits before the weights change; details() has
  the rest.""",
    )
    assert_expected_inline(
        report.details(),
        """\
memeff_compile: a loss is not fused (logits_reused), 2 graphs, 2 changes, 1 declined, 9.69 GiB never allocated

graph 0/0 (training, 412 nodes, our passes 18 ms)
  rewrote    fuse_linear_cross_entropy in lm_head
             train.py:12 in forward: loss = F.cross_entropy(self.lm_head(h), labels)
             Linear and cross entropy run as memeff::linear_cross_entropy; no N x V tensor is
             built.
             Saves 7.77 GiB (7.83 GiB before, 64.0 MiB after): 8*N*V - Min(67108864, 4*N*V) bytes
             with N = 8192, V = 128256.

  deferred   defer_logits in lm_head
             model.py:7 in forward: logits = self.lm_head(h)
             out.logits is computed from the hidden states on first use.
             Saves 1.93 GiB (1.96 GiB before, 32.0 MiB after): 2*N*V - 2*D*N bytes with D = 2048,
             N = 8192, V = 128256.
             Reading out.logits after the weights changed raises; options={'memeff.logits':
             'eager'} restores eager logits.

graph 1/0 (training, 412 nodes, our passes 18 ms): it went on unchanged
  declined   fuse_linear_cross_entropy (logits_reused)
             train.py:14 in forward: p = logits.softmax(-1)
             The logits are read again by softmax, so they have to exist.
             Would save 3.91 GiB: 4*N*V bytes with N = 8192, V = 128256.
             What to do: compute the softmax outside of the compiled function.""",
    )


def test_text_when_nothing_was_found() -> None:
    report = Report((graph(training=False),))
    assert_expected_inline(
        str(report),
        """\
memeff_compile: 1 graph, no changes
changed: nothing
next: nothing here is what a pass rewrites; details() has the graphs.""",
    )
    assert_expected_inline(
        report.details(),
        """\
memeff_compile: 1 graph, no changes

graph 0/0 (inference, 412 nodes, our passes 18 ms): it went on unchanged, no pass found anything to do here""",
    )


def test_text_of_what_went_wrong_comes_before_what_would_save() -> None:
    failed = Record("backend", "mismatch", "verify_failed", "It differs.", "Please report it.")
    report = Report((graph(DECLINED, failed),))
    assert_expected_inline(
        str(report),
        """\
memeff_compile: the loss is not fused (logits_reused), 1 graph, no changes, 1 declined
changed: nothing
next: Please report it (backend: verify_failed); details() has the rest.""",
    )


def test_graphs_without_a_record_are_one_line() -> None:
    names = [f"graph {number}/0" for number in range(24)]
    report = Report((*(graph(name=name) for name in names), graph(REWROTE, name="graph 45/0")))
    text = report.details()
    assert len(text.splitlines()) < 15
    assert_expected_inline(
        text[text.rindex("graph 0/0") :],
        """\
graph 0/0, graph 1/0, graph 2/0, graph 3/0, graph 4/0, graph 5/0, graph 6/0, graph 7/0 and 16
more went on unchanged: no pass found anything to do there.""",
    )


def layers(count: int) -> list[Record]:
    """Return a pass's records about the caches of many layers."""
    said = replace(DEFERRED, pass_name="rewrite_kv_update", action="rewrote", code="rewrote")
    return [replace(said, module=f"model.layers.{n}.self_attn") for n in range(count)]


def test_layers_alike_are_one_in_the_text_and_all_in_the_json() -> None:
    report = Report((graph(*layers(32)),))
    assert_expected_inline(
        str(report),
        """\
memeff_compile: no loss was fused, 1 graph, 32 changes, 61.62 GiB never allocated
changed: rewrite_kv_update in model.layers.0.self_attn and 31 more (61.62 GiB)
next: nothing to do; details() has the rest.""",
    )
    assert_expected_inline(
        report.details(),
        """\
memeff_compile: no loss was fused, 1 graph, 32 changes, 61.62 GiB never allocated

graph 0/0 (training, 412 nodes, our passes 18 ms)
  rewrote    rewrite_kv_update in model.layers.0.self_attn and 31 more
             model.py:7 in forward: logits = self.lm_head(h)
             out.logits is computed from the hidden states on first use.
             Saves 61.62 GiB, 1.93 GiB at each (1.96 GiB before, 32.0 MiB after): 2*N*V - 2*D*N
             bytes with D = 2048, N = 8192, V = 128256.""",
    )
    data = json.loads(report.to_json())
    modules = [record["module"] for record in data["graphs"][0]["records"]]
    assert modules == [f"model.layers.{n}.self_attn" for n in range(32)]


def test_a_record_of_several_places_names_them_all_in_the_json() -> None:
    first, second, third = layers(3)
    both = Report((graph(first.joined(second).joined(third)),))
    record = json.loads(both.to_json())["graphs"][0]["records"][0]
    assert record["also"] == ["model.layers.1.self_attn", "model.layers.2.self_attn"]
    assert record["sites"] == 3
    assert Report.from_json(both.to_json()) == both


def test_a_line_of_the_users_is_quoted_once() -> None:
    again = replace(DEFERRED, source=REWROTE.source)
    text = " ".join(Report((graph(REWROTE, again), graph(again))).details().split())
    assert text.count("loss = F.cross_entropy(self.lm_head(h), labels)") == 1
    assert text.count("train.py:12 in forward") == 3


def test_a_loss_outside_of_the_model_says_its_bytes() -> None:
    use = LogitsUse({"cross_entropy": 3}, {}, 250 << 20)
    report = Report((replace(graph(), logits=use),))
    assert report.bytes_saved == 250 << 20
    assert Report.from_json(report.to_json()) == report
    assert_expected_inline(
        str(report),
        """\
memeff_compile: the loss is fused, 1 graph, no changes, 250.0 MiB never allocated
changed: losses outside of the model (3 calls, 250.0 MiB of logits never built)
next: nothing to do; details() has the rest.""",
    )
    assert "the logits of one are 250.0 MiB" in report.details()
    use.count_computed("argmax")
    assert report.bytes_saved == 0


def test_a_notebook_shows_the_short_form_and_folds_in_the_rest() -> None:
    shown = Report((graph(REWROTE),))._repr_html_()
    assert shown.startswith("<pre>memeff_compile: the loss is fused, 1 graph, 1 change")
    assert "<details><summary>details</summary><pre>memeff_compile" in shown
    assert "<b>" not in Report((graph(replace(REWROTE, sentence="<b>")),))._repr_html_()


def test_a_notebook_draws_the_bytes_before_and_after_to_one_scale() -> None:
    shown = Report((graph(REWROTE, DEFERRED),))._repr_html_()
    widths = [float(width) for width in re.findall(r"width:([\d.]+)em", shown)]
    assert len(widths) == 2
    assert widths[0] > widths[1] > 0
    assert shown.index("<table>") < shown.index("<details>")
    assert "<table>" not in Report((graph(DECLINED),))._repr_html_(), "nothing was saved"


def test_names_in_bars_are_escaped_and_nothing_has_no_width() -> None:
    assert "&lt;b&gt;" in bars({"<b>": (1.0, "1 byte")})
    assert "width:0.00em" in bars({"none": (0.0, "0 bytes")})


@pytest.mark.parametrize(("columns", "most"), [("50", 50), ("200", 96)])
def test_lines_fit_the_terminal(columns: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    report = Report((graph(REWROTE, DEFERRED), graph(DECLINED, name="graph 1/0")))
    longest = max(map(len, str(report).splitlines()[1:]))  # the first is one line always
    assert most - 20 < longest <= most
    sentences = [line for line in report.details().splitlines() if line.startswith(" " * 13)]
    assert most - 20 < max(map(len, sentences)) <= most + 2  # a record is indented by two


def test_a_loss_that_computed_the_logits_is_what_to_do_next() -> None:
    use = LogitsUse(steps=4)
    use.count_step()
    use.count_computed("argmax", "train.py:10")
    for _ in range(2):
        use.count_computed("_softmax", "train.py:12")
        use.record_gradient("_softmax", "train.py:12")
    report = Report((replace(graph(DEFERRED), logits=use),))
    assert_expected_inline(
        str(report),
        """\
memeff_compile: the loss is not fused (softmax), 1 graph, 1 change, 1.93 GiB never allocated
changed: defer_logits in lm_head (1.93 GiB)
next: your loss computed the logits by softmax at train.py:12 in 1 of 5 steps; log_softmax +
  gather would not; details() has the rest.""",
    )
    assert Report.from_json(report.to_json()) == report


def test_a_metric_beside_a_fused_loss_is_no_loss() -> None:
    use = LogitsUse(fused={"cross_entropy": 1}, steps=1, is_counted=False)
    use.count_computed("_local_scalar_dense", "train.py:30")
    report = Report((replace(graph(DEFERRED), logits=use),))
    assert report.summary.startswith("memeff_compile: the loss is fused, 1 graph")
    said = "your code computed the logits by item() at train.py:30 in 1 of 1 steps; do it only in"
    assert said in " ".join(str(report).split())
    assert "your code" not in str(Report((replace(graph(DEFERRED, training=False), logits=use),)))


def test_a_loss_that_is_fused_in_part_is_no_fused_loss() -> None:
    use = LogitsUse(fused={"log_softmax + nll_loss": 1}, steps=1, is_counted=False)
    use.count_computed("mean: sum over another dimension", "train.py:9")
    use.record_gradient("mean: sum over another dimension", "train.py:12")
    report = Report((replace(graph(DEFERRED), logits=use),))
    assert report.summary.startswith("memeff_compile: a loss is not fused (mean), 1 graph")
    said = "your loss computed the logits by mean: sum over another dimension at train.py:12 in 1"
    assert said in " ".join(str(report).split())


def test_the_first_words_are_about_the_loss_where_a_graph_trains() -> None:
    for records, training, words in (
        ((REWROTE,), True, "the loss is fused, 1 graph"),
        ((DECLINED,), True, "the loss is not fused (logits_reused), 1 graph"),
        ((DEFERRED,), True, "1 graph"),  # the loss is still to come
        ((), True, "no loss was fused, 1 graph"),
        ((), False, "1 graph"),
    ):
        summary = Report((graph(*records, training=training),)).summary
        assert summary.startswith(f"memeff_compile: {words}"), summary


def test_names_that_differ_in_numbers_are_folded_where_the_same_is_said() -> None:
    names = [(f"layers.{n}.up", "win4" if n else "dense") for n in range(4)]
    assert fold_names(names) == [("layers.0.up", "dense"), ("layers.1.up and 2 more", "win4")]


def test_text_before_anything_was_compiled_says_what_to_do() -> None:
    assert_expected_inline(
        str(Report(())),
        """\
Nothing has been compiled with backend="memeff" yet, or not since the last reset. 
Compile a model with torch.compile(model, backend="memeff"), call it once, then ask again. 
Only calls of the module itself are compiled: of a LightningModule compile the model inside it.""",
    )


def test_text_of_an_internal_error() -> None:
    record = Record(
        "backend", "internal_error", "internal_error", "Our code failed: KeyError: 'x'."
    )
    text = str(graph(record))
    assert_expected_inline(
        text,
        """\
graph 0/0 (training, 412 nodes, our passes 18 ms): it went on unchanged
  failed     backend (internal_error)
             Our code failed: KeyError: 'x'.""",
    )


def test_bytes_saved_substitutes_the_sizes() -> None:
    assert REWROTE.bytes_saved == 8 * 8192 * 128256 - (64 << 20)
    assert DECLINED.bytes_saved == 4 * 8192 * 128256
    assert Record("backend", "note", "note", "x").bytes_saved is None


def test_bytes_saved_is_none_when_a_size_is_unknown() -> None:
    assert replace(REWROTE, sizes={"N": 1}).bytes_saved is None
    assert "Saves: " in str(replace(REWROTE, sizes={}))


def test_total_counts_changes_only() -> None:
    total = Report((graph(REWROTE, DECLINED), graph(DEFERRED))).bytes_saved
    assert REWROTE.bytes_saved is not None
    assert DEFERRED.bytes_saved is not None
    assert total == REWROTE.bytes_saved + DEFERRED.bytes_saved


def test_rewrites_counts_per_pass() -> None:
    found = Report((graph(REWROTE, DECLINED), graph(REWROTE, DEFERRED)))
    assert found.rewrites("fuse_linear_cross_entropy") == 2
    assert found.rewrites("defer_logits") == 1
    assert found.rewrites("quantize_attention") == 0
    assert found.rewrites() == 3


def test_every_deferral_states_the_one_change_in_behaviour() -> None:
    found = Report((graph(DEFERRED),))
    assert "read out.logits before the weights change" in " ".join(str(found).split())
    text = " ".join(found.details().split())
    assert report.DEFERRED_SENTENCE in text
    assert "'memeff.logits': 'eager'" in text


class TestJson:
    """JSON holds formulas as strings and reads back."""

    def test_round_trip(self) -> None:
        found = Report((graph(REWROTE, DEFERRED), graph(DECLINED)))
        assert Report.from_json(found.to_json()) == found

    def test_formulas_are_strings_and_numbers_are_numbers(self) -> None:
        data = json.loads(Report((graph(REWROTE),)).to_json(include_graphs=False))
        record = data["graphs"][0]["records"][0]
        assert record["bytes_before"] == "8*N*V"
        assert record["bytes_saved"] == REWROTE.bytes_saved == data["bytes_saved"]
        assert "before" not in data["graphs"][0]

    @pytest.mark.parametrize(
        "formula",
        [
            4 * N * V,
            sympy.Max(N, V) - sympy.Min(D, 3),
            sympy.ceiling(N / 128) * 128 * D,
            sympy.floor(N / 3) + N**2 - V,
            sympy.Integer(0),
            sympy.Rational(1, 2) * N,
        ],
        ids=str,
    )
    def test_formula_round_trip(self, formula: sympy.Expr) -> None:
        found = Report((graph(replace(REWROTE, bytes_before=formula)),))
        assert Report.from_json(found.to_json()).records[0].bytes_before == formula

    def test_code_in_a_formula_is_refused(self) -> None:
        text = Report((graph(REWROTE),)).to_json().replace("8*N*V", "__import__('os').getcwd()")
        with pytest.raises(ValueError, match="not a byte formula"):
            Report.from_json(text)


class TestStore:
    """The process-wide list of graphs."""

    @pytest.fixture(autouse=True)
    def _empty(self) -> None:
        report.clear()

    def test_keeps_order_until_cleared(self) -> None:
        for index in range(3):
            report.record_graph(graph(name=f"graph {index}/0"))
        names = ["graph 0/0", "graph 1/0", "graph 2/0"]
        assert [each.name for each in report.graphs()] == names
        assert [each.name for each in report.last_report().graphs] == names
        report.clear()
        assert report.last_report() == Report(())

    def test_keeps_the_newest_64(self) -> None:
        for index in range(70):
            report.record_graph(graph(name=f"graph {index}/0"))
        kept = report.graphs()
        assert len(kept) == 64
        assert kept[-1].name == "graph 69/0"

    def test_takes_graphs_from_several_threads(self) -> None:
        def record() -> None:
            for _ in range(10):
                report.record_graph(graph())

        threads = [threading.Thread(target=record) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(report.graphs()) == 40


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1.0 KiB"),
        (64 << 20, "64.0 MiB"),
        (1.95 * (1 << 30), "1.95 GiB"),
        (-(1 << 20), "-1.0 MiB"),
    ],
)
def test_format_bytes(count: float, text: str) -> None:
    assert format_bytes(count) == text
