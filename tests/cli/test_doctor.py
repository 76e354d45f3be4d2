"""The doctor: its findings, its advice, and its exit status."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import memeff_compile
from memeff_compile import __main__ as command_line
from memeff_compile import kernels
from memeff_compile.cli import doctor
from memeff_compile.cli.doctor import Finding
from memeff_compile.options import options_page
from memeff_compile.planning.setting import Setting


@pytest.fixture
def no_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that Inductor finds no compiler, which also keeps these tests quick."""
    monkeypatch.setattr(doctor, "inductor_problem", lambda device: "InvalidCxxCompiler: none")


def pretend_installed(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    """Replace the versions that the doctor sees."""
    real: Callable[[str], str] = doctor.installed
    monkeypatch.setattr(doctor, "installed", lambda name: versions.get(name, real(name)))


@pytest.mark.usefixtures("no_inductor")
def test_this_machine_is_usable_and_the_text_names_what_matters() -> None:
    findings = doctor.diagnose()
    text = " ".join(doctor.findings_text(findings).split())
    assert doctor.is_usable(findings), text
    assert text.startswith(f"memeff_compile {memeff_compile.__version__}: it works here; ")
    for words in (
        torch.__version__.split("+")[0],
        "python",
        "found by name",
        "TORCH_LOGS",
        "same loss as eager",
        "generate() on cpu, eager",
        "same tokens as eager; 0 steps were replayed as CUDA graphs",
        "does not work: InvalidCxxCompiler: none",
        "toy model on cpu, aot_eager",
        "install a C++ compiler",
    ):
        assert words in text
    folders = {path.parent.name for path in Path(kernels.__path__[0]).glob("*/op.py")}
    assert len(folders) >= 9
    for name in folders:
        assert f"memeff::{name} " in text


def test_the_verdict_and_what_to_do_come_first() -> None:
    fine = Finding("versions", "python", "3.12")
    old = Finding("versions", "torch", "2.9", "upgrade it", blocks=True)
    optional = Finding("versions", "transformers", "none", "install it")
    for findings, words in (
        ([fine], "it works here; nothing to do"),
        ([fine, optional], "it works here; 1 thing to do"),
        ([fine, optional, old], "the backend is not usable here; 2 things to do"),
    ):
        text = doctor.findings_text(findings)
        assert text.splitlines()[0].endswith(f": {words}")
        assert doctor.verdict(findings) == words
        assert ("what to do" in text) == (len(findings) > 1)
        assert "upgrade it" not in text or text.index("upgrade it") < text.index("3.12")
        said = json.loads(doctor.findings_json(findings))
        assert (said["usable"], said["verdict"]) == (old not in findings, words)
        assert said["findings"][0]["text"] == "3.12"


@pytest.mark.parametrize("columns", [50, 80])
def test_long_lines_are_broken_at_the_terminals_width(
    columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    findings = [Finding("what runs", "memeff::attention", "one word and another " * 12)]
    lines = doctor.findings_text(findings).splitlines()[1:]
    assert max(map(len, lines)) <= columns
    assert sum(line.count("another") for line in lines) == 12


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "RTX 4090",
            ["library engine", "multiplies int8 and E4M3", "Our Triton kernels run on it"],
        ),
        ("H100", ["hopper engine", "speed measured attention"]),
        ("A100", ["library engine", "int8, and fp16 for weights and values"]),
        ("T4", ["need compute capability 8.0", "reference engine"]),
    ],
)
def test_a_gpu_that_is_not_here_is_answered_for(name: str, words: list[str]) -> None:
    text = " ".join(doctor.card_text(name).split())
    assert text.startswith(f"{name}")
    for each in words:
        assert each in text, text
    assert "that engine cannot take" not in text, "engines that do not run there are left out"
    assert ("Triton kernels (CUDA" in text) == (name != "T4")


@pytest.mark.parametrize(
    ("versions", "remedy"),
    [
        ({"torch": ""}, 'pip install "torch>=2.11"'),
        ({"torch": "2.9.1+cu130"}, 'pip install --upgrade "torch>=2.11"'),
    ],
    ids=["missing", "old"],
)
def test_missing_or_old_torch_blocks_and_names_the_command(
    monkeypatch: pytest.MonkeyPatch, versions: dict[str, str], remedy: str
) -> None:
    pretend_installed(monkeypatch, **versions)
    findings = doctor.diagnose()
    assert not doctor.is_usable(findings)
    assert remedy in doctor.findings_text(findings)
    assert "not usable here" in doctor.findings_text(findings)


@pytest.mark.parametrize(
    ("package", "version", "tested"),
    [
        ("torch", "2.13.0+cpu", ""),
        ("torch", "2.15.0", ""),
        ("torch", "2.12.1", "2.11, 2.13, 2.14 and 2.15"),
        ("torch", "2.16.0.dev2027", "2.11, 2.13, 2.14 and 2.15"),
        ("triton", "3.9.0", ""),
        ("triton", "4.0.0", "3.6, 3.7, 3.8 and 3.9"),
        ("transformers", "5.24.0", ""),
        ("transformers", "5.25.1", "5.16, 5.17, 5.23 and 5.24"),
        ("transformers", "", ""),
    ],
)
def test_an_untested_release_is_named_and_does_not_block(
    monkeypatch: pytest.MonkeyPatch, package: str, version: str, tested: str
) -> None:
    pretend_installed(monkeypatch, **{package: version})
    (line,) = [f for f in doctor._versions() if f.label == package]
    assert not line.blocks
    assert not line.remedy
    _, _, named = line.text.partition(", untested: expected to work; tested are ")
    assert named == tested


@pytest.mark.parametrize("package", doctor.TESTED)
def test_the_tested_releases_are_those_of_the_page(package: str) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs/measured/tested-stacks.md").read_text()
    rows = "\n".join(re.findall(r"^\| torch .*", page, re.M))
    found = {tuple(map(int, row)) for row in re.findall(rf"\b{package} (\d+)\.(\d+)", rows)}
    assert found == set(doctor.TESTED[package])


def test_versions_are_compared_as_numbers() -> None:
    assert doctor._release("2.13.0+cpu") > doctor._release("2.9.1")
    assert doctor._release("2.15.0.dev20260101") >= (2, 11)


@pytest.mark.usefixtures("no_inductor")
def test_backend_that_is_not_installed_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "entry_points", lambda group: [])
    findings = doctor.diagnose()
    assert not doctor.is_usable(findings)
    assert "pip install -e ." in doctor.findings_text(findings)


@pytest.mark.usefixtures("no_inductor")
def test_failing_toy_model_blocks_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("the first line\nand more")

    monkeypatch.setattr(doctor.memeff_compile, "compile", fail)
    findings = doctor.diagnose()
    assert not doctor.is_usable(findings)
    assert doctor.findings_text(findings).count("failed: RuntimeError: the first line") == 2


@pytest.mark.usefixtures("no_inductor")
def test_a_transformers_that_is_too_old_blocks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> str:
        raise ImportError("a cache of transformers, 5.17 or later")

    monkeypatch.setattr(doctor, "_trains", lambda *_: "trains")
    monkeypatch.setattr(doctor, "_generates", fail)
    findings = doctor._self_tests()
    assert doctor.is_usable(findings)
    assert findings[-1].text == "failed: ImportError: a cache of transformers, 5.17 or later"
    assert findings[-1].remedy == "pip install 'memeff_compile[transformers]'"


def test_inductor_problem_is_a_sentence_or_nothing() -> None:
    """For one kernel no headers are precompiled, which would take three times as long."""
    from torch._inductor import config

    with config.patch(cpp_cache_precompile_headers=False):
        problem = doctor.inductor_problem("cpu")
    assert problem == "" or ": " in problem


class TestCommandLine:
    """`memeff`, also as `python -m memeff_compile`."""

    @pytest.mark.parametrize(("blocks", "status"), [(False, 0), (True, 1)])
    def test_doctor_status(
        self,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
        blocks: bool,
        status: int,
    ) -> None:
        finding = Finding("versions", "torch", "1.0", "upgrade", blocks=blocks)
        monkeypatch.setattr(doctor, "diagnose", lambda: [finding])
        assert command_line.main(["doctor"]) == status
        assert "torch: upgrade" in capsys.readouterr().out

    def test_doctor_prints_json(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(doctor, "diagnose", lambda: [Finding("versions", "torch", "1.0")])
        assert command_line.main(["doctor", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["findings"][0]["label"] == "torch"

    def test_doctor_names_the_nearest_gpu(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert command_line.main(["doctor", "--gpu", "rtx 409"]) == 1
        assert "Did you mean rtx4090" in capsys.readouterr().err

    def test_options_prints_the_page(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert command_line.main(["options", "--page"]) == 0
        assert capsys.readouterr().out == options_page()

    def test_demo_names_the_packages_that_are_missing(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        from memeff_compile.cli import demo

        monkeypatch.setattr(demo, "installed", lambda name: name == "tqdm")
        assert command_line.main(["demo"]) == 1
        said = capsys.readouterr().err
        assert "transformers and tokenizers: pip install" in said

    def test_demo_needs_more_steps_than_warm_it_up(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        from memeff_compile.cli import demo

        monkeypatch.setattr(demo, "installed", lambda _: "1.0")
        assert command_line.main(["demo", "--steps", "2"]) == 1
        assert "3 are needed" in capsys.readouterr().err

    def test_no_command_prints_the_help(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert command_line.main([]) == 2
        assert "report-bug" in capsys.readouterr().out

    def test_version(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as stopped:
            command_line.main(["--version"])
        assert stopped.value.code == 0
        assert capsys.readouterr().out == f"memeff_compile {memeff_compile.__version__}\n"

    def test_console_script_is_this_function(self) -> None:
        project = (Path(kernels.__path__[0]).parents[1] / "pyproject.toml").read_text()
        assert '[project.scripts]\nmemeff = "memeff_compile.__main__:main"\n' in project

    def test_help_has_the_defaults_and_choices_of_settings(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit):
            command_line.main(["explain", "--help"])
        said = " ".join(capsys.readouterr().out.split())
        assert "default: None" not in said
        for name in ("optimizer", "sharding", "accounting"):
            (choices,) = set(re.findall(rf"--{name} {{([a-z0-9,]+)}}", said))
            for choice in choices.split(","):
                Setting(**{name: choice})  # refuses unknown arguments
        assert "(default: 2048)" in said
        assert "(default: adamw)" in said

    def test_unknown_command_lists_the_right_ones(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            command_line.main(["docter"])
        assert "Did you mean 'doctor'?" in capsys.readouterr().err
