"""Graphs saved by aot_compile: compiled here, loaded here and in another process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import memeff_compile
from memeff_compile.errors import MemeffError
from memeff_compile.logits.tensor import DeferredLogits

pytestmark = pytest.mark.skipif(
    torch.__version__ < "2.13",
    reason="aot_compile of torch 2.11 saves no graph of AOTAutograd (2.12 was not tried)",
)

ROOT = Path(__file__).parents[2]
ROWS, WIDTH, VOCAB = 8, 16, 512


class Model(nn.Module):
    """A head whose logits are returned, with a loss or without."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> tuple[Tensor | None, Tensor]:
        logits = self.head(self.body(x).relu()) * 0.5
        return None if labels is None else F.cross_entropy(logits, labels), logits


def inputs(*, loss: bool) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, WIDTH, generator=generator)
    labels = torch.randint(0, VOCAB, (ROWS,), generator=generator)
    return (x, labels) if loss else (x,)


def save(path: Path, given: tuple[Tensor, ...], options: dict[str, Any]) -> Any:
    compiled: Any = torch.compile(Model(), backend="memeff", fullgraph=True, options=options)
    made = compiled.forward.aot_compile((given, {}))
    made.save_compiled_function(str(path))
    return made


def load(path: Path) -> Any:
    with path.open("rb") as file:
        return torch.compiler.load_compiled_function(file)


def check(run: Any, given: tuple[Tensor, ...]) -> None:
    """Compare a graph's results with eager: loss, logits, and gradients if there are any."""
    found: list[list[Tensor]] = []
    for call, model in ((run, Model()), (None, Model())):
        loss, logits = model(*given) if call is None else call(model, *given)
        parts = [logits] if loss is None else [loss, logits]
        result = [part.detach().clone() for part in parts]
        if logits.requires_grad:
            sum(part.square().sum() for part in parts).backward()
            result += [p.grad for p in model.parameters() if p.grad is not None]
            assert len(result) == len(parts) + 3
        found.append(result)
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def elsewhere(path: Path, *, loss: bool, grad: bool) -> str:
    """Load a graph in a process that has not compiled; return the type of its logits."""
    code = (
        "import sys, torch, pathlib\n"
        "from tests.backend.test_saved_graphs import Model, check, inputs, load\n"
        f"torch.set_grad_enabled({grad})\n"
        f"torch.set_num_threads({torch.get_num_threads()})\n"  # PyTorch guards it
        f"run, given = load(pathlib.Path({str(path)!r})), inputs(loss={loss})\n"
        "check(run, given)\n"
        "print(type(run(Model(), *given)[1]).__name__)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("loss", [True, False], ids=["loss", "logits"])
@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
def test_a_saved_graph_returns_what_eager_does(loss: bool, grad: bool, tmp_path: Path) -> None:
    given, path = inputs(loss=loss), tmp_path / "graph"
    with torch.set_grad_enabled(grad):
        made = save(path, given, {"memeff.inner": "aot_eager"})
        check(made, given)
        torch._dynamo.reset()
        run = load(path)
        check(run, given)
        logits = run(Model(), *given)[1]
    # Without gradients and without a loss logits are wanted: they are not deferred.
    assert isinstance(logits, DeferredLogits) == (loss or grad)


def test_a_graph_saved_with_inductor_runs_in_another_process(tmp_path: Path) -> None:
    given, path = inputs(loss=True), tmp_path / "graph"
    save(path, given, {"fallback_by_default": True})  # no loops for g++ to compile
    assert memeff_compile.last_report().rewrites("fuse_linear_cross_entropy") == 1
    assert elsewhere(path, loss=True, grad=True) == "DeferredLogits"


@pytest.mark.slow
@pytest.mark.parametrize("loss", [True, False], ids=["loss", "logits"])
def test_a_graph_saved_without_gradients_runs_in_another_process(
    loss: bool, tmp_path: Path
) -> None:
    given, path = inputs(loss=loss), tmp_path / "graph"
    with torch.no_grad():
        save(path, given, {})
    name = elsewhere(path, loss=loss, grad=False)
    assert name == ("DeferredLogits" if loss else "Tensor")


def test_logits_that_nobody_wants_are_none_in_a_loaded_graph(tmp_path: Path) -> None:
    given, path = inputs(loss=True), tmp_path / "graph"
    save(path, given, {"memeff.inner": "aot_eager", "memeff.logits": "none"})
    loss, logits = load(path)(Model(), *given)
    assert logits is None
    torch.testing.assert_close(loss, Model()(*given)[0])


def test_a_graph_of_another_version_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, path = inputs(loss=True), tmp_path / "graph"
    save(path, given, {"memeff.inner": "aot_eager"})
    monkeypatch.setattr(memeff_compile, "__version__", "0.0.0")
    with pytest.raises(MemeffError, match="another version of memeff_compile"):
        load(path)


def test_a_graph_without_an_artifact_cannot_be_saved(tmp_path: Path) -> None:
    with pytest.raises(MemeffError, match=r"memeff\.inner='eager', of which there is no artifact"):
        save(tmp_path / "graph", inputs(loss=True), {"memeff.inner": "eager"})
