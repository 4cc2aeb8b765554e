"""The command line `moe-rl`. It only combines the libraries, which compute every number."""

import sys

from typer.exceptions import TyperException

from moe_rl.cli.console import say
from moe_rl.cli.copies import say_which_runs
from moe_rl.core.errors import InvalidInputError

BAD_INPUT, INTERRUPTED = 2, 130


def main() -> None:
    """Run the command line; bad input ends with one sentence on stderr and exit code 2."""
    try:
        # Here, since help texts name what other packages add, and one of these packages may be broken.
        from moe_rl.cli.commands import application

        say_which_runs()
        sys.exit(application()(prog_name="moe-rl", standalone_mode=False) or 0)
    except TyperException as error:
        from moe_rl.cli.help import refusal

        sentence = refusal(error, sys.argv[1:])
        if sentence:
            say(f"error: {sentence}")
        sys.exit(BAD_INPUT)
    except InvalidInputError as error:
        say(f"error: {error}")
        sys.exit(BAD_INPUT)
    except BrokenPipeError:
        # The reader of our output has gone (`| head`): nothing is wrong, and nothing is left to say.
        sys.stderr.close()
        sys.exit(0)
    except OSError as error:
        say(f"error: {error.filename or 'input'}: {error.strerror or error}.")
        sys.exit(BAD_INPUT)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
