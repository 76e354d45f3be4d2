"""`explain` on twelve models: its time, and the plan against an allocator.

    python benchmarks/models/planned.py

Each model is explained at its real size (8 sequences of 2,048 tokens, bf16, on device "meta"): the
CPU seconds of the call, and the largest batch in 80 GB. Then a small version of it (4 x 192, fp32)
is explained and run on a CPU, with Inductor and with memeff: the largest batch that the plan claims
for one and a half times the memory of the call, or the batch of the call where the plan is for that
one alone. Its row has the most bytes that the step had allocated. The allocations of Inductor's
code do not depend on its kernels' values, so they are not compiled, except where a model reads
values. One model at a time in a separate process, on one thread.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from torch import Tensor, nn

from benchmarks import RESULTS, rows

BATCH, LENGTH = 8, 2048
SMALL_BATCH, SMALL_LENGTH = 4, 192
MEMORY = "80GB"
CLASSES = 4096
TEXT: dict[str, Any] = {
    "vocab_size": CLASSES,
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
Call = tuple[nn.Module, dict[str, Any]]


class Split(nn.Module):
    """A model whose graph breaks before the head."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss and the logits."""
        hidden = self.model.model(input_ids=input_ids).last_hidden_state
        torch._dynamo.graph_break()
        logits = self.model.lm_head(hidden)
        return self.model.loss_function(logits, labels, self.model.config.vocab_size), logits


def _layers(count: int, heads: int, groups: int, hidden: int, inner: int) -> dict[str, int]:
    names = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_size")
    return dict(
        zip((*names, "intermediate_size"), (count, heads, groups, hidden, inner), strict=True)
    )


# name: the prefix of the classes, the real config, the changes for the small one
CAUSAL: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama-3.1-8b": (
        "Llama",
        {**_layers(32, 32, 8, 4096, 14336), "vocab_size": 128256, "rope_theta": 5e5},
        {},
    ),
    "mistral-7b (sliding)": (
        "Mistral",
        {**_layers(32, 32, 8, 4096, 14336), "vocab_size": 32000, "sliding_window": 1024},
        {"sliding_window": 64},
    ),
    "qwen3-0.6b (tied)": (
        "Qwen3",
        {
            **_layers(28, 16, 8, 1024, 3072),
            "vocab_size": 151936,
            "head_dim": 128,
            "tie_word_embeddings": True,
        },
        {"head_dim": 32, "tie_word_embeddings": True},
    ),
    "gpt2 (tied)": (
        "GPT2",
        {"n_positions": LENGTH},
        {"n_embd": 128, "n_layer": 4, "n_head": 4, "n_positions": 1024},
    ),
    "gemma-2-2b (sliding, eager)": (
        "Gemma2",
        {
            **_layers(26, 8, 4, 2304, 9216),
            "vocab_size": 256000,
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
            "sliding_window": 1024,
            "attn_implementation": "eager",
        },
        {
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "sliding_window": 64,
            "attn_implementation": "eager",
        },
    ),
    "gemma-3-1b (sliding)": (
        "Gemma3Text",
        {
            **_layers(26, 4, 1, 1152, 6912),
            "vocab_size": 262144,
            "head_dim": 256,
            "sliding_window": 512,
        },
        {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 64},
    ),
    "mixtral-8x7b (moe)": ("Mixtral", {}, {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3-30b-a3b (moe)": (
        "Qwen3Moe",
        {
            **_layers(48, 32, 4, 2048, 6144),
            "vocab_size": 151936,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
        },
        {"head_dim": 32, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    ),
    "qwen2-7b (split before the head)": (
        "Qwen2",
        {**_layers(28, 28, 4, 3584, 18944), "vocab_size": 152064},
        {},
    ),
}
OTHERS = (
    "t5-base (encoder-decoder)",
    "qwen2-vl-2b (vision-language, split)",
    "llava-1.5-7b (vision-language)",
)
MODELS = (*CAUSAL, *OTHERS)


def build(name: str, batch: int, length: int, *, small: bool) -> Call:
    """Return a model and its arguments; the real one without memory."""
    torch.manual_seed(0)
    with torch.device("cpu" if small else "meta"):
        if name in CAUSAL:
            model = _causal(name, small=small)
        else:
            model = {"t5": _t5, "qwen2": _qwen2_vl, "llava": _llava}[name.split("-")[0]](small)
        model = model.to(torch.float32 if small else torch.bfloat16)
    for module in model.modules():
        if small and isinstance(module, nn.Dropout):
            module.p = 0.0
    for config in [m.config for m in model.modules() if hasattr(m, "config")]:
        config.use_cache = False
    ids = torch.randint(5, 3000, (batch, length))
    inputs = {"input_ids": ids}
    if "vision" in name:
        inputs |= _images(model.config, ids, small=small)
    inputs |= {"labels": ids.clone()}
    if not small:
        inputs = {k: v.to("meta") if v.is_floating_point() else v for k, v in inputs.items()}
    return Split(model) if "split before" in name else model, inputs


def _causal(name: str, *, small: bool) -> Any:
    import transformers

    kind, real, other = CAUSAL[name]
    own = {**real, "max_position_embeddings": 8192} if not small else {**TEXT, **other}
    config = getattr(transformers, f"{kind}Config")(**own)
    return transformers.AutoModelForCausalLM.from_config(config)


def _t5(small: bool) -> Any:
    import transformers

    sizes = (128, 32, 512, 4, 4) if small else (768, 64, 3072, 12, 12)
    names = ("d_model", "d_kv", "d_ff", "num_layers", "num_heads")
    own = {**dict(zip(names, sizes, strict=True)), "decoder_start_token_id": 0}
    config = transformers.T5Config(**own, **({"vocab_size": CLASSES} if small else {}))
    return transformers.T5ForConditionalGeneration(config)


def _qwen2_vl(small: bool) -> Any:
    import transformers

    text = {**TEXT, "pad_token_id": None} if small else _layers(28, 12, 2, 1536, 8960)
    section = [4, 6, 6] if small else [16, 24, 24]
    text["rope_parameters"] = {"rope_type": "default", "mrope_section": section, "rope_theta": 1e6}
    vision = {"depth": 4, "embed_dim": 64, "num_heads": 4, "hidden_size": 128}
    ids = {"image": 4000, "vision_start": 4001, "vision_end": 4002, "video": 4003}
    if not small:
        text |= {"vocab_size": 151936, "max_position_embeddings": 32768}
        vision = {"depth": 32, "embed_dim": 1280, "num_heads": 16, "hidden_size": 1536}
        ids = {"image": 151655, "vision_start": 151652, "vision_end": 151653, "video": 151656}
    config = transformers.Qwen2VLConfig(
        text_config=text, vision_config=vision, **{f"{k}_token_id": v for k, v in ids.items()}
    )
    return transformers.Qwen2VLForConditionalGeneration(config)


def _llava(small: bool) -> Any:
    import transformers

    text = {**TEXT} if small else {**_layers(32, 32, 32, 4096, 11008), "vocab_size": 32064}
    sizes = (64, 128, 4, 4, 56) if small else (1024, 4096, 24, 16, 336)
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    vision = dict(zip((*names, "image_size"), sizes, strict=True))
    config = transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**text, **({} if small else {"rope_theta": 1e4})),
        vision_config=transformers.CLIPVisionConfig(**vision, patch_size=14),
        image_token_index=4000 if small else 32000,
    )
    return transformers.LlavaForConditionalGeneration(config)


def _images(config: Any, ids: Tensor, *, small: bool) -> dict[str, Tensor]:
    """Return an image for each sequence, and write where it stands into the ids."""
    batch = len(ids)
    if config.model_type == "llava":
        side = config.vision_config.image_size
        ids[:, 1 : 1 + (side // 14) ** 2] = config.image_token_id
        return {"pixel_values": torch.randn(batch, 3, side, side)}
    side = 8 if small else 16
    count = side * side // 4  # four patches are one place in the text
    ids[:, 1], ids[:, 2 + count] = config.vision_start_token_id, config.vision_end_token_id
    ids[:, 2 : 2 + count] = config.image_token_id
    return {
        "pixel_values": torch.randn(batch * side * side, 1176),
        "image_grid_thw": torch.tensor([[1, side, side]] * batch),
        "mm_token_type_ids": (ids == config.image_token_id).int(),
    }


def seconds(name: str) -> dict[str, Any]:
    """Explain a model at its real size."""
    from memeff_compile.errors import ExplainError
    from memeff_compile.planning.explain import explain

    model, inputs = build(name, BATCH, LENGTH, small=False)
    started = time.process_time()
    found = explain(model, **inputs)
    row: dict[str, Any] = {
        "kind": "seconds of explain",
        "model": name,
        "batch": BATCH,
        "length": LENGTH,
        "cpu_s": round(time.process_time() - started, 1),
        "graphs": len(found.report.graphs),
        "not_known_at_another": found.fixed,
    }
    try:
        plan = found.plan(optimizer="adamw", memory=MEMORY, gpus=8, sharding="fsdp")
    except ExplainError as error:
        return {**row, "refused": str(error)}
    for side, it in (("inductor", plan.before), ("memeff", plan.after)):
        row[side] = {"peak_mib": it.peak >> 20, "largest_batch": it.largest_batch}
    return row


def against_the_allocator(name: str, backend: str) -> dict[str, Any]:
    """Explain a small model, and run the batch that is claimed for a memory."""
    from memeff_compile.planning.explain import explain

    model, inputs = build(name, SMALL_BATCH, SMALL_LENGTH, small=True)
    found = explain(model, **inputs, device="cpu")

    def side(**given: Any) -> Any:
        plan = found.plan(**given)
        return plan.before if backend == "inductor" else plan.after

    memory = int(1.5 * side().peak)
    batch = side(memory=memory).largest_batch if not found.fixed else None
    planned = side(batch=batch or SMALL_BATCH).peak
    _, inputs = build(name, batch or SMALL_BATCH, SMALL_LENGTH, small=True)
    torch._dynamo.reset()
    compiled: Any = torch.compile(model, backend=backend, dynamic=False)

    def step() -> None:
        out = compiled(**inputs)
        (out[0] if isinstance(out, tuple) else out.loss).backward()
        model.zero_grad(set_to_none=True)

    with contextlib.nullcontext() if "vision" in name else _kernels_left_out():
        step()
        step()
        resident = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
        allocated = _most_allocated(step) + resident
    return {
        "kind": "plan against an allocator",
        "model": name,
        "backend": backend,
        "batch": batch or SMALL_BATCH,
        "length": SMALL_LENGTH,
        "planned_mib": round(planned / 2**20, 1),
        "allocated_mib": round(allocated / 2**20, 1),
        "ratio": round(planned / allocated, 3),
        "claimed_for_mib": None if batch is None else round(memory / 2**20, 1),
        "fits": None if batch is None else allocated <= memory,
    }


@contextlib.contextmanager
def _kernels_left_out() -> Iterator[None]:
    """Let Inductor's code allocate and call libraries, with zeros as its kernels' results."""
    from torch._C._dynamo import guards
    from torch._functorch import config as functorch_config
    from torch._inductor import config
    from torch._inductor.async_compile import AsyncCompile

    allocate = guards._empty_strided_cpu

    def zeros(*shape: Any) -> Tensor:
        return allocate(*shape).zero_()

    def nothing(*_: Any, **__: Any) -> Callable[..., None]:
        return lambda *_: None

    with (
        mock.patch.object(AsyncCompile, "cpp_pybinding", nothing),
        mock.patch.object(guards, "_empty_strided_cpu", zeros),
        config.patch(fx_graph_cache=False, compile_threads=1),
        functorch_config.patch(enable_autograd_cache=False),
    ):
        yield


def _most_allocated(step: Callable[[], None]) -> int:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step()
    found: Any = profiled.profiler
    events = [e for e in found.kineto_results.events() if e.name() == "[memory]"]
    live = most = 0
    for event in sorted(events, key=lambda e: int(e.start_ns())):
        live += event.nbytes()
        most = max(most, live)
    return most


def main() -> None:
    """Measure each model in a separate process."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, help="one alone, in this process")
    parser.add_argument("--what", nargs="+", default=list(WHAT), choices=list(WHAT))
    parser.add_argument("--out", type=Path, default=RESULTS / "cpu" / "explain.jsonl")
    given = parser.parse_args()
    if given.model is None:
        for name, what in itertools.product(MODELS, given.what):
            asked = ["--model", name, "--what", what, "--out", str(given.out)]
            subprocess.run([sys.executable, __file__, *asked], check=True)
        return
    torch.set_num_threads(1)
    for what in given.what:
        rows.write(given.out, WHAT[what](given.model))


WHAT: dict[str, Callable[[str], dict[str, Any]]] = {
    "seconds": seconds,
    "inductor": functools.partial(against_the_allocator, backend="inductor"),
    "memeff": functools.partial(against_the_allocator, backend="memeff"),
}

if __name__ == "__main__":
    main()
