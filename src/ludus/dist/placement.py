"""Where the processes of one run live in a Ray cluster: what `ludus train` asks this room for.

Trainer ranks are packed, for their links; engines are spread; tools live on nodes without GPUs where there are
some. Rank 0 is the process of `ludus train`: an actor holds its place on its node, and speaks for it.

A rollout engine is an `EmbeddedEngine` in an actor, with weights of its own. New weights are put into Ray's
object store once, by the trainer. Every node fetches them once, however many engines it has: they share its
memory, and copy from it into their modules in place. The store holds two versions at most, the newest and the
one before.

Who waits for whom: requests to an engine are calls of the actor, many at once. A call that never ends tells
of its death, and one every few seconds, which the engine's thread answers between two steps, of a hang. The
caller has the deadlines (`ReplicatedEngine`).
"""

from __future__ import annotations

import asyncio
import importlib
import os
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from ludus.core.failures import ConfigError, EngineError
from ludus.core.generation import Engine
from ludus.core.messages import Json, ToolSet
from ludus.dist.actors import HostedEnvs, HostSessions, RayHost, RewardHost, RunActor, hosted
from ludus.dist.cluster import Claim, RayCluster, cause_of, in_group, interface_of, load_ray, on_node
from ludus.engine import EngineConfig
from ludus.engine.replicas.process import ReplicaSettings, RequestedReplica, ServedEngine, checked
from ludus.engine.replicas.weights import WEIGHTS, copy_into, load_into
from ludus.envs.served import LOADER as ENV_LOADER
from ludus.remote.channel import Frame
from ludus.remote.processes import ScratchFolder
from ludus.tools.hosting import ToolReference
from ludus.tools.hosting.host import LOADER as TOOL_LOADER
from ludus.training.ranks.steps import spawn_rank

_PING_SECONDS = 5.0

_SEAT_SECONDS = 60.0


class WeightObjects:
    """The folders of a `WeightSource` in the object store: each version is put there once, for all engines."""

    def __init__(self) -> None:
        self._versions: dict[int, Any] = {}
        self._lock = threading.Lock()

    def put(self, folder: Path, version: int) -> Any:
        """The object with the weights of a version. Run it in a thread: it takes as long as copying them."""
        with self._lock:
            if version not in self._versions:
                mapped = np.memmap(folder / WEIGHTS, np.uint8, "r")
                self._versions[version] = load_ray().put(np.asarray(mapped))
                for old in sorted(self._versions)[:-2]:
                    del self._versions[old]
            return self._versions[version]


class EngineActor(RunActor):
    """One engine."""

    async def start(self, head: Json, files: Mapping[str, bytes], weights: Any) -> Json:
        """Load a model from its files; they are kept, without the weights, for architectures whose weights go
        by other names in files."""
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # everything comes from folders
        self._served, self._files = ServedEngine(), dict(files)
        with _model_folder(files, weights) as folder:
            reply, _ = await self._served.answer(
                {**head, "operation": "start", "folder": str(folder)}, b""
            )
        await self.tell({"version": head["version"]})
        return reply

    async def load_weights(self, weights: Any, version: int) -> Json:
        """Copy new weights into the module, from the memory that this node's engines share."""

        async def load() -> tuple[Json, bytes]:
            await self._served.engine.replace_weights(lambda: self._copy(weights), version)
            return {}, b""

        reply, _ = await self._served.told(load)
        await self.tell({"version": version})
        return reply

    def _copy(self, weights: Any) -> None:
        if not copy_into(self._served.engine.model, weights):
            with _model_folder(self._files, weights) as folder:
                load_into(self._served.engine.model, folder)

    async def perform(self, head: Json, body: bytes) -> tuple[Json, bytes]:
        return await self._served.answer(head, body)


class RayReplica(RequestedReplica):
    """An engine in an actor."""

    def __init__(
        self,
        number: int,
        settings: ReplicaSettings,
        cluster: RayCluster,
        claim: Claim,
        group: Any,
        weights: WeightObjects,
        *,
        hang_seconds: float,
    ) -> None:
        self._number, self._settings, self._hang_seconds = number, settings, hang_seconds
        self._cluster, self._claim, self._group, self._weights = cluster, claim, group, weights
        self._actor: Any = None
        self._end: asyncio.Task[str] | None = None
        self._version = -1

    @property
    def name(self) -> str:
        return f"engine {self._number} (a Ray actor)"

    @property
    def policy_version(self) -> int:
        return self._version

    async def start(self, folder: Path, version: int) -> None:
        await self.close()
        where = in_group(self._group, self._number)
        self._actor = self._cluster.start(EngineActor, "engine", self._number, self._claim, where)
        settings = self._settings
        head = {
            "version": version,
            "device": settings.device,
            "dtype": settings.dtype,
            "threads": settings.threads,
            "engine": settings.engine.model_dump(mode="json"),
        }
        files = _other_files(folder)
        weights = await asyncio.to_thread(self._weights.put, folder, version)
        checked(await self._call("start", head, files, weights))
        self._version = version
        self._end = asyncio.create_task(self._watch(self._actor))

    async def load_weights(self, folder: Path, version: int) -> None:
        weights = await asyncio.to_thread(self._weights.put, folder, version)
        checked(await self._call("load_weights", weights, version))
        self._version = version

    async def ended(self) -> str:
        end = self._end
        if end is not None:
            await asyncio.wait([end])
            if not end.cancelled():
                return end.result()
        return f"{self.name} was ended"

    async def close(self) -> None:
        end, self._end = self._end, None
        if end is not None:
            end.cancel()
            await asyncio.gather(end, return_exceptions=True)
        actor, self._actor = self._actor, None
        if actor is not None:
            self._cluster.kill(actor)

    async def _ask(self, operation: str, head: Json, body: bytes) -> Frame:
        found: Frame = await self._call("perform", {**head, "operation": operation}, body)
        return found

    async def _call(self, method: str, *arguments: Any) -> Any:
        ray, actor = load_ray(), self._actor
        if actor is None:
            raise EngineError(f"{self.name} is not running")
        answer = getattr(actor, method).remote(*arguments)
        try:
            return await answer
        except asyncio.CancelledError:
            ray.cancel(answer)
            raise
        except ray.exceptions.RayError as error:
            raise EngineError(f"{self.name} died: {cause_of(error)}") from error

    async def _watch(self, actor: Any) -> str:
        """Return when it has died or does not answer, with the reason."""
        ray = load_ray()
        end = asyncio.ensure_future(_awaited(actor.live.remote()))
        try:
            while True:
                done, _ = await asyncio.wait([end], timeout=min(_PING_SECONDS, self._hang_seconds / 4))
                if done:
                    await end
                    return f"{self.name} ended"
                async with asyncio.timeout(self._hang_seconds):
                    await actor.perform.remote({"operation": "ping"}, b"")
        except TimeoutError:
            return f"{self.name} did not answer for {self._hang_seconds:g} s"
        except ray.exceptions.RayError as error:
            return f"{self.name} died: {cause_of(error)}"
        finally:
            end.cancel()


def _other_files(folder: Path) -> dict[str, bytes]:
    """Files of a model's folder other than its weights: its configuration, its tokenizer."""
    others = [file for file in folder.iterdir() if file.is_file() and file.name != WEIGHTS]
    return {file.name: file.read_bytes() for file in others}


@contextmanager
def _model_folder(files: Mapping[str, bytes], weights: Any) -> Iterator[Path]:
    """A folder with these files and weights, for as long as a model is loaded from it.

    An actor is ended by a kill, at any time. So its weights are in memory that has no name, to which the folder
    has a link: that ends with the process, and gigabytes are never left behind.
    """
    scratch, memory = ScratchFolder("ludus-replica-"), os.memfd_create("ludus-weights")
    try:
        with open(memory, "wb", closefd=False) as file:
            file.write(memoryview(weights))
        for name, data in files.items():
            (scratch.path / name).write_bytes(data)
        (scratch.path / WEIGHTS).symlink_to(f"/proc/{os.getpid()}/fd/{memory}")
        yield scratch.path
    finally:
        os.close(memory)
        scratch.remove()


async def _awaited(answer: Any) -> Any:
    return await answer


class RayPlacement:
    """The places of a run."""

    def __init__(
        self,
        run: str,
        *,
        address: str | None,
        nodes: int | None,
        ranks: int,
        engines: int,
        tools: int,
        hosts: int,
        gpus: bool,
    ) -> None:
        """Join the cluster and reserve everything.

        Args:
            run: What `ludus cluster` calls it.
            address: "auto", "host:port", or "local" for a cluster of our own.
            nodes: How many nodes there must be.
            ranks: Processes that train, rank 0 among them.
            engines: Engines that sample; with none, rank 0 samples.
            tools: Actors of each host of tools, environments or rewards.
            hosts: How many such hosts there are.
            gpus: Whether ranks and engines have a GPU each.
        """
        each = 1.0 if gpus else 0.0
        self._rank = Claim("trainer rank", ranks, each)
        self._engine = Claim("engine", engines, each)
        self._tool = Claim("tool actor", tools)
        claims = [self._rank, self._engine, Claim(self._tool.role, tools * hosts)]
        self._hosts: list[RayHost | RewardHost] = []
        self.cluster = RayCluster(run, address, nodes, claims, has_weights=engines > 0)
        self.address = self.cluster.own_address
        self.interface = interface_of(self.address)
        try:
            self._seat = self._take_seat()
            others = Claim(self._rank.role, ranks - 1, each)
            self._ranks = self.cluster.reserve(others, "PACK") if others.count else None
            self._engines = self.cluster.reserve(self._engine, "SPREAD") if engines else None
        except BaseException:
            self.cluster.close()
            raise

    def _take_seat(self) -> Any:
        """Hold rank 0's place, with the GPU that is its own."""
        ray, claim = load_ray(), self._rank
        own = ray.get_runtime_context().get_node_id()
        seat = self.cluster.start(RunActor, "trainer", 0, claim, on_node(own))
        try:
            status = ray.get(seat.status.remote(), timeout=_SEAT_SECONDS)
        except ray.exceptions.GetTimeoutError:
            raise ConfigError(
                f"waited {_SEAT_SECONDS:g} seconds for a place for rank 0 on this node "
                f"({self.cluster.own_address}), which others hold: {claim}"
            ) from None
        ray.get(seat.tell.remote({"pid": os.getpid()}))
        if claim.gpus:
            # CUDA has looked at the environment already, so that the GPU is chosen by its number
            importlib.import_module("torch").cuda.set_device(int(status["gpu_ids"][0]))
            os.environ["LOCAL_RANK"] = str(status["gpu_ids"][0])
        return seat

    def launch(self, variables: Mapping[str, str]) -> RayRank:
        """Start a trainer rank on the node that was reserved for it."""
        rank = int(variables["RANK"])
        where = in_group(self._ranks, rank - 1)
        actor = self.cluster.start(RankActor, "trainer", rank, self._rank, where)
        return RayRank(self.cluster, actor, variables)

    def replicas(
        self, dtype: str, engine: EngineConfig, threads: int | None, hang_seconds: float
    ) -> list[Engine]:
        """The engines, not started yet: on a GPU each, or on the host."""
        device = "cuda:0" if self._engine.gpus else "cpu"  # Ray shows an actor its own GPU only
        settings = ReplicaSettings(device, dtype, engine, threads)
        weights = WeightObjects()
        return [
            RayReplica(
                number,
                settings,
                self.cluster,
                self._engine,
                self._engines,
                weights,
                hang_seconds=hang_seconds,
            )
            for number in range(self._engine.count)
        ]

    async def host_tools(self, references: Sequence[ToolReference]) -> ToolSet:
        """Tools, in actors."""
        return HostSessions(await self._host(references, TOOL_LOADER))

    async def host_envs(self, envs: Mapping[str, ToolReference]) -> dict[str, Any]:
        """Environments, in actors: what makes them, by name."""
        host = await self._host(list(envs.values()), ENV_LOADER)
        described = (await host.ask("envs", None, {}))["envs"]
        return {one["name"]: HostedEnvs(host, one) for one in described}

    async def _host(self, references: Sequence[ToolReference], loader: str) -> RayHost:
        host = RayHost(references, self._tool.count, loader=loader, cluster=self.cluster)
        self._hosts.append(host)
        await host.start()
        return host

    async def host_rewards(self, specs: Sequence[Any], rewards: Sequence[Any]) -> list[Any]:
        """Rewards, in actors that build them from their specs."""
        host = RewardHost(self.cluster, self._tool, specs)
        self._hosts.append(host)
        await host.start()
        return hosted(host, rewards)

    def report(self, phase: str, step: int, total: int, metrics: Mapping[str, float]) -> None:
        """Report the run's progress to `ludus cluster`; called after every step."""
        self._seat.tell.remote({"phase": phase, "step": step, "steps": total})

    async def close(self) -> None:
        """End everything that lives in the cluster."""
        try:
            for host in self._hosts:
                await host.stop()
        finally:
            self.cluster.close()


class RankActor(RunActor):
    """One rank."""

    async def serve(self, variables: Mapping[str, str]) -> int:
        """Run the rank; its exit code."""
        if Path.cwd() != Path(self._folder):
            raise ConfigError(
                f"this node has no folder {self._folder}: every trainer rank writes its part of a checkpoint "
                "into the run's folder, which must be on storage that all nodes share"
            )
        address = load_ray().util.get_node_ip_address()
        interface = interface_of(address)
        if interface is not None and "GLOO_SOCKET_IFNAME" not in os.environ:
            os.environ["GLOO_SOCKET_IFNAME"] = interface
        # Ray shows an actor its own GPU only, so that this is the first one
        process = spawn_rank({**variables, "LOCAL_RANK": "0"})
        await self.tell({"pid": process.pid})
        code: int = await asyncio.to_thread(process.wait)
        return code


class RayRank:
    """A rank as `ludus.training.ranks` knows processes."""

    def __init__(self, cluster: RayCluster, actor: Any, variables: Mapping[str, str]) -> None:
        self._cluster, self._actor = cluster, actor
        self._code = actor.serve.remote(dict(variables))
        self._how = ""

    def poll(self) -> int | None:
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        ray = load_ray()
        done, _ = ray.wait([self._code], timeout=timeout)
        if not done:
            raise subprocess.TimeoutExpired("a trainer rank", timeout or 0)
        try:
            code: int = ray.get(self._code)
        except ray.exceptions.RayTaskError as error:
            self._how = f"could not be started ({error.cause})"
            return 1
        except ray.exceptions.RayError as error:
            self._how = f"was lost with its Ray actor ({cause_of(error)})"
            return 1
        return code

    def kill(self) -> None:
        self._cluster.kill(self._actor)

    @property
    def how(self) -> str:
        """How it was lost, where that is more than an exit code."""
        return self._how
