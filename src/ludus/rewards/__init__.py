"""Rewards: plain Python functions that score episodes, their composition, and a first library.

A recipe names a reward, or gives a table: `reward` is the short name or a reference such as
`my_rewards.py:politeness`, and every other key is an option of it. Rewards nest: options may be rewards.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, get_type_hints

from ludus.core.failures import ConfigError
from ludus.core.registry import Registry
from ludus.core.trajectory import GroupReward, Reward, is_success
from ludus.rewards.check import (
    RewardFinding,
    RewardProblem,
    RewardReport,
    check_rewards,
    synthetic_episode,
)
from ludus.rewards.compose import Composite, Efficiency, FormatGate, Gate, ToolBonus, Weighted, combine
from ludus.rewards.conduct_rewards import CountBonus, Curiosity, Ranking
from ludus.rewards.reward import (
    SETTINGS,
    FunctionGroupReward,
    FunctionReward,
    FunctionTurnReward,
    UserFunction,
    group_reward,
    reward,
)
from ludus.rewards.scorer import Scorer, TurnReward, as_group_reward, as_reward_or_turn_reward
from ludus.rewards.scores import RewardTraits, check_options, option_types
from ludus.rewards.text_rewards import Format, contains, exact_match, f1, maths, numeric

__all__ = [
    "GROUP_REWARDS",
    "REWARDS",
    "Composite",
    "CountBonus",
    "Curiosity",
    "Efficiency",
    "Format",
    "FormatGate",
    "FunctionGroupReward",
    "FunctionReward",
    "FunctionTurnReward",
    "Gate",
    "Ranking",
    "RewardFinding",
    "RewardProblem",
    "RewardReport",
    "Scorer",
    "ToolBonus",
    "TurnReward",
    "Weighted",
    "build_group_reward",
    "build_reward",
    "check_rewards",
    "combine",
    "contains",
    "exact_match",
    "f1",
    "group_reward",
    "is_success",
    "maths",
    "numeric",
    "reward",
    "synthetic_episode",
]

REWARDS = Registry(
    "reward",
    {
        "exact_match": "ludus.rewards.text_rewards:exact_match",
        "f1": "ludus.rewards.text_rewards:f1",
        "contains": "ludus.rewards.text_rewards:contains",
        "expected_calls": "ludus.rewards.conduct_rewards:expected_calls",
        "numeric": "ludus.rewards.text_rewards:numeric",
        "maths": "ludus.rewards.text_rewards:maths",
        "format": "ludus.rewards.text_rewards:Format",
        "efficiency": "ludus.rewards.compose:Efficiency",
        "gate": "ludus.rewards.compose:Gate",
        "format_gate": "ludus.rewards.compose:FormatGate",
        "tool_bonus": "ludus.rewards.compose:ToolBonus",
        "three_dimensional": "ludus.rewards.conduct_rewards:ThreeDimensional",
        "turn_penalty": "ludus.rewards.conduct_rewards:turn_penalty",
        "call_penalty": "ludus.rewards.conduct_rewards:call_penalty",
        "time_penalty": "ludus.rewards.conduct_rewards:TimePenalty",
        "fault_penalty": "ludus.rewards.conduct_rewards:fault_penalty",
        "repeat_penalty": "ludus.rewards.conduct_rewards:repeat_penalty",
        "enough_known_penalty": "ludus.rewards.conduct_rewards:enough_known_penalty",
        "unit_tests": "ludus.rewards.code_tests:UnitTests",
        "programs": "ludus.rewards.code_tests:Programs",
        "sql_match": "ludus.rewards.code_tests:SqlMatch",
        "judge": "ludus.rewards.judges:Judge",
        "code_quality": "ludus.rewards.judges:CodeQuality",
        "model_match": "ludus.rewards.judges:ModelMatch",
        "semi_formal": "ludus.rewards.judges:SemiFormal",
        "process_judge": "ludus.rewards.judges:ProcessJudge",
    },
    group="ludus.rewards",
)
GROUP_REWARDS = Registry(
    "group reward",
    {
        "ranking": "ludus.rewards.conduct_rewards:Ranking",
        "curiosity": "ludus.rewards.conduct_rewards:Curiosity",
        "ruler": "ludus.rewards.judges:Ruler",
        "count_bonus": "ludus.rewards.conduct_rewards:CountBonus",
    },
    group="ludus.group_rewards",
)

Spec = str | Mapping[str, Any]


def build_reward(spec: Spec | Any) -> Reward | TurnReward:
    """The reward that a recipe's entry stands for; what is a reward already comes back as it is."""
    return as_reward_or_turn_reward(_build(spec, REWARDS))


def build_group_reward(spec: Spec | Any) -> GroupReward:
    """The group reward that a recipe's entry stands for."""
    return as_group_reward(_build(spec, GROUP_REWARDS))


def _build(spec: Any, registry: Registry) -> Any:
    if isinstance(spec, str):
        spec = {"reward": spec}
    if not isinstance(spec, Mapping):
        return spec
    options = dict(spec)
    name = options.pop("reward", None)
    if not isinstance(name, str):
        raise ConfigError(
            f"a {registry.kind} is a name, or a table whose key 'reward' names it: {spec!r}"
        )
    found = registry.load(name)
    if isinstance(found, type):
        check_options(name, options, option_types(found))
        return _construct(found, name, options)
    if not options:
        return found
    if isinstance(found, UserFunction):
        settings = get_type_hints(UserFunction.__init__)
        own = {key: settings[key] for key in SETTINGS}
        check_options(name, options, option_types(found.function) | own)
        return found.using(**options)
    raise ConfigError(f"{name!r} takes no options ({', '.join(options)}); decorate it with @reward")


def _construct(kind: type, name: str, options: dict[str, Any]) -> Any:
    for key in RewardTraits.of(kind).takes_rewards & options.keys():
        if isinstance(options[key], str | Mapping):
            options[key] = build_reward(options[key])
    try:
        inspect.signature(kind).bind(**options)
    except TypeError as error:
        names = inspect.signature(kind).parameters
        known = ", ".join(sorted(names, key=SETTINGS.__contains__))  # what is its own comes first
        raise ConfigError(f"{name!r}: {error}; its options are: {known}") from error
    return kind(**options)
