"""Each recipe at its smallest, for ``paceline recipe copy``: one file on torch and
``paceline.train``.
"""
