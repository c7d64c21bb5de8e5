"""Several ways to reach others, behind the contract of one."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.transport.base import Card, PageTransport, Pull, SettledTransfer, Transfer


class SeveralTransports(PageTransport):
    """Advertises every way of its members; a pull takes the first member whose way the peer also advertises."""

    def __init__(self, members: Sequence[PageTransport]) -> None:
        """members: over the same region and incarnation, best first. Owned from now on."""
        super().__init__(members[0].region, members[0].incarnation)
        self.kind = "+".join(member.kind for member in members)
        self._members = tuple(members)

    def card(self) -> Card:
        ways = tuple(way for member in self._members for way in member.card().ways)
        return Card(incarnation=self.incarnation, region_bytes=len(self.region), ways=ways)

    def begin(self, pull: Pull) -> Transfer:
        for member in self._members:
            if pull.card.way(member.kind) is not None:
                return member.begin(pull)
        return SettledTransfer(pull, f"{pull.card.incarnation} cannot be reached by any of {self.kind}")

    def forget(self, incarnation: str) -> None:
        for member in self._members:
            member.forget(incarnation)

    def close(self) -> None:
        for member in self._members:
            member.close()
