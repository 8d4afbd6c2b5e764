"""The one exception that stands for bad input, as opposed to a bug."""

from moh_llm.addresses import without_passwords


class UserError(Exception):
    """Something the user gave cannot be used.

    The message is one line that says what is wrong, where, and the way out. Commands print it as
    ``error: ...`` and exit with status 2, without a traceback; any other exception is a bug and
    keeps its traceback. User and password of an address in it are taken out.
    """

    def __init__(self, message: str):
        super().__init__(without_passwords(message))
