"""Channels and servers, the table of errors and statuses, and the in-process network.

grpc's fork handlers are switched off before grpc is imported: a training script forks (DataLoader with num_workers)
while channels are open, the children never use them, and the handlers can hang such a fork.
"""

import os

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
