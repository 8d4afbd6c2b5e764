"""The one exception that stands for bad input, as opposed to a bug."""


class UserError(Exception):
    """Something the user gave cannot be used.

    The message is one line that says what is wrong, where, and the way out. Commands print it as
    ``error: ...`` and exit with status 2, without a traceback; any other exception is a bug and
    keeps its traceback.
    """
