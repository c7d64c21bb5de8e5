"""What a page is, what it is called, who owns it, and where the prefix cache finds it."""

from kvstore.pages.cache import ColdPage, PageCache, allocate_region
from kvstore.pages.digest import bytes_digest, page_digests
from kvstore.pages.keys import KEY_BYTES, Namespace, extend_key, page_keys, salted
from kvstore.pages.layout import PageLayout
from kvstore.pages.ledger import InvalidTransition, Ledger, OutOfPages, Owner, PinKind
from kvstore.pages.tree import PageTree

__all__ = [
    "KEY_BYTES",
    "ColdPage",
    "InvalidTransition",
    "Ledger",
    "Namespace",
    "OutOfPages",
    "Owner",
    "PageCache",
    "PageLayout",
    "PageTree",
    "PinKind",
    "allocate_region",
    "bytes_digest",
    "extend_key",
    "page_digests",
    "page_keys",
    "salted",
]
