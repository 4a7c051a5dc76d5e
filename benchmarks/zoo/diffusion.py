"""Networks of diffusers, of reduced width: U-Nets and autoencoders like Stable Diffusion's, and transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from benchmarks.zoo import Built, Case, Cases, Tensors
from pyro_symmetric._torchvision import import_torchvision

# The shape of Stable Diffusion 1.5; its widths are 320, 640, 1280, 1280, and its context's is 768.
STABLE = {
    "in_channels": 4, "out_channels": 4, "layers_per_block": 2, "attention_head_dim": 8, "sample_size": 16,
    "down_block_types": ("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
}  # fmt: skip
KL = {
    "in_channels": 3, "out_channels": 3, "latent_channels": 4, "layers_per_block": 2, "sample_size": 32,
    "down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4,
}  # fmt: skip


def unet(widths: tuple[int, ...] = (16, 32, 64, 64), context: int = 24, groups: int = 4) -> Built:
    """A U-Net with cross-attention; by default twenty times narrower than Stable Diffusion's."""
    from diffusers import UNet2DConditionModel

    net = UNet2DConditionModel(block_out_channels=widths, cross_attention_dim=context, norm_num_groups=groups, **STABLE)
    inputs = torch.randn(2, 4, 16, 16), torch.tensor([3, 700]), torch.randn(2, 5, context)
    return Tensors(net, return_dict=False), inputs


def autoencoder(widths: tuple[int, ...] = (8, 16, 32, 32), groups: int = 4) -> Built:
    """An autoencoder with attention in the middle; by default sixteen times narrower than Stable Diffusion's."""
    from diffusers import AutoencoderKL

    net = AutoencoderKL(block_out_channels=widths, norm_num_groups=groups, **KL)
    return Tensors(net, return_dict=False), (torch.randn(2, 3, 32, 32),)


def diffusers() -> Cases:
    import_torchvision()
    import diffusers as library

    yield Case("UNet2DConditionModel", unet)
    yield Case("AutoencoderKL", autoencoder)
    small = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2, "sample_size": 8}
    image, time = torch.randn(2, 4, 8, 8), torch.tensor([3, 700])

    def case(name: str, options: dict[str, Any], *inputs: Any) -> Case:
        def build() -> Built:
            net: nn.Module = getattr(library, name)(**options)
            return (Tensors(net) if name == "UVit2DModel" else Tensors(net, return_dict=False)), inputs

        return Case(name, build)

    yield case(
        "UNet2DModel",
        {"sample_size": 16, "block_out_channels": (8, 16, 16, 32), "norm_num_groups": 4, "attention_head_dim": 4},
        torch.randn(2, 3, 16, 16), time,
    )  # fmt: skip
    yield case(
        "UNet1DModel",
        {"sample_size": 64, "block_out_channels": (32, 32, 64), "in_channels": 2, "extra_in_channels": 16},
        torch.randn(2, 2, 64),
        time,
    )
    yield case("VQModel", {"block_out_channels": (8, 16), "norm_num_groups": 4, "num_vq_embeddings": 16,
        "down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2},
        torch.randn(2, 3, 16, 16))  # fmt: skip
    yield case("AutoencoderTiny", {"encoder_block_out_channels": (8,) * 4, "decoder_block_out_channels": (8,) * 4},
        torch.randn(2, 3, 32, 32))  # fmt: skip
    yield case("DiTTransformer2DModel", {**small, "in_channels": 4, "num_embeds_ada_norm": 10},
        image, time, torch.tensor([1, 2]))  # fmt: skip
    yield case("SD3Transformer2DModel", {
        **small, "joint_attention_dim": 12, "caption_projection_dim": 16, "pooled_projection_dim": 10,
        "in_channels": 4, "out_channels": 4, "pos_embed_max_size": 8,
    }, image, torch.randn(2, 5, 12), torch.randn(2, 10), time)  # fmt: skip
    yield case("StableAudioDiTModel", {"sample_size": 16, "in_channels": 4, "num_layers": 2, "attention_head_dim": 8,
        "num_attention_heads": 2, "num_key_value_attention_heads": 2, "out_channels": 4, "cross_attention_dim": 12,
        "time_proj_dim": 16, "global_states_input_dim": 12, "cross_attention_input_dim": 12},
        torch.randn(2, 4, 16), time.float(), torch.randn(2, 5, 12), torch.randn(2, 1, 12))  # fmt: skip
    yield case("UVit2DModel", {"hidden_size": 16, "cond_embed_dim": 12, "micro_cond_encode_dim": 4,
        "block_out_channels": 16,
        "micro_cond_embed_dim": 32, "encoder_hidden_size": 12, "vocab_size": 20, "codebook_size": 18,
        "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24, "in_channels": 16,
        "block_num_heads": 2, "num_res_blocks": 1, "sample_size": 4},
        torch.randint(0, 18, (2, 4, 4)), torch.randn(2, 5, 12), torch.randn(2, 12), torch.randn(2, 5))  # fmt: skip
