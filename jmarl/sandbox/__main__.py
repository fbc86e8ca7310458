"""`python -m jmarl.sandbox`: which levels hold on this machine, and why the others do not."""

import sys

from jmarl.sandbox import levels

found = levels()
for level, reason in found.items():
    print(f"{level}  {reason or 'holds'}")
sys.exit(0 if any(not found[level] for level in ("S4", "S3", "S2")) else 1)
