"""How far a reader follows one call of a Linear, and one step: functions, files, changes of file.

`benchmarks/run.py way` prints them.  Where the way becomes shorter, lower the numbers.
"""

import json

import pytest
from repository import BENCHMARKS
from warm_python import environment, python

MOST = {
    "O1 forward": (33, 8, 19),
    "O1 step": (124, 26, 72),
    "O2 forward": (44, 10, 26),
    "O2 step with an overflow": (130, 29, 81),
}
COUNT = """
import json, sys
sys.path.insert(0, sys.argv[1])
import way
print(json.dumps(way.ways()))
"""


@pytest.fixture(scope="module")
def ways():
    env = environment(AMPATCH_NATIVE="0")
    done = python("-c", COUNT, str(BENCHMARKS), env=env)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", MOST)
def test_the_way_is_no_longer_than_this(ways, name):
    results = tuple(ways[name])
    assert all(first <= most for first, most in zip(results, MOST[name], strict=True)), results
