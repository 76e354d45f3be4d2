"""Compressed models through transformers' save_pretrained and from_pretrained."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers.core_model_loading
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    GPT2Config,
    LlamaConfig,
    LlamaForSequenceClassification,
    MixtralConfig,
    PreTrainedConfig,
    T5Config,
)

import memeff_compile
from memeff_compile.errors import CodedWeightError, MemeffError, OptionError
from memeff_compile.kernels.coded_weight import CodedWeight
from memeff_compile.model.weights.compress import compress_, compressed_weights, decompress_
from memeff_compile.model.weights.pretrained import MemeffConfig
from tests.support.fresh_python import FreshPython
from tests.support.hostile_weights import bits
from tests.support.live_bytes import LiveBytes

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
LLAMA = LlamaConfig(**SIZES)
IDS = torch.arange(24).view(2, 12) % 64
ALL_OF_IT = {"min_size": 0}


def dense(config: PreTrainedConfig = LLAMA, auto: Any = AutoModelForCausalLM, **more: Any) -> Any:
    torch.manual_seed(0)
    settings = {"dtype": torch.bfloat16, **more}
    return auto.from_config(config.__class__(**config.to_dict()), **settings).eval()


def compressed(codec: str = "win4", mantissa: int = 7, **more: Any) -> Any:
    model = dense(**more)
    compress_(model, codec, mantissa=mantissa, progress=False, min_size=0)
    return model


def logits(model: Any) -> Tensor:
    given = {"decoder_input_ids": IDS} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        found: Tensor = model(input_ids=IDS, **given).logits
    return found


def same_bits(left: nn.Module, right: nn.Module) -> bool:
    here, there = left.state_dict(), right.state_dict()
    return here.keys() == there.keys() and all(
        torch.equal(bits(here[name].bfloat16()), bits(there[name].bfloat16())) for name in here
    )


def same_parts(left: nn.Module, right: nn.Module) -> bool:
    here, there = compressed_weights(left), compressed_weights(right)
    return here.keys() == there.keys() and all(
        here[name].codec == there[name].codec
        and all(map(torch.equal, here[name].parts, there[name].parts))
        for name in here
    )


# --- save and load --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("codec", "mantissa"),
    [("win4", 7), ("tier", 7), pytest.param("rans", 7, marks=pytest.mark.slow), ("win4", 3)],
)
def test_a_compressed_model_comes_back_bit_for_bit_from_shards(
    tmp_path: Path, codec: str, mantissa: int
) -> None:
    model = compressed(codec, mantissa)
    model.save_pretrained(tmp_path / "1", max_shard_size="100KB")
    assert len(list((tmp_path / "1").glob("*.safetensors"))) > 3
    auto = AutoModelForCausalLM
    again, info = auto.from_pretrained(tmp_path / "1", output_loading_info=True)
    assert not any(info.values()), info
    assert len(compressed_weights(again)) == 14
    assert same_parts(again, model)
    assert same_bits(again, model)
    assert torch.equal(logits(again), logits(model))
    trains = {weight.requires_grad for weight in compressed_weights(again).values()}
    assert trains == {mantissa == 7}
    said = memeff_compile.verb_report(again)
    assert said is not None
    assert "14 compressed weights read from" in said.summary
    again.save_pretrained(tmp_path / "2")
    third = memeff_compile.from_pretrained(tmp_path / "2")
    assert type(third) is type(model)
    assert same_parts(third, model)
    size = (tmp_path / "2" / "model.safetensors").stat().st_size
    assert size < 0.85 * sum(p.nbytes for p in dense().parameters())


EVERY_LAYER: dict[str, Any] = {"layers": ["Linear", "Conv1D", "Embedding"], "skip": ()}
FAMILIES: dict[str, tuple[PreTrainedConfig, Any, int]] = {
    "tied": (
        LlamaConfig(**{**SIZES, "vocab_size": 256}, tie_word_embeddings=True),
        AutoModelForCausalLM,
        14,
    ),
    # all of its weights belong to Conv1D and Embedding
    "conv1d": (
        GPT2Config(vocab_size=256, n_embd=128, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=1),
        AutoModelForCausalLM,
        0,
    ),
    # its experts are joined on loading and split on saving
    "experts": (MixtralConfig(**SIZES, num_local_experts=4), AutoModelForCausalLM, 8),
    "encoder": (
        T5Config(
            **{"vocab_size": 64, "d_model": 128, "d_kv": 32, "d_ff": 256, "num_layers": 1},
            **{"num_heads": 4, "decoder_start_token_id": 0},
        ),
        AutoModelForSeq2SeqLM,
        16,
    ),
}


@pytest.mark.parametrize(
    ("family", "more"),
    [*((family, 0) for family in FAMILIES), ("tied", 1), ("conv1d", 10)],
)
def test_families_are_saved_loaded_compressed_and_dense_again(
    tmp_path: Path, family: str, more: int
) -> None:
    config, auto, count = FAMILIES[family]
    settings = {**ALL_OF_IT, **(EVERY_LAYER if more else {})}
    model = dense(config, auto)
    wanted = logits(model)
    model.save_pretrained(tmp_path / "dense")
    compress_(model, progress=False, **settings)
    served = logits(model)  # products of few tokens add in another order
    model.save_pretrained(tmp_path / "codes")
    loaded = memeff_compile.from_pretrained(tmp_path / "codes")
    assert len(compressed_weights(loaded)) == count + more
    assert torch.equal(logits(loaded), served)
    head, table = loaded.get_output_embeddings(), loaded.get_input_embeddings()
    assert (head.weight is table.weight) == config.tie_word_embeddings
    given = MemeffConfig(**settings)
    made = auto.from_pretrained(tmp_path / "dense", quantization_config=given)
    assert same_parts(made, model)
    decompress_(loaded)
    loaded.save_pretrained(tmp_path / "again")
    names = [json.loads((tmp_path / n / "config.json").read_text()) for n in ("dense", "again")]
    assert names[0] == names[1]
    files = [load_file(tmp_path / n / "model.safetensors") for n in ("dense", "again")]
    assert files[0].keys() == files[1].keys()
    assert torch.equal(logits(auto.from_pretrained(tmp_path / "again")), wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_models_of_other_dtypes_keep_codes_and_bits(tmp_path: Path, dtype: torch.dtype) -> None:
    codec = {torch.float32: "tier:fp32", torch.float16: "tier:fp16"}[dtype]
    exact = dense(dtype=dtype)
    model = compressed(codec, dtype=dtype)
    model.save_pretrained(tmp_path / "coded")
    exact.save_pretrained(tmp_path / "dense")
    loaded = memeff_compile.from_pretrained(tmp_path / "coded")
    settings = memeff_compile.MemeffConfig(codec, min_size=0)
    while_loading = AutoModelForCausalLM.from_pretrained(
        tmp_path / "dense", quantization_config=settings, dtype=dtype
    )
    for each in (loaded, while_loading):
        assert each.dtype == dtype
        coded = [w for w in each.parameters() if isinstance(w, CodedWeight)]
        assert {w.codec for w in coded} == {codec}
        assert len(coded) == 14
        assert torch.equal(logits(each), logits(exact))


def test_heads_and_base_models_read_each_others_folders(tmp_path: Path) -> None:
    model = compressed()
    model.save_pretrained(tmp_path / "whole")
    model.model.save_pretrained(tmp_path / "base")
    base = AutoModel.from_pretrained(tmp_path / "whole")
    assert same_parts(base, model.model)
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    assert same_parts(whole, model)
    other = LlamaForSequenceClassification.from_pretrained(tmp_path / "whole")
    assert same_parts(other, model)


def test_transformers_dequantize_gives_the_dense_model(tmp_path: Path) -> None:
    compressed().save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    loaded.dequantize()
    assert not compressed_weights(loaded)
    assert same_bits(loaded, dense())
    assert not hasattr(loaded, "hf_quantizer")


LOAD = """
{first}
import torch
from transformers import AutoModelForCausalLM
try:
    model = AutoModelForCausalLM.from_pretrained({path!r})
except RuntimeError as error:
    print("refused:", error)
    import memeff_compile
    model = memeff_compile.from_pretrained({path!r})
with torch.no_grad():
    print(torch.equal(model(input_ids=torch.load({ids!r})).logits, torch.load({wanted!r})))
"""


@pytest.mark.parametrize(
    "order", ["ours first", pytest.param("ours too late", marks=pytest.mark.slow)]
)
def test_another_process_loads_it_after_our_import(
    tmp_path: Path, fresh_python: FreshPython, order: str
) -> None:
    model = compressed()
    model.save_pretrained(tmp_path / "model")
    torch.save(logits(model), tmp_path / "wanted.pt")
    torch.save(IDS, tmp_path / "ids.pt")
    given = {name: str(tmp_path / f"{name}.pt") for name in ("ids", "wanted")}
    first = "import memeff_compile" if order == "ours first" else ""
    ran = fresh_python(LOAD.format(first=first, path=str(tmp_path / "model"), **given))
    assert ran.stdout.splitlines()[-1] == "True", ran.stderr
    # Without our import transformers stops at a shape, instead of initialising weights at random.
    assert ("refused:" in ran.stdout) == (order == "ours too late"), ran.stdout


# --- compress while loading -----------------------------------------------------------------------


class RealBytes(LiveBytes):
    """Count also bytes read from files, but no coded weight, because its parts are counted."""

    def read(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        self.live[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.live = dict(self._alive())
        self.peak = max(self.peak, sum(size for _, size in self.live.values()))
        return tensor

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(each, CodedWeight) for each in types):
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)


def test_loading_takes_no_more_than_the_codes_and_one_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = dense(LlamaConfig(**{**SIZES, "num_hidden_layers": 12, "intermediate_size": 128}))
    model.save_pretrained(tmp_path, max_shard_size="750KB")
    shards = [file.stat().st_size for file in tmp_path.glob("*.safetensors")]
    assert len(shards) > 3
    read = transformers.core_model_loading._materialize_copy
    with RealBytes() as live:
        monkeypatch.setattr(
            transformers.core_model_loading,
            "_materialize_copy",
            lambda *args, **kwargs: live.read(read(*args, **kwargs)),
        )
        given = MemeffConfig("tier", **ALL_OF_IT)
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=given)
    coded = compressed_weights(loaded)
    assert len(coded) == 12 * 7
    others = [p for p in loaded.parameters() if not isinstance(p, CodedWeight)]
    size = sum(w.coded_bytes for w in coded.values()) + sum(p.nbytes for p in others)
    assert size < sum(p.nbytes for p in model.parameters())
    assert size < live.peak < size + max(shards)
    assert sum(n for _, n in live.live.values()) < 1.15 * size, "something dense is still alive"


def test_a_report_says_what_was_compressed_and_why_not(tmp_path: Path) -> None:
    dense().save_pretrained(tmp_path)
    given = MemeffConfig("tier", skip=["layers.1", "layers.7"], min_size=2**14 + 1)
    model = memeff_compile.from_pretrained(tmp_path, quantization_config=given)
    report = memeff_compile.compression_report(model)
    assert report is not None
    assert {each.codec for each in report.compressed} == {"tier"}
    assert {each.name for each in report.compressed} == compressed_weights(model).keys()
    assert len(report.compressed) == 3
    why = {each.name: each.reason for each in report.left_dense}
    assert "skip names 'layers.1'" in why["model.layers.1.mlp.up_proj.weight"]
    assert "min_size" in why["model.layers.0.self_attn.q_proj.weight"]
    assert "Embedding" in why["model.embed_tokens.weight"]
    assert "skip names 'layers.7', but no module has this name" in report.notes[0]


def test_weights_that_cannot_be_compressed_stay_dense_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dense().save_pretrained(tmp_path)
    given = {"quantization_config": MemeffConfig(**ALL_OF_IT)}
    model = memeff_compile.from_pretrained(tmp_path, dtype=torch.float32, **given)
    assert not compressed_weights(model)
    assert "compressed nothing" in caplog.text
    assert "dtype is float32" in caplog.text
    model.save_pretrained(tmp_path / "again")
    assert "quantization_config" not in (tmp_path / "again" / "config.json").read_text()
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "again").dtype == torch.float32


def test_settings_are_checked_when_they_are_given() -> None:
    with pytest.raises(OptionError, match=r"mantissa|codec"):
        MemeffConfig(mantissa=5)
    with pytest.raises(OptionError, match="min_size"):
        MemeffConfig(min_size="all")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="codecs"):
        MemeffConfig(codecs="win4")  # type: ignore[call-arg]


# --- arguments of from_pretrained -----------------------------------------------------------------


def test_device_maps_place_codes_and_offloading_is_refused(tmp_path: Path) -> None:
    model = compressed()
    model.save_pretrained(tmp_path)
    cpu = torch.device("cpu")
    # Two device names, for which accelerate puts hooks on every module.
    apart = {"model": cpu, "lm_head": torch.device("cpu", 0)}
    for where in ("cpu", "auto", {"": "cpu"}, apart):
        placed = AutoModelForCausalLM.from_pretrained(tmp_path, device_map=where)
        assert hasattr(placed.model.layers[0].mlp.up_proj, "_hf_hook") == (where is apart)
        assert same_parts(placed, model)
        assert torch.equal(logits(placed), logits(model))
    with pytest.raises(CodedWeightError, match="device_map without 'disk'"):
        AutoModelForCausalLM.from_pretrained(
            tmp_path, device_map={"model": "cpu", "lm_head": "disk"}, offload_folder=tmp_path
        )
    # As with a GPU and "cpu": accelerate moves the modules on "cpu" to the GPU.
    with pytest.raises(CodedWeightError, match=r"keeps model.* on the disk or in host memory"):
        AutoModelForCausalLM.from_pretrained(tmp_path, device_map={"model": "cpu", "lm_head": cpu})


@pytest.mark.parametrize("is_coded", [True, False], ids=["codes", "dense"])
def test_tied_weights_on_two_devices_are_refused(tmp_path: Path, is_coded: bool) -> None:
    model = dense(FAMILIES["tied"][0])
    if is_coded:
        compress_(model, progress=False, min_size=0, **EVERY_LAYER)
    model.save_pretrained(tmp_path)
    given = {} if is_coded else {"quantization_config": MemeffConfig(**ALL_OF_IT, **EVERY_LAYER)}
    read = AutoModelForCausalLM.from_pretrained

    def untied(self: Any, *args: Any, **kwargs: Any) -> None:
        self.lm_head.weight = nn.Parameter(self.model.embed_tokens.weight.detach().clone())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(model), "tie_weights", untied)
        with pytest.raises(CodedWeightError, match=r"two devices|no codes of lm_head.weight"):
            read(tmp_path, **given)


def test_another_dtype_is_refused_with_the_way_to_it(tmp_path: Path) -> None:
    compressed().save_pretrained(tmp_path)
    assert memeff_compile.from_pretrained(tmp_path, dtype=torch.bfloat16).dtype == torch.bfloat16
    with pytest.raises(CodedWeightError, match=r"dtype=float32.*decompress_\(model\)"):
        memeff_compile.from_pretrained(tmp_path, dtype=torch.float32)


def spoil(folder: Path, how: str) -> None:
    file, said = folder / "model.safetensors", json.loads((folder / "config.json").read_text())
    tensors = load_file(file)
    name = "model.layers.0.mlp.up_proj.weight"
    if how == "a flipped byte":
        tensors[f"{name}.codes"].add_(1)
    elif how == "a part missing":
        del tensors[f"{name}.codes"]
    elif how == "a weight missing":
        tensors = {key: each for key, each in tensors.items() if not key.startswith(f"{name}.")}
    elif how == "another version":
        said["quantization_config"]["version"] = 2
    elif how == "another model":
        said["quantization_config"]["weights"] = {"encoder.weight": "win4 00000000"}
    (folder / "config.json").write_text(json.dumps(said))
    save_file(tensors, file, metadata={"format": "pt"})


SPOILT = {
    "a flipped byte": "does not match its checksum",
    "a part missing": "holds the parts",
    "a weight missing": "has no codes of model.layers.0.mlp.up_proj.weight",
    "another version": "version 2",
    "another model": "Load it as the class that was saved",
}


@pytest.mark.parametrize("how", SPOILT)
def test_a_folder_that_is_not_right_is_refused(tmp_path: Path, how: str) -> None:
    """The error says so, not only a report that transformers may be told not to print."""
    compressed().save_pretrained(tmp_path)
    spoil(tmp_path, how)
    with pytest.raises(CodedWeightError, match=SPOILT[how]):
        memeff_compile.from_pretrained(tmp_path)


def test_from_pretrained_of_a_file_says_how_a_file_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "comp.safetensors"
    memeff_compile.save_compressed(compressed(), path)
    with pytest.raises(OptionError, match=r"load_compressed_\(model, file\)"):
        memeff_compile.from_pretrained(path)


def test_a_missing_transformers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MemeffError, match="transformers is not installed"):
        memeff_compile.from_pretrained("folder")


# --- state dicts and what the model was -----------------------------------------------------------


@pytest.mark.parametrize(("codec", "mantissa"), [("win4", 7), ("win4", 1)])
def test_a_state_dict_of_codes_is_loaded_as_it_is(
    tmp_path: Path, codec: str, mantissa: int
) -> None:
    model = compressed(codec, mantissa)
    model.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    other = dense()
    with torch.no_grad():
        other.model.layers[0].mlp.up_proj.weight.mul_(2)
    compress_(other, codec, mantissa=mantissa, min_size=0, progress=False)
    assert not same_bits(other, model)
    other.load_state_dict(state)
    assert same_bits(other, model)


def test_a_state_dict_of_another_codec_is_refused(tmp_path: Path) -> None:
    compressed("tier").save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    with pytest.raises(RuntimeError, match="compress_ the model as the saved one was"):
        compressed("win4").load_state_dict(state)


def test_a_model_whose_buffers_were_rounded_is_named(tmp_path: Path) -> None:
    rounded = dense(dtype=torch.float32).to(torch.bfloat16)
    compress_(rounded, min_size=0, progress=False)
    rounded.save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match=r"rotary_emb.inv_freq \(float32 here and bfloat16 there"):
        memeff_compile.from_pretrained(tmp_path)


def test_what_another_quantizer_changed_is_saved_by_it(tmp_path: Path) -> None:
    model = dense()
    memeff_compile.ternarize_(model, skip=["model.layers.1"])
    memeff_compile.pack_ternary_(model)
    theirs = model.hf_quantizer
    compress_(model, min_size=0, progress=False)
    assert compressed_weights(model)
    assert model.hf_quantizer is theirs
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits(again), logits(model))
