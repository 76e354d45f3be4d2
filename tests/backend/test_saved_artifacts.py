"""Compiled code that another process loads: PyTorch's cache artifacts serve shared layers too."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
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

# Inductor traces its patterns when it first compiles anything.
torch.compile(torch.neg, options={"fallback_by_default": True})(torch.ones(2))
child("cold", after=save)
child("warm", before=load)
"""


@pytest.mark.xdist_group("processes with one cache")
def test_artifacts_of_shared_layers_serve_a_process_with_empty_caches(tmp_path: Path) -> None:
    inherited = [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([*inherited, str(ROOT)]),
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said = "6 layers of 1 kind, each kind compiled once"
    # before the layers, a layer, and after the layers
    assert done.stdout.splitlines() == [f"cold|0|3|{said}", f"warm|3|0|{said}"]
