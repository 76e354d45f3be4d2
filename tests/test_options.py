"""Options: accepted values, refused ones and their messages."""

from __future__ import annotations

import contextlib
import pickle
from dataclasses import FrozenInstanceError, fields
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memeff_compile.errors import MemeffError, OptionError
from memeff_compile.options import (
    FILTERS,
    MAY_FIND_NOTHING,
    PASS_NAMES,
    SWITCHES,
    Options,
    key_of,
    options_page,
)

ROOT = Path(__file__).resolve().parents[1]

DOCUMENTED_KEYS = (
    "preset",
    "linear_cross_entropy",
    "linear_cross_entropy.workspace",
    "linear_cross_entropy.eps",
    "linear_cross_entropy.tau",
    "linear_cross_entropy.parts",
    "linear_cross_entropy.sort_vocabulary",
    "logits",
    "embedding",
    "divergence",
    "gated_linear",
    "recompute",
    "rotary_tables",
    "attention",
    "attention.length",
    "kv_reads",
    "kv_codes",
    "ternary",
    "ternary_gate",
    "weights",
    "skip",
    "strict",
    "passes",
    "verify",
    "verify.tolerance",
    "verify.folder",
    "verify.limit",
    "inner",
    "cuda_graphs",
    "regions",
    "mode",
)


def parse(**options: object) -> Options:
    """Parse options given without their prefix."""
    return Options.parse(None, {f"memeff.{key}": value for key, value in options.items()})


def test_no_options_are_the_defaults() -> None:
    assert Options.parse() == Options.parse(None, {}) == Options()
    assert Options().to_dict() == {}
    assert Options().inductor_patches() == {}


def test_every_documented_key_is_a_field_and_every_field_is_documented() -> None:
    names = [each.name for each in fields(Options) if each.name != "inductor"]
    assert [key_of(name) for name in names] == [f"memeff.{key}" for key in DOCUMENTED_KEYS]
    assert all(f"| `{key_of(name)}` |" in options_page() for name in names)


def test_docs_page_is_current() -> None:
    page = (ROOT / "docs" / "options.md").read_text()
    assert page == options_page(), "run `make docs`"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("preset", "exact"),
        ("preset", "fast"),
        ("preset", "paper"),
        ("linear_cross_entropy", "off"),
        ("logits", "eager"),
        ("logits", "none"),
        ("attention", "off"),
        ("attention", "8b"),
        ("attention", "8b+f16"),
        ("attention", "4b"),
        ("kv_reads", "off"),
        ("kv_codes", "off"),
        ("ternary", "off"),
        ("weights", "off"),
        ("verify", "off"),
        ("verify", "on"),
        ("verify", "raise"),
        ("inner", "aot_eager"),
        ("inner", "eager"),
    ],
)
def test_available_value_is_stored(key: str, value: str) -> None:
    assert getattr(parse(**{key: value}), key) == value


@pytest.mark.parametrize(
    ("preset", "settings"),
    [
        ("exact", ("exact", False, "exact")),
        ("fast", ("mass", True, "8b")),
        ("paper", ("published", True, "8b")),
    ],
)
def test_a_preset_sets_what_was_not_given(preset: str, settings: tuple[str, bool, str]) -> None:
    for options in (parse(preset=preset), Options(preset=preset)):
        found = (
            options.linear_cross_entropy,
            options.linear_cross_entropy_sort_vocabulary,
            options.attention,
        )
        assert found == settings
        assert Options.parse(None, options.to_dict()) == options
        assert pickle.loads(pickle.dumps(options)) == options


@pytest.mark.parametrize(
    "given",
    [
        {"linear_cross_entropy": "exact"},
        {"linear_cross_entropy": "mass"},
        {"linear_cross_entropy": "off", "attention": "exact"},
        {"linear_cross_entropy.sort_vocabulary": False},
        {"attention": "off"},
    ],
    ids=str,
)
def test_what_is_given_goes_before_the_preset(given: dict[str, object]) -> None:
    options = parse(preset="paper", **given)
    for key, value in given.items():
        assert getattr(options, key.replace(".", "_")) == value
    if "linear_cross_entropy" in given:
        is_filter = given["linear_cross_entropy"] in FILTERS
        assert options.linear_cross_entropy_sort_vocabulary == is_filter
    assert Options.parse(None, options.to_dict()) == options


@pytest.mark.parametrize(
    ("options", "nearest"),
    [
        ({"memeff.logit": "eager"}, "memeff.logits"),
        ({"memeff.Logits": "eager"}, "memeff.logits"),
        ({"memeff.linear_ce": "off"}, "memeff.linear_cross_entropy"),
        ({"memeff.linear-cross-entropy": "off"}, "memeff.linear_cross_entropy"),
        ({"logits": "eager"}, "memeff.logits"),
        ({"memef.logits": "eager"}, "memeff.logits"),
        ({"max_autotun": True}, "max_autotune"),
        ({"triton.cudagraph": True}, "triton.cudagraphs"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_unknown_key_names_the_nearest(options: dict[str, object], nearest: str) -> None:
    with pytest.raises(OptionError) as caught:
        Options.parse(None, options)
    assert repr(next(iter(options))) in str(caught.value)
    assert repr(nearest) in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("logits", "defered", "Did you mean 'deferred'?"),
        ("logits", True, "True (bool); it takes 'deferred', 'eager', 'none'"),
        ("logits", None, "None (NoneType); it takes"),
        ("linear_cross_entropy", "exakt", "Did you mean 'exact'?"),
        ("linear_cross_entropy", 1, "1 (int); it takes 'exact', 'mass'"),
        ("inner", "aot-eager", "Did you mean 'aot_eager'?"),
        ("linear_cross_entropy.eps", 0, "a number between 0 and 1"),
        ("linear_cross_entropy.tau", "1e-3", "'1e-3' (str)"),
        ("linear_cross_entropy.parts", "bias", "'both', 'hidden', 'weight'"),
        ("linear_cross_entropy.sort_vocabulary", 1, "it takes True or False"),
        ("linear_cross_entropy.workspace", -1, "-1 (int); it takes 'auto'"),
        ("linear_cross_entropy.workspace", 1.5, "1.5 (float)"),
        ("linear_cross_entropy.workspace", True, "True (bool)"),
        ("linear_cross_entropy.workspace", "64 MB", "such as '64MiB'"),
        ("mode", "max-autotun", "Did you mean 'max-autotune'?"),
        ("mode", 3, "3 (int); it takes one of Inductor's modes"),
        ("verify", "onn", "Did you mean 'on'?"),
        ("verify", 3, "3 (int); it takes 'off', 'on', 'raise'"),
        ("verify.tolerance", 0, "0 (int); it takes a positive number"),
        ("verify.tolerance", True, "True (bool)"),
        ("verify.tolerance", float("inf"), "inf (float)"),
        ("verify.folder", 3, "3 (int); it takes the path of a folder"),
        ("verify.folder", "", "'' (str)"),
        ("verify.limit", "auto", "'auto' (str); it takes a number of bytes"),
        ("verify.limit", -1, "-1 (int); it takes a number of bytes"),
        ("strict", "fuse_linear_ce", "Did you mean 'fuse_linear_cross_entropy'?"),
        ("strict", 3, "3 (int); it takes a pass name"),
        ("strict", [3], "names the pass 3"),
        ("skip", 3, "3 (int); it takes a module path"),
        ("skip", [""], "non-empty module path"),
        ("skip", [4], "contains 4 (int)"),
        ("skip", {"defer_logit": "x"}, "Did you mean 'defer_logits'?"),
        ("skip", {"*": None}, "None (NoneType)"),
    ],
    ids=str,
)
def test_wrong_value_says_what_was_seen_and_needed(key: str, value: object, words: str) -> None:
    with pytest.raises(OptionError) as caught:
        parse(**{key: value})
    assert f"memeff.{key}" in str(caught.value)
    assert words in str(caught.value)


@pytest.mark.parametrize("name", PASS_NAMES)
def test_every_pass_has_an_option_that_switches_it_off(name: str) -> None:
    key, value = SWITCHES[name]
    switched = Options.parse(None, {key: value})
    with pytest.raises(OptionError, match=f"strict requires the pass '{name}'"):
        Options.parse(None, {**switched.to_dict(), "memeff.strict": name})


def test_the_page_of_decisions_names_every_switch_and_what_strict_asks() -> None:
    (page,) = (ROOT / "docs").rglob("how-it-decides.md")
    rows = dict(
        row.strip("| ").split(" | ", 1) for row in page.read_text().splitlines() if " | " in row
    )
    switches = dict.fromkeys(f"`{key}={value}`" for key, value in SWITCHES.values())
    assert rows["one pass off"] == ", ".join(switches)
    lenient = ", ".join(f"`{name}`" for name in MAY_FIND_NOTHING)
    assert f"({lenient}: only if it declined one)" in rows["an error instead of a silent decline"]


@pytest.mark.parametrize(
    ("given", "stored"), [(True, "on"), (False, "off"), ("raise", "raise"), ("off", "off")]
)
def test_verify_takes_words_and_booleans(given: object, stored: str) -> None:
    assert parse(verify=given).verify == stored


def test_options_must_be_a_mapping_with_string_keys() -> None:
    with pytest.raises(OptionError, match="takes a mapping such as"):
        Options.parse(None, [("memeff.logits", "eager")])  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="neither an option of memeff"):
        Options.parse(None, {3: "eager"})  # type: ignore[dict-item]


def test_the_error_is_also_a_value_error() -> None:
    assert issubclass(OptionError, ValueError)
    assert issubclass(OptionError, MemeffError)


def test_the_callers_dict_is_left_alone() -> None:
    options = {"memeff.skip": ["b", "a"], "max-autotune": True, "memeff.logits": "eager"}
    kept = {**options, "memeff.skip": ["b", "a"]}
    Options.parse("reduce-overhead", options)
    assert options == kept


class TestInductorKeys:
    """Every key without our prefix goes to Inductor, checked the way torch checks it."""

    def test_known_key_is_forwarded_with_dashes_as_underscores(self) -> None:
        parsed = Options.parse(None, {"max-autotune": True, "triton.cudagraphs": False})
        assert parsed.inductor == {"max_autotune": True, "triton.cudagraphs": False}
        assert parsed.inductor_patches() == {"max_autotune": True, "triton.cudagraphs": False}

    def test_wrong_type_says_which(self) -> None:
        with pytest.raises(OptionError, match=r"max_autotune is 'x' \(str\).*takes bool"):
            Options.parse(None, {"max_autotune": "x"})

    def test_callables_and_lists_are_accepted(self) -> None:
        parsed = Options.parse(None, {"post_grad_custom_post_pass": print})
        assert parsed.inductor["post_grad_custom_post_pass"] is print
        assert isinstance(hash(parsed), int)


class TestMode:
    """`mode=` of torch.compile and `memeff.mode` are the same thing."""

    def test_either_way_expands_to_the_same_patches(self) -> None:
        by_argument = Options.parse("reduce-overhead")
        by_option = parse(mode="reduce-overhead")
        assert by_argument == by_option
        assert by_argument.inductor_patches()["triton.cudagraphs"] is True

    def test_explicit_key_wins_over_the_mode(self) -> None:
        parsed = Options.parse("max-autotune", {"triton.cudagraphs": False})
        assert parsed.inductor_patches()["triton.cudagraphs"] is False
        assert parsed.inductor_patches()["max_autotune"] is True

    def test_contradiction_is_refused(self) -> None:
        assert Options.parse("max-autotune", {"memeff.mode": "max-autotune"})
        with pytest.raises(OptionError, match="Give one of them"):
            Options.parse("max-autotune", {"memeff.mode": "reduce-overhead"})

    def test_unknown_mode_argument_is_refused(self) -> None:
        with pytest.raises(OptionError, match=r"mode is 'fastest'.*'reduce-overhead'"):
            Options.parse("fastest")


@pytest.mark.parametrize(
    ("given", "count"),
    [
        ("auto", 0),
        (0, 0),
        (123, 123),
        ("64MiB", 64 << 20),
        (" 1.5 gib ", 3 << 29),
        ("512 B", 512),
        ("2KiB", 2048),
    ],
)
def test_workspace_is_stored_in_bytes(given: int | str, count: int) -> None:
    parsed = parse(**{"linear_cross_entropy.workspace": given})
    assert parsed.linear_cross_entropy_workspace == count


class TestSkip:
    """Which modules are left alone by which pass."""

    @pytest.mark.parametrize(
        ("pattern", "path", "expected"),
        [
            ("lm_head", "lm_head", True),
            ("lm_head", "lm_head.inner", True),
            ("lm_head", "lm_head2", False),
            ("lm_head", "model.lm_head", False),
            ("*.lm_head", "model.lm_head", True),
            ("model.layers.*.mlp", "model.layers.3.mlp.up_proj", True),
            ("model.layers.*.mlp", "model.layers.3.attention", False),
            ("model.layers.?", "model.layers.12", False),
            ("*", "", True),
            ("model", "", False),
            ("Model", "model", False),
        ],
    )
    def test_pattern(self, pattern: str, path: str, expected: bool) -> None:
        parsed = parse(skip=pattern)
        assert all(parsed.skips(name, path) is expected for name in PASS_NAMES)

    def test_per_pass_rules_hold_for_that_pass_only(self) -> None:
        parsed = parse(skip={"defer_logits": ["lm_head"], "*": "draft"})
        assert parsed.skips("defer_logits", "lm_head")
        assert not parsed.skips("fuse_linear_cross_entropy", "lm_head")
        assert parsed.skips("fuse_linear_cross_entropy", "draft.head")

    def test_order_and_repetition_do_not_matter(self) -> None:
        assert parse(skip=["a", "b", "a"]) == parse(skip={"*": ("b", "a")})
        assert parse(skip=[]) == Options()


class TestStrict:
    """Naming a pass that must fire."""

    def test_one_name_or_several_in_any_order(self) -> None:
        assert parse(strict="defer_logits").strict == ("defer_logits",)
        every = parse(strict=list(reversed(PASS_NAMES)), attention="8b", recompute="attention")
        assert every.strict == PASS_NAMES

    @pytest.mark.parametrize(
        "options",
        [
            {"strict": "fuse_linear_cross_entropy", "linear_cross_entropy": "off"},
            {"strict": "defer_logits", "logits": "eager"},
            {"strict": "defer_logits", "linear_cross_entropy": "off"},
            {"strict": "quantize_attention", "attention": "exact"},
        ],
        ids=str,
    )
    def test_requiring_a_pass_that_is_switched_off_is_refused(
        self, options: dict[str, str]
    ) -> None:
        with pytest.raises(OptionError, match="Drop one of the two"):
            parse(**options)


def test_options_are_immutable() -> None:
    with pytest.raises(FrozenInstanceError):
        Options().logits = "eager"  # type: ignore[misc]
    with pytest.raises(TypeError):
        Options().skip["*"] = ("x",)  # type: ignore[index]


# Hypothesis takes a second to sort all of Unicode, which these alphabets keep it from.
LETTERS = st.characters(codec="ascii")
PATH = st.from_regex(r"[a-z*]+(\.[a-z0-9*]+){0,2}", fullmatch=True, alphabet=LETTERS)
PATHS = st.lists(PATH, max_size=3)
TEXTS = st.text(
    st.characters(max_codepoint=0x2FF) | st.sampled_from("\u2028\ufeff漢🙂"), max_size=8
)
VALID = st.fixed_dictionaries(
    {},
    optional={
        "memeff.logits": st.sampled_from(["deferred", "eager", "none"]),
        "memeff.linear_cross_entropy": st.sampled_from(["exact", *FILTERS, "off"]),
        "memeff.linear_cross_entropy.workspace": st.one_of(
            st.just("auto"), st.integers(0, 1 << 40), st.just("64MiB")
        ),
        "memeff.inner": st.sampled_from(["inductor", "aot_eager", "eager"]),
        "memeff.skip": st.one_of(
            PATHS, st.dictionaries(st.sampled_from([*PASS_NAMES, "*"]), PATHS)
        ),
        "memeff.mode": st.sampled_from([None, "default", "reduce-overhead"]),
        "max_autotune": st.booleans(),
    },
)


@settings(max_examples=60, deadline=None)
@given(VALID)
def test_round_trips_through_dict_and_pickle(options: dict[str, object]) -> None:
    parsed = Options.parse(None, options)
    assert Options.parse(None, parsed.to_dict()) == parsed
    copy = pickle.loads(pickle.dumps(parsed))
    assert copy == parsed
    assert hash(copy) == hash(parsed)


@settings(max_examples=200, deadline=None)
@given(
    st.dictionaries(
        st.one_of(TEXTS, st.sampled_from([f"memeff.{key}" for key in DOCUMENTED_KEYS])),
        st.one_of(st.none(), st.booleans(), st.integers(), TEXTS, st.lists(st.none())),
        max_size=3,
    )
)
def test_any_input_parses_or_raises_our_error(options: dict[str, object]) -> None:
    with contextlib.suppress(OptionError):
        assert isinstance(Options.parse(None, options), Options)


@pytest.mark.parametrize(
    ("mode", "knob", "value"),
    [
        ("exact", "tau", 0.1),
        ("block", "tau", 0.1),
        ("published", "tau", 0.1),
        ("mass", "eps", 0.1),
        ("off", "parts", "hidden"),
        ("exact", "sort_vocabulary", True),
    ],
)
def test_knob_of_a_filter_that_is_not_on_is_refused(mode: str, knob: str, value: object) -> None:
    with pytest.raises(OptionError, match="which does not use it"):
        parse(**{"linear_cross_entropy": mode, f"linear_cross_entropy.{knob}": value})


def test_level_of_a_filter_is_its_own() -> None:
    mass = parse(**{"linear_cross_entropy": "mass", "linear_cross_entropy.tau": 0.25})
    block = parse(**{"linear_cross_entropy": "block", "linear_cross_entropy.eps": 0.5})
    assert (mass.filter_level, block.filter_level, parse().filter_level) == (0.25, 0.5, 0.0)
    assert (
        parse(**{"linear_cross_entropy.workspace": "minimal"}).linear_cross_entropy_workspace == 1
    )
