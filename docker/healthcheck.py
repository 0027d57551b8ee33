"""Asks the gRPC service at HOST:PORT how it is (grpc.health.v1): exit status 0 if it is serving, else 1 and the reason.

Costs no torch and no numba: it runs every few seconds.
"""

import sys
from typing import Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

TIMEOUT_S: Final = 3.0


def main() -> int:
    address = sys.argv[1]
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        try:
            answer = health.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            sys.stdout.write(f"{address}: {error.code().name}: {error.details()}\n")
            return 1
    sys.stdout.write(f"{address}: {health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)}\n")
    return 0 if answer.status == health_pb2.HealthCheckResponse.SERVING else 1


if __name__ == "__main__":
    sys.exit(main())
