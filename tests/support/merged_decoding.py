"""Decoding from caches whose layers share directions: a compiled model compared with eager."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch

import memeff_compile
from memeff_compile import KVCache, MiniCache
from memeff_compile.kernels.coded_kv_cache import op
from tests.support.cached_models import logits, prompt


def assert_compiled_steps_equal_eager(model: Any, new_cache: Callable[[], Any]) -> None:
    """Decode 10 tokens into two caches with one graph, and compare the logits with eager's.

    The caches' tensors keep their addresses, 32 tokens are merged, and nothing reads the dense view
    of more tokens than there are.
    """
    compiled = torch.compile(
        model, backend="memeff", options={"memeff.inner": "eager"}, fullgraph=True
    )
    ids = prompt(tokens=70)
    expected = logits(model, model, new_cache(), ids, 60)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(2):
            cache = new_cache()
            with torch.no_grad():
                model(input_ids=ids[:, :60], past_key_values=cache)
            before = [t.data_ptr() for layer in cache.layers for _, t in layer.tensors()]
            with mock.patch.object(op.reference, "view", wraps=op.reference.view) as views:
                parts = []
                for t in range(60, 70):
                    with torch.no_grad():
                        out = compiled(input_ids=ids[:, t : t + 1], past_key_values=cache)
                    parts.append(out.logits)
            torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=1e-4, atol=1e-5)
            assert [t.data_ptr() for layer in cache.layers for _, t in layer.tensors()] == before
            assert all(call.args[3] <= 70 for call in views.call_args_list)
            assert [line["merged"] for line in cache.merged()] == [32]


def assert_a_gpu_decodes_as_without_the_backend(
    merge: MiniCache, bits: int, *, types: Sequence[str] = (), **settings: Any
) -> None:
    """Decode in bf16 with CUDA graphs, and compare the kernels with the reference's dense view.

    With `types`, the layers are Gemma 3's; windows are long enough to never move.
    """
    import transformers

    sizes: dict[str, Any] = {
        "vocab_size": 512,
        "hidden_size": 512,
        "intermediate_size": 512,
        "num_hidden_layers": len(types) or 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
    }
    torch.manual_seed(0)
    if types:
        windows = {"layer_types": [*types], "sliding_window": 512, "query_pre_attn_scalar": 64}
        config: Any = transformers.Gemma3TextConfig(**sizes, **windows)
        model: Any = transformers.Gemma3ForCausalLM(config).cuda().bfloat16().eval()
    else:
        config = transformers.LlamaConfig(**sizes)
        model = transformers.LlamaForCausalLM(config).cuda().bfloat16().eval()
    ids = torch.randint(0, 512, (2, 340), device="cuda")
    compiled = torch.compile(
        model, backend="memeff", options={"triton.cudagraphs": True}, fullgraph=True
    )
    both = []
    for step in (model, compiled):
        cache = KVCache(config, 512, bits, merge=merge, **settings)
        parts = []
        with torch.no_grad():
            model(input_ids=ids[:, :250], past_key_values=cache)
            for t in range(250, 340):
                out = step(input_ids=ids[:, t : t + 1], past_key_values=cache)
                parts.append(out.logits.float().clone())
        both.append(torch.cat(parts, 1))
        assert [line["merged"] for line in cache.merged()] == [192] * (1 if types else 2)
    assert float((both[0] - both[1]).norm() / both[0].norm()) < 2e-2
    assert "coded_kv_cache_view(" not in memeff_compile.graphs()[-1].after
