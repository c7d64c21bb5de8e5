"""The description of the HTTP API. The bodies are read by hand, so FastAPI cannot know them."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from cluster.gateway.bodies import ChatBody, CompletionBody

_BODIES: dict[str, type[BaseModel]] = {"/v1/chat/completions": ChatBody, "/v1/completions": CompletionBody}
_REFUSALS = {
    "400": "The request has to be changed; `param` names the field",
    "404": "No such model",
    "408": "The body did not come in time",
    "413": "The body is too large",
    "415": "The body is not said to be JSON",
    "429": "Every worker is full; come back after `retry-after-ms`",
    "500": "It was tried, and failed",
    "503": "No worker is there; come back after `retry-after-ms`",
}


def describe(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document."""
    document = get_openapi(title=app.title, version="1", routes=app.routes)
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    for path, body in _BODIES.items():
        schema = body.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas.update(schema.pop("$defs", {}))
        schemas[body.__name__] = schema
        operation = document["paths"][path]["post"]
        reference = {"schema": {"$ref": f"#/components/schemas/{body.__name__}"}}
        operation["requestBody"] = {"required": True, "content": {"application/json": reference}}
        operation["responses"] = {
            "200": {
                "description": "The answer, or its events if `stream` is true",
                "content": {"application/json": {}, "text/event-stream": {}},
            }
        } | {status: {"description": text, "content": {"application/json": {}}} for status, text in _REFUSALS.items()}
    not_found = {"description": "No such model", "content": {"application/json": {}}}
    document["paths"]["/v1/models/{name}"]["get"]["responses"]["404"] = not_found
    not_ready = {"description": "No request could be served now", "content": {"application/json": {}}}
    for path in ("/health", "/readyz"):
        document["paths"][path]["get"]["responses"]["503"] = not_ready
    return document
