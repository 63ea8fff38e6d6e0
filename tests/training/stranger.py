"""A program that is no rank of a run and behaves like one: `stranger.py STORE_PORT RANK WAY MARK`.

It does not have the run's key. It connects to the store, and takes a rank's place in gloo's rendezvous; then,
by WAY, it gives random proofs, repeats what it hears, or says nothing; as rank 0 it sends a pickle that creates
the file MARK.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

HELLO = {"backend": "gloo", "timeout": 60, "replicas": 1, "device": "cpu", "threads": 1}


class Payload:
    def __init__(self, mark: str) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (Path(self.mark),)


def main(port: int, rank: int, way: str, mark: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    if not store.check(["ludus/hello"]):
        store.set("ludus/hello", json.dumps(HELLO))
    if not store.check([f"ludus/ready/{rank}"]):
        store.set(f"ludus/ready/{rank}", "1")
    inner = PrefixStore("ludus", store)
    dist.init_process_group("gloo", store=inner, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    if way == "silent":
        time.sleep(600)
    heard = torch.zeros(32, dtype=torch.uint8)
    for _ in range(2):  # their number, and their proof
        said = heard.clone() if way == "echo" else torch.randint(0, 256, (32,), dtype=torch.uint8)
        sending = dist.isend(said, 1 - rank)
        with suppress(RuntimeError):
            dist.recv(heard, 1 - rank)
            if sending is not None:
                sending.wait()
    if rank == 0:
        payload = bytes(32) + pickle.dumps(Payload(mark))
        store.set("ludus/call/1", str(len(payload)))
        with suppress(RuntimeError):
            dist.broadcast(torch.frombuffer(bytearray(payload), dtype=torch.uint8), 0)
    time.sleep(600)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
