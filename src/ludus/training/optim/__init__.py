"""From episodes to a gradient step: log-probabilities, losses, the learner, the optimizer, the critic."""
