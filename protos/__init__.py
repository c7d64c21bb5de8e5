"""The wire: generated messages and stubs of `protos/headrace/v1`."""

from protos._gen.headrace.v1 import (
    common_pb2,
    control_pb2,
    control_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
    kvstore_pb2,
    kvstore_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)

__all__ = [
    "common_pb2",
    "control_pb2",
    "control_pb2_grpc",
    "inference_pb2",
    "inference_pb2_grpc",
    "kvstore_pb2",
    "kvstore_pb2_grpc",
    "worker_pb2",
    "worker_pb2_grpc",
]
