"""The page of an answer: the picture of a large model, and what it says of its modules."""

from __future__ import annotations

import pytest

from ampatch.tune.answer import Answer
from ampatch.tune.report import cells, summary, tree, troubles, write_page
from ampatch.tune.sensitivity import Sensitivity
from ampatch.tune.shadow import Sample

LAYERS, PARTS = 12, ("attention", "feed_forward", "norm_before", "norm_after")
PATHS = [
    "layers",
    *(
        path
        for n in range(LAYERS)
        for path in (f"layers.{n}", *(f"layers.{n}.{part}" for part in PARTS))
    ),
]
SAMPLE = Sample(1e-3, 1e-2, 0.0, 0.0)


@pytest.fixture
def answer():
    modules = [Sensitivity(path, "Linear", (SAMPLE,)) for path in PATHS]
    refused = Sensitivity("layers.0.attention", "Cell", (), "it does not run in half: no", True)
    once = Sensitivity("layers.1.attention", "Cell", (), "it does not run a second time: no")
    return Answer(
        "train.py",
        "O3",
        "float16",
        "cured",
        needed=["layers.3"],
        line="initialize(...)",
        modules=[refused, once, *modules],
        paths=PATHS,
    )


def test_each_of_sixty_modules_is_named_in_the_picture(answer, tmp_path):
    write_page(tmp_path, answer)
    page = (tmp_path / "tune.html").read_text()
    for name in (*PARTS, *map(str, range(LAYERS))):
        count = LAYERS if name in PARTS else 1
        assert page.count(f">{name}</text>") == count, name


def test_a_module_lies_beside_those_in_it_and_is_as_high_as_they_are(answer):
    boxes = {box.title.split()[0]: box for box in tree(answer)}
    third = boxes["layers.3"]
    inside = [boxes[f"layers.3.{part}"] for part in PARTS]
    assert [one.first for one in inside] == list(range(third.first, third.first + third.leaves))
    assert {one.depth for one in inside} == {third.depth + 1}
    assert all(one.is_needed for one in (third, *inside)) and not boxes["layers.4"].is_needed


def test_the_speed_of_a_cure_is_the_verdict_on_it(answer):
    """Medians of step times would contradict the ratio, which is of each round by itself."""
    unknown = "speed not told apart from O0's on this machine: 1.15x (0.60 to 1.30 in 3 rounds)"
    answer.step_ms, answer.speeds = {"O0": 0.832, "cure": 1.01}, {"O0": 1.0, "cure": 1.15}
    answer.paces = {"O0": "the baseline", "cure": unknown}
    assert summary(answer)[-1] == f"Speed, with the cure: {unknown}."


def test_a_module_that_half_refuses_is_not_called_unmeasured(answer):
    assert troubles(answer) == [
        "layers.0.attention: it does not run in half: no",
        "Not measured: layers.1.attention: it does not run a second time: no",
    ]
    assert next(cells(answer))[0] == "layers.0.attention"
