"""Generated from protos/shardyard/wire/v1 by `make protos`; do not edit."""
