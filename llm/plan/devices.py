"""What one device is and how it is wired: memory, arithmetic, bandwidths."""

import dataclasses

from llm.metrics.hardware import PEAK_TFLOPS

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Device:
    """A device that holds one rank, in the units of data sheets.

    Attributes:
        gib: GiB that a process finds.
        tflops: Dense bf16 TFLOP/s of matrix products; of a GPU, the figure that the log's MFU uses.
        fp32_tflops: The same in fp32, which torch does not replace by tf32 unless told to.
        bandwidth: GB/s of its memory.
        node_link: GB/s, one way, to other devices of the node.
        network_link: GB/s, one way, to other nodes: its share of the node's adapters.
    """

    gib: float
    tflops: float
    fp32_tflops: float
    bandwidth: float
    node_link: float
    network_link: float


DEVICES = {
    # NVIDIA's data sheets of H100 SXM5 and H200 SXM; NVLink 4 has 900 GB/s both ways, and a
    # DGX H100 one 400 Gbit/s adapter for each GPU.
    "h100-80gb": Device(79.1, PEAK_TFLOPS["H100"], 67, 3350, 450, 50),
    "h200-141gb": Device(139.8, PEAK_TFLOPS["H200"], 67, 4800, 450, 50),
    # NVIDIA's data sheets of A100 SXM4; NVLink 3 has 600 GB/s both ways, and a DGX A100 one
    # 200 Gbit/s adapter for each GPU.
    "a100-40gb": Device(39.4, PEAK_TFLOPS["A100"], 19.5, 1555, 300, 25),
    "a100-80gb": Device(79.1, PEAK_TFLOPS["A100"], 19.5, 2039, 300, 25),
    # One of the two dies of an AMD MI250X (data sheet: 383 TFLOP/s, 3.2 TB/s and 128 GB in
    # all); in Frontier and LUMI a die reaches its neighbours over 50 GB/s links, four of
    # which are counted, and one 200 Gbit/s adapter serves two dies.
    "mi250x": Device(64.0, PEAK_TFLOPS["MI250X"], 47.9, 1638, 100, 12.5),
    # One of the two stacks (tiles) of an Intel Data Center GPU Max 1550 (data sheet: 839
    # TFLOP/s with XMX, 3.2 TB/s and 128 GB in all); in Aurora twelve share eight 200 Gbit/s
    # adapters, and Xe Link has 15 GB/s a way to each other card.
    "pvc": Device(64.0, PEAK_TFLOPS["GPU Max 1550"], 26, 1638, 75, 16.7),
    # A core's share of a server; give --memory_gib and --device_peak_tflops what is yours.
    "cpu": Device(16.0, 0.1, 0.1, 20, 10, 1),
}
