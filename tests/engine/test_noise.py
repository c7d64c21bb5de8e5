"""The noise is a published function: the same in every process, on every machine, for ever."""

from __future__ import annotations

import numpy as np

from engine import noise


def _words(start: int, token_ids: np.ndarray) -> np.ndarray:
    """splitmix64 in numpy: what the noise is made of."""
    with np.errstate(over="ignore"):
        z = np.uint64(start) + (token_ids.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def _gumbel(start: int, token_ids: np.ndarray) -> np.ndarray:
    remainder = ((~_words(start, token_ids) >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    return -np.log(-np.log(1.0 - remainder))


def test_words_are_splitmix64():
    """The reference implementation's first outputs for seed 1234567 (Vigna, prng.di.unimi.it)."""
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert _words(1234567, np.arange(4)).tolist() == expected


def test_the_noise_is_made_of_these_words():
    ids = np.array([0, 1, 2, 17, 49151])
    np.testing.assert_allclose(noise.gumbel(np.uint64(1234567), ids), _gumbel(1234567, ids), rtol=1e-12)


def test_streams_and_noise_stay_what_they_are():
    assert noise.stream(0, 0, 0) == 2558736989570252433
    assert noise.stream(2**64 - 1, 3, 17) == 15355230055362476544
    drawn = noise.gumbel(noise.stream(42, 0, 5), np.array([0, 1, 49151]))
    np.testing.assert_allclose(drawn, [-1.2923291756907833, -1.2362934984939216, -1.0787314010507458], rtol=1e-9)


def test_seed_choice_and_index_are_not_interchangeable():
    streams = {noise.stream(seed, choice, index) for seed in range(8) for choice in range(8) for index in range(8)}
    assert len(streams) == 512


def test_the_noise_is_gumbels():
    drawn = noise.gumbel(noise.stream(1, 2, 3), np.arange(200_000))
    assert abs(drawn.mean() - 0.5772) < 0.01  # Euler's constant
    assert abs(drawn.var() - np.pi**2 / 6) < 0.03
    assert np.isfinite(drawn).all()


def test_the_choice_is_the_largest_sum_although_most_are_never_computed():
    rng = np.random.default_rng(0)
    for width, temperature in ((0.0, 1.0), (0.1, 1.0), (3.0, 1.0), (3.0, 0.3), (10.0, 2.0), (30.0, 1.0)):
        for index in range(30):
            logits = (rng.standard_normal(3000) * width).astype(np.float32)
            kept = np.union1d(np.flatnonzero(rng.random(3000) < 0.7), [logits.argmax()])
            start = noise.stream(7, 0, index)
            sums = logits[kept].astype(np.float64) / temperature + noise.gumbel(start, kept)
            assert noise.choose(logits, temperature, kept, start) == kept[sums.argmax()]
