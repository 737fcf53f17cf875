"""Campaign on process group shutdown: Python exits while a collective over gloo is still running.

    python tests/faults/leaving.py                   as in `fit`, 40 pairs of processes
    python tests/faults/leaving.py --variant kept    with a process group that torch still references, as before

A gloo thread that releases a tensor needs the interpreter and aborts the process if the interpreter is shutting down.
The process group and its threads must therefore be destroyed before. But functions of torch that are imported while a
group exists, as Dynamo does for DistributedDataParallel, reference it as a default argument and keep it alive.
tests/training/test_distributed.py checks that `fit` leaves no such thread.
"""

import argparse
import importlib
import os
import subprocess
import sys
import tempfile
import time

import torch
import torch.distributed as dist

VARIANTS = ("free", "kept")
KEEPER = "torch.distributed.nn.functional"
DELAYS = (0.0, 0.002, 0.005, 0.01)  # delay of one process in seconds, around the exit of the other


def run_process(rank: int, store: str, variant: str, delay: float) -> None:
    """Start a collective and exit; the second process joins late."""
    if variant == "free":
        importlib.import_module(KEEPER)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    importlib.import_module(KEEPER)
    dist.barrier()
    if rank == 1:
        time.sleep(delay)
        dist.all_reduce(torch.ones(3))
        time.sleep(0.5)
        os._exit(0)  # only the other process is examined
    dist.all_reduce(torch.ones(3), async_op=True)
    dist.destroy_process_group()


def aborted(variant: str, delay: float) -> bool:
    """Start and end a process group of two processes; return whether the first one was aborted."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            __file__,
            "--variant",
            variant,
            "--delay",
            str(delay),
            "--store",
            f"{folder}/store",
            "--rank",
        ]
        pair = [subprocess.Popen([*command, str(rank)]) for rank in range(2)]
        try:
            first, second = (process.wait(timeout=120) for process in pair)
        finally:
            for process in pair:
                process.kill()
    if max(first, second) > 0:
        sys.exit("a process failed in another way")
    return first < 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--variant", choices=VARIANTS, default=VARIANTS[0])
    for name, kind in (("--delay", float), ("--store", str), ("--rank", int)):  # for a single process
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.store is not None:
        run_process(arguments.rank, arguments.store, arguments.variant, arguments.delay)
        return 0  # regular interpreter shutdown
    result = sum(aborted(arguments.variant, DELAYS[number % len(DELAYS)]) for number in range(arguments.pairs))
    print(f"{arguments.pairs} pairs, {arguments.variant}: {result} aborted")
    return int(result > 0)


if __name__ == "__main__":
    sys.exit(main())
