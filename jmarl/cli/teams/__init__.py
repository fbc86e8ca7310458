"""Teams of commands: `--model` becomes agents, and they meet the environment of `--environment`.

May import everything but the commands. Open `sources.py` first.
"""
