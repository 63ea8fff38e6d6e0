"""Code that runs inside the sandbox: sent there as source text, so it imports the standard library only."""
