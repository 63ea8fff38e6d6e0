"""Conversations as tokens, appended exactly, and content that cannot forge special tokens."""

from __future__ import annotations

from ludus.rollout.renderers.abilities import Abilities
from ludus.rollout.renderers.renderer import History, NextContext, Renderer

__all__ = ["Abilities", "History", "NextContext", "Renderer"]
