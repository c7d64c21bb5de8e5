"""What the wire can carry at all."""

from __future__ import annotations

from collections.abc import Iterator

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from protos import common_pb2, control_pb2, inference_pb2, kvstore_pb2, worker_pb2

NAMES_OF_BYTES = {
    "key": "16 bytes",
    "parent_key": "16 bytes",
    "keys": "16 bytes each",
    "stored": "16 bytes each",
    "known": "16 bytes each",
    "refused": "16 bytes each",
    "added": "16 bytes each",
    "removed": "16 bytes each",
    "prefixes": "16 bytes each",
    "namespace": "16 bytes",
    "tenant_salt": "a short secret",
    "blob": "addresses of a transport",
}


def messages() -> Iterator[Descriptor]:
    for module in (common_pb2, control_pb2, inference_pb2, kvstore_pb2, worker_pb2):
        yield from module.DESCRIPTOR.message_types_by_name.values()


def test_no_message_has_a_place_for_the_bytes_of_a_page():
    """Bulk bytes travel by the page transport alone. A new field of bytes has to be named above, with what it holds."""
    found = {
        field.name for message in messages() for field in message.fields if field.type == FieldDescriptor.TYPE_BYTES
    }
    assert found <= set(NAMES_OF_BYTES), found - set(NAMES_OF_BYTES)


def test_numbers_of_bytes_seconds_and_tokens_say_so_in_their_names():
    """Units in field names: a plain float or double is a ratio, a penalty or a rate that is named as one."""
    units = ("_s", "_ms", "_bytes", "_tokens", "_per_s", "_pages", "_p", "_penalty")
    plain = {"temperature", "weight", "logprob", "value"}
    for message in messages():
        if message.GetOptions().map_entry:
            continue
        for field in message.fields:
            if field.type in (FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_DOUBLE) and field.message_type is None:
                assert field.name.endswith(units) or field.name in plain, f"{message.full_name}.{field.name}"
