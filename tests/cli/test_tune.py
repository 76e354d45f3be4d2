"""`tune`: what it measures and chooses, the table it stores, and who believes the table."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from memeff_compile import __main__ as command_line
from memeff_compile import decisions
from memeff_compile.cli.measure import Bench, measure, table_text
from memeff_compile.cli.tune import tune
from memeff_compile.decisions import Entry, Found, Machine, Question, Table
from memeff_compile.errors import TuneError

ENGINE = "linear_cross_entropy.products"
OTHER = "another_op.engine"
MACHINE = Machine("Some GPU", "9.0", "2.11.0", "3.6.0", "0.1.0-abc")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache folder of the test's own, and a process that has read no table yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    decisions.forget()
    yield tmp_path / "cache" / "memeff_compile" / "decisions.json"
    decisions.forget()


# --- a machine that is not there --------------------------------------------------------------


class Lab:
    """A clock that advances by what a workload says it took."""

    def __init__(self) -> None:
        self.time = 0.0
        self.order: list[tuple[str, str]] = []

    def milliseconds(self, run: Callable[[], Any]) -> float:
        took = float(run())
        self.time += took / 1e3
        return took

    def now(self) -> float:
        return self.time


@dataclass
class Job:
    """A workload whose time depends on the setting."""

    name: str
    costs: Mapping[str, float]
    lab: Lab

    def run(self, setting: str) -> float:
        self.lab.order.append((self.name, setting))
        return self.costs[setting]


def question(
    name: str,
    default: str,
    jobs: Mapping[str, Mapping[str, float]],
    lab: Lab,
    faults: Mapping[str, str] | None = None,
) -> Question:
    def fault(setting: str) -> str:
        return (faults or {}).get(setting, "")

    options = tuple(next(iter(jobs.values())))
    return Question(
        name, default, options, fault, lambda: [Job(n, c, lab) for n, c in jobs.items()]
    )


def bench(lab: Lab, *questions: Question, seconds: float = 1e9) -> Bench:
    return Bench(MACHINE, questions, lab, seconds)


def answer(
    jobs: Mapping[str, Mapping[str, float]],
    *,
    default: str = "hopper",
    faults: Mapping[str, str] | None = None,
) -> Found:
    lab = Lab()
    entry = measure(bench(lab, question(ENGINE, default, jobs, lab, faults)), "2026-11-21")
    return entry.found[ENGINE]


# --- measuring --------------------------------------------------------------------------------


def test_the_faster_setting_is_chosen_and_says_by_how_much() -> None:
    found = answer({"a": {"hopper": 10.0, "library": 8.0}, "b": {"hopper": 20.0, "library": 16.0}})
    assert (found.value, found.default) == ("library", "hopper")
    assert found.reason == "20.0% less time than hopper"
    assert [(t.value, t.workload, t.median) for t in found.timings] == [
        ("hopper", "a", 10.0),
        ("hopper", "b", 20.0),
        ("library", "a", 8.0),
        ("library", "b", 16.0),
    ]


@pytest.mark.parametrize(("library", "value"), [(9.81, "hopper"), (9.79, "library")])
def test_the_default_stays_unless_another_is_two_per_cent_faster(
    library: float, value: str
) -> None:
    assert answer({"a": {"hopper": 10.0, "library": library}}).value == value


def test_workloads_count_alike_whatever_they_take() -> None:
    """Half the time on a small one outweighs a tenth more on a large one."""
    jobs = {"small": {"hopper": 1.0, "library": 0.5}, "large": {"hopper": 100.0, "library": 110.0}}
    assert answer(jobs).value == "library"


def test_a_setting_with_wrong_numbers_is_out_however_fast() -> None:
    jobs = {"a": {"hopper": 10.0, "library": 1.0}}
    found = answer(jobs, faults={"library": "dC is off by 1.0e+00"})
    assert found.value == "hopper"
    assert found.refused == {"library": "dC is off by 1.0e+00"}
    assert found.timings == ()


def test_a_default_with_wrong_numbers_is_out_too() -> None:
    jobs = {"a": {"hopper": 1.0, "library": 10.0, "third": 12.0}}
    assert answer(jobs, faults={"hopper": "nll is nan"}).value == "library"


def test_a_setting_that_fails_is_out_with_its_error() -> None:
    lab = Lab()

    def fault(setting: str) -> str:
        if setting == "hopper":
            raise RuntimeError("out of shared memory\nand a traceback")
        return ""

    asked = replace(
        question(ENGINE, "hopper", {"a": {"hopper": 1.0, "library": 2.0}}, lab), fault=fault
    )
    found = measure(bench(lab, asked), "2026-11-21").found[ENGINE]
    assert found.value == "library"
    assert found.refused == {"hopper": "RuntimeError: out of shared memory"}


def test_a_setting_that_fails_only_at_full_size_is_out_too() -> None:
    lab = Lab()
    jobs = {"a": {"hopper": 1.0, "library": 2.0, "third": 3.0}}

    class Fails(Job):
        def run(self, setting: str) -> float:
            if setting == "hopper":
                raise MemoryError("4 GiB are needed")
            return super().run(setting)

    works = [Fails("a", jobs["a"], lab)]
    asked = replace(question(ENGINE, "hopper", jobs, lab), workloads=lambda: works)
    found = measure(bench(lab, asked), "2026-11-21").found[ENGINE]
    assert (found.value, found.reason) == ("library", "the fastest of those that work")
    assert found.refused == {"hopper": "MemoryError: 4 GiB are needed"}


def test_nothing_is_stored_where_no_setting_is_right(cache: Path) -> None:
    lab = Lab()
    jobs = {"a": {"hopper": 1.0, "library": 2.0}}
    wrong = question(ENGINE, "hopper", jobs, lab, {"hopper": "nan", "library": "nan"})
    assert run_command(lab, wrong) == 1
    assert not cache.exists()


def test_settings_take_turns_and_warm_up_first() -> None:
    lab = Lab()
    jobs = {"a": {"hopper": 1.0, "library": 2.0}}
    measure(bench(lab, question(ENGINE, "hopper", jobs, lab), seconds=0.0), "2026-11-21")
    assert lab.order == [("a", "hopper"), ("a", "library")] * 6  # one round to warm up, five timed


# --- the table --------------------------------------------------------------------------------


def entry(machine: Machine = MACHINE, engine: str = "library", date: str = "2026-11-21") -> Entry:
    found = answer({"a": {"hopper": 10.0, "library": 8.0}})
    return Entry(machine, date, {ENGINE: replace(found, value=engine)})


def store(path: Path, *entries: Entry) -> None:
    decisions.save(Table(entries), path)


def test_a_table_is_read_as_it_was_written(cache: Path) -> None:
    table = Table((entry(), entry(replace(MACHINE, gpu="Another GPU"))))
    decisions.save(table, cache)
    assert decisions.load(cache) == table
    assert [path.name for path in cache.parent.iterdir()] == ["decisions.json"]


def test_a_measurement_decides_on_its_machine_and_nowhere_else(cache: Path) -> None:
    store(cache, entry())
    assert decisions.value(MACHINE, ENGINE, "hopper") == "library"
    assert decisions.value(MACHINE, OTHER, "usual") == "usual"  # not in the entry
    assert decisions.value(replace(MACHINE, gpu="Another GPU"), ENGINE, "hopper") == "hopper"
    assert decisions.value(None, ENGINE, "hopper") == "hopper"


@pytest.mark.parametrize("field", ["torch", "triton", "kernels"])
def test_an_entry_of_other_software_is_left_with_one_warning(
    field: str, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store(cache, entry(replace(MACHINE, **{field: "other"})))
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert decisions.value(MACHINE, ENGINE, "hopper") == "hopper"
    (record,) = caplog.records
    assert "Measure again with `python -m memeff_compile tune`" in record.getMessage()


BROKEN = {
    "empty": "",
    "no JSON": "{",
    "a list": "[]",
    "another format": '{"format": 2, "entries": []}',
    "an unknown engine": '"library"->"quick"',
    "a machine of numbers": '"2.11.0"->2.11',
    "no decisions": '"found"->"lost"',
}


@pytest.mark.parametrize("text", BROKEN.values(), ids=BROKEN)
def test_a_broken_table_is_left_with_one_warning(
    text: str, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = Table((entry(),)).to_json()
    before, _, after = text.partition("->")
    cache.parent.mkdir(parents=True)
    cache.write_text(whole.replace(before, after) if after else text)
    with caplog.at_level(logging.WARNING):
        for machine in (MACHINE, replace(MACHINE, gpu="Another GPU")):
            assert decisions.value(machine, ENGINE, "hopper") == "hopper"
    (record,) = caplog.records
    assert str(cache) in record.getMessage()
    assert "tune --reset" in record.getMessage()


def test_a_process_keeps_the_table_it_has_read(cache: Path) -> None:
    store(cache, entry(engine="library"))
    assert decisions.value(MACHINE, ENGINE, "hopper") == "library"
    store(cache, entry(engine="hopper"))
    assert decisions.value(MACHINE, ENGINE, "hopper") == "library"
    decisions.forget()
    assert decisions.value(MACHINE, ENGINE, "hopper") == "hopper"


def test_a_table_that_cannot_be_written_leaves_the_old_one_and_no_remains(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(cache, entry())
    before = cache.read_text()

    def full(self: Path, target: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(TuneError, match="no space left"):
        store(cache, entry(engine="hopper"))
    assert cache.read_text() == before
    assert [path.name for path in cache.parent.iterdir()] == ["decisions.json"]


def test_compiled_code_is_tagged_by_what_was_decided_and_not_by_when(cache: Path) -> None:
    assert decisions.fingerprint([MACHINE]) == ""
    tags = []
    for date, engine in (("2026-11-21", "library"), ("2026-11-22", "library"), ("", "hopper")):
        decisions.forget()
        store(cache, entry(engine=engine, date=date))
        tags.append(decisions.fingerprint([MACHINE]))
    assert tags[0] == tags[1] != ""
    assert tags[2] == ""  # the default was confirmed


def test_the_note_says_what_was_measured(cache: Path) -> None:
    store(cache, entry())
    assert decisions.speed_note(MACHINE) == "measured on this GPU on 2026-11-21"
    other = replace(MACHINE, gpu="Another GPU")
    assert decisions.speed_note(other).startswith("speed not measured on this GPU")
    ours = replace(MACHINE, gpu="NVIDIA H200")
    assert decisions.speed_note(ours) == "defaults measured on an NVIDIA H200"


def test_kernels_version_follows_their_source() -> None:
    version, _, digest = decisions.kernels_version().partition("-")
    assert version == "0.1.0"
    assert len(digest) == 16


# --- the command ------------------------------------------------------------------------------


def run_command(lab: Lab, asked: Question, *arguments: str) -> int:
    """Run the command with a GPU that is not there."""
    import argparse

    from memeff_compile.cli.tune import add_tune_arguments

    parser = argparse.ArgumentParser()
    add_tune_arguments(parser)
    return tune(parser.parse_args(arguments), lambda *, quick: bench(lab, asked, seconds=0.0))


def faster_library(lab: Lab) -> Question:
    return question(ENGINE, "hopper", {"a": {"hopper": 10.0, "library": 8.0}}, lab)


def test_the_command_measures_stores_shows_and_resets(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = entry(replace(MACHINE, gpu="Another GPU"))
    store(cache, other)
    lab = Lab()
    assert run_command(lab, faster_library(lab)) == 0
    printed = capsys.readouterr().out
    assert f"{ENGINE} = library  (20.0% less time than hopper; default hopper)" in printed
    assert f"Stored in {cache}" in printed
    found = decisions.load(cache)
    assert found.entries[0] == other  # what was measured elsewhere stays
    assert found.entry(MACHINE) is not None

    assert command_line.main(["tune", "--show"]) == 0
    assert capsys.readouterr().out == f"{cache}\n\n{table_text(found)}"
    assert command_line.main(["tune", "--reset"]) == 0
    assert not cache.exists()
    assert command_line.main(["tune", "--reset"]) == 0
    assert command_line.main(["tune", "--show"]) == 0
    assert "the defaults decide" in capsys.readouterr().out


def test_a_table_elsewhere_is_written_and_not_used(cache: Path, tmp_path: Path) -> None:
    lab, out = Lab(), tmp_path / "table.json"
    assert run_command(lab, faster_library(lab), "--out", str(out)) == 0
    assert decisions.load(out).entry(MACHINE) is not None
    assert not cache.exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--out", "absent/table.json"], "There is no folder absent"),
        (["--out", "notes.txt"], "cannot be used"),
        (["--show", "--out", "notes.txt"], "cannot be used"),
        (["--reset", "--out", "notes.txt"], "no other file"),
    ],
)
def test_a_file_that_is_no_table_is_left_alone(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("notes.txt").write_text("my notes")
    lab = Lab()
    assert run_command(lab, faster_library(lab), *arguments) == 1
    assert words in capsys.readouterr().err
    assert Path("notes.txt").read_text() == "my notes"
    assert lab.order == []  # said before anything is measured


def test_without_a_gpu_the_command_says_what_it_saw_and_needs(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command_line.main(["tune"]) == 1
    said = capsys.readouterr().err
    assert f"No GPU was found (torch {torch.__version__} is built with" in said
    assert "compute capability 8.0 or later" in said
    assert not cache.exists()


def test_the_stored_file_is_plain_json(cache: Path) -> None:
    store(cache, entry())
    stored = json.loads(cache.read_text())
    assert stored["entries"][0]["found"][ENGINE]["value"] == "library"
    assert stored["entries"][0]["machine"]["gpu"] == "Some GPU"
