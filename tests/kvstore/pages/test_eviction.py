import pytest

from kvstore.pages import PageTree, page_keys
from kvstore.pages.eviction import Eviction, LeafFrequency, LeafLru


def strangers(count: int) -> list[bytes]:
    """Keys of first pages that have nothing in common."""
    return [page_keys(b"", [number], 1)[0] for number in range(count)]


def evict(tree: PageTree[int], num_pages: int) -> list[int]:
    went = []
    while len(tree) > num_pages:
        key, _ = next(tree.coldest())
        went.append(tree.remove(key))
    return went


def flood(tree: PageTree[int], keys: list[bytes], num_pages: int) -> None:
    """Pages that nobody asks for again."""
    for number, key in enumerate(keys):
        tree.insert(key, None, number)
        evict(tree, num_pages)


def test_by_frequency_a_page_that_was_used_again_outlives_newer_ones_that_were_not():
    popular, *others = strangers(13)
    for eviction, stays in ((LeafFrequency(), True), (LeafLru(), False)):
        tree: PageTree[int] = PageTree(eviction)
        tree.insert(popular, None, -1)
        for _ in range(8):
            tree.match([popular])
        flood(tree, others, 8)
        assert (popular in tree) is stays


def test_by_frequency_a_page_that_nobody_uses_any_more_goes_all_the_same():
    popular, *others = strangers(200)
    tree: PageTree[int] = PageTree(LeafFrequency())
    tree.insert(popular, None, -1)
    for _ in range(100):
        tree.match([popular])
    flood(tree, others, 8)
    assert popular not in tree


def test_uses_before_an_eviction_count_after_it():
    returning, *others = strangers(40)
    tree: PageTree[int] = PageTree(LeafFrequency())
    tree.insert(returning, None, -1)
    for _ in range(8):
        tree.match([returning])
    tree.remove(returning)
    tree.insert(returning, None, -1)
    flood(tree, others[:12], 8)
    assert returning in tree


def test_a_touch_is_no_further_use():
    touched, *others = strangers(40)
    tree: PageTree[int] = PageTree(LeafFrequency())
    tree.insert(touched, None, -1)
    for _ in range(8):
        tree.touch(touched)
    flood(tree, others[:12], 8)
    assert touched not in tree


def test_what_went_long_ago_is_forgotten():
    eviction = LeafFrequency()
    first, *others = strangers(3_000)
    eviction.left(first, 9, 100)
    assert eviction.arrived(first) == 10
    for key in others:
        eviction.left(key, 2, 100)
    assert eviction.arrived(first) < 10


def test_strangers_are_rarely_mistaken_for_pages_that_were_here():
    eviction = LeafFrequency()
    gone, others = strangers(2_000)[:1_000], strangers(2_000)[1_000:]
    for key in gone:
        eviction.left(key, 5, 250)
    assert [eviction.arrived(key) for key in gone] == [6] * len(gone)
    assert sum(eviction.arrived(key) > 1 for key in others) < len(others) / 10


@pytest.mark.parametrize("eviction", [LeafLru(), LeafFrequency()])
def test_an_eviction_keeps_what_the_tree_relies_on(eviction: Eviction):
    """The head of a queue is worth least in it; another use moves a page to no earlier queue and costs it nothing."""
    queues = [eviction.queue(num_uses) for num_uses in range(1, 100)]
    assert queues == sorted(queues)
    assert set(queues) == set(range(eviction.num_queues))
    for idle in (0, 1, 10, 1_000):
        worths = [eviction.worth(queue, idle, 100) for queue in range(eviction.num_queues)]
        assert worths == sorted(worths)
        assert all(eviction.worth(queue, idle + 1, 100) < worth for queue, worth in enumerate(worths))
