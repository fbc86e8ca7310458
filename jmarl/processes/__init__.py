"""Several processes as one run: start them, find each one's place, wait until all are there, end all when one fails.

The room imports only `jmarl.config`. Open `join.py` and `exchange.py` first; `launch.py` is behind the
command `jmarl launch`.
"""
