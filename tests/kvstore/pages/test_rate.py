from kvstore.pages import Rate


def test_a_rate_is_unknown_until_measured_and_ignores_empty_measurements():
    rate = Rate()
    rate.measured(0, 1.0)
    rate.measured(5, 0.0)
    assert rate.per_s == 0
    rate.measured(10, 2.0)
    assert rate.per_s == 5


def test_a_large_transfer_outweighs_small_ones_whose_time_is_latency():
    rate = Rate()
    rate.measured(1_000_000, 0.001)
    for _ in range(3):
        rate.measured(10, 0.0001)
    assert rate.per_s > 500_000_000


def test_the_past_fades():
    rate = Rate()
    rate.measured(100, 1.0)
    for _ in range(30):
        rate.measured(1, 1.0)
    assert 1 <= rate.per_s < 2
