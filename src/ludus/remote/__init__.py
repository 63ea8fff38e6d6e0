"""Threads, processes and servers: how they are reached, watched and replaced."""
