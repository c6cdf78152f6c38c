"""Draws the picture in the README: the first screen of the report of its sweep.

    OMP_NUM_THREADS=1 python docs/site/picture.py            # runs the README's sweep first
    python docs/site/picture.py ampatch-sweep/digits         # draws a sweep that is there

Needs Chromium, and the extra `sweep`.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
PICTURE = ROOT / "docs/images/report.png"
SWEEP = ("sweep", "examples/digits.py", "--budget", "4", "--overwrite")  # the README's
WIDTH, HEIGHT, SCALE = 1400, 620, 2  # pixels of the screen, and of the picture for each of them
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome", "headless_shell")


def draw(page: Path, picture: Path) -> None:
    """Write the first screen of a page, reduced to 64 colours."""
    browser = next(filter(None, map(shutil.which, NAMES)), None)
    if browser is None:
        sys.exit(f"No Chromium: none of {', '.join(NAMES)} is in PATH.")
    with tempfile.TemporaryDirectory() as profile:
        options = (
            "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
            f"--force-device-scale-factor={SCALE}", f"--window-size={WIDTH},{HEIGHT}",
            f"--user-data-dir={profile}", f"--screenshot={picture}",
        )  # fmt: skip
        words = [browser, *options, page.resolve().as_uri()]
        subprocess.run(words, check=True, stderr=subprocess.DEVNULL)
    with Image.open(picture) as image:
        image.convert("RGB").quantize(64).save(picture, optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Draws the picture in the README.")
    parser.add_argument("directory", nargs="?", type=Path, help="of a sweep that has run")
    directory = parser.parse_args().directory
    if directory is None:
        directory = ROOT / "ampatch-sweep/digits"
        subprocess.run([sys.executable, "-m", "ampatch", *SWEEP], cwd=ROOT, check=True)
    draw(directory / "report.html", PICTURE)


if __name__ == "__main__":
    main()
