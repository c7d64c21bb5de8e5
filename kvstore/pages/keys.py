"""Names of pages: a key commits to the namespace and to every token up to the page's end."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b

import numpy as np

KEY_BYTES = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Namespace:
    """Everything that the values of a page depend on, tenant excepted (see `salted`)."""

    weights_digest: str
    """Hex digest of the weights' content."""
    adapter_digest: str
    """Hex digest of the adapter's content; empty without one."""
    page_size: int
    num_layers: int
    cache_dtype: str
    layout_version: int
    rope: str
    """RoPE parameters in a canonical spelling."""
    numerics_id: str
    """Backend, weight packing, reduction order."""

    def digest(self) -> bytes:
        """16 bytes: BLAKE2b-128 of the fields as canonical JSON."""
        text = json.dumps(asdict(self), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        return blake2b(text.encode(), digest_size=KEY_BYTES).digest()


def salted(namespace: bytes, tenant_salt: bytes) -> bytes:
    """The tenant's own namespace, so that tenants share no page; the namespace itself for an empty salt."""
    if not tenant_salt:
        return namespace
    return blake2b(namespace + tenant_salt, digest_size=KEY_BYTES, person=b"headrace-tenant").digest()


def extend_key(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Key of the page that holds exactly `token_ids`, after the page (or namespace) `parent`."""
    return blake2b(parent + np.asarray(token_ids, dtype="<u4").tobytes(), digest_size=KEY_BYTES).digest()


def page_keys(namespace: bytes, token_ids: Sequence[int], page_size: int) -> list[bytes]:
    """Keys of the full pages of `token_ids`, in order; a partly filled last page has none."""
    data = np.asarray(token_ids, dtype="<u4").tobytes()
    step = 4 * page_size
    keys: list[bytes] = []
    key = namespace
    for start in range(0, len(data) - step + 1, step):
        key = blake2b(key + data[start : start + step], digest_size=KEY_BYTES).digest()
        keys.append(key)
    return keys
