"""From a YAML file to a checked Spec."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from cluster.spec.checks import ModelShape, cross_checks, model_checks
from cluster.spec.document import Document, SpecError
from cluster.spec.explain import explain
from cluster.spec.schema import ModelSpec, Spec


@dataclass(frozen=True, slots=True)
class LoadedSpec:
    """A spec and the document that it came from, so that later checks can still point at a line."""

    spec: Spec
    document: Document


def default_spec() -> LoadedSpec:
    """The laptop's cluster."""
    return LoadedSpec(Spec(), Document("", "the default spec"))


def load_spec(path: Path) -> LoadedSpec:
    """Read and check a spec. Relative paths in it are taken from its own folder and become absolute.

    Raises SpecError, which names file, line and field of everything that is wrong.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise SpecError(f"{path}: cannot read the spec: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SpecError(f"{path}: not UTF-8 text: {error.reason} at byte {error.start}") from error
    return parse_spec(text, name=str(path), folder=path.resolve().parent)


def parse_spec(text: str, *, name: str, folder: Path) -> LoadedSpec:
    """As `load_spec`, from text. name: what messages call it. folder: where relative paths start."""
    document = Document(text, name)
    try:
        spec = Spec.model_validate(document.data)
    except ValidationError as error:
        raise document.error(explain(error.errors())) from error
    problems = list(cross_checks(spec))
    if problems:
        raise document.error(problems)
    models = [_absolute(model, folder) for model in spec.models]
    return LoadedSpec(spec.model_copy(update={"models": models}), document)


def check_models(loaded: LoadedSpec, shape_of: Callable[[ModelSpec], ModelShape]) -> None:
    """Check the spec against the models' own files.

    shape_of: may raise ValueError or OSError for a model that cannot be read.
    Raises SpecError like `load_spec`.
    """
    problems = list(model_checks(loaded.spec, shape_of))
    if problems:
        raise loaded.document.error(problems)


def _absolute(model: ModelSpec, folder: Path) -> ModelSpec:
    """The model with its relative paths taken from `folder`."""

    def path(value: str | None) -> str | None:
        return None if value is None else os.path.normpath(folder / Path(value).expanduser())

    is_path = not model.weights.startswith(("package:", "random:"))
    return model.model_copy(
        update={
            "weights": path(model.weights) if is_path else model.weights,
            "config": path(model.config),
            "tokenizer": path(model.tokenizer),
        }
    )
