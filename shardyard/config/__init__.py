"""Settings: where they come from, and what each may be.

In: defaults, a YAML file, environment variables and flags; the later wins. Out: one frozen `Settings`, with the
origin of each value, or one ConfigurationError that lists all problems.

Read `settings` first: the settings themselves, a file for each section. `configuration` joins the layers and explains
the result. `settings_file` reads YAML, `assignments` reads one value and says what is wrong with it.
"""
