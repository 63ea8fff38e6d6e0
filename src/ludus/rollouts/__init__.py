"""Rollouts: episodes, agents, groups, and how messages become tokens."""

from ludus.rollouts.agent import Agent, Demonstrator, Expert
from ludus.rollouts.episode import Budgets, Episode, EpisodeOver, Turn
from ludus.rollouts.rollout import Rollout
from ludus.rollouts.tasksets import load_tasks

__all__ = [
    "Agent",
    "Budgets",
    "Demonstrator",
    "Episode",
    "EpisodeOver",
    "Expert",
    "Rollout",
    "Turn",
    "load_tasks",
]
