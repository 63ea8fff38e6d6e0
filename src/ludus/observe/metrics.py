"""The metrics of a batch of episodes, and the catalogue of what every logged number means.

A name such as `reward/<part>` stands for a family. A name may start with the split it was measured on:
`eval/success` is `success` over the evaluation episodes. What users log themselves goes under `custom/`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from ludus.core.failures import Boundary, Fault
from ludus.core.trajectory import TURN_CUT, Group, SegmentKind, StopReason, Trajectory, is_success

Aggregate = Literal["mean", "sum", "max", "last"]

SPLITS = ("train", "eval", "sft", "dpo", "rejection", "distill", "rollout")
"""The prefixes that say which episodes or examples, or which stage, a number was measured on."""


@dataclass(frozen=True, slots=True)
class Metric:
    """A number with a written definition. `aggregate` says how the numbers of several steps combine."""

    name: str
    definition: str
    unit: str
    aggregate: Aggregate = "mean"

    def covers(self, name: str) -> bool:
        """Whether `name` is this metric, or a member of this family."""
        pattern = re.sub(r"<\w+>", ".+", re.escape(self.name))
        return re.fullmatch(pattern, name, flags=re.DOTALL) is not None


ROLLOUT_METRICS: tuple[Metric, ...] = (
    Metric("episodes", "Episodes played, the failed ones included.", "episodes", "sum"),
    Metric(
        "episodes_scored",
        "Episodes that ended by themselves or by a budget and were scored. Every mean and share below "
        "is over these, unless it says otherwise.",
        "episodes",
        "sum",
    ),
    Metric("reward", "Mean of the total reward that is trained on.", "reward"),
    Metric("reward_std", "Standard deviation (population) of the total reward.", "reward"),
    Metric("reward/<part>", "Mean of one part of the reward, over the episodes that have it.", "reward"),
    Metric(
        "success",
        "Share of episodes that succeeded: the reward part `success` is at least 1, or, where there is "
        "no such part, the total is; or as the recipe defines it.",
        "share",
    ),
    Metric("turns", "Mean number of actions: how often the model spoke.", "per episode"),
    Metric("tool_calls", "Mean number of tool calls, the faulty ones included.", "per episode"),
    Metric("invalid_calls", "Mean number of calls that were answered by a fault.", "per episode"),
    Metric("invalid_call_share", "Calls answered by a fault of the model's, over all calls.", "share"),
    Metric("fault/<type>", "Mean number of calls answered by a fault of this type.", "per episode"),
    Metric("fault_share/<type>", "Calls answered by a fault of this type, over all calls.", "share"),
    Metric("tool/<name>/calls", "Mean number of calls of this tool, the faulty ones included; calls of tools "
           "that do not exist are in `fault/unknown_tool` alone.", "per episode"),
    Metric("tool/<name>/errors", "Mean number of calls of this tool that were answered by a fault.",
           "per episode"),
    Metric("stop/<reason>", "Share of episodes that ended for this reason.", "share"),
    Metric("truncated", "Share of episodes that ended because a budget ran out.", "share"),
    Metric(TURN_CUT, "Share of episodes that ended in an action that `budgets.max_turn_tokens` cut before a "
           "call was complete; the others of `stop/max_tokens` used up `budgets.max_tokens`.", "share"),
    Metric("failure_mode/<mode>", "Of an evaluation: share of episodes that this kept from succeeding: format, "
           "tool_choice, arguments, efficiency or knowledge (`ludus.observe.diagnosis`).", "share"),
    Metric("tokens/prompt", "Mean number of tokens the task put there.", "tokens per episode"),
    Metric("tokens/action", "Mean number of tokens the model sampled; those that branches of a tree share "
           "count once.", "tokens per episode"),
    Metric("tokens/observation", "Mean number of tokens tools and environments put there, and the "
           "end-of-turn tokens that were added for the model.", "tokens per episode"),
    Metric("images_unseen", "Mean number of images, or other media, that came up in an episode and that the "
           "model was not shown: it reads text only, or they could not be read. Left out where none were.",
           "per episode"),
    Metric("tree/branches", "Attempts that went on from a turn of another one (`rl.tree`).", "episodes", "sum"),
    Metric("tree/replayed", "Branches whose tools and environments came to their turn by the same calls again.",
           "episodes", "sum"),
    Metric("tree/fresh", "Branches that could not be had, and were played from the prompt instead.", "episodes",
           "sum"),
    Metric("tree/tokens_saved", "Sampled tokens that branches share with the attempts that they branched off.",
           "tokens", "sum"),
    Metric("tree/calls_saved", "Tool calls that forked branches share, and that were not made again.", "calls",
           "sum"),
    Metric("tree/depth", "Mean number of turns that a branch shares.", "turns"),
    Metric(
        "groups_without_signal",
        "Share of all groups in which no two scored attempts have different rewards: a baseline taken "
        "over the group leaves nothing to learn from them.",
        "share",
    ),
    Metric("failures", "Episodes lost to an infrastructure failure, out of all episodes.", "episodes", "sum"),
    Metric("failure/<boundary>", "Episodes lost to an infrastructure failure at this boundary.", "episodes",
           "sum"),
    Metric("failure_share", "Episodes lost to an infrastructure failure, over all episodes.", "share"),
    Metric("aborted", "Episodes cancelled on purpose: shutdown, or too stale.", "episodes", "sum"),
    Metric("unscored", "Episodes that neither failed nor were aborted, and have no reward.", "episodes",
           "sum"),
    Metric(
        "seconds/<phase>",
        "Mean wall time an episode spent in a phase: generate, tools, rewards, total. `execution` is the part "
        "of rewards in which the answer's own code or query ran. Phases of different episodes overlap.",
        "seconds per episode",
    ),
    Metric("search/score", "What prefixes were worth when a search over turns held them (`rl.tree.branch = "
           "\"turns\"`).", "score per held prefix"),
    Metric("judge/calls", "Questions to models that judge (`judge`, `ruler`), without those that the cache "
           "answered.", "per episode"),
    Metric("judge/tokens", "Tokens of these questions and their answers.", "tokens per episode"),
    Metric("judge/unanswered", "Attempts that kept a judge from answering, which a control question did not: "
           "they score the minimum.", "share of episodes"),
    Metric("judge/money", "What they cost, by the prices in the model's `budget`.", "per episode"),
    Metric("model_server/requests", "An agent behind the model server: replies that were recorded.",
           "per episode"),
    Metric("model_server/conversations", "Conversations that it began, each a sequence of its own.",
           "per episode"),
    Metric("model_server/branches", "Replies that did not continue the end of a sequence: another reply to the "
           "same messages, or going on from an earlier turn.", "per episode"),
    Metric("model_server/restarts", "Conversations with replies in them that were not found as they were "
           "sampled: the client rewrote or shortened them, or the chat template did. Rendered anew, as a "
           "sequence of their own.", "per episode"),
    Metric("model_server/retries", "Retries that were answered by what the first request had sampled.",
           "per episode"),
    Metric("model_server/forwarded", "Requests for models at another address.", "per episode"),
    Metric("model_server/unrecorded", "Replies that no client was there to take; they are not trained on.",
           "per episode"),
    Metric("model_server/temperature_overridden", "Requests for another temperature than the recipe's; they "
           "get that.", "per episode"),
)  # fmt: skip

TRAINING_METRICS: tuple[Metric, ...] = (
    Metric("loss", "The loss that was minimised: what each trained token weighs is the aggregation's to say. "
           "This and the gradient's norm are missing where there was nothing to learn.", "nats"),
    Metric("entropy", "Mean entropy of the policy's next-token distribution at action tokens. This, the clip "
           "fractions, ratios, differences and divergences are plain means over all action tokens of the "
           "step that are not masked, those without advantage included.", "nats"),
    Metric("kl", "Mean estimate of KL(policy ‖ reference) at action tokens; absent without a reference.",
           "nats"),
    Metric("kl_coefficient", "Weight of that divergence in this step; it changes with `kl.control`.", "1",
           "last"),
    Metric("kl_old_k1", "Mean of log p_old - log p at action tokens, which were drawn from p_old: the k1 "
           "estimate of KL(p_old ‖ policy), the policy when the step began against each update's. verl's "
           "`ppo_kl`.", "nats"),
    Metric("kl_old_k3", "The k3 estimate of the same divergence, never negative; what `target_kl` bounds.",
           "nats"),
    Metric("ess", "Effective sample size of the importance weights w = p / p_engine over action tokens, as a "
           "share: (sum w)² / (n · sum w²).", "share"),
    Metric("ess_sequence", "The same over sequences, a sequence's weight being the product of its tokens'.",
           "share"),
    Metric("extended", "1 after the last step of a run that was then made longer; `evaluation.patience` counts "
           "from there.", "1", "last"),
    Metric("updates", "Optimizer updates that the step took; `target_kl` may leave some out.", "updates",
           "sum"),
    Metric("clip_fraction", "Share of action tokens whose importance ratio was clipped.", "share"),
    Metric("clip_fraction_low", "Share of action tokens clipped at the lower bound (advantage below 0; TRL's "
           "clip_ratio/low).", "share"),
    Metric("clip_fraction_high", "Share of action tokens clipped at the upper bound (advantage above 0; TRL's "
           "clip_ratio/high), or by a dual clip's.", "share"),
    Metric("gradient_norm", "L2 norm of the whole gradient before clipping.", "1"),
    Metric("learning_rate", "Learning rate of the optimizer step.", "1", "last"),
    Metric("logprob_difference_mean", "Mean absolute difference between the engine's and the trainer's "
           "log-probability of the same action token under the same weights; absent in a step without such "
           "tokens, as an asynchronous one may be.", "nats"),
    Metric("logprob_difference_max", "The largest such difference.", "nats", "max"),
    Metric("ratio_mean", "Mean ratio of a trained token's probability to its probability when the step "
           "began.", "1"),
    Metric("ratio_max", "The largest such ratio.", "1", "max"),
    Metric("importance_weight", "Mean weight that an importance correction gave to a trained token.",
           "1"),
    Metric("importance_cut", "Share of tokens whose weight the correction truncated or masked.", "share"),
    Metric("replay/groups", "Groups of earlier steps that the step was trained on again (rl.replay_buffer).",
           "groups"),
    Metric("replay/stored", "Groups that were stored, after those that have expired were dropped.", "groups",
           "last"),
    Metric("replay/lag_mean", "Mean over these groups of how many versions the policy that played them is "
           "behind the one that is trained.", "versions"),
    Metric("replay/expired_age", "Stored groups that were dropped: older than max_age.", "groups", "sum"),
    Metric("replay/expired_versions", "Stored groups that were dropped: max_lag versions behind.", "groups",
           "sum"),
    Metric("replay/expired_tools", "Stored groups that were dropped: a tool or environment has changed.",
           "groups", "sum"),
    Metric("replay/expired_uses", "Stored groups that were dropped: trained on often enough.", "groups",
           "sum"),
    Metric("lag_mean", "Mean over the episodes of a step of how many versions the oldest policy that took "
           "part in an episode is behind the one that is trained.", "versions"),
    Metric("lag_max", "The largest such lag; at most staleness + ceil((staleness.window - 1) / tasks).",
           "versions", "max"),
    Metric("versions_per_episode", "Mean number of policy versions whose tokens are in an episode.",
           "versions"),
    Metric("groups_in_flight", "Groups that were being played when the step was trained.", "groups"),
    Metric("groups_finished", "Groups that had been played and waited for their step when the step was "
           "trained.", "groups"),
    Metric("wait_seconds", "Wall time in which the trainer waited for groups.", "seconds"),
    Metric("paused_seconds", "Wall time in which the engine was paused: for the whole update, or, with "
           "cluster.engines or cluster.servers, while the slowest engine loaded the weights of the last "
           "one.", "seconds"),
    Metric("engine/replicas", "Engines that serve, of cluster.engines or cluster.servers.", "engines", "last"),
    Metric("engine/restarts", "Engines that were started again so far.", "engines", "last"),
    Metric("engine/sync_seconds", "Wall time from the end of the last update to the last engine that had "
           "its weights and had passed the canary.", "seconds"),
    Metric("engine/canary_difference", "Mean difference between an engine's and the trainer's "
           "log-probabilities of a fixed text after the last update, of the engine where it is largest.",
           "nats", "max"),
    Metric("value_loss", "The critic's loss: half the squared error of its values.", "reward²"),
    Metric("value_clip_fraction", "Share of values that had moved too far to be moved on.", "share"),
    Metric("value_gradient_norm", "L2 norm of the critic's gradient before clipping.", "1"),
    Metric("value_learning_rate", "Learning rate of the critic's step.", "1", "last"),
    Metric("explained_variance", "Share of the returns' variance that the critic's values explain; absent "
           "where all episodes were paid the same.", "share"),
    Metric("masked", "Episodes that were kept out of the loss because they were broken.", "episodes",
           "sum"),
    Metric("broken/<kind>", "Episodes that went wrong in this way by the model's doing: no_answer, "
           "over_length, tool_error, timed_out, void_turn, over_time.", "episodes", "sum"),
    Metric("refilled", "Groups with several outcomes that replaced one with a single one.", "groups", "sum"),
    Metric("without_signal", "Groups that still have one outcome after all refills.", "groups", "sum"),
    Metric("resampled", "Attempts that resampling left out of their groups.", "episodes", "sum"),
    Metric("sets/<name>", "A number over the episodes of one task set, such as sets/maths/success.",
           "any"),
    Metric("curriculum/<setting>", "The value of a scheduled setting in this step.", "any", "last"),
    Metric("no_signal", "Whether nothing could be learned from the step's rewards: no advantage differed from "
           "0, as where the rewards of each group are all equal.", "share"),
    Metric("without_advantage", "Share of the tokens in the loss whose advantage is 0.", "share"),
    Metric("success_low", "Lower end of the 95% interval of `success`, lost episodes counted as 0.",
           "share", "last"),
    Metric("success_high", "Upper end of the 95% interval of `success`, lost episodes counted as 1.",
           "share", "last"),
    Metric("pass@<k>", "The chance that at least one of k attempts succeeds, averaged over tasks "
           "(unbiased).", "share"),
    Metric("average@<k>", "The success of the first k attempts, averaged over tasks.", "share"),
    Metric("kept", "Episodes that rejection sampling found worth imitating.", "episodes"),
    Metric("pairs", "Pairs of episodes (for KTO: episodes) that a preference step learned from.",
           "pairs", "sum"),
    Metric("accuracy", "Share of pairs whose preferred episode has the larger implicit reward; for KTO, "
           "of episodes on their side of the reference point.", "share"),
    Metric("reference_point", "KTO's z0: the estimate of KL(policy ‖ reference) from mismatched prompts "
           "and answers, at least 0.", "nats"),
    Metric("margin", "Mean difference of the implicit rewards of preferred and rejected episodes.",
           "nats"),
    Metric("held_out_loss", "Mean of -log p over the assistant's tokens of held-out conversations.",
           "nats"),
    Metric("reverse_kl", "Mean of log p(student) - log p(teacher) over the tokens that the student sampled: "
           "an estimate of KL(student ‖ teacher).", "nats"),
    Metric("action_tokens", "Tokens of the batch that the loss applies to, counted once whatever `epochs`; "
           "those without advantage included.", "tokens", "sum"),
    Metric("prefix_sharing", "Tokens of the trained rows that no pass computed because another row of the same "
           "micro-batch begins with the same ones, over all tokens of these rows (`share_prefixes`).", "share"),
    Metric("experts/entropy", "How evenly a mixture of experts spreads the step's tokens: the entropy of each "
           "layer's share of tokens by expert over its largest value, averaged over layers; 1 is even.",
           "share"),
    Metric("experts/load_max", "Tokens of the busiest expert of any layer over an even share.", "share", "max"),
    Metric("experts/dead", "Share of the experts of all layers that got no token of the step.", "share"),
    Metric("router_aux_loss", "Load-balancing loss of the routers over the tokens of a pass, before its weight "
           "(`optimizer.router_aux_loss`).", "loss"),
    Metric("tokens_per_second", "Generated tokens over the wall time of the step.", "tokens/s"),
    Metric("episodes_per_second", "Episodes played over the wall time of the step.", "episodes/s"),
    Metric("time_share/<phase>", "Share of the step's wall time that a phase took. Training is "
           "measured; the time of playing is divided among generation, tools and rewards in proportion "
           "to the time that episodes spent in each, and what they spent elsewhere is in none.",
           "share"),
    Metric("policy_version", "How many times the weights have been updated.", "updates", "last"),
    Metric("step_seconds", "Wall time of the whole step.", "seconds"),
    Metric("gpu/utilisation", "Mean share of the time in which the GPUs that this process may see computed "
           "anything, since the row before (NVML's utilization.gpu).", "share"),
    Metric("gpu/memory_gb", "The most memory that was in use on one of them, by whatever process.", "GiB",
           "max"),
    Metric("custom/<name>", "What user code has logged (`ludus.log`): the mean over the step.", "any"),
)  # fmt: skip

CATALOGUE: tuple[Metric, ...] = ROLLOUT_METRICS + TRAINING_METRICS


@lru_cache(maxsize=4096)
def definition_of(name: str) -> Metric | None:
    """The catalogue's entry for a logged name, its split prefix aside; None for an unknown name."""
    exact = [metric for metric in CATALOGUE if metric.name == name]
    found = exact or [metric for metric in CATALOGUE if metric.covers(name)]
    if found:
        return found[0]
    split, slash, rest = name.partition("/")
    return definition_of(rest) if slash and split in SPLITS else None


def undefined(names: Iterable[str]) -> list[str]:
    return [name for name in names if definition_of(name) is None]


def prefixed(split: str, metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics with each name under `split`, which is one of `SPLITS`."""
    if split not in SPLITS:
        raise ValueError(f"a split is one of {', '.join(SPLITS)}, not {split!r}")
    return {f"{split}/{name}": value for name, value in metrics.items()}


def combine(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """One row for several: each metric by its own aggregate, and an unknown one by its mean."""
    return {
        name: _AGGREGATES[metric.aggregate if (metric := definition_of(name)) else "mean"](values)
        for name, values in _columns(rows).items()
    }


def _columns(rows: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    columns: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            columns.setdefault(name, []).append(value)
    return columns


Success = Callable[[Trajectory], bool]

_ENDINGS = tuple(
    reason for reason in StopReason if reason not in (StopReason.FAILED, StopReason.ABORTED)
)


def rollout_metrics(groups: Sequence[Group], success: Success = is_success) -> dict[str, float]:
    """The numbers of a batch. A mean over nothing is left out, since it is not zero."""
    played = [trajectory for group in groups for trajectory in group.trajectories]
    scored = [trajectory for trajectory in played if trajectory.is_trainable]
    metrics: dict[str, float] = {"episodes": len(played), "episodes_scored": len(scored)}
    if scored:
        metrics |= reward_metrics(scored, success)
        metrics |= _conduct(scored)
        metrics |= tool_metrics(scored)
        metrics |= _tokens(scored)
        metrics |= _means("seconds", [trajectory.seconds for trajectory in scored])
        metrics |= _counts(scored)
    if any(trajectory.branch is not None for trajectory in played):
        metrics |= _tree(played)
    if groups:
        metrics["groups_without_signal"] = _mean(not has_signal(group) for group in groups)
    return metrics | failure_metrics(played)


def _counts(scored: Sequence[Trajectory]) -> dict[str, float]:
    """Means of the agents' counters. An agent without a counter of a name counted 0."""
    names = sorted({name for trajectory in scored for name in trajectory.counts})
    return {name: _mean(trajectory.counts.get(name, 0.0) for trajectory in scored) for name in names}


def reward_metrics(scored: Sequence[Trajectory], success: Success = is_success) -> dict[str, float]:
    totals = [trajectory.reward for trajectory in scored if trajectory.reward is not None]
    mean = _mean(totals)
    return {
        "reward": mean,
        "reward_std": _mean((total - mean) ** 2 for total in totals) ** 0.5,
        "success": _mean(success(trajectory) for trajectory in scored),
        **_means("reward", [trajectory.rewards for trajectory in scored]),
    }


def failure_metrics(played: Sequence[Trajectory]) -> dict[str, float]:
    """Counts of lost episodes by boundary: the only numbers that include failed episodes."""
    boundaries = Counter(t.failure.boundary for t in played if t.failure is not None)
    healthy = [t for t in played if t.failure is None]
    aborted = sum(t.stop is StopReason.ABORTED for t in healthy)
    metrics: dict[str, float] = {
        "failures": boundaries.total(),
        **{f"failure/{boundary.value}": boundaries[boundary] for boundary in Boundary},
        "aborted": aborted,
        "unscored": sum(t.reward is None for t in healthy if t.stop is not StopReason.ABORTED),
    }
    if played:
        metrics["failure_share"] = boundaries.total() / len(played)
    return metrics


def has_signal(group: Group) -> bool:
    """Whether two scored attempts differ in reward, so that a group baseline tells them apart."""
    return len({trajectory.reward for trajectory in group.trainable}) > 1


def _conduct(scored: Sequence[Trajectory]) -> dict[str, float]:
    faults = Counter(fault for trajectory in scored for fault in trajectory.faults)
    # A call that could not even be parsed may have left a fault and no call: it was an attempt at one.
    calls = sum(max(len(a.calls), len(a.faults)) for trajectory in scored for a in trajectory.actions)
    stops = Counter(trajectory.stop for trajectory in scored)
    count = len(scored)
    return {
        "turns": _mean(trajectory.turns for trajectory in scored),
        "tool_calls": calls / count,
        "invalid_calls": faults.total() / count,
        "invalid_call_share": faults.total() / calls if calls else 0.0,
        **{f"fault/{fault.value}": faults[fault] / count for fault in Fault},
        **{f"fault_share/{fault.value}": faults[fault] / calls if calls else 0.0 for fault in Fault},
        **{f"stop/{reason.value}": stops[reason] / count for reason in _ENDINGS},
        "truncated": _mean(trajectory.stop.is_truncated for trajectory in scored),
        TURN_CUT: _mean(trajectory.counts.get(TURN_CUT, 0.0) for trajectory in scored),
    }


def tool_metrics(scored: Sequence[Trajectory]) -> dict[str, float]:
    """Calls and errors by the name of the tool. A name that the model made up would be a metric for ever."""
    actions = [action for trajectory in scored for action in trajectory.actions]
    faulted = Counter(
        pair for action in actions for pair in zip(action.faulted, action.faults, strict=False)
    )
    calls = Counter(call.name for action in actions for call in action.calls if call.fault is None)
    calls -= Counter({name: n for (name, fault), n in faulted.items() if fault is Fault.UNKNOWN_TOOL})
    errors = Counter(dict.fromkeys(calls, 0))
    for (name, fault), count in faulted.items():
        if fault is not Fault.UNKNOWN_TOOL and name in calls:
            errors[name] += count
    return {
        f"tool/{name}/{what}": found[name] / len(scored)
        for name in sorted(calls)
        for what, found in (("calls", calls), ("errors", errors))
    }


_SET_FAMILIES = ("tool/", "reward/")


def set_metrics(name: str, metrics: Mapping[str, float], chosen: Iterable[str]) -> dict[str, float]:
    """Metrics logged for one task set among several: the chosen ones, its tools, the parts of its reward."""
    wanted = set(chosen)
    return {
        f"sets/{name}/{metric}": value
        for metric, value in metrics.items()
        if metric in wanted or metric.startswith(_SET_FAMILIES)
    }


def _tokens(scored: Sequence[Trajectory]) -> dict[str, float]:
    totals: Counter[SegmentKind] = Counter()
    seen: set[int] = set()
    for trajectory in scored:
        shared = 0 if trajectory.branch is None else trajectory.branch.segments
        segments = [segment for sequence in trajectory.sequences for segment in sequence.segments]
        for place, segment in enumerate(segments):
            if place >= shared or id(segment) not in seen:  # what branches share counts once
                totals[segment.kind] += len(segment.tokens)
        seen.update(map(id, segments))
    return {f"tokens/{kind.value}": totals[kind] / len(scored) for kind in SegmentKind}


def _tree(played: Sequence[Trajectory]) -> dict[str, float]:
    """Metrics of the tokens that branches share with the attempts that they branched off."""
    states = Counter(t.branch.state for t in played if t.branch is not None)
    prefixes = [
        (
            t.branch.state,
            [s for s in t.sequences[0].segments[: t.branch.segments] if s.logprobs is not None],
        )
        for t in played
        if t.branch is not None and t.branch.segments
    ]
    forked = [actions for state, actions in prefixes if state == "fork"]
    metrics: dict[str, float] = {
        "tree/branches": len(prefixes),
        "tree/replayed": states["replay"],
        "tree/fresh": states["fresh"],
        "tree/tokens_saved": sum(len(one.tokens) for _, actions in prefixes for one in actions),
        "tree/calls_saved": sum(len(one.calls) for actions in forked for one in actions),
    }
    if prefixes:
        metrics["tree/depth"] = _mean(len(actions) for _, actions in prefixes)
    return metrics


def _means(family: str, rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    columns = _columns(rows)
    return {f"{family}/{name}": _mean(columns[name]) for name in sorted(columns)}


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers)


_AGGREGATES: dict[Aggregate, Callable[[Sequence[float]], float]] = {
    "mean": _mean,
    "sum": sum,
    "max": max,
    "last": lambda values: values[-1],
}
