"""Settings: where they come from, and what each may be.

In: defaults, a YAML file, environment variables and flags. A later one wins over an earlier one. Out: one frozen
`Settings` with the origin of each value, or one ConfigurationError that lists all problems.

Read `settings` first: the settings themselves, with a file for each section. `configuration` combines the layers and
explains the result. `settings_file` reads YAML. `assignments` reads one value and says what is wrong with it.
"""
