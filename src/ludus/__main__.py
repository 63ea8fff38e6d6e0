"""`python -m ludus` is the command `ludus`."""

from ludus.cli.main import run

if __name__ == "__main__":
    run()
