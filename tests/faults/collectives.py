"""Campaign on collectives: two processes exchange small tensors over gloo, many times.

    python tests/faults/collectives.py                               as in fedlas, 20,000 rounds of five
    python tests/faults/collectives.py --implementation compiled     as in a compiled loss
    python tests/faults/collectives.py --implementation functional   with torch's functional collectives

The results of every round are checked. With torch 2.15 on aarch64, `functional` ends in SIGABRT or SIGSEGV or hangs,
usually within a few thousand rounds; waiting for each collective immediately only delays this.
"""

import argparse
import importlib
import os
import signal
import sys
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from fedlas import ranks
from fedlas.training.distributed import FUNCTIONAL

WORLD = 2
IMPLEMENTATIONS = ("plain", "compiled", "functional")


def exchange(rank: int, rounds: int, implementation: str, folder: str) -> None:
    """Exchange the tensors of a training step: a few sums, a few rows and a scalar."""
    torch.set_num_threads(1)
    importlib.import_module(FUNCTIONAL)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    total, stacked = ranks.total, ranks.stacked
    if implementation == "compiled":
        total, stacked = (torch.compile(item, fullgraph=True, backend="aot_eager") for item in (total, stacked))
    if implementation == "functional":
        ranks._plain_total = lambda x: ranks.functional.all_reduce(x, "sum", ranks._world())
        ranks._plain_stacked = lambda x, count: ranks._gather(x.reshape(1, -1), 0, ranks._world()).view(count, *x.shape)
    for number in range(rounds):
        values = torch.full((50,), float(rank + number % 7))
        summed, gathered = total(values), stacked(values)
        highest = int(stacked(torch.tensor(rank)).max())
        none_negative = total((values < 0).float()) == 0
        rows = stacked(torch.full((50, 10), float(rank))).flatten(0, 1)
        expected = torch.arange(WORLD) + float(number % 7)
        assert (summed == expected.sum()).all()
        assert (gathered == expected[:, None]).all()
        assert (rows == torch.arange(WORLD).repeat_interleave(50)[:, None]).all()
        assert highest == WORLD - 1
        assert none_negative.all()
        if rank == 0 and (number + 1) % 5000 == 0:
            print(f"{number + 1} rounds", file=sys.stderr, flush=True)
    dist.destroy_process_group()


def run_processes(rounds: int, implementation: str, limit: float) -> str:
    """Return how the processes ended."""
    with tempfile.TemporaryDirectory() as folder:
        context = mp.start_processes(
            exchange, (rounds, implementation, folder), WORLD, join=False, start_method="spawn"
        )
        deadline = time.monotonic() + limit
        try:
            while not context.join(timeout=1):
                if time.monotonic() > deadline:
                    return f"not finished after {limit:.0f} s"
        except (mp.ProcessExitedException, mp.ProcessRaisedException) as error:
            return str(error).strip().splitlines()[-1]
        finally:
            for process in context.processes:
                if process.pid and process.is_alive():
                    os.kill(process.pid, signal.SIGKILL)
    return "every round right"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20_000)
    parser.add_argument("--implementation", choices=IMPLEMENTATIONS, default=IMPLEMENTATIONS[0])
    parser.add_argument("--limit", type=float, default=600.0, help="seconds")
    arguments = parser.parse_args()
    result = run_processes(arguments.rounds, arguments.implementation, arguments.limit)
    print(f"{arguments.rounds} rounds, {arguments.implementation}: {result}")
    return int(result != "every round right")


if __name__ == "__main__":
    sys.exit(main())
