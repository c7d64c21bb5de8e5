"""The storage node: keeps pages that left the workers' pools, and lends them."""
