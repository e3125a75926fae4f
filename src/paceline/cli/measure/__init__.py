"""Jobs that measure: the trial of ``check``, the probes and results of ``forecast``."""
