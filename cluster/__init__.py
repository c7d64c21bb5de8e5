"""Everything that sees the whole cluster: spec, launching, control plane, router, gateway, the `headrace` command."""
