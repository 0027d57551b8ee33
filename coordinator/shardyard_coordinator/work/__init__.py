"""Which worker computes which samples, and what counts.

In: requests for work, and the servers' watermarks, which say what has been applied. Out: leases under tokens, and which
samples are done, dropped or lost. Each sample counts once an epoch; docs/internals/ledger.md has the rules.

- `tokens` and `feeds`: what a lease and a feed are. Start here.
- Asynchronous jobs: `data_ledger` leases ranges of samples (`data_shards`: those of one feed).
- Synchronous jobs: `ranks` gives logical ranks to workers, `step_ledger` follows the steps.
- Mirrored jobs: `replica_book` forms the groups of workers that train together.
- `checkpoint_copy`: the ledger's copy in a checkpoint, and what is open again when partitions go back to it.
- Backup workers: `straggler_verdicts` says which ranks count in a step, `step_times` how long to wait for the rest.
- `quarantine`: batches that kill workers or have no finite gradient.
- `losses`: pushes that no worker can compute again, and residuals of compression, found and counted.
- `ledger_conversion`: converts one ledger to the other when a job changes its mode.
"""
