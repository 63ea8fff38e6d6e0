"""What is somewhere else: threads, processes and servers, how they are reached, watched and replaced."""
