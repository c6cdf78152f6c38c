"""Where things are in the repository, for tests that read or start them."""

from pathlib import Path

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
HELPERS = TESTS / "helpers"
DATA = HELPERS / "data"
BENCHMARKS = ROOT / "benchmarks"
DOCS = ROOT / "docs"
EXAMPLES = ROOT / "examples"
