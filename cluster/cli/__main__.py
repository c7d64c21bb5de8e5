"""`python -m cluster.cli` is the `headrace` command."""

import sys

from cluster.cli import main

sys.exit(main())
