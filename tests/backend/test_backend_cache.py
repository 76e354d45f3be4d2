"""A warm start: a second process finds the compiled graphs in AOTAutograd's cache.

PyTorch's cache artifacts serve shared layers, too. Processes are expensive: the graphs of all tests
are compiled in a few, forked from one that has done the imports. The slow test uses unrelated
processes, in which even the order of a set differs.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "own_pass.py"

PROGRAM = """
import torch
from torch._dynamo.utils import counters

OPS = {"fallback_by_default": True}  # Inductor calls them: no loops for g++ to compile

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(64, 16)
        self.lm_head = torch.nn.Linear(16, 64)
        self.lm_head.weight = self.embed.weight

    def forward(self, ids):
        logits = self.lm_head(self.embed(ids))[:, :-1]
        targets = torch.nn.functional.pad(ids, (0, 1), value=-100)[:, 2:]
        z_loss = logits.logsumexp(-1).square().mean()
        loss = torch.nn.functional.cross_entropy(logits.reshape(-1, 64), targets.reshape(-1))
        return loss + 1e-4 * z_loss, logits

def gated(x, w):
    y = x @ w
    return (y * torch.sigmoid(y)).sum()

def begin():
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)

def say(name, *more):
    found = counters["aot_autograd"]
    print(name, *more, *(found[f"autograd_cache_{what}"] for what in ("hit", "miss", "bypass")))

def rewrites(name):
    import memeff_compile
    return memeff_compile.last_report().rewrites(name)

def ours():
    begin()
    loss, logits = torch.compile(Model(), backend="memeff", options=OPS)(torch.arange(16).view(2, 8))
    loss.backward()
    names = ("fuse_linear_cross_entropy", "fuse_embedding_gradient")
    say("OURS", f"{loss.item():.6f}", *map(rewrites, names))

def own(chosen):
    begin()
    x, w = torch.ones(3, 4), torch.ones(4, 5, requires_grad=True)
    options = {"memeff.passes": chosen, **OPS}
    torch.compile(gated, backend="memeff", options=options)(x, w).backward()
    say("OWN", rewrites("use_silu"))

ours()
import own_pass
own(own_pass.UseSilu())
"""

OTHERS = """
import importlib
from pathlib import Path
import memeff_compile
own(own_pass.UseSilu())
chosen = own_pass.UseSilu()
chosen.limit = 3
own(chosen)
with Path(own_pass.__file__).open("a") as file:
    file.write("# another version")
own(importlib.reload(own_pass).UseSilu())
memeff_compile.__version__ = "0.0.0"
ours()
"""

ARTIFACTS = """
import os, sys
import torch
import memeff_compile.backend
from torch._dynamo.utils import counters

LAYERS = 6

class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(16, 32), torch.nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(64, 16), torch.nn.Linear(16, 64, bias=False)
        self.layers = torch.nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)[:, :-1]
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

def run(name):
    counters.clear()
    torch.manual_seed(0)
    model, ids = Model(), torch.arange(32).view(4, 8)
    loss = model(ids)
    loss.backward()
    expected = [loss.detach(), *(p.grad.clone() for p in model.parameters())]
    model.zero_grad()
    # Inductor calls the operations: no loops for g++ to compile
    options = {"memeff.regions": "on", "fallback_by_default": True}
    compiled = torch.compile(model, backend="memeff", options=options)
    loss = compiled(ids)
    loss.backward()
    found = [loss.detach(), *(p.grad for p in model.parameters())]
    torch.testing.assert_close(found, expected)
    of = counters["aot_autograd"]
    said = [r.sentence for r in memeff_compile.last_report().records if r.code == "repeated_layers"]
    print(name, of["autograd_cache_hit"], of["autograd_cache_miss"], *said, sep="|", flush=True)

def child(name, before=None, after=None):
    pid = os.fork()
    if pid == 0:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(os.getcwd(), name)
        before and before()
        run(name)
        after and after()
        sys.stdout.flush()
        os._exit(0)
    if os.waitpid(pid, 0)[1]:
        sys.exit(name)

def save():
    data, _ = torch.compiler.save_cache_artifacts()
    with open("artifacts", "wb") as file:
        file.write(data)

def load():
    with open("artifacts", "rb") as file:
        torch.compiler.load_cache_artifacts(file.read())

child("cold", after=save)
child("warm", before=load)
"""

FORKS = """
import os
import runpy
import sys
import torch._inductor.compile_fx
import memeff_compile.backend

# Inductor traces its patterns when it first compiles anything.
torch.compile(torch.neg, options={"fallback_by_default": True})(torch.ones(2))

for program in sys.argv[1:]:
    sys.stdout.flush()
    child = os.fork()
    if not child:
        sys.path.insert(0, os.getcwd())
        runpy.run_path(program)
        sys.stdout.flush()
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        sys.exit(program)
    print("END")
"""


def _run(folder: Path, *programs: str) -> list[str]:
    inherited = [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
    done = subprocess.run(
        [sys.executable, *programs],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([*inherited, str(ROOT)]),
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache"),
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def _of(name: str, lines: list[str]) -> list[str]:
    return [line for line in lines if line.startswith(f"{name} ")]


@pytest.fixture(scope="module", params=["forked", pytest.param("apart", marks=pytest.mark.slow)])
def said(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[list[str]]:
    """Return what three programs print: two with one cache, and one that saves and loads its own."""
    folder = tmp_path_factory.mktemp("processes")
    (folder / "own_pass.py").write_text(EXAMPLE.read_text())
    programs = {"first.py": PROGRAM, "second.py": PROGRAM + OTHERS, "artifacts.py": ARTIFACTS}
    for name, text in (programs | {"forks.py": FORKS}).items():
        (folder / name).write_text(text)
    if request.param == "apart":
        return [_run(folder, name) for name in programs]
    lines = _run(folder, "forks.py", *programs)
    first, second = (place for place, line in enumerate(lines[:-1]) if line == "END")
    return [lines[:first], lines[first + 1 : second], lines[second + 1 : -1]]


@pytest.mark.xdist_group("processes with one cache")
def test_second_process_hits_the_autograd_cache(said: list[list[str]]) -> None:
    (cold,), (warm, other) = (_of("OURS", lines) for lines in said[:2])
    assert cold.endswith(" 1 1 0 1 0")
    assert warm == cold.removesuffix("0 1 0") + "1 0 0"
    assert other == cold, "another version of ours may have other ops under the same names"


@pytest.mark.xdist_group("processes with one cache")
def test_ones_own_pass_survives_it_and_its_versions_differ(said: list[list[str]]) -> None:
    cold, warm = "OWN 1 0 1 0", "OWN 1 1 0 0"
    first, second = (_of("OWN", lines) for lines in said[:2])
    assert first == [cold]
    assert second == [warm, warm, cold, cold]


@pytest.mark.xdist_group("processes with one cache")
def test_artifacts_of_shared_layers_serve_a_process_with_empty_caches(
    said: list[list[str]],
) -> None:
    shared = "6 layers of 1 kind, each kind compiled once"
    # before the layers, a layer, and after the layers
    assert said[2] == [f"cold|0|3|{shared}", f"warm|3|0|{shared}"]
