"""Errors that name the field, the value and the remedy in one line."""


class InputError(ValueError):
    """What the user gave does not work: a file, a corpus, a run directory (exit status 1)."""


class UsageError(InputError):
    """A name, a field or a size is wrong, whatever the world looks like (exit status 2)."""


def unknown_name(kind: str, name: str, known) -> UsageError:
    """The error for a name that is not in a registry; lists the names that are."""
    return UsageError(f"unknown {kind} {name!r}: choose one of {', '.join(sorted(known))}")
