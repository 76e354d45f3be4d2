"""Models cut for tensor parallelism, by transformers and by torch: decoding, and compressed shards."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import memeff_compile
from memeff_compile import compat
from memeff_compile.errors import CodedWeightError, OptionError, UnsupportedInputError
from memeff_compile.kernels.coded_weight import CodedWeight
from memeff_compile.model.cache.kv_cache import KVCache
from memeff_compile.passes import rewrite_kv_update
from tests.distributed.models import fresh_start, gradients
from tests.distributed.processes import TwoProcesses

HEADS, KV_HEADS = 8, 4
GIVEN = {"do_sample": False}


@cache
def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def whole(**settings: Any) -> Any:
    """A Llama of one layer, the same in all processes, which have a part of its heads each."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 160, **settings}
    config = transformers.LlamaConfig(
        num_hidden_layers=1,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=32,
        initializer_range=0.2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
        **sizes,
    )
    return transformers.LlamaForCausalLM(config).eval()


@contextmanager
def as_torchrun_starts_it() -> Iterator[None]:
    rank, ranks = str(dist.get_rank()), str(dist.get_world_size())
    with mock.patch.dict(os.environ, RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=ranks):
        yield


def by_transformers(model: Any) -> Any:
    """Load a model as `tp_plan="auto"` cuts it."""
    from transformers.distributed import DistributedConfig

    folder: list[Any] = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    if dist.get_rank() == 0:
        model.save_pretrained(folder[0])
    dist.barrier()
    with as_torchrun_starts_it():
        return type(model).from_pretrained(
            folder[0],
            distributed_config=DistributedConfig(tp_size=dist.get_world_size()),
            device_map=None,
            dtype=model.dtype,
        )


def by_torch(model: Any, over: DeviceMesh | None = None, *, looks_up_parts: bool = True) -> Any:
    """Cut a model in place by `parallelize_module`; the embedding too, or not."""
    layer, plan = "model.layers.*.", {}
    for name in ("q_proj", "k_proj", "v_proj"):
        plan[f"{layer}self_attn.{name}"] = ColwiseParallel()
    for name in ("gate_proj", "up_proj"):
        plan[f"{layer}mlp.{name}"] = ColwiseParallel()
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        plan[layer + name] = RowwiseParallel()
    plan["lm_head"] = ColwiseParallel(output_layouts=Replicate())
    if looks_up_parts:
        plan["model.embed_tokens"] = RowwiseParallel(input_layouts=Replicate())
    return parallelize_module(model, over or mesh(), plan)


Cut = Callable[[Any], Any]


def prompts() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Two sequences, one of them padded on the left; then two shorter ones."""
    ids = torch.randint(3, 150, (2, 9), generator=torch.Generator().manual_seed(0))
    seen = torch.ones_like(ids)
    ids[0, :3], seen[0, :3] = 0, 0
    return (
        {"input_ids": ids, "attention_mask": seen},
        {"input_ids": ids[:, 4:], "attention_mask": seen[:, 4:]},
    )


def generated(model: Any, **given: Any) -> list[Tensor]:
    lengths = zip(prompts(), (6, 4), strict=True)
    return [model.generate(**p, max_new_tokens=n, **GIVEN, **given) for p, n in lengths]


def assert_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
        of_rank_0 = one.clone()
        dist.broadcast(of_rank_0, 0)
        assert torch.equal(one, of_rank_0)


def records() -> set[tuple[str, str]]:
    found = memeff_compile.last_report().records
    assert not [r for r in found if r.action == "internal_error"], str(found)
    return {(r.pass_name, r.code) for r in found}


def decoding_with_a_static_cache(cut: Cut) -> None:
    """Compiled in place; torch stops at a second length under DTensors, unless sizes are fixed."""
    model = cut(whole())
    model.compile(backend="memeff", options={"memeff.inner": "eager"}, dynamic=False)
    with mock.patch.object(rewrite_kv_update, "MIN_COPIED_BYTES", 0):
        found = generated(model, cache_implementation="static")
    assert_equal(found, generated(whole()))
    assert ("rewrite_kv_update", "rewrote") in records()


def decoding_by_the_verb(cut: Cut, kv_cache: int | str) -> None:
    model, alone = cut(whole()), whole()
    memeff_compile.compile(model, kv_cache=kv_cache, inner="eager")
    memeff_compile.use_kv_cache_(alone, 16 if kv_cache == "static" else kv_cache)
    with mock.patch.object(rewrite_kv_update, "MIN_COPIED_BYTES", 0):
        found = generated(model)
    assert_equal(found, generated(alone))
    name = "rewrite_kv_update" if kv_cache == "static" else "compress_kv_cache"
    assert (name, "rewrote") in records()
    (kept,) = vars(model)["_prepare_cache_for_generation"].pool._kept
    (layer,) = kept.cache.layers
    for name in layer.buffers:
        assert getattr(layer, name).shape[1] == KV_HEADS // dist.get_world_size()


def a_cache_of_ones_own(cut: Cut) -> None:
    """It is allocated by the first keys, and takes as many heads as a rank has."""
    model, alone = cut(whole()), whole()
    model.compile(backend="memeff", options={"memeff.inner": "eager"}, dynamic=False)
    ids = prompts()[1]["input_ids"]
    found = []
    for each in (model, alone):
        own = KVCache(alone.config, 64, bits=4)
        found.append(each.generate(ids, past_key_values=own, max_new_tokens=4, **GIVEN))
    assert_equal(found[:1], found[1:])
    assert ("compress_kv_cache", "rewrote") in records()


def wide(**settings: Any) -> Any:
    """Sizes of which half is enough for a code."""
    return whole(hidden_size=256, intermediate_size=512, **settings).bfloat16()


def compressed_shards(cut: Cut, codec: str) -> None:
    ids, inner = prompts()[1]["input_ids"], "eager" if cut is by_torch else "aot_eager"
    dense, coded = cut(wide()), cut(wide())
    report = memeff_compile.compress_(coded, codec, min_size=0, progress=False)
    shapes = {each.name.split(".")[-2]: each.shape for each in report.compressed}
    assert shapes["up_proj"] == (256, 256)  # of 512 rows
    assert shapes["o_proj"] == (256, 128)  # of 256 columns
    assert len(shapes) == 7
    local = compat.local_part(coded.model.layers[0].mlp.up_proj.weight)
    assert isinstance(local, CodedWeight)

    outs = []
    for model in (dense, coded):
        out = model(input_ids=ids, labels=ids)
        out.loss.backward()
        outs.append(out.logits.detach())
    assert torch.equal(*outs)
    for name, gradient in gradients(dense).items():
        assert torch.equal(gradients(coded)[name], gradient), name

    with torch.no_grad():
        for model in (dense, coded):
            fresh_start()
            model.compile(backend="memeff", options={"memeff.inner": inner}, dynamic=False)
            outs.append(model(input_ids=ids).logits)
    assert torch.equal(outs[2], outs[3])
    code = "distributed_linear" if cut is by_torch else "rewrote"
    records = memeff_compile.last_report().records
    mine = [r for r in records if r.pass_name == "encode_weights"]
    if cut is by_transformers and torch.__version__ < (2, 13):  # whose closures hand weights over
        mine = [r for r in mine if r.code != "not_a_linear"]
    assert {r.code for r in mine} == {code}
    assert sum(r.sites for r in mine) == 7

    state = coded.state_dict()
    for name, value in dense.state_dict().items():
        assert type(compat.local_part(state[name])) is Tensor
        assert torch.equal(compat.local_part(state[name]), compat.local_part(value))
    assert memeff_compile.decompress_(coded) == 7
    assert torch.equal(coded(input_ids=ids).logits, outs[0])


def what_is_refused() -> None:
    """In sentences that say in which order it works, and before anything has changed."""
    model = by_torch(wide())
    memeff_compile.compress_(model, min_size=0, progress=False)
    ids = prompts()[1]["input_ids"]
    optimizer = torch.optim.AdamW(model.parameters())
    model(input_ids=ids, labels=ids).loss.backward()
    before = model.model.embed_tokens.weight.full_tensor()
    with pytest.raises(CodedWeightError, match=r"AdamW\.step would write"):
        optimizer.step()
    assert torch.equal(model.model.embed_tokens.weight.full_tensor(), before)

    narrow = memeff_compile.compress_(by_torch(wide()), progress=False)
    assert "its shard has 32768 elements" in narrow.left_dense[1].reason

    def two() -> nn.Sequential:
        return nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))

    plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    ternary = parallelize_module(memeff_compile.ternarize_(two()), mesh(), plan)
    with pytest.raises(UnsupportedInputError, match="was split over processes"):
        ternary(torch.ones(2, 32))
    with pytest.raises(OptionError, match="has hooks"):
        memeff_compile.ternarize_(parallelize_module(two(), mesh(), plan))


SLOW = pytest.mark.slow
CASES: list[Any] = [
    pytest.param(partial(decoding_with_a_static_cache, by_transformers), marks=SLOW),
    pytest.param(partial(decoding_with_a_static_cache, by_torch), marks=SLOW),
    pytest.param(partial(decoding_by_the_verb, by_transformers, "static"), marks=SLOW),
    pytest.param(partial(decoding_by_the_verb, by_transformers, 4), marks=SLOW),
    pytest.param(partial(decoding_by_the_verb, by_torch, "static"), marks=SLOW),
    partial(decoding_by_the_verb, by_torch, 4),
    pytest.param(partial(a_cache_of_ones_own, by_torch), marks=SLOW),
    pytest.param(partial(compressed_shards, by_transformers, "win4"), marks=SLOW),
    partial(compressed_shards, by_torch, "win4"),
    pytest.param(partial(compressed_shards, by_transformers, "tier"), marks=SLOW),
    pytest.param(partial(compressed_shards, by_torch, "rans"), marks=SLOW),
    what_is_refused,
]


def case_name(case: Any) -> str:
    given = [getattr(a, "__name__", str(a)) for a in getattr(case, "args", ())]
    return " ".join([getattr(case, "func", case).__name__, *given])


@pytest.mark.xdist_group("two processes")
@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_cut_models(case: Callable[[], None], two_processes: TwoProcesses) -> None:
    two_processes.run(case)
