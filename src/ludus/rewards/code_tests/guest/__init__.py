"""What runs inside the sandbox for judging: sent there as text, so it imports the standard library only."""
