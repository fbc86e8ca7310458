"""What a run is: fingerprints of its data, rewards, formatters and environments, by which a resume notices changes.

The room imports `config` and what comes before it. Open `fingerprint.py` first.
"""
