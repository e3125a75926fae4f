"""Nodes that connect to the launcher, each known by a token: started by a scheduler, or typed."""
