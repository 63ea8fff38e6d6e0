"""Rollouts: episodes, agents, groups, and how messages become tokens."""

from ludus.rollout.agent import Agent
from ludus.rollout.budgets import Budgets
from ludus.rollout.demonstrator import Demonstrator, Expert
from ludus.rollout.episode import Episode, EpisodeOver, Turn
from ludus.rollout.runner import Rollout
from ludus.rollout.tasksets import load_tasks

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
