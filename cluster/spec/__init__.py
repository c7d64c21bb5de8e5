"""The spec: the one YAML that says what a cluster is made of."""

from cluster.spec.checks import ModelShape
from cluster.spec.document import SpecError
from cluster.spec.explain import without_password
from cluster.spec.listen import HostPort, parse_host_port
from cluster.spec.load import LoadedSpec, check_models, default_spec, load_spec, parse_spec
from cluster.spec.render import HEADING, render_spec
from cluster.spec.schema import ModelSpec, PrefillGroup, Spec, WorkerGroup
from cluster.spec.size import about_bytes

__all__ = [
    "HEADING",
    "HostPort",
    "LoadedSpec",
    "ModelShape",
    "ModelSpec",
    "PrefillGroup",
    "Spec",
    "SpecError",
    "WorkerGroup",
    "about_bytes",
    "check_models",
    "default_spec",
    "load_spec",
    "parse_host_port",
    "parse_spec",
    "render_spec",
    "without_password",
]
