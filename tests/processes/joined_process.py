"""A process of several: joins, adds up an array that is divided over all, and does what its arguments say.

python joined_process.py [wait | exchange | fail RANK] [--strategy X]
"""

import sys
import time

import jmarl

jmarl.join_processes(timeout=20)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from jax.sharding import NamedSharding, PartitionSpec  # noqa: E402

from jmarl.models.sharding import make_mesh  # noqa: E402

where = NamedSharding(make_mesh(f"data={jax.device_count()}").mesh, PartitionSpec("data"))


@jax.jit
def total():
    return jax.lax.with_sharding_constraint(jnp.arange(4.0 * jax.device_count()), where).sum()


print(f"total {float(total())} of {jax.process_count()} processes, {jax.device_count()} devices", flush=True)
what = sys.argv[1] if len(sys.argv) > 1 else ""
if what == "fail" and jax.process_index() == int(sys.argv[2]):
    {}["no such city"]
while what in ("wait", "exchange", "fail"):
    time.sleep(0.05)
    if what == "exchange":
        float(total())
