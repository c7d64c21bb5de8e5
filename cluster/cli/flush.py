"""`headrace flush`: empty the workers' own prefix caches."""

from __future__ import annotations

import argparse

from cluster.cli.control import call_control
from cluster.cli.which import ready_cluster
from protos import control_pb2


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "flush",
        help="empty the workers' prefix caches",
        description="Ask workers to drop every cached page that no request uses, after offering it to storage nodes.",
    )
    parser.add_argument("node_ids", nargs="*", metavar="NODE", help="such as decode-0; without any, every worker")
    parser.add_argument("--cluster", metavar="NAME", help="which cluster, where several run")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    addresses = ready_cluster(arguments.cluster)
    request = control_pb2.EvictPrefixesRequest(node_ids=arguments.node_ids)
    response = call_control(addresses.control, lambda stub, timeout_s: stub.EvictPrefixes(request, timeout=timeout_s))
    print(f"asked {', '.join(sorted(response.node_ids)) or 'nobody: no worker is registered'}")
    return 0
