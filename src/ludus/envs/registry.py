"""Short names of the prebuilt environments; each is imported when it is asked for."""

from __future__ import annotations

from ludus.core.registry import Registry

ENVS = Registry("environment", {"safe": "ludus.envs.safe:Safe"})
