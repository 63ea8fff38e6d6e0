"""A model behind OpenAI's and Anthropic's APIs: to serve a checkpoint, and to train agents that use them."""

from ludus.serve.model.checkpoint import CheckpointService
from ludus.serve.model.episodes import EpisodeService, EpisodeSession
from ludus.serve.model.programs import ProgramAgent
from ludus.serve.model.server import ModelServer

__all__ = ["CheckpointService", "EpisodeService", "EpisodeSession", "ModelServer", "ProgramAgent"]
