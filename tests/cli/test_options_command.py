"""`memeff options`: each option in a line, one in full, and a suggestion for a wrong name."""

from __future__ import annotations

import pytest
from expecttest import assert_expected_inline

from memeff_compile import __main__ as command_line
from memeff_compile.cli.options import option_text
from memeff_compile.options import Options, option_facts

KEYS = [facts.key for facts in option_facts()]


def test_every_option_has_a_line_with_its_values(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert command_line.main(["options"]) == 0
    out = capsys.readouterr().out
    for key in KEYS:
        assert f"\n{key} " in f"\n{out}"
    assert max(map(len, out.splitlines())) <= 80
    assert "|" not in out


def test_text_of_one_option() -> None:
    assert_expected_inline(
        option_text("logits"),
        """\
memeff.logits
  takes     deferred, eager, none
  default   deferred
  does      The logits that a model called with labels returns. deferred: computed on first use;
            reading them after the weights changed raises an error. eager: computed in every
            step, as without the backend. none: the output is None.
  example   memeff_compile.compile(model, logits='eager')
            model.compile(backend="memeff", options={'memeff.logits': 'eager'})""",
    )


@pytest.mark.parametrize("key", KEYS)
def test_the_example_of_an_option_is_taken(key: str) -> None:
    (facts,) = [facts for facts in option_facts() if facts.key == key]
    assert key in {facts.keys[name] for name in facts.example}
    if key != "memeff.passes":  # its example is code
        Options(**facts.example)
    assert facts.default in option_text(key)


@pytest.mark.parametrize("name", ["verify_limit", "verify.limit", "memeff.verify.limit"])
def test_an_option_is_found_by_its_key_and_by_its_keyword(name: str) -> None:
    assert option_text(name).startswith("memeff.verify.limit\n")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("logit", "Did you mean 'memeff.logits'?"),
        ("attn", "Did you mean 'memeff.attention'?"),
        ("xyzzy", "The options are memeff.preset"),
        ("kv_cache", "compile(model, kv_cache=...)"),
    ],
)
def test_a_wrong_name_is_an_error_with_the_nearest(
    name: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command_line.main(["options", name]) == 1
    assert words in capsys.readouterr().err
