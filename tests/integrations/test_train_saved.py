"""A compressed model is saved, loaded by another process, and trained further by the Trainer."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import memeff_compile
from memeff_compile.errors import CodedWeightError
from memeff_compile.kernels.coded_weight import CodedWeight
from memeff_compile.model.weights.compress import compressed_weights
from tests.support.fresh_python import FreshPython

transformers = pytest.importorskip("transformers", reason="Trainer is of transformers")
peft = pytest.importorskip("peft", reason="adapters are of PEFT")


def model() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def compressed(folder: Path) -> Path:
    made = model()
    memeff_compile.compress_(made, min_size=0, progress=False)
    assert len(compressed_weights(made)) == 7
    made.save_pretrained(folder)
    return folder


def train(model: Any, way: str, folder: str, resume: str | None = None) -> tuple[list[float], Any]:
    """Train for four steps; return the losses and the changed tensors."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import Trainer, TrainingArguments

    import memeff_compile

    optimizer: Any = None
    if way == "LoRA":
        torch.manual_seed(1)
        model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"))
    else:
        optimizer = memeff_compile.optim_in_backward(model, torch.optim.SGD, lr=1e-2)
    rows = torch.arange(8 * 12).view(8, 12).mul(7).remainder(64)
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=4,
        save_steps=2,
        logging_steps=1,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
        optimizers=(optimizer, None),
    )
    trainer.train(resume_from_checkpoint=resume)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    wanted = "lora" if way == "LoRA" else ""
    return losses, {n: v.clone() for n, v in model.state_dict().items() if wanted in n}


TRAIN = """
from __future__ import annotations
import torch
from typing import Any
{train}
import memeff_compile
for way in ("LoRA", "in backward"):
    model = memeff_compile.from_pretrained({folder!r})
    torch.save(train(model, way, "out"), f"{{way}}.pt")
"""


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[n], right[n]) for n in left)


@pytest.mark.parametrize("where", ["here", pytest.param("elsewhere", marks=pytest.mark.slow)])
def test_a_saved_model_is_trained_with_the_bits_of_the_dense_model(
    where: str, tmp_path: Path, fresh_python: FreshPython
) -> None:
    folder = compressed(tmp_path / "codes")
    if where == "elsewhere":
        script = TRAIN.format(train=inspect.getsource(train), folder=str(folder))
        ran = fresh_python(script)
        assert ran.returncode == 0, ran.stderr
    for way in ("LoRA", "in backward"):
        if where == "elsewhere":
            losses, changed = torch.load(tmp_path / f"{way}.pt")
        else:
            loaded = memeff_compile.from_pretrained(folder)
            losses, changed = train(loaded, way, str(tmp_path / "out" / way))
        expected, wanted = train(model(), way, str(tmp_path / "dense" / way))
        assert losses == expected, way
        assert len(losses) == 4
        assert same(changed, wanted), way


def test_a_checkpoint_of_codes_is_gone_on_from(tmp_path: Path) -> None:
    folder = compressed(tmp_path / "codes")
    whole, wanted = train(memeff_compile.from_pretrained(folder), "", str(tmp_path / "run"))
    checkpoint = tmp_path / "run" / "checkpoint-2"
    resumed = memeff_compile.from_pretrained(folder)
    losses, changed = train(resumed, "", str(tmp_path / "run"), str(checkpoint))
    assert losses == whole
    assert same(changed, wanted)
    # A checkpoint is a folder like that of save_pretrained.
    last = memeff_compile.from_pretrained(tmp_path / "run" / "checkpoint-4")
    assert len(compressed_weights(last)) == 7
    assert same(dict(last.state_dict()), wanted)


def test_an_adapter_is_saved_without_a_dense_model_if_it_is_handed_over(tmp_path: Path) -> None:
    base = memeff_compile.from_pretrained(compressed(tmp_path / "codes"))
    adapted = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules="all-linear"))
    adapted.save_pretrained(tmp_path / "whole")
    own = {name: p for name, p in adapted.named_parameters() if p.requires_grad}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CodedWeight, "decode", None)  # decoding is forbidden
        adapted.save_pretrained(tmp_path / "own", state_dict=own)
    files = [load_file(tmp_path / n / "adapter_model.safetensors") for n in ("whole", "own")]
    assert len(files[0]) == 14
    assert same(*files)


def test_an_ordinary_optimizer_is_refused_with_the_way_out(tmp_path: Path) -> None:
    loaded = memeff_compile.from_pretrained(compressed(tmp_path / "codes"))
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), max_steps=1, use_cpu=True, report_to=[]
    )
    row = torch.arange(12)
    data = [{"input_ids": row, "labels": row}]
    trainer = transformers.Trainer(model=loaded, args=arguments, train_dataset=data)
    with pytest.raises(CodedWeightError, match="optim_in_backward"):
        trainer.train()
