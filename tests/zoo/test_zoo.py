"""Unmodified transformers models of many families: the loss is fused, and everything equals eager.

The models are tiny and random. The inner compiler is aot_eager (eager where many calls of one
compilation are compared), so that the comparison sees the passes' work and not Inductor's rounding.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

import memeff_compile
from memeff_compile.logits.tensor import DeferredLogits
from tests.support.closeness import assert_no_worse, assert_same_gradients, pooled_error
from tests.support.zoo import FAMILIES, VOCABULARY, Family, build, inputs

pytest.importorskip("transformers", reason="the model zoo is built from transformers' configs")

BY_NAME = {family.name: family for family in FAMILIES}
FUSE = "fuse_linear_cross_entropy"
EMBEDDING = "fuse_embedding_gradient"
GATED = "fuse_gated_linear"


def compiled(
    model: nn.Module, *, dynamic: bool | None = None, fullgraph: bool = True, **options: Any
) -> Any:
    torch._dynamo.reset()
    memeff_compile.reset()
    settings = {"memeff.inner": "aot_eager"} | {f"memeff.{k}": v for k, v in options.items()}
    return torch.compile(
        model, backend="memeff", fullgraph=fullgraph, dynamic=dynamic, options=settings
    )


def step(model: Any, owner: nn.Module, batch: dict[str, Any]) -> tuple[Any, list[Tensor | None]]:
    """Return the model's output and its gradients after one backward."""
    owner.zero_grad(set_to_none=True)
    output = model(**batch)
    output.loss.backward()
    return output, [p.grad for p in owner.parameters()]


def records() -> list[tuple[str, str]]:
    """Return the records, except those of attention: tests/zoo/test_zoo_attention.py has these."""
    found = memeff_compile.last_report().records
    return [(r.pass_name, r.code) for r in found if r.pass_name != "recover_attention"]


FUSED_AND_DEFERRED = [(FUSE, "rewrote"), ("defer_logits", "logits_deferred")]


def is_tied(model: nn.Module) -> bool:
    """Return whether the head's weight is the embedding's."""
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    return head is not None and head.weight is table.weight


def expected_records(model: nn.Module, graphs: int = 1) -> list[tuple[str, str]]:
    """Return the required records of a training graph: tied tables are rewritten, too, and so are
    gated MLPs in checkpoints. If Dynamo splits a model, table and head are in two graphs.
    """
    tied = [(EMBEDDING, "rewrote")] if is_tied(model) and graphs == 1 else []
    is_gated = any(name.endswith("mlp.gate_proj") for name, _ in model.named_modules())
    checkpointed = any(getattr(m, "gradient_checkpointing", False) for m in model.modules())
    return FUSED_AND_DEFERRED + tied + ([(GATED, "rewrote")] if is_gated and checkpointed else [])


def graphs_without_us(model: nn.Module, batch: dict[str, Any]) -> int:
    """Count the graphs that Dynamo makes of a model before any backend has a say."""
    torch._dynamo.reset()
    counter = CompileCounter()
    torch.compile(model, backend=counter)(**batch)
    torch._dynamo.reset()
    return int(counter.frame_count)


def skip_where_plain_compilation_fails(model: nn.Module, batch: dict[str, Any]) -> None:
    """Skip a mixture of experts where AOTAutograd alone cannot trace transformers' own op."""
    if not any("experts" in name for name, _ in model.named_modules()):
        return
    torch._dynamo.reset()
    try:
        torch.compile(model, backend="aot_eager", fullgraph=True)(**batch).loss.backward()
    except Exception as error:
        name = type(error).__name__
        pytest.skip(f"plain aot_eager fails on this model as one graph here, too: {name}")


def assert_equals_eager(model: nn.Module, batch: dict[str, Any], **settings: Any) -> Any:
    skip_where_plain_compilation_fails(model, batch)
    expected, expected_grads = step(model, model, batch)
    count = 1
    try:
        found, grads = step(compiled(model, **settings), model, batch)
    except torch._dynamo.exc.Unsupported:
        # transformers before 5.20 branches on data in some families: their graph breaks anyway.
        count = graphs_without_us(model, batch)
        assert count > 1
        found, grads = step(compiled(model, fullgraph=False, **settings), model, batch)
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-6, atol=0)
    assert_same_gradients(grads, expected_grads)
    assert len(memeff_compile.graphs()) == count
    if settings.get("logits") != "none":
        assert records() == expected_records(model, count)
        assert isinstance(found.logits, DeferredLogits)
        assert found.logits.materialisations == 0
        torch.testing.assert_close(found.logits, expected.logits, rtol=1e-5, atol=1e-5)
    return found


def as_few_layers(family: Family) -> dict[str, int]:
    """Return settings of one layer, or none for families whose layers alternate."""
    if family.name in ("llama", "gemma2", "gemma3_text", "cohere2", "gpt_neo", "smollm3"):
        return {}
    names = {"num_hidden_layers", *family.overrides} & {"num_hidden_layers", "n_layer", "n_layers"}
    return dict.fromkeys(names, 1)


def test_the_zoo_is_large_enough() -> None:
    assert len(FAMILIES) == len(BY_NAME) >= 40
    assert {f.kind for f in FAMILIES} == {"causal", "seq2seq", "masked", "speech"}


ALIKE = set(
    "mistral qwen2 qwen3 gemma smollm3 helium olmo olmo2 starcoder2 stablelm nemotron glm phi3 "
    "cohere2 codegen gpt_neo roberta mbart pegasus blenderbot m2m_100 mixtral gemma3_text gptj "
    "gpt_neox bloom falcon biogpt xglm mpt marian electra".split()
)
"""Families whose head and loss are written as those of one that is not named here."""


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(f, marks=pytest.mark.slow if f.name in ALIKE else (), id=f.name)
        for f in FAMILIES
    ],
)
def test_fused_loss_equals_eager(family: Family) -> None:
    """One family goes through AOTAutograd; for the others the passes are enough.

    Layers are traced one by one, so those that are all alike are one layer here.
    """
    inner = "aot_eager" if family.name == "llama" else "eager"
    batch: dict[str, Any] = inputs(family)
    if family.name in ("t5", "whisper"):  # bart has a cache, for which Dynamo copies its config
        batch["use_cache"] = False
    assert_equals_eager(build(family, **as_few_layers(family)), batch, inner=inner)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["t5", "bert", "whisper"])
def test_fused_loss_of_other_kinds_equals_eager_through_aot_autograd(name: str) -> None:
    assert_equals_eager(build(BY_NAME[name]), inputs(BY_NAME[name]))


@pytest.mark.parametrize(
    "name", ["gemma2", *(pytest.param(n, marks=pytest.mark.slow) for n in ("llama", "bert"))]
)
def test_bf16_is_no_worse_than_eager(name: str) -> None:
    family = BY_NAME[name]
    model = build(family, torch.bfloat16)
    exact = build(family)
    exact.load_state_dict(model.state_dict())
    run = compiled(model, inner="eager")
    ours, eager = [], []
    for seed in range(5):
        batch = inputs(family, seed=seed)
        _, truth = step(exact, exact, batch)
        _, grads = step(model, model, batch)
        eager.append(pooled_error(grads, truth))
        found, grads = step(run, model, batch)
        ours.append(pooled_error(grads, truth))
        assert found.logits.dtype == torch.bfloat16
    assert_no_worse(ours, eager)
    assert records() == expected_records(model)


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("gpt2", "qwen3", "gemma2", "falcon")),
    ],
)
@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated")
def test_gradient_checkpointing_equals_eager(name: str) -> None:
    model = build(BY_NAME[name])
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert_equals_eager(model, {**inputs(BY_NAME[name]), "use_cache": False})
    assert "tag_activation_checkpoint" in memeff_compile.graphs()[-1].after


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated")
def test_graph_break_of_transformers_before_the_head_does_not_matter() -> None:
    """With the cache left on, transformers warns under checkpointing, and Dynamo breaks there."""
    family = BY_NAME["llama"]
    model = build(family)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    expected, expected_grads = step(model, model, inputs(family))
    found, grads = step(compiled(model, fullgraph=False, inner="eager"), model, inputs(family))
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-6, atol=0)
    assert_same_gradients(grads, expected_grads)
    assert memeff_compile.last_report().rewrites(FUSE) == 1


@pytest.mark.parametrize("name", ["llama", pytest.param("gemma2", marks=pytest.mark.slow)])
@pytest.mark.parametrize("items", [torch.tensor(17), 17], ids=["tensor", "int"])
def test_num_items_in_batch_equals_eager(name: str, items: Any) -> None:
    family = BY_NAME[name]
    batch = {**inputs(family), "num_items_in_batch": items}
    assert_equals_eager(build(family, num_hidden_layers=1), batch, inner="eager")


def test_shift_labels_equal_eager() -> None:
    batch = inputs(BY_NAME["llama"])
    shifted = torch.nn.functional.pad(batch["labels"], (0, 1), value=-100)[:, 1:].contiguous()
    model = build(BY_NAME["llama"], num_hidden_layers=1)
    by_hand = assert_equals_eager(model, {**batch, "shift_labels": shifted}, inner="eager")
    torch.testing.assert_close(by_hand.loss, model(**batch).loss)


@pytest.mark.parametrize(
    ("name", "tied"),
    [("llama", True), ("gpt2", False), pytest.param("bart", False, marks=pytest.mark.slow)],
)
def test_tied_and_untied_heads_equal_eager(name: str, tied: bool) -> None:
    model = build(BY_NAME[name], tie_word_embeddings=tied)
    shared = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert shared == tied
    assert_equals_eager(model, inputs(BY_NAME[name]), inner="eager")


def test_attention_mask_equals_eager() -> None:
    family = BY_NAME["llama"]
    batch = inputs(family)
    mask = torch.ones_like(batch["input_ids"])
    mask[0, :3] = 0
    model = build(family, num_hidden_layers=1)
    assert_equals_eager(model, {**batch, "attention_mask": mask}, inner="eager")


def test_mixture_of_experts_with_router_loss_equals_eager() -> None:
    family = BY_NAME["mixtral"]
    model = build(family, output_router_logits=True)
    skip_where_plain_compilation_fails(model, inputs(family))
    expected, expected_grads = step(model, model, inputs(family))
    found, grads = step(compiled(model, fullgraph=False), model, inputs(family))
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-6, atol=0)
    assert_same_gradients(grads, expected_grads)
    assert memeff_compile.last_report().rewrites(FUSE) == 1


@pytest.mark.parametrize(
    "name", ["gemma2", *(pytest.param(n, marks=pytest.mark.slow) for n in ("cohere", "granite"))]
)
def test_everything_dynamic_equals_eager(name: str) -> None:
    """With dynamic=True Dynamo makes symbols of a config's numbers, too: softcaps and scales."""
    family = BY_NAME[name]
    model = build(family, num_hidden_layers=1)
    run = compiled(model, dynamic=True, inner="eager")
    for rows, length in ((2, 12), (3, 9)):
        batch = inputs(family, rows, length)
        expected, expected_grads = step(model, model, batch)
        found, grads = step(run, model, batch)
        torch.testing.assert_close(found.loss, expected.loss, rtol=1e-6, atol=0)
        assert_same_gradients(grads, expected_grads)
    assert records() == expected_records(model) * len(memeff_compile.graphs())


@pytest.mark.parametrize("name", ["llama", pytest.param("gemma2", marks=pytest.mark.slow)])
def test_autocast_is_no_worse_than_eager(name: str) -> None:
    family = BY_NAME[name]
    model = build(family, num_hidden_layers=1)
    run = compiled(model, inner="eager")
    ours, eager = [], []
    for seed in range(5):
        batch = inputs(family, seed=seed)
        _, truth = step(model, model, batch)
        with torch.autocast("cpu", torch.bfloat16):
            _, grads = step(model, model, batch)
            eager.append(pooled_error(grads, truth))
            found, grads = step(run, model, batch)
            ours.append(pooled_error(grads, truth))
        assert found.logits.dtype == torch.bfloat16
    assert_no_worse(ours, eager)
    assert records() == FUSED_AND_DEFERRED


@pytest.mark.parametrize(
    "context",
    [torch.no_grad, pytest.param(torch.inference_mode, marks=pytest.mark.slow)],
    ids=lambda c: c.__name__,
)
def test_evaluation_equals_eager(context: Any) -> None:
    family = BY_NAME["gemma2"]
    model = build(family, num_hidden_layers=1).eval()
    with context():
        expected, found = model(**inputs(family)), compiled(model)(**inputs(family))
        torch.testing.assert_close(found.loss, expected.loss, rtol=1e-6, atol=0)
        torch.testing.assert_close(found.logits, expected.logits)
    assert not memeff_compile.graphs()[-1].training


def test_a_forward_without_labels_is_left_alone() -> None:
    family = BY_NAME["llama"]
    model = build(family, num_hidden_layers=1).eval()
    ids = inputs(family)["input_ids"]
    with torch.no_grad():
        expected, found = model(ids), compiled(model, inner="eager")(ids)
    torch.testing.assert_close(found.logits, expected.logits)
    assert type(found.logits) is Tensor
    assert records() == []


def test_logits_none_drops_them() -> None:
    family = BY_NAME["llama"]
    model = build(family, num_hidden_layers=1)
    expected, expected_grads = step(model, model, inputs(family))
    found, grads = step(compiled(model, logits="none"), model, inputs(family))
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-6, atol=0)
    assert_same_gradients(grads, expected_grads)
    assert found.logits is None
    assert records() == [(FUSE, "rewrote"), ("defer_logits", "logits_none")]


def test_a_loss_on_the_logits_outside_equals_eager() -> None:
    """Distillation: a second loss reads out.logits; gradients of both reach the weights."""
    family = BY_NAME["llama"]
    model = build(family, num_hidden_layers=1)
    batch = inputs(family)
    teacher = torch.randn(2, 12, VOCABULARY, generator=torch.Generator().manual_seed(0))

    def both(run: Any) -> tuple[Tensor, list[Tensor | None]]:
        model.zero_grad(set_to_none=True)
        output = run(**batch)
        distance = nn.functional.kl_div(
            output.logits.log_softmax(-1),
            teacher.log_softmax(-1),
            reduction="batchmean",
            log_target=True,
        )
        (output.loss + distance).backward()
        return output.loss, [p.grad for p in model.parameters()]

    expected, expected_grads = both(model)
    found, grads = both(compiled(model))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    assert_same_gradients(grads, expected_grads)


def test_no_graph_break_of_a_familys_own_is_added() -> None:
    """GPT-2 alone would break between head and loss; the backend keeps it in one piece."""
    family = BY_NAME["gpt2"]
    model = build(family)
    pieces: list[Any] = []

    def count(gm: Any, example_inputs: Any) -> Any:
        pieces.append(gm)
        return gm.forward

    torch._dynamo.reset()
    torch.compile(model, backend=count)(**inputs(family))
    assert len(pieces) == 1
