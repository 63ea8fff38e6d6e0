"""Settings of a stage that contradict each other, or would have no effect: refused when they are read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ludus.core.failures import ConfigError
from ludus.training.curriculum import check_settings

if TYPE_CHECKING:
    from ludus.training.settings import PreferenceConfig, RLConfig

PLAIN = {"grpo", "dapo", "gspo", "cispo", "rloo", "ppo", "turn_grpo", "gigpo"}
PLAIN |= {"reinforce", "reinforce_pp", "reinforce_pp_baseline"}
"""Algorithms of `ludus.algos` that need no options: known here, so that reading a recipe loads no torch."""
_MINING = ("tasks", "attempts", "margin", "max_failures")
"""What a stage of preferences is told about playing."""
_OF_A_LOSS = {"gamma": "simpo", "desirable_weight": "kto", "undesirable_weight": "kto"}
"""What only one of the preference losses has."""


def check_reinforcement(config: RLConfig) -> None:
    """Raise a `ValueError` for what could not learn."""
    by_length = config.aggregation in (None, "length")
    if config.algorithm == "dr_grpo" and by_length and "length" not in config.aggregation_options:
        raise ValueError(
            "dr_grpo divides by a fixed length: set aggregation_options = { length = N }, for instance "
            "to the tokens that an episode says at most"
        )
    try:
        check_settings(config.curriculum)
        if not _is_plain(config):
            _check_algorithm(config)
    except ConfigError as error:
        raise ValueError(str(error)) from None  # so that it is named by its place in the recipe
    _check_attempts(config)
    _check_divergence(config)
    _check_bootstrap(config)
    if config.updates > config.tasks:
        raise ValueError(
            f"updates = {config.updates} cannot split the {config.tasks} group(s) of a step (tasks)"
        )


def _is_plain(config: RLConfig) -> bool:
    """Whether nothing can be wrong with the algorithm: a known name, and nothing said about its parts."""
    said = {name: value for name, value in config.algorithm_settings.items() if name != "name" and value}
    is_usual = config.attempts > 1 and config.critic is None and config.advantage_mask
    return config.algorithm in PLAIN and not said and is_usual


def _check_algorithm(config: RLConfig) -> None:
    """What the algorithm's functions say about options and needs; to ask them, torch is imported."""
    from ludus.algos import Need, load_algorithm

    needs = load_algorithm(**config.algorithm_settings).needs
    _check_needs(config, has_critic=Need.CRITIC in needs)
    if config.attempts == 1 and config.steps and Need.SIBLINGS in needs:
        raise ValueError(
            f"{config.algorithm} compares the attempts at a task with each other, so attempts = 1 can "
            'teach nothing; use at least 2, or an algorithm such as "reinforce" or "ppo"'
        )


def check_mining(config: PreferenceConfig) -> None:
    """Raise a `ValueError` for settings of playing beside given pairs, and the other way round."""
    idle = _MINING if config.pairs is not None else ("batch",)
    changed = [name for name in idle if name in _changed(config)]
    if changed and config.pairs is not None:
        raise ValueError(
            f"{' and '.join(changed)} would have no effect: with pairs from a file, nothing is played; leave "
            "them out, or leave out pairs to mine them"
        )
    if changed:
        raise ValueError(
            "batch would have no effect: it is about pairs from a file, and how many are mined in a step is "
            "decided by tasks; set that, or pairs"
        )
    others = [
        (name, loss)
        for name, loss in _OF_A_LOSS.items()
        if name in _changed(config) and loss != config.loss
    ]
    for name, loss in others:
        raise ValueError(f'{name} would have no effect: it is a setting of loss = "{loss}"')
    if config.columns and config.pairs is None:
        raise ValueError("columns names the columns of given data, and pairs names none")
    if config.loss == "kto" and config.pairs is not None and config.batch < 2:
        raise ValueError("kto compares the episodes of a step with each other: batch must be at least 2")


def _changed(config: PreferenceConfig) -> set[str]:
    """The settings that are not as they would be when left out."""
    fields = type(config).model_fields
    return {name for name in fields if getattr(config, name) != fields[name].default}


def _check_needs(config: RLConfig, has_critic: bool) -> None:
    if not config.advantage_mask and not has_critic:
        raise ValueError(
            f"advantage_mask = false is about the recursion of a critic's advantages; {config.algorithm} "
            "has none (ppo has)"
        )
    critic = config.critic
    if critic is not None and not has_critic:
        raise ValueError(
            f"there are settings for a critic, and {config.algorithm} asks for none: leave out critic, or "
            "use ppo (an estimator of your own asks for one by @needs(Need.CRITIC))"
        )
    if critic is not None and 0 < config.steps <= critic.warmup_steps:
        raise ValueError(
            f"critic.warmup_steps = {critic.warmup_steps} leaves none of {config.steps} step(s) for the "
            "policy to learn in: lower it, or raise steps"
        )


def _check_bootstrap(config: RLConfig) -> None:
    """What is paid for being cut would be lost: a bootstrapped episode's outcome is the critic's value."""
    if config.algorithm != "ppo" or not config.options.get("bootstrap"):
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
            f"options.bootstrap takes an episode that a budget cut as going on, at the critic's value, so "
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


def _check_divergence(config: RLConfig) -> None:
    idle = [name for name in ("kl_control", "reference_sync") if getattr(config, name) is not None]
    if config.kl == 0 and idle:
        raise ValueError(
            f"{' and '.join(idle)} would have no effect: kl = 0 leaves out the divergence from the reference; "
            "set kl, for instance to 0.01"
        )
    if config.target_kl is not None and config.updates * config.epochs == 1:
        raise ValueError(
            "target_kl would have no effect: it leaves out further updates of a step, and there is one; set "
            "epochs or updates, or leave out target_kl"
        )
    if config.kl == 0 and (config.kl_in, config.kl_estimator) != ("loss", "k3"):
        raise ValueError(
            "kl_in and kl_estimator say how the divergence from the reference counts, and kl = 0 leaves "
            "it out: set kl, for instance to 0.01"
        )
    if config.kl > 0 and (config.kl_in, config.kl_estimator) == ("loss", "k1"):
        raise ValueError(
            'kl_estimator = "k1" penalises nothing as a term of the loss, where the gradient counts: its '
            'expectation is 0. Use "k2" (the gradient of KL(policy || reference)) or "k3", or '
            'kl_in = "reward", where "k1" is right'
        )
