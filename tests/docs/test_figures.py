"""Figures and tables of docs/ are what `benchmarks/run.py figures` makes of committed results."""

import re
import sys
from xml.etree import ElementTree

import pytest
from repository import BENCHMARKS, DOCS

sys.path.append(str(BENCHMARKS))

import figures
import result_tables
from figures import FIGURES, IMAGES, PLACE, completed

from ampatch import native

AGAIN = "python benchmarks/run.py figures draws it again"
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
TRAINING = "Training, ordinary optimizer, dispatch-bound"
NAME = re.compile(r"\b[a-z][0-9a-f]{10}\b")  # of a shape, from the last bits of its numbers


def about(svg: str, word: str) -> str:
    """What a picture says of itself."""
    [element] = ElementTree.fromstring(svg).iter(f"{{http://purl.org/dc/elements/1.1/}}{word}")
    return "".join(element.itertext()).strip()


def test_a_figure_shows_the_committed_results_as_the_script_draws_them():
    """All of it, where matplotlib is the version that drew it; others draw a bit differently."""
    matplotlib = pytest.importorskip("matplotlib")
    for name, make in FIGURES.items():
        figure = make()
        committed = (IMAGES / f"{name}.svg").read_text(encoding="utf-8")
        assert about(committed, "description") == figure.values(), AGAIN
        before, now = (NAME.sub("", svg) for svg in (committed, figure.svg()))
        if about(before, "creator") != f"matplotlib {matplotlib.__version__}":
            pytest.skip(f"{name} was drawn by {about(before, 'creator')}")
        assert NUMBER.sub("", now) == NUMBER.sub("", before), AGAIN
        drawn, kept = ([float(number) for number in NUMBER.findall(text)] for text in (now, before))
        assert drawn == pytest.approx(kept, abs=0.01), AGAIN


def test_pages_have_each_figure_and_table_once():
    shown = []
    for page in sorted(DOCS.rglob("*.md")):
        text = page.read_text(encoding="utf-8")
        assert completed(page) == text, f"{page}: {AGAIN}"
        shown += [name for _, _, name, _ in PLACE.findall(text)]
    assert sorted(shown) == sorted([*FIGURES, *figures.TABLES])
    assert sorted(FIGURES) == sorted(path.stem for path in IMAGES.glob("*.svg"))


def test_the_means_that_initialize_and_the_page_repeat_are_those_of_the_file():
    """`native.SPEEDUP` is what the native part gave at O1."""
    means = result_tables.Results.newest("speed").tables()[TRAINING][-1]
    assert native.SPEEDUP == f"{float(means['O1 native']) / float(means['O1']):.2f}"
    page = result_tables.Results(DOCS / "performance.md").tables()["How long a step takes"]
    [row] = [row for row in page if row[""] == f"{TRAINING} (6)"]
    assert row.items() <= {**means, "": row[""]}.items()
