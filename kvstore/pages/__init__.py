"""What a page is, what it is called, who owns it, and where the prefix cache finds it."""

from kvstore.pages.cache import ColdPage, PageCache, allocate_region
from kvstore.pages.digest import bytes_digest, page_digests
from kvstore.pages.eviction import Eviction, LeafFrequency, LeafLru
from kvstore.pages.keys import KEY_BYTES, Namespace, extend_key, page_keys, salted
from kvstore.pages.layout import PageLayout
from kvstore.pages.ledger import InvalidTransition, Ledger, OutOfPages, Owner, PinKind
from kvstore.pages.rate import Rate
from kvstore.pages.tree import PageTree
from kvstore.pages.write_back import EvictPrefixes, OfferPages, OfferSettled, StorageChanged, WriteBack, WriteBackConfig

__all__ = [
    "KEY_BYTES",
    "ColdPage",
    "EvictPrefixes",
    "Eviction",
    "InvalidTransition",
    "LeafFrequency",
    "LeafLru",
    "Ledger",
    "Namespace",
    "OfferPages",
    "OfferSettled",
    "OutOfPages",
    "Owner",
    "PageCache",
    "PageLayout",
    "PageTree",
    "PinKind",
    "Rate",
    "StorageChanged",
    "WriteBack",
    "WriteBackConfig",
    "allocate_region",
    "bytes_digest",
    "extend_key",
    "page_digests",
    "page_keys",
    "salted",
]
