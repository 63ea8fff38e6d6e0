"""Rollouts: episodes, agents and groups."""

from ludus.rollouts.agent import Agent, Demonstrator, Expert, RetrieveThenAnswer
from ludus.rollouts.env_contract import Clause, EnvContract, Verdict, check_env
from ludus.rollouts.episode import Episode, EpisodeOver, Turn
from ludus.rollouts.recorder import Budgets
from ludus.rollouts.rollout import Rollout
from ludus.rollouts.tasksets import load_tasks
from ludus.rollouts.tool_calls import StepRewards

__all__ = [
    "Agent",
    "Budgets",
    "Clause",
    "Demonstrator",
    "EnvContract",
    "Episode",
    "EpisodeOver",
    "Expert",
    "RetrieveThenAnswer",
    "Rollout",
    "StepRewards",
    "Turn",
    "Verdict",
    "check_env",
    "load_tasks",
]
