"""The steps that all trainer ranks do together. Rank 0 alone plays episodes and owns the run's folder.

    rank 0      plays, writes the run ─ perform("train_step", rows) ──┐
    every rank  load_policy ─ open_stage ─ train_step ... train_step ─┴─ save_policy ...

The steps are collective: the same on every rank and in the same order. Rank 0 names the next one
(`Ranks.perform`) with its settings and the step's rows, which travel as tensors (`wire.py`); the others wait
for it (`serve_rank`). Within a step all ranks compute the same things, except that each has its share of the
micro-batches (`optim/sharding.py`). With one process a step is a plain call.

Each rank holds its part of every weight, gradient and moment; it reads its parts from files and writes them to
files (`models/sharded.py`). Only where rank 0's embedded engine samples does rank 0 have a whole copy beside
that: `sampled`, into which each update is gathered tensor by tensor. Other engines get files, which are
gathered in the same way (`write_weights`).
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import PrefixStore

from ludus.core.failures import LudusError
from ludus.core.messages import MediaSpan
from ludus.core.registry import import_object
from ludus.model import use_ludus_attention
from ludus.model.images import forget_features
from ludus.training.config.stages import BaseStageConfig, OptimizerConfig
from ludus.training.models.loading import load_model
from ludus.training.models.lora import adapter_parameters, is_adapted
from ludus.training.models.references import adapter_reference, saved_adapter
from ludus.training.models.sharded import (
    ModelSource,
    load_sharded,
    save_policy,
    score_tokens,
    write_merged,
)
from ludus.training.optim.learner import Learner, frozen
from ludus.training.optim.sharding import (
    ALONE,
    PeerFailed,
    RankGroup,
    ShardedModel,
    join_group,
    leave_group,
    local,
    module_of,
    named_weights,
    shard_of,
)
from ludus.training.ranks.wire import (
    ERROR,
    HELLO,
    READY,
    STEP,
    STOP,
    WATCHED,
    SignedStore,
    chosen_interface,
    gloo_through,
    join_store,
    torchrun_interface,
    unpack_step,
)

C = TypeVar("C", bound=BaseStageConfig)

TRAINERS = "ludus.training.stages:trainer_class"
"""By name: the trainers of the stages build on this module (`StageTrainer`)."""
OPTIMIZER = "optimizer.safetensors"
STEPS = frozenset({
    "load_policy", "open_stage", "prepare_stage", "train_step", "measure", "restart", "save_stage",
    "load_stage", "save_policy", "write_engine_weights", "score",
})  # fmt: skip
"""Steps that rank 0 can ask for."""

_PATIENCE = timedelta(days=1)


class RankSteps:
    """The steps on one rank. All ranks do each of them at the same time."""

    allowed = STEPS

    def __init__(self, group: RankGroup = ALONE) -> None:
        self.group = group
        self.policy: nn.Module
        """The trained model; of several ranks each has its part."""
        self.sampled: nn.Module | None = None
        """On rank 0, where its own engine samples and several ranks train: the whole copy that it samples."""
        self.source: ModelSource | None = None
        """Where the policy came from, where there are several ranks."""
        self.stage: StageTrainer[Any] | None = None
        self._gathers = False

    def perform(self, step: str, arguments: tuple[Any, ...]) -> Any:
        """Do a step, which all other ranks do as well."""
        if step not in self.allowed:
            raise ValueError(f"there is no step {step!r} of the trainer ranks")
        return getattr(self, step)(*arguments)

    # The steps

    def load_policy(self, source: ModelSource, gathers: bool) -> None:
        """Read this rank's part of the model that is trained; rank 0 may have a copy that it `gathers` into."""
        self.source, self._gathers = source, gathers
        self.policy = load_sharded(source, self.group)

    def open_stage(self, plan: StagePlan[Any]) -> None:
        """Make what the stage trains with."""
        self.stage = None  # the last one's memory is free before
        self.stage = import_object(TRAINERS)(plan.config)(self, plan)

    def prepare_stage(self, source: ModelSource | None, folder: Path) -> None:
        """Make what else the stage reads; `folder` has the weights that it began with, where it needs them."""
        self.opened.prepare(source, folder)

    def train_step(self, rows: Any, settings: StepSettings) -> dict[str, float]:
        """Learn from a step's rows; the weights that are sampled here are the new ones then."""
        metrics = self.opened.learn(rows, settings)
        self._gather()
        return metrics

    def measure(self, rows: Any) -> float:
        """The loss on rows that are not learned from."""
        return self.opened.measure(rows)

    def restart(self, source: ModelSource | None, folder: Path) -> None:
        """Return to the weights that the stage began with."""
        self.opened.restart(source, folder)
        self._gather()

    def save_stage(self, folder: Path) -> None:
        """Write this rank's part of the stage's state into a checkpoint."""
        self.opened.save(folder)

    def load_stage(self, folder: Path) -> None:
        """Go on from a checkpoint, of however many ranks."""
        self.opened.load(folder)

    def save_policy(self, folder: Path) -> None:
        """Write this rank's part of the policy in Hugging Face format; of an adapted one, of the adapter."""
        save_policy(folder, self.policy)

    def write_engine_weights(self, folder: Path) -> None:
        """Gather the policy into a folder for engines of their own."""
        write_merged(folder, self.policy)

    def score(self, tokens: Sequence[int], media: Sequence[MediaSpan]) -> list[float]:
        """The policy's log-probability of each token."""
        return score_tokens(self.policy, tokens, media)

    # What the steps use

    @property
    def opened(self) -> StageTrainer[Any]:
        """The stage that is trained."""
        assert self.stage is not None, "no stage has been opened"
        return self.stage

    def load_frozen(self, source: ModelSource) -> nn.Module:
        """A model that is read and not trained, sharded as the policy is."""
        if self.group.size > 1:
            return load_sharded(source, self.group, trains=False)
        model, _ = load_model(source.config, source.seed)
        use_ludus_attention(model)
        return frozen(model)

    @torch.no_grad()
    def _gather(self) -> None:
        if not isinstance(self.policy, ShardedModel) or not self._gathers:
            return
        known = {} if self.sampled is None else dict(self.sampled.named_parameters())
        for name, whole in self.policy.wholes(trainable=True):
            if known:
                known[name].copy_(whole)


class Ranks:
    """The ranks as rank 0 sees them. This class is one process alone."""

    size = 1

    def __init__(self, rank0: RankSteps | None = None) -> None:
        self.rank0 = rank0 or RankSteps()
        """Rank 0's own part."""

    @classmethod
    def alone(cls, policy: nn.Module) -> Ranks:
        """One process with a model that is there already."""
        made = cls()
        made.rank0.policy = policy
        return made

    def perform(self, step: str, *arguments: Any) -> Any:
        """Do a step on all ranks at once, and give rank 0's result back."""
        return self.rank0.perform(step, arguments)

    def close(self) -> None:
        """End the other ranks."""


@dataclass(frozen=True, slots=True)
class StagePlan(Generic[C]):
    """Settings of a stage's trainer, besides the policy."""

    config: C
    total: int
    """Optimizer steps, over which the learning rate is scheduled."""
    seed: int
    temperature: float = 1.0
    bare_reference: bool = False
    """The reference of an adapted policy is the model without the adapter."""


@dataclass(frozen=True, slots=True)
class StepSettings:
    """Settings of a step of a stage, besides its rows."""

    number: int
    """Number of the step in the plan, from 0, which decides the learning rate."""
    kl: float = 0.0
    """The KL coefficient, which may adapt."""
    version: int | None = None
    """The version of the policy that is trained."""


class StageTrainer(Generic[C]):
    """The trainer of a stage on every rank: its optimizer, the models that it reads, and its updates."""

    def __init__(self, rank: RankSteps, plan: StagePlan[C]) -> None:
        self.rank, self.plan, self.config = rank, plan, plan.config
        self.learner = self._new_learner()

    def _new_learner(self) -> Learner:
        plan, optimizer = self.plan, self.optimizer
        return Learner(self.rank.policy, optimizer, plan.total, plan.temperature, plan.seed)

    @property
    def optimizer(self) -> OptimizerConfig:
        """The policy's."""
        found: OptimizerConfig = self.config.optimizer  # type: ignore[attr-defined]
        return found

    def prepare(self, source: ModelSource | None, folder: Path) -> None:
        """Before the first step, or the first one after a checkpoint."""

    def load_start(self, source: ModelSource | None, folder: Path) -> nn.Module:
        """The reference model: the weights that the stage began with, which are in a folder."""
        policy = self.rank.policy
        if is_adapted(policy):
            return adapter_reference(policy, folder, self.plan.bare_reference)
        assert source is not None, "a reference of all weights is read from somewhere"
        return self.rank.load_frozen(source)

    def learn(self, rows: Any, settings: StepSettings) -> dict[str, float]:
        """Change the weights by optimizer steps on these rows; their metrics."""
        raise NotImplementedError

    def measure(self, rows: Any) -> float:
        raise NotImplementedError

    def restart(self, source: ModelSource | None, folder: Path) -> None:
        """Return to the weights that the stage began with, and to an optimizer that knows nothing."""
        policy = self.rank.policy
        forget_features(policy)
        with torch.no_grad():
            if is_adapted(policy):
                start = saved_adapter(policy, folder)
                for name, parameter in adapter_parameters(module_of(policy)):
                    local(parameter).copy_(shard_of(start[name], parameter))
            else:
                loaded = self.load_start(source, folder)
                for (_, own), (_, other) in zip(
                    named_weights(policy), named_weights(loaded), strict=True
                ):
                    local(own).copy_(local(other))
        self.learner = self._new_learner()

    def save(self, folder: Path) -> None:
        self.learner.save(folder / OPTIMIZER)

    def load(self, folder: Path) -> None:
        self.learner.load(folder / OPTIMIZER)


def serve_rank(steps: type[RankSteps] = RankSteps) -> None:
    """Do the steps until rank 0 says to stop, and end. The environment tells the rank."""
    for number in (
        signal.SIGINT,
        signal.SIGHUP,
    ):  # a terminal's signals are rank 0's to hear, which saves first
        signal.signal(number, signal.SIG_IGN)
    is_watched = bool(os.environ.get(WATCHED))
    if not is_watched:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun also sends it to all
    logging.getLogger("ludus").setLevel(logging.ERROR)  # rank 0 says it all
    warnings.simplefilter("ignore")
    store, rank, size = join_store()
    if is_watched:
        threading.Thread(target=_end_with_parent, args=(store,), daemon=True).start()
    interface = chosen_interface(None) if is_watched else torchrun_interface()
    try:
        store.set(f"{READY}/{rank}", b"1")
        hello = json.loads(_waited_for(store, HELLO))
        group = join(store, rank, size, hello, interface)
        _serve(store, rank, steps(group))
    except LudusError as error:
        _end(f"trainer rank {rank} ended: {error}")
    leave()


def _serve(store: SignedStore, rank: int, steps: RankSteps) -> None:
    number = 0
    while (told := _waited_for(store, f"{STEP}/{(number := number + 1)}")) != STOP:
        message = torch.empty(int(told), dtype=torch.uint8)
        try:
            dist.broadcast(message, 0)
        except RuntimeError:  # rank 0 is gone
            os._exit(1)
        packed = store.read(f"{STEP}/{number}/message", message.numpy().tobytes())
        _perform(packed, steps, store, f"{ERROR}/{number}/{rank}")


def _perform(message: bytes, steps: RankSteps, store: SignedStore, key: str) -> None:
    group = steps.group
    try:
        step, arguments = unpack_step(message)
        steps.perform(step, arguments)
        group.agree()
    except PeerFailed:
        group.reset()  # rank 0 knows, and decides
    except Exception as error:  # noqa: BLE001 - whatever it is, rank 0 has to hear of it
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{type(error).__name__}: {error} ({where.filename}:{where.lineno})"
        store.set(key, text.encode())
        try:
            group.tell(error)
        except PeerFailed:
            group.reset()
        except RuntimeError:  # a lost connection: rank 0 is gone
            _end(f"a trainer rank ended: {text}")


def _waited_for(store: SignedStore, name: str) -> bytes:
    """A value of the store, however long it takes; ends the process where the store is gone."""
    while True:
        try:
            store.inner.wait([name], _PATIENCE)  # a store that is gone closes its connection
            return store.get(name)
        except RuntimeError as error:
            is_store = isinstance(error, dist.DistStoreError) or str(error) == "Wait timeout"  # a file's
            if not (is_store and "timeout" in str(error).lower()):
                os._exit(1)


def _end(text: str) -> None:
    """End at once: what is left of a collective would wait for the others."""
    print(text, file=sys.stderr, flush=True)
    os._exit(1)


def _end_with_parent(store: SignedStore) -> None:
    """Rank 0, or the actor that has started this process, holds the other end of this pipe."""
    while os.read(sys.stdin.fileno(), 1):
        pass
    store.close()
    os._exit(1)


# Starting a rank on this machine, and connecting to the others, which rank 0 does in the same way.


def spawn_rank(
    variables: Mapping[str, str], steps: type[RankSteps] = RankSteps
) -> subprocess.Popen[bytes]:
    """Start a rank on this machine. It ends when this process does."""
    paths = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
    environment = {**os.environ, **variables, "PYTHONPATH": paths, WATCHED: "1"}
    own = f"from {steps.__module__} import {steps.__name__}"
    code = f"from ludus.training.ranks.steps import serve_rank; {own}; serve_rank({steps.__name__})"
    # in a session of its own: Ctrl-C in a terminal is for rank 0 alone, also while this one still imports
    return subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stdin=subprocess.PIPE, start_new_session=True
    )


def join(
    store: SignedStore, rank: int, size: int, hello: dict[str, Any], interface: str | None
) -> RankGroup:
    """Connect this process to all others, as rank 0 has said, and ask them for the key."""
    device = torch.device(hello["device"])
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", rank)))
    if hello["threads"] is not None:
        torch.set_num_threads(hello["threads"])
    hook = sys.excepthook
    with gloo_through(interface):
        dist.init_process_group(
            hello["backend"],
            store=PrefixStore("ludus", store.inner),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=hello["timeout"]),
        )
        sys.excepthook = hook  # torch's puts "[rank0]:" before every line of a traceback, and stays
        store.prove_membership(rank, [dist.group.WORLD])
        group = join_group(device, hello["replicas"])
    assert group.mesh is not None
    store.prove_membership(
        rank, [one for one in group.mesh.get_all_groups() if one is not dist.group.WORLD]
    )
    return group


def leave() -> None:
    """This process trains alone again."""
    leave_group()
    if dist.is_initialized():
        dist.destroy_process_group()
