"""What runs on the inside: the warm interpreter and the sessions forked from it. Standard library alone."""
