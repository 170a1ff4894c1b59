"""The command line: one file a command, whose ``run`` is the `tune_cac.cli.command.Command` of its name."""
