"""Asks the gRPC service of a ROLE at HOST:PORT how it is (grpc.health.v1), with its own certificate, which is in
FOLDER: exit status 0 if it is serving, else 1 and the reason. Without a certificate there, it is asked without TLS.

    healthcheck.py ROLE FOLDER HOST:PORT

Costs no torch and no numba: it runs every few seconds.
"""

import sys
from pathlib import Path
from typing import Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

TIMEOUT_S: Final = 3.0
OPTIONS: Final = [("grpc.enable_http_proxy", 0)]


def open_channel(role: str, folder: Path, address: str) -> grpc.Channel:
    if not (folder / "tls.crt").is_file():
        return grpc.insecure_channel(address, options=OPTIONS)
    authorities, key, certificate = ((folder / name).read_bytes() for name in ("ca.crt", "tls.key", "tls.crt"))
    shown = grpc.ssl_channel_credentials(authorities, key, certificate)
    named = ("grpc.ssl_target_name_override", f"{role}.shardyard")
    return grpc.secure_channel(address, shown, options=[*OPTIONS, named])


def main() -> int:
    role, folder, address = sys.argv[1:]
    with open_channel(role, Path(folder), address) as channel:
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
