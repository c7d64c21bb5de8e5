"""The control plane's bookkeeping, without sockets and with time passed in."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cluster.catalog import Roster, RosterEntry
from cluster.control import state as state_module
from cluster.control.state import TAKEOVER_EPOCH_STEP, UnknownNodes
from protos import common_pb2, control_pb2
from tests.cluster.control.cluster import SILENCE_S, TICK_S, Cluster, Stream, Watcher, key, node

PREFILL, DECODE, KV, GATEWAY = (
    common_pb2.ROLE_PREFILL,
    common_pb2.ROLE_DECODE,
    common_pb2.ROLE_KV,
    common_pb2.ROLE_GATEWAY,
)
GIB = 1 << 30


@pytest.fixture
def cluster():
    cluster = Cluster()
    yield cluster
    cluster.check()


# Registration.


def test_a_node_registers_and_watchers_learn_of_it_its_load_and_its_prefixes(cluster):
    watcher = cluster.watch()
    watcher.drain()
    stream = cluster.join(node("decode-0"), control_pb2.Load(pages_free=3))
    stream.holds(1, 2)
    stream.report(prefixes=control_pb2.PrefixDelta(added=[key(3)], removed=[key(1)]))
    watcher.drain()
    assert watcher.num_snapshots == 1
    assert watcher.nodes["decode-0"].load.pages_free == 3
    assert watcher.prefixes["decode-0"] == {key(2), key(3)}
    assert stream.kinds() == ["joined", "storage"]


def test_a_watcher_that_comes_later_gets_everything_at_once(cluster):
    cluster.join(node("decode-0"), control_pb2.Load(pages_free=3)).holds(1, 2)
    watcher = cluster.watch()
    watcher.drain(most=1)
    assert watcher.view() == cluster.view()


def test_a_snapshot_too_large_for_one_message_goes_on_as_changes(cluster, monkeypatch):
    monkeypatch.setattr(state_module, "KEYS_PER_MESSAGE", 3)
    cluster.join(node("decode-0")).holds(*range(4))
    cluster.join(node("decode-1")).holds(*range(10, 17))
    pieces = cluster.state.snapshot()
    assert [piece.WhichOneof("event") for piece in pieces] == [
        "snapshot",
        "prefixes",
        "prefixes",
        "prefixes",
        "prefixes",
    ]
    watcher = cluster.watch()
    watcher.drain()
    assert watcher.view() == cluster.view()


@pytest.mark.parametrize("field", ["node_id", "incarnation", "address", "role"])
def test_a_registration_that_lacks_something_is_refused_and_says_what(cluster, field):
    registration = node("decode-0")
    registration.ClearField(field)
    stream = cluster.join(registration)
    assert stream.end.kind == "invalid"
    assert field in stream.end.reason
    assert not cluster.state.records


def test_a_stream_that_does_not_begin_with_a_registration_is_refused(cluster):
    stream = Stream(cluster, 1, node("decode-0"))
    cluster.streams[1] = stream
    stream.report(load=control_pb2.Load())
    assert stream.end.kind == "invalid"


def test_registering_twice_on_one_stream_ends_it(cluster):
    watcher = cluster.watch()
    stream = cluster.join(node("decode-0"))
    stream.report(registration=node("decode-1"))
    assert stream.end.kind == "invalid"
    watcher.drain()
    assert watcher.nodes == {}


def test_a_new_incarnation_replaces_the_old_and_clears_what_was_known(cluster):
    watcher = cluster.watch()
    old = cluster.join(node("decode-0", "a"), control_pb2.Load(pages_free=3))
    old.holds(1)
    new = cluster.join(node("decode-0", "b"))
    assert old.end.kind == "replaced"
    assert new.end is None
    watcher.drain()
    assert watcher.view() == {"decode-0": ("b", b"", frozenset())}
    assert cluster.state.restarts() == {"decode-0": 1}
    old.loses_stream()  # The word of the old stream's end comes late and means nothing.
    assert "decode-0" in cluster.state.records


def test_an_old_process_that_wakes_up_after_it_was_replaced_is_refused(cluster):
    cluster.join(node("decode-0", "a"))
    cluster.join(node("decode-0", "b"))
    woken = cluster.join(node("decode-0", "a"))
    assert woken.end.kind == "superseded"
    assert cluster.state.records["decode-0"].node.incarnation == "b"


def test_the_same_process_on_a_new_stream_keeps_what_was_known_of_it(cluster):
    watcher = cluster.watch()
    old = cluster.join(node("decode-0", "a"), control_pb2.Load(pages_free=3))
    old.holds(1)
    cluster.join(node("decode-0", "a"))
    assert old.end.kind == "replaced"
    watcher.drain()
    assert watcher.gone == []
    assert watcher.nodes["decode-0"].load.pages_free == 3
    assert cluster.state.restarts() == {}


# Gaps.


def test_a_gap_in_the_sequence_asks_for_a_resync_and_changes_wait_for_it(cluster):
    watcher = cluster.watch()
    stream = cluster.join(node("decode-0"), control_pb2.Load())
    stream.holds(1)
    stream.report(prefixes=control_pb2.PrefixDelta(added=[key(2)]), skip=1)
    assert stream.kinds()[-1] == "resync"
    stream.report(prefixes=control_pb2.PrefixDelta(added=[key(3)]))
    watcher.drain()
    assert watcher.prefixes["decode-0"] == {key(1)}
    stream.holds(2, 3, 4)
    stream.report(prefixes=control_pb2.PrefixDelta(removed=[key(4)]))
    watcher.drain()
    assert watcher.prefixes["decode-0"] == {key(2), key(3)}
    assert stream.kinds().count("resync") == 1


# Death.


def test_a_broken_stream_is_a_death_at_once(cluster):
    watcher = cluster.watch()
    watcher.drain()
    stream = cluster.join(node("prefill-0", role=PREFILL))
    stream.loses_stream()
    watcher.drain()
    assert [(gone.node_id, gone.reason) for gone in watcher.gone] == [("prefill-0", "its stream broke")]


def test_silence_is_a_death_after_silence_s_and_no_sooner(cluster):
    watcher = cluster.watch()
    watcher.drain()
    stream = cluster.join(node("decode-0"))
    cluster.tick(SILENCE_S)
    assert stream.end is None
    stream.report(load=control_pb2.Load())
    cluster.tick(SILENCE_S)
    assert stream.end is None
    cluster.tick(TICK_S)
    assert stream.end.kind == "silent"
    watcher.drain()
    assert watcher.gone[0].reason == "silent for 5.5 s"


def test_a_node_that_was_silent_may_come_back(cluster):
    cluster.join(node("decode-0"))
    cluster.tick(SILENCE_S + TICK_S)
    assert cluster.join(node("decode-0")).end is None
    assert cluster.state.restarts() == {}


def test_the_control_planes_own_pause_is_not_the_nodes_silence(cluster):
    """Frozen for a minute, it finds all reports waiting in its sockets, and must not bury everybody before reading."""
    stream = cluster.join(node("decode-0"))
    cluster.now_s += 60.0
    cluster.deliver(cluster.state.tick(cluster.now_s, TICK_S))
    assert stream.end is None
    cluster.tick(SILENCE_S + 3 * TICK_S)
    assert stream.end.kind == "silent"


def test_a_node_that_leaves_in_good_order_and_comes_again_has_not_been_restarted(cluster):
    watcher = cluster.watch()
    watcher.drain()
    stream = cluster.join(node("decode-0", "a"))
    stream.report(leave=control_pb2.Leave())
    stream.loses_stream()
    watcher.drain()
    assert [gone.reason for gone in watcher.gone] == ["left"]
    cluster.join(node("decode-0", "b"))
    assert cluster.state.restarts() == {}


# Storage views.


def test_a_storage_node_is_a_member_once_it_has_said_how_large_it_is(cluster):
    decode = cluster.join(node("decode-0"))
    large = cluster.join(node("kv-0", role=KV))
    assert list(decode.view().members) == []
    large.report(load=control_pb2.Load(capacity_bytes=2 * GIB))
    cluster.join(node("kv-1", role=KV), control_pb2.Load(capacity_bytes=GIB // 2))
    cluster.join(node("kv-2", role=KV), control_pb2.Load())
    members = [(member.node_id, member.incarnation, member.address, member.weight) for member in decode.view().members]
    assert members == [
        ("kv-0", "a", "kv-0.a:1", 2.0),
        ("kv-1", "a", "kv-1.a:1", 0.5),
        ("kv-2", "a", "kv-2.a:1", 1.0),
    ]


def test_each_change_of_the_members_has_a_newer_epoch_and_nothing_else_has(cluster):
    decode = cluster.join(node("decode-0"))
    epochs = [decode.view().membership_epoch]

    def expect_news(expected: bool) -> None:
        epoch = decode.view().membership_epoch
        assert (epoch > epochs[-1]) == expected
        epochs.append(epoch)

    storage = cluster.join(node("kv-0", role=KV), control_pb2.Load(capacity_bytes=GIB))
    expect_news(True)
    storage.report(load=control_pb2.Load(capacity_bytes=GIB, stored_bytes=7))
    cluster.join(node("prefill-0", role=PREFILL), control_pb2.Load())
    expect_news(False)
    storage = cluster.join(node("kv-0", role=KV))
    expect_news(False)
    storage = cluster.join(node("kv-0", "b", role=KV), control_pb2.Load(capacity_bytes=GIB))
    expect_news(True)
    storage.loses_stream()
    expect_news(True)
    assert list(decode.view().members) == []


def test_gateways_are_not_told_of_storage_nodes(cluster):
    gateway = cluster.join(node("gateway-0", role=GATEWAY))
    cluster.join(node("kv-0", role=KV), control_pb2.Load())
    assert gateway.kinds() == ["joined"]


# Operators.


def test_evicting_asks_the_workers_that_are_named_or_all_of_them(cluster):
    streams = {
        name: cluster.join(node(name, role=role))
        for name, role in (("decode-0", DECODE), ("prefill-0", PREFILL), ("kv-0", KV), ("gateway-0", GATEWAY))
    }
    assert cluster.evict(["prefill-0"]) == ["prefill-0"]
    assert cluster.evict() == ["decode-0", "prefill-0"]
    assert [stream.kinds().count("evict") for stream in streams.values()] == [1, 2, 0, 0]


@pytest.mark.parametrize("unknown", ["nobody", "kv-0"])
def test_evicting_on_who_is_no_worker_asks_nobody(cluster, unknown):
    stream = cluster.join(node("decode-0"))
    cluster.join(node("kv-0", role=KV))
    with pytest.raises(UnknownNodes, match=unknown):
        cluster.evict(["decode-0", unknown])
    assert "evict" not in stream.kinds()


# Taking over.


def roster(**present: bool) -> Roster:
    nodes = {
        name.replace("_", "-"): RosterEntry(incarnations=("a",), present=here, restarts=0)
        for name, here in present.items()
    }
    return Roster(membership_epoch=10, nodes=nodes)


def test_a_new_control_plane_sends_no_storage_view_before_all_have_come_back():
    """A view with the first of two storage nodes would move the other's share, and move it back a moment later."""
    cluster = Cluster(roster(decode_0=True, kv_0=True, kv_1=True, kv_2=False))
    decode = cluster.join(node("decode-0"), control_pb2.Load())
    cluster.join(node("kv-0", role=KV), control_pb2.Load())
    assert decode.view() is None
    last = cluster.join(node("kv-1", "b", role=KV))
    assert decode.view() is None
    last.report(load=control_pb2.Load())
    assert [member.node_id for member in decode.view().members] == ["kv-0", "kv-1"]
    assert decode.view().membership_epoch > 10 + TAKEOVER_EPOCH_STEP
    assert cluster.state.restarts() == {"kv-1": 1}
    cluster.check()


def test_a_new_control_plane_gives_up_after_silence_s_on_those_who_do_not_come_back():
    cluster = Cluster(roster(decode_0=True, kv_0=True, kv_1=True))
    watcher = cluster.watch()
    watcher.drain()
    decode = cluster.join(node("decode-0"), control_pb2.Load())
    storage = cluster.join(node("kv-0", role=KV), control_pb2.Load())
    for _ in range(2):
        cluster.tick(SILENCE_S / 2)
        decode.report(load=control_pb2.Load())
        storage.report(load=control_pb2.Load())
    watcher.drain()
    assert [(gone.node_id, gone.incarnation) for gone in watcher.gone] == [("kv-1", "a")]
    assert [member.node_id for member in decode.view().members] == ["kv-0"]
    assert not cluster.state.roster().nodes["kv-1"].present
    cluster.check()


def test_the_roster_carries_over_what_the_next_control_plane_has_to_know():
    first = Cluster()
    first.join(node("decode-0", "a"))
    first.join(node("decode-0", "b"))
    first.join(node("kv-0", role=KV), control_pb2.Load())
    first.join(node("kv-1", role=KV)).report(leave=control_pb2.Leave())
    second = Cluster(Roster.from_json(first.state.roster().to_json()), control_epoch=2)
    assert not second.state.settled
    assert second.join(node("decode-0", "a")).end.kind == "superseded"
    decode = second.join(node("decode-0", "c"), control_pb2.Load())
    second.join(node("kv-0", role=KV), control_pb2.Load())
    assert second.state.settled
    assert decode.view().membership_epoch > first.state.membership_epoch
    assert second.state.restarts() == {"decode-0": 2}
    second.check()


def test_every_change_that_the_roster_must_keep_shows_in_its_version(cluster):
    seen = [(cluster.state.roster_version, cluster.state.roster())]

    def look() -> None:
        version, roster = cluster.state.roster_version, cluster.state.roster()
        assert (version == seen[-1][0]) == (roster == seen[-1][1])
        seen.append((version, roster))

    stream = cluster.join(node("kv-0", role=KV))
    look()
    stream.report(load=control_pb2.Load())
    look()
    stream.report(load=control_pb2.Load(running=1))
    look()
    stream.loses_stream()
    look()
    cluster.join(node("kv-0", "b", role=KV)).report(leave=control_pb2.Leave())
    look()


# Slow watchers.


def test_a_watcher_that_falls_behind_gets_a_fresh_snapshot_and_keeps_little_waiting(cluster):
    stream = cluster.join(node("decode-0"))
    stream.holds()
    slow, quick = cluster.watch(max_bytes=2_000), cluster.watch()
    slow.drain()
    quick.drain()
    for number in range(200):
        stream.report(prefixes=control_pb2.PrefixDelta(added=[key(number)]))
    assert sum(size for _, size in slow.feed._waiting) <= 2_000
    slow.drain()
    quick.drain()
    assert (slow.num_snapshots, quick.num_snapshots) == (2, 1)
    assert slow.view() == quick.view() == cluster.view()


# Everything in any order.

NODES = {"decode-0": DECODE, "prefill-0": PREFILL, "kv-0": KV, "kv-1": KV, "gateway-0": GATEWAY}
KEYS = st.sets(st.integers(0, 7), max_size=4)


class AnyOrder(RuleBasedStateMachine):
    """Joins, gaps, deaths, silence, takeovers and watchers of any speed: everybody who has read all sees the same."""

    def __init__(self) -> None:
        super().__init__()
        self.cluster = Cluster()
        self.epochs = [0]
        self.held: dict[int, set[int]] = {}

    def live(self) -> list[Stream]:
        sessions = {record.session for record in self.cluster.state.records.values()}
        return [stream for stream in self.cluster.streams.values() if stream.number in sessions]

    def some_stream(self, data: st.DataObject) -> Stream:
        return data.draw(st.sampled_from(self.live()))

    @rule(name=st.sampled_from(sorted(NODES)), incarnation=st.sampled_from("abc"))
    def join(self, name, incarnation):
        stream = self.cluster.join(node(name, incarnation, NODES[name]))
        self.held[stream.number] = set()

    @precondition(lambda self: self.live())
    @rule(data=st.data(), pages=st.integers(0, 3), skip=st.sampled_from([0, 0, 0, 1]))
    def load(self, data, pages, skip):
        self.some_stream(data).report(load=control_pb2.Load(pages_free=pages, capacity_bytes=pages * GIB), skip=skip)

    @precondition(lambda self: self.live())
    @rule(data=st.data(), numbers=KEYS)
    def account(self, data, numbers):
        stream = self.some_stream(data)
        self.held[stream.number] = set(numbers)
        stream.holds(*numbers)

    @precondition(lambda self: self.live())
    @rule(data=st.data(), added=KEYS, removed=KEYS, skip=st.sampled_from([0, 0, 0, 2]))
    def change(self, data, added, removed, skip):
        stream = self.some_stream(data)
        held = self.held[stream.number]
        delta = control_pb2.PrefixDelta(
            added=[key(number) for number in added - held], removed=[key(number) for number in (removed & held) - added]
        )
        self.held[stream.number] = (held - removed) | added
        stream.report(prefixes=delta, skip=skip)

    @precondition(lambda self: self.live())
    @rule(data=st.data())
    def break_stream(self, data):
        self.some_stream(data).loses_stream()

    @precondition(lambda self: self.live())
    @rule(data=st.data())
    def leave(self, data):
        self.some_stream(data).report(leave=control_pb2.Leave())

    @precondition(lambda self: self.cluster.streams)
    @rule(data=st.data())
    def late_word_of_any_stream(self, data):
        stream = data.draw(st.sampled_from(list(self.cluster.streams.values())))
        if stream not in self.live():
            stream.loses_stream()

    @rule(seconds=st.sampled_from([TICK_S, SILENCE_S / 2, SILENCE_S + TICK_S]))
    def time_passes(self, seconds):
        self.cluster.tick(seconds)

    @rule(max_bytes=st.sampled_from([100, 1_000, 1 << 20]))
    def watch(self, max_bytes):
        if len(self.cluster.watchers) < 4:
            self.cluster.watch(max_bytes)

    @precondition(lambda self: self.cluster.watchers)
    @rule(data=st.data(), most=st.integers(0, 5))
    def read_a_little(self, data, most):
        watcher: Watcher = data.draw(st.sampled_from(self.cluster.watchers))
        watcher.drain(most)

    @rule()
    def everybody_reads_everything(self):
        self.cluster.check()

    @rule()
    def take_over(self):
        """The control plane dies; the next one starts from the roster, and all who live register again."""
        survivors = [stream.node for stream in self.live()]
        roster = Roster.from_json(self.cluster.state.roster().to_json())
        self.epochs.append(self.cluster.state.membership_epoch)
        self.cluster = Cluster(roster, control_epoch=self.cluster.state.control_epoch + 1)
        self.held = {}
        for survivor in survivors:
            stream = self.cluster.join(survivor, control_pb2.Load())
            self.held[stream.number] = set()
            stream.holds()
            assert stream.end is None
        assert self.cluster.state.settled
        assert set(self.cluster.state.records) == {survivor.node_id for survivor in survivors}

    @rule()
    def a_synced_node_is_known_exactly(self):
        for stream in self.live():
            record = self.cluster.state.records[stream.node.node_id]
            if record.synced:
                assert record.prefixes == {key(number) for number in self.held[stream.number]}

    @invariant()
    def membership_epochs_only_rise(self):
        self.epochs.append(self.cluster.state.membership_epoch)
        assert self.epochs[-1] >= self.epochs[-2]

    def teardown(self):
        self.cluster.check()


AnyOrder.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestAnyOrder = AnyOrder.TestCase
