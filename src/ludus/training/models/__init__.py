"""Models: loading, saving, making them; GGUF files and LoRA adapters."""
