"""The coverage that is published is of the intervals that are printed."""

import importlib.util
import sys
from pathlib import Path

import numpy as np

from moh_llm.intervals import kls

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
# By its path: a package of the same name measures tests.
_spec = importlib.util.spec_from_file_location("interval_coverage", Path(sys.path[-1]) / "coverage.py")
coverage = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(coverage)


def test_a_population_of_documents():
    draw = np.random.default_rng(0)
    tokens = draw.integers(50, 500, 300).astype(float)
    sums = np.stack([tokens, tokens * 3, tokens * 3, tokens * draw.lognormal(-3, 0.5, 300), tokens], 1)
    found = coverage.cover_population(sums, kls, 100)
    assert found["printed"][5] > 0.93 > found["bootstrap"][5] and set(found["printed"]) == set(coverage.NUMBERS)
