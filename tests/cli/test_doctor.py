"""The doctor: what it finds, what it advises, and its exit status."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from memeff_compile import __main__ as command_line
from memeff_compile import kernels
from memeff_compile.cli import doctor
from memeff_compile.cli.doctor import Finding
from memeff_compile.options import options_page


@pytest.fixture
def no_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that Inductor finds no compiler, which also keeps these tests quick."""
    monkeypatch.setattr(doctor, "inductor_problem", lambda device: "InvalidCxxCompiler: none")


def pretend_installed(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    """Replace the versions that the doctor sees."""
    real: Callable[[str], str] = doctor._installed
    monkeypatch.setattr(doctor, "_installed", lambda name: versions.get(name, real(name)))


@pytest.mark.usefixtures("no_inductor")
def test_this_machine_is_usable_and_the_text_names_what_matters() -> None:
    findings = doctor.diagnose()
    text = doctor.findings_text(findings)
    assert doctor.is_usable(findings), text
    for words in (
        torch.__version__.split("+")[0],
        "python",
        "found by name",
        "TORCH_LOGS",
        "same loss as eager",
    ):
        assert words in text
    folders = {path.parent.name for path in Path(kernels.__path__[0]).glob("*/op.py")}
    assert len(folders) >= 9
    for name in folders:
        assert f"memeff::{name} " in text


@pytest.mark.usefixtures("no_inductor")
def test_without_a_compiler_it_falls_back_to_aot_eager_and_says_so() -> None:
    text = doctor.findings_text(doctor.diagnose())
    assert "does not work: InvalidCxxCompiler: none" in text
    assert "aot_eager" in text
    assert "install a C++ compiler" in text


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
    assert "failed: the first line" in doctor.findings_text(findings)


def test_inductor_problem_is_a_sentence_or_nothing() -> None:
    problem = doctor.inductor_problem("cpu")
    assert problem == "" or ": " in problem


class TestCommandLine:
    """`python -m memeff_compile`."""

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

    def test_options_prints_the_page(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert command_line.main(["options"]) == 0
        assert capsys.readouterr().out == options_page()

    def test_demo_outside_of_the_repository_says_where_it_is(
        self,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
        tmp_path: object,
    ) -> None:
        monkeypatch.setattr(command_line, "DEMO", command_line.DEMO.parent / "absent.py")
        assert command_line.main(["demo"]) == 1
        assert "examples/train_tiny_llama.py" in capsys.readouterr().err

    def test_unknown_command_lists_the_right_ones(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            command_line.main(["docter"])
        assert "doctor" in capsys.readouterr().err
