"""Which graphs are replayed as CUDA graphs, and that a replay equals the step.

A GPU is imitated: recording has no effect, a replay uses the recorded memory, and its results
overwrite those of the previous replay.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import memeff_compile
from memeff_compile.backend import cuda_graphs, replay
from memeff_compile.backend.replay import MAX_RECORDINGS, Recorder, Roles
from memeff_compile.report import Replays
from tests.support.recorded import Imitation, imitate

HEADS, DEPTH, LENGTH = 2, 16, 8


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Imitation:
    return imitate(monkeypatch)


class Layer(nn.Module):
    """Attention over buffers that it writes to, as gpt-fast has it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv = nn.Linear(HEADS * DEPTH, 3 * HEADS * DEPTH, bias=False)
        self.register_buffer("k", torch.zeros(1, HEADS, LENGTH, DEPTH))
        self.register_buffer("v", torch.zeros(1, HEADS, LENGTH, DEPTH))

    def heads(self, x: Tensor) -> tuple[Tensor, ...]:
        batch, tokens, _ = x.shape
        parts = self.qkv(x).view(batch, tokens, 3, HEADS, DEPTH).permute(2, 0, 3, 1, 4)
        return parts.unbind(0)

    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        self.k.index_copy_(2, at, k)
        self.v.index_copy_(2, at, v)
        mask = torch.arange(LENGTH, device=x.device) <= at[:, None]
        y = F.scaled_dot_product_attention(q, self.k, self.v, attn_mask=mask)
        return y.transpose(1, 2).flatten(2)


def compiled(function: Callable[..., Any], **settings: Any) -> Callable[..., Any]:
    return memeff_compile.compile(function, inner=settings.pop("inner", "aot_eager"), **settings)


def step_inputs(at: int, tokens: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(at)
    x = torch.randn(1, tokens, HEADS * DEPTH, generator=generator)
    return x, torch.arange(at, at + tokens)


def code() -> str:
    found = [r for r in memeff_compile.last_report().records if r.pass_name == "backend"]
    assert not [r for r in found if r.action == "internal_error"], found
    return found[-1].code if found else ""


def replays() -> Replays:
    found = memeff_compile.graphs()[-1].replays
    assert found is not None
    return found


# --- which graphs ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("tokens", "expected"), [(1, "cuda_graph"), (8, "cuda_graph")])
def test_a_step_over_buffers_is_recorded(engine: Imitation, tokens: int, expected: str) -> None:
    with torch.no_grad():
        compiled(Layer())(*step_inputs(0, tokens))
    assert code() == expected


def test_a_prompt_is_not_recorded(engine: Imitation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "MAX_QUERIES", 4)
    with torch.no_grad():
        compiled(Layer())(*step_inputs(0, 5))
    assert code() == "prefill"


def test_a_number_of_tokens_that_varies_is_not_recorded(engine: Imitation) -> None:
    with torch.no_grad():
        compiled(Layer(), dynamic=True)(*step_inputs(0, 3))
    assert code() == "prefill"


def test_training_is_left_alone_without_a_word(engine: Imitation) -> None:
    layer = Layer()
    q = torch.randn(1, HEADS, 2, DEPTH)

    def loss(x: Tensor) -> Tensor:
        _, k, v = layer.heads(x)
        return F.scaled_dot_product_attention(q, k, v).sum()

    compiled(loss)(step_inputs(0)[0]).backward()
    assert code() == ""
    assert memeff_compile.graphs()[-1].replays is None


def test_a_graph_without_attention_is_left_alone_without_a_word(engine: Imitation) -> None:
    with torch.no_grad():
        compiled(lambda x: x + 1)(torch.ones(2))
    assert code() == ""


def test_a_cache_that_grows_is_named_with_the_way_out(engine: Imitation) -> None:
    layer = Layer()

    def step(x: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k_new, v_new = layer.heads(x)
        k, v = torch.cat([k, k_new], 2), torch.cat([v, v_new], 2)
        return F.scaled_dot_product_attention(q, k, v), k, v

    with torch.no_grad():
        compiled(step)(step_inputs(0)[0], layer.k, layer.v)
    assert code() == "growing_cache"
    (record,) = [r for r in memeff_compile.last_report().records if r.code == "growing_cache"]
    assert "cache_implementation='static'" in record.hint


def test_a_cache_made_inside_is_not_recorded(engine: Imitation) -> None:
    layer = Layer()

    def step(x: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        q, k_new, v_new = layer.heads(x)
        k = torch.zeros(1, HEADS, LENGTH, DEPTH)
        k.index_copy_(2, at, k_new)
        return F.scaled_dot_product_attention(q, k_new, v_new), k

    with torch.no_grad():
        compiled(step)(*step_inputs(0))
    assert code() == "cache_created_inside"


def test_off_a_mode_and_another_compiler_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "DEVICES", ("cpu",))
    with torch.no_grad():
        compiled(Layer())(*step_inputs(0))
        assert code() == ""
        monkeypatch.setattr(cuda_graphs, "INNERS", ("aot_eager",))
        compiled(Layer(), cuda_graphs="off")(*step_inputs(0))
        assert code() == "asked_off"


def test_no_gpu_is_no_word() -> None:
    with torch.no_grad():
        compiled(Layer())(*step_inputs(0))
    assert code() == ""


def test_what_waits_for_the_device_is_not_recorded(engine: Imitation) -> None:
    layer = Layer()

    def step(x: Tensor, at: Tensor) -> Tensor:
        return layer(x, at)[torch.nonzero(x[0, 0] > 0)[:, 0] * 0]

    with torch.no_grad(), torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled(step, fullgraph=True)(*step_inputs(0))
    assert code() == "unsafe_op(nonzero)"


@torch.library.custom_op("memeff_tests::counted", mutates_args=())
def counted(x: Tensor) -> Tensor:
    """Does something on the host, which a replay would leave out."""
    return x.clone()


@counted.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def test_an_op_of_somebody_else_is_not_recorded(engine: Imitation) -> None:
    layer = Layer()
    with torch.no_grad():
        compiled(lambda x, at: counted(layer(x, at)))(*step_inputs(0))
    assert code() == "unsafe_op(counted)"


def test_a_decision_that_fails_costs_nothing_but_the_recording(
    engine: Imitation, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(info: Any, options: Any) -> Any:
        raise RuntimeError("oh")

    monkeypatch.setattr(cuda_graphs, "decide", fail)
    plain, step = Layer(), compiled(Layer())
    with torch.no_grad():
        torch.testing.assert_close(step(*step_inputs(0)), plain(*step_inputs(0)))
    (record,) = [r for r in memeff_compile.last_report().records if r.pass_name == "backend"]
    assert (record.action, record.code) == ("internal_error", "decision_failed")
    assert "RuntimeError: oh" in record.sentence


def test_large_results_are_not_cloned(engine: Imitation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "MAX_CLONED", 64)
    with torch.no_grad():
        compiled(Layer())(*step_inputs(0))
    assert code() == "outputs_large"


def test_an_input_elsewhere_is_named(engine: Imitation) -> None:
    layer = Layer()

    def step(x: Tensor, at: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        return layer(x, at), other + 1

    with torch.no_grad():
        compiled(step)(*step_inputs(0), torch.ones(2, device="meta"))
    assert code() == "cpu_input(other)"


# --- a mode of the user's -------------------------------------------------------------------------


def asked_of_inductor(monkeypatch: pytest.MonkeyPatch) -> list[tuple[dict[str, Any], list[int]]]:
    """Return a list that collects Inductor's arguments from now on: patches, and static inputs."""
    seen = []

    def compile_graph(gm: Any, inputs: Any, patches: Any, tag: str) -> Any:
        placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
        static = [
            place
            for place, node in enumerate(placeholders)
            if node.meta.get("tensor_dict", {}).get("_dynamo_static_input_type")
        ]
        seen.append((dict(patches), static))
        return gm.forward

    monkeypatch.setattr("memeff_compile.compat.compile_with_inductor", compile_graph)
    return seen


def test_under_a_mode_a_graph_that_makes_its_cache_has_no_cuda_graph(
    engine: Imitation, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = asked_of_inductor(monkeypatch)
    layer = Layer()

    def prefill(x: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        q, k_new, v_new = layer.heads(x)
        k = torch.zeros(1, HEADS, LENGTH, DEPTH)
        k.index_copy_(2, at, k_new)
        return F.scaled_dot_product_attention(q, k_new, v_new), k

    with torch.no_grad():
        compiled(prefill, inner="inductor", mode="reduce-overhead")(*step_inputs(0, 4))
    assert seen[-1][0]["triton.cudagraphs"] is False
    assert code() == "cache_created_inside"


def test_under_a_mode_caches_that_are_written_to_are_said_to_stay(
    engine: Imitation, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = asked_of_inductor(monkeypatch)
    layer = Layer()

    def step(x: Tensor, at: Tensor, k: Tensor) -> Tensor:
        q, k_new, v_new = layer.heads(x)
        k.index_copy_(2, at, k_new)
        return F.scaled_dot_product_attention(q, k[:, :, :1], v_new)

    with torch.no_grad():
        compiled(step, inner="inductor", mode="reduce-overhead")(
            *step_inputs(0), torch.zeros_like(layer.k)
        )
    patches, static = seen[-1]
    assert patches["triton.cudagraphs"] is True
    assert len(static) == 2  # the weight, and the cache
    assert memeff_compile.graphs()[-1].replays is None


# --- replays --------------------------------------------------------------------------------------


@torch.no_grad()
def test_replays_equal_the_step_and_results_stay(engine: Imitation) -> None:
    plain, layer = Layer(), Layer()
    step = compiled(layer)
    found = [step(*step_inputs(at)) for at in range(LENGTH)]
    expected = [plain(*step_inputs(at)) for at in range(LENGTH)]
    torch.testing.assert_close(torch.stack(found), torch.stack(expected))
    torch.testing.assert_close(layer.k, plain.k)
    assert engine.recorded == 1
    assert replays() == Replays(recordings=1, replays=LENGTH - 2, ran=2)
    assert "1 recorded, 6 calls replayed, 2 ran without" in memeff_compile.last_report().details()


@torch.no_grad()
def test_a_report_with_replays_is_read_back(engine: Imitation) -> None:
    step = compiled(Layer())
    for at in range(4):
        step(*step_inputs(at))
    report = memeff_compile.last_report()
    assert type(report).from_json(report.to_json()).graphs[-1].replays == replays()


@torch.no_grad()
def test_another_cache_and_another_weight_are_recorded_anew(engine: Imitation) -> None:
    plain, layer = Layer(), Layer()
    step = compiled(layer)
    for count in range(24):
        if count % 6 == 5:  # other memory; the values go on
            for each in (layer, plain):
                each.k = each.k.clone()
                each.qkv.weight.data = each.qkv.weight * 0.5
        if count % 6 == 3:  # in place: a replay reads the current values
            for each in (layer, plain):
                each.qkv.weight.mul_(3)
        at = step_inputs(count % LENGTH)
        torch.testing.assert_close(step(*at), plain(*at))
    assert engine.recorded == 5
    assert replays().stopped == ""


@torch.no_grad()
def test_addresses_that_never_come_again_end_it(engine: Imitation) -> None:
    layer = Layer()
    step = compiled(layer)
    for at in (0, 1, 2):
        step(*step_inputs(at))
    kept = []
    for _ in range(4 * MAX_RECORDINGS):
        kept.append(layer.k)
        layer.k = layer.k.clone()
        step(*step_inputs(3))
    assert engine.recorded == 1  # an address is recorded when it has come twice
    for cache in kept:
        layer.k = cache
        step(*step_inputs(3))
    assert "addresses" in replays().stopped
    assert engine.recorded == 2 * MAX_RECORDINGS + 1


class Wide(Layer):
    """The same after a linear that is large enough to be compressed."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(HEADS * DEPTH, 512, bias=False)
        self.bfloat16()

    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        return super().forward(self.wide(x.bfloat16())[..., : HEADS * DEPTH], at)


class Window:
    """A Python counter in a cache, as in transformers' windows."""

    def __init__(self) -> None:
        self.seen, self.left = 5, 0


@torch.no_grad()
@pytest.mark.parametrize("reads_it", [False, True])
def test_a_number_that_is_only_counted_on_is_counted_beside_the_replay(
    engine: Imitation, reads_it: bool
) -> None:
    def step(layer: Layer, window: Window, x: Tensor, at: Tensor) -> Tensor:
        found = layer(x * window.seen if reads_it else x, at)
        window.left = 100 - 2 * window.seen
        window.seen += at.shape[0]
        return found

    run = compiled(step)
    ours, theirs = (Layer(), Window()), (Layer(), Window())
    for at in range(LENGTH):
        torch.testing.assert_close(run(*ours, *step_inputs(at)), step(*theirs, *step_inputs(at)))
        assert vars(ours[1]) == vars(theirs[1])
    assert replays().replays == (0 if reads_it else LENGTH - 3)  # the first compiles 5 as it is


@torch.no_grad()
def test_attention_that_is_spelled_out_is_a_step_too(
    engine: Imitation, monkeypatch: pytest.MonkeyPatch
) -> None:
    def step(x: Tensor, at: Tensor) -> Tensor:
        q, k, v = layer.heads(x)
        layer.k.index_copy_(2, at, k)
        layer.v.index_copy_(2, at, v)
        scores = torch.tanh(q @ layer.k.mT / 50) * 50
        return torch.softmax(scores, -1) @ layer.v

    layer = Layer()
    compiled(step)(*step_inputs(0))
    assert code() == "cuda_graph"
    monkeypatch.setattr(cuda_graphs, "MAX_QUERIES", 4)
    compiled(step)(*step_inputs(0, 5))
    assert code() == "prefill"


@torch.no_grad()
def test_compressed_weights_count_by_their_parts(engine: Imitation) -> None:
    layer, plain = Wide(), Wide()
    memeff_compile.compress_(layer.wide, min_size=0, progress=False)
    weight: Any = layer.wide.weight
    step = compiled(layer)
    for count in range(24):
        if count % 6 in (3, 5):
            plain.wide.weight.mul_(1.5)
        if count % 6 == 3:
            weight.store(plain.wide.weight)
        if count % 6 == 5:
            weight.encode_anew(plain.wide.weight)
        at = step_inputs(count % LENGTH)
        torch.testing.assert_close(step(*at), plain(*at))
    assert replays().replays > 12


@torch.no_grad()
def test_a_replay_does_not_take_compressed_weights_apart(
    engine: Imitation, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = Wide()
    memeff_compile.compress_(layer.wide, min_size=0, progress=False)
    step = compiled(layer)
    for count in range(4):
        step(*step_inputs(count))
    before = replays().replays
    flatten = type(layer.wide.weight).__tensor_flatten__

    def taken_apart(weight: Tensor) -> Any:
        assert engine.is_replaying  # on a CPU a replay runs the step, which takes them apart
        return flatten(weight)

    monkeypatch.setattr(type(layer.wide.weight), "__tensor_flatten__", taken_apart)
    monkeypatch.setattr(engine, "record", None)
    step(*step_inputs(4))
    assert replays().replays == before + 1


@torch.no_grad()
def test_versions_of_caches_rise(engine: Imitation) -> None:
    layer = Layer()
    step = compiled(layer)
    for at in range(4):
        before = layer.k._version
        step(*step_inputs(at))
        assert layer.k._version > before


def test_inference_mode_and_none_share_buffers(engine: Imitation) -> None:
    plain, layer = Layer(), Layer()
    step = compiled(layer)
    for at in range(LENGTH):
        mode = torch.inference_mode() if at % 2 else torch.no_grad()
        with mode:
            found, expected = step(*step_inputs(at)), plain(*step_inputs(at))
            assert found.is_inference() == bool(at % 2)
        torch.testing.assert_close(found.clone(), expected.clone())


# --- the recorder alone ---------------------------------------------------------------------------


def recorder(step: Callable[..., Any], engine: Imitation, **roles: Any) -> tuple[Recorder, Replays]:
    use = Replays()
    return Recorder(step, Roles(**roles), use, engine), use


def test_masks_that_are_expanded_are_copied_as_they_are() -> None:
    engine = Imitation()
    step, use = recorder(lambda x: (x * 2,), engine, held=(), copied=(0,))
    for value in range(5):
        x = torch.full((1, 3), float(value)).expand(4, 3)
        (y,) = step(x)
        assert torch.equal(y, x * 2)
    assert use.replays == 3


@pytest.mark.parametrize(
    ("step", "why"),
    [
        (lambda x, c: (x[0],), "a result is a view"),
        (lambda x, c: (c[0],), "a result is a view"),
        (lambda x, c: (y := x + 1, y[0]), "a result is a view"),
        (lambda x, c: ((x + 1).sum().expand(3),), "a result is a view"),
        (lambda x, c: (x + torch.rand(()),), "it draws random numbers"),
        (lambda x, c: (x.add_(1) * 2,), "it writes to an input"),
        (lambda x, c: x + 1, "it returns a Tensor"),
    ],
)
def test_what_cannot_be_replayed_runs_as_it_is(step: Callable[..., Any], why: str) -> None:
    engine = Imitation()
    recorded, use = recorder(step, engine, held=(1,), copied=(0,))
    cache = torch.arange(6.0).view(2, 3)
    for value in range(4):
        torch.manual_seed(value)
        given = torch.full((2, 3), float(value))
        expected_input = given.clone()
        expected = step(expected_input, cache.clone())
        torch.manual_seed(value)
        found = recorded(given, cache)
        for a, b in zip(found, expected, strict=True):
            assert torch.equal(a, b)
        if use.ran > 2 or value == 0:
            assert torch.equal(given, expected_input)
    assert use.stopped.startswith(why)
    assert engine.recorded == 0


def test_inputs_that_share_memory_with_a_cache_run_as_they_are() -> None:
    cache = torch.zeros(4)
    recorded, use = recorder(
        lambda x, c: (c.add_(1), x + 0)[1:], Imitation(), held=(1,), copied=(0,), written=(1,)
    )
    for value in range(1, 5):
        (found,) = recorded(cache[:2], cache)
        assert found.tolist() == [value, value]
    assert "shares memory" in use.stopped


def test_inputs_that_are_returned_come_back_as_they_came() -> None:
    recorded, use = recorder(
        lambda x, c, n: (x, c, None, n), Imitation(), held=(1,), copied=(0,), numbers=(2,)
    )
    cache = torch.zeros(2)
    for value in range(5):
        x = torch.full((2,), float(value))
        found = recorded(x, cache, 7)
        assert found[0] is x
        assert found[1] is cache
        assert found[2:] == (None, 7)
    assert use.replays == 3


def test_numbers_and_sizes_tell_recordings_apart() -> None:
    engine = Imitation()
    recorded, use = recorder(
        lambda x, n: (x * n,), engine, held=(), copied=(0,), numbers=(1,), varying=(0,)
    )
    for _ in range(4):
        for size, number in ((2, 3), (3, 3), (2, 5)):
            x = torch.rand(size)
            assert torch.equal(recorded(x, number)[0], x * number)
    assert engine.recorded == use.recordings == 3


@pytest.mark.parametrize("times", [1, 3])
def test_numbers_that_never_come_again_end_it(times: int) -> None:
    recorded, use = recorder(lambda c, n: (c + n,), Imitation(), held=(0,), numbers=(1,))
    cache = torch.zeros(2)
    for number in range(5 * MAX_RECORDINGS):
        for _ in range(times):
            assert recorded(cache, number)[0].tolist() == [number, number]
    assert use.stopped.startswith("a number that tensors are made of, or a size, changes")


def test_a_recording_that_fails_ends_it_and_the_step_runs(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(Imitation):
        def record(self, step: Any, inputs: Any) -> Any:
            raise RuntimeError("operation not permitted when stream is capturing")

    count = torch.zeros(())
    recorded, use = recorder(lambda c: (c.add_(1) * 1,), Failing(), held=(0,), written=(0,))
    assert [recorded(count)[0].item() for _ in range(5)] == [1, 2, 3, 4, 5]
    assert use.stopped.startswith("recording it failed: operation not permitted")
    assert "could not be recorded" in caplog.text


def test_a_foreign_capture_sees_the_step_itself() -> None:
    engine = Imitation()
    recorded, use = recorder(lambda x: (x + 1,), engine, held=(), copied=(0,))
    for _ in range(3):
        recorded(torch.ones(2))
    engine.is_busy = True
    assert recorded(torch.ones(2))[0].tolist() == [2, 2]
    assert (use.replays, use.ran) == (1, 3)


def test_streams_have_recordings_of_their_own() -> None:
    engine = Imitation()
    recorded, _ = recorder(lambda x: (x + 1,), engine, held=(), copied=(0,))
    for stream in (0, 1):
        engine.on = stream
        for _ in range(3):
            recorded(torch.ones(2))
    assert engine.recorded == 2


def test_only_the_latest_recordings_are_kept() -> None:
    engine = Imitation()
    recorded, use = recorder(lambda c: (c + 1,), engine, held=(0,))
    caches = [torch.full((2,), float(n)) for n in range(MAX_RECORDINGS + 2)]
    for cache in caches:
        for _ in range(6):
            assert torch.equal(recorded(cache)[0], cache + 1)
    assert engine.recorded == use.recordings == len(caches)
    assert len(recorded._recordings) == MAX_RECORDINGS


def test_two_threads_get_their_own_results() -> None:
    engine = Imitation()
    recorded, use = recorder(
        lambda x, c: (x + c.add_(1),), engine, held=(1,), copied=(0,), written=(1,)
    )
    wrong = []

    def work(number: int) -> None:
        cache = torch.zeros(64)
        for at in range(200):
            x = torch.full((64,), 1000.0 * number)
            found = recorded(x, cache)[0]
            if not torch.equal(found, x + at + 1):
                wrong.append((number, at))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert use.replays > 300


def test_dense_is_what_clones_keep() -> None:
    base = torch.zeros(4, 6)
    assert replay._is_dense(base)
    assert replay._is_dense(base.t())
    assert not replay._is_dense(base[:, :3])
    assert not replay._is_dense(base[0].expand(4, 6))
    assert replay._is_dense(base[:, :0])
