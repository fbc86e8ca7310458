"""Files of a run: checkpoints with manifests, the lock of the output directory, fingerprints of data and reward.

The room imports `logs` and what comes before it. Open `run_directory.py` first.
"""
