"""Take the pictures of this folder: a report, in light and dark, and the page of ``checkpoint.py serve``.

    pip install playwright      # and a Chromium, e.g. apt-get install chromium
    python3 docs/pictures.py RUN [--browser /usr/bin/chromium]

RUN is the folder of a finished run of train.py. The script writes docs/report.png, docs/report-dark.png and
docs/serve.png.
"""

from __future__ import annotations

import argparse
import io
import pathlib
import sys
import tempfile
import threading

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from PIL import Image  # noqa: E402
from playwright.sync_api import Page, sync_playwright  # noqa: E402

from workbench.publish import forms, serve  # noqa: E402
from workbench.reports import html_report  # noqa: E402

WIDTH, HEIGHT = 1280, 1500
COLOURS = 192  # of a picture: a third of the bytes


def main() -> None:
    """Take all pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("run", type=pathlib.Path, metavar="RUN")
    parser.add_argument("--browser", default="/usr/bin/chromium", help="(%(default)s)")
    args = parser.parse_args()
    net = args.run / "net.pt"
    with (
        tempfile.TemporaryDirectory() as scratch,
        serve.Server(forms.read(net), net, 0) as server,
        sync_playwright() as playwright,
    ):
        report = pathlib.Path(scratch, "report.html")
        html_report.write([args.run], report)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        browser = playwright.chromium.launch(executable_path=args.browser, args=["--no-sandbox"])
        for name, scheme, width in (("report", "light", WIDTH), ("report-dark", "dark", 400)):
            page = browser.new_page(viewport={"width": width, "height": HEIGHT}, color_scheme=scheme)
            page.goto(report.as_uri())
            _save(page, name)
        page = browser.new_page(viewport={"width": WIDTH, "height": 1090}, color_scheme="light")
        page.goto(f"http://127.0.0.1:{server.server_address[1]}")
        for number in range(4):
            page.locator(".examples button").nth(number).click()
            page.locator(".answers tbody").nth(number).wait_for()
        _save(page, "serve")
        browser.close()
        server.shutdown()


def _save(page: Page, name: str) -> None:
    """Save the window as a PNG file of few colours."""
    picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    picture.quantize(COLOURS, dither=Image.Dither.NONE).save(HERE / f"{name}.png", optimize=True)


if __name__ == "__main__":
    main()
