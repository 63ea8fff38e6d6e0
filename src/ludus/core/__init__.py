"""The vocabulary every other room speaks: tasks, messages, trajectories, failures, seams."""
