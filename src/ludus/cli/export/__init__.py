"""A trained model for other programs: `ludus export`, `ludus serve vllm RUN`."""
