"""Rollouts: episodes, agents and groups."""

from ludus.rollouts.agent import Agent, Demonstrator, Expert, RetrieveThenAnswer
from ludus.rollouts.budgets import Budgets
from ludus.rollouts.episode import Episode, EpisodeOver, Turn
from ludus.rollouts.rollout import Rollout
from ludus.rollouts.tasksets import load_tasks
from ludus.rollouts.tool_calls import StepRewards

__all__ = [
    "Agent",
    "Budgets",
    "Demonstrator",
    "Episode",
    "EpisodeOver",
    "Expert",
    "RetrieveThenAnswer",
    "Rollout",
    "StepRewards",
    "Turn",
    "load_tasks",
]
