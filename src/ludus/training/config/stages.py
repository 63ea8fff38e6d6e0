"""Settings of a run's stages, each of which trains or evaluates; RL's are in `rl.py`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from ludus.core.config import Config, Place, ShortConfig
from ludus.training.config.run import EvaluationSampling, ModelConfig

Decay = Annotated[float, Field(ge=0, lt=1, strict=True)]


@dataclass(frozen=True, slots=True)
class UsualRates:
    """Default learning rates of a kind of stage, by the kind of weights that are trained."""

    scratch: float
    """All weights of a model made from scratch, by this run or by one before it."""
    full: float
    """All weights of a pretrained model."""
    lora: float
    """An adapter."""

    def of(self, model: ModelConfig) -> float:
        if model.lora is not None:
            return self.lora
        return self.scratch if model.is_from_scratch else self.full


class MuonConfig(Config):
    """Muon's own settings (Jordan et al., 2024; Moonlight's scale, so that rates are those of AdamW)."""

    momentum: float = Field(default=0.95, ge=0, lt=1)
    """Decay of the running mean of gradients."""
    nesterov: bool = True
    """Look one step ahead with it."""
    iterations: int = Field(default=5, ge=1, le=20)
    """Newton-Schulz iterations by which an update is made orthogonal."""


class OptimizerConfig(Config):
    """The optimizer and its schedule."""

    name: Literal["adamw", "adamw_8bit", "paged_adamw_8bit", "muon"] = "adamw"
    """adamw; its states in 8 bits (package bitsandbytes, a GPU), also paged to the host; or muon for matrices
    of layers, with AdamW for embeddings, heads and vectors. All but adamw need a single trainer rank."""
    muon: MuonConfig = MuonConfig()
    """Settings of name = "muon"."""
    learning_rate: float | None = Field(default=None, gt=0)
    """Peak learning rate. When left out, the usual one of the stage for a model made from scratch, a pretrained
    one or an adapter (docs/training.md); a run prints it, and its recipe.json has it."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """The learning-rate schedule after the warm-up: constant, or down to a tenth of the peak over the updates
    that are planned, whether or not each of them is taken."""
    warmup_steps: int = Field(default=0, ge=0)
    """Planned updates over which it rises from 0."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay of matrices; vectors (norms, biases) have none."""
    betas: tuple[Decay, Decay] = (0.9, 0.99)
    """Decay of AdamW's running moments."""
    max_gradient_norm: float = Field(default=1.0, gt=0)
    """Longer gradients are scaled down to this."""
    micro_batch_tokens: int = Field(default=16384, ge=1)
    """At most so many tokens in one forward and backward pass; gradients are summed over such passes."""
    activation_memory: Literal["auto"] | Annotated[float, Field(gt=0, strict=True)] = "auto"
    """GiB that a pass may keep for its backward pass; "auto": what is free. Layers are recomputed to fit."""
    share_prefixes: bool = True
    """Compute a prefix that several rows of a pass begin with once; on a GPU only with flash attention."""
    router_aux_loss: float = Field(default=0.0, ge=0)
    """Weight of the routers' load-balancing loss in a mixture of experts (docs/models.md); 0 leaves it out."""

    @model_validator(mode="after")
    def _has_effect(self) -> OptimizerConfig:
        if self.name != "muon" and self.muon != MuonConfig():
            raise ValueError(f'muon would have no effect: name is "{self.name}"')
        return self

    @property
    def peak_rate(self) -> float:
        """The peak learning rate; of RL on a pretrained model, where nothing was decided."""
        return RL_RATES.full if self.learning_rate is None else self.learning_rate

    def for_model(self, rates: UsualRates, model: ModelConfig) -> OptimizerConfig:
        """With the usual learning rate, where it has none."""
        if self.learning_rate is not None:
            return self
        return self.model_copy(update={"learning_rate": rates.of(model)})


RL_RATES = UsualRates(scratch=5e-4, full=1e-6, lora=1e-5)
CRITIC_RATES = UsualRates(scratch=1e-3, full=1e-5, lora=1e-4)


class BaseStageConfig(Config):
    """Base of the settings of all stages.

    A new kind: a subclass, its place in `StageConfig` (recipe.py), a `Stage`, and a line in `STAGES`.
    """

    label: ClassVar[str]
    """Name of this kind of stage in sentences."""
    prefix: ClassVar[str] = ""
    """Prefix of its metrics, before the slash; RL's have none."""
    learns: ClassVar[bool] = True
    """Whether it changes the weights."""
    draws_tasks: ClassVar[bool] = True
    """Whether it plays training tasks, which the stage's own seed decides."""
    can_end_early: ClassVar[bool] = False
    """Whether `evaluation.patience` may end it."""
    saves_at_start: ClassVar[bool] = True
    """Whether a run that begins with it has a checkpoint before its first step."""
    usual_rates: ClassVar[UsualRates | None] = None
    """The learning rates of its optimizer where a recipe has none; None where it does not learn."""

    @property
    def title(self) -> str:
        """Name of the stage in sentences; by the loss, where a kind has several."""
        return self.label

    @property
    def total_steps(self) -> int:
        """The steps of the whole stage; one that has no `steps` is a single one."""
        return int(dict(self).get("steps", 1))

    @property
    def optimizers(self) -> dict[str, OptimizerConfig]:
        """Its optimizers by their key."""
        return {key: value for key, value in self if isinstance(value, OptimizerConfig)}

    @property
    def length_key(self) -> str | None:
        """The key by which a finished stage is made longer; None where it does not learn."""
        return "steps" if self.learns else None

    @property
    def needs_tasks(self) -> bool:
        """Whether it plays training tasks with these settings."""
        return self.draws_tasks and self.total_steps > 0

    @property
    def needs_rewards(self) -> bool:
        """Whether what it plays must be scored."""
        return self.needs_tasks


class SFTConfig(BaseStageConfig):
    """Supervised learning on demonstrations."""

    label = "the warm start"
    prefix = "sft"
    draws_tasks = False
    saves_at_start = False
    usual_rates = UsualRates(scratch=1e-3, full=2e-5, lora=2e-4)

    kind: Literal["sft"] = "sft"
    """What kind of stage this is."""
    demonstrations: Place | None = None
    """An expert as 'module:function', or conversations in a file, a folder of logs or 'dataset:NAME@SPLIT'."""
    columns: dict[str, str] = Field(default_factory=dict)
    """Which column of the data is which field, such as { prompt = "question", completion = "answer" }."""
    held_out: Annotated[float, Field(gt=0, lt=1, strict=True)] | Place | None = None
    """Conversations to measure the loss on: a share of the demonstrations, or their own file or dataset."""
    steps: int = Field(default=100, ge=1)
    """Optimizer steps; warm_start.steps = 0 leaves the warm start out."""
    epochs: float | None = Field(default=None, gt=0, le=1_000_000)
    """Passes over the demonstrations, instead of a number of steps."""
    batch: int = Field(default=32, ge=1)
    """Demonstrations in a step."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """Its own optimizer settings; every stage starts with a fresh optimizer."""

    @model_validator(mode="after")
    def _one_length(self) -> SFTConfig:
        if self.epochs is not None and self.steps != type(self).model_fields["steps"].default:
            raise ValueError("give steps or epochs, not both")
        return self

    @property
    def length_key(self) -> str:
        return "steps" if self.epochs is None else "epochs"

    def with_steps(self, found: int) -> SFTConfig:
        """A copy with a number of steps instead of epochs, over `found` demonstrations."""
        if self.epochs is None:
            return self
        learned = found - self.held_out_count(found)
        steps = max(1, math.ceil(self.epochs * learned / self.batch))
        return self.model_copy(update={"steps": steps, "epochs": None})

    @property
    def demonstrations_needed(self) -> int:
        """As many as the steps can use once, and the share that is kept out of training."""
        share = self.held_out if isinstance(self.held_out, float) else 0.0
        return math.ceil(self.steps * self.batch / (1 - share))

    def held_out_count(self, found: int) -> int:
        """How many of the demonstrations are kept out of training to measure the loss on."""
        share = self.held_out if isinstance(self.held_out, float) else 0.0
        return min(max(1, round(share * found)), found - 1) if share else 0


_MINING = ("tasks", "attempts", "margin")
"""Settings of a preference stage that apply only if it plays."""


class PreferenceLossConfig(ShortConfig):
    """A preference loss with its settings; a text is its name."""

    short = "name"

    name: Literal["dpo", "ipo", "simpo", "kto"] = "dpo"
    """dpo, ipo and simpo learn from pairs, kto from single episodes that are good or bad."""
    beta: float | None = Field(default=None, gt=0)
    """How strongly log-probabilities count: 0.1 when left out, and 2.0 for simpo."""
    gamma: float = Field(default=1.0, ge=0)
    """SimPO's target margin between the two rewards of a pair."""
    desirable_weight: float = Field(default=1.0, ge=0)
    """KTO's weight of good episodes."""
    undesirable_weight: float = Field(default=1.0, ge=0)
    """KTO's weight of bad episodes."""

    @model_validator(mode="after")
    def _has_effect(self) -> PreferenceLossConfig:
        for name, loss in _OF_A_LOSS.items():
            if getattr(self, name) != type(self).model_fields[name].default and loss != self.name:
                raise ValueError(f'{name} would have no effect: it is a setting of the loss "{loss}"')
        return self

    @property
    def scale(self) -> float:
        """Beta, or the usual one of the loss."""
        usual = 2.0 if self.name == "simpo" else 0.1
        return usual if self.beta is None else self.beta


_OF_A_LOSS = {"gamma": "simpo", "desirable_weight": "kto", "undesirable_weight": "kto"}
"""Settings that only one of the preference losses has."""


class PreferenceConfig(BaseStageConfig):
    """DPO and its kin: prefer one episode to another, on pairs mined from groups or given."""

    label = "preferences"
    prefix = "dpo"
    can_end_early = True
    usual_rates = UsualRates(scratch=1e-4, full=1e-6, lora=1e-5)

    kind: Literal["dpo"] = "dpo"
    """What kind of stage this is."""
    loss: PreferenceLossConfig = PreferenceLossConfig()
    """The loss: dpo, ipo, simpo or kto, or { name = "simpo", beta = 2.5 }."""
    pairs: Place | None = None
    """Given rows of prompt, chosen, rejected (for kto also prompt, completion, label); mined when left out."""
    columns: dict[str, str] = Field(default_factory=dict)
    """Which column of the given data is which field, such as { chosen = "accepted" }."""
    steps: int = Field(default=50, ge=1)
    """Optimizer steps; where pairs are mined, each step plays first."""
    batch: int = Field(default=16, ge=1)
    """Given pairs (for kto: episodes) in a step."""
    tasks: int = Field(default=16, ge=1)
    """Tasks to mine from in a step."""
    attempts: int = Field(default=4, ge=2)
    """Episodes for each of them: the best is preferred to the worst."""
    margin: float = Field(default=0.0, ge=0)
    """How much better in reward the chosen one must be."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """Optimizer settings."""

    @model_validator(mode="after")
    def _has_effect(self) -> PreferenceConfig:
        """Refuse settings of playing beside given pairs, and the other way round."""
        fields = type(self).model_fields
        changed = {name for name in fields if getattr(self, name) != fields[name].default}
        idle = [name for name in _MINING if name in changed]
        if self.pairs is not None and idle:
            raise ValueError(
                f"{' and '.join(idle)} would have no effect: with pairs from a file, nothing is played; leave "
                "them out, or leave out pairs to mine them"
            )
        if self.pairs is None and "batch" in changed:
            raise ValueError(
                "batch would have no effect: it is about pairs from a file, and how many are mined in a step "
                "is decided by tasks; set that, or pairs"
            )
        if self.columns and self.pairs is None:
            raise ValueError("columns names the columns of given data, and pairs names none")
        if self.loss.name == "kto" and self.pairs is not None and self.batch < 2:
            raise ValueError(
                "kto compares the episodes of a step with each other: batch must be at least 2"
            )
        return self

    @property
    def title(self) -> str:
        return {"dpo": "DPO", "ipo": "IPO", "simpo": "SimPO", "kto": "KTO"}[self.loss.name]

    @property
    def needs_tasks(self) -> bool:
        return self.pairs is None


class RejectionConfig(BaseStageConfig):
    """Rejection sampling; with several rounds AgentEvol's: explore, filter, imitate, repeat."""

    label = "rejection sampling"
    prefix = "rejection"
    usual_rates = UsualRates(scratch=1e-4, full=2e-5, lora=2e-4)

    kind: Literal["rejection"] = "rejection"
    """What kind of stage this is."""
    rounds: int = Field(default=1, ge=1)
    """How often to explore anew."""
    tasks: int = Field(default=64, ge=1)
    """Tasks to explore in a round."""
    attempts: int = Field(default=8, ge=1)
    """Episodes for each of them."""
    threshold: float = 1.0
    """The least reward of an episode that is imitated."""
    keep: int = Field(default=1, ge=1)
    """How many episodes of a task are imitated at most: the best, the shorter first."""
    steps: int = Field(default=50, ge=1)
    """Optimizer steps in a round."""
    batch: int = Field(default=32, ge=1)
    """Episodes in a step."""
    demonstrations: Place | None = None
    """Conversations to imitate beside one's own best episodes, as AgentEvol does: a file (also what `ludus
    synth`
    makes), or 'dataset:NAME@SPLIT'."""
    restart: bool = False
    """Begin each round's imitation from the weights that the stage began with, as AgentEvol does."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """Optimizer settings."""

    @property
    def total_steps(self) -> int:
        return self.rounds * self.steps

    @property
    def length_key(self) -> str:
        return "rounds"  # other steps would divide the steps that are done into other rounds

    @model_validator(mode="after")
    def _keeps_some(self) -> RejectionConfig:
        if self.keep > self.attempts:
            raise ValueError(
                f"keep = {self.keep} episodes of a task cannot be kept, where attempts = {self.attempts} "
                "are played"
            )
        return self


class DistillationConfig(BaseStageConfig):
    """On-policy distillation: the student plays, and a teacher scores its tokens (reverse KL)."""

    label = "distillation"
    prefix = "distill"
    can_end_early = True
    usual_rates = UsualRates(scratch=5e-4, full=1e-5, lora=1e-4)

    kind: Literal["distill"] = "distill"
    """What kind of stage this is."""
    teacher: Place
    """The teacher: a folder or a name on the hub, with the student's tokenizer."""
    steps: int = Field(default=100, ge=1)
    """Training steps: play, let the teacher score, update."""
    tasks: int = Field(default=16, ge=1)
    """Tasks in a step."""
    attempts: int = Field(default=4, ge=1)
    """Episodes for each of them."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """Optimizer settings."""

    @property
    def needs_rewards(self) -> bool:
        return False


class EvaluationStageConfig(BaseStageConfig, EvaluationSampling):
    """An evaluation on the held-out tasks, with pass@k."""

    label = "the evaluation"
    prefix = "eval"
    learns = False
    draws_tasks = False

    kind: Literal["eval"] = "eval"
    """What kind of stage this is."""
    attempts: int = Field(default=4, ge=1)
    """Episodes for each task."""
    pass_at: tuple[Annotated[int, Field(strict=True)], ...] = ()
    """The k of pass@k; powers of two up to the attempts when left out."""

    @field_validator("pass_at")
    @classmethod
    def _has_attempts(cls, pass_at: tuple[int, ...], known: ValidationInfo) -> tuple[int, ...]:
        attempts = known.data.get("attempts")
        if attempts is not None and not all(1 <= k <= attempts for k in pass_at):
            raise ValueError(f"pass@k needs k attempts, and there are {attempts}")
        return pass_at
