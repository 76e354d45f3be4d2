"""A warm start: a second process finds the compiled graphs in AOTAutograd's cache.

Processes are expensive: the graphs of all tests are compiled in two, forked from one that has done
the imports. The slow test uses two unrelated processes, in which even the order of a set differs.
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
) -> tuple[list[str], list[str]]:
    """Return the cache results of each compilation in two processes with one cache."""
    folder = tmp_path_factory.mktemp("processes")
    (folder / "own_pass.py").write_text(EXAMPLE.read_text())
    programs = {"first.py": PROGRAM, "second.py": PROGRAM + OTHERS, "forks.py": FORKS}
    for name, text in programs.items():
        (folder / name).write_text(text)
    if request.param == "apart":
        return _run(folder, "first.py"), _run(folder, "second.py")
    lines = _run(folder, "forks.py", "first.py", "second.py")
    end = lines.index("END")
    return lines[:end], lines[end:]


@pytest.mark.xdist_group("processes with one cache")
def test_second_process_hits_the_autograd_cache(said: tuple[list[str], list[str]]) -> None:
    (cold,), (warm, other) = (_of("OURS", lines) for lines in said)
    assert cold.endswith(" 1 1 0 1 0")
    assert warm == cold.removesuffix("0 1 0") + "1 0 0"
    assert other == cold, "another version of ours may have other ops under the same names"


@pytest.mark.xdist_group("processes with one cache")
def test_ones_own_pass_survives_it_and_its_versions_differ(
    said: tuple[list[str], list[str]],
) -> None:
    cold, warm = "OWN 1 0 1 0", "OWN 1 1 0 0"
    first, second = (_of("OWN", lines) for lines in said)
    assert first == [cold]
    assert second == [warm, warm, cold, cold]
