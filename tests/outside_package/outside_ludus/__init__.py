"""A package that extends Ludus from outside its tree; its names are in the entry points beside it."""
