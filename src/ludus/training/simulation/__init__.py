"""Discrete-event simulation of asynchronous training on more GPUs, on a virtual clock.

The controller is the real one: `RolloutController` and its `Ledger` schedule groups, take batches, bound lags.
What it drives is simulated by latencies that were measured: engines that share their time among requests,
tools, an optimizer, weight syncs, and engines that die. Time is virtual: the event loop jumps to the next
event, so that hours of 1,000 GPUs take minutes of one core; a controller that waits for nothing is an error.
"""

from ludus.training.simulation.config import SimulatedRun, SimulationConfig
from ludus.training.simulation.run import run_virtually, simulate

__all__ = ["SimulatedRun", "SimulationConfig", "run_virtually", "simulate"]
