"""The layer of each parameter of a network."""

import itertools

import pytest

from classify.models import registry
from classify.models.depths import depths
from classify.models.registry import NetSpec


def layers(name, **args):
    return depths(registry.on_meta_device(NetSpec(name, 10, (224, 224), args or None)))


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("net", {"conv1.weight": 1, "conv2.bias": 2, "fc1.weight": 3, "fc2.weight": 4, "fc3.bias": 5}),
        ("resnet18", {"conv1.weight": 0, "bn1.bias": 0, "layer1.0.bn1.bias": 1, "layer1.1.conv1.weight": 2,
                      "layer4.1.conv2.weight": 8, "fc.weight": 9}),
        ("vit_b_16", {"class_token": 0, "conv_proj.bias": 0, "encoder.pos_embedding": 0,
                      "encoder.layers.encoder_layer_0.ln_1.weight": 1,
                      "encoder.layers.encoder_layer_11.mlp.3.bias": 12, "encoder.ln.weight": 12,
                      "heads.head.bias": 13}),
        ("timm/vit_tiny_patch16_224", {"cls_token": 0, "patch_embed.proj.bias": 0, "blocks.0.norm1.weight": 1,
                                       "blocks.11.mlp.fc2.bias": 12, "norm.weight": 12, "head.weight": 13}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_layers_are_counted_from_the_image_to_the_head(name, wanted):
    found = layers(name)
    offset = 1 if name == "net" else 0  # which has nothing before its first layer
    assert {key: found[key] for key in wanted} == {key: each - offset for key, each in wanted.items()}
    assert sorted(set(found.values())) == list(range(max(found.values()) + 1))


@pytest.mark.parametrize("name", ["convnext_tiny", "mobilenet_v3_small", "vgg11", "airbench", "densenet121"])
def test_any_network_has_layers_and_its_head_is_the_last(name):
    found = layers(name)
    outline = registry.on_meta_device(NetSpec(name, 10, (224, 224)))
    names = [key for key, _ in outline.named_parameters()]
    assert list(found) == names
    assert max(found.values()) >= 4
    assert found[names[0]] == 0 and found[names[-1]] == max(found.values())
    assert all(before <= after for before, after in itertools.pairwise(found.values()))
