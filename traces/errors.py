"""The one error that a user's mistake raises."""


class InputError(ValueError):
    """Bad input from a user: one line that says what is wrong, where, and how to mend it.

    The command line prints the message alone and exits with code 2.
    """
