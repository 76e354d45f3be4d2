"""Tiny random models of many transformers families, built from configs: no weights, no downloads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY, WIDTH = 101, 32


@dataclass(frozen=True)
class Family:
    """One model family: its config type, settings beyond the common sizes, and how to feed it."""

    name: str
    kind: str = "causal"  # causal, seq2seq, masked, speech
    overrides: dict[str, Any] = field(default_factory=dict)


_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "attention_dropout": 0.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GQA = {"num_key_value_heads": 2, "head_dim": 8}
_SEQ2SEQ = {
    "vocab_size": VOCABULARY,
    "d_model": WIDTH,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "pad_token_id": 1,
    "decoder_start_token_id": 2,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "forced_eos_token_id": None,
}
_GPT = {
    "vocab_size": VOCABULARY,
    "n_embd": WIDTH,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

FAMILIES = (
    Family("llama", overrides=_GQA),
    Family("mistral", overrides=_GQA),
    Family("mixtral", overrides={**_GQA, "num_local_experts": 2, "num_experts_per_tok": 1}),
    Family("qwen2", overrides={"num_key_value_heads": 2}),
    Family("qwen3", overrides=_GQA),
    Family("gemma", overrides=_GQA),
    Family("gemma2", overrides={"query_pre_attn_scalar": 8, "sliding_window": 16}),
    Family("gemma3_text", overrides={"query_pre_attn_scalar": 8, "sliding_window": 16}),
    Family("phi", overrides={"num_key_value_heads": 4, "resid_pdrop": 0.0, "embd_pdrop": 0.0}),
    Family("phi3", overrides={"resid_pdrop": 0.0, "embd_pdrop": 0.0}),
    Family("gpt2", overrides=_GPT),
    Family("gptj", overrides={**_GPT, "rotary_dim": 4}),
    Family("gpt_neox", overrides={"rotary_pct": 0.5}),
    Family(
        "gpt_neo",
        overrides={
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "resid_dropout": 0.0,
            "embed_dropout": 0.0,
        },
    ),
    Family(
        "opt",
        overrides={"ffn_dim": 48, "word_embed_proj_dim": WIDTH, "dropout": 0.0},
    ),
    Family("bloom", overrides={"n_layer": 2, "n_head": 4, "hidden_dropout": 0.0}),
    Family("falcon", overrides={"hidden_dropout": 0.0}),
    Family("starcoder2", overrides={"residual_dropout": 0.0, "embedding_dropout": 0.0}),
    Family("stablelm", overrides={"num_key_value_heads": 2, "hidden_dropout": 0.0}),
    Family("olmo"),
    Family("olmo2"),
    Family("cohere", overrides={"logit_scale": 0.0625}),
    Family("cohere2", overrides={"logit_scale": 0.0625, "sliding_window": 16}),
    Family("granite", overrides={"logits_scaling": 4.0}),
    Family("nemotron", overrides=_GQA),
    Family("smollm3"),
    Family("helium", overrides=_GQA),
    Family("glm"),
    Family("codegen", overrides={**_GPT, "rotary_dim": 4}),
    Family("biogpt", overrides={"activation_dropout": 0.0, "layerdrop": 0.0}),
    Family("xglm", overrides={**_SEQ2SEQ, "num_layers": 2, "attention_heads": 4, "ffn_dim": 48}),
    Family("mpt", overrides={"d_model": WIDTH, "n_heads": 4, "n_layers": 2, "max_seq_len": 64}),
    Family("bart", "seq2seq", _SEQ2SEQ),
    Family("mbart", "seq2seq", _SEQ2SEQ),
    Family("marian", "seq2seq", _SEQ2SEQ),
    Family("pegasus", "seq2seq", _SEQ2SEQ),
    Family("m2m_100", "seq2seq", {**_SEQ2SEQ, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0}),
    Family("blenderbot", "seq2seq", _SEQ2SEQ),
    Family(
        "t5",
        "seq2seq",
        {
            "d_model": WIDTH,
            "d_kv": 8,
            "d_ff": 48,
            "num_layers": 1,
            "num_decoder_layers": 1,
            "num_heads": 4,
            "dropout_rate": 0.0,
            "decoder_start_token_id": 0,
        },
    ),
    Family(
        "whisper",
        "speech",
        {
            **_SEQ2SEQ,
            "num_mel_bins": 8,
            "max_source_positions": 16,
            "max_target_positions": 32,
        },
    ),
    Family("bert", "masked"),
    Family("roberta", "masked"),
    Family("electra", "masked", {"embedding_size": WIDTH}),
    Family("distilbert", "masked", {"dim": WIDTH, "n_layers": 2, "n_heads": 4, "dropout": 0.0}),
)

_EXPERTS = {
    **_GQA,
    **dict.fromkeys(["num_local_experts", "num_experts", "n_routed_experts"], 4),
    **{"num_experts_per_tok": 2, "moe_intermediate_size": 16},
}
_GROUPS = {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1}
_RANKS = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
_LATENT = {**_EXPERTS, **_GROUPS, **_RANKS, "v_head_dim": 8, "num_key_value_heads": 4}
_MAMBA = {"mamba_d_head": 8, "mamba_d_state": 4}
_WINDOW = {**_GQA, "sliding_window": 8}
_T5 = next(family.overrides for family in FAMILIES if family.name == "t5")
_NO_JITTER = {"router_jitter_noise": 0.0}

# Newer ones, hybrids and those that Dynamo splits: a step of each in the slow tests.
FURTHER = (
    *(Family(name, overrides=_GQA) for name in "glm4 ernie4_5 hunyuan_v1_dense arcee".split()),
    *(Family(name, overrides=_GQA) for name in "apertus nanochat".split()),
    *(Family(name, overrides=_WINDOW) for name in "olmo3 exaone4 ministral".split()),
    *(Family(name, overrides=_EXPERTS) for name in "olmoe granitemoe flex_olmo".split()),
    *(Family(name, overrides=_LATENT) for name in "deepseek_v2 deepseek_v3".split()),
    *(Family(name, overrides={**_EXPERTS, **_GROUPS}) for name in "glm4_moe dots1".split()),
    *(Family(name, "seq2seq", _SEQ2SEQ) for name in "led plbart".split()),
    *(Family(name, "seq2seq", _T5) for name in "mt5 umt5".split()),
    Family("persimmon", overrides={"hidden_dropout": 0.0}),
    Family("seed_oss", overrides={**_GQA, "residual_dropout": 0.0}),
    Family("diffllama", overrides={"num_key_value_heads": 2}),
    Family("vaultgemma", overrides={**_WINDOW, "query_pre_attn_scalar": 8}),
    Family("qwen3_moe", overrides={**_EXPERTS, "decoder_sparse_step": 1}),
    Family("qwen2_moe", overrides={**_EXPERTS, "shared_expert_intermediate_size": 16}),
    Family("phimoe", overrides={**_EXPERTS, **_NO_JITTER, "input_jitter_noise": 0.0}),
    Family("gpt_oss", overrides={**_EXPERTS, "sliding_window": 8}),
    Family(
        "minimax",
        overrides={**_EXPERTS, "layer_types": ["full_attention", "linear_attention"]},
    ),
    Family(
        "ernie4_5_moe",
        overrides={**_EXPERTS, "moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 1},
    ),
    Family("jetmoe", overrides={**_EXPERTS, "kv_channels": 8}),
    Family(
        "dbrx",
        overrides={
            "d_model": WIDTH,
            "n_heads": 4,
            "n_layers": 2,
            "max_seq_len": 64,
            "attn_config": {
                "kv_n_heads": 2,
                "attn_pdrop": 0.0,
                "clip_qkv": 8.0,
                "rope_theta": 10000.0,
            },
            "ffn_config": {
                "hidden_size": WIDTH,
                "ffn_hidden_size": 16,
                "moe_num_experts": 4,
                "moe_top_k": 2,
            },
        },
    ),
    Family("mamba", overrides={"state_size": 4}),
    Family("mamba2", overrides={"state_size": 4, "num_heads": 8, "head_dim": 8, "n_groups": 1}),
    Family("falcon_h1", overrides={**_GQA, **_MAMBA, "mamba_d_ssm": WIDTH, "mamba_n_heads": 4}),
    Family(
        "bamba",
        overrides={
            **_GQA,
            **_MAMBA,
            "attn_layer_indices": [1],
            "mamba_n_heads": 8,
            "mamba_n_groups": 1,
        },
    ),
    Family("lfm2", overrides={**_GQA, "layer_types": ["conv", "full_attention"]}),
    Family(
        "recurrent_gemma",
        overrides={
            **_GQA,
            "lru_width": WIDTH,
            "attention_window_size": 8,
            "block_types": ["recurrent", "attention"],
        },
    ),
    Family(
        "nllb-moe",
        "seq2seq",
        {
            **_SEQ2SEQ,
            **_NO_JITTER,
            "moe_token_dropout": 0.0,
            "encoder_layerdrop": 0.0,
            "decoder_layerdrop": 0.0,
            "num_experts": 4,
            "encoder_sparse_step": 1,
            "decoder_sparse_step": 1,
        },
    ),
)


def build(family: Family, dtype: torch.dtype = torch.float32, **overrides: Any) -> nn.Module:
    """Build the family's model with random weights, dropout off, in training mode."""
    import transformers

    settings = {**_COMMON, **family.overrides, **overrides}
    config = transformers.AutoConfig.for_model(family.name, **settings)
    auto: dict[str, Callable[..., nn.Module]] = {
        "causal": transformers.AutoModelForCausalLM.from_config,
        "seq2seq": transformers.AutoModelForSeq2SeqLM.from_config,
        "masked": transformers.AutoModelForMaskedLM.from_config,
        "speech": transformers.AutoModelForSpeechSeq2Seq.from_config,
    }
    torch.manual_seed(0)
    model = auto[family.kind](config, dtype=dtype)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model.train()


def inputs(family: Family, rows: int = 2, length: int = 12, seed: int = 1) -> dict[str, Tensor]:
    """Return a batch with labels, some of them ignored."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (rows, length), generator=generator)
    labels = ids.clone()
    labels[:, ::4] = -100
    if family.kind == "speech":
        features = torch.randn(rows, 8, 32, generator=generator)
        return {"input_features": features, "labels": labels}
    return {"input_ids": ids, "labels": labels}
