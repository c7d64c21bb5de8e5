"""Pages wherever they live: layout, keys, pool and ledger, radix tree, codecs, transport, and the storage node."""
