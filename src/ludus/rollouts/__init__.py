"""Rollouts: episodes, agents, groups, and how messages become tokens."""

from ludus.rollouts.agent import Agent, Demonstrator, Expert, RetrieveThenAnswer
from ludus.rollouts.budgets import Budgets
from ludus.rollouts.episode import Episode, EpisodeOver, Turn
from ludus.rollouts.formats import FORMATS, ActionFormat, ParsedAction, load_format
from ludus.rollouts.renderer import History, NextContext, Renderer
from ludus.rollouts.rollout import Rollout
from ludus.rollouts.tasksets import load_tasks
from ludus.rollouts.tokenizers import CHATML, HFTokenizer, load_tokenizer
from ludus.rollouts.tool_calls import StepRewards

__all__ = [
    "CHATML",
    "FORMATS",
    "ActionFormat",
    "Agent",
    "Budgets",
    "Demonstrator",
    "Episode",
    "EpisodeOver",
    "Expert",
    "HFTokenizer",
    "History",
    "NextContext",
    "ParsedAction",
    "Renderer",
    "RetrieveThenAnswer",
    "Rollout",
    "StepRewards",
    "Turn",
    "load_format",
    "load_tasks",
    "load_tokenizer",
]
