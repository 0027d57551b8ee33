"""Compiles all loops that a server can need, to disk: `python -m shardyard_ps_server.jit`, as images and tests do."""

from shardyard.codecs.format import finiteness
from shardyard.codecs.warmup import warm_decoders
from shardyard_ps_server.jit import optimizer_warmup, table_warmup

if __name__ == "__main__":
    optimizer_warmup.main()
    warm_decoders()
    finiteness.warm()
    table_warmup.main(())
