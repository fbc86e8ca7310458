"""The command `jmarl`: one module per subcommand, each with `add_arguments(parser)` and `run(args) -> exit code`.

May import everything. Open `main.py` first: it parses, picks the subcommand and turns errors into one line.
"""
