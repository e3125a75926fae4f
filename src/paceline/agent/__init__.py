"""The agent, which runs on a node: facts, supervision, lease, framed stream.

Standard library only, Python 3.9 or newer, relative imports only: the files of this package are
shipped to the nodes as they are and run there as ``paceline_agent``.
"""
