"""What does not work as it should, with since-when and consequence: one list for the whole cluster."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping

from cluster.catalog import Placement
from cluster.control.record import ROLES, NodeRecord
from protos import control_pb2

TCP = "transport-tcp"


class Degradations:
    """Remembers since when each of the cluster's degradations has been there."""

    def __init__(self) -> None:
        self._since_unix_s: dict[tuple[str, str], float] = {}

    def current(
        self,
        records: Mapping[str, NodeRecord],
        placement: Placement | None,
        own: Mapping[str, str],
        now_unix_s: float,
    ) -> list[control_pb2.Degradation]:
        """The whole list as it is now: the nodes' own, those that only the whole shows, and the control plane's own.

        own: consequence by kind.
        """
        found = dict(_found(records, placement))
        found.update({(kind, ""): consequence for kind, consequence in own.items()})
        self._since_unix_s = {what: self._since_unix_s.get(what, now_unix_s) for what in found}
        listed = [
            control_pb2.Degradation(kind=kind, consequence=consequence, since_unix_s=self._since_unix_s[kind, subject])
            for (kind, subject), consequence in found.items()
        ]
        for node_id, record in records.items():
            for reported in record.load.degradations if record.load is not None else ():
                listed.append(
                    control_pb2.Degradation(
                        kind=reported.kind,
                        consequence=f"{node_id}: {reported.consequence}",
                        since_unix_s=reported.since_unix_s,
                    )
                )
        return sorted(listed, key=lambda entry: (entry.kind, entry.consequence))


def _found(records: Mapping[str, NodeRecord], placement: Placement | None) -> Iterator[tuple[tuple[str, str], str]]:
    """((kind, subject), consequence) of what the registered nodes show together."""
    registered = Counter(ROLES[record.node.role] for record in records.values())
    for role, wanted in placement.counts.items() if placement is not None else ():
        if registered[role] < wanted:
            yield (
                ("missing-nodes", role),
                f"{role}: {registered[role]} of {wanted} are registered; the rest have more to do",
            )
    for node_id, record in records.items():
        if record.load is None or not record.load.transport.endswith("tcp"):
            continue
        if all(reported.kind != TCP for reported in record.load.degradations):
            yield (TCP, node_id), f"{node_id}: pages travel by TCP ({record.load.transport}): slower, and in clear text"
    fingerprints: dict[str, dict[bytes, list[str]]] = defaultdict(lambda: defaultdict(list))
    for node_id, record in records.items():
        if record.is_worker:
            fingerprint = record.node.fingerprint
            fingerprints[fingerprint.model][fingerprint.SerializeToString(deterministic=True)].append(node_id)
    for model, groups in fingerprints.items():
        if len(groups) > 1:
            sides = " | ".join(sorted(", ".join(sorted(group)) for group in groups.values()))
            yield ("fingerprint-mismatch", model), f"{model}: these never work together: {sides}"
