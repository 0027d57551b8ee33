"""What all commands share at the terminal. This folder knows no command.

In: options, settings and errors. Out: loaded settings, a signal as an event, and an error as text.

`options` has `-c`, `--set`, `--log-format` and the end by a signal. `error_output` prints an error: what happened, why,
and what to do.
"""
