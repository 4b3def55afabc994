"""Shared by tests: a real cluster on this machine, and the plain loop that every job is compared with."""
