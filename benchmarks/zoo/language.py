"""Transformers: language, speech, vision, of reduced width and depth."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.zoo import Built, Case, Cases, Tensors
from pyro_symmetric.networks import import_torchvision

# What configurations call these sizes; each takes those that it knows.
SMALL = {
    "vocab_size": 50, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32,
    "max_position_embeddings": 32, "head_dim": 6, "num_key_value_heads": 2, "d_model": 24, "d_ff": 32, "d_kv": 6,
    "num_layers": 2, "num_heads": 4, "n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 32, "dim": 24,
    "n_layers": 2, "n_heads": 4, "hidden_dim": 32, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32,
    "embedding_size": 24, "ffn_dim": 32, "word_embed_proj_dim": 24, "num_local_experts": 4, "num_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "state_size": 4,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "use_cache": False,
    "image_size": 32, "patch_size": 8, "d_inner": 32, "emb_dim": 24, "num_mel_bins": 8, "max_source_positions": 12,
    "max_target_positions": 16, "sliding_window": 8, "n_groups": 1, "attention_layers": ["global", "local"],
    "attention_types": [[["global", "local"], 1]], "layer_types": None, "n_inner": 32, "time_step_rank": 4,
}  # fmt: skip
LANGUAGE = """
    albert bert camembert convbert deberta-v2 distilbert electra ernie esm fnet funnel ibert layoutlm
    megatron-bert mpnet nystromformer nomic_bert rembert roberta roberta-prelayernorm roformer squeezebert xlm
    xlm-roberta modernbert
"""
CAUSAL = """
    bloom codegen cohere cohere2 ctrl deepseek_v2 falcon gemma gemma2 gemma3_text glm gpt2 gpt_bigcode gpt_neo
    gpt_neox gptj granite granitemoe helium llama mamba mamba2 mistral mixtral mpt nemotron olmo olmo2 olmoe
    openai-gpt opt phi phi3 qwen2 qwen2_moe qwen3 qwen3_moe rwkv smollm3 stablelm starcoder2 xglm recurrent_gemma
    jamba
"""
ENCODER_DECODER = (
    "t5 mt5 bart mbart marian pegasus blenderbot m2m_100 switch_transformers"
)
VISION = """
    vit deit beit dinov2 dinov2_with_registers ijepa vit_msn yolos siglip_vision_model clip_vision_model
"""


def transformers() -> Cases:
    import_torchvision()
    import transformers as hf

    for kinds, auto in ((LANGUAGE, hf.AutoModel), (CAUSAL, hf.AutoModelForCausalLM)):
        for kind in kinds.split():
            yield Case(kind, lambda kind=kind, auto=auto: of_tokens(kind, auto))
    for kind in ENCODER_DECODER.split():
        yield Case(kind, lambda kind=kind: of_two_sequences(kind))
    for kind in VISION.split():
        yield Case(kind, lambda kind=kind: of_images(kind))
    yield Case("whisper", whisper)


def config(kind: str) -> Any:
    """A small configuration of a kind of network: sizes that it doesn't know are left
    out.
    """
    from transformers import AutoConfig

    default = AutoConfig.for_model(kind)
    names = {*vars(default), *getattr(default, "attribute_map", {})}
    sizes = {key: value for key, value in SMALL.items() if key in names}
    if isinstance(getattr(default, "intermediate_size", None), list):
        sizes.pop("intermediate_size")
    return AutoConfig.for_model(kind, **sizes)


def tokens(length: int = 6) -> torch.Tensor:
    return torch.randint(3, 50, (2, length))


def of_tokens(kind: str, auto: Any) -> Built:
    return Tensors(auto.from_config(config(kind)), ("input_ids",)), (tokens(),)


def of_two_sequences(kind: str) -> Built:
    from transformers import AutoModelForSeq2SeqLM

    net = AutoModelForSeq2SeqLM.from_config(config(kind))
    return Tensors(net, ("input_ids", "decoder_input_ids"), use_cache=False), (
        tokens(),
        tokens(5),
    )


def of_images(kind: str) -> Built:
    from transformers import AutoModel

    return Tensors(AutoModel.from_config(config(kind)), ("pixel_values",)), (
        torch.randn(2, 3, 32, 32),
    )


def whisper() -> Built:
    from transformers import WhisperForConditionalGeneration

    net = WhisperForConditionalGeneration(config("whisper"))
    return Tensors(net, ("input_features", "decoder_input_ids"), use_cache=False), (
        torch.randn(2, 8, 24),
        tokens(),
    )
