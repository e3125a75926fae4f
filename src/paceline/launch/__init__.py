"""Job → plan → running job."""
