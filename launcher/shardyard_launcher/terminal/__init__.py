"""What all commands share at the terminal. This folder knows no command.

In: options, settings and errors. Out: loaded settings, a signal as an event, answers of a coordinator, and text.

- `options`: the options for settings and for finding a yard, and the end by a signal. Read it first.
- `coordinator_client`: a command's connection to a coordinator. `member_answers`: one question to several members.
- `data_progress`: epoch, percent and time left of a running job. `quantities`: sizes and times in words.
- `tables`: tables for people. `error_output`: an error as text: what happened, why, and what to do.
"""
