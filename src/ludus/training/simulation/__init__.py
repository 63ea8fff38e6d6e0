"""Simulation of asynchronous training on more GPUs (`ludus simulate`)."""
