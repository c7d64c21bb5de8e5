"""What an empty spec says is what a component does that is built without one."""

from __future__ import annotations

from cluster.router import RouterConfig
from cluster.spec import Spec
from decode_node.core import DecodeCoreConfig
from prefill_node.core import PrefillCoreConfig


def test_gateways_and_workers_have_the_defaults_of_the_spec() -> None:
    routing, timing = Spec().routing, Spec().timing
    router, decode, prefill = RouterConfig(), DecodeCoreConfig(), PrefillCoreConfig()
    assert router.local_prefill_max_tokens == decode.local_prefill_max_tokens == routing.local_prefill_max_tokens
    assert router.growth_reserve_tokens == routing.growth_reserve_tokens
    assert decode.pull_deadline_s == prefill.pull_deadline_s == timing.pull_deadline_s
    assert decode.grace_s == prefill.grace_s == timing.grace_s
