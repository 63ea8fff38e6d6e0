"""[rl]: settings of reinforcement learning."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from ludus.core.config import ChoiceConfig, Config, ShortConfig
from ludus.rollouts.tree import TreeConfig
from ludus.training.config.rl_checks import check_rl
from ludus.training.config.run import ModelConfig
from ludus.training.config.stages import CRITIC_RATES, RL_RATES, BaseStageConfig, OptimizerConfig
from ludus.training.data.curricula import CurriculumConfig


class CriticConfig(Config):
    """A value function, for algorithms that need one (ppo)."""

    kind: Literal["model", "head"] = "model"
    """A copy of the model with a value head, or a head on the policy's own hidden states."""
    warmup_steps: int | None = Field(default=None, ge=0)
    """RL steps at the start in which only the critic learns; 5, or a quarter of a shorter stage's, when left
    out."""
    passes: int = Field(default=4, ge=1)
    """How often it goes over each step's episodes."""
    clip: float | None = Field(default=0.5, gt=0)
    """How far a value may move in one step before it gets no more gradient."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """Its own optimizer settings."""

    def for_model(self, model: ModelConfig, steps: int) -> CriticConfig:
        """With what is usual for the model and a stage of so many steps, where nothing is said."""
        warm_up = min(5, steps // 4) if self.warmup_steps is None else self.warmup_steps
        optimizer = self.optimizer.for_model(CRITIC_RATES, model)
        return self.model_copy(update={"warmup_steps": warm_up, "optimizer": optimizer})


Treatment = Literal["keep", "mask", "verltool"] | Annotated[float, Field(strict=True)]


class BrokenConfig(Config):
    """Treatment of episodes that went wrong by the model's doing: keep, mask, verltool, or a number to add.

    A masked episode is not trained on, but stays in its group's baseline with its reward; as VerlTool has it
    (C.2), with the reward 0. A number is added to its reward.
    """

    no_answer: Treatment = "keep"
    """It used up its turns without an answer or an ending."""
    over_length: Treatment = "keep"
    """It used up its tokens."""
    tool_error: Treatment = "keep"
    """One of its calls was malformed, unknown, or raised."""
    timed_out: Treatment = "keep"
    """One of its calls took too long or hit a limit."""
    void_turn: Treatment = "keep"
    """In one of its turns it neither called anything nor answered."""
    over_time: Literal["failure", "verltool"] = "failure"
    """It took longer than budgets.max_seconds: an infrastructure failure (played again, in neither loss nor
    baseline), or as VerlTool has it (reward 0, in the baseline, not in the loss, not played again)."""


class RefillConfig(Config):
    """DAPO's dynamic sampling: groups whose attempts all succeed or all fail are replaced by groups of further
    tasks; where no reward has a part "success", groups whose rewards are all equal before shaping."""

    rounds: int = Field(default=3, ge=1)
    """How often to play replacements; what is still without signal then stays."""


class OverlongConfig(Config):
    """DAPO's overlong shaping: a price for coming close to the longest length, rising over a buffer."""

    longest: int = Field(ge=2)
    """Tokens said, over the whole episode, from which on the price is paid in full."""
    buffer: int = Field(ge=1)
    """Over how many tokens before that it rises."""
    price: float = Field(default=1.0, gt=0)
    """The highest penalty."""

    @model_validator(mode="after")
    def _fits(self) -> OverlongConfig:
        if self.buffer > self.longest:
            raise ValueError("buffer cannot be larger than longest")
        return self


class PlateauConfig(Config):
    """End the stage when the use of a tool does not rise any more (ZeroTIR)."""

    metric: str = "tool_calls"
    """The metric of the training episodes: tool_calls, or of one tool tool/NAME/calls."""
    after: int = Field(default=100, ge=3)
    """Steps of the stage before it may end."""
    window: int = Field(default=50, ge=3)
    """Over how many of the last steps the trend is fitted."""
    tolerance: float = Field(default=0.05, ge=0)
    """A trend that gains at most this share of the mean over the window is a plateau."""


class KLControlConfig(Config):
    """An adaptive KL weight, which begins at `kl.weight` (Ziegler et al., 2019; verl's adaptive `kl_ctrl`)."""

    target: float = Field(gt=0)
    """The divergence from the reference to come to, in nats per token."""
    horizon: int = Field(default=10000, ge=1)
    """Episodes over which it changes by a fifth at most; nor does it change by more in a single step."""


class KLConfig(ShortConfig):
    """The divergence from the model that the stage started from; a number is its weight."""

    short = "weight"

    weight: float = Field(default=0.0, ge=0)
    """Its weight; at 0 no reference is loaded."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """How it is estimated from the sampled tokens."""
    place: Literal["loss", "reward"] = "loss"
    """Whether it is part of the loss, or of each token's reward."""
    control: KLControlConfig | None = None
    """Let the weight adapt, so that the divergence comes to a target."""


class StalenessConfig(ShortConfig):
    """How far the policy that plays may be behind the one that is trained; a number is its `steps`."""

    short = "steps"

    steps: int = Field(default=0, ge=0)
    """Steps that it may be behind: 0 waits for every episode of a step, above 0 episodes are played while
    others are trained on (asynchronous training)."""
    window: int = Field(default=1, ge=1)
    """Groups within which a finished one may be trained before an older one that is still being played: 1 is
    strict order. The lag is at most steps + ceil((window - 1) / rl.tasks) steps."""
    updates: bool = False
    """Allow several updates or epochs in a step with steps > 0, each of which adds to the lag."""
    stall_seconds: float = Field(default=3600.0, gt=0)
    """With steps > 0: seconds without a finished group after which a run that waits for one ends, and says for
    what it waits."""


class ReferenceSyncConfig(Config):
    """A reference that follows the policy (TR-DPO; TRL's `sync_ref_model`)."""

    every: int = Field(default=512, ge=1)
    """RL steps between two syncs (TRL's `ref_model_sync_steps`)."""
    mixup_alpha: float = Field(default=0.6, gt=0, le=1)
    """reference = alpha * policy + (1 - alpha) * reference (TRL's `ref_model_mixup_alpha`)."""


class ReplayBufferConfig(Config):
    """Experience replay: groups of earlier steps join later ones, importance-corrected, until they expire."""

    groups: int = Field(default=4, ge=1)
    """Stored groups that join each step, beside those that are played for it."""
    capacity: int = Field(default=256, ge=1)
    """Groups that are stored at most; the oldest make room."""
    max_lag: int = Field(default=8, ge=1)
    """Policy versions (steps) after which a group is dropped."""
    max_age: float | None = Field(default=None, gt=0)
    """Seconds after which a group is dropped; no limit when left out."""
    uses: int = Field(default=4, ge=1)
    """How often a group is trained on again at most."""


@dataclass(frozen=True, slots=True)
class RolloutSettings:
    """Rollout settings of a step, for any stage, and the treatment of its episodes."""

    tasks: int
    attempts: int
    refill: RefillConfig | None = None
    keep_attempts: int | None = None
    overlong: OverlongConfig | None = None
    broken: BrokenConfig = field(default_factory=BrokenConfig)
    tree: TreeConfig | None = None
    sampler: str | None = None


class RLConfig(BaseStageConfig):
    """Reinforcement learning."""

    label = "RL"
    can_end_early = True
    usual_rates = RL_RATES
    other_keys = "options of an algorithm are in its table: algorithm = { name = ..., OPTION = ... }"

    kind: Literal["rl"] = "rl"
    """What kind of stage this is."""
    algorithm: ChoiceConfig = ChoiceConfig(name="grpo")
    """How rewards become advantages and a loss: a name (`ludus train --help` lists them; docs/algorithms.md) or
    'file.py:function', or { name = "ppo", lam = 0.95 } with options of the advantages."""
    loss: ChoiceConfig = ChoiceConfig()
    """Another loss than the algorithm's own: a name, 'file.py:function', or { name = "cispo", clip_high = 4 }
    with its options; options alone are for the algorithm's own."""
    aggregation: ChoiceConfig = ChoiceConfig()
    """Another average over tokens than the algorithm's own, or its options: { length = 512 }."""
    correction: ChoiceConfig = ChoiceConfig()
    """Importance correction for samples of another policy: truncated (TIS), masked (MIS), or none, as { name =
    "masked", high = 2.0 }. When left out, truncated with staleness, and none without."""
    steps: int = Field(default=100, ge=0)
    """Training steps: play, score, update."""
    tasks: int = Field(default=16, ge=1)
    """Tasks (prompts) in a step."""
    attempts: int = Field(default=8, ge=1)
    """Episodes for each task: the group (TRL's `num_generations`, verl's `rollout.n`)."""
    tree: TreeConfig | None = None
    """Play each group as a tree: attempts that branch off others share their first turns (docs/trees.md)."""
    replay_buffer: ReplayBufferConfig | None = None
    """Train on groups of earlier steps again, until they are too old or a tool has changed."""
    staleness: StalenessConfig = StalenessConfig()
    """Asynchronous training: staleness = 1, or { steps = 1, window = 4 }."""
    updates: int = Field(default=1, ge=1)
    """Optimizer updates (mini-batches) in an epoch; the step's groups are split among them."""
    epochs: int = Field(default=1, ge=1, le=1000)
    """Passes over a step's episodes, of so many updates each (verl's `ppo_epochs`, TRL's `num_iterations`)."""
    target_kl: float | None = Field(default=None, gt=0)
    """Leave out a step's further updates once the policy has moved so far in it (`kl_old_k3`)."""
    kl: KLConfig = KLConfig()
    """The divergence from the model the stage started from: 0.01, or { weight = 0.01, place = "reward" }."""
    reference_sync: ReferenceSyncConfig | None = None
    """Let the reference follow the policy from time to time."""
    entropy: float = Field(default=0.0, ge=0)
    """Weight of an entropy bonus."""
    critic: CriticConfig | None = None
    """The value function; algorithms that need one have it with these settings or the usual ones."""
    loss_mask: bool = True
    """Train on the model's tokens alone. False trains on observations too: for ablations."""
    advantage_mask: bool = True
    """Let credit skip observations. False lets it flow through them: for ablations."""
    refill: RefillConfig | None = None
    """Replace groups without signal (DAPO's dynamic sampling)."""
    keep_attempts: int | None = Field(default=None, ge=2)
    """GRPO-RoC: of the attempts at a task, keep so many, the untidy among the correct ones less likely."""
    overlong: OverlongConfig | None = None
    """A price for length."""
    broken: BrokenConfig = BrokenConfig()
    """Treatment of broken episodes."""
    plateau: PlateauConfig | None = None
    """End the stage early when a tool's use does not rise any more; its power law is in the report."""
    curriculum: tuple[CurriculumConfig, ...] = ()
    """Settings that change while training, such as a growing horizon; or 'file.py:function', which gives their
    values (docs/hooks.md)."""
    sampler: str | None = None
    """Chooses the tasks of a step: learnable, or 'file.py:function' (docs/hooks.md). Left out, every task comes
    once an epoch."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """Optimizer settings."""

    @model_validator(mode="after")
    def _can_learn(self) -> RLConfig:
        check_rl(self)
        return self

    @field_validator(
        "curriculum", mode="before", json_schema_input_type=str | tuple[CurriculumConfig, ...]
    )
    @classmethod
    def _curriculum_function(cls, given: Any) -> Any:
        return ({"function": given},) if isinstance(given, str) else given

    @property
    def rollouts(self) -> RolloutSettings:
        """The rollout settings of a step."""
        return RolloutSettings(
            self.tasks,
            self.attempts,
            self.refill,
            self.keep_attempts,
            self.overlong,
            self.broken,
            self.tree,
            self.sampler,
        )

    def updates_before(self, step: int) -> int:
        """The policy's updates that are planned for the steps before this one, counted from 0."""
        warm_up = self.critic.warmup_steps if self.critic is not None else None
        return max(0, step - (warm_up or 0)) * self.updates * self.epochs

    @property
    def algorithm_settings(self) -> dict[str, Any]:
        """Keyword arguments for `load_algorithm`."""
        return {
            "name": self.algorithm.name,
            "options": self.algorithm.options,
            "loss": self.loss.name,
            "loss_options": self.loss.options,
            "aggregation": self.aggregation.name,
            "aggregation_options": self.aggregation.options,
            "correction": self.importance_correction,
            "correction_options": self.correction.options,
        }

    @property
    def importance_correction(self) -> str | None:
        """The correction in effect: what is said, or the usual one of stale samples."""
        if self.correction.name is None:
            return "truncated" if self.has_stale_samples else None
        return None if self.correction.name == "none" else self.correction.name

    @property
    def starts_at_training_pass(self) -> bool:
        """Whether ratios start from the training pass itself, which is the old policy where a step has one
        update.

        It saves the pass that would compute it. What else needs the old policy before that has it computed.
        """
        is_single = self.updates * self.epochs == 1 and self.loss_mask and self.kl.place == "loss"
        return self.has_stale_samples and self.importance_correction is not None and is_single

    @property
    def has_stale_samples(self) -> bool:
        """Whether steps train on samples of older weights."""
        return self.staleness.steps > 0 or self.replay_buffer is not None
