"""What the commands do with settings between reading and running them.

The room imports all rooms before the command line. Open `completion.py` first.
"""
