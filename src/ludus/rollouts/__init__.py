"""Rollouts: episodes, agents, groups, and how messages become tokens."""

from ludus.rollouts.agent import Agent
from ludus.rollouts.budgets import Budgets
from ludus.rollouts.demonstrator import Demonstrator, Expert
from ludus.rollouts.episode import Episode, EpisodeOver, Turn
from ludus.rollouts.runner import Rollout
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
