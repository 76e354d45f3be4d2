"""generate() with its steps replayed as CUDA graphs, on a GPU that is imitated: eager's tokens."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessorList, StaticCache
from transformers.generation.logits_process import LogitsProcessor

import memeff_compile
from tests.support import zoo
from tests.support.cached_models import make, prompt
from tests.support.recorded import Imitation, imitate

NEW = 12
ONE_LAYER = {"num_hidden_layers": 1}


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Imitation:
    return imitate(monkeypatch)


def compiled(**settings: Any) -> Any:
    model = make(**settings)
    model.compile(backend="memeff", options={"memeff.inner": "eager"})
    return model


def caches(bits: int | None, model: Any) -> dict[str, Any]:
    if bits is None:
        return {"cache_implementation": "static"}
    return {"past_key_values": memeff_compile.KVCache(model.config, 64, bits)}


def generated(model: Any, bits: int | None, ids: Tensor, **settings: Any) -> Any:
    given = {"max_new_tokens": NEW, "do_sample": False, **caches(bits, model), **settings}
    return model.generate(ids, **given)


def totals() -> tuple[int, int]:
    found = [g.replays for g in memeff_compile.graphs() if g.replays is not None]
    assert not [each.stopped for each in found if each.stopped]
    return sum(each.recordings for each in found), sum(each.replays for each in found)


@pytest.mark.parametrize("bits", [pytest.param(None, marks=pytest.mark.slow), 4])
def test_tokens_are_those_of_eager_again_and_again(engine: Imitation, bits: int | None) -> None:
    plain, model = make(), compiled()
    for length, new in ((20, NEW), (20, NEW), (31, NEW + 3)):
        ids = prompt(2, length)
        given = {"max_new_tokens": new}
        expected = generated(plain, bits, ids, **given)
        assert torch.equal(generated(model, bits, ids, **given), expected)
    recordings, replays = totals()
    assert replays >= 2 * (NEW - 3)
    assert recordings <= 4


@pytest.mark.slow
@pytest.mark.parametrize("bits", [None, 4])
def test_beams_and_left_padding(engine: Imitation, bits: int | None) -> None:
    plain, model = make(), compiled()
    ids = prompt(2, 16)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    for settings in ({}, {"num_beams": 3}):
        given: dict[str, Any] = {"attention_mask": mask, **settings}
        expected = generated(plain, bits, ids, **given)
        assert torch.equal(generated(model, bits, ids, **given), expected)
        assert torch.equal(generated(model, bits, ids, **given), expected)
    assert totals()[1] > 0


class Kept(LogitsProcessor):
    """Keeps the scores of every step, as some processors do."""

    def __init__(self) -> None:
        self.scores: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.scores.append(scores)
        return scores


def test_results_of_all_steps_stay(engine: Imitation) -> None:
    plain, model = make(**ONE_LAYER), compiled(**ONE_LAYER)
    ids = prompt(2, 20)
    asked = {
        "return_dict_in_generate": True,
        "output_logits": True,
        "output_hidden_states": True,
    }
    generated(model, None, ids, **asked)
    ours, theirs = Kept(), Kept()
    found = generated(model, None, ids, logits_processor=LogitsProcessorList([ours]), **asked)
    expected = generated(plain, None, ids, logits_processor=LogitsProcessorList([theirs]), **asked)
    torch.testing.assert_close(found.logits, expected.logits)
    torch.testing.assert_close(found.hidden_states, expected.hidden_states)
    torch.testing.assert_close(ours.scores, theirs.scores)
    assert totals()[1] >= NEW - 2


@pytest.mark.slow
def test_sampling_draws_the_same_tokens(engine: Imitation) -> None:
    plain, model = make(), compiled()
    ids = prompt(2, 20)
    for seed in range(3):
        results = []
        for each in (plain, model):
            torch.manual_seed(seed)
            results.append(generated(each, 4, ids, do_sample=True, top_k=20))
        assert torch.equal(*results)
    assert totals()[1] > 0


@pytest.mark.slow
def test_assisted_decoding(engine: Imitation) -> None:
    plain, model, helper = make(), compiled(), make(num_hidden_layers=1)
    ids = prompt(1, 16)
    for _ in range(2):
        expected = plain.generate(ids, max_new_tokens=NEW, do_sample=False)
        found = model.generate(ids, max_new_tokens=NEW, do_sample=False, assistant_model=helper)
        assert torch.equal(found, expected)


def test_streaming_from_another_thread(engine: Imitation) -> None:
    class Streamer:
        def __init__(self) -> None:
            self.tokens: list[int] = []

        def put(self, value: Tensor) -> None:
            self.tokens += value.flatten().tolist()

        def end(self) -> None:
            pass

    model, plain, ids = compiled(**ONE_LAYER), make(**ONE_LAYER), prompt(1, 16)
    expected = generated(plain, 4, ids).flatten().tolist()
    for _ in range(2):
        streamer = Streamer()
        thread = threading.Thread(
            target=generated, args=(model, 4, ids), kwargs={"streamer": streamer}
        )
        thread.start()
        thread.join()
        assert streamer.tokens == expected
    assert totals()[1] > 0


@pytest.mark.slow
def test_two_models_take_turns(engine: Imitation) -> None:
    models = [compiled(), compiled(hidden_size=64)]
    plains = [make(), make(hidden_size=64)]
    held = [StaticCache(config=each.config, max_cache_len=64) for each in models]
    others = [StaticCache(config=each.config, max_cache_len=64) for each in plains]
    tokens = [prompt(2, 10), prompt(2, 10)]
    expected = [prompt(2, 10), prompt(2, 10)]
    with torch.no_grad():
        for _ in range(10):
            for sides, all_caches, ids in ((models, held, tokens), (plains, others, expected)):
                for place, (each, cache) in enumerate(zip(sides, all_caches, strict=True)):
                    out = each(input_ids=ids[place], past_key_values=cache)
                    ids[place] = out.logits[:, -1:].argmax(-1)
            assert torch.equal(torch.stack(tokens), torch.stack(expected))
    assert totals()[0] == 2


def test_a_cache_that_is_used_again_is_not_recorded_again(engine: Imitation) -> None:
    plain, model, ids = make(**ONE_LAYER), compiled(**ONE_LAYER), prompt(2, 20)
    cache = memeff_compile.KVCache(model.config, 64, bits=4)
    expected = generated(plain, 4, ids)
    for _ in range(3):
        cache.reset()
        found = model.generate(ids, max_new_tokens=NEW, do_sample=False, past_key_values=cache)
        assert torch.equal(found, expected)
    assert engine.recorded == 1


@pytest.mark.parametrize("kv_cache", ["static", pytest.param(4, marks=pytest.mark.slow)])
def test_a_step_for_caches_of_any_length_is_recorded_for_each(
    engine: Imitation, kv_cache: str | int
) -> None:
    plain = make(**ONE_LAYER)
    model = memeff_compile.compile(make(**ONE_LAYER), kv_cache=kv_cache, inner="eager")
    with memeff_compile.use_kv_cache_(plain, bits=16 if kv_cache == "static" else 4):  # type: ignore[attr-defined]
        for length in (20, 300, 31, 310):
            ids = prompt(2, length)
            expected = plain.generate(ids, max_new_tokens=NEW, do_sample=False)
            found = model.generate(ids, max_new_tokens=NEW, do_sample=False)
            assert torch.equal(found, expected)
    assert len(memeff_compile.graphs()) == 2
    assert engine.recorded == 2
    assert totals()[1] >= 4 * (NEW - 4)


WINDOWS: dict[str, dict[str, Any]] = {
    "Mistral": {"sliding_window": 16},
    "Qwen2": {
        "sliding_window": 16,
        "use_sliding_window": True,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "Gemma2": {"sliding_window": 16, "query_pre_attn_scalar": 16},
    "Gemma3Text": {
        "sliding_window": 16,
        "query_pre_attn_scalar": 16,
        "layer_types": ["full_attention", "sliding_attention"],
    },
}


def compiled_for(kv_cache: str | int, family: str, **settings: Any) -> tuple[Any, dict[str, Any]]:
    """Return a compiled model, and its generate() arguments: by kv_cache, or by the backend
    alone.
    """
    model = make(family, **settings)
    if kv_cache == "bare":
        model.compile(backend="memeff", options={"memeff.inner": "eager"})
        return model, {"cache_implementation": "static"}
    return memeff_compile.compile(model, kv_cache=kv_cache, inner="eager"), {}


@pytest.mark.parametrize(
    ("family", "kv_cache"),
    [
        *(pytest.param("Mistral", each, marks=pytest.mark.slow) for each in ("static", "bare")),
        *(
            pytest.param(family, kv_cache, marks=pytest.mark.slow)
            for family in ("Qwen2", "Gemma2", "Gemma3Text")
            for kv_cache in ("static", 4, "bare")
        ),
    ],
)
def test_steps_of_a_model_with_windows_are_replayed(
    engine: Imitation, family: str, kv_cache: str | int
) -> None:
    """Windows that fill, and move once they are full, that a prompt is longer than; padding."""
    settings = WINDOWS[family] | (ONE_LAYER if family == "Mistral" else {})
    plain = make(family, **settings)
    model, given = compiled_for(kv_cache, family, **settings)
    steps = 0
    for tokens, new, padding in ((10, 40, 0), (40, 12, 0), (11, 30, 4), (1, 8, 0)):
        ids = prompt(2, tokens)
        mask = torch.ones_like(ids)
        mask[0, :padding] = 0
        asked = {"max_new_tokens": new, "do_sample": False, "attention_mask": mask}
        expected = plain.generate(ids, **asked)
        assert torch.equal(model.generate(ids, **asked, **given), expected)
        steps += new - 1
    # A step runs twice before it is recorded; with transformers' layer, filling windows and full ones
    # are a step each, and so are those of other caches.
    assert totals()[1] >= steps - (2 if kv_cache != "bare" else 14)
    if kv_cache == "static":
        # Prompts inside of the window, beyond it and with padding, which Mistral sees alike; a step.
        assert len(memeff_compile.graphs()) <= (3 if family == "Mistral" else 4)


@pytest.mark.slow
@pytest.mark.parametrize("sequences", [1, 3])
def test_beams_over_windows_are_replayed(engine: Imitation, sequences: int) -> None:
    plain = make("Mistral", **WINDOWS["Mistral"], **ONE_LAYER)
    model, _ = compiled_for("static", "Mistral", **WINDOWS["Mistral"], **ONE_LAYER)
    for tokens in (10, 30):
        asked = {"max_new_tokens": 20, "do_sample": False, "num_beams": 3}
        asked["num_return_sequences"] = sequences
        ids = prompt(2, tokens)
        assert torch.equal(model.generate(ids, **asked), plain.generate(ids, **asked))
    assert totals()[1] >= 2 * 19 - 4


@pytest.mark.parametrize(
    "tokens", [(20, 300, 31, 700, 33), pytest.param((700, 31, 20), marks=pytest.mark.slow)]
)
def test_windows_shorter_and_longer_than_the_cache_share_their_graphs(
    engine: Imitation, tokens: tuple[int, ...]
) -> None:
    """Prompts inside of the window and beyond it, and one step for caches of any length."""
    plain = make("Mistral", sliding_window=500, **ONE_LAYER)
    model, _ = compiled_for("static", "Mistral", sliding_window=500, **ONE_LAYER)
    for length in tokens:
        ids = prompt(2, length)
        expected = plain.generate(ids, max_new_tokens=NEW, do_sample=False)
        assert torch.equal(model.generate(ids, max_new_tokens=NEW, do_sample=False), expected)
    assert len(memeff_compile.graphs()) == 3
    # The first step of a cache is recorded with it, and the first of all runs as it is, twice.
    assert totals()[1] >= len(tokens) * (NEW - 1) - 6


def alive() -> tuple[int, int]:
    """Return how many tensors there are, and the bytes of their memory."""
    gc.collect()
    kinds = (Tensor, torch.nn.Parameter)
    found = [each for each in gc.get_objects() if type(each) in kinds]
    storages = {s.data_ptr(): s.nbytes() for s in map(Tensor.untyped_storage, found)}
    return len(found), sum(storages.values())


@pytest.mark.slow
@pytest.mark.parametrize("family", ["Llama", "Mistral"])
@pytest.mark.parametrize("kv_cache", ["static", 4])
def test_memory_is_flat_over_calls_that_differ(
    engine: Imitation, family: str, kv_cache: str | int
) -> None:
    """Caches are used again, and of recordings the latest are kept."""
    settings = ONE_LAYER | ({"sliding_window": 16} if family == "Mistral" else {})
    model, _ = compiled_for(kv_cache, family, **settings)
    calls = [(batch, tokens, new) for batch in (1, 2) for tokens in (5, 40, 300) for new in (6, 24)]
    held = []
    for _ in range(9):  # the latest 8 recordings of a step are kept
        for batch, tokens, new in calls:
            model.generate(prompt(batch, tokens), max_new_tokens=new, do_sample=False)
        held.append(alive())
    assert held[-3] == held[-2] == held[-1]
    assert totals()[1] > 0


FAMILIES = {each.name: each for each in (*zoo.FAMILIES, *zoo.FURTHER)}
EXPERTS = ("mixtral", "qwen3_moe", "granitemoe", "gpt_oss")
SEEN = (
    "llama mistral qwen2 qwen3 gemma gemma2 gemma3_text phi phi3 gpt2 gpt_neox opt bloom olmo2 olmo3 "
    "granite cohere2 stablelm smollm3 starcoder2 glm4 lfm2"
).split()


@pytest.mark.parametrize(
    "name", ["falcon", *(pytest.param(name, marks=pytest.mark.slow) for name in (*SEEN, *EXPERTS))]
)
def test_steps_of_many_families_are_replayed(engine: Imitation, name: str) -> None:
    dtype = torch.bfloat16 if name in EXPERTS else torch.float32
    plain, model = (zoo.build(FAMILIES[name], dtype).eval() for _ in range(2))
    model.load_state_dict(plain.state_dict())
    for each in (plain, model):
        each.generation_config.eos_token_id = None  # type: ignore[union-attr]
        each.generation_config.pad_token_id = 0  # type: ignore[union-attr]
    model = memeff_compile.compile(model, kv_cache="static", inner="eager")
    if name in EXPERTS:  # in bf16 logits of tiny models tie, and another cache rounds otherwise
        memeff_compile.use_kv_cache_(plain, bits=16)
    for length in (10, 20):
        ids = prompt(2, length)
        expected = plain.generate(ids, max_new_tokens=NEW, do_sample=False)  # type: ignore[operator]
        assert torch.equal(model.generate(ids, max_new_tokens=NEW, do_sample=False), expected)  # type: ignore[operator]
    assert totals()[1] >= 2 * (NEW - 1) - 4


@pytest.mark.slow
def test_experts_in_other_dtypes_wait_for_the_gpu_and_the_way_out_is_told(
    engine: Imitation,
) -> None:
    model = memeff_compile.compile(
        zoo.build(FAMILIES["mixtral"]).eval(), kv_cache="static", inner="eager"
    )
    model.generate(prompt(2, 10), max_new_tokens=3, do_sample=False)  # type: ignore[operator]
    (found,) = [r for r in memeff_compile.last_report().records if r.code.startswith("unsafe")]
    assert "bfloat16" in found.hint


def test_a_growing_cache_is_told_the_way_out(engine: Imitation) -> None:
    model = compiled(**ONE_LAYER)
    model.generate(prompt(), max_new_tokens=3, do_sample=False)
    found = [r for r in memeff_compile.last_report().records if r.code == "growing_cache"]
    assert found
    assert "KVCache" in found[0].hint
