import heapq

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstore.pages import PageTree
from kvstore.pages.eviction import Eviction, LeafFrequency, LeafLru


def chain(tree: PageTree[str], *keys: bytes) -> None:
    """Pages of one prompt."""
    for parent, key in zip((None, *keys), keys, strict=False):
        if key not in tree:
            tree.insert(key, parent, key.decode())


def order(tree: PageTree[str]) -> list[str]:
    return [value for _, value in tree.coldest()]


def test_a_missing_page_leaves_a_hole_and_does_not_shift_its_neighbours():
    tree: PageTree[str] = PageTree()
    chain(tree, b"a", b"b", b"c")
    tree.remove(b"b")
    assert tree.match([b"a", b"b", b"c"]) == ["a", None, "c"]
    tree.check()
    tree.insert(b"b", b"a", "again")
    assert [key for key, _ in tree.coldest()] == [b"c", b"b", b"a"]
    tree.check()


def test_leaves_go_before_their_parents_and_the_least_recently_used_first():
    tree: PageTree[str] = PageTree()
    chain(tree, b"a", b"b", b"c")
    chain(tree, b"a", b"x")
    assert order(tree) == ["c", "b", "x", "a"]
    tree.match([b"a", b"b", b"c"])
    assert order(tree) == ["x", "c", "b", "a"]


def test_a_walk_leaves_the_order_as_it_was():
    tree: PageTree[str] = PageTree()
    chain(tree, b"a", b"b", b"c")
    assert order(tree) == order(tree) == ["c", "b", "a"]
    walk = tree.coldest()
    assert next(walk) == (b"c", "c")
    tree.check()
    assert order(tree) == ["c", "b", "a"]
    assert list(walk) == [], "a new walk ends those before it"


def test_yielded_pages_may_go_at_once_or_later():
    tree: PageTree[str] = PageTree()
    chain(tree, b"a", b"b")
    chain(tree, b"a", b"x")
    went = []
    for key, value in tree.coldest():
        went.append(value)
        if key != b"b":
            tree.remove(key)
        tree.check()
    assert went == ["b", "x", "a"]
    assert list(tree.keys()) == [b"b"]
    assert order(tree) == ["b"]


def test_a_child_that_comes_back_makes_its_parent_wait_again():
    tree: PageTree[str] = PageTree()
    chain(tree, b"a", b"b")
    tree.remove(b"b")
    assert order(tree) == ["a"]
    chain(tree, b"a", b"b")
    chain(tree, b"z")
    assert order(tree) == ["b", "a", "z"]
    tree.check()


def test_pages_that_come_and_go_without_a_walk_leave_nothing_behind():
    tree: PageTree[str] = PageTree()
    for number in range(1_000):
        tree.insert(b"%d" % number, None, "")
        tree.remove(b"%d" % number)
    tree.check()


def test_what_is_not_here_cannot_be_used_or_removed():
    tree: PageTree[str] = PageTree()
    chain(tree, b"a")
    with pytest.raises(KeyError):
        tree.insert(b"a", None, "")
    for call in (tree.touch, tree.remove, tree.parent):
        with pytest.raises(KeyError):
            call(b"b")
    assert tree.get(b"b") is None


class Reference:
    """A tree without an order of its own: it looks at every page."""

    def __init__(self, eviction: Eviction) -> None:
        self.eviction = eviction
        self.pages: dict[bytes, list] = {}  # key -> [parent, last use, number of uses]
        self.uses = 0

    def use(self, key: bytes, count: int) -> None:
        self.uses += 1
        self.pages[key][1] = self.uses
        self.pages[key][2] += count

    def order(self) -> list[bytes]:
        children = {key: 0 for key in self.pages}
        for parent, _, _ in self.pages.values():
            if parent in children:
                children[parent] += 1
        heap = [self._entry(key) for key, count in children.items() if not count]
        heapq.heapify(heap)
        went = []
        while heap:
            key = heapq.heappop(heap)[-1]
            went.append(key)
            parent = self.pages[key][0]
            if parent in children:
                children[parent] -= 1
                if not children[parent]:
                    heapq.heappush(heap, self._entry(parent))
        return went

    def _entry(self, key: bytes) -> tuple:
        _, last_used, num_uses = self.pages[key]
        queue = self.eviction.queue(num_uses)
        return (self.eviction.worth(queue, self.uses - last_used, len(self.pages)), queue, last_used, key)


class TreeMachine(RuleBasedStateMachine):
    """Any order of events: the incremental order equals that of looking at every page."""

    eviction: type[Eviction] = LeafLru

    @initialize()
    def begin(self) -> None:
        self.tree: PageTree[bytes] = PageTree(self.eviction())
        self.reference = Reference(self.eviction())

    prompts = st.lists(st.sampled_from("ab"), min_size=1, max_size=5).map("".join)

    @staticmethod
    def keys(prompt: str) -> list[bytes]:
        return [prompt[: end + 1].encode() for end in range(len(prompt))]

    @rule(prompt=prompts, holes=st.integers(0, 31))
    def use(self, prompt: str, holes: int) -> None:
        """A prompt is matched, and what was missing comes, some of it."""
        keys = self.keys(prompt)
        found = self.tree.match(keys)
        assert found == [key if key in self.reference.pages else None for key in keys]
        for key in reversed(keys):
            if key in self.reference.pages:
                self.reference.use(key, 1)
        for index, key in enumerate(keys):
            if found[index] is None and not holes >> index & 1:
                parent = keys[index - 1] if index else None
                self.reference.pages[key] = [parent, 0, self.reference.eviction.arrived(key)]
                self.reference.use(key, 0)
                self.tree.insert(key, parent, key)

    @precondition(lambda self: self.reference.pages)
    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.reference.pages)))
        self.reference.use(key, 0)
        self.tree.touch(key)

    @precondition(lambda self: self.reference.pages)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        self._gone(data.draw(st.sampled_from(sorted(self.reference.pages))))

    @rule(num_pages=st.integers(1, 8), every=st.integers(1, 3), at_once=st.booleans())
    def evict(self, num_pages: int, every: int, at_once: bool) -> None:
        """Evict some of the coldest while walking or after it; skip others, as if they were pinned."""
        expected = self.reference.order() if every == 1 and not at_once else None
        seen: list[bytes] = []
        victims: list[bytes] = []
        for key, value in self.tree.coldest():
            assert key == value
            seen.append(key)
            if len(seen) % every == 0:
                victims.append(key)
                if at_once:
                    self._gone(key)
            if len(victims) == num_pages:
                break
        assert expected is None or seen == expected[: len(seen)]
        for key in [] if at_once else victims:
            self._gone(key)

    @invariant()
    def agrees(self) -> None:
        self.tree.check()
        assert set(self.tree.keys()) == self.reference.pages.keys()

    @rule()
    def same_order(self) -> None:
        assert [key for key, _ in self.tree.coldest()] == self.reference.order()

    def _gone(self, key: bytes) -> None:
        _, _, num_uses = self.reference.pages.pop(key)
        self.reference.eviction.left(key, num_uses, len(self.reference.pages))
        assert self.tree.remove(key) == key


TestLeafLru = TreeMachine.TestCase
TestLeafLru.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)


class FrequencyMachine(TreeMachine):
    eviction = LeafFrequency


TestLeafFrequency = FrequencyMachine.TestCase
TestLeafFrequency.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
