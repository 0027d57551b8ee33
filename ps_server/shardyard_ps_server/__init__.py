"""The parameter server: holds partitions of jobs, applies pushes to them, and answers pulls.

Rooms, from top to bottom. A room imports only rooms below it.

- `service`: gRPC streams and requests, and the process.
- `hosting`: which jobs and partitions are here, and who may change them.
- `wal`: the write-ahead log. `checkpoint`: partitions into files, and back.
- `partition`: one partition. Ledger, step gate, dense blocks and their versions.
- `jit`: loops compiled when a server starts.
- `rows`: the tables of one partition, and the rows that readers hold.
- `tables`: one table. Index, rows, disk tier, expiry. It has a map of its own.
- `values`: versions of dense values, and the arithmetic of optimizers.

Follow one push: `service/exchange_stream.py`, `hosting/store.py`, `partition/partition.py`. `partition/ledger.py`
says whether it is new, a duplicate or out of order.
"""
