"""The report: its text, its JSON and its store."""

from __future__ import annotations

import json
import threading
from dataclasses import replace

import pytest
import sympy
from expecttest import assert_expected_inline

from memeff_compile import report
from memeff_compile.report import GraphReport, Record, Report, format_bytes

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
    text = str(Report((graph(REWROTE, DEFERRED), graph(DECLINED, name="graph 1/0"))))
    assert_expected_inline(
        text,
        """\
memeff_compile: 2 graphs, 2 changes, 1 declined, 9.69 GiB never allocated

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

graph 1/0 (training, 412 nodes, our passes 18 ms)

  declined   fuse_linear_cross_entropy (logits_reused)
             train.py:14 in forward: p = logits.softmax(-1)
             The logits are read again by softmax, so they have to exist.
             Would save 3.91 GiB: 4*N*V bytes with N = 8192, V = 128256.
             What to do: compute the softmax outside of the compiled function.

  The graph went on unchanged for the reasons above.""",
    )


def test_text_when_nothing_was_found() -> None:
    text = str(Report((graph(training=False),)))
    assert_expected_inline(
        text,
        """\
memeff_compile: 1 graph, no changes

graph 0/0 (inference, 412 nodes, our passes 18 ms)

  The graph went on unchanged: no pass found anything to do here.""",
    )


def test_text_before_anything_was_compiled_says_what_to_do() -> None:
    assert_expected_inline(
        str(Report(())),
        """\
Nothing has been compiled with backend="memeff" yet, or not since the last reset. 
Compile a model with torch.compile(model, backend="memeff"), call it once, then ask again.""",
    )


def test_text_of_an_internal_error() -> None:
    record = Record(
        "backend", "internal_error", "internal_error", "Our code failed: KeyError: 'x'."
    )
    text = str(graph(record))
    assert_expected_inline(
        text,
        """\
graph 0/0 (training, 412 nodes, our passes 18 ms)

  failed     backend (internal_error)
             Our code failed: KeyError: 'x'.

  The graph went on unchanged for the reasons above.""",
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
    text = " ".join(str(Report((graph(DEFERRED),))).split())
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
