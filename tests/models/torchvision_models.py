"""Models of torchvision, with its compiled operators off."""

from functools import partial

import torch
from harness import Model
from torch import nn


def _images(size):
    return lambda n, t: (torch.randn(n, 3, size, size),)


def _video(n, t):
    return (torch.randn(n, 3, 4, 32, 32),)


def _of(name, **options):
    def build():
        from torchvision import models

        return getattr(models, name)(num_classes=3, **options)

    return build


def _resnet(block, **options):
    def build():
        from torchvision.models import resnet

        model = resnet.ResNet(getattr(resnet, block), (1, 1, 1, 1), num_classes=3, width_per_group=8, **options)
        return model

    return build


def _group_norm_resnet():
    from torchvision.models import resnet

    return resnet.ResNet(resnet.BasicBlock, (1, 1, 1, 1), num_classes=3, norm_layer=partial(nn.GroupNorm, 4))


def _convnext():
    from torchvision.models import convnext

    blocks = [convnext.CNBlockConfig(8, 12, 1), convnext.CNBlockConfig(12, None, 1)]
    return convnext.ConvNeXt(blocks, stochastic_depth_prob=0.0, num_classes=3)


def _swin(block):
    def build():
        from torchvision.models import swin_transformer as swin

        merging = swin.PatchMergingV2 if block.endswith("V2") else swin.PatchMerging
        return swin.SwinTransformer(
            [4, 4], 8, [2, 1], [2, 2], [4, 4], num_classes=3, stochastic_depth_prob=0.0, block=getattr(swin, block),
            downsample_layer=merging,
        )  # fmt: skip

    return build


def _swin3d():
    from torchvision.models.video import swin_transformer as swin

    return swin.SwinTransformer3d([2, 4, 4], 8, [2, 1], [2, 2], [2, 4, 4], num_classes=3, stochastic_depth_prob=0.0)


def _vit():
    from torchvision.models import VisionTransformer

    return VisionTransformer(16, 8, 2, 2, 8, 12, num_classes=3)


def _maxvit():
    from torchvision.models.maxvit import MaxVit

    return MaxVit((64, 64), 8, 2, [8, 8], [1, 1], 4, 0.0, num_classes=3)


def _densenet():
    from torchvision.models import DenseNet

    return DenseNet(growth_rate=4, block_config=(1, 1), num_init_features=8, num_classes=3)


def _efficientnet():
    from torchvision.models import efficientnet

    blocks = [
        efficientnet.FusedMBConvConfig(2, 3, 1, 8, 8, 1),
        efficientnet.MBConvConfig(2, 3, 2, 8, 12, 1),
    ]
    return efficientnet.EfficientNet(blocks, 0.0, stochastic_depth_prob=0.0, num_classes=3, last_channel=16)


def _video_resnet(name):
    def build():
        from torchvision.models.video import resnet

        conv = {"r3d": resnet.Conv3DSimple, "mc3": resnet.Conv3DNoTemporal, "r2plus1d": resnet.Conv2Plus1D}[name]
        stem = resnet.BasicStem if name != "r2plus1d" else resnet.R2Plus1dStem

        class Small(nn.Module):
            """One block; the whole network has 33 million weights."""

            def __init__(self):
                super().__init__()
                self.stem, self.block = stem(), resnet.BasicBlock(64, 64, conv)
                self.head = nn.Linear(64, 3)

            def forward(self, x):
                return self.head(self.block(self.stem(x)).mean((2, 3, 4)))

        return Small()

    return build


def _segmentation(head):
    def build():
        from torchvision.models import segmentation

        if head == "FCN":
            return segmentation.fcn.FCNHead(8, 3)
        return segmentation.deeplabv3.DeepLabHead(8, 3, atrous_rates=(2, 3, 4))

    return build


MODELS = {
    "squeezenet1_1": Model(_of("squeezenet1_1", dropout=0.0), _images(64)),
    "shufflenet_v2_x0_5": Model(_of("shufflenet_v2_x0_5"), _images(32)),
    "mobilenet_v2": Model(_of("mobilenet_v2", width_mult=0.1, dropout=0.0), _images(32)),
    "mobilenet_v3_small": Model(_of("mobilenet_v3_small", width_mult=0.25, dropout=0.0), _images(32)),
    "mnasnet0_5": Model(_of("mnasnet0_5", dropout=0.0), _images(32)),
    "regnet_y_400mf": Model(_of("regnet_y_400mf"), _images(32)),
    "ResNet (Bottleneck)": Model(_resnet("Bottleneck"), _images(32)),
    "ResNet (GroupNorm)": Model(_group_norm_resnet, _images(32)),
    "DenseNet": Model(_densenet, _images(32)),
    "EfficientNet": Model(_efficientnet, _images(32)),
    "ConvNeXt": Model(_convnext, _images(32)),
    "SwinTransformer": Model(_swin("SwinTransformerBlock"), _images(32)),
    "SwinTransformer V2": Model(_swin("SwinTransformerBlockV2"), _images(32)),
    "SwinTransformer3d": Model(_swin3d, _video),
    "VisionTransformer": Model(_vit, _images(16)),
    "MaxVit": Model(_maxvit, _images(64)),
    "r3d": Model(_video_resnet("r3d"), _video),
    "mc3": Model(_video_resnet("mc3"), _video),
    "r2plus1d": Model(_video_resnet("r2plus1d"), _video),
    "FCNHead": Model(_segmentation("FCN"), lambda n, t: (torch.randn(n, 8, 6, 6),)),
    "DeepLabHead": Model(_segmentation("DeepLab"), lambda n, t: (torch.randn(n, 8, 6, 6),)),
}
