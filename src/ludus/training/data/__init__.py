"""Training data: conversations, tasks and their order, played groups, episodes packed into batches."""
