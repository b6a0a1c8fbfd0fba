"""The page classifies the bytes of dropped images, and answers no other page, no other host, no path."""

import http.client
import json
import pathlib
import signal
import threading

import numpy as np
import pytest
import torch
from folders import save, table
from PIL import Image
from support import error_line, free_port, started, time_limit, wait_until
from written_networks import write_checkpoint

import checkpoint
from net import Net
from workbench.publish import forms, serve

CLASSES = ["a", "b\x1b", "c"]


@pytest.fixture(scope="module")
def network(tmp_path_factory) -> pathlib.Path:
    torch.manual_seed(0)
    return (
        write_checkpoint(tmp_path_factory.mktemp("served") / "checkpoint", "net", Net(3), CLASSES) / "net.pt"
    )


@pytest.fixture(scope="module")
def port(network):
    """The port of a page in a thread."""
    with serve.Server(forms.read(network), network, 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


def ask(
    port: int, method: str, content: bytes = b"", path: str = "/", **headers: str
) -> tuple[int, dict, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    connection.request(
        method, path, content or None, {name.replace("_", "-"): headers[name] for name in headers}
    )
    answer = connection.getresponse()
    return answer.status, dict(answer.getheaders()), answer.read().decode()


def test_invalid_and_taken_ports_are_one_line(network, port, capsys):
    for number, line in (
        (-1, "must be from 0 to 65535"),
        (70000, "must be from 0"),
        (port, "cannot be served on ("),
    ):
        assert checkpoint.main(["serve", str(network), "--port", str(number)]) == 2
        (said,) = capsys.readouterr().err.splitlines()
        assert said.startswith(f"checkpoint.py: --port: {number}: {line}")


@pytest.mark.parametrize("is_given", [True, False])
def test_the_command_serves_until_it_is_interrupted(network, is_given):
    """Port 0 takes a free port, and the line names it."""
    number = free_port() if is_given else 0
    with started(["checkpoint.py", "serve", str(network), "--port", str(number)]) as page:
        wait_until(lambda: page.stdout.endswith("\n"), page)
        address, said = page.stdout.split(maxsplit=1)
        taken = int(address.removeprefix("http://127.0.0.1:"))
        assert said == "(Ctrl+C ends it)\n" and taken == (number or taken)
        assert ask(taken, "GET")[0] == 200
        page.send_signal(signal.SIGINT)
        assert page.wait(time_limit()) == 130
        assert page.stderr == "checkpoint.py: interrupted\n"


def test_a_large_image_is_refused_before_it_is_decoded(network, tmp_path, monkeypatch):
    classifier = forms.read(network)
    large = save(tmp_path / "large.png", Image.new("1", (9000, 9000)))
    monkeypatch.setattr(Image.Image, "load", None)  # it decodes
    line = error_line(serve.answer, classifier, large.read_bytes())
    assert line == "image: 81 megapixels are more than 50; give a smaller image"


def test_the_page_classifies_as_predict_does(network, port, tmp_path, capsys):
    pixels = np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8)
    photo = save(tmp_path / "photo.png", Image.fromarray(pixels))
    assert checkpoint.main(["predict", str(network), str(photo), "--json", "--unknown"]) == 0
    (wanted,) = json.loads(capsys.readouterr().out)
    status, _, said = ask(port, "POST", photo.read_bytes(), Origin=f"http://127.0.0.1:{port}")
    found = json.loads(said)["classes"]
    assert json.loads(said)["unknown"] == wanted["unknown"]
    assert status == 200 and found[0][0] == wanted["class"].replace("\x1b", "\\x1b")
    values = sorted(wanted["probabilities"].values(), reverse=True)
    assert [each[1] for each in found] == pytest.approx(values, abs=1e-6)


@pytest.mark.parametrize("threshold", [0.0, 1.0])
def test_the_page_says_unknown_below_the_threshold(threshold, network, tmp_path):
    classifier = forms.read(network)
    classifier.description["confidence"]["confidence_threshold"] = threshold
    photo = save(tmp_path / "photo.png", Image.new("RGB", (40, 40)))
    assert serve.answer(classifier, photo.read_bytes())["unknown"] == bool(threshold)


def test_the_page_loads_nothing_and_is_framed_by_none(port):
    status, headers, said = ask(port, "GET")
    assert status == 200 and "<title>net.pt</title>" in said and "://" not in said
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
    assert not [name for name in headers if name.lower().startswith("access-control")]
    assert ask(port, "GET", path="/net.pt")[0] == ask(port, "GET", path="/../net.json")[0] == 404


@table(
    "host, origin, is_own",
    address=("127.0.0.1:7860", None, True),
    name=("localhost:7860", "http://localhost:7860", True),
    forwarded=("localhost", "http://localhost", True),
    no_host=(None, None, False),
    rebound=("evil.example:7860", None, False),
    rebound_page=("evil.example", "http://evil.example", False),
    lengthened=("127.0.0.1.evil.example", None, False),
    within=("evil.example:127.0.0.1", None, False),
    other_site=("127.0.0.1:7860", "http://evil.example", False),
    other_port=("127.0.0.1:7860", "http://127.0.0.1:8000", False),
    other_scheme=("127.0.0.1:7860", "https://127.0.0.1:7860", False),
    a_file=("127.0.0.1:7860", "null", False),
)
def test_other_hosts_and_pages_are_refused(host, origin, is_own, port):
    assert serve.is_of_this_page(host, origin) == is_own
    headers = {"Host": host or "", **({"Origin": origin} if origin else {})}
    for method in ("GET", "POST"):
        status, answered, said = ask(port, method, b"", **headers)
        assert (status == 403) != is_own, said
        assert not [name for name in answered if name.lower().startswith("access-control")]


@table(
    "content, status, line",
    a_path=(b'{"data": [{"path": "FILE"}]}', 422, "image: not a readable image; give another"),
    an_address=(b"http://127.0.0.1/photo.png", 422, "image: not a readable image; give another"),
    nothing=(b"", 422, "image: not a readable image; give another"),
)
def test_a_request_that_brings_no_image_is_refused(content, status, line, port, tmp_path):
    secret = save(tmp_path / "secret.png", 1)
    content = content.replace(b"FILE", bytes(secret))
    for path in ("/", f"/file={secret}"):
        found, _, said = ask(
            port, "POST", content, path, Content_Type="application/json", Content_Length=str(len(content))
        )
        assert (found, json.loads(said)) == (status, {"error": line})


def test_an_image_in_a_form_is_refused_with_a_remedy(port):
    status, _, said = ask(
        port, "POST", b"", "/", Content_Type="multipart/form-data; boundary=x", Content_Length="0"
    )
    assert (status, json.loads(said)["error"]) == (
        415,
        "image: is part of a form; send the file's bytes alone, e.g. curl --data-binary @photo.jpg",
    )


@table(
    "length, status",
    none=(None, 411),
    negative=("-1", 411),
    chunked=("x", 411),
    large=(str(serve.MOST_BYTES + 1), 413),
    huge=("9" * 5000, 413),
)
def test_an_image_without_a_fair_length_is_refused_before_it_is_read(length, status, port):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    connection.putrequest("POST", "/")
    if length:
        connection.putheader("Content-Length", length)
    connection.endheaders()
    assert connection.getresponse().status == status
