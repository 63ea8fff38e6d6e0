"""Placement on a cluster: the only room that imports ray. Needs the extra `ray`."""

from ludus.dist.ray_host import RayHost

__all__ = ["RayHost"]
