import random

import numpy as np
import pytest

from kvstore.pages import Namespace, PageLayout, bytes_digest, extend_key, page_digests, page_keys, salted

NAMESPACE = Namespace(
    weights_digest="00",
    adapter_digest="",
    page_size=4,
    num_layers=2,
    cache_dtype="bfloat16",
    layout_version=1,
    rope="theta=10000",
    numerics_id="test",
)


def test_the_published_vectors_hold():
    """These stand in kvstore/README.md: other programs may compute keys by them."""
    namespace = NAMESPACE.digest()
    assert namespace.hex() == "45fbdf318cf3d48ad794c6bf971f6e24"
    keys = page_keys(namespace, list(range(9)), 4)
    assert [key.hex() for key in keys] == [
        "5bd1c82a61bc7fc41805a88a0d9faa01",
        "b81b12957d64849ca8d494ab815f8c99",
    ]
    assert salted(namespace, b"tenant-a").hex() == "3193fbcb8677061ce1a02d1d490fa68e"
    assert bytes_digest(np.arange(10, dtype=np.uint8)) == 0x1F067A984F6FDA1E


def test_only_full_pages_have_keys():
    assert [len(page_keys(b"n", list(range(n)), 4)) for n in (0, 3, 4, 5, 8)] == [0, 0, 1, 1, 2]


def test_a_key_commits_to_every_token_before_it_and_to_the_namespace():
    tokens = list(range(12))
    keys = page_keys(b"n", tokens, 4)
    for place in range(12):
        changed = [*tokens[:place], 99, *tokens[place + 1 :]]
        same = [a == b for a, b in zip(keys, page_keys(b"n", changed, 4), strict=True)]
        assert same == [index < place // 4 for index in range(3)]
    assert not set(keys) & set(page_keys(b"m", tokens, 4))


def test_keys_grow_page_by_page():
    keys = page_keys(b"n", list(range(8)), 4)
    assert extend_key(extend_key(b"n", [0, 1, 2, 3]), [4, 5, 6, 7]) == keys[1]


def test_tenants_share_no_namespace():
    assert salted(b"n", b"") == b"n"
    assert len({salted(b"n", b""), salted(b"n", b"a"), salted(b"n", b"b")}) == 3


def test_digests_are_per_head_and_notice_any_flipped_bits():
    layout = PageLayout(num_layers=2, num_kv_heads=3, head_dim=4, page_size=4, dtype="bfloat16")
    rng = np.random.default_rng(1)
    pages = rng.integers(0, 256, (2, layout.page_bytes), dtype=np.uint8)
    before = page_digests(pages, 3)
    assert before.shape == (2, 3)
    pages[1, layout.head_bytes] ^= 0x80
    after = page_digests(pages, 3)
    assert (before != after).tolist() == [[False] * 3, [False, True, False]]


def test_flipping_the_sign_of_two_values_is_noticed():
    """Regression: with words as wide as the sum, two flipped top bits cancel, whatever odd coefficients they meet."""
    data = np.zeros(64, dtype=np.uint8)
    digests = {bytes_digest(data)}
    for first, second in [(3, 7), (7, 15), (3, 63), (31, 47)]:
        flipped = data.copy()
        flipped[[first, second]] ^= 0x80
        digests.add(bytes_digest(flipped))
    assert len(digests) == 5


def test_the_length_is_part_of_a_digest():
    assert len({bytes_digest(np.zeros(n, dtype=np.uint8)) for n in range(9)}) == 9


def test_a_digest_is_the_sum_that_the_docstring_says():
    random.seed(3)
    words = [random.getrandbits(32) for _ in range(5)]

    def splitmix(n: int) -> int:
        mask = 2**64 - 1
        z = n * 0x9E3779B97F4A7C15 & mask
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ z >> 27) * 0x94D049BB133111EB & mask
        return z ^ z >> 31 | 1

    expected = sum(word * splitmix(place + 1) for place, word in enumerate(words)) + 20 * 0x9E3779B97F4A7C15
    assert bytes_digest(np.array(words, dtype="<u4").view(np.uint8)) == expected % 2**64


@pytest.mark.parametrize("field", ["num_layers", "num_kv_heads", "head_dim", "page_size"])
def test_a_layout_names_the_field_that_is_impossible(field):
    good = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 1, "page_size": 1, "dtype": "float32"}
    with pytest.raises(ValueError, match=field):
        PageLayout(**(good | {field: 0}))


def test_page_bytes_of_the_laptop_model():
    layout = PageLayout(num_layers=30, num_kv_heads=3, head_dim=64, page_size=16, dtype="bfloat16")
    assert layout.page_bytes == 368_640
    assert [layout.pages_for(n) for n in (0, 1, 16, 17)] == [0, 1, 1, 2]
