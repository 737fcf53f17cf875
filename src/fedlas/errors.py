"""Errors that a user can do something about; the command line shows them as one line."""


class UserError(ValueError):
    """Wrong input; the message says what was wrong and what to do."""


class UserTypeError(UserError, TypeError):
    """A value of a wrong type."""


class MissingPackageError(UserError, ImportError):
    """A package that is needed here is not installed."""
