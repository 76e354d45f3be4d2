"""optim_in_backward: the same bits as a step after the backward, and one gradient at a time."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
)

from memeff_compile.errors import CodedWeightError, MemeffError, OptionError
from memeff_compile.kernels.coded_weight import CODECS, CodedWeight, Step, codecs, op
from memeff_compile.model.weights.compress import compress_, compressed_weights, decompress_
from memeff_compile.model.weights.optim_in_backward import (
    TRAINING_ROOM,
    _Queue,
    optim_in_backward,
    plain_step,
)
from tests.support.token_rows import TokenRows

Factory = Callable[[nn.Parameter], Optimizer]
FACTORIES: dict[str, Factory] = {
    "SGD": lambda p: torch.optim.SGD([p], lr=0.05),
    "SGD with momentum": lambda p: torch.optim.SGD([p], lr=0.05, momentum=0.9, foreach=True),
    "AdamW": lambda p: torch.optim.AdamW([p], lr=1e-3),
    "fused AdamW": lambda p: torch.optim.AdamW([p], lr=1e-3, fused=True),
}
IDS = torch.arange(16).view(2, 8) % 64


def llama(**settings: Any) -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        **settings,
    )
    return LlamaForCausalLM(config).to(torch.bfloat16)


def t5() -> nn.Module:
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=64,
        d_model=128,
        d_kv=32,
        d_ff=256,
        num_layers=1,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    return T5ForConditionalGeneration(config).to(torch.bfloat16)


def train(model: nn.Module, optimizer: Optimizer, steps: int) -> list[float]:
    losses = []
    for step in range(steps):
        ids = (IDS * (step + 1)) % 64
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def same_weights(left: nn.Module, right: nn.Module) -> bool:
    other = right.state_dict()
    return all(torch.equal(value, other[name]) for name, value in left.state_dict().items())


def compressed(model: nn.Module, codec: str = "win4") -> nn.Module:
    assert compress_(model, codec, min_size=0, progress=False).compressed
    return model


# --- the same bits --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FACTORIES)
def test_steps_equal_those_of_a_plain_optimizer_on_dense_weights(name: str) -> None:
    plain, model = llama(), compressed(llama())
    whole = FACTORIES[name](nn.Parameter(torch.zeros(1)))
    settings = {
        k: v for k, v in whole.defaults.items() if k in ("lr", "momentum", "foreach", "fused")
    }
    reference = type(whole)(plain.parameters(), **settings)
    expected = train(plain, reference, 4)
    found = train(model, optim_in_backward(model, FACTORIES[name]), 4)
    assert found == expected
    assert same_weights(plain, model)
    assert found[-1] < found[0]


@pytest.mark.parametrize(
    ("make", "codec"),
    [
        *[(llama, codec) for codec in CODECS],
        *[(t5, codec) for codec in ("win4", "tier")],
    ],
    ids=["Llama-win4", "Llama-tier", "Llama-rans", "T5-win4", "T5-tier"],
)
@pytest.mark.slow
def test_twenty_steps_equal_the_dense_run(make: Callable[[], nn.Module], codec: str) -> None:
    plain, model = make(), compressed(make(), codec)
    expected = train(plain, optim_in_backward(plain, FACTORIES["SGD"]), 20)
    assert train(model, optim_in_backward(model, FACTORIES["SGD"]), 20) == expected
    assert same_weights(plain, model)
    assert len(compressed_weights(model)) >= 7


@pytest.mark.slow
def test_checkpointed_steps_equal_the_dense_run() -> None:
    models = [llama(), compressed(llama(), "tier")]
    losses = []
    for model in models:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
        losses.append(train(model, optim_in_backward(model, FACTORIES["AdamW"]), 3))
    assert losses[0] == losses[1]
    assert same_weights(*models)


@pytest.mark.slow
def test_a_checkpoint_does_not_multiply_again_what_only_its_result_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As with dense weights, computing again ends before the last product of the region."""
    model = compressed(
        nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 128)).bfloat16()
    )
    decoded: list[tuple[int, ...]] = []
    plain = op.reference.decode

    def decode(parts: Any, form: Any, size: Any) -> Tensor:
        decoded.append(tuple(size))
        return plain(parts, form, size)

    monkeypatch.setattr(op.reference, "decode", decode)
    x = torch.ones(1, 128, dtype=torch.bfloat16, requires_grad=True)
    out = checkpoint(model, x, use_reentrant=False)
    assert decoded == [(256, 128), (128, 256)]
    decoded.clear()
    out.float().sum().backward()
    # The first linear again; then the gradients of both.
    assert decoded == [(256, 128), (128, 256), (256, 128)]


def test_compiled_steps_equal_the_dense_run_and_compile_once() -> None:
    losses = []
    for is_coded in (False, True):
        model = llama()
        if is_coded:
            compressed(model)
        optimizer = optim_in_backward(model, FACTORIES["SGD"])
        torch._dynamo.reset()
        model.compile(backend="memeff", options={"memeff.inner": "aot_eager"})
        losses.append(train(model, optimizer, 2))
        with torch._dynamo.config.patch(error_on_recompile=True):
            losses[-1] += train(model, optimizer, 2)
    assert losses[0] == losses[1]


def phi3() -> nn.Module:
    torch.manual_seed(0)
    config = Phi3Config(
        vocab_size=64,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=1,
        num_attention_heads=4,
        pad_token_id=0,
    )
    return Phi3ForCausalLM(config).to(torch.bfloat16)


@pytest.mark.slow
def test_packed_projections_are_compressed_and_train_alike_when_compiled() -> None:
    """One weight for gate and up, or queries, keys and values, is split after its linear."""
    models = [phi3(), phi3()]
    report = compress_(models[1], min_size=0, progress=False)
    names = {each.name.split(".")[-2] for each in report.compressed}
    assert names == {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}
    losses = []
    for model in models:
        torch._dynamo.reset()
        optimizer = optim_in_backward(model, FACTORIES["SGD"])
        model.compile(backend="memeff", options={"memeff.inner": "aot_eager"})
        losses.append(train(model, optimizer, 3))
    assert losses[0] == losses[1]
    assert same_weights(*models)


def test_weights_that_outgrow_their_room_are_coded_anew() -> None:
    """A step that leaves the windows: everything becomes a patch, and still every bit is right."""
    models = [nn.Linear(256, 256, bias=False).bfloat16() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    compressed(models[1])
    x = torch.randn(4, 256, dtype=torch.bfloat16)
    for model in models:
        optim_in_backward(model, lambda p: torch.optim.SGD([p], lr=1e30))
        model(x).float().sum().backward()
    assert torch.equal(models[0].weight, models[1].weight.decode())


SGD = torch.optim.SGD
NOT_PLAIN: dict[str, Callable[[nn.Parameter], Optimizer]] = {
    "momentum": lambda p: SGD([p], lr=0.1, momentum=0.9),
    "maximize": lambda p: SGD([p], lr=0.1, maximize=True),
    "fused": lambda p: SGD([p], lr=0.1, fused=True),
    "a tensor": lambda p: SGD([p], lr=torch.tensor(0.1)),
    "another class": lambda p: type("Mine", (SGD,), {})([p], lr=0.1),
    "AdamW": lambda p: torch.optim.AdamW([p], lr=0.1),
}


@pytest.mark.parametrize("case", NOT_PLAIN)
def test_only_sgd_and_nothing_else_is_done_by_a_kernel(case: str) -> None:
    weight = nn.Parameter(torch.ones(2))
    assert plain_step(NOT_PLAIN[case](weight)) is None
    for settings in ({}, {"foreach": False}, {"dampening": 0.5}):
        plain = SGD([weight], lr=0.1, weight_decay=0.2, **settings)
        assert plain_step(plain) == Step(0.1, 0.2)
    plain.register_step_pre_hook(lambda *_: None)
    assert plain_step(plain) is None


def test_an_optimizer_whose_step_was_wrapped_keeps_its_wrapper() -> None:
    optimizer = SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    assert plain_step(optimizer) is None


# --- memory ---------------------------------------------------------------------------------------


@contextmanager
def most_gradients(model: nn.Module) -> Iterator[list[int]]:
    """Record how many parameters have a gradient whenever one has got its own."""
    seen: list[int] = []

    def count(_: Tensor) -> None:
        seen.append(sum(p.grad is not None for p in model.parameters()))

    hooks = [p.register_post_accumulate_grad_hook(count) for p in model.parameters()]
    yield seen
    for hook in hooks:
        hook.remove()


def test_one_gradient_is_alive_at_a_time_and_nothing_dense_stays() -> None:
    model = compressed(llama())
    with most_gradients(model) as seen:
        optimizer = optim_in_backward(model, FACTORIES["SGD"])
        model(input_ids=IDS, labels=IDS).loss.backward()
    assert len(seen) == len(list(model.parameters()))
    assert max(seen) == 1
    held = [p for group in optimizer.param_groups for p in group["params"]]
    coded = len(compressed_weights(model))
    assert sum(p.numel() == 0 for p in held) == coded == 7
    assert all(p.grad is None for p in (*model.parameters(), *held))


def test_a_model_that_was_moved_first_is_coded_anew_where_it_has_to() -> None:
    """Moving a module to where it is leaves weights that show their own parts."""
    model = compressed(nn.Linear(256, 256, bias=False).bfloat16()).to("cpu")
    before = model.weight.decode()
    optim_in_backward(model, lambda p: torch.optim.SGD([p], lr=1e30))
    model(torch.ones(1, 256, dtype=torch.bfloat16)).float().sum().backward()
    assert torch.equal(model.weight.decode(), before.add(-1e30))


def test_compressed_weights_get_room_to_grow() -> None:
    model = compressed(nn.Linear(256, 256, bias=False).bfloat16())
    before = model.weight.decode()
    optim_in_backward(model, FACTORIES["SGD"])
    assert model.weight.room == TRAINING_ROOM
    assert torch.equal(model.weight.decode(), before)


class Waits:
    """A value that is not settled, and where it waits."""

    is_settled = False

    def __init__(self, place: slice, waiting: list[slice]) -> None:
        self.place, self.waiting = place, waiting

    def settle(self) -> None:
        assert self.waiting.pop(0) == self.place, "the oldest comes first"


def test_values_that_wait_never_share_host_memory() -> None:
    queue = _Queue([])
    queue._ring = torch.zeros(100, dtype=torch.int16)
    waiting: list[slice] = []
    generator = torch.Generator().manual_seed(0)
    most = 0
    for _ in range(300):
        count = int(torch.randint(1, 60, (), generator=generator))
        ring = queue.place_for(count)
        assert ring is not None
        assert ring.numel() == count
        place = slice(ring.storage_offset(), ring.storage_offset() + count)
        assert all(place.stop <= other.start or other.stop <= place.start for other in waiting)
        waiting.append(place)
        queue._waiting.append((Waits(place, waiting), queue._head))  # as add() in a backward
        queue._head += count
        most = max(most, len(waiting))
    assert most >= 4
    queue.settle()
    assert not waiting


class FailsOnce:
    """A value for which there is no memory the first time that it is settled."""

    is_settled = False
    failures = 1

    def settle(self) -> None:
        self.failures -= 1
        if self.failures >= 0:
            raise torch.OutOfMemoryError("no room")


def test_a_weight_stays_and_an_older_value_waits_on_where_no_room_can_be_made() -> None:
    model = compressed(nn.Linear(256, 256, bias=False).bfloat16())
    optimizer = optim_in_backward(model, FACTORIES["SGD"])
    before = model.weight.decode()
    x = torch.ones(1, 256, dtype=torch.bfloat16)
    oldest: Any = FailsOnce()
    optimizer._queue._waiting = [(oldest, 0), (oldest, 0)]
    with pytest.raises(torch.OutOfMemoryError):
        model(x).float().sum().backward()
    assert torch.equal(model.weight.decode(), before)
    assert len(optimizer._queue._waiting) == 2
    model(x).float().sum().backward()
    optimizer._queue.settle()
    assert not torch.equal(model.weight.decode(), before)
    assert oldest.failures < 0


def fails_when_coded_anew(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CodedWeight, "encode_anew", lambda *_: FailsOnce().settle())


def fails_half_written(patch: pytest.MonkeyPatch) -> None:
    def encode(parts: list[Tensor], *_: object) -> None:
        parts[1].zero_()
        raise MemoryError("no room on the host")

    patch.setattr(op, "encode_soon", encode)


def fails_at_the_refuge(patch: pytest.MonkeyPatch) -> None:
    def encode(parts: list[Tensor], *_: object) -> codecs.Outcome:
        parts[1].zero_()
        return codecs.Outcome(torch.ones(1, dtype=torch.int32), [0])

    patch.setattr(op, "encode_soon", encode)
    patch.setattr(codecs.Outcome, "fetch", lambda _: FailsOnce().settle())


@pytest.mark.parametrize(
    "fail",
    [fails_when_coded_anew, fails_half_written, fails_at_the_refuge],
    ids=lambda f: f.__name__,
)
def test_a_value_that_could_not_be_encoded_is_kept(
    fail: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = compressed(nn.Linear(256, 256, bias=False).bfloat16()).weight
    assert isinstance(weight, CodedWeight)
    value = torch.randn(256, 256).bfloat16() * 1e30
    with monkeypatch.context() as patch:
        fail(patch)
        with pytest.raises(
            CodedWeightError, match=r"no room.*They are kept dense.*smaller batches"
        ):
            weight.store_soon(value)
    assert torch.equal(weight.decode(), value)


def test_training_goes_on_after_memory_ran_out_half_way(monkeypatch: pytest.MonkeyPatch) -> None:
    models = [nn.Linear(256, 256, bias=False).bfloat16() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    compressed(models[1])
    x = torch.randn(4, 256, dtype=torch.bfloat16)
    for model in models:
        optim_in_backward(model, FACTORIES["SGD"])
        with monkeypatch.context() as patch:
            fails_half_written(patch)
            with suppress(CodedWeightError):
                model(x).float().sum().backward()
        model(x).float().sum().backward()
    assert torch.equal(models[0].weight, models[1].weight.decode())


def test_another_thread_waits_until_a_place_is_taken() -> None:
    queue, settled = _Queue([]), threading.Event()
    thread = threading.Thread(target=lambda: (queue.settle(), settled.set()))
    with queue.lock:
        thread.start()
        assert not settled.wait(0.1)
    thread.join(10)
    assert settled.is_set()


# --- loops ----------------------------------------------------------------------------------------


def test_a_scheduler_sets_the_rates_of_all() -> None:
    model = compressed(llama())
    optimizer = optim_in_backward(model, FACTORIES["SGD"])
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    train(model, optimizer, 1)
    scheduler.step()
    rates = {o.param_groups[0]["lr"] for o in optimizer.optimizers.values()}
    assert rates == {0.025}


@pytest.mark.parametrize("name", ["SGD with momentum", "AdamW"])
def test_saved_and_resumed_training_goes_on_bit_for_bit(name: str) -> None:
    straight = compressed(llama())
    train(straight, optim_in_backward(straight, FACTORIES[name]), 2)
    model = compressed(llama())
    optimizer = optim_in_backward(model, FACTORIES[name])
    train(model, optimizer, 1)
    state = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
    resumed = compressed(llama())
    resumed.load_state_dict(state[1])
    again = optim_in_backward(resumed, FACTORIES[name])
    again.load_state_dict(state[0])
    ids = (IDS * 2) % 64
    resumed(input_ids=ids, labels=ids).loss.backward()
    assert same_weights(straight, resumed)


def trainer(model: nn.Module, folder: Path, name: str, **settings: Any) -> Trainer:
    optimizer = optim_in_backward(model, FACTORIES[name])
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    arguments = TrainingArguments(
        str(folder),
        per_device_train_batch_size=2,
        num_train_epochs=1,
        max_grad_norm=0.0,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        logging_steps=1,
        **settings,
    )
    return Trainer(model, arguments, train_dataset=TokenRows(10), optimizers=(optimizer, scheduler))


@pytest.mark.slow
def test_the_trainer_takes_optimizer_and_scheduler_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    dense, model = llama(), compressed(llama())
    runs = [
        trainer(each, tmp_path / str(number), "AdamW", save_steps=3, save_strategy="steps")
        for number, each in enumerate((dense, model))
    ]
    losses = []
    for run in runs:
        run.train()
        losses.append([entry["loss"] for entry in run.state.log_history if "loss" in entry])
    assert losses[0] == losses[1]
    assert len(losses[0]) == 5
    assert same_weights(dense, model)
    resumed = compressed(llama())
    again = trainer(resumed, tmp_path / "1", "AdamW")
    again.train(resume_from_checkpoint=str(tmp_path / "1" / "checkpoint-3"))
    assert same_weights(model, resumed)


def test_a_state_of_something_else_is_refused() -> None:
    optimizer = optim_in_backward(llama(), FACTORIES["SGD"])
    own = optimizer.state_dict()
    for state in ({}, {**own, "names": own["names"][::-1]}, {**own, "param_groups": []}):
        with pytest.raises(MemeffError, match="another optimizer or for another model"):
            optimizer.load_state_dict(state)


def test_accumulated_gradients_update_once() -> None:
    plain, model = llama(), compressed(llama())
    reference = torch.optim.SGD(plain.parameters(), lr=0.05)
    optim_in_backward(model, FACTORIES["SGD"], accumulate=2)
    before = model.state_dict()
    for number in range(2):
        for each in (plain, model):
            ids = (IDS * (number + 1)) % 64
            each(input_ids=ids, labels=ids).loss.backward()
        if number == 0:
            after = model.state_dict()
            assert all(torch.equal(before[name], after[name]) for name in before)
    reference.step()
    assert same_weights(plain, model)


def test_max_norm_clips_each_gradient_by_its_own_norm() -> None:
    plain, model = llama(), compressed(llama())
    plain(input_ids=IDS, labels=IDS).loss.backward()
    for parameter in plain.parameters():
        torch.nn.utils.clip_grad_norm_([parameter], 1e-2)
    torch.optim.SGD(plain.parameters(), lr=0.05).step()
    optim_in_backward(model, FACTORIES["SGD"], max_norm=1e-2)
    model(input_ids=IDS, labels=IDS).loss.backward()
    other = plain.state_dict()
    for name, value in model.state_dict().items():
        assert torch.allclose(value, other[name], atol=1e-5, rtol=2**-7), name


def test_clipping_after_the_backward_finds_no_gradients() -> None:
    """The page's statement about global-norm clipping."""
    model = compressed(llama())
    optim_in_backward(model, FACTORIES["SGD"])
    model(input_ids=IDS, labels=IDS).loss.backward()
    assert float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)) == 0.0


def test_dropping_gradients_starts_an_accumulation_again() -> None:
    model = compressed(nn.Linear(256, 256, bias=False).bfloat16())
    optimizer = optim_in_backward(model, FACTORIES["SGD"], accumulate=2)
    x = torch.ones(1, 256, dtype=torch.bfloat16)
    before = model.weight.decode()
    for _ in range(3):
        model(x).sum().backward()
        optimizer.zero_grad()
    assert torch.equal(model.weight.decode(), before)


def test_a_closure_is_called_and_updates() -> None:
    model = compressed(nn.Linear(256, 256, bias=False).bfloat16())
    optimizer = optim_in_backward(model, FACTORIES["SGD"])
    before = model.weight.decode()

    def closure() -> float:
        loss = model(torch.ones(1, 256, dtype=torch.bfloat16)).float().sum()
        loss.backward()
        return float(loss.detach())

    assert isinstance(optimizer.step(closure), float)
    assert not torch.equal(model.weight.decode(), before)


def test_hooks_can_be_taken_off() -> None:
    model = compressed(nn.Linear(256, 256, bias=False).bfloat16())
    optim_in_backward(model, FACTORIES["SGD"]).remove()
    model(torch.ones(1, 256, dtype=torch.bfloat16)).sum().backward()
    assert type(model.weight.grad) is Tensor
    assert isinstance(model.weight, CodedWeight)


@pytest.mark.parametrize("first", ["optimizer", "hook", "compressed", "moved"])
def test_a_model_that_had_hooks_before_is_updated(first: str) -> None:
    """State that removed hooks leave must not disable new ones."""
    model: nn.Module = nn.Linear(256, 256, bias=False).bfloat16()
    if first == "optimizer":
        optim_in_backward(model, FACTORIES["SGD"]).remove()
        compressed(model)
    elif first == "hook":
        model.weight.register_post_accumulate_grad_hook(lambda p: None).remove()
        compressed(model)
    elif first == "compressed":
        optim_in_backward(compressed(model), FACTORIES["SGD"]).remove()
        decompress_(model)
    else:
        optim_in_backward(compressed(model), FACTORIES["SGD"]).remove()
        model.to(torch.device("cpu"), non_blocking=True)
        model._apply(lambda t: t.clone())
    optim_in_backward(model, FACTORIES["SGD"])
    before = model.state_dict()["weight"].clone()
    model(torch.ones(1, 256, dtype=torch.bfloat16)).float().sum().backward()
    assert model.weight.grad is None
    assert not torch.equal(model.state_dict()["weight"], before)


def test_a_second_call_is_refused_until_the_first_is_taken_off() -> None:
    model = nn.Linear(4, 4)
    first = optim_in_backward(model, lambda p: torch.optim.SGD([p], lr=0.1))
    with pytest.raises(OptionError, match="earlier optim_in_backward"):
        optim_in_backward(model, lambda p: torch.optim.SGD([p], lr=0.2))
    first.remove()
    optim_in_backward(model, lambda p: torch.optim.SGD([p], lr=0.0))
    before = model.weight.detach().clone()
    model(torch.ones(1, 4)).sum().backward()
    assert torch.equal(model.weight, before)


@pytest.mark.parametrize("is_coded", [True, False])
def test_a_model_that_is_given_up_goes_with_its_optimizer(is_coded: bool) -> None:
    """Only the model refers to the optimizer, and both are collected."""
    model = nn.Linear(256, 256, bias=False, dtype=torch.bfloat16)
    if is_coded:
        model = compressed(model)
    optim_in_backward(model, FACTORIES["AdamW"])
    x = torch.ones(1, 256, dtype=torch.bfloat16)
    before = model.state_dict()["weight"].clone()
    gc.collect()
    model(x).float().sum().backward()
    assert model.weight.grad is None
    assert not torch.equal(model.state_dict()["weight"], before)
    weight = weakref.ref(model.weight)
    del model
    gc.collect()
    assert weight() is None


def pickled(model: nn.Module) -> Any:
    return pickle.loads(pickle.dumps(model))


def saved(model: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def with_shallow_parameters(model: nn.Module) -> nn.Module:
    twin = copy.deepcopy(model)
    twin.weight = nn.Parameter(copy.copy(model.weight))
    vars(twin.weight).update(vars(model.weight))
    return twin


@pytest.mark.parametrize("is_coded", [True, False])
@pytest.mark.parametrize("copied", [copy.deepcopy, pickled, saved, with_shallow_parameters])
def test_a_copy_of_the_model_is_not_taken_for_it(
    copied: Callable[[nn.Module], Any], is_coded: bool
) -> None:
    model = nn.Linear(256, 256, bias=False, dtype=torch.bfloat16)
    if is_coded:
        model = compressed(model)
    first = optim_in_backward(model, FACTORIES["SGD"])
    twin = copied(model)
    x = torch.ones(1, 256, dtype=torch.bfloat16)
    twin(x).float().sum().backward()
    assert twin.weight.grad is not None  # no optimizer updates it
    twin.zero_grad()
    second = optim_in_backward(twin, FACTORIES["SGD"])
    for each, optimizer in ((twin, second), (model, first)):
        before = each.weight.detach().clone() + 0
        each(x).float().sum().backward()
        optimizer.step()
        assert each.weight.grad is None
        assert not torch.equal(each.weight + 0, before)
        with pytest.raises(OptionError, match="earlier optim_in_backward"):
            optim_in_backward(each, FACTORIES["SGD"])
        optimizer.remove()
        optim_in_backward(each, FACTORIES["SGD"])


def test_lossy_weights_that_require_gradients_are_refused() -> None:
    model = nn.Linear(256, 256, bias=False, dtype=torch.bfloat16)
    compress_(model, mantissa=3, min_size=0, progress=False)
    model.requires_grad_(True)
    with pytest.raises(OptionError, match="fewer mantissa bits"):
        optim_in_backward(model, lambda p: torch.optim.SGD([p], lr=0.1))


def test_a_model_moved_afterwards_is_noticed_at_the_step() -> None:
    model = compressed(nn.Linear(256, 256, bias=False).bfloat16())
    optimizer = optim_in_backward(model, FACTORIES["SGD"])
    model._apply(lambda t: t.clone())  # as .to(device) does
    model(torch.ones(1, 256, dtype=torch.bfloat16)).sum().backward()
    with pytest.raises(MemeffError, match="was not updated"):
        optimizer.step()
    optimizer.zero_grad()
    optimizer.train()
    before = model.weight.decode()
    model(torch.ones(1, 256, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    assert not torch.equal(model.weight.decode(), before)


def test_hooks_of_others_run_again_after_a_move() -> None:
    model = compressed(nn.Linear(256, 256, bias=False).bfloat16())
    seen: list[str] = []
    model.weight.register_hook(lambda g: seen.append("before"))
    after = model.weight.register_post_accumulate_grad_hook(lambda p: seen.append("after"))
    optimizer = optim_in_backward(model, FACTORIES["SGD"])
    model._apply(lambda t: t.clone())
    optimizer.train()
    x = torch.ones(1, 256, dtype=torch.bfloat16)
    model(x).float().sum().backward()
    assert seen == ["before", "after"]
    assert model.weight.grad is None
    after.remove()
    model(x).float().sum().backward()
    assert seen[2:] == ["before"]


def test_a_model_is_not_decompressed_under_its_optimizer() -> None:
    model = compressed(nn.Linear(256, 256, bias=False).bfloat16())
    optim_in_backward(model, FACTORIES["SGD"])
    with pytest.raises(CodedWeightError, match="remove"):
        decompress_(model)


def test_a_weight_that_got_nan_stays_exact() -> None:
    model = compressed(nn.Linear(256, 256, bias=False).bfloat16())
    optim_in_backward(model, FACTORIES["SGD"])
    model(torch.full((1, 256), float("nan"), dtype=torch.bfloat16)).sum().backward()
    assert model.weight.decode().isnan().all()


@pytest.mark.parametrize("codec", CODECS)
def test_accumulating_with_frozen_weights_leaves_them(codec: str) -> None:
    model = compressed(nn.Linear(256, 256).bfloat16(), codec)
    model.weight.requires_grad_(False)
    before = model.weight.decode()
    optim_in_backward(model, FACTORIES["SGD"])
    model(torch.ones(1, 256, dtype=torch.bfloat16)).sum().backward()
    assert torch.equal(model.weight.decode(), before)


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("factory", "settings", "needed"),
    [
        (lambda p: None, {}, "NoneType"),
        (torch.optim.SGD, {"rate": 1}, "the factory failed for weight .*'rate'"),
        (torch.optim.SGD, {"lr": -1.0}, "the factory failed for weight .*learning rate: -1.0"),
        (FACTORIES["SGD"], {"lr": 1e-4}, r"lr were given.*optim_in_backward\(model, torch"),
        (torch.optim.SGD([torch.ones(1)]), {}, "the factory failed for weight .*not callable"),
        (lambda p: torch.optim.SGD([p, nn.Parameter(torch.ones(1))], lr=1.0), {}, "2 parameters"),
        (lambda p: torch.optim.LBFGS([p]), {}, r"LBFGS.step\(\) needs closure"),
        (FACTORIES["SGD"], {"accumulate": 0}, "accumulate is 0"),
        (FACTORIES["SGD"], {"accumulate": True}, "accumulate is True"),
        (FACTORIES["SGD"], {"max_norm": -1.0}, "max_norm is -1.0"),
    ],
    ids=[
        "no optimizer",
        "a setting that the class has not",
        "a setting that the class refuses",
        "settings of a function",
        "an instance",
        "two parameters",
        "a closure",
        "accumulate 0",
        "accumulate True",
        "negative norm",
    ],
)
def test_a_wrong_argument_is_said(factory: Any, settings: dict[str, Any], needed: str) -> None:
    with pytest.raises(OptionError, match=needed):
        optim_in_backward(nn.Linear(4, 4), factory, **settings)


@pytest.mark.parametrize("codec", ["", "win4"])
def test_a_class_is_given_its_settings(codec: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(256, 256).bfloat16()
    twin = copy.deepcopy(model)
    if codec:
        compressed(model, codec)
    settings = {"lr": 1e-2, "weight_decay": 0.1}
    made = optim_in_backward(model, torch.optim.AdamW, accumulate=2, **settings)
    wanted = optim_in_backward(twin, lambda p: torch.optim.AdamW([p], **settings), accumulate=2)
    assert [g["weight_decay"] for g in made.param_groups] == [0.1, 0.1]
    for each in (model, twin):
        for seed in range(4):
            each(inputs_of(seed)).float().square().sum().backward()
    assert made.accumulate == wanted.accumulate == 2
    assert torch.equal(model.state_dict()["weight"], twin.state_dict()["weight"])


def inputs_of(seed: int) -> torch.Tensor:
    return torch.randn(4, 256, generator=torch.Generator().manual_seed(seed)).bfloat16()


def test_nothing_to_train_is_said() -> None:
    with pytest.raises(OptionError, match="requires_grad"):
        optim_in_backward(nn.Linear(4, 4).requires_grad_(False), FACTORIES["SGD"])


def test_several_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(MemeffError, match="2 processes"):
        optim_in_backward(nn.Linear(4, 4), FACTORIES["SGD"])
