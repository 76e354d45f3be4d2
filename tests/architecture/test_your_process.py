"""The page `docs/use/your-process.md` names every module that changes something of others."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

from tests.support.fresh_python import FreshPython, fresh_python

__all__ = ["fresh_python"]

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "memeff_compile"
PAGE = (ROOT / "docs" / "use" / "your-process.md").read_text()
NAMED = set(
    re.findall(
        r"`((?:kernels|logits|model|compat|backend|passes|planning|cli|integrations|__main__)[\w.]*)`",
        PAGE,
    )
)

# Calls by which code registers itself with PyTorch, Python or transformers.
REGISTERS = re.compile(
    r"register_\w*hook\w*|register_lowering|register_quantiz\w+|register_fallthrough|meta_path\.insert"
    r"|AttentionInterface\.register|AttentionMaskInterface\.register|ForkingPickler\.register"
    r"|atexit\.register|signal\.signal|simplefilter|filterwarnings|set_default_\w+|setLevel|addHandler"
)


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


def changes_in(tree: ast.AST) -> set[str]:
    """Return a module's registrations, and the attributes of imported modules that it assigns."""
    found: set[str] = set()
    imported = {
        alias.asname or alias.name.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        and not getattr(node, "level", 0)
        and not (getattr(node, "module", "") or "").startswith("memeff_compile")
        for alias in node.names
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and REGISTERS.search(ast.unparse(node.func)):
            found.add(ast.unparse(node.func))
        if isinstance(node, ast.Assign | ast.AugAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                base = target
                while isinstance(base, ast.Attribute | ast.Subscript):
                    base = base.value
                is_inside = isinstance(base, ast.Name) and base is not target
                if is_inside and base.id in imported:
                    found.add(ast.unparse(target))
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "config.patch":
            found.add("config.patch")
    return found


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=module_of)
def test_a_module_that_changes_something_of_others_is_on_the_page(path: Path) -> None:
    found = changes_in(ast.parse(path.read_text()))
    assert not found or module_of(path) in NAMED, sorted(found)


@pytest.mark.parametrize("name", sorted(NAMED))
def test_a_module_on_the_page_is_there(name: str) -> None:
    path = PACKAGE / Path(*name.split("."))
    assert path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def test_an_assignment_and_a_hook_are_seen() -> None:
    text = "from torch._dynamo import config\nconfig.x = 1\nm.register_forward_hook(f)\n"
    assert changes_in(ast.parse(text)) == {"config.x", "m.register_forward_hook"}
    assert changes_in(ast.parse("import torch\ntorch.backends.cudnn.enabled = False")) != set()
    assert changes_in(ast.parse("from .errors import x\nself.x = x\nx.y = 1")) == set()


LOOK = """
import json, os, random, sys, logging, warnings
import torch, torch._dynamo, torch._inductor.config, torch._functorch.config
from multiprocessing.reduction import ForkingPickler
from torch.optim import optimizer

def seen():
    settings = {}
    for module in (torch._dynamo.config, torch._inductor.config, torch._functorch.config):
        held = module.get_config_copy() if hasattr(module, "get_config_copy") else dict(module._config)
        for name, value in held.items():
            settings[module.__name__ + "." + name] = repr(sorted(map(str, value)) if isinstance(value, set) else value)
    return {
        **settings,
        "meta_path": str([type(each).__name__ for each in sys.meta_path]),
        "environment": str(sorted(os.environ.items())),
        "warnings": str(warnings.filters),
        "handlers": str([logging.getLogger().handlers, logging.getLogger().level]),
        "dtype": str(torch.get_default_dtype()),
        "random": str(hash(bytes(torch.get_rng_state().tolist()))) + str(hash(random.getstate())),
        "threads": str(torch.get_num_threads()),
        "precision": torch.get_float32_matmul_precision(),
        "grad": str(torch.is_grad_enabled()),
        "steps": str([len(optimizer._global_optimizer_pre_hooks), len(optimizer._global_optimizer_post_hooks)]),
        "reducers": str(sorted(each.__name__ for each in ForkingPickler._extra_reducers)),
    }

model = torch.nn.Sequential(torch.nn.Embedding(64, 8), torch.nn.Linear(8, 64))
ids = torch.arange(16)
step = torch.optim.SGD(model.parameters(), 0.1)
torch.compile(model, backend="aot_eager")(ids).sum().backward()
torch._dynamo.reset()
before = seen()
import memeff_compile
from memeff_compile.backend import memeff
imported = seen()
compiled = torch.compile(model, backend=memeff, options={"memeff.inner": "aot_eager"})
torch.nn.functional.cross_entropy(compiled(ids), ids).backward()
memeff_compile.reset()
after = seen()
step.zero_grad()
changed = lambda a, b: sorted(name for name in b if a.get(name) != b[name])
print(json.dumps([changed(before, imported), changed(imported, after), before["steps"], after["steps"]]))
"""


def test_importing_and_training_change_what_the_page_says(fresh_python: FreshPython) -> None:
    done = fresh_python(LOOK)
    assert done.returncode == 0, done.stderr
    by_import, by_training, hooks_before, hooks_after = json.loads(done.stdout.splitlines()[-1])
    assert by_import == ["meta_path", "reducers"]
    assert by_training == ["steps"]
    assert (hooks_before, hooks_after) == ("[0, 0]", "[0, 1]")
