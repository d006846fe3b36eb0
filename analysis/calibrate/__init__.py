"""Fitting latency profiles: typed measurements in, monotone tables with their errors out."""
