"""The agent: starts the training processes of a machine, restarts those that a signal ended, and reports errors.

In: a launch (a script, its arguments, a number of workers), over gRPC or from the command line. Out: its output, its
events, and the first error by time. The agent knows neither torch nor gradients.

Read `supervision` first: it decides, without I/O, what is started, restarted or stopped. `launch` carries that out
with `processes`, which `fork_server` starts, and their `pipes`; `environment` is what each process finds in its
environment. `event_log` keeps the events for watchers. `kept_output` writes what processes print into files
(`output_files`), in a folder for each launch (`launch_folders`), where it outlives the agent. `error_report` says which
error to show. `service` is the gRPC service, `process` the role itself. `bootstrap` runs the script inside each
training process and writes its error file.
"""
