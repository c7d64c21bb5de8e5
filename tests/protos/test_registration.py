"""A node's registration against a control plane that is scripted at the wire."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import grpc
import pytest

from protos import common_pb2, control_pb2, control_pb2_grpc
from protos import registration as registration_module
from protos.registration import NodeConfig, Registration
from protos.serving import Server, serve

DEADLINE_S = 20.0


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


class Session:
    """One Join stream, seen from the control plane: takes reports one by one, says what it is told to."""

    def __init__(self, requests: AsyncIterator[control_pb2.JoinRequest], context: grpc.aio.ServicerContext) -> None:
        self._requests = requests
        self._context = context
        self._sequence = 0
        self.over = asyncio.Event()

    async def next(self) -> control_pb2.JoinRequest:
        """The next report; its number must follow the last one."""
        async with asyncio.timeout(DEADLINE_S):
            request = await anext(self._requests)
        self._sequence += 1
        assert request.sequence == self._sequence
        return request

    async def next_prefixes(self) -> control_pb2.PrefixDelta:
        """The next report about prefixes, whatever loads come before it."""
        while (request := await self.next()).WhichOneof("report") != "prefixes":
            pass
        return request.prefixes

    async def say(self, response: control_pb2.JoinResponse) -> None:
        await self._context.write(response)

    async def join(self, epoch: int = 1) -> control_pb2.Node:
        """Take the registration and the full account that follows it."""
        node = (await self.next()).registration
        await self.say(control_pb2.JoinResponse(control_epoch=epoch, joined=control_pb2.Joined()))
        return node


class ScriptedControl(control_pb2_grpc.ControlServiceServicer):
    """Hands every Join stream to the test and keeps it open until the test ends it."""

    def __init__(self) -> None:
        self._sessions: asyncio.Queue[Session] = asyncio.Queue()

    async def session(self) -> Session:
        async with asyncio.timeout(DEADLINE_S):
            return await self._sessions.get()

    async def Join(
        self, request_iterator: AsyncIterator[control_pb2.JoinRequest], context: grpc.aio.ServicerContext
    ) -> None:
        session = Session(request_iterator, context)
        self._sessions.put_nowait(session)
        await session.over.wait()

    async def listen(self, port: int = 0) -> Server:
        def register(server: grpc.aio.Server) -> Sequence[str]:
            control_pb2_grpc.add_ControlServiceServicer_to_server(self, server)
            return ["headrace.v1.ControlService"]

        return await serve(register, host="127.0.0.1", port=port)


def with_registration(
    body: Callable[[ScriptedControl, Registration, Server], Awaitable[None]], heartbeat_s: float = 60.0
) -> None:
    """Run `body` with a scripted control plane and a started registration that speaks to it."""

    async def check() -> None:
        control = ScriptedControl()
        server = await control.listen()
        config = NodeConfig(
            node_id="decode-0",
            control_address=server.address,
            heartbeat_s=heartbeat_s,
            reconnect_min_s=0.01,
            reconnect_max_s=0.02,
        )
        node = control_pb2.Node(node_id="decode-0", incarnation="i", role=common_pb2.ROLE_DECODE)
        registration = Registration(config, node, lambda: control_pb2.Load(pages_total=7))
        await registration.start()
        try:
            await body(control, registration, server)
        finally:
            await server.stop(0)
            await registration.stop()

    asyncio.run(check())


def test_a_node_registers_then_reports_its_load_and_all_its_prefixes():
    async def body(control: ScriptedControl, registration: Registration, server: Server) -> None:
        registration.publish([key(1), key(2)], [])
        session = await control.session()
        node = await session.join()
        assert (node.node_id, node.incarnation, node.role) == ("decode-0", "i", common_pb2.ROLE_DECODE)
        await registration.registered(DEADLINE_S)
        assert (await session.next()).load.pages_total == 7
        account = (await session.next()).prefixes
        assert account.reset
        assert sorted(account.added) == [key(1), key(2)]
        registration.publish([key(3)], [key(1)])
        change = (await session.next()).prefixes
        assert (change.reset, list(change.added), list(change.removed)) == (False, [key(3)], [key(1)])

    with_registration(body)


def test_loads_come_with_every_heartbeat():
    async def body(control: ScriptedControl, registration: Registration, server: Server) -> None:
        session = await control.session()
        await session.join()
        kinds = [(await session.next()).WhichOneof("report") for _ in range(6)]
        assert kinds == ["load", "prefixes", "load", "load", "load", "load"]

    with_registration(body, heartbeat_s=0.01)


def test_changes_that_cancel_out_are_not_told():
    async def body(control: ScriptedControl, registration: Registration, server: Server) -> None:
        session = await control.session()
        await session.join()
        assert (await session.next_prefixes()).reset
        registration.publish([key(1)], [])
        registration.publish([], [key(1)])
        registration.publish([key(2), key(2)], [key(9)])
        change = await session.next_prefixes()
        assert (list(change.added), list(change.removed)) == ([key(2)], [])

    with_registration(body)


def test_a_large_account_comes_in_pieces_of_which_only_the_first_resets(monkeypatch):
    monkeypatch.setattr(registration_module, "KEYS_PER_MESSAGE", 2)

    async def body(control: ScriptedControl, registration: Registration, server: Server) -> None:
        registration.publish([key(number) for number in range(5)], [])
        session = await control.session()
        await session.join()
        pieces = [await session.next_prefixes() for _ in range(3)]
        assert [piece.reset for piece in pieces] == [True, False, False]
        assert sorted(added for piece in pieces for added in piece.added) == [key(number) for number in range(5)]

    with_registration(body)


def test_a_resync_is_answered_with_a_load_and_a_full_account():
    async def body(control: ScriptedControl, registration: Registration, server: Server) -> None:
        session = await control.session()
        await session.join()
        assert (await session.next_prefixes()).reset
        registration.publish([key(1)], [])
        assert list((await session.next_prefixes()).added) == [key(1)]
        await session.say(control_pb2.JoinResponse(control_epoch=1, resync=control_pb2.Resync()))
        assert (await session.next()).WhichOneof("report") == "load"
        account = (await session.next()).prefixes
        assert (account.reset, list(account.added)) == (True, [key(1)])

    with_registration(body)


def test_after_a_lost_stream_the_node_registers_again_from_sequence_one_with_everything():
    async def body(control: ScriptedControl, registration: Registration, server: Server) -> None:
        session = await control.session()
        await session.join()
        assert (await session.next_prefixes()).reset
        session.over.set()
        registration.publish([key(1)], [])
        session = await control.session()
        await session.join()
        await registration.registered(DEADLINE_S)
        account = await session.next_prefixes()
        assert (account.reset, list(account.added)) == (True, [key(1)])

    with_registration(body)


def test_a_node_outlives_its_control_plane_and_finds_the_next_one_at_the_same_address():
    async def body(control: ScriptedControl, registration: Registration, server: Server) -> None:
        await (await control.session()).join()
        await registration.registered(DEADLINE_S)
        await server.stop(0)
        again = await control.listen(port=int(server.address.rpartition(":")[2]))
        try:
            await (await control.session()).join(epoch=2)
            await registration.registered(DEADLINE_S)
        finally:
            await again.stop(0)

    with_registration(body)


def test_directives_reach_the_node_in_order():
    async def body(control: ScriptedControl, registration: Registration, server: Server) -> None:
        session = await control.session()
        await session.join()
        view = control_pb2.StorageView(membership_epoch=4)
        await session.say(control_pb2.JoinResponse(control_epoch=1, storage=view))
        await session.say(control_pb2.JoinResponse(control_epoch=1, evict=control_pb2.EvictPrefixes()))
        async with asyncio.timeout(DEADLINE_S):
            assert (await registration.directives.get()).storage == view
            assert (await registration.directives.get()).WhichOneof("directive") == "evict"

    with_registration(body)


def test_directives_that_nobody_takes_do_not_pile_up(caplog):
    async def body(control: ScriptedControl, registration: Registration, server: Server) -> None:
        session = await control.session()
        await session.join()
        newest = registration_module.MAX_DIRECTIVES + 3
        for epoch in range(1, newest + 1):
            view = control_pb2.StorageView(membership_epoch=epoch)
            await session.say(control_pb2.JoinResponse(control_epoch=1, storage=view))
        await session.say(control_pb2.JoinResponse(control_epoch=1, resync=control_pb2.Resync()))
        for _ in range(2):  # The second account answers the resync, so everything before it has been read.
            assert (await session.next_prefixes()).reset
        assert registration.directives.qsize() == registration_module.MAX_DIRECTIVES
        assert registration.directives.get_nowait().storage.membership_epoch == 4

    with_registration(body)
    assert "nobody takes them" in caplog.text


def test_an_older_control_plane_that_wakes_up_is_refused():
    async def body(control: ScriptedControl, registration: Registration, server: Server) -> None:
        session = await control.session()
        await session.join(epoch=5)
        await registration.registered(DEADLINE_S)
        evict = control_pb2.JoinResponse(control_epoch=4, evict=control_pb2.EvictPrefixes())
        await session.say(evict)
        for _ in range(2):  # It leaves that one, and refuses to register there again.
            session = await control.session()
            await session.join(epoch=4)
        await (await control.session()).join(epoch=6)
        await registration.registered(DEADLINE_S)
        assert registration.directives.empty()
        assert registration.control_epoch == 6

    with_registration(body)


def test_a_node_that_stops_closes_its_stream_in_good_order():
    async def body(control: ScriptedControl, registration: Registration, server: Server) -> None:
        session = await control.session()
        await session.join()
        assert (await session.next_prefixes()).reset
        stopping = asyncio.create_task(registration.stop())
        assert (await session.next()).WhichOneof("report") == "leave"
        with pytest.raises(StopAsyncIteration):
            await session.next()
        session.over.set()
        async with asyncio.timeout(DEADLINE_S):
            await stopping
        await registration.stop()

    with_registration(body)


def test_a_node_that_ends_otherwise_cuts_its_stream_without_a_leave():
    async def body(control: ScriptedControl, registration: Registration, server: Server) -> None:
        session = await control.session()
        await session.join()
        await registration.registered(DEADLINE_S)
        assert (await session.next_prefixes()).reset
        async with asyncio.timeout(DEADLINE_S):
            await registration.stop(leave=False)
        with pytest.raises((StopAsyncIteration, asyncio.CancelledError, grpc.RpcError)):
            await session.next()

    with_registration(body)


def test_stopping_does_not_wait_for_a_control_plane_that_never_answered():
    async def body(control: ScriptedControl, registration: Registration, server: Server) -> None:
        await control.session()
        async with asyncio.timeout(DEADLINE_S):
            await registration.stop()
        with pytest.raises(TimeoutError):
            await registration.registered(0.01)

    with_registration(body)


def test_a_load_report_that_fails_is_logged_and_tried_again(caplog):
    async def check() -> None:
        control = ScriptedControl()
        server = await control.listen()
        failures = iter([ZeroDivisionError("no rate yet")])

        def load() -> control_pb2.Load:
            for failure in failures:
                raise failure
            return control_pb2.Load(ready=True)

        config = NodeConfig(node_id="kv-0", control_address=server.address, reconnect_min_s=0.01)
        registration = Registration(config, control_pb2.Node(node_id="kv-0"), load)
        await registration.start()
        try:
            await (await control.session()).join()
            session = await control.session()
            await session.join()
            assert (await session.next()).load.ready
        finally:
            await server.stop(0)
            await registration.stop()

    asyncio.run(check())
    assert "no rate yet" in caplog.text


@pytest.mark.parametrize(
    "wrong", [{"node_id": ""}, {"heartbeat_s": 0}, {"join_deadline_s": -1.0}, {"reconnect_min_s": 3.0}]
)
def test_a_nonsense_config_is_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        NodeConfig(**{"node_id": "n", "control_address": "127.0.0.1:1", **wrong})
