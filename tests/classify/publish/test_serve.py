"""The page classifies dropped images, as gradio's client asks it."""

import json
import pathlib
import signal
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from support import error_line, free_port, started, time_limit, wait_until
from written_networks import write_checkpoint

import checkpoint
from classify.publish import forms, serve
from net import Net


@pytest.fixture
def network(tmp_path) -> pathlib.Path:
    torch.manual_seed(0)
    return write_checkpoint(tmp_path / "checkpoint", "net", Net(3), ["a", "b", "c"]) / "net.pt"


def test_missing_gradio_and_invalid_ports_are_one_line(network, monkeypatch, capsys):
    for port in ("0", "70000"):
        assert checkpoint.main(["serve", str(network), "--port", port]) == 2
        assert f"--port: {port}: must be from 1 to 65535" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "gradio", None)
    assert checkpoint.main(["serve", str(network)]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("checkpoint.py: serve: needs gradio, ") and said.endswith("; pip install gradio")


def test_a_large_image_is_refused_before_it_is_decoded(network, tmp_path, monkeypatch):
    classifier = forms.read(network)
    Image.new("1", (9000, 9000)).save(tmp_path / "large.png")
    monkeypatch.setattr(Image.Image, "load", None)  # it decodes
    line = error_line(serve.probabilities, classifier, str(tmp_path / "large.png"))
    assert line.endswith("large.png: 81 megapixels are more than 50; give a smaller image")


def test_the_page_classifies_as_predict_does(network, tmp_path, capsys):
    client = pytest.importorskip("gradio_client")
    pixels = np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "photo.png")
    (tmp_path / "bad.png").write_text("no image")
    (tmp_path / "big.png").write_bytes(bytes(serve.MOST_BYTES + 1))
    port = str(free_port())
    with started(["checkpoint.py", "serve", str(network), "--port", port]) as page:
        wait_until(lambda: page.stdout.startswith(f"http://127.0.0.1:{port} "), page)
        asked = client.Client(f"http://127.0.0.1:{port}", verbose=False, analytics_enabled=False)
        answer = asked.predict(client.handle_file(str(tmp_path / "photo.png")), api_name="/classify")
        with pytest.raises(Exception, match="not a readable image"):
            asked.predict(client.handle_file(str(tmp_path / "bad.png")), api_name="/classify")
        with pytest.raises(Exception, match=r"413|exceed"):
            asked.predict(client.handle_file(str(tmp_path / "big.png")), api_name="/classify")
        assert checkpoint.main(["serve", str(network), "--port", port]) == 2
        said = capsys.readouterr().err.splitlines()[-1]
        assert said.startswith(f"checkpoint.py: --port: {port}: cannot be served on (")
        page.send_signal(signal.SIGINT)
        page.wait(time_limit())
        assert "Traceback" not in page.stderr
    assert checkpoint.main(["predict", str(network), str(tmp_path / "photo.png"), "--json"]) == 0
    (wanted,) = json.loads(capsys.readouterr().out)
    found = {each["label"]: each["confidence"] for each in answer["confidences"]}
    assert found == pytest.approx(wanted["probabilities"], abs=1e-6)
    assert answer["label"] == wanted["class"]
