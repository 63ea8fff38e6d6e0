"""Training data: conversations, tasks and their order, episodes packed into batches."""
