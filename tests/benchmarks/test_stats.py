"""Percentiles, spreads and ratios."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.stats import Spread, percentile, ratios, spread

NUMBERS = st.floats(min_value=-1e6, max_value=1e6, allow_nan=False)


@given(st.lists(NUMBERS, min_size=1), st.floats(min_value=0, max_value=100))
def test_percentiles_are_those_of_numpy(values, percent):
    assert percentile(values, percent) == pytest.approx(float(np.percentile(values, percent)), rel=1e-9, abs=1e-6)


def test_every_percentile_of_one_value_is_that_value():
    assert [percentile([3.0], percent) for percent in (0, 50, 99, 100)] == [3.0] * 4


@pytest.mark.parametrize("percent", [-1, 101])
def test_there_is_no_percentile_outside_0_to_100(percent):
    with pytest.raises(ValueError, match="percent"):
        percentile([1.0], percent)


def test_nothing_has_neither_percentiles_nor_a_spread():
    with pytest.raises(ValueError, match="nothing"):
        percentile([], 50)
    with pytest.raises(ValueError, match="nothing"):
        spread([])


def test_ratios_are_taken_repeat_by_repeat():
    """A machine that was twice as slow in the second repeat changes no ratio; a ratio of the medians would move."""
    assert ratios([10.0, 5.0, 12.0], [20.0, 10.0, 8.0]) == Spread(0.5, 0.5, 1.5)


def test_repeats_must_pair_up():
    with pytest.raises(ValueError, match="zip"):
        ratios([1.0, 2.0], [1.0])
