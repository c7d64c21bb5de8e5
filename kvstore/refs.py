"""A page that somebody else may pull: what one worker tells another about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.transport import Card, Pull
from protos import common_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class PageRef:
    """One page of a request, in the pool that a `Card` describes."""

    page_index: int
    key: bytes
    """Empty for the tail page."""
    offset_bytes: int
    num_bytes: int
    digests: tuple[int, ...]
    """One per kv head."""
    valid_tokens: int

    def to_proto(self) -> common_pb2.PageRef:
        return common_pb2.PageRef(
            page_index=self.page_index,
            key=self.key,
            offset_bytes=self.offset_bytes,
            num_bytes=self.num_bytes,
            digests=self.digests,
            valid_tokens=self.valid_tokens,
        )

    @classmethod
    def from_proto(cls, ref: common_pb2.PageRef) -> PageRef:
        return cls(
            page_index=ref.page_index,
            key=ref.key,
            offset_bytes=ref.offset_bytes,
            num_bytes=ref.num_bytes,
            digests=tuple(ref.digests),
            valid_tokens=ref.valid_tokens,
        )


@dataclass(frozen=True, slots=True)
class StopPull:
    """An order to the transport thread: post nothing further of this pull. It still settles."""

    pull_id: int


def pull_of(
    refs: Sequence[PageRef], local_offsets: Sequence[int], *, pull_id: int, card: Card, deadline_s: float
) -> Pull:
    """Pull these pages to `local_offsets` (bytes into our region, one per ref), digests checked."""

    def column(values: Sequence[int]) -> npt.NDArray[np.int64]:
        return np.asarray(values, dtype=np.int64)

    return Pull(
        pull_id=pull_id,
        card=card,
        remote_offsets=column([ref.offset_bytes for ref in refs]),
        local_offsets=column(local_offsets),
        num_bytes=column([ref.num_bytes for ref in refs]),
        deadline_s=deadline_s,
        expected=np.asarray([ref.digests for ref in refs], dtype=np.uint64),
    )
