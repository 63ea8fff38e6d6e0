"""Checks of [rl]: settings that contradict each other, could not learn, or would have no effect."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ludus.algos.specs import ALGORITHMS, AlgorithmSpec
from ludus.core.failures import ConfigError
from ludus.rollouts.recorder import Budgets
from ludus.training.data.curricula import BUDGETS, by_setting, check_settings, function_of

if TYPE_CHECKING:
    from ludus.training.config.rl import RLConfig


def check_rl(config: RLConfig) -> None:
    """Raise a `ValueError` for what could not learn."""
    name = config.algorithm.name
    if name is None:
        raise ValueError("algorithm.name must be given")
    if name.replace("-", "_").lower() in ("grpo_roc", "roc"):
        raise ValueError(
            'GRPO-RoC is GRPO on resampled attempts: set algorithm = "grpo", and keep_attempts to about half '
            "of attempts, such as attempts = 16, keep_attempts = 8"
        )
    spec, aggregation = ALGORITHMS.get(name), config.aggregation
    by_length = spec is not None and spec.needs_options and aggregation.name in (None, "length")
    if by_length and "length" not in aggregation.options:
        raise ValueError(
            f"{name} divides by a fixed length: set aggregation = {{ length = N }}, for instance to the tokens "
            "that an episode says at most"
        )
    try:
        check_settings(config.curriculum)
        if not _is_plain(config):
            _check_algorithm(config)
    except ConfigError as error:
        raise ValueError(str(error)) from None  # so that it is named by its place in the recipe
    _check_attempts(config)
    _check_tree(config)
    _check_staleness(config)
    _check_replay_buffer(config)
    _check_divergence(config)
    _check_bootstrap(config)
    if config.updates > config.tasks:
        raise ValueError(
            f"updates = {config.updates} cannot split the {config.tasks} group(s) of a step (tasks)"
        )


def _spec(config: RLConfig) -> AlgorithmSpec | None:
    return ALGORITHMS.get(config.algorithm.name or "")


def _is_plain(config: RLConfig) -> bool:
    """Whether nothing can be wrong with the algorithm: a known name, and nothing said about its parts."""
    said = {name: value for name, value in config.algorithm_settings.items() if name != "name" and value}
    is_usual = config.attempts > 1 and config.critic is None and config.advantage_mask
    spec = _spec(config)
    return spec is not None and not spec.needs_options and not said and is_usual


def _check_algorithm(config: RLConfig) -> None:
    """Check the options and needs of the algorithm's functions; this imports torch."""
    from ludus.algos import Need, load_algorithm

    needs = load_algorithm(**config.algorithm_settings).needs
    _check_needs(config, has_critic=Need.CRITIC in needs)
    if config.attempts == 1 and config.steps and Need.SIBLINGS in needs:
        raise ValueError(
            f"{config.algorithm.name} compares the attempts at a task with each other, so attempts = 1 can "
            'teach nothing; use at least 2, or an algorithm such as "reinforce" or "ppo"'
        )


def _check_needs(config: RLConfig, has_critic: bool) -> None:
    if not config.advantage_mask and not has_critic:
        raise ValueError(
            f"advantage_mask = false is about the recursion of a critic's advantages; {config.algorithm.name} "
            "has none (ppo has)"
        )
    critic = config.critic
    if critic is not None and not has_critic:
        raise ValueError(
            f"there are settings for a critic, and {config.algorithm.name} asks for none: leave out critic, or "
            "use ppo (an estimator of your own asks for one by @needs(Need.CRITIC))"
        )
    if critic is not None and 0 < config.steps <= (critic.warmup_steps or 0):
        raise ValueError(
            f"critic.warmup_steps = {critic.warmup_steps} leaves none of {config.steps} step(s) for the "
            "policy to learn in: lower it, or raise steps"
        )


def _check_bootstrap(config: RLConfig) -> None:
    """Refuse penalties for being cut with bootstrapping: the critic's value replaces the outcome."""
    if not config.algorithm.options.get("bootstrap"):
        return
    prices = [
        f"broken.{kind}"
        for kind in ("no_answer", "over_length")
        if isinstance(getattr(config.broken, kind), float)
    ]
    if config.overlong is not None:
        prices.append("overlong")
    if prices:
        raise ValueError(
            f"algorithm.bootstrap takes an episode that a budget cut as going on, at the critic's value, so "
            f"{' and '.join(prices)} would be lost where it is paid: leave out the one or the other"
        )


def _check_attempts(config: RLConfig) -> None:
    if config.attempts == 1 and config.steps and config.refill is not None:
        raise ValueError(
            "refill replaces groups whose rewards are all equal, and with attempts = 1 every group is so: "
            "use at least 2 attempts, or leave out refill"
        )
    if config.keep_attempts is not None and config.keep_attempts >= config.attempts:
        raise ValueError("keep_attempts must be below attempts, of which it keeps some")


def _check_tree(config: RLConfig) -> None:
    if config.tree is None:
        return
    if config.tree.roots >= config.attempts:
        raise ValueError(
            f"tree.roots = {config.tree.roots} leaves none of {config.attempts} attempts to branch off: lower "
            "it, or raise attempts"
        )
    spec = _spec(config)
    if spec is not None and spec.reads_turns:
        raise ValueError(
            f"{config.algorithm.name} gives credit along whole episodes, and branches share their first turns: "
            "use tree_grpo, treepo, tree_value, or an algorithm with one advantage per episode, such as grpo"
        )


def _check_staleness(config: RLConfig) -> None:
    """Stale samples need a bounded loss, and what adds to the lag must be asked for."""
    stale = config.staleness
    if stale.steps == 0:
        unused = {"staleness.window": stale.window > 1, "staleness.updates": stale.updates}
        if idle := [name for name, is_set in unused.items() if is_set]:
            raise ValueError(f"{' and '.join(idle)} would have no effect: staleness.steps is 0")
        return
    if config.loss.name == "policy_gradient" and config.importance_correction is None:
        raise ValueError(
            f"staleness = {stale.steps} trains on samples of older weights, and the loss policy_gradient "
            'neither clips nor corrects their ratios: leave out correction = "none", or use a clipped loss'
        )
    if config.updates * config.epochs > 1 and not stale.updates:
        raise ValueError(
            f"with staleness = {stale.steps}, {config.updates * config.epochs} updates a step make "
            f"samples up to {stale.steps * config.updates * config.epochs} optimizer updates old before "
            "the step begins: set updates and epochs to 1, or staleness.updates = true to have it so"
        )


def _check_replay_buffer(config: RLConfig) -> None:
    """Stored samples need a bounded loss, and a baseline that does not depend on who played them."""
    if config.replay_buffer is None:
        return
    spec = _spec(config)
    if config.critic is not None or (spec is not None and spec.has_critic):
        raise ValueError(
            "replay_buffer: a critic's advantages are of the policy that is trained, and stored episodes were "
            "played by older ones: use an algorithm whose baseline is the group, such as grpo"
        )
    if config.loss.name == "policy_gradient" and config.importance_correction is None:
        raise ValueError(
            "replay_buffer trains on samples of older weights, and the loss policy_gradient neither clips nor "
            'corrects their ratios: leave out correction = "none", or use a clipped loss'
        )


def _check_divergence(config: RLConfig) -> None:
    kl = config.kl
    if kl.weight == 0:
        idle = [
            f"kl.{name}"
            for name in ("control", "place", "estimator")
            if getattr(kl, name) != getattr(type(kl)(), name)
        ]
        idle += ["reference_sync"] if config.reference_sync is not None else []
        if idle:
            raise ValueError(
                f"{' and '.join(idle)} would have no effect: kl.weight = 0 leaves out the divergence from the "
                "reference; set it, for instance to 0.01"
            )
    if config.target_kl is not None and config.updates * config.epochs == 1:
        raise ValueError(
            "target_kl would have no effect: it leaves out further updates of a step, and there is one; set "
            "epochs or updates, or leave out target_kl"
        )
    if kl.weight > 0 and (kl.place, kl.estimator) == ("loss", "k1"):
        raise ValueError(
            'kl.estimator = "k1" penalises nothing as a term of the loss, where the gradient counts: its '
            'expectation is 0. Use "k2" (the gradient of KL(policy || reference)) or "k3", or '
            'kl.place = "reward", where "k1" is right'
        )


# Checks against other tables of the recipe.


def check_followed_metrics(config: RLConfig, where: str, per_set: Sequence[str]) -> None:
    """A curriculum that follows a metric of a task set must name one that steps have."""
    for number, one in enumerate(config.curriculum):
        metric = one.adaptive.metric if one.adaptive is not None else ""
        if metric.startswith("sets/") and metric not in per_set:
            there = f"there are: {', '.join(per_set)}" if per_set else "there are not several task sets"
            raise ValueError(
                f"{where}.curriculum.{number}.adaptive.metric: no step has {metric!r}, so the value would "
                f"never move; {there}"
            )


def check_overlong(
    config: RLConfig, where: str, budgets: Budgets, own_budgets: Sequence[Budgets | None]
) -> None:
    """The price for length must be within reach. `own_budgets` are those that task sets give themselves."""
    if config.overlong is None or function_of(config.curriculum):  # which may set any budget
        return
    most = max(_most_said(config, budgets, own) for own in own_budgets)
    if config.overlong.longest > most:
        raise ValueError(
            f"{where}.overlong.longest: no episode says {config.overlong.longest} tokens; the budgets end it "
            f"after {most} (max_turns * max_turn_tokens, and max_tokens). Lower it, or raise them"
        )


def check_tree_turns(
    config: RLConfig, where: str, budgets: Budgets, own_budgets: Sequence[Budgets | None]
) -> None:
    """Branches begin at second turns or later; search over turns chooses among first ones too."""
    if (
        config.tree is None
        or config.tree.branch == "turns"
        or function_of(config.curriculum) is not None
    ):
        return
    if max(_largest(config, budgets, own)("max_turns") for own in own_budgets) == 1:
        raise ValueError(
            f"{where}.tree: a branch begins at a second turn or later, and budgets.max_turns = 1 allows none: "
            "raise it, or leave out tree"
        )


def _largest(config: RLConfig, budgets: Budgets, own: Budgets | None) -> Callable[[str], int]:
    """The largest that each of the budgets will ever be."""
    moved = {
        name.removeprefix(BUDGETS): max(one.values)
        for name, one in by_setting(config.curriculum).items()
    }
    given = {name: getattr(own, name) for name in own.model_fields_set} if own is not None else {}

    def budget(name: str) -> int:
        if name in moved:
            return int(min(moved[name], given.get(name, moved[name])))
        return int(given.get(name, getattr(budgets, name)))

    return budget


def _most_said(config: RLConfig, budgets: Budgets, own: Budgets | None) -> int:
    """Tokens that an episode can say under the largest budgets that it will ever have."""
    budget = _largest(config, budgets, own)
    return min(budget("max_turns") * budget("max_turn_tokens"), budget("max_tokens"))
