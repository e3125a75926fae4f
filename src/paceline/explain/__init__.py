"""Explains what went wrong from the files of a run: evidence, rules, one conclusion."""
