"""Quality control: what is wrong with an example, what is a duplicate, how varied and how hard a set is."""
