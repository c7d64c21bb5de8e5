"""The spec: the one YAML that says what a cluster is made of."""

from cluster.spec.checks import ModelShape
from cluster.spec.document import SpecError
from cluster.spec.explain import without_password
from cluster.spec.listen import HostPort
from cluster.spec.load import LoadedSpec, check_models, default_spec, load_spec, parse_spec
from cluster.spec.render import render_spec
from cluster.spec.schema import DecodeGroup, GatewayGroup, KvGroup, ModelSpec, PrefillGroup, Spec, Timing, WorkerGroup
from cluster.spec.size import about_bytes

__all__ = [
    "DecodeGroup",
    "GatewayGroup",
    "HostPort",
    "KvGroup",
    "LoadedSpec",
    "ModelShape",
    "ModelSpec",
    "PrefillGroup",
    "Spec",
    "SpecError",
    "Timing",
    "WorkerGroup",
    "about_bytes",
    "check_models",
    "default_spec",
    "load_spec",
    "parse_spec",
    "render_spec",
    "without_password",
]
