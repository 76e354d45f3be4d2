"""The systems are extras: the core works without any one of them."""

from __future__ import annotations

import json

from memeff_compile.options import PASS_NAMES
from memeff_compile.system import Hooks, System, hooks, systems
from tests.support.fresh_python import FreshPython, fresh_python

__all__ = ["fresh_python"]

WITHOUT = """
import json, logging, os, sys
from importlib.abc import MetaPathFinder

# What all have in common is imported once: a child for each system starts from here.
import torch
import torch._dynamo
from torch import nn
import torch.nn.functional as F

class Blocked(MetaPathFinder):
    def __init__(self, names):
        self.names = names
    def find_spec(self, fullname, path, target=None):
        if any(fullname == name or fullname.startswith(name + ".") for name in self.names):
            raise ModuleNotFoundError("No module named " + repr(fullname), name=fullname)

class Said(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []
    def emit(self, record):
        self.lines.append(record.getMessage())

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.qkv = nn.Embedding(64, 16), nn.Linear(16, 48)
        self.out, self.head = nn.Linear(16, 16), nn.Linear(16, 64, bias=False)
    def forward(self, ids, labels=None):
        h = self.embed(ids)
        q, k, v = (e.unflatten(-1, (2, 8)).transpose(1, 2) for e in self.qkv(h).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        logits = self.head(h + self.out(mixed.transpose(1, 2).flatten(2)))
        if labels is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

def tokens(call, ids):
    with torch.no_grad():
        for _ in range(3):
            ids = torch.cat([ids[:, 1:], call(ids)[:, -1:].argmax(-1)], 1)  # one graph for all
    return ids.tolist()

def run(blocked):
    sys.meta_path.insert(0, Blocked(blocked))
    said = Said()
    logging.getLogger().addHandler(said)
    import memeff_compile
    from memeff_compile.backend import memeff
    from memeff_compile.options import PASS_NAMES
    torch.manual_seed(0)
    model, ids = Model(), torch.arange(24).view(2, 12)
    expected = torch.autograd.grad(model(ids, ids), list(model.parameters()))
    generated = tokens(model, ids)
    compiled = torch.compile(model, backend=memeff, options={"memeff.inner": "eager"})
    found = torch.autograd.grad(compiled(ids, ids), list(model.parameters()))
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs)
    fused = memeff_compile.last_report().rewrites("fuse_linear_cross_entropy")
    assert tokens(compiled, ids) == generated
    present = [name for name in sys.modules if any(name.startswith(b) for b in blocked)]
    return [fused, list(PASS_NAMES), sorted(present), said.lines]

# So is what PyTorch's compiler imports and traces when it first compiles anything. No gradient is computed
# here: a process whose autograd has started its threads must not fork.
torch.compile(Model(), backend="eager")(*[torch.arange(24).view(2, 12)] * 2)
torch._dynamo.reset()

for name, blocked in json.loads(sys.argv[1]).items():
    pid = os.fork()
    if pid == 0:
        print(json.dumps([name, *run(blocked)]), flush=True)
        os._exit(0)
    if os.waitpid(pid, 0)[1]:
        sys.exit(name)
"""


ROOMS = {
    "low-bit attention": "model.attention",
    "KV caches": "model.cache",
    "ternary linears": "model.ternary",
    "compressed weights": "model.weights",
}


def files_of(system: System) -> list[str]:
    """Return the modules that a system consists of, folders included."""
    sources = [each.source.split(":")[0] for each in system.passes]
    folders = [op.rpartition(".")[0] for op in system.ops]
    return sorted(f"memeff_compile.{name}" for name in {*sources, *folders, ROOMS[system.name]})


def test_without_a_system_a_model_still_compiles_trains_and_generates(
    fresh_python: FreshPython,
) -> None:
    done = fresh_python(WITHOUT, json.dumps({each.name: files_of(each) for each in systems()}))
    assert done.returncode == 0, done.stderr
    outcomes = {name: rest for name, *rest in map(json.loads, done.stdout.splitlines())}
    for system in systems():
        fused, passes, present, said = outcomes.pop(system.name)
        gone = {each.facts.name for each in system.passes}
        assert fused == 1
        assert passes == [name for name in PASS_NAMES if name not in gone]
        assert not present
        assert sum("a system is left out" in line for line in said) == 1, said
    assert not outcomes


def test_four_systems_hand_themselves_in_and_each_brings_a_pass_and_an_op() -> None:
    assert [each.name for each in systems()] == list(ROOMS)
    assert all(each.passes and each.ops for each in systems())


def test_hooks_that_a_system_leaves_alone_change_nothing() -> None:
    assert all(isinstance(each, Hooks) for each in hooks())
    plain = Hooks()
    assert not plain.wants(None)  # type: ignore[arg-type]
