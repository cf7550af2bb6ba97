"""The one multi-process helper of the tests: real gloo ranks on this machine, loopback only, no fixed port.

    def work(rank, world, n):            # module level, so that it pickles
        ...
        return picklable

    results = run_ranks(4, work, 3)      # results[rank]

Put many cases into one function: a call costs about a second whatever it does. A rank that raises fails the call with
its traceback, and a hang fails it after ``timeout`` seconds.
"""

from __future__ import annotations

import datetime
import multiprocessing
import os
import pickle
import sys
import time
import traceback
from multiprocessing.connection import wait

import torch
import torch.distributed as dist

PG_TIMEOUT_S = 20
# What each rank would import on its own, a second or more: the library, and what a first DTensor or trace needs.
PRELOAD = ["torch", "torch._dynamo", "torch.distributed.tensor", "torch.fx.experimental.proxy_tensor",
           "torch.fx.experimental.symbolic_shapes", "optree", "fsharding"]
GRACE_S = 2  # how long the other ranks may take to report, once one has failed


def run_ranks(world_size, fn, *args, timeout=90, process_group=True, survives=True):
    """Run ``fn(rank, world_size, *args)`` in ``world_size`` processes and return the list of results, by rank.

    A gloo process group is up when fn starts; with ``process_group=False`` only the environment of a launcher is (RANK,
    WORLD_SIZE, MASTER_ADDR, ...). Results travel by pickle. ``survives=False``: fn ends with a fault, after which the
    ranks can no longer meet. Raises AssertionError with the failing rank's traceback.
    """
    # The server lives here and keeps its port from the moment it is chosen, so that no other program can take it.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = _context()
    ranks = []
    for rank in range(world_size):
        reader, writer = context.Pipe(duplex=False)
        job = pickle.dumps((fn, args))
        job_args = (writer, job, rank, world_size, store.port, process_group, survives)
        process = context.Process(target=_rank_main, args=job_args)
        process.start()
        writer.close()
        ranks.append((process, reader))
    try:
        return _collect(ranks, time.monotonic() + timeout, timeout)
    finally:
        for process, reader in ranks:
            if process.is_alive():
                process.join(GRACE_S)
            if process.is_alive():
                process.kill()
            process.join()
            reader.close()


def _context():
    # A fork server that has imported torch once, and nothing else has run in it: children start in milliseconds, and
    # there are no threads to inherit.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context


def _collect(ranks, deadline, timeout):
    results, failures, pending = {}, [], {reader: rank for rank, (_, reader) in enumerate(ranks)}
    while pending:
        ready = wait(list(pending), max(0.0, deadline - time.monotonic()))
        if not ready:
            if failures:
                break
            raise AssertionError(f"ranks {sorted(pending.values())} did not finish within {timeout} s")
        for reader in ready:
            rank = pending.pop(reader)
            try:
                good, value = pickle.loads(reader.recv_bytes())
            except EOFError:
                good, value = False, f"the process ended without a word (exit code {ranks[rank][0].exitcode})"
            if good:
                results[rank] = value
            else:
                failures.append((rank, value))
                deadline = min(deadline, time.monotonic() + GRACE_S)
    if failures:
        rank, text = failures[0]
        others = f" (then also {[rank for rank, _ in failures[1:]]})" if len(failures) > 1 else ""
        raise AssertionError(f"rank {rank} of {len(ranks)} failed{others}:\n{text}")
    return [results[rank] for rank in range(len(ranks))]


def _rank_main(writer, job, rank, world_size, port, process_group, survives):
    torch.set_num_threads(1)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # these ranks talk through gloo, also on a machine with GPUs
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1",
                      MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True", GLOO_SOCKET_IFNAME=_loopback())
    try:
        fn, args = pickle.loads(job)
        limit = datetime.timedelta(seconds=PG_TIMEOUT_S)
        if process_group:
            dist.init_process_group("gloo", store=dist.TCPStore("127.0.0.1", port, is_master=False, timeout=limit),
                                    rank=rank, world_size=world_size, timeout=limit)
        value = pickle.dumps((True, fn(rank, world_size, *args)))
        if dist.is_initialized() and survives:
            dist.barrier()  # without it gloo may abort a rank whose peer is gone already
            dist.destroy_process_group()
        writer.send_bytes(value)
    except BaseException:  # whatever it is, the parent must hear of it
        writer.send_bytes(pickle.dumps((False, traceback.format_exc())))
    finally:
        writer.close()
        sys.stdout.flush()


def _loopback():
    return "lo0" if sys.platform == "darwin" else "lo"
