"""Who is in the yard and in each job, and what the members report.

In: registrations, heartbeats and goodbyes, with the time as an argument. Out: which incarnations live, which lease
has run out, how far a job is. What becomes of a lost worker's work is decided in `machine` and `work`.

- `membership`: the members of the yard, their incarnations and leases. Read it first.
- `roster`: the workers of one job, those that departed, and how long the job waits for more.
- `runs`: the launches that have joined one job.
- `progress`: step, samples and rate, from the workers' reports.
- `nonfinite`: how many gradients of each worker were not finite.
- `readers`: the readers of one job, and for how long its values stay for them.
- `evaluations`: what evaluators report, and the best version that they keep.
"""
