"""The cost of importing memeff_compile, each part seen in a fresh process."""

from __future__ import annotations

import pytest

from tests.support.fresh_python import FreshPython

LOADED = """
import sys
import memeff_compile
{then}
hosts = ("transformers", "accelerate", "peft", "trl", "lightning", "axolotl", "torchtitan")
heavy = ("torch", "triton", "torch._dynamo", "sympy", "memeff_compile.integrations", *hosts)
heavy = [name for name in heavy if name in sys.modules]
print(heavy)
"""


def test_importing_the_package_imports_nothing_heavy(fresh_python: FreshPython) -> None:
    result = fresh_python(LOADED.format(then=""))
    assert result.stdout.strip() == "[]", result.stderr


@pytest.mark.parametrize("name", ["Options", "OptionError", "last_report", "graphs", "__version__"])
def test_a_public_name_costs_no_torch(fresh_python: FreshPython, name: str) -> None:
    result = fresh_python(LOADED.format(then=f"memeff_compile.{name}"))
    assert result.stdout.strip() == "[]", result.stderr


BY_NAME = """\
import torch
assert "memeff_compile" not in sys.modules
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(48, 16)
        self.head = torch.nn.Linear(16, 48)
    def forward(self, ids):
        return torch.nn.functional.cross_entropy(self.head(self.embed(ids)), ids)
model = torch.compile(Model(), backend="memeff", options={"memeff.inner": "eager"})
model(torch.arange(8)).backward()
print(sys.modules["memeff_compile"].last_report().rewrites("fuse_linear_cross_entropy"))
"""


def test_the_backend_is_found_by_name_without_triton_and_public_names_resolve(
    fresh_python: FreshPython,
) -> None:
    """The backend comes first, before any import of memeff_compile, and prints nothing by itself.

    torch._dynamo itself imports triton where it can, so triton is made unimportable. So is
    transformers, until a name that needs it has said so.
    """
    rooms = ("kernels", "logits.tensor", "passes", "model", "verify", "backend", "planning", "cli")
    rooms += ("integrations", "integrations.trl")
    code = f"""
import sys
sys.modules["triton"] = sys.modules["transformers"] = None
{BY_NAME}
import memeff_compile
try:
    memeff_compile.KVCache
except ImportError as error:
    print(error)
del sys.modules["transformers"]
assert set(memeff_compile.__all__) == set(dir(memeff_compile))
assert all(getattr(memeff_compile, name) is not None for name in memeff_compile.__all__)
assert set(memeff_compile.__all__) == set(dir(memeff_compile)), "submodules are no public names"
from memeff_compile import errors
missing = [name for name in errors.__all__ if getattr(memeff_compile, name, None) is None]
print(missing, len(errors.__all__) > 10)
try:
    memeff_compile.last_raport
except AttributeError as error:
    print(error)
import importlib
for room in {rooms}:
    importlib.import_module("memeff_compile." + room)
    print(room)
"""
    result = fresh_python(code)
    assert "memeff" not in result.stderr
    rewritten, without, first, second, *imported = result.stdout.splitlines()
    assert rewritten == "1", result.stderr
    assert "pip install 'memeff_compile[transformers]'" in without
    assert first == "[] True", result.stderr
    assert "last_report" in second
    assert tuple(imported) == rooms, result.stderr
