"""The spec's text: what `headrace spec` prints and deploy/specs/ holds."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from cluster.spec import HostPort, Spec, parse_spec, render_spec
from cluster.spec import schema as schema_module
from cluster.spec.render import HEADING
from cluster.spec.size import about_bytes, format_bytes, parse_bytes

ROOT = Path(__file__).parents[3]


def test_the_shipped_laptop_spec_is_the_default_one() -> None:
    """Written with `headrace spec > deploy/specs/laptop.yaml`."""
    assert (ROOT / "deploy/specs/laptop.yaml").read_text() == render_spec(Spec(), HEADING)


def test_the_text_of_a_spec_loads_as_that_spec() -> None:
    spec = parse_spec(
        "cluster: two\nmodels: [{name: a, weights: /w, context_tokens: 9}, {name: b, weights: 'random:1', config: /c}]"
        "\nprefill: []\ndecode: [{model: a, threads: 2}, {model: b}]\ngateway: {http: '[::1]:0', grpc: 'host:5'}\n"
        "catalog: 'redis://u:p@h:1/2'\n",
        name="x",
        folder=Path("/"),
    ).spec
    assert parse_spec(render_spec(spec), name="x", folder=Path("/")).spec == spec


def sections() -> list[type[BaseModel]]:
    return [
        kind
        for kind in vars(schema_module).values()
        if isinstance(kind, type) and issubclass(kind, schema_module.Section)
    ]


@pytest.mark.parametrize("section", sections(), ids=lambda section: section.__name__)
def test_every_field_has_a_description_and_an_optional_one_an_example(section: type[BaseModel]) -> None:
    for name, field in section.model_fields.items():
        assert field.description, f"{section.__name__}.{name}"
        assert field.default is not None or field.examples, f"{section.__name__}.{name}"


def test_every_field_appears_in_the_text_of_the_default_spec() -> None:
    text = render_spec(Spec())
    for section in sections():
        for name in section.model_fields:
            assert f"{name}: " in text or f"{name}:\n" in text, name


@given(st.integers(min_value=0, max_value=1 << 50))
def test_a_size_reads_back_as_it_was_written(size: int) -> None:
    assert parse_bytes(format_bytes(size)) == size


def test_sizes_are_shown_in_three_digits() -> None:
    assert [about_bytes(size) for size in (0, 999, 1 << 10, 1500 << 20)] == ["0B", "999B", "1KiB", "1.46GiB"]


def test_an_address_shows_an_ipv6_host_in_brackets() -> None:
    assert [str(HostPort("::1", 8000)), str(HostPort("127.0.0.1", 8000))] == ["[::1]:8000", "127.0.0.1:8000"]
