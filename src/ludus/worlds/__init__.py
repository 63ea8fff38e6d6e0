"""Prebuilt environments, each with tasks, rewards and a demonstrator (docs/envs.md)."""
