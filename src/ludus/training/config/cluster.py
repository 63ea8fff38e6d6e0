"""[cluster]: the processes of a run."""

from __future__ import annotations

import os
from typing import Literal

from pydantic import Field, model_validator

from ludus.core.config import Config, Place
from ludus.llm.http import is_address


class ClusterConfig(Config):
    """The processes of a run: those that train together, and those that sample (docs/distributed.md)."""

    engines: int = Field(default=0, ge=0, le=4096)
    """Processes that sample, each with a copy of the model on a device of its own, while others train; 0 is the
    trainer's own process, which samples the very module that it trains."""
    engine: str | None = None
    """The engine, by name (embedded, process, vllm, or one that an installed package registers) or as
    "file.py:Class" (docs/engine.md). Left out: vllm with servers, process with engines, else embedded."""
    servers: tuple[str, ...] = ()
    """Addresses of vLLM servers that sample instead, such as ["http://127.0.0.1:8000"] (ludus serve vllm)."""
    weights: Place | None = None
    """A folder through which servers get new weights, which they see under the same path; shared memory when
    left out, for servers on this machine."""
    trainer_ranks: int | None = Field(default=None, ge=1, le=65536)
    """Processes that train, one per GPU; 1 when left out, or as many as torchrun has started."""
    dp_replicate: int = Field(default=1, ge=1)
    """Copies of the model among the trainer ranks (HSDP): each is sharded over trainer_ranks / dp_replicate."""
    backend: Literal["auto", "nccl", "gloo"] = "auto"
    """Communication backend between ranks; auto is nccl on GPUs and gloo on CPUs."""
    timeout: float = Field(default=600.0, gt=0)
    """Seconds that ranks wait for each other within a step before the run ends with an error, and that an
    engine may take to start, to load weights, or to give a sign of life before it is started again."""
    restarts: int = Field(default=0, ge=0, le=1000)
    """How often a run whose trainer rank has died goes on from its last checkpoint by itself."""
    address: str | None = None
    """The Ray cluster that places the processes: "auto", "host:port", or "local" for one of our own."""
    nodes: int | None = Field(default=None, ge=1, le=65536)
    """Nodes that this cluster must have; with it, the address is "auto" (or RAY_ADDRESS) when left out."""

    tools: int = Field(default=0, ge=0, le=65536)
    """Ray actors for tools, and as many each for environments and for rewards; 0 is the process of the run."""

    @property
    def is_on_ray(self) -> bool:
        """Whether Ray places the processes; else they live on this machine."""
        return self.address is not None or self.nodes is not None

    @model_validator(mode="after")
    def _one_kind_of_engine(self) -> ClusterConfig:
        if self.servers and self.engines:
            raise ValueError(
                f"cluster.servers and cluster.engines = {self.engines}: give one of them, either servers that "
                "you have started or engines that the run starts"
            )
        for one in self.servers:
            if not is_address(one):
                raise ValueError(
                    f"cluster.servers: {one!r} is not an address such as http://127.0.0.1:8000"
                )
        if len(set(self.servers)) < len(self.servers):
            raise ValueError("cluster.servers names a server twice")
        if self.weights is not None and not (self.servers or self.engine):
            raise ValueError("cluster.weights is for cluster.servers, and there are none")
        if self.engine is not None and self.is_on_ray and self.engines:
            raise ValueError(
                f"cluster.engine = {self.engine!r} is made on this machine, and cluster.engines = "
                f"{self.engines} are placed by Ray: leave out one of them"
            )
        return self

    @model_validator(mode="after")
    def _on_ray(self) -> ClusterConfig:
        if self.tools and not self.is_on_ray:
            raise ValueError(
                f"cluster.tools = {self.tools} needs a Ray cluster: set cluster.address, to 'auto' for one "
                "that runs, or to 'local' for one of its own"
            )
        return self

    @model_validator(mode="after")
    def _divisible(self) -> ClusterConfig:
        if self.trainer_ranks is not None and self.trainer_ranks % self.dp_replicate:
            raise ValueError(
                f"cluster.dp_replicate = {self.dp_replicate} must divide cluster.trainer_ranks = "
                f"{self.trainer_ranks}"
            )
        return self


_LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def launched_rank() -> tuple[int, int]:
    """(rank, number of ranks) from torchrun's environment variables; (0, 1) without them."""
    if not all(name in os.environ for name in _LAUNCHED):
        return 0, 1
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
