"""A web page that only this machine can open: a person drops an image on it and sees the image's classes.

A request contains the bytes of an image, which stay in memory: no request can name a file or an address.
"""

from __future__ import annotations

import io
import json
import pathlib
import socketserver
import sys
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Any

import torch

from classify.config.command_line import called
from classify.config.metric_table import THRESHOLD
from classify.config.rules import NUMBER
from classify.images.decode import MissingPackage, decode, open_image
from classify.reports import classification_log
from deepspeed_trial.errors import InvalidInput, one_line, printable
from workbench.publish import heat_maps, scoring
from workbench.publish.network import Classifier
from workbench.reports import page, recorded_run

HOST = "127.0.0.1"
NAMES = (HOST, "localhost")  # the names of this machine for its browsers
MOST_BYTES, MOST_MEGAPIXELS = 20 * 2**20, 50  # the maxima for an image
AT_ONCE = 4  # images in memory at a time
EXAMPLES = 12  # images of the run on the page
PATIENCE = 20  # seconds that a client may be silent
TEMPLATE = pathlib.Path(__file__).with_name("serve.html.jinja")
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; connect-src 'self'; img-src blob: data:;"
    " script-src 'unsafe-inline'; style-src 'unsafe-inline'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
}


def run(classifier: Classifier, net: pathlib.Path, port: int) -> None:
    """Serve the page to this machine until an interrupt.

    Args:
        classifier: the network.
        net: the network's file; if the file is in a run's folder, the page shows images of the run.
        port: the port of 127.0.0.1; 0 takes a free port.

    Raises:
        InvalidInput: if the port is invalid or taken.
    """
    if not 0 <= port <= 65535:
        raise InvalidInput(f"--port: {port}: must be from 0 to 65535; give another")
    try:
        server = Server(classifier, net, port)
    except OSError as error:
        what = f"cannot be served on ({one_line(error)})"
        raise InvalidInput(f"--port: {port}: {what}; give another port") from error
    with server:
        print(f"http://{HOST}:{server.server_address[1]}  (Ctrl+C ends it)", flush=True)
        server.serve_forever()


def answer(classifier: Classifier, content: bytes) -> dict[str, Any]:
    """Return the answer to the bytes of an image file.

    Returns:
        ``classes``: pairs of a class and its probability, the most probable first. ``unknown``: whether the
        network is unsure, always False for a network without a threshold. ``labels``: the labels that reach
        their thresholds; None if the network gives an image one label. ``heat``: the heat map of the first
        class, a picture in base64; missing if the network has no heat maps.

    Raises:
        InvalidInput: if the image has too many pixels, or cannot be read.
    """
    try:
        with open_image(io.BytesIO(content)) as opened:  # no pixel is decoded yet
            pixels = opened.width * opened.height
    except MissingPackage:
        raise
    except Exception as error:  # Pillow's formats raise different classes
        raise InvalidInput("image: not a readable image; give another") from error
    if pixels > MOST_MEGAPIXELS * 1e6:
        much = f"{pixels / 1e6:,.0f} megapixels are more than {MOST_MEGAPIXELS}"
        raise InvalidInput(f"image: {much}; give a smaller image")
    size, fit = scoring.fitting(classifier.description)
    threshold = (classifier.description.get("confidence") or {}).get(THRESHOLD, 0.0)
    images = torch.from_numpy(decode(content, size, "image", fit))[None]
    (row,), (is_unknown,) = scoring.classify(classifier, images, threshold=threshold)
    names = [printable(name) for name in classifier.description["classes"]]
    found: dict[str, Any] = {
        "classes": sorted(zip(names, row.tolist(), strict=True), key=lambda each: -each[1]),
        "unknown": bool(is_unknown),
        "labels": None if classifier.thresholds is None else [*map(printable, classifier.labels(row))],
    }
    try:
        ((_, heat),) = heat_maps.drawn(classifier, images, row.argmax()[None])
        found["heat"] = classification_log.picture(heat)
    except (InvalidInput, RuntimeError):  # RuntimeError: a layer without gradients
        pass
    return found


def described(classifier: Classifier, net: pathlib.Path) -> dict[str, Any]:
    """Return the page's values: name, classes and accuracy of a network, and images of its run."""
    description = classifier.description
    results = recorded_run.results(net.parent, description["provenance"])
    examples: list[dict[str, Any]] = []
    if results:
        run = recorded_run.RecordedRun.read(net.parent)
        if run.classification["classes"] == description["classes"]:
            kinds = [run.classified.get(kind) or [] for kind in ("unsure", "mistakes")]
            examples = [each for pair in zip(*kinds, strict=False) for each in pair]
    exported = description["provenance"].get("accuracy")
    if not results and isinstance(exported, dict) and NUMBER.is_valid(exported.get("value")):
        results = [recorded_run.Result("", str(exported.get("images")), {"accuracy": exported["value"]})]
    shown = [(each.metrics.get("accuracy"), each.images) for each in results]
    return {
        "title": net.resolve().name,
        "name": description["net"]["name"],
        "size": description["input"],
        "classes": description["classes"],
        "results": [(f"{100 * share:.2f} %", images) for share, images in shown if share is not None],
        "examples": [recorded_run.picture_of(each) for each in examples[:EXAMPLES]],
        "most_bytes": MOST_BYTES,
    }


def is_of_this_page(host: str | None, origin: str | None) -> bool:
    """Return whether a request comes from this machine and from this page.

    The browser sets both headers. A page of another site has another origin. If a site's name resolves to
    this machine (DNS rebinding), the host differs.

    Args:
        host: the request's header ``Host``.
        origin: the request's header ``Origin``, which browsers send with each POST.
    """
    return str(host).partition(":")[0] in NAMES and origin in (None, f"http://{host}")


class Server(socketserver.ThreadingTCPServer):
    """An HTTP server of the page and of the classifier.

    Args:
        classifier: the network.
        net: the network's file.
        port: the port of 127.0.0.1.
    """

    allow_reuse_address, daemon_threads = True, True

    def __init__(self, classifier: Classifier, net: pathlib.Path, port: int) -> None:
        self.classifier = classifier
        self.page = page.render(TEMPLATE, described(classifier, net))
        self.slots = threading.BoundedSemaphore(AT_ONCE)
        super().__init__((HOST, port), Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print a request's error as a line; ignore a client that has disconnected."""
        error = sys.exc_info()[1]
        if error and not isinstance(error, OSError):
            print(f"{called('checkpoint')}: serve: {one_line(error)}", file=sys.stderr)


class Handler(BaseHTTPRequestHandler):
    """A handler of requests for the page, or for the classes of an image."""

    server: Server
    timeout = PATIENCE

    def do_GET(self) -> None:
        """Answer with the page."""
        if self._is_of_this_page():
            is_page = self.path == "/"
            status = HTTPStatus.OK if is_page else HTTPStatus.NOT_FOUND
            self._answer(status, "text/html; charset=utf-8", self.server.page if is_page else "no such page")

    def do_POST(self) -> None:
        """Answer with the classes of the image in the request."""
        if not self._is_of_this_page():
            return
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdecimal()):
            return self._refuse(HTTPStatus.LENGTH_REQUIRED, "image: length is missing; set Content-Length")
        if len(length) > len(str(MOST_BYTES)) or int(length) > MOST_BYTES:
            much = f"image: is larger than {MOST_BYTES // 2**20} MiB; give a smaller image"
            return self._refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, much)
        if self.headers.get_content_type() == "multipart/form-data":
            remedy = "send the file's bytes alone, e.g. curl --data-binary @photo.jpg"
            return self._refuse(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"image: is part of a form; {remedy}")
        with self.server.slots:
            try:
                found = answer(self.server.classifier, self.rfile.read(int(length)))
            except InvalidInput as error:
                return self._refuse(HTTPStatus.UNPROCESSABLE_ENTITY, error.errors[0])
        self._answer(HTTPStatus.OK, "application/json", json.dumps(found))

    def log_message(self, *args: Any) -> None:
        """Do not log requests."""

    def _is_of_this_page(self) -> bool:
        is_own = is_of_this_page(self.headers.get("Host"), self.headers.get("Origin"))
        if not is_own:
            own = f"http://{HOST}:{self.server.server_address[1]}"
            self._refuse(HTTPStatus.FORBIDDEN, f"the request comes from another page or host; open {own}")
        return is_own

    def _refuse(self, status: HTTPStatus, error: str) -> None:
        self._answer(status, "application/json", json.dumps({"error": error}))

    def _answer(self, status: HTTPStatus, kind: str, text: str) -> None:
        content = text.encode()
        self.send_response(status)
        for name, value in {**HEADERS, "Content-Type": kind, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)
