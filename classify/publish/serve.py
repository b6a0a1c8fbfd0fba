"""A page of this machine alone, to drop an image on and see its classes; gradio is an extra."""

from __future__ import annotations

import os
import pathlib
import tempfile
from typing import Any

from PIL import Image

from classify.publish import scoring
from classify.publish.network import Classifier
from harness.errors import InvalidInput, one_line

HOST = "127.0.0.1"
MOST_BYTES, MOST_MEGAPIXELS = 20 * 2**20, 50  # of a file
KEPT = 600  # seconds that a file is kept for which somebody has asked
SHOWN = 5  # classes


def page(classifier: Classifier, title: str) -> Any:
    """The page, as gradio has it."""
    import gradio

    def classify(path: str | None) -> dict[str, float]:
        if path is None:
            raise gradio.Error("drop an image first", print_exception=False)
        try:
            return probabilities(classifier, path)
        except InvalidInput as error:
            said = error.errors[0].removeprefix(f"{path}: ").replace(path, os.path.basename(path))
            raise gradio.Error(said, print_exception=False) from error

    image = gradio.Image(type="filepath", sources=["upload", "clipboard"], label="Image", height=320)
    # Without which gradio reads the file itself, and has no words for one that is no image
    image.preprocess = lambda payload: payload.path if payload else None
    return gradio.Interface(
        classify,
        image,
        gradio.Label(num_top_classes=SHOWN, label="Class"),
        title=title,
        flagging_mode="never",
        analytics_enabled=False,
        delete_cache=(KEPT, KEPT),
        deep_link=False,
    )


def probabilities(classifier: Classifier, path: str) -> dict[str, float]:
    """The probability of every class for an image file.

    Raises:
        InvalidInput: if it is too large, or cannot be read as an image.
    """
    try:
        with Image.open(path) as image:  # of which no pixel is decoded yet
            pixels = image.width * image.height
    except Exception as error:  # Pillow's formats each raise errors of their own
        raise InvalidInput(f"{path}: not a readable image ({one_line(error)}); give another") from error
    if pixels > MOST_MEGAPIXELS * 1e6:
        much = f"{pixels / 1e6:,.0f} megapixels are more than {MOST_MEGAPIXELS}"
        raise InvalidInput(f"{path}: {much}; give a smaller image")
    (row,) = scoring.probabilities(classifier, [pathlib.Path(path)])
    return dict(zip(classifier.description["classes"], row.tolist(), strict=True))


def run(classifier: Classifier, title: str, port: int) -> None:
    """Serves the page to this machine until it is interrupted.

    Args:
        classifier: the network.
        title: of the page.
        port: of 127.0.0.1.

    Raises:
        InvalidInput: if gradio is missing, or the port is taken.
    """
    if not 1 <= port <= 65535:
        raise InvalidInput(f"--port: {port}: must be from 1 to 65535; give another")
    with tempfile.TemporaryDirectory() as folder:
        # It asks no other machine, and keeps nothing
        os.environ.update(GRADIO_ANALYTICS_ENABLED="False", HF_HUB_OFFLINE="1", GRADIO_TEMP_DIR=folder)
        try:
            import gradio
        except ImportError as error:
            what = f"needs gradio, which cannot be imported ({one_line(error)})"
            raise InvalidInput(f"serve: {what}; pip install gradio") from error
        local = gradio.themes.Default(font=["system-ui", "sans-serif"], font_mono=["monospace"])
        made = page(classifier, title)
        try:
            made.launch(
                server_name=HOST,
                server_port=port,
                share=False,
                max_file_size=MOST_BYTES,
                theme=local,
                footer_links=[],
                enable_monitoring=False,
                ssr_mode=False,
                pwa=False,
                mcp_server=False,
                quiet=True,
                prevent_thread_lock=True,
            )
        except OSError as error:
            what = f"cannot be served on ({one_line(error)})"
            raise InvalidInput(f"--port: {port}: {what}; give another") from error
        print(f"http://{HOST}:{port}  (Ctrl+C ends it)", flush=True)
        made.block_thread()
