"""Conversations as tokens, appended exactly, and content that cannot forge special tokens."""

from __future__ import annotations

from ludus.rollouts.renderers.abilities import Abilities
from ludus.rollouts.renderers.renderer import History, NextContext, Renderer

__all__ = ["Abilities", "History", "NextContext", "Renderer"]
