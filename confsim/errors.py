"""Errors of the simulator; a user's mistake is an `InputError` in every room."""

from traces.errors import InputError as InputError

__all__ = ["InputError"]
