"""Makes `python -m redpoll` the command `redpoll`."""

from redpoll.cli import main

if __name__ == "__main__":
    main(prog_name="redpoll")
