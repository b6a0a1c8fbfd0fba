"""Heat maps show the pixels that a class depends on, in any thread, in serve, predict and the page."""

import base64
import io
import threading

import numpy as np
import pytest
import torch
from folders import save
from PIL import Image
from support import error_line
from torch import nn
from written_networks import write_checkpoint

import checkpoint
from net import Net
from workbench.publish import forms, heat_maps, serve
from workbench.publish.network import Classifier

SIDE = 6


class Halves(nn.Module):
    """Adds up the red of the left half for class 0, and of the right half for class 1."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 1, 1, bias=False)
        with torch.no_grad():
            self.convolution.weight.copy_(torch.tensor([1.0, 0, 0]).view(1, 3, 1, 1))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features = self.convolution(images)
        halves = [features[..., : SIDE // 2], features[..., SIDE // 2 :]]
        return torch.cat([half.sum((2, 3)) for half in halves], 1)


def classifier(net: nn.Module | None) -> Classifier:
    return Classifier({}, lambda inputs: inputs, net)


def test_a_map_is_hot_where_the_class_is():
    inputs = torch.zeros(2, 3, SIDE, SIDE)
    inputs[:, 0] = 1.0
    heat = heat_maps.heat_maps(classifier(Halves()), inputs, torch.tensor([0, 1]))
    left, right = heat[:, :, : SIDE // 2], heat[:, :, SIDE // 2 :]
    assert (left[0] == 1).all() and (right[0] == 0).all()
    assert (left[1] == 0).all() and (right[1] == 1).all()
    cold = heat_maps.heat_maps(classifier(Halves()), -inputs, torch.tensor([0, 1]))
    assert (cold == 0).all()
    image = np.full((SIDE, SIDE, 3), 100, np.uint8)
    drawn = heat_maps.overlay(image, heat[0].numpy())
    assert (drawn[:, SIDE // 2 :] == 100).all() and (drawn[:, : SIDE // 2, 0] > 150).all()


def test_networks_without_gradients_or_convolutions_are_refused():
    inputs, classes = torch.zeros(1, 3, SIDE, SIDE), torch.tensor([0])
    for net, line in (
        (None, "heat map: needs gradients, which this format cannot give; use .pt or .safetensors"),
        (nn.Sequential(nn.Flatten(), nn.Linear(3 * SIDE**2, 2)), "heat map: the network has no convolution"),
    ):
        assert error_line(heat_maps.heat_maps, classifier(net), inputs, classes).startswith(line)


def test_other_threads_that_use_the_network_change_no_map():
    net, main, ended = Halves(), threading.current_thread(), threading.Event()
    inputs, classes = torch.rand(1, 3, SIDE, SIDE), torch.tensor([0])
    wanted = heat_maps.heat_maps(classifier(net), inputs, classes)

    def classify() -> None:
        with torch.no_grad():
            net(torch.zeros(5, 3, SIDE, SIDE))
        ended.set()

    def in_between(*_: object) -> None:
        if threading.current_thread() is main:
            thread = threading.Thread(target=classify)
            thread.start()
            thread.join()

    net.register_forward_hook(in_between)
    assert torch.equal(heat_maps.heat_maps(classifier(net), inputs, classes), wanted)
    assert ended.is_set()


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("heat") / "checkpoint"
    return write_checkpoint(folder, "net", Net(3), ["a<b>", "b", "c"]) / "net.pt"


def test_serve_and_predict_show_the_map(network, tmp_path, capsys):
    pixels = np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8)
    photo = save(tmp_path / "<photo>.png", Image.fromarray(pixels))
    found = serve.answer(forms.read(network), photo.read_bytes())
    heat = np.asarray(Image.open(io.BytesIO(base64.b64decode(found["heat"]))))
    seen = forms.read(network).description["input"]
    assert heat.shape == (seen["height"], seen["width"], 3)
    page = tmp_path / "heat.html"
    assert checkpoint.main(["predict", str(network), str(photo), "--heat", str(page)]) == 0
    text = page.read_text()
    assert found["heat"] in text and "<photo>" not in text and "&lt;photo&gt;.png" in text
    onnx = tmp_path / "net.onnx"
    assert checkpoint.main(["export", str(network.parent), str(onnx)]) == 0
    capsys.readouterr()
    assert checkpoint.main(["predict", str(onnx), str(photo), "--heat", str(page)]) == 2
    assert "needs gradients, which this format cannot give" in capsys.readouterr().err
    assert "heat" not in serve.answer(forms.read(onnx), photo.read_bytes())
