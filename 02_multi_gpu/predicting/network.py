"""How long links between devices take to all-reduce a gradient."""

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Link:
    """What connects two devices, in each direction.

    latency: seconds before the first byte arrives; bandwidth: bytes/s.
    per_gpu: every GPU has such a port of its own; otherwise the GPUs of a node share one.
    """

    name: str
    latency: float
    bandwidth: float
    per_gpu: bool = True


# VENDORS' FIGURES, NOT MEASURED HERE. Bandwidth: NVLink 4 has 900 GB/s, the sum of both
# directions (https://www.nvidia.com/en-us/data-center/h100/); a DGX H100 has a port of
# 400 Gbit/s for each of its 8 GPUs (https://docs.nvidia.com/dgx/dgxh100-user-guide/).
# Latency: the constants with which NCCL chooses its algorithms, protocol Simple
# (https://github.com/NVIDIA/nccl/blob/master/src/graph/tuning.cc); for Ethernet with TCP,
# kernel to kernel (https://www.wwt.com/article/the-basics-of-high-performance-networking).
# A copy gets about 84% of such a line rate: 380 of 450 GB/s
# (https://github.com/NVIDIA/nccl/issues/1264).
NVLINK = Link("NVLink 4, in a node", 3.4e-6, 450e9)
NETWORKS = (
    Link("InfiniBand NDR, 400 Gbit/s a GPU", 14e-6, 50e9),
    Link("Ethernet, 100 Gbit/s a node", 50e-6, 12.5e9, per_gpu=False),
    Link("Ethernet, 25 Gbit/s a node", 50e-6, 3.125e9, per_gpu=False),
)


@dataclass(frozen=True)
class Cluster:
    """Full nodes of several GPUs: the link inside a node, and the network between nodes."""

    gpus_per_node: int
    inside: Link
    network: Link

    @property
    def ports(self) -> int:
        """The ports of a node to the network."""
        return self.gpus_per_node if self.network.per_gpu else 1


def make_clusters(gpus_per_node: int, link_share: float) -> list[Cluster]:
    """A cluster for each of NETWORKS. An all-reduce gets `link_share` of the line rate."""
    inside = slow_down(NVLINK, link_share)
    clusters = []
    for network in NETWORKS:
        between = slow_down(network, link_share)
        clusters.append(Cluster(gpus_per_node, inside, between))
    return clusters


def slow_down(link: Link, share: float) -> Link:
    """The link with this share of its bandwidth."""
    return replace(link, bandwidth=share * link.bandwidth)


def all_reduce_seconds(size: float, devices: int, cluster: Cluster) -> float:
    """Seconds to all-reduce `size` bytes over N devices of a cluster.

    Taken is one ring through all GPUs, or the hierarchy of Jia et al. 2018
    (https://arxiv.org/abs/1807.11205), whichever is faster, as NCCL would. In the
    hierarchy, half a ring inside each node comes before a ring or a tree between nodes,
    and the other half after it. Each port of a node sends its part of the bytes.
    """
    if devices <= cluster.gpus_per_node:
        return ring_seconds(size, devices, cluster.inside)
    nodes = devices // cluster.gpus_per_node
    part = size / cluster.ports
    by_ring = ring_seconds(part, nodes, cluster.network)
    by_tree = tree_seconds(part, nodes, cluster.network)
    inside = ring_seconds(size, cluster.gpus_per_node, cluster.inside)
    hierarchy = inside + min(by_ring, by_tree)
    return min(hierarchy, one_ring_seconds(size, devices, cluster))


def ring_seconds(size: float, devices: int, link: Link) -> float:
    """Seconds to all-reduce `size` bytes in a ring: 2(N-1) messages of size/N in a row.

    No algorithm moves fewer bytes (Patarasuk and Yuan 2009,
    https://doi.org/10.1016/j.jpdc.2008.09.002).
    """
    message = link.latency + size / devices / link.bandwidth
    return 2 * (devices - 1) * message


def tree_seconds(size: float, devices: int, link: Link) -> float:
    """Seconds to all-reduce `size` bytes up and down a pipelined tree.

    It has fewer messages in a row than a ring, and moves more bytes. NCCL's own estimate,
    https://github.com/NVIDIA/nccl/blob/master/src/graph/tuning.cc.
    """
    if devices == 1:
        return 0.0
    depth = math.ceil(math.log2(devices))
    return 2 * (depth * link.latency + size / link.bandwidth)


def one_ring_seconds(size: float, devices: int, cluster: Cluster) -> float:
    """Seconds to all-reduce `size` bytes in one ring, which enters each node once."""
    nodes = devices // cluster.gpus_per_node
    bandwidth = cluster.ports * cluster.network.bandwidth
    if cluster.gpus_per_node > 1:
        bandwidth = min(bandwidth, cluster.inside.bandwidth)
    hops_inside = (devices - nodes) * cluster.inside.latency
    hops_between = (nodes - 1) * cluster.network.latency
    moved = 2 * (devices - 1) / devices * size
    return 2 * (hops_inside + hops_between) + moved / bandwidth
