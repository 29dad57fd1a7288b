"""`python -m jaxdnn`: what this installation can do, and how fast."""

import argparse
import sys

from jaxdnn import __version__, bench, doctor


def main(arguments: list[str] | None = None) -> int:
    """Runs the command that `arguments` name; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m jaxdnn", description=__doc__)
    parser.add_argument("--version", action="version", version=f"jaxdnn {__version__}")
    commands = parser.add_subparsers(metavar="command")
    parser.set_defaults(run=lambda _: print(parser.format_help(), end="") or 0)

    command = commands.add_parser("doctor", help="what was found where, and which engines can run here")
    command.set_defaults(run=doctor.main)

    command = commands.add_parser("bench", help="time every case against plain JAX and the machine's limit")
    bench.add_arguments(command)
    command.set_defaults(run=bench.main)

    parsed = parser.parse_args(arguments)
    return parsed.run(parsed)


if __name__ == "__main__":
    sys.exit(main())
