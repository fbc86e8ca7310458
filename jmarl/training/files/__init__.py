"""What a run keeps on disk: checkpoints with manifests, the lock of its directory, fingerprints of its data.

Open `run_directory.py` first.
"""
