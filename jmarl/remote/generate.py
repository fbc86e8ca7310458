"""Write the Python modules of environments.proto beside it: `python -m jmarl.remote.generate`.

Needs grpcio-tools (extra `test`); who serves or connects does not. A test fails when the modules differ from the file.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROTO = Path("jmarl/remote/environments.proto")  # from the directory of the package, so that its imports are those of Python
ROOT = Path(__file__).resolve().parents[2]
OUTPUTS = ("environments_pb2.py", "environments_pb2.pyi", "environments_pb2_grpc.py")


def generate(directory: Path) -> None:
    """Write the modules to jmarl/remote of a directory."""
    flags = [f"--{kind}={directory}" for kind in ("python_out", "pyi_out", "grpc_python_out")]
    subprocess.run([sys.executable, "-m", "grpc_tools.protoc", f"--proto_path={ROOT}", *flags, str(PROTO)], check=True)


if __name__ == "__main__":
    generate(ROOT)
