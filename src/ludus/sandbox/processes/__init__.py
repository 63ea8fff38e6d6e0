"""Sessions in processes of this machine, forked from warm interpreters: the backend "process"."""
