"""Print which levels hold on this machine and why the others do not: `python -m jmarl.sandbox`.

The exit status is 0 if one of S4, S3 and S2 holds.
"""

import sys

from jmarl.sandbox import levels

reasons = levels()
for level, reason in reasons.items():
    print(f"{level}  {reason or 'holds'}")
sys.exit(0 if any(not reasons[level] for level in ("S4", "S3", "S2")) else 1)
