"""Placement on a Ray cluster: trainer ranks, rollout engines and tools in actors. Needs the extra `ray`.

The only room that imports ray. `training` asks for it by name (`RayPlacement`), the tool server by `RayHost`.
"""

from ludus.dist.actors import RayHost
from ludus.dist.placement import RayPlacement

__all__ = ["RayHost", "RayPlacement"]
