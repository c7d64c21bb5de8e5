"""What can go wrong with a benchmark.

BenchmarkError      it cannot go on
├── LoadError       a request was refused, broke off, or got another answer than it asked for
└── Unavailable     a peer cannot take part here, which is no failure
"""


class BenchmarkError(Exception):
    """The text is for the person who started it."""


class LoadError(BenchmarkError):
    """A request was refused, broke off, or got another answer than it asked for."""


class Unavailable(BenchmarkError):
    """A peer cannot take part here; the text says what it lacks."""
