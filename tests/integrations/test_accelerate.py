"""Accelerate: the plug-in, its closed list of names, and the patch that opens it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from accelerate import Accelerator
from accelerate.commands.launch import launch_command_parser
from accelerate.state import AcceleratorState
from accelerate.utils.launch import prepare_simple_launcher_cmd_env
from torch import nn

import memeff_compile
from memeff_compile.errors import OptionError
from memeff_compile.integrations.accelerate import MemeffPlugin
from tests.integrations.tiny import (
    OPTIONS,
    assert_same_gradients,
    batch,
    codes,
    gradients,
    llama,
)

ROOT = Path(__file__).resolve().parents[2]
PATCH = ROOT / "docs" / "upstream" / "accelerate-dynamo-backends.patch"


@pytest.fixture(autouse=True)
def _accelerate_forgets() -> Iterator[None]:
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def step(plugin: MemeffPlugin | None) -> tuple[Any, nn.Module, Accelerator]:
    """Train one step; return the loss, the original model, and the accelerator."""
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, **({} if plugin is None else {"dynamo_plugin": plugin}))
    model = llama()
    prepared, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    ids = batch()["input_ids"]
    loss = prepared(input_ids=ids, labels=ids).loss
    accelerator.backward(loss)
    optimizer.step()
    return loss.detach(), model, accelerator


def test_the_plugin_compiles_what_is_prepared_with_its_options() -> None:
    expected, eager, _ = step(None)
    plugin = MemeffPlugin(options=OPTIONS, logits="none")
    loss, model, accelerator = step(plugin)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0.0)
    assert_same_gradients(gradients(model), gradients(eager))
    assert codes() == {"rewrote", "logits_none"}
    assert accelerator.state.dynamo_plugin is plugin
    assert plugin.to_dict()["backend"] == "memeff"
    assert plugin.to_dict()["options"] == {**OPTIONS, "memeff.logits": "none"}


def test_regions_are_compiled_one_by_one_and_the_loss_builds_no_logits() -> None:
    expected, eager, _ = step(None)
    loss, model, _ = step(MemeffPlugin(options=OPTIONS, use_regional_compilation=True))
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0.0)
    assert_same_gradients(gradients(model), gradients(eager))
    report = memeff_compile.last_report()
    (use,) = (graph.logits for graph in report.graphs if graph.logits is not None)
    assert use.fused == {"cross_entropy": 1}
    assert use.computed == {}
    assert len(report.graphs) > 1


def test_options_and_a_mode_go_together_and_are_checked_at_once() -> None:
    plugin = MemeffPlugin(mode="reduce-overhead", options={"memeff.logits": "none"})
    arguments = plugin.to_kwargs()
    assert "mode" not in arguments
    assert arguments["options"] == {"memeff.mode": "reduce-overhead", "memeff.logits": "none"}
    with pytest.raises(OptionError, match="Did you mean 'logits'"):
        MemeffPlugin(logit="none")


def launch(*more: str) -> Any:
    given = ["--cpu", "--num_processes", "1", "--num_machines", "1", "--mixed_precision", "no"]
    return launch_command_parser().parse_args([*given, *more, "train.py"])


def test_accelerate_refuses_the_name_in_the_words_that_the_docs_have(
    capsys: pytest.CaptureFixture[str],
) -> None:
    said = []
    with pytest.raises(ValueError, match="DynamoBackend") as by_name:
        Accelerator(cpu=True, dynamo_backend="memeff")
    said.append(str(by_name.value))
    with pytest.raises(SystemExit):
        launch("--dynamo_backend", "memeff")
    said.append("invalid choice: 'memeff' (choose from")
    assert said[-1] in capsys.readouterr().err
    from_file = launch()
    from_file.dynamo_backend = "memeff"  # as in a configuration file
    with pytest.raises(ValueError, match="Unknown dynamo backend") as in_a_file:
        prepare_simple_launcher_cmd_env(from_file)
    said.append(str(in_a_file.value).split(". ")[0])
    page = (ROOT / "docs" / "use" / "frameworks.md").read_text()
    assert all(one in page for one in said), said


PATCHED = """
import sys
from pathlib import Path
import torch, accelerate
from accelerate import Accelerator
import memeff_compile
assert Path(accelerate.__file__).is_relative_to({site!r}), accelerate.__file__

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(48, 16), torch.nn.Linear(16, 48)
    def forward(self, input_ids, labels):
        logits = self.head(self.embed(input_ids)).flatten(0, 1)
        return {{"loss": torch.nn.functional.cross_entropy(logits, labels.flatten())}}

def is_fused():
    return memeff_compile.last_report().rewrites("fuse_linear_cross_entropy") > 0

given = {{}} if "launched" in sys.argv else {{"dynamo_backend": "memeff"}}
ids = torch.arange(8)
Accelerator(cpu=True, **given).prepare(Model())(ids[None], ids[None])["loss"].backward()
assert is_fused()
if "launched" not in sys.argv:
    from accelerate.utils import DynamoBackend
    try:
        DynamoBackend("MEMEF")
    except ValueError as error:
        print(error)
    from transformers import Trainer, TrainingArguments
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    memeff_compile.reset()
    settings = dict(use_cpu=True, report_to=[], max_steps=1, save_strategy="no", disable_tqdm=True)
    args = TrainingArguments({folder!r}, torch_compile=True, torch_compile_backend="memeff", **settings)
    Trainer(Model(), args, train_dataset=[{{"input_ids": ids, "labels": ids}}] * 8).train()
    assert is_fused()
print("compiled")
"""


@pytest.fixture
def patched(tmp_path: Path) -> Path:
    """Return a script that uses a copy of the installed accelerate with the patch of the docs."""
    if version("accelerate") != "1.15.0":
        pytest.skip(f"the patch is for accelerate 1.15.0, and this is {version('accelerate')}")
    site, code = tmp_path / "site", tmp_path / "train.py"
    source = Path(accelerate.__file__).parent
    shutil.copytree(
        source, site / "accelerate", ignore=shutil.ignore_patterns("__pycache__", "test_utils")
    )
    applied = subprocess.run(
        ["git", "apply", "-p2", str(PATCH)], cwd=site, capture_output=True, text=True
    )
    assert applied.returncode == 0, applied.stderr
    code.write_text(PATCHED.format(site=str(site), folder=str(tmp_path / "out")))
    return code


def run(code: Path, *command: str) -> subprocess.CompletedProcess[str]:
    paths = f"{code.parent / 'site'}:{ROOT}"
    return subprocess.run(
        [sys.executable, *command],
        env={
            "PYTHONPATH": paths,
            "PATH": "/usr/bin:/bin",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        },
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
def test_with_the_patch_accelerator_and_trainer_take_the_name(patched: Path) -> None:
    result = run(patched, str(patched))
    assert "'MEMEF' is not a valid DynamoBackend" in result.stdout, result.stderr
    assert result.stdout.endswith("compiled\n"), result.stderr


@pytest.mark.slow
def test_with_the_patch_accelerate_launch_takes_the_name(patched: Path) -> None:
    given = ["--cpu", "--num_processes", "1", "--num_machines", "1", "--mixed_precision", "no"]
    launched = ["-m", "accelerate.commands.launch", *given, "--dynamo_backend", "memeff"]
    result = run(patched, *launched, str(patched), "launched")
    assert result.stdout.endswith("compiled\n"), result.stderr
