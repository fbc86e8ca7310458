"""A local cluster of Ray with two nodes, in a process of its own: starting one forks, which the process of JAX must not.

Prints its address. A line on standard input removes the second node; the end of the input ends the cluster.
"""

import sys

from ray.cluster_utils import Cluster

if __name__ == "__main__":
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "include_dashboard": False})
    second = cluster.add_node(num_cpus=4)
    cluster.wait_for_nodes()
    print(cluster.address, flush=True)
    for _ in sys.stdin:
        cluster.remove_node(second)
        print("removed", flush=True)
    cluster.shutdown()
