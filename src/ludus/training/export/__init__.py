"""A trained model for other programs: its folder, its card, a GGUF file, a hub."""
