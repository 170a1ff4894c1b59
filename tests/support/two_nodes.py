"""A Ray cluster of two nodes with a processor each, in a process of its own: prints its address, ends with its input.

Ray keeps the token of a process's first cluster, so a cluster without one cannot begin where a search has run.
"""

from __future__ import annotations

import sys

from ray.cluster_utils import Cluster

from tune_cac.ray_backend.session import starting_alone

if __name__ == "__main__":
    with starting_alone():
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        with starting_alone():
            cluster.add_node(num_cpus=1)
            cluster.wait_for_nodes()
        print(cluster.address, flush=True)
        sys.stdin.read()
    finally:
        cluster.shutdown()
