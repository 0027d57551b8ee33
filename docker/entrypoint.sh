#!/bin/sh
# Starts a role with the image's compiled kernels in a folder that can be written.
#
# numba takes a cache folder only if it can write there, and the root file system may be read-only; where the processor
# is not the one that the image was built on, it compiles anew and keeps the result there.
set -eu

kernels=/opt/shardyard/kernels
if [ -d "$kernels" ]; then
    if ! mkdir -p "$NUMBA_CACHE_DIR" || ! cp -R "$kernels/." "$NUMBA_CACHE_DIR/"; then
        echo "error: cannot write to $NUMBA_CACHE_DIR" >&2
        echo "  why: compiled kernels are kept there, also where the root file system is read-only" >&2
        echo "  what to do: give the container a writable /tmp (docker run --tmpfs /tmp)" >&2
        exit 1
    fi
fi
exec "$@"
