"""A test backend of torch.distributed that moves tensors through host memory and gloo, and joins as NCCL does.

NCCL refuses two ranks on one device and gloo has no CUDA all-to-all. Here a call returns at once, as NCCL's does, with
its work queued on side streams, and `wait()` makes the caller's current stream wait, not the host:

    caller's stream:  ... point                                                  wait() = wait_event(done)
    "down" stream:         wait(point)  device->pinned  arrived := n
    worker thread:                                      until arrived, gloo on the pinned buffers, ready := n
    "up" stream:                                        until ready (a memory wait)  pinned->device  done

All CUDA calls of an operation are made by the thread that asks for it, when it asks; the worker makes none, so that no
lock of the driver (cudaMalloc and cudaHostAlloc synchronize) can stop it. Operations of a group keep their order.

    prompt   host tensors take the same path, with threads in the place of streams
    late     finds races on a CPU: what an operation writes is NaN from the call to its `wait()`, and what it reads must
             not change before that
    device   CUDA tensors; needs CUDA_DEVICE_MAX_CONNECTIONS=32, since a memory wait blocks its hardware queue

Types that NCCL refuses are refused in each. Not shown by any of them: NCCL's own order of two communicators, NVLink,
RDMA, and on a CPU two streams of one rank (see `tests/streams_model.py`).
"""

from staged.group import StagedGroup, install

__all__ = ["StagedGroup", "install"]
