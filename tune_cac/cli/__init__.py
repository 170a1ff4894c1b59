"""The command line: one file a command, each with `add_parser` and `run`.

``add_parser(commands, debug)`` adds the command: ``commands`` comes from `argparse.ArgumentParser.add_subparsers`, and
``debug`` is the parent parser of every command. ``run(arguments)`` takes parsed arguments and returns the exit code.
"""
