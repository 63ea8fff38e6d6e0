"""What is learned from: conversations, tasks and their order, episodes packed into batches."""
