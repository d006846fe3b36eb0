"""Goodput searches and the processes that they run on."""
