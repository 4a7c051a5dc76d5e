"""Networks of torchvision and timm: classification, segmentation, video, optical flow,
detection.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from benchmarks.zoo import Built, Case, Cases
from pyro_symmetric.networks import import_torchvision

# Name -> pixels a side: smaller than the networks were made for, if they allow it.
TORCHVISION = {
    64: """convnext_tiny densenet121 efficientnet_b0 efficientnet_b1 efficientnet_v2_s googlenet mnasnet0_5 mnasnet1_0
        mobilenet_v2 mobilenet_v3_large mobilenet_v3_small regnet_x_400mf regnet_y_400mf regnet_y_800mf resnet18
        resnet34 resnet50 resnext50_32x4d shufflenet_v2_x0_5 shufflenet_v2_x1_0
        squeezenet1_0 squeezenet1_1 vgg11 vgg11_bn
        wide_resnet50_2""",
    96: "alexnet",
    224: "maxvit_t swin_t vit_b_16",
    256: "swin_v2_t",
    299: "inception_v3",
}
SEGMENTATION = "fcn_resnet50 deeplabv3_mobilenet_v3_large lraspp_mobilenet_v3_large"
VIDEO = "r3d_18 mc3_18 r2plus1d_18 s3d"
TIMM = {
    64: """resnet10t convnextv2_atto mobilenetv3_small_050 regnetx_002 ghostnet_050 eca_resnet33ts seresnext26t_32x4d
        poolformer_s12 edgenext_xx_small nfnet_l0 hrnet_w18_small dla34 hgnetv2_b0 tresnet_m vovnet39a ghostnetv2_100
        dpn68 res2net50_14w_8s skresnet34 resnest26d tf_mixnet_s bat_resnext26ts fasternet_t0 starnet_s1 mambaout_femto
        mobilenetv4_conv_small repvit_m0_9 convmixer_768_32 rexnet_100 selecsls42b darknet53 cspresnet50 xception41""",
    224: """efficientformer_l1 coat_tiny coatnet_nano_rw_224 davit_tiny efficientvit_b0 focalnet_tiny_srf gcvit_xxtiny
        inception_next_tiny lambda_resnet26t mvitv2_tiny nest_tiny pit_ti_224 pvt_v2_b0 rdnet_tiny shvit_s1
        swiftformer_xs swin_tiny_patch4_window7_224 tiny_vit_5m_224 tnt_s_patch16_224 twins_svt_small visformer_tiny
        xcit_nano_12_p16_224 vit_tiny_patch16_224 deit3_small_patch16_224 mixer_s32_224 resmlp_12_224 gmlp_s16_224
        hiera_tiny_224 poolformerv2_s12 convformer_s18 efficientvit_m0 levit_128s efficientformerv2_s0""",
    240: "crossvit_9_240",
    256: "mobilevit_xxs fastvit_t8 mobilevitv2_050 halonet26t botnet26t_256 maxvit_rmlp_pico_rw_256",
}
TIMM_REDUCED: dict[str, dict[str, Any]] = {
    "cait_xxs24_224": {"depth": 3},
    "eva02_tiny_patch14_224": {"depth": 2},
    "volo_d1_224": {},
}


class Maps(nn.Module):
    """The main map of a network for segmentation."""

    def __init__(self, net: nn.Module):
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)["out"]


def images(side: int) -> tuple[torch.Tensor, ...]:
    """Batch statistics of few numbers magnify rounding: small images come in larger
    batches.
    """
    return (torch.randn(8 if side < 96 else 2, 3, side, side),)


def torchvision() -> Cases:
    models = import_torchvision().models

    def classifier(name: str, side: int) -> Built:
        options = (
            {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
        )
        return models.get_model(name, weights=None, **options), images(side)

    for side, names in TORCHVISION.items():
        for name in names.split():
            yield Case(name, lambda name=name, side=side: classifier(name, side))
    for name in SEGMENTATION.split():
        yield Case(
            name,
            lambda name=name: (
                Maps(models.get_model(name, weights=None, weights_backbone=None)),
                (torch.randn(2, 3, 64, 64),),
            ),
        )
    for name in VIDEO.split():
        side = 64 if name != "s3d" else 96
        yield Case(
            name,
            lambda name=name, side=side: (
                models.get_model(name, weights=None),
                (torch.randn(2, 3, 14, side, side),),
            ),
        )
    yield Case("fasterrcnn_mobilenet_v3_large_fpn", lambda: (
        models.get_model("fasterrcnn_mobilenet_v3_large_fpn", weights=None, weights_backbone=None),
        ([torch.randn(3, 64, 64), torch.randn(3, 64, 64)],),
    ))  # fmt: skip


def timm() -> Cases:
    import_torchvision()
    import timm as library

    def built(name: str, side: int, **options: Any) -> Built:
        return library.create_model(name, num_classes=7, **options), images(side)

    for side, names in TIMM.items():
        for name in names.split():
            yield Case(name, lambda name=name, side=side: built(name, side))
    for name, options in TIMM_REDUCED.items():
        yield Case(name, lambda name=name, options=options: built(name, 224, **options))
