"""One module a command; each has ``HELP``, ``add_arguments(parser)`` and ``run(arguments)``."""
