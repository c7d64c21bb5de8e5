"""Noticing that an HTTP client has gone, whatever is being done for it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

T = TypeVar("T")


class ClientGone(Exception):
    """The client has closed its connection; nobody reads the answer."""


async def until_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Do `work`, but cancel it the moment the client goes away. Raises ClientGone then.

    The request's body must have been read: what `receive` brings apart from the end of the connection is dropped.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        # Also on the way out of a cancellation of our own: the work's `finally` blocks have run when this returns.
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
