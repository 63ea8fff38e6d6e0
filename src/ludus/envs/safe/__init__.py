"""A safe with three dials: the quickstart's task."""

from ludus.envs.safe.env import Safe
from ludus.envs.safe.expert import expert
from ludus.envs.safe.reward import found, opened
from ludus.envs.safe.tasks import held_out_tasks, training_tasks

__all__ = ["Safe", "expert", "found", "held_out_tasks", "opened", "training_tasks"]
