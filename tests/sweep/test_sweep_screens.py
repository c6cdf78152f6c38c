"""The report in headless Chromium, as a phone and a desk show it.

    pytest -m slow tests/sweep/test_sweep_screens.py

leaves the screenshots in the directory that pytest prints on failure, or in
AMPATCH_SCREENSHOTS if that is set.
"""

import html
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from PIL import Image, ImageStat
from sweep_made import made_sweep

from ampatch.sweep import write_report

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome", "headless_shell")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason=f"no chromium: none of {', '.join(NAMES)} in PATH"),
]
WIDTHS = {390: 5200, 1280: 3200, 1400: 3200}  # pixels: heights that hold the whole page
# A window cannot be as narrow as a phone, a frame can.
FRAME = """<!DOCTYPE html><title>-</title><iframe id="f" style="width: {width}px; height: 800px;
border: 0" onload="const page = this.contentDocument;
for (const one of page.querySelectorAll('details')) one.open = true;
const boxes = [page.documentElement, ...page.querySelectorAll('.scroll')];
document.title = 'hidden ' + Math.max(...boxes.map(box => box.scrollWidth - box.clientWidth))"
srcdoc="{page}"></iframe>"""


def chromium(tmp_path, page, *options):
    return subprocess.run(
        [
            CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
            "--force-device-scale-factor=1", f"--user-data-dir={tmp_path / 'profile'}",
            *options, page.as_uri(),
        ],
        check=True, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    directory = tmp_path_factory.mktemp("sweep")
    made_sweep(directory, notes=["A note that is long enough to need more than a phone's line."])
    write_report(directory)
    return directory / "report.html"


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_the_page_is_drawn(report, tmp_path, width, dark):
    place = Path(os.environ.get("AMPATCH_SCREENSHOTS", tmp_path))
    shot = place / f"report-{width}-{'dark' if dark else 'light'}.png"
    options = ["--blink-settings=preferredColorScheme=0"] if dark else []
    size = f"--window-size={width},{WIDTHS[width]}"
    chromium(tmp_path, report, size, f"--screenshot={shot}", *options)
    with Image.open(shot) as image:
        assert image.width == width
        corner = image.convert("L").getpixel((2, 2))
        assert corner < 60 if dark else corner > 240
        for name in ("headline", "pictures"):
            part = (0, 0, width, 300) if name == "headline" else (0, 900, width, image.height)
            assert ImageStat.Stat(image.convert("L").crop(part)).stddev[0] > 10, name
        colours = {rgb for _, rgb in image.convert("RGB").getcolors(maxcolors=2**24)}
        assert (0xD5, 0x5E, 0) in colours  # O2's bars


@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_of_the_page_or_its_tables_is_hidden_at_the_side(report, tmp_path, width):
    frame = tmp_path / "frame.html"
    page = html.escape(report.read_text(encoding="utf-8"))
    frame.write_text(FRAME.format(width=width, page=page), encoding="utf-8")
    dom = chromium(tmp_path, frame, "--dump-dom").stdout
    assert "<title>hidden 0</title>" in dom
