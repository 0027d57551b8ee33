"""What commands do with checkpoints, apart from their options.

- `take`: asks for checkpoints of running jobs, for `checkpoint take` and `save`.
- `save`: what `down` saves before it ends a yard.
- `kept`: the checkpoints in a state folder, as `down` lists and deletes them.
- `resume_notice`: from which checkpoints the jobs go on that `up` has found.
- `export`: the files that `checkpoint export` writes.
"""
