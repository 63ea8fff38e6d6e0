"""Environments and task sets of other libraries, as environments, tasks and rewards of Ludus."""
