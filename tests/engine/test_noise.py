"""The noise is a published function: the same in every process, on every machine, for ever."""

from __future__ import annotations

import numpy as np

from engine import noise
from engine.sampling import NOISE_SPAN


def test_words_are_splitmix64():
    """The reference implementation's first outputs for seed 1234567 (Vigna, prng.di.unimi.it)."""
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert noise.words(1234567, np.arange(4, dtype=np.uint64)).tolist() == expected


def test_streams_and_noise_stay_what_they_are():
    assert noise.stream(0, 0, 0) == 2558736989570252433
    assert noise.stream(2**64 - 1, 3, 17) == 15355230055362476544
    drawn = noise.gumbel(noise.stream(42, 0, 5), np.array([0, 1, 49151]))
    np.testing.assert_allclose(drawn, [-1.2923291756907833, -1.2362934984939216, -1.0787314010507458], rtol=1e-12)


def test_seed_choice_and_index_are_not_interchangeable():
    streams = {noise.stream(seed, choice, index) for seed in range(8) for choice in range(8) for index in range(8)}
    assert len(streams) == 512


def test_the_noise_is_gumbels_and_stays_within_its_span():
    drawn = noise.gumbel(noise.stream(1, 2, 3), np.arange(200_000))
    assert abs(drawn.mean() - 0.5772) < 0.01  # Euler's constant
    assert abs(drawn.var() - np.pi**2 / 6) < 0.03
    uniform = np.array([0.5, 2**52 - 0.5]) * 2.0**-52
    lowest, highest = -np.log(-np.log(uniform))
    assert highest - lowest < NOISE_SPAN
    assert lowest <= drawn.min() < drawn.max() <= highest
