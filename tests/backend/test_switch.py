"""`memeff.preset=off`, MEMEFF_DISABLE and PyTorch's switches turn everything off."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch

import memeff_compile
from memeff_compile.cli.toy import ToyModel
from memeff_compile.kernels.coded_weight import CodedWeight
from memeff_compile.options import PASS_NAMES, Options
from tests.support.fresh_python import FreshPython

IDS = torch.arange(8)


def test_the_preset_switches_every_pass_off_whatever_else_is_given() -> None:
    given = {"linear_cross_entropy": "mass", "linear_cross_entropy.tau": 0.1, "attention": "8b"}
    given |= {"strict": ("fuse_linear_cross_entropy",), "weights": "win4", "preset": "off"}
    options = Options.parse(None, {f"memeff.{key}": value for key, value in given.items()})
    assert all(options.switched_off(name) for name in PASS_NAMES)
    assert (options.strict, options.cuda_graphs, options.weights) == ((), "off", "off")
    assert options.logits == "eager"
    assert Options.parse(None, options.to_dict()) == options
    with pytest.raises(memeff_compile.OptionError, match=r"memeff\.logits is 'lazy'"):
        Options(preset="off", logits="lazy")


@pytest.mark.parametrize("way", ["preset", "environment"])
def test_a_graph_goes_on_as_it_came_and_the_report_says_so(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"memeff.inner": "eager", "memeff.strict": "fuse_linear_cross_entropy"}
    if way == "preset":
        options["memeff.preset"] = "off"
    else:
        monkeypatch.setenv("MEMEFF_DISABLE", "1")
    memeff_compile.reset()
    model = torch.compile(ToyModel(), backend="memeff", options=options)
    model(IDS).backward()
    report = memeff_compile.last_report()
    assert report.rewrites() == 0
    (graph,) = report.graphs
    assert graph.before == graph.after
    assert [record.code for record in graph.records] == ["switched_off"]
    assert "Leave memeff.preset out" in str(report)


def test_a_disabled_environment_of_zero_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMEFF_DISABLE", "0")
    memeff_compile.reset()
    memeff_compile.compile(ToyModel(), inner="eager")(IDS)
    assert memeff_compile.last_report().rewrites() == 1


@pytest.mark.parametrize("way", ["preset", "environment"])
def test_no_weight_is_compressed(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(1024, 1024, dtype=torch.bfloat16))
    settings = {"preset": "off"} if way == "preset" else {}
    if way == "environment":
        monkeypatch.setenv("MEMEFF_DISABLE", "1")
    memeff_compile.compile(model, weights="win4", inner="eager", **settings)
    assert not isinstance(model[0].weight, CodedWeight)


@contextmanager
def set_variable(name: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(name, "1")
        yield


SWITCHES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "preset": nullcontext,
    "MEMEFF_DISABLE": lambda: set_variable("MEMEFF_DISABLE"),
    "TORCH_COMPILE_DISABLE": lambda: torch._dynamo.config.patch(disable=True),
    "TORCHDYNAMO_DISABLE": lambda: set_variable("TORCHDYNAMO_DISABLE"),
    "force_eager": lambda: torch.compiler.set_stance("force_eager"),
}


def make() -> Any:
    transformers = pytest.importorskip("transformers", reason="the model is one of its")
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(num_attention_heads=2, eos_token_id=None, **sizes)
    return transformers.LlamaForCausalLM(config).eval()


PROMPT = torch.arange(2, 40)[None]


def generate(model: Any) -> Any:
    asked = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    return model.generate(PROMPT, **asked, return_dict_in_generate=True, output_logits=True)


def compiled(model: Any, **settings: Any) -> None:
    kv_cache = {"bits": 2, "recent": 16, "keep_first": 0, "group": 32}
    memeff_compile.compile(
        model, kv_cache=kv_cache, attention="8b", attention_length=0, inner="eager", **settings
    )


def assert_as_eager(found: Any, expected: Any) -> None:
    assert type(found.past_key_values) is type(expected.past_key_values)
    assert torch.equal(found.sequences, expected.sequences)
    torch.testing.assert_close(found.logits, expected.logits)


@pytest.mark.parametrize("switch", SWITCHES)
def test_generate_has_the_models_own_cache_and_eager_tokens(switch: str) -> None:
    model = make()
    expected = generate(model)
    with SWITCHES[switch]():
        compiled(model, **({"preset": "off"} if switch == "preset" else {}))
        assert_as_eager(generate(model), expected)


def test_generate_has_them_where_it_is_switched_later() -> None:
    model = make()
    expected = generate(model)
    compiled(model)
    assert isinstance(generate(model).past_key_values, memeff_compile.KVCache)
    for switch in (each for each in SWITCHES if each != "preset"):
        with SWITCHES[switch]():
            assert_as_eager(generate(model), expected)


@pytest.mark.parametrize("switch", ["MEMEFF_DISABLE", "TORCH_COMPILE_DISABLE", "force_eager"])
def test_attention_sees_its_heads_as_they_are(switch: str) -> None:
    from memeff_compile.model import use_low_bit_heads_

    model, ids = make(), torch.arange(2, 20)[None]
    with torch.no_grad():
        expected = model(ids).logits
        use_low_bit_heads_(model, query=4, key_value=2)
        assert not torch.allclose(model(ids).logits, expected, atol=1e-4)
        with SWITCHES[switch]():
            torch.testing.assert_close(model(ids).logits, expected)


def test_the_variable_of_pytorch_is_heeded_before_anything_is_compiled(
    fresh_python: FreshPython,
) -> None:
    said = (
        "import os; os.environ['TORCH_COMPILE_DISABLE'] = '1'\n"
        "from memeff_compile import compat\nprint(compat.compiling_is_off())"
    )
    assert fresh_python("-c", said).stdout.strip() == "True"
