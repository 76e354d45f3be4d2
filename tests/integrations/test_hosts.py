"""Modules for frameworks, tested with installed frameworks or with stand-ins."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memeff_compile
from memeff_compile.errors import OptionError
from memeff_compile.integrations import hosts, trl
from tests.integrations.tiny import OPTIONS
from tests.support.fresh_python import FreshPython

ROOT = Path(__file__).resolve().parents[2]
HOSTS = ("accelerate", "axolotl", "lightning", "torchtitan", "transformers")


def test_importing_us_imports_no_host(fresh_python: FreshPython) -> None:
    """Compiling with the backend does not import them either."""
    code = f"""
import sys
for name in ("peft", "trl", *{HOSTS!r}):
    sys.modules[name] = None
import memeff_compile, memeff_compile.backend
import memeff_compile.integrations, memeff_compile.integrations.trl
loaded = [name for name in sys.modules if name.startswith("memeff_compile.integrations.")]
print(sorted(loaded))
"""
    result = fresh_python(code)
    expected = [f"memeff_compile.integrations.{name}" for name in ("hosts", "trl")]
    assert result.stdout.strip() == str(expected), result.stderr


@pytest.mark.parametrize("name", HOSTS)
def test_a_host_that_is_missing_is_named_with_the_line_that_installs_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, f"memeff_compile.integrations.{name}", raising=False)
    with pytest.raises(ImportError, match=rf"needs {name}.*pip install '{name}") as raised:
        import_module(f"memeff_compile.integrations.{name}")
    assert raised.value.name == name


@pytest.mark.parametrize(
    ("found", "least"), [("1.9.0", "1.16"), ("1.15.3", "1.16"), ("0.9", "1"), ("1.9.9rc1", "2.0")]
)
def test_a_host_that_is_too_old_is_named_with_both_versions(
    found: str, least: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = ModuleType("olden")
    old.__version__ = found  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "olden", old)
    said = rf"needs olden>={re.escape(least)}; this environment has {re.escape(found)}\."
    with pytest.raises(ImportError, match=said):
        hosts.host("olden", least)
    assert hosts.host("olden", found) is old


FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "with a bias": {"bias": True},
    "scaled, at a temperature": {"scale": 0.25, "temperature": 0.7},
    "capped": {"softcap": 2.0, "temperature": 1.5, "bias": True},
}
OUTPUTS = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


def trl_statistics(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, form: dict[str, Any]
) -> list[Tensor]:
    """Return the statistics that TRL's documentation lists, computed from the logits."""
    z = nn.functional.linear(hidden, weight, bias) * form.get("scale", 1.0)
    if "softcap" in form:
        z = form["softcap"] * torch.tanh(z / form["softcap"])
    z = z / form.get("temperature", 1.0)
    p = z.softmax(-1)
    return [
        z.log_softmax(-1).gather(-1, target[:, None])[:, 0],
        -(p * p.log()).sum(-1),
        p.square().sum(-1).log(),
        z.mean(-1),
        z.argmax(-1) == target,
    ]


@pytest.mark.parametrize("form", FORMS.values(), ids=list(FORMS))
def test_the_head_of_trl_is_one_op_with_the_values_and_gradients_of_its_formula(
    form: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trl, "_CLASSES_AT_ONCE", 24)
    torch.manual_seed(0)
    hidden = torch.randn(12, 16, requires_grad=True)
    weight = torch.randn(70, 16, requires_grad=True)
    bias = torch.randn(70, requires_grad=True) if form.get("bias") else None
    target = torch.randint(0, 70, (12,))
    target[:4] = (nn.functional.linear(hidden, weight, bias)[:4]).argmax(-1)

    def ours(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Any, ...]:
        given = (form.get("temperature", 1.0), 32, form.get("softcap"), form.get("scale", 1.0))
        return trl.statistics(hidden, weight, bias, target, *given, OUTPUTS)

    found = torch.compile(ours, backend="memeff", options=OPTIONS, fullgraph=True)(
        hidden, weight, bias
    )
    leaves = [leaf for leaf in (hidden, weight, bias) if leaf is not None]
    actual = torch.autograd.grad(found[0].sum() + 0.3 * found[1].sum(), leaves)
    exact = [None if leaf is None else leaf.double() for leaf in (hidden, weight, bias)]
    expected = trl_statistics(*exact, target, form)  # type: ignore[arg-type]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other.to(one.dtype), rtol=1e-5, atol=1e-5)
    wanted = torch.autograd.grad(expected[0].sum() + 0.3 * expected[1].sum(), leaves)
    for one, other in zip(actual, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert memeff_compile.last_report().rewrites("fuse_linear_cross_entropy") >= 1
    assert not any(found[i].requires_grad for i in (2, 3))


@pytest.fixture
def utils(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a stand-in of trl.trainer.utils with a forward that calls its function."""
    code = """
import torch
class _ChunkedLogProbFunction:
    calls = 0
    @classmethod
    @torch._dynamo.disable
    def apply(cls, hidden, weight, bias, targets, *given):
        cls.calls += 1
        every = torch.log_softmax(torch.nn.functional.linear(hidden, weight, bias), -1)
        return every.gather(-1, targets.unsqueeze(-1)).squeeze(-1), None, None, None, None
def forward(model, ids):
    hidden = model.embed(ids)
    given = (1.0, 32768, None, 1.0, ("log_probs",))
    out = _ChunkedLogProbFunction.apply(hidden, model.head.weight, model.head.bias, ids, *given)
    return -out[0].sum()
"""
    for name in ("trl", "trl.trainer", "trl.trainer.utils"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    top, trainer, made = (sys.modules[n] for n in ("trl", "trl.trainer", "trl.trainer.utils"))
    monkeypatch.setattr(top, "__version__", "1.16.0", raising=False)
    monkeypatch.setattr(trainer, "utils", made, raising=False)
    exec(code, made.__dict__)
    return made


class Tokens(nn.Module):
    """An embedding and an output projection, called as TRL's trainers call a model."""

    def __init__(self, forward: Callable[..., Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(48, 16), nn.Linear(16, 48)
        self.of_trl = forward

    def forward(self, ids: Tensor) -> Tensor:
        return self.of_trl(self, ids)


def test_the_head_is_handed_over_while_this_backend_captures_and_only_then(utils: Any) -> None:
    theirs, ids = utils._ChunkedLogProbFunction, torch.arange(1, 9)
    expected = Tokens(utils.forward)(ids)
    undo = trl.hand_over_head()
    assert trl.hand_over_head() == undo
    model = Tokens(utils.forward)
    torch.testing.assert_close(model(ids), expected)
    assert theirs.calls == 2
    model.compile(backend="eager")
    torch.testing.assert_close(model(ids), expected)
    assert theirs.calls == 3
    model = Tokens(utils.forward)
    model.compile(backend="memeff", options=OPTIONS, fullgraph=True)
    torch.testing.assert_close(model(ids), expected)
    assert theirs.calls == 3
    assert memeff_compile.last_report().rewrites("fuse_linear_cross_entropy") == 1
    undo()
    assert utils._ChunkedLogProbFunction is theirs


def test_a_trl_with_another_name_is_left_alone_with_a_warning(
    utils: Any, caplog: pytest.LogCaptureFixture
) -> None:
    del utils._ChunkedLogProbFunction
    trl._warn_of_another_name.cache_clear()
    trl.hand_over_head()()
    assert not hasattr(utils, "_ChunkedLogProbFunction")
    assert "memeff does not fuse it" in caplog.text


@pytest.fixture
def axolotl(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return our module for Axolotl, next to the installed one or a stand-in of its base class."""
    pytest.importorskip("pydantic", reason="Axolotl's settings are models of pydantic")
    try:
        import_module("axolotl.integrations.base")
    except ImportError:
        for name in ("axolotl", "axolotl.integrations", "axolotl.integrations.base"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        base = sys.modules["axolotl.integrations.base"]
        monkeypatch.setattr(base, "BasePlugin", type("BasePlugin", (), {}), raising=False)
    name = "memeff_compile.integrations.axolotl"
    yield import_module(name)
    sys.modules.pop(name, None)


def test_axolotl_gets_the_callback_with_the_options_of_its_file(axolotl: Any) -> None:
    from memeff_compile.integrations.transformers import MemeffCallback

    plugin = axolotl.MemeffPlugin()
    module, name = plugin.get_input_args().rsplit(".", 1)
    schema = getattr(import_module(module), name)
    given = {"memeff": {"memeff.logits": "none", "mode": "reduce-overhead"}}
    assert schema(**given).model_dump() == given
    assert schema().model_dump() == {"memeff": None}
    plugin.register(given)
    (callback,) = plugin.add_callbacks_pre_trainer(given, nn.Linear(2, 2))
    assert isinstance(callback, MemeffCallback)
    arguments = callback.request.arguments()
    assert arguments["options"] == {"memeff.logits": "none", "memeff.mode": "reduce-overhead"}
    (callback,) = plugin.add_callbacks_pre_trainer({}, nn.Linear(2, 2))
    assert callback.request.arguments()["options"] is None


@pytest.mark.parametrize(
    ("cfg", "said"),
    [
        ({"memeff": {"memeff.logit": "none"}}, "Did you mean 'memeff.logits'"),
        ({"torch_compile": True}, "set torch_compile: false"),
        ({"liger_fused_linear_cross_entropy": True}, "set liger_fused_linear_cross_entropy: false"),
        ({"cut_cross_entropy": True}, "set cut_cross_entropy: false"),
    ],
)
def test_axolotl_is_told_at_once_of_options_and_of_a_second_fused_loss(
    axolotl: Any, cfg: dict[str, Any], said: str
) -> None:
    with pytest.raises(OptionError, match=said):
        axolotl.MemeffPlugin().register(cfg)


class Patcher:
    """The part of a ModelPatcher that the ComfyUI node uses."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def clone(self) -> Patcher:
        return Patcher(self.module)


def test_the_node_of_comfyui_compiles_a_copy_with_attention_in_the_bits_it_was_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """ComfyUI's function passes its arguments to torch.compile; here a stand-in does."""
    from examples.comfyui import NODE_CLASS_MAPPINGS

    def set_torch_compile_wrapper(model: Patcher, **given: Any) -> None:
        given["options"] |= OPTIONS
        model.module = torch.compile(model.module, **given)  # type: ignore[assignment]

    helpers = ModuleType("comfy_api.torch_helpers")
    helpers.set_torch_compile_wrapper = set_torch_compile_wrapper  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "comfy_api", ModuleType("comfy_api"))
    monkeypatch.setitem(sys.modules, "comfy_api.torch_helpers", helpers)

    class Attends(nn.Module):
        def forward(self, x: Tensor, transformer_options: dict[str, int]) -> Tensor:
            return nn.functional.scaled_dot_product_attention(x, x, x) * transformer_options["step"]

    model, x = Attends(), torch.randn(1, 2, 256, 64, dtype=torch.bfloat16)
    node = NODE_CLASS_MAPPINGS["CompileByMemeff"]()
    levels = node.INPUT_TYPES()["required"]["attention"][0]
    assert levels == ["exact", "8b", "8b+f16", "4b"]
    before = Patcher(model)
    (copied,) = getattr(node, node.FUNCTION)(before, "8b")
    assert before.module is model
    with torch.no_grad():
        found = [copied.module(x, {"step": step}) for step in (1, 1)]
    torch.testing.assert_close(found[1], model(x, {"step": 1}), rtol=0.05, atol=0.05)
    (record,) = memeff_compile.last_report().records
    assert (record.pass_name, record.code) == ("quantize_attention", "not_faster")  # on a CPU
