"""`python -m tapeout.models.tiny --seed 0 -o DIR` writes the tiny checkpoint. It adds and replaces files; it removes none."""

import argparse
import sys

from tapeout.models.tiny import write_tiny

LARGEST_SEED = 2**32 - 1


def main() -> int:
    """Parses the command line, writes, and returns the exit code: 0 written, 1 not writable, 2 wrong use."""
    parser = argparse.ArgumentParser(prog="python -m tapeout.models.tiny", description="Writes the tiny checkpoint.")
    parser.add_argument("-o", "--output", required=True, metavar="DIR", help="folder to write; made when absent")
    parser.add_argument("--seed", type=_seed, default=0, help=f"0 to {LARGEST_SEED}; same seed, same bytes")
    options = parser.parse_args()
    try:
        folder = write_tiny(options.output, options.seed)
    except OSError as error:
        print(f"error: {options.output}: cannot write: {error.strerror}; choose another folder", file=sys.stderr)
        return 1
    print(folder)
    return 0


def _seed(text: str) -> int:
    if not text.isdecimal() or int(text) > LARGEST_SEED:
        raise argparse.ArgumentTypeError(f"found {text!r}; expected a whole number from 0 to {LARGEST_SEED}")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
